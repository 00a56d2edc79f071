"""Fig. 3 of DeepLin: more local steps, faster; FedAvg's training loss by round for K in {1, 5, 10}.

Depth 3, width 500, all clients in every round, i.i.d. and with two classes a client. N is not printed: 80, the middle
of the values of fig. 2. The paper shows that fewer rounds are needed with more local steps, and takes that for a rate
proportional to K.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear import curves
from fedtangent._src.experiments.deep_linear.curves import CurveSettings, Setting
from fedtangent._src.experiments.deep_linear.fig2 import by_power
from fedtangent._src.experiments.lab.runner import Study, experiment, within


@dataclass(frozen=True)
class StepsSettings(CurveSettings):
    """The paper's settings, but for N."""

    num_clients: int = 80
    local_steps: tuple[int, ...] = within((1, 5, 10), count=2, increasing=True)

    def runs(self) -> list[Setting]:
        """Returns a setting for every K."""
        return [Setting(self.num_clients, k) for k in self.local_steps]


def run(study: Study) -> lab.Outcome:
    """Trains with every K on every seed, with clients of every kind."""
    settings = study.settings
    title = f"Fig. 3: rounds fall with K, N = {settings.num_clients}"
    return curves.outcome(study, title, lambda curves: by_power(curves, settings.level, "K", -1.0))


SCALES = curves.figure_scales(StepsSettings(), "num_clients=10", "num_clients=20")
ENTRIES = (experiment(__name__, run, SCALES, ("liu_deep_linear",), check=curves.check, exact=True, least_seeds=2),)
