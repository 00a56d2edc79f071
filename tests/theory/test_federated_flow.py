"""The flow against federated gradient descent actually carried out on a linear model."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.kernels.gram import KernelBlocks
from fedtangent.theory import Rule, covariance_terms, federated_flow
from fedtangent.types import Cohort

ROUNDS = [0, 1, 4, 10]
SIZES = [3, 1, 5, 2, 7, 6]
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
    one = flow.predict(f0[last], linear_run.test @ w0[last], 10, last)
    assert distance(one, linear_run.test @ linear_run.weights(last, w0[last])[10]) < TOLERANCE


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
    run = maker.run(SIZES, maker.permutations(SIZES, 10, 2), 2)
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
    run = maker.run(SIZES, maker.permutations(SIZES, 10, 2), 2, server=0.9)
    w0 = initial_weights(run)
    truth = trained(run, run.test, w0)
    assert distance(predicted(run, w0), truth) < TOLERANCE
    assert distance(predicted(WRONG[wrong](run), w0), truth) > 1e-3


def test_kernel_that_couples_outputs(maker):
    """Three outputs sharing all weights, f_c(x) = phi_c(x) w: an [n C, n C] kernel that is no Kronecker product."""
    sizes = [2, 5, 1]
    rng = maker.rng
    train, test = rng.standard_normal((8, 3, 60)) / 8, rng.standard_normal((4, 3, 60)) / 8
    rows = maker.clients(sizes, 8)
    run = maker.run(
        sizes,
        maker.permutations(sizes, 10, 2),
        2,
        train=train.reshape(24, 60),
        test=test.reshape(12, 60),
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
    f0_train, f0_test = (run.train @ w0).reshape(2, 8, 3), (run.test @ w0).reshape(2, 4, 3)
    assert (
        distance(flow.predict(f0_train, f0_test, ROUNDS), trained(loop, run.test, w0).reshape(4, 2, 4, 3)) < TOLERANCE
    )
    assert (
        distance(flow.residual(10, f0_train), (trained(loop, run.train, w0)[-1] - run.y).reshape(2, 8, 3)) < TOLERANCE
    )
    assert distance(flow.cov(10, 1), loop.covariance(1, 10)) < TOLERANCE
    # the Kronecker approximation (the trace kernel for every output) is another model
    average = np.einsum("icp,jcp->ij", train, train) / 3, np.einsum("icp,jcp->ij", test, train) / 3
    shared = federated_flow(KernelBlocks(*average), y, partition, run.cohorts, run.rule(), num_models=2)
    assert distance(shared.predict(f0_train, f0_test, 10), flow.predict(f0_train, f0_test, 10)) > 0.05


def test_round_zero_is_the_prior(maker):
    run = maker.run(SIZES, maker.permutations(SIZES, 10, 2), 2)
    flow = run.flow()
    assert np.all(np.asarray(flow.mean(0)) == 0)
    np.testing.assert_allclose(flow.cov(0, 0), run.blocks.nngp_test, rtol=1e-14)
    assert np.all(np.asarray(flow.operator(0)) == 0)


def test_rounds_may_repeat_and_come_in_any_order(maker):
    run = maker.run([12, 12], maker.everyone([12, 12], 10), 1)
    flow = run.flow()
    each = np.stack([flow.mean(r) for r in (7, 0, 10, 7)])
    np.testing.assert_array_equal(np.asarray(flow.mean([7, 0, 10, 7])), each)
    assert distance(flow.mean(10), flow.mean(7)) > 1e-3


def test_order_of_slots_is_irrelevant(maker):
    run = maker.run([3, 9, 12], maker.permutations([3, 9, 12], 10, 2), 2)
    order = [2, 0, 1]
    other = replace(run, client=run.client[:, order], model=run.model[:, order], weight=run.weight[:, order])
    w0 = initial_weights(run)
    assert distance(predicted(other, w0), predicted(run, w0)) < 1e-13


def test_twins_equal_one_client_of_twice_the_weight(maker):
    run = maker.run([6, 6], maker.everyone([6, 6], 10), 1)
    twins = replace(
        run,
        clients=(run.clients[0], run.clients[0], run.clients[1]),
        client=np.tile([0, 1, 2], (10, 1)),
        model=np.zeros((10, 3), int),
        weight=np.ones((10, 3)),
        steps=run.steps[[0, 0, 1]],
    )
    w0 = initial_weights(run)
    assert distance(predicted(twins, w0), predicted(replace(run, weight=run.weight * [2, 1]), w0)) < 1e-13
    assert distance(predicted(twins, w0), predicted(run, w0)) > 1e-3


def test_empty_slot_is_absent(maker):
    run = maker.run([4, 8, 12], maker.everyone([4, 8, 12], 10), 1)
    emptied = replace(run, weight=run.weight * [1, 0, 1])
    absent = replace(run, client=run.client[:, [0, 2]], model=run.model[:, [0, 2]], weight=run.weight[:, [0, 2]])
    w0 = initial_weights(run)
    assert distance(predicted(emptied, w0), predicted(absent, w0)) < 1e-13


def test_scalars_stand_for_every_round_and_client(maker):
    run = maker.run([12, 12], maker.everyone([12, 12], 10), 1)
    short = federated_flow(*run.problem, Rule(4, 0.9))
    assert short.num_models == 1
    np.testing.assert_array_equal(short.mean(10), run.flow().mean(10))


def test_derivatives_match_differences(maker):
    run = maker.run([6, 18], maker.everyone([6, 18], 10), 1)

    def loss(rate, server, weight):
        cohorts = Cohort(run.client, run.model, weight)
        rule = Rule(run.steps, rate, server_learning_rate=server)
        flow = federated_flow(*run.problem[:3], cohorts, rule, num_models=1)
        return jnp.sum(flow.mean(10) ** 2) + jnp.sum(flow.cov(5, 0))

    at = jnp.asarray(0.9), jnp.asarray(0.8), jnp.asarray(run.weight)
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*at)
    direction = 0.3, -0.2, np.random.default_rng(0).standard_normal(run.weight.shape)
    step = 1e-5
    ahead, behind = (loss(*(a + sign * step * d for a, d in zip(at, direction, strict=True))) for sign in (1, -1))
    slope = sum(float(jnp.sum(g * d)) for g, d in zip(gradients, direction, strict=True))
    # central differences: truncation step^2 = 1e-10, rounding 1e-16 / step = 1e-11, both relative to order-1 values
    assert abs((ahead - behind) / (2 * step) - slope) < 1e-7 * abs(slope)


def test_float64_without_the_global_switch(maker):
    run = maker.run([12, 12], maker.everyone([12, 12], 10), 1)
    reference = np.asarray(run.flow().mean(10))
    with jax.enable_x64(False):
        flow = run.flow()
        mean, cov = flow.mean(10), flow.cov(10, 0)
        assert isinstance(mean, np.ndarray) and isinstance(cov, np.ndarray)
        assert mean.dtype == cov.dtype == np.float64
        np.testing.assert_array_equal(mean, reference)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            jax.jit(lambda rate: run.flow(learning_rate=rate).mean(10))(0.9)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            jax.jit(lambda x: x + flow.mean(10))(np.zeros(1))


def test_variances_of_several_rounds(maker):
    run = maker.run([6, 18], maker.permutations([6, 18], 10, 2), 2)
    flow = run.flow()
    found = flow.variance([0, 7])
    assert found.shape == (2, 2, 5)
    assert distance(found[1], [np.diag(run.covariance(k, 7)) for k in range(2)]) < TOLERANCE
    assert distance(flow.variance(7, 1), np.diag(run.covariance(1, 7))) < TOLERANCE
    assert len(repr(flow)) < 200
