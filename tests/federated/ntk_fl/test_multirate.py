"""The cross entropy's descent by few products with the kernel is the descent, at every time and every stable step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedtangent._src.federated.ntk_fl import Evolution, Examples, multirate, ntk_evolve
from fedtangent._src.federated.ntk_fl.multirate import Nodes, extrapolated, leading_factor, multirate_dual
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp

from ...drawn import parameters
from ...nightly import nightly

N, C = 160, 10
TIMES = (1, 30, 100, 101, 600)
TOLERANCE = 5e-9  # of the dual's norm


def softmax(f: np.ndarray) -> np.ndarray:
    power = np.exp(f - f.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True)


def descend(kernel, outputs, y, step: float, times=TIMES) -> np.ndarray:
    """NumPy's loop: the dual after each number of steps."""
    dual, found = np.zeros_like(outputs), []
    for t in range(1, max(times) + 1):
        dual = dual + step * (y - softmax(outputs + (kernel @ dual.ravel().reshape(len(kernel), -1)).reshape(y.shape)))
        if t in times:
            found.append(dual)
    return np.stack(found)


@functools.cache
def digits():
    """A network on 160 digits, its averaged kernel, outputs and targets."""
    loaded, model = load_digits(), mlp(64, C, (40,), "relu", dtype=jnp.float64)
    x, y = 2 * loaded.data[:N] / 16 - 1, np.eye(C)[loaded.target[:N]]
    params = parameters(model)
    kernel, outputs = jax.jit(lambda p: (empirical_ntk(model, p, x), model.apply(p, x)))(params)
    return model, params, x, np.asarray(kernel), np.asarray(outputs), y


@functools.cache
def compiled(times=TIMES, useless: bool = False):
    """The descent by few products, with the kernel's own factor, or with none."""

    def evolve(kernel, outputs, y, step):
        def product(g):
            return (kernel @ g.reshape((len(kernel), -1))).reshape(g.shape)

        factor, _ = leading_factor(product, outputs.shape, len(kernel))
        factor = 0 * factor if useless else factor
        return multirate_dual(product, lambda moved: y - jax.nn.softmax(outputs + moved), outputs, step, times, factor)

    return jax.jit(evolve)


def largest_step(kernel) -> float:
    return 4 / float(np.linalg.eigvalsh(kernel)[-1])


def worst(found, expected) -> float:
    """The largest relative distance of a time's dual."""
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(np.asarray(found), expected, strict=True))


@pytest.mark.parametrize("share", [0.02, 0.9, 1.0])
def test_it_is_the_descent_at_every_time(share):
    _, _, _, kernel, outputs, y = digits()
    step = share * largest_step(kernel)
    dual, products = compiled()(kernel, outputs, y, step)
    assert int(products) < TIMES[-1] / 2
    expected = descend(kernel, outputs, y, step)
    assert worst(dual, expected) < TOLERANCE
    later = tuple(t + 1 for t in TIMES)
    for wrong in (descend(kernel, outputs, y, 1.001 * step), descend(kernel, outputs, y, step, later)):
        assert worst(dual, wrong) > 1e-4


@pytest.mark.parametrize("number", nightly([1, 4], [4]))
def test_there_may_be_fewer_examples_than_outputs(number):
    _, _, _, kernel, outputs, y = digits()
    kernel, outputs, y = kernel[:number, :number], outputs[:number], y[:number]
    step = 0.9 * largest_step(kernel)
    dual, products = compiled()(kernel, outputs, y, step)
    assert int(products) < TIMES[-1] / 2
    assert worst(dual, descend(kernel, outputs, y, step)) < TOLERANCE
    assert worst(dual, descend(kernel, outputs, y, 1.001 * step)) > 1e-5


def test_descent_and_not_its_flow():
    """Half the step for twice as many, which is nearer to the flow, is another place."""
    _, _, _, kernel, outputs, y = digits()
    step = 0.9 * largest_step(kernel)
    dual, _ = compiled()(kernel, outputs, y, step)
    assert worst(dual, descend(kernel, outputs, y, step / 2, tuple(2 * t for t in TIMES))) > 1e-3


