"""The residual ledger passes what follows the flow and fails every wrong prediction; its parts by brute force."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent
from fedtangent._src import data
from fedtangent._src.comparison import ledger_bounds
from fedtangent._src.comparison.ledger import ResidualLedger, residual_ledger
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.history import Run
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.models import mlp, rbf_linear
from fedtangent._src.models.features import LinearStructure
from fedtangent._src.theory.flow import Rule
from fedtangent._src.types import Algorithm, Cohort, Model, Partition

from ..nightly import nightly

ROUNDS, STEPS, CLIENTS, RATE = 12, 3, 4, 0.5
X = np.random.default_rng(0).standard_normal((14, 3))
PARTITION = partition.quantity_skew(14, CLIENTS, 2.0, 1, min_client_size=2)


class Seen(NamedTuple):
    algorithm: Algorithm
    ledger: ResidualLedger
    run: Run
    features: np.ndarray  # of the linear model
    weights: np.ndarray  # [K, features, 1] initial ones


def seen(model: Model, y: np.ndarray, *, x: np.ndarray = X, recipe: Any = algorithms.fed_ensemble, rate: float = RATE,
         dtype: Any = jnp.float64, weighting: str = "examples", flow: Any = None, num_models: int = 2, seed: int = 3,
         evaluate_every: int = 4, **options: Any) -> Seen:  # fmt: skip
    held = data.federated_data(x, y, PARTITION, dtype=dtype)
    plan = schedule.per_client_permutations(CLIENTS, num_models)
    algorithm = recipe(model, plan, client_learning_rate=rate, work=Work(steps=STEPS, batch_size=None), **options)
    rule = Rule(STEPS, rate, **(flow or {}))
    ledger = residual_ledger(algorithm, model, held, ROUNDS, rule, seed=seed, weighting=weighting)
    run = simulate(
        algorithm,
        held,
        num_rounds=ROUNDS,
        seed=seed,
        evaluation=Evaluation(evaluate_every, ledger),
        devices=Devices("scan"),
    )
    if not isinstance(model.structure, LinearStructure):
        return Seen(algorithm, ledger, run, np.zeros(0), np.zeros(0))
    start = algorithm.params(algorithm.init(seed, CLIENTS))["weights"]  # type: ignore[misc]
    return Seen(algorithm, ledger, run, np.asarray(model.structure.features(jnp.asarray(x))), np.asarray(start))


def network(width: int, outputs: int = 1) -> Model:
    return mlp(3, outputs, (width,), "erf", dtype=jnp.float64)


@pytest.fixture(scope="module")
def linear() -> Seen:
    model = rbf_linear(num_features=30, bandwidth=0.2, dtype=jnp.float64)
    x = np.linspace(-1, 1, 14)[:, None]
    return seen(model, np.sin(4 * x), x=x, rate=0.1)


@pytest.fixture(scope="module")
def wide() -> Seen:
    return seen(network(4096), np.sin(2 * X[:, :1]))


def late(run: Run) -> Cohort:
    return Cohort(*(np.roll(leaf, 1, axis=0) for leaf in run.history.rounds["cohort"]))


WRONG: dict[str, Callable[[Seen], dict[str, Any]]] = {
    "step size 10 % too large": lambda s: {"learning_rate": 1.1 * s.ledger.federation.rule.learning_rate},
    "one local step less": lambda s: {"local_steps": STEPS - 1},
    "cohorts one round late": lambda s: {"cohorts": late(s.run)},
    "another model's initial function": lambda s: {"models": [1, 0]},
    "a proximal term that is not there": lambda s: {"mu": 0.3},
    "server rate": lambda s: {"server_learning_rate": 0.9},
}


CONTROLS = [*(("wide", name) for name in WRONG), ("linear", "another model's initial function")]


@pytest.mark.parametrize(("which", "name"), nightly(CONTROLS, [("wide", name) for name in list(WRONG)[:3]]))
def test_a_wrong_prediction_fails(request: pytest.FixtureRequest, which: str, name: str) -> None:
    run = request.getfixturevalue(which)
    assert not run.ledger.against(**WRONG[name](run)).passed


def test_a_linear_model_is_within_rounding(linear: Seen) -> None:
    ledger = linear.ledger
    assert ledger.passed and ledger.is_of(linear.run.history)
    assert [r.round for r in ledger.rows] == [r for r in (0, 4, 8, 12) for _ in range(2 * CLIENTS)]
    last = [r for r in ledger.rows if r.round == ROUNDS]
    assert max(r.tolerance for r in last) < 1e-10 and min(r.moved for r in last) > 0.05
    assert ledger.against(learning_rate=0.1 * (1 + 1e-8)).passed is False  # rounding, not slack


def test_a_wide_network_is_within_the_bound_and_near_it(wide: Seen) -> None:
    rows = [r for r in wide.ledger.rows if r.round]
    assert wide.ledger.passed and wide.ledger.is_of(wide.run.history)
    ratios = np.array([r.gap / r.tolerance for r in rows])
    assert 0.05 < np.median(ratios) < 1  # a bound, but not one that anything would pass
    assert max(r.tolerance / r.moved for r in rows) < 0.05
    same = wide.ledger.against(cohorts=wide.run.history.rounds["cohort"])
    np.testing.assert_allclose([r[3:5] for r in same.rows], [r[3:5] for r in wide.ledger.rows], rtol=1e-6, atol=1e-12)


def test_metrics_are_those_of_the_rows(wide: Seen) -> None:
    for evaluation in wide.run.history.evaluations:
        rows = [r for r in wide.ledger.rows if r.round == evaluation.round]
        found = evaluation.metrics
        assert found["failed"] == 0.0
        assert found["worst_ratio"] == max(r.gap / r.tolerance for r in rows)
        assert found["gap"] == pytest.approx(np.mean([r.gap for r in rows]), rel=1e-12)


def test_the_last_gap_is_that_of_the_last_rows(wide: Seen) -> None:
    for rate in (0.1, 0.11):
        rows = wide.ledger.against(learning_rate=rate).rows
        last = [row.gap**2 for row in rows if row.round == rows[-1].round]
        assert wide.ledger.last_gap(learning_rate=rate) == pytest.approx(np.sqrt(np.mean(last)), rel=1e-12)


def test_gaps_are_simulated_less_predicted(linear: Seen) -> None:
    """Against NumPy that trains on features, and does not know of kernels."""
    ledger, features = linear.ledger, linear.features
    w = [_trained(ledger, features, k, linear.weights[k])[0] for k in range(2)]
    for row in ledger.rows:
        own = PARTITION.client(row.client)
        moved = features[own] @ (w[row.model][row.round] - w[row.model][0])
        assert row.moved == pytest.approx(rms(moved), rel=1e-9, abs=1e-12)
        seen = ledger.snapshots[row.round // 4].outputs[row.model][own]
        assert rms(seen - features[own] @ w[row.model][row.round]) < 1e-12
        assert row.gap < 1e-12


def _trained(ledger: ResidualLedger, features: np.ndarray, model: int, start: np.ndarray, begin: int = 0,
             targets: np.ndarray | None = None) -> tuple[list[np.ndarray], list[float]]:  # fmt: skip
    """Weights after every round, and the farthest that a client went from the server's in it."""
    of, path, far = ledger.federation, [start], []
    y, rate = of.y if targets is None else targets, of.rule.learning_rate
    for r in range(begin, ROUNDS):
        slots = [s for s in range(len(of.cohorts.client[r])) if of.cohorts.model[r, s] == model]
        total, mean, moves = sum(float(of.cohorts.weight[r, s]) for s in slots), np.zeros_like(start), [0.0]
        for s in slots:
            own, local = PARTITION.client(int(of.cohorts.client[r, s])), path[-1].copy()
            for _ in range(STEPS):
                local = local - rate / len(own) * features[own].T @ (features[own] @ local - y[own])
            mean += float(of.cohorts.weight[r, s]) / total * local
            moves.append(float(np.linalg.norm(local - path[-1])))
        path.append(mean)
        far.append(max(moves))
    return path, far


