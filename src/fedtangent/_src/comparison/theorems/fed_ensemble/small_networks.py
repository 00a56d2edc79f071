"""Networks that can be trained within Theorem 9.1: kappa_2 < 1, C_1 measured, equally many examples in every round.

They have one hidden layer of erf units. Inputs are few, nearly orthogonal and of norm 1, so that the kernel is well
conditioned and C_2 small: the largest allowed step falls as 1 / C_2^2. Unequal clients take turns at the models in
fixed groups, so that every round of every model has the same number of examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float, Float64, Int, Shaped

import fedtangent as ft
from fedtangent._src.comparison.settings import Problem, Scale, Setting
from fedtangent._src.comparison.simulated import cohorts, init_key
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.engine.loop import Measure
from fedtangent._src.engine.run import predict
from fedtangent._src.models.linearised import first_order
from fedtangent._src.theory.fed_ensemble.convergence import Curvature
from fedtangent._src.types import Algorithm, AnyArray, Array, Cohort, Key, Model, PyTree, Schedule

W_STD = 1.5
Function = Callable[[np.ndarray], np.ndarray]
# Activations with their first and second derivatives; ReLU's second one is taken as 0.
ACTIVATIONS: dict[str, tuple[Function, Function, Function]] = {
    "erf": (
        lambda z: scipy.special.erf(z),
        lambda z: 2 / np.sqrt(np.pi) * np.exp(-(z**2)),
        lambda z: -4 / np.sqrt(np.pi) * z * np.exp(-(z**2)),
    ),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float), np.zeros_like),
}


class Task(NamedTuple):
    """Sizes of the clients, their groups, the length of training, and the targets."""

    sizes: tuple[int, ...]  # of the clients
    group: tuple[int, ...]  # of each client; groups take turns at as many models
    ages: int
    step: float  # eta_0 tau, as a fraction of the largest that kappa_2 < 1 allows
    labels: float = 1.0  # norm of Y, in units of the root of the kernel's mean diagonal
    weakest: bool = False  # Y along the kernel's weakest direction, instead of a random one
    evaluations: int = 1
    local_steps: int = 2

    @property
    def nbar(self) -> int:
        """The number of examples that train a model in a round; the same for all groups."""
        return sum(size for size, group in zip(self.sizes, self.group, strict=True) if group == 0)


def _turns(group: tuple[int, ...]) -> Schedule:
    """Builds the schedule in which client i trains model ``group[i] + round``, modulo the number of groups."""
    num_models, num_clients = max(group) + 1, len(group)

    def sample(key: Key, state: tuple[()], round_: Array) -> tuple[Cohort, tuple[()]]:
        model = (jnp.asarray(group, jnp.int32) + round_.astype(jnp.int32)) % num_models
        return Cohort(jnp.arange(num_clients, dtype=jnp.int32), model, jnp.ones(num_clients, jnp.float32)), state

    return Schedule(num_models, num_clients, num_clients, lambda key: (), sample)


def one_hidden_layer(input_size: int, width: int, activation: str = "erf") -> Model:
    """Builds a scalar network without biases, in the NTK parameterisation and in float64.

    Args:
        input_size: Dimension of the inputs.
        width: Number of hidden units.
        activation: "erf" or "relu".
    """
    return ft.models.mlp(input_size, 1, (width,), activation, b_std=None, w_std=W_STD, dtype=jnp.float64)


def inputs(rng: np.random.Generator, number: int) -> Float64[np.ndarray, "number d"]:
    """Draws nearly orthogonal inputs of norm 1, [number, number + 1].

    Args:
        rng: Source of randomness.
        number: Number of inputs.
    """
    size = number + 1
    x = np.linalg.qr(rng.standard_normal((size, size)))[0][:number]
    x = x + 0.15 * rng.standard_normal(x.shape) / np.sqrt(size)
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True) * (1 - 1e-12))  # never above 1 by rounding


def setting(task: Task, width: int, seed: int) -> Setting:
    """Builds the setting of ``task`` for networks of ``width``.

    The step is chosen for the expected C_1 and size of the initial functions.

    Args:
        task: Clients, training and targets.
        width: Width of the networks.
        seed: Seed of data and networks.
    """
    rng, n = np.random.default_rng(seed), sum(task.sizes)
    x = inputs(rng, n)
    model = one_hidden_layer(x.shape[1], width)
    theta = np.asarray(model.kernel(jnp.asarray(x), None, get="ntk"))  # type: ignore[misc]
    y = np.linalg.eigh(theta)[1][:, :1] if task.weakest else rng.standard_normal((n, 1))
    y = y * (task.labels * np.sqrt(np.trace(theta) / n) / np.linalg.norm(y))
    clients = consecutive(task.sizes)
    c2 = float(sum(np.sqrt(np.trace(theta[a:b, a:b])) for a, b in itertools.pairwise(clients.offsets)))
    c1, r0 = 5.0, float(np.hypot(np.linalg.norm(y), np.sqrt(np.trace(theta))))
    rounds = max(task.group) + 1
    rate = task.step * Curvature(c2, c1, r0, width).largest_progress() / task.local_steps
    work = ft.Work(steps=task.local_steps, batch_size=None)
    algorithm = ft.fed_ensemble(model, _turns(task.group), client_learning_rate=rate, work=work)
    problem, rule = Problem(x, y, x[:1], y[:1], clients), ft.theory.Rule(task.local_steps, rate)
    size = Scale((width,), 1, rounds * task.ages, evaluate_every=rounds * (task.ages // task.evaluations))
    return Setting("networks", "a few nearly orthogonal inputs", problem, algorithm, rule, size, seed)


def jacobian(activation: str, params: PyTree, x: Float64[np.ndarray, "n d"]) -> Float64[np.ndarray, "n P"]:
    """Computes the Jacobian of ``one_hidden_layer`` with respect to its weights, in NumPy.

    Args:
        activation: "erf" or "relu".
        params: Parameters of the network.
        x: Inputs.
    """
    w, a, first, last = _weights(params, x)
    function, slope, _ = ACTIVATIONS[activation]
    z = first * x @ w
    below = last * first * x[:, :, None] * (slope(z) * a)[:, None, :]
    return np.concatenate([below.reshape(len(x), -1), last * function(z)], axis=1)


def curvature(activation: str, params: PyTree, x: Float64[np.ndarray, "n d"]) -> float:
    """Computes C_1 of one network: a bound of ``l^-1/2 ||Hessian||`` in the papers' parameterisation.

    The papers' weights are l^-1/2 times the weights here, so C_1 is l^1/2 times the Hessian's norm here, l the width.
    The Hessian is block diagonal in the hidden units; for an example of norm r the block of unit u is ``[[p r^2, q r],
    [q r, 0]]`` in the direction of the example and of the unit's last weight a_u, with ``p = a_u phi''(z)`` and ``q =
    phi'(z)`` at the unit's input z, times the layers' scales. The bound for all examples is the root of the sum of
    squares; it is exact for one example.

    Args:
        activation, params, x: As for ``jacobian``.
    """
    w, a, first, last = _weights(params, x)
    _, slope, second = ACTIVATIONS[activation]
    z, r = first * x @ w, np.linalg.norm(x, axis=1)[:, None]
    p, q = last * first**2 * a * second(z) * r**2, last * first * slope(z) * r
    norms = np.abs(p) / 2 + np.sqrt(p**2 / 4 + q**2)
    return float(np.sqrt(w.shape[1] * np.sum(norms**2, axis=0).max()))


def _weights(params: PyTree, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns both layers' weights, [d, l] and [l], and their scales."""
    w, a = np.asarray(params[0][0]), np.asarray(params[2][0])[:, 0]
    return w, a, W_STD / np.sqrt(x.shape[1]), W_STD / np.sqrt(len(a))


