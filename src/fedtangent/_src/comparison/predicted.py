"""The theory's side of a comparison: the federated kernel flow at every evaluated round, and Theorem 2's limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated, network_functions
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.losses import words
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import Flow, federated_flow
from fedtangent._src.theory.prior import covariance_terms, prior_functions
from fedtangent._src.types import Cohort, Gaussian

PRIOR_DRAWS = 64  # initial functions that a law is estimated from, where it has no closed form


class ModelLaw(NamedTuple):
    """The predicted mean and covariance of each of K independent models at the test points.

    For the squared error the law is Gaussian and the outputs are independent; for other losses these are moments. The
    covariance is of one output.
    """

    mean: Float[np.ndarray, "K m C"]
    cov: Float[np.ndarray, "K m m"]

    @property
    def average_cov(self) -> Float[np.ndarray, "m m"]:
        """The mean of the covariances over models, [m, m], which the sample covariance about the means estimates."""
        return self.cov.mean(axis=0)


@dataclass(frozen=True)
class Predicted:
    """The predictions for one setting from its analytic kernel: flow, law over networks, and limit."""

    setting: Setting
    cohorts: Cohort  # [R, S]
    blocks: KernelBlocks
    flow: Flow
    moments: tuple[ModelLaw, ...]  # one per evaluated round
    limit: Gaussian | None  # None for other losses, and for a kernel that is singular in float64
    why_no_limit: str = ""
    influences: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Evaluated round -> B [K, m, n] of ``mean + f_0(x) - B f_0(X)``; empty if a run is not linear in f_0."""

    drawn: np.ndarray | None = None
    """Final test outputs [draws, K, m, C] from initial functions of the prior; None with a law in closed form."""

    def networks(self, seen: Sequence[Simulated], rounds: tuple[int, ...]) -> list[np.ndarray]:
        """Predicts each network from its initial function: the function ``networks`` for this flow.

        Args:
            seen: Simulated networks, one entry for each width.
            rounds: Evaluated rounds.

        Returns:
            Predictions at the test points, [r, K, E, m, C] for each entry of ``seen``.
        """
        return networks(self.flow, seen, rounds, self.influences or None)


def predict(setting: Setting, cohorts: Cohort) -> Predicted:
    """Predicts flow, law and limit of ``setting`` under ``cohorts`` [R, S], from the analytic kernel."""
    blocks = setting.blocks()
    flow = run_flow(setting, blocks, cohorts)
    if not flow.kind.is_linear:
        why = f"a law is known of the loss squared_error, not of {words(setting.problem.loss)}"
        drawn = _from_prior(setting, blocks, flow)
        return Predicted(setting, cohorts, blocks, flow, _sampled_laws(drawn), None, why, drawn=drawn[:, -1])
    limit, why = limit_of(setting.problem, blocks)
    influences = {r: np.asarray(flow.dependence(r)[0]) for r in setting.size.rounds}
    covs = [np.stack([covariance_terms(blocks, b).total for b in each]) for each in influences.values()]
    moments = tuple(map(ModelLaw, np.asarray(flow.mean(setting.size.rounds)), covs))
    return Predicted(setting, cohorts, blocks, flow, moments, limit, why, influences)


def limit_of(problem: Problem, kernels: KernelBlocks | LargeKernel) -> tuple[Gaussian | None, str]:
    """Returns Theorem 2's limit and an empty text, or None and the reason why there is no limit.

    Args:
        problem: The problem; training points that no client holds are left out.
        kernels: Its kernels.
    """
    held = np.unique(problem.partition.indices)  # rows that nobody holds are not learnt
    known = kernels
    if len(held) < len(problem.x_train):
        if isinstance(kernels, LargeKernel):
            return None, "some training points of a large kernel are held by nobody"
        known = _of_rows(kernels, held)
    try:
        return gp_limit(known, problem.y_train[held], max_relative_jitter=0.0), ""
    except SingularKernelError as error:
        return None, str(error)


def _of_rows(blocks: KernelBlocks, rows: np.ndarray) -> KernelBlocks:
    """Returns the blocks of the training points ``rows`` and all test points."""
    square, cross = np.ix_(rows, rows), np.s_[:, rows]
    train, test_train = (
        (np.asarray(block)[square] for block in (blocks.ntk_train, blocks.nngp_train)),
        (np.asarray(block)[cross] for block in (blocks.ntk_test_train, blocks.nngp_test_train)),
    )
    (ntk, nngp), (ntk_cross, nngp_cross) = train, test_train
    return KernelBlocks(ntk, ntk_cross, nngp, nngp_cross, blocks.nngp_test, blocks.ntk_test)


def _from_prior(setting: Setting, blocks: KernelBlocks, flow: Flow) -> np.ndarray:
    """Returns test outputs at every evaluated round for initial functions from the prior, [draws, r, K, m, C]."""
    starts, train = drawn_starts(setting, blocks, PRIOR_DRAWS), len(setting.problem.x_train)
    each = [np.asarray(flow.predict(f[:, :train], f[:, train:], setting.size.rounds)) for f in starts]
    return np.stack(each)


