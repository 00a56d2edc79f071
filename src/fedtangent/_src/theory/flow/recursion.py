"""The recursion of the federated kernel flow, compiled once per problem shape.

Every parameter vector of a run (the K models, a momentum buffer, corrections) stays in the span of the initial weights
and the training features: it is ``beta w_0 - Phi a`` with a number beta and coefficients a [q]. A round maps these
linearly, so the recursion carries a few columns and never an n x n operator. The numbers beta depend on the rule only
and are computed first (``shares_of_start``).

The same map serves in both directions. Forward it gives the path of every prediction. Its transpose, applied to
``Theta(X, x)``, gives how a prediction depends on the initial function (``influence``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from fedtangent._src.kernels.gram import product
from fedtangent._src.theory.flow import clients
from fedtangent._src.theory.flow.clients import Batch, Bucket, Drive
from fedtangent._src.theory.flow.rounds import BucketSlots, Rounds
from fedtangent._src.theory.flow.rules import Kind, Numbers
from fedtangent._src.types import AnyArray, Array

GATHERED = 2**25  # numbers of a large kernel gathered at once
GATHERED_ON_CPU = 2**21  # the same on a CPU, whose caches have room for so many
Momentum = TypeVar("Momentum", Array, Array | None)
Kept = TypeVar("Kept", Array, tuple[()])


class FlowState(NamedTuple):
    """State of a run after a round, as coefficients of the training features; None for parts that the rule lacks.

    Axes are q rows of the training kernel, K models, and D coefficient vectors of each model (one for each output).

    ``a`` are the K models and ``past`` the models of earlier rounds. ``memory`` is the server's momentum buffer,
    FedDyn's h or SCAFFOLD's c, and ``corrections`` are the clients' h_i or c_i on their own examples, one array for
    each bucket (group of clients of similar size).
    """

    a: Float[Array, "q K D"]  # the models
    memory: Float[Array, "q K D"] | None  # the server's momentum buffer, FedDyn's h or SCAFFOLD's c
    corrections: tuple[Float[Array, "_ K _ D"], ...] | None  # per bucket [b, K, s, D]: h_i or c_i on the client's rows
    past: Float[Array, "q _ D"] | None = None  # the models of one round ago, two, .. up to the largest delay

    @property
    def models(self) -> Float[Array, "q _ D"]:
        """The models of this round and earlier ones from which clients may start, the newest first along axis 1."""
        return self.a if self.past is None else jnp.concatenate([self.a, self.past], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Program:
    """The problem that the recursion runs on, without the initial functions.

    ``kind`` and ``numbers`` describe the rule, ``theta`` is the kernel of the training points, ``buckets`` are the
    clients in groups of similar size, and ``rounds`` says who trains which model when, at which rates.
    """

    kind: Kind = field(metadata={"static": True})
    theta: Float[Array, "q p"]  # kernel of the training points, [q, q]; a large kernel has p >= q columns
    buckets: tuple[Bucket, ...]
    rounds: Rounds
    numbers: Numbers
    targets: Shaped[Array, "q D"] | None = None  # under a loss other than the squared error

    @property
    def num_models(self) -> int:
        """Number K of models."""
        return self.rounds.trained.shape[1]


class Input(NamedTuple):
    """Initial functions at the training points; under the squared error the recursion is linear in them.

    Both arrays are [q, K, D]: q rows of the training kernel, K models (or 1, the same function for all), D outputs.
    ``residual`` is ``f_0(X) - Y``, or f_0(X) under another loss. ``along`` is the Jacobian times the initial weights,
    ``J(X) w_0``; None without weight decay.
    """

    residual: Float[AnyArray, "q _ D"]  # f_0(X) - Y; under another loss f_0(X)
    along: Float[AnyArray, "q _ D"] | None  # J(X) w_0; None without weight decay


def zero_state(program: Program, columns: int) -> FlowState:
    """Returns the state before the first round, all zeros.

    Args:
        program: Rule, kernel, clients and rounds.
        columns: Number D of coefficient vectors of each model.
    """
    a = jnp.zeros((program.theta.shape[0], program.num_models, columns))
    remembers = program.kind.has_server_momentum or program.kind.corrects
    corrections = None
    if program.kind.corrects:
        shapes = [(b.rows.shape[0], program.num_models, b.rows.shape[1], columns) for b in program.buckets]
        corrections = tuple(map(jnp.zeros, shapes))
    past = jnp.tile(jnp.zeros_like(a), (1, program.kind.most_delay, 1)) if program.kind.most_delay else None
    return FlowState(a, jnp.zeros_like(a) if remembers else None, corrections, past)


@jax.jit
def shares_of_start(program: Program) -> Float[Array, "rounds K"]:
    """Computes beta, the share of the initial weights that weight decay leaves, before each round and at the end.

    The result is [R + 1, K], for R rounds of K models.
    """
    return _decay(program, jnp.ones(program.num_models), jnp.zeros(program.num_models))[0]


@jax.jit
def decay_map(program: Program) -> Float[Array, "s s"]:
    """Computes the matrix by which a pass over all rounds multiplies one model's share of the initial weights.

    It is [2, 2], and acts on the share and the server's momentum of it; without server momentum it is [1, 1].
    ``program`` must have a single model.
    """
    columns = [_decay(program, jnp.full(1, b), jnp.full(1, 1.0 - b)) for b in (1.0, 0.0)]
    whole = jnp.stack([jnp.stack([betas[-1, 0], memory[0]]) for betas, memory in columns], axis=1)
    return whole if program.kind.has_server_momentum else whole[:1, :1]


def _decay(
    program: Program, beta: Float[Array, "K"], memory: Float[Array, "K"]
) -> tuple[Float[Array, "rounds K"], Float[Array, "K"]]:
    """Computes the share of the initial weights before each round and at the end, and the last momentum [K].

    ``beta`` [K] is the share before the first round, and ``memory`` [K] its momentum.
    """
    rounds = program.rounds

    def step(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], Array]:
        beta, memory = carry
        change = -program.numbers.weight_decay * _mean_kappa(program, j) * beta
        moved, memory = _server_momentum(program, change, memory, rounds.trained[j])
        return (beta + rounds.server_learning_rate[j] * moved, memory), beta

    (last, memory), before = jax.lax.scan(step, (beta, memory), jnp.arange(rounds.model.shape[0]))
    return jnp.concatenate([before, last[None]]), memory


@jax.jit
def path(
    program: Program, starts: Input, beta: Float[Array, "rounds K"], rounds: Int[Array, "E"]
) -> Float[Array, "E q K D"]:
    """Computes the models' coefficients after each of ``rounds``, [E, q, K, D].

    A model has D vectors of coefficients; q is the number of rows of the training kernel.

    Args:
        program: Rule, kernel, clients and rounds.
        starts: Initial functions at the training points.
        beta: Share of the initial weights w_0 that is left before each round and after the last, [R + 1, K].
        rounds: Numbers of finished rounds [E], increasing. The recursion stops after the last of them.
    """
    start = zero_state(program, starts.residual.shape[2])
    num_records, num_rounds = len(rounds), len(beta) - 1
    # The record that each round fills: num_records for none, -1 for a round that is not run.
    record = jnp.where(jnp.arange(num_rounds) < rounds[-1], num_records, -1)
    record = record.at[jnp.where(rounds > 0, rounds - 1, num_rounds)].set(jnp.arange(num_records), mode="drop")

    def step(carry: tuple[FlowState, Array], now: tuple[Array, Array]) -> tuple[tuple[FlowState, Array], None]:
        state, records = carry
        j, place = now
        state = jax.lax.cond(place >= 0, lambda: one_round(program, starts, beta[j], state, j), lambda: state)

        def filled() -> Array:
            return jax.lax.dynamic_update_index_in_dim(records, state.a, place, 0)

        return (state, jax.lax.cond((place >= 0) & (place < num_records), filled, lambda: records)), None

    empty = jnp.zeros((num_records, *start.a.shape))
    return jax.lax.scan(step, (start, empty), (jnp.arange(num_rounds), record))[0][1]


@jax.jit
def last_state(program: Program, starts: Input, beta: Float[AnyArray, "rounds K"], start: FlowState) -> FlowState:
    """Computes the state after all rounds.

    Args:
        program: Rule, kernel, clients and rounds.
        starts: Initial functions at the training points.
        beta: Share of the initial weights w_0 that is left before each round and after the last, [R + 1, K].
        start: State before the first round.
    """

    def step(state: FlowState, j: Array) -> tuple[FlowState, None]:
        return one_round(program, starts, jnp.asarray(beta)[j], state, j), None

    return jax.lax.scan(step, start, jnp.arange(len(beta) - 1))[0]


@jax.jit
def influence(
    program: Program,
    theta_x: Float[Array, "m q"],
    beta: Float[Array, "rounds K"],
    active: Bool[Array, "R"],
) -> Float[Array, "K m q"]:
    """Computes how predictions depend on the initial function, by the transpose of the rounds.

    The rounds are transposed one by one, from the last to the first. A transpose of the whole scan would store at once
    the gathered rows of every round.

    Args:
        program: Rule, kernel, clients and rounds.
        theta_x: Kernel Theta(x, X) of the m points of the prediction, [m, q].
        beta: Share of the initial weights w_0 that is left before each round, [R + 1, K].
        active: Whether each round has taken place, [R] bool.

    Returns:
        B of ``f(x) = gamma f_0(x) - B f_0(X) + ..`` for each model, [K, m, q].
    """
    last = _influenced(program, theta_x, beta, active, lambda _: ())[0]
    return last.transpose(1, 2, 0)


@jax.jit
def influences(
    program: Program, theta_x: Float[Array, "m q"], beta: Float[Array, "rounds K"]
) -> Float[Array, "R K m q"]:
    """Computes how the last model depends on a function that is added before each of the R rounds, [R, K, m, q].

    Without weight decay a function g that is added before round r changes the last model by ``g(x) - B_r g(X)``.

    Args:
        program: Rule, kernel, clients and rounds.
        theta_x: Kernel Theta(x, X) of the m points of the prediction, [m, q].
        beta: Share of the initial weights w_0 that is left before each round, [R + 1, K].
    """
    active = jnp.ones(len(beta) - 1, bool)
    return _influenced(program, theta_x, beta, active, lambda b: b.transpose(1, 2, 0))[1]


def _influenced(
    program: Program,
    theta_x: Float[Array, "m q"],
    beta: Float[Array, "rounds K"],
    active: Bool[Array, "R"],
    record: Callable[[Array], Kept],
) -> tuple[Float[Array, "q K m"], Kept]:
    """Transposes the rounds from the last to the first; returns B of ``influence`` [q, K, m], and records.

    The records stack, over the rounds, what ``record`` returns for the B of a function that is added before the round.
    """
    state = zero_state(program, theta_x.shape[0])
    zeros = jnp.zeros_like(state.a)
    starts = Input(zeros, zeros if program.kind.decays else None)

    def of_functions(total: Input) -> Array:
        b = jnp.asarray(total.residual)
        return b if total.along is None else b + program.numbers.homogeneity * total.along

    def back(carry: tuple[FlowState, Input], now: tuple[Array, Array]) -> tuple[tuple[FlowState, Input], Kept]:
        j, is_active = now

        def transposed() -> tuple[FlowState, Input]:
            behind, total = carry

            def forward(starts: Input, state: FlowState) -> FlowState:
                return one_round(program, starts, beta[j], state, j)

            of_input, of_state = jax.linear_transpose(forward, starts, state)(behind)
            return of_state, jax.tree.map(jnp.add, total, of_input)

        after = jax.lax.cond(is_active, transposed, lambda: carry)
        return after, record(of_functions(after[1]))

    last = state._replace(a=jnp.broadcast_to(theta_x.T[:, None, :], zeros.shape))
    rounds = jnp.arange(len(active))
    (_, total), records = jax.lax.scan(back, (last, starts), (rounds, active), reverse=True)
    return of_functions(total), records


def one_round(
    program: Program, starts: Input, beta: Float[Array, "K"], state: FlowState, j: Int[Array, ""]
) -> FlowState:
    """Computes the state after round ``j``.

    Args:
        program: Rule, kernel, clients and rounds.
        starts: Initial functions at the training points.
        beta: Share of the initial weights w_0 that is left before the round, [K].
        state: State before the round.
        j: Index of the round.
    """
    drive = _drive(program, starts, beta, state, j)
    sums = _trained(program, drive, state, j)
    change = _with_pull(program, state, sums)
    past = None if state.past is None else state.models[:, : state.past.shape[1]]
    return _server(program, j, state, change, sums)._replace(past=past)


class _Sums(NamedTuple):
    """Weighted sums of the clients' updates in a round, for each of K models; arrays as in ``FlowState``.

    ``change`` sums updates, ``corrected`` changes of SCAFFOLD's c_i, and ``pull`` kappa, how far a constant gradient
    of size 1 moves a client. ``starts`` sums FedAsync's weights by the model from which clients start. Not summed are
    the clients' ``corrections`` after the round, and the ``norms`` of their updates before clipping.
    """

    change: Float[Array, "q K D"]  # coefficients of their moves
    corrected: Float[Array, "q K D"]  # SCAFFOLD: changes of c_i
    pull: Float[Array, "K"]  # kappa: how far a constant force of size 1 moves the clients
    starts: Float[Array, "_"] | None  # FedAsync: weights of the answers by the model at which they start
    corrections: tuple[Float[Array, "_ K _ D"], ...] | None  # each client's after the round, not added up
    norms: Float[Array, "S"] | None = None  # of the clients' moves before clipping; None without clipping


class _Answers(NamedTuple):
    """Updates of the S clients of one bucket (group of similar size) that train in a round.

    They are coefficients on the s kernel rows of each client, with D columns (outputs).
    """

    moves: Float[Array, "S s D"]  # coefficients of the client's move on the client's rows
    gradient: Float[Array, "S s D"]  # z, the part of the move that comes from the client's data
    kappa: Float[Array, "S"]  # how far a constant gradient of size 1 moves the client


def _drive(program: Program, starts: Input, beta: Float[Array, "K"], state: FlowState, j: Int[Array, ""]) -> Drive:
    """Computes the residuals and tilts with which clients start training in round ``j``, on all training points.

    ``beta`` [K] is the share of the initial weights that is left before the round, ``state`` the state before it.
    """
    controlled = program.kind.algorithm == "scaffold"
    carried = [state.a, state.memory] if controlled and state.memory is not None else [state.models]
    values = _products(program, jnp.concatenate(carried, axis=2), j)
    moved = values[..., : state.a.shape[2]]
    ages, start = 1 + program.kind.most_delay, jnp.broadcast_to(jnp.asarray(starts.residual), state.a.shape)
    residual, tilt = jnp.tile(start, (1, ages, 1)) - moved, None
    if program.kind.decays and starts.along is not None:
        remaining = beta[None, :, None] * starts.along
        residual = residual + remaining - starts.along
        tilt = program.numbers.weight_decay * (remaining - moved)
    elif controlled:
        tilt = -values[..., state.a.shape[2] :]
    return Drive(residual, tilt, program.targets)


def clipped_round(
    program: Program, starts: Input, a: Float[Array, "q 1 D"], j: Int[Array, ""], clip_norm: Array | float
) -> tuple[Float[Array, "q 1 D"], Float[Array, "S"]]:
    """Computes the server's change of one model in a round in which clients' updates are clipped.

    Args:
        program: Rule (FedAvg without weight decay and server momentum), kernel, clients and rounds of one model.
        starts: Initial functions at the training points.
        a: Coefficients of the model before the round.
        j: Index of the round.
        clip_norm: Bound on the norm of an update.

    Returns:
        The change of ``a`` at server rate 1, and the norm of every client's update before clipping, [S], for a round of
        S slots (places for a client); 0 for an empty slot.
    """
    state = FlowState(a, None, None)
    sums = _trained(program, _drive(program, starts, jnp.ones(1), state, j), state, j, clip_norm)
    assert sums.norms is not None
    return sums.change, sums.norms


def _trained(
    program: Program, drive: Drive, state: FlowState, j: Int[Array, ""], clip_norm: Array | float | None = None
) -> _Sums:
    """Trains the clients of round ``j`` and returns the weighted sums of their updates, for each model.

    ``drive`` has the residuals (under other losses outputs and targets) and tilts at which they start, and ``state`` is
    the state before the round. If ``clip_norm`` is set, each update is clipped to this norm before it is weighted.
    """
    rounds = program.rounds
    change, corrected, pull = jnp.zeros_like(state.a), jnp.zeros_like(state.a), jnp.zeros(program.num_models)
    starts = jnp.zeros(state.models.shape[1]) if program.kind.algorithm == "fed_async" else None
    norms = None if clip_norm is None else jnp.zeros(rounds.model.shape[1])
    normaliser = _mean_kappa(program, j) if program.kind.algorithm == "fed_nova" else None
    corrections = []
    for i, (bucket, slots) in enumerate(zip(program.buckets, rounds.slots, strict=True)):
        weight, model = _weights_of(slots, rounds, j)
        if rounds.delay is not None and rounds.oldest is not None:
            age = jnp.minimum(rounds.delay[j][slots.slot[j]], rounds.oldest[j])
            weight = weight * program.numbers.delay_weights[age]
        correction = None
        if state.corrections is not None:
            correction = state.corrections[i].at[slots.place[j], model].get(mode="fill", fill_value=0.0)
        answer = _answers(program, bucket, slots, j, drive, correction)
        if normaliser is not None:
            weight = weight * normaliser[model] / jnp.where(answer.kappa > 0, answer.kappa, 1.0)
        if norms is not None and clip_norm is not None:
            lengths = jnp.where(weight > 0, clients.lengths(bucket, slots.place[j], answer.moves), 0.0)
            weight = weight * jnp.minimum(1.0, clip_norm / jnp.where(lengths > 0, lengths, 1.0))
            norms = norms.at[slots.slot[j]].add(lengths)
        at = bucket.rows[slots.place[j]], model[:, None]
        change = change.at[at].add(weight[:, None, None] * answer.moves, mode="drop")
        pull = pull.at[model].add(weight * answer.kappa)
        starts = None if starts is None else starts.at[_start_of(program, slots, j)].add(weight)
        if state.corrections is not None and correction is not None:
            step = _correction_change(program, answer, correction)
            step = jnp.where(slots.present[j][:, None, None], step, 0.0)
            corrections.append(state.corrections[i].at[slots.place[j], model].add(step))
            corrected = corrected.at[at].add(weight[:, None, None] * step, mode="drop")
    return _Sums(change, corrected, pull, starts, tuple(corrections) or None, norms)


def _with_pull(program: Program, state: FlowState, sums: _Sums) -> Float[Array, "q K D"]:
    """Returns the change of each model in a round: the clients' summed updates plus parts that do not come from data.

    These parts are weight decay, SCAFFOLD's c and FedAsync's late models. ``state`` is the state before the round.
    """
    change, pull = sums.change, sums.pull[None, :, None]
    if sums.starts is not None:
        away = state.models - jnp.tile(state.a, (1, 1 + program.kind.most_delay, 1))
        of_ages = (sums.starts[None, :, None] * away).reshape(away.shape[0], -1, *state.a.shape[1:])
        change = change + of_ages.sum(axis=1)
    if program.kind.decays:
        change = change - program.numbers.weight_decay * pull * state.a
    if program.kind.algorithm == "scaffold" and state.memory is not None:
        change = change - pull * state.memory
    return change


def _answers(
    program: Program,
    bucket: Bucket,
    slots: BucketSlots,
    j: Int[Array, ""],
    drive: Drive,
    correction: Float[Array, "S s D"] | None,
) -> _Answers:
    """Trains the clients of one bucket (group of similar size) in round ``j`` and returns their updates.

    An update is kernel coefficients on the rows of the client's own examples. ``drive`` has the residuals at the start
    (under other losses than the squared error outputs and targets) and the tilt, a linear term that all local
    objectives share, such as weight decay. ``correction`` has the coefficients of the clients' h_i (FedDyn) or c_i
    (SCAFFOLD); None for other rules.
    """
    place = slots.place[j]
    at = bucket.rows[place], _start_of(program, slots, j)[:, None]
    batches = None if program.rounds.batches is None else program.rounds.batches[j][slots.slot[j]]
    on_rows = Drive(
        drive.values.at[at].get(mode="fill", fill_value=0.0),
        None if drive.tilt is None else drive.tilt.at[at].get(mode="fill", fill_value=0.0),
        None if drive.targets is None else drive.targets.at[at[0]].get(mode="fill", fill_value=0.0),
    )

    def one(slot: tuple[Array, Array, Drive, Array | None, Array | None]) -> Array:
        i, present, drive, e, batches = slot

        def trained() -> Array:
            return _train(program, bucket, i, j, drive, e, batches)

        return jax.lax.cond(present, trained, lambda: jnp.zeros_like(drive.values))

    z = jax.lax.map(jax.checkpoint(one), (place, slots.present[j], on_rows, correction, batches))
    kappa = _kappas_of(program, bucket, slots, j)
    return _Answers(z if correction is None else z + kappa[:, None, None] * correction, z, kappa)


def _train(
    program: Program,
    bucket: Bucket,
    i: Int[Array, ""],
    j: Int[Array, ""],
    drive: Drive,
    e: Float[Array, "s D"] | None,
    batches: Int[Array, "T B"] | None,
) -> Float[Array, "s D"]:
    """Trains client ``i`` of a group of clients in round ``j``; returns the coefficients of its update, z [s, D].

    ``drive`` has the residual and tilt on the client's rows, ``e`` the coefficients of the client's h_i (FedDyn) or c_i
    (SCAFFOLD; None for other rules), and ``batches`` its minibatches (None for full batches).
    """
    kind, numbers, steps, rate = program.kind, program.numbers, bucket.local_steps[i], program.rounds.learning_rate[j]
    if kind.stepwise:
        assert bucket.block is not None
        block, width = bucket.block[i], kind.rows_per_example
        sizes = clients.sizes_of_steps(kind, numbers, rate, steps)
        if e is not None:
            drive = drive._replace(tilt=product(block, e) + (0.0 if drive.tilt is None else drive.tilt))
        count, everyone = bucket.num_examples[i], jnp.arange(block.shape[0])

        def of_step(t: Int[Array, ""]) -> Batch:
            if batches is None:
                return Batch(everyone, everyone // width < count)
            rows = batches[t][:, None] * width + jnp.arange(width)[None]
            rows = jnp.where(batches[t][:, None] >= 0, rows, block.shape[0]).ravel()
            return Batch(rows, jnp.repeat(batches[t] >= 0, width))

        optimizer = clients.unit_optimizer(kind, j)
        return clients.descent_by_steps(kind, numbers, block, optimizer, of_step, steps, sizes, drive)
    eigenvalues, vectors = bucket.eigenvalues[i], bucket.eigenvectors[i]
    gains = clients.gains(kind, numbers, eigenvalues, rate, bucket.num_examples[i], steps)
    turned = gains.residual[:, None] * product(vectors.T, drive.values)
    if kind.tilts:
        force = jnp.zeros_like(turned) if drive.tilt is None else product(vectors.T, drive.tilt)
        if e is not None:
            force = force + eigenvalues[:, None] * product(vectors.T, e)
        turned = turned - gains.tilt[:, None] * force
    return product(vectors, turned)


def _correction_change(program: Program, answer: _Answers, correction: Float[Array, "S s D"]) -> Float[Array, "S s D"]:
    """Computes the change of clients' h_i (FedDyn: ``-mu`` times the update) or c_i (SCAFFOLD, option II).

    ``answer`` has the clients' updates, ``correction`` the h_i or c_i before them. In a round of rate 0 no c_i changes.
    """
    if program.kind.algorithm == "fed_dyn":
        return -program.numbers.mu * answer.moves
    moves = (answer.kappa > 0)[:, None, None]  # in a round of rate 0 no control variate changes
    return jnp.where(moves, -answer.gradient / jnp.where(moves, answer.kappa[:, None, None], 1.0) - correction, 0.0)


def _server(
    program: Program, j: Int[Array, ""], state: FlowState, change: Float[Array, "q K D"], sums: _Sums
) -> FlowState:
    """Returns the state after the server's step of round ``j``; a model that no client trains keeps its state.

    ``change`` is the change of each model at server rate 1 (``_with_pull``), and ``sums`` has the clients' corrections.
    """
    rounds = program.rounds
    trained, rate = rounds.trained[j][None, :, None], rounds.server_learning_rate[j]
    fraction = rounds.fraction[j][None, :, None]
    if program.kind.algorithm == "fed_dyn" and state.memory is not None:
        h = state.memory - program.numbers.mu * fraction * change
        return FlowState(state.a + rate * jnp.where(trained, change - h / program.numbers.mu, 0.0), h, sums.corrections)
    if program.kind.algorithm == "scaffold" and state.memory is not None:
        return FlowState(state.a + rate * change, state.memory + fraction * sums.corrected, sums.corrections)
    if program.kind.algorithm == "modified_local_gd":  # (1 - alpha) w_0 + alpha w, of which w_0 has no coefficients
        drawn_back = rounds.anchoring[j] * (state.a + rate * change)
        return FlowState(jnp.where(trained, drawn_back, state.a), None, None)
    moved, memory = _server_momentum(program, change, state.memory, trained)
    return FlowState(state.a + rate * moved, memory, sums.corrections)


def _server_momentum(program: Program, change: Array, memory: Momentum, trained: Array) -> tuple[Array, Momentum]:
    """Applies momentum, ``v = momentum v + change``; returns the step v (Nesterov: ``change + momentum v``) and v.

    ``trained`` says which models a client trains; the other models do not move and keep their v.
    """
    if not program.kind.has_server_momentum or memory is None:
        return change, memory
    new = jnp.where(trained, program.numbers.server_momentum * memory + change, memory)
    moved = change + program.numbers.server_momentum * new if program.kind.nesterov else new
    return jnp.where(trained, moved, 0.0), new


def _weights_of(slots: BucketSlots, rounds: Rounds, j: Int[Array, ""]) -> tuple[Float[Array, "S"], Int[Array, "S"]]:
    """Returns weight (0 for padding) and model of the places for clients of one bucket in round ``j``, [S] each."""
    slot = slots.slot[j]
    return jnp.where(slots.present[j], rounds.weight[j][slot], 0.0), rounds.model[j][slot]


def _start_of(program: Program, slots: BucketSlots, j: Int[Array, ""]) -> Int[Array, "S"]:
    """Returns the index in ``FlowState.models`` of the model from which each client starts in round ``j``, [S]."""
    slot, rounds = slots.slot[j], program.rounds
    model = rounds.model[j][slot]
    return model if rounds.delay is None else model + program.num_models * rounds.delay[j][slot]


def _kappas_of(program: Program, bucket: Bucket, slots: BucketSlots, j: Int[Array, ""]) -> Float[Array, "S"]:
    """Computes kappa, how far a constant gradient of size 1 moves a client, for each client of one bucket, [S]."""
    place, rate = slots.place[j], program.rounds.learning_rate[j]
    kind, optimizer = program.kind, clients.unit_optimizer(program.kind, j)
    untilted = kind._replace(algorithm="fed_avg", decays=False)

    def kappa(num_examples: Array, steps: Array) -> Array:
        if kind.stepwise:
            sizes = clients.sizes_of_steps(kind, program.numbers, rate, steps)
            return clients.kappas(optimizer, program.numbers.nu, sizes)[1]
        return clients.gains(untilted, program.numbers, jnp.zeros(1), rate, num_examples, steps).kappa

    return jax.vmap(kappa)(jnp.asarray(bucket.num_examples)[place], jnp.asarray(bucket.local_steps)[place])


def _mean_kappa(program: Program, j: Int[Array, ""]) -> Float[Array, "K"]:
    """Computes the weighted mean of the clients' kappas (``_kappas_of``) in round ``j``, [K]; 0 without a client."""
    mean = jnp.zeros(program.num_models)
    for bucket, slots in zip(program.buckets, program.rounds.slots, strict=True):
        weight, model = _weights_of(slots, program.rounds, j)
        mean = mean.at[model].add(weight * _kappas_of(program, bucket, slots, j))
    return mean


