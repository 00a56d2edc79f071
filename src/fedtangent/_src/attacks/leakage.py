"""Deep leakage: searches for the input whose gradient, or Jacobian, is the one that was sent (Zhu et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int32

from fedtangent._src import pytrees
from fedtangent._src.attacks.observation import Observed
from fedtangent._src.checks import choice, number, whole
from fedtangent._src.losses import get_loss
from fedtangent._src.types import AnyArray, Array, Key, Model, PyTree

Sight = tuple[Array, Array, Array | None]  # messages, weight of every entry, outputs or labels if they are known
COMPARED = ("all", "kept")
SOFT_LOSSES = ("cross_entropy", "squared_error")
OPTIMIZERS = ("lbfgs", "adam")
MEMORY = 20  # of L-BFGS
PATIENCE = 5  # steps of L-BFGS without a lower value before it stops


@dataclass(frozen=True)
class Attack:
    """Options of the attacker's search; raises ``ValueError`` for unknown names and numbers out of range.

    Attributes:
        optimizer: "lbfgs" or "adam".
        num_steps: Largest number of steps.
        learning_rate: Step size of adam.
        num_restarts: Number of random starts; the result with the smallest mismatch is returned.
        compare: Which entries of a sparsified message have to match: "all", with the zeros, as in Zhu et al. (2019), or
            "kept", only entries that were sent.
        init_scale: Standard deviation of the pixels at the start; for unknown labels it is 1.
        tolerance: Relative squared mismatch at which the search ends.
    """

    optimizer: str = "lbfgs"
    num_steps: int = 300
    learning_rate: float = 0.1
    num_restarts: int = 1
    compare: str = "all"
    init_scale: float = 1.0
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        choice("optimizer", self.optimizer, OPTIMIZERS)
        choice("compare", self.compare, COMPARED)
        for name in ("num_steps", "num_restarts"):
            whole(name, getattr(self, name), 1)
        for name in ("learning_rate", "init_scale", "tolerance"):
            number(name, getattr(self, name), above=0)


@dataclass(frozen=True)
class Batch:
    """Facts about the batch behind a message, which is the gradient of the batch's mean ``loss``.

    Raises ``ValueError`` for an unknown loss and a size below 1.

    Attributes:
        size: Number of examples B.
        loss: "cross_entropy" or "squared_error".
        labels: Labels [m, B, C] of m messages if the attacker knows them: probabilities (cross entropy) or targets
            (squared error).
    """

    size: int = 1
    loss: str = "cross_entropy"
    labels: Array | None = None

    def __post_init__(self) -> None:
        whole("size", self.size, 1)
        choice("loss", self.loss, SOFT_LOSSES)


class Leak(NamedTuple):
    """Result of an attack on m messages; each one is from the restart with the smallest mismatch.

    Attributes:
        x: Reconstructed inputs, [m, ...] from Jacobians and [m, B, ...] from gradients of batches of B examples.
        labels: Reconstructed or known labels of batches, as probabilities (cross entropy) or targets (squared error);
            None from Jacobians.
        mismatch: Squared distance of the compared entries, relative to their squared norm in the message, [m]; if the
            outputs are known, plus the same of the outputs.
        history: Lowest mismatch before each step and after the last, [m, num_steps + 1].
        steps: Number of steps taken, [m].
        finite: Whether any restart found a finite mismatch, [m].
    """

    x: Float[Array, "m ..."]
    labels: Float[Array, "m B C"] | None
    mismatch: Float[Array, "m"]
    history: Float[Array, "m num_steps+1"]
    steps: Int32[Array, "m"]
    finite: Bool[Array, "m"]


class Minimum(NamedTuple):
    """Result of a search for the smallest value of an objective.

    Attributes:
        point: The best point.
        value: The objective at this point, [].
        history: Lowest value before each step and after the last, [num_steps + 1].
        steps: Number of steps taken, [].
    """

    point: PyTree
    value: Float[Array, ""]
    history: Float[Array, "num_steps+1"]
    steps: Int32[Array, ""]


def from_jacobians(
    model: Model,
    params: PyTree,
    messages: Observed,
    shape: tuple[int, ...],
    key: Key,
    attack: Attack = Attack(),
    outputs: Float[AnyArray, "m C"] | None = None,
) -> Leak:
    """Reconstructs inputs [m, ...] of ``shape`` from Jacobians J: minimises ``|J(x') - J|^2 / |J|^2`` for each example.

    Labels, which NTK-FL sends in the open, are not needed. For a ReLU network the search can get stuck: its Jacobian
    depends on the input piecewise linearly, and the gradient of the objective says nothing about inputs with other
    active units. Smooth activations (Zhu et al. use the sigmoid) do not have this obstacle.

    Args:
        model: The clients' network.
        params: Parameters at which the Jacobians were taken.
        messages: Jacobians [m, C, P] of m examples of any clients, as ``observation.jacobians`` returns them, for C
            outputs and P parameters.
        shape: Shape of an input.
        key: Key of the random starts.
        attack: Options of the search.
        outputs: Outputs f [m, C] of the network, which clients of NTK-FL send too; adds ``|f(x') - f|^2 / |f|^2``. None
            if they are unknown.

    Raises:
        ValueError: ``messages``, ``shape`` or ``outputs`` do not fit the model.
    """
    flat = ravel_pytree(params)[0]
    expected = (model.output_size, flat.size)
    if messages.values.ndim != 3 or messages.values.shape[1:] != expected:
        must = f"must be the model's Jacobians, [m, {expected[0]}, {expected[1]}]"
        raise ValueError(f"messages.values: got shape {messages.values.shape}, {must}")
    _check_shape(model, params, shape)
    if outputs is not None and outputs.shape != messages.values.shape[:2]:
        raise ValueError(f"outputs: got shape {outputs.shape}, must be {messages.values.shape[:2]}")
    count = len(messages.values) * attack.num_restarts
    start = jax.random.normal(key, (count, *shape), flat.dtype) * attack.init_scale, None
    sight = messages.values, _weight(messages, attack), outputs
    return _best_of(_search(model, None, _limits(attack), params, sight, start), len(messages.values))


def from_gradients(
    model: Model,
    params: PyTree,
    messages: Observed,
    shape: tuple[int, ...],
    key: Key,
    attack: Attack = Attack(),
    batch: Batch = Batch(),
) -> Leak:
    """Reconstructs inputs [m, B, ...] from gradients g of batches: minimises ``|grad(x', y') - g|^2 / |g|^2``.

    Unknown labels are reconstructed too, for the cross entropy as the softmax of logits (Zhu et al., 2019, Algorithm
    1). The order of a batch cannot be found. ReLU networks have the obstacle that ``from_jacobians`` describes.

    Args:
        model: The clients' network.
        params: Parameters at which the gradients were taken.
        messages: Gradients [m, P] by P parameters as ``observation.gradient`` returns them, each of a separate batch of
            B examples.
        shape: Shape of an input.
        key: Key of the random starts.
        attack: Options of the search.
        batch: Size B, loss and, if known, labels of the batches.

    Raises:
        ValueError: ``messages``, ``shape`` or ``batch.labels`` do not fit the model.
    """
    flat = ravel_pytree(params)[0]
    if messages.values.ndim != 2 or messages.values.shape[1] != flat.size:
        must = f"must be the model's gradients, [m, {flat.size}]"
        raise ValueError(f"messages.values: got shape {messages.values.shape}, {must}")
    _check_shape(model, params, shape)
    labels, shape_of_labels = batch.labels, (len(messages.values), batch.size, model.output_size)
    if labels is not None and labels.shape != shape_of_labels:
        raise ValueError(f"batch.labels: got shape {labels.shape}, must be {shape_of_labels}")
    pixels, logits = jax.random.split(key)
    count = len(messages.values) * attack.num_restarts
    x = jax.random.normal(pixels, (count, batch.size, *shape), flat.dtype) * attack.init_scale
    guess = jax.random.normal(logits, (count, *shape_of_labels[1:]), flat.dtype) if labels is None else None
    sight = messages.values, _weight(messages, attack), labels
    leak = _best_of(_search(model, batch.loss, _limits(attack), params, sight, (x, guess)), len(messages.values))
    return leak._replace(labels=_targets(batch.loss, leak.labels, labels))


def _check_shape(model: Model, params: PyTree, shape: tuple[int, ...]) -> None:
    try:
        jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct((1, *shape), jnp.float32))
    except (TypeError, ValueError) as error:
        must = f"must be the shape of one example that {model.name} accepts"
        raise ValueError(f"shape: got {shape}, {must}: {error}") from error


def _relative(guess: Array, message: Array, weight: Array) -> Float[Array, ""]:
    """Computes ``|guess - message|^2 / |message|^2``, a scalar, over the entries with weight 1 (the others have 0)."""
    scale = pytrees.magnitude(weight * message)
    square = jnp.sum(weight * (message / scale) ** 2)
    return jnp.sum(weight * ((guess - message) / scale) ** 2) / jnp.maximum(square, jnp.finfo(guess).tiny)


def _weight(messages: Observed, attack: Attack) -> Array:
    return (messages.kept | (attack.compare == "all")).astype(messages.values.dtype)


def _limits(attack: Attack) -> Attack:
    """Returns ``attack`` with fixed values of the options that the compiled ``_search`` does not use.

    So attacks that differ only in these options share one compilation.
    """
    return replace(attack, compare="all", init_scale=1.0, num_restarts=1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _search(
    model: Model, loss: str | None, attack: Attack, params: PyTree, sight: Sight, starts: tuple[Array, Array | None]
) -> Minimum:
    """Searches from each start for the input behind its message; returns the minima, [messages * restarts, ...].

    ``sight`` has the messages, the weights of their entries, and known outputs or labels. Messages are gradients of
    ``loss``; without a loss they are Jacobians. ``starts`` are inputs, and for gradients with unknown labels also
    labels (else None), [messages * restarts, ...] each; the restarts of one message follow one another.
    """
    flat, unravel = ravel_pytree(params)
    restarts = len(starts[0]) // len(sight[0])

    def of_jacobian(message: Sight, point: tuple[Array, Array | None]) -> Array:
        (values, weight, outputs), x = message, point[0][None]
        jacobian = jax.jacrev(lambda w: model.apply(unravel(w), x)[0])(flat)
        apart = _relative(jacobian, values, weight)
        if outputs is None:
            return apart
        return apart + _relative(model.apply(params, x)[0], outputs, jnp.ones_like(outputs))

    def of_gradient(message: Sight, point: tuple[Array, Array | None]) -> Array:
        values, weight, labels = message
        y, mask = _targets(str(loss), point[1], labels), jnp.ones(len(point[0]), bool)
        gradient = jax.grad(lambda w: get_loss(str(loss))(model.apply(unravel(w), point[0]), y, mask))(flat)
        return _relative(gradient, values, weight)

    def search(part: tuple[Array, PyTree]) -> Minimum:
        number, start = part
        message = jax.tree.map(lambda leaf: leaf[number // restarts], sight)
        return minimise(partial(of_jacobian if loss is None else of_gradient, message), start, attack)

    return jax.lax.map(search, (jnp.arange(len(starts[0])), starts))


def _best_of(minima: Minimum, messages: int) -> Leak:
    """Returns the restart with the smallest mismatch for each message; ``messages`` is the number of messages."""
    rows = jax.tree.map(lambda leaf: leaf.reshape(messages, -1, *leaf.shape[1:]), minima)
    best = jnp.argmin(rows.value, axis=1)
    point, value, history, steps = jax.tree.map(lambda leaf: leaf[jnp.arange(messages), best], rows)
    x, guess = point
    return Leak(x, guess, value, history, steps, jnp.isfinite(value))


def _targets(loss: str, guess: Array | None, labels: Array | None) -> Array:
    """Returns ``labels`` if they are known; else the attacker's guess.

    The guess is the softmax of ``guess`` for the cross entropy, and ``guess`` itself for the squared error.
    """
    if labels is not None:
        return labels
    assert guess is not None
    return jax.nn.softmax(guess) if loss == "cross_entropy" else guess


# ---- the minimiser ------------------------------------------------------------------------------------------------


def minimise(objective: Callable[[PyTree], Float[Array, ""]], start: PyTree, attack: Attack) -> Minimum:
    """Minimises ``objective`` from ``start`` by the optimiser of ``attack``.

    The search ends when the tolerance or the number of steps is reached, or when L-BFGS takes five steps without a
    lower value. L-BFGS chooses its steps by a line search and ignores the learning rate. NaN and inf are never the
    best value: if there is no other, the result is ``start`` with value inf.

    Args:
        objective: Function of a pytree that returns a number.
        start: First point.
        attack: Optimiser, number of steps, learning rate and tolerance.

    Returns:
        The best point, its value, the lowest value by step, and the number of steps.
    """
    num_steps, line_search = attack.num_steps, attack.optimizer == "lbfgs"
    patience = PATIENCE if line_search else num_steps
    descent = optax.lbfgs(memory_size=MEMORY) if line_search else optax.adam(attack.learning_rate)
    method = optax.with_extra_args_support(descent)
    value, slope = jax.value_and_grad(objective)(start)
    first = jnp.where(jnp.isfinite(value), value, jnp.inf)
    history = jnp.full((num_steps + 1,), first)

    def goes_on(carry: PyTree) -> Array:
        _, _, (_, best), _, step, idle = carry
        return (step < num_steps) & (best > attack.tolerance) & (idle < patience)

    def advance(carry: PyTree) -> PyTree:
        (point, value, slope), state, (lowest, best), history, step, idle = carry
        change, state = method.update(slope, state, point, value=value, grad=slope, value_fn=objective)
        point = optax.apply_updates(point, change)
        if line_search:  # which has evaluated the point that it chose
            value, slope = optax.tree.get(state, "value"), optax.tree.get(state, "grad")
        else:
            value, slope = jax.value_and_grad(objective)(point)
        better = value < best  # False for NaN
        lowest = jax.tree.map(lambda new, old: jnp.where(better, new, old), point, lowest)
        best, idle = jnp.where(better, value, best), jnp.where(better, 0, idle + 1)
        return (point, value, slope), state, (lowest, best), history.at[step + 1].set(best), step + 1, idle

    zero = jnp.zeros((), jnp.int32)
    carry = (start, value, slope), method.init(start), (start, first), history, zero, zero
    _, _, (lowest, best), history, steps, _ = jax.lax.while_loop(goes_on, advance, carry)
    return Minimum(lowest, best, jnp.where(jnp.arange(num_steps + 1) > steps, best, history), steps)
