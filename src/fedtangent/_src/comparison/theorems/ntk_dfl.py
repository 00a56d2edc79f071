"""NTK-DFL (Thompson et al., ICML 2025): its rounds as powers of a matrix, consensus, and NTK-FL on a complete graph.

Clients on a graph train a model that is linear in its weights. After every round the functions of all clients must be
the matrix's, to rounding, and in the long run approach the targets, and each other, at the rate of its spectral radius.
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
from fedtangent._src.federated.graph import Graph, complete, metropolis_weights, ring, torus
from fedtangent._src.theory.ntk_fl.neighbours import neighbourhood_round
from fedtangent._src.types import Algorithm, Array, PyTree

SUBJECT = "NTK-DFL"
CLIENTS = consecutive((2, 3, 4, 2, 3, 4))
EXAMPLES, NEW, DIMENSION, OUTPUTS = 18, 4, 30, 2  # more inputs than points: the kernel is positive definite
TIME, ROUNDS = 3, 5
LATE = 30, 60  # rounds between which the rate is measured
MARGIN = 0.02


class Problem(NamedTuple):
    """Points, of which the first are the clients' examples, and a different start of every client's model."""

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, "n C"]
    start: Float64[np.ndarray, "N d C"]
    rate: float  # eta, with which no step on any neighbourhood overshoots

    def round(self, graph: Graph, time: int = TIME) -> Float64[np.ndarray, "Nn Nn"]:
        """Returns the matrix of a round on a graph.

        Args:
            graph: Graph of the clients.
            time: Number of steps.
        """
        mixing = metropolis_weights(graph)
        return neighbourhood_round(self.x @ self.x.T, CLIENTS, mixing, self.rate / OUTPUTS, time)


def problem_of(seed: int, new: int = NEW) -> Problem:
    """Draws a problem.

    Args:
        seed: Seed of points, targets and start.
        new: Number of points that no client holds.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((EXAMPLES + new, DIMENSION)) / np.sqrt(DIMENSION)
    y, start = rng.standard_normal((len(x), OUTPUTS)), rng.standard_normal((len(CLIENTS.sizes), DIMENSION, OUTPUTS))
    # every neighbourhood has 9 examples or more, and no larger eigenvalue than all points together
    return Problem(x, y, start, OUTPUTS * 9 / float(np.linalg.eigvalsh(x @ x.T)[-1]))


def residuals(problem: Problem, graph: Graph, rounds: int) -> Float64[np.ndarray, "r Nn C"]:
    """Simulates NTK-DFL, and returns the residuals of all models at all points at the start and after every round.

    Args:
        problem: The problem.
        graph: Graph of the clients.
        rounds: Number of rounds.
    """
    model = ft.models.linear(DIMENSION, OUTPUTS, dtype=jnp.float64)
    algorithm = ft.ntk_dfl(model, ft.schedules.neighbourhoods(graph), problem.rate, evolution=ft.Evolution((TIME,)))
    federated = ft.data.federated_data(problem.x[:EXAMPLES], problem.y[:EXAMPLES], CLIENTS, dtype=jnp.float64)
    evaluation = ft.Evaluation(1, lambda of, state: {"members": np.asarray(of.predict(state, problem.x).members)})
    start = {"weights": jnp.asarray(problem.start)}
    run = ft.simulate(algorithm, federated, num_rounds=rounds, start=start, evaluation=evaluation)
    members = np.stack([row.metrics["members"] for row in run.history.evaluations])
    return np.asarray(members - problem.y).reshape(rounds + 1, -1, OUTPUTS)


def rounds_verdict(seed: int, graph: Graph, rounds: int) -> Verdict:
    """Checks that all models are the matrix's powers after every round.

    Args:
        seed: Seed of the problem.
        graph: Graph of the clients.
        rounds: Number of rounds.
    """
    problem = problem_of(seed)
    paths, right = residuals(problem, graph, rounds), problem.round(graph)
    num, points = len(CLIENTS.sizes), len(problem.x)
    own = right.reshape(num, points, num, points) * np.eye(num)[:, None, :, None]
    unmixed = (own / metropolis_weights(graph).diagonal()[:, None, None, None]).reshape(right.shape)
    mixed_last = np.kron(metropolis_weights(graph), np.eye(points)) @ unmixed
    wrong = {
        "no mixing": unmixed,
        "mixing after the steps": mixed_last,
        "complete graph": problem.round(complete(num)),
        "one step less": problem.round(graph, TIME - 1),
    }

    def error(matrix: np.ndarray) -> float:
        predicted = [np.linalg.matrix_power(matrix, r) @ paths[0] for r in range(1, rounds + 1)]
        return float(max(map(relative_distance, paths[1:], predicted)))

    statement = "residuals of all models = powers of the matrix of a round, every round"
    sizes = f"{graph.name}, linear model, {EXAMPLES} examples and {NEW} more points, t = {TIME}"
    return Claim(SUBJECT, statement, sizes).exact(error(right), {name: error(matrix) for name, matrix in wrong.items()})


