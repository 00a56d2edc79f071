"""Channels: the transport of a message from client to server, whole, clipped, sparsified or quantised.

A channel that compresses treats a message as one vector: its P floating numbers, leaf after leaf, whatever their
dtypes. It consists of stages; each stage leaves out or rounds some of the numbers that are still to be sent. ``ledger``
counts the bytes of the result. Channels can be chained, and with error feedback the numbers that a channel leaves out
are added to the client's next message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedtangent._src import pytrees
from fedtangent._src.checks import number, whole
from fedtangent._src.entries import WrittenEntry, build_written
from fedtangent._src.federated.wire import ledger
from fedtangent._src.federated.wire.ledger import Code
from fedtangent._src.federated.wire.sparsify import num_kept
from fedtangent._src.types import Array, Channel, Key, PyTree


class Unsent(NamedTuple):
    """The numbers of a message, taken as a vector of P numbers, that are to be sent after some stages of a channel.

    Attributes:
        values: The k numbers, [k].
        at: Their positions among the P numbers, [k] int32; None if all P numbers are sent, in order.
    """

    values: Array
    at: Array | None


class Stage(NamedTuple):
    """A stage of a channel, which leaves out, rounds or scales some of a message's numbers.

    Attributes:
        apply: Leaves out, rounds or scales some of the numbers, ``(key, Unsent) -> Unsent``.
        code: Function from the size of the encoded message before the stage to the size after it.
        clips: Function from an ``Unsent`` to whether the stage scales its numbers down; None if the stage never clips.
    """

    apply: Callable[[Key, Unsent], Unsent]
    code: Callable[[Code], Code]
    clips: Callable[[Unsent], Array] | None = None


def _coded(stages: tuple[Stage, ...], key: Key, message: PyTree) -> tuple[list[Unsent], Callable[[Array], PyTree]]:
    """Flattens the floating leaves of ``message`` into one vector and passes it through the stages in order.

    Stage j draws its random numbers from ``fold_in(key, j)``.

    Returns:
        The numbers before the first stage and after each stage; the function that restores the leaves from a vector.
    """
    dtype = ledger.dtypes(message)[1]
    floating = [leaf.astype(dtype) for leaf in jax.tree.leaves(message) if ledger.is_floating(leaf)]
    vector, parts = ravel_pytree(floating)
    unsent = [Unsent(vector, None)]
    for j, stage in enumerate(stages):
        unsent.append(stage.apply(jax.random.fold_in(key, j), unsent[-1]))
    return unsent, parts


def _send(stages: tuple[Stage, ...], key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the message as the server receives it after all stages, and the client's memory unchanged."""
    leaves, structure = jax.tree.flatten(message)
    floating = [i for i, leaf in enumerate(leaves) if ledger.is_floating(leaf)]
    if not stages or not floating:
        return message, memory
    (first, *_, unsent), parts = _coded(stages, key, message)
    received = unsent.values if unsent.at is None else jnp.zeros_like(first.values).at[unsent.at].set(unsent.values)
    for i, part in zip(floating, parts(received), strict=True):
        leaves[i] = part.astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, leaves), memory


def _report(stages: tuple[Stage, ...], key: Key, message: PyTree, memory: PyTree) -> dict[str, Array]:
    """Returns ``{"clipped": whether a stage clips this message}``; an empty dictionary if the channel never clips."""
    if not any(stage.clips for stage in stages) or not any(map(ledger.is_floating, jax.tree.leaves(message))):
        return {}
    unsent = _coded(stages, key, message)[0][:-1]
    clipped = [stage.clips(numbers) for stage, numbers in zip(stages, unsent, strict=True) if stage.clips is not None]
    return {"clipped": jnp.any(jnp.stack(clipped))}


def _uplink(stages: tuple[Stage, ...], message: PyTree, broadcast: PyTree) -> tuple[int, int]:
    return ledger.message_bytes(message, [stage.code for stage in stages]), 0


def _staged(*stages: Stage) -> Channel:
    """Builds a channel from stages, which are applied to a whole message one after another."""
    part = functools.partial
    return Channel(send=part(_send, stages), uplink=part(_uplink, stages), report=part(_report, stages))


def lossless() -> Channel:
    """Builds the channel that sends the message unchanged, each number in its dtype."""
    return _staged()


def as_is(uplink: Callable[[PyTree, PyTree], tuple[int, int]]) -> Channel:
    """Builds the channel that sends messages unchanged and charges the bytes that ``uplink`` counts.

    ``uplink(message, broadcast)`` returns the bytes of a message, and the bytes to add for each example of the client.
    """
    return Channel(send=lambda key, message, memory: (message, memory), uplink=uplink)


