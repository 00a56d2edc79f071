"""The federated kernel flow: mean and covariance of a run after every round, fixed point, stable step sizes."""

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
