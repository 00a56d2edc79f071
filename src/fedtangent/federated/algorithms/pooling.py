"""Clients that hand over their examples, and a server that trains on all of them together.

The ideal that federated algorithms are held against: no local drift, and no privacy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent.federated.aggregate import Stacked
from fedtangent.federated.local import Problem, Work, minimise, validate_work
from fedtangent.federated.rates import Optimizer, at_round
from fedtangent.federated.wire import ledger
from fedtangent.federated.wire.channel import as_is
from fedtangent.losses import Loss
from fedtangent.types import Array, Channel, Client, FederatedData, Model, PyTree, RoundInfo, Server


def raw_examples() -> Channel:
    """The examples themselves: for each of a client's, the bytes of its x and of its y in their own dtypes."""
    return as_is(lambda message, broadcast: (0, ledger.example_bytes(message.x, message.y)))


def pooled_client(received: Stacked, round_: Array) -> Client:
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
        pool = pooled_client(aggregated, info.round)
        trained, report = minimise(info.key, model, loss, at_round(optimizer, info.round), work, Problem(params), pool)
        return trained, {
            "server_loss": report["loss"],
            "server_steps": report["steps"],
            "pooled": pool.size,
            "dropped": aggregated.beyond,  # clients beyond the slots of the pool were not heard: reported
        }

    return Server(init=lambda params: params, broadcast=lambda params: (), params=lambda params: params, update=update)
