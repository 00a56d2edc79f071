"""Federated conformal prediction beside the intervals of ensembles and of Gaussian processes."""
