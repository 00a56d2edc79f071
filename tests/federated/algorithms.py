"""The algorithms that every law is tested on: one row for each recipe, on six clients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from fedtangent.federated import recipes
from fedtangent.federated.local import Work
from fedtangent.federated.schedule import per_client_permutations, strata, uniform_sampling
from fedtangent.types import Algorithm, Model, Schedule


class Row(NamedTuple):
    build: Callable[..., Algorithm]  # (model, schedule, accept=None) -> algorithm
    schedule: Schedule  # for six clients
    full_batch: Callable[[Model, Schedule], Algorithm]
    doubled: str  # what makes one client two: twice the "weight", or the "examples" twice (NTK-FL pools, unweighted)


def _fed_avg(work: Work, **options: Any) -> Callable[..., Algorithm]:
    return functools.partial(recipes.fed_avg, client_learning_rate=0.2, work=work, **options)


def _fed_ensemble(work: Work, **options: Any) -> Callable[..., Algorithm]:
    return functools.partial(recipes.fed_ensemble, client_learning_rate=0.2, work=work, **options)


def _ntk_fl(kernel: str) -> Callable[..., Algorithm]:
    return functools.partial(recipes.ntk_fl, learning_rate=0.3, times=(1, 4, 9), kernel=kernel)


ALGORITHMS = {
    "fed_avg": Row(
        _fed_avg(Work(epochs=2, batch_size=2)), uniform_sampling(6, 4), _fed_avg(Work(steps=3)), doubled="weight"
    ),
    "fed_ensemble": Row(
        _fed_ensemble(Work(steps=4, batch_size=3), server_learning_rate=0.8, weighting="uniform"),
        strata(6, 3, 4),
        _fed_ensemble(Work(epochs=2), weighting="uniform"),
        doubled="weight",
    ),
    "fed_sgd": Row(
        functools.partial(recipes.fed_sgd, learning_rate=0.2),
        uniform_sampling(6, 4),
        functools.partial(recipes.fed_sgd, learning_rate=0.3),
        doubled="weight",
    ),
    "ntk_fl": Row(_ntk_fl("averaged"), per_client_permutations(6, 2), _ntk_fl("exact"), doubled="examples"),
}
