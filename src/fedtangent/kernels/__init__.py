"""Tangent kernels: analytic, and of finite networks."""

from fedtangent.kernels.analytic import analytic
from fedtangent.kernels.empirical import empirical_ntk

__all__ = ["analytic", "empirical_ntk"]
