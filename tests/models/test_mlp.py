"""The MLP is exactly neural-tangents' stax network, and its kernel is that network's."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import models
from fedtangent._src.data import load
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.kernels.gram import analytic
from fedtangent._src.models import deep_linear, logistic, mlp

from ..drawn import parameters
from ..nightly import nightly

X = np.random.default_rng(0).normal(size=(5, 4))
BY_DAY = (((6, 7), "erf", "standard", 0.3), ((), "relu", "ntk", 0.3), ((6, 7, 8), "gelu", "ntk", None))
NETWORKS = [
    pytest.param(
        *(widths, activation, parameterization, b_std),
        id=f"{widths}-{activation}-{parameterization}-{b_std}",
        marks=() if (widths, activation, parameterization, b_std) in BY_DAY else pytest.mark.slow,
    )
    for widths, activation, parameterization, b_std in [
        *itertools.product([(6, 7)], ["erf"], ["ntk", "standard"], [None, 0.3]),
        ((), "relu", "ntk", 0.3),
        ((), "relu", "standard", None),
        ((6, 7, 8), "gelu", "ntk", None),
        ((6, 7, 8), "relu", "standard", 0.3),
    ]
]


def largest_difference(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


@pytest.mark.parametrize(("widths", "activation", "parameterization", "b_std"), NETWORKS)
def test_same_parameters_and_outputs_as_stax(widths, activation, parameterization, b_std):
    model = mlp(4, 3, widths, activation, parameterization, w_std=1.3, b_std=b_std, last_w_std=0.7, dtype=jnp.float64)
    stax_init, stax_apply, _ = model.kernel.network()
    theirs = jax.eval_shape(lambda key: stax_init(key, (-1, 4))[1], jax.random.key(1))
    ours = parameters(model, scale={"ntk": 1.0, "standard": 0.5}[parameterization])
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    # negative control: the other parameterization is another function of the same parameters
    other = {"ntk": "standard", "standard": "ntk"}[parameterization]
    wrong = mlp(4, 3, widths, activation, other, w_std=1.3, b_std=b_std, last_w_std=0.7, dtype=jnp.float64)
    outputs = jax.jit(lambda p: [apply(p, X) for apply in (model.apply, stax_apply, wrong.apply)])
    found, expected, control = outputs(ours)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    assert float(np.abs(control - np.asarray(expected)).max()) > 0.05


@functools.cache
def outputs_of_activations() -> dict:
    """Ours and those of stax, of the same parameters, in one program."""
    every = {name: mlp(4, 3, (20, 20), name, dtype=jnp.float64) for name in models.ACTIVATIONS}
    params = {name: parameters(model) for name, model in every.items()}
    return jax.jit(
        lambda p: {name: (m.apply(p[name], X), m.kernel.network()[1](p[name], X)) for name, m in every.items()}
    )(params)


@pytest.mark.parametrize("activation", list(models.ACTIVATIONS))
def test_every_activation_is_that_of_stax(activation):
    found, expected = outputs_of_activations()[activation]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("parameterization", models.PARAMETERIZATIONS)
def test_initial_parameters_have_the_stated_scales(parameterization):
    model = mlp(50, 1, (400,), "relu", parameterization, w_std=1.5, b_std=0.2, dtype=jnp.float64)
    (weight, bias), _, (last, _) = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    expected = {
        "ntk": (1.0, 1.0, 1.0),
        "standard": (1.5 / 50**0.5, 0.2, 1.5 / 400**0.5),
        "maximal_update": (400**-0.5, 400**-0.5, 400**-0.5),
    }[parameterization]
    for leaf, std in zip((weight, bias, last), expected, strict=True):
        error = std / (2 * leaf.size) ** 0.5  # of a standard deviation estimated from Gaussian draws
        assert abs(np.sqrt(np.mean(leaf**2)) - std) < 4 * error


def mean_kernel(model, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over initialisations of the empirical tangent kernel, and its standard error, [5, 5] each."""
    keys = jax.random.split(jax.random.key(3), draws)
    kernels = np.asarray(jax.jit(jax.vmap(lambda key: empirical_ntk(model, model.init(key), X)))(keys))
    return kernels.mean(axis=0), kernels.std(axis=0, ddof=1) / draws**0.5


