"""Divergence of the global model: noticed between chunks, traced back to the last good round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.types import Array, PyTree


@jax.jit
def _all_finite(tree: PyTree) -> Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.bool_(True)


def is_finite(state: PyTree) -> bool:
    """Whether the server's part of ``state`` (all of a state that has none) holds finite numbers only."""
    return bool(_all_finite(getattr(state, "server", state)))


def broken_round(infos: dict[str, Any]) -> int | None:
    """The first row of ``infos`` in which no client that trained saw a finite loss, or None.

    One client's broken data are that client's trouble; when nobody's loss is finite it is the model's.
    """
    if "loss" not in infos:
        return None
    active = infos["cohort"].weight > 0
    finite = np.isfinite(infos["loss"])
    if finite.shape != active.shape:
        return None
    rows = np.flatnonzero(active.any(axis=1) & ~(finite & active).any(axis=1))
    return int(rows[0]) if rows.size else None


def refused_round(infos: dict[str, Any]) -> tuple[int, str] | None:
    """The first row of ``infos`` in which a server refused a learning rate as unstable, and why; or None.

    Such a server reports ``refused``, ``learning_rate`` and ``stable_learning_rate``, each [R, K]; its model is as it
    was before that round.
    """
    if "refused" not in infos:
        return None
    refused = np.asarray(infos["refused"])
    rows = np.flatnonzero(refused.any(axis=1))
    if rows.size == 0:
        return None
    row = int(rows[0])
    model = int(np.flatnonzero(refused[row])[0])
    given, stable = (float(infos[name][row][model]) for name in ("learning_rate", "stable_learning_rate"))
    return row, f"learning rate {given:.6g} is above {stable:.6g}, the largest stable one"


def copied(state: PyTree) -> PyTree:
    """The state in buffers of its own, which the next chunk cannot take over."""
    return jax.tree.map(jnp.copy, state)
