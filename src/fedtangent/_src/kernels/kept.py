"""A store of the kernels of images: float64 blocks that took long to compute are read from disk by the next run."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float64

from fedtangent._src.kernels.gram import KernelBlocks, read_only, spaced
from fedtangent._src.models.kernels import AnalyticKernel
from fedtangent._src.storage import replacing, sha256

MOST_BYTES = 2**32  # of all kept kernels; the least recently used are removed first
UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile)  # also a wrong checksum inside the file


def kept_blocks(
    kernel: AnalyticKernel,
    x_train: Float64[np.ndarray, "n ..."],
    x_test: Float64[np.ndarray, "m ..."],
    folder: Path,
    compute: Callable[[], KernelBlocks],
) -> KernelBlocks:
    """Returns the kernel blocks of a file in ``folder``, or computes them and writes the file.

    Only kernels that are computed in tiles are stored: others take less time than a file. A damaged file is computed
    and written again; in a folder that cannot be written to, nothing is stored.

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
