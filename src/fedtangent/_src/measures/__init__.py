"""Measures of runs: calibration, paired intervals, privacy, change of tangent kernels, loss surfaces."""
