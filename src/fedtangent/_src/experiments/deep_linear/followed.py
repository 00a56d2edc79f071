"""Training of a deep linear network by FedAvg, with theory's flows and the quantities in the proof of DeepLin."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.theorems.deep_linear import Size, run_of
from fedtangent._src.theory.checks import Assumption
from fedtangent._src.theory.deep_linear import gram
from fedtangent._src.theory.deep_linear.theorem import linear_model

FLOWS = {  # the exact flows beside a network; the last three are wrong theories
    "own": "flow of P(0)",
    "infinite": "flow of the limit",
    "one_step": "K forgotten",
    "summed": "N forgotten",
    "lambda_max": "lambda_max everywhere",
}
DRAWS = 1000  # networks of one seed, at most
CONTROL = "1 - 2 eta K lambda_min: N forgotten"  # the name of a wrong bound


class Look(NamedTuple):
    """The hypotheses and terms in the proof of DeepLin's Theorem IV.2, measured after one round.

    W^i is the weight matrix of layer i, eta the learning rate, lambda_min the least eigenvalue of the initial kernel; N
    clients take K local steps a round.

    Attributes:
        hypotheses: The hypotheses of the proof, each with measured and required value.
        terms: Norms of the four terms whose sum is the residual after the next round (eq. (17) of DeepLin), over the
            norm of the present residual, in units of ``eta K lambda_min / N``. For the term "first", the residual of a
            linear model, it is 1 minus this ratio of norms.
        moved: Norm of the change since the start of the products ``W^{i+1}' W^{i+1}`` and ``W^i W^i'`` of all layers,
            over the products' initial norm.
        unbalanced: Norm of the change since the start of the difference of these two products, over their initial norm.
    """

    round: int
    hypotheses: tuple[Assumption, ...]
    terms: dict[str, float]
    moved: float  # motion of both sides of the layers' balance, over their norm at the start
    unbalanced: float


class FollowedNetwork(NamedTuple):
    """A trained deep linear network, with the constants of DeepLin's Theorem IV.2 and theory's flows for it.

    Residuals [n C] are coordinates in the eigenbasis of the initial kernel P(0), least eigenvalue first, divided by the
    norm of the initial residual.

    Attributes:
        draw: Number of the network among the networks of its seed and width.
        eigenvalues: Eigenvalues of P(0), [n C].
        modes: Residuals of the network after every round, [R + 1, n C].
        flows: Residuals that two right and three wrong theories predict, [R + 1, n C] each, by the keys of FLOWS, such
            as "own" for the flow of P(0).
        looks: Quantities of the proof after selected rounds; only for draw 0.
    """

    seed: int
    draw: int
    width: int
    theorem: ft.theory.DeepLinearTheorem
    eigenvalues: np.ndarray
    modes: np.ndarray
    flows: dict[str, np.ndarray]
    looks: tuple[Look, ...]

    @property
    def loss(self) -> np.ndarray:
        """Squared norm of the residual after every round, over its initial value, [R + 1]."""
        return np.asarray(np.sum(self.modes**2, axis=1))

    def error(self, name: str) -> float:
        """Computes the largest distance over all rounds between the network's residuals and ``flows[name]``."""
        return float(np.linalg.norm(self.flows[name] - self.modes, axis=1).max())

    @property
    def unit(self) -> float:
        """Relative decrease of the slowest mode in a round of K steps, to first order: ``eta K lambda_min / N``.

        eta is the learning rate, N the number of clients, lambda_min the least eigenvalue of the initial kernel P(0).
        """
        return 2 * (1 - self.theorem.constants.rate())

    def bounds(self) -> dict[str, np.ndarray]:
        """Returns three bounds on the relative loss after every round, [R + 1] each, by name.

        They are bound (18) of DeepLin, the tighter bound in its proof, and a wrong bound as control.
        """
        rounds = np.arange(len(self.modes))
        c = self.theorem.constants
        wrong = max(1 - 2 * c.num_clients * self.unit, 0.0)
        return {"(18)": c.rate() ** rounds, "its proof": c.rate() ** (2.0 * rounds), CONTROL: wrong**rounds}


