"""Models as pure functions, with their analytic kernels at infinite width where these are known.

A function that is marked with ``models.entry.network`` can be read from this package by its name: ``models.mlp``.
"""

from __future__ import annotations

from fedtangent._src.entries import catalogue
from fedtangent._src.models.convolutional import CONVOLUTIONS, choose_convolution, max_pool
from fedtangent._src.models.dense import ACTIVATIONS, PARAMETERIZATIONS
from fedtangent._src.models.entry import ModelFunction, build
from fedtangent._src.models.flax_networks import from_flax
from fedtangent._src.models.gemm import gemm_convolution

__all__ = [
    "ACTIVATIONS",
    "CONVOLUTIONS",
    "PARAMETERIZATIONS",
    "build",
    "choose_convolution",
    "from_flax",
    "gemm_convolution",
    "max_pool",
]


def __getattr__(name: str) -> ModelFunction:
    entry = None if name.startswith("_") else catalogue("models").get(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function: ModelFunction = entry.function
    return function


def __dir__() -> list[str]:
    return [*__all__, *catalogue("models")]
