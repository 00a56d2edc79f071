"""The largest stable server rate of late answers: closed forms, and maps assembled for every outcome of the delays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.flow import Flow, Rule, federated_flow
from fedtangent._src.types import Cohort, Partition

from ..documents import run

TOLERANCE = 1e-5  # relative; the searches' are 1e-6


def flow_of(
    x: np.ndarray, sizes: list[int], clients: Any, ages: Any, steps: int = 1, rate: float = 0.3, **rule
) -> Flow:
    """Rounds of the listed clients on a linear model."""
    kernel, offsets = x @ x.T, np.cumsum([0, *sizes]).astype(np.int32)
    client = np.array(clients)
    cohorts = Cohort(client, np.zeros_like(client), np.ones(client.shape))
    weights = np.ones(ages) if np.ndim(ages) == 0 else np.asarray(ages)
    rule = Rule(steps, rate, **{"algorithm": "fed_buff", "delay_weights": weights, **rule})
    partition = Partition(np.arange(len(x), dtype=np.int32), offsets)
    return federated_flow(KernelBlocks(kernel, kernel), np.ones((len(x), 1)), partition, cohorts, rule)


def one_mode(ages: Any, x: float = 0.3, **rule) -> Flow:
    return flow_of(np.ones((1, 1)), [1], [[0]], ages, rate=x, **rule)


def exactly(delay: int) -> np.ndarray:
    return np.eye(delay + 1)[delay]


@pytest.mark.parametrize("delay", range(5))
def test_one_mode_of_a_fixed_delay_has_a_closed_form(delay: int) -> None:
    flow, closed = one_mode(delay + 1), 2 * np.sin(np.pi / (2 * (2 * delay + 1))) / 0.3
    assert flow.largest_stable_server_rate(exactly(delay)) == pytest.approx(closed, rel=TOLERANCE)
    later = 2 * np.sin(np.pi / (2 * (2 * delay + 3))) / 0.3
    assert abs(later / closed - 1) > 0.15


def test_the_clients_rate_of_a_fixed_delay_has_the_same_closed_form() -> None:
    """One local step: the product of both rates decides."""
    flow = one_mode(3, delays=2, server_learning_rate=0.8)
    assert flow.largest_stable_learning_rate() == pytest.approx(2 * np.sin(np.pi / 10) / 0.8, rel=2e-4)
    assert flow.contraction() < 1


def test_a_discount_is_a_smaller_rate_and_mixing_models_is_stable_at_any_delay() -> None:
    late = [0.0, 0.0, 1.0]
    plain, discounted = one_mode(3), one_mode([1.0, 1.0, 0.5])
    half = 2 * plain.largest_stable_server_rate(late)
    assert discounted.largest_stable_server_rate(late) == pytest.approx(half, rel=TOLERANCE)
    for x in (0.3, 1.9):
        for law in ([0.0, 0.0, 1.0], [0.2, 0.5, 0.3]):
            assert one_mode(3, x, algorithm="fed_async").largest_stable_server_rate(law) >= 1 - TOLERANCE
    assert one_mode(3, 2.1, algorithm="fed_async").largest_stable_server_rate(late) < 0.9
    assert one_mode(3, 1.9).largest_stable_server_rate(late) < 0.5


def outcomes(flow_rounds: list, law: np.ndarray, mixes: bool, weights: np.ndarray, rate: float) -> list:
    """Every (probability, map) of a round's clients and delays; ``flow_rounds`` are lists of (client, share, move)."""
    ages, found = law.shape[1], []
    for answers in flow_rounds:
        size = answers[0][2].shape[0]
        for delays in itertools.product(range(ages), repeat=len(answers)):
            whole, chance = np.eye(size * ages, k=-size), 1 / len(flow_rounds)
            whole[:size, :size] += np.eye(size)
            for (i, share, move), d in zip(answers, delays, strict=True):
                chance *= law[i, d]
                towards = share * np.eye(size) * mixes
                whole[:size, d * size : (d + 1) * size] += rate * weights[d] * (towards - move)
                whole[:size, :size] -= rate * weights[d] * towards
            found.append((chance, whole))
    return found


