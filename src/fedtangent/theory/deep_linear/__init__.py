"""FedAvg on deep linear networks (DeepLin, papers: ``liu_deep_linear``); rows are examples, the paper's are columns.

Eq. (1), (5): ``models.linear_networks``, ``gram.products``. (3), (4): the loss ``squared_error_sum``. (6) to (8), (10),
(17): ``rounds``. (14) to (16): ``gram``. (18), Theorem IV.2, its hypotheses A to C: ``theorem``. (23) to (26), terms of
(17) along runs: ``experiments.deep_linear.theorem``. All of it against simulation: ``compare.theorems.deep_linear``.
"""

from fedtangent.theory.deep_linear.gram import spectrum as deep_linear_spectrum
from fedtangent.theory.deep_linear.rounds import (
    FullBatchWork,
    ResidualTerms,
    balancedness,
    full_batch_work,
    residual_terms,
)
from fedtangent.theory.deep_linear.theorem import DeepLinearTheorem, deep_linear_limit, deep_linear_theorem

__all__ = [
    "DeepLinearTheorem",
    "FullBatchWork",
    "ResidualTerms",
    "balancedness",
    "deep_linear_limit",
    "deep_linear_spectrum",
    "deep_linear_theorem",
    "full_batch_work",
    "residual_terms",
]
