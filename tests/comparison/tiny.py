"""The cases of ``fedtangent compare``, cut down to seconds; each is one object, whose programs tests share."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from fedtangent._src.comparison import cases
from fedtangent._src.comparison.cases import Build, sine_linear
from fedtangent._src.comparison.cases import digits as whole_digits
from fedtangent._src.comparison.settings import NTKRuns, Problem, Scale, Setting
from fedtangent._src.data import partition
from fedtangent._src.federated import schedule
from fedtangent._src.models.dense import mlp

NUM_MODELS = 2
TIMES = (10, 100)


def whole(case: Build) -> Setting:
    """The setting that is cut down, which chooses its rate anew then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "step_size", lambda problem, model: 1.0)
        return case(None, "smoke", 0)


def cut(setting: Setting, examples: int, clients: int, points: int, size: Scale, exact_draws: int = 0) -> Setting:
    """The first ``examples`` and test ``points`` of ``setting``, on ``clients`` unequal clients.

    With as many of one as of the other, kernels of either are one program.
    """
    given = setting.problem
    problem = Problem(
        given.x_train[:examples],
        given.y_train[:examples],
        given.x_test[:points],
        given.y_test[:points],
        partition.quantity_skew(examples, clients, alpha=2.0, seed=1, min_client_size=2),
        None if given.labels_test is None else given.labels_test[:points],
    )
    plan = schedule.per_client_permutations(clients, NUM_MODELS)
    algorithm, runs = cases.ensemble(problem, setting.algorithm.model, plan), NTKRuns(TIMES, exact_draws)
    return cases.standard_case(setting.name, setting.title, problem, algorithm, size, setting.seed, runs)


@functools.cache
def linear() -> Setting:
    """The radial basis functions, which follow the flow exactly."""
    return cut(whole(sine_linear), 30, 6, 30, Scale((100,), 5, 10, 5))


@functools.cache
def network() -> Setting:
    """A network of one output on 24 digits (is it a 0?), whose kernel is far from singular."""
    small = digits()
    given = small.problem
    problem = dataclasses.replace(given, y_train=given.y_train[:, :1], y_test=given.y_test[:, :1], labels_test=None)
    model = mlp(given.x_train.shape[1], 1, widths=(64,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)
    return dataclasses.replace(small, problem=problem, algorithm=small.algorithm.on(model))


@functools.cache
def digits() -> Setting:
    """A network of ten outputs on 24 digits."""
    return cut(whole(whole_digits), 24, 4, 24, Scale((16, 32, 64), 5, 10, 4), exact_draws=5)
