"""Schedules: which clients train which model in which round."""

from fedtangent._src.federated.schedule import (
    all_clients,
    assigned_by_loss,
    best_fitting,
    by_poll,
    drawn_cohorts,
    gradient_norm_sampling,
    mixed_permutations,
    neighbourhoods,
    own_models,
    per_client_permutations,
    poisson_sampling,
    power_of_choice,
    random_models,
    random_walk,
    strata,
    uniform_sampling,
)

__all__ = [
    "all_clients",
    "assigned_by_loss",
    "best_fitting",
    "by_poll",
    "drawn_cohorts",
    "gradient_norm_sampling",
    "mixed_permutations",
    "neighbourhoods",
    "own_models",
    "per_client_permutations",
    "poisson_sampling",
    "power_of_choice",
    "random_models",
    "random_walk",
    "strata",
    "uniform_sampling",
]
