"""The convolutional network of the federated-learning literature, as a flax network that is fast on a CPU."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from fedtangent._src import timings
from fedtangent._src.checks import choice, whole
from fedtangent._src.models.entry import MOST_UNITS
from fedtangent._src.models.gemm import Convolution, gemm_convolution
from fedtangent._src.models.images import image_network, image_shape, of_images
from fedtangent._src.types import Array, Model

if TYPE_CHECKING:
    import flax.linen as nn

CONVOLUTIONS: dict[str, Convolution] = {"lax": lax.conv_general_dilated, "gemm": gemm_convolution}
BATCH, CLIENTS = 10, 2  # of the convolutions that are timed
LARGEST_WINDOW = 127  # of a pooling: positions are kept as int8


# ---- pooling -------------------------------------------------------------------------------------------------------


def _windows(x: Array, window: tuple[int, int]) -> Array:
    """Splits ``x`` [B, H, W, C] into windows of h x w pixels, [B, H // h, h, W // w, w, C]; ``window`` is (h, w).

    Rows and columns of pixels that are left at the end are dropped.
    """
    (h, w), (rows, columns) = window, (x.shape[1] // window[0], x.shape[2] // window[1])
    filled = x[:, : rows * h, : columns * w]
    return filled.reshape((x.shape[0], rows, h, columns, w, x.shape[3]))


def _largest(x: Array, window: tuple[int, int]) -> tuple[Array, Array]:
    """Returns the largest entry of each window and its position in the window (int8), [B, H // h, W // w, C] each.

    ``x`` is [B, H, W, C] and ``window`` is (h, w). Of equal entries, the first one counts.
    """
    parts = _windows(x, window)
    positions = itertools.product(range(window[0]), range(window[1]))
    best = parts[:, :, 0, :, 0]
    where = jnp.zeros(best.shape, jnp.int8)
    for place, (i, j) in list(enumerate(positions))[1:]:
        other = parts[:, :, i, :, j]
        where = jnp.where(other > best, jnp.int8(place), where)
        best = jnp.maximum(best, other)
    return best, where


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pool(x: Array, window: tuple[int, int]) -> Array:
    return _largest(x, window)[0]


@_pool.defjvp
def _pool_jvp(window: tuple[int, int], primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    best, where = _largest(primals[0], window)
    places = jnp.arange(window[0] * window[1], dtype=jnp.int8).reshape((1, 1, window[0], 1, window[1], 1))
    chosen = where[:, :, None, :, None, :] == places
    moved = _windows(tangents[0], window)
    return best, jnp.sum(jnp.where(chosen, moved, jnp.zeros((), moved.dtype)), axis=(2, 4))


def max_pool(x: Array, window: tuple[int, int] = (2, 2)) -> Array:
    """Computes ``flax.linen.max_pool(x, window, strides=window, padding="VALID")`` for ``x`` [B, H, W, C].

    Values and gradient are the same: the first of several equal entries in a window gets the gradient. It can be
    differentiated in forward and reverse mode, and to any order.

    Args:
        x: Images [B, H, W, C].
        window: Height and width of the window.

    Raises:
        ValueError: ``x`` does not have four axes, a side of the window is below 1, or it has more than 127 entries.
    """
    if x.ndim != 4:
        raise ValueError(f"x: got shape {x.shape}, must have the axes [B, H, W, C]")
    if min(window) < 1 or window[0] * window[1] > LARGEST_WINDOW:
        raise ValueError(
            f"window: got {window}, must be two sides of at least 1, with a product of at most {LARGEST_WINDOW}"
        )
    return _pool(x, tuple(window))


# ---- the faster convolution ---------------------------------------------------------------------------------------


def choose_convolution(input_shape: Sequence[int], filters: int, window: int) -> str:
    """Returns ``"lax"`` or ``"gemm"``, whichever is faster for a convolution and its gradients on this device.

    ``"lax"`` is ``jax.lax.conv_general_dilated``, and ``"gemm"`` is ``gemm_convolution``. The time is measured once on
    each machine and then kept in a file, for two clients with separate kernels [window, window, I, filters] and batches
    of 10 images. The clients run one after another on a CPU, and at once on other devices, as in ``simulate``.

    Args:
        input_shape: (H, W, I) of an image with I channels.
        filters: Output channels.
        window: Side of the window.
    """
    settings = tuple(input_shape), filters, window, "scan" if jax.default_backend() == "cpu" else "vmap"
    question, measure = {"convolution": list(map(str, settings))}, functools.partial(_measure, *settings)
    seconds = timings.cached(question, measure, CONVOLUTIONS)
    return min(CONVOLUTIONS, key=lambda name: seconds[name])


def convolution_called(name: str, input_shape: Sequence[int], filters: int, window: int) -> Convolution:
    """Returns the convolution called ``name``: ``"lax"``, ``"gemm"``, or for ``"auto"`` the faster of these two.

    Args:
        name: "lax" (``jax.lax.conv_general_dilated``), "gemm" (``gemm_convolution``) or "auto".
        input_shape: Input shape of the costliest layer, as for ``choose_convolution``.
        filters: Output channels of that layer.
        window: Side of its window.

    Raises:
        ValueError: The name is unknown; the message lists the allowed names.
    """
    choice("convolution", name, ("auto", *CONVOLUTIONS))
    return CONVOLUTIONS[choose_convolution(input_shape, filters, window) if name == "auto" else name]


def _measure(shape: tuple[int, ...], filters: int, window: int, mapping: str) -> dict[str, float]:
    """Measures the median seconds of a convolution with its gradients, by ``"lax"`` and by ``"gemm"``.

    Two clients compute it, each with a batch of 10 images and a separate kernel. ``shape`` is (H, W, channels) of an
    image. With ``mapping`` "scan" the clients run one after another, with "vmap" at once.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (CLIENTS, BATCH, *shape), jnp.float32)
    w = jax.random.normal(keys[1], (CLIENTS, window, window, shape[-1], filters), jnp.float32)
    steps = {name: _step(convolve, mapping) for name, convolve in CONVOLUTIONS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        jax.block_until_ready(step(x, w))  # compiles
    for _ in range(3):  # in turn, so that both meet the same load
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(x, w))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _step(convolve: Convolution, mapping: str) -> Callable[[Array, Array], Array]:
    """Compiles the function to be timed: a convolution with its gradients for several clients, reduced to a scalar.

    ``convolve`` computes the convolution; ``mapping`` is "scan" or "vmap", as for ``_measure``.
    """

    def loss(x: Array, w: Array) -> Array:
        y = convolve(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return 0.5 * jnp.vdot(y, y)

    def one(x: Array, w: Array) -> Array:
        value, (by_x, by_w) = jax.value_and_grad(loss, (0, 1))(x, w)
        return value + jnp.sum(by_x) + jnp.sum(by_w)

    def step(x: Array, w: Array) -> Array:
        if mapping == "vmap":
            return jnp.sum(jax.vmap(one)(x, w))
        return lax.scan(lambda total, pair: (total + one(*pair), None), jnp.zeros((), x.dtype), (x, w))[0]

    return jax.jit(step)


# ---- the network --------------------------------------------------------------------------------------------------


def _check(input_shape: Sequence[int], sizes: tuple[Sequence[int], Sequence[int], int], window: int, pool: int) -> None:
    filters, hidden, output_size = sizes
    groups = {"filters": filters, "hidden": hidden, "output_size": (output_size,), "window": (window,), "pool": (pool,)}
    for name, values in groups.items():
        for value in values:
            whole(name, value)
    if not filters:
        raise ValueError("filters: got none, must be a number for each convolution, one or more")
    if min(input_shape[:2]) < pool ** len(filters):
        side = pool ** len(filters)
        why = f"each of {len(filters)} convolutions divides both by {pool}"
        raise ValueError(f"input_shape: got {tuple(input_shape)}, must be at least {side} high and wide: {why}")


def _network(
    convolution: Convolution,
    sizes: tuple[tuple[int, ...], tuple[int, ...], int],
    window: int,
    pool: int,
    parameterization: str,
) -> nn.Module:
    import flax.linen as nn  # here: it takes longer to import than the rest of the package

    filters, hidden, output_size = sizes

    of_width = parameterization == "maximal_update"
    first_init = nn.initializers.variance_scaling(1 / filters[0] if of_width else 1.0, "fan_in", "truncated_normal")

    def applied(layer: nn.Conv | nn.Dense, x: Array, is_first: bool = False, is_last: bool = False) -> Array:
        """Applies ``layer`` to ``x``; in the parameterization muP, also scales ``x`` and the output by constants.

        The constants have the effect of muP's factors of weights and biases.
        """
        if not of_width:
            return layer(x)
        if is_last:
            return layer(x / x.shape[-1] ** 0.5)
        root = layer.features**0.5
        return root * layer(x if is_first else x / root)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for i, size in enumerate(filters):
                init = first_init if i == 0 else nn.initializers.lecun_normal()
                shape = (window, window)
                layer = nn.Conv(size, shape, padding="SAME", kernel_init=init, conv_general_dilated=convolution)
                # relu and max commute, and after the pooling there is less of it to do
                x = nn.relu(max_pool(applied(layer, x, is_first=i == 0), (pool, pool)))
            x = x.reshape((x.shape[0], -1))
            for size in hidden:
                x = nn.relu(applied(nn.Dense(size), x))
            return applied(nn.Dense(output_size), x, is_last=True)

    return Network()


@image_network(
    {
        "filters": 4096,
        "hidden": MOST_UNITS,
        "window": 1000,
        "pool": None,
        "convolution": None,
        "parameterization": None,
    },
    "mcmahan2017",
    "yang2021",
    "yang2022",
)
def cnn(
    input_shape: Sequence[int] = (28, 28, 1),
    output_size: int = 10,
    filters: Sequence[int] = (32, 64),
    hidden: Sequence[int] = (512,),
    window: int = 5,
    pool: int = 2,
    convolution: str = "auto",
    parameterization: str = "standard",
) -> Model:
    """Builds FedAvg's network: convolutions with relu and max pooling, then dense layers (McMahan et al., 2017).

    The default has 5x5 convolutions of 32 and 64 channels, each followed by 2x2 max pooling, a dense layer of 512 and a
    linear output: 1,663,370 parameters for 28x28x1 images and 10 classes. Convolutions pad to keep the size; they are
    computed as ``convolution`` says, lax, gemm or auto. ``apply`` takes ``x`` [n, ...] of any shape that holds
    ``input_shape`` numbers for each example. Weights start as in flax (LeCun normal, zero biases), float32. There is no
    analytic kernel.

    In the ``maximal_update`` parameterization (muP; Yang et al., 2022, table 9) hidden features start as in the
    standard one, and outputs are divided by the root of the last layer's fan-in. One learning rate of SGD then serves
    all layers, and any numbers of channels and units in fixed proportion. The docstring of ``mlp`` says for which
    optimizers this holds.

    Args:
        input_shape: (H, W, channels); (H, W) is short for (H, W, 1).
        filters: Channels of the convolutions.
        hidden: Widths of the dense layers.
        window: Side of a convolution's window.
        pool: Side of a pooling window.
        parameterization: standard or maximal_update.

    Raises:
        ValueError: A size is below 1, ``filters`` is empty, the image is too small to be pooled, or a name is unknown.
    """
    shape = image_shape(input_shape)
    filters, hidden = tuple(filters), tuple(hidden)
    _check(shape, (filters, hidden, output_size), window, pool)
    choice("parameterization", parameterization, ("standard", "maximal_update"))
    last = (*(n // pool ** (len(filters) - 1) for n in shape[:2]), (shape[2], *filters)[-2])
    chosen = convolution_called(convolution, last, filters[-1], window)
    network = _network(chosen, (filters, hidden, output_size), window, pool, parameterization)
    kind = "" if parameterization == "standard" else f", {parameterization}"
    name = f"cnn({'x'.join(map(str, shape))}, {'-'.join(map(str, (*filters, *hidden, output_size)))}{kind})"
    return of_images(network, shape, output_size, name)
