"""A client's local training: it minimises an objective, starting from parameters that depend on the broadcast.

Every algorithm here poses one kind of local problem: minimise ``F_i(w) + <tilt, w> + prox / 2 |w - anchor|^2`` over the
parameters w from ``start``, where F_i is client i's mean loss. Algorithms differ in (start, anchor, tilt, prox), and in
the client's message and state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int, Int32, Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import whole
from fedtangent._src.losses import Loss
from fedtangent._src.models.gemm import with_fast_convolutions
from fedtangent._src.optimizers import Optimizer, Sgd, at_round
from fedtangent._src.types import Array, Client, Descend, FederatedData, Key, Local, Model, OfParameters, PyTree, Settle


class Work(NamedTuple):
    """The amount of a client's local training, and its minibatches.

    Exactly one of ``steps`` and ``epochs`` is set. Minibatches are cut from the client's examples, in a new random
    order in every epoch. The last, partial batch of an epoch is masked: its gradient is the mean over its real
    examples.

    Loops have dynamic trip counts, so that a small client takes little time, and ``steps`` may be traced. Reverse-mode
    differentiation needs static trip counts, which ``differentiable`` gives: every client then loops as often as the
    largest one and skips the superfluous steps. The results are the same; minibatches take longer, most of all under
    ``vmap``, where no step is really skipped.

    Attributes:
        steps: Local steps T; a traced number only without ``differentiable``.
        epochs: Passes over a client's examples.
        batch_size: Examples of a minibatch; None for full batches, one in an epoch.
        differentiable: Whether the loops have static trip counts.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = 16
    differentiable: bool = False


def client_view(
    data: FederatedData,
    client_id: Int[Array, ""],
    active: Bool[Array, ""],
    max_client_size: int,
    round_: Int[Array, ""] | int = 0,
) -> Client:
    """Returns the ``Client`` record with the rows of ``data`` that are one client's, padded to ``max_client_size``.

    Args:
        data: Training examples of all clients.
        client_id: Id of the client, [] int32.
        active: Whether the client trains, [] bool; if not, the record has size 0.
        max_client_size: Number of examples of the largest client.
        round_: Number of the round.
    """
    start, stop = data.offsets[client_id], data.offsets[client_id + 1]
    # Padding repeats the client's own last example: another client's row, were it not finite, would reach the gradient.
    index = data.indices[jnp.minimum(start + jnp.arange(max_client_size, dtype=jnp.int32), stop - 1)]
    return Client(client_id, jnp.where(active, stop - start, 0), index, data, jnp.asarray(round_, jnp.int32))


def validate_work(work: Work) -> None:
    """Raises ``ValueError`` unless exactly one of ``steps`` and ``epochs`` is set, and no number is below 1.

    Numbers must be whole. A traced ``steps`` has no value to check, and passes.
    """
    if (work.steps is None) == (work.epochs is None):
        raise ValueError(f"work: got steps={work.steps}, epochs={work.epochs}, must be exactly one of steps and epochs")
    for name, value in zip(("work.steps", "work.epochs", "work.batch_size"), work[:3], strict=True):
        if name == "work.steps" and isinstance(value, jax.core.Tracer):
            continue  # type: ignore[unreachable]  # of a sweep: it has no value to look at
        if value is not None:
            whole(name, value)


class LocalProblem(NamedTuple):
    """The objective ``F_i(w) + <tilt, w> + prox / 2 |w - anchor|^2`` that client i minimises over the parameters w.

    F_i is the client's mean loss.

    Attributes:
        start: Parameters before the first step.
        anchor: Parameters to which the proximal term pulls; None for no such term.
        tilt: Coefficients of the linear term, shaped like the parameters; None for no such term.
        prox: Strength of the proximal term.
    """

    start: PyTree
    anchor: PyTree | None = None
    tilt: PyTree | None = None
    prox: Float[Array, ""] | float = 0.0


_Gradient = Callable[[PyTree, Array, Array, Array], tuple[Array, PyTree]]  # (params, x, y, mask) -> loss, gradient
_LocalStep = Callable[[PyTree, Array, Array, Array], PyTree]  # (carry, x, y, mask of a batch) -> carry