def own_linearisation(model: Model) -> Model:
    """Builds ``model`` linearised in its weights about the initial weights, which its parameters keep."""

    def init(key: Key) -> PyTree:
        params = model.init(key)
        return {"start": params, "weights": params}

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        return first_order(model, jax.lax.stop_gradient(params["start"]), params["weights"], x)

    return Model(f"{model.name}, linearised where it starts", init, apply, None, model.output_size)


class FollowedNetworks(NamedTuple):
    """E draws of K networks of one width and their linearisations, at T ages of their training."""

    setting: Setting
    ages: Int[np.ndarray, "T"]  # the first is 0
    residual: Float64[np.ndarray, "E T K"]  # ||f - Y||
    gap: Float64[np.ndarray, "E T K"]  # ||f - f_lin||
    change: Float64[np.ndarray, "E T K"]  # ||f - f_0||
    kernels: Float64[np.ndarray, "E T K n n"]
    c1: Float64[np.ndarray, "E K"]  # the largest along the way
    start: Float64[np.ndarray, "E K n C"]  # initial functions

    @property
    def drift(self) -> Float64[np.ndarray, "E T K"]:
        """The operator norm of Theta_t - Theta_0."""
        return np.linalg.norm(self.kernels - self.kernels[:, :1], 2, axis=(-2, -1))

    def theorem(self, draw: int) -> ft.theory.Theorem1:
        """Evaluates Theorem 1 on the K networks of one draw, for the initial kernel that is farthest from the limit."""
        setting, start, c1 = self.setting, self.kernels[draw, 0], float(self.c1[draw].max())
        x, y, clients = setting.problem.x_train, setting.problem.y_train, setting.problem.partition
        limit = np.asarray(setting.kernel(jnp.asarray(x), None, get="ntk"))
        farthest = start[np.argmax(np.linalg.norm(start - limit, 2, axis=(1, 2)))]
        networks = ft.theory.Networks(self.start[draw], x, farthest, c1, float(setting.size.largest))
        run, rule, num_models = cohorts(setting), setting.followed, setting.num_models
        return ft.theory.theorem_1(setting.blocks(), y, clients, run, rule, num_models=num_models, networks=networks)


