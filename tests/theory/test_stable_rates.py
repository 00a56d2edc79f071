"""The largest stable rate is the end of the interval that begins at 0: beside brute force on assembled rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.theory.flow.asymptotics import end_of_stable, factors_to_search
from fedtangent._src.types import Cohort, Partition

from ..nightly import nightly

FINE = 1e-3  # step of a dense scan of rates, relative


def flow_of(x: np.ndarray, sizes: list[int], steps: np.ndarray, weights: np.ndarray, rate: float = 0.1, **rule) -> Flow:
    """One round of everybody, on a linear model; test points are the training points."""
    kernel = x @ x.T
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    partition, client = Partition(np.arange(len(x), dtype=np.int32), offsets), np.arange(len(sizes))[None]
    cohorts = Cohort(client, np.zeros_like(client), weights[None])
    return federated_flow(
        KernelBlocks(*[kernel] * 6), np.ones((len(x), 1)), partition, cohorts, Rule(steps, rate, **rule)
    )


def radius_of(
    x: np.ndarray, sizes: list[int], steps: np.ndarray, weights: np.ndarray, **rule
) -> Callable[[np.ndarray], np.ndarray]:
    """The spectral radius of the assembled round in weight space (momentum doubles it), as a function of the rates."""
    server, momentum = rule.get("server_learning_rate", 1.0), rule.get("server_momentum", 0.0)
    parts, eye = np.split(x, np.cumsum(sizes)[:-1]), np.eye(x.shape[1])
    shares = weights / weights.sum()
    if rule.get("algorithm") == "fed_nova":
        shares = shares * (shares @ steps) / steps

    def radius(rates: np.ndarray) -> np.ndarray:
        rates = rates[:, None, None]
        moves = sum(
            share * (eye - np.linalg.matrix_power(eye - rates * part.T @ part / len(part), int(count)))
            for share, part, count in zip(shares, parts, steps, strict=True)
        )
        same = np.broadcast_to(eye, moves.shape)
        round_ = np.block([[same - server * moves, -server * momentum * same], [moves, momentum * same]])
        if (late := rule.get("delays")) is not None:
            size = len(eye)
            round_ = np.tile(np.eye(size * (late + 1), k=-size), (len(rates), 1, 1))
            round_[:, :size, :size], round_[:, :size, size * late :] = eye, -rule["delay_weights"][late] * moves
        return np.abs(np.linalg.eigvals(round_)).max(axis=1)

    return radius


def first_unstable(radius: Callable[[np.ndarray], np.ndarray], start: float) -> float:
    """The least rate of a dense scan at which the radius is above 1."""
    for rates in np.split(start * np.exp(np.arange(0, 12, FINE)), 60):
        if (grows := radius(rates) > 1 + 1e-9).any():
            return float(rates[grows.argmax()])
    raise ValueError("no rate of the scan is unstable")


@pytest.mark.parametrize("rate", nightly([0.1, 3.0, 4.0, 100.0], [0.1, 4.0]))
def test_an_island_of_stable_rates_is_not_the_end(rate: float) -> None:
    """A round multiplies the residual by .24 (1 - r)^3 + .76 (1 - r)^2: 1 at 8/3, and again below 1 near 4."""
    case = np.ones((2, 1)), [1, 1], np.array([3, 2]), np.array([0.24, 0.76])
    flow = flow_of(*case, rate=rate)
    for r in (0.1, 2.6, 3.0, 4.4):
        factor = abs(0.24 * (1 - r) ** 3 + 0.76 * (1 - r) ** 2)
        assert flow_of(*case, rate=r).contraction() == pytest.approx(factor, rel=1e-9)
    bound = flow.largest_stable_learning_rate()
    assert 8 / 3 * (1 - 1e-4) <= bound <= 8 / 3
    assert flow_of(*case, rate=1.1 * bound).contraction() > 1 > flow_of(*case, rate=4.4).contraction()


RULES = {
    "fed_avg": {},
    "server": {"server_learning_rate": 1.6},
    "fed_nova": {"algorithm": "fed_nova"},
    "momentum": {"server_momentum": 0.5},
    "fed_buff": {"algorithm": "fed_buff", "delays": 3, "delay_weights": [1.0, 0.9, 0.8, 0.7]},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", nightly([0, 1], [0]))
def test_random_problems_beside_a_dense_scan(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, sizes = rng.normal(size=(4, 3)), [1, 1, 2]
    steps, weights = rng.integers(1, 6, 3), rng.dirichlet(np.ones(3))
    bound = flow_of(x, sizes, steps, weights, **RULES[name]).largest_stable_learning_rate()
    radius = radius_of(x, sizes, steps, weights, **RULES[name])
    gentle = 0.05 / np.linalg.norm(x, 2) ** 2 / steps.max()
    assert bound == pytest.approx(first_unstable(radius, gentle), rel=1e-4 + FINE)


@pytest.mark.parametrize("place", [13.4, 13.6, 15.45])
def test_a_narrow_maximum_between_two_trials_is_found(place: float) -> None:
    """Unstable rates between two neighbouring trials that are both stable, and below the rates where all grow."""
    step, width, centre = 1.25, 0.12, 0.1 * 1.25**place

    def growth(rate: float) -> float:
        return 0.5 + 0.7 * np.exp(-((np.log(rate / centre) / width) ** 2)) + (rate > 50)

    assert all(growth(0.1 * step**k) < 1 for k in range(27))  # no trial is unstable before 50
    edge = centre * np.exp(-width * np.sqrt(np.log(0.7 / 0.5)))
    assert end_of_stable(growth, 1.0, start=0.1, step=step, tolerance=1e-3) == pytest.approx(edge, rel=2e-3)


def test_ends_of_searches() -> None:
    def end(is_stable: Callable[[float], bool], start: float = 1.0) -> float:
        return end_of_stable(
            lambda rate: 0.0 if is_stable(rate) else np.nan, 1.0, start=start, step=1.3, tolerance=1e-4
        )

    for bound in (0.037, 1.0, 300.0, 1e5):
        assert end(lambda rate, bound=bound: rate <= bound) == pytest.approx(bound, rel=1e-4)
    assert end(lambda rate: True) == np.inf and end(lambda rate: False) == 0.0
    assert end(lambda rate: False, start=np.inf) == np.inf


OTHERS = {"scaffold": {"algorithm": "scaffold"}, "fed_dyn": {"algorithm": "fed_dyn", "mu": 1.0}, **RULES}


@pytest.mark.parametrize("name", OTHERS)
def test_a_search_begins_where_no_round_grows(name: str) -> None:
    """FedAvg at the clients' bound, others where T steps and the server reach no minimum of the steepest client."""
    x, sizes, steps = np.random.default_rng(0).normal(size=(4, 3)), [1, 1, 2], np.array([3, 1, 5])
    steepest = max(np.linalg.norm(part, 2) ** 2 / len(part) for part in np.split(x, [1, 2]))
    begin, end = factors_to_search(flow_of(x, sizes, steps, np.ones(3), rate=0.1, **OTHERS[name]))
    reach = {"fed_avg": 0.5, "server": None, "momentum": 10.0, "fed_dyn": 5.0, "fed_buff": 35.0}.get(name, 5.0)
    if name == "server":  # 1.6 (1 - (1 - x)^5) < 2, and fewer steps are no stricter
        assert begin == pytest.approx((1 + (2 / 1.6 - 1) ** (1 / 5)) / steepest / 0.1, rel=0.3)
    elif name == "fed_dyn":
        assert begin == pytest.approx(1 / 5 / (steepest + 1.0) / 0.1, rel=1e-12)
    else:
        assert begin == pytest.approx(1 / reach / steepest / 0.1, rel=1e-12)
    assert end == np.inf and radius_at(x, sizes, steps, begin * 0.1, name) <= 1 + 1e-9


