"""How lazy the networks of a comparison are, at every width."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Num

from fedtangent._src import pytrees
from fedtangent._src.comparison import linear_models
from fedtangent._src.comparison.laziness.parts import Parts, parts
from fedtangent._src.comparison.predicted import Predicted, run_flow
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.types import Model, PyTree

MOST_NUMBERS = 2**22  # of a Jacobian, for networks of unknown structure


class Laziness(NamedTuple):
    """Networks of one width at every evaluated round: distance from theory, in parts, and drift of the kernel."""

    width: int
    parts: Parts  # each [r, K, e]
    drift: Float[np.ndarray, "r K e"]  # see ``WatchedNetworks``

    def curves(self) -> dict[str, Float[np.ndarray, "r K e"]]:
        """Returns the values of ``METRICS`` by name, each [r, K, e]."""
        return self.parts._asdict() | {"drift": self.drift}


def watched_draws(setting: Setting) -> int:
    """Returns how many draws of each width are watched: 1, or 2 if the ensemble has a single model.

    It is 0 for a linear model, which is always lazy, and for networks whose kernel [n C, n C], or the Jacobian that it
    needs [n C, parameters], is too large.
    """
    rows = setting.problem.y_train.size
    if setting.is_linear or rows > linear_models.MOST_ROWS:
        return 0
    widest = setting.model(setting.size.largest)
    num_params = pytrees.size(jax.eval_shape(widest.init, jax.random.key(0)))
    if widest.structure is None and rows * num_params > MOST_NUMBERS:
        return 0
    return 1 if setting.num_models > 1 else 2


def split(theory: Predicted, networks: Simulated, infinite: Float[np.ndarray, "r K E p C"]) -> Laziness:
    """Splits the distance of the watched networks from infinite width, at the training and some test examples together.

    The path of a linearised network is the federated flow with the whole empirical kernel at its start: exact, and
    cheaper than training.

    Args:
        theory: Setting and cohorts.
        networks: Networks of one width, some of them watched.
        infinite: The flow of infinite width at the points of ``at_points``, [r, K, E, n + some m, C].
    """
    assert networks.watched is not None
    setting, model, draws = theory.setting, theory.setting.model(networks.width), len(networks.watched.starts)
    network = at_points(setting.problem, networks.train, networks.test)[:, :, :draws]
    linear = np.empty_like(network)
    for draw, starts in enumerate(networks.watched.starts):
        for k in range(network.shape[1]):
            linear[:, k, draw] = linearised_flow(theory, model, pytrees.take(starts, k), network[0, k, draw], k)
    moved = (path - network[0] for path in (network, linear, infinite[:, :, :draws]))
    return Laziness(networks.width, parts(*moved), networks.watched.drift)


def at_points(
    problem: Problem, train: Num[np.ndarray, "*axes n C"], test: Num[np.ndarray, "*axes m C"]
) -> Num[np.ndarray, "*axes p C"]:
    """Joins outputs at all training examples and at some test examples (``linear_models.some_points``).

    Args:
        problem: The problem.
        train: Outputs at the training examples, [..., n, C].
        test: Outputs at the test examples, [..., m, C].
    """
    return np.concatenate([train, test[..., linear_models.some_points(problem), :]], axis=-2)


def linearised_flow(
    theory: Predicted, model: Model, params: PyTree, start: Float[np.ndarray, "p C"], k: int
) -> Float[np.ndarray, "r p C"]:
    """Computes the path of one network, linearised at its initial weights, at the points of ``at_points``.

    Args:
        theory: Setting and cohorts.
        model: The network.
        params: Its initial weights.
        start: Its initial function, [p, C] at these points.
        k: Number of the network among the K models.

    Returns:
        Outputs at the evaluated rounds, [r, p, C].
    """
    setting, problem = theory.setting, theory.setting.problem
    x = np.concatenate([problem.x_train, problem.x_test[linear_models.some_points(problem)]])
    blocks = linear_models.empirical_blocks(model, params, problem.x_train, x)
    flow = run_flow(setting, blocks, theory.cohorts, outputs="full")
    runs = flow.runs(start[None, : len(problem.x_train)], start[None], setting.size.rounds, model=k)
    return np.asarray(runs.test)[:, 0, 0]
