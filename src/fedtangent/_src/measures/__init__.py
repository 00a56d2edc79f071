"""Measures of runs: calibration, conformal sets, paired intervals, privacy, tangent kernels, loss surfaces."""
