"""Distances, curves, table rows and errors by client, for every comparison of networks with a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.comparison.statistics import relative_errors, run_errors
from fedtangent._src.comparison.table import MethodRow, networks_row, outputs_row


class Gap(NamedTuple):
    """Networks and their prediction from the same initial functions, at one width and every evaluated round."""

    error: Float[np.ndarray, "r K E"]  # relative error at the test points
    run_error: Float[np.ndarray, "K E"]  # of all rounds together
    simulated: Float[np.ndarray, "r"]  # training error (``Problem.left``), over all networks
    predicted: Float[np.ndarray, "r"]
    test: Float[np.ndarray, "r K E m C"]  # predicted outputs
    train: Float[np.ndarray, "r K E n C"]


class PredictedCurve(NamedTuple):
    """The prediction from the initial functions of the widest networks, round by round, for figures."""

    rounds: Int[np.ndarray, "r"]
    left: Float[np.ndarray, "r"]  # training error (``Problem.left``), over all networks
    score: Float[np.ndarray, "r E"]  # of the mean over K: test accuracy, or mean squared error without labels


def gap_of(
    problem: Problem,
    networks: Simulated,
    train: Float[np.ndarray, "r K E n C"],
    test: Float[np.ndarray, "r K E m C"],
) -> Gap:
    """Computes the distance of each network from its prediction, relative to how far the prediction moves.

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


def curve_of(problem: Problem, networks: Simulated, gap: Gap) -> PredictedCurve:
    """Returns the curve of a prediction at the evaluated rounds.

    Args:
        problem: Examples and loss.
        networks: The networks that are predicted.
        gap: Their prediction.
    """
    return PredictedCurve(np.array(networks.rounds), gap.predicted, problem.score(gap.test.mean(axis=1)))


def rows_of(
    setting: Setting, method: str, simulated: Sequence[Simulated], gaps: Sequence[Gap]
) -> tuple[MethodRow, ...]:
    """Builds the rows of a comparison without a law: networks of each width, and the prediction of the widest.

    Args:
        setting: The setting.
        method: Name of the prediction.
        simulated: Networks of each width, ascending.
        gaps: Their predictions.
    """
    test, pairs = gaps[-1].test[-1], zip(simulated, gaps, strict=True)
    rows = [networks_row(setting, networks, float(np.mean(gap.error[-1]))) for networks, gap in pairs]
    return *rows, outputs_row(
        setting, f"{method}, round {setting.size.num_rounds}", test, setting.problem.ensemble(test)
    )


def errors_by_client(problem: Problem, networks: Simulated, gap: Gap) -> dict[int, tuple[float, float]]:
    """Returns each client's final training error (``Problem.left``), predicted and simulated, by the client's number.

    Clients without examples are left out.

    Args:
        problem: Examples, clients and loss.
        networks: Networks of one width.
        gap: Their prediction.
    """
    errors, ends = {}, (gap.train[-1:], networks.train[-1:])
    for i in range(problem.partition.num_clients):
        rows = problem.partition.client(i)
        if len(rows):
            predicted, simulated = (float(problem.left(end[..., rows, :], rows)[0]) for end in ends)
            errors[i] = predicted, simulated
    return errors
