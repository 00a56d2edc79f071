"""Networks of growing width: the kernel's drift and the gap to linear training (FE-2021 Theorem 9.1, 9.3 and 9.4).

Each network and its linearisation start from the same weights and are trained by the same algorithm on the same data
and schedule, with steps that Theorem 9.1 allows: they differ only by the curvature of the network.
"""

from __future__ import annotations

import numpy as np

from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.statistics import width_slope
from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.fed_ensemble.networks import half_slope_row
from fedtangent._src.comparison.theorems.fed_ensemble.small_networks import (
    FollowedNetworks,
    Task,
    follow,
    setting,
    theorem,
)
from fedtangent._src.comparison.verdicts import Verdict, bounded_verdict
from fedtangent._src.theory.fed_ensemble.convergence import gap_from_drift, kappa_4, linearisation_gap
from fedtangent._src.theory.fed_ensemble.second_order import age_operators, second_order_terms

SIZES, GROUP = (1, 1, 2), (0, 0, 1)
SHORT = Task(SIZES, GROUP, 100, 0.9, labels=2.0, evaluations=10)
# Labels far from the initial functions, and small steps: the gap exceeds the kappa_4 of one age.
LONG = Task(SIZES, GROUP, 600, 0.1, labels=8.0, evaluations=10, local_steps=1)
LONG_WIDTH = 64
MARGIN = 0.2  # of a slope
WHERE = "n = 4, 3 clients of 1 and 2, K = 2, nbar = 2"


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks slopes in the width, and two bounds of the gap: from the measured drift, and as printed."""
    widths, draws = of_scale(scale, ((64, 256, 1024), 40), ((64, 256, 1024, 4096), 100))
    settings = [setting(SHORT, width, seed) for width in widths]
    seen = [follow(given, draws) for given in settings]
    where = f"{WHERE}, widths {widths[0]} .. {widths[-1]}, {seen[0].c1.size} networks each"
    return [*_slopes(settings, seen, where), _from_drift(settings, seen, where), _as_printed(scale, seed)]


def _slopes(settings: list[Setting], seen: list[FollowedNetworks], where: str) -> list[Verdict]:
    """Checks that the distance to the limiting kernel falls as l^-1/2, and drift and gap at least so fast.

    The control is the change of the outputs, which does not fall.
    """
    widths = tuple(s.width for s in seen)
    limits = [given.blocks().ntk_train for given in settings]
    far = [np.linalg.norm(s.kernels[:, -1] - k, 2, axis=(-2, -1)) for s, k in zip(seen, limits, strict=True)]
    distance, drift, gap, change = (
        width_slope(widths, values)
        for values in (far, *([getattr(s, name)[:, -1] for s in seen] for name in ("drift", "gap", "change")))
    )
    statement, control = "operator norm of Theta_t - Theta: slope in the width", ("Theta_0 for the limit Theta", drift)
    rows = [half_slope_row("FE-2021 Theorem 9.1", statement, where, distance, control, MARGIN)]
    steep = -np.inf, -0.5
    wrong = "initial function for the linearised one", str(change), change.outside(*steep)
    said = {
        ("section 9.3", "operator norm of Theta_t - Theta_0: slope in the width"): drift,
        ("section 9.4", "||g - g_lin||, own linearisation: slope in the width"): gap,
    }
    for (place, statement), found in said.items():
        right = str(found), "-1/2 or steeper: O(l^-1/2)", found.within(*steep)
        notices = f"slope flatter by {-0.5 - found.value + found.length:.2f}"
        rows.append(Verdict.of(f"FE-2021 {place}", statement, where, right, wrong, notices))
    return rows


def _from_drift(settings: list[Setting], seen: list[FollowedNetworks], where: str) -> Verdict:
    """Checks that the gap of every network is below the first-order bound from the largest drift of its kernel."""
    ratios: list[float] = []
    wrong: list[float] = []
    for given, s in zip(settings, seen, strict=True):
        progress = SHORT.ages * given.followed.local_steps * given.followed.learning_rate
        drift, low = s.drift.max(axis=1), np.linalg.eigvalsh(s.kernels[:, 0])[..., 0]
        for gap, moved, r0, smallest in zip(
            s.gap[:, -1].flat, drift.flat, s.residual[:, 0].flat, (low - drift).flat, strict=True
        ):
            for found, factor in ((ratios, 1.0), (wrong, 2.0)):
                bound = gap_from_drift(progress, moved, r0, factor * max(smallest, 0.0), SHORT.nbar)
                found.append(float(gap / bound))
    return bounded_verdict(
        "FE-2021 section 9.4, first order",
        "||g - g_lin|| / R_0 drift t e^(-lambda t), t = eta_0 tau ages / nbar: largest over networks",
        where,
        float(np.max(ratios)),
        "2 lambda for lambda",
        float(np.max(wrong)),
    )


def _as_printed(scale: str, seed: int) -> Verdict:
    """Checks section 9.4's last line: the gap is below kappa_4 / (1 - q) at any age.

    The constants are measured on each network.
    """
    given = setting(LONG, LONG_WIDTH, seed)
    seen = follow(given, of_scale(scale, 2, 10))
    rule = given.followed
    progress, ratios, wrong, largest = rule.local_steps * rule.learning_rate, [], [], 0.0
    for draw in range(len(seen.start)):
        constants = theorem(given, seen, draw).constants
        largest = max(largest, constants.kappa_2)
        for k in range(given.num_models):
            start, r0 = seen.kernels[draw, 0, k], float(seen.residual[draw, 0, k])
            age = age_operators(
                start, given.problem.partition, cohorts(given), rule.local_steps, rule.learning_rate, model=k,
                rounds=range(given.num_models),
            )  # fmt: skip
            second = float(np.linalg.norm(second_order_terms(age, "gradient_descent"), 2)) / progress**2
            kappa = kappa_4(progress, float(seen.c1[draw, k]), constants.c2, r0, LONG.nbar, LONG_WIDTH)
            bound = linearisation_gap(kappa, progress, float(np.linalg.eigvalsh(start)[0]), LONG.nbar, second)
            ratios.append(float(seen.gap[draw, :, k].max()) / bound)
            wrong.append(float(seen.gap[draw, :, k].max()) / kappa)
    return bounded_verdict(
        "FE-2021 section 9.4, last line",
        f"||g - g_lin|| / printed kappa_4 / (1 - q), C_1 <= {seen.c1.max():.2f} measured, kappa_2 {largest:.2f}: "
        "largest over networks and ages",
        f"{WHERE}, width {LONG_WIDTH}, {LONG.ages} ages, {seen.c1.size} networks",
        max(ratios),
        "one age's kappa_4 for all of them",
        max(wrong),
    )


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.linearisation_gap",
        "networks of growing width: drift of the kernel, distance to linear training",
        checks,
        papers=("shi2021",),
        statement="Theorem 9.1, sections 9.3 and 9.4 of FE-2021",
        functions=(linearisation_gap, gap_from_drift, kappa_4, age_operators),
    ),
)
