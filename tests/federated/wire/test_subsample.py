"""Clients that use a part of their examples: which ones, how many, and that training sees no other."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.federated.local import Work, client_view
from fedtangent._src.federated.wire.subsample import largest_sample, num_sampled, subsampled
from fedtangent._src.types import Local, Partition

from ..toys import owned_rows, recording_local, uneven_data


def rows_of(beta: float, client: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [draws] and rows [draws, most] that a client uses under so many keys."""
    data = uneven_data()
    looking = Local(
        lambda params: (),
        lambda key, broadcast, state, client: ((client.size, client.rows), state, {"steps": jnp.int32(0)}),
    )
    view = client_view(data, jnp.int32(client), jnp.bool_(True), 6)
    look = jax.jit(jax.vmap(lambda key: subsampled(looking, beta).update(key, (), (), view)[0]))
    size, rows = look(jax.random.split(jax.random.key(0), draws))
    return np.asarray(size), np.asarray(rows)


def test_a_client_draws_uniformly_without_replacement_from_its_own_rows() -> None:
    data, draws = uneven_data(), 3000
    own = owned_rows(data)[1]  # five examples, of which two are drawn
    size, rows = rows_of(0.4, 1, draws)
    assert (size == 2).all() and rows.shape == (draws, 2)  # as small as the largest client's draw: 0.4 of 6
    assert set(rows.ravel()) == set(own) and (rows[:, 0] != rows[:, 1]).all()
    pairs = {frozenset(pair) for pair in rows.tolist()}
    counts = np.array([sum(frozenset(pair) == p for pair in rows.tolist()) for p in pairs])
    assert len(pairs) == 10
    error = math.sqrt(draws * 0.1 * 0.9)
    assert np.abs(counts - draws / 10).max() < 4 * error < draws / 10 / 4  # the last: a pair too rare would show


def test_small_clients_keep_an_example_and_padding_repeats_a_drawn_one() -> None:
    size, rows = rows_of(0.1, 2, 5)  # of a single example
    assert (size == 1).all() and (rows == owned_rows(uneven_data())[2][0]).all()
    size, rows = rows_of(0.6, 3, 50)  # two of four (2.4), in arrays for four of six (3.6)
    assert rows.shape == (50, 4) and (size == 2).all()
    assert all(set(row) == set(row[:2]) for row in rows.tolist())
    np.testing.assert_array_equal(num_sampled(np.array([0, 1, 2, 3, 4, 5, 200]), 0.5), [0, 1, 1, 2, 2, 3, 100])
    assert largest_sample(Partition(np.arange(9), np.array([0, 2, 3, 9])), 2, 0.5) == 4


def test_local_training_sees_the_drawn_rows_alone() -> None:
    """Two epochs over batches of two: each drawn row has a share in each epoch, every other row none."""
    data = uneven_data()
    n = data.x.shape[0]
    _, local = recording_local(Work(epochs=2, batch_size=2), n, 6)
    coded = data._replace(x=jnp.eye(n), y=-jnp.ones((n, 6)))
    view = client_view(coded, jnp.int32(1), jnp.bool_(True), 6)
    update = subsampled(local, 0.6).update
    _, _, info = jax.jit(lambda key: update(key, jnp.zeros((n, 6)), (), view))(jax.random.key(3))
    share = np.asarray(info["share"])
    seen = np.flatnonzero(share.any(axis=1))
    assert int(info["examples"]) == 3 == len(seen) and set(seen) < set(owned_rows(data)[1])
    assert (np.count_nonzero(share, axis=1)[seen] == 2).all() and int(info["steps"]) == 4


@pytest.mark.parametrize("beta", [0.0, -0.5, 1.5, float("nan")])
def test_beta_outside_its_range_is_refused(beta: float) -> None:
    untrained = Local(lambda params: (), lambda *given: ((), (), {}))
    with pytest.raises(ValueError, match=r"beta: got .*, must be above 0 and at most 1"):
        subsampled(untrained, beta)
