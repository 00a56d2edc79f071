"""Channels: what they do to a message, what it costs against messages really written as bytes, what they remember."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.entries import catalogue
from fedtangent._src.federated.wire.channel import (
    chain,
    clip,
    jacobians,
    lossless,
    named_channel,
    qsgd,
    random_k,
    top_k,
    uniform_quantiser,
    with_error_feedback,
)
from fedtangent._src.types import Array, Channel, PyTree

from ...nightly import nightly
from .. import reference_channel as reference

SHAPES = {"a": (3, 4), "b": (1, 7), "c": (5, 8)}
P = 12 + 7 + 40
KEY = jax.random.key(5)
DTYPES = {
    "float64": (np.float64,) * 3,
    "float32": (np.float32,) * 3,
    "float16": (np.float16,) * 3,
    "mixed": (np.float32, np.float64, np.float16),
}

EPS = {"float64": 2.3e-16, "float32": 1.2e-7, "float16": 1.2e-7, "mixed": 2.3e-16}  # of what is computed in


def message(dtypes: str, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    kinds = DTYPES[dtypes]
    return {name: jnp.asarray(rng.normal(size=SHAPES[name]), kind) for name, kind in zip(SHAPES, kinds, strict=True)}


def vector(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def sent(channel: Channel, what: PyTree, key: Array = KEY) -> PyTree:
    return channel.send(key, what, channel.init(what))[0]


@functools.cache
def compiled(channel: Channel) -> Callable[[PyTree], PyTree]:
    """``sent`` in one program for all messages of the same shapes."""
    return jax.jit(lambda what: sent(channel, what))


class Case(NamedTuple):
    """A channel, and how the independent encoder is to write the same message."""

    channel: Channel
    clip: float | None = None
    places: Callable[[np.ndarray], np.ndarray] | None = None
    scale: float = 1.0
    known: bool = False  # the receiver draws the places itself
    quantiser: str | None = None
    bits: int = 0
    bucket: int | None = None
    stage: int = 0  # of the quantiser


def drawn_places(k: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda v: np.sort(np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 0), P)[:k]))


def largest(k: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda v: reference.largest(v, k)


def drawn_of(count: int, k: int) -> np.ndarray:
    """Which k of ``count`` numbers the second stage draws."""
    return np.sort(np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 1), count)[:k]))


def largest_then_drawn(count: int, k: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda v: np.sort(reference.largest(v, count))[drawn_of(count, k)]


def drawn_twice(count: int, k: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda v: drawn_places(count)(v)[drawn_of(count, k)]


CASES = {
    "lossless": Case(lossless()),
    "clip": Case(clip(0.7), clip=0.7),
    "clip_long": Case(clip(1e6), clip=1e6),
    "top_k_list": Case(top_k(5), places=largest(5)),
    "top_k_bitmap": Case(top_k(fraction=0.5), places=largest(30)),
    "top_k_one": Case(top_k(fraction=1e-9), places=largest(1)),
    "random_k": Case(random_k(6), places=drawn_places(6), scale=P / 6),
    "random_k_plain": Case(random_k(40, rescale=False), places=drawn_places(40)),
    "random_k_shared": Case(random_k(6, shared_seed=True), places=drawn_places(6), scale=P / 6, known=True),
    **{f"qsgd_{b}": Case(qsgd(b), quantiser="qsgd", bits=b) for b in (2, 4, 8, 16)},
    "qsgd_buckets": Case(qsgd(4, bucket_size=8), quantiser="qsgd", bits=4, bucket=8),
    **{f"uniform_{b}": Case(uniform_quantiser(b), quantiser="uniform", bits=b) for b in (2, 8, 16)},
    "clip_qsgd": Case(chain(clip(0.7), qsgd(5)), clip=0.7, quantiser="qsgd", bits=5, stage=1),
    "top_k_qsgd": Case(chain(top_k(30), qsgd(3)), places=largest(30), quantiser="qsgd", bits=3, stage=1),
    "top_k_qsgd_buckets": Case(
        chain(top_k(31), qsgd(4, bucket_size=9)), places=largest(31), quantiser="qsgd", bits=4, bucket=9, stage=1
    ),
    "top_k_uniform": Case(
        chain(top_k(7), uniform_quantiser(6)), places=largest(7), quantiser="uniform", bits=6, stage=1
    ),
    "random_k_shared_qsgd": Case(
        chain(random_k(9, shared_seed=True), qsgd(4)), None, drawn_places(9), P / 9, True, "qsgd", 4, None, 1
    ),
    "top_k_random_k_shared": Case(  # the seed tells which of 30 numbers are sent, not their places among all
        chain(top_k(30), random_k(9, shared_seed=True)), places=largest_then_drawn(30, 9), scale=30 / 9
    ),
    "random_k_shared_twice": Case(
        chain(random_k(30, shared_seed=True), random_k(9, shared_seed=True)), None, drawn_twice(30, 9), P / 9, True
    ),
    "feedback": Case(with_error_feedback(top_k(5)), places=largest(5)),
}


def written(case: Case, dtypes: str) -> tuple[np.ndarray, int]:
    """The message as the encoder writes it: what comes out of the bytes, and how many there are."""
    what = message(dtypes)
    widest = np.dtype(jnp.result_type(*jax.tree.leaves(what)))
    compute = np.promote_types(widest, np.float32)
    v = vector(what) if case.clip is None else reference.clip(vector(what), case.clip)
    if case.places is None and case.quantiser is None:  # leaf by leaf, each in its own dtype
        leaves = jax.tree.leaves(what)
        parts = np.split(v, np.cumsum([leaf.size for leaf in leaves])[:-1])
        raw = [p.astype(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]
        return np.concatenate([p.astype(float) for p in raw]), sum(len(p.tobytes()) for p in raw)
    places = None if case.places is None else case.places(v)
    values = (v if places is None else v[places]) * case.scale
    u = jax.random.uniform(jax.random.fold_in(KEY, case.stage), values.shape, compute)
    form = reference.Format(
        P, len(values), widest, compute, case.quantiser, case.bits, case.bucket, places if case.known else None
    )
    data = reference.encode(form, values, places, np.asarray(u, float))
    return reference.decode(form, data), len(data)


FEW = ("lossless", "top_k_list", "qsgd_4", "uniform_8", "top_k_qsgd")
DAILY = [(n, "mixed") for n in ("lossless", "clip", "top_k_list", "top_k_bitmap", "random_k", "random_k_plain")]
DAILY += [(n, "mixed") for n in ("random_k_shared", "qsgd_4", "uniform_8", "clip_qsgd", "top_k_qsgd_buckets")]
DAILY += [(n, "mixed") for n in ("random_k_shared_qsgd", "top_k_random_k_shared", "random_k_shared_twice", "feedback")]
DAILY += [("top_k_qsgd", "float32")]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    nightly([(n, "mixed") for n in CASES] + [(n, d) for n in FEW for d in DTYPES if d != "mixed"], DAILY),
)
def test_bytes_and_numbers_are_those_of_a_message_that_is_really_written(name: str, dtypes: str) -> None:
    """By day of each way of writing once, and of one message in float32 alone."""
    case, what = CASES[name], message(dtypes)
    decoded, length = written(case, dtypes)
    assert case.channel.uplink(what, what) == (length, 0)
    received = compiled(case.channel)(what)
    assert jax.tree.map(lambda leaf: leaf.dtype, received) == jax.tree.map(lambda leaf: leaf.dtype, what)
    # Each leaf is rounded to its own dtype, where the decoder has float64: a few roundings of the largest number.
    for leaf, numbers in zip(jax.tree.leaves(received), np.split(decoded, [12, 19]), strict=True):
        bound = 4 * max(float(jnp.finfo(leaf.dtype).eps), EPS[dtypes]) * np.abs(decoded).max()
        np.testing.assert_allclose(np.asarray(leaf, float).ravel(), numbers, rtol=0, atol=bound)
    if name not in ("lossless", "clip_long"):
        assert np.abs(vector(received) - vector(what)).max() > 1e-6


@pytest.mark.parametrize(("channel", "bits"), [(top_k(5), 5 * 6), (top_k(12), 59), (top_k(9), 54), (top_k(P), 0)])
def test_places_are_a_list_or_a_bitmap_whichever_is_smaller(channel: Channel, bits: int) -> None:
    what = message("float32")
    k = int(np.count_nonzero(vector(compiled(channel)(what))))
    assert channel.uplink(what, what)[0] == -(-(32 * k + bits) // 8)


def test_leaves_that_are_not_floating_pass_and_are_charged() -> None:
    what = {**message("float32"), "steps": jnp.arange(3, dtype=jnp.int32), "seen": jnp.array([True, False])}
    for channel in (qsgd(4), with_error_feedback(top_k(5)), chain(clip(0.1), random_k(4))):
        received = compiled(channel)(what)
        assert np.array_equal(received["steps"], what["steps"]) and np.array_equal(received["seen"], what["seen"])
        floating = {name: what[name] for name in SHAPES}
        assert channel.uplink(what, ())[0] == channel.uplink(floating, ())[0] + 12 + 2
    assert qsgd(4).uplink({"steps": what["steps"]}, ())[0] == 12


# ---- laws ---------------------------------------------------------------------------------------------------------

DRAWS, STANDARD_ERRORS = 4000, 5.0  # of 59 numbers, one beyond 5 standard errors by chance: 3e-5


@functools.cache
def many(channel: Channel) -> np.ndarray:
    """What arrives of many sendings of one message, [DRAWS, P]."""
    what = message("float64")
    found = jax.jit(jax.vmap(lambda key: sent(channel, what, key)))(jax.random.split(KEY, DRAWS))
    return np.concatenate([np.asarray(leaf).reshape(DRAWS, -1) for leaf in jax.tree.leaves(found)], axis=1)


def bias(channel: Channel) -> float:
    """The largest deviation of the mean of many sent messages from the message, in measured standard errors."""
    what, rows = message("float64"), many(channel)
    deviation = np.abs(rows.mean(axis=0) - vector(what))
    error = rows.std(axis=0, ddof=1) / np.sqrt(DRAWS)
    return float(np.max(np.where(deviation > 1e-12, deviation / np.maximum(error, 1e-300), 0)))


UNBIASED = {
    "random_k": random_k(6),
    "qsgd_2": qsgd(2),
    "qsgd_4": qsgd(4),
    "qsgd_buckets": qsgd(3, bucket_size=8),
    "uniform_2": uniform_quantiser(2),
    "uniform_8": uniform_quantiser(8),
    "random_k_qsgd": chain(random_k(20), qsgd(3)),
}


@pytest.mark.parametrize("name", nightly(UNBIASED, ["random_k", "qsgd_4", "uniform_2", "random_k_qsgd"]))
def test_unbiased(name: str) -> None:
    assert 0 < bias(UNBIASED[name]) < STANDARD_ERRORS


BIASED = {
    "random_k": random_k(6, rescale=False),
    "top_k": top_k(6),
    "top_k_qsgd": chain(top_k(20), qsgd(3)),
    "clip": clip(0.9),
}


@pytest.mark.parametrize("name", nightly(BIASED, ["random_k"]))
def test_a_biased_channel_is_found(name: str) -> None:
    assert bias(BIASED[name]) > 4 * STANDARD_ERRORS


@pytest.mark.parametrize(
    ("name", "low", "high"),
    nightly(
        [
            ("random_k", P / 6 - 1, P / 6 - 1),  # exactly
            ("qsgd_4", 0.0, min(P / 7**2, np.sqrt(P) / 7)),  # Alistarh et al. 2017, lemma 3.1
            ("qsgd_2", 0.0, np.sqrt(P)),
        ],
        ["random_k", "qsgd_4"],
    ),
)
def test_variance(name: str, low: float, high: float) -> None:
    what, rows = message("float64"), many(UNBIASED[name])
    squares = np.sum((rows - vector(what)) ** 2, axis=1) / np.sum(vector(what) ** 2)
    error = STANDARD_ERRORS * squares.std(ddof=1) / np.sqrt(DRAWS)
    assert low - error < squares.mean() < high + error
    assert squares.mean() > 10 * error


NUMBERS = st.floats(-1e3, 1e3, allow_subnormal=False)
one_top_k = functools.cache(top_k)
VECTORS = st.sampled_from((2, 7)).flatmap(lambda n: arrays.arrays(np.float64, n, elements=NUMBERS))


@hypothesis.given(VECTORS, st.sampled_from((0.01, 0.8)))
@hypothesis.settings(max_examples=40)
def test_top_k_contracts(v: np.ndarray, fraction: float) -> None:
    """Stich et al. 2018, definition 2.1: |v - C(v)|^2 <= (1 - k / P) |v|^2, with equality for equal magnitudes."""
    k = max(1, round(fraction * len(v)))
    left = float(np.sum((v - np.asarray(compiled(one_top_k(fraction=fraction))({"v": v})["v"])) ** 2))
    assert left <= (1 - k / len(v)) * np.sum(v**2) * (1 + 1e-12)
    signs = np.where(v < 0, -1.0, 1.0)
    equal = np.asarray(compiled(one_top_k(k))({"v": signs})["v"])
    assert np.array_equal(equal, np.where(np.arange(len(v)) < k, signs, 0))


ALL = {
    "top_k": top_k(P),
    "top_k of all": top_k(fraction=1.0),
    "random_k": random_k(P),
    "random_k of all": random_k(fraction=1.0),
}


@pytest.mark.parametrize(
    ("name", "dtypes"), nightly(itertools.product(ALL, DTYPES), [("top_k", "mixed"), ("random_k of all", "mixed")])
)
def test_all_numbers_are_lossless(name: str, dtypes: str) -> None:
    channel, what = ALL[name], message(dtypes)
    received = compiled(channel)(what)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (received, what)), strict=True))
    assert channel.uplink(what, ()) == lossless().uplink(what, ())


@pytest.mark.parametrize("norm", [1e-3, 1.0, 5.0, 100.0])
def test_clipped_messages_are_no_longer_and_point_the_same_way(norm: float) -> None:
    what = message("float64")
    v, c = vector(what), vector(sent(clip(norm), what))
    assert np.linalg.norm(c) == pytest.approx(min(norm, np.linalg.norm(v)), rel=1e-14)
    assert v @ c == pytest.approx(np.linalg.norm(v) * np.linalg.norm(c), rel=1e-14)


@pytest.mark.parametrize("large", [1e25, 3e38])
def test_a_length_whose_square_is_beyond_float32_is_clipped_too(large: float) -> None:
    c = sent(clip(2.0), {"w": jnp.asarray([large, -large], jnp.float32)})["w"]
    np.testing.assert_allclose(c, [2**0.5, -(2**0.5)], rtol=1e-6)


def test_clipped_messages_are_counted() -> None:
    owed = ({"w": jnp.asarray([30.0, 40.0])}, ())
    cases: list[tuple[Channel, float, PyTree, list[bool]]] = [
        (clip(5.1), 1.0, None, [False]),
        (clip(4.9), 1.0, None, [True]),
        (clip(5e-30), 1.1e-30, None, [True]),
        (clip(5e30), 0.9e30, None, [False]),
        (chain(top_k(1), clip(4.5)), 1.0, None, [False]),  # 4 of the 3 and the 4
        (chain(clip(9.0), qsgd(8), clip(1.0)), 1.0, None, [True]),
        (with_error_feedback(clip(9.0)), 1.0, None, [False]),
        (with_error_feedback(clip(9.0)), 1.0, owed, [True]),
        (qsgd(8), 1.0, None, []),
    ]

    @jax.jit
    def reports(three_and_four: Array) -> list[list[Array]]:
        found = []
        for channel, size, memory, _ in cases:
            what = {"w": size * three_and_four}
            found.append(list(channel.report(KEY, what, memory or channel.init(what)).values()))
        return found

    found = reports(jnp.asarray([3.0, 4.0], jnp.float32))
    assert [[bool(v) for v in of_one] for of_one in found] == [expected for *_, expected in cases]


@pytest.mark.parametrize("channel", [qsgd(8), qsgd(4, bucket_size=3), uniform_quantiser(8), top_k(3), random_k(3)])
def test_a_message_and_a_multiple_of_it_are_sent_alike(channel: Channel) -> None:
    """Up to numbers whose squares float32 does not have; a power of two changes no digit."""
    what, send = message("float32"), compiled(channel)
    exact = vector(send(what))
    for power in (2.0**-80, 2.0**80):
        multiple = {name: leaf * power for name, leaf in what.items()}
        np.testing.assert_array_equal(vector(send(multiple)) / power, exact)


def test_the_whole_range_of_float32_can_be_quantised() -> None:
    what = {"w": jnp.asarray([-3e38, 3e38, 1.0], jnp.float32)}
    for channel in (qsgd(8), uniform_quantiser(8)):
        np.testing.assert_allclose(compiled(channel)(what)["w"], what["w"], atol=3e38 / 50)


TELLING = [name for name in CASES if name not in ("random_k", "random_k_plain", "random_k_shared")]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    nightly(
        itertools.product(TELLING, ("mixed", "float32")),
        [case for case in DAILY if case[0] in TELLING],
    ),
)
@pytest.mark.parametrize("bad", nightly([np.nan, np.inf], [np.inf]))
def test_a_message_that_is_not_finite_stays_so_and_a_zero_message_is_zero(name: str, dtypes: str, bad: float) -> None:
    """Otherwise ``accept`` could not refuse it; with random places only a number that is sent can tell.

    By day the channels and messages that are also compared to what is really written.
    """
    send, what = compiled(CASES[name].channel), jax.tree.map(np.array, message(dtypes))
    assert not vector(send(jax.tree.map(np.zeros_like, what))).any()
    for leaf in what.values():
        leaf[0] = bad
    if name != "random_k_shared_qsgd":
        assert not np.isfinite(vector(send(what))).all()


TELESCOPING = {
    "top_k": top_k(4),
    "top_k_qsgd": chain(top_k(9), qsgd(3)),
    "random_k": random_k(5, rescale=False),
    "qsgd": qsgd(6),
    "clip_uniform": chain(clip(0.2), uniform_quantiser(2)),
}


@pytest.mark.parametrize("name", nightly(TELESCOPING, ["top_k_qsgd", "clip_uniform"]))
def test_error_feedback_telescopes(name: str) -> None:
    """What was sent plus what is remembered is the sum of the updates; without the memory it is far from it."""
    channel = TELESCOPING[name]
    wrapped, memory = with_error_feedback(channel), with_error_feedback(channel).init(message("float64"))
    send = jax.jit(lambda key, update, memory: (*wrapped.send(key, update, memory), sent(channel, update, key)))
    total, received, forgotten = (np.zeros(P) for _ in range(3))
    for t in range(30):
        update = message("float64", seed=t)
        total += vector(update)
        got, memory, plain = send(jax.random.fold_in(KEY, t), update, memory)
        received += vector(got)
        forgotten += vector(plain)
    assert np.abs(received + vector(memory) - total).max() < 1e-12
    assert np.abs(forgotten - total).max() > 0.1
    assert np.abs(vector(memory)).max() > 0.1


def test_feedback_costs_nothing_and_keeps_the_inner_memory() -> None:
    what = message("float32")
    twice = with_error_feedback(with_error_feedback(top_k(5)))
    assert twice.uplink(what, ()) == top_k(5).uplink(what, ())
    memory = jax.eval_shape(twice.send, KEY, what, twice.init(what))[1]
    assert jax.tree.structure(memory) == jax.tree.structure(twice.init(what))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: top_k(0), "k: got 0, must be a whole number of at least 1"),
        (lambda: random_k(1.5), r"k: got 1\.5, must be a whole number of at least 1"),
        (lambda: top_k(), "k: got .*, must be exactly one of the two"),
        (lambda: top_k(3, fraction=0.5), "k: got .*, must be exactly one of the two"),
        (lambda: top_k(fraction=0.0), "fraction: got 0.0, must be above 0 and at most 1"),
        (lambda: random_k(fraction=1.01), "fraction: got 1.01, must be above 0"),
        (lambda: top_k(P + 1).uplink(message("float32"), ()), f"k: got {P + 1}, must be from 1 to {P}"),
        (lambda: sent(random_k(P + 1), message("float32")), f"k: got {P + 1}, must be from 1 to {P}"),
        (lambda: chain(top_k(5), random_k(6)).uplink(message("float32"), ()), "k: got 6, must be from 1 to 5"),
        (lambda: qsgd(1), "bits: got 1, must be a whole number from 2 to 16"),
        (lambda: qsgd(17), "bits: got 17"),
        (lambda: uniform_quantiser(1), "bits: got 1, must be a whole number from 2 to 16"),
        (lambda: uniform_quantiser(4.0), "bits: got 4.0"),
        (lambda: qsgd(4, bucket_size=0), "bucket_size: got 0, must be a whole number of at least 1"),
        (lambda: clip(0.0), r"norm: got 0\.0, must be above 0 and finite"),
        (lambda: clip(float("nan")), "norm: got nan"),
        (
            lambda: chain(qsgd(4), with_error_feedback(top_k(3))),
            "channels: got one that cannot be chained at position 1",
        ),
        (lambda: chain(jacobians(3)), "channels: got one that cannot be chained at position 0"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


WRITTEN = ("lossless", "top_k:0.3", "random_k:0.3", "qsgd:4", "quantise:4")


@pytest.mark.parametrize("unit", nightly([2.0**-80, 2.0**-40, 2.0**40, 2.0**80], [2.0**-80, 2.0**80]))
@pytest.mark.parametrize("text", nightly([*WRITTEN, "clip", "qsgd in buckets"], ["lossless", "clip"]))
def test_a_message_of_another_unit_arrives_in_that_unit(text: str, unit: float) -> None:
    """2^-80 is 1e-24: in float32 the squares of such numbers vanish, and those of 2^80 overflow.

    By day of the channels whose multiples of a message are not compared above.
    """
    what, units = message("float32"), (1.0, unit)
    if text == "clip":
        channels = [clip(1.5 * u) for u in units]
    else:
        channels = [qsgd(4, bucket_size=7) if text == "qsgd in buckets" else named_channel(text) or lossless()] * 2
    plain, other = (
        vector(sent(channel, jax.tree.map(lambda leaf, u=u: u * leaf, what))) / u
        for channel, u in zip(channels, units, strict=True)
    )
    assert np.count_nonzero(plain) > 5
    np.testing.assert_array_equal(plain, other)


def test_every_channel_is_tried_in_other_units() -> None:
    assert {text.partition(":")[0] for text in WRITTEN} | {"clip"} == set(catalogue("channels"))


def test_error_feedback_in_half_precision_forgets_nothing() -> None:
    """A number that is never sent grows by the same small step in each of 600 rounds; bfloat16 would stop at 256."""
    channel = with_error_feedback(top_k(1))
    what = {"a": jnp.asarray([1.0, 2.0**-12], jnp.bfloat16)}
    memory, total = channel.init(what), np.zeros(2)
    send = jax.jit(channel.send)
    for _ in range(600):
        received, memory = send(KEY, what, memory)
        assert received["a"].dtype == jnp.bfloat16
        total += np.asarray(received["a"], float)
    np.testing.assert_allclose(total + np.asarray(memory[0]["a"], float), 600 * np.array([1.0, 2.0**-12]), rtol=1e-6)
