"""Outcomes of every comparison of networks with a prediction: distances, curves, table rows and errors by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated, history_beside
from fedtangent._src.comparison.statistics import relative_errors, run_errors
from fedtangent._src.comparison.table import MethodRow, networks_row, outputs_row
from fedtangent._src.comparison.verdicts import Verdict, undecided
from fedtangent._src.engine.history import History, html_of


class Gap(NamedTuple):
    """Networks and their prediction from the same initial functions, at one width and each of r evaluated rounds.

    The networks are K models in each of E draws (initialisations).

    Attributes:
        error: Distance of each network from its prediction at the test points by round, relative to how far the
            prediction is from the start at the last round.
        run_error: Distance of each network over all rounds together, relative to the predicted changes from the start.
        simulated, predicted: Training error (``Problem.left``) over all networks, and over their predictions.
        test, train: Predicted outputs at the test points and at the training points.
    """

    error: Float[np.ndarray, "r K E"]
    run_error: Float[np.ndarray, "K E"]
    simulated: Float[np.ndarray, "r"]
    predicted: Float[np.ndarray, "r"]
    test: Float[np.ndarray, "r K E m C"]
    train: Float[np.ndarray, "r K E n C"]


class PredictedCurve(NamedTuple):
    """The prediction from the initial functions of the widest networks, round by round, for figures.

    ``left`` is the training error (``Problem.left``) over all networks; ``score`` is the test accuracy of the mean
    output of the K models in each of E draws, or without labels its mean squared error.
    """

    rounds: Int[np.ndarray, "r"]
    left: Float[np.ndarray, "r"]  # training error (``Problem.left``), over all networks
    score: Float[np.ndarray, "r E"]  # of the mean over K: test accuracy, or mean squared error without labels


def gap_of(
    problem: Problem,
    networks: Simulated,
    train: Float[np.ndarray, "r K E n C"],
    test: Float[np.ndarray, "r K E m C"],
) -> Gap:
    """Computes the distance of each network from its prediction, relative to the predicted change in the run.

    Args:
        problem: Examples and loss.
        networks: Networks of one width.
        train: Predicted outputs at the training examples, from the networks' initial functions.
        test: Predicted outputs at the test points.
    """
    moved = np.broadcast_to(test[-1] - networks.test[0], networks.test.shape)
    error = relative_errors(test, networks.test, moved)
    of_run = run_errors(test[1:], networks.test[1:], networks.test[0])
    return Gap(error, of_run, problem.left(networks.train), problem.left(train), test, train)


@dataclass(frozen=True, eq=False)
class BesidePrediction:
    """Networks compared with predictions that begin with the same initial functions; base of two comparisons.

    The prediction is the network's linearisation at its start (``FromStart``), or the same run on the features of the
    analytic kernel (``OnFeatures``).

    Attributes:
        setting: Data, clients and algorithm.
        simulated: Outputs of the networks at the evaluated rounds. ``OnFeatures`` has one entry for each width;
            ``FromStart`` has a single entry, for the networks that start from the given weights.
        gaps: Predicted outputs and the networks' distance from them, one entry for each entry of ``simulated``.
        verdicts: Comparisons with their negative controls.
        times: Seconds of each step of the comparison, by its name.
    """

    method: ClassVar[str]  # name of the prediction
    ntk_fl: ClassVar[tuple[Simulated, ...]] = ()  # NTK-FL is compared with closed forms only
    setting: Setting
    simulated: tuple[Simulated, ...]
    gaps: tuple[Gap, ...]
    verdicts: tuple[Verdict, ...]
    times: dict[str, float]

    @property
    def seconds(self) -> float:
        """The time of the comparison in seconds: the sum of ``times``."""
        return sum(self.times.values())

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the verdicts whose intervals are too wide to decide; they count neither as agreement nor failure."""
        return undecided(self.verdicts)

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def curve(self) -> PredictedCurve:
        """The predicted learning curve of the networks of the largest width."""
        problem, networks, gap = self.setting.problem, self.simulated[-1], self.gaps[-1]
        return PredictedCurve(np.array(networks.rounds), gap.predicted, problem.score(gap.test.mean(axis=1)))

    @property
    def rows(self) -> tuple[MethodRow, ...]:
        """The rows of the table: networks of each width, and the prediction of the widest networks."""
        setting, test, pairs = self.setting, self.gaps[-1].test[-1], zip(self.simulated, self.gaps, strict=True)
        rows = [networks_row(setting, networks, float(np.mean(gap.error[-1]))) for networks, gap in pairs]
        title = f"{self.method}, round {setting.size.num_rounds}"
        return *rows, outputs_row(setting, title, test, setting.problem.ensemble(test))

    @property
    def history(self) -> History:
        """The metrics of the widest networks along the run; its field ``predicted`` has their prediction's.

        Test metrics use the test points of the comparison, at most 500, sampled at random.
        """
        return history_beside(self.setting.problem, self.simulated[-1], self.gaps[-1].train, self.gaps[-1].test)


def errors_by_client(problem: Problem, networks: Simulated, gap: Gap) -> dict[int, tuple[float, float]]:
    """Returns each client's training error after the last round, predicted and simulated, by the client's number.

    ``Problem.left`` defines the training error, over all models and draws. Clients without examples are left out.

    Args:
        problem: Examples, clients and loss.
        networks: Networks of one width.
        gap: The prediction for these networks (``gap_of``).
    """
    errors, ends = {}, (gap.train[-1:], networks.train[-1:])
    for i in range(problem.partition.num_clients):
        rows = problem.partition.client(i)
        if len(rows):
            predicted, simulated = (float(problem.left(end[..., rows, :], rows)[0]) for end in ends)
            errors[i] = predicted, simulated
    return errors
