"""The shuffling server: rows are permuted together and uniformly, and neither updates nor averages change."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine.run import simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.aggregate import Stacked, weighted_mean
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution, Examples, ntk_server
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.federated.wire.shuffler import folded, permuted
from fedtangent._src.models import mlp
from fedtangent._src.types import RoundInfo

from ..toys import distance, flat, two_layer, uneven_data

NETWORK = mlp(3, 2, (5,), dtype=jnp.float64)


def pooled(permutation: np.ndarray | None = None) -> Stacked:
    """Messages of three clients, of which the last has a row of padding; targets may be permuted by themselves."""
    rng = np.random.default_rng(2)
    x, y, mask = rng.normal(size=(3, 3, 3)), rng.normal(size=(3, 3, 2)), np.ones((3, 3), bool)
    mask[2, 2] = False
    if permutation is not None:
        y = y.reshape(9, 2)[permutation].reshape(3, 3, 2)
    messages = Examples(*map(jnp.asarray, (x, y, mask)))
    return Stacked(messages, jnp.int32(3), jnp.int32(0), jnp.ones(3), jnp.arange(3, dtype=jnp.int32))


def test_the_update_does_not_depend_on_the_order_of_rows_but_on_who_has_which_target() -> None:
    params = NETWORK.init(jax.random.key(0))
    info = RoundInfo(jnp.int32(0), jnp.float32(3), jnp.int32(3), jax.random.key(5))
    made = {s: ntk_server(NETWORK, 0.3, Evolution((5, 30), "averaged", "eigh"), shuffle=s) for s in (False, True)}
    plain, report = made[False].update(params, pooled(), info)
    mixed, other = made[True].update(params, pooled(), info)
    moved = np.abs(flat(plain) - flat(params)).max()
    assert moved > 0.05 and int(report["time"]) == int(other["time"])
    assert 0 < np.abs(flat(plain) - flat(mixed)).max() < 1e-12 * max(1, moved) * 100
    # negative control: Jacobians and outputs in another order than the targets
    wrong, _ = made[False].update(params, pooled(np.roll(np.arange(9), 1)), info)
    assert np.abs(flat(wrong) - flat(plain)).max() > 0.1 * moved


def test_rows_are_permuted_together_uniformly() -> None:
    rows = {"a": jnp.arange(4), "b": 10.0 * jnp.arange(4)[:, None]}
    found = jax.jit(jax.vmap(lambda key: permuted(key, rows)))(jax.random.split(jax.random.key(1), 2400))
    np.testing.assert_array_equal(10 * found["a"], found["b"][..., 0])
    orders, counts = np.unique(np.asarray(found["a"]), axis=0, return_counts=True)
    assert len(orders) == 24
    assert np.abs(counts - 100).max() < 4.5 * math.sqrt(2400 / 24 * 23 / 24)


def test_messages_are_shuffled_with_their_weights_before_averaging() -> None:
    rng = np.random.default_rng(3)
    messages, weight = rng.normal(size=(5, 4)), np.array([3.0, 1.0, 0.0, 7.0, 2.0])
    messages[2] = np.nan  # an empty place
    expected = np.average(messages[weight > 0], axis=0, weights=weight[weight > 0])
    order = np.array([3, 0, 4, 2, 1])
    found = folded(weighted_mean(), jnp.asarray(messages[order]), jnp.asarray(weight[order]))
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    wrong = np.asarray(folded(weighted_mean(), jnp.asarray(np.nan_to_num(messages)[order]), jnp.asarray(weight)))
    assert np.abs(wrong - expected).max() > 0.1  # negative control: the weights stay behind


@pytest.mark.slow
def test_fed_avg_behind_a_shuffler_is_fed_avg() -> None:
    options: dict[str, Any] = {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=2)}
    plain, mixed = (
        simulate(
            algorithms.fed_avg(two_layer(), uniform_sampling(6, 4), averaging=Averaging(shuffle=s), **options),
            uneven_data(),
            num_rounds=2,
            seed=1,
        )
        for s in (False, True)
    )
    assert distance(plain.state.server, mixed.state.server) < 1e-12
