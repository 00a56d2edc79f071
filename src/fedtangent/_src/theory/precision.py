"""Float64 for the theory, in whatever precision the program trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.types import PyTree

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def in_float64(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Wraps ``function`` so that it runs with JAX's 64-bit types enabled.

    If the program has enabled them (``jax_enable_x64``), the function is called directly: traceable, differentiable,
    returning JAX arrays. Otherwise it runs eagerly in a 64-bit scope, and its arrays are returned as NumPy float64,
    which later 32-bit JAX code can read. Inside a caller's jit or grad that is impossible, and the call raises a
    ValueError.
    """

    @functools.wraps(function)
    def wrapped(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        if jnp.result_type(float) == np.float64:
            return function(*args, **kwargs)
        if not is_concrete(args, kwargs, jnp.zeros(())):  # the zero: of a call that is staged into a larger program
            require_float64(f" for {function.__name__} in jit, grad or vmap")
        with jax.enable_x64(True):
            result = function(*args, **kwargs)
        return cast(Result, jax.tree.map(lambda a: np.asarray(a) if isinstance(a, jax.Array) else a, result))

    return wrapped


def require_float64(where: str = "") -> None:
    """Raises ``ValueError`` unless the program has enabled JAX's 64-bit types; ``where`` completes the message."""
    if jnp.result_type(float) != np.float64:
        raise ValueError(f"jax_enable_x64: got False, must be True{where}; call fedtangent.enable_x64() first")


def is_concrete(*values: PyTree) -> bool:
    """Returns whether no leaf of ``values`` is a tracer, so that their numbers can be read."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def on_device(array: np.ndarray) -> jax.Array:
    """Returns ``array`` as a JAX array, without a copy if it is read-only (``kernels.gram.read_only``)."""
    return jnp.asarray(array) if array.flags.writeable else jax.device_put(array)
