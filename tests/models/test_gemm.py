"""``gemm_convolution`` is ``lax.conv_general_dilated``: values, derivatives of both modes, and under vmap."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedtangent as ft
from fedtangent._src.models import gemm_convolution
from fedtangent._src.models.gemm import with_fast_convolutions

from ..nightly import nightly

LAYOUT = ("NHWC", "HWIO", "NHWC")
CASES = {
    "same": ((9, 8), (3, 2), (1, 1), "SAME", (1, 1)),
    "strided": ((9, 8), (3, 3), (2, 3), "SAME", (1, 1)),
    "dilated": ((11, 9), (3, 2), (1, 1), "SAME_LOWER", (2, 3)),
    "strided and dilated": ((11, 13), (2, 3), (3, 2), "VALID", (2, 1)),
    "explicit": ((7, 5), (3, 3), (2, 1), [(2, 0), (1, 3)], (1, 1)),
    "cropped": ((9, 8), (3, 2), (1, 2), [(-1, 2), (4, -2)], (1, 1)),
    "one by one": ((6, 5), (1, 1), (2, 2), "SAME", (1, 1)),
    "window larger than the image": ((3, 4), (5, 5), (1, 1), "SAME", (1, 1)),
    "rows the window skips": ((10, 10), (2, 2), (4, 4), "VALID", (1, 1)),
}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
RTOL = {jnp.float32: 2e-6, jnp.float64: 1e-13}  # some units in the last place, relative to the largest entry


def operands(spatial, window, dtype, clients=(), channels=(4, 6)):
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((*clients, *shape)) for shape in ((3, *spatial, channels[0]), (*window, *channels)))
    return jnp.asarray(x, dtype), jnp.asarray(w / 4, dtype)


def closeness(ours, theirs) -> float:
    """Largest difference of any pair of leaves, relative to the leaf's largest entry."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs)


def loss(convolve, strides, padding, dilation):
    def scalar(x, w):
        y = convolve(x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=LAYOUT)
        return jnp.sum(jnp.sin(y) + y**2)

    return scalar


@pytest.mark.parametrize(
    ("case", "dtype"),
    nightly(
        [*((case, jnp.float32) for case in CASES), ("dilated", jnp.float64)],
        ["same", "strided and dilated", "cropped", ("dilated", jnp.float64)],
    ),
)
def test_values_and_derivatives(case, dtype):
    """By day with the control, strides and dilation together, padding that cuts, and doubles."""
    spatial, window, strides, padding, dilation = CASES[case]
    x, w = operands(spatial, window, dtype)
    tangents = (np.cos(x), np.cos(w))

    def everything(convolve):
        f = loss(convolve, strides, padding, dilation)
        return jax.jit(lambda x, w: jax.jvp(jax.value_and_grad(f, (0, 1)), (x, w), tangents))(x, w)

    ours, theirs = everything(gemm_convolution), everything(lax.conv_general_dilated)
    assert closeness(ours, theirs) < 10 * RTOL[dtype]
    if case == "same":  # negative control: a turned kernel
        turned = everything(lambda x, w, *rest, **options: gemm_convolution(x, jnp.flip(w, (0, 1)), *rest, **options))
        assert closeness(turned, theirs) > 0.01


@DTYPES
def test_values_by_a_plain_loop(dtype):
    x, w = (np.asarray(a) for a in operands((5, 6), (3, 2), dtype))
    ours = jax.jit(lambda x, w: gemm_convolution(x, w, (2, 1), [(1, 1), (0, 1)], dimension_numbers=LAYOUT))(x, w)
    padded = np.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)))
    expected = np.zeros((3, 3, 6, 6), dtype)
    for i in range(3):
        for j in range(6):
            expected[:, i, j] = np.tensordot(padded[:, 2 * i : 2 * i + 3, j : j + 2], w, 3)
    assert closeness(ours, expected) < RTOL[dtype]
    assert closeness(ours[:, ::-1], expected) > 0.1  # negative control