@pytest.mark.parametrize("b_std", nightly([None, 0.4], [0.4]))
@pytest.mark.parametrize("parameterization", models.PARAMETERIZATIONS)
def test_kernel_is_the_mean_of_the_networks_own_tangent_kernels(parameterization, b_std):
    """With one hidden layer the expectation is exact at any width, and depends on it in the standard one.

    A network in the maximal-update one starts with the tangent kernel of the ntk one, but has no kernel of its own. By
    day with biases, which are one term more.
    """
    model = mlp(4, 2, (8,), "erf", parameterization, w_std=1.4, b_std=b_std, dtype=jnp.float64)
    assert (model.kernel is None) == (parameterization == "maximal_update")
    blocks = (model if model.kernel else mlp(4, 2, (8,), "erf", w_std=1.4, b_std=b_std)).kernel(X)
    mean, error = mean_kernel(model, 3000)
    limit = 5.0  # 25 correlated entries: beyond 5 standard errors with probability below 25 * 6e-7
    assert np.max(np.abs(mean - blocks.ntk) / error) < limit
    # negative controls: another width's kernel (standard), the prior covariance (ntk)
    other = mlp(4, 2, (10,), "erf", "standard", w_std=1.4, b_std=b_std)
    wrong = other.kernel(X).ntk if parameterization == "standard" else blocks.nngp
    assert np.max(np.abs(mean - wrong) / error) > limit


def test_deep_networks_approach_their_kernel_as_one_over_root_width():
    widths = [32, 64, 128, 256]
    errors, reference = [], mlp(4, 1, (1, 1), "erf", w_std=1.4, b_std=0.1).kernel(X).ntk  # of any width
    for width in widths:
        model = mlp(4, 1, (width, width), "erf", w_std=1.4, b_std=0.1, dtype=jnp.float64)
        drawn = jax.tree.map(lambda *leaves: np.stack(leaves), *(parameters(model, seed) for seed in range(50)))
        kernels = jax.jit(lambda p, m=model: jax.lax.map(lambda q: empirical_ntk(m, q, X), p))(drawn)
        squared = np.sum((np.asarray(kernels) - np.asarray(reference)) ** 2, axis=(1, 2))
        errors.append(np.sqrt(np.mean(squared) / np.sum(np.asarray(reference) ** 2)))
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.1, (slope, errors)


def test_prior_covariance_is_that_of_the_outputs():
    model = mlp(4, 1, (20,), "relu", w_std=1.4, b_std=0.3, dtype=jnp.float64)  # exact at any width
    draw = jax.jit(jax.vmap(lambda key: model.apply(model.init(key), X)[:, 0]))
    outputs = draw(jax.random.split(jax.random.key(5), 8000))
    products, kernels = np.asarray(outputs)[:, :, None] * np.asarray(outputs)[:, None, :], model.kernel(X)
    error = np.std(products, axis=0, ddof=1) / 8000**0.5
    assert np.max(np.abs(np.mean(products, axis=0) - kernels.nngp) / error) < 5
    assert np.max(np.abs(np.mean(products, axis=0) - kernels.ntk) / error) > 5


def test_kernel_blocks_and_names():
    model = mlp(4, 3, (6,))
    blocks = model.kernel(X, X[:2])
    assert blocks.nngp.shape == blocks.ntk.shape == (5, 2)
    assert blocks.ntk.dtype == jnp.float64
    np.testing.assert_allclose(blocks.ntk, model.kernel(X).ntk[:, :2], rtol=1e-12)
    only = model.kernel(X, get=("ntk",))
    assert only.nngp is None
    np.testing.assert_array_equal(only.ntk, analytic(model, X, get="ntk"))
    images = (10 * X.reshape(5, 2, 2)).astype(np.uint8)
    np.testing.assert_array_equal(model.kernel(images).ntk, model.kernel(images.reshape(5, 4).astype(float)).ntk)
    with pytest.raises(ValueError, match=r"get: got 'gp', allowed are 'nngp', 'ntk'"):
        model.kernel(X, get="gp")
    with pytest.raises(ValueError, match="must have an analytic kernel"):
        analytic(model._replace(kernel=None), X)


