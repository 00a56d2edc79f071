"""What theory says a federated run must do, computed without running one.

Nothing here imports the simulation, so that one mistake cannot agree with itself.

Index of theorems:

==========================  ======================================================================================
``gp_limit``                Theorem 2 of FE-2024 (4.2 and eq. 17 of FE-2021): models trained to convergence are
                            draws of a Gaussian process with mean ``Theta(x, X) Theta^-1 Y``
``covariance_terms``        the covariance of Theorem 2, and of any finite round, term by term
``federated_flow``          exact law and predictions of every round for any cohorts: the discrete dynamics behind
                            FE-2021 section 9.2, eq. (13)-(16), without their remainder terms
``Flow.fixed_point``        where those dynamics end, from their own operator: Theorem 2 as a checkable statement
``Flow.bias``               how far that is from Theorem 2: weight decay, labels that contradict each other
``Flow.stability``          the step sizes for which they converge, whatever the schedule;
                            ``Flow.largest_stable_learning_rate``: for this one
``predicted_loss``          eq. (10) of FE-2024 for the ensemble's prediction, differentiable in every number of a run;
                            ``best_learning_rate`` minimises it
==========================  ======================================================================================

FE-2021 and FE-2024 are the two papers on Fed-ensemble (arXiv 2021 and IEEE TASE 2024).
"""

from fedtangent.theory._stability import Stability
from fedtangent.theory.federated_flow import Flow, LimitDistance, federated_flow
from fedtangent.theory.gp_limit import CovarianceTerms, covariance_terms, gp_limit
from fedtangent.theory.tuning import BestRate, PredictedLoss, best_learning_rate, predicted_loss

__all__ = [
    "BestRate",
    "CovarianceTerms",
    "Flow",
    "LimitDistance",
    "PredictedLoss",
    "Stability",
    "best_learning_rate",
    "covariance_terms",
    "federated_flow",
    "gp_limit",
    "predicted_loss",
]
