"""The theory's side: the federated kernel flow at every evaluated round, and the limit of Theorem 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtangent.compare.settings import Setting
from fedtangent.kernels.gram import KernelBlocks, SingularKernelError, kernel_blocks
from fedtangent.theory import Flow, Rule, federated_flow, gp_limit
from fedtangent.theory.fed_ensemble.limit import covariance_terms
from fedtangent.types import Cohort, Gaussian


class Moments(NamedTuple):
    """Mean and covariance of each of the K models at one round, at the test points."""

    mean: np.ndarray  # [K, m, C]
    cov: np.ndarray  # [K, m, m]


@dataclass(frozen=True)
class Predicted:
    """Everything the theory says of one setting, for the kernel of one width (or of infinite width)."""

    blocks: KernelBlocks
    flow: Flow
    rounds: tuple[int, ...]
    moments: tuple[Moments, ...]  # one per evaluated round
    limit: Gaussian | None  # None where the kernel is singular in float64: the flow is then the only prediction
    why_no_limit: str = ""


def predict(setting: Setting, cohorts: Cohort, width: int | None = None) -> Predicted:
    """Flow and limit for ``setting`` under ``cohorts`` [R, S], from the analytic kernel."""
    kernel = setting.model(setting.largest if width is None else width).kernel
    if kernel is None:
        raise ValueError(f"setting {setting.name}: its model has no analytic kernel")
    blocks = kernel_blocks(kernel, setting.x_train, setting.x_test)
    flow = run_flow(setting, blocks, cohorts)
    try:
        limit, why = gp_limit(blocks, setting.y_train, max_relative_jitter=0.0), ""
    except SingularKernelError as error:
        limit, why = None, str(error)
    means = np.asarray(flow.mean(setting.rounds))
    moments = tuple(Moments(mean, np.asarray(flow.cov(r))) for r, mean in zip(setting.rounds, means, strict=True))
    return Predicted(blocks, flow, setting.rounds, moments, limit, why)


def run_flow(
    setting: Setting,
    blocks: KernelBlocks,
    cohorts: Cohort,
    num_models: int | None = None,
    server_learning_rate: float = 1.0,
    outputs: str = "shared",
) -> Flow:
    """The flow of ``setting`` under ``cohorts``, for the setting's K models unless told otherwise."""
    return federated_flow(
        blocks,
        setting.y_train,
        setting.partition,
        cohorts,
        Rule(setting.local_steps, setting.learning_rate, server_learning_rate=server_learning_rate),
        num_models=setting.schedule.num_models if num_models is None else num_models,
        outputs=outputs,
    )


def without_cross_terms(flow: Flow, blocks: KernelBlocks, round_: int, num_models: int) -> np.ndarray:
    """A wrong covariance, [K, m, m]: the prior and propagated terms without the cross terms. A negative control."""
    wrong = []
    for k in range(num_models):
        terms = covariance_terms(blocks, np.asarray(flow.influence(round_, k)))
        wrong.append(np.asarray(terms.prior + terms.propagated))
    return np.stack(wrong)


def one_client_dropped(cohorts: Cohort, client: int) -> Cohort:
    """The same cohorts as if ``client`` had never taken part. A negative control."""
    weight = np.where(np.asarray(cohorts.client) == client, 0.0, np.asarray(cohorts.weight))
    return cohorts._replace(weight=weight)  # type: ignore[arg-type]


def networks(flow: Flow, train: np.ndarray, test: np.ndarray, rounds: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The flow's prediction of each network from its own initial function.

    ``train`` [K, E, n, C] and ``test`` [K, E, m, C] are outputs at round 0. Returns predictions at ``rounds`` with a
    leading axis for them.
    """
    draws = range(train.shape[1])
    on_train = [np.asarray(flow.predict_train(train[:, e], rounds)) for e in draws]
    on_test = [np.asarray(flow.predict(train[:, e], test[:, e], rounds)) for e in draws]
    return np.stack(on_train, axis=2), np.stack(on_test, axis=2)
