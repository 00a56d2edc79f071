"""Arithmetic on parameters, against NumPy leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import pytrees
from fedtangent._src.types import PyTree


def tree(seed: int, lead: tuple[int, ...] = ()) -> PyTree:
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(*lead, 3, 2))),
        "rest": (jnp.asarray(rng.normal(size=(*lead, 4)), jnp.float32), jnp.asarray(rng.normal(size=lead))),
    }


def check(result: PyTree, *expected: np.ndarray) -> None:
    """Leaves of ``result`` (in the order rest, rest, w) equal ``expected``, in the dtypes of ``tree``."""
    found = jax.tree.leaves(result)
    assert [leaf.dtype for leaf in found] == [jnp.float32, jnp.float64, jnp.float64]
    for leaf, value in zip(found, expected, strict=True):
        assert leaf.shape == np.shape(value)
        np.testing.assert_allclose(leaf, value, rtol=1e-6 if leaf.dtype == jnp.float32 else 1e-15)


def arrays(a: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(a)]


def test_add_subtract_scale() -> None:
    a, b = tree(0), tree(1)
    pairs = list(zip(arrays(a), arrays(b), strict=True))
    check(pytrees.add(a, b), *(x + y for x, y in pairs))
    check(pytrees.subtract(a, b), *(x - y for x, y in pairs))
    check(pytrees.scale(0.3, a), *(0.3 * x for x, _ in pairs))
    check(pytrees.scale(jnp.float64(0.3), a), *(0.3 * x for x, _ in pairs))  # no promotion of the float32 leaf


def test_zeros_of_arrays_and_of_shapes() -> None:
    a = tree(0)
    for given in (a, jax.eval_shape(lambda: a)):
        check(pytrees.zeros_like(given), *(np.zeros(x.shape) for x in arrays(a)))


def test_where_by_scalar_and_by_leading_axis() -> None:
    a, b = tree(0), tree(1)
    check(pytrees.where(jnp.bool_(True), a, b), *arrays(a))
    check(pytrees.where(jnp.bool_(False), a, b), *arrays(b))
    many, others = tree(0, (3,)), tree(1, (3,))
    chosen = pytrees.where(jnp.array([True, False, True]), many, others)
    check(chosen, *(np.stack([x[0], y[1], x[2]]) for x, y in zip(arrays(many), arrays(others), strict=True)))


def test_where_does_not_let_nan_through() -> None:
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, tree(1))
    check(pytrees.where(jnp.bool_(True), tree(0), bad), *arrays(tree(0)))


def test_take_undoes_stack() -> None:
    trees = [tree(i) for i in range(3)]
    stacked = pytrees.stack(trees)
    assert [leaf.shape for leaf in jax.tree.leaves(stacked)] == [(3, 4), (3,), (3, 3, 2)]
    for i, one in enumerate(trees):
        check(pytrees.take(stacked, i), *arrays(one))
        check(pytrees.take(stacked, jnp.int32(i)), *arrays(one))


def test_vdot_and_norm() -> None:
    a, b = tree(0), tree(1)
    expected = sum(float(np.sum(x.astype(float) * y)) for x, y in zip(arrays(a), arrays(b), strict=True))
    assert float(pytrees.vdot(a, b)) == pytest.approx(expected, rel=1e-6)
    assert float(pytrees.norm(a)) == pytest.approx(
        np.sqrt(sum(np.sum(x.astype(float) ** 2) for x in arrays(a))), rel=1e-6
    )
    assert float(pytrees.norm({})) == 0


def test_size_and_bytes_of_arrays_and_of_shapes() -> None:
    a = tree(0)
    for given in (a, jax.eval_shape(lambda: a)):
        assert pytrees.size(given) == 6 + 4 + 1
        assert pytrees.num_bytes(given) == 6 * 8 + 4 * 4 + 8
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    assert (pytrees.size(huge), pytrees.num_bytes(huge)) == (2**40, 2**42)
    assert (pytrees.size({}), pytrees.num_bytes({})) == (0, 0)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_norm_of_numbers_whose_squares_have_no_place_in_float32(size: float) -> None:
    numbers = [size * np.array([3.0, -4.0, 0.0]), size * np.array([[12.0]])]
    a = [jnp.asarray(leaf, jnp.float32) for leaf in numbers]
    exact = pytest.approx(13 * size, rel=1e-6, abs=0)
    assert float(pytrees.norm(a)) == exact
    plain = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in a)))
    assert (plain == exact) == (1e-19 < size < 1e19)  # the control


def test_the_norm_shows_numbers_that_are_not_finite_and_is_0_without_any() -> None:
    for bad in (np.nan, np.inf):
        assert not np.isfinite(pytrees.norm([jnp.array([1.0, bad]), jnp.ones(2)]))
    assert pytrees.norm([jnp.zeros(3), jnp.zeros(0)]) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_added_up_in_float32(dtype: Any) -> None:
    half = {"a": jnp.ones(3, dtype), "b": jnp.ones(2, jnp.int32), "c": jnp.ones((), jnp.float64)}
    assert [leaf.dtype for leaf in jax.tree.leaves(pytrees.wide(half))] == [jnp.float32, jnp.int32, jnp.float64]
    assert [leaf.dtype for leaf in jax.tree.leaves(pytrees.accumulator(half))] == [jnp.float32, jnp.int32, jnp.float64]
    assert [leaf.dtype for leaf in jax.tree.leaves(pytrees.cast_like(pytrees.wide(half), half))] == [
        leaf.dtype for leaf in jax.tree.leaves(half)
    ]
    assert float(pytrees.norm([jnp.full(3000, 100, dtype)])) == pytest.approx(100 * 3000**0.5, rel=1e-6)
