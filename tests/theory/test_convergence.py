"""Theorem 1's constants, bounds and assumptions on runs carried out in weight space."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.fed_ensemble.convergence import (
    FORMS,
    Curvature,
    Networks,
    gap_from_drift,
    kappa_4,
    linearisation_gap,
    theorem_1,
    weight_movement,
)
from fedtangent._src.theory.flow import Rule
from fedtangent._src.types import Cohort, Partition

MODELS, OWN, AGES = 5, 4, 60
SIZES = [OWN] * (2 * MODELS)


def latin(maker, rate: float, ages: int = AGES, steps: int = 4):
    """Equal clients that take turns at the models: the same number of examples in every round."""
    rounds = MODELS * ages
    client = np.tile(np.arange(len(SIZES)), (rounds, 1))
    model = (client + np.arange(rounds)[:, None]) % MODELS
    run = maker.run(SIZES, (client, model, np.full(client.shape, float(OWN))), MODELS, n=sum(SIZES))
    features = maker.rng.standard_normal((sum(SIZES) + 5, 160)) / 160**0.5
    return replace(
        run,
        train=features[: sum(SIZES)],
        test=features[sum(SIZES) :],
        prior=np.ones(160),
        rates=np.full(rounds, rate),
        steps=np.full(len(SIZES), steps),
    )


def theorem(run, **networks):
    return theorem_1(*run.problem, run.rule(), num_models=run.num_models, networks=Networks(**networks))


def path(run, k: int = 0):
    """Residual norms after every age, and how far the weights have moved, by training in weight space from zero."""
    weights = run.weights(k, np.zeros((run.train.shape[1], 2)))[::MODELS]
    residual = np.array([np.linalg.norm(run.train @ w - run.y) for w in weights])
    return residual, np.array([np.linalg.norm(w) for w in weights])


def test_bound_as_proved_holds_and_the_printed_ones_do_not(maker):
    run = latin(maker, 0.2, ages=250)
    found = theorem(run)
    assert set(found.failing) == {"kappa_2_below_1", "kappa_3_small"}
    residual, _ = path(run)
    bounds = {form: found.residual_bound(form)[:, 0] for form in FORMS}
    assert residual[0] == pytest.approx(bounds["proof"][0])
    assert np.all(residual <= bounds["proof"] * (1 + 1e-12))
    assert residual[-1] < 0.7 * bounds["proof"][-1]
    assert np.any(residual > bounds["equation_18"])  # K / 3 > 1
    assert np.any(residual > found.residual_bound("proof", found.constants.lambda_max)[:, 0])
    late = np.log(residual[-60] / residual[-1]) / 59 / found.exponent("first_order")[1]
    assert 0.9 < late < 1.2  # the true rate is the first-order one


def test_constants_by_definition(maker):
    run = latin(maker, 0.05)
    c = theorem(run).constants
    theta = run.train @ run.train.T
    jacobians = [run.train[rows] for rows in run.clients]
    assert np.allclose(c.client_norms, [np.linalg.norm(j) for j in jacobians], rtol=1e-12, atol=0)
    assert c.c2 == pytest.approx(sum(np.linalg.norm(j) for j in jacobians))
    assert c.lambda_min == pytest.approx(np.linalg.eigvalsh(theta)[0])
    assert c.examples_per_round == c.least_examples_per_round == 2 * OWN
    assert np.allclose(c.r0, np.linalg.norm(run.y), rtol=1e-12, atol=0)
    progress = 0.05 * 4
    assert c.kappa_2 == pytest.approx(np.expm1(min(progress * c.c2 + 2 * progress**2 * c.c2**4, 709.0)), rel=1e-9) or (
        np.isinf(c.kappa_2)
    )
    assert Curvature(c.c2).kappa_2(c.largest_progress) == pytest.approx(1)


def test_kappas_with_curvature():
    p, c1, c2, r0, width, n = 0.01, 0.7, 1.3, 2.0, 16.0, 4
    square = 2 * c2**4 + 8 * r0 / 4 * c1 * c2**2
    curvature = Curvature(c2, c1, r0, width)
    assert curvature.kappa_2(p) == pytest.approx(np.exp(p * c2 + p**2 * square) - 1)
    assert curvature.kappa_3(p, n) == pytest.approx(p**2 * square + p**2 * 6 * c2**4)
    assert curvature.kappa_2(curvature.largest_progress()) == pytest.approx(1)
    assert curvature.kappa_2(1e6) == np.inf


def test_exponents_of_every_form(maker):
    rates = np.repeat([0.05, 0.025], MODELS * AGES // 2)
    found = theorem(replace(latin(maker, 1.0), rates=rates))
    c = found.constants
    unit = 4 * c.lambda_min / c.examples_per_round * np.repeat([0.05, 0.025], AGES // 2)
    total = np.concatenate([[0], np.cumsum(unit)])
    for form, factor in {"proof": 1 / 3, "equation_18": 5 / 3, "informal": 5 / 6, "first_order": 1.0}.items():
        assert np.allclose(found.exponent(form), factor * total, rtol=1e-12, atol=0)
    assert found.residual_bound().shape == (AGES + 1, MODELS)
    assert np.isinf(found.constants.kappa_2)  # far too large here


def test_weight_movement(maker):
    run = latin(maker, 0.02, ages=40)
    _, moved = path(run)
    flow = run.flow()
    theta = run.train @ run.train.T
    exact = [weight_movement(theta, flow.operator(MODELS * a, 0), -run.y) for a in (1, 10, 40)]
    assert np.allclose(exact, moved[[1, 10, 40]], rtol=1e-9, atol=0)
    assert not np.allclose([weight_movement(np.eye(40), flow.operator(MODELS, 0), -run.y)], moved[1], rtol=1e-3, atol=0)
    found, growth = theorem(run), 1.001
    c, q = found.constants, np.exp(-found.exponent("proof")[1])
    assert np.all(moved[1:] <= found.movement_bound("summed", growth)[1:, 0])
    assert np.any(moved > found.movement_bound("summed", growth)[1, 0] * 0.25)  # it adds up over ages
    summed = growth * c.c2 * c.r0[0] * 0.02 * 4 / c.examples_per_round * (1 - q**40) / (1 - q)
    assert found.movement_bound("summed", growth)[-1, 0] == pytest.approx(summed)
    proof = growth * c.c2 * c.r0[0] * 3 / c.lambda_min * (1 - q**40)
    assert found.movement_bound("proof", growth)[-1, 0] == pytest.approx(proof)
    printed = found.movement_bound("equation_18", growth)[-1, 0]
    assert printed == pytest.approx(proof * 0.02 * c.examples_per_round)
    wide = theorem(run, width=100.0).movement_bound("proof", growth)[-1, 0]
    assert wide == pytest.approx(proof / 10)


def test_a_step_that_is_too_large_breaks_the_bound_and_is_reported(maker):
    run = latin(maker, 5.0, steps=10)
    found = theorem(run)
    residual, _ = path(run)
    assert np.any(residual > found.residual_bound()[:, 0])
    assert {"kappa_2_below_1", "kappa_3_small"} <= set(found.failing)
    assert "stable_step" not in found.failing
    assert "stable_step" in theorem(replace(run, rates=run.rates * 4)).failing


def test_a_step_that_the_theorem_allows(maker):
    run = latin(maker, 0.02)
    allowed = theorem(run).constants.largest_progress
    found = theorem(replace(run, rates=np.full(len(run.rates), 0.99 * allowed / 4)))
    kappa = {a.name: a for a in found.assumptions}["kappa_2_below_1"]
    assert kappa.holds and 0.9 < kappa.measured < 1
    residual, _ = path(replace(run, rates=np.full(len(run.rates), 0.99 * allowed / 4)))
    assert np.all(residual <= found.residual_bound()[:, 0] * (1 + 1e-12))


def _names(run, **options):
    return set(theorem(run, **options).failing) - {"kappa_2_below_1", "kappa_3_small"}


def test_assumptions_one_by_one(maker):
    run = latin(maker, 0.02)
    n = sum(SIZES)
    x = run.train[:, :3]
    assert _names(run, x_train=x / np.linalg.norm(x, axis=1).max()) == set()
    assert _names(run, x_train=2 * x / np.linalg.norm(x, axis=1).max()) == {"inputs_in_unit_ball"}
    same = np.array(x / np.linalg.norm(x, axis=1).max())
    same[1] = same[0]
    assert _names(run, x_train=same) == {"consistent_data"}
    equal = np.array(run.y)
    equal[1] = equal[0]
    assert _names(replace(run, y=equal), x_train=same) == set()
    assert _names(run, initial_kernel=run.blocks.ntk_train) == set()
    assert _names(run, initial_kernel=run.blocks.ntk_train + np.eye(n)) == {"wide_enough"}
    uneven = run.model.copy()
    uneven[0, 0], uneven[1, 0] = run.model[1, 0], run.model[0, 0]
    assert _names(replace(run, model=uneven)) == {"constant_examples_per_round"}
    missing = run.weight.copy()
    missing[0, 0] = 0
    assert _names(replace(run, weight=missing)) == {"constant_examples_per_round", "every_client_once_an_age"}
    heavier = run.weight.copy()
    heavier[0, 0] = 7
    assert _names(replace(run, weight=heavier)) == {"weights_by_examples"}
    steps = run.steps.copy()
    steps[3] = 2
    assert _names(replace(run, steps=steps)) == {"equal_local_steps"}
    overlapping = (run.clients[1], *run.clients[1:])
    assert _names(replace(run, clients=overlapping)) == {"clients_divide_the_data"}


def test_stationary_points_that_do_not_coincide(maker):
    """Fewer features than examples and labels that contradict each other: no minimum is one of every client."""
    run = latin(maker, 0.02)
    few = replace(run, train=run.train[:, :20], test=run.test[:, :20], prior=np.ones(20))
    assert _names(few) == {"full_rank", "stationary_points_coincide"}
    found = {a.name: a for a in theorem(few).assumptions}["stationary_points_coincide"]
    best = np.linalg.lstsq(few.train, few.y, rcond=None)[0]

    def largest(w):
        return max(np.linalg.norm(few.train[r].T @ (few.train[r] @ w - few.y[r])) / OWN for r in few.clients)

    assert found.measured == pytest.approx(largest(best) / largest(0 * best), rel=1e-6)
    realisable = replace(few, y=few.train @ maker.rng.standard_normal((20, 2)))
    assert _names(realisable) == {"full_rank"}


def test_gap_of_section_9_4():
    p, c1, c2, r0, nbar, width = 0.1, 0.7, 1.3, 2.0, 5.0, 64.0
    curved, drifting = 8 * p**2 * r0**2 * c1 * c2**2, 2 * p * np.exp(p / (nbar * c2**2)) * r0 * c2**2
    right = np.exp(p * c2**2 / nbar) * (curved + drifting) / 8
    assert kappa_4(p, c1, c2, r0, nbar, width) == pytest.approx(right)
    assert kappa_4(p, c1, c2, r0, nbar, 4 * width) == pytest.approx(right / 2)
    assert kappa_4(1e6, c1, c2, r0, 1.0, width) == np.inf
    q = (1 + p**2 * 0.5) * np.exp(-p * 2.0 / nbar)
    assert linearisation_gap(0.3, p, 2.0, nbar, 0.5) == pytest.approx(0.3 / (1 - q))
    assert linearisation_gap(0.3, p, 0.0, nbar) == np.inf
    assert gap_from_drift(4.0, 0.3, 1.5, 0.5, 2.0) == pytest.approx(1.5 * 0.3 * 2 * np.exp(-0.5 * 2))
    with pytest.raises(ValueError, match="width: got 0, must be above 0"):
        kappa_4(p, c1, c2, r0, nbar, 0)
    with pytest.raises(ValueError, match=r"drift: got -1\.0, must be at least 0"):
        gap_from_drift(1.0, -1.0, 1.0, 1.0, 1.0)


def test_gap_from_drift_bounds_a_kernel_that_moves():
    """``g' = -Theta_t g`` for a kernel that turns, by small steps, against ``g' = -Theta_0 g``."""
    rng = np.random.default_rng(6)
    features, turn = rng.standard_normal((6, 20)) / 20**0.5, rng.standard_normal((6, 6))
    theta, turn, start = features @ features.T, 0.01 * (turn + turn.T), rng.standard_normal(6)
    steps, dt = 4000, 2e-3
    g, linear, gaps = start.copy(), start.copy(), []
    for s in range(steps):
        g, linear = g - dt * (theta + turn * min(1.0, s / 1000)) @ g, linear - dt * theta @ linear
        gaps.append(np.linalg.norm(g - linear))
    times, drift = dt * np.arange(1, steps + 1), np.linalg.norm(turn, 2)
    low = np.linalg.eigvalsh(theta)[0] - drift
    bound = gap_from_drift(times, drift, np.linalg.norm(start), low, 1.0)
    assert np.all(gaps <= bound)
    assert np.any(gaps > 0.05 * bound)
    assert np.any(gaps > gap_from_drift(times, drift, np.linalg.norm(start), np.linalg.eigvalsh(theta)[-1], 1.0))


def test_refuses(maker):
    run = latin(maker, 0.02)
    names = ("kernels", "y_train", "partition", "cohorts")
    good = dict(zip(names, run.problem, strict=True)) | {"rule": run.rule(), "num_models": MODELS}
    bad = {
        "rounds_per_age: got 301, must be a whole number from 1 to 300": {"rounds_per_age": 301},
        r"f0_train: got shape \(40, 2\), must be \(5, 40, 2\)": {"networks": Networks(f0_train=run.y)},
        "c1: got -1.0, must be at least 0": {"networks": Networks(c1=-1.0)},
        "width: got 0.0, must be at least 1": {"networks": Networks(width=0.0)},
        r"x_train: got shape \(3, 2\), must be of 40 examples": {"networks": Networks(x_train=np.ones((3, 2)))},
        r"initial_kernel: got shape \(2, 2\), must be \(40, 40\)": {"networks": Networks(initial_kernel=np.eye(2))},
        "learning_rate: got -1.0, must be above 0": {"rule": run.rule(learning_rate=-1.0)},
        "mu: got 0.1, must be 0.0: the theorem is about FedAvg": {"rule": run.rule(mu=0.1)},
        "algorithm: got 'scaffold', must be 'fed_avg': the theorem is about FedAvg": {
            "rule": run.rule(algorithm="scaffold")
        },
        "partition: got 40 for client 0, must be from 0 to 39": {
            "partition": Partition(np.arange(1, 41), np.array([0, 40]))
        },
        "cohorts: got client, model and weight of shapes": {"cohorts": Cohort(run.client, run.model, run.weight[:1])},
    }
    for message, change in bad.items():
        with pytest.raises(ValueError, match=message):
            theorem_1(**{**good, **change})
    found = theorem_1(**good)
    with pytest.raises(ValueError, match="form: got 'fast', allowed are proof"):
        found.exponent("fast")
    with pytest.raises(ValueError, match="form: got 'far', allowed are summed"):
        found.movement_bound("far")


def test_an_uneven_run_takes_the_weakest_number_of_each_kind():
    """Clients, steps, rates and visits all differ; every number by hand."""
    sizes, offsets = np.array([1, 2, 3, 4]), np.array([0, 1, 3, 6, 10])
    features = np.random.default_rng(3).standard_normal((10, 30)) / 30
    theta, y = features @ features.T, np.arange(20.0).reshape(10, 2) / 9
    client = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3], [3, 1, 2, 0]])
    model = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1]])
    cohorts = Cohort(client, model, sizes[client].astype(float))  # type: ignore[arg-type]
    steps, rates = np.array([2, 1, 3, 5]), np.array([0.1, 0.05, 0.08, 0.02])
    partition = Partition(np.arange(10, dtype=np.int32), offsets.astype(np.int32))
    found = theorem_1(KernelBlocks(theta, theta[:2]), y, partition, cohorts, Rule(steps, rates))
    c = found.constants
    assert (c.examples_per_round, c.least_examples_per_round) == (9, 1)  # of {3, 7}, {4, 6}, {1, 9}, {5, 5}
    assert found.plan.visits.max() == 2 and found.plan.most_progress == 0.1 * 5  # client 0, model 0, in the first age
    assert found.plan.least_progress.tolist() == [0.05 * 1, 0.02 * 1]
    smallest = np.linalg.eigvalsh(theta)[0]
    exponent = np.array([0, 0.05, 0.07]) * smallest / 9 / 3
    np.testing.assert_allclose(found.exponent("proof"), exponent, rtol=1e-9)
    c2 = sum(np.linalg.norm(features[a:b]) for a, b in itertools.pairwise(offsets))
    assert c.kappa_2 == pytest.approx(Curvature(c2, 0.0, np.linalg.norm(y)).kappa_2(0.5), rel=1e-12)
    assert c.kappa_3 == pytest.approx(Curvature(c2, 0.0, np.linalg.norm(y)).kappa_3(0.5, 4), rel=1e-12)
    each = 2 * 0.5 / 1 * np.exp(-exponent[:-1])
    summed = c2 * np.linalg.norm(y) * np.array([0, each[0], each.sum()])
    np.testing.assert_allclose(found.movement_bound("summed", 1.0)[:, 0], summed, rtol=1e-12)
    printed = c2 * np.linalg.norm(y) * 3 / smallest * -np.expm1(-exponent) * 0.1 * 9
    np.testing.assert_allclose(found.movement_bound("equation_18", 1.0)[:, 1], printed, rtol=1e-9)