def _products(program: Program, a: Float[Array, "q _ D"], j: Int[Array, ""]) -> Float[Array, "q _ D"]:
    """Multiplies the kernel with the coefficients ``a`` of the models in round ``j``: ``Theta a``, shaped like ``a``.

    Axis 1 of ``a`` has the K models of the round, then the models of earlier rounds, as ``FlowState.models``. If
    ``program.rounds.needed`` is not None, each model gets only the rows of the clients that train it in round ``j``,
    and 0 in all other rows.
    """
    if program.rounds.needed is None:
        return product(program.theta, a)
    rows = jnp.tile(program.rounds.needed[j], (a.shape[1] // program.num_models, 1))
    if program.theta.dtype == jnp.float32:  # a large kernel, of which nothing is transposed: a loop may end early
        mapped = jax.lax.map(lambda model: in_chunks(program.theta, *model), (rows, a.transpose(1, 0, 2)))
        return mapped.transpose(1, 0, 2)

    def one(model: tuple[Array, Array]) -> Array:
        mine, columns = model
        return product(program.theta.at[mine].get(mode="fill", fill_value=0.0), columns)

    # Without the checkpoint a transpose would gather the rows of all models first, another n x n numbers.
    products = jax.lax.map(jax.checkpoint(one), (rows, a.transpose(1, 0, 2)))
    models = jnp.arange(a.shape[1])[:, None]
    return jnp.zeros_like(a).at[rows, models].add(products, mode="drop", unique_indices=True)


@jax.jit
def in_chunks(theta: Float[Array, "q p"], rows: Int[Array, "E"], a: Float[Array, "q D"]) -> Float[Array, "q D"]:
    """Computes the listed rows of ``Theta a`` [q, D], 0 elsewhere, and gathers few rows of Theta at a time.

    Args:
        theta: Kernel [q, p].
        rows: Rows to compute, int32; entries of q or more are padding and come last.
        a: Coefficients [q, D].
    """
    gathered = GATHERED_ON_CPU if jax.default_backend() == "cpu" else GATHERED
    q, chunk = theta.shape[0], max(1, min(len(rows), gathered // theta.shape[1]))
    rows = jnp.concatenate([rows, jnp.full(-len(rows) % chunk, q, rows.dtype)])

    def with_chunk(i: Array, products: Array) -> Array:
        mine = jax.lax.dynamic_slice_in_dim(rows, i * chunk, chunk)
        return products.at[mine].set(product(theta.at[mine].get(mode="fill", fill_value=0.0), a), mode="drop")

    count = jnp.sum(rows < q)  # they come first
    return jax.lax.fori_loop(0, (count + chunk - 1) // chunk, with_chunk, jnp.zeros_like(a))
