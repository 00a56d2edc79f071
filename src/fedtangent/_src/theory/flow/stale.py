"""The stability of rounds whose answers are late: the largest stable server rate for a law of random delays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import choice, real_array
from fedtangent._src.kernels.gram import known_modes
from fedtangent._src.theory.checks import check_known, in_float64
from fedtangent._src.theory.flow.asymptotics import ROUNDING, end_of_stable
from fedtangent._src.theory.flow.rounds import RunSlots
from fedtangent._src.types import ArrayLike

if TYPE_CHECKING:
    from fedtangent._src.theory.flow.flow import Flow

MOMENTS = ("mean", "mean_square")
STEP = 1.2  # ratio of neighbouring server rates that are tried
SETTLED, ITERATIONS = 1e-13, 20_000  # change of a growth in an iteration at which the iterations end; most of them


class Answers(NamedTuple):
    """The answers of one round, whose delays are random, in coordinates without null directions.

    At server rate g an answer of delay d moves the model m by ``g w(d) (p (m_d - m) - X m_d)`` if the server mixes
    models, else by ``-g w(d) X m_d``, where m_d is the model of d rounds ago.
    """

    moves: Float64[np.ndarray, "S d d"]  # X
    shares: Float64[np.ndarray, "S"]  # p
    law: Float64[np.ndarray, "S ages"]  # probability of each delay
    weights: Float64[np.ndarray, "ages"]  # w
    mixes: bool

    def maps(self, rate: float) -> tuple[Float64[np.ndarray, "D D"], Float64[np.ndarray, "_ d D"]]:
        """Returns the expected map of the last models, and the rows of its deviations, whose squares add up.

        Args:
            rate: Server rate g.
        """
        slots, size, ages = *self.moves.shape[:2], len(self.weights)
        eye, rows = np.eye(size), np.zeros((slots, ages, size, ages, size))
        towards = self.mixes * self.shares[:, None, None] * eye
        for d, weight in enumerate(self.weights):
            rows[:, d, :, d] += rate * weight * (towards - self.moves)
            rows[:, d, :, 0] -= rate * weight * towards
        rows = rows.reshape(slots, ages, size, ages * size)
        mean = np.einsum("sd,sdij->sij", self.law, rows)
        whole = np.eye(ages * size, k=-size)  # every model becomes a round older
        whole[:size] = mean.sum(axis=0)
        whole[:size, :size] += eye
        deviations = np.sqrt(self.law)[..., None, None] * (rows - mean[:, None])
        return whole, deviations.reshape(-1, size, ages * size)


def largest_stable(flow: Flow, delays: ArrayLike, moment: str, model: int, tolerance: float) -> float:
    """Computes what ``Flow.largest_stable_server_rate`` documents.

    Args:
        flow, delays, moment, model, tolerance: As there, of ``flow``.
    """
    flow.check_law("largest stable server rate")
    if not flow.kind.is_stale:
        raise ValueError(f"rule: got the algorithm {flow.kind.algorithm!r}, allowed are fed_async, fed_buff")
    check_known("rule", flow.rounds, flow.numbers)
    choice("moment", moment, MOMENTS)
    law = _law(delays, flow.partition.num_clients, flow.kind.most_delay + 1)
    rounds = [_answers(flow, law, r, model) for r in range(flow.num_rounds)]
    moved = np.mean([answers.moves.sum(axis=0) for answers in rounds], axis=0)
    steepest = float(np.abs(np.linalg.eigvals(moved)).max(initial=0.0))
    start = 1 / ((1 + 2 * flow.kind.most_delay) * steepest) if steepest > 0 else np.inf
    growth = _growth_of_mean if moment == "mean" else _growth_of_square
    return end_of_stable(lambda g: growth(rounds, g), 1 + ROUNDING, start=start, step=STEP, tolerance=tolerance)


def _law(delays: ArrayLike, num_clients: int, ages: int) -> Float64[np.ndarray, "N ages"]:
    """Returns the probability of each delay for each client; raises ``ValueError`` for numbers that are none."""
    law = real_array("delays", delays)
    if law.shape not in ((ages,), (num_clients, ages)):
        raise ValueError(f"delays: got shape {law.shape}, must be [{ages}] or [{num_clients}, {ages}] probabilities")
    if not (np.all(law >= 0) and np.allclose(law.sum(axis=-1), 1, rtol=0, atol=1e-9)):
        raise ValueError(f"delays: got {delays!r:.60}, must be probabilities of at least 0 that sum to 1")
    return np.broadcast_to(law, (num_clients, ages))


@in_float64
def _answers(flow: Flow, law: Float64[np.ndarray, "N ages"], r: int, model: int) -> Answers:
    """Returns the answers of round ``r`` for one model."""
    slots = RunSlots(*(part[r : r + 1] for part in flow.slots))
    rounds = jax.tree.map(lambda leaf: np.asarray(leaf)[r : r + 1], flow.rounds)
    rounds = rounds._replace(server_learning_rate=np.ones(1), delay=None, oldest=None)
    kind = flow.kind._replace(algorithm="fed_avg", most_delay=0)
    filled = np.flatnonzero((rounds.weight[0] > 0) & (rounds.model[0] == model))
    values, vectors = known_modes(np.asarray(flow.theta))
    down = (np.sqrt(values) * vectors)[:, values > 0].T
    moves = np.zeros((len(filled), len(down), len(down)))
    for place, slot in enumerate(filled):
        alone = rounds._replace(weight=rounds.weight * (np.arange(rounds.weight.shape[1]) == slot))
        moves[place] = down @ replace(flow, kind=kind, slots=slots, rounds=alone).operator(1, model) @ down.T
    mixes, weights = flow.kind.algorithm == "fed_async", np.asarray(flow.numbers.delay_weights)
    return Answers(moves, rounds.weight[0, filled], law[slots.client[0, filled]], weights, mixes)


def _growth_of_mean(rounds: list[Answers], rate: float) -> float:
    """Computes the spectral radius of the expected round."""
    mean = np.mean([answers.maps(rate)[0] for answers in rounds], axis=0)
    return float(np.abs(np.linalg.eigvals(mean)).max())


def _growth_of_square(rounds: list[Answers], rate: float) -> float:
    """Computes the spectral radius of the map of the models' second moments, by iterations."""
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
