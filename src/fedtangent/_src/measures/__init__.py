"""Measures of runs: uncertainty and calibration, paired intervals, privacy, kernels, loss surfaces."""
