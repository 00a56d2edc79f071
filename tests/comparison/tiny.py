"""The cases of ``fedtangent compare``, cut down to what runs in seconds."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from fedtangent._src.comparison import Setting, settings
from fedtangent._src.comparison.cases import Build, sine_linear
from fedtangent._src.comparison.cases import digits as whole_digits
from fedtangent._src.data import partition
from fedtangent._src.federated import schedule
from fedtangent._src.models.dense import mlp
from fedtangent._src.types import Model

NUM_MODELS = 2
TIMES = (10, 100)


def whole(case: Build) -> Setting:
    """The setting that is cut down, which chooses its rate anew then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "step_size", lambda setting: 1.0)
        return case(None, "smoke", 0)


def cut(setting: Setting, examples: int, clients: int, points: int, **changes: object) -> Setting:
    """The first ``examples`` and test ``points`` of ``setting``, on ``clients`` unequal clients.

    With as many of one as of the other, kernels of either are one program.
    """
    return dataclasses.replace(
        setting,
        x_train=setting.x_train[:examples],
        y_train=setting.y_train[:examples],
        x_test=setting.x_test[:points],
        y_test=setting.y_test[:points],
        labels_test=None if setting.labels_test is None else setting.labels_test[:points],
        partition=partition.quantity_skew(examples, clients, alpha=2.0, seed=1, min_client_size=2),
        schedule=schedule.per_client_permutations(clients, NUM_MODELS),
        ntk_times=TIMES,
        learning_rate=0.0,  # chosen anew
        **changes,
    )


def linear() -> Setting:
    """The radial basis functions, which follow the flow exactly."""
    return cut(whole(sine_linear), 30, 6, 30, draws=5, num_rounds=10, evaluate_every=5)


def network() -> Setting:
    """A network of one output on 24 digits (is it a 0?), whose kernel is far from singular."""
    small = digits()
    inputs = small.x_train.shape[1]

    def model(width: int) -> Model:
        return mlp(inputs, 1, widths=(width,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)

    return dataclasses.replace(
        small, y_train=small.y_train[:, :1], y_test=small.y_test[:, :1], labels_test=None, model=model
    )


def digits() -> Setting:
    """A network of ten outputs on 24 digits."""
    small = cut(whole(whole_digits), 24, 4, 24, widths=(16, 32, 64), draws=5, exact_draws=5)
    return dataclasses.replace(small, num_rounds=10, evaluate_every=4)
