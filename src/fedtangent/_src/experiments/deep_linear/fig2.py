"""Fig. 2 of DeepLin: FedAvg is slower with more clients; training loss by round for N in {40, 80, 160}.

Depth 3, width 500, all clients in every round, i.i.d. and with two classes a client. The paper does not give K; here it
is 5, the middle of the values of fig. 3, which is ``fig3`` at the end of this file. The paper shows that more rounds
are needed with more clients, and concludes that the rate is inversely proportional to N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear import curves
from fedtangent._src.experiments.deep_linear.curves import Curve, CurveSettings, Setting, rounds_to
from fedtangent._src.experiments.lab.runner import Study, experiment, within
from fedtangent._src.experiments.lab.trials import scheme_name

FIGURE_3 = "Fig. 3 of DeepLin: FedAvg is faster with more local steps; training loss by round for K in {1, 5, 10}."
PROPORTIONAL = 0.1  # how far a power may be from 1 to count as proportional


@dataclass(frozen=True)
class ClientsSettings(CurveSettings):
    """The paper's settings, but for K."""

    num_clients: tuple[int, ...] = within((40, 80, 160), count=2, increasing=True)
    local_steps: int = 5

    def runs(self) -> list[Setting]:
        """Returns a setting for every N."""
        return [Setting(n, self.local_steps) for n in self.num_clients]


@dataclass(frozen=True)
class StepsSettings(CurveSettings):
    """The paper's settings of fig. 3, but for N."""

    num_clients: int = 80
    local_steps: tuple[int, ...] = within((1, 5, 10), count=2, increasing=True)

    def runs(self) -> list[Setting]:
        """Returns a setting for every K."""
        return [Setting(self.num_clients, k) for k in self.local_steps]


def run(study: Study) -> lab.Outcome:
    """Trains with every N on every seed, with clients of every kind."""
    settings = study.settings
    title = f"Fig. 2: rounds grow with N, K = {settings.local_steps}"
    return curves.outcome(study, title, lambda curves: by_power(curves, settings.level, "N", 1.0))


def run_3(study: Study) -> lab.Outcome:
    """Trains with every K on every seed, with clients of every kind."""
    settings = study.settings
    title = f"Fig. 3: rounds fall with K, N = {settings.num_clients}"
    return curves.outcome(study, title, lambda curves: by_power(curves, settings.level, "K", -1.0))


def by_power(curves: Sequence[Curve], level: float, of: str, power: float) -> tuple[lab.Claim, ...]:
    """Judges whether rounds to a level grow or fall with N or K, and in proportion to its power.

    Args:
        curves: Curves of all runs.
        level: Share of the initial excess to which rounds are counted.
        of: "N" or "K".
        power: 1 if rounds should grow, -1 if they should fall.
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


SCALES = curves.figure_scales(ClientsSettings(), "num_clients=5,10,20", "num_clients=10,20,40")
SCALES_3 = curves.figure_scales(StepsSettings(), "num_clients=10", "num_clients=20")
PAPERS, PART_3 = ("liu_deep_linear",), ("fig3", FIGURE_3)
ENTRIES = (
    experiment(__name__, run, SCALES, PAPERS, check=curves.check, exact=True, least_seeds=2),
    experiment(__name__, run_3, SCALES_3, PAPERS, check=curves.check, exact=True, least_seeds=2, part=PART_3),
)
