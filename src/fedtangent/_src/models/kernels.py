"""Analytic kernels of infinitely wide networks, computed by neural-tangents, in tiles where the inputs are images."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from fedtangent._src import liveness
from fedtangent._src.checks import MAX_INDEX
from fedtangent._src.pytrees import on_device
from fedtangent._src.types import Apply, Array, ArrayLike, Key, PyTree

KERNELS = ("nngp", "ntk")


class Kernels(NamedTuple):
    """Prior covariance (``nngp``) and tangent kernel (``ntk``) between two batches, [n1, n2]; None if not requested."""

    nngp: Float[Array, "n1 n2"] | None = None
    ntk: Float[Array, "n1 n2"] | None = None


def check_get(get: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``get`` as a tuple of names; raises ``ValueError`` unless they are "nngp", "ntk" or both, once each."""
    names = (get,) if isinstance(get, str) else tuple(get) if isinstance(get, tuple | list) else ()
    if not names or any(name not in KERNELS for name in names) or len(set(names)) < len(names):
        allowed = f"{', '.join(map(repr, KERNELS))} and tuples of them without repetition"
        raise ValueError(f"get: got {get!r}, allowed are {allowed}")
    return names


Blocks = Kernels | Float[Array, "n1 _"]  # of several kernels by name, or of one


def select(blocks: Kernels, get: str | tuple[str, ...]) -> Blocks:
    """Returns the kernel [n1, n2] that ``get`` names, or all of ``blocks`` if ``get`` is a tuple.

    Args:
        blocks: The computed kernels.
        get: Name of one kernel, or a tuple of names.
    """
    selected: Blocks = getattr(blocks, get) if isinstance(get, str) else blocks
    return selected


def as_floating(x: ArrayLike) -> Float[Array, "..."]:
    """Converts ``x`` to a floating array; whole numbers (such as raw pixels) take the default floating dtype."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    return on_device(x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float)))


# a neural-tangents kernel: from inputs [n1, q], inputs [n2, q] or None, and names, to a named tuple with their blocks
StaxKernel = Callable[[Array, Array | None, tuple[str, ...]], Kernels]
StaxNetwork = tuple[Callable[[Key, tuple[int, ...]], PyTree], Apply, StaxKernel]  # (initialise, apply, kernel)
Tick = Callable[[int, int], None]  # called with the numbers of finished tiles and of all tiles
TILE_BYTES = 2**24  # work of a tile on a CPU: larger ones leave its caches (measured by benchmarks/pooled_kernel.py)
TILE_SHARE = 1 / 8  # of an accelerator's memory
MOST_UNTILED = 2**11  # bytes of the work of a pair, below which all pairs are computed at once, as for vectors


def stax() -> ModuleType:
    """Returns ``neural_tangents.stax``, whose layers make networks with analytic kernels (Novak et al., 2020).

    It is the user's installed module, loaded so that it runs on this version of JAX.

    Raises:
        ImportError: neural-tangents is not installed, or has another version.

    Example:
        >>> import fedtangent as ft
        >>> stax = ft.kernels.stax()
        >>> network = stax.serial(stax.Dense(64), stax.Relu(), stax.Dense(3))
        >>> ft.models.from_stax(network, input_shape=5)
        Model(stax, output_size=3)
    """
    # imported here: neural-tangents takes longer to import than the rest of the package together
    from fedtangent._src.kernels.neural_tangents import stax as module

    return module


@dataclasses.dataclass(frozen=True)
class AnalyticKernel:
    """Analytic kernel of a neural-tangents network, called as ``kernel(x1, x2=None, get=("nngp", "ntk"))``.

    The network is built at the first call. If it pools, a pair of images needs memory in proportion to the square of
    the number of pixels. Kernels of images are therefore computed in tiles (blocks of rows and columns). Without ``x2``
    the kernel is symmetric, and only the tiles on one side of the diagonal are computed.

    Attributes:
        network: Builds the network of stax.
        prepare: Converts inputs [n, ...] to the inputs of the network.
    """

    network: Callable[[], StaxNetwork]
    prepare: Callable[[Array], Array]

    def __call__(self, x1: ArrayLike, x2: ArrayLike | None = None, get: str | tuple[str, ...] = KERNELS) -> Blocks:
        """Computes the kernels that ``get`` names between ``x1`` and ``x2``, [n1, n2] each; see ``types.Kernel``.

        Raises:
            ValueError: ``get`` names another kernel, or the memory is too small for a single pair of examples.
        """
        return select(self.blocks(x1, x2, check_get(get)), get)

    def blocks(
        self,
        x1: ArrayLike,
        x2: ArrayLike | None,
        names: tuple[str, ...] = KERNELS,
        tick: Tick = lambda done, total: None,
    ) -> Kernels:
        """Computes kernels between two batches, [n1, n2] each, in tiles if they need much memory (never if traced).

        Args:
            x1: Inputs [n1, ...].
            x2: Inputs [n2, ...]; None for ``x1``.
            names: Names of the kernels to compute.
            tick: Called with the number of finished tiles and the number of all tiles; never without tiles.

        Raises:
            ValueError: The memory is too small for a single pair of examples.
        """
        first, second = as_floating(x1), None if x2 is None else as_floating(x2)
        columns = first if second is None else second
        if isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
            return _blocks(self, first, second, names)
        side = self.side(first)
        if max(len(first), len(columns)) <= side:
            return _blocks(self, first, second, names)
        dtype = jnp.promote_types(self._computing(first), self._computing(columns))
        out = {name: np.empty((len(first), len(columns)), dtype) for name in names}
        rows = [(i, j) for i in tiles(len(first), side) for j in tiles(len(columns), side)]
        places = [(i, j) for i, j in rows if second is not None or i.start <= j.start]
        for done, (i, j) in enumerate(places):
            tick(done, len(places))
            # of one size: one program for pairs of tiles, one for the diagonal
            x, y = (_filled(part, side) for part in (first[i], columns[j]))
            tile = _blocks(self, x, None if second is None and i == j else y, names)
            for name in names:
                block = np.asarray(getattr(tile, name))[: i.stop - i.start, : j.stop - j.start]
                if second is None:
                    block = 0.5 * (block + block.T) if i == j else block
                    out[name][j, i] = block.T
                out[name][i, j] = block
        tick(len(places), len(places))
        return Kernels(**{name: jnp.asarray(block) for name, block in out.items()})

    def side(self, x: ArrayLike) -> int:
        """Returns the number of rows, and of columns, of the largest tile of the kernel that is computed at once.

        It is ``MAX_INDEX`` if the kernel needs no tiles.

        Args:
            x: Inputs [n, ...]; only their shape and type count.

        Raises:
            ValueError: The memory is too small for a single pair of examples.
        """
        shape, limit = np.shape(x)[1:], liveness.memory_limit()
        of_pair = _pair_bytes(self, shape, self._computing(x))
        if of_pair > liveness.USABLE * limit:
            raise ValueError(
                f"kernel: got examples of shape {shape}, a pair of which needs up to {liveness.size(of_pair)} of "
                f"memory, must be at most {liveness.size(liveness.USABLE * limit)}, {liveness.USABLE:.0%} of all"
            )
        if of_pair <= MOST_UNTILED:
            return MAX_INDEX
        work = TILE_BYTES if jax.default_backend() == "cpu" else int(TILE_SHARE * limit)
        return max(1, math.isqrt(work // of_pair))

    def tile_bytes(self, x: ArrayLike) -> int:
        """Returns the bytes of the intermediate arrays that one tile needs; 0 if the kernel is not computed in tiles.

        It is an upper bound for a full tile, even if ``x`` has fewer examples than one.

        Args:
            x: Inputs [n, ...], as for ``side``.

        Raises:
            ValueError: The memory is too small for a single pair of examples.
        """
        side = self.side(x)
        return 0 if side == MAX_INDEX else side**2 * _pair_bytes(self, np.shape(x)[1:], self._computing(x))

    def _computing(self, x: ArrayLike) -> str:
        """Returns the name of the dtype in which the kernel of ``x`` is computed: at least JAX's default float."""
        return str(jnp.promote_types(jnp.result_type(x), jnp.result_type(float)))


