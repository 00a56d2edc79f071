"""Tangent features: the gradient of a network of one output, on which TCT trains a linear model."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int, Shaped

from fedtangent._src import checks
from fedtangent._src.models.rows import check_independent_rows
from fedtangent._src.types import AnyArray, Apply, Array, Key, Model, PyTree

BLOCK = 64  # examples whose whole gradients are in memory at once


def tangent_features(
    model: Model, params: PyTree, x: Shaped[AnyArray, "n ..."], num_features: int | None = None, seed: int = 0
) -> Float[Array, "n p"]:
    """Computes the features ``phi(x) = df(x)/dw`` of a network of one output f, at a sample of its parameters.

    TCT (train, convexify, train) uses them to replace a network by a linear model. A network of C outputs is trained,
    its last layer is replaced by a random one of a single output, and the gradient of that output, at randomly chosen
    parameters, is the input of a linear model of C outputs, ``ft.models.linear(p, C)``, which starts at zero. With
    all parameters ``phi phi'`` is exactly the empirical tangent kernel of the network with one output.

    Source: Yu et al., 2022 (arXiv 2207.06343); definition as in the authors' code (github.com/yaodongyu/TCT,
    ``compute_eNTK``), whose features are neither centred nor normalised.

    Args:
        model: The network of ``params`` with a last layer of one output.
        params: Trained parameters, of a network with any number of outputs. Parameters whose shapes differ from the
            model's (the last layer's) are drawn anew from ``seed``.
        x: Examples [n, ...].
        num_features: Number p of parameters, drawn without replacement from ``seed``; None for all, in their order.
        seed: Seed of the new last layer and of the sample. Training and test features need the same seed.

    Returns:
        Features [n, p] in the dtype of the parameters.

    Raises:
        ValueError: The model has several outputs or its output for an example depends on other examples, its parameters
            have another structure than ``params``, no shape agrees, or ``num_features`` or ``seed`` is out of range.

    Example, a network of three outputs:

        >>> import jax, fedtangent as ft
        >>> network, one_output = (ft.models.mlp(4, c, widths=(16,)) for c in (3, 1))
        >>> trained = network.init(jax.random.key(0))
        >>> ft.kernels.tangent_features(one_output, trained, jax.numpy.ones((5, 4)), num_features=50).shape
        (5, 50)
    """
    checks.instance("model", model, Model)
    if model.output_size != 1:
        raise ValueError(f"model: got {model.output_size} outputs, must be the trained network with one output")
    checks.seed(seed)
    layer_key, sample_key = jax.random.split(jax.random.key(seed))
    weights = _with_new_outputs(model, params, layer_key)
    size = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(weights))
    if num_features is None:
        sample = jnp.arange(size)
    else:
        checks.whole("num_features", num_features, 1, size)
        sample = jax.random.permutation(sample_key, size)[:num_features]
    check_independent_rows(model, x.shape[1:], x.dtype)
    return _gradients(model.apply, weights, jnp.asarray(x), sample)


def _with_new_outputs(model: Model, params: PyTree, key: Key) -> PyTree:
    """Draws anew the parameters that have other shapes in ``model`` (the last layer), and keeps the others."""
    fresh = model.init(key)
    structure, allowed = (str(jax.tree.structure(tree)) for tree in (params, fresh))
    if structure != allowed:
        raise ValueError(f"params: got the structure {structure}, must be {allowed}, as {model.name} has it")
    if all(np.shape(new) != np.shape(old) for new, old in zip(*map(jax.tree.leaves, (fresh, params)), strict=True)):
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
        raise ValueError(f"params: got arrays of shapes {shapes}, must have a shape in common with {model.name}")
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return jax.tree.map(lambda new, old: jnp.asarray(old if new.shape == np.shape(old) else new, dtype), fresh, params)


@partial(jax.jit, static_argnums=0)
def _gradients(
    apply: Apply, weights: PyTree, x: Shaped[Array, "n ..."], sample: Int[Array, "p"]
) -> Float[Array, "n p"]:
    """Computes the output's gradient by the sampled parameters for each example, in blocks of examples."""

    def of_one(example: Shaped[Array, "..."]) -> Float[Array, "p"]:
        gradient = jax.grad(lambda w: apply(w, example[None])[0, 0])(weights)
        return ravel_pytree(gradient)[0][sample]

    return jax.lax.map(of_one, x, batch_size=BLOCK)
