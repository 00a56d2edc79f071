"""Local-GD in overparameterised linear models: the implicit bias of many local steps (papers: ``localgd``)."""

from fedtangent._src.theory.local_gd.max_margin import (
    FeasibleSets,
    direction_distance,
    exponential_models,
    farkas,
    feasible_sets,
    halpern,
    hard_margin,
    parallel_projections,
)
from fedtangent._src.theory.local_gd.regression import (
    LocalRegression,
    LocalTheorem1,
    local_regression,
    local_theorem_1,
    minimum_norm,
)

__all__ = [
    "FeasibleSets",
    "LocalRegression",
    "LocalTheorem1",
    "direction_distance",
    "exponential_models",
    "farkas",
    "feasible_sets",
    "halpern",
    "hard_margin",
    "local_regression",
    "local_theorem_1",
    "minimum_norm",
    "parallel_projections",
]
