"""Models by name, for the command line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from fedtangent.models.convolutional import cnn
from fedtangent.models.dense import logistic, mlp
from fedtangent.models.linear import rbf_linear
from fedtangent.models.recurrent import lstm
from fedtangent.types import Model


def _rbf_linear(input_size: int, output_size: int, **options: Any) -> Model:
    if input_size != 1:
        raise ValueError(f"input_size: got {input_size}, the model rbf_linear takes scalar inputs, that is 1")
    return rbf_linear(output_size=output_size, **options)


def _cnn(input_size: int, output_size: int, **options: Any) -> Model:
    shape = tuple(options.pop("input_shape", (28, 28, 1)))
    if math.prod(shape) != input_size:
        raise ValueError(f"input_shape: got {shape}, that is not the {input_size} numbers of an example")
    return cnn(shape, output_size, **options)


def _lstm(input_size: int, output_size: int, **options: Any) -> Model:
    # input_size is the number of characters of an example, which the network leaves open
    return lstm(options.pop("vocabulary", output_size), output_size, **options)


# name -> (builder (input_size, output_size, **options), the function whose signature names the options)
_BUILDERS: dict[str, tuple[Callable[..., Model], Callable[..., Model]]] = {
    "mlp": (mlp, mlp),
    "logistic": (logistic, logistic),
    "cnn": (_cnn, cnn),
    "lstm": (_lstm, lstm),
    "rbf_linear": (_rbf_linear, rbf_linear),
}


def available() -> tuple[str, ...]:
    """Names that ``build`` knows."""
    return tuple(_BUILDERS)


def build(name: str, input_size: int, output_size: int, **options: Any) -> Model:
    """The model called ``name`` for ``input_size`` numbers an example and ``output_size`` outputs.

    ``options`` are the other arguments of the model's own function, such as ``widths`` of ``mlp``, ``seed`` of
    ``rbf_linear`` or ``input_shape`` of ``cnn`` (28x28x1 if not given). ``vocabulary`` of ``lstm`` is ``output_size``
    if not given. Raises ``ValueError`` with the allowed names for an unknown model or option.
    """
    if name not in _BUILDERS:
        raise ValueError(f"model: got {name!r}, allowed are {', '.join(_BUILDERS)}")
    builder, described = _BUILDERS[name]
    allowed = [key for key in inspect.signature(described).parameters if key not in ("input_size", "output_size")]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{option}: not an option of model {name}, allowed are {', '.join(allowed)}")
    return builder(input_size, output_size, **options)
