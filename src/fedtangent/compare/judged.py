"""Every verdict of one setting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent.compare import exact
from fedtangent.compare.predicted import Predicted, networks, one_client_dropped, run_flow, without_cross_terms
from fedtangent.compare.simulated import Simulated
from fedtangent.compare.statistics import law_distance, mean_statistic, relative_errors, variance_statistic
from fedtangent.compare.verdicts import (
    Sampled,
    Verdict,
    exact_verdict,
    mean_verdict,
    paired_verdict,
    sampled_verdict,
    slope_verdict,
    variance_verdict,
)
from fedtangent.federated import schedule
from fedtangent.federated.compose import drawn_cohorts
from fedtangent.theory import Flow, covariance_terms, ntk_evolution
from fedtangent.types import Gaussian, Schedule

FIXED_POINT = 1e-8
NUM_MODELS = 5  # K of the schedules whose fixed points are checked
MAX_DROPPED = 20  # clients tried as the one to leave out
FIXED_POINT_AGES = 20  # ages of K rounds in a pass: under partial participation too, every client comes up


def all_verdicts(
    theory: Predicted, seen: tuple[Simulated, ...], moved: tuple[Simulated, ...], errors: list[np.ndarray]
) -> tuple[Verdict, ...]:
    """The comparisons that apply to what was predicted, trained (``seen``) and moved by NTK-FL.

    ``errors`` holds, per width, each network's relative error to the flow at the last round.
    """
    setting, dropped = theory.setting, _most_missed(theory)
    verdicts = []
    if setting.is_linear:
        verdicts.append(exact.linear_verdict(theory, seen[-1], dropped))
    else:
        wrong = [_errors(dropped, s) for s in seen]
        verdicts.append(slope_verdict(setting.name, setting.widths, errors, "flow without one client", wrong))
        verdicts.append(exact.linearised_verdict(setting, theory.cohorts))
    verdicts += exact.law_verdicts(theory)
    verdicts += _every_round(theory, seen)
    if not setting.is_linear:
        verdicts.append(_paired(theory, seen[-1], dropped))
    if theory.limit is not None:
        verdicts += _limit(theory, seen, theory.limit)
        verdicts += _fixed_points(theory, theory.limit)
    for method in dict.fromkeys(m.method for m in moved):
        verdicts += _evolution(theory, tuple(m for m in moved if m.method == method))
    return tuple(verdicts)


def _most_missed(theory: Predicted) -> Flow:
    """The flow without the client whose absence changes the last round's mean most. A negative control."""
    setting, cohorts = theory.setting, theory.cohorts
    right = np.asarray(theory.flow.mean(setting.num_rounds))
    flows = [
        run_flow(setting, theory.blocks, one_client_dropped(cohorts, client))
        for client in np.unique(np.asarray(cohorts.client))[:MAX_DROPPED]
    ]
    change = [np.linalg.norm(np.asarray(flow.mean(setting.num_rounds)) - right) for flow in flows]
    return flows[int(np.argmax(change))]


def _errors(flow: Flow, seen: Simulated) -> np.ndarray:
    """Relative error of each network to ``flow`` from its own initial function at the last round, [K, E]."""
    predicted = networks(flow, seen, seen.rounds[-1:])[0]
    return relative_errors(predicted, seen.test[-1], predicted - seen.test[0])


def _every_round(theory: Predicted, seen: tuple[Simulated, ...]) -> list[Verdict]:
    setting, verdicts = theory.setting, []
    for at, r in enumerate(setting.rounds[1:], start=1):
        samples = Sampled(setting.widths, tuple(s.test[at] for s in seen), *theory.moments[at])
        untrained = theory.moments[0].mean
        verdicts.append(mean_verdict(setting.name, f"mean = flow, round {r}", samples, "untrained network", untrained))
        wrong_cov = without_cross_terms(theory.flow, r)
        verdicts.append(
            variance_verdict(setting.name, f"variance = flow, round {r}", samples, "no cross terms", wrong_cov)
        )
    return verdicts


def _paired(theory: Predicted, seen: Simulated, dropped: Flow) -> Verdict:
    """Mean of the networks against the flow from the same initial functions: sampling error all but cancels."""
    right, wrong = (networks(flow, seen, seen.rounds[-1:])[0] for flow in (theory.flow, dropped))
    return paired_verdict(
        theory.setting.name,
        f"mean = flow from the same initial functions, round {seen.rounds[-1]}",
        seen.test[-1] - right,
        "flow without one client",
        seen.test[-1] - wrong,
    )


def _limit(theory: Predicted, seen: tuple[Simulated, ...], limit: Gaussian) -> list[Verdict]:
    """Networks at the last round against Theorem 2, once the flow has come nearer to it than sampling can tell."""
    if not reached(theory, limit):
        return []
    setting, num_models = theory.setting, theory.setting.schedule.num_models
    mean, cov = (np.broadcast_to(part, (num_models, *part.shape)) for part in (limit.mean, limit.cov))
    samples = Sampled(setting.widths, tuple(s.test[-1] for s in seen), mean, cov)
    wrong_mean = seen[-1].test[0].mean(axis=1)
    what = f"Theorem 2, round {setting.num_rounds}"
    prior = np.broadcast_to(_prior(theory), cov.shape)
    return [
        mean_verdict(setting.name, f"mean = {what}", samples, "untrained network", wrong_mean),
        variance_verdict(setting.name, f"variance = {what}", samples, "prior covariance", prior),
    ]


