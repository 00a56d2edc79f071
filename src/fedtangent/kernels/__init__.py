"""Tangent kernels: analytic kernels, and kernels of finite networks."""

from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.kernels.gram import KernelBlocks, analytic, kernel_blocks
from fedtangent.kernels.large import LargeKernel, large_kernel

__all__ = ["KernelBlocks", "LargeKernel", "analytic", "empirical_ntk", "kernel_blocks", "large_kernel"]
