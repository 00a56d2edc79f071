"""Kernel diagnostics against full matrices and Jacobians, and as the callback of a run."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import data, pytrees
from fedtangent._src.data import partition
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.measures import tangent_kernels as measures
from fedtangent._src.measures.tangent_kernels import METRICS, kernel_diagnostics, stratified
from fedtangent._src.models import mlp, rbf_linear
from fedtangent._src.types import Algorithm, FederatedData, Model, Partition

N, P, D, C = 12, 9, 4, 3
RNG = np.random.default_rng(3)
FEATURES = RNG.standard_normal((N, P))
THETA = FEATURES @ FEATURES.T
DISJOINT = ([0, 1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11])
SHARED = ([0, 1, 2, 3, 4], [3, 4, 5, 6], [0, 7, 8, 9, 1], [10, 11, 4])


def clients_of(rows: Any) -> Partition:
    return Partition(np.concatenate([np.asarray(r, np.int32) for r in rows]), np.cumsum([0, *map(len, rows)]))


def operators(rows: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Full matrices: the Gram operators on weights, and the clients' shares."""
    on_weights = [FEATURES[own].T @ FEATURES[own] / len(own) for own in rows]
    sizes = np.array([len(own) for own in rows])
    return on_weights, sizes / sizes.sum()


def variance(ops: list[np.ndarray], share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = sum(p * a for p, a in zip(share, ops, strict=True))
    return sum(p * a @ a for p, a in zip(share, ops, strict=True)) - mean @ mean, mean @ mean


@pytest.mark.parametrize("rows", [DISJOINT, SHARED], ids=["disjoint", "shared"])
def test_gram_operators_are_those_of_full_matrices(rows: Any) -> None:
    found = measures.gram_operators(THETA, clients_of(rows))
    on_weights, share = operators(rows)
    pairs = list(itertools.combinations(range(4), 2))
    assert len(found.commutators) == 6
    for at, (i, j) in enumerate(pairs):
        a, b = on_weights[i], on_weights[j]
        norm = np.linalg.norm(a @ b - b @ a)
        assert found.commutators[at] == pytest.approx(norm, rel=1e-10)
        assert found.relative[at] == pytest.approx(norm / np.linalg.norm(a) / np.linalg.norm(b) / 2**0.5, rel=1e-10)
        assert abs(found.commutators[at] / np.linalg.norm(on_weights[i] @ on_weights[j]) - 1) > 1e-3
    var, mean_squared = variance(on_weights, share)
    assert found.variance == pytest.approx(np.linalg.norm(var), rel=1e-10)
    assert found.relative_variance == pytest.approx(np.linalg.norm(var) / np.linalg.norm(mean_squared), rel=1e-10)
    equal = variance(on_weights, np.full(4, 0.25))[0]  # negative control: clients weighted equally
    assert abs(found.variance / np.linalg.norm(equal) - 1) > 1e-3


def test_clients_that_hold_the_same_are_one() -> None:
    found = measures.gram_operators(THETA, clients_of([[0, 1, 2], [2, 0, 1], []]))
    assert len(found.commutators) == 1
    assert max(found.relative_mean, found.relative_variance) < 1e-6  # the root of rounding
    assert measures.gram_operators(THETA, clients_of([[0, 1]])).mean == 0.0


def test_pairs_are_drawn_where_there_are_many() -> None:
    every = [[i] for i in range(N)]
    whole, some = (measures.gram_operators(THETA, clients_of(every), max_pairs=m, seed=1) for m in (1000, 10))
    assert (len(whole.commutators), len(some.commutators)) == (66, 10)
    assert set(some.commutators) <= set(whole.commutators) and len(set(some.commutators)) == 10


def test_the_commutator_tells_heterogeneity() -> None:
    digits = data.load("digits", num_train=400)
    x, y = np.asarray(digits.x_train, np.float64), np.asarray(digits.y_train)
    theta = np.asarray(mlp(64, 10, (64,), dtype=jnp.float64).kernel(jnp.asarray(x), None, get="ntk"))
    seeds = [measures.gram_operators(theta, partition.iid(400, 10, seed)) for seed in range(4)]
    split = measures.gram_operators(theta, partition.shards(y, 10, 1, 0))
    scatter = np.std([s.relative_mean for s in seeds])
    assert split.relative_mean > 2 * seeds[0].relative_mean and split.relative_variance > 2 * seeds[0].relative_variance
    assert split.relative_mean - seeds[0].relative_mean > 20 * scatter


def test_drift_in_both_norms() -> None:
    change = RNG.standard_normal((N, N))
    change = 0.1 * (change + change.T)
    found = measures.drift(THETA + change, THETA)
    assert found.frobenius == pytest.approx(np.linalg.norm(change) / np.linalg.norm(THETA), rel=1e-12)
    assert found.operator == pytest.approx(np.linalg.norm(change, 2) / np.linalg.norm(THETA, 2), rel=1e-10)
    assert measures.drift(THETA, THETA) == (0.0, 0.0)
    assert np.isnan(measures.drift(THETA * np.nan, THETA)).all()


def test_alignment_by_its_definition() -> None:
    targets = RNG.standard_normal((N, C)) + 2
    h, outer = np.eye(N) - 1 / N, targets @ targets.T

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))

    plain, centred = cosine(THETA, outer), cosine(h @ THETA @ h, h @ outer @ h)
    assert measures.alignment(THETA, targets) == pytest.approx(plain, rel=1e-12)
    assert measures.alignment(THETA, targets, centred=True) == pytest.approx(centred, rel=1e-10)
    assert abs(plain / centred - 1) > 1e-2
    assert measures.alignment(outer, targets) == pytest.approx(1, rel=1e-12)
    # what centring is for: a nearly constant kernel is aligned with nearly constant targets, and says nothing of them
    constant = np.ones((N, N)) + 1e-3 * THETA
    assert measures.alignment(constant, targets) > 0.7
    assert measures.alignment(constant, targets, True) == pytest.approx(centred, rel=1e-6)
    assert np.isnan(measures.alignment(THETA, np.zeros((N, 1))))


