"""Privacy accounting: the (epsilon, delta) of a run of ``algorithms.dp_fed_avg``."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

from fedtangent._src.checks import choice, number, whole

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LEAST_NOISE, MOST_NOISE = 1e-100, 1e8  # beyond them dp-accounting says 0, or fails: its squares under- or overflow
LEAST_SEARCHED, MOST_SEARCHED = 1e-3, 1e6  # noise multipliers for a budget
SAMPLINGS = ("without_replacement", "poisson")


def epsilon(
    *,
    num_clients: int,
    clients_per_round: float,
    num_rounds: int,
    noise_multiplier: float,
    delta: float,
    sampling: str = "without_replacement",
) -> float:
    """Computes an upper bound of the epsilon of a ``dp_fed_avg`` run, for the privacy of a whole client.

    The bound is by Renyi differential privacy (Mironov, 2017), computed by the ``dp-accounting`` library. It covers all
    models and rounds of the run.

    Args:
        num_clients: Number of clients in the federation.
        clients_per_round: Number of clients in a round of ``schedules.uniform_sampling``; under Poisson sampling the
            expected number, ``rate * num_clients``.
        num_rounds: Number of rounds. If a client trains one of K models in each round, the rounds of all models count.
        noise_multiplier: Standard deviation of the noise that ``dp_fed_avg`` adds to the sum of the updates, in units
            of ``clip_norm``; epsilon is infinite below 1e-100, and does not fall further above 1e8.
        delta: The delta of (epsilon, delta) differential privacy, in (0, 1).
        sampling: ``"poisson"`` (``schedules.poisson_sampling``; Mironov, Talwar and Zhang, 2019): neighbouring
            federations differ in the presence of a client, which changes the sum by at most ``clip_norm``.
            ``"without_replacement"`` (``schedules.uniform_sampling``; ``schedules.all_clients`` with
            ``clients_per_round = num_clients``; Wang, Balle and Kasiviswanathan, 2019, theorem 27): the number of
            clients is public and neighbours differ in one client's data, which changes the sum by up to twice
            ``clip_norm``. Epsilons of the two kinds must not be compared.

    Raises:
        ValueError: An argument is out of range.

    Example:

        >>> import fedtangent as ft
        >>> of_run = dict(num_clients=1000, clients_per_round=50, num_rounds=100, delta=1e-5)
        >>> quiet, noisy = (ft.measures.epsilon(noise_multiplier=noise, **of_run) for noise in (1.0, 2.0))
        >>> noisy < quiet
        True
    """
    whole("num_clients", num_clients)
    whole("num_rounds", num_rounds)
    choice("sampling", sampling, SAMPLINGS)
    number("clients_per_round", clients_per_round, above=0, at_most=num_clients)
    if sampling == "without_replacement":
        whole("clients_per_round", clients_per_round)
    number("noise_multiplier", noise_multiplier, at_least=0)
    number("delta", delta, above=0, below=1)
    if noise_multiplier < LEAST_NOISE:
        return math.inf
    noise_multiplier = min(float(noise_multiplier), MOST_NOISE)  # less noise: a bound of it is one of more
    import dp_accounting  # a second to import, and nothing else needs it
    from dp_accounting import rdp

    if sampling == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        noise = dp_accounting.GaussianDpEvent(noise_multiplier)
        one = dp_accounting.PoissonSampledDpEvent(clients_per_round / num_clients, noise)
    else:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        noise = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        one = dp_accounting.SampledWithoutReplacementDpEvent(int(num_clients), int(clients_per_round), noise)

    def total(event: DpEvent) -> float:
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        return float(accountant.compose(event, int(num_rounds)).get_epsilon(float(delta)))

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of orders that it leaves out, which can only loosen the bound
    try:
        return min(total(one), total(noise))  # the bound with sampling can be the looser one
    finally:
        logger.setLevel(level)


def noise_multiplier(
    target_epsilon: float,
    *,
    num_clients: int,
    clients_per_round: float,
    num_rounds: int,
    delta: float,
    sampling: str = "without_replacement",
) -> float:
    """Computes the least noise multiplier with which a ``dp_fed_avg`` run has at most a given epsilon.

    It is the inverse of ``measures.epsilon``, to a relative error of 1e-6.

    Args:
        target_epsilon: Largest epsilon, above 0.
        num_clients, clients_per_round, num_rounds, delta, sampling: The run, as for ``measures.epsilon``.

    Returns:
        The multiplier; ``exp(-8)``, about 3.4e-4, if that suffices: the search goes no lower.

    Raises:
        ValueError: A multiplier of 10^6 is not enough, or an argument is out of range.

    Example:

        >>> import fedtangent as ft
        >>> of_run = dict(num_clients=1000, clients_per_round=50, num_rounds=100, delta=1e-5)
        >>> noise = ft.measures.noise_multiplier(8.0, **of_run)
        >>> round(ft.measures.epsilon(noise_multiplier=noise, **of_run), 3)
        8.0
    """
    from scipy.optimize import brentq

    number("target_epsilon", target_epsilon, above=0)

    @functools.cache
    def over(log: float) -> float:
        spent = epsilon(
            num_clients=num_clients,
            clients_per_round=clients_per_round,
            num_rounds=num_rounds,
            noise_multiplier=math.exp(log),
            delta=delta,
            sampling=sampling,
        )
        return math.log(max(spent, 1e-300) / target_epsilon) if spent < math.inf else MOST_SEARCHED

    low = high = 0.0
    while over(high) > 0:
        if high > math.log(MOST_SEARCHED):
            raise ValueError(
                f"target_epsilon: got {target_epsilon:g}, must be larger: no noise up to {MOST_SEARCHED:g} suffices"
            )
        low, high = high, high + 2
    while over(low) <= 0:
        if low < math.log(LEAST_SEARCHED):
            return math.exp(low)
        low, high = low - 2, low
    return math.exp(float(brentq(over, low, high, xtol=2e-7)) + 5e-7)
