"""What runs are measured by: uncertainty and calibration, paired intervals, privacy, kernels, loss surfaces."""

from fedtangent.measures import paired, privacy, tangent_kernels, uncertainty

__all__ = ["paired", "privacy", "tangent_kernels", "uncertainty"]
