"""What a client does: minimise its own objective from where the server starts it.

One local problem serves every algorithm here: minimise ``F_i(w) + <tilt, w> + prox / 2 |w - anchor|^2`` from
``start``. Algorithms differ in (start, anchor, tilt, prox) only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent import pytrees
from fedtangent.losses import Loss
from fedtangent.types import Array, Client, Key, Local, Model, PyTree


class Work(NamedTuple):
    """How long a client trains and on what batches.

    Exactly one of ``steps`` (local steps T) and ``epochs`` is set. ``batch_size=None`` is full batch, for which an
    epoch is one step. A client's last, partial batch is masked: its gradient is the mean over its real examples.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None


def validate_work(work: Work) -> None:
    """Raise ``ValueError`` if ``work`` is not one of ``steps`` or ``epochs``, each at least 1."""
    if (work.steps is None) == (work.epochs is None):
        raise ValueError(f"local work: exactly one of steps and epochs, got steps={work.steps}, epochs={work.epochs}")
    for name, value in zip(("local steps", "local epochs", "batch_size"), work, strict=True):
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}, must be at least 1")


class Problem(NamedTuple):
    """The tilted, proximal local problem around the client's own loss F_i; ``None`` terms cost nothing."""

    start: PyTree
    anchor: PyTree | None = None
    tilt: PyTree | None = None
    prox: Array | float = 0.0


def _gradient(model: Model, loss: Loss, problem: Problem) -> Callable[..., tuple[Array, PyTree]]:
    def objective(params: PyTree, x: Array, y: Array, mask: Array) -> Array:
        return loss(model.apply(params, x), y, mask)

    def gradient(params: PyTree, x: Array, y: Array, mask: Array) -> tuple[Array, PyTree]:
        value, grad = jax.value_and_grad(objective)(params, x, y, mask)
        if problem.tilt is not None:
            grad = pytrees.add(grad, problem.tilt)
        if problem.anchor is not None:
            grad = pytrees.add(grad, pytrees.scale(problem.prox, pytrees.subtract(params, problem.anchor)))
        return value, grad

    return gradient


def _shuffled(key: Key, client: Client) -> Array:
    """A fresh order of the client's real examples, padding last, [max_size]."""
    padded = client.rows.shape[0]
    draws = jax.random.uniform(key, (padded,), jnp.float32)
    return client.rows[jnp.argsort(jnp.where(jnp.arange(padded) < client.size, draws, jnp.inf))]


def _full_batch(work: Work, client: Client, step: Callable[..., PyTree], carry: PyTree) -> tuple[PyTree, Array]:
    x, y = client.data.x[client.rows], client.data.y[client.rows]
    mask = jnp.arange(client.rows.shape[0]) < client.size
    total = jnp.where(client.size > 0, work.steps or work.epochs or 0, 0)
    return jax.lax.fori_loop(0, total, lambda _, c: step(c, x, y, mask), carry), total


def _minibatches(
    work: Work, key: Key, client: Client, step: Callable[..., PyTree], carry: PyTree
) -> tuple[PyTree, Array]:
    batch = min(work.batch_size or 1, client.rows.shape[0])
    per_epoch = -(-client.size // batch)
    total = per_epoch * (work.epochs or 0) if work.steps is None else jnp.where(client.size > 0, work.steps, 0)
    num_epochs = -(-total // jnp.maximum(per_epoch, 1))

    def epoch(e: Array, carry: PyTree) -> PyTree:
        order = _shuffled(jax.random.fold_in(key, e), client)

        def one(t: Array, carry: PyTree) -> PyTree:
            position = t * batch + jnp.arange(batch)
            rows = order[jnp.minimum(position, order.shape[0] - 1)]
            return step(carry, client.data.x[rows], client.data.y[rows], position < client.size)

        return jax.lax.fori_loop(0, jnp.minimum(per_epoch, total - e * per_epoch), one, carry)

    return jax.lax.fori_loop(0, num_epochs, epoch, carry), total


def minimise(
    key: Key,
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    work: Work,
    problem: Problem,
    client: Client,
) -> tuple[PyTree, dict[str, Array]]:
    """Run a client's local steps on ``problem``; dynamic trip counts, so that a client costs what it holds.

    Returns the parameters after the last step and ``info`` with ``loss`` (mean of the batch losses seen, float) and
    ``steps`` (int32). A client of size 0 returns ``start`` untouched.
    """
    gradient = _gradient(model, loss, problem)

    def step(carry: PyTree, x: Array, y: Array, mask: Array) -> PyTree:
        params, opt_state, total_loss = carry
        value, grad = gradient(params, x, y, mask)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total_loss + value.astype(total_loss.dtype)

    carry = (problem.start, optimizer.init(problem.start), jnp.zeros((), jnp.float32))
    if work.batch_size is None:
        (params, _, total_loss), steps = _full_batch(work, client, step, carry)
    else:
        (params, _, total_loss), steps = _minibatches(work, key, client, step, carry)
    return params, {"loss": total_loss / jnp.maximum(steps, 1), "steps": jnp.asarray(steps, jnp.int32)}


def local_sgd(model: Model, loss: Loss, optimizer: optax.GradientTransformation, work: Work) -> Local:
    """Plain local training from the broadcast parameters; the message is ``server - client`` (FedAvg's client).

    Raises ``ValueError`` for an impossible ``work``.
    """
    validate_work(work)

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        params, info = minimise(key, model, loss, optimizer, work, Problem(start=broadcast), client)
        return pytrees.subtract(broadcast, params), client_state, info

    return Local(init=lambda params: (), update=update)
