"""Models as pure functions, with the analytic kernel of exactly that network where there is one."""

from __future__ import annotations

from fedtangent.models.choice import CONVOLUTIONS, choose_convolution
from fedtangent.models.cnn import cnn
from fedtangent.models.convolution import gemm_convolution
from fedtangent.models.dense import DenseLayer, DenseStructure
from fedtangent.models.flax_adapter import from_flax
from fedtangent.models.kernels import Kernels
from fedtangent.models.lstm import lstm
from fedtangent.models.mlp import ACTIVATIONS, PARAMETERIZATIONS, logistic, mlp, stax_network
from fedtangent.models.pooling import max_pool
from fedtangent.models.rbf_linear import LinearStructure, rbf_linear
from fedtangent.models.registry import available, build

__all__ = [
    "ACTIVATIONS",
    "CONVOLUTIONS",
    "PARAMETERIZATIONS",
    "DenseLayer",
    "DenseStructure",
    "Kernels",
    "LinearStructure",
    "available",
    "build",
    "choose_convolution",
    "cnn",
    "from_flax",
    "gemm_convolution",
    "logistic",
    "lstm",
    "max_pool",
    "mlp",
    "rbf_linear",
    "stax_network",
]
