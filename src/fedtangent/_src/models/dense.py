"""Multilayer perceptrons as neural-tangents stax networks, with the analytic kernel of exactly that network."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypedDict, Unpack, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from fedtangent._src.checks import choice, number, whole
from fedtangent._src.entries import NoOptions
from fedtangent._src.models.entry import CROSS_ENTROPY, MOST_UNITS, SQUARED_ERROR, network
from fedtangent._src.models.kernels import AnalyticKernel, StaxNetwork, check_dtype, stax
from fedtangent._src.models.layers import biased
from fedtangent._src.types import AnyArray, Array, Descend, EitherArray, Key, Model, PyTree

PARAMETERIZATIONS = ("ntk", "standard", "maximal_update")


@runtime_checkable
class Sized(Protocol):
    """An object with the shape of an example and the number of outputs of a model for it, such as a ``Dataset``."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs C."""


class DenseLayer(NamedTuple):
    """Scales of a layer ``z = weight_scale * h W + bias_scale * b`` with inputs h; ``bias_scale`` None: no biases."""

    weight_scale: float  # Python floats, so that they never decide the dtype
    bias_scale: float | None


class DenseStructure(NamedTuple):
    """Dense layers with one elementwise activation between them.

    Parameters follow neural-tangents' stax: a list with ``(W [fan_in, fan_out], b [1, fan_out] or None)`` for each
    layer and ``()`` for each activation, so layer ``l``'s parameters are ``params[2 * l]``.

    Attributes:
        input_size: Number of features of an example.
        activation: The activation function.
        layers: Scales of each layer.
        descend: Function that takes several gradient steps at once, as in ``types.Model``; None without one.
    """

    input_size: int
    activation: Callable[[Array], Array]
    layers: tuple[DenseLayer, ...]
    descend: Descend | None = None


def flatten_inputs(x: Shaped[EitherArray, "n ..."], input_size: int) -> Shaped[EitherArray, "n input_size"]:
    """Returns the examples as rows of numbers, [n, input_size].

    Args:
        x: Examples [n, ...].
        input_size: Number of features of an example.

    Raises:
        ValueError: An example has another number of features.
    """
    flat = cast("EitherArray", x.reshape((x.shape[0], -1)) if x.shape[0] else x.reshape((0, input_size)))
    if flat.shape[1] != input_size:
        raise ValueError(f"x: got {x.shape}, {flat.shape[1]} numbers an example, must be {input_size} for this model")
    return flat


def forward(
    structure: DenseStructure, params: PyTree, x: Shaped[AnyArray, "n ..."]
) -> tuple[list[Float[AnyArray, "n _"]], list[Float[Array, "n _"]]]:
    """Computes every layer's inputs ``h`` [n, fan_in] and outputs before the activation ``z`` [n, fan_out].

    ``z[-1]`` is the network's output [n, C].

    Args:
        structure: Layers of the network.
        params: Parameters, in whose dtype everything is computed.
        x: Examples [n, ...].
    """
    h: AnyArray = flatten_inputs(x, structure.input_size).astype(params[0][0].dtype)
    inputs: list[AnyArray] = []
    outputs: list[Array] = []
    for i, layer in enumerate(structure.layers):
        weight, bias = params[2 * i]
        h = structure.activation(outputs[-1]) if i else h
        z = layer.weight_scale * (h @ weight)
        if layer.bias_scale is not None:
            z = biased(z, layer.bias_scale * bias)
        inputs.append(h)
        outputs.append(z)
    return inputs, outputs


class Activation(NamedTuple):
    """An elementwise activation function, with the name and arguments of its layer in neural-tangents' ``stax``.

    The ``stax`` layer provides the analytic kernel.
    """

    function: Callable[[Array], Array]
    stax_name: str
    stax_arguments: dict[str, float]


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(jax.nn.relu, "Relu", {}),
    "leaky_relu": Activation(lambda z: jax.nn.leaky_relu(z, 0.01), "LeakyRelu", {"alpha": 0.01}),
    "abs": Activation(jnp.abs, "Abs", {}),
    "erf": Activation(jax.scipy.special.erf, "Erf", {}),
    "gelu": Activation(lambda z: jax.nn.gelu(z, approximate=False), "Gelu", {}),
    "sin": Activation(jnp.sin, "Sin", {}),
    "cos": Activation(jnp.cos, "Cos", {}),
}