def _gradient(model: Model, loss: Loss, problem: LocalProblem) -> _Gradient:
    apply = with_fast_convolutions(model.apply)

    def objective(
        params: PyTree, x: Shaped[Array, "B ..."], y: Shaped[Array, "B ..."], mask: Bool[Array, "B"]
    ) -> Float[Array, ""]:
        return loss(pytrees.wide(apply(params, x)), y, mask)

    def gradient(
        params: PyTree, x: Shaped[Array, "B ..."], y: Shaped[Array, "B ..."], mask: Bool[Array, "B"]
    ) -> tuple[Float[Array, ""], PyTree]:
        value, grad = jax.value_and_grad(objective)(params, x, y, mask)
        if problem.tilt is not None:
            grad = pytrees.cast_like(pytrees.add(grad, problem.tilt), params)
        if problem.anchor is not None:
            grad = pytrees.add(grad, pytrees.scale(problem.prox, pytrees.subtract(params, problem.anchor)))
        return value, grad

    return gradient


def _shuffled(key: Key, client: Client) -> Int[Array, "max_size"]:
    """Returns the rows of the client's examples in a new random order, padding last, [max_size]."""
    padded = client.rows.shape[0]
    draws = jax.random.uniform(key, (padded,), jnp.float32)
    return client.rows[jnp.argsort(jnp.where(jnp.arange(padded) < client.size, draws, jnp.inf))]


def _of_batch(
    order: Int[Array, "max_size"], t: Int[Array, ""], batch: int, size: Int[Array, ""]
) -> tuple[Int[Array, "batch"], Bool[Array, "batch"]]:
    """Returns the rows of minibatch number ``t`` of an epoch, [batch], and whether each is real, [batch] bool.

    A minibatch has ``batch`` rows. ``order`` has the rows of the client's examples in the order of this epoch, padding
    last; ``size`` of them are real.
    """
    position = t * batch + jnp.arange(batch)
    return order[jnp.minimum(position, order.shape[0] - 1)], position < size


