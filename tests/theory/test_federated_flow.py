"""The flow against federated gradient descent actually carried out on a linear model."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.theory.prior import covariance_terms

from .conftest import SIZES, permuted, square

ROUNDS = [0, 1, 4, 10]
# Both sides do the same exact arithmetic in float64, with condition numbers below 1e3.
TOLERANCE = 1e-9


def distance(value, reference) -> float:
    """Largest difference relative to the largest entry."""
    value, reference = np.asarray(value), np.asarray(reference)
    assert value.shape == reference.shape
    return float(np.max(np.abs(value - reference)) / np.max(np.abs(reference)))


def initial_weights(run) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((run.num_models, run.train.shape[1], run.y.shape[1]))


def trained(run, features, w0) -> np.ndarray:
    """Predictions [E, K, ., C] of the trained models after ROUNDS."""
    paths = [run.weights(k, w0[k]) for k in range(run.num_models)]
    return np.array([[features @ path[r] for path in paths] for r in ROUNDS])


def predicted(run, w0) -> np.ndarray:
    return run.flow().predict(run.train @ w0, run.test @ w0, ROUNDS)


def test_predictions_and_residuals(linear_run):
    w0 = initial_weights(linear_run)
    flow = linear_run.flow()
    on_train = trained(linear_run, linear_run.train, w0)
    f0 = linear_run.train @ w0
    assert (
        distance(flow.predict(f0, linear_run.test @ w0, ROUNDS), trained(linear_run, linear_run.test, w0)) < TOLERANCE
    )
    assert distance(flow.predict_train(f0, ROUNDS), on_train) < TOLERANCE
    assert distance(flow.residual(ROUNDS, f0), on_train - linear_run.y) < TOLERANCE
    last = linear_run.num_models - 1
    one = flow.predict(f0[last], linear_run.test @ w0[last], ROUNDS, last)
    path = linear_run.weights(last, w0[last])
    assert distance(one, [linear_run.test @ path[r] for r in ROUNDS]) < TOLERANCE


def test_mean_and_covariance(linear_run):
    flow = linear_run.flow()
    zero = np.zeros_like(initial_weights(linear_run))
    mean = trained(linear_run, linear_run.test, zero)
    covariances = np.array([linear_run.covariance(k, 10) for k in range(linear_run.num_models)])
    # mean at round 0 is zero, so the whole path is one comparison
    assert distance(flow.mean(ROUNDS), mean) < TOLERANCE
    on_train = flow.predict_train(linear_run.train @ zero, ROUNDS)
    assert distance(on_train, trained(linear_run, linear_run.train, zero)) < TOLERANCE
    assert distance(flow.ensemble_mean(ROUNDS), mean.mean(axis=1)) < TOLERANCE
    assert distance(flow.cov(10), covariances) < TOLERANCE
    assert distance(flow.cov(4, 0), linear_run.covariance(0, 4)) < TOLERANCE
    assert distance(flow.ensemble_cov(10), covariances.sum(axis=0) / linear_run.num_models**2) < TOLERANCE


def test_covariance_without_cross_terms_fails(maker):
    run = permuted(maker)
    terms = covariance_terms(run.blocks, run.blocks.ntk_test_train @ np.asarray(run.flow().operator(10)))
    truth = run.covariance(0, 10)
    assert distance(terms.total, truth) < TOLERANCE
    assert distance(terms.prior + terms.propagated, truth) > 0.05


def _dropped(run):
    weight = run.weight.copy()
    weight[:, run.client.shape[1] - 1] = 0
    return replace(run, weight=weight)


WRONG = {
    "one client dropped": _dropped,
    "one local step more": lambda run: replace(run, steps=run.steps + 1),
    "equal weights": lambda run: replace(run, weight=(run.weight > 0).astype(float)),
    "models exchanged": lambda run: replace(run, model=(run.model + 1) % run.num_models),
    "rounds in another order": lambda run: replace(
        run, client=run.client[::-1], model=run.model[::-1], weight=run.weight[::-1]
    ),
    "step 1 % larger": lambda run: replace(run, rates=1.01 * run.rates),
    "server step ignored": lambda run: replace(run, server=1.0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_run_is_told_apart(maker, wrong):
    run = permuted(maker, server=0.9)
    w0 = initial_weights(run)
    truth = trained(run, run.test, w0)
    assert distance(predicted(run, w0), truth) < TOLERANCE
    assert distance(predicted(WRONG[wrong](run), w0), truth) > 1e-3


def test_kernel_that_couples_outputs(maker):
    """Three outputs sharing all weights, f_c(x) = phi_c(x) w: an [n C, n C] kernel that is no Kronecker product."""
    sizes = [2, 5, 1]
    rng = maker.rng
    train, test = rng.standard_normal((2, 8, 3, 60)) / 8
    rows = maker.clients(sizes, 8)
    run = maker.run(
        sizes,
        maker.permutations(sizes, 10, 2),
        2,
        train=train.reshape(24, 60),
        test=test.reshape(24, 60),
        y=rng.standard_normal((24, 1)),
        prior=rng.uniform(0.5, 2.0, 60),
        clients=tuple((3 * own[:, None] + np.arange(3)).reshape(-1) for own in rows),
    )
    # The loop divides by the rows it is given, 3 n_i: tripling its step gives the gradient of 1/(2 n_i) sum_c (.)^2.
    loop = replace(run, rates=3 * run.rates)
    partition = replace(run, clients=rows).partition
    y = run.y.reshape(8, 3)
    flow = federated_flow(run.blocks, y, partition, run.cohorts, run.rule(), num_models=2, outputs="full")
    w0 = initial_weights(loop)
    f0_train, f0_test = (run.train @ w0).reshape(2, 8, 3), (run.test @ w0).reshape(2, 8, 3)
    found = np.asarray(flow.predict(f0_train, f0_test, ROUNDS))
    assert distance(found, trained(loop, run.test, w0).reshape(4, 2, 8, 3)) < TOLERANCE
    left = (trained(loop, run.train, w0) - run.y).reshape(4, 2, 8, 3)
    assert distance(flow.residual(ROUNDS, f0_train), left) < TOLERANCE
    assert distance(flow.cov(10, 1), loop.covariance(1, 10)) < TOLERANCE
    # the Kronecker approximation (the trace kernel for every output) is another model
    average = np.einsum("icp,jcp->ij", train, train) / 3, np.einsum("icp,jcp->ij", test, train) / 3
    shared = federated_flow(KernelBlocks(*average), y, partition, run.cohorts, run.rule(), num_models=2)
    assert distance(shared.predict(f0_train, f0_test, 10), found[-1]) > 0.05


def test_round_zero_is_the_prior(maker):
    run = permuted(maker)
    flow = run.flow()
    assert np.all(np.asarray(flow.mean(ROUNDS)[0]) == 0)
    prior = run.blocks.nngp_test
    np.testing.assert_allclose(flow.cov(0, 0), 0.5 * (prior + prior.T), rtol=1e-14)
    assert np.all(np.asarray(flow.operator(0)) == 0)


def test_rounds_may_repeat_and_come_in_any_order(maker):
    run = square(maker, SIZES, maker.everyone(SIZES, 10), 1)
    each = run.flow().mean(ROUNDS)
    found = run.flow().mean([4, 0, 10, 1, 4])  # four rounds, as above
    np.testing.assert_array_equal(np.asarray(found), np.asarray(each)[[2, 0, 3, 1, 2]])
    np.testing.assert_array_equal(run.flow().mean(4), each[2])
    assert distance(each[2], each[3]) > 1e-3


def test_a_point_is_predicted_alike_whatever_other_points_are_asked_for(maker):
    """Bit for bit but for the order of sums: one point, two in another order, and beside points 100 times as far."""
    run = permuted(maker)
    w0, whole = initial_weights(run), run.flow()
    at_all, mean, cov = predicted(run, w0), whole.mean(7), np.asarray(whole.cov(7, 1))
    far = replace(run, test=np.concatenate([run.test[[9, 4]], 100 * run.test]))
    for points, other in (([3], replace(run, test=run.test[[3]])), ([9, 4], far)):
        flow, asked = other.flow(), slice(len(points))
        assert distance(predicted(other, w0)[..., asked, :], at_all[..., points, :]) < 1e-13
        assert distance(flow.mean(7)[..., asked, :], mean[..., points, :]) < 1e-13
        assert distance(flow.cov(7, 1)[asked, asked], cov[np.ix_(points, points)]) < 1e-13
    assert distance(mean[..., [9], :], mean[..., [4], :]) > 1e-3  # control: points differ


def test_order_of_slots_is_irrelevant(maker):
    run = permuted(maker)
    order = [2, 0, 5, 1, 4, 3]
    other = replace(run, client=run.client[:, order], model=run.model[:, order], weight=run.weight[:, order])
    w0 = initial_weights(run)
    assert distance(predicted(other, w0), predicted(run, w0)) < 1e-13


def test_twins_equal_one_client_of_twice_the_weight(maker):
    run = square(maker, SIZES, maker.everyone(SIZES, 10), 1)
    run = replace(run, clients=(run.clients[0], run.clients[0], *run.clients[2:]))
    w0, one = initial_weights(run), run.weight * [1, 0, 1, 1, 1, 1]
    twins = replace(run, weight=one + run.weight[:, :1] * (np.arange(6) == 1))
    assert distance(predicted(twins, w0), predicted(replace(run, weight=one * [2, 1, 1, 1, 1, 1]), w0)) < 1e-13
    assert distance(predicted(twins, w0), predicted(replace(run, weight=one), w0)) > 1e-3


def test_empty_slot_is_absent(maker):
    run = square(maker, SIZES, maker.everyone(SIZES, 10), 1)
    emptied = replace(run, weight=run.weight * [1, 0, 1, 1, 1, 1])
    there = [0, 2, 3, 4, 5]
    absent = replace(run, client=run.client[:, there], model=run.model[:, there], weight=run.weight[:, there])
    w0 = initial_weights(run)
    assert distance(predicted(emptied, w0), predicted(absent, w0)) < 1e-13


def test_scalars_stand_for_every_round_and_client(maker):
    run = square(maker, SIZES, maker.everyone(SIZES, 10), 1)
    short = federated_flow(*run.problem, Rule(4, 0.9))
    assert short.num_models == 1
    np.testing.assert_array_equal(short.mean(ROUNDS), run.flow().mean(ROUNDS))


def test_float64_without_the_global_switch(maker):
    run = square(maker, SIZES, maker.everyone(SIZES, 10), 1)
    reference = np.asarray(run.flow().mean(ROUNDS))
    with jax.enable_x64(False):
        flow = run.flow()
        mean, cov = flow.mean(ROUNDS), flow.cov(10, 0)
        assert isinstance(mean, np.ndarray) and isinstance(cov, np.ndarray)
        assert mean.dtype == cov.dtype == np.float64
        np.testing.assert_array_equal(mean, reference)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            jax.jit(lambda rate: run.flow(learning_rate=rate).mean(10))(0.9)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            jax.jit(lambda x: x + flow.mean(10))(np.zeros(1))


def test_variances_of_several_rounds(maker):
    run = permuted(maker)
    flow = run.flow()
    found = flow.variance([0, 7])
    assert found.shape == (2, 3, 24)
    assert distance(found[1], [np.diag(run.covariance(k, 7)) for k in range(3)]) < TOLERANCE
    assert distance(flow.variance(7, 1), np.diag(run.covariance(1, 7))) < TOLERANCE
    assert len(repr(flow)) < 200
