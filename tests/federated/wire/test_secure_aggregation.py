"""Secure aggregation: the sum is that of the clients' fixed-point numbers to the last bit, a message tells nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.federated import algorithms, faults, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, uniform_sampling
from fedtangent._src.federated.wire import channel
from fedtangent._src.federated.wire.secure_aggregation import decode_mean, encode, fraction_bits, mask_messages

from ...nightly import nightly
from ..toys import arguments_of, distance, two_layer, uneven_data

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def messages(clients: int = 5) -> dict[str, Any]:
    return {"a": RNG.normal(size=(clients, 3, 2)), "b": RNG.normal(size=(clients, 4))}


def flat(tree: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in tree.values()], axis=1)


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact(bits: int) -> None:
    """Against whole numbers of Python's, which do not wrap around."""
    sent, weight, active = messages(), np.array([3.0, 1.0, 0.0, 4.0, 2.0]), np.array([1, 1, 0, 1, 1], bool)
    sent["b"][2] = np.nan  # an empty place
    ids = jnp.asarray([7, 2, 0, 9, 4], jnp.int32)
    numbers, cut = encode(jax.tree.map(jnp.asarray, sent), jnp.asarray(weight), bits, 16.0)
    scale = 2 ** fraction_bits(5, bits, 16.0)
    share = weight / 4
    whole = [
        [round(float(share[i] * v) * scale) for v in flat(sent)[i]] + [round(float(share[i]) * scale)]
        for i in np.flatnonzero(active)
    ]
    expected = [sum(column) for column in zip(*whole, strict=True)]
    masked = np.asarray(mask_messages(KEY, numbers, jnp.asarray(active), ids))
    total = masked.sum(axis=0, dtype=masked.dtype)
    assert [int(v) - 2**bits * (int(v) >= 2 ** (bits - 1)) for v in total] == expected
    assert int(cut) == 0 and not masked[2].any()
    mean = decode_mean(jnp.asarray(total), sent, bits)
    np.testing.assert_allclose(
        flat({k: np.asarray(v)[None] for k, v in mean.items()})[0], np.array(expected[:-1]) / expected[-1]
    )
    exact = np.average(flat(sent)[active], axis=0, weights=weight[active])
    found = flat({k: np.asarray(v)[None] for k, v in mean.items()})[0]
    step = 5 / scale / share.sum()  # half of one for each client, and as much for their weights
    assert np.abs(found - exact).max() < 2 * step + 1e-15
    # negative control: without one client's masks nothing is left of the sum
    some = masked[[0, 1, 3]].sum(axis=0, dtype=masked.dtype).astype(object)
    assert not any(abs(int(s) - e) < 2 ** (bits - 8) for s, e in zip(some[:3], expected[:3], strict=True))


def test_a_masked_message_is_uniform_and_the_plain_one_is_not() -> None:
    numbers, _ = encode({"a": jnp.asarray(RNG.normal(size=(3, 20_000)))}, jnp.ones(3), 32, 16.0)
    ids, all_ = jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool)
    masked = np.asarray(mask_messages(KEY, numbers, all_, ids))

    def chi_squared(words: np.ndarray) -> float:
        """Of its bytes, in standard deviations from what 255 degrees of freedom have."""
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        return (np.sum((counts - expected) ** 2 / expected) - 255) / math.sqrt(2 * 255)

    assert all(abs(chi_squared(row.copy())) < 5 for row in masked)
    assert chi_squared(np.asarray(numbers)[0].copy()) > 100
    pairs = itertools.combinations(masked.astype(float), 2)
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(20_000) for a, b in pairs)  # and so is each beside another
    again = np.asarray(mask_messages(jax.random.key(1), numbers, all_, ids))  # another round, other masks
    assert abs(np.corrcoef(masked[0].astype(float), again[0].astype(float))[0, 1]) < 5 / math.sqrt(20_000)


def test_a_pairs_mask_does_not_depend_on_the_order_of_the_clients() -> None:
    numbers = jnp.asarray(RNG.integers(0, 2**32, (4, 6), dtype=np.uint32))
    ids, order = jnp.asarray([3, 8, 1, 5], jnp.int32), np.array([2, 0, 3, 1])
    plain = np.asarray(mask_messages(KEY, numbers, jnp.ones(4, bool), ids))
    other = np.asarray(mask_messages(KEY, numbers[order], jnp.ones(4, bool), ids[order]))
    np.testing.assert_array_equal(plain[order], other)