def tiles(n: int, side: int) -> list[slice]:
    """Splits ``range(n)`` into consecutive slices of length ``side``; the last one may be shorter.

    Args:
        n: Number of examples.
        side: Number of examples in a slice.
    """
    return [slice(start, min(start + side, n)) for start in range(0, n, side)]


def _filled(x: Array, side: int) -> Array:
    """Pads ``x`` [n, ...] to [side, ...] by repeating its last example."""
    return x if len(x) == side else jnp.concatenate([x, jnp.repeat(x[-1:], side - len(x), axis=0)])


@functools.lru_cache(maxsize=64)
def _pair_bytes(kernel: AnalyticKernel, shape: tuple[int, ...], dtype: str) -> int:
    """Bounds the bytes of the intermediate arrays that the kernel of one pair of examples of this shape needs."""
    one = jax.ShapeDtypeStruct((1, *shape), dtype)
    traced = jax.make_jaxpr(lambda x1, x2: kernel.network()[2](kernel.prepare(x1), kernel.prepare(x2), KERNELS).ntk)
    return max(1, liveness.peak_bytes(traced(one, one).jaxpr))


@functools.partial(jax.jit, static_argnums=(0, 3))  # one program: operation by operation, each would be compiled alone
def _blocks(
    kernel: AnalyticKernel, x1: Float[Array, "n1 ..."], x2: Float[Array, "n2 ..."] | None, names: tuple[str, ...]
) -> Kernels:
    second = None if x2 is None else kernel.prepare(x2)
    return Kernels(**kernel.network()[2](kernel.prepare(x1), second, names)._asdict())


def check_dtype(dtype: DTypeLike, needs_x64: bool) -> None:
    """Raises ``ValueError`` unless ``dtype`` is floating and, if ``needs_x64``, available in JAX's present mode.

    Args:
        dtype: Type of a model's parameters.
        needs_x64: Whether a 64-bit type raises an error while JAX's 64-bit mode is off.
    """
    kind = np.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(f"dtype: got {kind.name}, must be a floating type")
    if needs_x64 and jax.dtypes.canonicalize_dtype(kind) != kind:
        raise ValueError(f"dtype: got {kind.name}, must be float32 without fedtangent.enable_x64()")
