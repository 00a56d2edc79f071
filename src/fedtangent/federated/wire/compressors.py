"""Clipping, sparsifiers and quantisers of whole messages (``compression`` says what they cost and chains them)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent.checks import check_positive, is_whole
from fedtangent.federated.wire.compression import Code, Sending, Stage, stages_channel
from fedtangent.types import Array, Channel, Key


def clip(norm: float) -> Channel:
    """The whole message scaled down to Euclidean length ``norm`` where it is longer (McMahan et al., 2018, FlatClip).

    Raises ``ValueError`` unless ``norm`` is positive and finite.
    """
    check_positive("norm", norm)

    def apply(key: Key, sending: Sending) -> Sending:
        values = sending.values
        # Scaled so that no square is too large for the dtype, and by no more than has an inverse in it.
        scale = jnp.max(jnp.abs(values)) / 4
        scale = jnp.where(scale > 0, scale, 1)
        unit = values / scale
        squares = jnp.sum(jnp.square(unit))
        root = jnp.sqrt(jnp.where(squares > 0, squares, 1))
        bound = jnp.asarray(norm, values.dtype)
        # False for numbers that are not finite: they stay as they are, and the server can refuse them.
        longer = root > bound / scale
        return sending._replace(values=jnp.where(longer, unit * (bound / root), values))

    return stages_channel(Stage(apply, lambda code: code))


# ---- sparsifiers --------------------------------------------------------------------------------------------------


def top_k(k: int | None = None, *, fraction: float | None = None) -> Channel:
    """The k numbers of largest magnitude of the whole message, the rest are 0 (Stich et al., 2018, definition 2.1).

    Of equal magnitudes the first count. Give ``k``, or a ``fraction`` of the P numbers, rounded to at least 1.

    Raises ``ValueError`` for other than one of the two, a fraction outside (0, 1], and, once the message is known, k
    outside 1 .. P.
    """
    _check_share(k, fraction)

    def apply(key: Key, sending: Sending) -> Sending:
        count = _count(k, fraction, sending.values.size)
        return _narrowed(sending, jax.lax.top_k(jnp.abs(sending.values), count)[1])

    return stages_channel(Stage(apply, lambda code: code._replace(numbers=_count(k, fraction, code.numbers))))


def random_k(
    k: int | None = None, *, fraction: float | None = None, rescale: bool = True, shared_seed: bool = False
) -> Channel:
    """k numbers of the whole message drawn uniformly, times P / k, which makes it unbiased; the rest are 0.

    Args:
        k: or a ``fraction`` of the P numbers, rounded to at least 1.
        rescale: without it the message shrinks instead (Stich et al., 2018, definition 2.1), for error feedback.
        shared_seed: the server draws the same places from the client's seed, so that none are sent.

    Raises ``ValueError`` as ``top_k`` does.
    """
    _check_share(k, fraction)

    def apply(key: Key, sending: Sending) -> Sending:
        total = sending.values.size
        count = _count(k, fraction, total)
        chosen = _narrowed(sending, jax.random.permutation(key, total)[:count])
        return chosen._replace(values=chosen.values * (total / count)) if rescale else chosen

    def code(code: Code) -> Code:
        count = _count(k, fraction, code.numbers)
        # A place that the receiver can draw itself is not one it has to be told.
        known = shared_seed and code.numbers == code.places
        return code._replace(numbers=count, places=count if known else code.places)

    return stages_channel(Stage(apply, code))


def _narrowed(sending: Sending, chosen: Array) -> Sending:
    """The numbers of ``sending`` at ``chosen``, in the order of their places, which a bitmap cannot but keep."""
    chosen = jnp.sort(chosen)
    at = chosen if sending.at is None else sending.at[chosen]
    return Sending(sending.values[chosen], at.astype(jnp.int32))


def _check_share(k: int | None, fraction: float | None) -> None:
    if (k is None) == (fraction is None):
        raise ValueError(f"k: exactly one of k and fraction, got k={k}, fraction={fraction}")
    if k is not None and (not is_whole(k) or k < 1):
        raise ValueError(f"k: got {k!r}, must be a whole number from 1 to the number of parameters")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction: got {fraction}, must be above 0 and at most 1")


def _count(k: int | None, fraction: float | None, total: int) -> int:
    if k is None:
        return max(1, round(float(fraction or 0) * total))
    if k > total:
        raise ValueError(f"k: got {k}, must be from 1 to {total}, the numbers of a message")
    return int(k)


# ---- quantisers ---------------------------------------------------------------------------------------------------


def qsgd(bits: int, *, bucket_size: int | None = None) -> Channel:
    """QSGD's quantiser (Alistarh et al., 2017, section 3.1): a sign and a level of |v| / |v|_2 for each number v.

    The s = 2^(bits - 1) - 1 levels above 0 are equally far apart; v is rounded to one of its two neighbours at random
    so that it is unbiased. A number takes ``bits`` bits and a bucket one norm.

    Args:
        bucket_size: numbers that share a norm; by default the whole message does.

    Raises ``ValueError`` for bits outside 2 .. 16 and a ``bucket_size`` below 1.
    """
    _check_bits(bits)
    if bucket_size is not None and (not is_whole(bucket_size) or bucket_size < 1):
        raise ValueError(f"bucket_size: got {bucket_size!r}, must be a whole number of at least 1")
    levels = 2 ** (bits - 1) - 1

    def apply(key: Key, sending: Sending) -> Sending:
        values, total = sending.values, sending.values.size
        width = min(bucket_size or total, total)
        buckets = jnp.pad(values, (0, -total % width)).reshape(-1, width)
        norm = jnp.sqrt(jnp.sum(jnp.square(buckets), axis=1, keepdims=True))
        share = jnp.abs(buckets) / jnp.where(norm > 0, norm, 1)
        drawn = jax.random.uniform(key, (total,), values.dtype)
        level = jnp.floor(share * levels + jnp.pad(drawn, (0, -total % width)).reshape(-1, width))
        # A number that is its bucket's only one may be rounded above its norm.
        quantised = jnp.sign(buckets) * jnp.minimum(level, levels) * (norm / levels)
        return sending._replace(values=quantised.reshape(-1)[:total])

    def code(code: Code) -> Code:
        buckets = -(-code.numbers // min(bucket_size or code.numbers, code.numbers))
        return code._replace(bits=bits, header=buckets * code.scale_bits)

    return stages_channel(Stage(apply, code))


def uniform_quantiser(bits: int) -> Channel:
    """Each number rounded to one of 2^bits levels, equally far apart from the message's least number to its largest.

    It is rounded to one of its two neighbours at random so that it is unbiased, as FedCOM asks of its quantiser
    (Haddadpour et al., 2021, assumption 1). A number takes ``bits`` bits, and the message its two ends.

    Raises ``ValueError`` for bits outside 2 .. 16.
    """
    _check_bits(bits)
    top = 2**bits - 1

    def apply(key: Key, sending: Sending) -> Sending:
        values = sending.values
        low, high = jnp.min(values), jnp.max(values)
        step = (high - low) / top
        drawn = jax.random.uniform(key, values.shape, values.dtype)
        level = jnp.floor((values - low) / jnp.where(step > 0, step, 1) + drawn)
        return sending._replace(values=low + jnp.clip(level, 0, top) * step)

    return stages_channel(Stage(apply, lambda code: code._replace(bits=bits, header=2 * code.scale_bits)))


def _check_bits(bits: int) -> None:
    if not is_whole(bits) or not 2 <= bits <= 16:
        raise ValueError(f"bits: got {bits!r}, must be a whole number from 2 to 16")
