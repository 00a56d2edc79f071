"""The theory's side of a comparison: the federated kernel flow, Theorem 2 of FE-2024, and the kernels' memory."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from fedtangent._src import liveness
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated, network_functions
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.kernels.large import TILE, LargeKernel, large_kernel
from fedtangent._src.losses import words
from fedtangent._src.models.kernels import AnalyticKernel
from fedtangent._src.progress import progress_of, ticks
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import Flow, federated_flow
from fedtangent._src.theory.flow.clients import SMALLEST_BUCKET
from fedtangent._src.theory.flow.flow import finite_functions
from fedtangent._src.theory.flow.recursion import GATHERED
from fedtangent._src.theory.prior import covariance_terms, prior_functions
from fedtangent._src.types import AnyArray, Cohort, Gaussian

PRIOR_DRAWS = 64  # initial functions that a law is estimated from, where it has no closed form
AT_ONCE = 2**26  # outputs that ``from_starts`` computes together, half a GiB


class ModelLaw(NamedTuple):
    """The predicted mean and covariance of each of K independent models at the m test points.

    Under the squared error the outputs are Gaussian and independent of each other. The covariance is of one output.
    """

    mean: Float[np.ndarray, "K m C"]
    cov: Float[np.ndarray, "K m m"]

    @property
    def average_cov(self) -> Float[np.ndarray, "m m"]:
        """The mean of the K covariances, [m, m]."""
        return self.cov.mean(axis=0)


@dataclass(frozen=True)
class Predicted:
    """The predictions for one setting: flow, mean and covariance over networks, and the limit of many rounds.

    ``moments`` has the mean and covariance of the models at each evaluated round. ``blocks`` are the kernels at the
    training and the test points.
    """

    setting: Setting
    cohorts: Cohort  # S clients in each of R rounds, [R, S]
    blocks: KernelBlocks
    flow: Flow
    moments: tuple[ModelLaw, ...]  # one per evaluated round
    limit: Gaussian | None  # None with weight decay, another loss than the squared error, or a singular kernel
    why_no_limit: str = ""  # the reason, if ``limit`` is None
    influences: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """(B [K, m, n], gamma [K]) by round: outputs are ``mean + gamma f_0(x) - B f_0(X)``; empty if not linear in f_0."""

    sampled: np.ndarray | None = None
    """Final test outputs [draws, K, m, C] from initial functions of the prior; None with a law in closed form."""


def predict(setting: Setting, cohorts: Cohort, progress: bool | None = False) -> Predicted:
    """Predicts a run from its model's analytic kernel: the flow, the models' distribution by round, and the limit.

    The distribution is the mean and covariance of each model over random initial functions. The limit is the Gaussian
    process after many rounds, None for a singular kernel. Under a loss other than the squared error the distribution is
    estimated from 64 initial functions (``PRIOR_DRAWS``), without a limit.

    Args:
        setting: The run: problem, algorithm and the rounds to evaluate.
        cohorts: The S clients of each round, and the model that each of them trains, [R, S].
        progress: Whether to show progress; None: if the work takes some seconds.

    Raises:
        ValueError: No closed form follows the algorithm.
        FloatingPointError: Outputs leave the range of float64, because the run is not stable.
    """
    blocks, rounds = setting.blocks(progress), setting.size.rounds
    flow = run_flow(setting, blocks, cohorts)
    if not flow.kind.is_linear:
        why = f"a law is known for the loss squared_error, not for {words(setting.problem.loss)}"
        # one by one, so that equal starts have equal outputs to the last bit
        outputs = from_starts(flow, prior_starts(setting, blocks, PRIOR_DRAWS), rounds, together=1).test
        sampled = np.asarray(finite_functions(outputs)).transpose(2, 0, 1, 3, 4)  # [E, r, K, m, C]
        return Predicted(setting, cohorts, blocks, flow, _sampled_laws(sampled), None, why, sampled=sampled[:, -1])
    limit, why = (None, "weight decay moves the limit") if flow.kind.decays else limit_of(setting.problem, blocks)
    influences = {r: jax.tree.map(np.asarray, flow.dependence(r)) for r in rounds}
    pairs = (zip(*influence, strict=True) for influence in influences.values())
    covs = [np.stack([covariance_terms(blocks, b, gamma).total for b, gamma in of_models]) for of_models in pairs]
    moments = tuple(map(ModelLaw, np.asarray(flow.mean(rounds)), covs))
    return Predicted(setting, cohorts, blocks, flow, moments, limit, why, influences)


class Starts(NamedTuple):
    """E initial functions of each of the K models, at the training and the test points."""

    train: Float[np.ndarray, "E K n C"]
    test: Float[np.ndarray, "E K m C"]


class Outputs(NamedTuple):
    """Training and test outputs of the K models after each of r rounds, from each of E initial functions."""

    train: Float[np.ndarray, "r K E n C"]
    test: Float[np.ndarray, "r K E m C"]


def from_starts(
    flow: Flow | Sequence[Flow],
    starts: Starts,
    rounds: Sequence[int],
    rows: Int[np.ndarray, "t"] | None = None,
    together: int | None = None,
) -> Outputs:
    """Computes the outputs of the K models, from each initial function, after ``rounds``.

    Outputs of a run that is not stable may be infinite or NaN.

    Args:
        flow: Flow of all models, or the flow of each model if the models have different kernels.
        starts: E initial functions.
        rounds: Numbers of finished rounds, [r].
        rows: Indices of the training points in the result; None for all.
        together: Number of initial functions whose runs are computed together; None: as many as memory allows.
    """
    draws, runs = len(starts.train), list[tuple[AnyArray, AnyArray]]()
    step = together or at_once(draws, len(rounds) * sum(part[0].size for part in starts))
    for first in range(0, draws, step):
        train, test = (part[first : first + step] for part in starts)
        if isinstance(flow, Flow):
            runs.append(flow.runs(train, test, rounds, rows))
            continue
        of_models = [f.runs(train[:, k], test[:, k], rounds, rows, k) for k, f in enumerate(flow)]
        runs.append(Outputs(*(np.concatenate(part, axis=1) for part in zip(*of_models, strict=True))))
    return Outputs(*(np.concatenate(part, axis=2) for part in zip(*runs, strict=True)))


def at_once(draws: int, of_one: int) -> int:
    """Returns how many initial functions' runs are computed together: a divisor of ``draws``, at least 1.

    It is the largest that keeps the output values within ``AT_ONCE``, or 1 if a single run exceeds that.

    Args:
        draws: Number of all initial functions.
        of_one: Number of output values of one of them, at all rounds.
    """
    return max(e for e in range(1, draws + 1) if draws % e == 0 and (e == 1 or e * of_one <= AT_ONCE))


def networks(flow: Flow, simulated: Sequence[Simulated], rounds: Sequence[int]) -> list[Float[np.ndarray, "r K E m C"]]:
    """Predicts each network's outputs at the test points by the flow from its initial function.

    Args:
        flow: The flow.
        simulated: Networks, one entry for each width.
        rounds: Numbers of finished rounds, [r], all at least 1.
    """
    # with round 0, as ``side_by_side.run`` predicts them: the same compiled program
    return [from_starts(flow, starts_of(networks), [0, *rounds]).test[1:] for networks in simulated]


def starts_of(networks: Simulated) -> Starts:
    """Returns the initial functions of the networks, their outputs before training."""
    return Starts(networks.train[0].swapaxes(0, 1), networks.test[0].swapaxes(0, 1))


def limit_of(problem: Problem, kernels: KernelBlocks | LargeKernel) -> tuple[Gaussian | None, str]:
    """Returns the Gaussian process after many rounds (Theorem 2 of FE-2024) and "", or None and the reason.

    Args:
        problem: The problem; training points that belong to no client are left out.
        kernels: Its kernels.
    """
    rows = np.unique(problem.partition.indices)  # rows of no client are not learnt
    if len(rows) < len(problem.x_train):
        if isinstance(kernels, LargeKernel):
            return None, "some training points of the large kernel belong to no client"
        kernels = _of_rows(kernels, rows)
    try:
        return gp_limit(kernels, problem.y_train[rows], max_relative_jitter=0.0), ""
    except SingularKernelError as error:
        return None, str(error)


def _of_rows(blocks: KernelBlocks, rows: np.ndarray) -> KernelBlocks:
    """Returns the kernels of the training points ``rows`` and all test points."""
    square, cross = np.ix_(rows, rows), np.s_[:, rows]
    return blocks._replace(
        ntk_train=np.asarray(blocks.ntk_train)[square],
        ntk_test_train=np.asarray(blocks.ntk_test_train)[cross],
        nngp_train=np.asarray(blocks.nngp_train)[square],
        nngp_test_train=np.asarray(blocks.nngp_test_train)[cross],
    )


def prior_starts(setting: Setting, kernels: KernelBlocks | LargeKernel, draws: int) -> Starts:
    """Draws initial functions of each of the K models from the prior.

    The prior of a large kernel is too large to factorise: its initial functions come from random networks of the
    setting's largest width.

    Args:
        setting: The setting.
        kernels: Its kernels.
        draws: Number E of initial functions of each model.
    """
    models, problem = setting.num_models, setting.problem
    train, outputs = problem.y_train.shape
    if isinstance(kernels, LargeKernel):
        x = np.concatenate([problem.x_train, problem.x_test]).astype(np.float32)
        functions = network_functions(setting, setting.size.largest, draws * models, x)
        functions = functions.reshape(draws, models, len(x), outputs)
    else:
        starts = np.asarray(prior_functions(kernels, draws * models * outputs, setting.seed))  # [n + m, .]
        functions = starts.reshape(len(starts), draws, models, outputs).transpose(1, 2, 0, 3)
    first, others = functions[:, :, :train], functions[:, :, train:]
    if problem.points == "train":  # the same points, at which a function drawn in two places differs by rounding
        others = first[:, :, : others.shape[2]]
    return Starts(first, others)


def _sampled_laws(sampled: Float[np.ndarray, "E r K m C"]) -> tuple[ModelLaw, ...]:
    """Computes mean and covariance over the E draws of ``sampled`` outputs, one ``ModelLaw`` for each round.

    The covariance is averaged over the C outputs.
    """
    first = sampled[0]
    moved = sampled - first  # exactly 0 where all start as the same function, and so is the covariance
    about = moved - moved.mean(axis=0)
    cov = np.einsum("erkmc,erkqc->rkmq", about, about, optimize=True) / ((len(sampled) - 1) * sampled.shape[-1])
    return tuple(map(ModelLaw, first + moved.mean(axis=0), cov))


def run_flow(
    setting: Setting,
    blocks: KernelBlocks | LargeKernel,
    cohorts: Cohort,
    num_models: int | None = None,
    outputs: str = "shared",
    **changes: Any,
) -> Flow:
    """Builds the flow of ``setting`` under ``cohorts``.

    Args:
        setting: Problem and rule.
        blocks: Kernels at the training and test points.
        cohorts: Cohorts: S clients in each of R rounds, [R, S].
        num_models: Number of models; default: the K of the setting's algorithm.
        outputs: "shared" if all outputs have one kernel, or "full" if the kernel couples outputs.
        changes: Fields of the rule to replace.

    Raises:
        ValueError: No closed form follows the setting's algorithm, or an argument does not fit.
    """
    return federated_flow(
        blocks,
        setting.problem.y_train,
        setting.problem.partition,
        cohorts,
        dataclasses.replace(setting.followed, **changes),
        num_models=setting.num_models if num_models is None else num_models,
        outputs=outputs,
    )


MOST_EXACT = 8000  # training and test points together, at most, for blocks in float64
PROGRAM = 3 * 2**29  # bytes of JAX, its compiler and the data


class KernelPlan(NamedTuple):
    """The bytes of memory that a flow will need, predicted before it is computed; built by ``plan_kernels``.

    ``kernel``, ``clients``, ``functions`` and ``work`` are the bytes for the kernel, the clients' blocks of it, the
    functions at the evaluated rounds, and scratch work. ``limit`` is the available memory. A large kernel
    (``is_large``) is computed in parts, and may be kept in a file in ``folder``; None: in memory.
    """

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
    """Decides whether the kernels of ``setting`` are kept in memory, or in a file in ``folder``.

    Args:
        setting: The setting.
        draws: Initial functions of each model that are computed together.
        folder: Folder of the file of a kernel that does not fit in memory.

    Raises:
        ValueError: Neither memory nor disk has room, or memory is too small for a pair of images; the message says how
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
        on_disk = f", or {liveness.size(filed.total)} and {liveness.size(plan.kernel)} of disk" if is_large else ""
        disk = f" and {liveness.size(free)} of disk" if is_large else ""
        raise ValueError(
            f"data: got {n} training points, whose kernel needs {liveness.size(plan.total)} of memory{on_disk}; this "
            f"machine has {liveness.size(plan.limit)} of memory{disk}: use fewer points"
        )
    return filed


def planned_kernels(setting: Setting, plan: KernelPlan, progress: bool | None = False) -> KernelBlocks | LargeKernel:
    """Computes the kernels of ``setting``, in memory or in a file as ``plan`` says.

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
