"""Adapts neural-tangents 0.6.5 to JAX 0.8 to 0.12; no other module of fedtangent imports neural-tangents.

``from fedtangent._src.kernels.neural_tangents import nt, predict, stax``

neural-tangents 0.6.5 uses names and behaviours of JAX (and SciPy) that have since moved or been removed. This module
changes no installed file and patches nothing in JAX, not even during the import. It executes every module of
neural-tangents with a modified ``import``, which returns proxies of the few modules with missing names. A proxy is the
real module plus the names that ``_restored`` lists, each with its reason. The proxies exist only in the namespaces of
neural-tangents' modules, so they serve its code at import and at run time alike.

``neural_tangents.experimental`` (TensorFlow kernels) is replaced by an empty module: TensorFlow is never imported.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import NamedTuple, Protocol, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.tree_util import PyTreeDef

from fedtangent._src.models.gemm import ConvolutionOptions, Geometry, channels_last, patches
from fedtangent._src.types import AnyArray, PyTree

__all__ = ["nt", "predict", "stax"]

PACKAGE = "neural_tangents"
SUPPORTED_NEURAL_TANGENTS = "0.6.5"
SUPPORTED_JAX = ((0, 8), (0, 12))  # oldest and newest minor version that the tests have run under
_MARK = "__jax_proxies__"  # set on modules of neural-tangents that were loaded from here


# Functions that JAX once had, written with today's.


@runtime_checkable
class _Function(Protocol):
    """A function of arrays, or of trees of arrays."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the function's result."""


def _flatten_fun(fun: _Function, in_tree: PyTreeDef) -> tuple[_Function, Callable[[], PyTreeDef]]:
    """Returns ``fun`` over flat arguments and results, and a function that returns the tree of its last result.

    ``in_tree`` is the tree of the arguments of ``fun``.
    """
    out_trees: list[PyTreeDef] = []

    def flat(*args: PyTree) -> list[PyTree]:
        out, out_tree = jax.tree_util.tree_flatten(fun(*jax.tree_util.tree_unflatten(in_tree, args)))
        out_trees.append(out_tree)
        return out

    return flat, lambda: out_trees[-1]


def _linearize(
    fun: _Function, *primals: AnyArray, has_aux: bool = False
) -> tuple[PyTree, list[types.SimpleNamespace], Jaxpr, list[AnyArray]]:
    """Linearises ``fun`` at ``primals``; returns what ``ad.linearize`` returned in older versions of JAX.

    These are the outputs, a partial value for each output (which says that the tangent is unknown), the jaxpr of the
    linear map, and its constants. The jaxpr has no nested calls: it is traced from a tape, a list of the map's
    equations without them. ``has_aux`` is ignored: neural-tangents passes False.
    """
    outputs, tangent_map = jax.linearize(fun, *primals)
    nested = jax.make_jaxpr(tangent_map)(*primals)
    tape: list[_Step] = []
    slots = [_Slot() for _ in primals]
    out_slots = _unroll(nested.jaxpr, nested.consts, slots, tape)
    flat = jax.make_jaxpr(lambda *tangents: _play(tape, dict(zip(slots, tangents, strict=True)), out_slots))(*primals)
    return outputs, [_UNKNOWN] * len(outputs), flat.jaxpr, flat.consts


class _Slot:
    """Placeholder for a value of the linear map that is known only when the tape of equations is played."""


_Value = AnyArray | _Slot


class _Step(NamedTuple):
    """Equation of a linear map without nested calls; its inputs are values or slots, its outputs slots."""

    eqn: JaxprEqn
    inputs: Sequence[_Value]
    outputs: Sequence[_Slot]


def _unroll(jaxpr: Jaxpr, consts: Sequence[AnyArray], args: Sequence[_Value], tape: list[_Step]) -> list[_Value]:
    """Evaluates a jaxpr as far as its inputs are known, and appends the other equations to ``tape``.

    An input that is not yet known is a ``_Slot``; nested calls are unrolled. Returns the jaxpr's outputs, values or
    slots.
    """
    values: dict[Var, _Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Var | Literal) -> _Value:
        return atom.val if isinstance(atom, Literal) else values[atom]

    outputs: Sequence[_Value]
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in _CALLS and inner is not None:
            body, body_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            outputs = _unroll(body, body_consts, inputs, tape)
        elif any(isinstance(x, _Slot) for x in inputs):
            slots = [_Slot() for _ in eqn.outvars]
            tape.append(_Step(eqn, inputs, slots))
            outputs = slots
        else:  # evaluated outside the trace that plays the tape, where each value counts as linear in the parameters
            outputs = _bind(eqn, [x for x in inputs if not isinstance(x, _Slot)])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _play(tape: Sequence[_Step], values: dict[_Slot, AnyArray], outputs: Sequence[_Value]) -> list[AnyArray]:
    """Evaluates the equations on ``tape`` and returns the values of ``outputs``.

    ``values`` has the numbers of the input slots; the numbers of all other slots are added to it.
    """

    def read(x: _Value) -> AnyArray:
        return values[x] if isinstance(x, _Slot) else x

    for step in tape:
        values.update(zip(step.outputs, _bind(step.eqn, [read(x) for x in step.inputs]), strict=True))
    return [read(x) for x in outputs]


