"""A run's state on disk: orbax writes the arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.pytrees import is_key
from fedtangent.types import PyTree


def layout(state: PyTree) -> dict[str, str]:
    """Path to dtype and shape of every leaf: ``{".server.params['W']": "float32[5,64,10]"}``."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path) or "state": f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def _on_host(leaf: Any) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def on_host(state: PyTree) -> dict[str, np.ndarray]:
    """The leaves as NumPy arrays by their paths, typed keys as their data; leaves of no elements are left out.

    Every process of a run must call it: arrays spread over hosts are gathered.
    """
    leaves = jax.tree.leaves(state)
    arrays = {path: _on_host(leaf) for path, leaf in zip(layout(state), leaves, strict=True)}
    return {path: array for path, array in arrays.items() if array.size}


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # One process writes (or reads) by itself: orbax is not to wait for the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"fedtangent_{jax.process_index()}",
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the arrays below ``folder``, which must not exist yet."""
    import orbax.checkpoint as ocp

    with _checkpointer() as writer:
        writer.save(folder.absolute(), args=ocp.args.StandardSave(arrays))


def read_state(folder: Path, like: PyTree) -> PyTree:
    """The state written to ``folder``, as ``like`` in structure, dtypes and key types; equal ``layout`` is presumed."""
    with _checkpointer() as reader:
        arrays = reader.restore(folder.absolute())
    leaves, structure = jax.tree.flatten(like)
    found = [_like(leaf, arrays[path]) if leaf.size else leaf for path, leaf in zip(layout(like), leaves, strict=True)]
    return jax.tree.unflatten(structure, found)


def _like(leaf: Any, array: np.ndarray) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.asarray(array, leaf.dtype)
    # A copy in JAX's own memory, tied to no device, as a fresh state is: the compiled rounds are then the same ones.
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(leaf))
    return jnp.array(array, leaf.dtype)