def drawn_batches(work: Work, key: Key, size: Int[Array, ""], largest: int, most: int) -> Int32[Array, "most B"]:
    """Returns the minibatches that ``minimise`` draws with the same key, so that theory can follow them.

    Args:
        work: Local steps and minibatches.
        key: Key of the client's update.
        size: Number of the client's examples, [] int32.
        largest: Number of examples of the largest client.
        most: Number of local steps to return.

    Returns:
        Positions among the client's examples, [most, B] int32 for minibatches of B examples; -1 for padding and after
        the client's last step.
    """
    places = jnp.arange(largest, dtype=jnp.int32)
    client = Client(jnp.int32(0), size, places, FederatedData(places, places, places, places), jnp.int32(0))
    batch = min(work.batch_size or largest, largest)
    per_epoch = jnp.maximum(-(-size // batch), 1)
    total = per_epoch * (work.epochs or 0) if work.steps is None else work.steps

    def one(t: Int[Array, ""]) -> Int[Array, "B"]:
        order = _shuffled(jax.random.fold_in(key, t // per_epoch), client)
        rows, counts = _of_batch(order, t % per_epoch, batch, size)
        return jnp.where(counts & (t < total), rows, -1)

    return jax.vmap(one)(jnp.arange(most, dtype=jnp.int32))


def _all_examples(work: Work, client: Client) -> tuple[tuple[Array, Array, Array], int | Array, Array]:
    """Returns a client's examples, (inputs, targets, mask), and two numbers of full-batch steps.

    The first is the number that ``work`` asks for, maybe traced. The second is the number that the client takes: the
    same, or 0 for a client without examples.
    """
    mask = jnp.arange(client.rows.shape[0]) < client.size
    most = (work.epochs or 0) if work.steps is None else work.steps
    total = jnp.where(client.size > 0, most, 0)
    return (client.data.x[client.rows], client.data.y[client.rows], mask), most, total


def _full_batch(work: Work, client: Client, step: _LocalStep, carry: PyTree) -> tuple[PyTree, Int[Array, ""]]:
    examples, most, total = _all_examples(work, client)
    if work.differentiable:
        return _static_loop(most, total, lambda _, c: step(c, *examples), carry), total
    return jax.lax.fori_loop(0, total, lambda _, c: step(c, *examples), carry), total


def _static_loop(
    most: int | Array, total: Int[Array, ""], body: Callable[[Array, PyTree], PyTree], carry: PyTree
) -> PyTree:
    """Applies ``body(t, carry)`` for t = 0 .. ``total`` - 1 in a scan of fixed length ``most`` (differentiable)."""

    def one(carry: PyTree, t: Array) -> tuple[PyTree, None]:
        return jax.lax.cond(t < total, lambda c: body(t, c), lambda c: c, carry), None

    return jax.lax.scan(one, carry, jnp.arange(most))[0]


def _minibatches(
    work: Work, key: Key, client: Client, step: _LocalStep, carry: PyTree
) -> tuple[PyTree, Int[Array, ""]]:
    batch = min(work.batch_size or 1, client.rows.shape[0])
    per_epoch = -(-client.size // batch)
    total = per_epoch * (work.epochs or 0) if work.steps is None else jnp.where(client.size > 0, work.steps, 0)
    num_epochs = -(-total // jnp.maximum(per_epoch, 1))

    def one(order: Int[Array, "max_size"], t: Int[Array, ""], carry: PyTree) -> PyTree:
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
    """Trains on one client: runs the optimiser on the objective of ``problem`` for the steps of ``work``.

    Args:
        key: Key from which the minibatches are drawn.
        model: The network.
        loss: The loss.
        optimizer: An optax optimiser, whose state starts anew.
        work: Local steps and minibatches.
        problem: Start, anchor, tilt and proximal strength of the objective.
        client: The client's examples.

    Returns:
        The parameters after the last step, and a dictionary with ``loss`` (mean of the batches' losses, each before its
        step and without the problem's further terms, float) and ``steps`` (number of steps, int32). With an optimiser
        that accumulates gradients (``optax.MultiSteps``) it also has ``unapplied``, the number of gradients not yet
        applied, int32. A client of size 0 returns ``start`` unchanged.
    """
    full_batch = work.batch_size is None or work.batch_size >= client.rows.shape[0]
    if full_batch and model.descend and isinstance(optimizer, Sgd) and _is_plain(work, problem):
        return _descended(model.descend, loss, optimizer.rate, work, problem.start, client)
    gradient = _gradient(model, loss, problem)

    def step(carry: PyTree, x: Shaped[Array, "B ..."], y: Shaped[Array, "B ..."], mask: Bool[Array, "B"]) -> PyTree:
        params, opt_state, total_loss = carry
        value, grad = gradient(params, x, y, mask)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total_loss + value.astype(total_loss.dtype)

    carry = (problem.start, optimizer.init(problem.start), jnp.zeros((), jnp.float32))
    if full_batch:
        (params, opt_state, total_loss), steps = _full_batch(work, client, step, carry)
    else:
        (params, opt_state, total_loss), steps = _minibatches(work, key, client, step, carry)
    return params, _info(total_loss, steps) | _unapplied(opt_state)


def _unapplied(opt_state: PyTree) -> dict[str, Array]:
    """Returns ``{"unapplied": number of gradients that optax.MultiSteps has not applied}``; {} for other optimisers."""
    accumulates = lambda part: isinstance(part, optax.MultiStepsState)  # noqa: E731
    waiting = [part.mini_step for part in jax.tree.leaves(opt_state, is_leaf=accumulates) if accumulates(part)]
    return {"unapplied": jnp.max(jnp.stack(waiting))} if waiting else {}


def _info(total_loss: Float[Array, ""], steps: Int[Array, ""]) -> dict[str, Array]:
    return {"loss": total_loss / jnp.maximum(steps, 1), "steps": jnp.asarray(steps, jnp.int32)}


def _is_plain(work: Work, problem: LocalProblem) -> bool:
    """Returns whether ``Model.descend`` can do the local training, as far as ``work`` and ``problem`` decide.

    It can if the problem has no anchor and no tilt, and loops need no static trip counts (``work.differentiable``). The
    caller checks that batches are full and that the optimiser is plain SGD.
    """
    return not work.differentiable and problem.anchor is None and problem.tilt is None


def _descended(
    descend: Descend, loss: Loss, rate: float | Float[Array, ""], work: Work, start: PyTree, client: Client
) -> tuple[PyTree, dict[str, Array]]:
    """Returns the result of ``minimise`` for plain full-batch gradient descent, by one call of ``Model.descend``."""
    (x, y, mask), most, total = _all_examples(work, client)
    params, total_loss = descend(start, x, lambda outputs: loss(pytrees.wide(outputs), y, mask), rate, total, most)
    return params, _info(total_loss, total)


def no_state(params: PyTree) -> tuple[()]:
    """Returns an empty tuple, as the state of a client that keeps nothing between rounds or as an empty message."""
    return ()


def from_broadcast(broadcast: PyTree, client_state: PyTree) -> LocalProblem:
    """Returns the local problem of FedAvg: minimise the client's loss, starting from the broadcast parameters.

    Args:
        broadcast: Parameters that the server sent.
        client_state: The client's state, which is not used.
    """
    return LocalProblem(start=broadcast)


def is_zero(mu: float | Float[Array, ""]) -> bool:
    """Returns whether the proximal strength mu is 0, so that its term can be left out; False for a traced mu."""
    return not isinstance(mu, jax.core.Tracer) and float(mu) == 0


@runtime_checkable
class Pose(Protocol):
    """A function that makes a client's local problem from the server's broadcast and the client's state."""

    def __call__(self, broadcast: PyTree, client_state: PyTree, /) -> LocalProblem:
        """Returns the objective that the client minimises, with the parameters to start from.

        Args:
            broadcast: Tree that the server sent.
            client_state: The client's state for this model.
        """


@runtime_checkable
class Answer(Protocol):
    """A function that makes a client's message to the server after local training."""

    def __call__(
        self, broadcast: PyTree, client_state: PyTree, params: PyTree, steps: Int[Array, ""], client: Client, /
    ) -> tuple[PyTree, PyTree]:
        """Returns the message, and the client's new state.

        Args:
            broadcast: Tree that the server sent.
            client_state: The client's state for this model.
            params: Parameters after the last local step.
            steps: Number of local steps, [] int32.
            client: The client's id, examples and round.
        """


def proximal(mu: float | Float[Array, ""]) -> Pose:
    """Builds FedProx's ``Pose``: minimise the loss plus ``mu / 2 |w - broadcast|^2``, starting at the broadcast."""
    if is_zero(mu):
        return lambda broadcast, client_state: LocalProblem(broadcast)
    return lambda broadcast, client_state: LocalProblem(broadcast, anchor=broadcast, prox=mu)


def difference(
    broadcast: PyTree, client_state: PyTree, params: PyTree, steps: Int[Array, ""], client: Client
) -> tuple[PyTree, PyTree]:
    """Returns FedAvg's message ``broadcast - params``, and the client's state unchanged (an ``Answer``).

    Args:
        broadcast: Parameters that the server sent.
        client_state: The client's state.
        params: Parameters after the last local step.
        steps, client: Not used.
    """
    return pytrees.subtract(broadcast, params), client_state


class Posed(TypedDict, total=False):
    """The functions in which an algorithm's local training may differ from FedAvg's; each one is optional.

    Attributes:
        pose: Makes the problem that a client minimises; by default its loss, starting from the broadcast.
        answer: Makes the client's message; by default the broadcast minus the trained parameters.
        init: Makes a client's first state from a model's parameters; by default an empty state.
        message: Makes a tree with the shapes of a message from a model's parameters; by default the parameters.
        settle: Corrects the client's state after its message has travelled; by default no correction.
    """

    pose: Pose
    answer: Answer
    init: OfParameters
    message: OfParameters
    settle: Settle


def local_training(model: Model, loss: Loss, optimizer: Optimizer, work: Work, **posed: Unpack[Posed]) -> Local:
    """Builds a client's part of an algorithm: local training and its message, by default as in FedAvg.

    Args:
        model: The network.
        loss: The loss.
        optimizer: An optax optimiser, or a function from the round to one (such as ``optimizers.sgd`` of a
            learning-rate schedule); its state does not outlive a round.
        work: Local steps and minibatches.
        posed: Fields of ``Posed`` in which the algorithm differs from FedAvg.

    Raises:
        ValueError: ``work`` sets both or neither of ``steps`` and ``epochs``, or a number below 1.
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
