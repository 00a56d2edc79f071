"""Figures 2 to 4 of DeepLin: FedAvg by the number of clients, of local steps, and by their ratio.

Fig. 2: depth 3, width 500, all N clients in every round, i.i.d. and with two classes a client. The paper does not give
the number K of local steps; here it is 5, the middle of the values of fig. 3. The paper shows that more rounds are
needed with more clients, and concludes that the rate is inversely proportional to N. Fig. 3 varies K instead.

Fig. 4: the same networks, K = 5 and 10; i.i.d., two and five classes a client. The paper shows that curves of equal K /
N "stay similarly", because bound (18) of DeepLin depends on K / N only. Here the distance of two loss curves a and b,
the largest ``|ln a - ln b|`` of any round, is measured against the heterogeneity of the clients. With K > 1 and labels
that no model fits, clients pull the mean away from least squares, and fewer, larger clients pull it farther: bound (18)
does not describe this. The closed form at infinite width gives the size of this effect (``limit``).
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
from fedtangent._src.experiments.deep_linear.curves import Curve, CurveSettings, Setting, apart, rounds_to
from fedtangent._src.experiments.lab.runner import Study, experiment, within
from fedtangent._src.experiments.lab.trials import scheme_name

FIGURE_3 = "Fig. 3 of DeepLin: FedAvg is faster with more local steps; training loss by round for K in {1, 5, 10}."
PROPORTIONAL = 0.1  # how far a power may be from 1 to count as proportional


@dataclass(frozen=True)
class ClientsSettings(CurveSettings):
    """Settings of fig. 2 of DeepLin: several numbers of clients, and our choice of the number of local steps."""

    num_clients: tuple[int, ...] = within((40, 80, 160), count=2, increasing=True)
    local_steps: int = 5

    def runs(self) -> list[Setting]:
        """Returns one run for every number of clients."""
        return [Setting(n, self.local_steps) for n in self.num_clients]


@dataclass(frozen=True)
class StepsSettings(CurveSettings):
    """Settings of fig. 3 of DeepLin: several numbers of local steps, and our choice of the number of clients."""

    num_clients: int = 80
    local_steps: tuple[int, ...] = within((1, 5, 10), count=2, increasing=True)

    def runs(self) -> list[Setting]:
        """Returns one run for every number of local steps."""
        return [Setting(self.num_clients, k) for k in self.local_steps]


def run_2(study: Study) -> lab.Outcome:
    """Trains with every number N of clients (fig. 2 of DeepLin), and judges how the rounds to a loss grow with N.

    It does so for every number of classes a client and every seed.
    """
    settings = study.settings
    title = f"Fig. 2: rounds grow with N, K = {settings.local_steps}"
    return curves.outcome(study, title, lambda curves: by_power(curves, settings.level, "N", 1.0))


def run_3(study: Study) -> lab.Outcome:
    """Trains with every number K of steps (fig. 3 of DeepLin), and judges how the rounds to a loss fall with K.

    It does so for every number of classes a client and every seed.
    """
    settings = study.settings
    title = f"Fig. 3: rounds fall with K, N = {settings.num_clients}"
    return curves.outcome(study, title, lambda curves: by_power(curves, settings.level, "K", -1.0))


def by_power(curves: Sequence[Curve], level: float, of: str, power: float) -> tuple[lab.Claim, ...]:
    """Judges how the number of rounds to a given loss depends on N or K, for each number of classes a client.

    A first claim is on the direction, a second one on proportionality. If a run never reaches the loss, there is only
    the first, and it is undecided.

    Args:
        curves: Curves of all runs; N or K must rise over the curves of one seed and number of classes.
        level: The loss above least squares to reach, as a share of its initial value.
        of: "N" (clients) or "K" (local steps).
        power: 1 if rounds should grow in proportion to N or K, -1 if they should fall in inverse proportion.
    """
    verdicts, grow = list[lab.Claim](), "grow" if power > 0 else "fall"
    for (classes,), group in lab.grouped(curves, "classes").items():
        steps, powers = list[float](), list[float]()
        for runs in lab.grouped(group, "seed").values():
            varied = np.array([c.setting.num_clients if of == "N" else c.setting.local_steps for c in runs], float)
            with np.errstate(invalid="ignore"):  # two runs may both need infinitely many rounds
                rounds = np.log([rounds_to(c.excess, level) for c in runs])
                steps.append(float(power * np.min(power * np.diff(rounds))))
            if np.isfinite(rounds).all():
                powers.append(float(np.polyfit(np.log(varied), rounds, 1)[0]))
        where = f"{scheme_name(classes)}: rounds"
        if len(powers) < len(steps):
            missing = f"not reached in {len(steps) - len(powers)} of {len(steps)} seeds"
            verdicts.append(lab.Claim(f"{where} {grow} with {of}", missing, lab.UNDECIDED))
            continue
        least = lab.interval(np.exp(steps))
        judge = least.claim_above if power > 0 else least.claim_below
        verdicts.append(judge(f"{where} {grow} with {of}", "smallest ratio of neighbours {:.2f}", 1))
        is_proportional = lab.interval(abs(p - power) for p in powers).below(PROPORTIONAL)
        statement = f"{where} are proportional to {of}^{power:g} (power to {PROPORTIONAL:g})"
        verdicts.append(lab.Claim(statement, f"power {lab.interval(powers):.3f}", is_proportional))
    return tuple(verdicts)


SCALES_2 = curves.figure_scales(ClientsSettings(), "num_clients=5,10,20", "num_clients=10,20,40")
SCALES_3 = curves.figure_scales(StepsSettings(), "num_clients=10", "num_clients=20")
SUMMARY_FIG2 = "Fig. 2 of DeepLin: FedAvg is slower with more clients; training loss by round for N in {40, 80, 160}."


SAME = 0.1  # of |ln - ln'|: two curves that a figure shows as one
ALIKE = ("one.classes", "one.setting", "twice.setting")  # in these the pairs of all seeds agree


@dataclass(frozen=True)
class RatioSettings(CurveSettings):
    """Settings of fig. 4 of DeepLin: each N with ``local_steps``, and 2 N with twice as many steps."""

    classes_per_client: tuple[int, ...] = within((0, 5, 2), least=0)
    num_clients: tuple[int, ...] = within((80, 40), count=2)
    local_steps: int = 5

    def runs(self) -> list[Setting]:
        """Returns the runs of all pairs (N, K) and (2 N, 2 K), without repetitions."""
        both = (Setting(times * n, times * self.local_steps) for n in self.num_clients for times in (1, 2))
        return list(dict.fromkeys(both))


class Pair(NamedTuple):
    """Loss curves of two runs of equal K / N (local steps over clients), and of one with another K / N.

    Attributes:
        one: Curve of N clients with K local steps.
        twice: Curve of 2 N clients with 2 K local steps.
        other: Curve of another K / N, for comparison.
    """

    one: Curve
    twice: Curve
    other: Curve

    @property
    def of_excess(self) -> float:
        """Distance of the runs (N, K) and (2 N, 2 K): largest ``|ln a - ln b|`` of any round.

        Here a and b are the two runs' losses above least squares.
        """
        return apart(self.one.excess, self.twice.excess)

    @property
    def of_loss(self) -> float:
        """Largest ``|ln a - ln b|`` of any round for the training losses a and b of ``one`` and ``twice``."""
        return apart(self.one.loss, self.twice.loss)

    @property
    def of_flows(self) -> float:
        """Largest ``|ln a - ln b|`` in any round of the predicted curves a of ``one`` and b of ``twice``.

        The flow predicts the curves for infinite width. They show the loss above the loss of least squares.
        """
        return apart(self.one.flow, self.twice.flow)

    @property
    def of_limits(self) -> float:
        """Distance ``|ln a - ln b|`` of the final losses a of ``one`` and b of ``twice`` at infinite width.

        A final loss is the loss above least squares after infinitely many rounds.
        """
        return abs(math.log(self.one.limit / self.twice.limit))

    @property
    def of_ratios(self) -> float:
        """Largest ``|ln a - ln b|`` of any round for the losses above least squares of ``one`` and ``other``."""
        return apart(self.one.excess, self.other.excess)

    @property
    def until(self) -> int:
        """Last round up to which the losses of ``one`` and ``twice`` above least squares agree to 10 %."""
        off = np.flatnonzero(np.abs(np.log(self.one.excess / self.twice.excess)) > SAME)
        return int(off[0]) - 1 if len(off) else len(self.one.excess) - 1


def run_4(study: Study) -> lab.Outcome:
    """Runs fig. 4 of DeepLin: compares loss curves of FedAvg runs (N, K) and (2 N, 2 K), which have the same K / N.

    N is the number of clients and K the number of local steps. Every such pair is trained for each seed and for each
    number of classes per client in the settings.
    """
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
    """Pairs the loss curves of runs (N, K) and (2 N, 2 K), for every seed and number of classes a client.

    Each pair also gets the curve of a run with another K / N.
    """
    at, result = {(c.classes, c.setting, c.seed): c for c in curves}, []
    for classes in settings.classes_per_client:
        for i, n in enumerate(settings.num_clients):
            other = Setting(settings.num_clients[i - 1], settings.local_steps)
            three = Setting(n, settings.local_steps), Setting(2 * n, 2 * settings.local_steps), other
            for seed in dict.fromkeys(c.seed for c in curves):
                result.append(Pair(*(at[classes, setting, seed] for setting in three)))
    return result


def _sheet(all_pairs: Sequence[Pair]) -> lab.Sheet:
    """Builds the table of how far the two loss curves of a pair are apart, with means and intervals over seeds."""
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
    """Judges whether runs of equal K / N (local steps over clients) have the same loss curve, for each kind of clients.

    It also judges whether these curves are farther apart for each kind of clients than for the kind before it in the
    settings, which by default is less heterogeneous. This is our claim, not the paper's.
    """
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


SCALES_4 = curves.figure_scales(RatioSettings(), "num_clients=10,5", "num_clients=20,10", "classes_per_client=0,2")
SUMMARY_FIG4 = (
    "Fig. 4 of DeepLin: equal K / N gives equal curves; N = 80 and 160, and 40 and 80, the larger N with "
    "twice the steps."
)
_entry = partial(experiment, __name__, papers=("liu_deep_linear",), check=curves.check, exact=True, least_seeds=2)
ENTRIES = (
    _entry(run_2, SCALES_2, part=("fig2", SUMMARY_FIG2)),
    _entry(run_3, SCALES_3, part=("fig3", FIGURE_3)),
    _entry(run_4, SCALES_4, part=("fig4", SUMMARY_FIG4)),
)
