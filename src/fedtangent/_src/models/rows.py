"""A network's output for an example must depend on that example only: batches are padded, and kernels are in blocks."""

from __future__ import annotations

import contextlib
import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.types import Apply, Array, Key, Model

ROWS = 4
_measured: weakref.WeakSet[Apply] = weakref.WeakSet()  # functions whose rows did not influence each other


def module_of(apply: Apply) -> str:
    """Returns the module in which a network's function is written; a wrapper has the module of its network."""
    function: object = apply
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def check_rows(model: Model, shape: tuple[int, ...], dtype: np.dtype, name: str = "model") -> None:
    """Raises ``ValueError`` if the output of a network for an example depends on the other examples of the batch.

    Such a network (it normalises over its batch, say) would read the padding of a batch as examples. It is measured
    once for each network, by changing the first of four examples. The package's own networks are measured in the tests.

    Args:
        model: The network.
        shape: Shape of an example.
        dtype: Dtype of an example.
        name: Name of the argument, for the error message.
    """
    if module_of(model.apply).startswith("fedtangent.") or model.apply in _measured:
        return
    with jax.ensure_compile_time_eval():
        change = float(change_of_others(model, shape, dtype))
    if not change <= np.sqrt(jnp.finfo(jnp.float32).eps):
        raise ValueError(
            f"{name}: got {model.name}, whose output for an example changes by {change:.2g} of its size with another "
            "example of the batch, must depend on its own example only: batches are padded. Normalise over features or "
            "groups of channels, not over the batch"
        )
    with contextlib.suppress(TypeError):  # of an object that cannot be kept weakly
        _measured.add(model.apply)


def change_of_others(model: Model, shape: tuple[int, ...], dtype: np.dtype) -> Float[Array, ""]:
    """Returns how far outputs move, relative to the largest, when another example of their batch changes, a scalar.

    The parameters are drawn near those of ``init``, so that weights that start at 0 hide nothing.

    Args:
        model: The network.
        shape: Shape of an example.
        dtype: Dtype of an example; whole numbers are drawn from 0 and 1.
    """
    rng, size = np.random.default_rng(0), (ROWS, *shape)
    rows = rng.normal(size=size) if jnp.issubdtype(dtype, jnp.floating) else rng.integers(0, 2, size)
    changed = rows.copy()
    changed[0] = 1 - 2 * rows[0] if jnp.issubdtype(dtype, jnp.floating) else 1 - rows[0]

    @jax.jit
    def others(key: Key, x: Shaped[Array, "n ..."]) -> Float[Array, "m C"]:
        leaves, structure = jax.tree.flatten(model.init(key))
        near = [w + jax.random.normal(jax.random.fold_in(key, i), w.shape, w.dtype) / 8 for i, w in enumerate(leaves)]
        return model.apply(jax.tree.unflatten(structure, near), x)[1:]

    key = jax.random.key(0)
    before, after = others(key, jnp.asarray(rows, dtype)), others(key, jnp.asarray(changed, dtype))
    largest = jnp.max(jnp.abs(before))
    return jnp.max(jnp.abs(after - before)) / jnp.where(largest > 0, largest, 1)
