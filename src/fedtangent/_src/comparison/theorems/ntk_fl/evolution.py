"""Eq. (9a) and (9b) of NTK-FL in whole runs of the recipe, and Remark 1: how far the network departs from them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float64, Int

import fedtangent as ft
from fedtangent._src.comparison.theorems import entries, of_scale
from fedtangent._src.comparison.theorems.claims import Claim
from fedtangent._src.comparison.theorems.ntk_fl.descents import Sphere, descents, sphere
from fedtangent._src.comparison.verdicts import EXACT, Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.models.linearised import first_order
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent._src.types import Algorithm, PyTree

SIZE, NEW = 20, 8  # training examples, and further points
CLIENTS = consecutive((6, 5, 9))
ROUNDS = 3
TIMES = (2, 5, 10)  # candidate times, so early that one step more or less matters
DOUBLINGS = tuple(2**k for k in range(0, 11, 2))


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks eq. (9a) and (9b) to rounding, and Remark 1."""
    width = of_scale(scale, 256, 1024)
    return [_evolution(seed, width), _remark_1(seed, width)]


class _Round(NamedTuple):
    """One round of ``time`` steps: the linearised network at its start and end, and what NTK-FL's eq. (9a) predicts."""

    kernel: Float64[np.ndarray, "p p"]  # at training and new points
    y: Float64[np.ndarray, "p"]
    start: Float64[np.ndarray, "p"]
    end: Float64[np.ndarray, "p"]
    time: int
    step: float

    def _matrix(self, rows: Int[np.ndarray, "r"], factor: float = 1.0, later: int = 0) -> Float64[np.ndarray, "p r"]:
        """Returns ``B_t`` of (9a) for the examples ``rows``, with a multiple of the step and ``later`` more steps."""
        blocks = ft.kernels.KernelBlocks(self.kernel[np.ix_(rows, rows)], self.kernel[:, rows])
        return np.asarray(ft.theory.ntk_evolution(blocks, factor * self.step / len(rows), self.time + later))

    def printed(self) -> Float64[np.ndarray, "p n"]:
        """Returns ``B_t`` of (9a) as printed, with ``exp(-eta t H / N)``."""
        h = self.kernel[:SIZE, :SIZE]
        evolved = np.eye(SIZE) - scipy.linalg.expm(-self.step * self.time / SIZE * h)
        return np.asarray(self.kernel[:, :SIZE] @ np.linalg.solve(h, evolved))

    def _error(self, rows: Int[np.ndarray, "r"], b: Float64[np.ndarray, "p r"]) -> float:
        """Returns the distance of the linearised network from the prediction by ``b``, over how far it has moved."""
        predicted = self.start - b @ (self.start[rows] - self.y[rows])
        return float(np.linalg.norm(self.end - predicted) / np.linalg.norm(self.end - self.start))


def _evolution(seed: int, width: int) -> Verdict:
    """Checks (9a) at training and new points, in every round of a run."""
    problem = sphere(seed, width, SIZE, NEW)
    history = _history(problem, TIMES, seed, ROUNDS)
    times = [int(t) for t in np.asarray(history.rounds["time"])[:, 0]]
    linearised = jax.jit(first_order, static_argnums=0)
    rounds = []
    for (before, after), time in zip(itertools.pairwise(history.evaluations), times, strict=True):
        old, new, x = before.metrics["params"], after.metrics["params"], jnp.asarray(problem.x)
        start, end = (np.asarray(linearised(problem.model, old, weights, x))[:, 0] for weights in (old, new))
        kernel = empirical_kernel(problem.x, old["v"])
        rounds.append(_Round(kernel, problem.y, start, end, time, problem.step))
    every = np.arange(SIZE)
    others = every[CLIENTS.offsets[1] :]
    errors = {
        "": [r._error(every, r._matrix(every)) for r in rounds],
        "eta x 0.95": [r._error(every, r._matrix(every, 0.95)) for r in rounds],
        "one step less": [r._error(every, r._matrix(every, 1.0, -1)) for r in rounds],
        "(9a)'s exponential as printed, no steps": [r._error(every, r.printed()) for r in rounds],
        "one client missing": [r._error(others, r._matrix(others)) for r in rounds],
    }
    worst = {name: np.max(values) for name, values in errors.items()}
    return Claim(
        "NTK-FL eq. (9a), (9b)",
        "network linearised at a round's start, at the weights of the round's end = (9a), every round",
        f"sphere, N = {SIZE} on 3 clients of 6, 5 and 9, {NEW} points more, n = {width}, t = "
        f"{', '.join(map(str, times))}, half of the largest stable step",
    ).exact(worst.pop(""), worst)


