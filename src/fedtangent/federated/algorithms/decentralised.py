"""Learning without a server: models that walk from client to client, and models that neighbours mix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import pytrees
from fedtangent.checks import choice, instance
from fedtangent.federated.algorithms.averaging import check_base, fed_avg
from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.entry import (
    LAW_CLIENTS,
    TRAINED,
    Around,
    Averaging,
    Given,
    Laws,
    entry_of,
    shared_arguments,
)
from fedtangent.federated.graph import (
    Graph,
    check_doubly_stochastic,
    metropolis_weights,
    named_graph,
    ring,
    spectral_gap,
)
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate
from fedtangent.types import Algorithm, Array, Cost, FederatedData, Model, PyTree, RoundInfo, Schedule, wrapped

ORDERS = ("train_then_mix", "mix_then_train")


def random_walk(
    model: Model, schedule: Schedule, *, base: Callable[..., Algorithm] = fed_avg, **options: Any
) -> Algorithm:
    """K models walk over a graph of clients and train where they stand (FE-2024, section V-H and figure 6).

    It is ``base`` (FedAvg with one client for each model: the client's model is the next) under the schedule
    ``schedule.random_walk(graph, K)``: "FedAvg Random Walk" is K = 1, "Fed-ensemble Random Walk" predicts with the mean
    of K models. ``options`` are those of ``base``.

    There is no server: a client sends the model that it trained to the next one. The ledger charges one message up for
    each model in each round and nothing down; a model that stays is charged as one that moves. Raises ``ValueError``
    for a schedule under which several clients train one model in a round.
    """
    check_base(base)
    _no_server("random_walk", options)
    if not _walks(schedule):
        raise ValueError("schedule: must train each model on one client a round, as schedule.random_walk does")
    algorithm = base(model, schedule, **options)
    name = "random_walk" if base is fed_avg else f"{algorithm.name}_random_walk"
    return wrapped(algorithm, name, lambda cost, data: _between_clients(cost, 1.0))


def _no_server(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for options that hide clients from a server."""
    for option in ("shuffle", "secure_aggregation"):
        if options.get(option):
            raise ValueError(f"{option}: hides clients from a server, but {name} has none: leave it out")


def _walks(schedule: Schedule, own: bool = False) -> bool:
    """Whether each model is trained by at most one client a round; with ``own``, by the client of its own number."""
    instance("schedule", schedule, Schedule)
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        client, model = map(np.asarray, schedule.sample(key, schedule.init(key), jnp.int32(0))[0][:2])
    return len(np.unique(model)) == len(model) and (not own or np.array_equal(client, model))


def gossip(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    mixing: Graph | np.ndarray,
    order: str = "train_then_mix",
    common_start: bool = True,
    **options: Unpack[Options],
) -> Algorithm:
    """Gossip averaging, or decentralised SGD: every client trains its own model and mixes it with its neighbours'.

    With ``W`` the mixing matrix, ``x_k`` the models and ``d_k`` what local training takes off model k:
    ``x_k <- sum_j W_kj (x_j - d_j)`` for ``"train_then_mix"`` (Koloskova et al., ICML 2020, algorithm 1), and
    ``x_k <- sum_j W_kj x_j - d_k`` for ``"mix_then_train"``, where training and sending take place at once. With one
    local step the latter is D-PSGD (Lian et al., NeurIPS 2017, algorithm 1, whose footnote allows the former too).

    Args:
        schedule: ``schedule.own_models(N)``, model k on client k.
        mixing: [K, K], symmetric, rows sum to 1, at least 0, with a spectral gap; of a graph its
            ``graph.metropolis_weights``.
        common_start: all models start alike, as the papers have it; otherwise each from its own initialisation.
        options: ``algorithms.common.Options``.

    A client that is not there (it drops out, or its message is rejected) neither trains nor exchanges: its model stays
    as it is, and its neighbours keep the share that it would have had. So every round mixes by a symmetric, doubly
    stochastic matrix, and mixing never changes the mean of the models. Prediction is the mean of the models' outputs.
    ``info["consensus_distance"]`` is ``sqrt(1 / K sum_k |x_k - mean|^2)`` after mixing.

    The ledger charges each client one message to each of its neighbours (W_kj > 0) up, and nothing down; where clients
    differ in neighbours, each is charged the mean number, rounded up to a byte.

    Raises ``ValueError`` for a matrix that is none of the above, an unknown order, another schedule, a ``channel``
    (neighbours need the model, of which a channel has the last change only) and, before a run, for data of which a
    client has none: it could not take part, and its neighbours would lose touch.
    """
    if not _walks(schedule, own=True):
        raise ValueError("schedule: must train model k on client k, and on no other, as schedule.own_models does")
    _no_server("gossip", options)
    if options.get("channel") is not None:
        raise ValueError(
            "channel: gossip sends whole models, of which a channel has the last change only: leave it out"
        )
    matrix = np.asarray(metropolis_weights(mixing) if isinstance(mixing, Graph) else mixing, np.float64)
    _check_mixing(matrix, schedule.num_models)
    choice("order", order, ORDERS)

    def map_models(update: Callable[..., Any]) -> Callable[..., Any]:
        def updated(before: Any, aggregated: PyTree, info: RoundInfo) -> tuple[Any, dict[str, Array]]:
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
    return train_and_average(
        "gossip",
        model,
        schedule,
        client_learning_rate,
        work,
        options,
        map_models=map_models,
        common_start=common_start,
        check=_everybody_trains,
        ledger=lambda cost, data: _between_clients(cost, float(neighbours.mean())),
    )


def _everybody_trains(data: FederatedData) -> None:
    empty = np.flatnonzero(np.diff(np.asarray(data.offsets)) == 0)
    if len(empty):
        raise ValueError(f"data: client {empty[0]} holds no examples; gossip needs every client to train")


def consensus_distance(params: PyTree) -> Array:
    """``sqrt(1 / K sum_k |x_k - mean|^2)`` of models with leading axis K, a scalar."""
    away = jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), params)
    return pytrees.norm(away) / jnp.sqrt(jax.tree.leaves(params)[0].shape[0])


