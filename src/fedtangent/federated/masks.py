"""Which parameters stay with a client: masks over a model's parameters, and the two parts that they make.

A part has the structure of the parameters with None for the leaves of the other part, so that only what a part holds
is broadcast, averaged, sent and counted in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from fedtangent.types import Model, PyTree

Private: TypeAlias = PyTree | str | Sequence[str] | Callable[[str], bool]


def parameter_paths(params: PyTree) -> list[str]:
    """The path of every parameter, such as ``"dense/kernel"`` or ``"0/1"``, in the order of the tree's leaves."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]


def private_mask(model: Model, private: Private) -> PyTree:
    """A tree of bools like ``model``'s parameters: True for those that stay with the client.

    Args:
        private: such a tree; a function from a parameter's path to a bool; a regular expression, which is searched
            for in the path; or names: each a whole path or the beginning of one that ends before a ``/``.

    Raises ``ValueError`` for a tree of another structure, a name or an expression that matches nothing, and for a
    mask of no parameter or of all of them.
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    paths, structure = parameter_paths(params), jax.tree.structure(params)
    chosen = _chosen(private, paths, structure)
    shown = private if isinstance(private, str | list | tuple) and not any(chosen) else "a mask"
    if not any(chosen):
        raise ValueError(f"private: got {shown!r} that matches no parameter; the parameters are {', '.join(paths)}")
    if all(chosen):
        raise ValueError(
            "private: matches all parameters, which leaves nothing to share (local_only shares nothing); the "
            f"parameters are {', '.join(paths)}"
        )
    return jax.tree.unflatten(structure, chosen)


def _chosen(private: Private, paths: list[str], structure: jax.tree_util.PyTreeDef) -> list[bool]:
    """Whether each parameter is private."""
    if isinstance(private, str):
        try:
            pattern = re.compile(private)
        except re.error as error:
            raise ValueError(f"private: got {private!r}, which is no regular expression: {error}") from error
        return [pattern.search(path) is not None for path in paths]
    if callable(private):
        return [bool(private(path)) for path in paths]
    if isinstance(private, list | tuple | set | frozenset) and all(isinstance(name, str) for name in private):
        unknown = [name for name in private if not any(_names(name, path) for path in paths)]
        if unknown:
            raise ValueError(f"private: got the name {unknown[0]!r}; the parameters are {', '.join(paths)}")
        return [any(_names(name, path) for name in private) for path in paths]
    given, leaves = jax.tree.structure(private), jax.tree.leaves(private)
    if given != structure:
        raise ValueError(f"private: got a mask of structure {given}, but the parameters have {structure}")
    if not all(isinstance(leaf, bool | np.bool_) for leaf in leaves):
        raise ValueError(f"private: a mask must hold True or False only; got {leaves}")
    return [bool(leaf) for leaf in leaves]


def _names(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def shared_part(mask: PyTree, params: PyTree) -> PyTree:
    """The parameters that travel, None for the private ones."""
    return jax.tree.map(lambda private, leaf: None if private else leaf, mask, params)


def private_part(mask: PyTree, params: PyTree) -> PyTree:
    """The parameters that stay with the client, None for the shared ones."""
    return jax.tree.map(lambda private, leaf: leaf if private else None, mask, params)


def joined(shared: PyTree, private: PyTree) -> PyTree:
    """The parameters of which these are the two parts."""
    return jax.tree.map(lambda s, p: p if s is None else s, shared, private, is_leaf=lambda leaf: leaf is None)
