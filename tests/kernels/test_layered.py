"""Flax networks: the kernel from their layers is the contraction of the Jacobian, whatever else the network does."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels import layered
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import build, cnn, from_flax

from ..drawn import parameters
from ..nightly import nightly

RNG = np.random.default_rng(0)
C = 3
Dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
Conv = functools.partial(nn.Conv, param_dtype=jnp.float64)


class Residual(nn.Module):
    """Strides, dilation, explicit padding, a normalisation with weights of its own and a skip connection."""

    @nn.compact
    def __call__(self, x):
        x = Conv(2, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.GroupNorm(1, param_dtype=jnp.float64)(x))
        skip = Conv(3, (1, 1), strides=(2, 2))(y)
        y = Conv(3, (3, 2), strides=2, padding=((1, 1), (0, 1)), kernel_dilation=(1, 1))(y)
        y = skip + Conv(3, (3, 2), kernel_dilation=2)(nn.relu(y))
        return Dense(C)(nn.avg_pool(y, (2, 2), (2, 2)).mean((1, 2)))


class Shared(nn.Module):
    """A dense layer at every position, used twice; a one-dimensional convolution used at two sizes."""

    @nn.compact
    def __call__(self, x):
        dense, convolution = Dense(5), Conv(5, (3,))
        h = jnp.sin(dense(jnp.tanh(dense(x))))
        h = h + convolution(h) + convolution(nn.relu(h[:, :2])).sum(1, keepdims=True)
        return Dense(C)(h.reshape((h.shape[0], -1)))


class Tied(nn.Module):
    """The first layer's weights serve once more, turned, and outside any layer; one matrix is no layer's."""

    @nn.compact
    def __call__(self, x):
        first, second = Dense(4), Dense(4)
        h = second(jnp.tanh(first(x)))
        h = jnp.tanh(h @ first.get_variable("params", "kernel").T)
        own = self.param("own", nn.initializers.normal(1.0), (4, 2), jnp.float64)
        return Dense(C)(jnp.concatenate([h, jnp.sin(h @ own)], axis=1))


class Cell(nn.Module):
    """What ``nn.scan`` repeats."""

    @nn.compact
    def __call__(self, carry, _):
        return jnp.tanh(Dense(4)(carry)), None


class Lifted(nn.Module):
    """Layers inside transformations that flax lifts."""

    @nn.compact
    def __call__(self, x):
        h = nn.jit(nn.Dense)(4, param_dtype=jnp.float64)(jnp.tanh(nn.remat(nn.Dense)(4, param_dtype=jnp.float64)(x)))
        h, _ = nn.scan(Cell, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()(h, None)
        return Dense(C)(h)


SHAPES = {Residual: (5, 6, 2), Shared: (4, 5), Tied: (4,), Lifted: (4,)}


def flax_model(network, shape):
    return from_flax(network(), jax.ShapeDtypeStruct((1, *shape), jnp.float64), C)


def double_params(model):
    """Parameters with no zeros among them, biases included."""
    return jax.tree.map(jnp.float64, parameters(model, 1, 0.5))


def jacobians(model, params, x) -> list[np.ndarray]:
    """[n, C, parameters] of every leaf."""
    leaves = jax.tree.leaves(jax.jit(jax.jacrev(model.apply))(params, x))
    return [np.asarray(leaf).reshape((x.shape[0], C, -1)) for leaf in leaves]


def contract(j1: list[np.ndarray], j2: list[np.ndarray]) -> np.ndarray:
    return sum(np.einsum("ikp,jmp->ikjm", a, b) for a, b in zip(j1, j2, strict=True))


def mean_over_outputs(kernel: np.ndarray) -> np.ndarray:
    return np.einsum("ikjk->ij", kernel) / C


def assert_close(actual, expected, tolerance=1e-10):
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < tolerance * np.abs(expected).max()


@pytest.fixture(scope="module")
def convolutional():
    model = cnn((5, 5, 2), C, filters=(2, 3), hidden=(4,), window=3, convolution="lax")
    x1, x2 = RNG.normal(size=(5, 50)), RNG.normal(size=(3, 50))
    params = double_params(model)
    return model, params, x1, x2, jacobians(model, params, np.concatenate([x1, x2]))


@pytest.mark.parametrize("by_gradients", nightly([True, False], [True]))
def test_the_convolutional_network(convolutional, monkeypatch, by_gradients):
    """Both orders of contraction; odd blocks of a symmetric kernel, and a rectangular one."""
    model, params, x1, x2, every = convolutional
    j1, j2 = [j[:5] for j in every], [j[5:] for j in every]
    monkeypatch.setattr(layered, "_prefers_gradients", lambda layer, *_: by_gradients and layer.positions > 1)

    @jax.jit
    def kernels(params, x1, x2):
        return empirical_ntk(model, params, x1, trace=False, block_size=2), empirical_ntk(model, params, x1, x2)

    whole, mean = kernels(params, x1, x2)
    assert_close(whole, contract(j1, j1))
    assert_close(mean, mean_over_outputs(contract(j1, j2)))
    # negative control: without any one leaf, a kernel or a bias
    for i in range(len(every)):
        wrong = contract([j for k, j in enumerate(j1) if k != i], [j for k, j in enumerate(j2) if k != i])
        difference = np.abs(np.asarray(mean) - mean_over_outputs(wrong)).max()
        assert difference > 1e-4 * np.abs(wrong).max()


COUNTED = {
    Residual: {"Conv_0", "Conv_1", "Conv_2", "Conv_3", "Dense_0"},
    Shared: {"Dense_0", "Conv_0", "Dense_1"},
    Tied: {"Dense_1", "Dense_2"},
    Lifted: {"Dense_0"},
}


@pytest.mark.parametrize("network", nightly(COUNTED, [Tied]))
def test_only_layers_that_own_their_weights_are_counted(network):
    model = flax_model(network, SHAPES[network])
    params = jax.eval_shape(model.init, jax.random.key(0))
    plan = model.structure.plan(params, jax.ShapeDtypeStruct((2, *SHAPES[network]), jnp.float64))
    assert {call.path[-1] for call in plan.calls} == COUNTED[network]
    owned = [leaf.size for path in COUNTED[network] for leaf in jax.tree.leaves(params[path])]
    assert plan.num_others == sum(leaf.size for leaf in jax.tree.leaves(params)) - sum(owned)


@pytest.mark.parametrize("network", nightly([Residual, Shared], [Shared]))
def test_networks_of_ones_own(network):
    """By day of layers that are used twice; strides, skips and normalisation are those of the network below."""
    model = flax_model(network, SHAPES[network])
    params, x = double_params(model), RNG.normal(size=(4, *SHAPES[network]))
    every = jacobians(model, params, x)
    mean = jax.jit(lambda p, x: empirical_ntk(model, p, x))(params, x)
    assert_close(mean, mean_over_outputs(contract(every, every)))
    # negative control: without the first layer
    assert np.abs(np.asarray(mean) - mean_over_outputs(contract(every[1:], every[1:]))).max() > 1e-3


def test_the_whole_kernel_with_weights_outside_layers():
    model = flax_model(Tied, (4,))
    params, x = double_params(model), RNG.normal(size=(4, 4))
    every = jacobians(model, params, x)
    whole = jax.jit(lambda p, x: empirical_ntk(model, p, x[:3], x[1:], trace=False))(params, x)
    assert_close(whole, contract([j[:3] for j in every], [j[1:] for j in every]))
    # negative control: the layer whose weights serve twice, by its calls alone
    alone = contract([j[:3] for j in every[2:]], [j[1:] for j in every[2:]])
    assert np.abs(np.asarray(whole) - alone).max() > 1e-3 * np.abs(alone).max()


NETWORKS = {  # strides, skips, depthwise convolutions, normalisation, half the channels, cells
    "mobilenet_v2": ((4, 4, 1), {"width": 0.1, "blocks": (1,)}, "Conv_1"),
    "lstm": ((5,), {"units": 5, "embedding": 2}, "layer_0"),
    "resnet18": ((8, 8, 1), {"width": 2, "blocks": (1, 1), "convolution": "gemm"}, "Conv_0"),
    "mobilenet_v2 of more blocks": ((8, 8, 1), {"width": 0.1, "blocks": (1, 2)}, "Block_2"),
    "shufflenet_v2": ((8, 8, 1), {"width": 0.5, "blocks": (2,)}, "Reducing_0"),
}


@pytest.mark.parametrize("name", nightly(NETWORKS, ["mobilenet_v2"]))
def test_every_network(name):
    shape, options, layer = NETWORKS[name]
    of_text = name == "lstm"
    model = build(name.split()[0], shape, C, **options)
    x = RNG.integers(0, C, (4, *shape)) if of_text else RNG.normal(size=(4, *shape))
    params = double_params(model)
    with_paths = jax.tree.leaves_with_path(params)
    every = jacobians(model, params, x)

    @jax.jit
    def kernels(params, x):
        return empirical_ntk(model, params, x[:3], x[1:]), empirical_ntk(model, params, x, trace=False)

    mean, whole = kernels(params, x)
    assert_close(whole, contract(every, every))
    assert_close(mean, mean_over_outputs(contract([j[:3] for j in every], [j[1:] for j in every])))
    # negative controls: without one layer; without what is no layer's (scales, shifts, depthwise kernels, embeddings)
    plan = model.structure.plan(params, x)
    assert 0 < plan.num_others < sum(leaf.size for _, leaf in with_paths)
    in_one = {i for i, (path, _) in enumerate(with_paths) if path[0].key == layer}
    for missing in (in_one, set(plan.others)):
        kept = [j for i, j in enumerate(every) if i not in missing]
        assert len(kept) < len(every)
        wrong = contract(kept, kept)
        # resnet18's first layer is 6e-5 to 2e-4 of the kernel over 12 seeds
        assert np.abs(np.asarray(whole) - wrong).max() > 1e-5 * np.abs(wrong).max()


@pytest.mark.slow
def test_the_published_network_is_built_from_its_layers():
    """MobileNetV2 has more than 65,536 weights outside layers, fewer than its layers have outputs."""
    model = build("mobilenet_v2", (32, 32, 3), 10)
    params = jax.eval_shape(model.init, jax.random.key(0))
    plan = model.structure.plan(params, jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32))
    assert layered.MOST_OTHERS < plan.num_others == 98_336 and layered.is_layered(plan)
    assert not layered.is_layered(plan._replace(num_others=10**6))


def wide(width):
    class Wide(nn.Module):
        """Most weights are no layer's."""

        @nn.compact
        def __call__(self, x):
            own = self.param("own", nn.initializers.normal(1.0), (4, width), jnp.float64)
            return Dense(C)(jnp.tanh(x @ own))

    return Wide


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: Dense(4, dtype=jnp.bfloat16)(x).astype(x.dtype),
        lambda x: Conv(4, (2,), feature_group_count=2)(x),
        lambda x: Dense(4)(inputs=x),
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in (
                lambda x: Dense(4, dot_general=lambda *a, **k: 2 * jax.lax.dot_general(*a, **k))(x),
                lambda x: Conv(4, (2,), padding="CIRCULAR")(x),
                lambda x: Conv(4, (2,), padding=1, input_dilation=2)(x),
                lambda x: Conv(4, (2,), mask=jnp.ones((2, 4, 4)))(x),
            )
        ),
    ],
)
def test_layers_of_another_kind_are_not_counted(layer):
    """By day of two dense layers and a convolution."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = layer(x)
            return Dense(C)(h.reshape((h.shape[0], -1)))

    model = flax_model(Network, (6, 4))
    params = jax.eval_shape(model.init, jax.random.key(0))
    plan = model.structure.plan(params, jax.ShapeDtypeStruct((2, 6, 4), jnp.float64))
    assert len(plan.calls) == 1 and plan.calls[0].fan_in > 4  # the last layer alone
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    layer_size = (plan.calls[0].fan_in + 1) * C
    assert plan.num_others == sum(sizes) - layer_size


@pytest.mark.parametrize(("width", "expected"), [(10, True), (layered.MOST_OTHERS, False)])
def test_many_weights_outside_layers_go_to_neural_tangents(width, expected):
    model = flax_model(wide(width), (4,))
    x = jax.ShapeDtypeStruct((2, 4), jnp.float64)
    plan = model.structure.plan(jax.eval_shape(model.init, jax.random.key(0)), x)
    assert plan.num_others == 4 * width and layered.is_layered(plan) == expected


def test_inputs_and_parameters_decide_nothing_but_the_dtype_of_the_result():
    model = cnn((5, 5, 2), C, filters=(2,), hidden=(), window=3, convolution="gemm")
    params = jax.eval_shape(model.init, jax.random.key(0))
    for x in (jax.ShapeDtypeStruct((2, 50), jnp.float64), jax.ShapeDtypeStruct((2, 5, 5, 2), jnp.uint8)):
        assert jax.eval_shape(lambda p, x: empirical_ntk(model, p, x), params, x).dtype == jnp.float32


def test_no_array_as_large_as_a_jacobian():
    """The program for n = 40 never holds n C numbers for each parameter, nor for those of its largest layer."""
    model = cnn((8, 8, 2), 10, filters=(4, 32), hidden=(64,), window=3, convolution="lax")
    params = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((40, 128), jnp.float32)
    dense = params["Dense_0"]["kernel"].size

    def largest(function) -> int:
        return max(_sizes(jax.make_jaxpr(function)(params, x).jaxpr))

    assert largest(lambda p, x: empirical_ntk(model, p, x)) < 40 * dense
    # negative control: the Jacobian itself
    assert largest(jax.jacrev(model.apply)) >= 40 * 10 * dense


def _sizes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _sizes(inner)


def test_half_a_symmetric_product_is_the_product():
    a = jnp.asarray(RNG.normal(size=(3 * layered.SMALLEST_STRIP + 5, 4)))
    half = layered.gram(a)
    np.testing.assert_allclose(half, a @ a.T, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(half, half.T)


def test_other_parameters_are_refused(convolutional):
    model, params, x1, _, _ = convolutional
    other = jax.tree.map(lambda leaf: leaf[..., :1], params)
    with pytest.raises(ValueError, match=r"params: got arrays of shapes .*, must be .*, as cnn\(5x5x2, 2-3-4-3\) has"):
        empirical_ntk(model, other, x1)


def test_no_examples():
    model = cnn((5, 5, 2), C, filters=(2,), hidden=(), window=3, convolution="gemm")
    params = parameters(model)
    assert empirical_ntk(model, params, np.zeros((0, 50)), np.zeros((2, 50))).shape == (0, 2)
