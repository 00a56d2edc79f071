"""Baselines that move data: training at the server on the cohort's examples, and examples that everybody shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent.checks import instance, whole
from fedtangent.data.sharing import number_given
from fedtangent.federated.aggregate import Stacked, stack
from fedtangent.federated.algorithms.averaging import check_base, fed_avg
from fedtangent.federated.algorithms.common import check_data, client_descent
from fedtangent.federated.algorithms.entry import Around, Laws, Training, entry_of
from fedtangent.federated.compose import compose, sequentially
from fedtangent.federated.local import LocalProblem, Work, minimise, validate_work
from fedtangent.federated.ntk_fl import send_examples
from fedtangent.federated.rates import Optimizer, Rate, at_round, check_rate
from fedtangent.federated.wire import ledger
from fedtangent.federated.wire.channel import as_is
from fedtangent.losses import Loss, get_loss
from fedtangent.types import (
    Accept,
    Algorithm,
    Array,
    Client,
    Cost,
    FederatedData,
    Model,
    PyTree,
    RoundInfo,
    Schedule,
    Server,
    wrapped,
)


def centralised(
    model: Model,
    schedule: Schedule,
    *,
    learning_rate: Rate,
    work: Work,
    loss: str | Loss = "squared_error",
    optimizer: Callable[[float | Array], optax.GradientTransformation] | None = None,
    slots_per_model: int | None = None,
    accept: Accept | None = None,
) -> Algorithm:
    """Centralised training, the upper bound of NTK-FL, section 6, (iii): SGD at the server on the cohort's data.

    The clients of a round hand over their examples; the server trains each model on the pooled examples of its
    clients: ``work`` counts its steps, or its epochs over the pool, and its minibatches are drawn from all pooled rows.
    Every example counts alike. The ledger charges each example's x and y, every time that its client is in a cohort,
    and nothing downwards.

    Args:
        learning_rate: may be a schedule of the round.
        optimizer: from the rate, SGD by default; its state does not outlive a round.
        slots_per_model: the most clients that one model pools in a round (all slots by default); ``info["dropped"]``
            counts, per model, those beyond it.

    Raises ``ValueError`` for a rate that is not positive, an impossible ``work``, an unknown loss, or
    ``slots_per_model`` outside 1 .. S.
    """
    check_rate("learning_rate", learning_rate)
    instance("schedule", schedule, Schedule)
    slots = schedule.num_slots if slots_per_model is None else slots_per_model
    whole("slots_per_model", slots, 1, schedule.num_slots)
    server = pool_server(model, get_loss(loss), client_descent(learning_rate, optimizer), work)
    return compose(
        "centralised",
        model,
        send_examples(),
        server,
        schedule,
        aggregate=stack(slots),
        channel=as_is(lambda message, broadcast: (0, ledger.example_bytes(message.x, message.y))),
        map_models=sequentially,
        accept=accept,
        check=partial(check_data, loss),
    )


def _pooled_client(received: Stacked, round_: Array) -> Client:
    """The examples of M clients as those of one: real rows first, client after client in order of their ids.

    So the order of a cohort does not matter. Messages have leading axis M; empty places (no real row) go last.
    """
    held = jnp.any(received.messages.mask, axis=1)
    order = jnp.argsort(jnp.where(held, received.client, jnp.iinfo(jnp.int32).max), stable=True)
    flat = jax.tree.map(lambda leaf: leaf[order].reshape((-1, *leaf.shape[2:])), received.messages)
    rows = jnp.argsort(~flat.mask, stable=True).astype(jnp.int32)
    size = jnp.sum(flat.mask, dtype=jnp.int32)
    data = FederatedData(flat.x, flat.y, rows, jnp.stack([jnp.zeros_like(size), size]))
    return Client(jnp.int32(0), size, rows, data, round_)


def pool_server(model: Model, loss: Loss, optimizer: Optimizer, work: Work) -> Server:
    """The server's part: ``work`` on the pooled examples of a model's clients, from where the model is.

    Broadcasts nothing: the clients need no model to hand over their data. Raises ``ValueError`` for an impossible work.
    """
    validate_work(work)

    def update(params: PyTree, aggregated: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        pool = _pooled_client(aggregated, info.round)
        trained, report = minimise(
            info.key, model, loss, at_round(optimizer, info.round), work, LocalProblem(params), pool
        )
        return trained, {
            "server_loss": report["loss"],
            "server_steps": report["steps"],
            "pooled": pool.size,
            "dropped": aggregated.beyond,  # clients beyond the slots of the pool were not heard: reported
        }

    return Server(init=lambda params: params, broadcast=lambda params: (), params=lambda params: params, update=update)


def data_sharing(
    model: Model,
    schedule: Schedule,
    *,
    shared: Sequence[int] | np.ndarray,
    fraction: float = 1.0,
    base: Callable[..., Algorithm] = fed_avg,
    **options: Any,
) -> Algorithm:
    """Data sharing (Zhao et al., 2018, section 4; NTK-FL, section 6, (i)): clients also train on a global set.

    It is ``base`` on data that ``sharing.with_shared(partition, shared, fraction)`` made, charged once, before the
    first round, for the x and y of the shared examples that every client is sent. A client's weight counts all that it
    holds.

    Args:
        shared: indices of the global set G (``sharing.class_balanced`` draws one uniformly by class). NTK-FL's has
            10 % as many examples as all clients together.
        fraction: how much of it each client got, the paper's alpha; NTK-FL's clients get all of it.
        options: those of ``base``.

    Raises ``ValueError`` for a ``shared`` that is empty, repeats an index or is no list of whole numbers, a fraction
    outside (0, 1], and, before a run, for data of which some client that has examples was not given its shared ones.
    """
    each = number_given(shared, fraction)
    chosen = np.asarray(shared, np.int64)
    check_base(base)
    algorithm = base(model, schedule, **options)

    def charged(found: Cost, data: FederatedData) -> Cost:
        shared_bytes = _sharing_clients(data, chosen, each) * each * ledger.example_bytes(data.x, data.y)
        return found._replace(downlink_once=found.downlink_once + shared_bytes)

    name = "data_sharing" if base is fed_avg else f"{algorithm.name}_data_sharing"
    return wrapped(algorithm, name, charged)


def _sharing_clients(data: FederatedData, shared: np.ndarray, each: int) -> int:
    """How many clients were given ``each`` of the shared examples; raises unless all that have examples were."""
    num_examples, offsets = data.x.shape[0], np.asarray(data.offsets)
    if shared.max() >= num_examples:
        raise ValueError(f"shared: has the index {shared.max()}, but data has {num_examples} examples")
    is_shared = np.zeros(num_examples, bool)
    is_shared[shared] = True
    before = np.concatenate([[0], np.cumsum(is_shared[np.asarray(data.indices)])])
    holds, sizes = before[offsets[1:]] - before[offsets[:-1]], np.diff(offsets)
    short = np.flatnonzero((sizes > 0) & (holds < each))
    if short.size:
        raise ValueError(
            f"data: client {short[0]} holds {holds[short[0]]} of the shared examples, must hold {each} "
            f"({short.size} such): make the partition with sharing.with_shared"
        )
    return int(np.sum(sizes > 0))


@dataclasses.dataclass(frozen=True)
class DataSharingOptions(Around):
    """Options of data sharing."""

    shared_fraction: float = 0.1
    """Share of all examples that every client holds."""


ENTRIES = (
    entry_of(
        centralised,
        "SGD at the server on the cohort's pooled data",
        Training,
        renamed={"client_learning_rate": "learning_rate", "client_optimizer": "optimizer"},
        papers=("yue2022",),
        parts="its examples; pool; SGD on the pool",
        rule="its server trains on the pooled examples; nearest is fed_avg with one client, who holds them all",
        sends="examples",
        laws=Laws(
            {"learning_rate": 0.2, "work": Work(epochs=2, batch_size=3)},
            exact={"work": Work(steps=3)},
            doubled="examples",
            nothing_on=("downlink_bytes",),
        ),
    ),
    entry_of(
        data_sharing,
        "every client holds --shared-fraction of all examples too, around --base (Zhao et al., 2018)",
        DataSharingOptions,
        papers=("zhao2018",),
        parts="those of --base, on shared examples too",
        needs=("shared",),
    ),
)
