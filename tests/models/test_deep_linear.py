"""The deep linear network: the paper's formula, its kernels at infinite and finite width, its row space."""

from __future__ import annotations

import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedtangent import simulate
from fedtangent._src import data, models
from fedtangent._src.data import partition
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.optimizers import staircase_decay

from ..nightly import nightly


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((6, 5))


@pytest.mark.parametrize("depth", nightly([1, 2, 4], [1, 4]))
def test_it_is_the_product_of_eq_1_and_its_kernels_are_exact(x, depth):
    model = models.deep_linear(5, 3, 32, depth, jnp.float64)
    params = model.init(jax.random.key(0))
    product = np.eye(5)
    for weight, _ in params[::2]:
        product = np.asarray(weight).T @ product
    expected = x @ product.T / np.sqrt(32 ** (depth - 1) * 3)
    np.testing.assert_allclose(model.apply(params, jnp.asarray(x)), expected, rtol=1e-12)
    kernels = model.kernel(jnp.asarray(x))
    np.testing.assert_allclose(kernels.nngp, x @ x.T / 3, atol=1e-12)
    np.testing.assert_allclose(kernels.ntk, depth * x @ x.T / 3, atol=1e-12)
    tree = jax.jacobian(model.apply)(params, jnp.asarray(x))
    jacobian = np.concatenate([np.asarray(leaf).reshape(18, -1) for leaf in jax.tree.leaves(tree)], axis=1)
    full = (jacobian @ jacobian.T).reshape(6, 3, 6, 3)
    np.testing.assert_allclose(empirical_ntk(model, params, jnp.asarray(x), trace=False), full, atol=1e-11)


def test_its_kernel_comes_near_the_limit_with_its_width(x):
    away = []
    for width in (32, 128, 512):
        model = models.deep_linear(5, 3, width, 3, jnp.float64)
        found = [empirical_ntk(model, model.init(jax.random.key(s)), jnp.asarray(x)) for s in range(8)]
        away.append(np.mean([np.linalg.norm(np.asarray(f) - x @ x.T) for f in found]))
    slope = np.polyfit(np.log([32, 128, 512]), np.log(away), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.2)


def test_descent_in_the_row_space_of_the_data_is_the_same_trajectory(x):
    """Inputs and first weights turned into an orthonormal basis of the rows: the same outputs after every step."""
    wide = np.concatenate([x, x @ np.random.default_rng(1).standard_normal((5, 9))], axis=1)  # rank 5 of 14
    basis = np.linalg.svd(wide, full_matrices=False)[2][:5].T
    y = np.random.default_rng(2).standard_normal((6, 3))
    whole, small = (models.deep_linear(size, 3, 16, 3, jnp.float64) for size in (14, 5))
    params = whole.init(jax.random.key(0))
    turned = [(jnp.asarray(basis).T @ params[0][0], None), *params[1:]]
    for rate, same in ((0.02, True), (0.03, False)):
        one, other = params, turned
        for _ in range(20):
            one = _step(whole, one, jnp.asarray(wide), y, 0.02)
            other = _step(small, other, jnp.asarray(wide @ basis), y, rate)
        outputs = whole.apply(one, jnp.asarray(wide)), small.apply(other, jnp.asarray(wide @ basis))
        assert np.allclose(*outputs, atol=1e-10) == same


def _step(model, params, x, y, rate):
    return jax.tree.map(lambda p, g: p - rate * g, params, _gradient(model)(params, x, y))


@functools.cache
def _gradient(model):
    return jax.jit(jax.grad(lambda params, x, y: _loss(y, model.apply(params, x))))


def _loss(y, outputs):
    return jnp.sum((outputs - y) ** 2) / 2


@pytest.mark.parametrize("depth", nightly([1, 2, 4], [4]))
def test_its_own_steps_of_descent_are_those_of_the_gradient(x, depth):
    model = models.deep_linear(5, 3, 16, depth, jnp.float64)
    y = np.random.default_rng(2).standard_normal((6, 3))
    expected, lost = model.init(jax.random.key(0)), 0.0
    start = expected
    descend, loss = jax.jit(model.descend, static_argnums=(2, 5)), partial(_loss, y)
    for steps in range(1, 13):
        lost += float(_loss(y, model.apply(expected, x)))
        expected = _step(model, expected, x, y, 0.05)
        for most in (1, 12):  # weights written after every step, and after several
            found, total = descend(start, x, loss, 0.05, jnp.int32(steps), most)
            chex.assert_trees_all_close(found, expected, rtol=1e-11)
            assert total == pytest.approx(lost, rel=1e-5)  # a float32


@pytest.mark.parametrize(
    "work", [pytest.param(Work(steps=7, batch_size=None), marks=pytest.mark.slow), Work(epochs=7, batch_size=None)]
)
def test_clients_take_its_own_steps(x, work):
    """Which gives what the gradient gives, also under a schedule; anything but plain descent takes the gradient."""
    model = models.deep_linear(5, 3, 16, 3, jnp.float64)
    plain = model._replace(structure=model.structure._replace(descend=None))
    held = data.federated_data(x, x[:, :3], partition.iid(6, 2, 0), jnp.float64)

    def built(model, recipe=algorithms.fed_avg, **given):
        own = {"client_learning_rate": 0.05, "work": work, "loss": "squared_error_sum", **given}
        return recipe(model, schedule.all_clients(2), **own)

    def trained(model, **given):
        algorithm = built(model, **given)
        return algorithm.params(simulate(algorithm, held, num_rounds=2).state)

    def traced(algorithm):  # what a run would compile
        state = algorithm.init(0, 2)
        return jax.eval_shape(lambda state: algorithm.step(state, held, engine_for(held, "scan"))[0], state)

    for given in ({}, {"client_learning_rate": staircase_decay(0.05, 0.5, 1)}):
        chex.assert_trees_all_close(trained(model, **given), trained(plain, **given), rtol=1e-11)
    refuse = model._replace(structure=model.structure._replace(descend=lambda *_: {}["taken"]))
    with pytest.raises(KeyError, match="taken"):
        traced(built(refuse))
    momentum = {"client_learning_rate": None, "client_optimizer": optax.sgd(0.05, momentum=0.5)}
    traced(built(refuse, **momentum))
    traced(built(refuse, work=work._replace(batch_size=2)))
    for recipe, own in ((algorithms.fed_prox, {"mu": 0.1}), (algorithms.scaffold, {})):
        traced(built(refuse, recipe, **own))  # which add to the gradient


@pytest.mark.parametrize("options", [{"depth": 0}, {"width": 0}, {"output_size": 0}, {"input_size": -1}])
def test_sizes_below_one_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: got"):
        models.deep_linear(**{"input_size": 5, "output_size": 3, **options})
