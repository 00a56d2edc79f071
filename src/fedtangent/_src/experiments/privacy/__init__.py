"""Differential privacy: DP-FedAvg compared with what theory predicts for it."""