class _Layer(NamedTuple):
    fan_in: int
    fan_out: int
    w_std: float
    b_std: float | None
    is_first: bool
    is_last: bool


class _Scaled(NamedTuple):
    """Factors of weights and biases in a layer's formula, and the standard deviations of their initial values."""

    factors: DenseLayer
    weight_std: float
    bias_std: float


def _scaled(layer: _Layer, parameterization: str) -> _Scaled:
    """Returns the scales of a layer in a parameterization: ntk, standard or maximal_update, which ``mlp`` defines.

    The scales of ``maximal_update`` are from table 9 of Yang et al. (2022).
    """
    w_std, b_std, root = layer.w_std, layer.b_std, layer.fan_in**0.5
    if parameterization == "standard":
        return _Scaled(DenseLayer(1.0, None if b_std is None else 1.0), w_std / root, b_std or 0.0)
    if parameterization == "ntk" or (layer.is_first and layer.is_last):  # without hidden layers no size is a width
        return _Scaled(DenseLayer(w_std / root, b_std), 1.0, 1.0)
    out = 1.0 if layer.is_last else layer.fan_out**0.5
    if layer.is_first:
        factor, std = out / root, 1 / out
    else:
        factor, std = 1 / root if layer.is_last else 1.0, 1 / root
    return _Scaled(DenseLayer(w_std * factor, None if b_std is None else b_std * out), std, 1 / out)


def _check(sizes: Sequence[int], activation: str, parameterization: str) -> None:
    for name, size in zip(("input_size", *["widths"] * (len(sizes) - 2), "output_size"), sizes, strict=True):
        whole(name, size)
    choice("activation", activation, ACTIVATIONS)  # those with an analytic kernel
    choice("parameterization", parameterization, PARAMETERIZATIONS)


def _initialise(layers: tuple[_Layer, ...], parameterization: str, dtype: DTypeLike, key: Key) -> PyTree:
    params: list[PyTree] = []
    for i, layer in enumerate(layers):
        weight_key, bias_key = jax.random.split(jax.random.fold_in(key, i))
        _, weight_std, bias_std = _scaled(layer, parameterization)
        weight = weight_std * jax.random.normal(weight_key, (layer.fan_in, layer.fan_out), dtype)
        bias = None if layer.b_std is None else bias_std * jax.random.normal(bias_key, (1, layer.fan_out), dtype)
        params.extend([(weight, bias), ()] if i + 1 < len(layers) else [(weight, bias)])
    return params


def _stax(layers: tuple[_Layer, ...], activation: str, parameterization: str) -> StaxNetwork:

    layer_of, chosen, stack = stax(), ACTIVATIONS[activation], []
    for i, layer in enumerate(layers):
        if i:
            stack.append(getattr(layer_of, chosen.stax_name)(**chosen.stax_arguments))
        stack.append(layer_of.Dense(layer.fan_out, layer.w_std, layer.b_std, parameterization=parameterization))
    built: StaxNetwork = layer_of.serial(*stack)
    return built


class WeightScales(TypedDict, total=False):
    """Scales of the weights and biases of ``mlp``, which explains them."""

    w_std: float  # standard deviation of weights times sqrt(fan_in), by default sqrt(2)
    b_std: float | None  # standard deviation of biases, by default 0.1; None: no biases
    last_w_std: float | None  # replaces w_std in the last layer


