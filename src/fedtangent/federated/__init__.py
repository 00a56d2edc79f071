"""The parts of federated algorithms, and the recipes made of them."""

from fedtangent.federated import aggregate, channel, compose, faults, local, predict, rates, recipes, schedule, server

__all__ = ["aggregate", "channel", "compose", "faults", "local", "predict", "rates", "recipes", "schedule", "server"]