def _history(problem: Sphere, times: tuple[int, ...], seed: int, rounds: int) -> ft.types.History:
    """Runs NTK-FL with every client in every round; the history has the weights after each round."""
    evolution = ft.Evolution(times=times, method="eigh")
    algorithm = ft.ntk_fl(problem.model, ft.schedules.all_clients(3), learning_rate=problem.step, evolution=evolution)
    assert algorithm.params is not None
    read = algorithm.params

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(lambda leaf: np.asarray(leaf)[0], read(state))}

    data = ft.data.federated_data(problem.x[:SIZE], problem.y[:SIZE, None], CLIENTS, dtype=jnp.float64)
    key = jax.random.key(seed)
    return ft.simulate(
        algorithm, data, num_rounds=rounds, seed=seed, start=key, evaluation=ft.Evaluation(1, look)
    ).history


def _remark_1(seed: int, width: int) -> Verdict:
    """Checks Remark 1: as t grows, (9a)'s residual tends to 0, and the network at (9b)'s weights departs from it."""
    problem = sphere(seed, width, SIZE)
    x, y, model, params, step = problem
    losses = np.asarray(_history(problem, DOUBLINGS, seed, 1).rounds["losses"])[0, 0]
    paths, at = descents(model, params, x, y[:, None], step, DOUBLINGS[-1]), np.array(DOUBLINGS)
    recipe = np.allclose(2 * SIZE * losses, paths.tangent[at], rtol=EXACT, atol=0)
    start = np.asarray(model.apply(params, jnp.asarray(x)))[:, 0] - y
    values, vectors = np.linalg.eigh(empirical_kernel(x, params["v"]))
    predicted = np.sum(((1 - step * values / SIZE) ** at[:, None] * (vectors.T @ start)) ** 2, axis=1)
    early = predicted > 1e-8 * predicted[0]  # later it is rounding
    apart, alike = 2 * SIZE * losses / predicted, paths.linear[at] / predicted
    grows = bool(np.all(np.diff(apart) > 0) and np.all(np.diff(paths.gap[at]) > 0))
    follows = bool(np.all(np.diff(alike[early]) > EXACT))
    ratios = f"{', '.join(f'{a:.3g}' for a in apart)}; {paths.gap[at[1]]:.2g} to {paths.gap[at[-1]]:.2g}"
    return Claim(
        "NTK-FL Remark 1",
        "squared residual of the network at NTK-FL's weights / (9a)'s, which goes to 0; l1 distance to descent's",
        f"sphere, N = {SIZE}, n = {width}, half of the largest stable step, t = {', '.join(map(str, DOUBLINGS))}",
    ).judged(
        (ratios, "each grows with t", grows and recipe),
        ("network linear in its weights", ", ".join(f"{a:.3g}" for a in alike[early]), not follows),
        f"a quotient that grows by {EXACT:g}",
    )


ENTRIES = entries(
    _checks,
    "the recipe's evolution of function and weights, to rounding, and where the network leaves it",
    papers=("yue2022",),
    statement="eq. (9a) and (9b), Remark 1 of NTK-FL",
    functions=(ft.theory.ntk_evolution,),
)
