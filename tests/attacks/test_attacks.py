"""Attacks: what is seen, what is read in closed form, what a search finds, what the switches hide, and misuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import signal

from fedtangent import attacks
from fedtangent._src import data, models
from fedtangent._src.attacks import leakage
from fedtangent._src.attacks.leakage import Attack, Batch, minimise
from fedtangent._src.attacks.observation import Observed
from fedtangent._src.data.dataset import projection_matrix
from fedtangent._src.types import Model, PyTree

from ..drawn import parameters
from ..nightly import nightly

SIDE, IMAGES = 8, 6
SEARCHED = 3  # of them, by lenets of as many outputs
SEARCH = Attack(num_steps=60)


class Case(NamedTuple):
    """Digits, a network and its weights, and the Jacobians and gradients that clients send."""

    model: Model
    params: PyTree
    x: jax.Array  # [m, 8, 8, 1]
    y: jax.Array
    jacobians: Observed
    gradients: Observed


def digits() -> tuple[jax.Array, jax.Array]:
    held = data.load("digits", seed=0, dtype="float32", flatten=False)
    rows = [int(np.flatnonzero(held.y_test == c)[0]) for c in range(IMAGES)]  # of one class each: they differ
    return jnp.asarray(held.x_test[rows]), jnp.asarray(held.y_test[rows])


def gradients_of(model: Model, params: PyTree, x: jax.Array, y: jax.Array) -> Observed:
    given = np.asarray(x), np.asarray(y)
    each = [attacks.gradient(model, params, *(part[i : i + 1] for part in given)) for i in range(len(y))]
    return Observed(*(jnp.asarray(np.concatenate(parts)) for parts in zip(*each, strict=True)))


def case(model: Model, seed: int, count: int) -> Case:
    x, y = (part[:count] for part in digits())
    params = jax.jit(model.init)(jax.random.key(seed))
    return Case(model, params, x, y, attacks.jacobians(model, params, x), gradients_of(model, params, x, y))


@pytest.fixture(scope="module")
def lenet() -> Case:
    return case(attacks.lenet((SIDE, SIDE, 1), SEARCHED), 0, SEARCHED)


@pytest.fixture(scope="module")
def ten_outputs() -> Case:
    return case(attacks.lenet((SIDE, SIDE, 1)), 0, IMAGES)


@pytest.fixture(scope="module")
def dense() -> Case:
    return case(models.mlp(SIDE**2, 10, (40,), "relu", "standard", b_std=0.0), 1, IMAGES)


def score(found: Any, originals: Any) -> np.ndarray:
    shown = np.clip(np.asarray(found), 0, 1).reshape(-1, SIDE, SIDE)
    return attacks.ssim(shown, np.asarray(originals).reshape(-1, SIDE, SIDE))


# ---- what is seen ----


def test_jacobians_and_gradients_against_finite_differences() -> None:
    model = attacks.lenet((5, 6, 2), 3, dtype=jnp.float64)
    params = parameters(model, scale=0.3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, 6, 2)), np.array([2, 0])
    flat, unravel = ravel_pytree(params)
    way, step = rng.normal(size=flat.size), 1e-5

    def loss(outputs: np.ndarray) -> float:
        return float(np.mean(np.log(np.exp(outputs).sum(axis=1)) - outputs[[0, 1], y]))

    outputs = jax.jit(lambda w: model.apply(unravel(w), x))
    ahead, behind = (np.asarray(outputs(flat + s * step * way)) for s in (1, -1))
    seen = attacks.jacobians(model, params, jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(seen.values) @ way, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-9)
    whole = attacks.gradient(model, params, jnp.asarray(x), jnp.asarray(y))
    slope = (loss(ahead) - loss(behind)) / (2 * step)
    np.testing.assert_allclose(whole.values[0] @ way, slope, rtol=1e-7)
    assert seen.kept.all() and seen.values.shape == (2, 3, flat.size) and whole.values.shape == (1, flat.size)


def test_lenet_against_scipy(lenet: Case) -> None:
    h = np.asarray(lenet.x, np.float64)[0]
    for (weight, bias), stride in zip(lenet.params[:-1], (2, 2, 1), strict=True):
        kernel = np.asarray(weight, np.float64)
        planes = [
            sum(signal.correlate2d(h[..., i], kernel[..., i, o], "same") for i in range(h.shape[-1]))
            for o in range(kernel.shape[-1])
        ]
        h = 1 / (1 + np.exp(-(np.stack(planes, -1)[::stride, ::stride] + np.asarray(bias))))
    expected = h.ravel() @ np.asarray(lenet.params[-1][0]) + np.asarray(lenet.params[-1][1])
    found = jax.jit(lenet.model.apply)(lenet.params, lenet.x)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_sparsify_keeps_the_largest_of_each_message() -> None:
    values = np.random.default_rng(3).normal(size=(3, 4, 25))
    seen = attacks.sparsify(Observed(jnp.asarray(values), jnp.ones(values.shape, bool)), 0.9)
    for before, after, kept in zip(values, *(np.asarray(part) for part in seen), strict=True):
        least = np.sort(np.abs(before).ravel())[-10]
        np.testing.assert_array_equal(kept, np.abs(before) >= least)
        np.testing.assert_array_equal(after, before * kept)
    # exactly as what is sent: equals of the last one are kept all, and where few are above zero, all are known
    ties = Observed(jnp.asarray([[3.0, 1.0, -1.0, 1.0, 0.5], [2.0, 0.0, 0.0, 0.0, 0.0]]), jnp.ones((2, 5), bool))
    kept = [[True, True, True, True, False], [True] * 5]
    np.testing.assert_array_equal(attacks.sparsify(ties, 0.6).kept, kept)


# ---- similarity ----


def ssim_by_hand(a: np.ndarray, b: np.ndarray, window: int) -> float:
    """Wang et al. (2004), eq. 13, uniform windows, sample variances."""
    pieces = [np.lib.stride_tricks.sliding_window_view(v, (window, window)).reshape(-1, window**2) for v in (a, b)]
    (m, n), c1, c2 = (p.mean(axis=1) for p in pieces), 0.01**2, 0.03**2
    s, t = (p.var(axis=1, ddof=1) for p in pieces)
    both = ((pieces[0] - m[:, None]) * (pieces[1] - n[:, None])).sum(axis=1) / (window**2 - 1)
    return float(np.mean((2 * m * n + c1) * (2 * both + c2) / ((m**2 + n**2 + c1) * (s + t + c2))))


def test_ssim_against_its_formula() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.uniform(size=(2, 2, SIDE, SIDE))
    for given, window in ((None, 3), (5, 5)):
        found = attacks.ssim(a, b, window=given)
        np.testing.assert_allclose(found, [ssim_by_hand(*pair, window) for pair in zip(a, b, strict=True)], rtol=1e-10)
    np.testing.assert_allclose(attacks.ssim(a, a), 1.0)
    assert (attacks.ssim(a, 1 - a) < -0.5).all()


# ---- the minimiser ----


def valley(point: jax.Array) -> jax.Array:
    return 100 * (point[1] - point[0] ** 2) ** 2 + (1 - point[0]) ** 2


def test_the_minimiser_finds_rosenbrocks_minimum_and_stops() -> None:
    attack = Attack(num_steps=200, tolerance=1e-16)
    found = jax.jit(partial(minimise, valley, attack=attack))(jnp.array([-1.2, 1.0]))
    np.testing.assert_allclose(found.point, [1, 1], atol=1e-6)
    assert found.steps < 60 and (np.diff(found.history) <= 0).all()
    assert found.history[0] == pytest.approx(24.2) and found.history[-1] == found.value == pytest.approx(
        float(valley(found.point))
    )


def test_adam_and_values_that_are_not_finite() -> None:
    run = partial(minimise, attack=Attack("adam", 400, 0.05, tolerance=1e-12))
    found = jax.jit(lambda p: run(lambda q: jnp.sum((q - 2.0) ** 2), p))(jnp.zeros(3))
    np.testing.assert_allclose(found.point, 2.0, atol=1e-3)
    lost = jax.jit(lambda p: run(lambda q: jnp.sum(q) * jnp.nan, p))(jnp.zeros(3))
    assert np.isinf(lost.value) and (lost.point == 0).all()


# ---- deep leakage ----


def test_a_jacobian_gives_the_image_and_another_images_does_not(lenet: Case) -> None:
    find = partial(attacks.from_jacobians, lenet.model, lenet.params, shape=(SIDE, SIDE, 1), key=jax.random.key(5))
    whole = find(messages=lenet.jacobians, attack=SEARCH)
    assert whole.finite.all() and (score(whole.x, lenet.x) > 0.9).all() and (whole.mismatch < 1e-6).all()
    assert score(whole.x, np.roll(lenet.x, 1, axis=0)).max() < 0.6
    untrained = np.asarray(jax.random.normal(jax.random.key(5), lenet.x.shape))
    assert score(untrained, lenet.x).max() < 0.4


@pytest.mark.slow
def test_jacobians_in_another_order_give_the_images_in_that_order(lenet: Case) -> None:
    others = jax.tree.map(partial(jnp.roll, shift=1, axis=0), lenet.jacobians)
    find = partial(attacks.from_jacobians, lenet.model, lenet.params, shape=(SIDE, SIDE, 1), key=jax.random.key(5))
    wrong = find(messages=others, attack=SEARCH)
    assert score(wrong.x, lenet.x).max() < 0.6
    assert (score(wrong.x, jnp.roll(lenet.x, 1, axis=0)) > 0.9).all()


@pytest.mark.parametrize(("more", "less"), nightly([(0.95, 0.8), (0.8, 0.5)], [0.95]))
def test_sparsity_blurs_a_search_that_compares_zeros_and_not_one_that_does_not(
    lenet: Case, more: float, less: float
) -> None:
    find = partial(attacks.from_jacobians, lenet.model, lenet.params, shape=(SIDE, SIDE, 1), key=jax.random.key(5))
    sparse = {s: attacks.sparsify(lenet.jacobians, s) for s in (more, less)}
    found = {s: score(find(messages=seen, attack=SEARCH).x, lenet.x) for s, seen in sparse.items()}
    gain = found[less] - found[more]
    assert gain.mean() > 3 * gain.std(ddof=1) / SEARCHED**0.5 > 0
    kept = score(find(messages=sparse[0.8], attack=dataclasses.replace(SEARCH, compare="kept")).x, lenet.x)
    assert (kept > 0.99).all() and kept.min() > found[0.8].mean()


def leak_of(lenet: Case, seen: Observed) -> leakage.Leak:
    """What is found from gradients, the better of two starts."""
    attack = dataclasses.replace(SEARCH, num_restarts=2)
    return attacks.from_gradients(lenet.model, lenet.params, seen, (SIDE, SIDE, 1), jax.random.key(6), attack)


def test_a_gradient_gives_image_and_label(lenet: Case) -> None:
    leak = leak_of(lenet, lenet.gradients)
    assert leak.x.shape == (SEARCHED, 1, SIDE, SIDE, 1) and leak.history.shape == (SEARCHED, 61)
    assert (score(leak.x, lenet.x) > 0.9).all()
    assert leak.labels is not None
    np.testing.assert_array_equal(leak.labels[:, 0].argmax(axis=-1), lenet.y)
    np.testing.assert_allclose(leak.labels.sum(axis=-1), 1, rtol=1e-5)
    assert score(leak.x, jnp.roll(lenet.x, 1, axis=0)).max() < 0.6


@pytest.mark.slow
def test_sparsity_blurs_what_a_gradient_gives(lenet: Case) -> None:
    """By day the Jacobians tell it."""
    leak, sparse = (leak_of(lenet, seen) for seen in (lenet.gradients, attacks.sparsify(lenet.gradients, 0.9)))
    loss = score(leak.x, lenet.x) - score(sparse.x, lenet.x)
    assert loss.mean() > 3 * loss.std(ddof=1) / SEARCHED**0.5


@pytest.mark.slow
def test_a_gradient_of_a_batch_of_two_gives_both_images(lenet: Case) -> None:
    seen = attacks.gradient(lenet.model, lenet.params, lenet.x[:2], lenet.y[:2])
    labels = jax.nn.one_hot(lenet.y[:2], SEARCHED)[None]
    leak = attacks.from_gradients(
        lenet.model,
        lenet.params,
        seen,
        (SIDE, SIDE, 1),
        jax.random.key(7),
        Attack(num_steps=500),
        Batch(2, labels=labels),
    )
    assert (score(leak.x, lenet.x[:2]) > 0.9).all()  # labels given in order


@pytest.mark.slow
def test_outputs_help_where_few_entries_are_left(ten_outputs: Case) -> None:
    lenet = ten_outputs
    seen = attacks.sparsify(lenet.jacobians, 0.995)
    outputs = lenet.model.apply(lenet.params, lenet.x)
    find = partial(attacks.from_jacobians, lenet.model, lenet.params, seen, (SIDE, SIDE, 1), jax.random.key(8))
    attack = Attack(num_steps=300, compare="kept")
    gain = score(find(attack, outputs=outputs).x, lenet.x) - score(find(attack).x, lenet.x)
    assert gain.mean() > -2 * gain.std(ddof=1) / IMAGES**0.5
    wrong = score(find(attack, outputs=jnp.roll(outputs, 1, axis=0)).x, lenet.x)
    assert (score(find(attack, outputs=outputs).x, lenet.x) - wrong).mean() > 0


@pytest.mark.slow
def test_relu_is_harder_to_search_than_the_sigmoid(ten_outputs: Case) -> None:
    lenet = ten_outputs
    model = attacks.lenet((SIDE, SIDE, 1), activation="relu")
    seen = gradients_of(model, lenet.params, lenet.x, lenet.y)
    leak = attacks.from_gradients(model, lenet.params, seen, (SIDE, SIDE, 1), jax.random.key(6), Attack(num_steps=200))
    smooth = attacks.from_gradients(
        lenet.model,
        lenet.params,
        lenet.gradients,
        (SIDE, SIDE, 1),
        jax.random.key(6),
        Attack(num_steps=200),
    )
    apart = score(smooth.x, lenet.x) - score(leak.x, lenet.x)
    assert apart.mean() > 3 * apart.std(ddof=1) / IMAGES**0.5


# ---- in closed form ----


def test_a_dense_first_layer_tells_its_input(dense: Case) -> None:
    flat = np.asarray(dense.x).reshape(IMAGES, -1)
    for seen in (dense.jacobians, dense.gradients):
        found = attacks.read_first_layer(dense.model, dense.params, seen)
        np.testing.assert_allclose(found, flat, atol=2e-5)
    scaled = models.mlp(SIDE**2, 10, (40,), "erf", b_std=0.3)  # with NTK scales
    params = parameters(scaled)
    seen = attacks.sparsify(attacks.jacobians(scaled, params, dense.x), 0.8)
    found = np.asarray(attacks.read_first_layer(scaled, params, seen, fill=-1.0))
    read = found != -1.0
    np.testing.assert_allclose(found[read], flat[read], atol=1e-4)
    assert 0.2 < read.mean() < 1.0


def test_sparsity_hides_little_from_the_closed_form_and_a_batch_mixes(dense: Case) -> None:
    flat = np.asarray(dense.x).reshape(IMAGES, -1)
    found = np.asarray(attacks.read_first_layer(dense.model, dense.params, attacks.sparsify(dense.jacobians, 0.9)))
    assert score(found, flat).mean() > 0.9
    mixed = attacks.gradient(dense.model, dense.params, dense.x, dense.y)
    one = np.asarray(attacks.read_first_layer(dense.model, dense.params, mixed))
    assert score(np.repeat(one, IMAGES, axis=0), flat).mean() < 0.6


# ---- the other switches ----


def test_shuffled_rows_tell_images_but_not_whose(dense: Case) -> None:
    order = np.roll(np.arange(IMAGES), 2)
    seen = attacks.shuffle_rows(dense.jacobians, jnp.asarray(order))
    found = attacks.read_first_layer(dense.model, dense.params, seen)
    assert score(found, dense.x[order]).min() > 0.999
    assert score(found, dense.x).max() < 0.7


def test_shuffled_weights_hide_the_image_until_a_client_colludes(dense: Case) -> None:
    size = dense.jacobians.values.shape[-1]
    order = np.random.default_rng(5).permutation(size)
    hidden = attacks.shuffle_weights(dense.jacobians, jnp.asarray(order))
    kernels = [np.einsum("icp,jcp->ij", part.values, part.values) for part in (dense.jacobians, hidden)]
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-4)  # what the server needs is what it was
    theirs = jax.tree.map(lambda leaf: leaf[:2], hidden)
    assert score(attacks.read_first_layer(dense.model, dense.params, theirs), dense.x[:2]).max() < 0.5
    known = np.asarray(dense.jacobians.values[2:])
    found = attacks.order_from_known(known, np.asarray(hidden.values[2:]))
    np.testing.assert_array_equal(known[..., found], np.asarray(hidden.values[2:]))
    back = attacks.shuffle_weights(theirs, jnp.asarray(np.argsort(found)))
    assert score(attacks.read_first_layer(dense.model, dense.params, back), dense.x[:2]).min() > 0.8
    with pytest.raises(ValueError, match="must be the columns of known in another order"):
        attacks.order_from_known(known, np.asarray(dense.jacobians.values[1:-1]))


def test_a_projection_goes_back_with_its_own_matrix_only(dense: Case) -> None:
    flat = np.asarray(dense.x).reshape(IMAGES, -1)
    own, other = (projection_matrix(SIDE**2, 40, seed, "none", np.float32) for seed in (1, 2))
    back = attacks.back_project(jnp.asarray(flat @ own), jnp.asarray(own))
    np.testing.assert_allclose(back, flat @ own @ np.linalg.pinv(own.astype(float)), atol=1e-4)
    wrong = attacks.back_project(jnp.asarray(flat @ own), jnp.asarray(other))
    assert score(back, flat).mean() > score(wrong, flat).mean() + 0.3


# ---- misuse ----


def _fail(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in parts), text


def test_mistakes_are_named(lenet: Case, dense: Case) -> None:
    key, shape = jax.random.key(0), (SIDE, SIDE, 1)
    gradients = partial(attacks.from_gradients, lenet.model, lenet.params, key=key)
    jacobians = partial(attacks.from_jacobians, lenet.model, lenet.params, key=key)
    _fail(lambda: attacks.sparsify(lenet.jacobians, 1.0), "sparsity", "1.0")
    _fail(lambda: attacks.sparsify(lenet.jacobians, float("nan")), "sparsity", "nan")
    _fail(lambda: Attack(optimizer="sgd"), "optimizer", "sgd", "lbfgs, adam")
    _fail(lambda: Attack(compare="some"), "compare", "all, kept")
    _fail(lambda: Attack(num_restarts=0), "num_restarts", "0")
    _fail(lambda: Attack(learning_rate=0.0), "learning_rate", "0.0")
    _fail(lambda: jacobians(messages=lenet.gradients, shape=shape), "messages", f"[m, {SEARCHED},")
    _fail(lambda: gradients(messages=lenet.jacobians, shape=shape), "messages", "[m, ")
    _fail(lambda: jacobians(messages=lenet.jacobians, shape=(7, 7, 1)), "shape", "(7, 7, 1)")
    _fail(lambda: jacobians(messages=lenet.jacobians, shape=shape, outputs=jnp.zeros((2, 4))), "outputs", "(2, 4)")
    _fail(lambda: Batch(loss="hinge"), "loss", "hinge")
    _fail(lambda: Batch(0), "size", "0")
    wrong = Batch(labels=jnp.zeros((1, 1, 10)))
    _fail(lambda: gradients(messages=lenet.gradients, shape=shape, batch=wrong), "labels", "(1, 1, 10)")
    _fail(lambda: attacks.read_first_layer(lenet.model, lenet.params, lenet.jacobians), "model", "dense")
    _fail(lambda: attacks.read_first_layer(dense.model, dense.params, lenet.jacobians), "messages", "[m, C,")
    _fail(lambda: attacks.lenet((8, 8)), "input_shape", "(8, 8)", "(H, W, channels)")
    _fail(lambda: attacks.gradient(lenet.model, lenet.params, lenet.x[:3], lenet.y[:2]), "y", "2 targets, must be 3")
    _fail(lambda: attacks.lenet((8, 8, 1), activation="tanh"), "activation", "sigmoid, relu")
    _fail(lambda: attacks.ssim(np.zeros((1, 8, 8)), np.zeros((1, 8, 7))), "images", "(1, 8, 7)")
    _fail(lambda: attacks.ssim(np.zeros((1, 8, 8)), np.zeros((1, 8, 8)), window=4), "window", "4")
    _fail(lambda: attacks.ssim(np.zeros((1, 8, 8)), np.zeros((1, 8, 8)), data_range=0), "data_range", "0")
    _fail(lambda: attacks.back_project(jnp.zeros((2, 3)), jnp.zeros((3, 4))), "z", "(3, 4)")


@pytest.mark.parametrize("unit", [2.0**-80, 2.0**80])
def test_gradients_of_another_unit_tell_as_much(dense: Case, unit: float) -> None:
    seen = dense.gradients._replace(values=unit * dense.gradients.values)
    found = attacks.read_first_layer(dense.model, dense.params, seen)
    np.testing.assert_allclose(found, np.asarray(dense.x).reshape(IMAGES, -1), atol=2e-5)
    one, other = dense.gradients.values[:2]
    weight = jnp.ones_like(one)
    mismatch = leakage._relative(one, other, weight)
    assert float(leakage._relative(unit * one, unit * other, weight)) == pytest.approx(float(mismatch), rel=1e-6)
    assert float(mismatch) > 0.1
