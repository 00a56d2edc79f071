"""How a message travels from client to server, and the bytes it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.entries import WrittenEntry, build_written
from fedtangent.federated.wire.compression import chain, lossless, place_bits, with_error_feedback
from fedtangent.federated.wire.compressors import clip, qsgd, random_k, top_k, uniform_quantiser
from fedtangent.federated.wire.sparsify import num_kept
from fedtangent.types import Channel, Key, PyTree

__all__ = [
    "chain",
    "clip",
    "jacobians",
    "lossless",
    "named_channel",
    "qsgd",
    "random_k",
    "top_k",
    "uniform_quantiser",
    "with_error_feedback",
]


def _as_is(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    return message, memory


def jacobians(output_size: int, sparsity: float = 0.0, value_bits: int | None = None) -> Channel:
    """NTK-FL's uplink: for each example the Jacobian [C, P], the C outputs and the C targets (NTK-FL, section 4.1).

    Of a sparsified Jacobian (CP-NTK-FL, section 4.2) the ``num_kept(sparsity, C P)`` largest numbers and their places,
    coded as ``compression`` codes them; a number takes ``value_bits``, by default those of the widest parameter.

    The simulator never forms the Jacobian (it sends the examples and rebuilds the kernel from them); the ledger is
    charged for what the wire would carry, in the dtype of the parameters.
    """

    def uplink(message: PyTree, broadcast: PyTree) -> tuple[int, int]:
        widest = jnp.result_type(*jax.tree.leaves(broadcast)).itemsize
        rest = 2 * output_size * widest
        if sparsity == 0 and value_bits is None:
            return 0, output_size * pytrees.num_bytes(broadcast) + rest
        total = output_size * pytrees.size(broadcast)
        kept = num_kept(sparsity, total)
        bits = kept * (value_bits or 8 * widest) + place_bits(kept, total)
        return 0, -(-bits // 8) + rest

    return Channel(send=_as_is, uplink=uplink)


def named_channel(text: str, error_feedback: bool = False) -> Channel | None:
    """The channel that is written ``text``, such as ``top_k:0.01``; None for lossless, which changes nothing.

    Raises ``ValueError`` for a text that names no channel, and for error feedback where nothing is lost.
    """
    made: Channel = build_written("channels", text)
    if text == "lossless":
        if error_feedback:
            raise ValueError("error_feedback: a lossless channel owes nothing; name another channel")
        return None
    return with_error_feedback(made) if error_feedback else made


ENTRIES = (
    WrittenEntry("lossless", "updates as they are", lossless),
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
