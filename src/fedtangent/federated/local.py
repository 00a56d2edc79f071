"""What a client does: minimise its own objective, starting from parameters that depend on the broadcast.

One local problem serves every algorithm here: minimise ``F_i(w) + <tilt, w> + prox / 2 |w - anchor|^2`` from
``start``. Algorithms differ in (start, anchor, tilt, prox), and in what the client answers and remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from fedtangent import pytrees
from fedtangent.checks import whole
from fedtangent.losses import Loss
from fedtangent.optimizers import Optimizer, Sgd, at_round
from fedtangent.types import Array, Client, FederatedData, Key, Local, Model, OfParameters, PyTree, Settle


class Work(NamedTuple):
    """How long a client trains and on what batches.

    Exactly one of ``steps`` (local steps T) and ``epochs`` is set. ``batch_size=None`` is full batch, for which an
    epoch is one step. A client's last, partial batch is masked: its gradient is the mean over its real examples.

    Loops have dynamic trip counts, so that a client costs what it holds, and ``steps`` may be traced: one program for
    many numbers of steps. ``differentiable`` makes the counts static (those of the largest client, steps beyond a
    client's own are skipped; ``steps`` cannot be traced then), as reverse-mode differentiation through them needs.
    The results are the same; minibatches cost more, above all under ``vmap``, where nothing is skipped.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    differentiable: bool = False


def client_view(
    data: FederatedData, client_id: Array, active: Array, max_client_size: int, round_: Array | int = 0
) -> Client:
    """One client's rows of ``data``, padded to ``max_client_size``; an inactive slot has size 0."""
    start, stop = data.offsets[client_id], data.offsets[client_id + 1]
    # Padding repeats the client's own last example: another client's row, were it not finite, would reach the gradient.
    index = data.indices[jnp.minimum(start + jnp.arange(max_client_size, dtype=jnp.int32), stop - 1)]
    return Client(client_id, jnp.where(active, stop - start, 0), index, data, jnp.asarray(round_, jnp.int32))


def validate_work(work: Work) -> None:
    """Raise ``ValueError`` if ``work`` is not one of ``steps`` or ``epochs``, each a whole number of at least 1."""
    if (work.steps is None) == (work.epochs is None):
        raise ValueError(f"local work: exactly one of steps and epochs, got steps={work.steps}, epochs={work.epochs}")
    for name, value in zip(("local steps", "local epochs", "batch_size"), work[:3], strict=True):
        if name == "local steps" and isinstance(value, jax.core.Tracer):
            continue  # type: ignore[unreachable]  # of a sweep: it has no value to look at
        if value is not None:
            whole(name, value)


class LocalProblem(NamedTuple):
    """What a client minimises: ``F_i(w) + <tilt, w> + prox / 2 |w - anchor|^2``; a term that is None costs nothing."""

    start: PyTree  # the parameters that its steps begin with
    anchor: PyTree | None = None
    tilt: PyTree | None = None
    prox: Array | float = 0.0


def _gradient(model: Model, loss: Loss, problem: LocalProblem) -> Callable[..., tuple[Array, PyTree]]:
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


def _of_batch(order: Array, t: Array, batch: int, size: Array) -> tuple[Array, Array]:
    """The entries of ``order`` in batch number ``t`` of an epoch, [batch], and which of them count."""
    position = t * batch + jnp.arange(batch)
    return order[jnp.minimum(position, order.shape[0] - 1)], position < size


def drawn_batches(work: Work, key: Key, size: Array, largest: int, most: int) -> Array:
    """The batches of a client's local steps, as ``minimise`` draws them with ``key``: what the theory is given.

    Args:
        size: [] int32, the client's examples; ``largest``: those of the largest client.
        most: number of local steps that are asked for.

    Returns:
        [most, B] int32: places among the client's own examples; -1 for none, as behind the client's last step.
    """
    places = jnp.arange(largest, dtype=jnp.int32)
    client = Client(jnp.int32(0), size, places, FederatedData(places, places, places, places), jnp.int32(0))
    batch = min(work.batch_size or largest, largest)
    per_epoch = jnp.maximum(-(-size // batch), 1)
    total = per_epoch * (work.epochs or 0) if work.steps is None else work.steps

    def one(t: Array) -> Array:
        order = _shuffled(jax.random.fold_in(key, t // per_epoch), client)
        rows, counts = _of_batch(order, t % per_epoch, batch, size)
        return jnp.where(counts & (t < total), rows, -1)

    return jax.vmap(one)(jnp.arange(most, dtype=jnp.int32))


def _all_examples(work: Work, client: Client) -> tuple[tuple[Array, Array, Array], int, Array]:
    """A client's inputs, targets and mask; the steps asked for, maybe traced; the steps it takes (0 if it is empty)."""
    mask = jnp.arange(client.rows.shape[0]) < client.size
    most = (work.epochs or 0) if work.steps is None else work.steps
    total = jnp.where(client.size > 0, most, 0)
    return (client.data.x[client.rows], client.data.y[client.rows], mask), most, total


def _full_batch(work: Work, client: Client, step: Callable[..., PyTree], carry: PyTree) -> tuple[PyTree, Array]:
    examples, most, total = _all_examples(work, client)
    if work.differentiable:
        return _static_loop(most, total, lambda _, c: step(c, *examples), carry), total
    return jax.lax.fori_loop(0, total, lambda _, c: step(c, *examples), carry), total


def _static_loop(most: int, total: Array, body: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """``body(t, carry)`` for t below ``total``, as a scan over ``most`` steps."""

    def one(carry: PyTree, t: Array) -> tuple[PyTree, None]:
        return jax.lax.cond(t < total, lambda c: body(t, c), lambda c: c, carry), None

    return jax.lax.scan(one, carry, jnp.arange(most))[0]


def _minibatches(
    work: Work, key: Key, client: Client, step: Callable[..., PyTree], carry: PyTree
) -> tuple[PyTree, Array]:
    batch = min(work.batch_size or 1, client.rows.shape[0])
    per_epoch = -(-client.size // batch)
    total = per_epoch * (work.epochs or 0) if work.steps is None else jnp.where(client.size > 0, work.steps, 0)
    num_epochs = -(-total // jnp.maximum(per_epoch, 1))

    def one(order: Array, t: Array, carry: PyTree) -> PyTree:
        rows, counts = _of_batch(order, t, batch, client.size)
        # a partition's indices are checked when the data is made: no need to clamp them again in every step
        x, y = (values.at[rows].get(mode="promise_in_bounds") for values in (client.data.x, client.data.y))
        return step(carry, x, y, counts)

    def epoch(e: Array, carry: PyTree) -> PyTree:
        order = _shuffled(jax.random.fold_in(key, e), client)
        steps = jnp.minimum(per_epoch, total - e * per_epoch)
        return jax.lax.fori_loop(0, steps, lambda t, carry: one(order, t, carry), carry)

    def flat(t: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        e, b = t // jnp.maximum(per_epoch, 1), t % jnp.maximum(per_epoch, 1)
        order = jax.lax.cond(
            b == 0, lambda order: _shuffled(jax.random.fold_in(key, e), client), lambda order: order, carry[0]
        )
        return order, one(order, b, carry[1])

    if work.differentiable:
        most = (work.epochs or 0) * -(-client.rows.shape[0] // batch) if work.steps is None else work.steps
        return _static_loop(most, total, flat, (client.rows, carry))[1], total
    return jax.lax.fori_loop(0, num_epochs, epoch, carry), total


def minimise(
    key: Key,
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    work: Work,
    problem: LocalProblem,
    client: Client,
) -> tuple[PyTree, dict[str, Array]]:
    """Run a client's local steps on ``problem``; dynamic trip counts, so that a client costs what it holds.

    Returns the parameters after the last step and ``info`` with ``loss`` (mean of the batch losses seen, float) and
    ``steps`` (int32). A client of size 0 returns ``start`` untouched.
    """
    full_batch = _is_full_batch(work, client.rows.shape[0])
    if full_batch and model.descend and isinstance(optimizer, Sgd) and _is_plain(work, problem):
        return _descended(model.descend, loss, optimizer.rate, work, problem.start, client)
    gradient = _gradient(model, loss, problem)

    def step(carry: PyTree, x: Array, y: Array, mask: Array) -> PyTree:
        params, opt_state, total_loss = carry
        value, grad = gradient(params, x, y, mask)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total_loss + value.astype(total_loss.dtype)

    carry = (problem.start, optimizer.init(problem.start), jnp.zeros((), jnp.float32))
    if full_batch:
        (params, _, total_loss), steps = _full_batch(work, client, step, carry)
    else:
        (params, _, total_loss), steps = _minibatches(work, key, client, step, carry)
    return params, _info(total_loss, steps)


def _info(total_loss: Array, steps: Array) -> dict[str, Array]:
    return {"loss": total_loss / jnp.maximum(steps, 1), "steps": jnp.asarray(steps, jnp.int32)}


def _is_full_batch(work: Work, largest: int) -> bool:
    """Whether every batch is all that a client has: there is nothing to draw then."""
    return work.batch_size is None or work.batch_size >= largest


def _is_plain(work: Work, problem: LocalProblem) -> bool:
    """Whether local training is descent by the gradient of a client's own loss alone."""
    return not work.differentiable and problem.anchor is None and problem.tilt is None


def _descended(
    descend: Callable[..., tuple[PyTree, Array]], loss: Loss, rate: float | Array, work: Work, start: PyTree,
    client: Client,
) -> tuple[PyTree, dict[str, Array]]:  # fmt: skip
    """Does the work of ``minimise`` for plain full-batch descent, with one call of ``Model.descend`` for all steps."""
    (x, y, mask), most, total = _all_examples(work, client)
    params, total_loss = descend(start, x, lambda outputs: loss(outputs, y, mask), rate, total, most)
    return params, _info(total_loss, total)


def no_state(params: PyTree) -> tuple[()]:
    """The state of a client that keeps nothing."""
    return ()


def from_broadcast(broadcast: PyTree, client_state: PyTree) -> LocalProblem:
    """The client's own loss, from the broadcast parameters."""
    return LocalProblem(start=broadcast)


def is_zero(mu: float | Array) -> bool:
    """Whether mu is known to be 0, so that its term can be left out."""
    return not isinstance(mu, jax.core.Tracer) and float(mu) == 0


class Pose(Protocol):
    """Poses the problem that a client minimises."""

    def __call__(self, broadcast: PyTree, client_state: PyTree, /) -> LocalProblem:
        """Returns the problem.

        Args:
            broadcast: The server's broadcast.
            client_state: The client's state for this model.
        """


class Answer(Protocol):
    """Makes a client's message."""

    def __call__(
        self, broadcast: PyTree, client_state: PyTree, params: PyTree, steps: Array, client: Client, /
    ) -> tuple[PyTree, PyTree]:
        """Returns the message, and the client's new state.

        Args:
            broadcast: The server's broadcast.
            client_state: The client's state for this model.
            params: Parameters after the last local step.
            steps: Number of local steps, [] int32.
            client: The client.
        """


def proximal(mu: float | Array) -> Pose:
    """Pose ``F_i(w) + mu / 2 |w - w_server|^2``; a mu of 0 costs nothing."""
    if is_zero(mu):
        return lambda broadcast, client_state: LocalProblem(broadcast)
    return lambda broadcast, client_state: LocalProblem(broadcast, anchor=broadcast, prox=mu)


def difference(
    broadcast: PyTree, client_state: PyTree, params: PyTree, steps: Array, client: Client
) -> tuple[PyTree, PyTree]:
    """The message ``server - client``, and nothing remembered."""
    return pytrees.subtract(broadcast, params), client_state


class Posed(TypedDict, total=False):
    """Parts of local training in which an algorithm differs from plain gradient descent from the broadcast.

    Attributes:
        pose: The problem that a client minimises; by default its own loss from the broadcast.
        answer: Its message; by default ``server - client``.
        init: From parameters to the state that a client keeps; by default nothing.
        message: From parameters to a tree with the shapes of a message; by default parameters.
        settle: Corrects the client's state, for states that the server mirrors; by default nothing.
    """

    pose: Pose
    answer: Answer
    init: OfParameters
    message: OfParameters
    settle: Settle


def local_training(model: Model, loss: Loss, optimizer: Optimizer, work: Work, **posed: Unpack[Posed]) -> Local:
    """Local training on the problem that an algorithm poses; without ``posed``, FedAvg's: SGD from the broadcast.

    ``optimizer`` may be a function from the round to one (``optimizers.sgd`` of a schedule); its state does not
    outlive a round. Raises ``ValueError`` for an impossible ``work``.
    """
    validate_work(work)
    pose, answer = posed.get("pose", from_broadcast), posed.get("answer", difference)

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        descent = at_round(optimizer, client.round)
        params, info = minimise(key, model, loss, descent, work, pose(broadcast, client_state), client)
        return *answer(broadcast, client_state, params, info["steps"], client), info

    local = Local(posed.get("init", no_state), update)
    return local._replace(message=posed.get("message", local.message), settle=posed.get("settle", local.settle))
