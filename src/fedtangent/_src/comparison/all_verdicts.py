"""All verdicts of one setting: which comparisons apply to it, with which wrong theories as negative controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float64, Int

from fedtangent._src.comparison import linear_models, verdicts
from fedtangent._src.comparison.predicted import Predicted, Starts, from_starts, run_flow
from fedtangent._src.comparison.predicted import networks as predicted_networks
from fedtangent._src.comparison.settings import Report, Setting
from fedtangent._src.comparison.simulated import Simulated, network_functions
from fedtangent._src.comparison.statistics import Pair, law_distance
from fedtangent._src.comparison.verdicts import AtRound, Verdict
from fedtangent._src.federated import schedule
from fedtangent._src.kernels.gram import KernelBlocks, joined
from fedtangent._src.losses import targets_of
from fedtangent._src.theory.flow import Flow
from fedtangent._src.theory.flow.functions import zero_functions
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution
from fedtangent._src.theory.prior import covariance_terms, prior_blocks
from fedtangent._src.types import AnyArray, Cohort, Gaussian, Schedule

FIXED_POINT = 1e-8
NUM_MODELS = 5  # K of the schedules whose fixed points are checked
MAX_DROPPED = 20  # clients tried as those to leave out
SLOWER = (0.75, 0.5, 0.25, 0.1)  # wrong rates
SHARES = (0.9, 0.5, 0.1, 0.0)  # of the training time, wrong too
FIXED_POINT_AGES = 20  # ages of K rounds in a pass: under partial participation too, every client comes up
MORE_STARTS = 2000  # values of initial functions at a point, at least, that are drawn and not trained
NARROW = 1e-3  # of the variance along the prior's widest axis: axes of less variance are left out
REACHED = 0.25  # of a verdict's margin: networks are compared with the limit too if the flow is as near to it


def all_verdicts(
    theory: Predicted,
    networks: tuple[Simulated, ...],
    evolved: tuple[Simulated, ...],
    say: Report = lambda line: None,
) -> tuple[Verdict, ...]:
    """Computes all verdicts that apply to a run: comparisons of networks and linear models with theory.

    Args:
        theory: Predictions for the run.
        networks: Networks trained by the run's algorithm, one entry for each width, in rising order.
        evolved: Networks trained by NTK-FL; verdicts on them exist only in a standard case of ``fedtangent compare``.
        say: Called with a line of text for each step of the work.
    """
    setting, name = theory.setting, theory.setting.name
    say(f"{name}: verdicts on networks")
    wrong = {} if setting.is_linear else wrong_flows(theory)
    sampled = sampled_verdicts(theory, networks, evolved, wrong)
    say(f"{name}: verdicts on linear models")
    examples, outputs = setting.problem.y_train.shape
    if setting.is_linear:
        outcomes = [linear_models.linear_verdict(theory, networks[-1])]
    elif examples * outputs <= linear_models.MOST_ROWS:
        outcomes = [linear_models.linearised_verdict(setting, theory.cohorts)]
    else:
        outcomes = [linear_models.of_kernel_verdict(theory)]
    if theory.flow.kind.is_linear and examples <= linear_models.MOST_STARTS and _starts_differ(theory):
        say(f"{name}: verdicts on laws")
        outcomes += linear_models.law_verdicts(theory)
    if setting.is_standard and theory.limit is not None and _determined(theory.blocks):
        say(f"{name}: verdicts on the flow repeated for ever")
        outcomes += _fixed_points(theory, theory.limit)
    return tuple(sampled + outcomes)


def sampled_verdicts(
    theory: Predicted, networks: tuple[Simulated, ...], evolved: tuple[Simulated, ...], wrong: dict[str, Flow]
) -> list[Verdict]:
    """Computes the verdicts on averages over sampled networks, which have a small chance of being wrong.

    Args:
        theory: Predictions for the run.
        networks: Networks trained by the run's algorithm, one entry for each width, in rising order.
        evolved: Networks trained by NTK-FL; verdicts on them exist only in a standard case of ``fedtangent compare``.
        wrong: Flows of wrong theories, the negative controls, keyed by the mistake in each.
    """
    outcomes = _starts(theory, networks) if _starts_differ(theory) else []
    if not theory.setting.is_linear:
        outcomes += _every_round(theory, networks, wrong)
    if theory.limit is not None and _starts_differ(theory):
        outcomes += _limit(theory, networks, theory.limit)
    # Only standard cases have verdicts on NTK-FL: their examples and widths are chosen so that its one kernel for all
    # outputs is near the limiting one.
    for method in dict.fromkeys(of_width.method for of_width in evolved if theory.setting.is_standard):
        outcomes += _evolution(theory, tuple(of_width for of_width in evolved if of_width.method == method))
    return outcomes


def wrong_flows(theory: Predicted) -> dict[str, Flow]:
    """Builds flows of wrong theories, keyed by the mistake, as negative controls of verdicts on trained networks.

    In some flows the clients' learning rate is too small. In the others one client, a tenth or a third of the clients
    never takes part, but at most 20 are left out. These clients are chosen among the first 20 that take part: those
    whose absence, one at a time, changes the final test outputs most.
    """
    setting, cohorts, blocks = theory.setting, theory.cohorts, theory.blocks
    rate = setting.followed.learning_rate
    flows = {
        f"client rate x {by}": run_flow(setting, blocks, cohorts, learning_rate=np.multiply(by, rate)) for by in SLOWER
    }
    right, clients = _from_zero(theory.flow), np.unique(np.asarray(cohorts.client)[np.asarray(cohorts.weight) > 0])
    without = (run_flow(setting, blocks, without_clients(cohorts, [client])) for client in clients[:MAX_DROPPED])
    change = [np.linalg.norm(_from_zero(flow) - right) for flow in without]
    for count in sorted({1, *(min(-(-len(clients) // part), len(change)) for part in (10, 3))}):
        most = clients[np.argsort(change)[-count:]]
        flows[f"{count} of {len(clients)} clients missing"] = run_flow(setting, blocks, without_clients(cohorts, most))
    return flows


def without_clients(
    cohorts: Cohort, clients: Sequence[int] | Sequence[np.integer] | Int[np.ndarray, "clients"]
) -> Cohort:
    """Returns the cohorts without some clients, as if they had never taken part: a negative control.

    Args:
        cohorts: The right cohorts: S clients in each of R rounds, [R, S].
        clients: Numbers of the clients to leave out.
    """
    weight = np.where(np.isin(np.asarray(cohorts.client), clients), 0.0, np.asarray(cohorts.weight))
    return cohorts._replace(weight=weight)  # type: ignore[arg-type]


def _from_zero(flow: Flow) -> Float[np.ndarray, "K m C"]:
    """Returns the flow's final outputs at the test points, [K, m, C], started from the zero function."""
    zero = Starts(*(function[None] for function in zero_functions(flow, None)))
    return np.asarray(from_starts(flow, zero, [flow.num_rounds]).test[0][:, 0])


