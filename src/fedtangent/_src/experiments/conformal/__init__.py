"""Federated conformal prediction, compared with the intervals of ensembles and of Gaussian processes."""