def test_init_gives_the_requested_dtype_and_the_same_numbers_in_either_mode():
    wide = np.float64  # a NumPy scalar in the arguments must not widen the parameters
    model = mlp(4, 3, (6,), "relu", "standard", w_std=wide(1.4), b_std=wide(0.1))
    with_x64 = jax.jit(model.init)(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(with_x64)} == {jnp.dtype(jnp.float32)}
    assert model.apply(with_x64, X).dtype == jnp.float32
    with jax.enable_x64(False):
        without = jax.jit(model.init)(jax.random.key(0))
        double = mlp(4, 3, (6,), dtype=jnp.float64)
        with pytest.raises(ValueError, match=r"dtype: got float64, .* fedtangent.enable_x64\(\)"):
            double.init(jax.random.key(0))
    assert largest_difference(with_x64, without) == 0
    drawn = jax.jit(double.init)(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(drawn)} == {jnp.dtype(jnp.float64)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "tanh"}, "activation: got 'tanh', allowed are relu, leaky_relu, abs, erf, gelu, sin, cos"),
        ({"parameterization": "mup"}, "parameterization: got 'mup', allowed are ntk, standard, maximal_update"),
        ({"widths": (3, 0)}, "widths: got 0"),
        ({"widths": (2.5,)}, "widths: got 2.5"),
        ({"output_size": 0}, "output_size: got 0"),
        ({"input_size": True}, "input_size: got True"),
        ({"w_std": -1.0}, "w_std: got -1.0"),
        ({"b_std": float("nan")}, "b_std: got nan"),
        ({"dtype": jnp.int32}, "dtype: got int32"),
        ({"loss": "cross_entropy"}, "scales: got 'loss', allowed are w_std, b_std, last_w_std"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        mlp(**{"input_size": 4, "output_size": 3, **arguments})


def test_inputs_of_the_wrong_size_are_named():
    model = mlp(4, 3)
    with pytest.raises(ValueError, match=r"x: got \(2, 5\), 5 numbers an example, must be 4 for this model"):
        model.apply(parameters(model), jnp.ones((2, 5)))


def test_sizes_from_a_data_set_and_other_widths() -> None:
    digits = load("digits", num_train=20, num_test=5)
    for make in (mlp, logistic, deep_linear):
        assert make(digits).name == make(64, 10).name
        with pytest.raises(ValueError, match="output_size: got none, must be given unless input_size is a Dataset"):
            make(64)
    with pytest.raises(ValueError, match=r"output_size: got .*, must be a number; widths are named: widths="):
        mlp(digits, (64,))  # type: ignore[arg-type]
    model = mlp(digits, widths=(8, 4), activation="erf", w_std=1.5)
    assert model.at_width(16).name == mlp(64, 10, (16, 16), "erf").name
    x = np.ones((2, 64))
    assert np.allclose(model.at_width(16).kernel(x).ntk, model.kernel(x).ntk)
    assert logistic(64, 10).at_width is None and deep_linear(digits, width=5, depth=4).at_width(7).name == (
        "deep_linear(64-7-7-7-10)"
    )


@pytest.mark.parametrize("dtype", nightly([jnp.bfloat16, jnp.float16], [jnp.bfloat16]))
def test_gradients_of_many_examples_in_half_precision_are_rounded_once(dtype) -> None:
    """A bias's gradient is a sum over examples: added up in bfloat16, 3,000 times 1/3,000 would make 1.016."""
    x, narrow = jnp.ones((3000, 2)), float(jnp.finfo(dtype).eps)
    model, exact = logistic(2, 3, dtype=dtype), logistic(2, 3, dtype=jnp.float64)

    def mean_output(model):
        return jax.jit(jax.grad(lambda params: jnp.mean(model.apply(params, x)[:, 0].astype(jnp.float32))))

    weight, bias = mean_output(model)(model.init(jax.random.key(0)))[0]
    assert bias.dtype == weight.dtype == dtype
    for found, wanted in zip((weight, bias), mean_output(exact)(exact.init(jax.random.key(0)))[0], strict=True):
        np.testing.assert_allclose(np.asarray(found, float), wanted, atol=narrow)
    if dtype == jnp.bfloat16:  # the control
        alone = jax.lax.fori_loop(0, 3000, lambda _, total: total + jnp.asarray(1 / 3000, dtype), jnp.zeros((), dtype))
        assert abs(float(alone) - 1) > 100 * narrow
