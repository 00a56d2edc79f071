"""All verdicts of one setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src.comparison import exact
from fedtangent._src.comparison.predicted import Predicted, networks, run_flow, without_clients, without_cross_terms
from fedtangent._src.comparison.simulated import Simulated, initial_functions
from fedtangent._src.comparison.statistics import Pair, law_distance
from fedtangent._src.comparison.verdicts import (
    MEAN_MARGIN,
    VARIANCE_MARGIN,
    AtRound,
    Verdict,
    exact_verdict,
    independence_verdict,
    initial_verdict,
    mean_verdict,
    slope_verdict,
    variance_verdict,
)
from fedtangent._src.federated import schedule
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.losses import targets_of
from fedtangent._src.theory.flow import Flow
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution
from fedtangent._src.theory.prior import covariance_terms
from fedtangent._src.types import AnyArray, Gaussian, Schedule

FIXED_POINT = 1e-8
NUM_MODELS = 5  # K of the schedules whose fixed points are checked
MAX_DROPPED = 20  # clients tried as those to leave out
SLOWER = (0.75, 0.5, 0.25, 0.1)  # wrong rates
SHARES = (0.9, 0.5, 0.1, 0.0)  # of the time, wrong too
FIXED_POINT_AGES = 20  # ages of K rounds in a pass: under partial participation too, every client comes up
MORE_STARTS = 2000  # values of initial functions at a point, at least, that are drawn and not trained
NARROW = 1e-3  # of the prior's widest axis: those below are left out
REACHED = 0.25  # of a verdict's margin: how near the flow is to the limit when networks are judged by that too


def all_verdicts(
    theory: Predicted,
    seen: tuple[Simulated, ...],
    moved: tuple[Simulated, ...],
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Verdict, ...]:
    """Computes all verdicts that apply to a setting.

    Args:
        theory: Flow and limit of the setting.
        seen: Networks trained by the setting's algorithm, one entry for each width.
        moved: Networks trained by NTK-FL.
        say: Called with a line of text for each step of the work.
    """
    setting, name = theory.setting, theory.setting.name
    say(f"{name}: verdicts on networks")
    wrong = {} if setting.is_linear else wrong_flows(theory)
    sampled = sampled_verdicts(theory, seen, moved, wrong)
    say(f"{name}: verdicts on linear models")
    examples, outputs = setting.problem.y_train.shape
    if setting.is_linear:
        verdicts = [exact.linear_verdict(theory, seen[-1])]
    elif examples * outputs <= exact.MOST_ROWS:
        verdicts = [exact.linearised_verdict(setting, theory.cohorts)]
    else:
        verdicts = [exact.of_kernel_verdict(theory)]
    if theory.flow.kind.is_linear and examples <= exact.MOST_STARTS and starts_differ(theory):
        say(f"{name}: verdicts on laws")
        verdicts += exact.law_verdicts(theory)
    if setting.is_standard and theory.limit is not None and _determined(theory.blocks):
        say(f"{name}: verdicts on the flow repeated for ever")
        verdicts += _fixed_points(theory, theory.limit)
    return tuple(sampled + verdicts)


def sampled_verdicts(
    theory: Predicted, seen: tuple[Simulated, ...], moved: tuple[Simulated, ...], wrong: dict[str, Flow]
) -> list[Verdict]:
    """Computes the verdicts on averages over sampled networks, which have a small chance of being wrong.

    Args:
        theory: Flow and limit of the setting.
        seen: Networks trained by the setting's algorithm, one entry for each width.
        moved: Networks trained by NTK-FL.
        wrong: Wrong flows, keyed by the mistake in each; the negative controls.
    """
    verdicts = _starts(theory, seen) if starts_differ(theory) else []
    if not theory.setting.is_linear:
        verdicts += _every_round(theory, seen, wrong)
    if theory.limit is not None and starts_differ(theory):
        verdicts += _limit(theory, seen, theory.limit)
    # Of a user's run, NTK-FL is shown and not judged: how near its one kernel for all outputs is to the limiting one
    # depends on examples and widths, which the standard cases choose so that it is.
    for method in dict.fromkeys(m.method for m in moved if theory.setting.is_standard):
        verdicts += _evolution(theory, tuple(m for m in moved if m.method == method))
    return verdicts


def wrong_flows(theory: Predicted) -> dict[str, Flow]:
    """Builds wrong flows, keyed by the mistake in each, as negative controls of sampled verdicts.

    They are so far from the right flow that networks of finite width can tell the two apart.
    """
    setting, cohorts, blocks = theory.setting, theory.cohorts, theory.blocks
    rate = setting.followed.learning_rate
    flows = {
        f"client rate x {by}": run_flow(setting, blocks, cohorts, learning_rate=np.multiply(by, rate)) for by in SLOWER
    }
    right, clients = _from_zero(theory.flow), np.unique(np.asarray(cohorts.client)[np.asarray(cohorts.weight) > 0])
    change = []
    for client in clients[:MAX_DROPPED]:
        change.append(np.linalg.norm(_from_zero(run_flow(setting, blocks, without_clients(cohorts, [client]))) - right))
    for count in sorted({1, *(min(-(-len(clients) // part), len(change)) for part in (10, 3))}):
        most = clients[np.argsort(change)[-count:]]
        flows[f"{count} of {len(clients)} clients missing"] = run_flow(setting, blocks, without_clients(cohorts, most))
    return flows


def _from_zero(flow: Flow) -> Float[np.ndarray, "K m C"]:
    """Returns the flow's final outputs at the test points, [K, m, C], started from the zero function."""
    train, test = (
        np.zeros((flow.num_models, rows, flow.y_train.shape[1]))
        for rows in (len(flow.y_train), len(flow.blocks.ntk_test_train))
    )
    return np.asarray(flow.predict(train, test, flow.num_rounds))