def radius_at(x: np.ndarray, sizes: list[int], steps: np.ndarray, rate: float, name: str) -> float:
    return flow_of(x, sizes, steps, np.ones(3), rate=rate, **OTHERS[name]).contraction()


def test_rates_end_with_the_normaliser_of_fed_nova() -> None:
    """With a proximal term mu the rule ends at 1 / mu, however stable the rounds below are."""
    case = np.ones((2, 1)) / 10, [1, 1], np.array([3, 2]), np.ones(2)
    flow = flow_of(*case, algorithm="fed_nova", mu=4.0)
    assert flow.largest_stable_learning_rate() == pytest.approx(1 / 4, rel=1e-3)
    assert flow_of(*case, rate=0.249, algorithm="fed_nova", mu=4.0).contraction() < 1
    assert flow_of(*case, algorithm="fed_nova").largest_stable_learning_rate() > 1


def test_weight_decay_counts_directions_that_the_points_have() -> None:
    """One example: .85 = 1 - .1 (1 + .5); the .95 of other directions counts where a test point has a part in them."""
    case = np.ones((1, 1)), [1], np.array([1]), np.ones(1)
    flow = flow_of(*case, weight_decay=0.5)
    assert flow.contraction() == pytest.approx(0.85, rel=1e-12)
    assert flow.largest_stable_learning_rate() == pytest.approx(2 / 1.5, rel=1e-4)
    elsewhere = replace(flow, kernels=flow.blocks._replace(ntk_test=np.full((1, 1), 1.5)))
    unknown = replace(flow, kernels=flow.blocks._replace(ntk_test=None))
    assert elsewhere.contraction() == unknown.contraction() == pytest.approx(0.95, rel=1e-12)
    # nothing of the initial function is left anywhere if J(x) w_0 is 0
    assert replace(elsewhere, numbers=flow.numbers._replace(homogeneity=np.zeros(()))).contraction() < 0.86


