"""Rows of the theorem table on convergence: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.comparison.theorems.fed_ensemble import bias_variance, convergence, networks
from fedtangent._src.comparison.theorems.fed_ensemble.networks import own_linearisation
from fedtangent._src.models.dense import mlp


def check(rows) -> None:
    assert rows
    for row in rows:
        assert row.passed, row


@pytest.mark.parametrize(("scale", "seed"), [("default", 0), ("default", 1)])
def test_second_order_terms(scale, seed):
    rows = convergence._check_second_order(scale, seed)
    assert len(rows) == 7
    check(rows)


@pytest.mark.parametrize("seed", range(6))
def test_decay_and_movement_of_linear_models(seed):
    rows = convergence._check_convergence("default", seed)
    assert len(rows) == 6
    check(rows)


def test_the_edge_of_the_assumptions():
    """The case is where it says it is: every assumption holds, and hardly more would break two of them."""
    case = convergence._edge_case(0)
    rates = [1e-8, 5e-9]
    assert case.theorem(rates).failing == ()
    farther = case._replace(empirical=case.empirical._replace(theta=case.empirical.theta - 0.01 * np.eye(15)))
    assert farther.theorem(rates).failing == ("wide_enough",)
    assert case.theorem([1e-6, 1e-6]).failing == ("kappa_3_small",)
    plan = case.theorem(rates, repeats=2).plan
    assert np.all(plan.examples == 3) and np.all(plan.visits == 1) and plan.num_ages == 4
    assert plan.least_progress.tolist() == [4e-8, 4e-8, 2e-8, 2e-8]


def test_decay_in_exponents():
    """One client, one example, one step: the residual falls by 1 - rate theta in an age; the least counts."""
    alone = convergence.RandomFederation(np.full((1, 1), 2.0), (np.array([0]),), np.zeros((1, 1), int), np.ones(1, int))
    found = convergence.EdgeCase(alone, alone).decay([0.1, 0.2], np.array([0.0, 0.1, 0.5]))
    assert found == pytest.approx(-np.log(0.6) / 0.4, rel=1e-12)


def test_least_noticed():
    assert convergence.least_noticed(lambda error: error >= 0.03) == pytest.approx(0.03, rel=0.03)
    assert convergence.least_noticed(lambda error: False) == np.inf


@pytest.mark.theory
@pytest.mark.slow
@pytest.mark.parametrize("part", [networks._check_networks, networks._check_linearisation_gap])
def test_networks(part):
    check(part("default", 0))


def test_few_linear_ensembles_leave_the_decomposition_undecided_at_worst():
    rows = bias_variance._decomposition(3, 4, 256, 8)
    assert len(rows) == 4 and rows[3].passed
    assert all(row.holds is not False and row.control_fails is not False and row.notices for row in rows)


@pytest.mark.theory
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_corollary_1_and_the_decomposition(seed):
    check(bias_variance._check_bias_variance("default", seed))


def test_how_often_an_ensemble_is_far_from_the_limit():
    rows = bias_variance._check_ensemble_mean("default", 0)
    assert len(rows) == 2
    check(rows)


def test_constants_of_networks_over_widths():
    check(networks._constants("default", 0, 60)[:1])


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


@pytest.mark.parametrize("activation", ["erf", "relu"])
def test_jacobian_and_curvature_by_differentiation(activation):
    x = networks.inputs(np.random.default_rng(0), 3)
    assert np.all(np.linalg.norm(x, axis=1) <= 1)
    x = x * np.array([[0.5], [1.0], [2.0]])
    model = networks.one_hidden_layer(4, 7, activation)
    params = model.init(jax.random.key(2))
    flat, back = jax.flatten_util.ravel_pytree(params)

    def outputs(weights):
        return model.apply(back(weights), x)[:, 0]

    right = np.asarray(jax.jit(jax.jacobian(outputs))(flat))
    np.testing.assert_allclose(networks.jacobian(activation, params, x), right, rtol=0, atol=1e-12)
    each = np.linalg.norm(np.asarray(jax.jit(jax.hessian(outputs))(flat)), 2, axis=(1, 2)) * 7**0.5
    alone = [networks.curvature(activation, params, x[i : i + 1]) for i in range(3)]
    np.testing.assert_allclose(alone, each, rtol=1e-10)
    together = networks.curvature(activation, params, x)
    assert max(each) <= together <= np.linalg.norm(each)


def test_networks_inside_the_theorem():
    """A short run: equal rounds, the step that was asked for, and what is measured at its ages."""
    task = networks.Task((1, 1, 2), (0, 0, 1), 4, 0.9, labels=2.0, evaluations=2)
    given = networks.setting_of(task, 64, 0)
    seen = networks.follow(given, 2)
    assert seen.ages.tolist() == [0, 2, 4] and task.nbar == 2
    assert seen.gap.shape == (2, 3, 2) and seen.kernels.shape == (2, 3, 2, 4, 4) and seen.c1.shape == (2, 2)
    assert np.all(seen.gap[:, 0] < 1e-14) and np.all(seen.drift[:, 0] == 0) and np.all(seen.change[:, 0] == 0)
    assert np.all(seen.gap[:, 1:] > 0) and np.all(seen.gap[:, -1] < 0.2 * seen.change[:, -1])
    np.testing.assert_allclose(
        seen.residual[:, 0], np.linalg.norm(seen.start - given.problem.y_train, axis=(2, 3)), rtol=1e-12
    )
    found = seen.theorem(1)
    assert set(found.failing) <= {"kappa_3_small", "wide_enough"} and 0.5 < found.constants.kappa_2 < 1
    assert np.all(found.plan.examples == 2) and found.constants.c1 == seen.c1[1].max()
    np.testing.assert_allclose(found.constants.r0, seen.residual[1, 0], rtol=1e-12)


def test_no_run_has_the_seed_of_another() -> None:
    seeds = [n for k in (1, 2, 4, 8) for first in (0, 1, 19, 2**32 - 1) for n in bias_variance.seeds_of(k, 64, first)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**32
