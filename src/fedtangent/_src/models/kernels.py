"""The shared parts of the models' analytic kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from fedtangent._src.types import Apply, Array, ArrayLike, Key, PyTree

KERNELS = ("nngp", "ntk")


class Kernels(NamedTuple):
    """Blocks [n1, n2] of the prior covariance (``nngp``) and the tangent kernel (``ntk``); None if not requested."""

    nngp: Float[Array, "n1 n2"] | None = None
    ntk: Float[Array, "n1 n2"] | None = None


def check_get(get: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``get`` as a tuple of kernel names; raises ``ValueError`` with the allowed ones."""
    names = (get,) if isinstance(get, str) else tuple(get) if isinstance(get, tuple | list) else ()
    if not names or any(name not in KERNELS for name in names) or len(set(names)) < len(names):
        raise ValueError(f"get: got {get!r}, allowed are {', '.join(map(repr, KERNELS))} and tuples of them")
    return names


Blocks = Kernels | Float[Array, "n1 _"]  # of several kernels by name, or of one


def select(blocks: Kernels, get: str | tuple[str, ...]) -> Blocks:
    """Returns one block of ``blocks``, or all of them.

    Args:
        blocks: The blocks.
        get: Name of one kernel, or a tuple of names.
    """
    selected: Blocks = getattr(blocks, get) if isinstance(get, str) else blocks
    return selected


def as_floating(x: ArrayLike) -> Float[Array, "..."]:
    """Converts ``x`` to a floating array; whole numbers (such as raw pixels) take the default floating dtype."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


# a neural-tangents kernel: from inputs [n1, q], inputs [n2, q] or None, and names, to a named tuple with their blocks
StaxKernel = Callable[[Array, Array | None, tuple[str, ...]], Kernels]
StaxNetwork = tuple[Callable[[Key, tuple[int, ...]], PyTree], Apply, StaxKernel]  # (initialise, apply, kernel)


@dataclasses.dataclass(frozen=True)
class AnalyticKernel:
    """Kernel ``(x1, x2=None, get=("nngp", "ntk")) -> Kernels`` of a neural-tangents network, built on first use."""

    network: Callable[[], StaxNetwork]
    prepare: Callable[[Array], Array]  # inputs [n, ...] -> [n, input_size]

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = KERNELS) -> Blocks:
        """Computes kernel blocks [n1, n2]; takes the arguments of ``types.Kernel``."""
        names = check_get(get)
        second = None if x2 is None else as_floating(x2)
        return select(_blocks(self, as_floating(x1), second, names), get)


@functools.partial(jax.jit, static_argnums=(0, 3))  # one program: operation by operation, each would be compiled alone
def _blocks(
    kernel: AnalyticKernel, x1: Float[Array, "n1 ..."], x2: Float[Array, "n2 ..."] | None, names: tuple[str, ...]
) -> Kernels:
    second = None if x2 is None else kernel.prepare(x2)
    return Kernels(**kernel.network()[2](kernel.prepare(x1), second, names)._asdict())


def check_dtype(dtype: DTypeLike, needs_x64: bool) -> None:
    """Raises ``ValueError`` unless ``dtype`` is floating and, if ``needs_x64``, available in the current mode.

    Args:
        dtype: Type of a model's parameters.
        needs_x64: Whether a 64-bit type needs JAX's 64-bit mode.
    """
    kind = np.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(f"dtype: got {kind.name}, must be a floating type")
    if needs_x64 and jax.dtypes.canonicalize_dtype(kind) != kind:
        raise ValueError(f"dtype: got {kind.name}, must be float32 without fedtangent.enable_x64()")
