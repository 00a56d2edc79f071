"""Secure aggregation: the sum is that of the clients' fixed-point numbers to the last bit, a message tells nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.engine import Devices, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import charge
from fedtangent._src.federated import algorithms, faults, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, uniform_sampling
from fedtangent._src.federated.wire import channel
from fedtangent._src.federated.wire.secure_aggregation import decode_mean, encode, fraction_bits, mask_messages

from ...nightly import nightly
from ..toys import arguments_of, distance, go, two_layer, uneven_data

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


encoded, decoded = jax.jit(encode, static_argnums=2), jax.jit(decode_mean, static_argnums=3)


def messages(clients: int = 5) -> dict[str, Any]:
    return {"a": RNG.normal(size=(clients, 3, 2)), "b": RNG.normal(size=(clients, 4))}


def flat(tree: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in tree.values()], axis=1)


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact(bits: int) -> None:
    """Against whole numbers of Python's, which do not wrap around."""
    sent, weight, active = messages(), np.array([3.0, 1.0, 0.0, 4.0, 2.0]), np.array([1, 1, 0, 1, 1], bool)
    sent["b"] *= 1e5  # an array of other sizes has a scale of its own
    sent["b"][2] = np.nan  # an empty place
    ids = jnp.asarray([7, 2, 0, 9, 4], jnp.int32)
    numbers, scales, lost = encoded(jax.tree.map(jnp.asarray, sent), jnp.asarray(weight), bits)
    unit = 2.0 ** fraction_bits(5, bits)
    share = weight / 4
    shares = share[active, None]
    scale = np.concatenate(
        [
            np.full(6, np.abs(shares * flat(sent)[active][:, :6]).max()),
            np.full(4, np.abs(shares * flat(sent)[active][:, 6:]).max()),
        ]
    )
    np.testing.assert_allclose(scales, scale[[0, 6]], rtol=1e-15)
    whole = [
        [round(float(share[i] * v / s) * unit) for v, s in zip(flat(sent)[i], scale, strict=True)]
        + [round(float(share[i]) * unit)]
        for i in np.flatnonzero(active)
    ]
    expected = [sum(column) for column in zip(*whole, strict=True)]
    masked = np.asarray(mask_messages(KEY, numbers, jnp.asarray(active), ids))
    total = masked.sum(axis=0, dtype=masked.dtype)
    off = [int(v) - 2**bits * (int(v) >= 2 ** (bits - 1)) - e for v, e in zip(total, expected, strict=True)]
    assert max(abs(v) for v in off) <= (0 if bits == 32 else 2**10)  # float64 has 53 digits of 64
    assert not lost.any() and not masked[2].any()
    mean = decoded(jnp.asarray(total), scales, sent, bits)
    exact = np.average(flat(sent)[active], axis=0, weights=weight[active])
    found = flat({k: np.asarray(v)[None] for k, v in mean.items()})[0]
    step = 5 / unit / share.sum()  # half of one for each client, and as much for their weights
    assert (np.abs(found - exact) / scale).max() < 2 * step + 1e-15
    # negative control: without one client's masks nothing is left of the sum
    some = masked[[0, 1, 3]].sum(axis=0, dtype=masked.dtype).astype(object)
    assert not any(abs(int(s) - e) < 2 ** (bits - 8) for s, e in zip(some[:3], expected[:3], strict=True))


def test_a_masked_message_is_uniform_and_the_plain_one_is_not() -> None:
    numbers = encoded({"a": jnp.asarray(RNG.normal(size=(3, 20_000)))}, jnp.ones(3), 32)[0]
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


@pytest.mark.parametrize("size", nightly([1e-30, 1e-6, 1.0, 2474.0, 1e30], [1e-30, 1e30]))
@pytest.mark.parametrize("clients", [3, 300])
def test_the_mean_has_the_digits_of_numbers_of_any_size(size: float, clients: int) -> None:
    sent = {
        "a": size * RNG.normal(size=(clients, 2, 2)).astype(np.float32),
        "b": np.full((clients, 3), size / 1e6, np.float32),
    }
    weight = RNG.integers(1, 50, clients).astype(np.float32)
    numbers, scales, lost = encoded(jax.tree.map(jnp.asarray, sent), jnp.asarray(weight), 32)
    mean = decoded(jnp.sum(numbers, axis=0, dtype=jnp.uint32), scales, sent, 32)
    assert not lost.any()
    for name, rows in sent.items():
        exact = np.average(rows.astype(np.float64), axis=0, weights=weight)
        # half of one for each number and, times the mean, for each weight; and float32's own rounding
        bound = clients * 2.0 ** -fraction_bits(clients, 32) / np.sum(weight / weight.max()) + 2.0**-22
        assert np.abs(np.asarray(mean[name]) - exact).max() < bound * np.abs(rows).max()