def test_coefficients_moves_and_propagation_are_those_of_weights(linear: Seen) -> None:
    ledger, features = linear.ledger, linear.features
    path, kernel = ledger.paths[1], ledger.observer.kernels[1]
    _, far = _trained(ledger, features, 1, linear.weights[1])
    np.testing.assert_allclose(path.local_moves, far, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(path.outputs, path.outputs[0] + kernel @ path.coefficients, rtol=0, atol=1e-12)
    push = np.random.default_rng(0).standard_normal(linear.weights[1].shape)
    later = [features @ w for w in _trained(ledger, features, 1, push, 5, np.zeros_like(ledger.federation.y))[0]]
    found = path.propagate(5, features @ push)
    assert found.shape == (ROUNDS + 1 - 5, 14, 1)
    np.testing.assert_allclose(found, later, rtol=0, atol=1e-9)
    assert np.abs(path.propagate(4, features @ push)[:3] - later[:3]).max() > 1e-3  # another round's cohorts


def test_the_tolerance_is_the_change_of_the_kernel_propagated(wide: Seen) -> None:
    """Rebuilt from snapshots with explicit matrices instead of the flow's recursion."""
    ledger = wide.ledger
    of, kernel, path = ledger.federation, ledger.observer.kernels[0], ledger.paths[0]
    rate, n = of.rule.learning_rate, len(X)

    def step(r: int) -> np.ndarray:
        slots = [s for s in range(len(of.cohorts.client[r])) if of.cohorts.model[r, s] == 0]
        total, matrix = sum(float(of.cohorts.weight[r, s]) for s in slots), np.zeros((n, n))
        for s in slots:
            own = PARTITION.client(int(of.cohorts.client[r, s]))
            pick = np.eye(n)[own]
            local = np.eye(n) - rate / len(own) * kernel @ pick.T @ pick
            matrix += float(of.cohorts.weight[r, s]) / total * np.linalg.matrix_power(local, STEPS)
        return matrix

    expected = np.zeros(CLIENTS)
    held = [PARTITION.client(i) for i in range(CLIENTS)]
    for before, at in zip(ledger.snapshots[:-1], ledger.snapshots[1:], strict=True):
        added = path.coefficients[at.round] - path.coefficients[before.round]
        start = pushed = at.change[0] @ added
        for r in range(at.round, ROUNDS):
            pushed = step(r) @ pushed
        left = np.linalg.norm(pushed) / np.linalg.norm(start)
        sizes = [sum(rms(at.change[0][np.ix_(own, j)] @ added[j]) for j in held) for own in held]
        least = np.sqrt(np.average(np.square(sizes), weights=PARTITION.sizes))
        share = 1 + np.max(path.local_moves[before.round : at.round]) / at.travelled[0]
        for client, own in enumerate(held):
            expected[client] += share * max(rms(pushed[own]), left * max(sizes[client], least))
    for row in ledger.rows:
        if row.round == ROUNDS and row.model == 0:
            assert row.tolerance == pytest.approx(expected[row.client], rel=1e-6)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


@pytest.mark.slow
def test_several_outputs_and_uniform_weights() -> None:
    found = seen(network(512, 2), np.sin(2 * X[:, :2]), weighting="uniform", num_models=1, recipe=_uniform)
    assert found.ledger.passed and found.ledger.is_of(found.run.history)
    assert found.ledger.federation.outputs == "full" and found.ledger.observer.kernels.shape == (1, 28, 28)


def _uniform(*given: Any, **options: Any) -> Any:
    return algorithms.fed_avg(*given, averaging=Averaging(weighting="uniform"), **options)


@pytest.mark.slow
def test_the_proximal_term_is_predicted_and_missed_where_ignored() -> None:
    options: dict[str, Any] = {"recipe": algorithms.fed_prox, "mu": 0.3, "flow": {"mu": 0.3}}
    found = seen(network(4096), np.sin(2 * X[:, :1]), **options)
    assert found.ledger.passed
    assert not found.ledger.against(mu=0.0).passed


@pytest.mark.slow
def test_float32_is_allowed_its_own_rounding(linear: Seen) -> None:
    x = np.linspace(-1, 1, 14)[:, None]
    model = rbf_linear(num_features=30, bandwidth=0.2, dtype=jnp.float32)
    found = seen(model, np.sin(4 * x), x=x, rate=0.1, dtype=jnp.float32)
    assert found.ledger.passed and not found.ledger.against(learning_rate=0.11).passed
    gaps = [max(r.gap for r in ledger.rows) for ledger in (found.ledger, linear.ledger)]
    assert gaps[0] > 1e3 * gaps[1]


def test_a_network_that_is_not_finite_fails_without_an_error(wide: Seen) -> None:
    state = wide.run.state
    broken = state._replace(server=jax.tree.map(lambda leaf: leaf * jnp.nan, state.server), round=jnp.int32(8))
    ledger = dataclasses.replace(wide.ledger, snapshots=[], rows=[], sources=([], []))
    found = ledger(wide.algorithm, broken)
    assert found["failed"] == 1.0 and np.isnan(found["gap"]) and not ledger.passed


@pytest.mark.slow
@pytest.mark.theory
def test_gap_and_tolerance_fall_together_with_the_width() -> None:
    """As fast as the drift of the kernel: 1 / width for a smooth activation, faster than the paper's O(width^-1/2)."""
    widths, gaps, bounds = (256, 1024, 4096), [], []
    for width in widths:
        runs = [seen(network(width), np.sin(2 * X[:, :1]), seed=s).ledger for s in range(6)]
        assert all(ledger.passed for ledger in runs)
        last = [[r for r in ledger.rows if r.round == ROUNDS] for ledger in runs]
        gaps.append(np.array([np.mean([r.gap for r in rows]) for rows in last]))
        bounds.append(np.array([np.mean([r.tolerance for r in rows]) for rows in last]))
    assert width_slope(widths, gaps).value < -0.6
    assert width_slope(widths, bounds).value < -0.6


def _made(
    model: Model | None = None, held: Any = None, rounds: Any = 3, recipe: Any = algorithms.fed_avg, **more: Any
) -> Any:
    held = data.federated_data(X, X[:, :1], PARTITION, dtype=jnp.float64) if held is None else held
    own = network(4)
    algorithm = recipe(
        own, schedule.all_clients(CLIENTS), client_learning_rate=RATE, work=Work(steps=STEPS, batch_size=None)
    )
    rule = Rule(more.pop("local_steps", STEPS), RATE)
    return residual_ledger(algorithm, model or own, held, rounds, rule, **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _made(rounds=0), "num_rounds: got 0, must be a whole number of at least 1"),
        (lambda: _made(weighting="size"), "weighting: got 'size', allowed are examples, uniform"),
        (
            lambda: _made(network(5)),
            "model: got mlp.*, must have parameters of the same shapes as the networks of fed_avg",
        ),
        (lambda: _made(recipe=algorithms.local_only), "algorithm: got local_only, must predict with trained networks"),
        (
            lambda: _made(held=data.federated_data(X, np.zeros(14, int), PARTITION)),
            "data: got int32 labels as targets, must be numbers",
        ),
        (lambda: _made(local_steps=0), "local_steps: got 0, must be whole numbers"),
    ],
)
def test_mistakes_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_ledger_is_for_its_rounds_and_needs_64_bits(linear: Seen) -> None:
    state = linear.run.state
    with pytest.raises(ValueError, match="state: got round 13, must be at most 12"):
        linear.ledger(linear.algorithm, state._replace(round=state.round + 1))
    with pytest.raises(ValueError, match="state: got round 12, must be after 12: use a new ledger for each run"):
        linear.ledger(linear.algorithm, state)
    fedtangent.enable_x64(False)
    try:
        with pytest.raises(ValueError, match="jax_enable_x64: got False, must be True"):
            residual_ledger(None, None, None, 3, Rule(1, 1.0))  # type: ignore[arg-type]
    finally:
        fedtangent.enable_x64()


def test_cohorts_other_than_the_recorded_are_noticed(linear: Seen) -> None:
    other = linear.ledger.against(cohorts=late(linear.run))
    assert not other.is_of(linear.run.history)
    assert ledger_bounds.Federation is type(other.federation) and isinstance(other.federation.partition, Partition)
