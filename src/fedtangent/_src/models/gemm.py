"""Convolutions that are fast inside loops over clients, and with a separate kernel for each client.

``gemm_convolution`` takes the place of ``jax.lax.conv_general_dilated`` in
``flax.linen.Conv(conv_general_dilated=..)``, which is slow there for two reasons. XLA's CPU backend runs only
channels-last convolutions with an unreversed kernel at the speed of a matrix product, and the gradients that JAX
derives do not have that form: here they are rewritten to have it. And ``vmap`` over clients turns separate kernels into
grouped convolutions: here they become batched matrix products over patches of the input.

A convolution, its gradient by the input and its gradient by the kernel are bilinear, and each is the transpose of the
others. They are three primitives, so that forward and reverse differentiation of any order, ``jit``, ``vmap``, ``scan``
and ``remat`` apply. A depthwise convolution, and each of its gradients, is a sum of shifted inputs times numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypedDict, Unpack, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir
from jaxtyping import Float, Shaped

from fedtangent._src.liveness import Program, inner_programs, is_program
from fedtangent._src.models.rows import module_of
from fedtangent._src.types import AnyArray, Apply, Array, PyTree

Precision = lax.PrecisionLike
DimensionNumbers = lax.ConvGeneralDilatedDimensionNumbers


class Geometry(NamedTuple):
    """Settings of a convolution of x [B, *spatial, I] with w [*window, I, O] into y [B, *output, O].

    B is the number of examples, I and O are the numbers of input and output channels. ``padding`` has zeros (before,
    after) for each spatial axis, and ``dilation`` is the distance between the entries of the window.
    """

    spatial: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]  # of the kernel
    precision: Precision

    @property
    def extent(self) -> tuple[int, ...]:
        """Size of the dilated window along each spatial axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.window, self.dilation, strict=True))

    @property
    def output(self) -> tuple[int, ...]:
        """Size of the output along each spatial axis."""
        room = (n + low + high for n, (low, high) in zip(self.spatial, self.padding, strict=True))
        return tuple(
            max(0, (r - e) // stride + 1) for r, e, stride in zip(room, self.extent, self.strides, strict=True)
        )


def channels_last(ndim: int) -> tuple[str, str, str]:
    """Returns the ``dimension_numbers`` of ``lax.conv_general_dilated`` for arrays of ``ndim`` axes, channels last."""
    spatial = "DHW"[-(ndim - 2) :]
    return f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"


def _library(x: Array, w: Array, g: Geometry) -> Array:
    numbers = channels_last(x.ndim)
    more = ConvolutionOptions(rhs_dilation=g.dilation, dimension_numbers=numbers, precision=g.precision)
    return lax.conv_general_dilated(x, w, g.strides, g.padding, **more)


def _direct_to_input(y: Array, w: Array, g: Geometry) -> Array:
    """Computes the gradient of a convolution by its input, as a convolution of ``y`` with the flipped kernel ``w``.

    ``y`` is the gradient by the convolution's output, [B, *output, O]; the function dilates and pads it. ``g`` are the
    settings of the convolution that is differentiated.
    """
    before = [e - 1 - low for e, (low, _) in zip(g.extent, g.padding, strict=True)]
    dilated = [(n - 1) * stride + 1 for n, stride in zip(g.output, g.strides, strict=True)]
    after = [n + e - 1 - d - b for n, e, d, b in zip(g.spatial, g.extent, dilated, before, strict=True)]
    turned = jnp.swapaxes(jnp.flip(w, range(w.ndim - 2)), -1, -2)
    more = ConvolutionOptions(
        lhs_dilation=g.strides,
        rhs_dilation=g.dilation,
        dimension_numbers=channels_last(y.ndim),
        precision=g.precision,
    )
    padding = list(zip(before, after, strict=True))
    return lax.conv_general_dilated(y, turned, (1,) * len(g.window), padding, **more)


def _direct_to_kernel(x: Array, y: Array, g: Geometry) -> Array:
    """Computes the gradient of a convolution by its kernel from input ``x`` and the gradient ``y`` by its output.

    It is a convolution of ``x`` with ``y`` in which the axes of channels and examples are swapped. ``g`` are the
    settings of the convolution that is differentiated.
    """
    dilated = [(n - 1) * stride + 1 for n, stride in zip(g.output, g.strides, strict=True)]
    sides = zip(g.padding, g.extent, dilated, g.spatial, strict=True)
    padding = [(low, e - 1 + d - n - low) for (low, _), e, d, n in sides]
    numbers = channels_last(x.ndim)
    more = ConvolutionOptions(rhs_dilation=g.strides, dimension_numbers=numbers, precision=g.precision)
    out = lax.conv_general_dilated(jnp.swapaxes(x, 0, -1), jnp.moveaxis(y, 0, -2), g.dilation, padding, **more)
    return jnp.moveaxis(out, 0, -2)


def _shifted(x: Array, g: Geometry) -> list[Array]:
    """Returns, for each entry of the window, the entries of ``x`` that are multiplied by it, [B, *output, I] each."""
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((low, high, 0) for low, high in g.padding), (0, 0, 0)])
    shifted = []
    for offset in itertools.product(*map(range, g.window)):
        start = [place * d for place, d in zip(offset, g.dilation, strict=True)]
        stop = [a + (n - 1) * stride + 1 for a, n, stride in zip(start, g.output, g.strides, strict=True)]
        shifted.append(lax.slice(padded, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *g.strides, 1)))
    return shifted


