"""The slots of every round as arrays for the recursion; a slot is one client that trains one model in one round.

Clients are grouped by size into buckets (``clients.build_clients``), which the recursion trains one after the other.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from fedtangent._src.pytrees import on_device
from fedtangent._src.theory.checks import is_concrete
from fedtangent._src.theory.flow.clients import ClientBlocks, client_rows
from fedtangent._src.types import AnyArray, Array, ArrayLike, Partition


class RunSlots(NamedTuple):
    """Client and model of every slot in R rounds, and whether it is filled (``present``), [R, S] each.

    A slot is a place for one client that trains one model; a round has S of them.
    """

    client: Int[np.ndarray, "R S"]
    model: Int[np.ndarray, "R S"]
    present: Bool[np.ndarray, "R S"]

    def trains(self, num_clients: int) -> Bool[np.ndarray, "N"]:
        """Returns whether each client trains in any round, [N] bool."""
        trains = np.zeros(num_clients, bool)
        trains[self.client[self.present]] = True
        return trains


class BucketSlots(NamedTuple):
    """Slots of each of R rounds whose client is in one bucket (group of similar size), padded to s entries a round.

    A slot is a place for a client in a round. ``slot`` is the index among the round's slots, ``place`` the client's
    index in the bucket; padding, slots of weight 0 and slots that ``only_model`` removes are not ``present``.
    """

    slot: Int32[AnyArray, "R s"]  # index among the round's slots
    place: Int32[AnyArray, "R s"]  # the client's place in the bucket
    present: Bool[AnyArray, "R s"]  # False for padding


class Rounds(NamedTuple):
    """Arrays that describe all R rounds: model and weight of every slot, step sizes, batches and delays.

    A slot is one client that trains one model in a round; a round has S slots. ``weight`` is relative to the sum over
    the model's slots in the round, ``fraction`` the model's number of slots divided by the N clients, and ``trained``
    whether any client trains the model. ``anchoring`` is the alpha of Modified Local-GD. ``slots`` lists the slots of
    each bucket of clients. ``batches`` are positions among a client's examples, for T steps of at most B examples, and
    ``needed`` the kernel rows of each model's clients (None for all). ``delay`` counts rounds. ``oldest`` caps the
    delays: in round r an answer can be at most r rounds old, and is then an answer to the initial model.
    """

    model: Int32[Array, "R S"]
    weight: Float[Array, "R S"]  # relative to its model's total in the round
    learning_rate: Float[Array, "R"]
    server_learning_rate: Float[Array, "R"]
    anchoring: Float[Array, "R"]  # Modified Local-GD's alpha, 1 elsewhere
    fraction: Float[Array, "R K"]  # slots that train the model, divided by N
    trained: Bool[Array, "R K"]  # whether any client trains the model
    slots: tuple[BucketSlots, ...]  # one per bucket
    batches: Int32[Array, "R S T B"] | None = None  # places in the examples of a slot's client, -1 for none
    needed: Int32[Array, "R K E"] | None = None  # the rows of each model's clients; None: all rows
    delay: Int32[Array, "R S"] | None = None  # of the slots' answers, in rounds; None: no answer is late
    oldest: Int32[Array, "R"] | None = None  # cap of the delays, r in round r


def build_rounds(
    clients: ClientBlocks,
    slots: RunSlots,
    weight: ArrayLike,
    rates: tuple[ArrayLike, ArrayLike, ArrayLike],
    num_models: int,
) -> Rounds:
    """Builds the arrays of all rounds, with the slots (clients that train a model in a round) listed by bucket.

    A bucket is a group of clients of similar size. Slots of weight 0 become empty. Batches, delays and ``needed`` are
    None.

    Args:
        clients: All clients, in buckets.
        slots: Client and model of every slot, and whether it is filled.
        weight: Weight of every slot [R, S], relative within a model and round.
        rates: The clients' learning rate, the server's learning rate and the anchoring.
        num_models: Number K of models.
    """
    client, _, present = slots
    packed = []
    for index in range(len(clients.buckets)):
        mine = present & (clients.bucket_of[client] == index)
        # up to a power of two: a run with a few clients fewer is then the same compiled program
        width = min(client.shape[1], 1 << (max(1, int(mine.sum(axis=1).max(initial=0))) - 1).bit_length())
        order = np.argsort(~mine, axis=1, kind="stable")[:, :width]
        filled = np.take_along_axis(mine, order, axis=1)
        place = np.where(filled, clients.place_in_bucket[np.take_along_axis(client, order, axis=1)], 0)
        packed.append(BucketSlots(order.astype(np.int32), place.astype(np.int32), filled))
    sizes = len(clients.bucket_of), num_models
    if is_concrete(weight, rates):
        return on_device(_weighted(np, slots, weight, rates, tuple(packed), *sizes))  # compiles nothing
    return _weighted_in_jax(jnp, slots, weight, rates, tuple(packed), *sizes)


def _weighted(
    xp: ModuleType,
    slots: RunSlots,
    weights: ArrayLike,
    rates: tuple[ArrayLike, ArrayLike, ArrayLike],
    packed: tuple[BucketSlots, ...],
    num_clients: int,
    num_models: int,
) -> Rounds:
    """Builds the rounds; a slot's weight is divided by the sum of the weights of its model in the round.

    ``xp`` is ``numpy``, or ``jax.numpy`` for traced numbers; ``packed`` has the slots of each bucket of clients. The
    other arguments are as for ``build_rounds``.
    """
    model = xp.asarray(slots.model, np.int32)
    of_model = [slots.present & (slots.model == k) for k in range(num_models)]
    weight = xp.where(slots.present, xp.asarray(weights, np.float64), 0.0)
    totals = xp.stack([xp.where(mine, weight, 0.0).sum(axis=1) for mine in of_model], axis=1)
    total = xp.take_along_axis(totals, model, axis=1)
    weight = xp.where(total > 0, weight / xp.where(total > 0, total, 1.0), 0.0)
    filled = slots.present & (weight > 0)
    counts = xp.stack([(mine & filled).sum(axis=1) for mine in of_model], axis=1).astype(np.float64)
    learning_rate, server_learning_rate, anchoring = (
        xp.broadcast_to(xp.asarray(r, np.float64), (len(model),)) for r in rates
    )
    return Rounds(
        model,
        weight,
        learning_rate,
        server_learning_rate,
        anchoring,
        fraction=counts / num_clients,
        trained=counts > 0,
        slots=tuple(p._replace(present=p.present & xp.take_along_axis(filled, p.slot, axis=1)) for p in packed),
    )


_weighted_in_jax = jax.jit(_weighted, static_argnames=("xp", "num_clients", "num_models"))


def only_model(rounds: Rounds, model: int) -> Rounds:
    """Returns the same rounds for one of the models, which becomes model 0.

    A slot is one client that trains one model in a round. Slots of other models stay in the arrays, with their weights,
    but are not ``present`` in ``slots``; so the filled entries of a bucket need not come first any more.

    Args:
        rounds: Rounds of all K models.
        model: Index of the model to keep.
    """
    is_known = is_concrete(rounds)
    tables = jax.tree.map(np.asarray, rounds) if is_known else rounds
    xp: ModuleType = np if is_known else jnp
    slots = tuple(
        part._replace(present=part.present & (xp.take_along_axis(tables.model, part.slot, axis=1) == model))
        for part in tables.slots
    )
    this = slice(model, model + 1)
    one = tables._replace(
        model=tables.model * 0,
        fraction=tables.fraction[:, this],
        trained=tables.trained[:, this],
        slots=slots,
        needed=None if tables.needed is None else tables.needed[:, this],
    )
    return on_device(one) if is_known else one


def rows_needed(
    partition: Partition, slots: RunSlots, num_models: int, rows_per_example: int, num_rows: int
) -> Int32[np.ndarray, "R K E"]:
    """Returns the kernel rows that each model needs in each round, the rows of its clients, [R, K, E] int32.

    E is a power of two, or ``num_rows`` if that is less. Where a model needs fewer than E rows, numbers of ``num_rows``
    or more pad.

    Args:
        partition: Training rows of each client.
        slots: Client and model of every slot (place for a client in a round).
        num_models: Number K of models.
        rows_per_example: Kernel rows of an example.
        num_rows: Number of kernel rows.
    """
    client, model, present = slots
    rows_of = [client_rows(partition, i, rows_per_example) for i in range(partition.num_clients)]
    needed = []
    for r in range(len(client)):
        for k in range(num_models):
            mine = client[r][present[r] & (model[r] == k)]
            needed.append(np.unique(np.concatenate([rows_of[i] for i in mine])) if len(mine) else np.zeros(0, np.int64))
    # A power of two, so that another schedule of the same clients is the same program.
    width = min(num_rows, 1 << max(0, max(len(rows) for rows in needed) - 1).bit_length())
    table = np.tile(num_rows + np.arange(width, dtype=np.int32), (len(needed), 1))
    for line, rows in zip(table, needed, strict=True):
        line[: len(rows)] = rows
    return table.reshape(len(client), num_models, width)


def check_once(slots: RunSlots, algorithm: str) -> None:
    """Raises ``ValueError`` if a client trains one model in two slots of a round.

    A client has a single correction (FedDyn, SCAFFOLD) for each model, which two slots would both change.

    Args:
        slots: Client and model of every slot (place for a client in a round).
        algorithm: Name of the algorithm in the message.
    """
    for r, present in enumerate(slots.present):
        pairs = np.stack([slots.client[r], slots.model[r]], axis=1)[present]
        values, counts = np.unique(pairs, axis=0, return_counts=True)
        if np.any(counts > 1):
            client = values[np.argmax(counts > 1)][0]
            raise ValueError(
                f"cohorts: got client {client} twice in round {r}, must be once per model and round for {algorithm}"
            )