@pytest.mark.parametrize(
    ("axes", "dtype"),
    nightly(
        [((0, None), jnp.float32), ((None, 0), jnp.float32), ((0, 0), jnp.float32), ((2, 1), jnp.float64)],
        [(2, 1)],  # and of one operand alone in the next test
    ),
)
def test_vmap_inside_and_outside_of_the_gradient(axes, dtype):
    _, window, strides, padding, dilation = CASES["strided"]
    x, w = operands((9, 8), window, dtype, (5,))
    x, w = (a[0] if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip((x, w), axes, strict=True))

    def both(convolve):
        f = loss(convolve, strides, padding, dilation)
        inside = jax.vmap(jax.value_and_grad(f, (0, 1)), axes)
        outside = jax.grad(lambda x, w: jnp.sum(jax.vmap(f, axes)(x, w)), (0, 1))
        return jax.jit(lambda x, w: (inside(x, w), outside(x, w)))(x, w)

    assert closeness(both(gemm_convolution), both(lax.conv_general_dilated)) < 10 * RTOL[dtype]


def test_every_gradient_under_vmap_over_one_operand():
    """Each of the three maps with only its first, or only its second, operand batched."""
    x, w = operands((6, 5), (3, 3), jnp.float32)
    y = np.random.default_rng(3).standard_normal((4, 3, 6, 5, 6)).astype(np.float32)
    many_x, many_w = (np.stack([a, -2 * a, a**2, a]) for a in (np.asarray(x), np.asarray(w)))

    def maps(convolve):
        def forward(x, w):
            return convolve(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)

        def to_input(y, w):
            return jax.vjp(lambda x: forward(x, w), x)[1](y)[0]

        def to_kernel(x, y):
            return jax.vjp(lambda w: forward(x, w), w)[1](y)[0]

        first, second = (0, None), (None, 0)
        inputs = jax.vmap(to_input, first)(y, w), jax.vmap(to_input, second)(y[0], many_w)
        return inputs, jax.vmap(to_kernel, first)(many_x, y[0]), jax.vmap(to_kernel, second)(x, y)

    ours, theirs = (jax.jit(maps, static_argnums=0)(f) for f in (gemm_convolution, lax.conv_general_dilated))
    assert closeness(ours, theirs) < 10 * RTOL[jnp.float32]


def test_second_order_in_reverse_mode():
    x, w = operands((6, 5), (3, 2), jnp.float64)

    def norm_of_gradient(convolve):
        gradients = jax.grad(loss(convolve, (2, 1), "SAME", (1, 1)), (0, 1))
        return jax.jit(jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in gradients(x, w)), (0, 1)))(x, w)

    ours = norm_of_gradient(gemm_convolution)
    assert closeness(ours, norm_of_gradient(lax.conv_general_dilated)) < 1e-12
    assert closeness(jax.tree.map(np.negative, ours), ours) > 0.1  # negative control


def test_in_a_rematerialised_scan():
    x, w = operands((6, 5), (3, 3), jnp.float32, channels=(4, 4))

    def deep(convolve):
        @jax.checkpoint
        def layer(h, _):
            return jnp.tanh(convolve(h, w, (1, 1), "SAME", dimension_numbers=LAYOUT)), None

        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(lax.scan(layer, x, None, length=4)[0])))(x)

    assert closeness(deep(gemm_convolution), deep(lax.conv_general_dilated)) < 1e-5


