"""Laws that every algorithm keeps: each entry says how it is built for them, and which need not hold and why.

All laws of an algorithm share its programs, one for each mapping: cohorts are the schedule's state, and all data have
the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.history import at_start, charge
from fedtangent._src.engine.loop import all_finite, copied
from fedtangent._src.engine.run import Run, simulate
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.entry import AlgorithmEntry
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.faults import dropout, finite
from fedtangent._src.types import Algorithm, Array, Cohort, Cost, FederatedData, Key, Model, PyTree, Schedule

from ..nightly import nightly
from .laws import LAW_CLIENTS, LAWS, Laws
from .toys import INPUTS, OUTPUTS, cohorts, counting, distance, federated, go, leaves, two_layer

ROUNDING = 1e-11  # float64; measured differences are below 1e-13, those of a broken law above VISIBLE
VISIBLE = 1e-4
SEED = 4
ROUNDS = 6  # of a table of cohorts
LARGEST, HELD = 8, 33  # examples of the largest client, and of all together: alike in all data of the laws
RING = [((k + step) % LAW_CLIENTS, k) for k in range(LAW_CLIENTS) for step in (-1, 0, 1)]  # (client, model)
SHARED = [0, 1]  # rows that every client holds that holds anything
EXEMPTIONS = ("rejection", "doubling", "divergence", "units")  # laws that an algorithm may be exempt from
COMPILES: list[str] = []


def _listen(event: str, duration: float, **_: Any) -> None:
    if "backend_compile" in event:
        COMPILES.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


# ---- schedules whose cohorts are their state ----------------------------------------------------------------------


def table(slots: list[tuple[int, int, float]]) -> Cohort:
    """The same cohort in every round; ``slots`` are (client, model, weight). Arrays [R, S]."""
    client, model, weight = (np.tile(column, (ROUNDS, 1)) for column in zip(*slots, strict=True))
    return Cohort(*map(jnp.asarray, (client.astype(np.int32), model.astype(np.int32), weight.astype(np.float32))))


def drawn(kind: str, key: Key) -> Cohort:
    """Cohorts of ROUNDS rounds: one client trains both models, another drops out; or each model has one client."""
    client = jax.random.permutation(key, jnp.tile(jnp.arange(LAW_CLIENTS), (ROUNDS, 1)), axis=1, independent=True)
    if kind == "own":
        client = jnp.tile(jnp.arange(LAW_CLIENTS), (ROUNDS, 1))
        return Cohort(client, client, (jax.random.uniform(key, client.shape) < 0.8).astype(jnp.float32))
    if kind == "neighbours":
        near, model = (np.tile(np.array(column), (ROUNDS, 1)) for column in zip(*RING, strict=True))
        there = jax.random.uniform(key, (ROUNDS, LAW_CLIENTS)) < 0.8
        weight = jnp.take_along_axis(there, jnp.asarray(near), axis=1).astype(jnp.float32)
        return Cohort(jnp.asarray(near), jnp.asarray(model), weight)
    if kind == "one":
        return Cohort(client[:, :3], jnp.tile(jnp.arange(3), (ROUNDS, 1)), jnp.ones((ROUNDS, 3), jnp.float32))
    model = jax.random.bernoulli(key, 0.5, (ROUNDS, 6)).astype(jnp.int32)
    both = jnp.concatenate([client[:, :5], client[:, :1]], axis=1)
    model = model.at[:, 5].set(1 - model[:, 0])
    return Cohort(both, model, jnp.ones((ROUNDS, 6), jnp.float32).at[:, 2].set(0))


@functools.cache
def scheduled(kind: str) -> Schedule:
    sizes = {"many": (6, 2), "one": (3, 3), "own": (LAW_CLIENTS, LAW_CLIENTS), "neighbours": (len(RING), LAW_CLIENTS)}
    slots, models = sizes[kind]

    def init(key: Key) -> Cohort:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.int32) if leaf.dtype == int else leaf, drawn(kind, key))

    def sample(key: Key, state: Cohort, round_: Array) -> tuple[Cohort, Cohort]:
        return jax.tree.map(lambda leaf: leaf[round_ % ROUNDS], state), state

    return Schedule(models, LAW_CLIENTS, slots, init, sample)


# ---- data of one shape --------------------------------------------------------------------------------------------


@functools.cache
def examples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(HELD, INPUTS)), rng.normal(size=(HELD, OUTPUTS))


def holding(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """What each client holds: its own rows, and the shared ones if it has any."""
    ends = len(SHARED) + np.cumsum(sizes)
    return [
        np.array([*SHARED, *range(end - size, end)] if size else [], int) for size, end in zip(sizes, ends, strict=True)
    ]


@functools.cache
def natural_data(kind: str) -> FederatedData:
    """Uneven clients; 4 and 7 (the last) hold nothing, but where every client must."""
    return federated(
        *examples(), holding((2, 4, 1, 1, 1, 1, 6, 1) if kind in ("own", "neighbours") else (3, 5, 1, 2, 0, 4, 6, 0))
    )


@functools.cache
def broken_data(kind: str) -> FederatedData:
    """Those data, where the examples of client 3, next to those of a small client, are NaN."""
    data = natural_data(kind)
    mine = np.asarray(data.indices)[data.offsets[3] + len(SHARED) : data.offsets[4]]
    return data._replace(x=data.x.at[mine].set(jnp.nan), y=data.y.at[mine].set(jnp.nan))


@functools.cache
def twins(rows_of_last: int) -> FederatedData:
    """Clients 0, 1 and 2, where 2 holds the same examples as 1, and 3 those ``rows_of_last`` times; others besides.

    They are three, so that batches of three or more are all of them.
    """
    b = [*SHARED, 5]
    owned = [[*SHARED, 3, 4], b, b, b * rows_of_last, list(range(7, 7 + LARGEST))]
    rest = list(range(15, 15 + HELD - sum(map(len, owned))))
    owned += [rest[:LARGEST], rest[LARGEST:], []]
    return federated(*examples(), [np.array(rows, int) for rows in owned])


# ---- one algorithm ------------------------------------------------------------------------------------------------


class Natural(NamedTuple):
    """A run, the state after each evaluated round, and what was traced and compiled for it."""

    run: Run
    states: dict[int, PyTree]
    traces: int
    compiles: int


class Case:
    """An algorithm as its entry says that the laws want it, and runs that several laws look at."""

    def __init__(self, name: str) -> None:
        self.entry: AlgorithmEntry = catalogue("algorithms")[name]
        self.laws: Laws = LAWS[name]
        self.schedule = scheduled(self.laws.cohorts)
        self.model, self.calls = counting(two_layer())
        self.algorithm = self.build(self.model, self.laws.arguments)

    def build(self, model: Model, arguments: Any, **more: Any) -> Algorithm:
        """The algorithm; a test may trace its step three times: for two mappings, and for the memory it takes."""
        given = {"shared": SHARED}
        needs = {need: given[need] for need in self.entry.needs if need in given}
        given = needs | dict(arguments) | more
        if "rejection" not in self.laws.exempt:
            given |= self.guarded(given)
        assert self.entry.recipe is not None
        built = self.entry.recipe(model, self.schedule, **given)
        return built._replace(step=chex.assert_max_traces(built.step, n=3))

    def guarded(self, given: dict[str, Any]) -> dict[str, Any]:
        """The argument that makes the server count finite messages only."""
        if self.entry.sends == "Jacobians":
            return {"pooling": Pooling(accept=finite())}
        if self.entry.name == "centralised":
            return {"accept": finite()}
        return {"averaging": dataclasses.replace(given.get("averaging", Averaging()), accept=finite())}

    @functools.cached_property
    def exact(self) -> Algorithm:
        """The algorithm with which clients of the same examples send the same."""
        arguments = {**self.laws.arguments, **self.laws.exact}
        return self.build(two_layer(), arguments) if self.laws.exact else self.algorithm

    @functools.cached_property
    def start(self) -> PyTree:
        """The state before the first round; its buffers must not be given away."""
        return self.algorithm.init(SEED, LAW_CLIENTS)

    @functools.cached_property
    def cost(self) -> Cost:
        return self.algorithm.cost(self.data, engine_for(self.data, "scan"))

    @property
    def data(self) -> FederatedData:
        return natural_data(self.laws.cohorts)

    @functools.cached_property
    def seldom(self) -> Natural:
        """A run whose third chunk of two rounds is incomplete."""
        return self.simulated(5, 2)

    @functools.cached_property
    def often(self) -> Natural:
        return self.simulated(6, 1)

    def simulated(self, rounds: int, every: int, seed: int = SEED) -> Natural:
        before = len(self.calls)
        COMPILES.clear()
        run = simulate(
            self.algorithm,
            self.data,
            num_rounds=rounds,
            seed=seed,
            evaluation=Evaluation(every, lambda _, state: {"at": copied(state)}),
            devices=Devices("scan"),
        )
        states = {evaluation.round: evaluation.metrics["at"] for evaluation in run.history.evaluations}
        return Natural(run, states, len(self.calls) - before, len(COMPILES))


@functools.cache
def case_of(name: str) -> Case:
    return Case(name)


def trained(state: PyTree) -> PyTree:
    """What training makes of a state: all but the schedule's part."""
    return state.server, state.client, state.channel