def _starts_differ(theory: Predicted) -> bool:
    """Returns whether the models start from random functions; False if all start from the zero function."""
    return bool(np.trace(np.asarray(theory.blocks.nngp_test)) > 0)


def _starts(theory: Predicted, networks: tuple[Simulated, ...]) -> list[Verdict]:
    """Checks that initial functions at the test points have the prior's variance, and are independent of each other."""
    setting, prior = theory.setting, np.asarray(theory.blocks.nngp_test)
    # Along the prior's axes every wide axis counts alike. The sum over points, dominated by one or two axes,
    # needs more samples, so it takes further networks that are not trained.
    variances, axes = np.linalg.eigh(prior)
    wide = variances > NARROW * variances[-1]
    units = [np.einsum("kemc,ma->keac", n.test[0], axes[:, wide] / np.sqrt(variances[wide])) for n in networks]
    count, widths, name = -(-MORE_STARTS // setting.problem.y_train.shape[1]), [n.width for n in networks], setting.name
    more = [network_functions(setting, width, count, setting.problem.x_test) for width in widths]
    squares = {
        "along the prior's axes": [_averaged(u * u) for u in units],
        "summed over points": [(np.sum(f**2, axis=1) / np.trace(prior)).ravel() for f in more],
    }
    products = {"draws": [_averaged(u[:, 1:] * u[:, :-1]) for u in units]}
    if setting.num_models > 1:
        products["models"] = [_averaged(u[1:] * u[:-1]) for u in units]
    if len(networks) > 1:
        products["widths"] = [_averaged(units[-1] * units[-2])]
    return [
        verdicts.initial_verdict(name, widths, squares),
        verdicts.independence_verdict(name, widths, products, squares["along the prior's axes"]),
    ]


def _averaged(values: Float[np.ndarray, "K E a C"]) -> Float[np.ndarray, "KE"]:
    """Averages values of K models in E draws over their last two axes, and returns the K E means in one axis."""
    return np.asarray(values.mean(axis=(2, 3)).ravel())


def _every_round(theory: Predicted, networks: tuple[Simulated, ...], wrong: dict[str, Flow]) -> list[Verdict]:
    """Compares networks at every evaluated round after the start with the flow from their initial functions.

    Three verdicts say whether the error falls with the width, and whether mean and variance agree. The verdict on the
    variance is left out for a loss other than the squared error, under which it has no closed form. ``wrong`` are flows
    of wrong theories, the controls.
    """
    setting, name, rounds = theory.setting, theory.setting.name, theory.setting.size.rounds[1:]
    right = predicted_networks(theory.flow, networks, rounds)
    if not theory.flow.kind.is_linear:
        return _without_a_law(theory, networks, right, wrong)
    means, followed = np.stack([law.mean for law in theory.moments[1:]]), []
    for at, r in enumerate(rounds, start=1):
        law = np.trace(theory.moments[at].cov, axis1=1, axis2=2)
        variance = _propagated_variance(theory.blocks, *theory.influences[r])
        followed.append(_followed(networks, [p[at - 1] for p in right], at, variance, law))
    away, slopes, variances = {}, {}, {}
    for mistake, flow in wrong.items():
        away[mistake] = list((np.asarray(flow.mean(setting.size.rounds))[1:] - means).mean(axis=1))
        slopes[mistake] = predicted_networks(flow, networks, rounds)
        variances[mistake] = np.trace(np.asarray(flow.cov(rounds[-1])), axis1=1, axis2=2)
    slopes["targets of the other sign"] = [p - 2 * means[:, :, None] for p in right]
    at_end = zip(*theory.influences[rounds[-1]], strict=True)
    terms = [covariance_terms(theory.blocks, b, gamma) for b, gamma in at_end]
    variances["no cross terms"] = np.array([np.trace(np.asarray(t.prior + t.propagated)) for t in terms])
    from_start = f"the flow's from the same initial functions, {len(rounds)} rounds"
    return [
        verdicts.slope_verdict(name, setting.size.widths, networks, right, slopes),
        verdicts.mean_verdict(name, f"mean = {from_start}", followed, away),
        verdicts.variance_verdict(name, f"variance = {from_start}", followed, variances),
    ]


def _without_a_law(
    theory: Predicted, networks: tuple[Simulated, ...], right: list[np.ndarray], wrong: dict[str, Flow]
) -> list[Verdict]:
    """Compares networks with the flow under a loss for which only the flow from a known start has a closed form.

    ``right`` are the flow's outputs from the networks' initial functions, ``wrong`` the flows of wrong theories.
    """
    setting, problem, rounds = theory.setting, theory.setting.problem, theory.setting.size.rounds[1:]
    of_classes = targets_of(problem.loss) == "classes"
    other = np.roll(problem.y_train, 1, axis=1) if of_classes else -problem.y_train
    mistake = "every class for the next" if of_classes else "targets of the other sign"
    changed = dataclasses.replace(setting, problem=dataclasses.replace(problem, y_train=other))
    flows = wrong | {mistake: run_flow(changed, theory.blocks, theory.cohorts)}
    others = {name: predicted_networks(flow, networks, rounds) for name, flow in flows.items()}
    return verdicts_from_starts(setting, networks, right, others, "the flow")


def verdicts_from_starts(
    setting: Setting,
    networks: tuple[Simulated, ...],
    right: Sequence[Float[np.ndarray, "r K E m C"]],
    wrong: Mapping[str, Sequence[Float[np.ndarray, "r K E m C"]]],
    source: str,
) -> list[Verdict]:
    """Compares networks with predictions from their initial functions, if mean and variance have no closed form.

    There are two verdicts: on the slope of the error against the width, and on the mean.

    Args:
        setting: The run.
        networks: Networks of each width.
        right: Predictions at the test points for each width, [r, K, E, m, C]: E draws of K models at the r
            evaluated rounds after round 0.
        wrong: The predictions of each wrong theory in the form of ``right``, keyed by the mistake in the theory.
        source: Name of the prediction in the text of the verdicts, for example "the flow".
    """
    num_rounds, unknown = len(right[-1]), np.full(setting.num_models, np.nan)
    away = {name: list((other[-1] - right[-1]).mean(axis=(1, 2))) for name, other in wrong.items()}
    followed = [_followed(networks, [p[at] for p in right], at + 1, unknown, unknown) for at in range(num_rounds)]
    whose = f"{source}'" if source.endswith("s") else f"{source}'s"
    mean = f"mean = {whose} from the same initial functions, {num_rounds} rounds"
    slope = verdicts.slope_verdict(setting.name, setting.size.widths, networks, right, wrong)
    return [
        slope._replace(statement=slope.statement.replace("the flow", source)),
        verdicts.mean_verdict(setting.name, mean, followed, away),
    ]


def _followed(
    networks: Sequence[Simulated],
    predicted: Sequence[Float[np.ndarray, "K E m C"]],
    at: int,
    exact_variance: Float[np.ndarray, "K"],
    law: Float[np.ndarray, "K"],
) -> AtRound:
    """Pairs networks at index ``at`` of the evaluated rounds with ``predicted`` outputs of each width, from E draws.

    ``exact_variance`` [K] is the known variance of the predictions over initial functions. ``law`` [K] is the variance
    that a verdict compares with the networks. Both are NaN if unknown.
    """
    pairs = tuple(Pair(n.width, n.test[at], p) for n, p in zip(networks, predicted, strict=True))
    moved = predicted[-1] - networks[-1].test[0]
    return AtRound(pairs, exact_variance, law, float(np.sqrt(np.mean(np.sum(moved**2, axis=(-2, -1))))))


def _propagated_variance(
    blocks: KernelBlocks, influences: Float[np.ndarray, "K m n"], gammas: Float[np.ndarray, "K"] | None = None
) -> Float[np.ndarray, "K"]:
    """Computes the variance of ``gamma f0(x) - B f0(X)``, summed over x, for each matrix B in ``influences``, [K].

    x are the test points and X the training points. f0 is drawn from the prior, so the sum is the trace of
    ``[-B, gamma I] S [-B, gamma I]'`` with the prior's covariance S. The ``gammas`` are 1 without weight decay.
    """
    prior = joined(*prior_blocks(blocks))
    factors = np.ones(len(influences)) if gammas is None else gammas
    rows = (np.concatenate([-b, g * np.eye(len(b))], axis=1) for b, g in zip(influences, factors, strict=True))
    return np.array([np.sum((a @ prior) * a) for a in rows])


def _limit(theory: Predicted, networks: tuple[Simulated, ...], limit: Gaussian) -> list[Verdict]:
    """Compares networks at the last round with the Gaussian process after many rounds (Theorem 2 of FE-2024).

    There are no verdicts if the flow is far from this limit.
    """
    name, num_rounds, last = theory.setting.name, theory.setting.size.num_rounds, theory.moments[-1]
    exact_variance = _propagated_variance(theory.blocks, *theory.influences[num_rounds])
    law = np.full(len(last.mean), np.trace(limit.cov))
    at_end = predicted_networks(theory.flow, networks, [num_rounds])
    away = last.mean - np.asarray(limit.mean)  # [K, m, C]
    right = _followed(networks, [p[0] - away[:, None] for p in at_end], -1, exact_variance, law)
    if not _is_reached(theory, limit, right.scale):
        return []
    mean = np.asarray(limit.mean)
    means = {"nine tenths of the mean": [-0.1 * mean], "untrained network": [-mean]}
    prior = np.full(len(law), np.trace(np.asarray(theory.blocks.nngp_test)))
    laws = {"covariance x 1.5": 1.5 * law, "prior covariance": prior}
    return [
        verdicts.mean_verdict(name, f"mean = Theorem 2, round {num_rounds}", [right], means),
        verdicts.variance_verdict(name, f"variance = Theorem 2, round {num_rounds}", [right], laws),
    ]


def _is_reached(theory: Predicted, limit: Gaussian, scale: float) -> bool:
    """Returns whether the flow's mean and variance at the last round are near the limit of many rounds.

    Near means within a quarter of the verdicts' margins; ``scale`` is how far training changes the functions. A limit
    without variance counts as not near.
    """
    last, trace = theory.moments[-1], np.trace(limit.cov)
    if not trace > 0:  # as at the training points: there is no variance to compare
        return False
    off = np.linalg.norm((last.mean - limit.mean).mean(axis=0)) / scale  # scale: how far training moves functions
    ratio = np.mean(np.trace(last.cov, axis1=1, axis2=2)) / trace
    return bool(off <= REACHED * verdicts.MEAN_MARGIN and abs(ratio - 1) <= REACHED * verdicts.VARIANCE_MARGIN)


def _evolution(theory: Predicted, networks: tuple[Simulated, ...]) -> list[Verdict]:
    """Compares NTK-FL's networks with the predictions of the infinite-width kernel.

    A prediction takes as many gradient steps as NTK-FL chose for the network.
    """
    name, method = theory.setting.name, networks[0].method
    times = np.concatenate([np.unique(n.info["time"]) for n in networks])
    when = f"t = {times.min()}..{times.max()}" if times.min() < times.max() else f"t = {times.max()}"
    right = _evolved(theory, networks)
    if theory.setting.is_linear:
        misses = {_slower(share): _largest(_evolved(theory, networks, share)) / right.scale for share in SHARES}
        error = _largest(right) / right.scale
        return [verdicts.exact_verdict(name, f"{method}: each network, {when}", error, misses, verdicts.EXACT)]
    target, response, means = theory.setting.problem.y_train, _responses(theory, networks[-1]), {}
    for share in SHARES:
        means[_slower(share)] = [((_responses(theory, networks[-1], share) - response) @ target).mean(axis=(0, 1))]
    prior = np.full(len(right.law), np.trace(np.asarray(theory.blocks.nngp_test)))
    laws = {"covariance x 1.5": 1.5 * right.law, "prior covariance": prior}
    return [
        verdicts.mean_verdict(name, f"{method}: mean, {when}", [right], means),
        verdicts.variance_verdict(name, f"{method}: variance", [right], laws),
    ]


def _slower(share: float) -> str:
    return f"{share:g} of the time" if share else "untrained network"


def _largest(followed: AtRound) -> float:
    """Returns the largest distance (norm over points) of an output from its prediction, over networks and outputs."""
    return float(np.max([np.max(np.linalg.norm(p.simulated - p.predicted, axis=-2)) for p in followed.pairs]))


def _evolved(theory: Predicted, networks: tuple[Simulated, ...], share: float = 1.0) -> AtRound:
    """Pairs NTK-FL's networks with the evolution under the infinite-width kernel, for ``share`` of their steps.

    A ``share`` below 1 is a wrong theory, for a negative control.
    """
    predicted, variances, laws = [], [], []
    for of_width in networks:
        responses = _responses(theory, of_width, share)
        predicted.append(of_width.test[0] + responses @ (theory.setting.problem.y_train - of_width.train[0]))
        variances.append([np.mean(_propagated_variance(theory.blocks, of_model)) for of_model in responses])
        covs = [[covariance_terms(theory.blocks, b).total for b in of_model] for of_model in responses]
        laws.append([np.mean([np.trace(cov) for cov in of_model]) for of_model in covs])
    return _followed(networks, predicted, -1, np.mean(variances, axis=0), np.mean(laws, axis=0))


def _responses(theory: Predicted, networks: Simulated, share: float = 1.0) -> Float[np.ndarray, "K E m n"]:
    """Computes the matrix B of ``f_t(x) = f_0(x) + B (Y - f_0(X))``, the prediction of each NTK-FL network.

    X and Y are training inputs and targets. B follows from the infinite-width kernel, for ``share`` of the network's
    steps; the result is [K, E, m, n].
    """
    step = 0.5 / float(np.linalg.eigvalsh(theory.blocks.ntk_train)[-1])
    times = (networks.info["time"][:, 0, :].T * share).astype(int)  # [E, R = 1, K] -> [K, E]
    response = {int(t): np.asarray(ntk_evolution(theory.blocks, step, int(t))) for t in np.unique(times)}
    return np.stack([[response[int(t)] for t in row] for row in times])


def _determined(blocks: KernelBlocks) -> bool:
    """Returns whether the kernel is so well conditioned that float64 finds the flow's fixed point up to 1e-8."""
    eigenvalues = np.linalg.eigvalsh(blocks.ntk_train)
    return bool(np.finfo(float).eps * eigenvalues[-1] < FIXED_POINT / 10 * eigenvalues[0])


def _fixed_points(theory: Predicted, limit: Gaussian) -> list[Verdict]:
    """Compares the flow after very many rounds with Theorem 2 of FE-2024, a Gaussian process, for three schedules."""
    clients = theory.setting.problem.partition.num_clients
    schedules: dict[str, Schedule] = {
        "full participation": schedule.all_clients(clients),
        f"permutations, K = {NUM_MODELS}": schedule.per_client_permutations(clients, NUM_MODELS),
        "strata, one client of each": schedule.strata(clients, NUM_MODELS, max(clients // 2, 1), 1),
    }
    return [_fixed_point(theory, name, plan, limit) for name, plan in schedules.items()]


def _fixed_point(theory: Predicted, name: str, plan: Schedule, limit: Gaussian) -> Verdict:
    setting, problem = theory.setting, theory.setting.problem
    cohorts = schedule.drawn_cohorts(plan, problem.partition, FIXED_POINT_AGES * plan.num_models, setting.seed)
    flow = run_flow(setting, theory.blocks, cohorts, plan.num_models)
    fewer = run_flow(setting, theory.blocks, without_clients(cohorts, [0]), plan.num_models)
    return verdicts.exact_verdict(
        setting.name,
        f"flow repeated for ever = Theorem 2, {name}",
        law_distance(_repeated(flow, problem.y_train), limit[:2]),
        {"flow without one client": law_distance(_repeated(fewer, problem.y_train), limit[:2])},
        FIXED_POINT,
    )


def _repeated(
    flow: Flow, y_train: Float64[np.ndarray, "n C"]
) -> tuple[Float64[np.ndarray, "m C"], Float[AnyArray, "m m"]]:
    """Computes mean and covariance of model 0 after 2^30 repetitions of the flow's rounds, by doubling 30 times."""
    theta = np.asarray(flow.blocks.ntk_train)
    operator = np.asarray(flow.operator(flow.num_rounds, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(30):  # no linear system is solved, so an unstable step still shows
            operator = operator + operator - operator @ theta @ operator
        b = flow.blocks.ntk_test_train @ operator
        return b @ y_train, covariance_terms(flow.blocks, b).total
