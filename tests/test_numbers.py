"""Numbers that once were silently wrong: each is refused in one line, or right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src import data, kernels, models
from fedtangent._src.data import partition
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import graph, schedule
from fedtangent._src.federated.ntk_fl.options import Evolution
from fedtangent._src.federated.wire.channel import named_channel
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.measures import uncertainty
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.theory.prior import prior_functions
from fedtangent._src.types import Cohort, Prediction

from .federated.laws import LAWS

CLIENTS = partition.of([[0, 1], [2, 3]])
SINGLE = partition.of([[0], [1], [2], [3]])
X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
MEMBERS = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 3)))
SCORES = ("negative_log_likelihood", "brier_score", "accuracy", "reliability", "expected_calibration_error")
INDEFINITE = np.kron(np.eye(2), [[1.0, 2.0], [2.0, 1.0]])  # eigenvalues 3 and -1


def psd() -> KernelBlocks:
    features = np.random.default_rng(2).standard_normal((6, 5))
    k = features @ features.T
    return KernelBlocks(k[:4, :4], k[4:, :4], k[:4, :4], k[4:, :4], k[4:, 4:])


def flow(weight: float = 1.0, **change: Any) -> Any:
    """Three rounds of four clients of one example each; kernels and fields of the rule may be given another value."""
    blocks = psd()._replace(**{name: change.pop(name) for name in KernelBlocks._fields if name in change})
    slots = np.tile(np.arange(4), (3, 1))
    cohorts: Any = Cohort(slots, np.zeros((3, 4), int), np.full((3, 4), weight))  # type: ignore[arg-type]
    return federated_flow(
        blocks, np.ones((4, 1)), SINGLE, cohorts, Rule(**{"local_steps": 2, "learning_rate": 0.1} | change)
    )


def refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(says) and "must be" in said, said


@pytest.mark.parametrize("label", [2**31, 2**32 + 1, 2**40])
def test_labels_beyond_the_range_of_int32(label: int, tmp_path: Path) -> None:
    y = np.array([0, 1, label, 1])
    says = f"got {label} at position 2 (1 such), must be from 0 to 2147483647"
    refused(lambda: data.federated_data(X, y, CLIENTS), f"y: {says}")
    np.savez(tmp_path / "own.npz", x=X, y=y, x_test=X, y_test=np.zeros(4, int))
    refused(lambda: data.load(str(tmp_path / "own.npz")), f"{tmp_path}/own.npz: y: {says}")


@pytest.mark.parametrize("label", [-1, 3, 7, 2**32])
@pytest.mark.parametrize("score", SCORES)
def test_uncertainty_of_labels_that_are_no_classes(score: str, label: int) -> None:
    of = getattr(uncertainty, score)
    refused(lambda: of(MEMBERS, np.array([0, 1, label])), f"labels: got {label} at position 2")
    assert np.isfinite(np.asarray(jax.tree.leaves(of(MEMBERS, jnp.array([0, 1, 2])))[0])).all()
    assert jax.jit(of)(MEMBERS, jnp.array([0, 1, label % 2**31])) is not None  # traced labels have no value to look at


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_a_row_of_measures_of_labels_that_are_no_classes(loss: str) -> None:
    predicted = Prediction(MEMBERS.mean(0), MEMBERS)
    refused(lambda: uncertainty.measure(predicted, jnp.zeros((3, 3)), jnp.array([0, 1, 7]), loss), "labels: got 7")


def test_an_indefinite_kernel_of_clients_with_one_example_each() -> None:
    refused(lambda: flow(ntk_train=INDEFINITE), "ntk_train: got a smallest eigenvalue of -1, must be positive semi")
    assert flow(ntk_train=np.abs(INDEFINITE) + 2 * np.eye(4)).stability().condition.holds
    singular = np.ones((4, 4), np.float32)  # semidefinite, and so are its roundings
    assert flow(ntk_train=singular - 1e-7 * np.eye(4)).stability().condition.holds


@pytest.mark.parametrize("weight", [1e-308, 1e-320, 1e308])
def test_weights_that_float64_cannot_divide(weight: float) -> None:
    refused(lambda: flow(weight), f"cohorts.weight: got {weight:g}, must be 0, or from")


@pytest.mark.parametrize("weight", [1e-38, 1e38])
def test_weights_are_relative(weight: float) -> None:
    np.testing.assert_allclose(flow(weight).mean(3), flow().mean(3), rtol=1e-12)


@pytest.mark.parametrize("steps", [2**31, 2**62, 2**63, np.uint64(2**63)])
def test_more_local_steps_than_32_bits_count(steps: Any) -> None:
    refused(lambda: flow(local_steps=steps), f"local_steps: got {steps}, must be whole numbers from 1 to 2147483647")


@pytest.mark.parametrize("kind", [complex, str, bool, object])
def test_kernels_of_real_numbers(kind: type) -> None:
    refused(lambda: flow(ntk_train=psd().ntk_train.astype(kind)), "ntk_train: got")
    refused(lambda: kernels.gram.jittered_cholesky(np.eye(2).astype(kind)), "theta: got")


def test_a_run_that_leaves_float64_says_so() -> None:
    fast = flow(learning_rate=1e200)
    for ask in (lambda: fast.mean(3), lambda: fast.residual(3), lambda: fast.cov(3), lambda: fast.variance(2)):
        with pytest.raises(FloatingPointError, match="learning_rate: got one at which the run is not stable"):
            ask()
    for ask in (fast.spectrum, fast.contraction, fast.fixed_point, fast.bias):
        with pytest.raises(FloatingPointError, match="numbers of a pass over the rounds are beyond float64"):
            ask()
    rate = fast.largest_stable_learning_rate()
    np.testing.assert_allclose(rate, flow(learning_rate=0.1).largest_stable_learning_rate(), rtol=1e-3)
    slower = flow(learning_rate=1e3)
    assert np.isfinite(slower.mean(3)).all() and not slower.stability().condition.holds


def test_functions_that_are_not_finite() -> None:
    found, zeros, nan = flow(), np.zeros((4, 1)), np.full((4, 1), np.nan)
    refused(lambda: found.predict(nan, zeros[:2], 1, 0), "f0_train: got nan")
    refused(lambda: found.predict(zeros, nan[:2], 1, 0), "f0_test: got nan")
    refused(lambda: found.residual(1, nan * np.inf, 0), "f0_train: got nan")
    refused(lambda: found.runs(nan[None, None], zeros[None, None, :2], [1]), "f0_train: got nan")


@pytest.mark.parametrize("patience", [2**31, 10**30])
def test_a_patience_beyond_32_bits(patience: int) -> None:
    refused(lambda: Evolution(patience=patience), f"patience: got {patience}, must be a whole number from 1 to 214748")


@pytest.mark.parametrize("bits", ["8.9", "8.0", "inf", "nan", "1e30"])
def test_bits_in_whole_numbers(bits: str) -> None:
    refused(lambda: named_channel(f"qsgd:{bits}"), f"channel: got 'qsgd:{bits}': bits: got")


FED_AVG = ft.fed_avg(models.mlp(X.shape[1], 1, (4,)), schedule.all_clients(2), 0.1)
SEEDED: dict[str, Callable[[Any], Any]] = {
    "partition": lambda seed: partition.iid(8, 2, seed=seed),
    "data": lambda seed: data.load("sine", seed=seed),
    "graph": lambda seed: graph.erdos_renyi(5, 1.0, seed),
    "features": lambda seed: models.rbf_linear(1, 1, seed=seed),
    "prior": lambda seed: prior_functions(psd(), 2, seed),
    "cohorts": lambda seed: schedule.drawn_cohorts(schedule.all_clients(2), CLIENTS, 2, seed),
    "theory": lambda seed: ft.predict(FED_AVG, (X, np.ones((4, 1))), CLIENTS, num_rounds=2, seed=seed),
}


@pytest.mark.parametrize("seed", [1.7, "3", True, None, -1, 2**32])
@pytest.mark.parametrize("name", SEEDED)
def test_seeds_in_whole_numbers(name: str, seed: Any) -> None:
    refused(lambda: SEEDED[name](seed), f"seed: got {seed!r}, must be a ")


@pytest.mark.parametrize("rounds", [2.5, 2.0, "2", True, 0, 2**31, 10**30])
def test_rounds_of_cohorts_in_whole_numbers(rounds: Any) -> None:
    refused(
        lambda: schedule.drawn_cohorts(schedule.all_clients(2), CLIENTS, rounds), f"num_rounds: got {rounds!r}, must"
    )


@pytest.mark.parametrize("model", [None, 3, "mlp"])
@pytest.mark.parametrize("name", [n for n, entry in catalogue("algorithms").items() if not entry.needs])
def test_recipes_of_a_model_that_is_none(name: str, model: Any) -> None:
    entry = catalogue("algorithms")[name]
    plan = catalogue("schedules")[entry.schedule]
    made = plan.build(plan.options(), 8, 0)
    refused(lambda: entry.recipe(model, made, **LAWS[name].arguments), f"model: got {model!r}, must be a Model")
