"""Experiments of DeepLin, FedAvg on deep linear networks: its figures, its theorem, and the lazy regime beyond it."""
