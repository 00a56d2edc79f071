"""The runs that NTK-FL's theory is compared with, against plain NumPy: descents, rounds of FedAvg and of NTK-FL."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.comparison.theorems.ntk_fl.evolution import (
    Start,
    TwoLayerProblem,
    descents,
    fed_avg_run,
    initial,
    movement,
)
from fedtangent._src.experiments.lab import two_layer
from fedtangent._src.experiments.lab.two_layer import several_rounds
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.two_layer import output_signs, two_layer_relu

from .two_layer_reference import Network, descend, descend_linear, fed_avg_round, sphere

WIDTH, NUM, DIM, CLIENTS = 24, 8, 20, 2


def task() -> TwoLayerProblem:
    return two_layer._problem("sphere", None, NUM, CLIENTS, 0)


def start(dim: int, key) -> tuple[Start, Network]:
    model = two_layer_relu(dim, WIDTH, dtype=jnp.float64)
    params = jax.jit(lambda k: initial(model, k))(key)
    begun = Start(model, key, params, np.zeros((0, 0)), np.zeros(0))
    return begun, Network(np.asarray(params["v"]), output_signs(WIDTH, 0))


def test_problem():
    found = task()
    np.testing.assert_allclose(np.linalg.norm(found.x, axis=1), 1)
    assert found.x.shape == (NUM, DIM) and set(found.y) == {-1.0, 1.0}
    assert [len(found.partition.client(m)) for m in range(CLIENTS)] == [4, 4]
    assert np.all(np.diff(found.y[found.partition.indices]) <= 0)  # by class
    digits = two_layer._problem("digits", None, 20, 4, 1)
    assert digits.x.min() >= 0 and not np.array_equal(digits.x, two_layer._problem("digits", None, 20, 4, 2).x)
    with pytest.raises(ValueError, match="num_examples: got 7, must be a multiple of num_clients, 2"):
        two_layer._problem("sphere", None, 7, 2, 0)


def test_descents_are_plain_loops():
    (model, _, params, *_), net = start(5, jax.random.key(1))
    x, eta, steps = sphere(2, NUM, 5), 3.0, 30
    y = np.random.default_rng(3).standard_normal(NUM)
    found = descents(model, params, x, y[:, None], eta, steps, watch=movement)
    real, straight = descend(net, x, y, eta, steps), descend_linear(net, x, y, eta, steps)
    j = net.jacobian(x)
    linear = np.array([net.outputs(x) + j @ (p.v - net.v).ravel() - y for p in straight])
    residual = np.array([p.outputs(x) - y for p in real])
    np.testing.assert_allclose(found.network, np.sum(residual**2, axis=1), rtol=1e-9)
    np.testing.assert_allclose(found.linear, np.sum(linear**2, axis=1), rtol=1e-9)
    np.testing.assert_allclose(found.tangent, [np.sum((p.outputs(x) - y) ** 2) for p in straight], rtol=1e-9)
    np.testing.assert_allclose(found.largest, np.abs(residual).max(axis=1), rtol=1e-9)
    gap = [np.abs(a.v - b.v).sum() for a, b in zip(real, straight, strict=True)]
    np.testing.assert_allclose(found.gap, gap, rtol=1e-9, atol=1e-13)
    summed = np.concatenate([np.zeros((1, NUM)), np.cumsum(residual - linear, axis=0)[:-1]])
    np.testing.assert_allclose(found.apart, np.abs(summed).sum(axis=1), rtol=1e-9, atol=1e-13)
    moved = [np.linalg.norm(p.v - net.v, axis=1).max() for p in real]
    np.testing.assert_allclose(found.watched["moved"], moved, rtol=1e-9, atol=1e-13)
    assert abs(found.tangent[-1] / found.network[-1] - 1) > 0.01 and found.gap[-1] > 0.1  # the two differ


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["averaged", "exact"])
def test_descent_of_several_outputs_by_the_whole_jacobian(kernel):
    model = mlp(4, 3, (6,), parameterization="standard", b_std=0.0, dtype=jnp.float64)
    params = jax.jit(model.init)(jax.random.key(0))
    x, y = sphere(4, 5, 4), np.random.default_rng(5).standard_normal((5, 3))
    leaves, shape = jax.tree.flatten(params)
    j = jax.jit(jax.jacrev(lambda p: model.apply(p, jnp.asarray(x))))(params)
    flat = np.concatenate([np.asarray(leaf).reshape(5, 3, -1) for leaf in jax.tree.leaves(j)], axis=2)  # [n, C, P]
    full = np.einsum("iap,jbp->iajb", flat, flat).reshape(15, 15)
    averaged = np.einsum("iap,jap->ij", flat, flat) / 3
    matrix = full if kernel == "exact" else np.kron(averaged, np.eye(3))
    eta, steps = 2.0, 20
    first = np.asarray(jax.jit(model.apply)(params, jnp.asarray(x))) - y
    residual, dual = first.reshape(15), np.zeros(15)
    for _ in range(steps):
        dual = dual - eta / 15 * residual
        residual = first.reshape(15) + matrix @ dual
    change = np.split(flat.reshape(15, -1).T @ dual, np.cumsum([leaf.size for leaf in leaves])[:-1])
    moved = [leaf + c.reshape(leaf.shape) for leaf, c in zip(leaves, change, strict=True)]
    at = np.asarray(jax.jit(model.apply)(jax.tree.unflatten(shape, moved), jnp.asarray(x))) - y
    found = descents(model, params, x, y, eta, steps, kernel)
    assert found.linear[-1] == pytest.approx(np.sum(residual**2), rel=1e-9)
    assert found.tangent[-1] == pytest.approx(np.sum(at**2), rel=1e-9)
    assert np.linalg.norm(full - np.kron(averaged, np.eye(3))) > 0.1 * np.linalg.norm(full)  # the two kernels differ
    with pytest.raises(ValueError, match="kernel: got 'best', allowed are exact, averaged"):
        descents(model, params, x, y, eta, steps, "best")


def test_the_recipe_of_fed_avg_takes_the_step_of_58():
    given, eta, steps, rounds = task(), 4.0, 3, 5
    begun, net = start(DIM, jax.random.key(4))
    at, found, sent = fed_avg_run(given, begun, eta, steps, rounds, 1)
    nets = [net]
    for _ in range(rounds):
        clients = [given.partition.client(m) for m in range(CLIENTS)]
        nets.append(fed_avg_round(nets[-1], given.x, given.y, clients, eta, steps).server)
    np.testing.assert_array_equal(at, np.arange(rounds + 1))
    np.testing.assert_allclose(found, [np.sum((n.outputs(given.x) - given.y) ** 2) for n in nets], rtol=1e-9)
    assert sent == rounds * CLIENTS * WIDTH * DIM * 8


@pytest.mark.slow
def test_rounds_of_ntk_fl_are_descents_of_the_linearised_network():
    given, eta, times = task(), 6.0, (5, 20)
    begun, net = start(DIM, jax.random.key(5))
    found = several_rounds(given, begun, eta, times, 2)
    for k in range(2):
        path = descend_linear(net, given.x, given.y, eta, times[-1])
        squared = [np.sum((path[t].outputs(given.x) - given.y) ** 2) for t in times]
        np.testing.assert_allclose(found.candidates[k], squared, rtol=1e-8)
        assert found.before[k] == pytest.approx(np.sum((net.outputs(given.x) - given.y) ** 2), rel=1e-9)
        assert found.time[k] == times[int(np.argmin(squared))] and found.after[k] == pytest.approx(min(squared))
        least = np.linalg.eigvalsh(net.jacobian(given.x) @ net.jacobian(given.x).T)[0]
        assert found.lambda_min[k] == pytest.approx(least, rel=1e-6)
        assert found.bound[k] == pytest.approx((1 - eta * least / (2 * NUM)) ** found.time[k], rel=1e-8)
        net = path[found.time[k]]
