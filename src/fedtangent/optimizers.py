"""Learning-rate schedules and optimisers beside those of optax."""

from fedtangent._src.optimizers import at_rate, sgd, staircase_decay

__all__ = [
    "at_rate",
    "sgd",
    "staircase_decay",
]
