"""Schedules that ask clients about the models: against loops from the papers, their laws, bytes and refusals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import fedtangent as ft
from fedtangent._src import streams
from fedtangent._src.engine.building import build
from fedtangent._src.engine.clients import device_mesh, engine_for, scan_clients, sharded
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.history import charge
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import schedule as schedules
from fedtangent._src.types import Algorithm, Engine, FederatedData, Poll, Polled, PyTree, Schedule

from ..nightly import nightly
from . import reference_polling as loops
from .reference import Params
from .toys import (
    INPUTS,
    NUM_CLIENTS,
    OUTPUTS,
    SIZES,
    distance,
    go,
    models_of,
    owned_rows,
    two_layer,
    uneven_data,
)

ROUNDS, SEED = 4, 3
WORST = ft.schedules.power_of_choice(NUM_CLIENTS, 4, 2)
POLL = WORST.poll
ROUNDING, VISIBLE = 1e-10, 1e-4
UNIFORM = ft.Averaging(weighting="uniform")
WORK = ft.Work(steps=3, batch_size=None)


def algorithm_of(schedule: Schedule, averaging: ft.Averaging = UNIFORM, loss: str = "squared_error") -> Algorithm:
    return ft.fed_avg(two_layer(), schedule, 0.2, work=WORK, loss=loss, averaging=averaging)


def clients_of(data: FederatedData, loss: str = "squared_error") -> loops.Clients:
    x, y = np.asarray(data.x), np.asarray(data.y)
    return loops.Clients([(x[rows], y[rows]) for rows in owned_rows(data)], 3, 0.2, loss)


def candidates_of(algorithm: Algorithm, seed: int = SEED) -> list[list[int]]:
    """The clients that are asked in each round."""
    key, poll = algorithm.init(seed, NUM_CLIENTS).schedule_key, algorithm.schedule.poll
    sizes = jnp.asarray(SIZES, jnp.int32)
    asked = [poll.candidates(streams.apart(key, streams.CANDIDATES), jnp.int32(t), sizes) for t in range(ROUNDS)]
    return [clients.tolist() for clients in asked]


def uniforms_of(algorithm: Algorithm) -> list[np.ndarray]:
    key = algorithm.init(SEED, NUM_CLIENTS).schedule_key
    return [
        np.asarray(jax.random.uniform(jax.random.fold_in(key, t), (NUM_CLIENTS,), jnp.float32)) for t in range(ROUNDS)
    ]


Replay = Callable[[list[Params], loops.Clients, Algorithm, str], tuple[list[Params], list[Any]]]


class Case(NamedTuple):
    """A schedule, its loop, and the mistakes of the loop that must show."""

    schedule: Schedule
    replay: Replay
    wrong: tuple[str, ...]
    averaging: ft.Averaging = UNIFORM
    loss: str = "squared_error"


CASES = {
    "power_of_choice": Case(
        WORST,
        lambda models, clients, algorithm, wrong: loops.power_of_choice(
            models[0], clients, candidates_of(algorithm), 2, wrong
        ),
        ("smallest", "first", "by examples"),
        loss="cross_entropy",
    ),
    "gradient_norm_sampling": Case(
        ft.schedules.gradient_norm_sampling(NUM_CLIENTS, 3),
        lambda models, clients, algorithm, wrong: loops.optimal_sampling(
            models[0], clients, uniforms_of(algorithm), 3, wrong
        ),
        ("unweighted", "not inverse", "of the cohort"),
        ft.Averaging(),
    ),
    "best_fitting": Case(
        ft.schedules.best_fitting(NUM_CLIENTS, 3, 5),
        lambda models, clients, algorithm, wrong: loops.ifca(models, clients, candidates_of(algorithm), wrong),
        ("worst", "fixed", "by examples"),
    ),
    "assigned_by_loss": Case(
        ft.schedules.assigned_by_loss(NUM_CLIENTS, 2),
        lambda models, clients, algorithm, wrong: loops.assigned(
            models, clients, [range(NUM_CLIENTS)] * ROUNDS, "worst", wrong
        ),
        ("other", "always model 0"),
    ),
    "assigned_to_the_best": Case(
        ft.schedules.assigned_by_loss(NUM_CLIENTS, 2, 5, fit="best"),
        lambda models, clients, algorithm, wrong: loops.assigned(
            models, clients, candidates_of(algorithm), "best", wrong
        ),
        ("other",),
    ),
}


@functools.cache
def algorithms(name: str) -> Algorithm:
    case = CASES[name]
    return algorithm_of(case.schedule, case.averaging, case.loss)


@functools.cache
def data_of(name: str) -> FederatedData:
    return uneven_data(labels=CASES[name].loss == "cross_entropy")


@functools.cache
def ran(name: str, mapping: str = "scan") -> tuple[PyTree, PyTree]:
    algorithm = algorithms(name)
    return go(algorithm, data_of(name), mapping, ROUNDS, algorithm.init(SEED, NUM_CLIENTS))


@pytest.mark.parametrize("name", nightly(CASES, ["power_of_choice", "best_fitting", "assigned_by_loss"]))
def test_a_run_is_the_loop_of_its_paper(name: str) -> None:
    """Gradient norms and the best clients have daily tests of their own below."""
    case, algorithm = CASES[name], algorithms(name)
    start, clients = models_of(algorithm, algorithm.init(SEED, NUM_CLIENTS)), clients_of(data_of(name), case.loss)
    state, infos = ran(name)
    ends = models_of(algorithm, state)
    expected, history = case.replay(start, clients, algorithm, "")
    assert distance(ends, expected) < ROUNDING
    cohort = infos["cohort"]
    for t, chosen in enumerate(history):
        filled = cohort.weight[t] > 0
        if name == "best_fitting":
            assert cohort.model[t].tolist() == chosen
        elif name.startswith("assigned"):
            assert list(zip(cohort.client[t].tolist(), cohort.model[t].tolist(), strict=True)) == chosen
        else:
            assert sorted(cohort.client[t][filled].tolist()) == sorted(chosen)
    for wrong in case.wrong:
        assert distance(ends, case.replay(start, clients, algorithm, wrong)[0]) > VISIBLE, wrong


# ---- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mapping"), list(itertools.product(CASES, ("vmap", "chunked:2"))))
def test_the_mapping_does_not_change_the_run(name: str, mapping: str) -> None:
    """By day gradient norms are sampled of all clients at once below; ``engine/test_mapping.py`` has other rounds."""
    state, infos = ran(name, mapping)
    assert distance(state.server, ran(name)[0].server) < ROUNDING
    assert np.array_equal(infos["cohort"].client, ran(name)[1]["cohort"].client)
    assert np.array_equal(infos["cohort"].model, ran(name)[1]["cohort"].model)


@pytest.mark.parametrize("name", nightly(CASES, ["power_of_choice", "assigned_by_loss"]))
def test_stopping_and_continuing_does_not_change_a_bit(name: str) -> None:
    """By day of a choice of clients and of one of models."""
    algorithm, data = algorithms(name), data_of(name)
    half, _ = go(algorithm, data, "scan", ROUNDS // 2, algorithm.init(SEED, NUM_CLIENTS))
    assert distance(go(algorithm, data, "scan", ROUNDS // 2, half)[0], ran(name)[0]) == 0
    assert distance(half.server, ran(name)[0].server) > VISIBLE


def test_clients_answer_on_their_devices() -> None:
    algorithm, data = algorithms("best_fitting"), data_of("best_fitting")
    state, engine = algorithm.init(SEED, NUM_CLIENTS), engine_for(data, "scan")
    mesh = device_mesh(1)
    over_devices = Engine(sharded(scan_clients, mesh), engine.max_client_size, mesh)
    one, _ = go(algorithm, data, "scan", 1, state)  # the program of the runs above
    other = jax.jit(lambda s: algorithm.step(s, data, over_devices)[0])(state)
    assert distance(one.server, other.server) < ROUNDING
    assert distance(one.server, state.server) > VISIBLE


@pytest.mark.parametrize(
    "name", nightly(["power_of_choice", "best_fitting", "gradient_norm_sampling"], ["best_fitting"])
)
def test_the_order_of_candidates_and_cohort_does_not_change_the_run(name: str) -> None:
    schedule, order = CASES[name].schedule, np.random.default_rng(0).permutation
    poll = schedule.poll
    asked, slots = order(poll.num_candidates), order(schedule.num_slots)

    def choose(key: Any, state: PyTree, round_: Any, polled: Polled) -> Any:
        cohort, state = poll.choose(key, state, round_, polled)
        return jax.tree.map(lambda leaf: leaf[slots], cohort), state

    other = poll._replace(choose=choose)
    if name != "gradient_norm_sampling":  # which draws a number for each candidate in order
        other = other._replace(candidates=lambda *arguments: poll.candidates(*arguments)[asked])
    algorithm = algorithm_of(schedule._replace(poll=other), CASES[name].averaging, CASES[name].loss)
    state, infos = go(algorithm, data_of(name), "scan", ROUNDS, algorithm.init(SEED, NUM_CLIENTS))
    assert distance(state.server, ran(name)[0].server) < ROUNDING
    assert not np.array_equal(infos["cohort"].client, ran(name)[1]["cohort"].client)


@pytest.mark.slow
def test_the_laws_that_runs_rely_on() -> None:
    """Mapping, evaluation, resume, traces, another model, rate 0; for one schedule of one model and one of several."""

    @ft.recipe
    def by_loss(model: Any, schedule: Any, client_learning_rate: Any = None, num_models: int = 1) -> Algorithm:
        clients = schedule.num_clients
        plan = ft.schedules.power_of_choice(clients, 6, 4) if num_models == 1 else ft.schedules.best_fitting(clients, 2)
        return ft.fed_avg(model, plan, client_learning_rate, work=ft.Work(steps=2, batch_size=2))

    own = dict.fromkeys(("order", "absence"), "the schedule of the laws is replaced")  # both laws have tests here
    for num_models in (1, 2):
        found = ft.testing.check_laws(by_loss, client_learning_rate=0.2, num_models=num_models, exempt=own)
        laws = {law.name: law for law in found}
        assert [name for name, law in laws.items() if law.holds is None] == ["order", "absence", "theory"]
        assert "no cohort is known before training" in laws["theory"].why


# ---- draws and choices -----------------------------------------------------------------------------------------------


def test_candidates_are_drawn_by_size_without_replacement() -> None:
    """As ``numpy.random.choice(p=sizes, replace=False)``: the next one in proportion among those that are left."""
    sizes, count = np.array([3, 5, 0, 4]), 6000
    draw = ft.schedules.power_of_choice(4, 2, 1).poll.candidates
    keys = jax.random.split(jax.random.key(0), count)
    pairs = np.asarray(jax.vmap(lambda key: draw(key, jnp.int32(0), jnp.asarray(sizes, jnp.int32)))(keys))
    p = sizes / sizes.sum()
    law = {(i, j): p[i] * p[j] / (1 - p[i]) for i in range(4) for j in range(4) if i != j and p[i] * p[j] > 0}
    observed = [np.sum((pairs == pair).all(axis=1)) for pair in law]
    assert sum(observed) == count  # a client without examples is never asked while others are left
    assert stats.chisquare(observed, count * np.array(list(law.values()))).pvalue > 1e-3
    assert stats.chisquare(observed, np.full(len(law), count / len(law))).pvalue < 1e-9  # control: all alike
    replaced = np.array([p[i] * p[j] for i, j in law])
    assert stats.chisquare(observed, count * replaced / replaced.sum()).pvalue < 1e-9  # control: with replacement


@pytest.mark.parametrize("expected", [1, 3, 7, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chances_are_the_optimal_ones(expected: int, seed: int) -> None:
    """Of eq. 7, literally, and of ``min(1, c norm)`` with the c whose sum is right."""
    norms = np.random.default_rng(seed).exponential(size=8) ** 2
    found = np.asarray(schedules._chances(jnp.asarray(norms), expected))
    np.testing.assert_allclose(found, loops.chances(norms, expected), rtol=1e-12)
    c = optimize.brentq(lambda c: np.minimum(1, c * norms).sum() - expected, 0, 2 * expected / norms.min())
    np.testing.assert_allclose(found, np.minimum(1, c * norms), rtol=1e-9)
    plain = np.minimum(1, expected * norms / norms.sum())  # control: cut without giving the rest to the others
    assert expected == 8 or (abs(plain.sum() - expected) > 1e-3) == (found.max() == 1)


def test_chances_without_gradients_and_with_infinite_ones() -> None:
    chances = jax.jit(functools.partial(schedules._chances, expected=2))
    assert np.asarray(chances(jnp.array([0.0, 0.0, 3.0]))).tolist() == [0, 0, 1]
    assert np.asarray(chances(jnp.zeros(3))).tolist() == [0, 0, 0]
    draw = jax.jit(ft.schedules.gradient_norm_sampling(3, 2).poll.choose)
    values = jnp.array([[1.0, jnp.inf, jnp.inf]])
    cohort, _ = draw(jax.random.key(0), (), jnp.int32(0), Polled(jnp.arange(3, dtype=jnp.int32), jnp.ones(3), values))
    assert np.asarray(cohort.weight).tolist() == [0, 1, 1]


def test_gradient_norm_sampling_is_without_bias_and_of_the_variance_that_it_promises() -> None:
    """Over draws, a step of FedSGD is that of all clients; averaged by shares of the cohort it is not."""
    data = uneven_data()
    rate, engine = 0.3, engine_for(data, "vmap")
    full = ft.fed_sgd(two_layer(), ft.schedules.all_clients(NUM_CLIENTS), rate)
    schedule = ft.schedules.gradient_norm_sampling(NUM_CLIENTS, 2)
    start = full.init(SEED, NUM_CLIENTS).server.params
    flat = lambda tree: np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)], 1)  # noqa: E731

    def moves(algorithm: Algorithm, count: int) -> np.ndarray:
        state = algorithm.init(SEED, NUM_CLIENTS)
        keys = jax.random.split(jax.random.key(1), count)
        step = lambda key: algorithm.step(state._replace(schedule_key=key), data, engine)[0].server.params  # noqa: E731
        return flat(jax.tree.map(lambda leaf: leaf[:, 0], jax.jit(jax.vmap(step))(keys))) - flat(start)

    clients = clients_of(data)._replace(steps=1, rate=rate)
    shares = np.array(SIZES) / sum(SIZES)
    (model,) = models_of(full, full.init(SEED, NUM_CLIENTS))
    trained = [clients.train(i, model) for i in range(NUM_CLIENTS)]
    all_of_them = flat(
        {k: sum(p * (t[k] - model[k]) for p, t in zip(shares, trained, strict=True))[None] for k in model}
    )
    of_cohort = schedule._replace(poll=schedule.poll._replace(inverse_weights=False))
    means = {}
    for name, plan in {"right": schedule, "wrong": of_cohort}.items():
        found = moves(ft.fed_sgd(two_layer(), plan, rate), 3000)
        error = found.std(axis=0, ddof=1) / np.sqrt(len(found))
        means[name] = np.sqrt(np.mean(((found.mean(axis=0) - all_of_them) / error) ** 2))
        if name == "right":
            spread = np.mean(np.sum((found - all_of_them) ** 2, axis=1))
    assert means["right"] < 1.5 and means["wrong"] > 5, means
    norms = shares * [np.sqrt(sum(np.sum((model[k] - t[k]) ** 2) for k in model)) for t in trained]
    p, uniform = loops.chances(norms, 2), np.full(NUM_CLIENTS, 2 / NUM_CLIENTS)
    promised, alike = (np.sum((1 - q) / q * norms**2) for q in (p, uniform))
    assert abs(spread / promised - 1) < 0.1 and promised < 0.9 * alike, (spread, promised, alike)


@pytest.mark.parametrize(("fit", "fewer"), [("worst", 0), ("best", 2)])
def test_models_have_equally_many_clients_and_no_client_two_models(fit: str, fewer: int) -> None:
    choose = jax.jit(ft.schedules.assigned_by_loss(9, 4, 9 - fewer, fit).poll.choose)
    rng = np.random.default_rng(0)
    for t in range(4):
        polled = Polled(
            jnp.asarray(rng.permutation(9)[: 9 - fewer], jnp.int32),
            jnp.ones(9 - fewer),
            jnp.asarray(rng.normal(size=(4, 9 - fewer))),
        )
        cohort, _ = choose(jax.random.key(0), (), jnp.int32(t), polled)
        assert sorted(cohort.client.tolist()) == sorted(polled.client.tolist())
        counts = np.bincount(cohort.model, minlength=4)
        assert counts.max() - counts.min() <= 1
        assert counts[t] == counts.max()  # the first in turn
        losses = np.asarray(polled.value[t])
        wanted = int(polled.client[losses.argmin() if fit == "best" else losses.argmax()])
        assert cohort.model[cohort.client.tolist().index(wanted)] == t  # and it has its first choice


# ---- clients that are absent, and numbers that are not finite ------------------------------------------------------


def with_clients(sizes: tuple[int, ...], broken: int | None = None) -> FederatedData:
    data = uneven_data(sizes=sizes)
    if broken is not None:
        data = data._replace(y=data.y.at[np.asarray(owned_rows(data)[broken])].set(jnp.nan))
    return data


@pytest.mark.parametrize(
    "name", nightly(["power_of_choice", "gradient_norm", "best_fitting", "assigned_by_loss"], ["power_of_choice"])
)
def test_a_client_without_examples_is_never_chosen(name: str) -> None:
    data, entry = with_clients((3, 0, 2, 4, 0, 2)), catalogue("schedules")[name]
    schedule = entry.build(entry.options(), 6, 0)
    algorithm = algorithm_of(schedule, ft.Averaging())
    infos = go(algorithm, data, "scan", 3, algorithm.init(SEED, 6))[1]
    cohort = infos["cohort"]
    assert not np.isin(cohort.client[cohort.weight > 0], [1, 4]).any() and (cohort.weight > 0).any()
    assert infos["polled"].tolist() == [4, 4, 4]  # a client without examples has nothing to answer


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_the_largest() -> None:
    data = with_clients(SIZES, broken=2)
    accepting = ft.Averaging(weighting="uniform", accept=ft.faults.finite())
    algorithm = algorithm_of(ft.schedules.power_of_choice(6, 6, 2), accepting)
    state, infos = go(algorithm, data, "scan", 2, algorithm.init(SEED, 6))
    assert (infos["cohort"].client[:, 0] == 2).all() and infos["rejected"].tolist() == [[1], [1]]
    assert all(np.isfinite(leaf).all() for leaf in models_of(algorithm, state)[0].values())


def test_clients_that_were_chosen_may_drop_out() -> None:
    """The choice is that without faults, and the same clients are contacted."""
    plain, left = (
        jax.jit(schedule.poll.choose) for schedule in (WORST, ft.faults.stragglers(ft.faults.dropout(WORST, 0.5), 2))
    )
    state = ft.faults.stragglers(ft.faults.dropout(WORST, 0.5), 2).init(jax.random.key(0))
    absent = []
    for t in range(12):
        values = jnp.asarray(np.random.default_rng(t).normal(size=(1, 4)))
        asked = Polled(jnp.arange(4, dtype=jnp.int32), jnp.ones(4), values)
        chosen, _ = plain(jax.random.key(1), (), jnp.int32(t), asked)
        cohort, state = left(jax.random.key(1), state, jnp.int32(t), asked)
        assert sorted(cohort.client.tolist()) == sorted(chosen.client.tolist()) and int(state.contacted) == 2
        absent.append(int(jnp.sum(cohort.weight == 0)))
    assert 0 < sum(absent) < 24


# ---- bytes ----------------------------------------------------------------------------------------------------------


WEIGHTS = 8 * (INPUTS + 1 + OUTPUTS) * 4  # bytes of the network, in float64
ANSWER = 4


@pytest.mark.parametrize(
    ("name", "candidates", "chosen", "models", "answers"),
    [
        ("power_of_choice", 4, 2, 1, 1),
        ("best_fitting", 5, 5, 3, 1),
        ("assigned_by_loss", 6, 6, 2, 2),
    ],
)
def test_polls_are_charged(name: str, candidates: int, chosen: int, models: int, answers: int) -> None:
    """K models down to each candidate and its answers up; a candidate that trains has its model already."""
    algorithm, data = algorithms(name), data_of(name)
    cost = algorithm.cost(data, engine_for(data))
    up, down = charge(cost, ran(name)[1])
    assert up == ROUNDS * (chosen * WEIGHTS + candidates * answers * ANSWER)
    assert down == ROUNDS * candidates * models * WEIGHTS


def test_what_a_broadcast_holds_besides_the_parameters_is_charged_again() -> None:
    """SCAFFOLD's control variate; without a poll both are."""
    data = uneven_data()
    scaffold, drawn = (
        ft.scaffold(two_layer(), schedule, 0.1, WORK).cost(data, engine_for(data))
        for schedule in (CASES["power_of_choice"].schedule, ft.schedules.uniform_sampling(NUM_CLIENTS, 2))
    )
    assert (scaffold.downlink, scaffold.downlink_per_poll, scaffold.uplink_per_poll) == (WEIGHTS, WEIGHTS, ANSWER)
    assert (drawn.downlink, drawn.downlink_per_poll, drawn.uplink_per_poll) == (2 * WEIGHTS, 0, 0)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ft.schedules.drawn_cohorts(WORST, None, 3, weighting=None), r"schedule: got one that chooses clients"),
        (lambda: ft.faults.round_times(ft.faults.stragglers(WORST, 1), jax.random.key(0), 3), "schedule: got one that"),
        (lambda: ft.gossip(two_layer(), WORST, 0.1), "schedule: got one that chooses clients"),
        (lambda: ft.local_only(two_layer(), WORST, 0.1), "asks clients about global models, but local_only"),
        (
            lambda: ft.scaffold(two_layer(), ft.schedules.gradient_norm_sampling(6, 2), 0.1),
            "which the server of scaffold cannot use: choose another schedule",
        ),
        (
            lambda: ft.ntk_fl(two_layer(), ft.schedules.gradient_norm_sampling(6, 2), 0.1),
            "schedule: got one that divides messages by their probabilities .*, which ntk_fl cannot use",
        ),
        (lambda: ft.schedules.power_of_choice(6, 7, 2), "candidates: got 7, must be"),
        (lambda: ft.schedules.power_of_choice(6, 3, 4), "clients_per_round: got 4, must be"),
        (lambda: ft.schedules.gradient_norm_sampling(6, 0), "clients_per_round: got 0, must be"),
        (lambda: ft.schedules.best_fitting(6, 2, 7), "clients_per_round: got 7, must be"),
        (lambda: ft.schedules.best_fitting(6, 0), "num_models: got 0, must be"),
        (lambda: ft.schedules.assigned_by_loss(6, 2, fit="any"), "fit: got 'any', allowed are worst, best"),
        (lambda: ft.schedules.by_poll(1, 6, 2, POLL._replace(measure="x")), "measure: got 'x', allowed are loss"),
        (lambda: ft.schedules.by_poll(1, 3, 2, POLL), "num_candidates: got 4, must be"),
        (lambda: ft.schedules.by_poll(1, 3, 2, None), "poll: got None, must be a Poll"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_command_line_has_them_all() -> None:
    options = {"dataset": "digits", "num_train": 60, "num_test": 8, "num_clients": 6}
    for name, more in {
        "power_of_choice": {"candidates": 5, "clients_per_round": 2},
        "gradient_norm": {"clients_per_round": 2},
        "best_fitting": {"num_models": 3, "clients_per_round": 4},
        "assigned_by_loss": {"num_models": 3, "fit": "best"},
    }.items():
        built = build(describe(**options, schedule=name, **more)).algorithm.schedule
        asked = {"power_of_choice": 5, "best_fitting": 4}.get(name, 6)
        assert built.poll.num_candidates == asked and built.num_models == more.get("num_models", 1)
        assert built.num_slots == {"power_of_choice": 2, "best_fitting": 4}.get(name, 6)


def test_a_users_rule_may_keep_a_state() -> None:
    """The client that trained longest ago, among those whose loss is above the median."""

    def choose(key: Any, last: Any, round_: Any, polled: Polled) -> Any:
        loss = polled.value[0]
        client = jnp.argmin(jnp.where(loss >= jnp.median(loss), last, jnp.iinfo(jnp.int32).max))[None].astype(jnp.int32)
        return ft.types.Cohort(client, jnp.zeros_like(client), jnp.ones(1, jnp.float32)), last.at[client].set(
            round_ + 1
        )

    poll = ft.types.Poll(NUM_CLIENTS, lambda key, round_, sizes: jnp.arange(NUM_CLIENTS, dtype=jnp.int32), choose)
    schedule = ft.schedules.by_poll(1, NUM_CLIENTS, 1, poll, init=lambda key: jnp.zeros(NUM_CLIENTS, jnp.int32))
    assert isinstance(schedule.poll, Poll)
    algorithm = algorithm_of(schedule)
    state, infos = go(algorithm, uneven_data(), "scan", 8, algorithm.init(SEED, NUM_CLIENTS))
    client = infos["cohort"].client[:, 0]
    last = np.zeros(NUM_CLIENTS, int)
    last[client] = np.arange(8) + 1
    assert state.schedule.tolist() == last.tolist() and len(set(client)) > 1
