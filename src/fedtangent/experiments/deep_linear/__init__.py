"""Experiments of FedAvg on deep linear networks (DeepLin), section V."""