@pytest.fixture(autouse=True)
def _count_traces_anew() -> None:
    chex.clear_trace_counter()  # between tests the suite may let go of what was compiled


# By day a server, clients with a state of their own, and a graph; of the others the laws that compile nothing.
DAILY = ("fed_avg", "gossip", "scaffold")


@pytest.fixture(scope="module", params=nightly(catalogue("algorithms"), DAILY))
def case(request: pytest.FixtureRequest) -> Case:
    """Each algorithm; pytest runs all laws of one before those of the next."""
    return case_of(request.param)


@pytest.fixture(scope="module", params=list(catalogue("algorithms")))
def any_case(request: pytest.FixtureRequest) -> Case:
    """Each algorithm, also by day."""
    return case_of(request.param)


def applies(case: Case, law: str) -> None:
    """Skip a law from which the entry exempts its algorithm."""
    if law in case.laws.exempt:
        pytest.skip(case.laws.exempt[law])


def test_every_entry_can_be_tested_and_exemptions_name_laws_and_reasons() -> None:
    assert set(LAWS) == set(catalogue("algorithms"))
    for laws in LAWS.values():
        assert set(laws.exempt) <= set(EXEMPTIONS) and all(laws.exempt.values())
        assert laws.doubled in ("weight", "examples")


def test_all_data_of_the_laws_have_the_same_shapes() -> None:
    shapes = {
        tuple((leaf.shape, leaf.dtype) for leaf in data)
        for data in (natural_data("many"), natural_data("own"), broken_data("many"), twins(1), twins(2))
    }
    assert len(shapes) == 1