def jacobians(output_size: int, sparsity: float = 0.0, value_bits: int | None = None) -> Channel:
    """Builds NTK-FL's channel, which charges for each example a Jacobian [C, P], C outputs and C targets.

    P is the number of parameters. A sparsified Jacobian (CP-NTK-FL, section 4.2 of the NTK-FL paper) is sent as its
    ``num_kept(sparsity, C P)`` numbers of largest magnitude and their positions. The simulator sends the examples, from
    which the server computes the kernel; the wire ledger charges the Jacobians.

    Args:
        output_size: Outputs C.
        sparsity: Share of the Jacobian's numbers that is set to zero.
        value_bits: Bits of a number; None for the bits of the widest parameter or, with a sparsity of 0, for each
            number the bits of its parameter's dtype.
    """

    def uplink(message: PyTree, broadcast: PyTree) -> tuple[int, int]:
        num_sent = None if sparsity == 0 else num_kept(sparsity, output_size * pytrees.size(broadcast))
        return 0, ledger.jacobian_bytes(broadcast, output_size, num_sent, value_bits)

    return as_is(uplink)


# ---- channels of channels -----------------------------------------------------------------------------------------


def chain(*channels: Channel) -> Channel:
    """Builds a channel from several: each one codes the numbers that the previous one leaves to be sent.

    ``chain(top_k(100), qsgd(4))`` sends the positions of the 100 largest numbers and quantises these numbers;
    ``chain(clip(1.0), qsgd(8))`` clips first.

    Args:
        channels: Channels of this module, in the order in which they are applied.

    Raises:
        ValueError: A channel that you wrote yourself, or one with error feedback. Put the error feedback around the
            chain.
    """
    stages: list[Stage] = []
    for i, channel in enumerate(channels):
        if not (isinstance(channel.uplink, functools.partial) and channel.uplink.func is _uplink):
            raise ValueError(
                f"channels: got one that cannot be chained at position {i}, allowed are lossless, clip, top_k, "
                "random_k, qsgd, uniform_quantiser and chains of them; put error feedback around the chain"
            )
        stages += channel.uplink.args[0]
    return _staged(*stages)