def patches(x: Array, g: Geometry) -> Array:
    """Gathers the inputs under the window at each output position, [B, *output, window * I].

    The last axis has the order of the kernel's axes [*window, I].

    Args:
        x: Inputs [B, *spatial, I].
        g: Settings of the convolution.
    """
    shifted = _shifted(x, g)
    return shifted[0] if len(shifted) == 1 else lax.concatenate(shifted, x.ndim - 1)


def _depthwise(x: Array, w: Array, g: Geometry) -> Array:
    """Computes a depthwise convolution: each channel of ``x`` [B, *spatial, I] with separate kernels.

    ``w`` is [*window, 1, O], with O / I kernels for each channel.
    """
    wide = jnp.repeat(x, w.shape[-1] // x.shape[-1], axis=-1)
    rows = w.reshape((-1, *(1,) * (x.ndim - 1), w.shape[-1]))
    return functools.reduce(jnp.add, (part * row for part, row in zip(_shifted(wide, g), rows, strict=True)))


def _product(x: Array, w: Array, g: Geometry) -> Array:
    """Computes the convolution as one matrix product of patches [B * output, window * I] with the kernel."""
    rows = patches(x, g)
    flat = rows.reshape((-1, rows.shape[-1]))
    return lax.dot(flat, w.reshape((-1, w.shape[-1])), precision=g.precision).reshape((*rows.shape[:-1], w.shape[-1]))


_Bilinear = Callable[[Array, Array, Geometry], Array]  # a convolution, or its gradient by one of its operands


def _transposed(forward: _Bilinear, by: str) -> _Bilinear:
    """Returns a function for the gradient of a convolution by one operand, derived with ``jax.linear_transpose``.

    ``forward`` computes the convolution, and ``by`` is "input" or "kernel".
    """

    def to_input(y: Array, w: Array, g: Geometry) -> Array:
        like = jax.ShapeDtypeStruct((y.shape[0], *g.spatial, w.shape[-2]), y.dtype)
        return jax.linear_transpose(lambda x: forward(x, w, g), like)(y)[0]

    def to_kernel(x: Array, y: Array, g: Geometry) -> Array:
        like = jax.ShapeDtypeStruct((*g.window, x.shape[-1], y.shape[-1]), x.dtype)
        return jax.linear_transpose(lambda w: forward(x, w, g), like)(y)[0]

    return to_input if by == "input" else to_kernel


class _Map(NamedTuple):
    """A bilinear map (a convolution, or its gradient by the input or by the kernel) with its implementations.

    Attributes:
        direct: Implementation that is fast on a CPU.
        library: Implementation that is fast on an accelerator.
        product: Implementation by matrix products of patches.
        shape: Computes the shape of the result from the shapes of the operands.
        folds: For each operand an axis of the operand and an axis of the result. If only this operand has a batch
            axis, ``vmap`` merges the batch axis with the first, and splits it off the second.
    """

    direct: _Bilinear
    library: _Bilinear
    product: _Bilinear
    shape: Callable[[ShapedArray, ShapedArray, Geometry], tuple[int, ...]]
    folds: tuple[tuple[int, int], tuple[int, int]]


_MAPS = {
    "forward": _Map(
        _library,
        _library,
        _product,
        lambda x, w, g: (x.shape[0], *g.output, w.shape[-1]),
        ((0, 0), (-1, -1)),
    ),
    "to_input": _Map(
        _direct_to_input,
        _transposed(_library, "input"),
        _transposed(_product, "input"),
        lambda y, w, g: (y.shape[0], *g.spatial, w.shape[-2]),
        ((0, 0), (-2, -1)),
    ),
    "to_kernel": _Map(
        _direct_to_kernel,
        _transposed(_library, "kernel"),
        _transposed(_product, "kernel"),
        lambda x, y, g: (*g.window, x.shape[-1], y.shape[-1]),
        ((-1, -2), (-1, -1)),
    ),
}


def _is_direct(a: Array, g: Geometry) -> bool:
    """Returns whether XLA's convolution of ``a`` is faster than a matrix product on a CPU.

    This holds for float32 and a window of more than one entry.
    """
    return a.dtype == jnp.float32 and max(g.window) > 1


def _batched(
    primitive: Primitive, rules: _Map, args: Sequence[AnyArray], dims: Sequence[int | None], g: Geometry
) -> tuple[Array, int]:
    """Implements ``vmap`` of a bilinear map: returns the result and its batch axis.

    ``primitive`` is the map, ``rules`` are its implementations. ``args`` are the two operands, and ``dims`` their batch
    axes or None. A batch axis of only one operand is folded into another axis of it. If both operands have one, the map
    becomes a batched matrix product, or a loop where XLA's convolution is faster on a CPU.
    """
    if None in dims:
        i = 1 if dims[0] is None else 0
        axis, result_axis = (place % args[1 - i].ndim for place in rules.folds[i])
        moved = jnp.moveaxis(args[i], dims[i] or 0, axis)
        size = moved.shape[axis]
        folded = moved.reshape((*moved.shape[:axis], -1, *moved.shape[axis + 2 :]))
        out = primitive.bind(*((folded, args[1]) if i == 0 else (args[0], folded)), geometry=g)
        shape = (*out.shape[:result_axis], size, out.shape[result_axis] // size, *out.shape[result_axis + 1 :])
        return out.reshape(shape), result_axis
    a, b = (jnp.moveaxis(operand, dim or 0, 0) for operand, dim in zip(args, dims, strict=True))

    def loop(a: Array, b: Array) -> Array:
        return lax.map(lambda pair: primitive.bind(*pair, geometry=g), (a, b))

    def products(a: Array, b: Array) -> Array:
        return jax.vmap(lambda a, b: rules.product(a, b, g))(a, b)

    if not _is_direct(a, g):
        return products(a, b), 0
    return lax.platform_dependent(a, b, cpu=loop, default=products), 0


def _primitive(name: str) -> Primitive:
    rules = _MAPS[name]
    primitive = Primitive(f"convolution_{name}")

    def on_cpu(a: Array, b: Array, *, geometry: Geometry) -> Array:
        return (rules.direct if _is_direct(a, geometry) else rules.product)(a, b, geometry)

    def abstract(a: ShapedArray, b: ShapedArray, *, geometry: Geometry) -> ShapedArray:
        return a.update(shape=rules.shape(a, b, geometry), weak_type=False)

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("geometry",)))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda a, b, *, geometry: rules.library(a, b, geometry), False))
    mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, False), platform="cpu")
    batching.primitive_batchers[primitive] = lambda args, dims, *, geometry: _batched(
        primitive, rules, args, dims, geometry
    )
    return primitive


