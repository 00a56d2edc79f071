"""NTK-FL as a local problem and a server of the common loop (Yue et al., ICML 2022, section 4.1).

A client's message stands for its Jacobians, outputs and targets. The simulator sends the examples instead and lets the
server compute the same kernel from them, so that no [N, C, P] array ever exists; the channel charges the wire ledger
for the Jacobians.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Num, Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import whole
from fedtangent._src.federated.aggregate import Stacked
from fedtangent._src.federated.ntk_fl.evolution import ntk_evolve
from fedtangent._src.federated.ntk_fl.options import Evolution, held_out
from fedtangent._src.federated.ntk_fl.tangent import Examples
from fedtangent._src.federated.wire.shuffler import permuted
from fedtangent._src.optimizers import Rate, rate_at
from fedtangent._src.types import AnyArray, Array, Client, Key, Local, Model, PyTree, RoundInfo, Server


def send_examples() -> Local:
    """Builds the client's part: a client sends its examples, from which the server computes their Jacobians."""

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[Examples, PyTree, dict[str, Array]]:
        mask = jnp.arange(client.rows.shape[0]) < client.size
        message = Examples(client.data.x[client.rows], client.data.y[client.rows], mask)
        return message, client_state, {"steps": jnp.int32(0)}

    return Local(init=lambda params: (), update=update)


def ntk_server(
    model: Model,
    learning_rate: Rate,
    evolution: Evolution,
    *,
    validation: tuple[Shaped[AnyArray, "m ..."], Num[AnyArray, "m ..."]] | None = None,
    pool_size: int | None = None,
    shuffle: bool = False,
) -> Server:
    """Builds the server's part: it pools the cohort's examples, evolves the kernel and keeps the best time (eq. 9-11).

    Args:
        model: The network.
        learning_rate: eta of the descent, a number or a schedule of the round.
        evolution: Times, kernel, method and loss of the evolution.
        validation: Examples that choose the time, as in ``ntk_evolve``.
        pool_size: The most examples that are pooled, which is the size of the kernel; ``info["examples_dropped"]``
            counts the others. None: all, padding included. ``largest_sample`` never drops an example.
        shuffle: Whether a server between clients and aggregation permutes the rows of Jacobians, outputs and targets
            together (section 4.2), by the round's key; the update stays the same up to rounding.
    """
    held_out(validation, evolution.loss, model)
    if pool_size is not None:
        whole("pool_size", pool_size)

    def update(params: PyTree, aggregated: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        pooled = jax.tree.map(lambda leaf: leaf.reshape((-1, *leaf.shape[2:])), aggregated.messages)
        sent = jnp.sum(pooled.mask, dtype=jnp.int32)
        if pool_size is not None and pool_size < pooled.mask.shape[0]:
            rows = jnp.argsort(~pooled.mask, stable=True)[:pool_size]  # real rows first, in their order
            pooled = pytrees.take(pooled, rows)
        if shuffle:
            pooled = permuted(info.key, pooled)
        rate = rate_at(learning_rate, info.round)
        weights, report = ntk_evolve(model, params, pooled, rate, evolution, validation)
        # Clients and examples for which the pool has no place are counted and reported.
        dropped = sent - jnp.sum(pooled.mask, dtype=jnp.int32)
        return weights, {**report, "dropped": aggregated.beyond, "examples_dropped": dropped}

    return Server(init=lambda params: params, broadcast=lambda state: state, params=lambda state: state, update=update)
