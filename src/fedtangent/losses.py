"""Losses ``(outputs, targets, mask) -> number``; recipes take the name of one, or a function of the user's."""

from fedtangent._src.losses import cross_entropy, exponential, logistic, masked_mean, squared_error, summed

__all__ = [
    "cross_entropy",
    "exponential",
    "logistic",
    "masked_mean",
    "squared_error",
    "summed",
]