_forward, _to_input, _to_kernel = map(_primitive, _MAPS)
# each is the transpose of the others, by its first operand and by its second
ad.defbilinear(
    _forward, lambda y, _, w, **g: _to_input.bind(y, w, **g), lambda y, x, _, **g: _to_kernel.bind(x, y, **g)
)
ad.defbilinear(
    _to_input, lambda x, _, w, **g: _forward.bind(x, w, **g), lambda x, y, _, **g: _to_kernel.bind(x, y, **g)
)
ad.defbilinear(
    _to_kernel, lambda w, _, y, **g: _to_input.bind(y, w, **g), lambda w, x, _, **g: _forward.bind(x, w, **g)
)


def _check(x: Array, w: Array, dimension_numbers: DimensionNumbers, groups: int) -> None:
    if not 3 <= x.ndim <= 5 or w.ndim != x.ndim:
        raise ValueError(f"lhs and rhs: got shapes {x.shape} and {w.shape}, must have the same number of axes, 3 to 5")
    layout = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    if layout != lax.conv_dimension_numbers(x.shape, w.shape, channels_last(x.ndim)):
        allowed = ", ".join(channels_last(x.ndim))
        raise ValueError(f"dimension_numbers: got {dimension_numbers}, must be channels last: ({allowed})")
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"lhs and rhs: got {x.dtype} and {w.dtype}, must be of one floating type")
    if groups < 1:
        raise ValueError(f"feature_group_count: got {groups}, must be at least 1")
    if w.shape[-2] * groups != x.shape[-1] or w.shape[-1] % groups:
        raise ValueError(
            f"rhs: got shape {w.shape} for lhs of shape {x.shape} in {groups} feature groups, must end in the axes "
            "(channels of lhs / groups, a multiple of groups)"
        )