def _bind(eqn: JaxprEqn, inputs: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """Evaluates ``eqn``'s primitive and returns its outputs, always as a list."""
    if eqn.primitive is lax.split_p:
        return _split(inputs[0], **eqn.params)
    bound = eqn.primitive.bind(*inputs, **eqn.params)
    return list(bound) if eqn.primitive.multiple_results else [bound]


_UNKNOWN = types.SimpleNamespace(is_known=lambda: False)  # the old partial value of an output: all need cotangents
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})  # calls that only nest a jaxpr


def _split(x: AnyArray, *, sizes: Sequence[int], axis: int) -> list[jax.Array]:
    """Computes ``lax.split`` by slices: neural-tangents has no rule for a primitive with several outputs."""
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [lax.slice_in_dim(x, stop - size, stop, axis=axis) for size, stop in zip(sizes, stops, strict=True)]


def _eqn_vjp(eqn: JaxprEqn | None, cotangent: PyTree, *inputs: PyTree) -> Sequence[PyTree | None]:
    """Returns the cotangents of an equation's linear inputs (``UndefinedPrimal``), and None for its other inputs.

    ``cotangent`` is the cotangent of the equation's output; ``eqn`` None stands for the identity.
    """
    from jax.interpreters import ad

    if eqn is None:
        return (cotangent,)
    linear = [i for i, x in enumerate(inputs) if ad.is_undefined_primal(x)]
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(inputs)]

    def bind(*args: AnyArray) -> PyTree:
        full = list(inputs)
        for i, arg in zip(linear, args, strict=True):
            full[i] = arg
        return eqn.primitive.bind(*full, **eqn.params)

    shapes = [jax.ShapeDtypeStruct(inputs[i].aval.shape, inputs[i].aval.dtype) for i in linear]
    cotangents = iter(jax.linear_transpose(bind, *shapes)(cotangent))
    return [next(cotangents) if i in linear else None for i in range(len(inputs))]


