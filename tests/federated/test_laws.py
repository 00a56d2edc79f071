"""Laws that every algorithm keeps: one table of algorithms, checked against the algorithms."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.engine.clients import engine_for
from fedtangent.engine.history import Run
from fedtangent.engine.loop import run_chunk
from fedtangent.engine.run import simulate
from fedtangent.entries import catalogue
from fedtangent.federated.faults import dropout, finite
from fedtangent.types import Algorithm, FederatedData, PyTree, Schedule

from .algorithms import ALGORITHMS, NIGHTLY
from .toys import cohorts, counting, distance, federated, fixed, leaves, owned_rows, reordered, two_layer, uneven_data

ROUNDING = 1e-11  # float64; measured differences are below 1e-13, those of a broken law above VISIBLE
VISIBLE = 1e-4
SEED = 4
COMPILES: list[str] = []


def _listen(event: str, duration: float, **_: Any) -> None:
    if "backend_compile" in event:
        COMPILES.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def wherever_it_applies(law: str) -> pytest.MarkDecorator:
    """Every algorithm but those whose row says why the law does not apply."""
    names = [name for name, row in ALGORITHMS.items() if law not in row.exempt]
    marks = [pytest.mark.slow if name in NIGHTLY else () for name in names]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in zip(names, marks, strict=True)])


everywhere = wherever_it_applies("every other")


def test_exemptions_name_laws_and_reasons() -> None:
    for row in ALGORITHMS.values():
        assert set(row.exempt) <= {"rejection", "doubling"} and all(row.exempt.values())


def test_every_recipe_has_a_row() -> None:
    assert set(catalogue("algorithms")) == set(ALGORITHMS)


class Natural(NamedTuple):
    """A run on six clients, the state after each evaluated round, and what was traced and compiled for it."""

    algorithm: Algorithm
    run: Run
    states: dict[int, PyTree]
    calls: list[int]
    traces: int
    compiles: int


@functools.cache
def natural(name: str, mapping: str = "scan", rounds: int = 5, every: int = 2) -> Natural:
    """A first run; without arguments the third of its chunks of two rounds is incomplete."""
    model, calls = counting(two_layer())
    return go(ALGORITHMS[name].build(model, ALGORITHMS[name].schedule), calls, mapping, rounds, every)


def go(algorithm: Algorithm, calls: list[int], mapping: str, rounds: int, every: int, seed: int = SEED) -> Natural:
    before = len(calls)
    COMPILES.clear()
    run = simulate(algorithm, uneven_data(), rounds, seed, mapping, every, evaluate=lambda state: {"at": leaves(state)})
    states = {evaluation.round: evaluation.metrics["at"] for evaluation in run.history.evaluations}
    return Natural(algorithm, run, states, calls, len(calls) - before, len(COMPILES))


def shuffled_slots(schedule: Schedule) -> list[int]:
    return np.random.default_rng(0).permutation(schedule.num_slots).tolist()


@everywhere
def test_neither_the_mapping_nor_the_order_of_the_slots_changes_the_result(name: str) -> None:
    row, one = ALGORITHMS[name], natural(name, "scan")
    order = shuffled_slots(row.schedule)
    other = simulate(row.build(two_layer(), reordered(row.schedule, order)), uneven_data(), 5, SEED, "vmap")
    assert distance(one.run.state, other.state) < ROUNDING
    for mine, theirs in ((one.run.history.rounds[key], other.history.rounds[key]) for key in ("examples", "steps")):
        assert np.array_equal(mine[:, order], theirs)
    assert not np.array_equal(one.run.history.rounds["examples"], other.history.rounds["examples"])
    assert distance(one.states[0], one.states[2]) > VISIBLE


@everywhere
def test_the_evaluation_frequency_does_not_change_a_bit(name: str) -> None:
    seldom, often = natural(name), natural(name, rounds=6, every=1)
    assert (list(seldom.states), list(often.states)) == ([0, 2, 4, 5], [0, 1, 2, 3, 4, 5, 6])
    for round_, state in seldom.states.items():
        assert distance(state, often.states[round_]) == 0
    assert distance(seldom.states[4], often.states[3]) > VISIBLE
    recorded = [run.history.rounds["cohort"] for run in (seldom.run, often.run)]
    assert all(np.array_equal(a, b[:5]) for a, b in zip(*recorded, strict=True))


@everywhere
def test_stopping_and_continuing_does_not_change_a_bit(name: str) -> None:
    """``state`` is all that a run carries: the second half, started from the first half's state alone, is the same."""
    whole, data = natural(name), uneven_data()
    half = simulate(whole.algorithm, data, 2, SEED, "scan", evaluate_every=2)
    state, _ = run_chunk(whole.algorithm, engine_for(data, "scan"), 2, half.state, data, jnp.int32(2))
    assert distance(leaves(state), whole.states[4]) == 0


