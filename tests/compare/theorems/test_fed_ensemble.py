"""Rows of the theorem table on convergence: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.compare.theorems.fed_ensemble import convergence, linearisation_gap, second_order
from fedtangent.compare.theorems.fed_ensemble.linearisation_gap import network_gap, own_linearisation
from fedtangent.models.dense import mlp


def check(rows) -> None:
    assert rows
    for row in rows:
        assert row.passed, row


@pytest.mark.parametrize(("scale", "seed"), [("default", 0), ("default", 1)])
def test_second_order_terms(scale, seed):
    rows = second_order.checks(scale, seed)
    assert len(rows) == 7
    check(rows)


def test_growth_inside_an_age():
    check([convergence._growth(0, "default")])


@pytest.mark.theory
@pytest.mark.slow
def test_decay_where_the_theorem_applies():
    check(convergence._where_it_applies(0, 200))
    check([convergence._movement(0)])


@pytest.mark.theory
@pytest.mark.slow
def test_decay_of_networks():
    check(convergence._networks("default", 0))


@pytest.mark.theory
@pytest.mark.slow
def test_width():
    check(linearisation_gap.checks("default", 0))


def test_own_linearisation():
    """It meets the network to second order in the weights' change, about the weights that it starts from."""
    model = mlp(2, 3, widths=(8,), activation="erf", dtype=jnp.float64)
    tangent = own_linearisation(model)
    linear, network = jax.jit(tangent.apply), jax.jit(model.apply)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2)))
    start = tangent.init(jax.random.key(3))
    direction = jax.tree.map(lambda w: jax.random.normal(jax.random.key(4), w.shape, w.dtype), start["weights"])

    def error(size: float, about: dict) -> float:
        moved = jax.tree.map(lambda w, d: w + size * d, start["weights"], direction)
        return float(np.linalg.norm(linear({**about, "weights": moved}, x) - network(moved, x)))

    errors = [error(size, start) for size in (0.02, 0.01)]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)
    elsewhere = {"start": tangent.init(jax.random.key(9))["start"]}
    assert error(0.01, elsewhere) > 100 * errors[1]
    frozen = jax.jit(jax.grad(lambda p: jnp.sum(tangent.apply(p, x))))(start)["start"]
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(frozen))


@pytest.mark.slow
def test_network_gap_of_a_small_network():
    setting = linearisation_gap.circle((16,), 1, 0)
    found = network_gap(setting, 16)
    assert found.gap.shape == (3, 1)
    assert np.all(found.gap > 0) and np.all(found.gap < found.change)
    # Weyl: eigenvalues are no farther apart than the operator norm; the drift is some of the distance
    assert np.all(found.drift > 0) and np.all(found.smallest_eigenvalue < found.largest_eigenvalue)
    assert np.all(found.initial_residual > 0) and np.all(found.distance > 0)