def test_neither_the_mapping_nor_the_order_of_the_slots_changes_the_result(case: Case) -> None:
    one = case.seldom.run
    order = np.random.default_rng(0).permutation(case.schedule.num_slots)
    reordered = jax.tree.map(lambda leaf: leaf[:, order], case.start.schedule)
    other, infos = go(case.algorithm, case.data, "vmap", 5, case.start, reordered)
    assert distance(trained(one.state), trained(other)) < ROUNDING
    recorded = one.history.rounds
    for name in {"examples", "steps"} & {key for key, leaf in infos.items() if np.shape(leaf)[1:] == order.shape}:
        assert np.array_equal(recorded[name][:, order], infos[name])
    assert not np.array_equal(recorded["examples"], infos["examples"])
    assert distance(trained(case.seldom.states[0]), trained(case.seldom.states[2])) > VISIBLE


def test_the_evaluation_frequency_does_not_change_a_bit(case: Case) -> None:
    seldom, often = case.seldom, case.often
    assert (list(seldom.states), list(often.states)) == ([0, 2, 4, 5], [0, 1, 2, 3, 4, 5, 6])
    for round_, state in seldom.states.items():
        assert distance(state, often.states[round_]) == 0
    assert distance(trained(seldom.states[4]), trained(often.states[3])) > VISIBLE
    recorded = [run.history.rounds["cohort"] for run in (seldom.run, often.run)]
    assert all(np.array_equal(a, b[:5]) for a, b in zip(*recorded, strict=True))


