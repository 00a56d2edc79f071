"""Checks of NTK-DFL (Thompson et al., ICML 2025): rounds as powers of a matrix, consensus, NTK-FL as a special case.

NTK-DFL is decentralised: each client keeps a model, and exchanges weights and Jacobians with its neighbours in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.statistics import relative_distance
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.federated.graph import Graph, complete, metropolis_weights, ring
from fedtangent._src.theory.ntk_fl.neighbours import neighbourhood_round
from fedtangent._src.types import Algorithm

SUBJECT = "NTK-DFL"
CLIENTS = consecutive((2, 3, 4, 2, 3, 4))
EXAMPLES, DIMENSION, OUTPUTS = 18, 30, 2  # more inputs than points: the kernel is positive definite
TIME, ROUNDS = 3, 5


class LinearProblem(NamedTuple):
    """A problem for NTK-DFL: points, targets, each client's initial linear model, and the learning rate ``rate``.

    The first 18 points are the training examples, divided in order among the six clients (``CLIENTS``); any others are
    test points. At this learning rate no step overshoots.
    """

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, "n C"]
    start: Float64[np.ndarray, "N d C"]  # different for every client
    rate: float  # eta, for which no step overshoots

    def matrix(self, graph: Graph, time: int = TIME) -> Float64[np.ndarray, "Nn Nn"]:
        """Returns the matrix by which a round on a regular graph multiplies the residuals of all N models at n points.

        It is [N n, N n], in the order model, point.

        Args:
            graph: The graph of the clients.
            time: Number of steps in a round.
        """
        kernel = self.x @ self.x.T
        return neighbourhood_round(kernel, CLIENTS, metropolis_weights(graph), self.rate / OUTPUTS, time)


def problem_of(seed: int, more: int = 0) -> LinearProblem:
    """Draws a linear regression for the clients ``CLIENTS``, with a different initial model for each client.

    Args:
        seed: Seed of the points, the targets and the initial models.
        more: Number of further points, which belong to no client.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((EXAMPLES + more, DIMENSION)) / np.sqrt(DIMENSION)
    y, start = rng.standard_normal((len(x), OUTPUTS)), rng.standard_normal((len(CLIENTS.sizes), DIMENSION, OUTPUTS))
    # every neighbourhood has 9 examples or more, and no larger eigenvalue than all points together
    return LinearProblem(x, y, start, OUTPUTS * 9 / float(np.linalg.eigvalsh(x @ x.T)[-1]))


def residuals(problem: LinearProblem, graph: Graph, rounds: int, every: int = 1) -> Float64[np.ndarray, "r Nn C"]:
    """Simulates NTK-DFL, and returns the residuals of all models at all points during training.

    Args:
        problem: Points, targets and initial models.
        graph: The graph of the clients.
        rounds: Number of rounds.
        every: Rounds between two records.

    Returns:
        Residuals [r, N n, C] at the start and after every ``every`` rounds, of N models at n points.
    """
    model = ft.models.linear(DIMENSION, OUTPUTS, dtype=jnp.float64)
    algorithm = ft.ntk_dfl(model, ft.schedules.neighbourhoods(graph), problem.rate, evolution=ft.Evolution((TIME,)))
    data = ft.data.federated_data(problem.x[:EXAMPLES], problem.y[:EXAMPLES], CLIENTS, dtype=jnp.float64)
    look = ft.Evaluation(every, lambda of, state: {"members": np.asarray(of.predict(state, problem.x).members)})
    start = {"weights": jnp.asarray(problem.start)}
    run = ft.simulate(algorithm, data, num_rounds=rounds, start=start, evaluation=look)
    members = np.stack([row.metrics["members"] for row in run.history.evaluations])
    return np.asarray(members - problem.y).reshape(len(members), -1, OUTPUTS)