def follow(setting: Setting, draws: int) -> FollowedNetworks:
    """Trains the K networks of the setting's width, and their linearisations.

    Args:
        setting: The setting.
        draws: Number of initialisations.
    """
    problem, size, model = setting.problem, setting.size, setting.model(setting.size.largest)
    x, data = jnp.asarray(problem.x_train), problem.federated()
    network, tangent = (setting.algorithm.on(m) for m in (model, own_linearisation(model)))
    kernels = jax.jit(jax.vmap(lambda params: ft.kernels.empirical_ntk(model, params, x)))

    def outputs(algorithm: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        return {"members": np.asarray(predict(algorithm, state, x).members)}

    def all_measured(algorithm: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        assert algorithm.params is not None
        weights = algorithm.params(state)
        models = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k]), weights) for k in range(setting.num_models)]
        c1 = np.array([curvature("erf", params, problem.x_train) for params in models])
        return {"c1": c1, **outputs(algorithm, state), "kernels": np.asarray(kernels(weights))}

    train = partial(ft.simulate, data=data, num_rounds=size.num_rounds, seed=setting.seed, devices=ft.Devices("scan"))

    def run(algorithm: Algorithm, draw: int, measure: Measure) -> list[ft.types.Measurement]:
        evaluation, start = ft.Evaluation(size.evaluate_every, measure), init_key(setting, draw, size.largest)
        return train(algorithm, start=start, evaluation=evaluation).history.evaluations

    curved, straight = (
        [run(algorithm, draw, measure) for draw in range(draws)]
        for algorithm, measure in ((network, all_measured), (tangent, outputs))
    )

    def stacked(name: str, runs: list[list[ft.types.Measurement]] = curved) -> np.ndarray:
        return np.stack([np.stack([e.metrics[name] for e in evaluations]) for evaluations in runs])

    members = stacked("members")
    return FollowedNetworks(
        setting,
        np.array([e.round for e in curved[0]]) // setting.num_models,
        np.linalg.norm(members - problem.y_train, axis=(-2, -1)),
        np.linalg.norm(members - stacked("members", straight), axis=(-2, -1)),
        np.linalg.norm(members - members[:, :1], axis=(-2, -1)),
        stacked("kernels"),
        stacked("c1").max(axis=1),
        members[:, 0],
    )
