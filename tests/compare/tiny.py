"""The cases of ``fedtangent compare``, cut down to what runs in seconds."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fedtangent.compare import Setting
from fedtangent.compare.cases import digits as whole_digits
from fedtangent.compare.cases import sine_linear
from fedtangent.data import partition
from fedtangent.federated import schedule
from fedtangent.models.dense import mlp
from fedtangent.types import Model

NUM_MODELS = 2
TIMES = (10, 100)


def cut(setting: Setting, examples: int, clients: int, points: int, **changes: object) -> Setting:
    """The first ``examples`` and test ``points`` of ``setting``, on ``clients`` unequal clients."""
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
    return cut(sine_linear(None, "smoke", 0), 30, 6, 40, draws=4, num_rounds=10, evaluate_every=5)


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
    small = cut(whole_digits(None, "smoke", 0), 24, 4, 20, widths=(16, 32, 64), draws=3, exact_draws=2)
    return dataclasses.replace(small, num_rounds=10, evaluate_every=4)
