"""The theory's side of a comparison: the federated kernel flow at every evaluated round, and Theorem 2's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedtangent.comparison.settings import Setting
from fedtangent.comparison.simulated import Simulated, network_functions
from fedtangent.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent.kernels.large import LargeKernel
from fedtangent.losses import words
from fedtangent.theory import Flow, Rule, federated_flow, gp_limit, prior_functions
from fedtangent.theory.prior import covariance_terms
from fedtangent.types import Cohort, Gaussian

PRIOR_DRAWS = 64  # initial functions that a law is estimated from, where it has no closed form


class ModelLaw(NamedTuple):
    """What theory says of each of K independent models at the test points: mean, and covariance of each output.

    Of the squared error the law is Gaussian, and its outputs are independent; of another loss these are moments.
    """

    mean: np.ndarray  # [K, m, C]
    cov: np.ndarray  # [K, m, m]

    @property
    def average_cov(self) -> np.ndarray:
        """Mean of the covariances over models, [m, m]: what their sample covariance about the means estimates."""
        return self.cov.mean(axis=0)


@dataclass(frozen=True)
class Predicted:
    """Everything the theory says of one setting, for its analytic kernel."""

    setting: Setting
    cohorts: Cohort  # [R, S]
    blocks: KernelBlocks
    flow: Flow
    moments: tuple[ModelLaw, ...]  # one per evaluated round
    limit: Gaussian | None  # None of another loss, or a kernel that is singular in float64: the flow then predicts
    why_no_limit: str = ""
    influences: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Evaluated round -> B [K, m, n] of ``mean + f_0(x) - B f_0(X)``; none where a run is not linear in f_0."""

    drawn: np.ndarray | None = None
    """[draws, K, m, C] test outputs at the end of draws from the prior, where the law has no closed form."""

    def networks(self, seen: Sequence[Simulated], rounds: tuple[int, ...]) -> list[np.ndarray]:
        """``networks`` of the flow at evaluated rounds, by ``influences`` where there are."""
        return networks(self.flow, seen, rounds, self.influences or None)


def predict(setting: Setting, cohorts: Cohort) -> Predicted:
    """Flow and limit for ``setting`` under ``cohorts`` [R, S], from the analytic kernel."""
    blocks = setting.blocks()
    flow = run_flow(setting, blocks, cohorts)
    if not flow.kind.is_linear:
        why = f"a law is known of the loss squared_error, not of {words(setting.loss)}"
        drawn = _from_prior(setting, blocks, flow)
        return Predicted(setting, cohorts, blocks, flow, _sampled_laws(drawn), None, why, drawn=drawn[:, -1])
    limit, why = limit_of(setting, blocks)
    influences = {r: np.asarray(flow.dependence(r)[0]) for r in setting.rounds}
    covs = [np.stack([covariance_terms(blocks, b).total for b in each]) for each in influences.values()]
    moments = tuple(map(ModelLaw, np.asarray(flow.mean(setting.rounds)), covs))
    return Predicted(setting, cohorts, blocks, flow, moments, limit, why, influences)


def limit_of(setting: Setting, kernels: KernelBlocks | LargeKernel) -> tuple[Gaussian | None, str]:
    """Theorem 2's limit and an empty text, or None and the reason why there is no limit."""
    held = np.unique(setting.partition.indices)  # rows that nobody holds are not learnt
    known = kernels
    if len(held) < len(setting.x_train):
        if isinstance(kernels, LargeKernel):
            return None, "some training points of a large kernel are held by nobody"
        known = _of_rows(kernels, held)
    try:
        return gp_limit(known, setting.y_train[held], max_relative_jitter=0.0), ""
    except SingularKernelError as error:
        return None, str(error)


