"""Checks the coverage of federated conformal prediction (Lu et al., ICML 2023) on many splits of the clients' examples.

Fed-ensemble trains once. Then every client's further examples are split again and again into calibration and test. The
mean coverage of the splits, with its interval, must be within the theorem's bounds. Clients differ: in the noise of
their targets (regression), or in their classes (digits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Num

import fedtangent as ft
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.intervals import Interval, half_width
from fedtangent._src.measures.conformal import conformal_predictor
from fedtangent._src.theory.conformal import conformal_coverage
from fedtangent._src.types import Model, Partition

SUBJECT = "conformal coverage"
ALPHA, SPLITS, MODELS = 0.1, 400, 3
CALIBRATION = (33, 31, 23)  # examples of each client: few, so that a wrong correction for finite samples is detected
TEST = 100  # examples of each client
NOISE = (0.1, 0.2, 0.8)  # standard deviations of the clients' targets
WEIGHTS = (0.05, 0.05, 0.9)  # of a mixture that is mostly of the noisiest client
RATES, ROUNDS = {"squared_error": 0.1, "cross_entropy": 5.0}, 30  # of training
QUIET = 0.2  # control: the noise of calibration examples, relative to that of test examples


class Pool(NamedTuple):
    """Outputs of the models at examples of all clients on which no model was trained.

    ``members`` are the outputs of the K models; ``targets`` are numbers [n, C] or class labels [n].
    """

    members: Float[np.ndarray, "K n C"]
    targets: Num[np.ndarray, "n *C"]
    clients: Partition

    def rows(self, which: np.ndarray) -> tuple[Float[np.ndarray, "K m C"], Num[np.ndarray, "m *C"]]:
        """Returns outputs and targets of the m examples with the indices ``which``."""
        return self.members[:, which], self.targets[which]


class Question(NamedTuple):
    """A way to calibrate prediction sets, whose coverage is measured.

    Attributes:
        score: Name of the conformal score: "residual", "normalised", "probability" or "adaptive".
        calibration_weights, test_weights: Weight of each client in calibration and in the tested mixture of clients;
            None: the client's number of calibration examples plus 1.
        calibration_targets: Targets of the calibration; None: the targets of the pool.
    """

    score: str
    calibration_weights: Sequence[float] | None = None
    test_weights: Sequence[float] | None = None
    calibration_targets: Num[np.ndarray, "n *C"] | None = None


def coverages(pool: Pool, question: Question, splits: int, seed: int) -> Float64[np.ndarray, "splits"]:
    """Measures how often prediction sets contain the target, on random splits into calibration and test examples.

    Args:
        pool: Examples of all clients.
        question: Score, weights, and targets of the calibration.
        splits: Number of splits.
        seed: Seed of the splits.

    Returns:
        The coverage in each split: the share of a client's test examples whose set contains the target, averaged over
        clients with the question's test weights.
    """
    rng, shares = np.random.default_rng(seed), []
    calibrated = pool if question.calibration_targets is None else pool._replace(targets=question.calibration_targets)
    mixture = np.add(CALIBRATION, 1) if question.test_weights is None else question.test_weights
    for _ in range(splits):
        shuffled = [rng.permutation(pool.clients.client(k)) for k in range(len(CALIBRATION))]
        calibration = np.concatenate([rows[:n] for rows, n in zip(shuffled, CALIBRATION, strict=True)])
        test = np.concatenate([rows[n : n + TEST] for rows, n in zip(shuffled, CALIBRATION, strict=True)])
        predictor = conformal_predictor(
            *calibrated.rows(calibration),
            consecutive(CALIBRATION),
            ALPHA,
            score=question.score,
            weights=question.calibration_weights,
        )
        covered = predictor.covers(*pool.rows(test)).reshape(len(CALIBRATION), TEST)
        shares.append(float(covered.mean(axis=1) @ mixture / np.sum(mixture)))
    return np.array(shares)


def _trained(
    model: Model, loss: str, examples: tuple[np.ndarray, np.ndarray, Partition], points: np.ndarray, seed: int
) -> Float[np.ndarray, "K n C"]:
    """Trains an ensemble of three models by Fed-ensemble, and returns the outputs of its models at ``points``.

    ``examples`` are the inputs, the targets and the partition; ``loss`` is "squared_error" or "cross_entropy".
    """
    x, y, clients = examples
    schedule, work = ft.schedules.per_client_permutations(clients.num_clients, MODELS), ft.Work(5, batch_size=None)
    algorithm = ft.fed_ensemble(model, schedule, client_learning_rate=RATES[loss], work=work, loss=loss)
    run = ft.simulate(algorithm, (x, y), clients, num_rounds=ROUNDS, seed=seed)
    return np.asarray(algorithm.predict(run.state, points).members)


def sine_pool(seed: int) -> tuple[Pool, Float64[np.ndarray, "n 1"]]:
    """Trains an ensemble on noisy sine data, and returns its outputs at new examples of every client.

    Args:
        seed: Seed of data and training.

    Returns:
        The pool (outputs, targets and clients of the new examples), and the random noise [n, 1] in its targets.
    """
    rng, num_clients = np.random.default_rng(seed), len(NOISE)

    def draw(per_client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Partition]:
        x = rng.uniform(-1, 1, (num_clients * per_client, 1))
        noise = np.repeat(NOISE, per_client)[:, None] * rng.standard_normal(x.shape)
        return x, np.sin(np.pi * x), noise, consecutive([per_client] * num_clients)

    x, signal, noise, clients = draw(20)
    model = ft.models.mlp(input_size=1, output_size=1, widths=(64,))
    examples = x, signal + noise, clients
    x, signal, noise, clients = draw(10 * (max(CALIBRATION) + TEST))
    return Pool(_trained(model, "squared_error", examples, x, seed), signal + noise, clients), noise


def digits_pool(seed: int) -> Pool:
    """Trains an ensemble on digits of clients with different classes, and returns a pool of their other examples.

    Args:
        seed: Seed of data and training.
    """
    digits, rng = ft.data.load("digits"), np.random.default_rng(seed)
    x, y = np.concatenate([digits.x_train, digits.x_test]), np.concatenate([digits.y_train, digits.y_test])
    clients = [rng.permutation(np.flatnonzero(np.isin(y, classes))) for classes in ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))]
    train = np.concatenate([client[:60] for client in clients])
    model = ft.models.mlp(input_size=x[0].size, output_size=10, widths=(64,))
    examples = x[train], y[train], consecutive([60] * len(clients))
    rest = [client[60:] for client in clients]
    rows = np.concatenate(rest)
    outputs = _trained(model, "cross_entropy", examples, x[rows], seed)
    return Pool(outputs, y[rows], consecutive(list(map(len, rest))))


def verdict(
    pool: Pool, statement: str, right: Question, control: tuple[str, Question], splits: int, seed: int
) -> Verdict:
    """Checks that the mean coverage of the splits is within the theorem's bounds, and the control's coverage is not.

    Args:
        pool: Examples of all clients.
        statement: Name of the comparison.
        right: Score and weights, to which the theorem applies.
        control: Name of a mistake, and the score and weights with it.
        splits: Number of splits.
        seed: Seed of the splits.
    """
    low, high = conformal_coverage(CALIBRATION, ALPHA, right.calibration_weights)
    measured = (coverages(pool, question, splits, seed) for question in (right, control[1]))
    estimate, wrong = (Interval.about(float(np.mean(shares)), float(half_width(shares))) for shares in measured)
    sizes = f"n_k = {', '.join(map(str, CALIBRATION))}, {splits} splits"
    expected, notices = f"{low:.3f} to {high:.3f}", f"{estimate.length / 2 + high - low:.3f}"
    claim = Claim(SUBJECT, statement, sizes)
    return claim.between(estimate, (control[0], wrong), (low, high), expected, notices)


def _check(scale: str, seed: int) -> list[Verdict]:
    splits = of_scale(scale, SPLITS, 10 * SPLITS)
    sine, noise = sine_pool(seed)
    quiet = sine.targets - (1 - QUIET) * noise
    digits = digits_pool(seed)
    shuffled = np.random.default_rng(seed).permutation(digits.targets)
    calm, blind = "calibration targets with a fifth of the noise", "weights ignored by the quantile"
    every = "mean coverage, mixture of all clients: "
    rows: list[tuple[Pool, str, Question, tuple[str, Question]]] = []
    for score in ("residual", "normalised"):
        rows.append((sine, f"{every}{score}", Question(score), (calm, Question(score, calibration_targets=quiet))))
    weighted, unweighted = Question("residual", WEIGHTS, WEIGHTS), Question("residual", None, WEIGHTS)
    rows.append((sine, "mean coverage, clients of given weights: residual", weighted, (blind, unweighted)))
    for score in ("probability", "adaptive"):
        wrong = "calibration labels shuffled", Question(score, calibration_targets=shuffled)
        rows.append((digits, f"{every}{score}, digits", Question(score), wrong))
    return [verdict(*row, splits, seed) for row in rows]


ENTRIES = (
    TheoremEntry(
        "conformal.coverage",
        "the coverage of federated conformal sets over splits into calibration and test",
        _check,
        papers=("lu2023",),
        statement="coverage under partial exchangeability",
        functions=(conformal_coverage,),
        is_quick=True,
    ),
)