class ConvolutionOptions(TypedDict, total=False):
    """Optional arguments of ``jax.lax.conv_general_dilated``; one that is left out has its default there."""

    lhs_dilation: Sequence[int] | None
    rhs_dilation: Sequence[int] | None
    dimension_numbers: DimensionNumbers
    feature_group_count: int
    precision: Precision


@runtime_checkable
class Convolution(Protocol):
    """A function that computes a convolution, as ``jax.lax.conv_general_dilated`` does."""

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        **options: Unpack[ConvolutionOptions],
    ) -> Array:
        """Returns the convolution of B examples with a kernel of O output channels, [B, *output, O].

        Args:
            lhs: Inputs [B, *spatial, I].
            rhs: Kernel [*window, I / groups, O].
            window_strides: Stride along each spatial axis.
            padding: Name of a padding, or pairs (low, high) for each spatial axis.
            options: See ``ConvolutionOptions``.
        """


def gemm_convolution(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Unpack[ConvolutionOptions],
) -> Array:
    """Computes ``jax.lax.conv_general_dilated`` for channels-last inputs, fast inside loops and under ``vmap``.

    Values and derivatives, forward and reverse and of any order, agree with ``conv_general_dilated`` to rounding.

    Args:
        lhs: Inputs ``[B, *spatial, I]`` with one to three spatial axes.
        rhs: Kernel ``[*window, I / groups, O]`` of the same floating type.
        window_strides: Stride along each spatial axis.
        padding: ``"SAME"``, ``"VALID"``, ``"SAME_LOWER"`` or pairs (low, high), which may be negative.
        **options: See ``ConvolutionOptions``. ``dimension_numbers`` must be passed, because JAX's default has the
            channels first.

    Returns:
        Array ``[B, *output, O]``.

    Raises:
        ValueError: The channels are not the last axis, the arrays have other numbers of axes, dtypes differ or are not
            floating, numbers of channels do not fit, or ``padding`` is a name although ``lhs_dilation`` dilates the
            input. Or there is another option, such as ``batch_group_count``, that is not its default.
    """
    for name, value in options.items():  # flax passes defaults too, such as out_sharding=None
        if name not in ConvolutionOptions.__annotations__ and value is not None and value != 1:
            raise ValueError(f"{name}: got {value!r}, must be left out")
    lhs_dilation, rhs_dilation = options.get("lhs_dilation"), options.get("rhs_dilation")
    groups = options.get("feature_group_count", 1)
    _check(lhs, rhs, options.get("dimension_numbers"), groups)
    num_axes = lhs.ndim - 2
    if lhs_dilation is not None and max(lhs_dilation) > 1:
        spread = [(0, 0, 0), *((0, 0, d - 1) for d in lhs_dilation), (0, 0, 0)]
        lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), spread)
    dilation = (1,) * num_axes if rhs_dilation is None else tuple(rhs_dilation)
    geometry = Geometry(lhs.shape[1:-1], rhs.shape[:-2], tuple(window_strides), (), dilation, options.get("precision"))
    if isinstance(padding, str):
        if lhs_dilation is not None and max(lhs_dilation) > 1:
            raise ValueError(
                f"padding: got {padding!r}, must be pairs (low, high) if lhs_dilation is {tuple(lhs_dilation)}"
            )
        padding = lax.padtype_to_pads(geometry.spatial, geometry.extent, geometry.strides, padding)
    geometry = geometry._replace(padding=tuple((int(low), int(high)) for low, high in padding))
    if groups == 1:
        return _forward.bind(lhs, rhs, geometry=geometry)
    if groups == lhs.shape[-1]:
        return _depthwise(lhs, rhs, geometry)
    x = lhs.reshape((*lhs.shape[:-1], groups, -1))
    w = rhs.reshape((*rhs.shape[:-1], groups, -1))
    out = jax.vmap(functools.partial(_forward.bind, geometry=geometry), in_axes=-2, out_axes=-2)(x, w)
    return out.reshape((*out.shape[:-2], -1))


# ---- in the user's networks ---------------------------------------------------------------------------------------


