"""Private rounds: plain NumPy loops over the weights of a linear model, from algorithm 1 of McMahan et al. (2018)."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Flow, PrivateFlow, Rule, federated_flow, private_flow
from fedtangent._src.types import Cohort, Partition

from ..documents import run

SIZES, INPUTS, OUTPUTS, TEST, STEPS, RATE = (4, 40, 1, 7, 3), 4, 2, 5, 3, 0.2
CLIENTS = np.array([[0, 1, 2], [3, 1, 4], [2, 0, 3], [4, 1, 0], [3, 2, 1]])  # of each round
SERVER = np.array([1.0, 0.5, 0.8, 1.0, 0.7])
RUNS = 16  # of most tests, so that they share a program


SINGLE = """
import numpy as np, fedtangent as ft
x = np.linspace(-1, 1, 6)[:, None]
clients = ft.partition.iid(6, num_clients=3, seed=0)
kernels = ft.kernels.kernel_blocks(ft.models.linear(1).kernel, x, x)
cohorts = ft.schedules.drawn_cohorts(ft.schedules.all_clients(3), clients, num_rounds=2, seed=0)
flow = ft.theory.federated_flow(kernels, x, clients, cohorts, ft.theory.Rule(5, 0.1))
rounds = ft.theory.private_flow(flow, 1.0, 0.1).at(0.2, 1.0).flow.rounds
print(rounds.weight.dtype, rounds.learning_rate.dtype)
"""


class Problem(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def of(cls, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(sum(SIZES) + TEST, INPUTS))
        y = x @ rng.normal(size=(INPUTS, OUTPUTS))
        return cls(x[:-TEST], y[:-TEST], x[-TEST:], y[-TEST:])

    def flow(self, clients: np.ndarray = CLIENTS, **rule) -> Flow:
        blocks = KernelBlocks(self.x @ self.x.T, self.x_test @ self.x.T, ntk_test=self.x_test @ self.x_test.T)
        partition = Partition(np.arange(sum(SIZES), dtype=np.int32), np.cumsum([0, *SIZES]).astype(np.int32))
        cohorts = Cohort(clients, np.zeros_like(clients), np.ones(clients.shape))
        options = {"server_learning_rate": SERVER, **rule}
        return federated_flow(blocks, self.y, partition, cohorts, Rule(STEPS, RATE, **options))

    def update(self, client: int, w: np.ndarray) -> np.ndarray:
        rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
        x, y, v = self.x[rows], self.y[rows], w.copy()
        for _ in range(STEPS):
            v -= RATE * x.T @ (x @ v - y) / len(x)
        return v - w

    def trained(self, clip_norm: float, start: np.ndarray, m: float = 3) -> tuple[np.ndarray, np.ndarray]:
        """The weights after all rounds without noise, and the norms of all updates."""
        w, norms = start.copy(), np.zeros(CLIENTS.shape)
        for r, cohort in enumerate(CLIENTS):
            total = np.zeros_like(w)
            for s, client in enumerate(cohort):
                change = self.update(int(client), w)
                norms[r, s] = np.linalg.norm(change)
                total += change * min(1.0, clip_norm / norms[r, s])
            w += SERVER[r] * total / m
        return w, norms


@pytest.mark.parametrize("clip_norm", [0.1, 0.4, 50.0])
@pytest.mark.parametrize("m", [3, 7.5])
def test_runs_without_noise_equal_the_loop(clip_norm: float, m: float) -> None:
    of, start = Problem.of(), np.random.default_rng(1).normal(size=(INPUTS, OUTPUTS))
    private = private_flow(of.flow(), clip_norm, 0.0, m)
    runs = private.runs(RUNS, 0, of.x @ start, of.x_test @ start)
    weights, norms = of.trained(clip_norm, start, m)
    np.testing.assert_allclose(runs.test, np.stack([of.x_test @ weights] * RUNS), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(runs.clipped, np.stack([(norms > clip_norm).mean(axis=1)] * RUNS))
    unclipped = of.x_test @ of.trained(np.inf, start, m)[0]
    assert clip_norm > 10 or np.abs(runs.test[0] - unclipped).max() > 1e-2


def test_norms_equal_the_loop() -> None:
    of, start = Problem.of(1), np.ones((INPUTS, OUTPUTS))
    private = private_flow(of.flow(), 50.0, 0.0)
    np.testing.assert_allclose(private.norms(of.x @ start), of.trained(50.0, start)[1], rtol=1e-10)


def test_the_law_equals_the_recursion_of_the_covariance() -> None:
    """A round maps the weights by a matrix M, and the covariance by ``P -> M P M' + s^2 I``."""
    of, noise, clip_norm = Problem.of(2), 0.3, 40.0
    private = private_flow(of.flow(), clip_norm, noise)
    cov, kept, fresh = np.zeros((INPUTS, INPUTS)), np.zeros((INPUTS, INPUTS)), np.eye(INPUTS)
    for r, cohort in enumerate(CLIENTS):
        moves = np.zeros_like(cov)
        for client in cohort:
            rows = slice(sum(SIZES[:client]), sum(SIZES[: client + 1]))
            x = of.x[rows]
            step = np.eye(INPUTS) - RATE * x.T @ x / len(x)
            moves += (np.linalg.matrix_power(step, STEPS) - np.eye(INPUTS)) / 3
        m = np.eye(INPUTS) + SERVER[r] * moves
        variance = (SERVER[r] * noise * clip_norm / len(cohort)) ** 2
        cov, kept = m @ cov @ m.T + variance * fresh, kept + variance * fresh
    law = private.law()
    np.testing.assert_allclose(law.cov, of.x_test @ cov @ of.x_test.T, rtol=1e-9)
    np.testing.assert_allclose(law.mean, of.x_test @ of.trained(np.inf, np.zeros((INPUTS, OUTPUTS)))[0], rtol=1e-9)
    assert np.abs(law.cov / (of.x_test @ kept @ of.x_test.T) - 1).max() > 0.1


