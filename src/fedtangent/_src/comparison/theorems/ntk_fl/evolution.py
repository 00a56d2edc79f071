"""Eq. (9a) and (9b) of NTK-FL in whole runs of the recipe, and Remark 1: how far the network departs from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from fedtangent._src import data as datasets
from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.ntk_fl.descents import descents
from fedtangent._src.comparison.theorems.ntk_fl.problem import half_stable_step, sphere
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine import Evaluation, simulate
from fedtangent._src.engine.history import History
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.models.linearised import first_order
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution
from fedtangent._src.theory.ntk_fl.lemmas import empirical_kernel
from fedtangent._src.types import Algorithm, Model, PyTree

SIZE, NEW = 20, 8  # training examples, and further points
CLIENTS = consecutive((6, 5, 9))
ROUNDS = 3
TIMES = (2, 5, 10)  # candidate times, so early that one step more or less matters
DOUBLINGS = tuple(2**k for k in range(0, 11, 2))


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks eq. (9a) and (9b) to rounding, and Remark 1."""
    width = of_scale(scale, 256, 1024)
    return [evolution(seed, width), remark_1(seed, width)]


def evolution(seed: int, width: int) -> Verdict:
    """Checks (9a) at training and new points, in every round of a run.

    The network is linearised at the weights of the round's start and evaluated at the weights of its end.
    """
    x, y, model, params = sphere(seed, width, SIZE + NEW)
    eta = half_stable_step(x[:SIZE], params)
    history = _run(model, (x[:SIZE], y[:SIZE]), eta, TIMES, seed)
    weights = [e.metrics["params"] for e in history.evaluations]
    times = [int(t) for t in np.asarray(history.rounds["time"])[:, 0]]
    rounds = [_Round(model, (x, y[:SIZE]), old, new, t, eta)
              for old, new, t in zip(weights[:-1], weights[1:], times, strict=True)]  # fmt: skip
    every = np.arange(SIZE)
    wrong = {
        "eta x 0.95": [r.discrete(every, 0.95) for r in rounds],
        "one step less": [r.discrete(every, 1.0, -1) for r in rounds],
        "(9a)'s exponential as printed, no steps": [r.printed() for r in rounds],
    }
    controls = {
        name: np.max([r.error(every, b) for r, b in zip(rounds, all_, strict=True)]) for name, all_ in wrong.items()
    }
    others = every[CLIENTS.offsets[1] :]
    controls["one client missing"] = np.max([r.error(others, r.discrete(others)) for r in rounds])
    found = np.max([r.error(every, r.discrete(every)) for r in rounds])
    statement = "network linearised at a round's start, at the weights that the recipe sends = (9a), each of its rounds"
    return exact_verdict("NTK-FL eq. (9a), (9b)", statement, found, controls, EXACT)._replace(
        sizes=f"sphere, N = {SIZE} on 3 clients of 6, 5 and 9, {NEW} points more, n = {width}, t = "
        f"{', '.join(map(str, times))}, half of the largest stable step"
    )


class _Round:
    """One round of ``time`` steps: the linearised network at its start and end, and what NTK-FL's eq. (9a) predicts."""

    def __init__(
        self, model: Model, points: tuple[np.ndarray, np.ndarray], old: PyTree, new: PyTree, time: int, eta: float
    ) -> None:
        x, self.y = points
        self.time, self.eta, self.kernel = time, eta, empirical_kernel(x, old["v"])
        self.start, self.end = (
            np.asarray(jax.jit(first_order, static_argnums=0)(model, old, w, jnp.asarray(x)))[:, 0] for w in (old, new)
        )

    def discrete(self, rows: np.ndarray, factor: float = 1.0, later: int = 0) -> np.ndarray:
        """Returns ``B_t`` [N + m, N'] of (9a) for N' examples ``rows``, with ``factor * eta``, ``later`` more steps."""
        blocks = KernelBlocks(self.kernel[np.ix_(rows, rows)], self.kernel[:, rows])
        return np.asarray(ntk_evolution(blocks, factor * self.eta / len(rows), self.time + later))

    def printed(self) -> np.ndarray:
        """Returns ``B_t`` [N + m, N] of (9a) as printed, with ``exp(-eta t H / N)``."""
        h = self.kernel[:SIZE, :SIZE]
        left = np.eye(SIZE) - expm(-self.eta * self.time / SIZE * h)
        return np.asarray(self.kernel[:, :SIZE] @ np.linalg.solve(h, left))

    def error(self, rows: np.ndarray, b: np.ndarray) -> float:
        """Returns the distance of the linearised network from the prediction by ``b``, over how far it has moved."""
        predicted = self.start - b @ (self.start[rows] - self.y[rows])
        return float(np.linalg.norm(self.end - predicted) / np.linalg.norm(self.end - self.start))


