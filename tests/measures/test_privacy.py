"""Epsilon against formulas computed here: the Gaussian mechanism exactly and by Renyi divergences, quadrature."""

from __future__ import annotations

import functools
import logging
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedtangent._src.measures import privacy

from ..nightly import nightly

RUN = {"num_clients": 100, "clients_per_round": 10, "num_rounds": 50, "noise_multiplier": 1.1, "delta": 1e-5}


of = functools.cache(privacy.epsilon)  # RUN's own is asked for again and again


def epsilon(**changed: Any) -> float:
    return of(**(RUN | changed))


def by_renyi(divergence: Any, delta: float, orders: np.ndarray) -> float:
    """The least epsilon of Canonne, Kamath and Steinke (2020), proposition 12, over Renyi orders."""
    return min(divergence(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)


def exact_gaussian(multiplier: float, num_rounds: int, delta: float) -> float:
    """Balle and Wang (2018), theorem 8: exact, of Gaussian noise; R rounds are one at multiplier / sqrt(R)."""
    mu = math.sqrt(num_rounds) / multiplier
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 500)


@pytest.mark.parametrize("noise", [0.8, 2.0, 10.0])
@pytest.mark.parametrize("num_rounds", [1, 40])
@pytest.mark.parametrize("sampling", privacy.SAMPLINGS)
def test_everybody_in_every_round_is_the_gaussian_mechanism(sampling: str, num_rounds: int, noise: float) -> None:
    """Replacing a client moves the sum by up to two clip_norm, so that the noise counts half."""
    effective = noise if sampling == "poisson" else noise / 2
    found = epsilon(clients_per_round=100, num_rounds=num_rounds, noise_multiplier=noise, sampling=sampling)
    orders = np.concatenate([np.arange(1.02, 64, 0.01), np.arange(64, 1025)])
    ours = by_renyi(lambda a: num_rounds * a / (2 * effective**2), RUN["delta"], orders)
    exact = exact_gaussian(effective, num_rounds, RUN["delta"])
    assert ours - 1e-9 <= found < 1.02 * ours  # the library tries fewer orders
    assert exact < found < 1.25 * exact
    wrong = by_renyi(lambda a: num_rounds * a / (2 * noise**2) / 4, RUN["delta"], orders)
    assert not wrong - 1e-9 <= found < 1.02 * wrong


def sampled_gaussian(alpha: float, rate: float, noise: float) -> float:
    """Renyi divergence of ``(1 - q) N(0, s^2) + q N(1, s^2)`` from ``N(0, s^2)``, by its definition, by quadrature."""

    x = np.linspace(-12 * noise, alpha + 12 * noise, 20_001)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    logs = norm.logpdf(x, scale=noise) + alpha * ratio
    return (logs.max() + math.log(np.trapezoid(np.exp(logs - logs.max()), x))) / (alpha - 1)


@pytest.mark.parametrize(("rate", "noise", "num_rounds"), [(0.1, 1.1, 50), (0.01, 0.8, 200), (0.5, 3.0, 20)])
def test_poisson_sampling_against_quadrature(rate: float, noise: float, num_rounds: int) -> None:
    found = epsilon(clients_per_round=100 * rate, noise_multiplier=noise, num_rounds=num_rounds, sampling="poisson")
    divergence = functools.cache(lambda a: num_rounds * sampled_gaussian(a, rate, noise))
    ours = by_renyi(divergence, RUN["delta"], np.concatenate([np.arange(1.5, 11, 0.1), np.arange(11, 50)]))
    assert found == pytest.approx(ours, rel=1e-3)
    assert ours < 0.7 * epsilon(
        clients_per_round=100, noise_multiplier=noise, num_rounds=num_rounds, sampling="poisson"
    )


def replaced_client(rate: float, noise: float, delta: float) -> float:
    """The exact epsilon of one round against the worst pair that we know: one client's update is C or is -C.

    ``(1 - q) N(0, s^2) + q N(1, s^2)`` beside the same with -1; a lower bound for every correct account.
    """
    grid = np.linspace(-15 * noise, 15 * noise, 200_001)

    def density(at: float) -> np.ndarray:
        return (1 - rate) * norm.pdf(grid, scale=noise) + rate * norm.pdf(grid, loc=at, scale=noise)

    here, there = density(1.0), density(-1.0)

    def excess(e: float) -> float:
        return float(np.trapezoid(np.maximum(here - math.exp(e) * there, 0), grid)) - delta

    return brentq(excess, 0, 50)


