"""CP-NTK-FL's switches: subsampling, projection, shuffling, and what its messages cost."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.data import load
from fedtangent.data.projection import projected, projection_matrix
from fedtangent.engine.clients import engine_for
from fedtangent.engine.run import simulate
from fedtangent.federated import algorithms
from fedtangent.federated.aggregate import Stacked, weighted_mean
from fedtangent.federated.local import Work, client_view
from fedtangent.federated.ntk_fl import Evolution, Examples, ntk_server
from fedtangent.federated.schedule import all_clients, uniform_sampling
from fedtangent.federated.wire import channel
from fedtangent.federated.wire.shuffler import folded, permuted
from fedtangent.federated.wire.subsample import largest_sample, num_sampled, subsampled
from fedtangent.models import mlp
from fedtangent.types import FederatedData, Local, Partition, RoundInfo

from .toys import distance, owned_rows, recording_local, two_layer, uneven_data


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# ---- subsampling --------------------------------------------------------------------------------------------------


def rows_of(beta: float, client: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [draws] and rows [draws, most] that a client uses under so many keys."""
    data = uneven_data()
    looking = Local(
        lambda params: (), lambda key, broadcast, state, client: ((client.size, client.rows), state, {"steps": 0})
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
    options: dict[str, Any] = {"client_learning_rate": 0.1, "work": Work(steps=1)}
    with pytest.raises(ValueError, match=r"beta: got .*, must be above 0 and at most 1"):
        algorithms.fed_avg(two_layer(), all_clients(6), beta=beta, **options)
    with pytest.raises(ValueError, match=r"beta: got .*, must be above 0 and at most 1"):
        algorithms.cp_ntk_fl(two_layer(), all_clients(6), learning_rate=0.1, beta=beta)


# ---- projection ---------------------------------------------------------------------------------------------------


def test_projection_is_standard_normal_and_the_seed_s_alone() -> None:
    matrix = projection_matrix(300, 100, 7, scale="none")
    count = matrix.size
    assert abs(matrix.mean()) < 4 / math.sqrt(count)
    assert abs(matrix.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((matrix**4).mean() - 3) < 4 * math.sqrt(96 / count)  # of another law it is not 3
    np.testing.assert_array_equal(matrix, projection_matrix(300, 100, (7).to_bytes(32, "big"), scale="none"))
    assert abs(np.corrcoef(matrix.ravel(), projection_matrix(300, 100, 8).ravel())[0, 1]) < 4 / math.sqrt(count)
    np.testing.assert_allclose(projection_matrix(300, 100, 7), matrix / math.sqrt(300))
    np.testing.assert_allclose(projection_matrix(300, 100, 7, scale="lengths"), matrix / 10)


def test_every_example_is_projected_with_the_same_matrix_and_keeps_its_size() -> None:
    digits = load("digits")
    found = projected(digits, 16, 3)
    matrix = projection_matrix(64, 16, 3)
    for before, after in ((digits.x_train, found.x_train), (digits.x_test, found.x_test)):
        assert after.dtype == before.dtype and after.shape == (len(before), 16)
        np.testing.assert_allclose(after, before.reshape(-1, 64).astype(float) @ matrix, rtol=0, atol=1e-6)
    # a coordinate's mean square is kept on average over matrices: 40 of them, by their own standard error
    x = digits.x_train[:50].reshape(50, -1).astype(float)
    ratios = [np.mean((x @ projection_matrix(64, 16, s)) ** 2) / np.mean(x**2) for s in range(40)]
    assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios, ddof=1) / math.sqrt(40) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 65, 0), "dimension: got 65, larger than the 64 inputs"),
        ((64, 0, 0), "dimension: got 0, must be a whole number of at least 1"),
        ((64, 2.5, 0), "dimension: got 2.5"),
        ((64, 8, -1), "seed: must be a whole number of at least 0, or bytes$"),
        ((64, 8, 0, "unit"), "scale: got 'unit', allowed are coordinates, lengths, none"),
    ],
)
def test_what_a_projection_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        projection_matrix(*arguments)


# ---- shuffling ----------------------------------------------------------------------------------------------------


