"""Runs on the two-layer ReLU network of eq. (12): NTK-FL, FedAvg, and descent on a network and its linearisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int

import fedtangent as ft
from fedtangent._src.checks import choice
from fedtangent._src.engine.run import predict
from fedtangent._src.theory.ntk_fl import lemmas
from fedtangent._src.types import Algorithm, AnyArray, Array, ArrayLike, FederatedData, Key, Model, Partition, PyTree

DIMENSION = 10


class TwoLayerProblem(NamedTuple):
    """N examples on M clients."""

    x: Float64[np.ndarray, "n d"]  # of norm 1
    y: Float64[np.ndarray, "n"]
    partition: Partition

    def federated(self) -> FederatedData:
        """Returns the data on the device, float64."""
        return ft.data.federated_data(self.x, self.y[:, None], self.partition, dtype=jnp.float64)


class Start(NamedTuple):
    """Network of one width at the start of every run."""

    model: Model
    key: Key  # that the weights are drawn from: the same for every method
    params: PyTree
    kernel: Float64[np.ndarray, "n n"]  # empirical
    residual: Float64[np.ndarray, "n"]


def initial(model: Model, run_key: Key) -> PyTree:
    """Draws the initial weights of a run of one model that gets ``run_key`` as its ``start``."""
    return model.init(jax.random.split(run_key, 1)[0])


def ntk_fl_run(
    task: TwoLayerProblem, start: Start, learning_rate: float, evolution: ft.Evolution, num_rounds: int
) -> ft.types.History:
    """Simulates NTK-FL with every client in every round. Needs 64-bit types.

    Args:
        task: The examples and clients.
        start: The network at its start.
        learning_rate: Step eta.
        evolution: Candidate times of a round, and how the server evolves the kernel.
        num_rounds: Number of rounds.

    Returns:
        The history; its evaluations have the weights ``params`` at the start and after every round.
    """
    schedule = ft.schedules.all_clients(task.partition.num_clients)
    algorithm = ft.ntk_fl(start.model, schedule, learning_rate=learning_rate, evolution=evolution)
    read = algorithm.params
    assert read is not None  # NTK-FL has global models

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(lambda leaf: np.asarray(leaf)[0], read(state))}

    evaluation = ft.Evaluation(1, look)
    return ft.simulate(
        algorithm, task.federated(), num_rounds=num_rounds, start=start.key, evaluation=evaluation
    ).history


class AveragedRun(NamedTuple):
    """A run of FedAvg at E evaluated rounds."""

    rounds: Int[np.ndarray, "E"]
    squared: Float64[np.ndarray, "E"]  # squared residuals
    uplink_bytes: int


def fed_avg_run(
    task: TwoLayerProblem, start: Start, learning_rate: float, local_steps: int, num_rounds: int, every: int
) -> AveragedRun:
    """Simulates FedAvg with every client in every round and the step eta of (58). Needs 64-bit types.

    The recipe divides by a client's N_m = N / M examples where (58) divides by N: its step is ``eta / M``.

    Args:
        task: The examples, and clients of equal size.
        start: The network at its start.
        learning_rate: Step eta.
        local_steps: Local steps in a round.
        num_rounds: Number of rounds.
        every: Rounds between two evaluations.
    """
    clients, x = task.partition.num_clients, jnp.asarray(task.x)
    schedule, work = ft.schedules.all_clients(clients), ft.Work(steps=local_steps, batch_size=None)
    algorithm = ft.fed_avg(start.model, schedule, client_learning_rate=learning_rate / clients, work=work)
    outputs = jax.jit(lambda state: predict(algorithm, state, x).mean[:, 0])

    def look(_: Algorithm, state: PyTree) -> dict[str, float]:
        return {"squared": float(np.sum((np.asarray(outputs(state)) - task.y) ** 2))}

    run = partial(ft.simulate, algorithm, task.federated(), num_rounds=num_rounds)
    evaluations = run(start=start.key, evaluation=ft.Evaluation(every, look)).history.evaluations
    squared = np.array([e.metrics["squared"] for e in evaluations])
    return AveragedRun(np.array([e.round for e in evaluations]), squared, evaluations[-1].uplink_bytes)


class Sphere(NamedTuple):
    """Random inputs of norm 1 with random signs as targets, and a network before training."""

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, "n"]
    model: Model
    params: PyTree  # initial weights of a run from ``jax.random.key(seed)``
    step: float  # n / lambda_max of the empirical kernel, which is half of the largest stable step


def sphere(seed: int, width: int, size: int, extra: int = 0) -> Sphere:
    """Draws a problem on the sphere.

    Args:
        seed: Seed of data and network.
        width: Number of neurons.
        size: Number of examples, for which the step is half of the largest stable one.
        extra: Number of further points that follow the examples in ``x`` and ``y``.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size + extra, DIMENSION))
    model = ft.models.two_layer_relu(DIMENSION, width, seed=seed, dtype=jnp.float64)
    params = initial(model, jax.random.key(seed))
    x, y = x / np.linalg.norm(x, axis=1, keepdims=True), rng.choice(np.array([-1.0, 1.0]), size + extra)
    step = size / float(np.linalg.eigvalsh(lemmas.empirical_kernel(x[:size], params["v"]))[-1])
    return Sphere(x, y, model, params, step)


