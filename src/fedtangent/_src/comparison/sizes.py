"""The memory that a setting's kernels need: float64 blocks, or float32 for more than 8,000 points."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fedtangent._src import liveness
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.kernels.large import TILE, LargeKernel, large_kernel
from fedtangent._src.models.kernels import AnalyticKernel
from fedtangent._src.progress import progress_of, ticks
from fedtangent._src.theory.flow.clients import SMALLEST_BUCKET
from fedtangent._src.theory.flow.recursion import GATHERED

MOST_EXACT = 8000  # training and test points together of which float64 blocks are built
PROGRAM = 3 * 2**29  # bytes of JAX, its compiler and the data


class KernelPlan(NamedTuple):
    """The bytes that a flow will need, predicted before it is computed; built by ``plan_kernels``."""

    kernel: int  # of all points; for a large kernel only of the training points
    clients: int  # the clients' blocks
    functions: int  # coefficients and functions at the evaluated rounds, of all initial functions
    work: int  # scratch memory
    limit: int  # bytes of memory
    is_large: bool
    folder: Path | None  # of the kernel's file; None: in memory

    @property
    def total(self) -> int:
        """The peak bytes in memory."""
        return (self.kernel if self.folder is None else 0) + self.clients + self.functions + self.work

    def __str__(self) -> str:
        where = "" if self.folder is None else f" in {self.folder}"
        kind = "float32" if self.is_large else "float64"
        return (
            f"memory: {liveness.size(self.total)} of {liveness.size(self.limit)} predicted at the peak (kernel in "
            f"{kind} {liveness.size(self.kernel)}{where}, clients {liveness.size(self.clients)}, functions "
            f"{liveness.size(self.functions)}, work {liveness.size(self.work)})"
        )


def plan_kernels(setting: Setting, draws: int, folder: Path) -> KernelPlan:
    """Plans the kernels of ``setting`` for ``draws`` initial functions: in memory, or in a file in ``folder``.

    Args:
        setting: The setting.
        draws: Initial functions of each model that are computed together.
        folder: Folder of the file of a kernel that does not fit in memory.

    Raises:
        ValueError: Neither memory nor disk has room, or memory has none for a pair of images; the message says how
            much is needed.
    """
    problem, rounds = setting.problem, len(setting.size.rounds)
    n, m, outputs = len(problem.x_train), len(problem.x_test), problem.y_train.shape[1]
    sizes = np.maximum(np.asarray(problem.partition.sizes, float), SMALLEST_BUCKET)
    of_clients = int(np.sum(4 ** np.ceil(np.log2(sizes))))
    columns = draws * setting.num_models * outputs
    functions, is_large = 8 * rounds * columns * (2 * n + 2 * m), n + m > MOST_EXACT
    kernel = setting.kernel
    tile = kernel.tile_bytes(problem.x_train) if isinstance(kernel, AnalyticKernel) else 0
    if is_large:
        work = PROGRAM + tile + 4 * (GATHERED + 6 * TILE**2) + 16 * n * columns
        sizes_of = 4 * n**2, 4 * of_clients, functions, work
    else:
        sizes_of = 16 * (n + m) ** 2, 16 * of_clients, functions, PROGRAM + tile + 24 * (n + m) ** 2
    plan = KernelPlan(*sizes_of, liveness.memory_limit(), is_large, None)
    if plan.total <= liveness.USABLE * plan.limit:
        return plan
    filed = plan._replace(folder=folder)
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    if not is_large or filed.total > liveness.USABLE * plan.limit or plan.kernel > free:
        raise ValueError(
            f"kernel: got {n} training points, whose flow needs {liveness.size(plan.total)} of memory, or "
            f"{liveness.size(filed.total)} and {liveness.size(plan.kernel)} of disk; there are "
            f"{liveness.size(plan.limit)} and {liveness.size(free)}"
        )
    return filed


def planned_kernels(setting: Setting, plan: KernelPlan, progress: bool | None = False) -> KernelBlocks | LargeKernel:
    """Computes the kernels of ``setting`` as planned.

    Args:
        setting: The setting.
        plan: Result of ``plan_kernels``.
        progress: Whether to show progress.
    """
    if not plan.is_large:
        return setting.blocks(progress)
    with progress_of(1, f"{setting.name}: kernel", "tile", shown=progress) as bar:
        devices = jax.devices() if jax.default_backend() != "cpu" or jax.process_count() > 1 else None
        x_train, x_test = setting.problem.x_train, setting.problem.x_test
        return large_kernel(setting.kernel, x_train, x_test, folder=plan.folder, devices=devices, tick=ticks(bar))
