"""The linear model of its inputs: Local-GD's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.models import build, linear

from ..drawn import parameters

X = np.random.default_rng(0).standard_normal((9, 2, 3))
FLAT = X.reshape(9, 6)
KEY = jax.random.key(0)


def test_is_the_product_of_inputs_and_weights() -> None:
    model = linear(6, 2, sigma=1.5, dtype=jnp.float64)
    params = parameters(model)
    assert params["weights"].shape == (6, 2)
    expected = [[sum(x[d] * params["weights"][d, c] for d in range(6)) for c in range(2)] for x in FLAT]
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-13)
    np.testing.assert_array_equal(model.apply(params, FLAT), model.apply(params, X))
    assert not np.any(model.apply(params, np.zeros((2, 6))))  # no bias


def test_starts_at_zero_unless_told_otherwise() -> None:
    assert not np.any(linear(6, 2).init(KEY)["weights"])
    assert linear(6, 2).init(KEY)["weights"].dtype == jnp.float32
    drawn = np.asarray(linear(4000, sigma=1.5, dtype=jnp.float64).init(KEY)["weights"])
    assert abs(drawn.std() / 1.5 - 1) < 4 / np.sqrt(2 * drawn.size)  # four standard errors
    assert abs(drawn.std() - 1) > 0.4


def test_kernel_is_exact() -> None:
    model = linear(6, 2, sigma=0.5, dtype=jnp.float64)
    jacobian = jax.jacrev(lambda p: model.apply(p, X)[:, 0])(parameters(model))["weights"].reshape(9, -1)
    blocks = model.kernel(X, X[:4])
    np.testing.assert_allclose(blocks.ntk, (jacobian @ jacobian.T)[:, :4], atol=1e-13)
    np.testing.assert_allclose(blocks.ntk, FLAT @ FLAT[:4].T, rtol=1e-13)
    np.testing.assert_allclose(blocks.nngp, 0.25 * blocks.ntk, rtol=1e-14)
    assert not np.any(linear(6).kernel(X).nngp)


def test_the_entry_reads_images_and_vectors() -> None:
    for shape in ((2, 3), 6):
        model = build("linear", shape, 3, sigma=0.1)
        assert model.output_size == 3 and parameters(model)["weights"].shape == (6, 3)
        hash(model)  # a static argument of jit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 0}, "input_size: got 0"),
        ({"input_size": 6, "output_size": 0}, "output_size: got 0"),
        ({"input_size": 6, "sigma": -1.0}, "sigma: got -1"),
        ({"input_size": 6, "dtype": jnp.int32}, "dtype: got int32"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 6 for this model"):
        linear(6).apply(parameters(linear(6)), jnp.ones((3, 2)))
