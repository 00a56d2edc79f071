"""Learning-rate schedules and optimisers that optax does not have."""

from fedtangent._src.optimizers import at_rate, sgd, staircase_decay

__all__ = [
    "at_rate",
    "sgd",
    "staircase_decay",
]
