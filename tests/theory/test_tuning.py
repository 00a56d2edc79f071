"""Predicted losses, their gradients, and the step size they choose, against runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.theory.flow import Rule, best_learning_rate, federated_flow, predicted_loss
from fedtangent._src.types import Cohort

SIZES = [3, 1, 5, 2, 7, 6]


def test_the_loss_is_the_mean_over_initial_models(maker):
    """Against weight space: the ensemble's error is a quadratic form of independent initial weights."""
    run = maker.run(SIZES, maker.permutations(SIZES, 10, 2), 2)
    y_test = maker.rng.standard_normal((5, 2))
    mixing = np.array([0.3, 0.7])
    found = predicted_loss(run.flow(), y_test, mixing=mixing)
    zero = np.zeros((run.train.shape[1], 2))
    mean = sum(m * run.test @ run.weights(k, zero)[-1] for k, m in enumerate(mixing))
    variance = sum(m**2 * np.mean(np.diag(run.covariance(k, 10))) for k, m in enumerate(mixing))
    assert float(found.bias) == pytest.approx(np.mean((mean - y_test) ** 2), rel=1e-9)
    assert float(found.variance) == pytest.approx(variance, rel=1e-9)
    assert float(found.total) == pytest.approx(float(found.bias + found.variance), rel=1e-14)
    uniform = predicted_loss(run.flow(), y_test)
    assert abs(uniform.total - found.total) > 1e-3 * found.total
    early = predicted_loss(run.flow(), y_test, 3, mixing)
    assert abs(early.total - found.total) > 1e-3 * found.total


def test_gradients_of_rates_steps_and_mixing(maker):
    run = maker.run(SIZES, maker.permutations(SIZES, 10, 2), 2)
    y_test = maker.rng.standard_normal((5, 2))

    def loss(numbers):
        rule = Rule(run.steps, numbers["rate"], step_weights=numbers["steps"], server_learning_rate=numbers["server"])
        cohorts = Cohort(run.client, run.model, numbers["clients"])
        flow = federated_flow(*run.problem[:3], cohorts, rule, num_models=2)
        return predicted_loss(flow, y_test, mixing=numbers["models"]).total

    at = {
        "clients": run.weight,
        "rate": 0.5,
        "server": 0.8,
        "steps": np.linspace(0.5, 1.5, 4),
        "models": np.array([0.3, 0.7]),
    }
    at = jax.tree.map(jnp.asarray, at)
    slopes = jax.jit(jax.grad(loss))(at)
    for name, value in at.items():
        direction = np.random.default_rng(0).standard_normal(value.shape)
        ahead, behind = (float(loss(at | {name: value + s * 1e-5 * direction})) for s in (1, -1))
        found = float(jnp.sum(slopes[name] * direction))
        # central differences: truncation and rounding are both about 1e-10 of values of order 1
        assert abs((ahead - behind) / 2e-5 - found) < 1e-6 * max(abs(found), 1e-2), name
        assert abs(found) > 1e-6, name


def test_the_best_rate_of_a_known_loss():
    found = best_learning_rate(lambda rate: (jnp.log(rate) - 1.5) ** 2 + 2, 0.1, 100.0)
    assert found.rate == pytest.approx(np.exp(1.5), rel=1e-4)
    assert found.loss == pytest.approx(2, abs=1e-7) and not found.at_edge
    assert len(found.rates) == len(found.losses)
    edge = best_learning_rate(lambda rate: (jnp.log(rate) - 1.5) ** 2, 0.1, 2.0)
    assert edge.rate == pytest.approx(2.0) and edge.at_edge
    wall = best_learning_rate(lambda rate: jnp.where(rate < 1.0, -rate, jnp.nan), 0.01, 10.0)
    assert wall.rate == pytest.approx(1.0, rel=1e-3) and not wall.at_edge


def test_an_unstable_rate_counts_as_infinite_without_a_derivative_too() -> None:
    def loss(rate: float) -> float:
        if rate > 1:
            raise FloatingPointError
        return -rate

    found = best_learning_rate(loss, 0.01, 10.0, derivative=False)
    assert found.rate == pytest.approx(1.0, rel=1e-3) and np.isinf(found.losses).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "low: got 0.0, must be above 0"),
        ((2.0, 1.0), "low: got 2.0, must be below high, 1.0"),
        ((1.0, 2.0, 2), "coarse: got 2, must be a whole number of at least 3"),
    ],
)
def test_a_bad_interval_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        best_learning_rate(lambda rate: rate, *arguments[:2], **({"coarse": 2} if len(arguments) == 3 else {}))


def test_bad_arguments_of_the_loss(maker):
    run = maker.run([12, 12], maker.everyone([12, 12], 10), 1)
    flow = run.flow()
    with pytest.raises(ValueError, match=r"y_test: got shape \(4, 2\), must be \(5, 2\)"):
        predicted_loss(flow, np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"mixing: got shape \(2,\), must be \(1,\)"):
        predicted_loss(flow, np.zeros((5, 2)), mixing=np.ones(2))
    with pytest.raises(ValueError, match=r"loss: got no finite number at learning rates from 1\.0 to 2\.0"):
        best_learning_rate(lambda rate: rate * jnp.nan, 1.0, 2.0)
