"""Data sets, class targets, features, and the data of a federation on the device."""

from fedtangent._src.data import (
    Dataset,
    classification_targets,
    federated_data,
    load,
    projected,
    projection_matrix,
    sign_targets,
)
from fedtangent._src.data.features import random_convolution, resnet50_features, with_features

__all__ = [
    "Dataset",
    "classification_targets",
    "federated_data",
    "load",
    "projected",
    "projection_matrix",
    "random_convolution",
    "resnet50_features",
    "sign_targets",
    "with_features",
]
