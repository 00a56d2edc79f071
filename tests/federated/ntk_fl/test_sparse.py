"""Sparsified Jacobians: thresholds by counting, kernels and updates chunk by chunk, against sorting whole Jacobians."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_evolve, sparse, sparse_linearise
from fedtangent._src.federated.ntk_fl.tangent import pool_examples
from fedtangent._src.federated.wire.sparsify import count_numbers, count_products, num_kept, threshold_of, thresholds
from fedtangent._src.models import mlp
from fedtangent._src.types import Model

from ...drawn import parameters
from ...nightly import nightly
from ..toys import flat
from .descent import jacobian_of, outputs_of

RNG = np.random.default_rng(0)
ROWS, INPUTS, OUTPUTS = 11, 5, 3
X = RNG.normal(size=(ROWS, INPUTS))
Y = RNG.normal(size=(ROWS, OUTPUTS))
MASK = np.arange(ROWS) != 4
NETWORKS: dict[str, dict[str, Any]] = {
    "two layers": {"widths": (7,)},
    "three layers without biases": {"widths": (6, 4), "b_std": None, "activation": "erf"},
    "linear": {"widths": ()},
}


def network(name: str, structured: bool, dtype: Any = jnp.float64) -> Model:
    model = mlp(INPUTS, OUTPUTS, dtype=dtype, **NETWORKS[name])
    return model if structured else model._replace(structure=None)


def whole_jacobian(model: Model, params: Any, x: np.ndarray = X) -> np.ndarray:
    """[n, C, P] in the order of ``flat``, zero in rows of padding."""
    found = jacobian_of(model, params, np.asarray(x, jax.tree.leaves(params)[0].dtype))
    return found.reshape(len(x), OUTPUTS, -1) * MASK[:, None, None].astype(found.dtype)


def sorted_out(jacobian: np.ndarray, sparsity: float) -> np.ndarray:
    """The reference: each example's Jacobian sorted, all below its k-th magnitude set to zero."""
    sparse = np.zeros_like(jacobian)
    k = max(1, int(np.floor((1 - sparsity) * jacobian[0].size + 0.5)))
    for row, kept in zip(jacobian, sparse, strict=True):
        kth = np.sort(np.abs(row), axis=None)[-k]
        kept[...] = np.where(np.abs(row) >= kth, row, 0)
    return sparse


def drawn(params: Any) -> tuple[Any, np.ndarray]:
    """A change of weights and a residual to try the tangent on."""
    rng = np.random.default_rng(1)
    change = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    return change, rng.normal(size=(ROWS, OUTPUTS))


def tangent(model: Model, params: Any, **keep: Any) -> dict[str, Any]:
    """All that the tangent can be asked, compiled together."""
    change, residual = drawn(params)

    @jax.jit
    def ask(weights: Any) -> dict[str, Any]:
        pool = pool_examples(jnp.asarray(X), jnp.asarray(Y), jnp.asarray(MASK))
        found = sparse_linearise(**keep)(model, weights, pool)
        kernels = {"gram": found.gram(), "whole": found.whole()}
        moved = {"push": found.push(change), "pull": found.pull(jnp.asarray(residual))}
        return {"outputs": found.outputs, **kernels, **moved}

    return ask(jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params))