def test_feature_groups_and_input_dilation():
    groups = 2
    x, _ = operands((7, 6), (3, 3), jnp.float64)
    w = np.random.default_rng(2).standard_normal((3, 3, 4 // groups, 8))
    options = {"lhs_dilation": (2, 1), "feature_group_count": groups, "dimension_numbers": LAYOUT}

    def gradients(convolve):
        def scalar(x, w):
            return jnp.sum(jnp.sin(convolve(x, w, (1, 2), [(1, 0), (2, 1)], **options)))

        return jax.jit(jax.value_and_grad(scalar, (0, 1)))(x, w)

    assert closeness(gradients(gemm_convolution), gradients(lax.conv_general_dilated)) < 1e-12


@pytest.mark.parametrize("times", nightly([1, 2], [2]))
def test_a_kernel_for_each_channel(times):
    """Depthwise convolutions, alone and with one kernel for each client."""
    x, _ = operands((7, 6), (3, 3), jnp.float64, clients=(2,))
    w = np.random.default_rng(2).standard_normal((2, 3, 2, 1, 4 * times))
    options = {"rhs_dilation": (2, 1), "feature_group_count": 4, "dimension_numbers": LAYOUT}

    def gradients(convolve, w=w):
        def scalar(x, w):
            return jnp.sum(jnp.sin(convolve(x, w, (1, 2), "SAME", **options)))

        one = jax.value_and_grad(scalar, (0, 1))
        return jax.jit(lambda x, w: (one(x[0], w[0]), jax.vmap(one)(x, w)))(x, w)

    theirs = gradients(lax.conv_general_dilated)
    assert closeness(gradients(gemm_convolution), theirs) < 1e-12
    assert closeness(gradients(gemm_convolution, w[..., ::-1]), theirs) > 0.01  # negative control


@pytest.mark.parametrize("window", [pytest.param((3,), marks=pytest.mark.slow), (3, 3), (2, 3, 2)], ids=len)
def test_behind_a_flax_layer_with_one_to_three_axes(window):
    spatial = (7, 6, 5)[: len(window)]
    x = jax.random.normal(jax.random.key(0), (2, *spatial, 3), jnp.float32)
    layers = [nn.Conv(5, window, strides=2, conv_general_dilated=f) for f in (gemm_convolution, None)]
    params = jax.jit(layers[0].init)(jax.random.key(1), x)
    ours, theirs = (jax.jit(jax.value_and_grad(lambda p, c=c: jnp.sum(jnp.sin(c.apply(p, x)))))(params) for c in layers)
    assert closeness(ours, theirs) < 10 * RTOL[jnp.float32]


def test_no_convolution_with_groups_remains_under_vmap_over_kernels():
    """What vmap makes of ``lax.conv_general_dilated``; ours must not."""
    x, w = operands((6, 5), (3, 3), jnp.float32, (5,))

    def program(convolve):
        batched = jax.vmap(lambda x, w: convolve(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT))
        return jax.jit(batched).lower(x, w).as_text()

    assert "feature_group_count = 5" in program(lax.conv_general_dilated)
    assert "feature_group_count = 5" not in program(gemm_convolution)


X, W = operands((6, 5), (3, 3), jnp.float32)
BAD = {
    "layout": (X, W, {"dimension_numbers": None}, "dimension_numbers"),
    "channels first": (X, W, {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}, "dimension_numbers"),
    "dtypes": (X, W.astype(jnp.float64), {}, "float32 and float64"),
    "integers": (X.astype(jnp.int32), W.astype(jnp.int32), {}, "floating"),
    "channels": (X, W[:, :, :3], {}, "feature groups"),
    "groups": (X, W, {"feature_group_count": 3}, "3 feature groups"),
    "padding": (X, W, {"lhs_dilation": (2, 1)}, "padding: got 'SAME'"),
    "groups of examples": (X, W, {"batch_group_count": 2}, "batch_group_count"),
    "type of the result": (X, W, {"preferred_element_type": jnp.float64, "out_sharding": None}, "preferred_element"),
    "axes": (X[0, 0], W[0, 0], {}, "must have the same number of axes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    x, w, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        gemm_convolution(x, w, (1, 1), "SAME", **{"dimension_numbers": LAYOUT, **options})


RNG = np.random.default_rng(5)


def _convolved(x, w, layout="NHWC", **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(layout, "HWIO", layout), **options)


def _channels_first(p, x):
    return _convolved(jnp.moveaxis(x, -1, 1), p["w"], "NCHW")


def _strided_kernel_first(p, x):
    w = jnp.transpose(p["w"], (3, 2, 0, 1))
    numbers, padding = ("NHWC", "OIHW", "HWNC"), ((2, 0), (1, 1))
    return lax.conv_general_dilated(x, w, (2, 1), padding, rhs_dilation=(1, 2), dimension_numbers=numbers)


def _in_a_loop(p, x):
    return lax.scan(lambda h, _: (jnp.tanh(_convolved(h, p["w"])), ()), x, None, 3)[0]


def _in_a_branch(p, x):
    return lax.cond(x.sum() > 0, lambda x: _convolved(x, p["w"]), lambda x: 2 * x, x)


def _in_a_while(p, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, _convolved(c[1], p["w"])), (0, x))[1]


NETWORKS = {
    "channels first": _channels_first,
    "strides, dilation, kernel and result in other orders": _strided_kernel_first,
    "groups": lambda p, x: _convolved(x, p["w"][:, :, :1], feature_group_count=3),
    "in a loop": _in_a_loop,
    "in a branch": _in_a_branch,
    "compiled": lambda p, x: jax.jit(lambda x: 1 + jax.jit(_convolved)(x, p["w"]))(x),
    "checkpointed": lambda p, x: jax.checkpoint(lambda w, x: jnp.sin(_convolved(x, w)))(p["w"], x),
    "a closed-over kernel": lambda p, x: jax.jit(lambda x: _convolved(x, KERNEL) * p["w"].sum())(x),
}
KERNEL = jnp.asarray(RNG.normal(size=(3, 3, 3, 3)), jnp.float32)


@pytest.mark.parametrize("name", nightly(NETWORKS, ["groups", "channels first"]))
def test_a_users_network_has_fast_convolutions_and_the_same_derivatives(name):
    """Values, gradients, forward derivatives, and gradients under vmap over kernels; no convolution of JAX is left."""

    def own(p, x):
        return NETWORKS[name](p, x).reshape(5, -1)

    fast = with_fast_convolutions(own)
    p, x = {"w": KERNEL / 3}, jnp.asarray(RNG.normal(size=(5, 6, 4, 3)), jnp.float32)

    def numbers(apply):
        def objective(p, x):
            return jnp.sum(jnp.sin(apply(p, x)) ** 2)

        many = jax.tree.map(lambda w: jnp.stack([w, 2 * w, -w]), p)
        tangents = jax.jvp(lambda p: apply(p, x), (p,), (jax.tree.map(jnp.cos, p),))
        each = jax.vmap(jax.grad(objective), in_axes=(0, None))(many, x)
        return apply(p, x), jax.grad(objective, argnums=(0, 1))(p, x), tangents, each

    found, right = (jax.jit(functools.partial(numbers, apply))() for apply in (fast, own))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert closeness(ours, theirs) < 1e-6
    assert "conv_general_dilated" in str(jax.make_jaxpr(own)(p, x))  # the control
    assert "conv_general_dilated" not in str(jax.make_jaxpr(fast)(p, x))


def test_an_operation_that_is_no_convolution_of_real_numbers_stays():
    """Whole numbers, a loop without derivatives, a function with derivatives of its own, the package's networks."""
    whole = jnp.arange(72, dtype=jnp.int32).reshape(1, 6, 4, 3)
    ones = {"w": jnp.ones((3, 3, 3, 3), jnp.int32)}

    def of_integers(p, x):
        return _convolved(x, p["w"]).astype(jnp.float32).reshape(1, -1)

    np.testing.assert_array_equal(with_fast_convolutions(of_integers)(ones, whole), of_integers(ones, whole))

    def in_a_while(p, x):
        return _in_a_while(p, x).reshape(2, -1)

    x = jnp.asarray(RNG.normal(size=(2, 6, 4, 3)), jnp.float32)
    p = {"w": KERNEL / 3}
    assert closeness(with_fast_convolutions(in_a_while)(p, x), in_a_while(p, x)) < 1e-6

    @jax.custom_jvp
    def own(x):
        return _convolved(x, KERNEL)

    own.defjvp(lambda primals, tangents: (own(*primals), 7 * _convolved(tangents[0], KERNEL)))
    derivative = jax.jvp(lambda x: with_fast_convolutions(lambda p, x: own(x).reshape(2, -1))({}, x), (x,), (x,))[1]
    assert closeness(derivative, 7 * _convolved(x, KERNEL).reshape(2, -1)) < 1e-6
    model = ft.models.cnn((6, 4, 3), 2, (2,), (), 3, convolution="lax")
    assert with_fast_convolutions(model.apply) is model.apply
