"""Compression and DP-FedAvg in plain NumPy, written from the papers, and encoders that write messages as bytes.

Nothing of fedtangent is used here. What is random (uniform draws, places, noise) is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .reference import Params, Train, mean

NAMES = ("V", "W", "b")  # the order in which a dictionary's leaves are one vector


def flat(params: Params) -> np.ndarray:
    return np.concatenate([params[name].ravel() for name in NAMES])


def shaped(vector: np.ndarray, like: Params) -> Params:
    ends = np.cumsum([like[name].size for name in NAMES])[:-1]
    parts = np.split(vector, ends)
    return {name: part.reshape(like[name].shape) for name, part in zip(NAMES, parts, strict=True)}


# ---- what the channels do to a vector -----------------------------------------------------------------------------


def clip(v: np.ndarray, norm: float) -> np.ndarray:
    """McMahan et al. 2018: ``v * min(1, S / |v|)``."""
    return v * min(1.0, norm / np.linalg.norm(v))


def largest(v: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest magnitudes, of equal ones the first; ascending."""
    return np.sort(np.argsort(-np.abs(v), kind="stable")[:k])


def qsgd_levels(v: np.ndarray, bits: int, bucket: int | None, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alistarh et al. 2017, section 3.1: the norm of each bucket, and a level in -s .. s of each number.

    With l = floor(s |v| / |v|_2), the level is l + 1 with probability s |v| / |v|_2 - l: where u is at least 1 minus
    that.
    """
    s, width = 2 ** (bits - 1) - 1, bucket or len(v)
    norms = np.array([np.linalg.norm(v[i : i + width]) for i in range(0, len(v), width)])
    ratio = s * np.abs(v) / np.repeat(norms, width)[: len(v)]
    low = np.floor(ratio)
    return norms, (np.sign(v) * (low + (u >= 1 - (ratio - low)))).astype(int)


def qsgd_numbers(norms: np.ndarray, levels: np.ndarray, bits: int, bucket: int | None) -> np.ndarray:
    return levels * (np.repeat(norms, bucket or len(levels))[: len(levels)] / (2 ** (bits - 1) - 1))


def uniform_levels(v: np.ndarray, bits: int, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two ends of the range, and a level in 0 .. 2^bits - 1 of each number, rounded up where u says so."""
    low, high = v.min(), v.max()
    ratio = (v - low) / ((high - low) / (2**bits - 1))
    below = np.floor(ratio)
    return np.array([low, high]), np.minimum(below + (u >= 1 - (ratio - below)), 2**bits - 1).astype(int)


def uniform_numbers(ends: np.ndarray, levels: np.ndarray, bits: int) -> np.ndarray:
    return ends[0] + levels * ((ends[1] - ends[0]) / (2**bits - 1))


# ---- messages as bytes --------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """What the two ends know before a message is sent; places are among P, None where all numbers are sent."""

    total: int  # P
    numbers: int  # k
    number: np.dtype  # of a number that is not quantised
    scale: np.dtype  # of a norm
    quantiser: str | None = None
    bits: int = 0
    bucket: int | None = None
    known: np.ndarray | None = None  # places that the receiver has drawn itself


def bits_of(integers: np.ndarray, width: int) -> np.ndarray:
    return ((np.asarray(integers, np.int64)[:, None] >> np.arange(width)) & 1).astype(np.uint8).ravel()


def integers_of(bits: np.ndarray, width: int) -> np.ndarray:
    return bits.reshape(-1, width).astype(np.int64) @ (1 << np.arange(width))


def raw_bits(x: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8))


def encode(f: Format, values: np.ndarray, places: np.ndarray | None, u: np.ndarray | None) -> bytes:
    """Header, places, numbers; padded to whole bytes."""
    parts = []
    if f.quantiser == "qsgd":
        norms, levels = qsgd_levels(values, f.bits, f.bucket, u)
        parts += [raw_bits(norms.astype(f.scale))]
        numbers = [bits_of(levels < 0, 1), bits_of(np.abs(levels), f.bits - 1)]
    elif f.quantiser == "uniform":
        ends, levels = uniform_levels(values, f.bits, u)
        parts += [raw_bits(ends.astype(f.scale))]
        numbers = [bits_of(levels, f.bits)]
    else:
        numbers = [raw_bits(values.astype(f.number))]
    if places is not None and f.known is None and f.numbers < f.total:
        width = index_width(f)
        parts += [
            bits_of(places, width) if width * f.numbers < f.total else bits_of(np.isin(range(f.total), places), 1)
        ]
    return np.packbits(np.concatenate(parts + numbers)).tobytes()