def test_drawn_runs_have_the_law() -> None:
    private, draws = private_flow(Problem.of(3).flow(), 40.0, 0.05), 4000
    law, runs = private.law(), private.runs(draws, seed=5).test
    deviations = np.sqrt(np.diag(law.cov))[:, None]
    assert np.abs((runs.mean(axis=0) - law.mean) / deviations).max() < 4.5 / np.sqrt(draws)
    assert np.abs(runs.var(axis=0) / deviations**2 - 1).max() < 4.5 * np.sqrt(2 / draws)
    assert not np.array_equal(private.runs(RUNS, seed=5).test, private.runs(RUNS, seed=6).test)


def test_one_step_on_batches_and_another_loss_are_clipped_too() -> None:
    """Local steps one by one give the same run as the response in closed form."""
    of = Problem.of()
    closed, stepwise = of.flow(), of.flow(step_weights=np.ones(STEPS), loss=ft.losses.squared_error)
    assert stepwise.kind.stepwise and not closed.kind.stepwise
    at = [private_flow(flow, 0.2, 0.5).runs(RUNS, 2).test for flow in (closed, stepwise)]
    np.testing.assert_allclose(at[0], at[1], rtol=1e-9, atol=1e-12)


def test_the_best_pair_is_the_least_of_its_table() -> None:
    of = Problem.of(4)
    private = private_flow(of.flow(), 1.0, 0.5)
    rates, clips = (0.05, 0.2, 0.4), (0.05, 0.5, 5.0)
    best = private.best(of.y_test, rates, clips, num_runs=RUNS, seed=1)
    errors = [
        [np.mean((private.at(rate, clip).runs(RUNS, 1).test - of.y_test) ** 2) for clip in clips] for rate in rates
    ]
    np.testing.assert_allclose(best.losses, errors)
    i, k = np.unravel_index(np.argmin(errors), (3, 3))
    assert (best.learning_rate, best.clip_norm) == (rates[i], clips[k]) and best.loss == best.losses.min()
    quiet = private_flow(of.flow(), 1.0, 0.0).best(of.y_test, rates, clips, num_runs=RUNS)
    assert quiet.loss < best.loss and quiet.clip_norm > best.clip_norm


@pytest.mark.slow
def test_numbers_are_float64_in_a_program_of_single_precision() -> None:
    done = subprocess.run([sys.executable, "-c", SINGLE], capture_output=True, text=True, check=True)
    assert done.stdout == "float64 float64\n"


def private_of(**options) -> PrivateFlow:
    return private_flow(Problem.of().flow(), **{"clip_norm": 1.0, "noise_multiplier": 0.1, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: private_of(clip_norm=0), "clip_norm: got 0.*above 0"),
        (lambda: private_of(noise_multiplier=-1), "noise_multiplier: got -1.*at least 0"),
        (lambda: private_of(expected_clients=0), "expected_clients: got 0.*above 0"),
        (lambda: private_of(clip_norm=0.01).law(), "clip_norm: got 0.01, must be at least"),
        (lambda: private_of().runs(0), "num_runs: got 0"),
        (lambda: private_of().runs(2, f0_train=np.zeros((3, 2))), r"f0_train: got shape \(3, 2\)"),
        (lambda: private_of().best(np.zeros((2, 2)), [0.1], [1.0]), "y_test: got shape"),
        (lambda: private_of().best(np.zeros((TEST, 2)), [], [1.0]), "learning_rates: got shape"),
        (
            lambda: private_of().best(np.zeros((TEST, 2)), [1e200], [1e200], num_runs=2),
            "learning_rates: got only",
        ),
        (lambda: private_of().at(0.1, -1.0), "clip_norm: got -1.0"),
        (
            lambda: private_flow(Problem.of().flow(weight_decay=0.1), 1.0, 0.1),
            "flow: got a flow with weight decay",
        ),
        (
            lambda: private_flow(Problem.of().flow(server_momentum=0.9), 1.0, 0.1),
            "flow: got a flow with server momentum",
        ),
        (lambda: private_flow(Problem.of().flow(algorithm="scaffold"), 1.0, 0.1), "algorithm: got 'scaffold'"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("budget", [0.5, 8.0])
def test_the_noise_multiplier_is_the_least_of_its_budget(budget: float) -> None:
    of_run = {"num_clients": 100, "clients_per_round": 100, "num_rounds": 10, "delta": 1e-3}
    noise = ft.measures.noise_multiplier(budget, **of_run)
    assert ft.measures.epsilon(noise_multiplier=noise, **of_run) <= budget
    assert ft.measures.epsilon(noise_multiplier=noise * 0.9999, **of_run) > budget


def test_a_budget_out_of_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="target_epsilon: got 1e-09"):
        ft.measures.noise_multiplier(1e-9, num_clients=10, clients_per_round=10, num_rounds=10**6, delta=1e-9)


@pytest.mark.slow
def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    run("theory.private_flow(")
    *printed, without_noise = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["epsilon 2", "epsilon 8", "epsilon 32"]
    assert without_noise == "without noise: error 0.0052"
    assert printed[0].endswith("error 0.0101 at rate 1.0, clip 0.1") and printed[2].endswith("rate 2.0, clip 0.3")