@everywhere
def test_traces_do_not_depend_on_the_number_of_rounds_and_a_second_run_compiles_nothing(name: str) -> None:
    first, longer = natural(name), natural(name, rounds=6, every=1)
    assert first.traces == longer.traces > 0
    assert first.compiles > 0
    go(first.algorithm, first.calls, "scan", 1, 2)  # the suite may have let go of what was compiled
    again, more = (go(first.algorithm, first.calls, "scan", rounds, 2, seed=8) for rounds in (5, 11))
    assert (again.compiles, more.compiles) == (0, 0)
    assert first.traces > again.traces == more.traces  # what is left: the shape of a message, for the ledger
    assert distance(first.states[4], again.states[4]) > VISIBLE  # another seed, another run


@everywhere
def test_a_run_draws_the_cohorts_that_unroll_shows(name: str) -> None:
    recorded, unrolled = natural(name).run.history.rounds["cohort"], cohorts(ALGORITHMS[name].schedule, SEED, 5)
    assert np.array_equal(recorded.client, unrolled.client)
    assert np.array_equal(recorded.model, unrolled.model)
    assert np.array_equal(recorded.weight > 0, unrolled.weight > 0)


PRESENT = [(0, 0, 1.0), (1, 1, 1.0), (2, 0, 1.0), (5, 1, 1.0), (6, 0, 1.0)]


def data_with_empty_and_broken_clients() -> FederatedData:
    """Eight clients: 4 and 7 (the last) hold nothing; the examples of 3, next to those of a small client, are NaN."""
    data = uneven_data(sizes=(3, 5, 1, 2, 0, 4, 6, 0))
    broken = owned_rows(data)[3]
    return data._replace(x=data.x.at[broken].set(jnp.nan), y=data.y.at[broken].set(jnp.nan))


def with_broken_clients(name: str, slots: list[tuple[int, int, float]], mapping: str, **options: Any) -> Run:
    algorithm = ALGORITHMS[name].build(two_layer(), fixed(8, 2, slots), **options)
    return simulate(algorithm, data_with_empty_and_broken_clients(), 2, SEED, mapping)


@functools.cache
def those_present(name: str) -> Run:
    return with_broken_clients(name, PRESENT, "scan")


@everywhere
def test_a_weight_of_zero_or_an_empty_client_is_as_absent(name: str) -> None:
    """Slots of weight 0 (a client whose data are NaN; a pair that also trains) and slots of clients without data.

    The run that has them trains them all at once (vmap), which is where they could leak.
    """
    absent = [(3, 0, 0.0), *PRESENT[:2], (0, 0, 0.0), (4, 0, 1.0), *PRESENT[2:], (7, 1, 1.0)]
    run, alone = with_broken_clients(name, absent, "vmap"), those_present(name)
    assert all(np.isfinite(leaf).all() for leaf in leaves(run.state.server))
    compared = ALGORITHMS[name].compared
    assert distance(compared(run.state), compared(alone.state)) < ROUNDING
    assert np.array_equal(run.history.rounds["model_weight"], alone.history.rounds["model_weight"])
    for ledger in ("uplink_bytes", "downlink_bytes"):
        sent = getattr(run.history.evaluations[-1], ledger)
        assert sent == getattr(alone.history.evaluations[-1], ledger)
        assert (sent > 0) == (ledger not in ALGORITHMS[name].nothing_on)