def test_spectrum_of_known_eigenvalues() -> None:
    basis = np.linalg.qr(RNG.standard_normal((4, 4)))[0]
    found = measures.spectrum(basis * np.array([8.0, 4.0, 2.0, 2.0]) @ basis.T)
    np.testing.assert_allclose(found.eigenvalues, [8, 4, 2, 2], rtol=1e-12)
    assert found.effective_rank == pytest.approx(2**1.75, rel=1e-12)  # entropy: 1/2 + 1/4 * 2 + 2 * 1/8 * 3 bits
    assert (found.trace_over_largest, found.condition_number) == (pytest.approx(2), pytest.approx(4))
    flat = measures.spectrum(3 * np.eye(5))
    assert (flat.effective_rank, flat.trace_over_largest) == (pytest.approx(5), pytest.approx(5))
    assert measures.spectrum(THETA).condition_number == np.inf  # rank 9 of 12
    assert measures.spectrum(np.ones((3, 3))).effective_rank == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measures.drift(THETA[:3], THETA), "theta: got .* must be a square matrix"),
        (
            lambda: measures.drift(THETA[:3, :3], THETA),
            r"theta_0: got shape \(12, 12\), must be \(3, 3\), the shape",
        ),
        (lambda: measures.drift(THETA, 0 * THETA), "theta_0: got zeros only, must have other"),
        (lambda: measures.alignment(THETA, np.ones(N)), r"targets: got .* must be \[n, C\]"),
        (lambda: measures.gram_operators(THETA, clients_of([[0, N]])), "clients: got rows 0 to 12"),
        (lambda: measures.gram_operators(THETA, clients_of([[0, 0]])), "holds a row twice"),
        (lambda: measures.gram_operators(THETA, clients_of(DISJOINT), max_pairs=0), "max_pairs: got 0"),
        (lambda: watch(num_examples=1), "num_examples: got 1, must be a whole number of at least 2"),
        (lambda: watch(model=mlp(D, C, (6,))), "must have parameters of the same shapes"),
        (lambda: watch(recipe=algorithms.local_only), "algorithm: got local_only, must predict with trained networks"),
        (lambda: watch(recipe=algorithms.fed_be_no_distillation), "algorithm: got fed_be_no_distillation, must"),
        (
            lambda: watch(recipe=lambda *a, **o: algorithms.lg_fed_avg(*a, private="^0/", **o)),
            "algorithm: got lg_fed_avg",
        ),
    ],
)
def test_mistakes_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def network(dtype: Any = jnp.float64) -> Model:
    return mlp(D, C, (5,), "erf", dtype=dtype)