def _eagerly(fun: _Function) -> _Function:
    """Wraps ``fun`` to evaluate known values at once: its cached results must not contain tracers of an old trace."""

    @functools.wraps(fun)
    def eager(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.ensure_compile_time_eval():
            return fun(*args, **kwargs)

    return eager


def _lru_cache(maxsize: int) -> Callable[[_Function], _Function]:
    return lambda fun: functools.lru_cache(maxsize)(_eagerly(fun))


def _with_eager_kernel(ensemble: _Function) -> _Function:
    @functools.wraps(ensemble)
    def predict_ensemble(kernel_fn: _Function, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return ensemble(_eagerly(kernel_fn), *args, **kwargs)

    return predict_ensemble


def _size(x: PyTree, axis: int | None = None) -> int:
    return int(jnp.size(x, axis)) if axis is not None else math.prod(_shape(x))


def _shape(x: PyTree) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else jnp.shape(x)


def _convolution(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Unpack[ConvolutionOptions],
) -> jax.Array:
    """Computes ``lax.conv_general_dilated`` without XLA's padding: as a product of patches, or padded beforehand."""
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, options.get("dimension_numbers"))
    if isinstance(padding, str):
        sizes = [lhs.shape[i] for i in layout.lhs_spec[2:]]
        window = [rhs.shape[i] for i in layout.rhs_spec[2:]]
        padding = lax.padtype_to_pads(sizes, window, window_strides, padding)
    edges = tuple((int(low), int(high)) for low, high in padding)
    last = lax.conv_dimension_numbers(lhs.shape, rhs.shape, channels_last(lhs.ndim))
    if layout == last and set(options) <= {"dimension_numbers"}:
        ones = (1,) * len(edges)
        rows = patches(lhs, Geometry(lhs.shape[1:-1], rhs.shape[:-2], tuple(window_strides), edges, ones, None))
        return rows @ rhs.reshape((-1, rhs.shape[-1]))
    everywhere = [(0, 0, 0)] * lhs.ndim
    for axis, (low, high) in zip(layout.lhs_spec[2:], edges, strict=True):
        everywhere[axis] = low, high, 0
    padded = lax.pad(lhs, jnp.zeros((), lhs.dtype), everywhere)
    return lax.conv_general_dilated(padded, rhs, window_strides, "VALID", **options)


class _CustomJvp(jax.custom_jvp):
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return super().__call__(*args, **kwargs) if is_traced else self.fun(*args, **kwargs)


def _eigvalsh(matrix: np.ndarray, eigvals: tuple[int, int]) -> np.ndarray:
    return scipy.linalg.eigvalsh(matrix, subset_by_index=eigvals)


def _flops(fun: _Function, optimize: bool, *args: PyTree, **kwargs: PyTree) -> float:
    """Returns JAX's count of floating-point operations of ``fun(*args, **kwargs)``; 0 if it reports none.

    With ``optimize`` they are counted in the compiled program, else in the program before XLA optimises it.
    """
    lowered = jax.jit(fun).lower(*args, **kwargs)
    analysis = (lowered.compile() if optimize else lowered).cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    return float((analysis or {}).get("flops", 0.0))


# What is restored, and why.


class Restored(NamedTuple):
    """Name that neural-tangents reads from a module, the value that replaces it there, and the reason."""

    module: str
    name: str
    value: object
    reason: str


def _restored() -> tuple[Restored, ...]:
    from jax.extend import core as extend
    from jax.extend import source_info_util

    moved = "left jax.core for jax.extend.core in JAX 0.6"
    util_gone = "jax.util is gone"
    crashes = "XLA's own padding reads before its operand on CPUs with AVX-512, and may crash; and slow under vmap"
    return (
        Restored("jax.core", "Jaxpr", extend.Jaxpr, moved),
        Restored("jax.core", "JaxprEqn", extend.JaxprEqn, moved),
        Restored("jax.core", "Literal", extend.Literal, moved),
        Restored("jax.core", "Primitive", extend.Primitive, moved),
        Restored("jax.core", "Var", extend.Var, moved),
        Restored("jax.core", "DShapedArray", type("DShapedArray", (), {}), "gone with dynamic shapes: nothing is one"),
        Restored("jax.core", "eval_context", jax.ensure_compile_time_eval, "no longer lets tracers through"),
        Restored("jax", "custom_jvp", _CustomJvp, "JAX 0.8 stages one out even when told to evaluate at once"),
        Restored("jax.util", "safe_map", lambda f, *xs: [f(*x) for x in zip(*xs, strict=True)], util_gone),
        Restored("jax.util", "safe_zip", lambda *xs: list(zip(*xs, strict=True)), util_gone),
        Restored("jax.interpreters.ad", "zeros_like_p", extend.Primitive("zeros_like"), "gone, unused since 0.4.24"),
        Restored("jax.interpreters.ad", "source_info_util", source_info_util, "now in jax.extend"),
        Restored("jax.interpreters.ad", "config", types.SimpleNamespace(jax_enable_checks=False), "gone"),
        Restored("jax.interpreters.ad", "linearize", _linearize, "returns other things; can leave nested jaxprs"),
        Restored("jax.extend.linear_util", "wrap_init", lambda fun: fun, "needs debug information now"),
        Restored("jax.api_util", "flatten_fun_nokwargs", _flatten_fun, "takes only what linear_util.wrap_init returns"),
        Restored("jax.lax", "conv_general_dilated", _convolution, crashes),
        Restored("jax.numpy", "size", _size, "refuses shapes that stand for arrays"),
        Restored("jax.numpy", "shape", _shape, "refuses shapes that stand for arrays"),
        Restored("jax.numpy", "dtype", lambda x: jnp.dtype(getattr(x, "dtype", x)), "refuses arrays"),
        Restored("functools", "lru_cache", _lru_cache, "kept tracers of the trace that came first"),
        Restored("scipy.linalg", "eigvalsh", _eigvalsh, "eigvals= is now subset_by_index="),
    )


def _replaced(package: types.ModuleType) -> tuple[Restored, ...]:
    """Returns replacements for functions of neural-tangents that fail on this JAX and that no proxy can repair."""
    empirical, ensemble = f"{PACKAGE}._src.empirical", package.predict.gradient_descent_mse_ensemble
    return (
        Restored(empirical, "_get_flops", _flops, "cost_analysis() returns a dictionary, once a list of them"),
        Restored(empirical, "_eqn_vjp_fn", _eqn_vjp, "primitives lost map_primitive, and some their transpose rule"),
        Restored(f"{PACKAGE}.predict", ensemble.__name__, _with_eager_kernel(ensemble), "kept tracers, like lru_cache"),
    )


# The import.


class _Proxy(types.ModuleType):
    """Module that stands in for another one, with names added or replaced.

    ``real`` is the replaced module, or None for a module that JAX no longer has.
    """

    def __init__(self, name: str, real: types.ModuleType | None):
        super().__init__(name)
        self.__dict__["__real__"] = real

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["__real__"], name)


