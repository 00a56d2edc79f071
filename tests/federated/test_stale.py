"""FedAsync and FedBuff against NumPy loops written from the papers, and the law of the delays that they draw."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src import streams
from fedtangent._src.comparison.followed import rule_of
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.stale import Staleness
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations, uniform_sampling
from fedtangent._src.types import Partition

from ..nightly import nightly
from . import reference
from .reference_corrected import Clients, Selections, plus, zeros
from .replay import MODEL, SEED, TOLERANCE, VISIBLE, batches
from .toys import SIZES, cohorts, distance, fixed, go, models_of, uneven_data

FULL, PASSES = Work(steps=3, batch_size=None), Work(epochs=2, batch_size=2)
SPEEDS = np.array(
    [[0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]]
)


def fed_async(
    x: reference.Params,
    selections: Selections,
    clients: Clients,
    delays: Any,
    s: Any,
    alpha: float,
    rho: float,
    wrong: str,
) -> reference.Params:
    """Xie et al., 2019, algorithm 1: one client a round, ``x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new``."""
    past = [x]
    for t, chosen in enumerate(selections):
        for i in chosen:
            tau = max(t - delays[t, i] - (wrong == "older"), 0)
            start = past[tau]

            def pull(v: reference.Params, start: reference.Params = start) -> reference.Params:
                return {name: rho * (v[name] - start[name]) for name in v}

            new = clients.train(t, i, start, (lambda v: {}) if wrong == "no_prox" else pull)[0]
            alpha_t = alpha * (1 if wrong == "no_discount" else s(t - tau))
            before = past[tau] if wrong == "update" else past[t]
            past.append({name: (1 - alpha_t) * past[t][name] + alpha_t * (new[name] - before[name] + past[t][name])
                         for name in x})  # fmt: skip
        if not chosen:
            past.append(past[t])
    return past[-1]


def fed_buff(
    w: reference.Params, selections: Selections, clients: Clients, delays: Any, s: Any, eta: float, wrong: str
) -> reference.Params:
    """Nguyen et al., 2022, algorithm 1: a buffer of K updates, each weighted by its staleness, is one server step."""
    past = [w]
    for t, chosen in enumerate(selections):
        buffer = zeros(w)
        for i in chosen:
            tau = max(t - delays[t, i] - (wrong == "older"), 0)
            update = plus(clients.train(t, i, past[tau])[0], past[t if wrong == "model" else tau], -1)
            buffer = plus(buffer, update, 1 if wrong == "no_discount" else s(t - tau))
        past.append(plus(past[t], buffer, eta / max(1 if wrong == "sum" else len(chosen), 1)))
    return past[-1]


class Late(NamedTuple):
    """The options of a run, the loop with the same ones, and the mistakes that must show."""

    staleness: Staleness
    schedule: Any
    work: Work
    loop: Any
    how: dict[str, Any]
    wrong: tuple[str, ...]


CASES = {
    "fed_async": Late(
        Staleness(probabilities=SPEEDS, mu=0.4),
        uniform_sampling(6, 1),
        PASSES,
        fed_async,
        {"s": lambda d: (d + 1) ** -0.5, "alpha": 0.6, "rho": 0.4},
        ("older", "no_prox", "no_discount", "update"),
    ),
    "fed_buff": Late(
        Staleness(2, buffered=True, discount="hinge", discount_rate=3.0, grace=1),
        uniform_sampling(6, 4),
        FULL,
        fed_buff,
        {"s": lambda d: 1.0 if d <= 1 else 1 / (3.0 * (d - 1) + 1), "eta": 0.6},
        ("older", "no_discount", "model", "sum"),
    ),
    "fed_buff_ensemble": Late(
        Staleness((0, 1, 2, 0, 3, 1), buffered=True, discount="constant"),
        per_client_permutations(6, 2),
        FULL,
        fed_buff,
        {"s": lambda d: 1.0, "eta": 0.6},
        ("older", "model"),
    ),
}
ROUNDS = 6


@pytest.mark.parametrize("name", nightly(CASES, ["fed_async", "fed_buff_ensemble"]))
def test_a_run_is_the_loop_of_the_paper(name: str) -> None:
    """By day without a buffer, and with one of an ensemble."""
    case, data = CASES[name], uneven_data()
    averaging = ft.Averaging(server_learning_rate=0.6)
    options = {"client_learning_rate": 0.2, "work": case.work, "staleness": case.staleness, "averaging": averaging}
    algorithm = algorithms.fed_async(MODEL, case.schedule, **options)
    start = algorithm.init(SEED, len(SIZES))
    state, infos = go(algorithm, data, "scan", ROUNDS, start)
    cohort = cohorts(case.schedule, SEED, ROUNDS)
    table = {
        (t, int(i)): int(d) for t in range(ROUNDS) for i, d in zip(cohort.client[t], infos["delay"][t], strict=True)
    }
    assert max(table.values()) >= 2 and all(d <= t for (t, _), d in table.items())
    drawn = rule_of(algorithm, Partition(np.asarray(data.indices), np.asarray(data.offsets)), ROUNDS, SEED).delays
    assert np.array_equal(np.minimum(drawn, np.arange(ROUNDS)[:, None]), infos["delay"])  # what theory follows
    clients = Clients(np.asarray(data.x), np.asarray(data.y), batches(case.work, ROUNDS), lambda t: 0.2)
    for k, (first, last) in enumerate(zip(models_of(algorithm, start), models_of(algorithm, state), strict=True)):
        mine = (cohort.weight > 0) & (cohort.model == k)
        selections = [cohort.client[t][mine[t]].tolist() for t in range(ROUNDS)]

        right, *wrong = (case.loop(first, selections, clients, table, **case.how, wrong=w) for w in ("", *case.wrong))
        assert distance(last, right) < TOLERANCE
        assert min(distance(last, other) for other in wrong) > VISIBLE


def test_delays_follow_their_law_and_depend_on_the_client_and_the_round_alone() -> None:
    rule = algorithms.fed_async(
        MODEL, uniform_sampling(6, 2), client_learning_rate=0.2, staleness=Staleness(probabilities=SPEEDS)
    ).rule
    everyone, train = np.tile(np.arange(6), (2000, 1)), streams.keys(1).train
    delays = rule["delays"](train, everyone)
    shares = np.stack([(delays == d).mean(axis=0) for d in range(3)], axis=1)
    error = np.sqrt(SPEEDS * (1 - SPEEDS) / 2000)
    assert np.all(np.abs(shares - SPEEDS) <= 4 * error)  # exactly 0 and 1 where the law says so
    assert np.array_equal(rule["delays"](train, everyone[:, [3, 1]]), delays[:, [3, 1]])
    assert abs(np.corrcoef(delays[:, 1], delays[:, 4])[0, 1]) < 4 / np.sqrt(2000)
    assert not np.array_equal(rule["delays"](streams.keys(2).train, everyone), delays)


def test_speeds_become_delays() -> None:
    """Against draws of the times themselves."""
    rng, mean = np.random.default_rng(0), np.array([0.5, 1.5])
    times = {
        "exponential": rng.exponential(mean, (40_000, 2)),
        "lognormal": mean * np.exp(0.7 * rng.standard_normal((40_000, 2)) - 0.7**2 / 2),
    }
    for distribution, drawn in times.items():
        delays = np.minimum(np.floor(drawn), 3)
        shares = np.stack([(delays == d).mean(axis=0) for d in range(4)], axis=1)
        law = ft.faults.delay_probabilities(mean, 3, distribution, spread=0.7)
        np.testing.assert_allclose(law.sum(axis=1), 1, rtol=1e-12)
        assert np.max(np.abs(law - shares)) < 4 * 0.5 / np.sqrt(40_000)
        assert np.max(np.abs(ft.faults.delay_probabilities(mean[::-1], 3, distribution, 0.7) - shares)) > 0.1
    assert ft.faults.delay_probabilities(2.0, 0).tolist() == [1.0]


@pytest.mark.parametrize("which", nightly(["mixed", "both"], ["mixed"]))
def test_without_delay_both_are_fed_avg(which: str) -> None:
    """Mixing fresh models is adding fresh updates; with delay 1 all three differ. By day of mixed models."""
    plan, data, ends = uniform_sampling(6, 4), uneven_data(), []
    kinds = (False,) if which == "mixed" else (False, True)
    late = [Staleness(delay, buffered=buffered) for delay in (0, 1) for buffered in kinds]
    fed_avg = algorithms.fed_avg(MODEL, plan, 0.2, FULL, averaging=ft.Averaging(weighting="uniform"))
    for algorithm in (fed_avg, *(algorithms.fed_async(MODEL, plan, 0.2, FULL, staleness) for staleness in late)):
        state, _ = go(algorithm, data, "scan", 3, algorithm.init(SEED, 6))
        ends.append(algorithm.params(state))
    fresh, delayed = ends[1 : 1 + len(kinds)], ends[1 + len(kinds) :]
    assert max(distance(ends[0], end) for end in fresh) < 1e-13
    assert min(distance(*pair) for pair in itertools.combinations([ends[0], *delayed], 2)) > VISIBLE


def test_a_round_without_an_answer_makes_the_models_a_round_older() -> None:
    """Client 0 answers in rounds 0 and 2 only, always to the model of two rounds ago."""

    def sample(key: Any, state: Any, round_: Any) -> Any:
        cohort, state = plan.sample(key, state, round_)
        return cohort._replace(weight=cohort.weight * (round_ % 2 == 0)), state

    plan = fixed(6, 1, [(1, 0, 1.0)])
    options = {"client_learning_rate": 0.2, "work": FULL, "staleness": Staleness(2, buffered=True, discount="constant")}
    algorithm = algorithms.fed_async(MODEL, plan._replace(sample=sample), **options)
    start = algorithm.init(SEED, 6)
    past = [jax.tree.map(lambda leaf: np.asarray(leaf[0]), start.server)]
    for rounds in (1, 2, 3):
        state, _ = go(algorithm, uneven_data(), "scan", rounds, start)
        past.append(jax.tree.map(lambda leaf: np.asarray(leaf[0]), state.server))
    newest = [{name: leaf[0] for name, leaf in models.items()} for models in past]
    assert distance(newest[1], newest[2]) == 0 and distance(newest[2], newest[3]) > VISIBLE
    for age in range(3):
        assert distance({name: leaf[age] for name, leaf in past[3].items()}, newest[3 - age]) == 0
    # twice the same update, to the initial model
    steps = [plus(newest[r + 1], newest[r], -1) for r in (0, 2)]
    assert distance(*steps) < 1e-13


def test_a_client_receives_one_model() -> None:
    data = uneven_data()
    fed_avg, late = (
        recipe(MODEL, uniform_sampling(6, 4), client_learning_rate=0.2, **options).cost(data, engine_for(data, "scan"))
        for recipe, options in ((algorithms.fed_avg, {}), (algorithms.fed_async, {"staleness": Staleness(3)}))
    )
    assert late == fed_avg


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "delay": ({"delay": -1}, r"delay: got -1, must be whole numbers from 0 to 1000"),
    "half": ({"delay": 1.5}, r"delay: got 1\.5, must be whole numbers from 0 to 1000"),
    "far": ({"delay": 2**31}, r"delay: got 2147483648, must be whole numbers from 0 to 1000"),
    "text": ({"delay": "two"}, r"delay: got 'two', must be a real number"),
    "clients": ({"delay": (1, 2)}, r"delay: got shape \(2,\), must be one number or one per client, \[6\]"),
    "buffered": ({"buffered": "yes"}, r"buffered: got 'yes', must be True or False"),
    "discount": ({"discount": "linear"}, r"discount: got 'linear', allowed are constant, polynomial, hinge"),
    "rate": ({"discount_rate": -0.5}, r"discount_rate: got -0\.5, must be at least 0"),
    "mu": ({"mu": -1.0}, r"mu: got -1\.0, must be at least 0"),
    "sum": ({"probabilities": (0.5, 0.4)}, r"probabilities: got \(0\.5, 0\.4\), must be at least 0 and sum to 1"),
    "negative": ({"probabilities": (1.5, -0.5)}, r"probabilities: got \(1\.5, -0\.5\), must be at least 0 and sum"),
    "rows": (
        {"probabilities": np.ones((2, 1))},
        r"probabilities: got shape \(2, 1\), must be \[D \+ 1\] for .*, or one row per client, \[6, D \+ 1\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_delays_are_refused_in_one_line(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        algorithms.fed_async(
            MODEL, uniform_sampling(6, 4), client_learning_rate=0.2, work=FULL, staleness=Staleness(**options)
        )
    assert "\n" not in str(caught.value)


def test_other_bad_arguments_are_refused_in_one_line() -> None:
    plan = uniform_sampling(6, 4)
    with pytest.raises(ValueError, match="staleness: got 2, must be a Staleness"):
        algorithms.fed_async(MODEL, plan, client_learning_rate=0.2, staleness=2)
    with pytest.raises(ValueError, match=r"server_optimizer: got .*, but fed_async does not use it"):
        optimizer = ft.Averaging(server_optimizer=ft.optimizers.sgd(1.0))
        algorithms.fed_async(MODEL, plan, client_learning_rate=0.2, averaging=optimizer)
    for arguments, message in (
        ((0.0, 2), "mean_time: got 0.0, must be positive"),
        ((1.0, -1), "most: got -1, must be a whole number from 0 to 1000"),
        ((1.0, 2, "uniform"), "distribution: got 'uniform', allowed are lognormal, exponential"),
        ((1.0, 2, "lognormal", 0.0), "spread: got 0.0, must be above 0 and finite"),
    ):
        with pytest.raises(ValueError, match=message):
            ft.faults.delay_probabilities(*arguments)
