"""Theory of Fed-ensemble, from the papers FE-2021 (arXiv) and FE-2024 (IEEE TASE)."""

from fedtangent._src.theory.fed_ensemble.bias_variance import (
    corollary_1,
    decompose_laws,
    decompose_runs,
    ensemble_law,
    ensemble_laws,
)
from fedtangent._src.theory.fed_ensemble.convergence import (
    Networks,
    Theorem1,
    gap_from_drift,
    kappa_4,
    linearisation_gap,
    theorem_1,
    weight_movement,
)
from fedtangent._src.theory.fed_ensemble.ensemble_mean import corollary_4_1
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.fed_ensemble.second_order import (
    age_operators,
    condition_15,
    expansion,
    exponential_average,
    exponential_product,
)
from fedtangent._src.theory.prior import covariance_terms, prior_functions

__all__ = [
    "Networks",
    "Theorem1",
    "age_operators",
    "condition_15",
    "corollary_1",
    "corollary_4_1",
    "covariance_terms",
    "decompose_laws",
    "decompose_runs",
    "ensemble_law",
    "ensemble_laws",
    "expansion",
    "exponential_average",
    "exponential_product",
    "gap_from_drift",
    "gp_limit",
    "kappa_4",
    "linearisation_gap",
    "prior_functions",
    "theorem_1",
    "weight_movement",
]
