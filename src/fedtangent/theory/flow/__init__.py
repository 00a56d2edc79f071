"""The exact federated dynamics, and what is read from them: where they end, which steps are stable, which are best."""

from fedtangent.theory.flow.asymptotics import PassSpectrum, Stability
from fedtangent.theory.flow.flow import Flow, LimitDistance, federated_flow
from fedtangent.theory.flow.rules import Rule
from fedtangent.theory.flow.tuning import BestRate, PredictedLoss, best_learning_rate, predicted_loss

__all__ = [
    "BestRate",
    "Flow",
    "LimitDistance",
    "PassSpectrum",
    "PredictedLoss",
    "Rule",
    "Stability",
    "best_learning_rate",
    "federated_flow",
    "predicted_loss",
]
