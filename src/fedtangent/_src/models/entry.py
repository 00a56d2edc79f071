"""What a model's entry says, and models by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from fedtangent._src.entries import Entry, catalogue, choose, given_options, own_options
from fedtangent._src.models.flax_networks import from_flax
from fedtangent._src.types import Model

SQUARED_ERROR, CROSS_ENTROPY = "squared_error", "cross_entropy"
EXPONENTIAL, LOGISTIC = "exponential", "logistic"
MOST_UNITS, MOST_LAYERS = 2**20, 200  # of a network that is described by options


@dataclasses.dataclass(frozen=True)
class ModelEntry(Entry):
    """A model: ``build(options, input_shape, output_size) -> Model``."""

    function: Callable[..., Model] = cast("Any", None)  # noqa: RUF009
    """What the package exports."""
    kinds: tuple[str, ...] = ("image", "vector")
    """Kinds of input that it reads: "image", "tokens", "vector"."""
    loss: str = SQUARED_ERROR
    """Loss that fits it where there are classes; numbers are always fitted by the squared error."""
    learning_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For each loss a step size of clients at which it trains, measured at its own sizes."""

    def fitting_loss(self, is_regression: bool) -> str:
        """Returns the loss that the model is trained with if the user names none."""
        return SQUARED_ERROR if is_regression else self.loss


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
        ValueError: The model or an option is unknown (the message lists the allowed names), or the model does not read
            this ``kind`` of input.
    """
    entry: ModelEntry = choose("models", name)
    check_kind(entry, kind)
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    model: Model = entry.build(given_options(entry, options), shape, output_size)
    return model


def entry_of_function(name: str, function: Callable[..., Any]) -> ModelEntry:
    """Builds the entry of a user's function ``(input_shape, output_size, **options)``.

    The function returns a ``Model``, or a flax module that maps floating examples [n, *input_shape] to [n,
    output_size]; for text it returns ``from_flax`` of its module.

    Args:
        name: ``package.module:function``.
        function: The function; its ``input_shape`` is a tuple, the shape of one example.

    Raises:
        ValueError: As ``entries.own_options``.
    """
    options = own_options("model", name, function, (), ())

    def made(o: Any, input_shape: tuple[int, ...], output_size: int) -> Model:
        given = {field.name: getattr(o, field.name) for field in dataclasses.fields(options)}
        found = function(input_shape, output_size, **given)
        if isinstance(found, Model):
            if found.output_size != output_size:
                raise ValueError(
                    f"model: got {name!r}, which returned a model of {found.output_size} outputs, must be {output_size}"
                )
            return found
        if not all(hasattr(found, part) for part in ("init", "apply")):
            raise ValueError(
                f"model: got {name!r}, which returned a {type(found).__name__}, must return a Model or a flax module"
            )
        return from_flax(found, jax.ShapeDtypeStruct((1, *input_shape), jnp.float32), output_size)

    summary = (inspect.getdoc(function) or "a model of your own").splitlines()[0]
    rates = {SQUARED_ERROR: 0.01, CROSS_ENTROPY: 0.05}  # with which most networks begin to train
    kinds = ("image", "tokens", "vector")
    return ModelEntry(
        name, summary, made, options, function=function, kinds=kinds, loss=CROSS_ENTROPY, learning_rates=rates
    )


def check_kind(entry: ModelEntry, kind: str | None) -> None:
    """Raises ``ValueError`` unless the model reads this kind of input; None stands for an unknown kind and passes."""
    if kind is not None and kind not in entry.kinds:
        readers = [name for name, other in catalogue("models").items() if kind in other.kinds]
        raise ValueError(
            f"model: got {entry.name!r}, which reads {' and '.join(entry.kinds)} inputs, but the data are of kind "
            f"{kind}, allowed are {', '.join(readers)}"
        )