Watch = Callable[[PyTree, PyTree], dict[str, Array]]


class Descents(NamedTuple):
    """Gradient descent on a network and on its linearisation after 0, 1, .. T steps; residuals are sums of squares."""

    network: Float[AnyArray, "T"]  # squared residual of the network under gradient descent
    tangent: Float[AnyArray, "T"]  # that of the network at the linearisation's weights, which are NTK-FL's
    linear: Float[AnyArray, "T"]  # that of the linearised network itself
    largest: Float[AnyArray, "T"]  # largest |f - y| of the network under gradient descent: Lemma 2's gamma
    apart: Float[AnyArray, "T"]  # sum over outputs of |sum_{u<t} (f_u - linear f_u)|, for ``residual_part``
    gap: Float[AnyArray, "T"]  # l1 distance of the two weights
    watched: Mapping[str, AnyArray]  # values returned by ``watch``, [T, ..]


def _nothing(start: PyTree, weights: PyTree) -> dict[str, Array]:
    return {}


def descents(
    model: Model,
    params: PyTree,
    x: ArrayLike,
    y: ArrayLike,
    learning_rate: float,
    steps: int,
    kernel: str = "exact",
    watch: Watch = _nothing,
) -> Descents:
    """Computes both descents on ``1/(2 N C) sum |f - y|^2`` from the same weights, in the parameters' dtype.

    Args:
        model: The network.
        params: Initial weights.
        x: Inputs, [N, ...].
        y: Targets, [N, C].
        learning_rate: Step size.
        steps: Number of steps.
        kernel: ``"exact"`` descends on the linearised network; ``"averaged"`` lets every output's residual follow the
            paper's ``H = 1/C sum_k Theta_kk`` (9b, 10).
        watch: Function of the initial and the present weights that returns numbers by name, called after every step.
    """
    choice("kernel", kernel, ("exact", "averaged"))
    examples = jnp.asarray(x), jnp.asarray(y)
    paths: Descents = jax.device_get(_descents(model, params, *examples, learning_rate, int(steps), kernel, watch))
    return paths


