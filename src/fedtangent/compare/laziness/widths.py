"""How lazy the networks of a comparison are, at every width."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from fedtangent.compare import exact
from fedtangent.compare.laziness.parts import Parts, parts
from fedtangent.compare.predicted import Predicted, run_flow
from fedtangent.compare.settings import Setting
from fedtangent.compare.simulated import Simulated, cohorts, init_key, recipe
from fedtangent.types import Model, PyTree


class Laziness(NamedTuple):
    """The split of the first draws' networks of one width, at every evaluated round; see ``laziness.parts``."""

    width: int
    parts: Parts  # each [r, K, e]
    drift: np.ndarray  # [r, K, e] of the tangent kernel, relative, in the Frobenius norm

    def curves(self) -> dict[str, np.ndarray]:
        """``METRICS`` by name, each [r, K, e]."""
        return self.parts._asdict() | {"drift": self.drift}


def is_followed(setting: Setting) -> bool:
    """Whether a comparison splits the distance: of networks whose whole kernel, [n C, n C], is not too large."""
    return not setting.is_linear and setting.y_train.size <= exact.MOST_ROWS


def split(theory: Predicted, seen: Simulated, infinite: np.ndarray) -> Laziness:
    """How lazy the first draws of ``seen`` are, at the training examples and some test points together.

    The path of a linearised network is the federated flow with the whole empirical kernel at its start: exact, and
    cheaper than its training. ``infinite`` [r, K, e, n + m, C] is the flow of infinite width there.
    """
    setting, draws = theory.setting, infinite.shape[2]
    points, model = exact.some_points(setting), setting.model(seen.width)
    network = np.concatenate([seen.train, seen.test[..., points, :]], axis=-2)[:, :, :draws]
    linear = np.empty_like(network)
    for draw in range(draws):
        for k, params in enumerate(_starts(setting, model, seen.width, draw)):
            linear[:, k, draw] = linearised_flow(setting, model, params, network[0, k, draw], k, points)
    assert seen.drift is not None
    return Laziness(seen.width, parts(linear[0], network, linear, infinite), seen.drift)


def _starts(setting: Setting, model: Model, width: int, draw: int) -> list[PyTree]:
    """The initial weights of the K networks of a draw."""
    algorithm, clients = recipe(setting, model), setting.partition.num_clients
    assert algorithm.params is not None
    stacked = algorithm.params(algorithm.init(setting.seed, clients, init_key(setting, draw, width)))
    return [jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(setting.schedule.num_models)]


def linearised_flow(
    setting: Setting, model: Model, params: PyTree, start: np.ndarray, k: int, points: np.ndarray
) -> np.ndarray:
    """Outputs [r, n + m, C] of network ``k``, linearised at its initial weights ``params``, at the evaluated rounds.

    ``start`` [n + m, C] is its initial function at the training examples and the test ``points`` [m].
    """
    at = np.concatenate([setting.x_train, setting.x_test[points]])
    blocks = exact.empirical_blocks(model, params, setting.x_train, at)
    flow = run_flow(setting, blocks, cohorts(setting), outputs="full")
    return np.asarray(flow.predict(start[: len(setting.x_train)], start, setting.rounds, k))
