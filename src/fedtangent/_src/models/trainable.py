"""Models of which a part is trained: some parameters, or low-rank factors of weight matrices; the rest is frozen.

Only the trained parameters are parameters of such a model, and count in messages, bytes on the wire, linearisations and
tangent kernels. In its tree of parameters the frozen ones are None, which JAX counts as no leaf.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.checks import instance, number, whole
from fedtangent._src.models.linearised import check_shapes
from fedtangent._src.models.rows import module_of
from fedtangent._src.types import AnyArray, Apply, Array, Key, Model, PyTree

Select: TypeAlias = str | Callable[[str], bool] | PyTree
"""Regular expression searched for in a parameter's path, a function of that path, or a tree of bools."""


def trainable(model: Model, params: PyTree, select: Select) -> Model:
    """Returns the model in which only the selected parameters are trained; the others keep their values in ``params``.

    ``model.init(key)`` of the result returns the selected part of ``params``, whatever the key, so that a run begins
    there. ``trainable(model, params, "Dense_1/")`` of a flax network trains the layer ``Dense_1``.

    Args:
        model: The network.
        params: Parameters of the network, for example pre-trained weights.
        select: The trained parameters: a regular expression that is searched for in a parameter's path, such as
            ``"Dense_1/kernel"`` or ``"^2/"``; a function of the path that returns True or False; or a tree of bools
            with the structure of the parameters.

    Returns:
        The model, whose parameters are a tree like ``params`` with None for those that are frozen.

    Raises:
        ValueError: ``params`` do not fit the model, ``select`` has another form or does not say True or False for each
            parameter, or it selects none (the message lists all paths).

    Example, the last layer of a dense network:

        >>> import jax, fedtangent as ft
        >>> network = ft.models.mlp(3, 2, widths=(16,))
        >>> weights = network.init(jax.random.key(0))
        >>> last = ft.models.trainable(network, weights, "^2/")
        >>> jax.tree.map(jax.numpy.shape, last.init(jax.random.key(1)))
        [(None, None), (), ((16, 2), (1, 2))]
    """
    check_shapes("params", params, model)
    mask, arrays = selection("select", model, select), jax.tree.map(jnp.asarray, params)
    trained, frozen = part_of(mask, arrays), rest_of(mask, arrays)

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return model.apply(joined(params, _as_wide(frozen, params)), x)

    return _of_part(model, f"a part of {model.name}", lambda key: trained, apply)


class LowRank(NamedTuple):
    """Factors of the change of a weight matrix W [in, out], which becomes ``W + alpha / rank * a b``.

    Attributes:
        a: Factor [in, rank], which starts as Gaussian noise.
        b: Factor [rank, out], which starts at zero.
    """

    a: Float[Array, "in rank"]
    b: Float[Array, "rank out"]


def lora(model: Model, params: PyTree, rank: int, select: Select = "", alpha: float | None = None) -> Model:
    """Returns the model in which weight matrices are changed by trained factors of low rank (LoRA).

    Each selected matrix W of ``params`` becomes ``W + alpha / rank * a b``; W and all other parameters are frozen. The
    factor b starts at zero, so a run begins with the function of ``params``. The entries of a have variance 1 / rank
    (the source states no number): with the default ``alpha``, the average tangent kernel of the factors at the start
    then equals the kernel of the full matrices.

    Source: Hu et al., 2021 (arXiv 2106.09685), section 4.1, whose matrices act from the left: A is a', B is b'.

    Args:
        model: The network.
        params: Parameters of the network, for example pre-trained weights.
        rank: Rank of the change of a matrix.
        select: The changed matrices, as for ``trainable``; by default all. Only selected parameters of two axes or more
            and more than one row are changed: a kernel [height, width, in, out] of a convolution is the matrix [height
            * width * in, out].
        alpha: Factor of the change; None for ``rank``.

    Returns:
        The model, whose parameters are a tree like ``params`` with a ``LowRank`` for each selected matrix, else None.

    Raises:
        ValueError: ``params`` do not fit the model, ``select`` has another form, it selects no matrix (the message
            lists all of them), ``rank`` is below 1, or ``alpha`` is not positive.

    Example:

        >>> import jax, fedtangent as ft
        >>> network = ft.models.mlp(3, 2, widths=(16,))
        >>> adapted = ft.models.lora(network, network.init(jax.random.key(0)), rank=1, select="^0/")
        >>> adapted.init(jax.random.key(1))[0][0].b.shape
        (1, 16)
    """
    check_shapes("params", params, model)
    whole("rank", rank)
    scale = 1.0 if alpha is None else number("alpha", alpha, above=0) / rank
    mask, arrays = selection("select", model, select, are_matrices=True), jax.tree.map(jnp.asarray, params)

    def init(key: Key) -> PyTree:
        leaves, structure = jax.tree.flatten(part_of(mask, arrays))
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, [_factors(k, w, rank) for k, w in zip(keys, leaves, strict=True)])

    def apply(factors: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        def changed(pair: LowRank | None, weight: Array | None) -> Array | None:
            return (
                weight if pair is None or weight is None else weight + (scale * (pair.a @ pair.b)).reshape(weight.shape)
            )

        return model.apply(jax.tree.map(changed, factors, _as_wide(arrays, factors), is_leaf=_is_place), x)

    return _of_part(model, f"LoRA of rank {rank} of {model.name}", init, apply)


def _factors(key: Key, weight: Array, rank: int) -> LowRank:
    """Draws the initial LoRA factors of a weight matrix, in its dtype: ``a`` with variance 1 / rank, ``b`` zero."""
    columns = weight.shape[-1]
    a = jax.random.normal(key, (weight.size // columns, rank), weight.dtype) / jnp.sqrt(rank).astype(weight.dtype)
    return LowRank(a, jnp.zeros((rank, columns), weight.dtype))


def _is_place(leaf: PyTree) -> bool:
    """Returns whether a subtree of LoRA's parameters stands for one parameter of the network: a ``LowRank`` or None.

    If the network itself has ``LowRank`` parameters, these do not: their ``a`` is then a ``LowRank`` or None.
    """
    return leaf is None or (isinstance(leaf, LowRank) and not (leaf.a is None or isinstance(leaf.a, LowRank)))


def _of_part(model: Model, name: str, init: Callable[[Key], PyTree], apply: Apply) -> Model:
    apply.__module__ = module_of(model.apply)
    return model._replace(name=name, init=init, apply=apply, kernel=None, structure=None, at_width=None)


def _as_wide(frozen: PyTree, trained: PyTree) -> PyTree:
    """Returns the frozen parameters, converted to float64 if any of the trained ones is float64."""
    if not any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(trained)):
        return frozen
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), frozen)


