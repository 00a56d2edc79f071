"""Channels: how messages travel, whole, clipped, sparsified or quantised; ``Averaging(channel=..)`` takes one."""

from fedtangent._src.federated.wire.channel import (
    chain,
    clip,
    jacobians,
    lossless,
    qsgd,
    random_k,
    top_k,
    uniform_quantiser,
    with_error_feedback,
)

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
