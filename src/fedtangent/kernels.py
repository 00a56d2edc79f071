"""Tangent kernels: analytic kernels, and kernels of finite networks."""

from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError, analytic, kernel_blocks
from fedtangent._src.kernels.large import LargeKernel, large_kernel
from fedtangent._src.kernels.tangent_features import tangent_features
from fedtangent._src.models.kernels import stax

__all__ = [
    "KernelBlocks",
    "LargeKernel",
    "SingularKernelError",
    "analytic",
    "empirical_ntk",
    "kernel_blocks",
    "large_kernel",
    "stax",
    "tangent_features",
]
