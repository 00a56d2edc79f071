"""Local-GD and Modified Local-GD (Local-GD paper, algorithms 1 to 3) with many local steps, against NumPy loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.models.features import linear
from fedtangent._src.types import Algorithm, Model, Partition

from ..nightly import nightly
from .toys import arguments_of, counting

NODES, HELD, SIZE, ROUNDS = 4, 6, 40, 3
STEPS, RATE, PULL = 150, 0.01, 0.05
TOLERANCE, VISIBLE = 1e-10, 1e-4  # relative; float64, the same arithmetic in another order
RNG = np.random.default_rng(0)
X = RNG.standard_normal((NODES, HELD, SIZE))
TRUTHS = RNG.standard_normal(SIZE) + 0.3 * RNG.standard_normal((NODES, SIZE))
NUMBERS = np.einsum("nhd,nd->nh", X, 2 * TRUTHS) + 0.2 * RNG.standard_normal((NODES, HELD))
SIGNS = np.sign(np.einsum("nhd,nd->nh", X, TRUTHS))
MODEL = linear(SIZE, dtype=jnp.float64)

SLOPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # of each example's loss by its output
    "squared_error": lambda f, y: f - y,
    "exponential": lambda f, y: -y * np.exp(-y * f),
    "logistic": lambda f, y: -y / (1 + np.exp(y * f)),
}


class Told(NamedTuple):
    """What a loop is told: the loss, whether it is a sum, lambda, and a round's number -> alpha."""

    loss: str
    is_sum: bool = False
    pull: float = 0.0
    alpha: Callable[[int], float] = lambda k: 1.0
    steps: int = STEPS

    @property
    def targets(self) -> np.ndarray:
        return NUMBERS if self.loss == "squared_error" else SIGNS


def loop(told: Told) -> np.ndarray:
    """Algorithm 1 with 2, or 3: the global model after every round, [R + 1, d]; of eq. (12) the local loss."""
    start = np.zeros(SIZE)
    w, path = start, [start]
    for k in range(ROUNDS):
        ends = []
        for x, y in zip(X, told.targets, strict=True):
            own = w.copy()
            for _ in range(told.steps):
                gradient = x.T @ SLOPES[told.loss](x @ own, y) / (1 if told.is_sum else len(y))
                own = own - RATE * (gradient + told.pull * (own - w))
            ends.append(own)
        alpha = told.alpha(k)
        w = (1 - alpha) * start + alpha * np.mean(ends, axis=0)
        path.append(w)
    return np.array(path)


def halpern(first_index: int) -> Callable[[int], float]:
    return lambda k: 1 - 1 / (k + first_index + 1)


CASES: dict[str, tuple[str, dict[str, Any], Told, dict[str, Told]]] = {
    # recipe, its options; the loop it is, and loops that are wrong
    "regression": ("fed_avg", {}, Told("squared_error"), {"a sum": Told("squared_error", is_sum=True)}),
    "regression, sums": (
        "fed_avg",
        {"loss": "squared_error_sum"},
        Told("squared_error", is_sum=True),
        {"a mean": Told("squared_error")},
    ),
    "eq. 12": (
        "fed_prox",
        {"loss": "exponential_sum", "mu": PULL},
        Told("exponential", True, PULL),
        {
            "no lambda": Told("exponential", True),
            "twice lambda": Told("exponential", True, 2 * PULL),
            "a mean": Told("exponential", False, PULL),
            "another loss": Told("logistic", True, PULL),
        },
    ),
    "logistic": (
        "fed_avg",
        {"loss": "logistic"},
        Told("logistic"),
        {"a sum": Told("logistic", True), "a step less": Told("logistic", steps=STEPS - 1)},
    ),
    "logistic, sums": ("fed_avg", {"loss": "logistic_sum"}, Told("logistic", True), {"a mean": Told("logistic")}),
    "algorithm 3": (
        "modified_local_gd",
        {"loss": "exponential_sum", "mu": PULL},
        Told("exponential", True, PULL, halpern(0)),
        {
            "no alpha": Told("exponential", True, PULL),
            "alpha of the next round": Told("exponential", True, PULL, halpern(1)),
            "no lambda": Told("exponential", True, 0.0, halpern(0)),
            "a mean": Told("exponential", False, PULL, halpern(0)),
        },
    ),
    "eq. 16, regression": (
        "modified_local_gd",
        {"first_index": 1},
        Told("squared_error", alpha=halpern(1)),
        {"no alpha": Told("squared_error"), "alpha of the round before": Told("squared_error", alpha=halpern(0))},
    ),
}


def built(recipe: str, steps: int = STEPS, model: Model = MODEL, **options: Any) -> Algorithm:
    make = getattr(algorithms, recipe)
    plan = schedule.all_clients(NODES)
    given = {"client_learning_rate": RATE, "work": Work(steps=steps, batch_size=None), **options}
    return make(model, plan, **arguments_of(make, given))


def nodes(targets: np.ndarray) -> Any:
    held = Partition(np.arange(NODES * HELD, dtype=np.int32), HELD * np.arange(NODES + 1, dtype=np.int32))
    y = targets.reshape(-1, 1)
    return data.federated_data(X.reshape(-1, SIZE), y, held, dtype=jnp.float64)


@functools.cache
def simulated(name: str) -> np.ndarray:
    recipe, options, told, _ = CASES[name]
    algorithm = built(recipe, **options)
    run = simulate(
        algorithm,
        nodes(told.targets),
        num_rounds=ROUNDS,
        evaluation=Evaluation(1, lambda _, state: {"w": np.asarray(algorithm.params(state)["weights"])[0, :, 0]}),
    )
    return np.array([e.metrics["w"] for e in run.history.evaluations])


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


@pytest.mark.parametrize("name", nightly(CASES, [name for name in CASES if not name.endswith(", sums")]))
def test_every_round_is_that_of_the_loop(name: str) -> None:
    """By day of one loss that sums over examples: eq. 12's."""
    _, _, told, wrong = CASES[name]
    found = simulated(name)
    assert found.shape == (ROUNDS + 1, SIZE) and not np.any(found[0])
    assert distance(found, loop(told)) < TOLERANCE
    for what, other in wrong.items():
        assert distance(found, loop(other)) > VISIBLE, what


@pytest.mark.parametrize("steps", nightly([150, 200], [150]))
def test_hundreds_of_local_steps_are_one_program(steps: int) -> None:
    """The model is traced as often as for one step, and a second run, of more rounds, traces nothing."""

    def traces(steps: int) -> int:
        chex.clear_trace_counter()
        model, calls = counting(MODEL)
        algorithm = built("fed_prox", steps, model, mu=PULL, loss="exponential_sum")
        algorithm = algorithm._replace(step=chex.assert_max_traces(algorithm.step, n=3))  # as in test_laws.py
        simulate(algorithm, nodes(SIGNS), num_rounds=2, evaluation=Evaluation(2), devices=Devices("scan"))
        first = len(calls)
        simulate(algorithm, nodes(SIGNS), num_rounds=4, evaluation=Evaluation(2), devices=Devices("scan"))
        assert len(calls) == first
        return first

    assert traces(steps) == traces(1)


def test_labels_that_are_no_signs_are_refused_before_the_run() -> None:
    for wrong in (np.where(SIGNS > 0, 1.0, 0.0), NUMBERS):
        with pytest.raises(ValueError, match=r"data: targets: got .*, must be -1 or 1 for the loss 'logistic'"):
            simulate(built("fed_avg", loss="logistic"), nodes(wrong), num_rounds=1)
