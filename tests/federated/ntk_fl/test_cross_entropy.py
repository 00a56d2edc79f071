"""NTK-FL's evolution under the cross entropy is gradient descent on the linearised network, loss -1/N sum y log p."""

from __future__ import annotations

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.data import partition
from fedtangent._src.engine import Evaluation, simulate
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve, sparse_linearise
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp

from ...drawn import parameters
from ...nightly import nightly
from ..toys import flat
from .descent import jacobian_of, linearised_descent, outputs_of

RATE, STEPS, N, C = 0.3, 60, 11, 3
RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(N, 4)), RNG.integers(0, C, N)
ONE_HOT = np.eye(C)[LABELS]
EVERY_ROW = np.ones(N, bool)


@functools.cache
def network():
    return mlp(4, C, (12,), "relu", dtype=jnp.float64)


def softmax(f: np.ndarray) -> np.ndarray:
    power = np.exp(f - f.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


def cross_entropy(f: np.ndarray, y: np.ndarray) -> float:
    return float(-np.sum(y * np.log(softmax(f))) / len(y))


def evolve(y=LABELS, times=(STEPS,), x=X, mask=EVERY_ROW, rate=RATE, validation=None, **modes):
    model = network()
    params = parameters(model)
    given = Examples(*map(jnp.asarray, (x, y, mask)))
    new, info = ntk_evolve(model, params, given, rate, Evolution(times, loss="cross_entropy", **modes), validation)
    return model, params, new, info


def jacobian(model, params) -> np.ndarray:
    return jacobian_of(model, params, X)


def descend(model, params, steps: int, scale: float = N, predict=softmax) -> np.ndarray:
    """In NumPy, on the explicit linearisation."""
    j, start = jacobian(model, params), outputs_of(model, params, X)
    change = np.zeros(j.shape[1])
    for _ in range(steps):
        f = start + (j @ change).reshape(N, C)
        change = change - RATE / scale * j.T @ (predict(f) - ONE_HOT).ravel()
    return flat(params) + change


def test_weights_equal_descent_on_the_linearised_network():
    model, params, new, info = evolve(kernel="exact")
    expected = descend(model, params, STEPS)
    moved = np.linalg.norm(expected - flat(params))
    assert np.linalg.norm(flat(new) - expected) < 1e-12 * moved
    assert int(info["products"]) == STEPS
    for wrong in (
        descend(model, params, STEPS, scale=N * C),  # averaged over outputs, as the squared error is
        descend(model, params, STEPS, predict=lambda f: f),  # the squared error's residual
        descend(model, params, STEPS + 1),
    ):
        assert np.linalg.norm(wrong - expected) > 1e-3 * moved
    taken = linearised_descent(model, params, jnp.asarray(X), jnp.asarray(ONE_HOT), STEPS, RATE, "cross_entropy")
    np.testing.assert_allclose(flat(taken), expected, rtol=0, atol=1e-12 * moved)


def test_averaged_kernel_moves_every_output_by_itself():
    model, params, new, _ = evolve(kernel="averaged")
    kernel, start = np.asarray(jax.jit(lambda p: empirical_ntk(model, p, X))(params)), outputs_of(model, params, X)
    dual = np.zeros((N, C))
    for _ in range(STEPS):
        dual = dual + RATE / N * (ONE_HOT - softmax(start + kernel @ dual))
    expected = flat(params) + jacobian(model, params).T @ dual.ravel()
    moved = np.linalg.norm(expected - flat(params))
    assert np.linalg.norm(flat(new) - expected) < 1e-12 * moved
    assert np.linalg.norm(flat(evolve(kernel="exact")[2]) - expected) > 1e-2 * moved


def test_the_time_is_chosen_by_the_network_s_cross_entropy():
    times, unseen = (2, 20, 60, 400, 2000), jnp.asarray(X[::-1])
    model, params, _, info = evolve(times=times, kernel="exact", validation=(unseen, LABELS))
    unflatten = jax.flatten_util.ravel_pytree(params)[1]
    outputs = [outputs_of(model, unflatten(jnp.asarray(descend(model, params, t))), unseen) for t in times]
    losses = [cross_entropy(f, ONE_HOT) for f in outputs]
    np.testing.assert_allclose(info["losses"], losses, rtol=1e-10)
    assert times[int(np.argmin(losses))] == int(info["time"])
    assert not np.allclose(info["losses"], [np.mean((f - ONE_HOT) ** 2) / 2 for f in outputs], rtol=1e-2)
    np.testing.assert_allclose(info["loss_before"], cross_entropy(outputs_of(model, params, unseen), ONE_HOT))


@pytest.mark.parametrize("kernel", nightly(["averaged", "exact"], ["exact"]))
def test_padding_does_not_count_and_labels_are_one_hot_targets(kernel):
    alone = evolve(kernel=kernel)
    padded = evolve(
        x=np.concatenate([X, np.full((3, 4), np.nan)]), y=np.concatenate([LABELS, [99, -1, 0]]),
        mask=np.concatenate([EVERY_ROW, np.zeros(3, bool)]), kernel=kernel,
    )  # fmt: skip
    for other in (padded, evolve(y=ONE_HOT, kernel=kernel)):
        np.testing.assert_allclose(flat(other[2]), flat(alone[2]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(other[3]["losses"], alone[3]["losses"], rtol=1e-12)


def test_largest_stable_rate_is_that_of_the_largest_curvature():
    model, params, _, info = evolve(kernel="exact", unstable="clip", rate=1e9)
    j = jacobian(model, params)
    largest = np.linalg.eigvalsh(j @ j.T)[-1]
    np.testing.assert_allclose(info["stable_learning_rate"], 4 * N / largest, rtol=1e-8)
    np.testing.assert_allclose(info["learning_rate"], 0.9 * 4 * N / largest, rtol=1e-8)
    with pytest.raises(ValueError, match=r"learning_rate: got .* 4 N / lambda_max of the exact kernel of these 11"):
        evolve(kernel="exact", rate=5 * N / largest)
    assert int(info["status"]) == 0


def test_descent_at_the_largest_stable_rate_never_rises_and_beyond_it_may():
    """On two examples whose softmax sits at its largest curvature, 1/2: outputs equal, two classes."""
    kernel, y = np.array([[1.0]]), np.array([[0.5, 0.5]])

    def last(rate: float) -> float:
        """Distance from the minimum after many steps, from 1e-3 away."""
        f = np.array([[1e-3, -1e-3]])
        for _ in range(200):
            f = f - rate * kernel @ (softmax(f) - y)
        return float(np.abs(f).max())

    assert last(0.99 * 4) < 1e-3 < last(1.01 * 4)


def test_confident_rows_are_no_nan():
    """log(softmax) of outputs 2000 apart is minus infinity where the target is 0."""
    model = network()
    params = jax.tree.map(lambda leaf: 300 * leaf, parameters(model))
    given = Examples(*map(jnp.asarray, (X, LABELS, EVERY_ROW)))
    outputs = outputs_of(model, params, X)
    assert np.ptp(outputs, axis=1).max() > 2000
    _, info = ntk_evolve(model, params, given, 1e-6, Evolution((1, 2), loss="cross_entropy"))
    assert np.all(np.isfinite(info["losses"]))
    assert np.isfinite(info["loss_before"])


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (ONE_HOT - 1 / C, {}, "y: got rows that are no probabilities, must be"),
        (LABELS + 1, {}, r"y: got .* must be from 0 to 2"),
        (LABELS - 1, {}, r"y: got .* must be from 0 to 2"),
        (LABELS[:5], {}, "y and mask"),
        (LABELS, {"validation": (X, LABELS + 1)}, r"validation: got .* must be from 0 to 2"),
    ],
)  # fmt: skip
def test_bad_input(y, options, message):
    with pytest.raises(ValueError, match=message):
        evolve(y=y, **options)


def test_a_federated_run_on_class_labels():
    """One round with every client is the evolution of all examples; the ledger charges outputs and targets."""
    clients = partition.iid(N, 3, seed=0)
    federated = data.federated_data(X, LABELS, clients, dtype=jnp.float64)
    model = network()
    algorithm = algorithms.ntk_fl(
        model,
        schedule.all_clients(3),
        learning_rate=RATE,
        evolution=Evolution(times=(STEPS,), kernel="exact"),
        loss="cross_entropy",
    )
    seen: list = []

    def look(algorithm, state):
        seen.append(jax.tree.map(lambda leaf: np.array(leaf[0]), algorithm.params(state)))
        return {}

    simulate(algorithm, federated, num_rounds=1, seed=0, evaluation=Evaluation(1, look))
    start, end = seen
    expected = descend(model, start, STEPS)
    assert np.linalg.norm(flat(end) - expected) < 1e-10 * np.linalg.norm(expected - flat(start))
    assert np.linalg.norm(descend(model, start, STEPS - 1) - expected) > 1e-3 * np.linalg.norm(expected - flat(start))


def test_a_run_validated_on_class_labels_and_refused_with_wrong_ones():
    clients, model = partition.iid(N, 3, seed=0), network()
    federated = data.federated_data(X, LABELS, clients, dtype=jnp.float64)
    times = (5, 50, 500)
    options = {"learning_rate": RATE, "evolution": Evolution(times, loss="cross_entropy")}
    held = jnp.asarray(X[:4]), jnp.asarray(LABELS[:4])
    algorithm = algorithms.ntk_fl(model, schedule.all_clients(3), pooling=Pooling(validation=held), **options)
    run = simulate(algorithm, federated, num_rounds=1, seed=0)
    losses = np.asarray(run.history.rounds["losses"]).ravel()
    assert np.asarray(run.history.rounds["time"]).item() == times[int(np.argmin(losses))]
    with pytest.raises(ValueError, match=r"validation: got .* must be from 0 to 2"):
        algorithms.ntk_fl(model, schedule.all_clients(3), pooling=Pooling(validation=(held[0], held[1] + 3)), **options)


def test_centred_targets_are_refused_before_a_run():
    clients, model = partition.iid(N, 3, seed=0), network()
    algorithm = algorithms.ntk_fl(
        model, schedule.all_clients(3), learning_rate=RATE, evolution=Evolution(times=(5,)), loss="cross_entropy"
    )
    centred = data.federated_data(X, ONE_HOT - 1 / C, clients, dtype=jnp.float64)
    with pytest.raises(ValueError, match="data: targets: got rows that are no probabilities, must be"):
        simulate(algorithm, centred, num_rounds=1, seed=0)


@pytest.mark.parametrize("mask", [np.ones(N), np.ones(N, int), 2 * np.ones(N, int)])
def test_a_mask_of_numbers_is_one_of_truths(mask):
    wrong = LABELS.copy()
    wrong[5] = 9
    with pytest.raises(ValueError, match=r"y: got .* must be from 0 to 2"):
        evolve(y=wrong, mask=mask)
    rows = ONE_HOT.copy()
    rows[5] = 7, -3, 9
    with pytest.raises(ValueError, match="y: got rows that are no probabilities, must be"):
        evolve(y=rows, mask=mask)


def test_one_output_has_no_cross_entropy():
    model = mlp(4, 1, (3,), "relu", dtype=jnp.float64)
    given = Examples(*map(jnp.asarray, (X, 0 * LABELS, EVERY_ROW)))
    with pytest.raises(ValueError, match="loss: 'cross_entropy' needs a model with at least 2 outputs, but it has 1"):
        ntk_evolve(model, parameters(model), given, RATE, Evolution((1,), loss="cross_entropy"))


def test_sparsified_jacobians_under_the_whole_kernel_are_the_passes():
    """Where the kernel of remade Jacobians is held it gives what push and pull give."""
    linearise = sparse_linearise(0.9, dtype=jnp.float64)
    held = evolve(kernel="exact", linearise=linearise)
    passes = evolve(kernel="exact", linearise=linearise, kernel_bytes=0)
    np.testing.assert_allclose(flat(held[2]), flat(passes[2]), rtol=0, atol=1e-12)
    assert np.abs(flat(held[2]) - flat(evolve(kernel="exact")[2])).max() > 1e-4