# ---- the clients' bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [1.0, 1.5])
def test_a_server_beyond_1_vouches_for_no_minibatches(server: float) -> None:
    """At server rate 1.5 steps that differ, in their batches or sizes, have no bound that is known."""
    x, batches = np.diag([1.0, 1.0]), [[[0], [1]]]
    flow = flow_of(x, [2], np.array([2]), np.ones(1), batches=batches, server_learning_rate=server)
    bound = flow.stability().max_stable_learning_rate
    assert bound == (2.0 if server == 1 else 0.0)
    weighted = flow_of(x, [2], np.array([2]), np.ones(1), step_weights=[1.0, 0.5], server_learning_rate=server)
    assert weighted.stability().max_stable_learning_rate == (4.0 if server == 1 else 0.0)
    assert flow.stability().stable == (server == 1)


@pytest.mark.parametrize(("server", "end"), [(1.0, np.inf), (2.0, np.inf), (3.0, np.log(3.0) / 2)])
def test_the_bound_of_gradient_flow_is_tight(server: float, end: float) -> None:
    """One client, eigenvalue 1, time 2 r: a round multiplies the residual by 1 - s (1 - e^-2r), -1 at the end."""
    case = np.ones((1, 1)), [1], np.array([2]), np.ones(1)
    rule = {"dynamics": "gradient_flow", "server_learning_rate": server}
    bound = flow_of(*case, **rule).stability().max_stable_learning_rate
    assert bound == pytest.approx(end, rel=1e-12)
    assert flow_of(*case, **rule).largest_stable_learning_rate() == pytest.approx(end, rel=1e-4)
    if end < np.inf:
        assert flow_of(*case, rate=0.99 * end, **rule).contraction() < 1
        assert flow_of(*case, rate=1.01 * end, **rule).contraction() > 1


def test_the_bound_of_minibatches_is_of_the_rows_that_they_hold() -> None:
    """A batch of one row beside one of three: the mean over its rows has 1, not 3 places, of stiffness 4, not 4/3."""
    x = np.diag([2.0, 1.0, 1.0, 1.0])
    rows = np.array([[[[0, -1, -1], [1, 2, 3]]]])
    flow = flow_of(x, [4], np.array([2]), np.ones(1), batches=rows)
    assert flow.stability().max_stable_learning_rate == pytest.approx(2 / 4, rel=1e-12)
    # by brute force: of each batch the largest eigenvalue of its mean gradient
    largest = max(np.linalg.norm(x[[0]], 2) ** 2 / 1, np.linalg.norm(x[[1, 2, 3]], 2) ** 2 / 3)
    assert flow.stability().max_stable_learning_rate == pytest.approx(2 / largest, rel=1e-12)
    twice = flow_of(x, [4], np.array([2]), np.ones(1), batches=np.array([[[[0, 0, 1], [1, 2, 3]]]]))
    assert twice.stability().max_stable_learning_rate == pytest.approx(2 / (2 / 3 * 4), rel=1e-12)
