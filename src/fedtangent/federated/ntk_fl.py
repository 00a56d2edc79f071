"""NTK-FL as a local problem and a server of the common loop (Yue et al., ICML 2022, section 4.1).

A client's message stands for its Jacobians, outputs and targets. The simulator sends the examples instead and lets
the server rebuild the same kernel from them, so that no [N, C, P] array ever exists; the channel charges the ledger
for the Jacobians that the wire would carry.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent.federated.aggregate import Stacked
from fedtangent.federated.ntk_evolution import KERNELS, METHODS, ntk_evolve
from fedtangent.federated.rates import Rate, rate_at
from fedtangent.types import Array, Client, Key, Local, Model, PyTree, RoundInfo, Server


class Examples(NamedTuple):
    """A client's examples; rows where ``mask`` is False are padding."""

    x: Array  # [max_size, ...]
    y: Array  # [max_size, C]
    mask: Array  # [max_size] bool


def send_examples() -> Local:
    """The client's part: its examples, standing for their Jacobians. No training takes place."""

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[Examples, PyTree, dict[str, Array]]:
        mask = jnp.arange(client.rows.shape[0]) < client.size
        message = Examples(client.data.x[client.rows], client.data.y[client.rows], mask)
        return message, client_state, {"steps": jnp.int32(0)}

    return Local(init=lambda params: (), update=update)


def ntk_server(model: Model, *, learning_rate: Rate, times: tuple[int, ...], kernel: str, method: str) -> Server:
    """The server's part: pool the cohort's examples, evolve the kernel, keep the best time (eq. 9-11)."""
    if not times or any(int(t) != t or t < 1 for t in times) or list(times) != sorted(set(times)):
        raise ValueError(f"times: got {times}, must be one or more increasing positive whole numbers of steps")
    for name, value, allowed in (("kernel", kernel, KERNELS), ("method", method, METHODS)):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")

    def update(params: PyTree, aggregated: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        pooled = jax.tree.map(lambda leaf: leaf.reshape((-1, *leaf.shape[2:])), aggregated.messages)
        weights, report = ntk_evolve(
            model,
            params,
            pooled.x,
            pooled.y,
            pooled.mask,
            learning_rate=rate_at(learning_rate, info.round),
            times=tuple(times),
            kernel=kernel,
            method=method,
        )
        # Clients beyond the slots of the pool were not heard: reported, not passed over.
        return weights, {**report, "dropped": aggregated.beyond}

    return Server(init=lambda params: params, broadcast=lambda s: s, params=lambda s: s, update=update)
