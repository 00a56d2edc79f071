"""Tangent kernels too large for float64: in float32, in memory, in a file, or divided among devices.

A kernel of n training points is computed in compiled square tiles; of two tiles that mirror each other only one is
computed. The kernel's rows at the test points are recomputed for each product with it and never stored.

The kernels of images that fit in memory take long to compute: ``kept_blocks`` stores their float64 blocks in files.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Float64, Int, Shaped

from fedtangent._src.checks import finite, real_array, writable
from fedtangent._src.kernels.gram import KernelBlocks, aligned, jittered_cholesky, product, read_only, spaced
from fedtangent._src.models.kernels import AnalyticKernel, Tick, tiles
from fedtangent._src.storage import replacing, sha256, sha256_of_file
from fedtangent._src.types import Array, ArrayLike, Kernel

TILE = 2048  # examples on a side of a compiled tile, at most
LANDMARKS = 1000  # training points of a preconditioner
PROBED = 32  # training points whose kernel identifies a file
AXIS = "columns"


@dataclass(frozen=True, eq=False)
class LargeKernel:
    """Tangent kernel of n training and m test points; built by ``large_kernel``.

    ``kernel`` is the function that computes the tangent kernel from inputs, ``x_train`` and ``x_test`` are the inputs.
    ``ntk_train`` [n, p], p >= n, is the kernel of the training points; columns beyond n are 0.
    """

    kernel: Kernel
    x_train: Float32[np.ndarray, "n ..."]
    x_test: Float32[np.ndarray, "m ..."]
    ntk_train: Float32[Array, "n p"]  # p >= n; columns beyond n are 0 (every device has equally many)

    def __len__(self) -> int:
        return len(self.x_train)

    def at_test(self, a: ArrayLike) -> Float64[np.ndarray, "m ..."]:
        """Multiplies the kernel of test and training points by coefficients a [n, ..]; returns [m, ..] float64."""
        shape = np.shape(a)
        a = np.asarray(a, np.float32).reshape(len(self), -1)
        products = np.zeros((len(self.x_test), a.shape[1]))
        with jax.enable_x64(False):
            side = side_of(self.kernel, self.x_train)
            for rows in tiles(len(self.x_test), side):
                for columns in tiles(len(self), side):
                    products[rows] += _tile_product(self.kernel, self.x_test[rows], self.x_train[columns], a[columns])
        return products.reshape(-1, *shape[1:])

    def preconditioner(self) -> Float[Array, "n L"]:
        """Computes F [n, L] with ``F F'`` close to the kernel, by Nystroem's method from L = min(1000, n/2) points.

        Raises:
            SingularKernelError: The kernel of these training points is singular, for example if many are equal.
        """
        rows = spaced(len(self), min(LANDMARKS, -(-len(self) // 2)))
        lower = jittered_cholesky(self.block(rows).astype(np.float64), 1e-6).lower
        columns = jax.jit(lambda theta: theta.at[rows].get(mode="promise_in_bounds")[:, : len(self)])(self.ntk_train)
        return jax.scipy.linalg.solve_triangular(jnp.asarray(lower, jnp.float32), columns, lower=True).T

    def block(self, rows: Int[np.ndarray, "s"]) -> Float32[np.ndarray, "s s"]:
        """Computes the kernel between the training points of indices ``rows`` [s]: [s, s] float32."""
        return _square(self.kernel, self.x_train[rows])


def large_kernel(
    kernel_fn: Kernel,
    x_train: ArrayLike,
    x_test: ArrayLike,
    *,
    folder: Path | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    tick: Tick = lambda done, total: None,
) -> LargeKernel:
    """Computes the tangent kernel of n training and m test points in float32.

    Args:
        kernel_fn: Function like ``Model.kernel``: ``(x1, x2, get="ntk")`` returns [n1, n2].
        x_train: Training inputs [n, ...].
        x_test: Test inputs [m, ...].
        folder: Folder for a memory-mapped file of the kernel, which later calls with the same kernel reuse; None stores
            the kernel in memory. Columns on several devices are never stored in a file.
        devices: Devices that the columns are divided among, including devices of other processes; by default the first
            device only.
        tick: Function that is called with the number of finished tiles and the number of all tiles.

    Raises:
        ValueError: Inputs that are empty, not finite, or of different shapes; a ``kernel_fn`` that is no function; a
            kernel not finite in float32; a ``folder`` that cannot be written to or has too little room (the message
            says how much the kernel needs); a file that was changed since it was written.
    """
    if not callable(kernel_fn):
        raise ValueError(f"kernel_fn: got {kernel_fn!r:.60}, must be a function of (x1, x2), such as model.kernel")
    train, test = _single("x_train", x_train), _single("x_test", x_test)
    if min(len(train), len(test)) == 0:
        raise ValueError(f"x_train and x_test: got {len(train)} and {len(test)} examples, must be at least one each")
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(f"x_train and x_test: got {train.shape} and {test.shape}, must hold examples of one shape")
    n, places, folder = len(train), list(devices or ()), None if folder is None else Path(folder)
    if len(places) < 2:
        if folder is None:
            kernel = _in_memory(kernel_fn, train, slice(0, n), tick)
        else:
            kernel = _in_file(kernel_fn, train, folder, tick)
        return LargeKernel(kernel_fn, train, test, jax.device_put(kernel, places[0] if places else None))
    wide = -(-n // len(places)) * len(places)
    mesh = jax.make_mesh((len(places),), (AXIS,), axis_types=(AxisType.Auto,), devices=places)

    def columns(index: tuple[slice, ...] | None) -> Float32[np.ndarray, "n _"]:
        assert index is not None
        start, stop, _ = index[1].indices(wide)
        mine = _in_memory(kernel_fn, train, slice(min(start, n), min(stop, n)), tick)
        return np.pad(mine, ((0, 0), (0, stop - start - mine.shape[1])))

    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    return LargeKernel(kernel_fn, train, test, jax.make_array_from_callback((n, wide), sharding, columns))


def _single(name: str, x: ArrayLike) -> Float32[np.ndarray, "n ..."]:
    """Returns examples as a contiguous float32 array; raises ``ValueError`` for numbers not finite in float32."""
    array, most = real_array(name, x), float(np.finfo(np.float32).max)
    finite(name, array)
    if array.size and np.max(np.abs(array)) > most:
        raise ValueError(f"{name}: got {np.max(np.abs(array)):g}, must be at most {most:.3g} in magnitude")
    return np.ascontiguousarray(array, np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _tile(kernel_fn: Kernel, x1: Shaped[Array, "n1 ..."], x2: Shaped[Array, "n2 ..."]) -> Float[Array, "n1 n2"]:
    return kernel_fn(x1, x2, get="ntk").astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _tile_product(
    kernel_fn: Kernel, x1: Shaped[Array, "n1 ..."], x2: Shaped[Array, "n2 ..."], a: Float[Array, "n2 k"]
) -> Float[Array, "n1 k"]:
    return product(_tile(kernel_fn, x1, x2), a)


@functools.partial(jax.jit, static_argnums=0)
def _diagonal(kernel_fn: Kernel, x: Shaped[Array, "n ..."]) -> Float[Array, "n"]:
    """Computes the kernel of each example with itself [n] in float64; in float32 the diagonal loses half its digits."""

    def one(example: Shaped[Array, "..."]) -> Float[Array, ""]:
        return kernel_fn(example[None], example[None], get="ntk")[0, 0]

    return jax.vmap(one)(x.astype(jnp.float64))


def side_of(kernel_fn: Kernel, x: Shaped[np.ndarray, "n ..."]) -> int:
    """Returns the number of examples on a side of a tile, the square block of a kernel that is computed at once.

    Args:
        kernel_fn: Kernel function, as for ``large_kernel``.
        x: Inputs [n, ...].

    Raises:
        ValueError: The memory is too small for a single pair of examples.
    """
    with jax.enable_x64(False):  # as the tiles are computed
        return min(TILE, kernel_fn.side(x)) if isinstance(kernel_fn, AnalyticKernel) else TILE


def _square(kernel_fn: Kernel, x: Float32[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n n"]:
    """Computes the kernel of ``x`` with itself, [n, n] float32 and exactly symmetric."""
    out = np.empty((len(x), len(x)), np.float32)
    _fill(out, kernel_fn, x, slice(0, len(x)), lambda done, total: None)
    return out


def _in_memory(
    kernel_fn: Kernel, x: Float32[np.ndarray, "n ..."], columns: slice, tick: Tick
) -> Float32[np.ndarray, "n columns"]:
    """Computes the columns ``columns`` of the kernel of ``x``, all n rows, as a read-only float32 array.

    JAX can use the array without a copy. ``tick`` is called with the numbers of finished tiles and of all tiles. Raises
    ``ValueError`` if an entry is not finite in float32.
    """
    out = aligned((len(x), columns.stop - columns.start), np.dtype(np.float32))
    _fill(out, kernel_fn, x, columns, tick)
    out.flags.writeable = False
    return out


def _fill(
    out: Float32[np.ndarray, "n columns"],
    kernel_fn: Kernel,
    x: Float32[np.ndarray, "n ..."],
    columns: slice,
    tick: Tick,
) -> None:
    """Fills ``out`` with the columns ``columns`` of the kernel of ``x``; raises ``ValueError`` if one is not finite.

    Of two tiles that mirror each other only one is computed. ``tick`` is called with the numbers of finished tiles and
    of all tiles.
    """
    first, side = columns.start, side_of(kernel_fn, x)
    mine = [slice(first + tile.start, first + tile.stop) for tile in tiles(columns.stop - first, side)]
    others = _around(len(x), columns, side)
    places = [(i, j) for j in mine for i in mine if i.start <= j.start] + [(i, j) for j in mine for i in others]

    def computed() -> Iterator[tuple[slice, slice, Array]]:
        with jax.enable_x64(False):
            for i, j in places:
                yield i, j, _tile(kernel_fn, x[i], x[j])

    def put(i: slice, j: slice, tile: Float32[np.ndarray, "rows columns"]) -> None:
        if not np.isfinite(tile.sum()):
            raise ValueError("kernel_fn: got a kernel with entries beyond float32 or NaN, must be finite in float32")
        if i == j:
            tile = 0.5 * (tile + tile.T)
            with jax.enable_x64(True):
                np.fill_diagonal(tile, np.asarray(_diagonal(kernel_fn, x[i])))
        out[i, j.start - first : j.stop - first] = tile
        if i != j and i in mine:
            out[j, i.start - first : i.stop - first] = tile.T

    before: tuple[slice, slice, Array] | None = None
    for done, (i, j, tile) in enumerate(computed()):  # one is written while the next is computed
        if before is not None:
            put(before[0], before[1], np.asarray(before[2]))
        before = i, j, tile
        tick(done, len(places))
    if before is not None:
        put(before[0], before[1], np.asarray(before[2]))
    tick(len(places), len(places))


def _around(n: int, columns: slice, side: int) -> list[slice]:
    """Divides the rows 0 .. n - 1 outside the range ``columns`` into tiles of at most ``side`` rows."""
    below = [slice(columns.stop + tile.start, columns.stop + tile.stop) for tile in tiles(n - columns.stop, side)]
    return tiles(columns.start, side) + below


def check_file(kernel_fn: Kernel, x: ArrayLike, folder: Path) -> None:
    """Raises ``ValueError`` if a folder cannot be written to, or if the kernel's file in it was changed.

    Args:
        kernel_fn: Kernel function, as for ``large_kernel``.
        x: Training inputs [n, ...].
        folder: Folder of the kernel's file.
    """
    writable("folder", folder, "a kernel's file")
    if folder.is_dir():
        _found(folder, _key(kernel_fn, np.asarray(x, np.float32)))


def _in_file(
    kernel_fn: Kernel, x: Float32[np.ndarray, "n ..."], folder: Path, tick: Tick
) -> Float32[np.ndarray, "n n"]:
    """Returns the kernel from its checked file in ``folder``; without a file, one process computes and writes it."""
    writable("folder", folder, "a kernel's file")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"kernel-{_key(kernel_fn, x)}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = _found(folder, name.removeprefix("kernel-"))
        if path is None:
            needed, free = 4 * len(x) ** 2, shutil.disk_usage(folder).free
            if needed > free:
                room = f"{needed / 1e9:.3g} GB, the size of the kernel"
                raise ValueError(f"folder: got {folder}, where {free / 1e9:.3g} GB are free, must have room for {room}")
            part = folder / f"{name}.part"
            out = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(len(x), len(x)))
            _fill(out, kernel_fn, x, slice(0, len(x)), tick)
            out.flush()
            del out
            path = folder / f"{name}-{sha256_of_file(part)}.npy"
            os.replace(part, path)
    return np.load(path, mmap_mode="r")


def _found(folder: Path, key: str) -> Path | None:
    """Returns the path of a kernel's file by its ``key``, or None; raises ``ValueError`` if its content was changed."""
    path = next(iter(folder.glob(f"kernel-{key}-*.npy")), None)
    if path is not None:
        status = path.stat()
        if not path.name.endswith(f"-{_digest_of(path, status.st_size, status.st_mtime_ns)}.npy"):
            raise ValueError(f"folder: {path} was changed since it was written; remove that file")
    return path