def follow(
    size: Size, work: ft.theory.FullBatchWork, which: tuple[int, int], looks: int, delta: float
) -> FollowedNetwork:
    """Trains one deep linear network by FedAvg, and computes the flows that theories predict for it.

    Args:
        size: Sizes of the run.
        work: The clients' examples, learning rate and local steps.
        which: The pair (seed, draw); the draw numbers the networks of a seed.
        looks: About how many times in the run the quantities of the proof are computed; only for draw 0.
        delta: Probability with which the theorem may fail.
    """
    (seed, draw), rounds = which, size.rounds
    run = run_of(size, work.x, work.y, work.learning_rate, DRAWS * seed + draw, max(rounds // looks, 1))
    theorem, outputs = ft.theory.deep_linear_theorem(run.weights[0], work, delta), work.x @ run.models
    quantities = [
        _looked(theorem, work, weights, t)
        for t, weights in run.weights.items()
        if t > 0 and draw == 0 and all(np.isfinite(w).all() for w in weights)
    ]
    start = np.linalg.norm(outputs[0] - work.y)
    kernel = gram.dense(gram.products(theorem.initial, work.x))
    values, vectors = np.linalg.eigh(kernel)

    def modes(after: np.ndarray) -> np.ndarray:
        return np.asarray((after - work.y).reshape(len(after), -1) @ vectors / start)

    limit = work.x @ theorem.linear.models(rounds, linear_model(theorem.initial))
    flow = kernel_flow(work, outputs[0], rounds)
    k, eta = work.local_steps, work.learning_rate
    flows = {
        "own": flow(kernel, k, eta),
        "infinite": limit,
        "one_step": flow(kernel, 1, eta),
        "summed": flow(kernel, k, eta * work.num_clients),
        "lambda_max": flow(values[-1] * np.eye(len(kernel)), k, eta),
    }
    of_flows = {name: modes(after) for name, after in flows.items()}
    return FollowedNetwork(seed, draw, size.width, theorem, values, modes(outputs), of_flows, tuple(quantities))


def check_width(name: str, width: int, outputs: int, dimension: int) -> None:
    """Raises ``ValueError`` if a width is below both C and d.

    The network's initial tangent kernel P(0) is then singular, and bound (18) of DeepLin does not fall.

    Args:
        name: Name of the setting in the message.
        width: Width of the network.
        outputs: Number C of outputs.
        dimension: Dimension d of the inputs.
    """
    if width < (least := min(outputs, dimension)):
        raise ValueError(f"{name}: got {width}, must be at least {least}, else the initial kernel is singular")


def kernel_flow(
    work: ft.theory.FullBatchWork, start: np.ndarray, rounds: int
) -> Callable[[np.ndarray, int, float], np.ndarray]:
    """Returns a function that computes the exact flow of full-batch FedAvg for a kernel.

    The function takes a kernel [n C, n C], the number of local steps and the learning rate. It returns the outputs at
    the training examples after every round, [R + 1, n, C].

    Args:
        work: The clients' examples.
        start: Outputs before the first round, [n, C].
        rounds: Number R of rounds.
    """
    plan = ft.schedules.drawn_cohorts(ft.schedules.all_clients(work.num_clients), None, rounds, weighting=None)

    def flow(kernel: np.ndarray, steps: int, rate: float) -> np.ndarray:
        blocks = ft.kernels.KernelBlocks(kernel, kernel[: start.shape[1]])
        rule = ft.theory.Rule(steps, rate, loss="squared_error_sum")
        process = ft.theory.federated_flow(blocks, work.y, work.partition, plan, rule, outputs="full")
        return np.asarray(process.predict_train(start, list(range(rounds + 1)), 0))

    return flow


def _looked(
    theorem: ft.theory.DeepLinearTheorem, work: ft.theory.FullBatchWork, weights: list[np.ndarray], t: int
) -> Look:
    """Computes the hypotheses and terms in the proof of DeepLin's Theorem IV.2 at ``weights`` after round t."""
    residual = float(np.linalg.norm(work.x @ linear_model(weights) - work.y))
    terms = ft.theory.residual_terms(theorem.initial, weights, work)
    norms = {name: float(np.linalg.norm(term)) / residual for name, term in terms._asdict().items()}
    norms["first"] = 1 - norms["first"]
    unit = 2 * (1 - theorem.constants.rate())
    hypotheses = theorem.hypotheses(weights, (residual / theorem.constants.residual) ** 2, t)
    units = {name: norm / unit for name, norm in norms.items()}
    return Look(t, hypotheses, units, *_balance(theorem.initial, weights))


def _balance(initial: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> tuple[float, float]:
    """Computes how far the products ``W^{i+1}' W^{i+1}`` and ``W^i W^i'`` have changed since the start.

    W^i is the matrix of layer i. Returns the norm of both changes and the norm of their difference, over all layers and
    relative to the products' initial norm.
    """
    # The difference of the two changes is the change of ``theory.balancedness``.
    size = moved = apart = 0.0
    for (below0, above0), (below, above) in zip(itertools.pairwise(initial), itertools.pairwise(weights), strict=True):
        sides0, sides = ((w.T @ w, v @ v.T) for v, w in ((below0, above0), (below, above)))
        up, down = sides[0] - sides0[0], sides[1] - sides0[1]
        size += float(sum(np.sum(side**2) for side in sides0))
        moved += float(np.sum(up**2) + np.sum(down**2))
        apart += float(np.sum((up - down) ** 2))
    return float(np.sqrt(moved / size)), float(np.sqrt(apart / size))
