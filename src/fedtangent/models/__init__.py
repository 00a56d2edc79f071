"""Models as pure functions, with the analytic kernel of exactly that network where there is one."""

from __future__ import annotations

from fedtangent.models.convolutional import cnn
from fedtangent.models.cpu.choice import CONVOLUTIONS, choose_convolution
from fedtangent.models.cpu.convolution import gemm_convolution
from fedtangent.models.cpu.pooling import max_pool
from fedtangent.models.dense import ACTIVATIONS, PARAMETERIZATIONS, logistic, mlp, stax_network
from fedtangent.models.dense_structure import DenseLayer, DenseStructure
from fedtangent.models.flax_adapter import from_flax
from fedtangent.models.kernels import Kernels
from fedtangent.models.linear import LinearStructure, rbf_linear
from fedtangent.models.recurrent import lstm
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
