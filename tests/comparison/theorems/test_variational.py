"""Rows on Fed-ensemble's evidence bound: they hold, their controls fail, and a wrong bound is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.comparison.theorems.fed_ensemble import variational
from fedtangent._src.theory.fed_ensemble.variational import LinearPosterior


@pytest.fixture(scope="module")
def measured() -> variational.Measured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variational, "SAMPLES", 3000)
        patch.setattr(variational, "ROUNDS", 160)
        patch.setattr(variational, "EVERY", 20)
        return variational.measure((1, 2, 4), 5)


def test_every_row_holds_and_its_control_fails(measured: variational.Measured) -> None:
    rows = variational.verdicts(measured)
    assert len(rows) == 3 and [row for row in rows if not row.passed] == []


def test_a_wrong_sign_of_the_entropy_is_noticed(measured: variational.Measured) -> None:
    def flipped(one: variational.Fitted) -> variational.Fitted:
        bound = one.bound._replace(value=one.bound.value - 2 * one.bound.entropy, entropy=-one.bound.entropy)
        return one._replace(bound=bound)

    wrong = measured._replace(
        fitted={k: flipped(one) for k, one in measured.fitted.items()},
        bounds=measured.bounds - 2 * measured.entropies,
        entropies=-measured.entropies,
    )
    with np.errstate(invalid="ignore"):
        assert [row.holds for row in variational.verdicts(wrong)] == [False, False, False]


def test_a_run_comes_near_to_the_bound_of_one_component_and_stays_below(measured: variational.Measured) -> None:
    """Its models end at one point: the papers' entropy, for four separated components, puts it above the evidence."""
    along = measured.bounds - measured.posterior.log_evidence
    assert along[0] < -1000 and -3 < along[-1] < 0
    assert measured.separated - measured.entropies[-1] > 0.3


def test_one_fitted_component_is_the_exact_one() -> None:
    """``KL[N(m, s^2 I) || N(m, S)]`` is least at ``s^2 = d / tr S^-1``."""
    root = np.array([[0.3, 0.1], [0.0, 0.05]])
    posterior = LinearPosterior(np.array([[1.0], [-2.0]]), root @ root.T, 0.0)
    mixture, divergence = variational.fit(posterior, 1)
    variance = 2 / np.trace(np.linalg.inv(posterior.cov))
    np.testing.assert_allclose(mixture.centres, posterior.mean.T, atol=1e-6)
    assert mixture.scale == pytest.approx(np.sqrt(variance), rel=1e-4)
    assert divergence == pytest.approx(0.5 * np.log(np.linalg.det(posterior.cov) / variance**2), abs=1e-7)


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("seed", [0, 1])
def test_the_check_at_its_own_scale(seed: int) -> None:
    assert all(row.passed for row in variational._check("default", seed))