@wherever_it_applies("rejection")
def test_a_rejected_client_is_as_absent(name: str) -> None:
    """Client 3, whose data are NaN, sends NaN to model 0; trained all at once, which is where it could leak."""
    sent = [*PRESENT[:2], (3, 0, 1.0), *PRESENT[2:]]
    run, alone = with_broken_clients(name, sent, "vmap", accept=finite()), those_present(name)
    assert distance(run.state.server, alone.state.server) < ROUNDING
    assert np.array_equal(run.history.rounds["model_weight"], alone.history.rounds["model_weight"])
    assert run.history.rounds["rejected"].tolist() == [[1, 0]] * 2
    # It is charged all the same.
    assert run.history.evaluations[-1].uplink_bytes > alone.history.evaluations[-1].uplink_bytes > 0


def test_a_broken_client_that_is_not_rejected_shows() -> None:
    """Negative control of the two laws above."""
    sent = [*PRESENT[:2], (3, 0, 1.0), *PRESENT[2:]]
    unguarded = with_broken_clients("fed_avg", sent, "vmap")
    assert not distance(unguarded.state.server, those_present("fed_avg").state.server) < ROUNDING


@everywhere
def test_a_client_that_drops_out_is_as_absent(name: str) -> None:
    """Against rounds in which those that dropped out have no weight, which is as if they were not named."""
    model, data, slots = two_layer(), uneven_data(), [(i, i % 2, 1.0) for i in range(6)]
    faulty = dropout(fixed(6, 2, slots), 0.4)
    run = simulate(ALGORITHMS[name].build(model, faulty), data, 3, SEED, "vmap")
    algorithm = ALGORITHMS[name].build(model, fixed(6, 2, slots))
    step = jax.jit(algorithm.step, static_argnums=2)
    state, everybody = (algorithm.init(SEED, 6) for _ in range(2))
    for weight in run.history.rounds["cohort"].weight:
        left = [(client, model, float(w > 0)) for (client, model, _), w in zip(slots, weight, strict=True)]
        assert 0 < sum(w for _, _, w in left) < 6
        state, _ = step(state._replace(schedule=fixed(6, 2, left).init(SEED)), data, engine_for(data, "scan"))
        everybody, _ = step(everybody, data, engine_for(data, "scan"))
    compared = ALGORITHMS[name].compared
    assert distance(compared(run.state), compared(state)) < ROUNDING
    assert distance(compared(run.state), compared(everybody)) > VISIBLE
    assert (run.history.rounds["contacted"] == 6).all()


def twins(rows_of_last: int) -> FederatedData:
    """Clients 0, 1 and 2, where 2 holds the same examples as 1, and 3 those ``rows_of_last`` times."""
    data = uneven_data(sizes=(3, 5))
    a, b = owned_rows(data)
    return federated(np.asarray(data.x), np.asarray(data.y), [a, b, b, np.tile(b, rows_of_last)])


@wherever_it_applies("doubling")
def test_two_identical_clients_are_one_that_counts_twice(name: str) -> None:
    row = ALGORITHMS[name]
    copies, weight = (1, 2.0) if row.doubled == "weight" else (2, 1.0)
    data = twins(copies)
    algorithm = row.full_batch(two_layer(), fixed(4, 1, [(0, 0, 1.0)] * 3))
    step = jax.jit(algorithm.step, static_argnums=2)
    ends = []
    for slots in ([(0, 1.0), (1, 1.0), (2, 1.0)], [(0, 1.0), (3, weight), (0, 0.0)], [(0, 1.0), (1, 1.0), (0, 0.0)]):
        cohort = fixed(4, 1, [(client, 0, weight) for client, weight in slots]).init(jax.random.key(0))
        state = algorithm.init(SEED, 4)._replace(schedule=cohort)
        for _ in range(2):
            state, _ = step(state, data, engine_for(data, "scan"))
        ends.append(state.server)
    assert distance(ends[0], ends[1]) < ROUNDING
    assert distance(ends[0], ends[2]) > VISIBLE
