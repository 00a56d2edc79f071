"""Entries of models, by which commands and ``build`` find a model by its name.

A model is a function such as ``cnn(input_shape, output_size, filters=..)`` marked with ``network``. Its options on the
command line are parameters of the function: name, type, default and help are in its signature and docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp

from fedtangent._src.entries import Entry, NoOptions, catalogue, choose, given_options, help_of, own_options
from fedtangent._src.models.flax_networks import from_flax, is_module
from fedtangent._src.types import Model

SQUARED_ERROR, CROSS_ENTROPY = "squared_error", "cross_entropy"
EXPONENTIAL, LOGISTIC = "exponential", "logistic"
MOST_UNITS, MOST_LAYERS = 2**20, 200  # of a network that is described by options
# from the shape of an example and the number of outputs to arguments of a model's function
Sizes = Callable[[tuple[int, ...], int], Mapping[str, int | tuple[int, ...]]]
OF_IMAGES = {SQUARED_ERROR: 0.01, CROSS_ENTROPY: 0.05}  # step sizes with which most networks begin to train


@runtime_checkable
class ModelFunction(Protocol):
    """A function that builds a model, such as ``mlp``."""

    def __call__(self, *sizes: Any, **options: Any) -> Model:
        """Builds the model.

        Args:
            sizes: Shape of the examples and number of outputs.
            options: Further arguments of the function, by name.
        """


@dataclasses.dataclass(frozen=True)
class ModelEntry(Entry):
    """The entry of a model: its name, options and papers, and ``build(options, input_shape, output_size) -> Model``."""

    function: ModelFunction = cast("ModelFunction", None)  # noqa: RUF009
    """Function that builds the model."""
    kinds: tuple[str, ...] = ("image", "vector")
    """Kinds of input that the model reads: "image", "tokens", "vector"."""
    loss: str = SQUARED_ERROR
    """Default loss of the model if targets are classes; for numbers it is the squared error."""
    learning_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Default step size of the clients for each loss, measured at the model's default sizes."""

    def fitting_loss(self, is_regression: bool) -> str:
        """Returns the name of the default loss: the squared error for regression, the entry's ``loss`` for classes."""
        return SQUARED_ERROR if is_regression else self.loss


Function = TypeVar("Function", bound=ModelFunction)


def _flat(input_shape: tuple[int, ...], output_size: int) -> dict[str, int]:
    return {"input_size": math.prod(input_shape), "output_size": output_size}


def network(
    most: Mapping[str, int | None],
    papers: tuple[str, ...] = (),
    sizes: Sizes = _flat,
    more: type[Any] = NoOptions,
    **about: Any,
) -> Callable[[Function], Function]:
    """Returns a decorator that marks a function as a model, so that it can be chosen by its name.

    Args:
        most: Names of the parameters that are options on the command line. The value is the largest number allowed, or
            None for no limit.
        papers: Keys of the papers behind the model.
        sizes: Function that converts the shape of an example and the number of outputs to the first arguments of the
            marked function.
        more: A frozen dataclass of options that the marked function takes by ``**``, and so does not name.
        about: Values of other fields of ``ModelEntry``, such as ``kinds``.
    """

    def mark(function: Function) -> Function:
        common = {
            "name": getattr(function, "__name__", ""),
            "most": most,
            "papers": papers,
            "sizes": sizes,
            "more": more,
        }
        function.about = common | about  # type: ignore[attr-defined]
        return function

    return mark


def entry_of(function: ModelFunction) -> ModelEntry:
    """Builds the entry of a model from its function, which is marked with ``network``."""
    about = dict(vars(function)["about"])
    name, sizes = about.pop("name"), about.pop("sizes")
    options = _options(name, function, about.pop("most"), about.pop("more"))
    summary = (inspect.getdoc(function) or name).splitlines()[0].removeprefix("Builds ").rstrip(".")

    def build(chosen: object, input_shape: tuple[int, ...], output_size: int) -> Model:
        model: Model = function(**sizes(input_shape, output_size), **vars(chosen))
        return model

    return ModelEntry(name, summary, build, options, function=function, **about)