def drawn_starts(setting: Setting, kernels: KernelBlocks | LargeKernel, draws: int) -> np.ndarray:
    """Draws ``draws`` initial functions for each of the K models, at all points.

    They are draws from the prior. The prior of a large kernel is too large to factorise: then they are random networks
    of the setting's width.

    Args:
        setting: The setting.
        kernels: Its kernels.
        draws: Number of initial functions of each model.

    Returns:
        Outputs at the training and the test points, [draws, K, n + m, C].
    """
    models, problem = setting.num_models, setting.problem
    outputs = problem.y_train.shape[1]
    if isinstance(kernels, LargeKernel):
        x = np.concatenate([problem.x_train, problem.x_test]).astype(np.float32)
        found = network_functions(setting, setting.size.largest, draws * models, x)
        return found.reshape(draws, models, len(x), outputs)
    starts = np.asarray(prior_functions(kernels, draws * models * outputs, setting.seed))  # [n + m, .]
    return starts.reshape(len(starts), draws, models, outputs).transpose(1, 2, 0, 3)


def _sampled_laws(drawn: np.ndarray) -> tuple[ModelLaw, ...]:
    """Returns mean and covariance over sampled initial functions at every round, for a loss without a closed-form law.

    The covariance is the average over outputs.

    Args:
        drawn: Predicted outputs from E initial functions, [E, r, K, m, C].
    """
    first = drawn[0]
    moved = drawn - first  # exactly 0 where all start as the same function, so that their covariance is
    about = moved - moved.mean(axis=0)
    cov = np.einsum("erkmc,erkqc->rkmq", about, about, optimize=True) / ((len(drawn) - 1) * drawn.shape[-1])
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
        cohorts: Cohorts of the rounds, [R, S].
        num_models: Number of models; default: the K of the setting's algorithm.
        outputs: "shared", or "full" if the kernel couples outputs.
        changes: Fields of the rule to replace.
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


def _from_own_start(flow: Flow, seen: Simulated, draw: int, rounds: tuple[int, ...]) -> np.ndarray:
    return np.asarray(flow.predict(seen.train[0][:, draw], seen.test[0][:, draw], rounds))


def without_cross_terms(blocks: KernelBlocks, influences: np.ndarray) -> np.ndarray:
    """Computes a wrong covariance, [K, m, m], as a negative control: prior and propagated terms, no cross terms.

    Args:
        blocks: Kernels, with the prior.
        influences: The matrix B of each model, [K, m, n].
    """
    terms = [covariance_terms(blocks, b) for b in influences]
    return np.stack([np.asarray(t.prior + t.propagated) for t in terms])


def without_clients(
    cohorts: Cohort, clients: Sequence[int] | Sequence[np.integer] | Int[np.ndarray, "clients"]
) -> Cohort:
    """Returns the cohorts without ``clients``, as if they had never taken part: a negative control."""
    weight = np.where(np.isin(np.asarray(cohorts.client), clients), 0.0, np.asarray(cohorts.weight))
    return cohorts._replace(weight=weight)  # type: ignore[arg-type]


def networks(
    flow: Flow, seen: Sequence[Simulated], rounds: tuple[int, ...], influences: Mapping[int, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Predicts each network at the test points with the flow, from the network's initial function.

    For full batches and the squared error an initial function f0 becomes ``mean + gamma f0(x) - B f0(X)``, with one B
    for all networks of a model. In other cases the flow runs once for each network.

    Args:
        flow: The flow.
        seen: Simulated networks, one entry for each width.
        rounds: Evaluated rounds.
        influences: The matrix B [K, m, n] for each round, if known; gamma is then 1.

    Returns:
        One array [r, K, E, m, C] for each entry of ``seen``; r counts ``rounds``.
    """
    if flow.kind.stepwise and influences is None:
        return [np.stack([_from_own_start(flow, s, e, rounds) for e in range(s.test.shape[2])], axis=2) for s in seen]
    means, found = np.asarray(flow.mean(rounds)), [np.empty((len(rounds), *s.test.shape[1:])) for s in seen]
    for at, r in enumerate(rounds):
        if influences is None:
            b, gamma = map(np.asarray, flow.dependence(r))
        else:
            b, gamma = influences[r], np.ones(flow.num_models)
        for predicted, s in zip(found, seen, strict=True):
            train, test = s.train[0], s.test[0]  # [K, E, n, C], [K, E, m, C]
            given = train if b.shape[2] == train.shape[2] else train.reshape(*train.shape[:2], -1, 1)
            pulled = (b[:, None] @ given).reshape(test.shape)
            predicted[at] = means[at][:, None] + gamma[:, None, None, None] * test - pulled
    return found
