"""Networks of growing width: the kernel's drift and the gap to linear training (FE-2021 Theorem 9.1, 9.3 and 9.4).

Each network and its linearisation start from the same weights and are trained by the same algorithm on the same data
and schedule, with steps that Theorem 9.1 allows: they differ only by the curvature of the network.
"""

from __future__ import annotations

import numpy as np

from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.fed_ensemble import small_networks
from fedtangent._src.comparison.theorems.fed_ensemble.networks import half_slope
from fedtangent._src.comparison.theorems.fed_ensemble.small_networks import FollowedNetworks, Task, follow
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.fed_ensemble.convergence import gap_from_drift, kappa_4, linearisation_gap
from fedtangent._src.theory.fed_ensemble.second_order import age_operators, second_order_terms

SIZES, GROUP = (1, 1, 2), (0, 0, 1)
SHORT = Task(SIZES, GROUP, 100, 0.9, labels=2.0, evaluations=10)
# Labels far from the initial functions, and small steps: the gap exceeds the kappa_4 of one age.
LONG = Task(SIZES, GROUP, 600, 0.1, labels=8.0, evaluations=10, local_steps=1)
LONG_WIDTH = 64
MARGIN = 0.2  # of a slope
WHERE = "n = 4, 3 clients of 1 and 2, K = 2, nbar = 2"


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks slopes in the width, and two bounds of the gap: from the measured drift, and as printed."""
    widths, draws = of_scale(scale, ((64, 256, 1024), 40), ((64, 256, 1024, 4096), 100))
    runs = [follow(small_networks.setting(SHORT, width, seed), draws) for width in widths]
    where = f"{WHERE}, widths {widths[0]} .. {widths[-1]}, {runs[0].c1.size} networks each"
    return [*_slopes(runs, where), _from_drift(runs, where), _as_printed(scale, seed)]


def _slopes(runs: list[FollowedNetworks], where: str) -> list[Verdict]:
    """Checks that the distance to the limiting kernel falls as width^-1/2, and drift and gap at least as fast."""
    widths = tuple(run.setting.size.largest for run in runs)
    far = [np.linalg.norm(run.kernels[:, -1] - run.setting.blocks().ntk_train, 2, axis=(-2, -1)) for run in runs]
    last = {name: [getattr(run, name)[:, -1] for run in runs] for name in ("drift", "gap", "change")}
    distance, drift, gap, change = (width_slope(widths, values) for values in (far, *last.values()))
    claim = Claim("FE-2021 Theorem 9.1", "operator norm of Theta_t - Theta: slope in the width", where)
    verdicts = [half_slope(claim, distance, ("Theta_0 instead of the limit Theta", drift), MARGIN)]
    slopes = {
        ("section 9.3", "operator norm of Theta_t - Theta_0: slope in the width"): drift,
        ("section 9.4", "||g - g_lin||, network and its linearisation: slope in the width"): gap,
    }
    control, steep = ("initial function instead of the linearised network", change), (-np.inf, -0.5)
    for (place, statement), slope in slopes.items():
        claim, notices = Claim(f"FE-2021 {place}", statement, where), -0.5 - slope.value + slope.length
        expected = "-1/2 or steeper: O(l^-1/2)"
        verdicts.append(claim.between(slope, control, steep, expected, f"slope flatter by {notices:.2f}"))
    return verdicts


def _from_drift(runs: list[FollowedNetworks], where: str) -> Verdict:
    """Checks that the gap of every network is below the first-order bound from the largest drift of its kernel."""

    def worst(factor: float) -> float:
        """Returns the largest ratio of gap to bound, for ``factor`` times the least eigenvalue."""
        ratios = []
        for run in runs:
            progress = SHORT.ages * run.setting.followed.local_steps * run.setting.followed.learning_rate
            drift, low = run.drift.max(axis=1), np.linalg.eigvalsh(run.kernels[:, 0])[..., 0]
            quantities = run.gap[:, -1], drift, run.residual[:, 0], low - drift
            for gap, moved, r0, smallest in zip(*(q.flat for q in quantities), strict=True):
                bound = gap_from_drift(progress, moved, r0, factor * max(smallest, 0.0), SHORT.nbar)
                ratios.append(float(gap / bound))
        return float(np.max(ratios))

    statement = "||g - g_lin|| / R_0 drift t e^(-lambda t), t = eta_0 tau ages / nbar: largest over networks"
    claim = Claim("FE-2021 section 9.4, first order", statement, where)
    return claim.bounded(worst(1.0), "2 lambda instead of lambda", worst(2.0))


def _as_printed(scale: str, seed: int) -> Verdict:
    """Checks section 9.4's last line, the gap is below kappa_4 / (1 - q) at any age, with constants of each network."""
    setting = small_networks.setting(LONG, LONG_WIDTH, seed)
    networks, rule, age_rounds = follow(setting, of_scale(scale, 2, 10)), setting.followed, range(setting.num_models)
    progress, ratios, wrong, largest = rule.local_steps * rule.learning_rate, [], [], 0.0
    clients, plan = setting.problem.partition, cohorts(setting)
    for draw in range(len(networks.start)):
        constants = networks.theorem(draw).constants
        largest = max(largest, constants.kappa_2)
        for k in range(setting.num_models):
            start, r0 = networks.kernels[draw, 0, k], float(networks.residual[draw, 0, k])
            age = age_operators(start, clients, plan, rule.local_steps, rule.learning_rate, model=k, rounds=age_rounds)
            second = float(np.linalg.norm(second_order_terms(age, "gradient_descent"), 2)) / progress**2
            kappa = kappa_4(progress, float(networks.c1[draw, k]), constants.c2, r0, LONG.nbar, LONG_WIDTH)
            bound = linearisation_gap(kappa, progress, float(np.linalg.eigvalsh(start)[0]), LONG.nbar, second)
            ratios.append(float(networks.gap[draw, :, k].max()) / bound)
            wrong.append(float(networks.gap[draw, :, k].max()) / kappa)
    return Claim(
        "FE-2021 section 9.4, last line",
        f"||g - g_lin|| / printed kappa_4 / (1 - q), C_1 <= {networks.c1.max():.2f} measured, kappa_2 {largest:.2f}: "
        "largest over networks and ages",
        f"{WHERE}, width {LONG_WIDTH}, {LONG.ages} ages, {networks.c1.size} networks",
    ).bounded(max(ratios), "kappa_4 of one age, not of all", max(wrong))


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.linearisation_gap",
        "networks of growing width: drift of the kernel, distance to linear training",
        _checks,
        papers=("shi2021",),
        statement="Theorem 9.1, sections 9.3 and 9.4 of FE-2021",
        functions=(linearisation_gap, gap_from_drift, kappa_4, age_operators),
    ),
)
