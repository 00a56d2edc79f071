"""The structured tangent kernel is the contraction of the Jacobian that it never builds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.kernels import empirical
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp, rbf_linear

from ..drawn import parameters
from ..nightly import nightly

RNG = np.random.default_rng(0)
X1, X2 = RNG.normal(size=(7, 4)), RNG.normal(size=(5, 4))
WIDTHS = [(), (6,), (6, 7), (6, 7, 8)]


def jacobians(model, params, x) -> list[np.ndarray]:
    """[n, C, parameters] of every leaf."""
    leaves = jax.tree.leaves(jax.jit(jax.jacrev(model.apply))(params, x))
    return [np.asarray(leaf).reshape((x.shape[0], model.output_size, -1)) for leaf in leaves]


def contract(leaves, n1: int) -> np.ndarray:
    """[n1, C, n2, C], of the first ``n1`` examples with the others."""
    every = np.concatenate(leaves, axis=2)
    return np.einsum("ikp,jmp->ikjm", every[:n1], every[n1:])


def mean_over_outputs(kernel: np.ndarray) -> np.ndarray:
    return np.einsum("ikjk->ij", kernel) / kernel.shape[1]


def both_of(model, params, x1, x2, **options):
    """The whole kernel and the mean over outputs."""
    return jax.jit(lambda p: [empirical_ntk(model, p, x1, x2, trace=trace, **options) for trace in (False, True)])(
        params
    )


@pytest.mark.parametrize(
    ("widths", "activation", "parameterization", "b_std"),
    nightly(
        [*((widths, "erf", "ntk", 0.3) for widths in WIDTHS), ((6, 7), "erf", "ntk", None),
         ((6, 7), "erf", "standard", None), ((6, 7), "erf", "standard", 0.3), ((), "erf", "standard", None),
         *(((6, 7), name, "ntk", 0.3) for name in ("relu", "gelu", "sin", "leaky_relu", "abs", "cos"))],
        [((), "erf", "ntk", 0.3), ((6, 7, 8), "erf", "ntk", 0.3), ((6, 7), "erf", "standard", None),
         ((6, 7), "erf", "standard", 0.3), ((6, 7), "relu", "ntk", 0.3)],
    ),
)  # fmt: skip
def test_equals_the_jacobian_contraction(widths, activation, parameterization, b_std):
    model = mlp(4, 3, widths, activation, parameterization, w_std=1.4, b_std=b_std, last_w_std=0.8, dtype=jnp.float64)
    params = parameters(model)
    leaves = jacobians(model, params, np.concatenate([X1, X2]))
    whole, mean = both_of(model, params, X1, X2)
    assert whole.shape == (7, 3, 5, 3)
    np.testing.assert_allclose(whole, contract(leaves, 7), rtol=0, atol=1e-10)
    np.testing.assert_allclose(mean, mean_over_outputs(contract(leaves, 7)), rtol=0, atol=1e-10)
    # negative control: without any one layer's term the difference is far above the tolerance
    own = 1 if b_std is None else 2
    for layer in range(0, len(leaves), own) if widths else ():
        wrong = contract(leaves[:layer] + leaves[layer + own :], 7)
        assert np.abs(np.asarray(whole) - wrong).max() > 1e-2


@pytest.mark.parametrize(
    ("block_size", "trace"), nightly([(1, True), (3, True), (3, False), (100, True)], [(3, True), (3, False)])
)
def test_blocks_change_nothing(block_size, trace):
    model = mlp(4, 3, (6, 5), "relu", dtype=jnp.float64)

    @jax.jit
    def kernels(params):
        sizes, seconds = (None, block_size), (X2, None)
        return [[empirical_ntk(model, params, X1, x2, trace, size) for size in sizes] for x2 in seconds]

    for whole, blocked in kernels(parameters(model)):
        assert blocked.shape == whole.shape
        np.testing.assert_allclose(blocked, whole, rtol=0, atol=1e-13)


def test_half_of_a_symmetric_kernel_s_blocks_are_computed(monkeypatch):
    """Of its own accord, for kernels of many examples: the same kernel, exactly symmetric, from 6 blocks and not 9."""
    model = mlp(4, 3, (6, 5), "relu", dtype=jnp.float64)
    params = parameters(model)
    monkeypatch.setattr(empirical, "SYMMETRIC_BLOCK", 3)
    computed = []
    block = empirical._dense_block

    def counted(structure, params, rows1, rows2, trace):
        jax.debug.callback(lambda: computed.append(rows2 is None))
        return block(structure, params, rows1, rows2, trace)

    monkeypatch.setattr(empirical, "_dense_block", counted)
    half = jax.jit(lambda p, x: empirical_ntk(model, p, x))(params, X1)
    jax.effects_barrier()
    monkeypatch.undo()
    assert sorted(computed) == [False] * 3 + [True] * 3
    np.testing.assert_allclose(half, both_of(model, params, X1, X1)[1], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(half, np.asarray(half).T)


def test_image_inputs_and_none_for_the_second_argument():
    model = mlp(4, 3, (6,), dtype=jnp.float64)
    params = parameters(model)
    images = X1.reshape(7, 2, 2)
    whole = jax.jit(lambda p: empirical_ntk(model, p, images, block_size=3))(params)
    np.testing.assert_allclose(whole, both_of(model, params, X1, X1)[1], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(whole).T)


def test_float32_agrees_to_its_own_precision_and_stays_float32():
    single, double = mlp(4, 3, (50, 50)), mlp(4, 3, (50, 50), dtype=jnp.float64)
    params = parameters(single)
    kernel = jax.jit(lambda p: empirical_ntk(single, p, X1, X2))(params)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    reference = np.asarray(jax.jit(lambda p: empirical_ntk(double, p, X1, X2))(wide))
    assert kernel.dtype == jnp.float32
    # sums of at most 150 products with relative rounding 2^-24 each, in three layers
    bound = 3 * 150 * 2.0**-24 * np.abs(reference).max()
    assert np.abs(np.asarray(kernel) - reference).max() < bound


def test_linear_model():
    model = rbf_linear(output_size=2, dtype=jnp.float64)
    params = parameters(model)
    x1, x2 = np.linspace(-1, 1, 6)[:, None], np.linspace(-0.5, 0.9, 4)[:, None]
    expected = contract(jacobians(model, params, np.concatenate([x1, x2])), 6)
    whole, blocked = both_of(model, params, x1, x2, block_size=4)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(blocked, mean_over_outputs(expected), rtol=0, atol=1e-12)
    analytic = jax.jit(model.kernel)(x1, x2).ntk
    np.testing.assert_allclose(both_of(model, params, x1, x2)[1], analytic, rtol=0, atol=1e-12)


def test_any_other_function_goes_to_neural_tangents():
    def apply(params, x):
        hidden = jnp.tanh(x @ params["a"] + params["c"][None, :])
        return jnp.concatenate([hidden @ params["b"], jnp.sum(hidden**2, axis=1, keepdims=True)], axis=1)

    params = {"a": jnp.asarray(RNG.normal(size=(4, 6))), "b": jnp.asarray(RNG.normal(size=(6, 2))), "c": jnp.ones(6)}
    model = mlp(4, 3)._replace(init=lambda key: params, apply=apply, structure=None)
    expected = contract(jacobians(model, params, np.concatenate([X1, X2])), 7)
    whole, traced = both_of(model, params, X1, X2, block_size=4)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(traced, mean_over_outputs(expected), rtol=0, atol=1e-10)


def test_no_array_as_large_as_a_jacobian():
    """The compiled program at n = 50 never holds n C P numbers."""
    model = mlp(30, 10, (40,))
    params = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    x = jax.ShapeDtypeStruct((50, 30), jnp.float32)

    def largest(function) -> int:
        jaxpr = jax.make_jaxpr(function)(params, x)
        shapes = [v.aval.shape for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars]
        return max(int(np.prod(shape)) for shape in shapes)

    assert largest(lambda p, x: empirical_ntk(model, p, x)) <= 50 * 10 * 50 < 50 * 10 * size
    # negative control: the Jacobian itself is that large (its largest leaf)
    assert largest(jax.jacrev(model.apply)) >= 50 * 10 * 30 * 40


@pytest.mark.parametrize("block_size", [0, -1, 2.5, "3", True])
def test_a_block_size_that_is_no_count_is_refused(block_size):
    model = mlp(4, 3, (6,), dtype=jnp.float64)
    with pytest.raises(ValueError, match=r"block_size: got .*, must be a whole number of at least 1"):
        empirical_ntk(model, parameters(model), X1, block_size=block_size)


def test_another_models_parameters_are_refused():
    model = mlp(4, 3, (6,), dtype=jnp.float64)
    for widths in ((6, 6), (), (5,)):
        other = mlp(4, 3, widths, dtype=jnp.float64)
        with pytest.raises(ValueError, match=r"params: got arrays of shapes .*, as mlp\(4-6-3"):
            empirical_ntk(model, parameters(other), X1)
    with pytest.raises(ValueError, match=r"params: got arrays of shapes \[\], must be .*, as rbf_linear"):
        empirical_ntk(rbf_linear(5, dtype=jnp.float64), {}, X1[:, :1])
