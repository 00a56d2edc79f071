"""FedAvg's CNN, the adapter it is built on, the choice of its convolution, and logistic regression."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import pytrees, timings
from fedtangent._src.models import build, choose_convolution, cnn, convolutional, from_flax, logistic

from ..drawn import parameters


class Published(nn.Module):
    """The network as it is usually written: relu before the pooling, flax's own layers."""

    @nn.compact
    def __call__(self, x):
        for size in (3, 4):
            x = nn.max_pool(nn.relu(nn.Conv(size, (5, 5))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(6)(x.reshape((x.shape[0], -1))))
        return nn.Dense(5)(x)


def test_fedavgs_number_of_parameters():
    assert pytrees.size(jax.eval_shape(cnn(convolution="gemm").init, jax.random.key(0))) == 1_663_370


@pytest.mark.parametrize("convolution", ["lax", "gemm"])
def test_same_function_and_gradient_as_the_usual_network(convolution):
    model = cnn((8, 8, 2), 5, filters=(3, 4), hidden=(6,), convolution=convolution)
    params = parameters(model, scale=0.3)
    x = jax.random.normal(jax.random.key(1), (3, 8, 8, 2), jnp.float32)

    def usual(params, x):
        return Published().apply({"params": params}, x)

    def gradients(apply):
        return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(apply(p, x)))))(params)

    apply, expected = jax.jit(model.apply), jax.jit(usual)(params, x)
    np.testing.assert_allclose(apply(params, x.reshape((3, -1))), expected, rtol=0, atol=2e-6)
    ours, theirs = gradients(model.apply), gradients(usual)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    # negative control: a turned kernel
    turned = {**params, "Conv_0": {**params["Conv_0"], "kernel": np.flip(params["Conv_0"]["kernel"], (0, 1))}}
    assert np.abs(np.asarray(apply(turned, x.reshape((3, -1)))) - expected).max() > 0.01


def test_clients_with_their_own_parameters_at_once():
    model = cnn((4, 4, 1), 3, filters=(2,), hidden=(), window=3, convolution="gemm")
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parameters(model, k, 0.3) for k in range(3)))
    x = jax.random.normal(jax.random.key(1), (3, 2, 4, 4), jnp.float32)
    gradient = jax.grad(lambda p, x: jnp.sum(jnp.sin(model.apply(p, x))))
    together = jax.jit(jax.vmap(gradient))(params, x)
    apart = jax.jit(lambda p, x: jax.lax.map(lambda row: gradient(*row), (p, x)))(params, x)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("lax", "gemm"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_choice_is_followed(monkeypatch, lax, gemm):
    monkeypatch.setattr(timings, "cached", lambda question, measure, names: {"lax": lax, "gemm": gemm})
    assert choose_convolution((8, 8, 2), 4, 3) == ("gemm" if gemm < lax else "lax")


@pytest.mark.parametrize("mapping", ["scan", "vmap"])
def test_the_choice_is_measured(mapping):
    seen = convolutional._measure((4, 4, 2), 2, 3, mapping)
    assert set(seen) == {"lax", "gemm"} and min(seen.values()) > 0


def test_auto_is_one_of_the_two(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path))
    model = cnn((4, 4), 3, filters=(2,), hidden=(), window=3)
    assert jax.eval_shape(model.apply, parameters(model), jnp.zeros((2, 16))).shape == (2, 3)


BAD = {
    "input_shape": (lambda: cnn((28,), 10), "input_shape"),
    "too small": (lambda: cnn((3, 3, 1), 10), "must be at least 4 high"),
    "filters": (lambda: cnn(filters=()), "filters"),
    "convolution": (lambda: cnn(convolution="fft"), "allowed are auto, lax, gemm"),
    "x": (lambda: cnn(convolution="lax").apply({"w": jnp.zeros(1)}, jnp.zeros((2, 10))), "examples of"),
    "state": (lambda: from_flax(nn.BatchNorm(use_running_average=False), jnp.zeros((2, 3)), 3), "batch_stats"),
    "output": (lambda: from_flax(nn.Dense(4), jnp.zeros((2, 3)), 3), r"\(2, 4\)"),
    "by name": (lambda: build("cnn", 100, 10), "input_shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_flax_network_of_ones_own():
    model = from_flax(nn.Dense(3), jnp.zeros((1, 4), jnp.float32), 3)
    params = parameters(model)
    x = jax.random.normal(jax.random.key(1), (5, 4), jnp.float32)
    np.testing.assert_allclose(model.apply(params, x), x @ params["kernel"] + params["bias"][None], atol=1e-6)
    assert (model.name, model.kernel, model.output_size) == ("Dense", None, 3)


def test_by_name():
    small = build("cnn", (8, 8, 1), 10, filters=(2, 3), hidden=(), convolution="lax")
    assert jax.eval_shape(small.apply, parameters(small), jnp.zeros((2, 64))).shape == (2, 10)
    assert build("lstm", 20, 30, units=4).name == "lstm(30, 8, 2x4)"
    assert build("logistic", 4, 3).output_size == 3


def test_logistic_regression_and_its_kernel():
    model = logistic(4, 3, dtype=jnp.float64)
    x = jax.random.normal(jax.random.key(0), (5, 4))
    params = jax.jit(model.init)(jax.random.key(0))
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(model.kernel(x, get="ntk"), x @ x.T + 1, rtol=1e-12)
    labels = jax.nn.one_hot(jnp.arange(5) % 3, 3)
    gradient = jax.jit(jax.grad(lambda p: -jnp.sum(labels * jax.nn.log_softmax(model.apply(p, x)))))
    weight, bias = gradient(params)[0]
    np.testing.assert_allclose(weight, x.T @ (1 / 3 - labels), atol=1e-12)
    np.testing.assert_allclose(bias[0], jnp.sum(1 / 3 - labels, axis=0), atol=1e-12)
    assert float(jnp.abs(logistic(4, 3, zero_init=False).init(jax.random.key(0))[0][0]).max()) > 0.1


def test_pixels_of_unsigned_numbers_are_real_numbers() -> None:
    """A module with dropout, which has no meaning for whole numbers, is made from images as they are stored."""

    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dropout(0.5, deterministic=True)(x)
            return nn.Dense(4)(x.reshape(len(x), -1))

    pixels = np.zeros((1, 3, 3, 1), np.uint8)
    model = from_flax(Dropped(), pixels, 4)
    params = model.init(jax.random.key(0))
    assert model.apply(params, jnp.ones((2, 3, 3, 1), jnp.float32)).dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
