"""The rows on NTK-DFL hold, their controls fail, and a mistake in mixing is noticed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedtangent._src.comparison.theorems import ntk_dfl
from fedtangent._src.federated.algorithms import decentralised
from fedtangent._src.types import PyTree

SEED = 1


@pytest.mark.theory
def test_every_round_is_the_matrix() -> None:
    found = ntk_dfl.rounds_verdict(SEED, rounds=3)
    assert found.holds and found.control_fails, found


def test_a_mean_with_other_shares_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decentralised._mix

    def wrong(matrix: jax.Array, present: jax.Array, params: PyTree) -> PyTree:
        return right(matrix @ matrix, present, params)

    monkeypatch.setattr(decentralised, "_mix", wrong)
    assert ntk_dfl.rounds_verdict(SEED, rounds=2).holds is False


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_row_holds_and_its_control_fails(seed: int) -> None:
    verdicts = ntk_dfl.ENTRIES[0].build("default", seed)
    assert len(verdicts) == 3 and all(verdict.holds and verdict.control_fails for verdict in verdicts)


def test_the_problem_needs_no_smaller_step() -> None:
    problem = ntk_dfl.problem_of(SEED)
    kernel = problem.x @ problem.x.T
    assert np.linalg.eigvalsh(kernel)[0] > 1e-3  # positive definite
    assert problem.rate / ntk_dfl.OUTPUTS / 9 * np.linalg.eigvalsh(kernel)[-1] <= 1 + 1e-12
