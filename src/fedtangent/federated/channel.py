"""How a message travels from client to server, and the bytes it takes."""

from __future__ import annotations

import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.federated.compression import chain, lossless, with_error_feedback
from fedtangent.federated.compressors import clip, qsgd, random_k, top_k, uniform_quantiser
from fedtangent.types import Channel, Key, PyTree

__all__ = [
    "chain",
    "clip",
    "jacobians",
    "lossless",
    "qsgd",
    "random_k",
    "top_k",
    "uniform_quantiser",
    "with_error_feedback",
]


def _as_is(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
    return message, memory


def jacobians(output_size: int) -> Channel:
    """NTK-FL's uplink: for each example the Jacobian [C, P], the C outputs and the C targets (NTK-FL, section 4.1).

    The simulator never forms the Jacobian (it sends the examples and rebuilds the kernel from them); the ledger is
    charged for what the wire would carry, in the dtype of the parameters.
    """

    def uplink(message: PyTree, broadcast: PyTree) -> tuple[int, int]:
        itemsize = jnp.dtype(message.y.dtype).itemsize
        return 0, output_size * pytrees.num_bytes(broadcast) + 2 * output_size * itemsize

    return Channel(send=_as_is, uplink=uplink)