def test_stopping_and_continuing_does_not_change_a_bit(case: Case) -> None:
    """``state`` is all that a run carries: the second half, started from the first half's state alone, is the same."""
    half, _ = go(case.algorithm, case.data, "scan", 2, case.start)
    state, _ = go(case.algorithm, case.data, "scan", 2, half)
    assert distance(state, case.seldom.states[4]) == 0


def test_traces_do_not_depend_on_the_number_of_rounds_and_a_second_run_compiles_nothing(case: Case) -> None:
    """The step itself may be traced three times in a test, which ``build`` asserts."""
    case.simulated(1, 2)  # the suite may have let go of what was compiled
    again, more = (case.simulated(rounds, 2, seed=8) for rounds in (5, 11))
    assert (again.compiles, more.compiles) == (0, 0)
    assert again.traces == more.traces  # what is left: the shape of a message, for the ledger
    assert distance(trained(case.seldom.states[4]), trained(again.states[4])) > VISIBLE  # another seed, another run


def test_a_prediction_depends_on_its_point_alone(case: Case) -> None:
    """Not on the other points, their number or their order: no statistic of a batch of points enters it."""
    state, x = case.seldom.run.state, np.asarray(case.data.x)
    others = np.concatenate([100 * x[3:] - 7, x[:3]])
    whole = case.algorithm.predict(state, x)
    for at, points in (([0, 1, 2], x[:3]), ([2], x[2:3]), ([2, 0], x[[2, 0]]), ([0, 1, 2], others)):
        few = case.algorithm.predict(state, points)
        assert distance(few.mean[-len(at) :], whole.mean[np.array(at)]) < ROUNDING
        assert distance(few.members[:, -len(at) :], whole.members[:, np.array(at)]) < ROUNDING
    assert distance(whole.mean[0], whole.mean[1]) > VISIBLE  # control: points differ


def test_float32_stays_float32(any_case: Case) -> None:
    """A round of a float32 model changes no dtype of the state, whatever numbers in float64 the recipe was given."""
    case = any_case
    algorithm = case.build(two_layer(jnp.float32), case.laws.arguments)
    data = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, case.data)
    step = functools.partial(algorithm.step, data=data, engine=engine_for(data, "scan"))
    before = jax.eval_shape(lambda: algorithm.init(SEED, LAW_CLIENTS))
    after = jax.eval_shape(step, before)[0]
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]
    assert np.dtype(float) not in {leaf.dtype for leaf in jax.tree.leaves(trained(after))}
    start = jax.eval_shape(lambda: case.algorithm.init(SEED, LAW_CLIENTS))
    wide = {leaf.dtype for leaf in jax.tree.leaves(trained(start))}
    assert np.dtype(float) in wide  # the control: a float64 model's state


def test_the_server_keeps_a_model_of_half_precision_in_float32(case: Case) -> None:
    """Clients compute in bfloat16; sums over rounds and clients lose no digits. Or the recipe refuses the dtype."""
    try:
        algorithm = case.build(two_layer(jnp.bfloat16), case.laws.arguments)
    except ValueError as error:
        assert "dtype: got 'bfloat16', allowed are" in str(error)
        return
    data = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, case.data)
    step = functools.partial(algorithm.step, data=data, engine=engine_for(data, "scan"))
    before = algorithm.init(SEED, LAW_CLIENTS)
    after = jax.eval_shape(step, before)[0]
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]
    assert jnp.bfloat16 not in {leaf.dtype for leaf in jax.tree.leaves(after.server)}
    if algorithm.params is not None:
        assert {leaf.dtype for leaf in jax.tree.leaves(algorithm.params(before))} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(algorithm.predict, before, data.x).mean.dtype == jnp.float32


