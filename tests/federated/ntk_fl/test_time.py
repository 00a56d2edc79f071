"""NTK-FL's choice of the number of steps: training or validation examples, loss or accuracy, patience."""

from __future__ import annotations

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine.clients import engine_for, parse
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.ntk_fl.evolution import choose_time
from fedtangent._src.federated.ntk_fl.tangent import pool_examples
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.types import Model

from ..toys import two_layer, uneven_data
from .descent import outputs_of
from .test_evolution import X, descend, evolve

TIMES = (1, 5, 20, 80, 300, 1000)
HELD = np.random.default_rng(7).normal(size=(6, 4))
LABELS = np.eye(3)[np.random.default_rng(8).integers(3, size=6)]


def losses_of(x: np.ndarray, y: np.ndarray, criterion: str) -> list[float]:
    """Of the networks that NumPy's descent on the pooled examples leads to, at every time."""
    model, params, targets, _, _ = evolve(3, kernel="exact", method="eigh")
    unflatten = jax.flatten_util.ravel_pytree(params)[1]
    found = []
    for t in TIMES:
        outputs = outputs_of(model, unflatten(jnp.asarray(descend(model, params, targets, t, 1.0))), x)
        wrong = np.mean(np.argmax(outputs, axis=1) != np.argmax(y, axis=1))
        found.append(float(wrong if criterion == "accuracy" else np.mean((outputs - y) ** 2) / 2))
    return found


@pytest.mark.parametrize("criterion", ["loss", "accuracy"])
def test_the_time_is_chosen_on_the_validation_examples(criterion):
    options = {"kernel": "exact", "criterion": criterion, "validation": (jnp.asarray(HELD), jnp.asarray(LABELS))}
    _, _, targets, _, info = evolve(3, TIMES, 1.0, **options)
    expected = losses_of(HELD, LABELS, criterion)
    np.testing.assert_allclose(info["losses"], expected, rtol=1e-9, atol=1e-12)
    assert int(info["time"]) == TIMES[int(np.argmin(expected))]
    training = losses_of(X, targets, criterion)
    assert np.abs(np.subtract(training, expected)).max() > 0.05  # control: it matters which
    if criterion == "loss":
        assert int(np.argmin(training)) != int(np.argmin(expected))


def sequence(losses: list[float], patience: int | None):
    """``choose_time`` on candidates with these losses, times 2: the network is one number and its target is 0."""
    with np.errstate(invalid="ignore"):
        dual = np.sqrt(2 * np.asarray(losses)).reshape((-1, 1, 1))
    return _chosen(jnp.asarray(dual), patience)


@functools.partial(jax.jit, static_argnames="patience")
def _chosen(dual, patience):
    model = Model("one number", lambda key: jnp.zeros(()), lambda p, x: jnp.full((x.shape[0], 1), p), None, 1)
    examples = pool_examples(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones(1, bool))
    return choose_time(model, jnp.zeros(()), lambda v: v[0, 0], dual, examples, Evolution(patience=patience))


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_patience_ends_the_search_and_finds_the_minimum_of_a_valley(patience):
    valley = [9.0, 4.0, 1.0, 0.5, 2.0, 3.0, 5.0, 8.0, 13.0, 14.0]
    whole, early = sequence(valley, None), sequence(valley, patience)
    np.testing.assert_allclose(whole.losses, valley, rtol=1e-12)
    assert int(whole.best) == int(early.best) == 3 and float(whole.params) == float(early.params)
    looked = 4 + patience
    np.testing.assert_allclose(early.losses[:looked], valley[:looked], rtol=1e-12)
    assert np.all(np.isnan(early.losses[looked:]))


def test_patience_counts_rises_in_a_row_and_losses_that_are_not_finite():
    bumpy = [5.0, 6.0, 4.0, 7.0, 8.0, 1.0]
    assert int(sequence(bumpy, None).best) == 5
    assert int(sequence(bumpy, 1).best) == 0 and int(sequence(bumpy, 2).best) == 2 and int(sequence(bumpy, 3).best) == 5
    broken = [5.0, np.nan, np.inf, 1.0]
    assert int(sequence(broken, None).best) == 3 and int(sequence(broken, 2).best) == 0
    assert np.all(np.isinf(sequence(broken, None).losses[1:3]))
    assert int(sequence([np.nan, np.inf], None).best) == -1
    assert int(sequence([2.0, 1.0, 1.0, 1.0], 1).best) == 1  # the first of equals, and no rise


def test_validation_examples_are_charged_once():
    data, plan = uneven_data(), all_clients(6)
    model = two_layer()
    held = (jnp.zeros((5, *data.x.shape[1:])), jnp.zeros((5, model.output_size)))
    costs = [
        algorithms.ntk_fl(
            model, plan, learning_rate=0.1, evolution=Evolution(times=(1,)), pooling=Pooling(validation=validation)
        ).cost(data, engine_for(data, parse("scan")))
        for validation in (None, held)
    ]
    assert costs[1].uplink_once - costs[0].uplink_once == 8 * 5 * (data.x.shape[1] + model.output_size)
    assert costs[0]._replace(uplink_once=0) == costs[1]._replace(uplink_once=0)
