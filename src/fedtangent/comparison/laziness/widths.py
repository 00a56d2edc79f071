"""How lazy the networks of a comparison are, at every width."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent import pytrees
from fedtangent.comparison import exact
from fedtangent.comparison.laziness.parts import Parts, parts
from fedtangent.comparison.predicted import Predicted, run_flow
from fedtangent.comparison.settings import Setting
from fedtangent.comparison.simulated import Simulated
from fedtangent.types import Model, PyTree


class Laziness(NamedTuple):
    """The split of some networks of one width, at every evaluated round; see ``laziness.parts``."""

    width: int
    parts: Parts  # each [r, K, e]
    drift: np.ndarray  # [r, K, e], see ``WatchedNetworks``

    def curves(self) -> dict[str, np.ndarray]:
        """``METRICS`` by name, each [r, K, e]."""
        return self.parts._asdict() | {"drift": self.drift}


def watched_draws(setting: Setting) -> int:
    """How many draws of each width are watched: 1, or 2 where the ensemble has a single model.

    0 for a linear model, which is always lazy, and for networks whose whole kernel, [n C, n C], is too large.
    """
    if setting.is_linear or setting.y_train.size > exact.MOST_ROWS:
        return 0
    return 1 if setting.schedule.num_models > 1 else 2


def split(theory: Predicted, seen: Simulated, infinite: np.ndarray) -> Laziness:
    """How lazy the networks of ``seen`` that were watched are, at the training and some test examples together.

    The path of a linearised network is the federated flow with the whole empirical kernel at its start: exact, and
    cheaper than its training. ``infinite`` [r, K, E, n + m, C] is the flow of infinite width, ``at_points``.
    """
    assert seen.watched is not None
    setting, model, draws = theory.setting, theory.setting.model(seen.width), len(seen.watched.starts)
    network = at_points(setting, seen.train, seen.test)[:, :, :draws]
    linear = np.empty_like(network)
    for draw, starts in enumerate(seen.watched.starts):
        for k in range(network.shape[1]):
            linear[:, k, draw] = linearised_flow(theory, model, pytrees.take(starts, k), network[0, k, draw], k)
    moved = (path - network[0] for path in (network, linear, infinite[:, :, :draws]))
    return Laziness(seen.width, parts(*moved), seen.watched.drift)


def at_points(setting: Setting, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Outputs [..., n, C] at the training examples and [..., m, C] at the test examples, at some of these, together."""
    return np.concatenate([train, test[..., exact.some_points(setting), :]], axis=-2)


def linearised_flow(theory: Predicted, model: Model, params: PyTree, start: np.ndarray, k: int) -> np.ndarray:
    """Outputs [r, n + m, C] of network ``k``, linearised at its initial weights ``params``, at the evaluated rounds.

    ``start`` [n + m, C] is its initial function, ``at_points``.
    """
    setting = theory.setting
    x = np.concatenate([setting.x_train, setting.x_test[exact.some_points(setting)]])
    blocks = exact.empirical_blocks(model, params, setting.x_train, x)
    flow = run_flow(setting, blocks, theory.cohorts, outputs="full")
    return np.asarray(flow.predict(start[: len(setting.x_train)], start, setting.rounds, k))