def _check_mixing(matrix: np.ndarray, num_models: int) -> None:
    if matrix.shape != (num_models, num_models):
        raise ValueError(
            f"mixing: got shape {matrix.shape}, must be [{num_models}, {num_models}], the schedule's models"
        )
    check_doubly_stochastic("mixing", matrix)
    if spectral_gap(matrix) < 1e-9:
        raise ValueError("mixing: has no spectral gap, so that models would never agree; let each keep a share")


def _among(matrix: np.ndarray, present: Array) -> Array:
    """The mixing matrix among the clients present, who keep the share that they would exchange with absent ones."""
    pairs = present[:, None] & present[None] & ~jnp.eye(len(matrix), dtype=bool)
    exchanged = jnp.where(pairs, jnp.asarray(matrix), 0)
    return exchanged + jnp.diag(1 - jnp.sum(exchanged, axis=1))


def _mix(matrix: Array, present: Array, params: PyTree) -> PyTree:
    """``sum_j W_kj x_j``; a model that is absent does not count even where it is not finite."""

    def leaf(x: Array) -> Array:
        kept = jnp.where(present.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
        return jnp.tensordot(matrix.astype(x.dtype), kept, axes=(1, 0), precision="highest")

    return jax.tree.map(leaf, params)


def _between_clients(cost: Cost, messages: float) -> Cost:
    """The ledger of clients that send ``messages`` messages each round to one another, and have no server."""
    uplink, per_example = (int(np.ceil(messages * each)) for each in cost[:2])
    return cost._replace(uplink=uplink, uplink_per_example=per_example, downlink=0)


@dataclasses.dataclass(frozen=True)
class GossipOptions(Averaging):
    """Options of gossip."""

    graph: str = "ring"
    """ring, torus, complete or erdos_renyi:<probability>."""


def _build_gossip(o: GossipOptions, given: Given) -> Algorithm:
    mixing = named_graph(o.graph, given.schedule.num_clients, given.seed)
    return gossip(given.model, given.schedule, mixing=mixing, **shared_arguments(o))


ENTRIES = (
    entry_of(
        random_walk,
        "models walk over --graph and train where they stand, around --base (Fed-ensemble, 2024, V-H)",
        Around,
        papers=("shi2024",),
        parts="those of --base, K walks on a graph",
        schedule="random_walk",
        laws=Laws(cohorts="one", nothing_on=("downlink_bytes",)),
    ),
    entry_of(
        gossip,
        "every client mixes its model with its neighbours' on --graph (D-PSGD, Lian et al., 2017)",
        GossipOptions,
        build=_build_gossip,
        papers=("lian2017",),
        parts="local SGD; own model; mixing with neighbours",
        rule="every client has a model of its own, which neighbours mix; nearest is fed_avg, where all are mixed",
        schedule="own",
        laws=Laws(
            {**TRAINED, "order": "mix_then_train", "mixing": ring(LAW_CLIENTS)},
            cohorts="own",
            nothing_on=("downlink_bytes",),
        ),
    ),
)
