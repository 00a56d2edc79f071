"""Learning without a server: models that walk from client to client, and clients that learn with their neighbours."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import pytrees, types
from fedtangent._src.checks import choice, instance
from fedtangent._src.federated.aggregate import OptaxState, Stacked, optax_server
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.averaging import check_base, fed_avg
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.algorithms.tangent import Pooling, evolving, of_loss
from fedtangent._src.federated.compose import Parts, sequentially
from fedtangent._src.federated.graph import (
    Graph,
    check_doubly_stochastic,
    metropolis_weights,
    named_graph,
    spectral_gap,
)
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.schedule import drawn_cohorts
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, sgd
from fedtangent._src.types import (
    Algorithm,
    Array,
    Cost,
    FederatedData,
    Model,
    PyTree,
    Recipe,
    Schedule,
    Server,
    ServerUpdate,
)

ORDERS = ("train_then_mix", "mix_then_train")
CHECKED_ROUNDS = 100  # of a schedule, to see whether models can walk by themselves
MIXES = "every client trains a separate model, and neighbours mix theirs; nearest is fed_avg, which mixes all"
EVOLVES = (
    "each client evolves a kernel (theory.neighbourhood_round); nearest is fed_avg, with which `compare` compares it"
)


@recipe(papers=("shi2024",), parts="as --base, for K models that walk on a graph", schedule="random_walk")
def random_walk(model: Model, schedule: Schedule, *, base: Recipe = fed_avg, **options: Any) -> Algorithm:
    """Builds K models that walk over a graph of clients and train where they stand (paper FE-2024, section V-H).

    It is ``base`` under the schedule ``schedules.random_walk(graph, K)``. K = 1 is the paper's "FedAvg Random Walk". K
    models are "Fed-ensemble Random Walk" (figure 6), whose prediction is the mean of the models. There is no server: a
    client sends the model that it trained to the next client. The wire ledger charges one message up for each model in
    each round, also for a model that stays, and nothing down.

    Args:
        schedule: A schedule under which at most one client trains each model in a round.

    Raises:
        ValueError: A schedule under which several clients train one model in one of the first 100 rounds (others are
            not checked) or whose clients are polled, ``averaging`` with ``shuffle`` or ``secure_aggregation``, which
            need a server, and as ``base`` raises.
    """
    check_base(base)
    _no_server("random_walk", options.get("averaging"))
    if not _walks(schedule):
        must = "must train each model on at most one client a round, as schedules.random_walk does"
        raise ValueError(f"schedule: got {schedule!r}, {must}")
    algorithm = base(model, schedule, **options)
    name = "random_walk" if base is fed_avg else f"{algorithm.name}_random_walk"
    return types.wrapped(algorithm, name, lambda cost, data: _between_clients(cost, 1.0))


def _no_server(name: str, averaging: Averaging | None) -> None:
    """Raises ``ValueError`` if ``averaging`` has shuffling or secure aggregation: algorithm ``name`` has no server."""
    for option in ("shuffle", "secure_aggregation"):
        if averaging is not None and getattr(averaging, option):
            raise ValueError(f"{option}: hides clients from a server, but {name} has none: leave it out")


def _walks(schedule: Schedule, same_client: bool = False) -> bool:
    """Returns whether at most one client trains each model in a round, so that models can walk by themselves.

    With ``same_client`` client k must also train model k. The first 100 rounds are checked.
    """
    client, model = _first_rounds(schedule, CHECKED_ROUNDS)
    is_alone = np.all(np.diff(np.sort(model, axis=1), axis=1) > 0)
    return bool(is_alone) and (not same_client or np.array_equal(client, model))


def _first_rounds(schedule: Schedule, num_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the clients of the schedule's first R rounds and the models that they train, [R, S] each for S pairs.

    Pairs of weight 0, which do not train, are included.
    """
    instance("schedule", schedule, Schedule)
    with jax.ensure_compile_time_eval():
        client, model, _ = drawn_cohorts(schedule, None, num_rounds, weighting=None)
    return np.asarray(client), np.asarray(model)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Options of gossip: the graph along which neighbours mix their models, the order of the steps, and the start."""

    graph: Graph | np.ndarray | str = "ring"
    """ring, torus, complete or erdos_renyi:<probability>. Or a graph, which mixes by ``graphs.metropolis_weights``; or
    a matrix [K, K], symmetric, rows sum to 1, at least 0, with a spectral gap."""
    order: str = "train_then_mix"
    """train_then_mix or mix_then_train."""
    common_start: bool = True
    """Off: initialise each model separately; in the papers all models start with the same parameters."""
    seed: int = 0
    """Seed of a random graph."""


@recipe(
    papers=("lian2017",),
    parts="local SGD; own model; mixing with neighbours",
    schedule="own",
    unused=("server_optimizer", "channel", "shuffle", "secure_aggregation"),
)
def gossip(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    mixing: Mixing = Mixing(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds gossip averaging: every client trains a model and mixes it with its neighbours' (decentralised SGD).

    With ``W`` the mixing matrix, ``x_k`` the models and ``d_k`` the update that local training subtracts from model k:
    ``x_k <- sum_j W_kj (x_j - d_j)`` for ``"train_then_mix"`` (Koloskova et al., ICML 2020, algorithm 1), and ``x_k <-
    sum_j W_kj x_j - d_k`` for ``"mix_then_train"``, where training and sending take place at once. With one local step
    ``"mix_then_train"`` is D-PSGD (Lian et al., NeurIPS 2017, algorithm 1; its footnote allows the other order too).

    A client that drops out, or whose message is rejected, neither trains nor exchanges: its model stays unchanged, and
    its neighbours add its weight to their own models' weights. So every round mixes by a symmetric, doubly stochastic
    matrix, and mixing never changes the mean of the models. The prediction is the mean of the models' outputs.
    ``info["consensus_distance"]`` is ``sqrt(1 / K sum_k |x_k - mean|^2)`` after mixing.

    The wire ledger charges each client one message up to each of its neighbours (W_kj > 0), as the mean over clients,
    and nothing down. There is no channel: neighbours need whole models, and a channel sends updates.

    Args:
        mixing: Graph or matrix, order of mixing and training, and how models start.

    Raises:
        ValueError: A matrix that is not symmetric and doubly stochastic, or has no spectral gap; an unknown graph or
            order; another schedule than ``schedules.own_models(N)``; before a run, data that leave a client without
            examples; and as ``fed_avg`` raises.
    """
    if not _walks(schedule, same_client=True):
        raise ValueError("schedule: must train model k on client k, and on no other, as schedules.own_models does")
    if averaging.channel is not None:
        raise ValueError("channel: gossip sends whole models, but a channel sends updates: leave it out")
    graph, order = mixing.graph, mixing.order
    chosen = named_graph(graph, schedule.num_clients, mixing.seed) if isinstance(graph, str) else graph
    matrix = np.asarray(metropolis_weights(chosen) if isinstance(chosen, Graph) else chosen, np.float64)
    _check_mixing(matrix, schedule.num_models)
    choice("order", order, ORDERS)

    def map_models(update: ServerUpdate) -> ServerUpdate:
        def updated(
            before: OptaxState, aggregated: PyTree, info: types.RoundInfo
        ) -> tuple[OptaxState, dict[str, Array]]:
            after, report = jax.vmap(update)(before, aggregated, info)
            present = info.weight > 0
            sent = after.params if order == "train_then_mix" else before.params
            params = _mix(_among(matrix, present), present, sent)
            if order == "mix_then_train":
                params = pytrees.add(params, pytrees.subtract(after.params, before.params))
            params = pytrees.where(present, params, before.params)
            return after._replace(params=params), {**report, "consensus_distance": consensus_distance(params)}

        return updated

    neighbours = np.count_nonzero(matrix - np.diag(matrix.diagonal()), axis=1)
    replaced = common.AveragingParts(
        lambda rate: optax_server(sgd(rate))._replace(map_models=map_models),
        parts=Parts(
            common_start=mixing.common_start,
            check=partial(_everybody_trains, "gossip"),
            ledger=lambda cost, data: _between_clients(cost, float(neighbours.mean())),
        ),
    )
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    return common.train_and_average("gossip", training, schedule, averaging, replaced, MIXES)