def starts_differ(theory: Predicted) -> bool:
    """Returns whether initial functions are random, so that the models have a law; False if all start as zero."""
    return bool(np.trace(np.asarray(theory.blocks.nngp_test)) > 0)


def _starts(theory: Predicted, seen: tuple[Simulated, ...]) -> list[Verdict]:
    """Checks that initial functions at the test points have the prior's variance, and are independent of each other.

    The variance is checked in two ways. The first takes the initial functions of the simulated networks along the
    prior's widest axes, scaled so that every axis counts alike. The second sums squares over the points, where one or
    two axes hold most of the variance; it needs more samples, and takes further networks that are not trained.
    """
    setting, prior = theory.setting, np.asarray(theory.blocks.nngp_test)
    variances, axes = np.linalg.eigh(prior)
    wide = variances > NARROW * variances[-1]
    units = [np.einsum("kemc,ma->keac", s.test[0], axes[:, wide] / np.sqrt(variances[wide])) for s in seen]
    more = [initial_functions(setting, s.width, -(-MORE_STARTS // s.test.shape[-1])) for s in seen]
    squares = {
        "mean over its axes": [_averaged(u * u) for u in units],
        "sum over points": [(np.sum(f**2, axis=1) / np.trace(prior)).ravel() for f in more],
    }
    products = {"draws": [_averaged(u[:, 1:] * u[:, :-1]) for u in units]}
    if setting.num_models > 1:
        products["models"] = [_averaged(u[1:] * u[:-1]) for u in units]
    if len(seen) > 1:
        products["widths"] = [_averaged(units[-1] * units[-2])]
    widths, name = [s.width for s in seen], setting.name
    return [
        initial_verdict(name, widths, squares),
        independence_verdict(name, widths, products, squares["mean over its axes"]),
    ]


def _averaged(values: Float[np.ndarray, "K E a C"]) -> Float[np.ndarray, "KE"]:
    """Averages over axes and outputs: [K, E, a, C] -> [K E]."""
    return np.asarray(values.mean(axis=(2, 3)).ravel())


def _every_round(theory: Predicted, seen: tuple[Simulated, ...], wrong: dict[str, Flow]) -> list[Verdict]:
    """Compares networks with the flow from the same initial functions, at every evaluated round."""
    setting, name, rounds = theory.setting, theory.setting.name, theory.setting.size.rounds[1:]
    right = theory.networks(seen, rounds)
    if not theory.flow.kind.is_linear:
        return _without_a_law(theory, seen, right, wrong)
    means, followed = np.asarray(theory.flow.mean(rounds)), []
    for at, r in enumerate(rounds, start=1):
        law = np.trace(theory.moments[at].cov, axis1=1, axis2=2)
        followed.append(
            _followed(
                seen,
                [p[at - 1] for p in right],
                at,
                propagated_variance(theory.blocks, theory.influences[r]),
                law,
            )
        )
    away, slopes, variances = {}, {}, {}
    for what, flow in wrong.items():
        away[what] = list((np.asarray(flow.mean(rounds)) - means).mean(axis=1))
        slopes[what] = networks(flow, seen, rounds)
        variances[what] = np.trace(np.asarray(flow.cov(rounds[-1])), axis1=1, axis2=2)
    slopes["targets of the other sign"] = [p - 2 * means[:, :, None] for p in right]
    variances["no cross terms"] = np.trace(
        without_cross_terms(theory.blocks, theory.influences[rounds[-1]]), axis1=1, axis2=2
    )
    from_start = f"the flow's from the same initial functions, {len(rounds)} rounds"
    return [
        slope_verdict(name, setting.size.widths, seen, right, slopes),
        mean_verdict(name, f"mean = {from_start}", followed, away),
        variance_verdict(name, f"variance = {from_start}", followed, variances),
    ]


def _without_a_law(
    theory: Predicted, seen: tuple[Simulated, ...], right: list[np.ndarray], wrong: dict[str, Flow]
) -> list[Verdict]:
    """Computes verdicts for a loss under which each network's flow is known, but not the law over networks."""
    setting, problem, rounds = theory.setting, theory.setting.problem, theory.setting.size.rounds[1:]
    of_classes = targets_of(problem.loss) == "classes"
    other = np.roll(problem.y_train, 1, axis=1) if of_classes else -problem.y_train
    what = "every class for the next" if of_classes else "targets of the other sign"
    changed = dataclasses.replace(setting, problem=dataclasses.replace(problem, y_train=other))
    flows = wrong | {what: run_flow(changed, theory.blocks, theory.cohorts)}
    others = {what: networks(flow, seen, rounds) for what, flow in flows.items()}
    away = {what: list((other[-1] - right[-1]).mean(axis=(1, 2))) for what, other in others.items()}
    unknown = np.full(setting.num_models, np.nan)
    followed = [_followed(seen, [p[at] for p in right], at + 1, unknown, unknown) for at in range(len(rounds))]
    from_start = f"the flow's from the same initial functions, {len(rounds)} rounds"
    return [
        slope_verdict(setting.name, setting.size.widths, seen, right, others),
        mean_verdict(setting.name, f"mean = {from_start}", followed, away),
    ]


def _followed(
    seen: Sequence[Simulated],
    predicted: Sequence[Float[np.ndarray, "K E m C"]],
    at: int,
    exact_variance: Float[np.ndarray, "K"],
    law: Float[np.ndarray, "K"],
    scale: float | None = None,
) -> AtRound:
    """Pairs the networks at the evaluated round number ``at`` with ``predicted`` [K, E, m, C] of each width."""
    pairs = tuple(Pair(s.width, s.test[at], p) for s, p in zip(seen, predicted, strict=True))
    moved = predicted[-1] - seen[-1].test[0]
    own = float(np.sqrt(np.mean(np.sum(moved**2, axis=(-2, -1)))))
    return AtRound(pairs, exact_variance, law, own if scale is None else scale)


def propagated_variance(blocks: KernelBlocks, influences: Iterable[Float[np.ndarray, "m n"]]) -> Float[np.ndarray, "K"]:
    """Computes the variance of ``f0(x) - B f0(X)`` for ``f0 ~ GP(0, K)``, summed over the test points.

    It is the trace of ``A K A'`` with ``A = [-B, I]`` and the prior K at all points, computed independently of the
    theory's formula.

    Args:
        blocks: Kernels; only the prior is used.
        influences: The matrix B [m, n] of each model.

    Returns:
        One variance for each B, [K].
    """
    cross = np.asarray(blocks.nngp_test_train)
    prior = np.block([[np.asarray(blocks.nngp_train), cross.T], [cross, np.asarray(blocks.nngp_test)]])
    rows = (np.concatenate([-b, np.eye(len(b))], axis=1) for b in influences)
    return np.array([np.sum((a @ prior) * a) for a in rows])


def _limit(theory: Predicted, seen: tuple[Simulated, ...], limit: Gaussian) -> list[Verdict]:
    """Compares networks at the last round with Theorem 2; no verdicts if the flow is still far from the limit."""
    name, num_rounds, last = theory.setting.name, theory.setting.size.num_rounds, theory.moments[-1]
    exact_variance = propagated_variance(theory.blocks, theory.influences[num_rounds])
    law = np.full(len(last.mean), np.trace(limit.cov))
    follow = [n[0] for n in theory.networks(seen, theory.setting.size.rounds[-1:])]
    away = last.mean - np.asarray(limit.mean)  # [K, m, C]
    right = _followed(seen, [f - away[:, None] for f in follow], -1, exact_variance, law)
    if not reached(theory, limit, right.scale):
        return []
    mean = np.asarray(limit.mean)
    means = {"nine tenths of the mean": [-0.1 * mean], "untrained network": [-mean]}
    prior = np.full(len(law), np.trace(np.asarray(theory.blocks.nngp_test)))
    what = f"Theorem 2, round {num_rounds}"
    return [
        mean_verdict(name, f"mean = {what}", [right], means),
        variance_verdict(
            name, f"variance = {what}", [right], {"covariance x 1.5": 1.5 * law, "prior covariance": prior}
        ),
    ]


def reached(theory: Predicted, limit: Gaussian, scale: float) -> bool:
    """Returns whether the flow's last round is near the limit: within the share ``REACHED`` of the verdicts' margins.

    Args:
        theory: The flow's means and covariances.
        limit: The limit of Theorem 2.
        scale: Norm by which the distance of the means is divided: how far training moves the functions.
    """
    last, trace = theory.moments[-1], np.trace(limit.cov)
    if not trace > 0:  # as at the training points: there is no variance to compare
        return False
    off = np.linalg.norm((last.mean - limit.mean).mean(axis=0)) / scale
    ratio = np.mean(np.trace(last.cov, axis1=1, axis2=2)) / trace
    return bool(off <= REACHED * MEAN_MARGIN and abs(ratio - 1) <= REACHED * VARIANCE_MARGIN)


def _evolution(theory: Predicted, moved: tuple[Simulated, ...]) -> list[Verdict]:
    """Compares NTK-FL's networks of every width with the limiting kernel's evolution for the times they chose."""
    name, method = theory.setting.name, moved[0].method
    times = np.concatenate([np.unique(m.info["time"]) for m in moved])
    when = f"t = {times.min()}..{times.max()}" if times.min() < times.max() else f"t = {times.max()}"
    right = _evolved(theory, moved)
    if theory.setting.is_linear:
        misses = {_slower(s): _largest(_evolved(theory, moved, s)) / right.scale for s in SHARES}
        found = _largest(right) / right.scale
        return [exact_verdict(name, f"{method}: each network, {when}", found, misses, exact.EXACT)]
    target, own = theory.setting.problem.y_train, _responses(theory, moved[-1])
    means = {_slower(s): [((_responses(theory, moved[-1], s) - own) @ target).mean(axis=(0, 1))] for s in SHARES}
    prior = np.full(len(right.law), np.trace(np.asarray(theory.blocks.nngp_test)))
    laws = {"covariance x 1.5": 1.5 * right.law, "prior covariance": prior}
    return [
        mean_verdict(name, f"{method}: mean, {when}", [right], means),
        variance_verdict(name, f"{method}: variance", [right], laws),
    ]


def _slower(share: float) -> str:
    return f"{share:g} of the time" if share else "untrained network"


def _largest(followed: AtRound) -> float:
    """Returns the largest error of a network."""
    return float(np.max([np.max(np.linalg.norm(p.seen - p.predicted, axis=-2)) for p in followed.pairs]))


def _evolved(theory: Predicted, moved: tuple[Simulated, ...], share: float = 1.0) -> AtRound:
    """Pairs NTK-FL's networks with the limiting kernel's evolution for ``share`` of the times that they chose."""
    predicted, variances, laws = [], [], []
    for m in moved:
        each = _responses(theory, m, share)
        predicted.append(m.test[0] + each @ (theory.setting.problem.y_train - m.train[0]))
        variances.append([np.mean(propagated_variance(theory.blocks, own)) for own in each])
        laws.append([np.mean([np.trace(covariance_terms(theory.blocks, b).total) for b in own]) for own in each])
    return _followed(moved, predicted, -1, np.mean(variances, axis=0), np.mean(laws, axis=0))


def _responses(theory: Predicted, moved: Simulated, share: float = 1.0) -> Float[np.ndarray, "K E m n"]:
    """Computes ``B`` [K, E, m, n] of networks that evolve with the limiting kernel for ``share`` of their times."""
    step = 0.5 / float(np.linalg.eigvalsh(theory.blocks.ntk_train)[-1])
    times = (moved.info["time"][:, 0, :].T * share).astype(int)  # [E, R = 1, K] -> [K, E]
    each = {int(t): np.asarray(ntk_evolution(theory.blocks, step, int(t))) for t in np.unique(times)}
    return np.stack([[each[int(t)] for t in row] for row in times])


def _determined(blocks: KernelBlocks) -> bool:
    """Returns whether the kernel is so well conditioned that float64 finds a fixed point to within ``FIXED_POINT``."""
    eigenvalues = np.linalg.eigvalsh(blocks.ntk_train)
    return bool(np.finfo(float).eps * eigenvalues[-1] < FIXED_POINT / 10 * eigenvalues[0])


def _fixed_points(theory: Predicted, limit: Gaussian) -> list[Verdict]:
    """Compares the flow's fixed point, its rounds repeated many times, with Theorem 2, under three schedules."""
    clients = theory.setting.problem.partition.num_clients
    schedules: dict[str, Schedule] = {
        "full participation": schedule.all_clients(clients),
        f"permutations, K = {NUM_MODELS}": schedule.per_client_permutations(clients, NUM_MODELS),
        "strata, one client of each": schedule.strata(clients, NUM_MODELS, max(clients // 2, 1), 1),
    }
    return [_fixed_point(theory, name, own, limit) for name, own in schedules.items()]


def _fixed_point(theory: Predicted, name: str, own: Schedule, limit: Gaussian) -> Verdict:
    setting, problem = theory.setting, theory.setting.problem
    drawn = schedule.drawn_cohorts(own, problem.partition, FIXED_POINT_AGES * own.num_models, setting.seed)
    flow = run_flow(setting, theory.blocks, drawn, own.num_models)
    fewer = run_flow(setting, theory.blocks, without_clients(drawn, [0]), own.num_models)
    return exact_verdict(
        setting.name,
        f"flow repeated for ever = Theorem 2, {name}",
        law_distance(repeated(flow, problem.y_train), limit[:2]),
        {"flow without one client": law_distance(repeated(fewer, problem.y_train), limit[:2])},
        FIXED_POINT,
    )


def repeated(
    flow: Flow, y_train: Float64[np.ndarray, "n C"]
) -> tuple[Float64[np.ndarray, "m C"], Float[AnyArray, "m m"]]:
    """Computes the law of model 0 after 2^30 repetitions of the flow's rounds.

    One pass over the rounds is an operator ``M``, and two passes are ``M + (I - M Theta) M``, so 30 compositions
    suffice. No linear system is solved: a step size beyond the stability bound diverges, and a client that never takes
    part changes the result.

    Args:
        flow: The flow of one pass.
        y_train: Targets, [n, C].

    Returns:
        Mean [m, C] and covariance [m, m] at the test points.
    """
    theta = np.asarray(flow.blocks.ntk_train)
    operator = np.asarray(flow.operator(flow.num_rounds, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(30):
            operator = operator + operator - operator @ theta @ operator
        b = flow.blocks.ntk_test_train @ operator
        return b @ y_train, covariance_terms(flow.blocks, b).total