def test_numbers_beyond_the_limit_are_cut_and_counted() -> None:
    sent = {"a": jnp.asarray([[40.0, 1.0], [-np.inf, np.nan], [15.0, 2.0]])}
    numbers, cut = encode(sent, jnp.ones(3), 32, 16.0)
    assert int(cut) == 3
    total = jnp.sum(numbers, axis=0, dtype=jnp.uint32)
    np.testing.assert_allclose(decode_mean(total, sent, 32)["a"], [31 / 3, 1.0], atol=1e-6)


def options(**more: Any) -> dict[str, Any]:
    return {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=2), **more}


@pytest.mark.parametrize("name", nightly(["fed_avg", "scaffold"], ["fed_avg"]))
def test_clients_that_drop_out(name: str) -> None:
    """Masks are drawn among those who answered: the average is the plain one, to the resolution of the numbers."""
    plan, data, recipe = faults.dropout(uniform_sampling(6, 4), 0.4), uneven_data(), getattr(algorithms, name)
    plain = simulate(recipe(two_layer(), plan, **options()), data, num_rounds=3, seed=2, devices=Devices("scan"))
    answered = (plain.history.rounds["cohort"].weight > 0).sum(axis=1)
    assert answered.min() < 4
    hidden = simulate(
        recipe(two_layer(), plan, **arguments_of(algorithms.fed_avg, options(secure_aggregation=32))),
        data,
        num_rounds=3,
        seed=2,
        devices=Devices("scan"),
    )
    step = 2.0 ** -fraction_bits(4, 32, 16.0)
    assert 0 < distance(plain.state.server, hidden.state.server) < 3 * 4 * 8 * step
    if name == "fed_avg":
        numbers = sum(leaf.size for leaf in jax.tree.leaves(two_layer().init(KEY)))
        assert hidden.history.evaluations[-1].uplink_bytes == int(answered.sum()) * (4 * (numbers + 1) + 32)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("fed_avg", {"secure_aggregation": 16}, "secure_aggregation: got 16, must be the bits"),
        ("fed_avg", {"secure_aggregation": True}, "secure_aggregation: got True"),
        ("fed_avg", {"channel": channel.qsgd(4)}, "channel: must be lossless with secure_aggregation"),
        ("fed_avg", {"accept": faults.finite()}, "accept: needs single messages"),
        ("fed_avg", {"shuffle": True}, "shuffle: adds nothing to secure_aggregation"),
        ("fed_com", {}, "secure_aggregation: got 32, but fed_com does not use it"),
        ("dp_fed_avg", {"clip_norm": 1.0, "noise_multiplier": 1.0}, "secure_aggregation: dp_fed_avg needs single"),
        ("fed_be_no_distillation", {}, "secure_aggregation: fed_be_no_distillation needs single messages"),
        ("local_only", {}, "secure_aggregation: got 32, but local_only does not use it"),
        ("random_walk", {"schedule": schedule.own_models(6)}, "secure_aggregation: hides clients from a server"),
    ],
)
def test_where_the_server_needs_single_messages(name: str, more: dict[str, Any], message: str) -> None:
    given = {"schedule": all_clients(6), "secure_aggregation": 32} | more
    with pytest.raises(ValueError, match=message):
        recipe = getattr(algorithms, name)
        inner = algorithms.fed_avg if name == "random_walk" else recipe
        recipe(two_layer(), given.pop("schedule"), **arguments_of(inner, options(**given)))


def test_bits_and_limits() -> None:
    assert fraction_bits(20, 32, 16.0) == 32 - 1 - (9 + 1)
    with pytest.raises(ValueError, match="limit: got 1e\\+09, must be smaller"):
        fraction_bits(20, 32, 1e9)
    with pytest.raises(ValueError, match="bits: got 16, allowed are 32 and 64"):
        fraction_bits(20, 16, 1.0)
    with pytest.raises(ValueError, match=r"limit: got 0\.0, must be above 0 and finite"):
        fraction_bits(20, 32, 0.0)
    with jax.enable_x64(False), pytest.raises(ValueError, match="bits: 64 needs JAX's 64-bit mode"):
        fraction_bits(20, 64, 1.0)
    with pytest.raises(ValueError, match="secure_aggregation: sums floating numbers"):
        encode({"a": jnp.ones((2, 3), jnp.int32)}, jnp.ones(2), 32, 16.0)