def reached(theory: Predicted, limit: Gaussian) -> bool:
    """Whether the flow's last round is nearer to the limit than sampling can tell: within one standard error each of
    the mean's and the variance's statistics."""
    last, draws = theory.moments[-1], theory.setting.draws
    trace = np.trace(limit.cov)
    spread = np.sqrt(2 * np.sum(limit.cov**2)) / trace / np.sqrt(last.mean.shape[0] * last.mean.shape[2])
    off = np.mean(draws * np.sum((last.mean - limit.mean) ** 2, axis=1) / trace)
    ratio = np.mean(np.trace(last.cov, axis1=1, axis2=2)) / trace
    return bool(off <= spread and abs(ratio - 1) <= spread / np.sqrt(draws - 1))


def _prior(theory: Predicted) -> np.ndarray:
    """Covariance of the initial functions at the test points: a wrong covariance for trained networks."""
    return theory.moments[0].cov[0]


class _Evolved(NamedTuple):
    """NTK-FL's networks at one width less the limiting kernel's mean at the times they chose, and its covariance."""

    centred: np.ndarray  # [K, E, m, C]
    mean: np.ndarray  # [K, m, C], the mean that was subtracted, averaged over draws
    cov: np.ndarray  # [K, m, m]
    times: np.ndarray  # [K, E]


def _evolved(theory: Predicted, moved: Simulated) -> _Evolved:
    blocks, y = theory.blocks, theory.setting.y_train
    times = moved.info["time"][:, 0, :].T  # [E, R = 1, K] -> [K, E]
    step = 1 / float(np.linalg.eigvalsh(blocks.ntk_train)[-1])
    responses = {int(t): ntk_evolution(blocks, step, int(t)) for t in np.unique(times)}
    covs = {t: covariance_terms(blocks, b).total for t, b in responses.items()}
    mean = np.stack([[responses[int(t)] @ y for t in row] for row in times])  # [K, E, m, C]
    cov = np.stack([np.mean([covs[int(t)] for t in row], axis=0) for row in times])
    return _Evolved(moved.test[-1] - mean, mean.mean(axis=1), cov, times)


def _evolution(theory: Predicted, moved: tuple[Simulated, ...]) -> list[Verdict]:
    """NTK-FL's networks, one entry per width, against the limiting kernel's evolution for the times they chose."""
    evolved = [_evolved(theory, m) for m in moved]
    name, method, widths = theory.setting.name, moved[0].method, tuple(m.width for m in moved)
    last = evolved[int(np.argmax(widths))]
    zero = np.zeros_like(last.mean)
    low, high = last.times.min(), last.times.max()
    when = f"t = {low}..{high}" if low < high else f"t = {high}"
    means = [mean_statistic(e.centred, zero, e.cov) for e in evolved]
    variances = [variance_statistic(e.centred, e.cov) for e in evolved]
    wrong_mean = mean_statistic(last.centred, -last.mean, last.cov)
    wrong_variance = variance_statistic(last.centred, np.broadcast_to(_prior(theory), last.cov.shape))
    return [
        sampled_verdict(name, f"{method}: mean, {when}", widths, means, 2, "untrained network", wrong_mean),
        sampled_verdict(name, f"{method}: variance", widths, variances, 1, "prior covariance", wrong_variance),
    ]


def _fixed_points(theory: Predicted, limit: Gaussian) -> list[Verdict]:
    """Where the flow itself ends, when its rounds are repeated for ever, against Theorem 2, under three schedules."""
    clients = theory.setting.partition.num_clients
    schedules: dict[str, Schedule] = {
        "full participation": schedule.all_clients(clients),
        f"permutations, K = {NUM_MODELS}": schedule.per_client_permutations(clients, NUM_MODELS),
        "strata, one client of each": schedule.strata(clients, NUM_MODELS, max(clients // 2, 1), 1),
    }
    return [_fixed_point(theory, name, own, limit) for name, own in schedules.items()]


def _fixed_point(theory: Predicted, name: str, own: Schedule, limit: Gaussian) -> Verdict:
    setting = theory.setting
    drawn = drawn_cohorts(own, setting.partition, FIXED_POINT_AGES * own.num_models, setting.seed)
    flow = run_flow(setting, theory.blocks, drawn, own.num_models)
    fewer = run_flow(setting, theory.blocks, one_client_dropped(drawn, 0), own.num_models)
    return exact_verdict(
        setting.name,
        f"flow repeated for ever = Theorem 2, {name}",
        law_distance(repeated(flow, setting.y_train), limit[:2]),
        {"flow without one client": law_distance(repeated(fewer, setting.y_train), limit[:2])},
        FIXED_POINT,
    )


def repeated(flow: Flow, y_train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of model 0 after 2^30 repetitions of the rounds: the pass ``M``, composed with itself.

    ``M`` after a pass after a pass is ``M + (I - M Theta) M``. Nothing is solved: a step beyond the stability bound
    diverges, and a client that is never asked leaves its mark.
    """
    theta = np.asarray(flow.kernels.ntk_train)
    operator = np.asarray(flow.operator(flow.num_rounds, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(30):
            operator = operator + operator - operator @ theta @ operator
        b = flow.kernels.ntk_test_train @ operator
        return b @ y_train, covariance_terms(flow.kernels, b).total
