"""Subsampling: clients use only a part of their examples in each round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import streams
from fedtangent._src.checks import number
from fedtangent._src.types import Array, Client, Key, Local, Partition, PyTree


def num_sampled(size: int | np.ndarray, beta: float) -> np.ndarray:
    """Returns how many examples a client uses: ``beta * size`` rounded half up, at least 1; 0 if it has none.

    Args:
        size: Number of the client's examples, or an array of such numbers.
        beta: Share of its examples that a client uses.
    """
    size = np.asarray(size)
    return np.where(size > 0, np.maximum(1, np.floor(beta * size + 0.5)), 0).astype(np.int32)


def largest_sample(partition: Partition, clients: int, beta: float = 1.0) -> int:
    """Returns the largest number of examples that the clients of a round can use together, at least 1.

    Args:
        partition: The clients' examples.
        clients: Number of clients in the round.
        beta: Share of its examples that a client uses.
    """
    return max(1, int(np.sort(num_sampled(partition.sizes, beta))[::-1][:clients].sum()))


def check_beta(beta: float) -> None:
    """Raises ``ValueError`` unless ``beta`` is a number in (0, 1]."""
    number("beta", beta, above=0, at_most=1)


def subsampled(local: Local, beta: float) -> Local:
    """Returns ``local`` for clients that use a random part of their examples (Yue et al., ICML 2022, section 4.2).

    A client of n examples draws ``num_sampled(n, beta)`` of them anew in every round, uniformly without replacement. It
    draws with its key of the round, so that the draw is the same for all models. ``info["examples"]``, by which the
    wire ledger charges bytes per example, counts the drawn examples; a client's weight in an average counts all its
    examples.

    Args:
        local: A client's part of an algorithm.
        beta: Share of the examples, in (0, 1]; for 1 the result is ``local``.

    Raises:
        ValueError: A beta outside (0, 1].
    """
    check_beta(beta)
    if beta == 1:
        return local

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        sampled = _draw(streams.apart(key, streams.SUBSAMPLE), client, beta)
        message, client_state, info = local.update(key, broadcast, client_state, sampled)
        return message, client_state, {**info, "examples": sampled.size}

    return local._replace(update=update)


def _draw(key: Key, client: Client, beta: float) -> Client:
    most = client.rows.shape[0]
    counts = num_sampled(np.arange(most + 1), beta)  # a table, so that host and device round alike
    size = jnp.asarray(counts)[client.size]
    draws = jax.random.uniform(key, (most,), jnp.float32)
    order = jnp.argsort(jnp.where(jnp.arange(most) < client.size, draws, jnp.inf))
    rows = client.rows[order][: max(1, int(counts.max(initial=0)))]
    # Padding repeats a drawn example, as everywhere: a row that was not drawn must not be touched.
    at = jnp.minimum(jnp.arange(rows.shape[0]), jnp.maximum(size - 1, 0))
    return client._replace(size=size, rows=rows[at])
