"""Models as pure functions, each with the analytic kernel of exactly that network."""

from __future__ import annotations

from fedtangent.models.dense import DenseLayer, DenseStructure
from fedtangent.models.kernels import Kernels
from fedtangent.models.mlp import ACTIVATIONS, PARAMETERIZATIONS, mlp, stax_network
from fedtangent.models.rbf_linear import LinearStructure, rbf_linear
from fedtangent.models.registry import available, build

__all__ = [
    "ACTIVATIONS",
    "PARAMETERIZATIONS",
    "DenseLayer",
    "DenseStructure",
    "Kernels",
    "LinearStructure",
    "available",
    "build",
    "mlp",
    "rbf_linear",
    "stax_network",
]