def consensus_verdict(seed: int, graph: Graph) -> Verdict:
    """Checks how fast all models approach the targets, and so each other.

    Args:
        seed: Seed of the problem.
        graph: Graph of the clients.
    """
    problem = problem_of(seed, new=0)
    lengths = np.linalg.norm(residuals(problem, graph, LATE[1]), axis=(1, 2))
    measured = np.log(lengths[LATE[1]] / lengths[LATE[0]]) / (LATE[1] - LATE[0])
    right, wrong = (np.log(np.abs(np.linalg.eigvals(problem.round(g))).max()) for g in (graph, complete(graph.num_nodes)))
    statement = "decay of the distance of all models from the targets / log of the spectral radius"
    claim = Claim(SUBJECT, statement, f"{graph.name}, rounds {LATE[0]} to {LATE[1]}, {lengths[-1] / lengths[0]:.1e} left")
    control = "complete graph", float(measured / wrong)
    return claim.near(float(measured / right), control, MARGIN, f"{MARGIN:.0%} of the rate")


def _digits_run(algorithm: Algorithm, data: ft.types.FederatedData, x: np.ndarray) -> np.ndarray:
    """Returns the outputs of the network of the models' mean weights after the last round, [n, C]."""
    run = ft.simulate(algorithm, data, num_rounds=3, start=jax.random.key(1))
    read = algorithm.params
    assert read is not None
    mean: PyTree = jax.tree.map(lambda leaf: leaf.mean(axis=0), read(run.state))
    outputs: Array = algorithm.model.apply(mean, x)
    return np.asarray(outputs)


def ntk_fl_verdict(seed: int) -> Verdict:
    """Checks that the mean of the models on a complete graph is the network that NTK-FL trains.

    Args:
        seed: Seed of examples and clients.
    """
    digits = ft.data.load("digits", seed=seed, num_train=60, num_test=20)
    clients = ft.partition.dirichlet(digits.y_train, 5, 0.5, seed=seed, dirichlet_method="per_class")
    y = ft.data.classification_targets(digits.y_train, 10)
    data = ft.data.federated_data(digits.x_train, y, clients, dtype=jnp.float64)
    model, evolution = ft.models.mlp(digits, (32,), dtype=jnp.float64), ft.Evolution((5, 20, 80))
    graphs = complete(5), ring(5)
    outputs = [
        _digits_run(ft.ntk_dfl(model, ft.schedules.neighbourhoods(graph), 1.0, evolution=evolution), data, digits.x_test)
        for graph in graphs
    ]
    central = _digits_run(ft.ntk_fl(model, ft.schedules.all_clients(5), 1.0, evolution=evolution), data, digits.x_test)
    errors = [relative_distance(found, central) for found in outputs]
    statement = "network of the mean weights on a complete graph = NTK-FL's, after 3 rounds"
    return Claim(SUBJECT, statement, "digits, dense network of width 32, 5 clients").exact(errors[0], {"ring": errors[1]})


def _check(scale: str, seed: int) -> list[Verdict]:
    rounds = of_scale(scale, ROUNDS, 4 * ROUNDS)
    graphs = ring(6), torus(2, 3)
    exact = [rounds_verdict(seed, graph, rounds) for graph in graphs]
    return [*exact, consensus_verdict(seed, graphs[0]), ntk_fl_verdict(seed)]


ENTRIES = (
    TheoremEntry(
        "ntk_dfl.rounds",
        "every round of clients that evolve kernels with their neighbours, their consensus, and NTK-FL as a special case",
        _check,
        papers=("thompson2025",),
        statement="algorithm 1 of NTK-DFL, for linear models",
        functions=(neighbourhood_round,),
    ),
)