def _build_proxies() -> dict[str, types.ModuleType]:
    """Builds the proxies, by the names of their modules; each has the attributes that ``_restored`` lists for it.

    The packages of these modules get proxies too, so that ``jax.core``, read as an attribute of the proxy of ``jax``,
    is the proxy of ``jax.core``.
    """
    proxies: dict[str, types.ModuleType] = {}

    def proxy(name: str) -> types.ModuleType:
        if name not in proxies:
            exists = importlib.util.find_spec(name) is not None
            proxies[name] = _Proxy(name, importlib.import_module(name) if exists else None)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(proxy(parent), child, proxies[name])
        return proxies[name]

    for item in _restored():
        setattr(proxy(item.module), item.name, item.value)
    return proxies


class _Loader(SourceFileLoader):
    """Loader that runs a module of neural-tangents unchanged, with an ``import`` that returns the proxies."""

    proxies: Mapping[str, types.ModuleType] = types.MappingProxyType({})

    def exec_module(self, module: types.ModuleType) -> None:
        proxies = self.proxies

        def import_(
            name: str,
            globals: dict[str, object] | None = None,
            locals: dict[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> types.ModuleType:
            if name in proxies and vars(proxies[name])["__real__"] is None:
                return proxies[name]
            real = builtins.__import__(name, globals, locals, fromlist or (), level)
            return proxies.get(real.__name__, real)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
        module.__dict__[_MARK] = proxies
        super().exec_module(module)


class _Finder:
    """Finder that gives neural-tangents' modules to ``_Loader``; on ``sys.meta_path`` only while they are imported."""

    def __init__(self, proxies: Mapping[str, types.ModuleType]):
        self.proxies = proxies

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == f"{PACKAGE}.experimental":
            return ModuleSpec(name, None, is_package=True)  # an empty package
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.proxies = self.proxies
        return spec


def _versions() -> str:
    """Returns the installed and the supported versions of neural-tangents and JAX, for error messages."""
    low, high = (".".join(map(str, v)) for v in SUPPORTED_JAX)
    return (
        f"installed: neural-tangents {metadata.version('neural-tangents')}, jax {jax.__version__}; "
        f"supported: neural-tangents {SUPPORTED_NEURAL_TANGENTS}, jax {low} to {high}"
    )


def _check_versions() -> None:
    """Raises ``ImportError`` unless neural-tangents has the supported version and JAX is not too old."""
    try:
        installed = metadata.version("neural-tangents")
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"neural-tangents {SUPPORTED_NEURAL_TANGENTS} is not installed") from error
    if installed != SUPPORTED_NEURAL_TANGENTS:
        raise ImportError(f"this version of neural-tangents is not supported ({_versions()})")
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", jax.__version__)[:2])
    if numbers < SUPPORTED_JAX[0]:
        raise ImportError(f"this version of jax is too old for fedtangent's neural-tangents ({_versions()})")


def _forget() -> None:
    """Removes all modules of neural-tangents from ``sys.modules``, so that a failed import leaves none behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def _load() -> types.ModuleType:
    """Imports ``neural_tangents`` through the proxies, once.

    Raises ``ImportError`` for unsupported versions, if the user has imported it already, or if the import fails.
    """
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and hasattr(loaded, _MARK):
        return loaded
    _check_versions()
    if loaded is not None:
        advice = "call fedtangent.kernels.stax() first"
        raise ImportError(f"neural_tangents was imported before fedtangent adapted it; {advice} ({_versions()})")
    _forget()
    finder: _Finder | None = None
    try:
        finder = _Finder(_build_proxies())
        sys.meta_path.insert(0, finder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of neural-tangents' own source and imports
            warnings.simplefilter("ignore", SyntaxWarning)
            package = importlib.import_module(PACKAGE)
        for item in _replaced(package):
            module = sys.modules[item.module]
            getattr(module, item.name)  # raises unless it exists
            setattr(module, item.name, item.value)
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        _forget()
        raise ImportError(f"neural-tangents cannot be made to work on this JAX: {error} ({_versions()})") from error
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    return package


nt = _load()
predict: types.ModuleType = nt.predict
stax: types.ModuleType = nt.stax
