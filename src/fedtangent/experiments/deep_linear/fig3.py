"""Fig. 3 of DeepLin: more local steps, faster; FedAvg's training loss by round for K in {1, 5, 10}.

Depth 3, width 500, all clients in every round, i.i.d. and with two classes a client. N is not printed: 80, the middle
of the values of fig. 2. The paper shows that fewer rounds are needed with more local steps, and takes that for a rate
proportional to K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedtangent.experiments.deep_linear import curves, report
from fedtangent.experiments.deep_linear.curves import Curve, CurveSettings, Setting
from fedtangent.experiments.deep_linear.fig2 import DIGITS, IMAGES, SMOKE, by_power
from fedtangent.experiments.lab.results import Claim, Outcome
from fedtangent.experiments.lab.runner import Study, by_scale, experiment, within


@dataclass(frozen=True)
class StepsSettings(CurveSettings):
    """The paper's; N is ours."""

    num_clients: int = 80
    local_steps: tuple[int, ...] = within((1, 5, 10), count=2, increasing=True)


def settings_of(s: StepsSettings) -> list[Setting]:
    """The runs."""
    return [Setting(s.num_clients, k) for k in s.local_steps]


def check(study: Study) -> None:
    """Of every run."""
    curves.check(study, settings_of(study.settings))


def run(study: Study) -> Outcome:
    """Every K of every seed, in both schemes."""
    s = study.settings
    title = f"Fig. 3: rounds fall with K, N = {s.num_clients}"
    return report.outcome(study, title, settings_of(s), lambda found: claims(found, s.level))


def claims(found: Sequence[Curve], level: float) -> tuple[Claim, ...]:
    """Rounds to the level fall with K, and in proportion to 1 / K."""
    return by_power(found, level, "K", -1.0)


IMAGES_SCALES = by_scale(
    StepsSettings(**{**SMOKE, "num_train": 2000}, num_clients=10),
    StepsSettings(**IMAGES, num_clients=20),
    StepsSettings(dtype="float32"),
)
SCALES = {
    "digits": by_scale(
        StepsSettings(**SMOKE, num_clients=10), StepsSettings(**DIGITS, num_clients=10),
        StepsSettings(learning_rate=0.0),
    ),
    "mnist": IMAGES_SCALES,
    "fashion_mnist": IMAGES_SCALES,
}  # fmt: skip
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=check, exact=True, least_seeds=2),)
