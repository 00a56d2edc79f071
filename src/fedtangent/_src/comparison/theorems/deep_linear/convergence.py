"""Theorem IV.2 of DeepLin, the induction hypotheses of its proof and its lemmas, on a run that meets its conditions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src.comparison.theorems import entries, of_scale
from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict
from fedtangent._src.theory.checks import Assumption
from fedtangent._src.theory.deep_linear.gram import dense, products
from fedtangent._src.theory.deep_linear.rounds import FullBatchWork, LocalPath, averaged, local_paths
from fedtangent._src.theory.deep_linear.theorem import DeepLinearTheorem, deep_linear_theorem

SIZES = Size(7, 1, 2, 1, 1100, 2, 400), Size(8, 1, 2, 2, 3200, 2, 800)
SPREAD = 0.95  # the least singular value of X (the largest is 1); the required width grows as kappa^4
DELTA = 0.2  # probability with which the theorem may fail
LOOKS = 6  # how often the weights are recorded along the run
NARROW = 4  # width of networks that violate the conditions: the controls
NARROW_DRAWS = 20
NARROW_ROUNDS = 50
ALL_NARROW = f"width {NARROW}, the worst of {NARROW_DRAWS}"
HYPOTHESES = {  # the measured quantity of each
    "C": "distance of a layer from its start / R",
    "B, largest": "largest singular value / 1.25 of the limit's",
    "B, least": "0.75 of the limit's / least singular value",
    "B, between": "norm of inner layers' products / 2 (L m^count)^1/2",
}


class Observed(NamedTuple):
    """A run with its theorem, the recorded losses and the recorded weights."""

    size: Size
    work: FullBatchWork
    theorem: DeepLinearTheorem
    losses: Float64[np.ndarray, "rounds"]  # over the initial one
    weights: dict[int, list[np.ndarray]]  # of the recorded rounds

    @property
    def last(self) -> list[np.ndarray]:
        """The weights after the last round."""
        return self.weights[max(self.weights)]

    def _bounded(self, place: str, statement: str, ratio: float, control: str, wrong: float) -> Verdict:
        """Checks that the ratio of a measured value to its bound is at most 1, and to a ``wrong`` bound more."""
        unmet = f"; not met: {', '.join(self.theorem.failing)}" if self.theorem.failing else ""
        sizes = f"{self.size}, {self.size.rounds} rounds{unmet}"
        return bounded_verdict(f"DeepLin {place}", statement, sizes, ratio, control, wrong)

    def narrow_networks(self) -> list[tuple[DeepLinearTheorem, list[np.ndarray]]]:
        """Draws untrained networks of ``NARROW`` units for the same problem, and returns each with its theorem."""
        sizes = (self.size.dimension, *[NARROW] * (self.size.depth - 1), self.size.outputs)
        networks = []
        for draw in range(NARROW_DRAWS):
            rng = np.random.default_rng([draw, 1])
            weights = [rng.standard_normal((b, a)) for a, b in itertools.pairwise(sizes)]
            networks.append((deep_linear_theorem(weights, self.work, DELTA), weights))
        return networks


def _observe(size: Size, seed: int) -> Observed:
    """Simulates a run at the largest learning rate that the theorem allows, and evaluates the theorem on it."""
    x, y = problem(size, seed, SPREAD)
    largest = np.linalg.norm(x, 2) ** 2
    kappa = largest / np.linalg.svd(x, compute_uv=False)[-1] ** 2
    rate = size.outputs / (50 * size.depth * kappa * size.local_steps * largest) * (1 - 1e-9)
    run, work = run_of(size, x, y, rate, seed, size.rounds // LOOKS), work_of(size, x, y, rate)
    losses = np.sum((x @ run.models - y) ** 2, axis=(1, 2))
    return Observed(size, work, deep_linear_theorem(run.weights[0], work, DELTA), losses / losses[0], run.weights)


def _bound_18(run: Observed) -> Verdict:
    """Checks that the loss is below (18) after every round; the control, (18) without N, is violated."""
    rounds, constants = np.arange(len(run.losses)), run.theorem.constants
    rates = (c.rate() for c in (constants, constants._replace(num_clients=1)))
    ratio, wrong = (float((run.losses / rate**rounds)[1:].max()) for rate in rates)
    return run._bounded("Theorem IV.2", "loss / bound (18), the worst round", ratio, "N forgotten", wrong)


def _hypotheses(run: Observed) -> list[Verdict]:
    """Checks hypotheses B and C at every recorded round; A is (18)."""
    looks = [run.theorem.hypotheses(weights, float(run.losses[r]), r) for r, weights in run.weights.items()]
    worst = _largest_ratios(looks)
    narrow = _largest_ratios([theorem.hypotheses(weights, 1.0, 0) for theorem, weights in run.narrow_networks()])
    narrow["C"] = max(float(np.linalg.norm(w)) for w in run.last) / run.theorem.constants.radius()
    narrow["B, between"] = 2 * worst["B, between"]
    controls = dict.fromkeys(worst, ALL_NARROW) | {"C": "distance from 0", "B, between": "layers twice as large"}
    return [
        run._bounded(f"hypothesis {name}", f"{HYPOTHESES[name]}, every look", ratio, controls[name], narrow[name])
        for name, ratio in worst.items()
        if name != "A"
    ]


def _largest_ratios(looks: Sequence[Sequence[Assumption]]) -> dict[str, float]:
    """Returns each assumption's largest ratio of measured to required value, or its inverse: above 1 if it fails."""
    ratios = dict[str, float]()
    for one in itertools.chain.from_iterable(looks):
        if one.relation == "<=":
            ratio = one.measured / one.required
        else:
            ratio = one.required / one.measured if one.measured > 0 else np.inf
        ratios[one.name] = max(ratios.get(one.name, 0.0), ratio)
    return ratios


