"""What runs are measured by: uncertainty and calibration, paired intervals, privacy, kernels, loss surfaces."""

from fedtangent._src.measures import loss_surface, paired, privacy, tangent_kernels, uncertainty

__all__ = ["loss_surface", "paired", "privacy", "tangent_kernels", "uncertainty"]
