"""Time, rounds and steps to infinity in closed form are the limit, also of kernels that are singular up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks, known_modes
from fedtangent._src.theory.deep_linear.rounds import full_batch_work
from fedtangent._src.theory.deep_linear.theorem import deep_linear_limit
from fedtangent._src.theory.fed_ensemble.convergence import gap_from_drift, theorem_1
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.theory.flow.clients import response
from fedtangent._src.theory.local_gd.regression import local_regression
from fedtangent._src.theory.ntk_fl.convergence import NtkConstants, NtkTheorem, ntk_evolution
from fedtangent._src.types import Cohort, Partition

from ..nightly import nightly

MOST = 2**31 - 1  # the largest number of steps and rounds
BASE = np.random.default_rng(0).normal(size=(7, 8)) / 2
FEATURES = {  # of one shape, so that a program serves all
    "of full rank": BASE,
    "a zero row": np.vstack([BASE[:6], np.zeros(8)]),  # eigenvalue 0
    "repeated rows": np.vstack([BASE[:5], BASE[:2]]),  # eigenvalues of rounding size, of either sign
    "sums of rows": np.vstack([BASE[:4], BASE[:2] + BASE[2:4], BASE[0] - BASE[3]]),
    "more rows than features": BASE * (np.arange(8) < 3),
}
TEST = np.random.default_rng(2).normal(size=(5, 8)) / 2


class Case:
    """A linear model with labels that no function fits where rows depend on each other."""

    def __init__(self, kind: str, dtype: type) -> None:
        """Features of the kind; the kernel is computed in ``dtype``."""
        self.train = FEATURES[kind]
        self.test = TEST * np.any(self.train, axis=0)
        x, x_test = self.train.astype(dtype), self.test.astype(dtype)
        self.kernels = KernelBlocks(x @ x.T, x_test @ x.T, None, None, None, x_test @ x_test.T)
        self.largest = float(np.linalg.norm(self.train, 2) ** 2)
        self.y = np.random.default_rng(3).normal(size=(len(x), 1))
        offsets = np.array([0, len(x) // 2, len(x)], np.int32)
        self.clients = Partition(np.arange(len(x), dtype=np.int32), offsets)
        self.alone = Partition(np.arange(len(x), dtype=np.int32), np.array([0, len(x)], np.int32))
        self.least_squares = self.test @ np.linalg.pinv(self.train, rcond=1e-5) @ self.y

    def flow(self, partition: Partition, steps: int, rate: float, **rule) -> Flow:
        """One round of all clients."""
        client = np.arange(partition.num_clients)[None]
        cohorts = Cohort(client, 0 * client, np.ones(client.shape))
        return federated_flow(self.kernels, self.y, partition, cohorts, Rule(steps, rate, **rule))


def with_prox(case: Case, mu: float) -> np.ndarray:
    """The minimiser of ``1/(2 n) |f - y|^2 + mu/2 |w|^2`` at the test points."""
    n = len(case.y)
    weights = np.linalg.solve(
        case.train.T @ case.train / n + mu * np.eye(case.train.shape[1]), case.train.T @ case.y / n
    )
    return case.test @ weights


def mean_of_clients(case: Case) -> np.ndarray:
    """FedAvg's first round if each client trains to the end, from 0."""
    parts = np.split(np.arange(len(case.y)), [len(case.y) // 2])
    return case.test @ np.mean([np.linalg.pinv(case.train[p], rcond=1e-5) @ case.y[p] for p in parts], axis=0)


# in closed form at a time, rounds or steps that stand for infinity, and the limit
LIMITS: dict[str, Callable[[Case], tuple[np.ndarray, np.ndarray]]] = {
    "ntk_evolution, time": lambda c: (
        np.asarray(ntk_evolution(c.kernels, 1 / c.largest, MOST)) @ c.y, c.least_squares
    ),
    "flow, local steps": lambda c: (
        np.asarray(c.flow(c.alone, MOST, len(c.y) / c.largest).mean(1, 0)), c.least_squares
    ),
    "flow, local steps of two clients": lambda c: (
        np.asarray(c.flow(c.clients, MOST, 1 / c.largest).mean(1, 0)), mean_of_clients(c)
    ),
    "flow, time of gradient flow": lambda c: (
        np.asarray(c.flow(c.alone, 1, 1e18, dynamics="gradient_flow").mean(1, 0)), c.least_squares
    ),
    "flow, time with a proximal term": lambda c: (
        np.asarray(c.flow(c.alone, 1, 1e18, dynamics="gradient_flow", mu=0.1).mean(1, 0)), with_prox(c, 0.1)
    ),
    "flow, local steps with a proximal term": lambda c: (
        np.asarray(c.flow(c.alone, MOST, 0.5 / c.largest, mu=0.1).mean(1, 0)), with_prox(c, 0.1)
    ),
    "flow, rounds": lambda c: (
        c.flow(c.alone, 3, 1 / c.largest).bias() + _pseudo_inverse(c), c.least_squares
    ),
    "flow, rounds of endless local work": lambda c: (
        c.flow(c.alone, 1, 1e18, dynamics="gradient_flow").bias() + _pseudo_inverse(c), c.least_squares
    ),
}  # fmt: skip


def _pseudo_inverse(case: Case) -> np.ndarray:
    """The mean of Theorem 2 that ``bias`` subtracts, by the pseudo-inverse of the kernel that the flow keeps."""
    kernel = case.flow(case.alone, 1, 0.1).blocks
    return kernel.ntk_test_train @ np.linalg.pinv(kernel.ntk_train, rcond=1e-12, hermitian=True) @ case.y


@pytest.mark.parametrize("x64", nightly([True, False], [True]))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", LIMITS)
def test_infinity_is_the_limit(name: str, dtype: type, x64: bool) -> None:
    for kind in FEATURES:
        with jax.enable_x64(x64):
            value, limit = LIMITS[name](Case(kind, dtype))
        assert np.abs(value - limit).max() < 2e4 * np.finfo(dtype).eps * np.abs(limit).max(), kind


def test_modes_lost_in_rounding_would_be_far_off() -> None:
    """Control: with the modes that the kernel's rounding has added the value is elsewhere."""
    case = Case("more rows than features", np.float32)
    eigenvalues, vectors = np.linalg.eigh(np.asarray(case.kernels.ntk_train, float))
    gains = np.where(np.abs(eigenvalues) > 1e-12, 1 / eigenvalues, 0.0)
    wrong = case.kernels.ntk_test_train @ (vectors * gains) @ vectors.T @ case.y
    assert np.abs(wrong - case.least_squares).max() > 0.1 * np.abs(case.least_squares).max()
    assert np.sum(known_modes(case.kernels.ntk_train)[0] > 0) == 3 < np.sum(eigenvalues > 1e-12)


@pytest.mark.parametrize("kind", FEATURES)
def test_regressions_without_end(kind: str) -> None:
    """Local work of ``MOST`` steps is local work until convergence, and ``MOST`` rounds are the limit."""
    x = np.pad(FEATURES[kind], ((0, 0), (0, 8)))
    case = Case(kind, np.float64)
    start = np.random.default_rng(4).normal(size=(x.shape[1], 1))
    endless = local_regression(x, case.y, case.clients)
    rate = 1 / np.linalg.norm(x, 2) ** 2
    many = local_regression(x, case.y, case.clients, learning_rate=rate, local_steps=MOST)
    assert np.abs(many.local(start) - endless.local(start)).max() < 1e-9 * max(np.abs(endless.local(start)).max(), 1)
    deep = deep_linear_limit(full_batch_work(x, case.y, case.clients, rate / 3, 2), 3)
    for run in (endless, many, deep):
        limit = run.limit(start)
        assert np.abs(run.after(MOST, start) - limit).max() < 1e-9 * np.abs(limit).max()
        assert np.abs(run.after(0, start) - limit).max() > 1e-3 * np.abs(limit).max()


def test_responses_of_eigenvalues_at_rounding_size() -> None:
    """``(1 - (1 - x)^T) / lambda``: eta T at 0 and near it, 1 / lambda without end."""
    with jax.enable_x64(True):
        values = np.asarray(response(np.array([0.0, 1e-300, 1e-20, -1e-20, 1e-3, 1.0]), 0.1, 1.0, MOST))
    np.testing.assert_allclose(values, [0.1 * MOST] * 4 + [1e3, 1.0], rtol=1e-9)


def test_bounds_at_infinity(maker) -> None:
    """With lambda 0, and with lambda at rounding size, a bound is what it tends to."""
    np.testing.assert_array_equal(gap_from_drift([0.0, 1e400], 1.0, 1.0, 0.5, 2.0), [0.0, 0.0])
    np.testing.assert_array_equal(gap_from_drift([0.0, 1e400], 1.0, 1.0, 0.0, 2.0), [0.0, np.inf])
    constants = NtkConstants(10, 100, 0.5, 1.0, 1.0, 0.1, 3.0, 0.1)
    theorem = NtkTheorem("theorem_1", constants, 1.0, ())
    np.testing.assert_array_equal(theorem.residual_bound([0, 1, np.inf]), [9.0, 9 * theorem.rate(), 0.0])
    assert np.all(theorem.residual_bound([0, 7, np.inf], 0.0) == 9)
    assert theorem.residual_bound(1e30, 1e-20) == 0 and theorem.residual_bound(1e30, 1e-30) < 9
    np.testing.assert_array_equal(theorem.residual_bound([0, 1], 1e9), [9.0, 0.0])
    run = maker.run([4] * 4, maker.everyone([4] * 4, 5), 1, n=16)
    found = theorem_1(*run.problem, run.rule(), num_models=1)
    at_zero, near, real = (
        replace(found, constants=found.constants._replace(lambda_min=value)).movement_bound("proof", growth=2.0)
        for value in (0.0, 1e-18, found.constants.lambda_min)
    )
    np.testing.assert_allclose(at_zero, near, rtol=1e-12)
    assert np.all(real[1:] < at_zero[1:]) and at_zero[-1] > 0