def _lemma_1(run: Observed) -> Verdict:
    """Checks Lemma VII.1: the initial singular values are within 0.8 and 1.2 times their limits."""

    def worst(theorem: DeepLinearTheorem, weights: Sequence[np.ndarray]) -> float:
        low, high = theorem.singular_values(weights)
        return max(high / 1.2, 0.8 / low if low > 0 else np.inf)

    narrow = max(worst(theorem, weights) for theorem, weights in run.narrow_networks())
    ratio = worst(run.theorem, run.weights[0])
    return run._bounded("Lemma VII.1", "initial singular values / their bounds", ratio, ALL_NARROW, narrow)


def _local_lemmas(run: Observed) -> list[Verdict]:
    """Checks Lemmas VII.2 to VII.7 in the run's last round."""
    paths, c, work = local_paths(run.last, run.work), run.theorem.constants, run.work
    decays, faster, drifts, moves, from_zero = ratios = tuple(list[float]() for _ in range(5))
    for client, path in enumerate(paths):
        x, y = work.of_client(client)
        singular, start = np.linalg.svd(x, compute_uv=False), path.residuals[0]
        size, after = np.linalg.norm(start), [*path.residuals[1:], products(path.weights, x).outputs - y]
        step = c.learning_rate * c.depth * singular[-1] ** 2 / c.outputs
        local = c._replace(largest=float(singular[0]))
        radius = 24 * c.outputs**0.5 * singular[0] * size / (c.depth * singular[-1] ** 2)
        for k, residual in enumerate(after, start=1):
            square = float(np.sum(residual**2)) / size**2
            decays.append(float(square / (1 - step / 4) ** k))
            faster.append(float(square / (1 - 4 * step) ** k))
            drifts.append(float(np.linalg.norm(residual - start) / size / local.drift_bound(k)))
        moves += [_norm(w - w0) / radius for w, w0 in zip(path.weights, run.last, strict=True)]
        from_zero += [_norm(w) / radius for w in path.weights]
    decay, fast, drift, moved, total = map(max, ratios)
    blocks = _kernels(run.theorem.initial, run.last, paths, work)
    joint, changes = ([_norm(block[i]) for block in blocks] for i in (0, 1))
    ends = work.y.shape[1] * np.cumsum(np.asarray(work.partition.sizes))[:-1]  # of the clients' columns
    parts = [[_norm(part) for part in np.split(block, ends, axis=1)] for block, _ in blocks]
    root = max(whole / np.sqrt(np.sum(np.square(part))) for whole, part in zip(joint, parts, strict=True))
    largest = max(whole / max(part) for whole, part in zip(joint, parts, strict=True))
    narrow = max(_narrow_drift(theorem, weights, work) for theorem, weights in run.narrow_networks())
    below = products(run.last, work.x).below
    a, b = (below[i] @ below[i].T for i in (1, 0))  # P consists of Kronecker products of this kind
    kron = _norm(np.kron(a, b))
    exact, frobenius = (abs(kron / (norm * _norm(b)) - 1) / EXACT for norm in (_norm(a), float(np.linalg.norm(a))))
    after_rounds, changed = f"{ALL_NARROW} after {NARROW_ROUNDS} rounds", max(changes) / c.kernel_bound()

    def row(number: str, statement: str, ratio: float, control: str, wrong: float) -> Verdict:
        return run._bounded(f"Lemma {number}", statement, ratio, control, wrong)

    return [
        row("VII.2", "|[P_1 .. P_N]| / (sum |P_c|^2)^1/2", float(root), "the largest |P_c|", float(largest)),
        row("VII.3", f"||A (x) B| / (|A| |B|) - 1| / {EXACT:g}", exact, "Frobenius norm of A", frobenius),
        row("VII.4, VII.6", "local loss / its bound, every client and step", decay, "4 in place of 1/4", fast),
        row("VII.5", "|P(t, k) - P(0)| / its bound, last round", changed, after_rounds, narrow),
        row("VII.6", "distance of a client's layer from the server's / R", moved, "distance from 0", total),
        row(
            "VII.7",
            "drift of a client's outputs / its bound, with the L of (33)",
            drift,
            "57/100 in place of 57/10",
            10 * drift,
        ),
    ]