def _run(
    model: Model,
    points: tuple[np.ndarray, np.ndarray],
    eta: float,
    times: tuple[int, ...],
    seed: int,
    rounds: int = ROUNDS,
) -> History:
    """Runs NTK-FL with every client in every round; the history has the weights after each round."""
    algorithm = algorithms.ntk_fl(
        model, schedule.all_clients(3), learning_rate=eta, evolution=Evolution(times=times, method="eigh")
    )
    assert algorithm.params is not None
    read, held = algorithm.params, datasets.federated_data(points[0], points[1][:, None], CLIENTS, dtype=jnp.float64)

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(lambda leaf: np.asarray(leaf)[0], read(state))}

    key = jax.random.key(seed)
    return simulate(algorithm, held, num_rounds=rounds, seed=seed, start=key, evaluation=Evaluation(1, look)).history


def remark_1(seed: int, width: int) -> Verdict:
    """Checks Remark 1: the residual of (9a) tends to 0, and the network at the weights of (9b) departs from it with t.

    The squared residual of the network at the recipe's candidates, over (9a)'s, grows with t, and so does the distance
    of these weights from gradient descent's. The control is the same ratio for the linearised network, which follows
    (9a) at every t.
    """
    x, y, model, params = sphere(seed, width, SIZE)
    eta = half_stable_step(x, params)
    losses = np.asarray(_run(model, (x, y), eta, DOUBLINGS, seed, 1).rounds["losses"])[0, 0]
    paths, at = descents(model, params, x, y[:, None], eta, DOUBLINGS[-1]), np.array(DOUBLINGS)
    recipe = np.allclose(2 * SIZE * losses, paths.tangent[at], rtol=EXACT, atol=0)
    start = np.asarray(model.apply(params, jnp.asarray(x)))[:, 0] - y
    values, vectors = np.linalg.eigh(empirical_kernel(x, params["v"]))
    predicted = np.sum(((1 - eta * values / SIZE) ** at[:, None] * (vectors.T @ start)) ** 2, axis=1)
    early = predicted > 1e-8 * predicted[0]  # later it is rounding
    apart, alike = 2 * SIZE * losses / predicted, paths.linear[at] / predicted
    grows = bool(np.all(np.diff(apart) > 0) and np.all(np.diff(paths.gap[at]) > 0))
    follows = bool(np.all(np.diff(alike[early]) > EXACT))
    return Verdict.of(
        "NTK-FL Remark 1",
        "squared residual of the network at NTK-FL's weights / (9a)'s, which goes to 0; l1 distance to descent's",
        f"sphere, N = {SIZE}, n = {width}, half of the largest stable step, t = {', '.join(map(str, DOUBLINGS))}",
        (
            f"{', '.join(f'{a:.3g}' for a in apart)}; {paths.gap[at[1]]:.2g} to {paths.gap[at[-1]]:.2g}",
            "each grows with t",
            grows and recipe,
        ),
        ("network linear in its weights", ", ".join(f"{a:.3g}" for a in alike[early]), not follows),
        f"a quotient that grows by {EXACT:g}",
    )


ENTRIES = (
    TheoremEntry(
        "ntk_fl.evolution",
        "the recipe's evolution of function and weights, to rounding, and where the network leaves it",
        checks,
        papers=("yue2022",),
        statement="eq. (9a) and (9b), Remark 1 of NTK-FL",
        functions=(ntk_evolution,),
    ),
)
