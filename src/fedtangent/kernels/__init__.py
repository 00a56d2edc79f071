"""Tangent kernels: analytic, and of finite networks."""

from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.kernels.gram import KernelBlocks, analytic, kernel_blocks

__all__ = ["KernelBlocks", "analytic", "empirical_ntk", "kernel_blocks"]