def index_width(f: Format) -> int:
    return math.ceil(math.log2(f.total))


def decode(f: Format, sent: bytes) -> np.ndarray:
    """The vector of P numbers, from the bytes and what is known before."""
    bits, at = np.unpackbits(np.frombuffer(sent, np.uint8)), 0

    def read(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return bits[at - count : at]

    def floats(count: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(np.packbits(read(8 * count * dtype.itemsize)).tobytes(), dtype).astype(float)

    buckets = 2 if f.quantiser == "uniform" else -(-f.numbers // (f.bucket or f.numbers))
    header = floats(buckets, f.scale) if f.quantiser else None
    places = np.arange(f.total) if f.known is None else f.known
    if f.known is None and f.numbers < f.total:
        width = index_width(f)
        listed = width * f.numbers < f.total
        places = integers_of(read(width * f.numbers), width) if listed else np.flatnonzero(read(f.total))
    if f.quantiser == "qsgd":
        negative, level = read(f.numbers), integers_of(read(f.numbers * (f.bits - 1)), f.bits - 1)
        numbers = qsgd_numbers(header, np.where(negative, -level, level), f.bits, f.bucket)
    elif f.quantiser == "uniform":
        numbers = uniform_numbers(header, integers_of(read(f.numbers * f.bits), f.bits), f.bits)
    else:
        numbers = floats(f.numbers, f.number)
    assert len(bits) - at < 8, "bits that nobody reads"
    vector = np.zeros(f.total)
    vector[places] = numbers
    return vector


# ---- the algorithms -----------------------------------------------------------------------------------------------

Send = Callable[[int, int, np.ndarray], np.ndarray]  # (round, client, update) -> what the server receives


def compressed_averaging(
    params: Params,
    selections: Sequence[Sequence[int]],
    train: Train,
    send: Send,
    weight: Callable[[int], float],
    rate: float,
) -> Params:
    """Haddadpour et al. 2021, algorithm 1 (FedCOM), and Reisizadeh et al. 2020, algorithm 1 (FedPAQ).

    Each client sends Q(server - client), the server moves by ``rate`` times their mean.
    """
    for t, chosen in enumerate(selections):
        received = [send(t, i, flat(params) - flat(train(t, i, params))) for i in chosen]
        weights = [weight(i) for i in chosen]
        average = sum(w * v for w, v in zip(weights, received, strict=True)) / sum(weights)
        params = shaped(flat(params) - rate * average, params)
    return params


def error_feedback(memory: dict[int, np.ndarray], compress: Callable[[np.ndarray], np.ndarray], fault: str) -> Send:
    """Karimireddy et al. 2019, algorithm 1: p = g + e, sends C(p), keeps e = p - C(p)."""

    def send(t: int, i: int, update: np.ndarray) -> np.ndarray:
        p = update + memory.get(i, np.zeros_like(update))
        sent = compress(p)
        memory[i] = np.zeros_like(p) if fault == "forgets" else p - sent
        return sent

    return send


def dp_fed_avg(
    params: Params,
    selections: Sequence[Sequence[int]],
    train: Train,
    clip_norm: float,
    m: float,
    deviation: float,
    noise: Callable[[int], Params],
    rate: float,
    clip_each_leaf: bool = False,
) -> Params:
    """McMahan et al. 2018, algorithm 1: sum of clipped updates over a fixed m, plus ``deviation`` times N(0, I)."""
    for t, chosen in enumerate(selections):
        total = np.zeros_like(flat(params))
        for i in chosen:
            moved = train(t, i, params)
            update = {name: moved[name] - params[name] for name in params}
            if clip_each_leaf:
                total += flat({name: clip(leaf, clip_norm) for name, leaf in update.items()})
            else:
                total += clip(flat(update), clip_norm)
        step = total / m - deviation * flat(noise(t))
        params = shaped(flat(params) + rate * step, params)
    return params


def uncompressed(
    params: Params, selections: Sequence[Sequence[int]], train: Train, weight: Callable[[int], float]
) -> Params:
    """FedAvg, for what compression must not be."""
    for t, chosen in enumerate(selections):
        params = mean([train(t, i, params) for i in chosen], [weight(i) for i in chosen])
    return params