def test_a_swing_from_step_to_step_is_seen():
    """Two classes with outputs near zero, where the largest stable step swings, and no factor that takes the swing."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(40, 60))
    kernel, outputs, y = half @ half.T, 1e-3 * rng.normal(size=(40, 2)), np.full((40, 2), 0.5)
    step = largest_step(kernel)
    for useless in (False, True):
        dual, _ = compiled(TIMES, useless)(kernel, outputs, y, step)
        expected = descend(kernel, outputs, y, step)
        assert np.abs(kernel @ (np.asarray(dual) - expected)).max() < 10 * multirate.SLOW_TOLERANCE
        assert np.abs(kernel @ expected[-1]).max() > 1e-4


def test_stretches_that_were_too_long_are_taken_again(monkeypatch):
    """However boldly the next is chosen; where more error is let pass the result is another one."""
    _, _, _, kernel, outputs, y = digits()
    step = 0.9 * largest_step(kernel)
    expected = descend(kernel, outputs, y, step)
    monkeypatch.setattr(multirate, "CAUTION", 4.0)
    assert worst(compiled.__wrapped__()(kernel, outputs, y, step)[0], expected) < TOLERANCE
    monkeypatch.setattr(multirate, "SLOW_TOLERANCE", 1e-1)
    assert worst(compiled.__wrapped__()(kernel, outputs, y, step)[0], expected) > 1e-6


def test_the_polynomial_goes_through_what_counts():
    def value(t):
        return 3.0 - t + 0.1 * t**2 + 0.02 * t**3

    times = jnp.asarray([9.0, 7.0, 4.0, 0.0, 0.0, 0.0])
    values = jnp.where(jnp.arange(6) < 4, value(times), jnp.nan_to_num(jnp.inf))[:, None, None] * jnp.ones((1, 2, 3))
    at = jax.jit(extrapolated)
    found = at(Nodes(times, values, jnp.int32(4)), jnp.asarray(12.0))
    np.testing.assert_allclose(found, np.full((2, 3), value(12.0)), rtol=1e-12)
    fewer = at(Nodes(times, values, jnp.int32(3)), jnp.asarray(12.0))
    assert np.abs(fewer - value(12.0)).min() > 0.1


def test_the_factor_leaves_little_of_the_kernel():
    _, _, _, kernel, _, _ = digits()
    leading = jax.jit(lambda matrix: leading_factor(lambda g: matrix @ g, (N, C), N))
    factor, products = leading(kernel)
    rest = np.linalg.eigvalsh(kernel - np.asarray(factor @ factor.T))
    sorted_ = np.linalg.eigvalsh(kernel)[::-1]
    assert factor.shape == (N, 10) and products == 2
    assert -1e-10 * sorted_[0] < rest[0] and sorted_[10] * (1 - 1e-9) < rest[-1] < 3 * sorted_[10]
    none, _ = leading(0 * kernel)
    assert not np.any(none)


@pytest.mark.parametrize("kernel", nightly(["averaged", "exact"], ["averaged"]))
def test_a_round_is_that_of_the_steps(kernel):
    """Weights, losses and the time that is chosen, by examples that the server holds; padding does not count."""
    model, params, x, _, _, y = digits()
    given = Examples(jnp.asarray(x), jnp.asarray(y), jnp.arange(N) < N - 3)
    held = jnp.asarray(x[-40:]), jnp.asarray(y[-40:])
    results = {
        method: ntk_evolve(
            model, params, given, 1e9,
            Evolution((5, 50, 300), kernel, method, loss="cross_entropy", unstable="clip"), held,
        )
        for method in ("iterate", "multirate")
    }  # fmt: skip
    (steps, by_steps), (fast, by_fast) = results["iterate"], results["multirate"]
    for a, b, start in zip(*map(jax.tree.leaves, (fast, steps, params)), strict=True):
        assert np.linalg.norm(a - b) < TOLERANCE * np.linalg.norm(b - start)
    np.testing.assert_allclose(by_fast["losses"], by_steps["losses"], rtol=TOLERANCE)
    assert int(by_fast["time"]) == int(by_steps["time"]) > 0
    assert int(by_steps["products"]) == 300 != int(by_fast["products"]) > 0


def test_steps_that_may_diverge_are_taken_themselves():
    model, params, x, kernel, _, y = digits()
    given = Examples(jnp.asarray(x), jnp.asarray(y), jnp.ones(N, bool))
    rate = 1.5 * N * largest_step(kernel)
    evolution = Evolution((5, 40), method="multirate", loss="cross_entropy", unstable="allow")
    assert int(ntk_evolve(model, params, given, rate, evolution)[1]["products"]) == 40


def test_where_it_is_not_active_nothing_is_computed():
    dual, products = multirate_dual(
        lambda g: g, lambda moved: 1 - moved, jnp.ones((4, 2)), 0.1, (3, 9), jnp.ones((4, 1)), False
    )
    assert int(products) == 0 and not np.any(dual)
