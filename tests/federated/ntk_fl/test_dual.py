"""Thousands of steps by a few hundred products: the Chebyshev series, its error and what guards it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial import chebyshev

from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve
from fedtangent._src.federated.ntk_fl.dual import (
    CUT,
    by_products,
    chebyshev_degree,
    chebyshev_dual,
    chebyshev_series,
    method_seconds,
)
from fedtangent._src.federated.ntk_fl.tangent import averaged_product, linearise_network, pool_examples
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import mlp

from ...drawn import parameters

TIMES = (1, 2, 37, 400, 2000)


def polynomial(z: np.ndarray, t: int) -> np.ndarray:
    """``sum_{u < t} (1 - z)^u`` in extended precision."""
    z = z.astype(np.longdouble)
    small = np.minimum(z, 0.5)
    return np.where(z < 0.5, -np.expm1(t * np.log1p(-small)), 1 - (1 - z) ** t) / z


@pytest.mark.parametrize("top", [2.0, 1.1, 0.02])
def test_the_series_is_the_polynomial_to_the_cut(top):
    coefficients, degree = chebyshev_series(top, TIMES)
    assert int(degree) <= coefficients.shape[1] - 1 == chebyshev_degree(2000) < 400
    z = np.concatenate([np.geomspace(1e-9, 1e-2, 200), np.linspace(0.005, 1, 2000)]) * top
    kept = np.asarray(coefficients)[:, : int(degree) + 1]
    for row, t in zip(kept, TIMES, strict=True):
        expected = polynomial(z, t)
        assert np.abs(chebyshev.chebval(1 - 2 * z / top, row) - expected).max() < 3 * CUT * t
    fewer = chebyshev.chebval(1 - 2 * z / top, kept[-1, : int(0.6 * int(degree))])  # negative control
    assert np.abs(fewer - polynomial(z, 2000)).max() > 1e-8 * 2000


def test_the_degree_grows_as_the_root_of_the_time_and_never_beyond_it():
    assert [chebyshev_degree(t) for t in (1, 2, 5)] == [0, 1, 4]
    times = 10 ** np.arange(3, 8)
    slope = np.polyfit(np.log(times), np.log([chebyshev_degree(int(t)) for t in times]), 1)[0]
    assert abs(slope - 0.5) < 0.005


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The averaged kernel of a network on 250 digits, and a residual."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    model = mlp(64, 10, (40,), dtype=jnp.float64)
    x, y = loaded.data[:250] / 16, np.eye(10)[loaded.target[:250]] - 0.1
    params = parameters(model)
    kernel, outputs = jax.jit(lambda p: (empirical_ntk(model, p, x), model.apply(p, x)))(params)
    return np.asarray(kernel), y - np.asarray(outputs)


@functools.cache
def by_series(degree: int | None = None):
    kernel, residual = (jnp.asarray(part) for part in digits())
    return jax.jit(
        lambda step, largest: chebyshev_dual(lambda g: kernel @ g, residual, step, (100, 2000), largest, degree=degree)
    )


@pytest.mark.parametrize("share", [0.03, 0.5, 0.99])
def test_it_equals_the_spectrum_and_the_steps_on_real_digits(share):
    """Against NumPy's eigendecomposition and NumPy's loop, to 1e-9 of the dual at a small and a large time."""
    kernel, residual = digits()
    eigenvalues, vectors = np.linalg.eigh(kernel)
    step = share * 2 / eigenvalues[-1]
    dual, products, inside = by_series()(step, min(1.1 * eigenvalues[-1], 2 / step))
    assert bool(inside) and 0 < int(products) < 400
    positive = np.maximum(eigenvalues, 1e-12)
    for row, t in zip(dual, (100, 2000), strict=True):
        response = step * polynomial(step * positive, t).astype(float)
        expected = vectors @ (response[:, None] * (vectors.T @ residual))
        assert np.abs(row - expected).max() < 1e-9 * np.abs(expected).max()
    taken, left = np.zeros_like(residual), residual
    for _ in range(2000):
        taken, left = taken + step * left, left - step * kernel @ left
    assert np.abs(dual[1] - taken).max() < 1e-9 * np.abs(taken).max()
    few = by_series(int(products) // 2)(step, min(1.1 * eigenvalues[-1], 2 / step))[0]  # negative control
    assert np.abs(few[1] - taken).max() > 1e-7 * np.abs(taken).max()


@pytest.mark.slow
def test_an_eigenvalue_outside_of_the_interval_is_noticed_and_the_steps_are_taken():
    kernel, residual = (jnp.asarray(part) for part in digits())
    largest = float(np.linalg.eigvalsh(kernel)[-1])
    inside = by_series()(0.3 / largest, 0.6 * largest)[2]
    assert not bool(inside) and bool(by_series()(0.3 / largest, largest)[2])

    def evolve(believed, method="chebyshev"):
        step, active = jnp.asarray(0.3 / largest), jnp.bool_(True)
        return by_products(lambda g: kernel @ g, residual, jnp.asarray(believed), (10, 300), method, step, active)

    expected = evolve(largest, "iterate")[0]
    for believed in (largest, 0.6 * largest):  # Lanczos' value comes from below
        dual, products = evolve(believed)
        assert np.abs(dual - expected).max() < 1e-10 * np.abs(expected).max()
        assert (int(products) < 200) == (believed == largest)
    # a residual without a part at the large eigenvalues does not mind them
    vectors = np.linalg.eigh(kernel)[1][:, :200]
    small = jnp.asarray(vectors @ (vectors.T @ residual))
    assert bool(chebyshev_dual(lambda g: kernel @ g, small, 0.3 / largest, (50,), 0.6 * largest)[2])


def test_where_it_is_not_active_nothing_is_computed():
    kernel, residual = (jnp.asarray(part) for part in digits())
    dual, products, _ = chebyshev_dual(lambda g: kernel @ g, residual, 1e-3, (2000,), 1.0, active=False)
    assert int(products) == 0 and not np.any(dual)


def three_outputs():
    """A network of three outputs with its parameters, and nine examples of which the last is masked."""
    model = mlp(4, 3, (12,), dtype=jnp.float64)
    rng = np.random.default_rng(0)
    x, y, mask = jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(rng.normal(size=(9, 3))), jnp.arange(9) < 8
    return model, parameters(model), x, y, mask


def test_products_without_the_kernel_in_memory():
    """H g by passes through the network is H g."""
    model, params, x, y, mask = three_outputs()
    tangent = linearise_network(model, params, pool_examples(x, y, mask))
    g = jnp.asarray(np.random.default_rng(1).normal(size=(9, 3))) * mask[:, None]
    found = averaged_product(tangent, (9, 3))(g)
    np.testing.assert_allclose(found, tangent.gram() @ g, rtol=0, atol=1e-12)
    assert np.abs(tangent.push(tangent.pull(g)) - found).max() > 0.01  # the whole kernel's product is another one


@pytest.mark.slow
def test_the_evolution_without_the_kernel_in_memory():
    model, params, x, y, mask = three_outputs()
    given, series = Examples(x, y, mask), Evolution((3, 150), method="chebyshev")
    held, info = ntk_evolve(model, params, given, 0.4, series)
    free, without = ntk_evolve(model, params, given, 0.4, dataclasses.replace(series, kernel_bytes=0))
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(free), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)
    for name in ("lambda_max", "losses", "function_gap"):
        np.testing.assert_allclose(without[name], info[name], rtol=1e-9, err_msg=name)


def test_the_cheapest_method_by_measured_costs():
    def cheapest(params: int, examples: int, evolution: Evolution) -> str:
        seconds = method_seconds(evolution, params, examples, 10)
        return min(seconds, key=seconds.__getitem__)

    long, many = Evolution((100, 2000)), method_seconds(Evolution((100, 2000)), 79510, 4000, 10)
    assert cheapest(1000, 20, long) == "eigh" and cheapest(79510, 4000, long) == "chebyshev"
    assert cheapest(79510, 4000, Evolution((1,))) in ("chebyshev", "iterate")
    assert set(many) == {"eigh", "chebyshev", "iterate"} and many["iterate"] > 4 * many["chebyshev"]
    assert "eigh" not in method_seconds(Evolution((2000,), "exact"), 79510, 4000, 10)
    assert "eigh" not in method_seconds(Evolution((2000,)), 79510, 40_000, 10)
    assert set(method_seconds(Evolution((2000,), loss="cross_entropy"), 100, 11, 3)) == {"iterate", "multirate"}
    assert cheapest(79510, 4000, Evolution((100, 2000), loss="cross_entropy")) == "multirate"
    assert cheapest(79510, 4000, Evolution((100, 2000), "exact", loss="cross_entropy")) == "multirate"
    assert cheapest(79510, 4000, Evolution((100,), loss="cross_entropy")) == "iterate"