# ---- parts of a tree of parameters, with None in place of the parameters of the other part


def selection(name: str, model: Model, select: Select, are_matrices: bool = False) -> PyTree:
    """Builds the mask of the selected parameters of a model: a tree of bools with the structure of the parameters.

    Args:
        name: Name of the argument, for the error message.
        model: Model whose parameters are selected.
        select: A regular expression, a function of a path, or a tree of bools, as for ``trainable``.
        are_matrices: Whether only weight matrices can be selected.

    Raises:
        ValueError: The expression is invalid, no parameter is selected, a tree of bools has another structure than the
            parameters, or a value of the tree or the function is not a bool.
    """
    instance("model", model, Model)
    params = model.shapes
    structure: Any = jax.tree.structure(params)
    by_path = jax.tree.leaves_with_path(params)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in by_path}
    if isinstance(select, str):
        try:
            pattern = re.compile(select)
        except re.error as error:
            raise ValueError(f"{name}: got {select!r}, which is no regular expression: {error}") from error
        chosen = [pattern.search(path) is not None for path in shapes]
    elif callable(select):
        chosen = [select(path) for path in shapes]
    elif structure != jax.tree.structure(select):
        mask_structure = jax.tree.structure(select)
        raise ValueError(f"{name}: got a mask of structure {mask_structure}, but the parameters have {structure}")
    else:
        chosen = jax.tree.leaves(select)
    if not all(isinstance(leaf, bool | np.bool_) for leaf in chosen):
        raise ValueError(f"{name}: got {chosen}, must be True or False for each parameter")
    # a bias may have the shape [1, units]
    allowed = {
        path for path, shape in shapes.items() if not are_matrices or (len(shape) >= 2 and math.prod(shape[:-1]) > 1)
    }
    mask = [bool(leaf) and path in allowed for path, leaf in zip(shapes, chosen, strict=True)]
    if not any(mask):
        one, all_ = ("matrix", "matrices") if are_matrices else ("parameter", "parameters")
        paths = ", ".join(path for path in shapes if path in allowed) or "an array without a name"
        raise ValueError(f"{name}: got {select!r}, which matches no {one}; the {all_} are {paths}")
    return jax.tree.unflatten(structure, mask)


def part_of(mask: PyTree, params: PyTree) -> PyTree:
    """Returns the selected parameters, with None for the others.

    Args:
        mask: Whether each parameter is selected: a tree of bools, as ``selection`` builds it.
        params: All parameters of a model.
    """
    return jax.tree.map(lambda is_selected, leaf: leaf if is_selected else None, mask, params)


def rest_of(mask: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters that are not selected, with None for the others.

    Args:
        mask: Whether each parameter is selected: a tree of bools, as ``selection`` builds it.
        params: All parameters of a model.
    """
    return jax.tree.map(lambda is_selected, leaf: None if is_selected else leaf, mask, params)


def joined(part: PyTree, rest: PyTree) -> PyTree:
    """Joins the selected and the other parameters of a model to one tree; inverts ``part_of`` and ``rest_of``.

    Args:
        part: The selected parameters, with None for the others.
        rest: The other parameters, with None for the selected ones.
    """
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf, part, rest, is_leaf=lambda leaf: leaf is None
    )
