"""Attacks by which a curious server reads examples from the gradients and Jacobians that clients send."""

from fedtangent._src.attacks.closed_form import back_project, order_from_known, read_first_layer
from fedtangent._src.attacks.leakage import Attack, Batch, Leak, from_gradients, from_jacobians
from fedtangent._src.attacks.networks import lenet, ssim
from fedtangent._src.attacks.observation import Observed, gradient, jacobians, shuffle_rows, shuffle_weights, sparsify

__all__ = [
    "Attack",
    "Batch",
    "Leak",
    "Observed",
    "back_project",
    "from_gradients",
    "from_jacobians",
    "gradient",
    "jacobians",
    "lenet",
    "order_from_known",
    "read_first_layer",
    "shuffle_rows",
    "shuffle_weights",
    "sparsify",
    "ssim",
]
