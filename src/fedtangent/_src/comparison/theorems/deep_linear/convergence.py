"""Theorem IV.2 of DeepLin, the induction hypotheses of its proof and its lemmas, on a run that meets its conditions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.deep_linear.runs import Size, problem, run_of, work_of
from fedtangent._src.comparison.verdicts import EXACT, Verdict, bounded_verdict
from fedtangent._src.theory.assumptions import Assumption
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


class Observed(NamedTuple):
    """A run, its theorem, and the recorded losses and weights."""

    size: Size
    work: FullBatchWork
    theorem: DeepLinearTheorem
    losses: np.ndarray  # [R + 1], over the initial one
    weights: dict[int, list[np.ndarray]]  # of the recorded rounds

    @property
    def last(self) -> list[np.ndarray]:
        """The weights after the last round."""
        return self.weights[max(self.weights)]

    def bounded(self, of: str, statement: str, ratio: float, control: str, wrong: float) -> Verdict:
        """Checks that a measured value is within its bound and beyond a wrong one.

        Args:
            of: Number of the theorem or lemma.
            statement: Name of the comparison.
            ratio: Measured value divided by its bound.
            control: Name of the wrong bound.
            wrong: Measured value divided by the wrong bound.
        """
        unmet = f"; not met: {', '.join(self.theorem.failing)}" if self.theorem.failing else ""
        sizes = f"{self.size}, {self.size.rounds} rounds{unmet}"
        return bounded_verdict(f"DeepLin {of}", statement, sizes, ratio, control, wrong)


def observe(size: Size, seed: int) -> Observed:
    """Simulates a run at the largest learning rate that the theorem allows, and evaluates the theorem on it."""
    x, y = problem(size, seed, SPREAD)
    largest = np.linalg.norm(x, 2) ** 2
    kappa = largest / np.linalg.svd(x, compute_uv=False)[-1] ** 2
    rate = size.outputs / (50 * size.depth * kappa * size.local_steps * largest) * (1 - 1e-9)
    run = run_of(size, x, y, rate, seed, size.rounds // LOOKS)
    work = work_of(size, x, y, rate)
    losses = np.sum((x @ run.models - y) ** 2, axis=(1, 2))
    return Observed(size, work, deep_linear_theorem(run.weights[0], work, DELTA), losses / losses[0], run.weights)


def bound_18(seen: Observed) -> Verdict:
    """Checks that the loss is below (18) after every round; the control, (18) without N, is violated."""
    rounds, constants = np.arange(len(seen.losses)), seen.theorem.constants
    ratio, wrong = (
        float((seen.losses / c.rate() ** rounds)[1:].max()) for c in (constants, constants._replace(num_clients=1))
    )
    return seen.bounded("Theorem IV.2", "loss / bound (18), the worst round", ratio, "N forgotten", wrong)


def hypotheses(seen: Observed) -> list[Verdict]:
    """Checks hypotheses B and C at every recorded round; A is (18)."""
    worst = dict[str, float]()
    for r, weights in seen.weights.items():
        for one in seen.theorem.hypotheses(weights, float(seen.losses[r]), r):
            worst[one.name] = max(worst.get(one.name, 0.0), _ratio(one))
    narrow = dict[str, float]()
    for theorem, weights in narrow_networks(seen):
        for one in theorem.hypotheses(weights, 1.0, 0):
            narrow[one.name] = max(narrow.get(one.name, 0.0), _ratio(one))
    radius = seen.theorem.constants.radius()
    narrow["C"] = max(float(np.linalg.norm(w)) for w in seen.last) / radius
    narrow["B, between"] = 2 * worst["B, between"]
    what = {"C": "distance of a layer from its start / R", "B, largest": "largest singular value / 1.25 of the limit's",
            "B, least": "0.75 of the limit's / least singular value",
            "B, between": "norm of inner layers' products / 2 (L m^count)^1/2"}  # fmt: skip
    control = dict.fromkeys(worst, f"width {NARROW}, the worst of {NARROW_DRAWS}")
    control |= {"C": "distance from 0", "B, between": "layers twice as large"}
    return [
        seen.bounded(f"hypothesis {name}", f"{what[name]}, every look", worst[name], control[name], narrow[name])
        for name in worst
        if name != "A"
    ]


def _ratio(one: Assumption) -> float:
    """Returns measured over required value of an assumption, or the inverse for a lower bound: above 1 if it fails."""
    if one.relation == "<=":
        return one.measured / one.required
    return one.required / one.measured if one.measured > 0 else np.inf


def narrow_networks(seen: Observed) -> Iterator[tuple[DeepLinearTheorem, list[np.ndarray]]]:
    """Draws untrained networks of ``NARROW`` units for the same problem, and yields each with its theorem."""
    size = seen.size._replace(width=NARROW)
    sizes = (size.dimension, *[NARROW] * (size.depth - 1), size.outputs)
    for draw in range(NARROW_DRAWS):
        rng = np.random.default_rng([draw, 1])
        weights = [rng.standard_normal((b, a)) for a, b in itertools.pairwise(sizes)]
        yield deep_linear_theorem(weights, seen.work, DELTA), weights


def lemma_1(seen: Observed) -> Verdict:
    """Checks Lemma VII.1: the initial singular values are within 0.8 and 1.2 times their limits."""

    def worst(theorem: DeepLinearTheorem, weights: Sequence[np.ndarray]) -> float:
        low, high = theorem.singular_values(weights)
        return max(high / 1.2, 0.8 / low if low > 0 else np.inf)

    narrow = max(worst(theorem, weights) for theorem, weights in narrow_networks(seen))
    ratio = worst(seen.theorem, seen.weights[0])
    control = f"width {NARROW}, the worst of {NARROW_DRAWS}"
    return seen.bounded("Lemma VII.1", "initial singular values / their bounds", ratio, control, narrow)


def local_lemmas(seen: Observed) -> list[Verdict]:
    """Checks Lemmas VII.2 to VII.7 in the run's last round."""
    paths, c, work = local_paths(seen.last, seen.work), seen.theorem.constants, seen.work
    decays, faster, drifts, moves, from_zero = (list[float]() for _ in range(5))
    for client, path in enumerate(paths):
        singular = np.linalg.svd(work.of_client(client)[0], compute_uv=False)
        start = path.residuals[0]
        size, after = np.linalg.norm(start), stepped(path, work, client)
        step = c.learning_rate * c.depth * singular[-1] ** 2 / c.outputs
        own = c._replace(largest=float(singular[0]))
        radius = 24 * c.outputs**0.5 * singular[0] * size / (c.depth * singular[-1] ** 2)
        for k, residual in enumerate(after, start=1):
            square = float(np.sum(residual**2)) / size**2
            decays.append(float(square / (1 - step / 4) ** k))
            faster.append(float(square / (1 - 4 * step) ** k))
            drift = np.linalg.norm(residual - start) / size
            drifts.append(float(drift / own.drift_bound(k)))
        pairs = list(zip(path.weights, seen.last, strict=True))
        moves.append(max(float(np.linalg.norm(w - w0, 2)) for w, w0 in pairs) / radius)
        from_zero.append(max(float(np.linalg.norm(w, 2)) for w, _ in pairs) / radius)
    blocks = kernels(seen.theorem.initial, seen.last, paths, work)
    joint, each, far = zip(*((_norm(b), [_norm(p) for p in _parts(b, work)], _norm(d)) for b, d in blocks), strict=True)
    narrow = max(narrow_kernel(theorem, weights, work) for theorem, weights in narrow_networks(seen))
    left, right = _factors(seen.last, work)
    kron = _norm(np.kron(left, right))
    exact = abs(kron / (_norm(left) * _norm(right)) - 1) / EXACT
    frobenius = abs(kron / (float(np.linalg.norm(left)) * _norm(right)) - 1) / EXACT
    root = max(j / np.sqrt(np.sum(np.square(e))) for j, e in zip(joint, each, strict=True))
    largest = max(j / max(e) for j, e in zip(joint, each, strict=True))
    return [
        seen.bounded("Lemma VII.2", "|[P_1 .. P_N]| / (sum |P_c|^2)^1/2", float(root), "the largest |P_c|",
                     float(largest)),
        seen.bounded("Lemma VII.3", f"||A (x) B| / (|A| |B|) - 1| / {EXACT:g}", exact, "Frobenius norm of A",
                     frobenius),
        seen.bounded("Lemma VII.4, VII.6", "local loss / its bound, every client and step", max(decays),
                     "4 in place of 1/4", max(faster)),
        seen.bounded("Lemma VII.5", "|P(t, k) - P(0)| / its bound, last round", max(far) / c.kernel_bound(),
                     f"width {NARROW}, the worst of {NARROW_DRAWS} after {NARROW_ROUNDS} rounds", narrow),
        seen.bounded("Lemma VII.6", "distance of a client's layer from the server's / R", max(moves), "distance from 0",
                     max(from_zero)),
        seen.bounded("Lemma VII.7", "drift of a client's outputs / its bound, with the L of (33)", max(drifts),
                     "57/100 in place of 57/10", 10 * max(drifts)),
    ]  # fmt: skip


