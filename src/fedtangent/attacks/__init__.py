"""Attacks: what a curious server reads from the gradients and Jacobians that clients send.

::

    observation.jacobians, gradient, sparsify     what the server sees
    leakage.from_gradients, from_jacobians        deep leakage: the input whose gradient or Jacobian matches
    first_layer.read_first_layer                  the input read off a dense first layer, in closed form
    shuffling.shuffle_rows, shuffle_weights       what a shuffling server hides, and from whom
    projection.back_project                       projected inputs, taken back with a matrix right or wrong
    similarity.ssim                               how much of an image came back
    networks.lenet                                the network that deep leakage was shown on
"""

from fedtangent.attacks.first_layer import read_first_layer
from fedtangent.attacks.leakage import Attack, Leak, from_gradients, from_jacobians
from fedtangent.attacks.networks import lenet
from fedtangent.attacks.observation import Observed, gradient, jacobians, sparsify
from fedtangent.attacks.projection import back_project
from fedtangent.attacks.shuffling import order_from_known, shuffle_rows, shuffle_weights
from fedtangent.attacks.similarity import ssim

__all__ = [
    "Attack",
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
