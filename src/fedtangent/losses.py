"""Losses ``(outputs, targets, mask) -> number``; algorithms take the name of one, or a user's function."""

from fedtangent._src.losses import cross_entropy, exponential, logistic, masked_mean, squared_error, summed

__all__ = [
    "cross_entropy",
    "exponential",
    "logistic",
    "masked_mean",
    "squared_error",
    "summed",
]