def _kernels(
    initial: Sequence[np.ndarray], weights: Sequence[np.ndarray], paths: Sequence[LocalPath], work: FullBatchWork
) -> list[tuple[Float64[np.ndarray, "nC nC"], Float64[np.ndarray, "nC nC"]]]:
    """Computes P(t, k) and P(t, k) - P(0) at every local step k of round t, one block of columns for each client."""
    now, begin = products(weights, work.x), products(initial, work.x)
    first = np.hstack([dense(begin, products(initial, work.of_client(c)[0])) for c in range(work.num_clients)])
    every = [np.hstack([dense(now, path.before[k]) for path in paths]) for k in range(work.local_steps)]
    return [(p, p - first) for p in every]


def _narrow_drift(theorem: DeepLinearTheorem, weights: list[np.ndarray], work: FullBatchWork) -> float:
    """Computes the drift of a narrow network's kernel over the bound of Lemma VII.5: above 1 if it is violated."""
    trained: list[np.ndarray] = weights
    for _ in range(NARROW_ROUNDS):
        trained = averaged(local_paths(trained, work))
    blocks = _kernels(weights, trained, local_paths(trained, work), work)
    return max(_norm(drift) for _, drift in blocks) / theorem.constants.kernel_bound()


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the bound of the theorem, the hypotheses and the lemmas."""
    run = _observe(of_scale(scale, *SIZES), seed)
    return [_bound_18(run), *_hypotheses(run), _lemma_1(run), *_local_lemmas(run)]


ENTRIES = entries(
    _checks,
    "FedAvg on a deep linear network decays at the theorem's rate, and what the proof assumes of the run",
    papers=("liu_deep_linear",),
    statement="Theorem IV.2, hypotheses A to C and Lemmas VII.1 to VII.7 of DeepLin",
    functions=(deep_linear_theorem,),
    figures=tuple(f"deep_linear.{name}" for name in ("theorem", "fig2", "fig3", "fig4", "regime_map")),
)