def sizes_of(input_size: int | Sized, output_size: int | None) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs of a model.

    Args:
        input_size: Number of inputs, or a data set, which has both numbers.
        output_size: Number of outputs; None to take it from the data set.

    Raises:
        ValueError: ``output_size`` is a tuple or list, or is None although ``input_size`` is not a data set.
    """
    if isinstance(output_size, tuple | list):
        raise ValueError(f"output_size: got {output_size}, must be a number; widths are named: widths={output_size}")
    outputs = outputs_of(input_size, output_size, "input_size")
    return math.prod(input_size.input_shape) if isinstance(input_size, Sized) else input_size, outputs


def outputs_of(inputs: object, output_size: int | None, name: str) -> int:
    """Returns ``output_size``, by default the number of outputs of a data set.

    Args:
        inputs: Inputs of a model: a data set, or a shape.
        output_size: Number of outputs; None to take it from the data set.
        name: Name of the argument ``inputs``, for the error message.

    Raises:
        ValueError: ``output_size`` is missing although ``inputs`` is not a data set.
    """
    if output_size is not None:
        return output_size
    if not isinstance(inputs, Sized):
        raise ValueError(f"output_size: got none, must be given unless {name} is a Dataset")
    return inputs.num_outputs


@dataclasses.dataclass(frozen=True)
class ScaleOptions(NoOptions):
    """Options of the initial weights of ``mlp``: standard deviations of weights, biases and last weights."""

    w_std: float = 2.0**0.5
    """Standard deviation of the weights, in units of 1 / sqrt(fan-in)."""
    b_std: float = 0.1
    """Standard deviation of the biases."""
    last_w_std: float | None = None
    """w_std of the last layer (default: w_std); a small one starts the network near zero."""


@network(
    {"widths": MOST_UNITS, "activation": None, "parameterization": None},
    ("yang2021", "yang2022"),
    more=ScaleOptions,
    learning_rates={SQUARED_ERROR: 1.0, CROSS_ENTROPY: 1.0},
)
def mlp(
    input_size: int | Sized,
    output_size: int | None = None,
    widths: Sequence[int] = (128,),
    activation: str = "relu",
    parameterization: str = "ntk",
    dtype: DTypeLike = jnp.float32,
    **scales: Unpack[WeightScales],
) -> Model:
    """Builds a multilayer perceptron of any depth, with the kernels of its infinite width.

    ``mlp(784, 10, (256, 256))`` has two hidden layers of 256 units; ``widths=()`` is a linear model. ``mlp(data)`` has
    the inputs and outputs of a ``Dataset``.

    A layer is ``z = (w_std / sqrt(fan_in)) h W + b_std b`` with N(0, 1) entries in the ``ntk`` parameterization. In the
    ``standard`` one it is ``z = h W + b`` with entries N(0, w_std^2 / fan_in) and N(0, b_std^2); its tangent kernel
    grows with ``widths``, and ``kernel`` is the one for these widths. ``b_std=None`` leaves the biases out; ``b_std=0``
    in the standard parameterization keeps them, trainable from zero. ``last_w_std`` replaces ``w_std`` in the last
    layer: a small value starts the network near zero.

    In the ``maximal_update`` parameterization (muP; Yang and Hu, 2021; by layers in table 9 of Yang et al., 2022)
    networks of every width learn features, and one learning rate of SGD serves all layers and all widths. The first
    weights have variance 1 / fan_out and the factor ``w_std sqrt(fan_out / fan_in)``, hidden weights variance 1 /
    fan_in and the factor ``w_std``, the last weights variance 1 / fan_in and the factor ``w_std / sqrt(fan_in)``. All
    biases but the last have variance 1 / fan_out and the factor ``b_std sqrt(fan_out)``. If all widths are n, the
    network is (apart from the last biases) the ``ntk`` network with its last layer's factor divided by sqrt(n), trained
    at n times the rate. Its tangent kernel changes in training at every width, so it has no ``kernel``. All of this
    holds for optimizers that are linear in the gradients: momentum, weight decay and proximal terms. Adam needs a rate
    for each layer: divided by fan_in in hidden layers, and by the root of the width in the others. Without hidden
    layers, ``maximal_update`` is the same as ``ntk``.

    ``apply`` takes ``x`` [n, ...], flattens each example and computes in the parameters' dtype. ``init(key)`` draws the
    same numbers whether or not 64-bit mode is on. ``kernel(x1, x2=None, get=("nngp", "ntk"))`` returns ``Kernels(nngp,
    ntk)``, each [n1, n2], the same for every output, in float64 if 64-bit mode is on.

    Args:
        input_size: Numbers of an example, or a ``Dataset``.
        output_size: Number of outputs; None with a ``Dataset``.
        widths: Widths of the hidden layers.
        activation: relu, leaky_relu, abs, erf, gelu, sin or cos.
        parameterization: ntk, standard or maximal_update.
        dtype: Type of the parameters.
        **scales: ``w_std``, ``b_std`` and ``last_w_std``, see ``WeightScales``.

    Raises:
        ValueError: A size is below 1 or missing, a name or a scale is unknown, a scale is negative, or ``dtype`` is not
            floating. ``init`` raises it for ``float64`` without 64-bit mode.

    Example, a network of width 64, and the kernels of infinite width:

        >>> import jax, fedtangent as ft
        >>> model = ft.models.mlp(input_size=3, output_size=2, widths=(64,))
        >>> x = jax.numpy.ones((5, 3))
        >>> model.apply(model.init(jax.random.key(0)), x).shape, model.kernel(x).ntk.shape
        ((5, 2), (5, 5))
    """
    input_size, output_size = sizes_of(input_size, output_size)
    for name in scales:
        choice("scales", name, WeightScales.__annotations__)
    w_std, b_std, last_w_std = scales.get("w_std", 2.0**0.5), scales.get("b_std", 0.1), scales.get("last_w_std")
    widths = (widths,) if isinstance(widths, int) else tuple(widths)
    sizes = (input_size, *widths, output_size)
    _check(sizes, activation, parameterization)
    for name, std in {"w_std": w_std, "b_std": b_std, "last_w_std": last_w_std}.items():
        if std is not None:
            number(name, std, at_least=0)
    check_dtype(dtype, needs_x64=False)
    # Python floats: a NumPy scalar would turn float32 into float64
    stds = [float(w_std)] * len(widths) + [float(w_std if last_w_std is None else last_w_std)]
    b_std = None if b_std is None else float(b_std)
    layers = tuple(
        _Layer(*layer, b_std, i == 0, i == len(widths))
        for i, layer in enumerate(zip(sizes[:-1], sizes[1:], stds, strict=True))
    )
    dense = tuple(_scaled(layer, parameterization).factors for layer in layers)
    structure = DenseStructure(input_size, ACTIVATIONS[activation].function, dense)

    def init(key: Key) -> PyTree:
        check_dtype(dtype, needs_x64=True)
        return _initialise(layers, parameterization, dtype, key)

    def at_width(width: int) -> Model:
        return mlp(input_size, output_size, (width,) * len(widths), activation, parameterization, dtype, **scales)

    is_standard, changes = parameterization == "standard", parameterization == "maximal_update" and bool(widths)
    kernel = AnalyticKernel(
        network=functools.cache(lambda: _stax(layers, activation, "standard" if is_standard else "ntk")),
        prepare=lambda x: flatten_inputs(x, input_size),
    )
    return Model(
        name=f"mlp({'-'.join(map(str, sizes))}, {activation}, {parameterization})",
        init=init,
        apply=lambda params, x: forward(structure, params, x)[1][-1],
        kernel=None if changes else kernel,
        output_size=output_size,
        structure=structure,
        at_width=at_width if widths else None,
        is_linear=not widths,
        vocabulary=0,
    )


@network({"zero_init": None}, learning_rates={SQUARED_ERROR: 0.01, CROSS_ENTROPY: 0.1})
def logistic(
    input_size: int | Sized, output_size: int | None = None, zero_init: bool = True, dtype: DTypeLike = jnp.float32
) -> Model:
    """Builds multinomial logistic regression, the linear mlp ``x W + b`` in the standard parameterization.

    The tangent kernel of inputs x1 and x2 is ``x1 x2' + 1``, whatever the parameters.

    Args:
        input_size: Numbers of an example, or a ``Dataset``.
        output_size: Number of outputs; None with a ``Dataset``.
        zero_init: Start at zero; otherwise the weights start as N(0, 1 / input_size).
        dtype: Type of the parameters.

    Raises:
        ValueError: A size is below 1 or missing, or ``dtype`` is not floating.
    """
    input_size, output_size = sizes_of(input_size, output_size)
    return mlp(
        input_size,
        output_size,
        (),
        parameterization="standard",
        w_std=0.0 if zero_init else 1.0,
        b_std=0.0,
        dtype=dtype,
    )._replace(name=f"logistic({input_size}-{output_size})")