def linear() -> Model:
    """``x W + b`` from 0 in float32: its updates have the unit of the targets."""

    def init(key: Key) -> PyTree:
        return {"W": jnp.zeros((INPUTS, OUTPUTS), jnp.float32), "b": jnp.zeros((1, OUTPUTS), jnp.float32)}

    return Model("linear", init, lambda params, x: x @ params["W"] + params["b"], None, OUTPUTS)


# By day a server of its own and clients with a state; the programs of the linear model serve this law alone.
IN_UNITS = ("cp_ntk_fl", "scaffold")


@pytest.mark.parametrize("name", nightly(LAWS, IN_UNITS))
def test_updates_of_another_unit_give_the_same_model_in_that_unit(name: str) -> None:
    """Gradients and updates times 2^-40 and 2^40, about 1e-12 and 1e12, in float32."""
    case = case_of(name)
    applies(case, "units")
    arguments, data = {**case.laws.arguments, **case.laws.linear}, case.data
    plain, models = case.build(linear(), arguments), {}
    for unit in (1.0, 2.0**-40, 2.0**40):
        changed = case.laws.in_units(unit)
        algorithm = case.build(linear(), {**arguments, **changed}) if changed else plain
        scaled = data._replace(x=data.x.astype(jnp.float32), y=(unit * data.y).astype(jnp.float32))
        state, _ = go(algorithm, scaled, "scan", 2, algorithm.init(SEED, LAW_CLIENTS))
        models[unit] = np.asarray(algorithm.predict(state, scaled.x).members, np.float64) / unit
    assert np.abs(models[1.0]).max() > VISIBLE
    for unit in (2.0**-40, 2.0**40):
        np.testing.assert_allclose(models[unit], models[1.0], rtol=0, atol=1e-6 * np.abs(models[1.0]).max())


def test_a_run_draws_the_cohorts_that_drawn_cohorts_shows(case: Case) -> None:
    recorded, unrolled = case.seldom.run.history.rounds["cohort"], cohorts(case.schedule, SEED, 5)
    assert np.array_equal(recorded.client, unrolled.client)
    assert np.array_equal(recorded.model, unrolled.model)
    sizes = np.diff(np.asarray(case.data.offsets))[unrolled.client]
    assert np.array_equal(recorded.weight > 0, (unrolled.weight > 0) & (sizes > 0))


# ---- clients that are absent --------------------------------------------------------------------------------------

PRESENT = {
    "many": [(0, 0, 1.0), (1, 1, 1.0), (2, 0, 1.0), (5, 1, 1.0), (6, 0, 1.0)],
    "one": [(0, 0, 1.0), (1, 1, 1.0)],
    "own": [(i, i, 1.0) for i in (0, 1, 2, 4, 5, 6, 7)],
    "neighbours": [(i, k, float(i != 3)) for i, k in RING if (i, k) != (3, 2)],
}
LAST = {"many": 0, "one": 2, "own": 3, "neighbours": 2}  # the model of the slot that stands last


def with_last(case: Case, client: int, weight: float, mapping: str, broken: bool = True) -> tuple[PyTree, PyTree]:
    """Two rounds of those present, and of one slot more."""
    kind = case.laws.cohorts
    data = broken_data(kind) if broken else natural_data(kind)
    slots = table([*PRESENT[kind], (client, LAST[kind], weight)])
    return go(case.algorithm, data, mapping, 2, case.start, slots)


@pytest.fixture(scope="module")
def alone(case: Case) -> tuple[PyTree, PyTree]:
    """A run of those present and of one slot that is empty; nobody's data are broken."""
    return with_last(case, 3, 0.0, "scan", broken=False)


def sent(case: Case, infos: PyTree) -> tuple[int, int]:
    """Bytes up and down, those before the first round too."""
    (first_up, first_down), (up, down) = at_start(case.cost), charge(case.cost, infos)
    return first_up + up, first_down + down


