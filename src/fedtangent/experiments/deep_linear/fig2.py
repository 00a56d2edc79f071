"""Fig. 2 of DeepLin: more clients, slower; FedAvg's training loss by round for N in {40, 80, 160}.

Depth 3, width 500, all clients in every round, i.i.d. and with two classes a client. K is not printed: 5, the middle of
the values of fig. 3. The paper shows that more rounds are needed with more clients, and takes that for a rate that is
inversely proportional to N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent.experiments.deep_linear import curves, report
from fedtangent.experiments.deep_linear.curves import Curve, CurveSettings, Setting, rounds_to
from fedtangent.experiments.lab.results import UNDECIDED, Claim, Outcome, interval
from fedtangent.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent.experiments.lab.trials import scheme_name

PROPORTIONAL = 0.1  # what a power may differ from 1 and still be taken for proportional


@dataclass(frozen=True)
class ClientsSettings(CurveSettings):
    """The paper's; K is ours."""

    num_clients: tuple[int, ...] = within((40, 80, 160), count=2, increasing=True)
    local_steps: int = 5


def settings_of(s: ClientsSettings) -> list[Setting]:
    """The runs."""
    return [Setting(n, s.local_steps) for n in s.num_clients]


def check(study: Study) -> None:
    """Of every run."""
    curves.check(study, settings_of(study.settings))


def run(study: Study) -> Outcome:
    """Every N of every seed, in both schemes."""
    s = study.settings
    title = f"Fig. 2: rounds grow with N, K = {s.local_steps}"
    return report.outcome(study, title, settings_of(s), lambda found: claims(found, s.level))


def claims(found: Sequence[Curve], level: float) -> tuple[Claim, ...]:
    """Rounds to the level grow with N, and in proportion to it."""
    return by_power(found, level, "N", 1.0)


def by_power(found: Sequence[Curve], level: float, of: str, power: float) -> tuple[Claim, ...]:
    """Whether rounds to a level grow (power 1) or fall (-1) with what varies, "N" or "K", and as it to that power."""
    said, grow = list[Claim](), "grow" if power > 0 else "fall"
    for classes in dict.fromkeys(c.classes for c in found):
        steps, powers = list[float](), list[float]()
        for seed in dict.fromkeys(c.seed for c in found):
            own = [c for c in found if (c.classes, c.seed) == (classes, seed)]
            varied = np.array([c.setting.num_clients if of == "N" else c.setting.local_steps for c in own], float)
            with np.errstate(invalid="ignore"):  # of two that never get there
                rounds = np.log([rounds_to(c.excess, level) for c in own])
                steps.append(float(power * np.min(power * np.diff(rounds))))
            if np.isfinite(rounds).all():
                powers.append(float(np.polyfit(np.log(varied), rounds, 1)[0]))
        where = f"{scheme_name(classes)}: rounds"
        if len(powers) < len(steps):
            missing = f"not reached in {len(steps) - len(powers)} of {len(steps)} seeds"
            said += [Claim(f"{where} {grow} with {of}", missing, UNDECIDED)]
            continue
        least = interval(np.exp(steps))
        said.append(Claim(f"{where} {grow} with {of}", f"smallest ratio of neighbours {least:.2f}",
                          least.above(1) if power > 0 else least.below(1)))  # fmt: skip
        off = interval([abs(p - power) for p in powers])
        said.append(Claim(f"{where} are proportional to {of}^{power:g} (power to {PROPORTIONAL:g})",
                          f"power {interval(powers):.3f}", off.below(PROPORTIONAL)))  # fmt: skip
    return tuple(said)


SMOKE: dict[str, Any] = {"num_train": 300, "directions": 8, "width": 256, "num_rounds": 20, "learning_rate": 0.0}
DIGITS: dict[str, Any] = {"num_rounds": 100, "learning_rate": 0.0}
IMAGES: dict[str, Any] = {"num_train": 10_000, "num_rounds": 100, "learning_rate": 0.0}
SMALL = (5, 10, 20)
IMAGES_SCALES = by_scale(
    ClientsSettings(**{**SMOKE, "num_train": 2000}, num_clients=SMALL),
    ClientsSettings(**IMAGES, num_clients=(10, 20, 40)),
    ClientsSettings(dtype="float32"),
)
SCALES = {
    "digits": by_scale(
        ClientsSettings(**SMOKE, num_clients=SMALL), ClientsSettings(**DIGITS, num_clients=SMALL),
        ClientsSettings(learning_rate=0.0),
    ),
    "mnist": IMAGES_SCALES,
    "fashion_mnist": IMAGES_SCALES,
}  # fmt: skip
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, exact=True, least_seeds=2),)
