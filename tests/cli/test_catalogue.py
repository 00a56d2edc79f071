"""What options become: rates, schedules with faults, what the server accepts."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.cli import algorithms, catalogue
from fedtangent.federated.schedule import all_clients, unroll
from fedtangent.streams import keys


def test_a_rate_that_does_not_decay_is_the_number() -> None:
    assert algorithms.decayed(0.3, 1.0, 10) == 0.3
    assert float(algorithms.decayed(0.3, 0.9, 10)(jnp.int32(25))) == pytest.approx(0.3 * 0.81)
    with pytest.raises(ValueError, match=r"factor: got 1\.1"):
        algorithms.decayed(0.3, 1.1, 10)


def test_faults_of_a_schedule() -> None:
    plan, sizes = all_clients(4), np.array([1, 1, 100, 0])
    assert catalogue.faulty(plan, sizes, 0.0, None, "lognormal", 1.0) is plan
    both = catalogue.faulty(plan, sizes, 0.3, 2, "lognormal", 0.1)
    rounds = 2000
    seen = unroll(both, keys(0).schedule, rounds)
    filled = np.asarray(seen.weight) > 0

    def share(clients: Any) -> float:
        """Of the rounds, those in which these clients are among the two."""
        return float((np.isin(np.asarray(seen.client), clients) & filled).any(axis=1).mean())

    # Those who drop out do not answer: two make the round as long as two are left.
    full = 1 - 0.3**4 - 4 * 0.7 * 0.3**3
    assert float(filled.all(axis=1).mean()) == pytest.approx(full, abs=5 * np.sqrt(full * (1 - full) / rounds))
    # The large one is among the first two only if it answers and at most one of the three others does.
    large = 0.7 * (0.3**3 + 3 * 0.7 * 0.3**2)
    assert share([2]) == pytest.approx(large, abs=5 * np.sqrt(large * (1 - large) / rounds))
    assert share([0]) > 2 * large


def test_acceptance() -> None:
    assert algorithms.acceptance(None) is None
    for bound, expected in ((math.inf, True), (6.0, True), (4.0, False)):
        accept = algorithms.acceptance(bound)
        assert accept is not None
        assert bool(accept({"w": jnp.array([3.0, 4.0])})) is expected
        assert not accept({"w": jnp.array([math.nan])})