@recipe(
    papers=("thompson2025",),
    parts="Jacobians of neighbours; mixing; kernel evolution",
    schedule="neighbourhoods",
    sends="Jacobians",
    unused=("validation",),
    python_only=("kernel_bytes", "slots_per_model"),
)
def ntk_dfl(
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None = None,
    loss: str | None = None,
    evolution: Evolution = Evolution(),
    pooling: Pooling = Pooling(),
) -> Algorithm:
    """Builds NTK-DFL: each client evolves the kernel of its neighbourhood (Thompson et al., ICML 2025, algorithm 1).

    In a round each client replaces its model by the mean of its model and its neighbours' models. Its neighbours send
    it their Jacobians, outputs and targets at this mean. From these and its examples it computes the tangent kernel and
    trains the model with it, as ``ntk_fl``'s server does. On a complete graph NTK-DFL is NTK-FL with all clients. All
    models start with the same parameters.

    A client that drops out keeps its model and is left out of its neighbours' means. If a message is rejected, the
    receiver leaves out the sender's model too. A client whose rate is unstable (``info["status"]``) keeps the mean.
    ``info["consensus_distance"]`` is ``sqrt(1 / N sum_i |x_i - mean|^2)`` of the clients' models x_i after the round.

    The prediction is the mean of the models' outputs, as for every ensemble. The paper's final model has the mean of
    the models' weights, as in the example. For a model that is linear in its weights the two are equal.

    The wire ledger charges a client, for each of its neighbours, its model, the mean, and the Jacobians of its
    examples, all up. Every message is charged the average over all messages of a round, rounded up to whole bytes.

    Args:
        model: Network whose kernel is evolved.
        schedule: Client i must be among the clients of model i, as in ``schedules.neighbourhoods(graph)``.
        learning_rate: Step size of gradient descent on the linearised network, a number or a schedule of the round.
        loss: squared_error or cross_entropy (default: the loss of ``evolution``).
        evolution: Candidate numbers of gradient steps, which kernel, and how gradient descent is computed.
        pooling: Sizes of a neighbourhood's pool, without validation examples.

    Raises:
        ValueError: A schedule under which client i does not train model i, or validation examples; before a run, data
            that leave a client without examples; and as ``ntk_fl`` raises.

    Example:
        >>> import fedtangent as ft, jax
        >>> ft.enable_x64()
        >>> data = ft.data.load("digits", num_train=60, num_test=30)
        >>> clients = ft.partition.iid(60, 4, seed=0)
        >>> schedule = ft.schedules.neighbourhoods(ft.graphs.ring(4))
        >>> algorithm = ft.ntk_dfl(ft.models.mlp(data, widths=(8,)), schedule, 1.0)
        >>> run = ft.simulate(algorithm, data, clients, num_rounds=1)
        >>> final = jax.tree.map(lambda leaf: leaf.mean(axis=0), algorithm.params(run.state))
        >>> algorithm.model.apply(final, data.x_test).shape
        (30, 10)
    """
    (client,), (of_model,) = _first_rounds(schedule, 1)
    nodes, is_own = schedule.num_models, client == of_model
    if nodes != schedule.num_clients or not np.array_equal(np.unique(client[is_own]), np.arange(nodes)):
        raise ValueError("schedule: must train model i on client i and others, as schedules.neighbourhoods does")
    if pooling.validation is not None:
        raise ValueError("validation: got examples, but ntk_dfl has no server to hold them: leave it out")

    def changed(server: Server, parts: Parts) -> tuple[Server, Parts]:
        of_targets = parts.check

        def check(data: FederatedData) -> None:
            if of_targets is not None:
                of_targets(data)
            _everybody_trains("ntk_dfl", data)

        def ledger(cost: Cost, data: FederatedData) -> Cost:
            sizes = np.diff(np.asarray(data.offsets))[client]
            sent, of_examples = np.mean(~is_own), sizes[~is_own].sum() / sizes.sum()  # a client sends nothing to itself
            models, jacobians = np.ceil(2 * sent * cost.downlink), np.ceil(of_examples * cost.uplink_per_example)
            return cost._replace(uplink=int(models), uplink_per_example=int(jacobians), downlink=0)

        parts = parts._replace(weighting="uniform", common_start=True, check=check, ledger=ledger)
        return server._replace(map_models=_from_neighbours), parts

    evolution = of_loss(evolution, loss)
    algorithm = evolving("ntk_dfl", model, schedule, learning_rate, evolution, pooling, changed=changed)
    return algorithm._replace(composition=algorithm.composition._replace(rule=EVOLVES))


