"""CP-NTK-FL's recipe: its switches together, what its messages cost, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.tangent import Compression
from fedtangent._src.federated.ntk_fl import Evolution, Examples
from fedtangent._src.federated.schedule import all_clients, uniform_sampling
from fedtangent._src.federated.wire import channel
from fedtangent._src.federated.wire.subsample import num_sampled
from fedtangent._src.models import mlp
from fedtangent._src.types import FederatedData

from .toys import arguments_of, distance, two_layer, uneven_data


@functools.cache
def network() -> Any:
    return mlp(3, 2, (5,), dtype=jnp.float64)


@pytest.mark.slow
def test_cp_ntk_fl_with_a_shuffler_alone_is_ntk_fl() -> None:
    data, plan = uneven_data(), uniform_sampling(6, 4)
    given: dict[str, Any] = {"learning_rate": 0.3, "evolution": Evolution((1, 9), method="eigh")}
    plain = simulate(algorithms.ntk_fl(network(), plan, **given), data, num_rounds=1, seed=1, devices=Devices("scan"))
    mixed = simulate(
        algorithms.cp_ntk_fl(network(), plan, compression=Compression(shuffle=True), **given),
        data,
        num_rounds=1,
        seed=1,
        devices=Devices("scan"),
    )
    assert distance(plain.state.server, mixed.state.server) < 1e-12
    assert plain.history.evaluations[-1].uplink_bytes == mixed.history.evaluations[-1].uplink_bytes > 0


# ---- the ledger ---------------------------------------------------------------------------------------------------


def image_data(inputs: int) -> FederatedData:
    """One client of 200 examples, in float32."""
    x, y = jnp.zeros((200, inputs), jnp.float32), jnp.zeros((200, 10), jnp.float32)
    return FederatedData(x, y, jnp.arange(200, dtype=jnp.int32), jnp.asarray([0, 200], jnp.int32))


def bytes_per_example(inputs: int, **options: Any) -> int:
    data = image_data(inputs)
    algorithm = algorithms.cp_ntk_fl(
        mlp(inputs, 10, (100,)), all_clients(1), learning_rate=0.1, **arguments_of(algorithms.cp_ntk_fl, options)
    )
    return algorithm.cost(data, engine_for(data, "scan")).uplink_per_example


@pytest.mark.parametrize(
    ("sparsity", "bits", "expected"),
    [
        (0.0, None, 4 * 10 * 21_110 + 80),
        (0.9, None, -(-(21_110 * 32 + 211_100) // 8) + 80),  # a bitmap is smaller
        (0.99, None, -(-(2_111 * 32 + 2_111 * 18) // 8) + 80),  # indices of 18 bits are
        (0.99, 16, -(-(2_111 * 16 + 2_111 * 18) // 8) + 80),
    ],
)
def test_bytes_of_an_example(sparsity: float, bits: int | None, expected: int) -> None:
    assert bytes_per_example(200, sparsity=sparsity, value_bits=bits) == expected


def test_the_papers_table_1_needs_99_percent_of_a_jacobian_set_to_zero() -> None:
    """386 MB in 26 rounds of 20 clients with 200 examples, d1' = 200, beta = .3: 14.85 MiB a round, as MiB."""
    examples = 20 * int(num_sampled(200, 0.3))
    a_round = {s: examples * bytes_per_example(200, sparsity=s, beta=0.3) / 2**20 for s in (0.9, 0.99)}
    assert abs(a_round[0.99] / (386 / 26) - 1) < 0.05
    assert a_round[0.9] > 8 * 386 / 26


@pytest.mark.slow
def test_beta_is_charged_by_what_is_drawn() -> None:
    data, model = uneven_data(), network()
    algorithm = algorithms.cp_ntk_fl(
        model,
        all_clients(6),
        learning_rate=0.1,
        compression=Compression(beta=0.5),
        evolution=Evolution((1,), method="eigh"),
    )
    run = simulate(algorithm, data, num_rounds=1, seed=0, devices=Devices("scan"))
    drawn = num_sampled(np.diff(np.asarray(data.offsets)), 0.5)
    np.testing.assert_array_equal(run.history.rounds["examples"][0], drawn)
    each = 8 * 2 * (3 * 5 + 5 + 5 * 2 + 2) + 8 * 2 * 2
    assert run.history.evaluations[-1].uplink_bytes == int(drawn.sum()) * each


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("cp_ntk_fl", {"sparsity": 1.0}, "sparsity: got 1.0, must be at least 0 and below 1"),
        ("cp_ntk_fl", {"beta": 1.5}, r"beta: got 1.5, must be above 0 and at most 1"),
        ("cp_ntk_fl", {"value_bits": 64}, "value_bits: got 64, must be a whole number from 10 to 32"),
        ("cp_ntk_fl", {"linearise": print}, "linearise: got a function, must be None"),
    ],
)
def test_what_the_recipes_refuse(recipe: str, options: dict[str, Any], message: str) -> None:
    build = getattr(algorithms, recipe)
    with pytest.raises(ValueError, match=message):
        build(two_layer(), all_clients(6), learning_rate=0.1, **arguments_of(build, options))


def test_sparse_jacobians_cost_less_only_where_they_are_sparse_enough() -> None:
    """A bitmap costs a bit a number: 3 % of zeros are not worth it in float32, 4 % are."""
    params = {"w": jnp.zeros(1000, jnp.float32)}
    message = Examples(jnp.zeros((4, 3)), jnp.zeros((4, 10)), jnp.ones(4, bool))
    dense, little, enough = (channel.jacobians(10, s).uplink(message, params)[1] for s in (0.0, 0.03, 0.04))
    assert little > dense > enough