@pytest.mark.parametrize(("taken", "noise"), [(10, 1.1), (50, 1.1), (50, 3.0)])
def test_sampling_without_replacement_is_bracketed(taken: int, noise: float) -> None:
    """Above the exact epsilon of a worst case, below the account without sampling."""
    found = epsilon(clients_per_round=taken, noise_multiplier=noise, num_rounds=1)
    low, high = (
        replaced_client(taken / 100, noise, RUN["delta"]),
        epsilon(clients_per_round=100, noise_multiplier=noise, num_rounds=1),
    )
    assert low < found <= high
    assert found < high or taken > 10
    assert low > 0.1


def test_the_second_order_of_sampling_without_replacement() -> None:
    """Wang, Balle and Kasiviswanathan (2019), theorem 27 at order 2, whose divergence is computed here by hand."""
    rate, noise, rounds, delta = 0.01, 4.0, 2000, 1e-5
    of_gaussian = 2 / (2 * (noise / 2) ** 2)
    second = math.log1p(rate**2 * min(4 * math.expm1(of_gaussian), 2 * math.exp(of_gaussian)))
    bound = by_renyi(lambda a: rounds * second, delta, np.array([2.0]))
    found = epsilon(clients_per_round=1, noise_multiplier=noise, num_rounds=rounds, delta=delta)
    assert 0 < found < bound  # the least over all orders


@pytest.mark.parametrize("sampling", nightly(privacy.SAMPLINGS, ["poisson"]))
@pytest.mark.parametrize(
    ("name", "values", "rising"),
    [
        ("noise_multiplier", (0.5, 1.1, 1.5, 4.0), False),
        ("num_rounds", (1, 10, 50, 1000), True),
        ("clients_per_round", (1, 10, 30, 100), True),
        ("num_clients", (20, 100, 1000), False),
        ("delta", (1e-8, 1e-5, 1e-3), False),
    ],
)
def test_monotone(sampling: str, name: str, values: tuple[float, ...], rising: bool) -> None:
    """By day of the sampling whose account is computed sooner."""
    found = np.array([epsilon(sampling=sampling, **{name: value}) for value in values])
    assert (np.diff(found) * (1 if rising else -1) > 0).all()
    assert (found > 0).all() and np.isfinite(found).all()


@pytest.mark.parametrize("sampling", nightly(privacy.SAMPLINGS, ["poisson"]))
def test_without_noise_there_is_no_privacy(sampling: str) -> None:
    assert epsilon(noise_multiplier=0, sampling=sampling) == math.inf
    ends = [epsilon(noise_multiplier=noise, sampling=sampling) for noise in (5e-324, 1e-153, 1e-90, 1e7, 1e9, 1e308)]
    assert ends[:2] == [math.inf] * 2 and ends[2] > 1e100 and ends[3] >= ends[4] == ends[5] >= 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"delta": 0}, "delta: got 0, must be above 0 and below 1"),
        ({"delta": 1.0}, "delta: got 1.0"),
        ({"noise_multiplier": -0.1}, "noise_multiplier: got -0.1, must be at least 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier: got nan"),
        ({"num_rounds": 0}, "num_rounds: got 0, must be a whole number of at least 1"),
        ({"num_clients": 1.5}, "num_clients: got 1.5"),
        ({"clients_per_round": 101}, "clients_per_round: got 101, must be above 0 and at most 100"),
        ({"clients_per_round": 0}, "clients_per_round: got 0"),
        ({"clients_per_round": 2.5}, "clients_per_round: got 2.5, must be a whole number of at least 1"),
        ({"sampling": "fixed"}, "sampling: got 'fixed', allowed are without_replacement, poisson"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        epsilon(**changed)


@pytest.mark.slow
def test_the_library_is_imported_when_asked_and_brings_no_other_framework() -> None:
    code = (
        "import sys, fedtangent, fedtangent._src.measures.privacy as p; assert 'dp_accounting' not in sys.modules;"
        "p.epsilon(num_clients=9, clients_per_round=3, num_rounds=2, noise_multiplier=1.0, delta=.1);"
        "assert 'dp_accounting' in sys.modules;"
        "print(sorted({'tensorflow', 'torch', 'keras', 'tf2jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_library_says_of_orders_that_it_leaves_out_stays_with_it(caplog: pytest.LogCaptureFixture) -> None:
    import dp_accounting
    from dp_accounting import rdp

    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(200.0))
    rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert "failed to converge" in caplog.text  # as it is by itself
    caplog.clear()
    found = privacy.epsilon(
        num_clients=100, clients_per_round=50, noise_multiplier=200.0, num_rounds=1, delta=1e-5, sampling="poisson"
    )
    assert caplog.text == "" and 0 < found < 0.1
    assert logging.getLogger("absl").isEnabledFor(logging.WARNING)
