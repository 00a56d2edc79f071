"""Attacks: what a curious server reads from the gradients and Jacobians that clients send."""

from fedtangent._src.attacks import (
    Attack,
    Batch,
    Leak,
    Observed,
    back_project,
    from_gradients,
    from_jacobians,
    gradient,
    jacobians,
    lenet,
    order_from_known,
    read_first_layer,
    shuffle_rows,
    shuffle_weights,
    sparsify,
    ssim,
)

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
