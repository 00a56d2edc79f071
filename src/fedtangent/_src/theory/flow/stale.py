"""Stability of asynchronous training: the largest stable server rate if clients' answers come with random delays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import choice, real_array
from fedtangent._src.kernels.gram import known_modes
from fedtangent._src.theory.checks import check_known, in_float64
from fedtangent._src.theory.flow.asymptotics import ROUNDING, end_of_stable
from fedtangent._src.theory.flow.rounds import RunSlots
from fedtangent._src.theory.flow.rules import STALE
from fedtangent._src.types import ArrayLike

if TYPE_CHECKING:
    from fedtangent._src.theory.flow.flow import Flow

STEP = 1.2  # ratio of neighbouring server rates that are tried
SETTLED, ITERATIONS = 1e-13, 20_000  # relative change of the growth at which the iterations end; most iterations


class Answers(NamedTuple):
    """Answers (updates) of the S clients of one round, whose delays are random, as matrices that act on models.

    A model is a vector m of d coefficients, without directions that no function depends on. At server rate g the answer
    of a client with delay k adds ``-g w_k X m_k`` to the server's model m, where m_k is the model of k rounds ago and
    w_k the delay's weight. If the server mixes models ("fed_async"), the answer adds
    ``g w_k (p (m_k - m) - X m_k)``, where p is the client's weight in the round. Delays run from 0 to D.
    """

    moves: Float64[np.ndarray, "S d d"]  # X of each client
    shares: Float64[np.ndarray, "S"]  # p if the server mixes models, else 0
    law: Float64[np.ndarray, "S ages"]  # probability of each delay, [S, D + 1]
    weights: Float64[np.ndarray, "ages"]  # w, [D + 1]

    def maps(self, rate: float) -> tuple[Float64[np.ndarray, "D D"], Float64[np.ndarray, "_ d D"]]:
        """Computes how the round maps the last D + 1 models, stacked in one vector of (D + 1) d numbers, newest first.

        Args:
            rate: Server rate g.

        Returns:
            The expected matrix of the map; and matrices E [S (D + 1), d, (D + 1) d] such that random delays add
            ``sum E M E'`` to the newest model's second moment, where M is the second moment of all D + 1 models.
        """
        slots, size, ages = *self.moves.shape[:2], len(self.weights)
        towards, blocks = self.shares[:, None, None] * np.eye(size), np.zeros((slots, ages, size, ages, size))
        for d, weight in enumerate(self.weights):
            blocks[:, d, :, d] += rate * weight * (towards - self.moves)
            blocks[:, d, :, 0] -= rate * weight * towards
        rows = blocks.reshape(slots, ages, size, ages * size)
        mean = np.einsum("sd,sdij->sij", self.law, rows)
        whole = np.eye(ages * size, k=-size)  # every model becomes a round older
        whole[:size] = mean.sum(axis=0) + np.eye(size, ages * size)
        deviations = np.sqrt(self.law)[..., None, None] * (rows - mean[:, None])
        return whole, deviations.reshape(-1, size, ages * size)


def largest_stable(flow: Flow, delays: ArrayLike, model: int, tolerance: float) -> float:
    """Computes the largest server rate at which training with random delays is stable: inf if all are, 0 if none is.

    All rates from 0 up to it are stable. ``Flow.largest_stable_server_rate`` explains the condition.

    Args:
        flow: Flow of a run with "fed_buff" or "fed_async".
        delays: Probabilities of the delays 0 to D, [D + 1], or for each client [N, D + 1].
        model: Index of the model.
        tolerance: Relative tolerance of the result.
    """
    flow.check_law("largest stable server rate")
    choice("algorithm", flow.kind.algorithm, STALE)
    check_known("rule", flow.rounds, flow.numbers)
    law, num_clients, ages = real_array("delays", delays), flow.partition.num_clients, flow.kind.most_delay + 1
    if law.shape not in ((ages,), (num_clients, ages)) or not np.all(law >= 0):
        raise ValueError(f"delays: got {delays!r:.60}, must be probabilities, [{ages}] or [{num_clients}, {ages}]")
    if not np.allclose(law.sum(axis=-1), 1, rtol=0, atol=1e-9):
        raise ValueError(f"delays: got {delays!r:.60}, must sum to 1")
    law = np.broadcast_to(law, (num_clients, ages))
    rounds = [_answers(flow, law, r, model) for r in range(flow.num_rounds)]
    moved = np.mean([answers.moves.sum(axis=0) for answers in rounds], axis=0)
    steepest = float(np.abs(np.linalg.eigvals(moved)).max(initial=0.0))
    start = 1 / ((2 * ages - 1) * steepest) if steepest > 0 else np.inf
    return end_of_stable(lambda g: _growth(rounds, g), 1 + ROUNDING, start=start, step=STEP, tolerance=tolerance)


@in_float64
def _answers(flow: Flow, law: Float64[np.ndarray, "N ages"], r: int, model: int) -> Answers:
    """Computes the ``Answers`` (updates of the clients) to one model in round ``r``, as matrices.

    ``law`` has the probability of each delay, for each client.
    """
    slots = RunSlots(*(part[r : r + 1] for part in flow.slots))
    rounds = jax.tree.map(lambda leaf: np.asarray(leaf)[r : r + 1], flow.rounds)
    rounds = rounds._replace(server_learning_rate=np.ones(1), delay=None, oldest=None)
    kind, weights = flow.kind._replace(algorithm="fed_avg", most_delay=0), jnp.ones(1)  # one program for all D
    fresh = replace(flow, kind=kind, numbers=flow.numbers._replace(delay_weights=weights), slots=slots)
    filled = np.flatnonzero((rounds.weight[0] > 0) & (rounds.model[0] == model))
    values, vectors = known_modes(np.asarray(flow.theta))
    down = (np.sqrt(values) * vectors)[:, values > 0].T
    moves = np.zeros((len(filled), len(down), len(down)))
    for place, slot in enumerate(filled):
        alone = rounds._replace(weight=rounds.weight * (np.arange(rounds.weight.shape[1]) == slot))
        moves[place] = down @ replace(fresh, rounds=alone).operator(1, model) @ down.T
    shares = rounds.weight[0, filled] * (flow.kind.algorithm == "fed_async")
    return Answers(moves, shares, law[slots.client[0, filled]], np.asarray(flow.numbers.delay_weights))


def _growth(rounds: list[Answers], rate: float) -> float:
    """Computes by iteration the factor by which a round finally multiplies the second moments of the models.

    The round is drawn from ``rounds``, each with the same probability; ``rate`` is the server rate.
    """
    maps = [answers.maps(rate) for answers in rounds]
    moment, growth = np.eye(len(maps[0][0])), 0.0
    for _ in range(ITERATIONS):
        moved, before = np.zeros_like(moment), growth
        for whole, deviations in maps:
            moved += whole @ moment @ whole.T / len(maps)
            spread = np.tensordot(deviations @ moment, deviations, axes=((0, 2), (0, 2)))
            moved[: len(spread), : len(spread)] += spread / len(maps)
        growth = float(np.trace(moved) / np.trace(moment))
        if abs(growth - before) <= SETTLED * growth:
            break
        # The sum with the moment itself has the same direction of growth, but no other of the same modulus.
        moment = moved / np.trace(moved) + moment / np.trace(moment)
    return growth
