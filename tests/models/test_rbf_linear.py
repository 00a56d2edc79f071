"""The toy of FE-2024, section V-A."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import models
from fedtangent._src.entries import catalogue
from fedtangent._src.models import build, rbf_linear

from ..drawn import parameters

X = np.linspace(-1, 1, 9)[:, None]


def test_is_the_papers_formula():
    model = rbf_linear(seed=3, dtype=jnp.float64)
    params = parameters(model)
    centres = np.random.default_rng(3).uniform(-1, 1, 100)
    weights = np.asarray(params["weights"])
    assert weights.shape == (100, 1)
    expected = [
        [sum(weights[p, 0] * np.exp(-((x - centres[p]) ** 2) / (2 * 0.08**2)) for p in range(100))] for x in X[:, 0]
    ]
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-12)
    np.testing.assert_array_equal(model.apply(params, X[:, 0]), model.apply(params, X))
    assert float(jnp.abs(rbf_linear(seed=4).apply(params, X) - jnp.asarray(expected)).max()) > 0.1  # other centres


def test_kernel_is_exact():
    model = rbf_linear(sigma=0.5, output_size=2, dtype=jnp.float64)
    params = parameters(model)
    jacobian = jax.jacrev(lambda p: model.apply(p, X)[:, 0])(params)["weights"].reshape(9, -1)
    blocks = model.kernel(X, X[:4])
    np.testing.assert_allclose(blocks.ntk, (jacobian @ jacobian.T)[:, :4], atol=1e-13)
    np.testing.assert_allclose(blocks.nngp, 0.25 * blocks.ntk, rtol=1e-14)
    assert model.kernel(X, get=("nngp",)).ntk is None
    np.testing.assert_array_equal(model.kernel(X, get="ntk"), model.kernel(X).ntk)


def test_prior_covariance_is_that_of_the_outputs():
    model = rbf_linear(sigma=0.5, dtype=jnp.float64)
    draw = jax.jit(jax.vmap(lambda key: model.apply(model.init(key), X)[:, 0]))
    outputs = np.asarray(draw(jax.random.split(jax.random.key(1), 20000)))
    products, kernels = outputs[:, :, None] * outputs[:, None, :], model.kernel(X)
    mean, error = np.mean(products, axis=0), np.std(products, axis=0, ddof=1) / 20000**0.5
    assert np.max(np.abs(mean - kernels.nngp) / error) < 5
    assert np.max(np.abs(mean - kernels.ntk) / error) > 5  # sigma left out


def test_dtypes():
    model = rbf_linear(sigma=np.float64(0.5))
    params = parameters(model)
    assert params["weights"].dtype == model.apply(params, X).dtype == jnp.float32
    assert model.kernel(X).ntk.dtype == jnp.float64
    with jax.enable_x64(False), pytest.raises(ValueError, match="dtype: got float64, must be float32"):
        rbf_linear(dtype=jnp.float64).init(jax.random.key(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_features": 0}, "num_features: got 0"),
        ({"output_size": 1.5}, "output_size: got 1.5"),
        ({"bandwidth": 0.0}, "bandwidth: got 0"),
        ({"bandwidth": -1.0}, "bandwidth: got -1"),
        ({"sigma": float("inf")}, "sigma: got inf"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        rbf_linear(**arguments)
    with pytest.raises(ValueError, match="must be 1 for this model"):
        model = rbf_linear()
        model.apply(parameters(model), jnp.ones((3, 2)))


def test_registry_builds_by_name():
    known = ("cnn", "linear", "logistic", "lstm", "mlp", "rbf_linear")
    assert set(catalogue("models")) >= set(known)
    for name in known:
        options = {"pool": 1, "convolution": "lax"} if name == "cnn" else {}
        model = build(name, (1, 1, 1) if name == "cnn" else 1, 2, **options)
        assert jax.eval_shape(model.apply, parameters(model), jnp.ones((3, 1))).shape == (3, 2)
        assert getattr(models, name).__name__ == name and name in dir(models)
        assert model.output_size == 2
        hash(model)  # a static argument of jit
    assert len(build("mlp", 4, 2, widths=(5, 6)).structure.layers) == 3


def test_registry_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=f"model: got 'resnet', allowed are {', '.join(catalogue('models'))}"):
        build("resnet", 4, 2)
    with pytest.raises(
        ValueError, match=r"depth: got an option that mlp does not have, allowed are widths, activation"
    ):
        build("mlp", 4, 2, depth=3)
    with pytest.raises(
        ValueError, match=r"model: got 'rbf_linear' for examples of shape \(4,\), must be another model"
    ):
        build("rbf_linear", 4, 2)
    for name, kind, readers in (
        ("cnn", "vector", "deep_linear, linear, logistic, mlp, rbf_linear"),
        ("mlp", "tokens", "lstm"),
    ):
        with pytest.raises(ValueError, match=f"'{name}', which reads .* kind {kind}, allowed are {readers}$"):
            build(name, 4, 2, kind)