@functools.lru_cache(maxsize=8)
def _digest_of(path: Path, size: int, changed: int) -> str:
    """Returns the SHA-256 digest of a file, cached while its size and time of change stay the same."""
    return sha256_of_file(path)


def _key(kernel_fn: Kernel, x: Float32[np.ndarray, "n ..."]) -> str:
    """Returns a hash of the examples and of the kernel between a few of them, which identifies a kernel."""
    probe = x[spaced(len(x), PROBED)]
    return sha256(str(x.shape), x, _square(kernel_fn, probe))[:16]


MOST_BYTES = 2**32  # of all kept kernels; the least recently used are removed first
UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)  # also a wrong checksum inside the file


def kept_blocks(
    kernel: AnalyticKernel,
    x_train: Float64[np.ndarray, "n ..."],
    x_test: Float64[np.ndarray, "m ..."],
    folder: Path,
    compute: Callable[[], KernelBlocks],
) -> KernelBlocks:
    """Reads kernel blocks from a file in ``folder``, or computes them and writes the file.

    Only kernels that are computed in tiles are stored: others take less time than a file. If a file is damaged,
    its blocks are computed again; in a folder that cannot be written to, nothing is stored.

    Args:
        kernel: Kernel of the network.
        x_train: Training inputs.
        x_test: Test inputs.
        folder: Folder of the files, of 4 GiB at most; the least recently used files are removed first.
        compute: Function that computes the blocks.
    """
    with jax.enable_x64(True):
        longer, side = max(x_train, x_test, key=len), kernel.side(x_train)
        if len(longer) <= side:
            return compute()
        # identifies the kernel, by a program that the blocks need too
        nngp, ntk = (np.asarray(block) for block in kernel.blocks(longer[spaced(len(longer), side)], None))
    path = folder / f"blocks-{sha256(f'{x_train.shape} {x_test.shape}', x_train, x_test, nngp, ntk)[:32]}.npz"
    with contextlib.suppress(*UNREADABLE), path.open("rb") as stream, np.load(stream) as file:
        blocks = KernelBlocks(**{name: read_only(file[name]) for name in KernelBlocks._fields})
        os.utime(path)
        return blocks
    blocks = compute()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as file:
            np.savez(file, **blocks._asdict())
        _remove_oldest(folder)
    return blocks


def _remove_oldest(folder: Path) -> None:
    total = 0
    for file in sorted(folder.glob("blocks-*.npz"), key=lambda file: file.stat().st_mtime, reverse=True):
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