def errors(found: dict[str, Any], params: Any, sparse: np.ndarray) -> dict[str, float]:
    """Largest differences from what the Jacobian ``sparse`` gives, over the size of that."""
    change, residual = drawn(params)
    expected = {
        "gram": np.einsum("ikp,jkp->ij", sparse, sparse) / OUTPUTS,
        "whole": np.einsum("ikp,jmp->ikjm", sparse, sparse).reshape((ROWS * OUTPUTS,) * 2),
        "push": sparse @ flat(change),
        "pull": np.einsum("nkp,nk->p", sparse, residual),
    }
    pairs = {name: (flat(found[name]), value.ravel()) for name, value in expected.items()}
    return {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize(
    ("name", "sparsity", "structured"),
    nightly(
        [
            (n, s, is_known)
            for n, s in (("two layers", 0.9), ("three layers without biases", 0.85))
            for is_known in (True, False)
        ],
        [("two layers", 0.9, False), ("three layers without biases", 0.85, True)],
    ),
)
def test_kernel_and_update_are_those_of_the_sorted_jacobian(name: str, sparsity: float, structured: bool) -> None:
    """By day of each network in one way, and each way of one network."""
    model = network(name, structured)
    params = parameters(model)
    jacobian = whole_jacobian(model, params)
    found = tangent(model, params, sparsity=sparsity, dtype=jnp.float64)
    assert max(errors(found, params, sorted_out(jacobian, sparsity)).values()) < 1e-13
    np.testing.assert_allclose(found["outputs"], MASK[:, None] * outputs_of(model, params, X), atol=1e-14)
    # negative controls: the whole Jacobian, and another share
    assert min(errors(found, params, jacobian).values()) > 0.05
    assert min(errors(found, params, sorted_out(jacobian, sparsity + 0.05)).values()) > 0.01


def test_a_linear_network_and_a_sparsity_of_none() -> None:
    model = network("linear", True)
    params = parameters(model)
    jacobian = whole_jacobian(model, params)
    assert max(errors(tangent(model, params, sparsity=0.0, dtype=jnp.float64), params, jacobian).values()) < 1e-13
    found = errors(tangent(model, params, sparsity=0.8, dtype=jnp.float64), params, sorted_out(jacobian, 0.8))
    assert max(found.values()) < 1e-13


def test_units_in_groups_and_rows_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units of seven at a time, four rows of eleven a search and a block of the kernel: the last are partial."""
    monkeypatch.setattr(sparse, "CHUNK_BYTES", 2 * ROWS * OUTPUTS * INPUTS * 8)
    monkeypatch.setattr(sparse, "SEARCH_ROWS", 4)
    monkeypatch.setattr(sparse, "_rows_a_block", lambda n: 4)
    model = network("two layers", True)
    params = parameters(model)
    found = tangent(model, params, sparsity=0.7, dtype=jnp.float64)
    assert max(errors(found, params, sorted_out(whole_jacobian(model, params), 0.7)).values()) < 1e-13


@pytest.mark.parametrize("structured", nightly([True, False], [True]), ids=["structured", "any model"])
def test_float32_jacobians_and_fewer_bits(structured: bool) -> None:
    """Entries are float32 numbers, as on the wire; sums are wider. With 16 bits they are NumPy's bfloat16."""
    model = network("two layers", structured, jnp.float32)
    params = parameters(model)
    sparse = sorted_out(whole_jacobian(model, params), 0.6)
    found = tangent(model, params, sparsity=0.6)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves((found["gram"], found["pull"])))
    assert max(errors(found, params, sparse.astype(np.float64)).values()) < 1e-6
    short = sparse.astype(jnp.bfloat16).astype(np.float64)
    few = tangent(model, params, sparsity=0.6, value_bits=16)
    assert max(errors(few, params, short).values()) < 1e-6
    assert min(errors(few, params, sparse.astype(np.float64)).values()) > 1e-4


