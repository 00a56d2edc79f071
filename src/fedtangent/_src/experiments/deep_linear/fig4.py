"""Fig. 4 of DeepLin: equal K / N gives equal curves; N = 80 and 160, and 40 and 80, the larger N with twice the steps.

Depth 3, width 500, all clients in every round, K = 5 and 10; i.i.d., two and five classes a client. The paper shows
that the curves "stay similarly", because (18) depends on K / N only. Here their distance is measured, the largest
``|ln - ln'|`` of any round, against the heterogeneity of the clients. With K > 1 and labels that no model fits, clients
pull the mean away from least squares, and fewer, larger clients pull it farther: (18) does not describe this. The
closed form at infinite width gives the size of this effect (``limit``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear import curves
from fedtangent._src.experiments.deep_linear.curves import Curve, CurveSettings, Setting, apart
from fedtangent._src.experiments.lab.runner import Study, experiment, within
from fedtangent._src.experiments.lab.trials import scheme_name

SAME = 0.1  # of |ln - ln'|: two curves that a figure shows as one
ALIKE = ("one.classes", "one.setting", "twice.setting")  # in these the pairs of all seeds agree


@dataclass(frozen=True)
class RatioSettings(CurveSettings):
    """The paper's settings: each N with ``local_steps`` beside 2 N with twice as many."""

    classes_per_client: tuple[int, ...] = within((0, 5, 2), least=0)
    num_clients: tuple[int, ...] = within((80, 40), count=2)
    local_steps: int = 5

    def runs(self) -> list[Setting]:
        """Returns both settings of every pair, without repetitions."""
        both = (Setting(times * n, times * self.local_steps) for n in self.num_clients for times in (1, 2))
        return list(dict.fromkeys(both))


class Pair(NamedTuple):
    """Two curves of one K / N, and a curve of another K / N, as a scale for distances."""

    one: Curve
    twice: Curve  # twice the N and K
    other: Curve  # of another K / N

    @property
    def of_excess(self) -> float:
        """Distance of the curves above least squares."""
        return apart(self.one.excess, self.twice.excess)

    @property
    def of_loss(self) -> float:
        """Distance of the training losses, as the paper draws them."""
        return apart(self.one.loss, self.twice.loss)

    @property
    def of_flows(self) -> float:
        """Distance at infinite width."""
        return apart(self.one.flow, self.twice.flow)

    @property
    def of_limits(self) -> float:
        """Distance of the flows' limits, in logarithms."""
        return abs(math.log(self.one.limit / self.twice.limit))

    @property
    def of_ratios(self) -> float:
        """Distance between the pair's first curve and the curve of another K / N."""
        return apart(self.one.excess, self.other.excess)

    @property
    def until(self) -> int:
        """The last round up to which the curves are within ``SAME`` of each other."""
        off = np.flatnonzero(np.abs(np.log(self.one.excess / self.twice.excess)) > SAME)
        return int(off[0]) - 1 if len(off) else len(self.one.excess) - 1


def run(study: Study) -> lab.Outcome:
    """Trains every pair on every seed, with clients of every kind."""
    of_curves = partial(_pairs, settings=study.settings)
    outcome = curves.outcome(
        study,
        "Fig. 4: equal K/N",
        lambda curves: claims(of_curves(curves)),
        lambda curves: (_sheet(of_curves(curves)),),
    )
    remark = (
        f"apart: largest |ln - ln'| of two curves in any round; {SAME:g} is taken for the same; label distance: total "
        "variation of a client's labels from all examples'"
    )
    return outcome._replace(remarks=(*outcome.remarks, remark))


def _pairs(curves: Sequence[Curve], settings: RatioSettings) -> list[Pair]:
    """Pairs the curves of equal K / N, seed by seed."""
    at, result = {(c.classes, c.setting, c.seed): c for c in curves}, []
    for classes in settings.classes_per_client:
        for i, n in enumerate(settings.num_clients):
            other = Setting(settings.num_clients[i - 1], settings.local_steps)
            three = Setting(n, settings.local_steps), Setting(2 * n, 2 * settings.local_steps), other
            for seed in dict.fromkeys(c.seed for c in curves):
                result.append(Pair(*(at[classes, setting, seed] for setting in three)))
    return result


def _sheet(all_pairs: Sequence[Pair]) -> lab.Sheet:
    """Builds the table of the pairs' distances, with means and intervals over seeds."""
    rows = []
    for (classes, one, twice), group in lab.grouped(all_pairs, *ALIKE).items():
        row: lab.Row = {"clients": scheme_name(classes), "pair": f"{tuple(one)}, {tuple(twice)}"}
        row["label distance"] = float(np.mean([(p.one.variation + p.twice.variation) / 2 for p in group]))
        for name in ("of_excess", "of_loss"):
            row[name] = lab.interval(getattr(p, name) for p in group)
        for name in ("of_flows", "of_limits", "of_ratios", "until"):
            row[name] = float(np.mean([getattr(p, name) for p in group]))
        rows.append(row)
    columns = "clients: {clients} | (N, K): {pair} | label distance: {label distance:.2f} | "
    columns += "excess apart: {of_excess:.3f} | flows apart: {of_flows:.3f} | their limits: {of_limits:.2f} | "
    columns += "from the other K/N: {of_ratios:.2f} | loss apart: {of_loss:.3f} | same until round: {until:.0f}"
    return lab.table("distance of the curves of equal K/N", rows, columns)


def claims(all_pairs: Sequence[Pair]) -> tuple[lab.Claim, ...]:
    """Judges whether equal K / N gives one curve, and, beyond the paper, less so for more heterogeneous clients."""
    verdicts = list[lab.Claim]()
    for (classes, one, twice), group in lab.grouped(all_pairs, *ALIKE).items():
        name = f"{scheme_name(classes)}: {tuple(one)} and {tuple(twice)}"
        for quantity, attribute in (("training loss", "of_loss"), ("excess", "of_excess")):
            away = lab.interval(getattr(p, attribute) for p in group)
            verdicts.append(away.claim_below(f"{name} have one curve of the {quantity} (to {SAME:g})", "{:.3f}", SAME))
    by_seed = {
        classes: np.array(
            [np.mean([p.of_excess for p in of_seed]) for of_seed in lab.grouped(group, "one.seed").values()]
        )
        for (classes,), group in lab.grouped(all_pairs, "one.classes").items()
    }
    for before, after in itertools.pairwise(by_seed):
        farther = f"curves of one K/N are farther apart: {scheme_name(after)} than {scheme_name(before)}"
        verdicts.append(lab.interval(by_seed[after] - by_seed[before]).claim_above(farther, "{:+.3f}"))
    return tuple(verdicts)


SCALES = curves.figure_scales(RatioSettings(), "num_clients=10,5", "num_clients=20,10", "classes_per_client=0,2")
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=curves.check, exact=True, least_seeds=2),)