def _from_neighbours(update: ServerUpdate) -> ServerUpdate:
    """Turns NTK-DFL's update of one model into an update of all clients' models, computed one at a time.

    The update of each model starts at the mean of this client's and its neighbours' models. A client that is away keeps
    its model, and is left out of the means. The update also reports "consensus_distance", the spread of the models.
    """
    evolve = sequentially(update)

    def updated(before: PyTree, aggregated: Stacked, info: types.RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        rows = jnp.arange(len(aggregated.weight))[:, None]
        arrived = jnp.zeros((len(rows),) * 2).at[rows, aggregated.client].add(aggregated.weight)
        total = jnp.sum(arrived, axis=1, keepdims=True)
        means = _mix(arrived / jnp.where(total > 0, total, 1), jnp.any(arrived > 0, axis=0), before)
        present = arrived.diagonal() > 0
        pooled = aggregated.messages._replace(mask=aggregated.messages.mask & present[:, None, None])
        aggregated = aggregated._replace(messages=pooled)  # nobody evolves the model of a client that is away
        after, report = evolve(pytrees.where(present, means, before), aggregated, info)
        params = pytrees.where(present, after, before)
        return params, {**report, "consensus_distance": consensus_distance(params)}

    return updated


def _everybody_trains(name: str, data: FederatedData) -> None:
    empty = np.flatnonzero(np.diff(np.asarray(data.offsets)) == 0)
    if len(empty):
        raise ValueError(f"data: client {empty[0]} holds no examples; {name} needs every client to train")


def consensus_distance(params: PyTree) -> Array:
    """Computes ``sqrt(1 / K sum_k |x_k - mean|^2)``, a scalar, of K models x_k (``params`` has a leading axis K)."""
    away = jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), params)
    return pytrees.norm(away) / jnp.sqrt(jax.tree.leaves(params)[0].shape[0])