CASES: dict[str, tuple[list[list[int]], np.ndarray, dict[str, Any]]] = {
    "two clients, one law": ([[0, 1]], np.tile([0.5, 0.2, 0.3], (2, 1)), {}),
    "two clients, two laws": ([[0, 1]], np.array([[0.1, 0.9], [0.6, 0.4]]), {"steps": 2}),
    "one client at a time": ([[0], [1]], np.array([[0.1, 0.9], [0.6, 0.4]]), {}),
    "mixed models": ([[0], [1]], np.array([[0.3, 0.2, 0.5], [0.0, 0.4, 0.6]]), {"algorithm": "fed_async", "rate": 1.4}),
}


@pytest.mark.parametrize("name", CASES)
def test_random_delays_beside_maps_assembled_for_every_outcome(name: str) -> None:
    """The mean of the Kronecker square of L over all outcomes, in the weights' space; that of L is another one."""
    clients, law, rule = CASES[name]
    rng = np.random.default_rng(3)
    x, weights = rng.normal(size=(4, 2)), np.array([1.0, 0.8, 0.7])[: law.shape[1]]
    flow = flow_of(x, [2, 2], clients, weights, **rule)
    steps, client_rate = rule.get("steps", 1), rule.get("rate", 0.3)
    moves = [
        np.eye(2) - np.linalg.matrix_power(np.eye(2) - client_rate * part.T @ part / 2, steps)
        for part in np.split(x, 2)
    ]
    rounds = [[(i, 1 / len(chosen), moves[i] / len(chosen)) for i in chosen] for chosen in clients]

    def radius(rate: float, squared: bool = True) -> float:
        maps = outcomes(rounds, law, rule.get("algorithm") == "fed_async", weights, rate)
        power = sum(chance * (np.kron(whole, whole) if squared else whole) for chance, whole in maps)
        return float(np.abs(np.linalg.eigvals(power)).max())

    end = flow.largest_stable_server_rate(law)
    assert radius(end * (1 - TOLERANCE)) <= 1 + 1e-9 < radius(end * (1 + TOLERANCE))
    assert all(radius(end * share) <= 1 + 1e-9 for share in (0.01, 0.2, 0.5, 0.8))
    assert radius(1.01 * end, squared=False) < 1  # the expected model is still stable there
    one = np.mean(law, axis=0)
    if not np.allclose(law, one):
        assert flow.largest_stable_server_rate(one) != pytest.approx(end, rel=1e-3)


@pytest.mark.slow
def test_the_example_of_the_documentation() -> None:
    edge = run("largest_stable_server_rate")["edge"]
    edges = [edge(np.eye(s + 1)[s]) for s in range(5)]
    assert all(later < 0.75 * sooner for sooner, later in itertools.pairwise(edges[:3])) and edges[4] < edges[0] / 5
    assert edges[4] < edge(np.full(5, 0.2)) < edges[0]


def test_bad_questions_are_refused_in_one_line() -> None:
    flow = one_mode(3)
    for arguments, message in (
        (([1.0],), r"delays: got \[1.0\], must be probabilities, \[3\] or \[1, 3\]"),
        (([0.5, 0.5, 0.5],), r"delays: got \[0.5, 0.5, 0.5\], must sum to 1"),
        (([0, 0, 1], 1), "model: got 1, must be a whole number from 0 to 0"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            flow.largest_stable_server_rate(*arguments)
        assert "\n" not in str(caught.value)
    plain = flow_of(np.ones((1, 1)), [1], [[0]], 1, algorithm="fed_avg", delay_weights=None)
    with pytest.raises(ValueError, match="algorithm: got 'fed_avg', allowed are fed_async, fed_buff"):
        plain.largest_stable_server_rate([1.0])
