"""Algorithms of the papers as compositions of the shared parts, a few lines each."""

from fedtangent.federated.recipes.averaging import fed_avg, fed_ensemble, fed_sgd
from fedtangent.federated.recipes.tangent import ntk_fl

__all__ = ["fed_avg", "fed_ensemble", "fed_sgd", "ntk_fl"]
