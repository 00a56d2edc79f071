"""TCT's features and its second phase: beside the empirical kernel, finite differences, and the authors' loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.kernels.tangent_features import BLOCK

from ..documents import run

NETWORK, ONE = (ft.models.mlp(4, c, widths=(8, 8), dtype=jnp.float64) for c in (3, 1))
STEPS, RATE, ROUNDS = 7, 0.05, 4


def examples(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 4))


def test_all_features_have_the_empirical_kernel() -> None:
    """More examples than a block; the kernel is computed layer by layer, without gradients of weights."""
    weights, x = ONE.init(jax.random.key(3)), examples(BLOCK + 5)
    phi = ft.kernels.tangent_features(ONE, weights, x)
    kernel = ft.kernels.empirical_ntk(ONE, weights, x)
    assert phi.dtype == jnp.float64
    np.testing.assert_allclose(phi @ phi.T, kernel, rtol=0, atol=1e-12 * float(jnp.max(kernel)))
    other = ft.kernels.empirical_ntk(ONE, ONE.init(jax.random.key(4)), x)
    assert float(jnp.max(jnp.abs(other - kernel))) > 1e-3 * float(jnp.max(kernel))  # control


def test_features_are_derivatives_and_the_trained_layers_are_kept() -> None:
    trained, x = NETWORK.init(jax.random.key(3)), examples(5)
    phi = np.asarray(ft.kernels.tangent_features(ONE, trained, x, seed=2))
    last = ONE.init(jax.random.split(jax.random.key(2))[0])[-1]
    leaves, structure = jax.tree.flatten([*trained[:-1], last])
    flat, sizes = np.concatenate([np.ravel(leaf) for leaf in leaves]), [leaf.size for leaf in leaves]

    def outputs(vector: np.ndarray) -> np.ndarray:
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return np.asarray(ONE.apply(jax.tree.unflatten(structure, shaped), jnp.asarray(x)))[:, 0]

    step = 1e-6
    changes = [(outputs(flat + step * e) - outputs(flat - step * e)) / (2 * step) for e in np.eye(len(flat))]
    np.testing.assert_allclose(phi, np.stack(changes, axis=1), atol=1e-8)  # rounding 1e-16 / step
    other = np.asarray(ft.kernels.tangent_features(ONE, trained, x, seed=3))
    assert np.max(np.abs(other - phi)) > 1e-2  # another last layer


def test_the_sample_is_without_replacement_and_the_same_for_all_examples() -> None:
    trained, x = NETWORK.init(jax.random.key(3)), examples(6)
    every = np.asarray(ft.kernels.tangent_features(ONE, trained, x, seed=1))
    some = np.asarray(ft.kernels.tangent_features(ONE, trained, x, num_features=40, seed=1))
    distances = np.abs(some[:, :, None] - every[:, None, :]).max(axis=0)  # [40, P]
    moving = np.ptp(some, axis=0) > 0  # columns of dead units and of the bias may be equal
    at = distances[moving].argmin(axis=1)
    assert distances[moving].min(axis=1).max() == 0 and len(set(at)) == len(at) > 10
    halves = [ft.kernels.tangent_features(ONE, trained, part, 40, 1) for part in (x[:2], x[2:])]
    np.testing.assert_allclose(np.concatenate(halves), some, atol=1e-14)
    assert not np.array_equal(at, np.sort(at))


def authors_loop(
    phi: np.ndarray, y: np.ndarray, clients: list[np.ndarray], rate: float, rounds: int = ROUNDS
) -> np.ndarray:
    """The second phase as in github.com/yaodongyu/TCT (``scaffold_update``): weights [p, C]."""
    server = np.zeros((phi.shape[1], y.shape[1]))
    trained = [server.copy() for _ in clients]
    corrections = [server.copy() for _ in clients]
    for _ in range(rounds):
        for i, rows in enumerate(clients):
            corrections[i] = corrections[i] + (server - trained[i]) / (STEPS * rate)
            w = server.copy()
            for _ in range(STEPS):
                gradient = phi[rows].T @ (phi[rows] @ w - y[rows]) / len(rows)
                w = w - rate * (gradient - corrections[i])
            trained[i] = w
        server = np.mean(trained, axis=0)
    return server


def second_phase() -> tuple[tuple[np.ndarray, ...], list[np.ndarray]]:
    """Features and labels, on three clients of different sizes and classes."""
    trained, x = NETWORK.init(jax.random.key(3)), examples(30)
    labels = np.argmax(x[:, :3], axis=1)
    phi = np.asarray(ft.kernels.tangent_features(ONE, trained, x, num_features=50, seed=1))
    order = np.argsort(labels[:20], kind="stable")
    return (phi[:20], labels[:20], phi[20:], labels[20:]), [order[:5], order[5:11], order[11:]]


def scaffold(rate: float) -> ft.types.Algorithm:
    model = ft.models.linear(50, 3, dtype=jnp.float64)
    work = ft.Work(steps=STEPS, batch_size=None)
    return ft.scaffold(model, ft.schedules.all_clients(3), rate, work, loss="squared_error")


def test_scaffold_on_the_features_is_the_authors_loop() -> None:
    data, clients = second_phase()
    targets = np.eye(3)[data[1]] - 1 / 3
    federated = ft.data.federated_data(data[0], targets, clients, jnp.float64)
    trained = ft.simulate(scaffold(RATE), federated, num_rounds=ROUNDS, evaluation=ft.Evaluation(progress=False))
    weights = np.asarray(scaffold(RATE).params(trained.state)["weights"][0])
    by_hand = authors_loop(data[0], targets, clients, RATE)
    size = np.max(np.abs(by_hand))
    assert np.max(np.abs(weights - by_hand)) < 1e-12 * size
    wrong = {
        "rate": authors_loop(data[0], targets, clients, 0.99 * RATE),
        "targets": authors_loop(data[0], np.eye(3)[data[1]], clients, RATE),
        "rounds": authors_loop(data[0], targets, clients, RATE, ROUNDS - 1),
    }
    assert all(np.max(np.abs(weights - other)) > 1e-4 * size for other in wrong.values())


def test_the_flow_follows_the_second_phase() -> None:
    """Rung 3 of theory is exact, as the model is linear: predicted and measured errors of every round agree."""
    data, clients = second_phase()
    each = ft.Evaluation(every=1, progress=False)
    simulated = ft.simulate(scaffold(RATE), data, clients, num_rounds=ROUNDS, evaluation=each)
    measured = simulated.history.curves()["test.mse"]

    def predicted(rate: float) -> np.ndarray:
        options = ft.Forecasting(draws=2, rates=False)
        theory = ft.predict(scaffold(rate), data, clients, num_rounds=ROUNDS, evaluation=each, forecasting=options)
        return theory.given.mean("test", "mse")

    np.testing.assert_allclose(predicted(RATE), measured, rtol=1e-9)
    assert np.max(np.abs(predicted(0.99 * RATE) / measured - 1)) > 1e-6  # control


@pytest.mark.slow
def test_the_example_of_the_guide() -> None:
    """Labels become one-hot targets less 1 / C, and the flow follows every round of the second phase.

    By day the flow follows the second phase in the test above.
    """
    names = run("ft.kernels.tangent_features(")
    measured, predicted = names["second"].history.curves(), names["theory"].given
    np.testing.assert_allclose(predicted.mean("test", "mse"), measured["test.mse"], rtol=1e-9)
    assert measured["test.mse"][0] == pytest.approx(np.mean((np.eye(10)[0] - 0.1) ** 2), rel=1e-6)
    assert measured["test.accuracy"][-1] > 0.5 and names["theory"].rates.stable > 0.3


def test_wrong_arguments() -> None:
    trained, x = NETWORK.init(jax.random.key(0)), examples(2)
    size = 4 * 8 + 8 + 8 * 8 + 8 + 8 + 1
    with pytest.raises(ValueError, match="model: got 3 outputs, must be the trained network"):
        ft.kernels.tangent_features(NETWORK, trained, x)
    with pytest.raises(ValueError, match=f"num_features: got {size + 1}, must be .* {size}"):
        ft.kernels.tangent_features(ONE, trained, x, num_features=size + 1)
    with pytest.raises(ValueError, match="params: got the structure"):
        ft.kernels.tangent_features(ONE, trained[:-1], x)
    with pytest.raises(ValueError, match=r"params: got arrays of shapes .* must have a shape in common"):
        ft.kernels.tangent_features(ONE, jax.tree.map(lambda leaf: leaf[..., None], trained), x)
    with pytest.raises(ValueError, match="seed"):
        ft.kernels.tangent_features(ONE, trained, x, seed=-1)
