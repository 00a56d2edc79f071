"""Schedules: which clients train which model in which round."""

from fedtangent._src.federated.schedule import (
    all_clients,
    drawn_cohorts,
    mixed_permutations,
    neighbourhoods,
    own_models,
    per_client_permutations,
    poisson_sampling,
    random_models,
    random_walk,
    strata,
    uniform_sampling,
)

__all__ = [
    "all_clients",
    "drawn_cohorts",
    "mixed_permutations",
    "neighbourhoods",
    "own_models",
    "per_client_permutations",
    "poisson_sampling",
    "random_models",
    "random_walk",
    "strata",
    "uniform_sampling",
]
