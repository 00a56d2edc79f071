"""The convolutional network of the federated-learning literature, as a flax network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent.models.cpu.choice import resolve_convolution
from fedtangent.models.cpu.pooling import max_pool
from fedtangent.models.entry import CROSS_ENTROPY, SQUARED_ERROR, ModelEntry
from fedtangent.models.flax_networks import FlaxStructure, from_flax
from fedtangent.types import Array, Model, PyTree


def _check(input_shape: Sequence[int], output_size: int, filters: Sequence[int], window: int, pool: int) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape: got {tuple(input_shape)}, must be (height, width, channels)")
    if output_size < 1 or window < 1 or pool < 1 or not filters or min(filters) < 1:
        raise ValueError(
            f"cnn: got output_size={output_size}, filters={tuple(filters)}, window={window}, pool={pool}, "
            "all must be at least 1 and there must be one convolution or more"
        )
    if min(input_shape[:2]) < pool ** len(filters):
        raise ValueError(
            f"input_shape: got {tuple(input_shape)}, too small to be pooled {len(filters)} times by {pool}"
        )


def _network(convolution: Any, sizes: tuple[tuple[int, ...], tuple[int, ...], int], window: int, pool: int) -> Any:
    import flax.linen as nn  # here: it takes longer to import than the rest of the package

    filters, hidden, output_size = sizes

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for size in filters:
                x = nn.Conv(size, (window, window), padding="SAME", conv_general_dilated=convolution)(x)
                # relu and max commute, and after the pooling there is less of it to do
                x = nn.relu(max_pool(x, (pool, pool)))
            x = x.reshape((x.shape[0], -1))
            for size in hidden:
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(output_size)(x)

    return Network()


def cnn(
    input_shape: Sequence[int] = (28, 28, 1),
    output_size: int = 10,
    filters: Sequence[int] = (32, 64),
    hidden: Sequence[int] = (512,),
    window: int = 5,
    pool: int = 2,
    convolution: str = "auto",
) -> Model:
    """Convolutions with relu and max pooling, then dense layers: by default FedAvg's CNN (McMahan et al., 2017).

    That is 5x5 convolutions of 32 and 64 channels, each followed by 2x2 max pooling, a dense layer of 512 and a linear
    output: 1,663,370 parameters for 28x28x1 images and 10 classes. Convolutions pad to keep the size.

    ``apply`` takes ``x`` [n, ...] of any shape that holds ``input_shape`` numbers an example. ``convolution`` is
    ``"lax"``, ``"gemm"`` (see ``models.gemm_convolution``) or ``"auto"``, the faster one of them on this machine,
    measured once. Weights start as flax's (LeCun normal, zero biases), float32. There is no analytic kernel.

    Raises ``ValueError`` for impossible sizes and unknown names. ``input_shape`` (H, W) is short for (H, W, 1).
    """
    shape = tuple(int(n) for n in input_shape)
    shape = (*shape, 1) if len(shape) == 2 else shape
    filters, hidden = tuple(filters), tuple(hidden)
    _check(shape, output_size, filters, window, pool)
    last = (
        *(n // pool ** (len(filters) - 1) for n in shape[:2]),
        (shape[2], *filters)[-2],
    )  # the costliest one's input
    chosen = resolve_convolution(convolution, last, filters[-1], window)
    network = _network(chosen, (filters, hidden, output_size), window, pool)
    name = f"cnn({'x'.join(map(str, shape))}, {'-'.join(map(str, (*filters, *hidden, output_size)))})"
    flat = from_flax(network, jax.ShapeDtypeStruct((1, *shape), jnp.float32), output_size, name)

    def apply(params: PyTree, x: Array) -> Array:
        if math.prod(x.shape[1:]) != math.prod(shape):
            raise ValueError(f"x: got {x.shape}, the model takes examples of {shape}")
        dtype = jax.tree.leaves(params)[0].dtype
        return flat.apply(params, x.reshape((x.shape[0], *shape)).astype(dtype))

    return flat._replace(apply=apply, structure=FlaxStructure(apply))


@dataclasses.dataclass(frozen=True)
class CnnOptions:
    """Options of cnn."""

    filters: tuple[int, ...] = (32, 64)
    """Channels of the convolutions."""
    hidden: tuple[int, ...] = (512,)
    """Widths of the dense layers."""
    window: int = 5
    """Side of a convolution's window."""
    pool: int = 2
    """Side of a pooling's window."""
    convolution: str = "auto"
    """lax, gemm, or auto: the faster one of them on this machine, measured once."""


def _build(o: CnnOptions, input_shape: tuple[int, ...], output_size: int) -> Model:
    return cnn(input_shape, output_size, o.filters, o.hidden, o.window, o.pool, o.convolution)


ENTRIES = (
    ModelEntry(
        "cnn",
        "FedAvg's convolutional network: convolutions with max pooling, then dense layers (McMahan et al., 2017)",
        _build,
        CnnOptions,
        ("mcmahan2017",),
        function=cnn,
        kinds=("image",),
        loss=CROSS_ENTROPY,
        learning_rates={SQUARED_ERROR: 0.01, CROSS_ENTROPY: 0.05},
    ),
)