def _options(title: str, function: ModelFunction, most: Mapping[str, int | None], more: Any) -> type[Any]:
    """Builds a dataclass with a field for each option of a model's function; help texts are from its docstring.

    ``title`` is the model's name. ``most`` has the largest number allowed for each option, or None. ``more`` is a
    dataclass of further options.
    """
    import docstring_parser

    texts = {p.arg_name: p.description or "" for p in docstring_parser.parse(inspect.getdoc(function) or "").params}
    parameters, kinds, fields = inspect.signature(function).parameters, typing.get_type_hints(function), []
    for name, largest in most.items():
        default = parameters[name].default
        kind = tuple[int, ...] if isinstance(default, tuple) else kinds[name]
        help_ = " ".join(texts.get(name, "").split()).partition(". ")[0].rstrip(".") + "."
        fields.append((name, kind, dataclasses.field(default=default, metadata={"most": largest, "help": help_})))
    kinds, helps = typing.get_type_hints(more), help_of(more)
    for field in dataclasses.fields(more):
        copied = dataclasses.field(default=field.default, metadata={"help": helps[field.name]})
        fields.append((field.name, kinds[field.name], copied))
    return dataclasses.make_dataclass(f"{title.title().replace('_', '')}Options", fields, frozen=True)


def build(
    name: str, input_shape: int | Sequence[int], output_size: int, kind: str | None = None, **options: Any
) -> Model:
    """Builds the model called ``name``: ``build("mlp", 784, 10, widths=(256, 256))`` is ``mlp(784, 10, (256, 256))``.

    Args:
        name: Name of a model, or ``package.module:function`` of the user's own, as for ``entry_of_function``.
        input_shape: Shape of an example; a number for vectors.
        output_size: Number of outputs.
        kind: Kind of the inputs, "image", "tokens" or "vector", to check that the model reads it; None for no check.
        **options: Options of the model's entry, such as ``widths`` of ``mlp``.

    Raises:
        ValueError: The model or an option is unknown (the message lists the allowed names), the model does not read
            this ``kind`` of input, or its function refuses a value.
    """
    entry: ModelEntry = choose("models", name)
    check_kind(entry, kind)
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    model: Model = entry.build(given_options(entry, options), shape, output_size)
    return model


def entry_of_function(name: str, function: ModelFunction) -> ModelEntry:
    """Builds the entry of a user's function ``(input_shape, output_size, **options)``.

    The function returns a ``Model``, or a flax.linen module that maps floating examples [n, *input_shape] to [n,
    output_size]. For text it must convert its module with ``from_flax``. By default such a model is trained by cross
    entropy if targets are classes.

    Args:
        name: ``package.module:function``.
        function: The function; its ``input_shape`` is a tuple, the shape of one example.

    Raises:
        ValueError: The first two parameters cannot be positional, or another one has no default, or a type that cannot
            be written on a command line. The entry's ``build`` raises it if the function returns something else.
    """
    options = own_options("model", name, function, (), ())

    def build(chosen: object, input_shape: tuple[int, ...], output_size: int) -> Model:
        built: object = function(input_shape, output_size, **vars(chosen))
        if is_module(built) and not isinstance(built, Model):
            return from_flax(built, jax.ShapeDtypeStruct((1, *input_shape), jnp.float32), output_size)
        if not isinstance(built, Model):
            raise ValueError(
                f"model: got {name!r}, which returned a {type(built).__name__}, must return a Model or a flax.linen "
                "module"
            )
        if built.output_size != output_size:
            raise ValueError(
                f"model: got {name!r}, which returned a model of {built.output_size} outputs, must be {output_size}"
            )
        return built

    summary = (inspect.getdoc(function) or "a model of your own").splitlines()[0]
    kinds, rates = ("image", "tokens", "vector"), OF_IMAGES
    return ModelEntry(
        name, summary, build, options, function=function, kinds=kinds, loss=CROSS_ENTROPY, learning_rates=rates
    )


def check_kind(entry: ModelEntry, kind: str | None) -> None:
    """Raises ``ValueError`` unless a model reads a kind of input.

    Args:
        entry: Entry of the model.
        kind: Kind of input, such as "image"; None for an unknown kind, which passes.
    """
    if kind is not None and kind not in entry.kinds:
        readers = [name for name, other in catalogue("models").items() if kind in other.kinds]
        raise ValueError(
            f"model: got {entry.name!r}, which reads {' and '.join(entry.kinds)} inputs, but the data are of kind "
            f"{kind}, allowed are {', '.join(readers)}"
        )
