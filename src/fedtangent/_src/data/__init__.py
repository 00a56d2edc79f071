"""Data sets, targets for classes, and the training examples of all clients on the device."""

from fedtangent._src.data.dataset import (
    Dataset,
    SourceInfo,
    classification_targets,
    projected,
    projection_matrix,
    sign_targets,
)
from fedtangent._src.data.federated import federated_data, max_client_size
from fedtangent._src.data.named import load

__all__ = [
    "Dataset",
    "SourceInfo",
    "classification_targets",
    "federated_data",
    "load",
    "max_client_size",
    "projected",
    "projection_matrix",
    "sign_targets",
]
