"""Fed-ensemble: FE-2021 (arXiv) and FE-2024 (IEEE TASE)."""

from fedtangent.theory.fed_ensemble import bias_variance, convergence, limit, second_order
from fedtangent.theory.fed_ensemble.bias_variance import *  # noqa: F403
from fedtangent.theory.fed_ensemble.convergence import *  # noqa: F403
from fedtangent.theory.fed_ensemble.limit import *  # noqa: F403
from fedtangent.theory.fed_ensemble.second_order import *  # noqa: F403

__all__: list[str] = []
__all__ += bias_variance.__all__
__all__ += convergence.__all__
__all__ += limit.__all__
__all__ += second_order.__all__