def test_a_weight_of_zero_or_an_empty_client_is_as_absent(case: Case, alone: tuple[PyTree, PyTree]) -> None:
    """A slot of weight 0 (of a client whose data are NaN, or of one that also trains), or of a client without data.

    The runs train all slots at once (vmap), which is where they could leak.
    """
    kind = case.laws.cohorts
    absent = [(3, 0.0)] if kind in ("own", "neighbours") else [(3, 0.0), (0, 0.0), (4, 1.0), (7, 1.0)]
    sizes = np.diff(np.asarray(case.data.offsets))
    of_model = [
        [client for client, k, weight in PRESENT[kind] if k == model and weight]
        for model in range(case.schedule.num_models)
    ]
    by_examples, uniform = (
        [float(sum(f(i) for i in ids)) for ids in of_model] for f in (lambda i: sizes[i], lambda i: 1)
    )
    assert alone[1]["model_weight"].tolist() in ([by_examples] * 2, [uniform] * 2)
    for client, weight in absent:
        state, infos = with_last(case, client, weight, "vmap")
        assert all(np.isfinite(leaf).all() for leaf in leaves(state.server))
        compared = [getattr(end, case.laws.compared) for end in (state, alone[0])]
        assert distance(*compared) < ROUNDING
        assert np.array_equal(infos["model_weight"], alone[1]["model_weight"])
        assert sent(case, infos) == sent(case, alone[1])
    for ledger, total in zip(("uplink_bytes", "downlink_bytes"), sent(case, alone[1]), strict=True):
        assert (total > 0) == (ledger not in case.laws.nothing_on)


def test_a_client_that_is_there_shows(case: Case, alone: tuple[PyTree, PyTree]) -> None:
    """Negative control of the law above, in the same program: the last slot has a weight."""
    state, infos = with_last(case, 3, 1.0, "vmap", broken=False)
    compared = [getattr(end, case.laws.compared) for end in (state, alone[0])]
    assert distance(*compared) > VISIBLE
    assert infos["model_weight"].sum() > alone[1]["model_weight"].sum()


def test_a_rejected_client_is_as_absent(case: Case, alone: tuple[PyTree, PyTree]) -> None:
    """Client 3, whose data are NaN, sends NaN; trained all at once, which is where it could leak."""
    applies(case, "rejection")
    state, infos = with_last(case, 3, 1.0, "vmap")
    assert distance(state.server, alone[0].server) < ROUNDING
    assert np.array_equal(infos["model_weight"], alone[1]["model_weight"])
    assert np.array_equal(
        infos["rejected"], np.tile(np.arange(case.schedule.num_models) == LAST[case.laws.cohorts], (2, 1))
    )
    assert sent(case, infos)[0] > sent(case, alone[1])[0]  # it is charged all the same


@functools.cache
def with_dropouts(kind: str) -> tuple[Cohort, Cohort, Cohort]:
    """Cohorts of a schedule with drop-outs, of one that never named those who dropped out, and of everybody."""
    left, everybody = cohorts(dropout(scheduled(kind), 0.4), SEED, ROUNDS), cohorts(scheduled(kind), SEED, ROUNDS)
    there = left.weight > 0
    assert (there.any(axis=1) & (there != (everybody.weight > 0)).any(axis=1))[:4].sum() >= 2
    unnamed = Cohort(np.where(there, left.client, 0), np.where(there, left.model, 0), left.weight)
    order = np.argsort(~there, axis=1, kind="stable")
    unnamed = jax.tree.map(lambda leaf: np.take_along_axis(leaf, order, axis=1), unnamed)
    left, unnamed, everybody = (jax.tree.map(jnp.asarray, rows) for rows in (left, unnamed, everybody))
    return left, unnamed, everybody


def test_a_client_that_drops_out_is_as_absent(case: Case) -> None:
    """In every round others drop out, who come back with what they kept: as if the cohorts had not named them."""
    left, unnamed, everybody = with_dropouts(case.laws.cohorts)
    end = go(case.algorithm, case.data, "vmap", 4, case.start, left)[0]
    ends = [go(case.algorithm, case.data, "scan", 4, case.start, rows)[0] for rows in (unnamed, everybody)]
    assert distance(trained(end), trained(ends[0])) < ROUNDING
    assert distance(trained(end), trained(ends[1])) > VISIBLE