def federation(dtype: Any = jnp.float64) -> FederatedData:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, D)), rng.standard_normal((30, C))
    return data.federated_data(x, y, partition.quantity_skew(30, 4, 2.0, 0, min_client_size=2), dtype=dtype)


def ensemble(model: Model, recipe: Any = algorithms.fed_ensemble) -> Algorithm:
    plan = schedule.per_client_permutations(4, 2)
    return recipe(model, plan, client_learning_rate=0.2, work=Work(steps=3, batch_size=None))


def watch(model: Model | None = None, recipe: Any = algorithms.fed_ensemble, **options: Any) -> Any:
    return kernel_diagnostics(ensemble(network(), recipe), model or network(), federation(), **options)


def by_jacobian(model: Model, params: Any, x: Any) -> np.ndarray:
    leaves = jax.tree.leaves(jax.jit(jax.jacrev(model.apply))(params, x))
    jacobian = np.concatenate([np.asarray(leaf).reshape(len(x), C, -1) for leaf in leaves], axis=2)
    return np.einsum("icp,jcp->ij", jacobian, jacobian) / C


def test_a_watched_run_against_its_jacobians_and_its_own_history() -> None:
    model, held = network(), federation()
    algorithm = ensemble(model)
    assert algorithm.params is not None
    watch = kernel_diagnostics(algorithm, model, held, seed=7)
    assert watch.watched.rows.tolist() == list(range(30))
    run = simulate(algorithm, held, num_rounds=6, seed=7, evaluation=Evaluation(3, watch), devices=Devices("scan"))
    plain = simulate(algorithm, held, num_rounds=6, seed=7, evaluation=Evaluation(3), devices=Devices("scan"))
    for one, other in zip(jax.tree.leaves(run.history.rounds), jax.tree.leaves(plain.history.rounds), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(jax.tree.leaves(run.state.server), jax.tree.leaves(plain.state.server), strict=True):
        np.testing.assert_array_equal(one, other)
    before, after = (algorithm.params(s) for s in (algorithm.init(7, 4), run.state))
    first, last = run.history.evaluations[0].metrics, run.history.evaluations[-1].metrics
    assert first["drift"] == first["drift_operator_model_1"] == 0.0
    drifts = []
    for k in range(2):
        theta_0, theta = (by_jacobian(model, pytrees.take(p, k), held.x) for p in (before, after))
        np.testing.assert_allclose(watch.initial[k], theta_0, rtol=0, atol=1e-12)
        drifts.append(np.linalg.norm(theta - theta_0) / np.linalg.norm(theta_0))
        found = {name: last[f"{name}_model_{k}"] for name in METRICS}
        clients = Partition(np.asarray(held.indices), np.asarray(held.offsets))
        gram, values = measures.gram_operators(theta, clients), np.linalg.eigvalsh(theta)
        wanted = {
            "drift": drifts[-1],
            "drift_operator": np.linalg.norm(theta - theta_0, 2) / np.linalg.norm(theta_0, 2),
            "alignment": measures.alignment(theta, held.y),
            "alignment_centred": measures.alignment(theta, held.y, True),
            "largest_eigenvalue": values[-1],
            "smallest_eigenvalue": values[0],
            "condition_number": values[-1] / values[0],
            "effective_rank": measures.spectrum(theta).effective_rank,
            "trace_over_largest": np.trace(theta) / values[-1],
            "commutator": gram.mean,
            "commutator_relative": gram.relative_mean,
            "gram_variance": gram.variance,
            "gram_variance_relative": gram.relative_variance,
        }
        assert set(wanted) == set(METRICS)
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-6), name
    assert last["drift"] == pytest.approx(np.mean(drifts), rel=1e-9) and min(drifts) > 1e-3
    # negative control: the initial kernel of another seed is not this run's
    assert kernel_diagnostics(algorithm, model, held, seed=8)(algorithm, run.state)["drift"] > 1.3 * last["drift"]


