"""Theorem 2 against plain inverses and against Bayesian linear regression."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.kernels.gram import SingularKernelError
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.prior import covariance_terms


@pytest.fixture
def run(maker):
    return maker.run([24], maker.everyone([24], 1), 1)


def test_against_a_plain_inverse(run):
    k, inverse = run.blocks, np.linalg.inv(run.blocks.ntk_train)
    b = k.ntk_test_train @ inverse
    limit = gp_limit(k, run.y)
    assert limit.jitter == 0
    np.testing.assert_allclose(limit.mean, b @ run.y, rtol=0, atol=1e-11)
    covariance = k.nngp_test + b @ k.nngp_train @ b.T - b @ k.nngp_test_train.T - k.nngp_test_train @ b.T
    np.testing.assert_allclose(limit.cov, covariance, rtol=0, atol=1e-11)
    terms = covariance_terms(k, b)
    for wrong in (terms.prior + terms.propagated, terms.prior - terms.propagated, terms.prior - 0.5 * terms.cross):
        assert np.max(np.abs(wrong - limit.cov)) > 0.05


def test_a_point_has_its_limit_whatever_other_points_are_asked_for(run):
    whole = gp_limit(run.blocks, run.y)
    far = replace(run, test=np.concatenate([run.test[[3, 1]], 100 * run.test]))
    for points, other in (([2], replace(run, test=run.test[[2]])), ([3, 1], far)):
        limit, asked = gp_limit(other.blocks, run.y), slice(len(points))
        np.testing.assert_allclose(limit.mean[asked], whole.mean[points], rtol=0, atol=1e-11)
        np.testing.assert_allclose(limit.cov[asked, asked], whole.cov[np.ix_(points, points)], rtol=0, atol=1e-11)
    assert np.abs(whole.mean[3] - whole.mean[1]).max() > 1e-3  # control


def test_is_the_law_of_interpolating_from_random_starts(run):
    """Exact: the projection of w0 on the null space of the data is all that remains of it."""
    _, values, right = np.linalg.svd(run.train)
    null = right[len(values) :]
    root = run.test @ null.T @ null * np.sqrt(run.prior)
    limit = gp_limit(run.blocks, run.y)
    np.testing.assert_allclose(limit.cov, root @ root.T, rtol=0, atol=1e-11)
    np.testing.assert_allclose(limit.mean, run.test @ np.linalg.lstsq(run.train, run.y)[0], rtol=0, atol=1e-11)


def test_is_the_bayesian_posterior_if_the_prior_is_proportional_to_theta(run):
    """FE-2021, end of section 9.2: with K = sigma^2 Theta, sigma^2 (Theta - Theta(x, X) Theta^-1 Theta(X, x'))."""
    variance = 1.7
    isotropic = type(run)(**{**vars(run), "prior": np.full_like(run.prior, variance)})
    limit = gp_limit(isotropic.blocks, run.y)
    # weights ~ N(0, variance I), conditioned in weight space on one noiseless observation after another
    mean, cov = np.zeros((run.train.shape[1], 2)), variance * np.eye(run.train.shape[1])
    for phi, y in zip(run.train, run.y, strict=True):
        gain = cov @ phi / (phi @ cov @ phi)
        mean, cov = mean + np.outer(gain, y - phi @ mean), cov - np.outer(gain, phi @ cov)
    posterior = run.test @ cov @ run.test.T
    np.testing.assert_allclose(limit.cov, posterior, rtol=0, atol=1e-11)
    np.testing.assert_allclose(limit.mean, run.test @ mean, rtol=0, atol=1e-11)
    # it would not be the posterior for a prior that is not proportional
    assert np.max(np.abs(gp_limit(run.blocks, run.y).cov - posterior)) > 0.05


def test_shapes_symmetry_and_positivity(run):
    limit = gp_limit(run.blocks, run.y)
    assert limit.mean.shape == (5, 2) and limit.cov.shape == (5, 5)
    assert limit.mean.dtype == limit.cov.dtype == np.float64
    np.testing.assert_array_equal(limit.cov, limit.cov.T)
    assert np.linalg.eigvalsh(limit.cov)[0] > -1e-13
    one = gp_limit(run.blocks, run.y[:, 1:])
    np.testing.assert_allclose(one.mean, limit.mean[:, 1:], rtol=1e-13, atol=1e-13)


def test_at_the_training_points_nothing_is_left_to_chance(run):
    k = run.blocks._replace(
        ntk_test_train=run.blocks.ntk_train,
        nngp_test_train=run.blocks.nngp_train,
        nngp_test=run.blocks.nngp_train,
        ntk_test=None,
    )
    limit = gp_limit(k, run.y)
    np.testing.assert_allclose(limit.mean, run.y, rtol=0, atol=1e-11)
    np.testing.assert_allclose(limit.cov, 0, rtol=0, atol=1e-11)


def test_repeated_input_is_reported_or_refused(run):
    rows = np.r_[np.arange(24), 0]
    k = type(run)(**{**vars(run), "train": run.train[rows]}).blocks
    y = run.y[rows]
    limit = gp_limit(k, y)
    assert 0 < limit.jitter <= 1e-10 * np.mean(np.diag(k.ntk_train))
    np.testing.assert_allclose(limit.mean, gp_limit(run.blocks, run.y).mean, rtol=0, atol=1e-4)
    with pytest.raises(
        SingularKernelError, match=r"25 training rows is singular: lambda_min = .*lambda_max = .*jitter"
    ):
        gp_limit(k, y, max_relative_jitter=0)
