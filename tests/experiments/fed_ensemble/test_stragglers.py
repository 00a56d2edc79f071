"""Stragglers: how long the server waits under each way to close a round, and what it costs."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import integrate, stats

from fedtangent._src import streams
from fedtangent._src.experiments.fed_ensemble import classifiers, stragglers
from fedtangent._src.experiments.fed_ensemble.classifiers import Entrant
from fedtangent._src.experiments.fed_ensemble.stragglers import Waited, _claims, _in_time
from fedtangent._src.federated import faults, schedule
from fedtangent._src.federated.faults import round_times

from ..performed import performed, study_of

TINY = ("num_clients=8", "clients_per_round=4", "keep_first=2", "num_models=2", "num_rounds=3", "local_epochs=1",
        "width=8", "tuning_rounds=3", "num_train=80", "num_validation=60", "num_test=50",
        "learning_rates=0.1,0.5")  # fmt: skip


def order_statistic(keep: int, asked: int, spread: float) -> float:
    """The mean of the ``keep``-th of ``asked`` lognormal times of mean 1, by its density."""
    place = stats.beta(keep, asked - keep + 1)

    def density(u: float) -> float:
        return float(np.exp(spread * stats.norm.ppf(u) - spread**2 / 2) * place.pdf(u))

    return float(integrate.quad(density, 0, 1, limit=200)[0])


@pytest.mark.parametrize(("keep", "asked"), [(100, 130), (130, 130), (100, 100)])
def test_a_round_lasts_as_long_as_the_last_answer_that_is_kept(keep: int, asked: int) -> None:
    plan = faults.stragglers(schedule.uniform_sampling(200, asked), keep)
    seen = np.asarray(round_times(plan, streams.keys(0).schedule, 400), np.float64)
    error = seen.std(ddof=1) / np.sqrt(len(seen))
    assert abs(seen.mean() - order_statistic(keep, asked, 1.0)) < 4 * error
    assert abs(seen.mean() - order_statistic(min(keep + 5, 100) - 5 * (keep == 100), asked, 1.0)) > 4 * error  # control


def test_of_all_answers_none_is_lost() -> None:
    """Waiting for all that are asked is the schedule without completion times, in another order."""
    asked = schedule.uniform_sampling(20, 8)
    waited = schedule.drawn_cohorts(faults.stragglers(asked, 8), None, 6, weighting=None)
    plain = schedule.drawn_cohorts(asked, None, 6, weighting=None)
    np.testing.assert_array_equal(np.sort(waited.client), np.sort(plain.client))
    fewer = schedule.drawn_cohorts(faults.stragglers(asked, 7), None, 6, weighting=None)
    assert all(set(a) < set(b) for a, b in zip(np.asarray(fewer.client), np.asarray(plain.client), strict=True))
    with pytest.raises(ValueError, match="schedule: got one without completion times"):
        round_times(asked, jax.random.key(0), 3)


def test_who_is_slow_is_told_by_examples_and_labels() -> None:
    study = study_of("fed_ensemble.stragglers", (*TINY, "classes_per_client=2"))
    trial = classifiers.divide(study, 2, 0)
    sizes = np.diff(np.asarray(trial.data.offsets))
    plain = classifiers._completion_times(study.settings, trial)
    np.testing.assert_allclose(plain, sizes / sizes.mean())
    slow = classifiers._completion_times(stragglers.studies(study)[2.0, "the first 2 of 4"].settings, trial)
    owner = np.split(np.asarray(trial.data.y)[np.asarray(trial.data.indices)], np.cumsum(sizes)[:-1])
    assert slow.mean() == pytest.approx(1)
    assert stats.spearmanr(slow / plain, [y.mean() for y in owner]).statistic == pytest.approx(1)


def test_equal_time_is_that_of_the_quickest() -> None:
    accuracy = np.arange(10.0)[None].repeat(2, axis=0)
    one = Waited(2, 0.0, "a", Entrant("fed_avg"), 0.1, np.full((2, 9), 2.0), accuracy)
    np.testing.assert_allclose(_in_time(one, np.array([18.0, 9.9])), [8.0, 3.0])
    slow = one._replace(way="b", seconds=np.full((2, 9), 4.0), accuracy=accuracy + np.array([[0.0], [0.001]]))
    said = [claim.verdict for claim in _claims([one, slow, slow._replace(way="c")])]
    assert said == ["seen", "seen", "seen", "seen"]
    turned = [claim.verdict for claim in _claims([slow, one, one._replace(way="c")])]
    assert turned[:2] == ["not seen"] * 2 and turned[-1] == "not seen"


def test_fewer_are_kept_than_asked() -> None:
    with pytest.raises(ValueError, match="keep_first: got 4, must be from 1 to 3, below clients_per_round"):
        study_of("fed_ensemble.stragglers", (*TINY, "keep_first=4"))
    with pytest.raises(ValueError, match="clients_per_round: got 9, must be a whole number from 0 to 8"):
        study_of("fed_ensemble.stragglers", (*TINY, "clients_per_round=9"))
    with pytest.raises(ValueError, match="keep_first: got 6, must be a whole number from 1 to 5"):
        study_of("fed_ensemble.table7", ("num_clients=5", "methods=fed_ensemble", "keep_first=6"))
    with pytest.raises(ValueError, match="clients_per_round: got 4, must be 0 for random_sampling"):
        study_of("fed_ensemble.table7", ("clients_per_round=4",))
    with pytest.raises(ValueError, match="clients_per_round: got 3, must be a multiple of 2"):
        study_of("fed_ensemble.stragglers", (*TINY, "keep_first=3"))


@pytest.mark.slow
def test_the_whole(tmp_path: Path) -> None:
    outcome, kept = performed("fed_ensemble.stragglers", TINY, tmp_path)
    assert len(outcome.rows) == 2 * 2 * 3 and outcome.claims
    for row in outcome.rows:
        assert row["seconds"] > 0 and 0 <= row["accuracy"] <= 1
    names = {m.algorithm.partition(", ")[2] for m in kept}
    assert "2 classes, the first 2 of 4" in names and len(names) == 6
