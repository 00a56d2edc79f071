"""Models linearised in their weights: the first-order Taylor expansion of a network about fixed parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.checks import instance
from fedtangent._src.models.rows import module_of
from fedtangent._src.types import AnyArray, Array, Model, PyTree


def linearised(model: Model, at: PyTree) -> Model:
    """Returns the first-order expansion of a network in its weights w, ``f(at, x) + df(at, x) (w - at)``, as a model.

    Here f(w, x) is the output of the network and df its derivative by the weights. The result has the network's
    ``init``, which does not return ``at``, and no analytic kernel.

    Args:
        model: The network.
        at: Parameters about which it is linearised.

    Raises:
        ValueError: ``model`` is no ``Model``, or ``at`` has another structure or other shapes than its parameters.
    """
    check_shapes("at", at, model)

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return first_order(model, at, params, x)

    apply.__module__ = module_of(model.apply)
    return model._replace(
        name=f"linearised {model.name}", apply=apply, kernel=None, structure=None, at_width=None, is_linear=True
    )


def first_order(model: Model, at: PyTree, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
    """Computes the outputs [n, C] of the linearised network, ``f(at, x) + df(at, x) (params - at)``.

    Args:
        model: The network f.
        at: Parameters about which it is linearised.
        params: Parameters at which the linearisation is evaluated; ``at`` is cast to their dtype.
        x: Inputs [n, ...].
    """
    at = jax.tree.map(lambda a, p: jnp.asarray(a, p.dtype), at, params)
    value, change = jax.jvp(lambda p: model.apply(p, x), (at,), (jax.tree.map(jnp.subtract, params, at),))
    return value + change


def check_shapes(name: str, params: PyTree, model: Model) -> None:
    """Raises ``ValueError`` if parameters have another structure or other shapes than a model's.

    Args:
        name: Name of the argument, for the error message.
        params: The parameters.
        model: The model; another object raises the error, too.
    """
    instance("model", model, Model)
    shapes, allowed = (jax.tree.map(np.shape, tree) for tree in (params, model.shapes))
    if shapes != allowed:
        raise ValueError(f"{name}: got parameters of shapes {shapes}, must be {allowed}, as {model.name} has them")
