"""NTK-FL's evolution under the limiting kernel, against the steps taken one by one."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution
from fedtangent._src.theory.prior import covariance_terms

N, M, C = 12, 5, 2


def blocks(seed: int = 0, rank: int = 30) -> KernelBlocks:
    phi = np.random.default_rng(seed).standard_normal((N + M, rank)) / np.sqrt(rank)
    gram = phi @ phi.T
    train, cross, test = gram[:N, :N], gram[N:, :N], gram[N:, N:]
    return KernelBlocks(train, cross, 2 * train, 2 * cross, 2 * test)


def descend(k: KernelBlocks, step: float, time: int, f0: np.ndarray, g0: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``time`` steps of gradient descent on 1/2 |f - y|^2 in function space; the test points follow."""
    f, g = f0.copy(), g0.copy()
    for _ in range(time):
        residual = f - y
        f, g = f - step * k.ntk_train @ residual, g - step * k.ntk_test_train @ residual
    return g


@pytest.fixture
def start() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((N, C)), rng.standard_normal((M, C)), rng.standard_normal((N, C))


def step_of(k: KernelBlocks, fraction: float = 1.0) -> float:
    return fraction / np.linalg.eigvalsh(k.ntk_train)[-1]


@pytest.mark.parametrize("time", [0, 1, 7, 300])
@pytest.mark.parametrize("fraction", [0.3, 1.0, 1.9])
def test_the_steps_taken_one_by_one(start, time: int, fraction: float) -> None:
    k, (f0, g0, y) = blocks(), start
    step = step_of(k, fraction)
    expected = descend(k, step, time, f0, g0, y)
    found = g0 - ntk_evolution(k, step, time) @ (f0 - y)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * (1 + np.max(np.abs(expected))))
    other = descend(k, step, time + 1, f0, g0, y)
    if time < 300:
        assert np.max(np.abs(found - other)) > 1e-4  # one step more is told apart


def test_a_singular_kernel_follows_the_steps_too(start) -> None:
    k, (f0, g0, y) = blocks(rank=6), start
    assert np.linalg.matrix_rank(k.ntk_train) == 6
    step, time = step_of(k), 500
    found = g0 - ntk_evolution(k, step, time) @ (f0 - y)
    expected = descend(k, step, time, f0, g0, y)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * (1 + np.max(np.abs(expected))))


@pytest.mark.theory
def test_time_to_infinity_is_theorem_2(start) -> None:
    k, y = blocks(), start[2]
    eigenvalues = np.linalg.eigvalsh(k.ntk_train)
    step = step_of(k)
    time = int(np.ceil(40 / (step * eigenvalues[0])))  # exp(-40) is below rounding
    b, limit = ntk_evolution(k, step, time), gp_limit(k, y)
    np.testing.assert_allclose(b, np.linalg.solve(k.ntk_train, k.ntk_test_train.T).T, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(b @ y, limit.mean, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(covariance_terms(k, b).total, limit.cov, rtol=0, atol=1e-10)
    early = ntk_evolution(k, step, time // 50)
    assert np.max(np.abs(early @ y - limit.mean)) > 1e-6


def test_the_exponential_is_not_the_discrete_power() -> None:
    """Pairing (9a)'s exponential with discrete steps is an error at the step sizes in use."""
    k = blocks()
    step, time = step_of(k, 0.5), 3
    values, vectors = np.linalg.eigh(k.ntk_train)
    exponential = k.ntk_test_train @ (vectors * ((1 - np.exp(-step * time * values)) / values)) @ vectors.T
    found = ntk_evolution(k, step, time)
    assert np.linalg.norm(found - exponential) > 0.01 * np.linalg.norm(found)
    tiny = step / 1e5  # and for tiny steps they are the same
    same = k.ntk_test_train @ (vectors * ((1 - np.exp(-tiny * 10**5 * 3 * values)) / values)) @ vectors.T
    np.testing.assert_allclose(ntk_evolution(k, tiny, 3 * 10**5), same, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.001, float("nan")])
def test_an_unstable_step_is_refused_with_its_bound(factor: float) -> None:
    k = blocks()
    bound = 2 / np.linalg.eigvalsh(k.ntk_train)[-1]
    with pytest.raises(ValueError, match=f"step: got .*, must be above 0 and at most {bound:g}"):
        ntk_evolution(k, factor * bound / 2, 10)


@pytest.mark.parametrize("time", [-1, 1.5])
def test_a_time_that_is_no_number_of_steps_is_refused(time: float) -> None:
    with pytest.raises(ValueError, match="time: got"):
        ntk_evolution(blocks(), 1e-3, time)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["step", "time"])
@pytest.mark.parametrize("value", ["0.1", None, True, np.ones(2)])
def test_what_is_no_number_is_refused(name: str, value: object) -> None:
    given = {"step": 1e-3, "time": 10, name: value}
    with pytest.raises(ValueError, match=f"{name}: got .*, must be (a|one) "):
        ntk_evolution(blocks(), **given)  # type: ignore[arg-type]