@functools.cache
def network() -> Any:
    return mlp(3, 2, (5,), dtype=jnp.float64)


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
    params = network().init(jax.random.key(0))
    info = RoundInfo(jnp.int32(0), jnp.float32(3), jnp.int32(3), jax.random.key(5))
    made = {s: ntk_server(network(), 0.3, Evolution((5, 30), "averaged", "eigh"), shuffle=s) for s in (False, True)}
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
        simulate(algorithms.fed_avg(two_layer(), uniform_sampling(6, 4), shuffle=s, **options), uneven_data(), 2, 1)
        for s in (False, True)
    )
    assert distance(plain.state.server, mixed.state.server) < 1e-12


@pytest.mark.slow
def test_cp_ntk_fl_with_a_shuffler_alone_is_ntk_fl() -> None:
    data, plan = uneven_data(), uniform_sampling(6, 4)
    given: dict[str, Any] = {"learning_rate": 0.3, "times": (1, 9), "kernel": "averaged", "method": "eigh"}
    plain = simulate(algorithms.ntk_fl(network(), plan, **given), data, 1, 1, "scan")
    mixed = simulate(algorithms.cp_ntk_fl(network(), plan, shuffle=True, **given), data, 1, 1, "scan")
    assert distance(plain.state.server, mixed.state.server) < 1e-12
    assert plain.history.evaluations[-1].uplink_bytes == mixed.history.evaluations[-1].uplink_bytes > 0


# ---- the ledger ---------------------------------------------------------------------------------------------------


def image_data(inputs: int) -> FederatedData:
    """One client of 200 examples, in float32."""
    x, y = jnp.zeros((200, inputs), jnp.float32), jnp.zeros((200, 10), jnp.float32)
    return FederatedData(x, y, jnp.arange(200, dtype=jnp.int32), jnp.asarray([0, 200], jnp.int32))


def bytes_per_example(inputs: int, **options: Any) -> int:
    data = image_data(inputs)
    algorithm = algorithms.cp_ntk_fl(mlp(inputs, 10, (100,)), all_clients(1), learning_rate=0.1, **options)
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
    options: dict[str, Any] = {"learning_rate": 0.1, "times": (1,), "sparsity": 0.0}
    data, model = uneven_data(), network()
    algorithm = algorithms.cp_ntk_fl(model, all_clients(6), beta=0.5, method="eigh", **options)
    run = simulate(algorithm, data, 1, 0, "scan")
    drawn = num_sampled(np.diff(np.asarray(data.offsets)), 0.5)
    np.testing.assert_array_equal(run.history.rounds["examples"][0], drawn)
    each = 8 * 2 * (3 * 5 + 5 + 5 * 2 + 2) + 8 * 2 * 2
    assert run.history.evaluations[-1].uplink_bytes == int(drawn.sum()) * each


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("cp_ntk_fl", {"sparsity": 1.0}, "sparsity: got 1.0, must be at least 0 and below 1"),
        ("cp_ntk_fl", {"value_bits": 64}, "value_bits: got 64, must be a whole number from 10 to 32"),
        ("cp_ntk_fl", {"linearise": print}, "linearise: is decided by sparsity"),
        ("cp_ntk_fl", {"secure_aggregation": 32}, "secure_aggregation: cp_ntk_fl needs every client's Jacobians"),
        ("ntk_fl", {"secure_aggregation": 32}, "secure_aggregation: ntk_fl needs every client's Jacobians one by one"),
    ],
)
def test_what_the_recipes_refuse(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(algorithms, recipe)(two_layer(), all_clients(6), learning_rate=0.1, **options)


def test_sparse_jacobians_cost_less_only_where_they_are_sparse_enough() -> None:
    """A bitmap costs a bit a number: 3 % of zeros are not worth it in float32, 4 % are."""
    params = {"w": jnp.zeros(1000, jnp.float32)}
    message = Examples(jnp.zeros((4, 3)), jnp.zeros((4, 10)), jnp.ones(4, bool))
    dense, little, enough = (channel.jacobians(10, s).uplink(message, params)[1] for s in (0.0, 0.03, 0.04))
    assert little > dense > enough