def test_a_linear_model_does_not_drift_and_float32_is_measured_in_float64() -> None:
    model = rbf_linear(num_features=20, bandwidth=0.2, dtype=jnp.float32)
    x = np.linspace(-1, 1, 12)[:, None]
    held = data.federated_data(x, np.sin(3 * x), partition.iid(12, 3, 0), dtype=jnp.float32)
    algorithm = algorithms.fed_avg(
        model, schedule.all_clients(3), client_learning_rate=0.1, work=Work(steps=2, batch_size=None)
    )
    watch = kernel_diagnostics(algorithm, model, held)
    run = simulate(algorithm, held, num_rounds=3, evaluation=Evaluation(measure=watch), devices=Devices("scan"))
    assert run.history.evaluations[-1].metrics["drift"] == 0.0
    wide = np.asarray(model.kernel(jnp.asarray(np.asarray(held.x), jnp.float64), None, get="ntk"))
    np.testing.assert_allclose(watch.initial[0], wide, rtol=1e-13)
    assert set(run.history.evaluations[-1].metrics) == set(METRICS)  # one model: nothing to add


def test_a_network_that_is_not_finite_is_not_a_number() -> None:
    watching, algorithm = watch(), ensemble(network())
    state = algorithm.init(0, 4)
    broken = state._replace(server=jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), state.server))
    found = watching(algorithm, broken)
    assert found["drift_model_0"] == 0.0 and np.isnan(found["drift_model_1"]) and np.isnan(found["drift"])
    for name in METRICS:
        assert np.isnan(found[f"{name}_model_1"]), name


@pytest.mark.parametrize(("count", "expected"), [(1000, 60), (60, 60), (20, 20), (5, 5), (2, 2)])
def test_examples_come_from_every_client_in_proportion(count: int, expected: int) -> None:
    sizes = [30, 20, 0, 6, 3, 1]
    clients = clients_of(np.split(np.random.default_rng(0).permutation(60), np.cumsum(sizes)[:-1]))
    held = data.federated_data(np.arange(60.0)[:, None], np.arange(60) % 3, clients)
    found = stratified(held, 3, count, seed=1)
    assert len(found.rows) == expected and np.all(np.diff(found.rows) > 0)
    np.testing.assert_array_equal(np.asarray(found.x)[:, 0], found.rows)
    np.testing.assert_allclose(found.targets, np.eye(3)[found.rows % 3] - 1 / 3)
    for i in range(6):
        own = found.rows[found.clients.client(i)]
        assert set(own) <= set(clients.client(i))
        if count == 20:
            assert abs(len(own) - sizes[i] / 3) < 1 or len(own) == 1
    assert set(np.concatenate([found.clients.client(i) for i in range(6)])) == set(range(expected))
    again, other = stratified(held, 3, count, seed=1), stratified(held, 3, count, seed=2)
    np.testing.assert_array_equal(again.rows, found.rows)
    assert expected == 60 or again.rows.tolist() != other.rows.tolist()


def test_a_common_example_counts_for_every_client_that_holds_it() -> None:
    held = data.federated_data(np.zeros((N, 1)), np.zeros((N, 1)), clients_of(SHARED))
    found = stratified(held, 1, N, seed=0)
    for i, own in enumerate(SHARED):
        assert sorted(found.rows[found.clients.client(i)]) == sorted(set(own) & set(found.rows))


def test_a_matrix_with_negative_eigenvalues_has_no_spectrum() -> None:
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    with pytest.raises(ValueError, match=r"theta: got the eigenvalue -0\.5 \(the largest is 3\), must be at least 0"):
        measures.spectrum(turn @ np.diag([3.0, 1.0, 0.0, -0.5]) @ turn.T)
    rounded = measures.spectrum(turn @ np.diag([3.0, 1.0, 0.0, -1e-9]) @ turn.T)
    np.testing.assert_allclose(rounded.eigenvalues, [3, 1, 0, 0], atol=1e-8)
