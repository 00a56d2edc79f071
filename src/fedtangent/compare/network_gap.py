"""How far finite networks are from their linearisation and from the limit, width by width (FE-2021 sections 9.3, 9.4).

Each network and its own linearisation start from the same weights and are trained by the same algorithm, data and
schedule, so that the only difference is the curvature of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.compare.settings import Setting
from fedtangent.compare.simulated import init_key
from fedtangent.engine.run import predict, simulate
from fedtangent.federated import algorithms
from fedtangent.federated.local import Work
from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.types import Algorithm, Array, Key, Model, PyTree


class NetworkGap(NamedTuple):
    """What was measured at one width, after the last round, at the training points: [K, E] each, E draws.

    Norms of kernels are operator norms, of the mean over outputs; movements are in the NTK parameterisation, where
    the papers' ``l^-1/2 ||w - w_0||`` is the movement over the square root of the width.
    """

    width: int
    gap: np.ndarray  # ||f - f_lin||
    change: np.ndarray  # ||f - f_0||
    drift: np.ndarray  # ||Theta_t - Theta_0||
    initial_distance: np.ndarray  # ||Theta_0 - Theta||, Theta the limit
    distance: np.ndarray  # ||Theta_t - Theta||
    movement: np.ndarray  # ||w_t - w_0||
    lipschitz: np.ndarray  # ||J(w_t) - J(w_0)||_F / ||w_t - w_0||: from below, the constant of Lemma 9.1
    smallest_eigenvalue: np.ndarray  # of Theta_0
    largest_eigenvalue: np.ndarray
    initial_residual: np.ndarray  # ||f_0 - Y||

    @property
    def relative_gap(self) -> np.ndarray:
        """The gap relative to how far the network's outputs have moved, [K, E]."""
        return self.gap / self.change


def own_linearisation(model: Model) -> Model:
    """``model`` as a first-order polynomial in its weights about the weights it starts from, whatever those are."""

    def init(key: Key) -> PyTree:
        params = model.init(key)
        return {"start": params, "weights": params}

    def apply(params: PyTree, x: Array) -> Array:
        start = jax.lax.stop_gradient(params["start"])
        away = jax.tree.map(jnp.subtract, params["weights"], start)
        value, change = jax.jvp(lambda p: model.apply(p, x), (start,), (away,))
        return value + change

    return Model(f"{model.name}, linearised where it starts", init, apply, None, model.output_size)


def network_gap(setting: Setting, width: int) -> NetworkGap:
    """Trains K networks of ``width``, and their linearisations, in each of the setting's draws.

    Holds the Jacobians [K, n, C, P] of one draw: meant for small problems.
    """
    model = setting.model(width)
    network, tangent = (_algorithm(setting, m) for m in (model, own_linearisation(model)))
    limit = np.asarray(model.kernel(jnp.asarray(setting.x_train), None, get="ntk"))  # type: ignore[misc]
    x = jnp.asarray(setting.x_train)
    measure = _Measure(
        jax.jit(lambda p: jax.vmap(lambda one: empirical_ntk(model, one, x))(p)),
        jax.jit(jax.vmap(jax.jacrev(lambda p: model.apply(p, x)))),
        limit,
    )
    draws = [_one_draw(setting, network, tangent, measure, draw) for draw in range(setting.draws)]
    return NetworkGap(width, *(np.stack(values, axis=1) for values in zip(*draws, strict=True)))


def _algorithm(setting: Setting, model: Model) -> Algorithm:
    return algorithms.fed_ensemble(
        model,
        setting.schedule,
        client_learning_rate=setting.learning_rate,
        work=Work(steps=setting.local_steps),
    )


class _Measure(NamedTuple):
    """Compiled once for all draws of a width."""

    kernels: Callable[[PyTree], Array]  # parameters [K, ...] -> [K, n, n]
    jacobians: Callable[[PyTree], PyTree]
    limit: np.ndarray  # [n, n]


def _one_draw(
    setting: Setting, network: Algorithm, tangent: Algorithm, measure: _Measure, draw: int
) -> tuple[np.ndarray, ...]:
    """The fields of ``NetworkGap`` after the width, [K] each."""
    start, end = _trained(setting, network, draw)
    linear = _trained(setting, tangent, draw)[1]
    before, after, limit = (
        np.asarray(measure.kernels(start.params)),
        np.asarray(measure.kernels(end.params)),
        measure.limit,
    )
    moved = _norms(jax.tree.map(jnp.subtract, end.params, start.params))
    turned = _norms(jax.tree.map(jnp.subtract, measure.jacobians(end.params), measure.jacobians(start.params)))
    return (
        np.linalg.norm(end.outputs - linear.outputs, axis=(1, 2)),
        np.linalg.norm(end.outputs - start.outputs, axis=(1, 2)),
        np.linalg.norm(after - before, 2, axis=(1, 2)),
        np.linalg.norm(before - limit, 2, axis=(1, 2)),
        np.linalg.norm(after - limit, 2, axis=(1, 2)),
        moved,
        turned / moved,
        np.linalg.eigvalsh(before)[:, 0],
        np.linalg.eigvalsh(before)[:, -1],
        np.linalg.norm(start.outputs - setting.y_train, axis=(1, 2)),
    )


class _Seen(NamedTuple):
    params: PyTree  # [K, ...]
    outputs: np.ndarray  # [K, n, C]


def _trained(setting: Setting, algorithm: Algorithm, draw: int) -> tuple[_Seen, _Seen]:
    """A draw before and after training."""
    x = jnp.asarray(setting.x_train)
    seen = []

    def watch(state: PyTree) -> dict[str, float]:
        assert algorithm.params is not None
        params = jax.tree.map(np.asarray, algorithm.params(state))
        seen.append(_Seen(params, np.asarray(predict(algorithm, state, x).members)))
        return {}

    simulate(
        algorithm,
        setting.federated(),
        setting.num_rounds,
        seed=setting.seed,
        evaluate_every=setting.num_rounds,
        evaluate=watch,
        init_key=init_key(setting, draw),
        mapping="scan",
    )
    return seen[0], seen[-1]


def _norms(tree: PyTree) -> np.ndarray:
    """Euclidean norm over everything but the leading axis, [K]."""
    return np.sqrt(
        sum(np.sum(np.asarray(leaf) ** 2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(tree))
    )