def test_what_is_too_small_beside_the_largest_is_counted_and_nothing_is_cut() -> None:
    sent = {"a": jnp.asarray([[1e9, 1.0, 0.0], [1e9, -1.0, 3.0], [1e9, 1e-3, 0.0]]), "b": jnp.full((3, 1), 1e-3)}
    numbers, scales, lost = encoded(sent, jnp.asarray([1.0, 1.0, 0.0]), 32)
    mean = decoded(jnp.sum(numbers, axis=0, dtype=jnp.uint32), scales, sent, 32)
    # 1 and -1 of the two clients; neither 3, nor 0, nor an array of smaller numbers, nor an empty place
    assert lost.tolist() == [1, 1, 0]
    np.testing.assert_allclose(mean["a"][0], 1e9, rtol=1e-6)
    np.testing.assert_allclose(mean["b"], 1e-3, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_array_that_is_not_finite_has_no_mean(bad: float) -> None:
    sent = {"a": jnp.asarray([[bad, 1.0], [2.0, 3.0]]), "b": jnp.ones((2, 1))}
    numbers, scales, _ = encoded(sent, jnp.ones(2), 32)
    mean = decoded(jnp.sum(numbers, axis=0, dtype=jnp.uint32), scales, sent, 32)
    assert np.isnan(mean["a"]).all() and np.allclose(mean["b"], 1)


def quadratic(targets: np.ndarray) -> tuple[Any, Any]:
    """One example a client, x = 1, of a linear model without bias that starts at 0."""
    data = ft.data.federated_data(
        np.ones((len(targets), 1), np.float32), targets[:, None].astype(np.float32), [[i] for i in range(len(targets))]
    )
    return ft.models.linear(1, 1), data


def test_control_variates_of_thousands() -> None:
    """SCAFFOLD with targets of thousands, by its formulas in NumPy: no number is cut, and the status says so."""
    targets = np.array([-1200.0, 900.0, 4100.0, 6100.0])
    model, data = quadratic(targets)
    averaging = ft.Averaging(secure_aggregation=32)
    scaffold = ft.scaffold(model, all_clients(4), 0.1, Work(steps=3), averaging=averaging)
    start = jax.tree.map(jnp.zeros_like, model.init(KEY))
    run = simulate(scaffold, data, num_rounds=2, start=start, devices=Devices("scan"))
    w, c, controls = 0.0, 0.0, np.zeros(4)
    for _ in range(2):
        y = np.full(4, w)
        for _ in range(3):
            y -= 0.1 * (y - targets - controls + c)
        new = controls - c + (w - y) / 0.3
        w, c, controls = y.mean(), c + (new - controls).mean(), new
    np.testing.assert_allclose(np.ravel(run.state.server.control["weights"])[0], c, rtol=1e-5)
    np.testing.assert_allclose(np.ravel(run.state.server.params["weights"])[0], w, rtol=1e-5)
    assert abs(c) > 1000 and run.status == "finished" and not run.history.rounds["rounded_away"].any()


def test_many_clients_with_a_small_update() -> None:
    model, data = quadratic(np.full(300, 1e-5))
    fed_avg = ft.fed_avg(model, all_clients(300), 0.1, Work(steps=1), averaging=ft.Averaging(secure_aggregation=32))
    run = simulate(fed_avg, data, num_rounds=1, start=jax.tree.map(jnp.zeros_like, model.init(KEY)))
    np.testing.assert_allclose(np.ravel(run.state.server.params["weights"])[0], 1e-6, rtol=1e-5)


def options(**more: Any) -> dict[str, Any]:
    return {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=2), **more}


@pytest.mark.parametrize("name", nightly(["fed_avg", "scaffold"], ["fed_avg"]))
def test_clients_that_drop_out(name: str) -> None:
    """Masks are drawn among those who answered: the average is the plain one, to the resolution of the numbers."""
    plan, data, recipe = faults.dropout(uniform_sampling(6, 4), 0.4), uneven_data(), getattr(algorithms, name)
    plain = recipe(two_layer(), plan, **options())
    seen, rounds = go(plain, data, "scan", 3, plain.init(2, 6))
    answered = (rounds["cohort"].weight > 0).sum(axis=1)
    assert answered.min() < 4
    hidden = recipe(two_layer(), plan, **arguments_of(algorithms.fed_avg, options(secure_aggregation=32)))
    masked, infos = go(hidden, data, "scan", 3, hidden.init(2, 6))
    step = 2.0 ** -fraction_bits(4, 32)  # of the largest number of a message, which is below 1
    assert 0 < distance(seen.server, masked.server) < 3 * 4 * 8 * step
    if name == "fed_avg":
        arrays = len(jax.tree.leaves(two_layer().init(KEY)))
        numbers = sum(leaf.size for leaf in jax.tree.leaves(two_layer().init(KEY)))
        sent, _ = charge(hidden.cost(data, engine_for(data, "scan")), infos)
        assert sent == int(answered.sum()) * (4 * (numbers + 1) + 32 + 4 * arrays)


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


def test_bits_and_numbers_of_messages() -> None:
    assert fraction_bits(20, 32) == 32 - 1 - (5 + 1)
    with pytest.raises(
        ValueError, match="secure_aggregation: got 32 bits, which leave sums of 20000000 messages 5 bits"
    ):
        fraction_bits(20_000_000, 32)
    with pytest.raises(ValueError, match="secure_aggregation: got 16 bits, allowed are 32 and 64"):
        fraction_bits(20, 16)
    with jax.enable_x64(False), pytest.raises(ValueError, match="secure_aggregation: 64 bits need JAX's 64-bit mode"):
        fraction_bits(20, 64)
    with pytest.raises(ValueError, match="secure_aggregation: sums floating-point numbers only"):
        encode({"a": jnp.ones((2, 3), jnp.int32)}, jnp.ones(2), 32)
