"""FedAvg on deep linear networks (DeepLin; papers: ``liu_deep_linear``)."""

from fedtangent.theory.deep_linear.gram import spectrum as deep_linear_spectrum
from fedtangent.theory.deep_linear.rounds import (
    FullBatchWork,
    ResidualTerms,
    balancedness,
    full_batch_work,
    residual_terms,
)
from fedtangent.theory.deep_linear.theorem import DeepLinearTheorem, deep_linear_limit, deep_linear_theorem

__all__ = ["DeepLinearTheorem", "FullBatchWork", "ResidualTerms", "balancedness", "deep_linear_limit"]
__all__ += ["deep_linear_spectrum", "deep_linear_theorem", "full_batch_work", "residual_terms"]
