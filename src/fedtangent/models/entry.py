"""What a model's entry says, and models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from fedtangent.entries import Entry, catalogue, choose, given_options
from fedtangent.types import Model

SQUARED_ERROR, CROSS_ENTROPY = "squared_error", "cross_entropy"
EXPONENTIAL, LOGISTIC = "exponential", "logistic"


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

    at_width: Callable[[Any, int, int], Any] | None = None
    """Its options, a width and a number of hidden layers -> the options of a network of which all these are so wide;
    None where its kernel does not depend on a width."""
    is_linear: bool = False
    """Whether it is linear in its parameters."""

    def fitting_loss(self, is_regression: bool) -> str:
        """The loss that it is trained with, if none is asked for."""
        return SQUARED_ERROR if is_regression else self.loss


def build(
    name: str, input_shape: int | Sequence[int], output_size: int, kind: str | None = None, **options: Any
) -> Model:
    """The model called ``name`` for examples of ``input_shape`` (one number: vectors) and ``output_size`` outputs.

    ``options`` are those of its entry, such as ``widths`` of ``mlp``. Raises ``ValueError`` with the allowed names for
    an unknown model or option, and for a ``kind`` of input that the model does not read: "image", "tokens", "vector".
    """
    entry: ModelEntry = choose("models", name)
    check_kind(entry, kind)
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    model: Model = entry.build(given_options(entry, options), shape, output_size)
    return model


def check_kind(entry: ModelEntry, kind: str | None) -> None:
    """Raise ``ValueError`` unless the model reads this kind of input (None: not known)."""
    if kind is not None and kind not in entry.kinds:
        readers = [name for name, other in catalogue("models").items() if kind in other.kinds]
        raise ValueError(
            f"model: got {entry.name!r}, which reads {' and '.join(entry.kinds)} inputs, but the data are of kind "
            f"{kind}, allowed are {', '.join(readers)}"
        )
