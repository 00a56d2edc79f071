"""Clients that drop out, are late or send nonsense: how often, what is left of them, and what the server counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

from fedtangent._src import streams
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.history import Run
from fedtangent._src.federated.aggregate import optax_server, stack
from fedtangent._src.federated.compose import Parts, compose
from fedtangent._src.federated.faults import dropout, finite, round_times, stragglers
from fedtangent._src.federated.schedule import all_clients, strata, uniform_sampling
from fedtangent._src.streams import keys
from fedtangent._src.types import Algorithm, Client, Cohort, FederatedData, Key, Local, PyTree, Schedule

from ..nightly import nightly
from .test_parts import pooling, visiting
from .toys import cohorts, fixed, go, leaves, two_layer, uneven_data

ROUNDS = 2000
MANY = 5.0  # standard errors


@functools.cache
def drawn(schedule: Schedule, rounds: int = ROUNDS, seed: int = 0) -> Cohort:
    return cohorts(schedule, seed, rounds)


def off(share: float, expected: float, draws: int) -> float:
    """How many standard errors a share of ``draws`` is off."""
    return abs(share - expected) / np.sqrt(expected * (1 - expected) / draws)


# --- dropout ---------------------------------------------------------------------------------------------------


def test_each_client_drops_out_as_often_as_it_should() -> None:
    chance = np.array([0.1, 0.5, 0.0, 0.3, 0.9, 0.2])
    lost = drawn(dropout(all_clients(6), chance)).weight == 0
    assert not lost[:, 2].any()
    for i in (0, 1, 3, 4, 5):
        assert off(lost[:, i].mean(), chance[i], ROUNDS) < MANY
        assert off(lost[:, i].mean(), chance[i] / 2, ROUNDS) > MANY  # negative control
    both = (lost[:, 1] & lost[:, 4]).mean()  # clients are independent, and so are rounds
    assert off(both, 0.45, ROUNDS) < MANY
    assert off((lost[1:, 1] & lost[:-1, 1]).mean(), 0.25, ROUNDS - 1) < MANY


def test_dropout_leaves_the_cohorts_and_takes_a_client_from_all_its_models() -> None:
    inner = all_clients(6, 3)
    with_faults, without = drawn(dropout(inner, 0.3), 50), drawn(inner, 50)
    assert np.array_equal(with_faults.client, without.client)
    assert np.array_equal(with_faults.model, without.model)
    lost = (with_faults.weight == 0).reshape(50, 3, 6)
    assert (lost == lost[:, :1]).all()
    assert 0 < lost.mean() < 1
    inner = uniform_sampling(6, 4)
    schedule = dropout(inner, 0.3)
    sampled = drawn(schedule, 50)
    assert np.array_equal(sampled.client, drawn(inner, 50).client)
    assert not np.array_equal(sampled.weight, drawn(schedule, 50, seed=1).weight)


@pytest.mark.parametrize("chance", [-0.1, 1.0, float("nan"), [0.1, 0.2]])
def test_bad_probability(chance: Any) -> None:
    with pytest.raises(ValueError, match="probability: got"):
        dropout(all_clients(6), chance)


# --- stragglers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wins"),
    [
        ({"distribution": "exponential"}, 3 / 4),  # rates 1 and 1/3
        ({"spread": 0.5}, norm.cdf(np.log(3) / (0.5 * np.sqrt(2)))),
        ({"spread": 2.0}, norm.cdf(np.log(3) / (2.0 * np.sqrt(2)))),
    ],
)
def test_the_faster_client_is_first_as_often_as_its_distribution_says(options: dict[str, Any], wins: float) -> None:
    first = drawn(stragglers(all_clients(2), 1, np.array([1.0, 3.0]), **options)).client[:, 0]
    assert off((first == 0).mean(), wins, ROUNDS) < MANY
    assert off((first == 0).mean(), 1 / 2, ROUNDS) > MANY


def test_times_too_small_for_float32_have_an_order() -> None:
    """Times of this spread are exp(-450 and less): all 0, and the first client the first every time."""
    first = drawn(stragglers(all_clients(4), 1, 1.0, spread=30.0)).client[:, 0]
    assert all(off((first == client).mean(), 1 / 4, ROUNDS) < MANY for client in range(4))


def test_the_first_hundred_of_130() -> None:
    schedule = stragglers(uniform_sampling(200, 130), 100)
    assert schedule.num_slots == 100
    seen, contacted = drawn(schedule, 200), drawn(uniform_sampling(200, 130), 200).client
    assert all(len(set(row)) == 100 for row in seen.client)
    assert all(set(row) < set(asked) for row, asked in zip(seen.client, contacted, strict=True))
    assert (seen.weight == 1).all()
    visits = np.bincount(seen.client.ravel(), minlength=200) / 200  # all alike: half the clients each round
    assert np.all([off(share, 0.5, 200) < MANY for share in visits])
    slow = np.where(np.arange(200) < 30, 1000.0, 1.0)
    late = drawn(stragglers(uniform_sampling(200, 130), 100, slow, spread=0.3), 200)
    assert (late.client < 30).mean() < (seen.client < 30).mean() / 10


@pytest.mark.parametrize(("keep", "empty"), nightly([(6, 0), (7, 1)], [(7, 1)]))
def test_an_empty_slot_is_never_among_the_first(keep: int, empty: int) -> None:
    inner = strata(6, 3, 4)  # six filled slots of eight
    assert (drawn(inner, 60).weight == 0).sum() == 2 * 60
    weight = drawn(stragglers(inner, keep), 60).weight
    assert ((weight == 0).sum(axis=1) == empty).all() and weight.shape == (60, keep)


def test_a_server_that_waits_twice_waits_at_least_as_long_as_the_first_time() -> None:
    slow = stragglers(all_clients(6), 4, mean_time=100.0)
    times = [round_times(schedule, keys(0).schedule, 3) for schedule in (slow, stragglers(slow, 2, mean_time=1e-3))]
    assert np.array_equal(*times) and np.all(times[0] > 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"keep": 0}, "keep: got 0"),
        ({"keep": 7}, "keep: got 7"),
        ({"keep": 1.5}, "keep: got 1.5"),
        ({"distribution": "uniform"}, "distribution: got 'uniform', allowed are lognormal, exponential"),
        ({"spread": 0.0}, "spread: got 0.0"),
        ({"mean_time": -1.0}, "mean_time"),
        ({"mean_time": [1.0, 2.0]}, r"mean_time: got .*one number or one per client, \[6\]"),
        ({"mean_time": float("inf")}, "mean_time"),
    ],
)
def test_bad_arguments_of_stragglers(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stragglers(all_clients(6), **({"keep": 3} | changed))


def test_whom_the_server_contacted_is_counted_through_nested_faults() -> None:
    schedule = dropout(stragglers(dropout(uniform_sampling(6, 5), 0.4), 4), 0.3)
    assert schedule.contacted is not None
    init, sample = jax.random.split(keys(0).schedule)
    state, drawn_next = jax.jit(schedule.init)(init), jax.jit(schedule.sample)
    for t in range(5):
        cohort, state = drawn_next(sample, state, jnp.int32(t))
        assert int(schedule.contacted(state)) == 5
        assert int(np.sum(np.asarray(cohort.weight) > 0)) <= 4
    assert cohorts(schedule, 0, 2).client.shape == (2, 4)


def test_clients_without_examples_are_not_contacted_with_faults_and_without() -> None:
    """As if absent: one of three has none, and nested faults, in which half of them drop out, contact the same two."""
    everyone, sizes = all_clients(3), (2, 0, 3)
    for schedule in (everyone, dropout(everyone, 0.5), stragglers(dropout(everyone, 0.5), 2)):
        algorithm = compose("visits", two_layer(), visiting(), optax_server(optax.sgd(1.0)), schedule)
        run = simulate(algorithm, uneven_data(sizes=sizes), num_rounds=2, devices=Devices("scan"))
        assert run.history.rounds["contacted"].tolist() == [2, 2]


# --- messages that the server does not accept ------------------------------------------------------------------


def test_what_is_accepted() -> None:
    message = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0), "n": jnp.int32(10**6)}

    @functools.partial(jax.jit, static_argnums=0)
    def accepted(bounds: tuple[float, ...], sent: PyTree) -> list[Any]:
        return [finite(bound)(sent) for bound in bounds]

    bounds = (float("inf"), 5.01, 5.0, 4.99, 1e30)
    assert [bool(v) for v in accepted(bounds, message)] == [True, True, True, False, True]
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not any(accepted(bounds, {**message, "b": jnp.array(bad)}))
    huge = {"a": jnp.full((3,), 1e30, jnp.float32)}  # the square is beyond float32
    assert [bool(v) for v in accepted((float("inf"), 1e12), huge)] == [True, False]
    assert not finite(1.0)({"a": jnp.full((8,), 1, jnp.float16)})
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            finite(wrong)


STRATA = strata(6, 3, 4)  # two empty slots a round
NONSENSE = {"nan": np.nan, "inf": np.inf, "explode": 1e6}


def corrupt(probability: float) -> Local:
    """Clients that count their visits and, with a probability in each round, send their targets in place of ones."""
    local = visiting()

    def update(key: Key, broadcast: PyTree, state: PyTree, client: Client) -> tuple[PyTree, PyTree, dict[str, Any]]:
        message, after, info = local.update(key, broadcast, state, client)
        hit = jax.random.bernoulli(streams.apart(key, 2**31 + 2), probability)
        sent = jax.tree.map(lambda leaf: jnp.where(hit, client.data.y[0, 0] * leaf, leaf), message)
        return sent, after, {**info, "corrupt": hit}

    return local._replace(update=update)


@functools.cache  # one object, so that runs with different nonsense share a program
def faulty(aggregate: str, guarded: bool) -> Algorithm:
    """Clients that count their visits and send ones, or nonsense; a server with momentum, or one that pools."""
    local = corrupt(0.4)
    accept = finite(100.0) if guarded else None
    if aggregate == "mean":
        server = optax_server(optax.sgd(1.0, momentum=0.9))
        return compose("faulty", two_layer(), local, server, STRATA, Parts(accept=accept))
    return compose("faulty", two_layer(), local, pooling(), STRATA, Parts(aggregate=stack(8), accept=accept))


@functools.cache
def run(aggregate: str, mapping: str, guarded: bool = True, how: str = "nan") -> Run:
    algorithm, data = faulty(aggregate, guarded), uneven_data()
    data = data._replace(y=np.full(data.y.shape, NONSENSE[how]))
    return simulate(
        algorithm,
        data,
        num_rounds=9,
        seed=0,
        evaluation=Evaluation(1, lambda _, state: {"at": leaves(state.server)}),
        devices=Devices(mapping),
    )


def is_finite(run: Run) -> bool:
    return all(np.isfinite(leaf).all() for leaf in leaves(run.state.server))


EVERYWHERE = pytest.mark.parametrize(
    ("aggregate", "mapping"),
    nightly(
        [("mean", "scan"), ("mean", "vmap"), ("stack", "chunked:3"), ("stack", "scan")],
        [("mean", "scan"), ("stack", "chunked:3")],
    ),
)


@EVERYWHERE
def test_the_rejected_are_counted_and_leave_no_trace(aggregate: str, mapping: str) -> None:
    rounds, state = run(aggregate, mapping).history.rounds, run(aggregate, mapping).state
    cohort, filled = rounds["cohort"], rounds["cohort"].weight > 0
    bad = rounds["corrupt"] & filled
    assert 0 < bad.sum() < filled.sum()
    rejected, visits, weight = np.zeros((9, 3), int), np.zeros((3, 6), int), np.zeros((9, 3))
    for t, s in np.argwhere(filled):
        k, i = cohort.model[t, s], cohort.client[t, s]
        rejected[t, k] += bad[t, s]
        visits[k, i] += not bad[t, s]
        weight[t, k] += cohort.weight[t, s] * (not bad[t, s])
    assert np.array_equal(rounds["rejected"], rejected)
    assert np.array_equal(state.client, visits)  # a rejected client's own state is as it was
    assert np.array_equal(rounds["model_weight"], weight)
    assert np.array_equal(rounds["contacted"], filled.sum(axis=1))
    assert is_finite(run(aggregate, mapping))
    if aggregate == "stack":
        assert np.array_equal(rounds["count"] * (weight > 0), (weight > 0) * counts(cohort, filled & ~bad))


def counts(cohort: Cohort, active: np.ndarray) -> np.ndarray:
    return np.stack([((cohort.model == k) & active).sum(axis=1) for k in range(3)], axis=1)


def test_without_the_check_nonsense_goes_through() -> None:
    assert not is_finite(run("mean", "scan", guarded=False))
    assert (run("mean", "scan", guarded=False).history.rounds["rejected"] == 0).all()


def test_a_model_whose_clients_were_all_rejected_keeps_its_state() -> None:
    """With momentum, so that an update by a zero message would show."""
    end = run("mean", "scan")
    states = [evaluation.metrics["at"] for evaluation in end.history.evaluations]
    weight = end.history.rounds["model_weight"]
    emptied = (weight == 0) & (end.history.rounds["rejected"] > 0)
    assert emptied.any()
    for t, k in np.ndindex(9, 3):
        moved = any(not np.array_equal(a[k], b[k]) for a, b in zip(states[t], states[t + 1], strict=True))
        assert moved == (weight[t, k] > 0)


@pytest.mark.parametrize("how", ["inf", "explode"])
def test_other_nonsense_is_rejected_as_well(how: str) -> None:
    other = run("mean", "scan", how=how)
    assert np.array_equal(other.history.rounds["rejected"], run("mean", "scan").history.rounds["rejected"])
    assert all(
        np.array_equal(*pair) for pair in zip(leaves(other.state), leaves(run("mean", "scan").state), strict=True)
    )


def test_a_rejected_message_leaves_its_place_in_a_pool_empty() -> None:
    """And is not taken for one that found no place."""
    data: FederatedData = uneven_data(sizes=(2, 2, 2))

    aggregate = stack(2)
    schedule = fixed(3, 1, [(0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0)])
    local = visiting()

    def update(key: Any, broadcast: Any, visits: Any, client: Any) -> Any:
        message, after, info = local.update(key, broadcast, visits, client)
        sent = jax.tree.map(lambda leaf: jnp.where(client.id == 0, jnp.nan, leaf), message)
        return sent, after, info

    server = pooling()._replace(
        update=lambda params, pooled, info: (
            params,
            {"filled": pooled.filled, "beyond": pooled.beyond, "W": pooled.messages["b"].sum(axis=(1, 2))},
        )
    )
    algorithm = compose(
        "pool", two_layer(), local._replace(update=update), server, schedule, Parts(aggregate, accept=finite())
    )
    _, rounds = go(algorithm, data, "scan", 1, algorithm.init(0, 3))
    assert rounds["filled"].tolist() == [[2]]
    assert rounds["beyond"].tolist() == [[1]]  # client 2: its place is the third whatever the server accepts
    assert rounds["W"].tolist() == [[[0.0, 4.0]]]