@partial(jax.jit, static_argnames=("model", "steps", "kernel", "watch"))
def _descents(
    model: Model,
    params: PyTree,
    x: Float[Array, "n d"],
    y: Float[Array, "n *C"],
    learning_rate: float | Float[Array, ""],
    steps: int,
    kernel: str,
    watch: Watch,
) -> Descents:
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    transpose = jax.linear_transpose(push, params)
    matrix = ft.kernels.empirical_ntk(model, params, x) if kernel == "averaged" else None
    step = learning_rate / y.size

    def minus(weights: PyTree, gradient: PyTree) -> PyTree:
        return jax.tree.map(lambda w, g: w - step * g, weights, gradient)

    def look(state: tuple[PyTree, PyTree, Array, Array]) -> tuple[Array, Callable[[Array], PyTree], Descents]:
        weights, change, residual, total = state
        out, pull = jax.vjp(lambda p: model.apply(p, x), weights)
        real = out - y
        at_tangent = model.apply(jax.tree.map(jnp.add, params, change), x) - y
        distances = jax.tree.map(lambda w, p, c: jnp.sum(jnp.abs(w - (p + c))), weights, params, change)
        measured = Descents(
            network=jnp.sum(real**2),
            tangent=jnp.sum(at_tangent**2),
            linear=jnp.sum(residual**2),
            largest=jnp.max(jnp.abs(real)),
            apart=jnp.sum(jnp.abs(total)),
            gap=jax.tree.reduce(jnp.add, distances),
            watched=watch(params, weights),
        )
        return real, pull, measured

    def one(state: tuple[PyTree, PyTree, Array, Array], _: None) -> tuple[PyTree, Descents]:
        real, pull, measured = look(state)
        weights, change, residual, total = state
        moved = minus(change, transpose(residual)[0])
        evolved = outputs - y + push(moved) if matrix is None else residual - step * (matrix @ residual)
        return (minus(weights, pull(real)[0]), moved, evolved, total + real - residual), measured

    start = (params, jax.tree.map(jnp.zeros_like, params), outputs - y, jnp.zeros_like(y))
    last, path = jax.lax.scan(one, start, None, length=steps)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]), path, look(last)[2])


def movement(start: PyTree, weights: PyTree) -> dict[str, Array]:
    """Computes R, the largest distance that a neuron has moved.

    Args:
        start: Weights at the start.
        weights: Weights after some steps.
    """
    return {"moved": jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))}


class GapBounds(NamedTuple):
    """Both descents of a network of eq. (12), and bounds of their weights' l1 distance, [T + 1] each."""

    paths: Descents
    radius: float  # R, measured
    lemma: Float64[np.ndarray, "T"]  # Lemma 2
    counted: Float64[np.ndarray, "T"]  # (25d), with the neurons that did switch
    left_out: Float64[np.ndarray, "T"]  # the term that (25a) leaves out


def gap_bounds(
    model: Model,
    params: PyTree,
    x: Float64[np.ndarray, "n d"],
    y: Float64[np.ndarray, "n 1"],
    learning_rate: float,
    steps: int,
    delta: float = 0.05,
) -> GapBounds:
    """Computes both descents on a network of eq. (12), and Lemma 2's bounds.

    Args:
        model, params, x, y, learning_rate, steps: As for ``descents``.
        delta: Probability with which Lemma 1 may fail.
    """

    def watch(start: PyTree, weights: PyTree) -> dict[str, Array]:
        active = [jnp.asarray(x) @ w["v"].T >= 0 for w in (start, weights)]
        return {**movement(start, weights), "switched": jnp.sum(active[0] != active[1])}

    paths = descents(model, params, x, y, learning_rate, steps, watch=watch)
    gamma, radius, num = paths.largest[:-1], float(paths.watched["moved"].max()), len(x)
    sizes = {"learning_rate": learning_rate, "width": len(params["v"]), "input_size": x.shape[1]}
    lemma = lemmas.weight_gap_bound(gamma, radius=radius, delta=delta, **sizes)
    counted = lemmas.switched_bound(gamma, paths.watched["switched"][:-1], num_examples=num, **sizes)
    return GapBounds(paths, radius, lemma, counted, lemmas.residual_part(paths.apart, num_examples=num, **sizes))