def with_fast_convolutions(apply: Apply) -> Apply:
    """Returns a function with the values of ``apply``, to rounding, whose convolutions run fast inside loops on a CPU.

    ``apply`` is traced, and ``gemm_convolution`` takes the place of its convolutions, also in its loops, branches,
    ``jit`` and ``checkpoint``. A convolution stays if it is not of one floating type, does not have one to three
    spatial axes, divides its examples into groups, or is inside a function with custom derivatives. If JAX's default
    backend is not the CPU, and for networks of this package, ``apply`` itself is returned.

    Args:
        apply: ``(params, x [n, ...]) -> outputs [n, C]`` of a user's network.
    """
    if module_of(apply).startswith("fedtangent.") or jax.default_backend() != "cpu":
        return apply

    def faster(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        traced = jax.make_jaxpr(apply)(params, x)
        if not _has_convolution(traced.jaxpr):
            return apply(params, x)
        return cast("Array", _evaluate(traced, *jax.tree.leaves((params, x)))[0])

    return faster


def _has_convolution(jaxpr: Jaxpr) -> bool:
    return any(_is_exchanged(eqn) or any(map(_has_convolution, inner_programs(eqn))) for eqn in jaxpr.eqns)


def _is_exchanged(eqn: JaxprEqn) -> bool:
    """Returns whether a traced operation is a convolution that ``gemm_convolution`` can compute.

    It must be of one floating type, have one to three spatial axes, and no groups of examples (``batch_group_count``).
    """
    if eqn.primitive is not lax.conv_general_dilated_p:
        return False
    x, w, out = (cast("ShapedArray", v.aval) for v in (*eqn.invars, *eqn.outvars))
    is_floating = x.dtype == w.dtype == out.dtype and jnp.issubdtype(x.dtype, jnp.floating)
    return bool(is_floating and 3 <= x.ndim <= 5 and eqn.params["batch_group_count"] == 1)


def _exchanged(eqn: JaxprEqn, x: AnyArray, w: AnyArray) -> Array:
    """Computes the traced convolution ``eqn`` of ``x`` with ``w`` by ``gemm_convolution``.

    Axes may be in any order: they are transposed before and after.
    """
    (batch, channels, *places), (outputs, inputs, *window), of_result = eqn.params["dimension_numbers"]
    options = {name: eqn.params[name] for name in ("lhs_dilation", "rhs_dilation", "feature_group_count", "precision")}
    last = gemm_convolution(
        jnp.transpose(x, (batch, *places, channels)),
        jnp.transpose(w, (*window, inputs, outputs)),
        eqn.params["window_strides"],
        eqn.params["padding"],
        dimension_numbers=channels_last(x.ndim),
        **options,
    )
    order = [of_result[0], *of_result[2:], of_result[1]]  # of the axes of ``last`` in the result
    return jnp.transpose(last, [order.index(axis) for axis in range(x.ndim)])


def _evaluate(program: ClosedJaxpr, *arguments: Array) -> list[object]:
    """Evaluates a traced function, with ``gemm_convolution`` for each convolution that ``_is_exchanged`` accepts.

    Returns the function's results. Operations with custom derivatives stay unchanged.
    """
    jaxpr = program.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *arguments), strict=True))

    def read(v: Var | Literal) -> object:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if _is_exchanged(eqn):
            x, w = cast("list[Array]", operands)
            results = [_exchanged(eqn, x, w)]
        else:
            bound = eqn.primitive.get_bind_params(_rewritten(eqn))
            functions, options = bound if isinstance(bound, tuple) else ([], bound)  # older JAX passes functions apart
            result = eqn.primitive.bind(*functions, *operands, **options)
            results = result if eqn.primitive.multiple_results else [result]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _rewritten(eqn: JaxprEqn) -> dict[str, object]:
    """Returns the parameters of a traced operation, with the programs inside it rewritten.

    In these programs, such as the body of a loop, ``gemm_convolution`` replaces the convolutions that ``_is_exchanged``
    accepts. The parameters stay the same if the programs have none, or if the operation has custom derivatives.
    """

    def faster(value: object) -> object:
        if not isinstance(value, Program):
            return value
        program = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, [])
        new = jax.make_jaxpr(functools.partial(_evaluate, program))(*(v.aval for v in program.jaxpr.invars))
        return new if program is value else new.jaxpr

    if eqn.primitive.name.startswith("custom_") or not any(map(_has_convolution, inner_programs(eqn))):
        return eqn.params
    return {name: jax.tree.map(faster, value, is_leaf=is_program) for name, value in eqn.params.items()}