def rounds_verdict(seed: int, rounds: int) -> Verdict:
    """Checks that r rounds of NTK-DFL on a ring multiply all models' residuals by the r-th power of a round's matrix.

    The matrix is ``LinearProblem.matrix``, and r is 1, 2, .., ``rounds``.

    Args:
        seed: Seed of the problem.
        rounds: Number of rounds.
    """
    problem, graph, num = problem_of(seed, more=4), ring(6), len(CLIENTS.sizes)
    paths, right, mixing = residuals(problem, graph, rounds), problem.matrix(graph), metropolis_weights(graph)
    blocks = right.reshape(num, len(problem.x), num, len(problem.x)) / np.maximum(mixing, 0.1)[:, None, :, None]
    unmixed = (blocks * np.eye(num)[:, None, :, None]).reshape(right.shape)
    wrong = {
        "no mixing": unmixed,
        "mixing after the steps": np.kron(mixing, np.eye(len(problem.x))) @ unmixed,
        "complete graph": problem.matrix(complete(num)),
        "one step less": problem.matrix(graph, TIME - 1),
    }

    def error(matrix: np.ndarray) -> float:
        predicted = [np.linalg.matrix_power(matrix, r) @ paths[0] for r in range(1, rounds + 1)]
        return float(max(map(relative_distance, paths[1:], predicted)))

    statement = "residuals of all models = powers of the matrix of a round, every round"
    claim = Claim(SUBJECT, statement, f"ring of 6, linear model, {EXAMPLES} examples and 4 points more, t = {TIME}")
    return claim.exact(error(right), {name: error(matrix) for name, matrix in wrong.items()})


def consensus_verdict(seed: int, rounds: int) -> Verdict:
    """Checks that all models on a ring come to agree with the targets, and so with each other, as fast as theory says.

    After R rounds the norm of all residuals, as functions of the kernel, must be at most rho^(R - 1) times that at the
    start, with the spectral radius rho of a round's matrix.

    Args:
        seed: Seed of the problem.
        rounds: Number of rounds.
    """
    problem, num = problem_of(seed), len(CLIENTS.sizes)
    inverse = np.linalg.inv(problem.x @ problem.x.T)
    ends = residuals(problem, ring(num), rounds, every=rounds).reshape(2, num, EXAMPLES, OUTPUTS)
    first, last = (np.sqrt(np.einsum("inc,nm,imc->", end, inverse, end)) for end in ends)
    right, wrong = (np.abs(np.linalg.eigvals(problem.matrix(graph))).max() for graph in (ring(num), complete(num)))
    statement = "norm of all models' residuals as functions of the kernel / its bound by the spectral radius"
    sizes = f"ring of 6, linear model, {EXAMPLES} examples, t = {TIME}, {rounds} rounds, {last / first:.1e} of it left"
    over, over_wrong = (float(last / first / radius ** (rounds - 1)) for radius in (right, wrong))
    return Claim(SUBJECT, statement, sizes).bounded(over, "complete graph", over_wrong)


def ntk_fl_verdict(seed: int) -> Verdict:
    """Checks that the network of NTK-DFL's mean weights on a complete graph has the outputs of NTK-FL's network."""
    digits = ft.data.load("digits", seed=seed, num_train=60, num_test=20)
    clients = ft.partition.dirichlet(digits.y_train, 5, 0.5, seed=seed, dirichlet_method="per_class")
    model = ft.models.mlp(digits, widths=(32,), dtype=jnp.float64)
    options = {"learning_rate": 1.0, "evolution": ft.Evolution((5, 20, 80))}

    def outputs(algorithm: Algorithm) -> np.ndarray:
        run = ft.simulate(algorithm, digits, clients, num_rounds=3, seed=seed)
        assert algorithm.params is not None
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), algorithm.params(run.state))
        return np.asarray(model.apply(mean, digits.x_test))

    central = outputs(ft.ntk_fl(model, ft.schedules.all_clients(5), **options))
    around = (ft.ntk_dfl(model, ft.schedules.neighbourhoods(graph), **options) for graph in (complete(5), ring(5)))
    right, wrong = (relative_distance(outputs(algorithm), central) for algorithm in around)
    claim = Claim(
        SUBJECT, "network of the mean weights on a complete graph = NTK-FL's", "digits, width 32, 5 clients, 3 rounds"
    )
    return claim.exact(right, {"ring": wrong})


def _check(scale: str, seed: int) -> list[Verdict]:
    rounds = of_scale(scale, ROUNDS, 4 * ROUNDS)
    return [rounds_verdict(seed, rounds), consensus_verdict(seed, 40 * rounds), ntk_fl_verdict(seed)]


ENTRIES = (
    TheoremEntry(
        "ntk_dfl.rounds",
        "every round of clients that evolve kernels with their neighbours, their consensus, and NTK-FL as a case",
        _check,
        papers=("thompson2025",),
        statement="algorithm 1 of NTK-DFL, for linear models",
        functions=(neighbourhood_round,),
        is_quick=True,
    ),
)