def stepped(path: LocalPath, work: FullBatchWork, client: int) -> list[np.ndarray]:
    """Returns the residuals of one client after each of its local steps.

    Args:
        path: The client's local steps.
        work: Data and local work of all clients.
        client: Number of the client.
    """
    x, y = work.of_client(client)
    return [*path.residuals[1:], products(path.weights, x).outputs - y]


def kernels(
    initial: Sequence[np.ndarray], weights: Sequence[np.ndarray], paths: Sequence[LocalPath], work: FullBatchWork
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes P(t, k) and P(t, k) - P(0) at every local step k, [n C, n C] each, the clients' columns side by side.

    Args:
        initial: Weights before the run.
        weights: Weights at the start of round t.
        paths: Local steps of every client in round t.
        work: Data and local work of all clients.
    """
    now, begin = products(weights, work.x), products(initial, work.x)
    first = np.hstack([dense(begin, products(initial, work.of_client(c)[0])) for c in range(work.num_clients)])
    every = [np.hstack([dense(now, path.before[k]) for path in paths]) for k in range(work.local_steps)]
    return [(p, p - first) for p in every]


def narrow_kernel(theorem: DeepLinearTheorem, weights: list[np.ndarray], work: FullBatchWork) -> float:
    """Computes the drift of a narrow network's kernel over the bound of Lemma VII.5: above 1 if it is violated."""
    own: list[np.ndarray] = weights
    for _ in range(NARROW_ROUNDS):
        own = averaged(local_paths(own, work))
    away = kernels(weights, own, local_paths(own, work), work)
    return max(_norm(d) for _, d in away) / theorem.constants.kernel_bound()


def _parts(p: np.ndarray, work: FullBatchWork) -> list[np.ndarray]:
    """Splits the columns of ``p`` by client."""
    outputs = work.y.shape[1]
    return np.split(p, outputs * np.cumsum(np.asarray(work.partition.sizes))[:-1], axis=1)


def _factors(weights: Sequence[np.ndarray], work: FullBatchWork) -> tuple[np.ndarray, np.ndarray]:
    """Returns two matrices A and B for Lemma VII.3; P consists of Kronecker products of this kind."""
    of = products(weights, work.x)
    return of.below[1] @ of.below[1].T, of.below[0] @ of.below[0].T


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the bound of the theorem, the hypotheses and the lemmas."""
    seen = observe(of_scale(scale, *SIZES), seed)
    return [bound_18(seen), *hypotheses(seen), lemma_1(seen), *local_lemmas(seen)]


ENTRIES = (
    TheoremEntry(
        "deep_linear.convergence",
        "FedAvg on a deep linear network decays at the theorem's rate, and what the proof assumes of the run",
        checks,
        papers=("liu_deep_linear",),
        statement="Theorem IV.2, hypotheses A to C and Lemmas VII.1 to VII.7 of DeepLin",
        functions=(deep_linear_theorem,),
        figures=(
            "deep_linear.theorem",
            "deep_linear.fig2",
            "deep_linear.fig3",
            "deep_linear.fig4",
            "deep_linear.regime_map",
        ),
    ),
)
