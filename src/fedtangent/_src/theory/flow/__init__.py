"""The exact federated dynamics, their fixed point, their stable step sizes and the search for the best step size."""

from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.flow import Flow
from fedtangent._src.theory.flow.private import PrivateFlow, private_flow
from fedtangent._src.theory.flow.rules import Rule
from fedtangent._src.theory.flow.tuning import best_learning_rate, predicted_loss

__all__ = [
    "Flow",
    "PrivateFlow",
    "Rule",
    "best_learning_rate",
    "federated_flow",
    "predicted_loss",
    "private_flow",
]