def _check_mixing(matrix: np.ndarray, num_models: int) -> None:
    if matrix.shape != (num_models, num_models):
        raise ValueError(
            f"mixing: got shape {matrix.shape}, must be [{num_models}, {num_models}], a row for each model"
        )
    check_doubly_stochastic("mixing", matrix)
    if spectral_gap(matrix) < 1e-9:
        raise ValueError(
            "mixing: has no spectral gap, so models never agree: connect all models, and make the diagonal positive"
        )


def _among(matrix: np.ndarray, present: Array) -> Array:
    """Returns the mixing matrix [K, K] of a round in which only some clients are ``present`` ([K] bool).

    The weights of a client's absent neighbours are added to its diagonal entry; an absent client has a 1 there.
    """
    pairs = present[:, None] & present[None] & ~jnp.eye(len(matrix), dtype=bool)
    exchanged = jnp.where(pairs, jnp.asarray(matrix), 0)
    return exchanged + jnp.diag(1 - jnp.sum(exchanged, axis=1))


def _mix(matrix: Array, present: Array, params: PyTree) -> PyTree:
    """Computes ``sum_j W_kj x_j`` for each model k, with W ``matrix`` and x_j the models; absent models count as 0."""

    def leaf(x: Array) -> Array:
        present_models = jnp.where(present.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
        return jnp.tensordot(matrix.astype(x.dtype), present_models, axes=(1, 0), precision="highest")

    return jax.tree.map(leaf, params)


def _between_clients(cost: Cost, messages: float) -> Cost:
    """Returns ``cost`` without a server: nothing is broadcast, and a client sends ``messages`` messages on average.

    A client that trains several models sends as many for each of them.
    """
    uplink, per_example = (int(np.ceil(messages * num_bytes)) for num_bytes in cost[:2])
    return cost._replace(uplink=uplink, uplink_per_example=per_example, downlink=0)