@pytest.mark.parametrize("dtype", nightly([np.float32, np.float64], [np.float32]))
def test_thresholds_leave_exactly_the_largest(dtype: Any) -> None:
    left, right = (RNG.normal(size=(6, size)).astype(dtype) for size in (13, 9))
    right[:, ::2] = 0  # dead units
    extra = RNG.normal(size=(6, 5)).astype(dtype)
    products = np.abs(left[:, :, None] * right[:, None, :]).reshape(6, -1)
    numbers = np.concatenate([products, np.abs(extra), np.abs(extra)], axis=1)
    of_products, of_extra = count_products(jnp.asarray(left), jnp.asarray(right)), count_numbers(jnp.asarray(extra), 2)

    def count(threshold: jax.Array) -> jax.Array:
        return of_products(threshold) + of_extra(threshold)

    largest = jnp.asarray(numbers.max(axis=1))
    positive = int((numbers > 0).sum(axis=1).min())
    for k in (2, 17, positive - 4):
        found = np.asarray(threshold_of(count, largest, k))
        reached = (numbers >= found[:, None]).sum(axis=1)
        kth = np.sort(numbers, axis=1)[:, -k]
        np.testing.assert_array_equal(reached, (numbers >= kth[:, None]).sum(axis=1))
        assert set(reached) <= {k, k + 1}  # only the numbers of ``extra`` are there twice
    everything = np.asarray(threshold_of(count, largest, numbers.shape[1]))
    np.testing.assert_array_equal(everything, 0)


def test_entries_equal_to_the_last_kept_one_are_all_kept() -> None:
    numbers = jnp.asarray([[3.0, -2.0, 2.0, 2.0, 1.0]])
    for k, kept in ((1, 1), (2, 4), (5, 5)):
        found = thresholds(numbers, 1 - k / 5)
        assert int(np.sum(np.abs(numbers) >= np.asarray(found)[:, None])) == kept


@pytest.mark.parametrize("kernel", nightly(["averaged", "exact"], ["exact"]))
def test_the_evolution_of_sparsified_jacobians_is_descent_with_them(kernel: str) -> None:
    """Equations (9b) and (10) in NumPy, with sparsified Jacobians in kernel and update alike."""
    model, steps, rate = network("two layers", True), 40, 0.3
    params = parameters(model)
    linearise = sparse_linearise(0.8, dtype=jnp.float64)
    given = Examples(*map(jnp.asarray, (X, Y, MASK)))
    new, info = ntk_evolve(model, params, given, rate, Evolution((steps,), kernel, "eigh", linearise))
    jacobian = whole_jacobian(model, params)
    left = np.where(MASK[:, None], Y - outputs_of(model, params, X), 0)

    def descend(in_kernel: np.ndarray, in_update: np.ndarray) -> np.ndarray:
        dual, residual, step = np.zeros_like(Y), left.copy(), rate / (MASK.sum() * OUTPUTS)
        averaged = np.einsum("ikp,jkp->ij", in_kernel, in_kernel) / OUTPUTS
        for _ in range(steps):
            dual = dual + step * residual
            moved = (
                averaged @ residual
                if kernel == "averaged"
                else np.einsum("ikp,p->ik", in_kernel, np.einsum("jkp,jk->p", in_kernel, residual))
            )
            residual = residual - step * moved
        return flat(params) + np.einsum("ikp,ik->p", in_update, dual)

    sparse = sorted_out(jacobian, 0.8)
    expected = descend(sparse, sparse)
    size = np.abs(expected - flat(params)).max()
    assert size > 0.1 and int(info["time"]) == steps
    np.testing.assert_allclose(flat(new), expected, rtol=0, atol=1e-10 * size)
    for wrong in ((jacobian, jacobian), (jacobian, sparse), (sparse, jacobian)):
        assert np.abs(flat(new) - descend(*wrong)).max() > 0.01 * size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, "sparsity: got 1.0, must be at least 0 and below 1"),
        ({"sparsity": -0.1}, "sparsity: got -0.1"),
        ({"sparsity": 0.5, "value_bits": 9}, "value_bits: got 9, must be a whole number from 10 to 32"),
        ({"sparsity": 0.5, "dtype": jnp.bfloat16}, "dtype: got 'bfloat16', allowed are float32, float64"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_linearise(**arguments)


def test_how_many_are_kept() -> None:
    assert [num_kept(s, 200) for s in (0.0, 0.5, 0.995, 0.9975, 0.9999)] == [200, 100, 1, 1, 1]
    assert num_kept(0.9, 211_100) == 21_110
