"""Theory of NTK-FL (Yue et al., ICML 2022)."""

from fedtangent._src.theory.ntk_fl.convergence import (
    NtkTheorem,
    TwoLayerStart,
    ntk_evolution,
    ntk_evolved,
    ntk_theorem_1,
    ntk_theorem_2,
)
from fedtangent._src.theory.ntk_fl.lemmas import weight_gap_bound

__all__ = [
    "NtkTheorem",
    "TwoLayerStart",
    "ntk_evolution",
    "ntk_evolved",
    "ntk_theorem_1",
    "ntk_theorem_2",
    "weight_gap_bound",
]