def _of_rows(blocks: KernelBlocks, rows: np.ndarray) -> KernelBlocks:
    """The blocks of some training points and all test points."""
    square, cross = np.ix_(rows, rows), np.s_[:, rows]
    train, test_train = (
        (np.asarray(block)[square] for block in (blocks.ntk_train, blocks.nngp_train)),
        (np.asarray(block)[cross] for block in (blocks.ntk_test_train, blocks.nngp_test_train)),
    )
    (ntk, nngp), (ntk_cross, nngp_cross) = train, test_train
    return KernelBlocks(ntk, ntk_cross, nngp, nngp_cross, blocks.nngp_test, blocks.ntk_test)


def _from_prior(setting: Setting, blocks: KernelBlocks, flow: Flow) -> np.ndarray:
    """Test outputs at every evaluated round of draws from the prior, [draws, r, K, m, C]."""
    starts, train = drawn_starts(setting, blocks, PRIOR_DRAWS), len(setting.x_train)
    each = [np.asarray(flow.predict(f[:, :train], f[:, train:], setting.rounds)) for f in starts]
    return np.stack(each)


def drawn_starts(setting: Setting, kernels: KernelBlocks | LargeKernel, draws: int) -> np.ndarray:
    """``draws`` initial functions for each of the K models, at all points: [draws, K, n + m, C].

    Draws from the prior; of a large kernel, whose prior is too large to factorise, networks of the setting's own width.
    """
    models, outputs = setting.schedule.num_models, setting.y_train.shape[1]
    if isinstance(kernels, LargeKernel):
        x = np.concatenate([setting.x_train, setting.x_test]).astype(np.float32)
        found = network_functions(setting, setting.largest, draws * models, x)
        return found.reshape(draws, models, len(x), outputs)
    starts = np.asarray(prior_functions(kernels, draws * models * outputs, setting.seed))  # [n + m, .]
    return starts.reshape(len(starts), draws, models, outputs).transpose(1, 2, 0, 3)


def _sampled_laws(drawn: np.ndarray) -> tuple[ModelLaw, ...]:
    """Mean and covariance, that of an output on average, at every round: of a loss with no law in closed form."""
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
    """The flow of ``setting`` under ``cohorts``, for the setting's K models unless told otherwise.

    ``changes`` replace fields of its rule.
    """
    return federated_flow(
        blocks,
        setting.y_train,
        setting.partition,
        cohorts,
        Rule(**{"local_steps": setting.local_steps, "learning_rate": setting.learning_rate, **setting.rule, **changes}),
        num_models=setting.schedule.num_models if num_models is None else num_models,
        outputs=outputs,
    )


def _from_own_start(flow: Flow, seen: Simulated, draw: int, rounds: tuple[int, ...]) -> np.ndarray:
    return np.asarray(flow.predict(seen.train[0][:, draw], seen.test[0][:, draw], rounds))


def without_cross_terms(blocks: KernelBlocks, influences: np.ndarray) -> np.ndarray:
    """A wrong covariance, [K, m, m]: the prior and propagated terms without the cross terms. A negative control."""
    terms = [covariance_terms(blocks, b) for b in influences]
    return np.stack([np.asarray(t.prior + t.propagated) for t in terms])


def without_clients(cohorts: Cohort, clients: Sequence[int] | np.ndarray) -> Cohort:
    """The same cohorts as if ``clients`` had never taken part. A negative control."""
    weight = np.where(np.isin(np.asarray(cohorts.client), clients), 0.0, np.asarray(cohorts.weight))
    return cohorts._replace(weight=weight)  # type: ignore[arg-type]


def networks(
    flow: Flow, seen: Sequence[Simulated], rounds: tuple[int, ...], influences: Mapping[int, np.ndarray] | None = None
) -> list[np.ndarray]:
    """The flow's prediction at the test points of each network from its own initial function, [r, K, E, m, C].

    One array for each of ``seen``; r counts ``rounds``. Of full batches and the squared error an initial function f0
    becomes ``mean + gamma f0(x) - B f0(X)``, with one B for all networks of a model (``influences``, where they are
    known, with gamma 1); else each has a run of its own.
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