def with_error_feedback(channel: Channel) -> Channel:
    """Builds the channel that adds to a client's next message the numbers that ``channel`` left out.

    A client sends ``p = message + memory`` through ``channel``, which makes C(p) of it, and keeps ``p - C(p)`` as
    memory (Stich et al., 2018, algorithm 1; Karimireddy et al., 2019, algorithm 1). The memory is kept per model and
    client, and stays while a client is absent or rejected. It costs no bytes. Use it with compressors whose error is
    shorter than the message (``top_k``, ``random_k`` without rescaling, quantisers with many levels): with others the
    memory grows without bound. Leaves that are not floating are sent unchanged.
    """

    def init(message: PyTree) -> PyTree:
        return pytrees.accumulator(message), channel.init(message)

    def with_owed(message: PyTree, owed: PyTree) -> PyTree:
        return jax.tree.map(lambda m, e: m + e if ledger.is_floating(m) else m, message, owed)

    def report(key: Key, message: PyTree, memory: PyTree) -> dict[str, Array]:
        return channel.report(key, with_owed(message, memory[0]), memory[1])

    def send(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        owed, inner = memory
        whole = with_owed(message, owed)
        sent, inner = channel.send(key, pytrees.cast_like(whole, message), inner)
        owed = jax.tree.map(lambda w, received, e: w - received if ledger.is_floating(w) else e, whole, sent, owed)
        return sent, (owed, inner)

    # not channel.uplink itself, which would say that the channel consists of stages and can be chained
    return Channel(send, lambda message, broadcast: channel.uplink(message, broadcast), init, report)


# ---- clipping -----------------------------------------------------------------------------------------------------


def clip(norm: float | Array) -> Channel:
    """Builds the channel that scales a message longer than ``norm`` down to that Euclidean length.

    ``info["clipped"]`` says which messages were longer. A message with numbers that are not finite stays unchanged.

    Source: McMahan et al., 2018, FlatClip.

    Raises:
        ValueError: ``norm`` is not positive and finite.
    """
    number("norm", norm, above=0)

    def is_longer(unsent: Unsent) -> Array:
        _, scale, root = _in_units(unsent.values)
        # False for numbers that are not finite: they stay as they are, and the server can refuse them.
        return jnp.squeeze(root > jnp.asarray(norm, scale.dtype) / scale)

    def apply(key: Key, unsent: Unsent) -> Unsent:
        unit, _, root = _in_units(unsent.values)
        shorter = unit * (jnp.asarray(norm, unit.dtype) / root)
        return unsent._replace(values=jnp.where(is_longer(unsent), shorter, unsent.values))

    return _staged(Stage(apply, lambda code: code, is_longer))


def _in_units(values: Array) -> tuple[Array, Array, Array]:
    """Divides each row of ``values`` by a scale, so that the squares neither overflow nor underflow the dtype.

    Returns:
        The divided rows; the scales, which are powers of two; the norms of the divided rows, where 0 is replaced by 1.
    """
    scale = pytrees.magnitude(values, axis=-1)
    unit = values / scale
    squares = jnp.sum(jnp.square(unit), axis=-1, keepdims=True)
    return unit, scale, jnp.sqrt(jnp.where(squares > 0, squares, 1))


# ---- sparsifiers --------------------------------------------------------------------------------------------------


def top_k(k: int | None = None, *, fraction: float | None = None) -> Channel:
    """Builds the channel that sends the k numbers of largest magnitude, the others as 0 (Stich et al., 2018, def. 2.1).

    The k numbers are chosen among all P numbers of the message; if magnitudes are equal, the first ones are chosen. In
    a ``chain``, P counts the numbers that earlier channels left.

    Args:
        k: How many numbers to send; give either ``k`` or ``fraction``.
        fraction: Share of the P numbers to send, rounded to at least one number.

    Raises:
        ValueError: Both or neither of ``k`` and ``fraction``, k below 1, or a fraction outside (0, 1]. When a message
            is sent: k above P.
    """
    _check_share(k, fraction)

    def apply(key: Key, unsent: Unsent) -> Unsent:
        count = _count(k, fraction, unsent.values.size)
        return _narrowed(unsent, jax.lax.top_k(jnp.abs(unsent.values), count)[1])

    return _staged(Stage(apply, lambda code: code._replace(numbers=_count(k, fraction, code.numbers))))


def random_k(
    k: int | None = None, *, fraction: float | None = None, rescale: bool = True, shared_seed: bool = False
) -> Channel:
    """Builds the channel that sends k of a message's P numbers, drawn at random, multiplied by P / k; the others are 0.

    The factor P / k makes the received message unbiased. In a ``chain``, P counts the numbers that earlier channels
    left.

    Args:
        k: How many numbers to send; give either ``k`` or ``fraction``.
        fraction: Share of the P numbers to send, rounded to at least one number.
        rescale: Whether to multiply by P / k; without it the message shrinks (Stich et al., 2018, definition 2.1), as
            error feedback needs.
        shared_seed: Whether the server draws the same positions from the client's seed, so that no positions are sent.
            It has no effect after a channel whose positions are sent, such as ``top_k``.

    Raises:
        ValueError: Both or neither of ``k`` and ``fraction``, k below 1, or a fraction outside (0, 1]. When a message
            is sent: k above P.
    """
    _check_share(k, fraction)

    def apply(key: Key, unsent: Unsent) -> Unsent:
        total = unsent.values.size
        count = _count(k, fraction, total)
        chosen = _narrowed(unsent, jax.random.permutation(key, total)[:count])
        return chosen._replace(values=chosen.values * (total / count)) if rescale else chosen

    def code(code: Code) -> Code:
        count = _count(k, fraction, code.numbers)
        # Places that the receiver can draw need not be sent.
        is_shared = shared_seed and code.numbers == code.places
        return code._replace(numbers=count, places=count if is_shared else code.places)

    return _staged(Stage(apply, code))


def _narrowed(unsent: Unsent, chosen: Array) -> Unsent:
    """Returns ``unsent`` with only its entries at the indices ``chosen``, sorted by index.

    In this order a bitmap can encode which entries were chosen.
    """
    chosen = jnp.sort(chosen)
    at = chosen if unsent.at is None else unsent.at[chosen]
    return Unsent(unsent.values[chosen], at.astype(jnp.int32))


def _check_share(k: int | None, fraction: float | None) -> None:
    if (k is None) == (fraction is None):
        raise ValueError(f"k: got {k}, fraction: got {fraction}, must be exactly one of the two")
    if k is not None:
        whole("k", k)
    else:
        number("fraction", fraction, above=0, at_most=1)


def _count(k: int | None, fraction: float | None, total: int) -> int:
    if k is None:
        return max(1, round(float(fraction or 0) * total))
    if k > total:
        raise ValueError(f"k: got {k}, must be from 1 to {total}, the size of a message")
    return int(k)


# ---- quantisers ---------------------------------------------------------------------------------------------------


def qsgd(bits: int, *, bucket_size: int | None = None) -> Channel:
    """Builds QSGD's quantiser: for each number v a sign and a level of ``|v| / norm`` (Alistarh et al., 2017).

    The numbers are cut into buckets of successive numbers, and the norm is the Euclidean norm of the bucket of v. There
    are 2^(bits - 1) - 1 equidistant levels above 0. A number is rounded to one of its two neighbouring levels at
    random, so that the result is unbiased.

    Args:
        bits: Bits of a number; each bucket also sends one norm.
        bucket_size: Numbers of a bucket; by default all numbers of the message are one bucket. The last bucket may have
            fewer.

    Raises:
        ValueError: Bits outside 2 .. 16, or a ``bucket_size`` below 1.
    """
    whole("bits", bits, 2, 16)
    if bucket_size is not None:
        whole("bucket_size", bucket_size)
    levels = 2 ** (bits - 1) - 1

    def apply(key: Key, unsent: Unsent) -> Unsent:
        values, total = unsent.values, unsent.values.size
        width = min(bucket_size or total, total)
        buckets = jnp.pad(values, (0, -total % width)).reshape(-1, width)
        unit, scale, norm = _in_units(buckets)
        share = jnp.abs(unit) / norm
        noise = jax.random.uniform(key, (total,), values.dtype)
        level = jnp.floor(share * levels + jnp.pad(noise, (0, -total % width)).reshape(-1, width))
        # A number that is its bucket's only one may be rounded above its norm.
        quantised = jnp.sign(buckets) * jnp.minimum(level, levels) * (norm / levels) * scale
        return unsent._replace(values=quantised.reshape(-1)[:total])

    def code(code: Code) -> Code:
        buckets = -(-code.numbers // min(bucket_size or code.numbers, code.numbers))
        return code._replace(bits=bits, header=buckets * code.scale_bits)

    return _staged(Stage(apply, code))


def uniform_quantiser(bits: int) -> Channel:
    """Builds the quantiser that rounds to 2^bits levels between the least and the largest number of the message.

    The levels are equidistant. A number is rounded to one of its two neighbouring levels at random, so that the result
    is unbiased, as FedCOM requires (Haddadpour et al., 2021, assumption 1). The least and the largest number are sent
    too.

    Args:
        bits: Bits of a number.

    Raises:
        ValueError: Bits outside 2 .. 16.
    """
    whole("bits", bits, 2, 16)
    top = 2**bits - 1

    def apply(key: Key, unsent: Unsent) -> Unsent:
        values = unsent.values / 4  # so that the range is not too large for the dtype
        low, high = jnp.min(values), jnp.max(values)
        step = (high - low) / top
        noise = jax.random.uniform(key, values.shape, values.dtype)
        level = jnp.floor((values - low) / jnp.where(step > 0, step, 1) + noise)
        return unsent._replace(values=4 * (low + jnp.clip(level, 0, top) * step))

    return _staged(Stage(apply, lambda code: code._replace(bits=bits, header=2 * code.scale_bits)))


# ---- as they are written ------------------------------------------------------------------------------------------


def named_channel(text: str, error_feedback: bool = False) -> Channel | None:
    """Returns the channel that a text describes, such as ``top_k:0.01``; None for "lossless", which changes nothing.

    Args:
        text: Name of a channel, with a colon and a number if the channel needs one.
        error_feedback: Whether to add error feedback.

    Raises:
        ValueError: ``text`` does not describe a channel, or it is "lossless" and ``error_feedback`` is True.
    """
    channel: Channel = build_written("channels", text)
    if text == "lossless":
        if error_feedback:
            raise ValueError("error_feedback: got True with a lossless channel, must be False: it leaves nothing out")
        return None
    return with_error_feedback(channel) if error_feedback else channel


ENTRIES = (
    WrittenEntry("lossless", "updates are sent unchanged", lossless),
    WrittenEntry("clip", "updates scaled to a largest Euclidean length", clip, papers=("mcmahan2018",), number="norm"),
    WrittenEntry("top_k", "the largest numbers of an update", lambda share: top_k(fraction=share), number="share"),
    WrittenEntry("random_k", "random numbers of an update", lambda share: random_k(fraction=share), number="share"),
    WrittenEntry("qsgd", "random levels around 0, one norm (QSGD)", qsgd, papers=("alistarh2017",), number="bits"),
    WrittenEntry(
        "quantise",
        "random levels from least to largest (FedCOM)",
        uniform_quantiser,
        papers=("haddadpour2021",),
        number="bits",
    ),
)