def test_a_schedule_with_dropouts_reaches_an_algorithm_by_its_cohorts_alone() -> None:
    case = case_of("scaffold")
    options = dict(case.laws.arguments)
    options |= case.guarded(options)
    run = simulate(
        case.entry.recipe(case.model, dropout(case.schedule, 0.4), **options),
        case.data,
        num_rounds=4,
        seed=SEED,
        devices=Devices("scan"),
    )
    left, _, everybody = with_dropouts(case.laws.cohorts)
    state, _ = go(case.algorithm, case.data, "scan", 4, case.start, left)
    assert distance(trained(run.state), trained(state)) < ROUNDING
    asked = (everybody.weight[:4] > 0) & (np.diff(case.data.offsets)[everybody.client[:4]] > 0)  # with examples
    assert (run.history.rounds["contacted"] == asked.sum(axis=1)).all()


def test_a_broken_client_that_is_not_rejected_shows() -> None:
    """Negative control of the rejection."""
    slots = table([*PRESENT["many"], (3, 0, 1.0)])
    guarded = case_of("fed_avg")
    unguarded = algorithms.fed_avg(two_layer(), guarded.schedule, **guarded.laws.arguments)
    both = (guarded.algorithm, unguarded)
    ends = [go(algorithm, broken_data("many"), "vmap", 2, guarded.start, slots)[0] for algorithm in both]
    assert np.isfinite(leaves(ends[0].server)[0]).all() and not np.isfinite(leaves(ends[1].server)[0]).all()


@pytest.mark.slow
def test_a_run_that_diverges_says_so(case: Case) -> None:
    """Whether it ends at its last good round or goes on; at a rate that lets the first round's steps overflow."""
    applies(case, "divergence")
    rate = "client_learning_rate" if "client_learning_rate" in case.laws.arguments else "learning_rate"
    needs = {"shared": SHARED} if "shared" in case.entry.needs else {}
    arguments = {**case.laws.arguments, **needs, **(case.laws.diverging or {rate: 1e200})}
    wild = case.entry.recipe(two_layer(), case.schedule, **arguments)
    through, ended = (
        simulate(
            wild,
            natural_data(case.laws.cohorts),
            num_rounds=3,
            evaluation=Evaluation(stop_on_divergence=stop),
            devices=Devices("scan"),
        )
        for stop in (False, True)
    )
    assert re.match(r"diverged by round \d$|unstable at round 1: ", through.status), through.status
    assert re.match(r"(diverged|unstable) at round \d", ended.status) and all_finite(ended.state), ended.status
    assert len(ended.history.rounds["examples"]) < len(through.history.rounds["examples"]) == 3
    assert case.seldom.run.status == "finished"  # the same at the rate of the other laws


# ---- clients that are alike ---------------------------------------------------------------------------------------


def test_two_identical_clients_are_one_that_counts_twice(case: Case) -> None:
    applies(case, "doubling")
    copies, weight = (1, 2.0) if case.laws.doubled == "weight" else (2, 1.0)
    nobody, places, ends = (0, 0, 0.0), case.schedule.num_slots, []
    for slots in ([(0, 1.0), (1, 1.0), (2, 1.0)], [(0, 1.0), (3, weight)], [(0, 1.0), (1, 1.0)]):
        rows = [(client, 0, weight) for client, weight in slots]
        beside = [(4, 1, 1.0)] if places > 3 else []  # another model, for those that mix models
        empty = [nobody] * (places - len(rows) - len(beside))
        state, _ = go(case.exact, twins(copies), "scan", 2, case.start, table(rows + beside + empty))
        ends.append(state.server)
    assert distance(ends[0], ends[1]) < ROUNDING
    assert distance(ends[0], ends[2]) > VISIBLE
