"""Tangent kernels: analytic kernels, and kernels of finite networks."""

from fedtangent._src.kernels import KernelBlocks, LargeKernel, analytic, empirical_ntk, kernel_blocks, large_kernel
from fedtangent._src.kernels.gram import SingularKernelError

__all__ = [
    "KernelBlocks",
    "LargeKernel",
    "SingularKernelError",
    "analytic",
    "empirical_ntk",
    "kernel_blocks",
    "large_kernel",
]
