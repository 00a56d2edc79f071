"""Tangent kernels: analytic, and of finite networks."""

from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent.kernels.infinite_width import analytic

__all__ = ["KernelBlocks", "analytic", "empirical_ntk", "kernel_blocks"]
