"""Checks that evaluate a user's network: examples of a batch must be independent, and every token must be read."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.types import AnyArray, Apply, Array, Key, Model, PyTree

ROWS = 8
_measured: weakref.WeakSet[Apply] = weakref.WeakSet()  # functions whose rows did not influence each other


def module_of(apply: Apply) -> str:
    """Returns the name of the Python module that defines ``apply``, after unwrapping a ``functools.partial``."""
    function: object = apply
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def check_independent_rows(model: Model, shape: tuple[int, ...], dtype: np.dtype, name: str = "model") -> None:
    """Raises ``ValueError`` if the output of a network for an example depends on the other examples of the batch.

    Such a network (one with batch normalisation, say) would count the padding of a batch as examples. The check
    evaluates the network on a batch, on batches that share only one example with it, and on a batch with only that
    example. It does so once for each network, and never for networks of this package, which the tests cover.

    Args:
        model: The network.
        shape: Shape of an example.
        dtype: Dtype of an example.
        name: Name of the argument, for the error message.
    """
    if module_of(model.apply).startswith("fedtangent.") or model.apply in _measured:
        return
    change, rounding = change_by_others(model, shape, dtype)
    if change > np.sqrt(rounding):
        raise ValueError(
            f"{name}: got {model.name}, whose output for an example changes by {change:.2g} of its size with another "
            "example of the batch, must depend on its own example only: batches are padded. Normalise over features or "
            "groups of channels, not over the batch"
        )
    with contextlib.suppress(TypeError):  # of an object that cannot be kept weakly
        _measured.add(model.apply)


def change_by_others(model: Model, shape: tuple[int, ...], dtype: np.dtype) -> tuple[float, float]:
    """Measures how much the output for one example changes with the other examples of its batch.

    Returns the largest change divided by the largest output, and the epsilon of the outputs' dtype. Other examples are
    positive and of three sizes, or absent. Noise is added to the parameters of ``init``, so that weights that start at
    0 hide nothing. An output that is always NaN does not count; one that is NaN only at times makes the change
    infinite.

    Args:
        model: The network.
        shape: Shape of an example.
        dtype: Dtype of an example; whole numbers are drawn from 0 and 1.
    """
    rng, is_floating = np.random.default_rng(0), jnp.issubdtype(dtype, jnp.floating)
    last = rng.random(shape) if is_floating else rng.integers(0, 2, shape)

    def batch(size: float) -> np.ndarray:
        others = size * rng.random((ROWS - 1, *shape)) if is_floating else rng.integers(0, 2, (ROWS - 1, *shape))
        return np.concatenate([others, last[None]]).astype(dtype)

    @jax.jit
    def outputs(key: Key, x: Shaped[Array, "n ..."]) -> Float[Array, "2 C"]:
        params = _near_the_start(model, key)
        return jnp.stack([model.apply(params, x)[-1], model.apply(params, x[-1:])[0]])

    with jax.ensure_compile_time_eval():  # also where a user's function is traced
        results = [np.asarray(outputs(jax.random.key(0), batch(size))) for size in (1.0, 8.0, 0.125)]
    alone_and_beside = np.concatenate(results).astype(np.float64)
    first = alone_and_beside[:1]
    same = (alone_and_beside == first) | (np.isnan(alone_and_beside) & np.isnan(first))
    change = np.abs(np.where(same, 0, alone_and_beside) - np.where(same, 0, first)).max()
    largest = np.abs(first[np.isfinite(first)]).max(initial=0)
    rounding = float(jnp.finfo(results[0].dtype).eps)
    return math.inf if np.isnan(change) else float(change) / (largest if largest > 0 else 1.0), rounding


def _near_the_start(model: Model, key: Key) -> PyTree:
    """Draws parameters with ``init`` and adds Gaussian noise, so that weights that start at 0 hide nothing."""
    leaves, structure = jax.tree.flatten(model.init(key))
    near = [w + jax.random.normal(jax.random.fold_in(key, i), w.shape, w.dtype) / 8 for i, w in enumerate(leaves)]
    return jax.tree.unflatten(structure, near)


@functools.partial(jax.jit, static_argnums=0)  # compiled once for a model, not for every run
def _outputs_near_the_start(model: Model, key: Key, x: Shaped[Array, "n ..."]) -> Float[Array, "n C"]:
    return model.apply(_near_the_start(model, key), x)


def check_reads(model: Model, *inputs: Shaped[AnyArray, "n ..."] | None) -> None:
    """Raises ``ValueError`` if a network does not tell the largest token of the data from other tokens.

    Its vocabulary is then too small, and JAX raises no error: an embedding reads its last row, or NaN, and a one-hot
    vector is 0. So the error is raised if the outputs for this token are NaN, or equal to those for the token before it
    (both read the last row) or for the token -2 (both one-hot vectors are 0). It is not raised if the outputs for token
    0 are the same. Networks that state their vocabulary are not checked.

    Args:
        model: The network.
        inputs: Arrays of examples. Real numbers and None are ignored.
    """
    tokens = [np.asarray(x) for x in inputs if x is not None and x.size and jnp.issubdtype(x.dtype, jnp.integer)]
    largest = max((int(x.max()) for x in tokens), default=0)
    if model.vocabulary is not None or largest == 0:
        return
    tried = np.array([largest, largest - 1, -2, 0], np.int32)
    x = np.broadcast_to(tried.reshape(-1, *(1 for _ in tokens[0].shape[1:])), (len(tried), *tokens[0].shape[1:]))
    with jax.ensure_compile_time_eval():
        outputs = np.asarray(_outputs_near_the_start(model, jax.random.key(0), x))
    is_nan, same = np.isnan(outputs).any(axis=1), (outputs == outputs[0]).all(axis=1)
    if (is_nan[0] and not is_nan[3]) or (same[1:3].any() and not same[3]):
        read_as = "NaN" if is_nan[0] else "another token"
        raise ValueError(
            f"model: got {model.name}, which reads the token {largest} of the data as {read_as}, must tell "
            f"{largest + 1} tokens apart; if it does, state it: model._replace(vocabulary={largest + 1})"
        )
