"""The weights that theory is told of, beside numbers written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison.followed import drawn_rows, steps_of
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, drawn_cohorts, uniform_sampling
from fedtangent._src.types import Partition

from ..federated.toys import EVERYBODY, SIZES, record, uneven_data

# Client 0 holds one example, 1 two, 2 none, 3 four.
HELD = Partition(np.array([5, 0, 1, 2, 3, 4, 6], np.int32), np.array([0, 1, 3, 3, 7], np.int32))


@pytest.mark.parametrize(("weighting", "expected"), [("examples", [1, 2, 0, 4]), ("uniform", [1, 1, 0, 1])])
def test_weights_by_hand(weighting: str, expected: list[int]) -> None:
    found = drawn_cohorts(all_clients(4), HELD, 3, weighting=weighting)
    np.testing.assert_array_equal(found.client, [[0, 1, 2, 3]] * 3)
    np.testing.assert_array_equal(found.weight, [expected] * 3)


def test_empty_slots_weigh_nothing() -> None:
    plan = uniform_sampling(4, 2)

    def half(key: object, state: object, round_: object) -> object:
        cohort, state = plan.sample(key, state, round_)  # type: ignore[arg-type]
        return cohort._replace(weight=cohort.weight.at[1].set(0)), state

    found = drawn_cohorts(plan._replace(sample=half), HELD, 5, seed=2)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.weight[:, 1], np.zeros(5))
    np.testing.assert_array_equal(found.weight[:, 0], np.array([1, 2, 0, 4])[found.client[:, 0]])


def test_refuses() -> None:
    with pytest.raises(ValueError, match="weighting: got 'size', allowed are examples, uniform"):
        drawn_cohorts(all_clients(4), HELD, 2, weighting="size")
    with pytest.raises(ValueError, match="partition: got 4 clients, but the schedule has 5"):
        drawn_cohorts(all_clients(5), HELD, 2)


UNEVEN = uneven_data()
SEEN = Partition(np.asarray(UNEVEN.indices), np.asarray(UNEVEN.offsets))


@pytest.mark.parametrize("work", [Work(epochs=2, batch_size=2), Work(steps=7, batch_size=4)])
def test_theory_is_told_of_the_very_minibatches(work: Work) -> None:
    rows = drawn_rows(work, SEEN, drawn_cohorts(EVERYBODY, SEEN, 3, 5), 5)
    assert rows is not None
    seen, steps = record(UNEVEN, EVERYBODY, work, 8, 3, 5), steps_of(work, SEEN)  # 8: more than any client makes
    for r in range(3):
        for i in range(len(SIZES)):
            theirs = [sorted(batch) for batch in seen.batches(r, i)]
            slot = int(np.flatnonzero(seen.client[r] == i)[0])
            ours = [sorted(batch[batch >= 0]) for batch in rows[r, slot] if np.any(batch >= 0)]
            assert ours == theirs
            assert len(ours) == steps[i]
    assert drawn_rows(Work(epochs=2, batch_size=None), SEEN, drawn_cohorts(EVERYBODY, SEEN, 3, 5), 5) is None
    assert drawn_rows(Work(steps=3, batch_size=max(SIZES)), SEEN, drawn_cohorts(EVERYBODY, SEEN, 3), 0) is None
