"""FedAvg and Fed-ensemble against NumPy loops written from the papers' algorithms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest

from fedtangent._src.engine.building import preview
from fedtangent._src.engine.description import describe
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import options_of
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import (
    all_clients,
    per_client_permutations,
    random_models,
    strata,
    uniform_sampling,
)
from fedtangent._src.streams import keys
from fedtangent._src.types import Cohort, FederatedData, Schedule

from ..nightly import nightly
from . import reference
from .replay import batches
from .toys import NUM_CLIENTS, SIZES, arguments_of, cohorts, distance, go, models_of, two_layer, uneven_data

SEED, RATE = 3, 0.2
MODEL = two_layer()
TOLERANCE, VISIBLE = 1e-10, 1e-4  # of a right loop; of a loop with one thing wrong

Models = list[reference.Params]


def independent_loops(schedule: Schedule, cohort: Cohort, models: Models, **how: object) -> Models:
    """Each model on its own is FedAvg on the clients selected for it."""
    return [
        reference.fed_avg(model, [chosen(cohort, t, k) for t in range(len(cohort.client))], **how)
        for k, model in enumerate(models)
    ]


def chosen(cohort: Cohort, t: int, k: int) -> list[int]:
    return [int(i) for i in cohort.client[t][(cohort.weight[t] > 0) & (cohort.model[t] == k)]]


def permutation_loop(schedule: Schedule, cohort: Cohort, models: Models, **how: object) -> Models:
    """FE-2024, algorithm 1 with the matrices P that the schedule drew."""
    K, rounds = len(models), len(cohort.client)
    permutations = np.full((-(-rounds // K), NUM_CLIENTS, K), -1)
    for t in range(rounds):
        permutations[t // K, cohort.client[t], t % K] = cohort.model[t]
    return reference.fed_ensemble_2024(models, rounds, permutations, **how)


def strata_loop(schedule: Schedule, cohort: Cohort, models: Models, **how: object) -> Models:
    """FE-2021, algorithm 1 with the strata, matrices P and selections that the schedule drew."""
    K, rounds = len(models), len(cohort.client)
    members = np.asarray(schedule.init(jax.random.split(keys(SEED).schedule)[0]))
    permutations = np.full((rounds // K, len(members), K), -1)
    selections = [[[] for _ in members] for _ in range(rounds)]
    for t, q in np.ndindex(rounds, len(members)):
        mine = (cohort.weight[t] > 0) & np.isin(cohort.client[t], members[q][members[q] >= 0])
        (permutations[t // K, q, t % K],) = np.unique(cohort.model[t][mine])  # one model for the whole stratum
        selections[t][q] = cohort.client[t][mine].tolist()
    return reference.fed_ensemble_2021(models, rounds // K, permutations, selections, **how)


def random_loop(schedule: Schedule, cohort: Cohort, models: Models, **how: object) -> Models:
    """Table VII: the models that the schedule drew for clients 0 .. N - 1."""
    assert (cohort.client == np.arange(NUM_CLIENTS)).all()
    return reference.fed_ensemble_random(models, list(cohort.model), **how)


class Case(NamedTuple):
    recipe: str
    schedule: Schedule
    loop: Callable[..., Models]
    rounds: int
    work: Work = Work(steps=4, batch_size=None)
    weighting: str = "examples"
    server_rate: float = 1.0
    loss: str = "squared_error"


CASES = {
    "ensemble_of_one": Case("fed_ensemble", uniform_sampling(6, 3), independent_loops, 5),  # it is FedAvg
    "sampling_minibatches_uniform": Case(
        "fed_avg", uniform_sampling(6, 4), independent_loops, 4, Work(epochs=2, batch_size=2), "uniform", 0.5
    ),
    "all_clients_three_models": Case("fed_ensemble", all_clients(6, 3), independent_loops, 2),
    "permutations_minibatches": Case(
        "fed_ensemble", per_client_permutations(6, 2), permutation_loop, 4, Work(steps=5, batch_size=2)
    ),
    "permutations_more_models_than_clients": Case(
        "fed_ensemble", per_client_permutations(6, 8), permutation_loop, 9, Work(epochs=3, batch_size=None), "uniform"
    ),
    "strata_uneven": Case("fed_ensemble", strata(6, 2, 4), strata_loop, 4, server_rate=1.5),
    "strata_partial_minibatches_uniform": Case(
        "fed_ensemble", strata(6, 3, 4, 1), strata_loop, 6, Work(epochs=1, batch_size=4), "uniform", 0.7
    ),
    "random_models": Case("fed_ensemble", random_models(6, 4), random_loop, 5, loss="cross_entropy"),
}


def case_data(case: Case) -> FederatedData:
    return uneven_data(labels=case.loss == "cross_entropy")


@functools.cache
def simulated(name: str) -> tuple[Models, Models]:
    """The models before and after a run of the engine."""
    case = CASES[name]
    algorithm = getattr(algorithms, case.recipe)(
        MODEL,
        case.schedule,
        client_learning_rate=RATE,
        work=case.work,
        loss=case.loss,
        averaging=Averaging(server_learning_rate=case.server_rate, weighting=case.weighting),
    )
    start = algorithm.init(SEED, NUM_CLIENTS)
    end, _ = go(algorithm, case_data(case), "scan", case.rounds, start)
    return models_of(algorithm, start), models_of(algorithm, end)


@functools.cache
def drawn(name: str) -> Cohort:
    """The cohorts of a case's run."""
    return cohorts(CASES[name].schedule, SEED, CASES[name].rounds)


def replayed(name: str, fault: str = "none") -> Models:
    """The models after the NumPy loop, with one thing wrong if asked."""
    case = CASES[name]
    data, of_clients = case_data(case), batches(case.work, case.rounds)
    x, y = np.asarray(data.x), np.asarray(data.y)

    def train(t: int, i: int, params: reference.Params) -> reference.Params:
        rows = of_clients[t, i][:-1] if fault == "steps" else of_clients[t, i]
        return reference.sgd(params, x, y, rows, RATE, case.loss)

    def weight(i: int) -> float:
        by_examples = (case.weighting == "examples") != (fault == "weights")
        return SIZES[i] if by_examples else 1

    cohort = wrongly_assigned(drawn(name), case) if fault == "assignment" else drawn(name)
    rate = 1.1 * case.server_rate if fault == "server_rate" else case.server_rate
    return case.loop(case.schedule, cohort, simulated(name)[0], train=train, weight=weight, rate=rate)


def wrongly_assigned(cohort: Cohort, case: Case) -> Cohort:
    """Models 0 and 1 exchanged; where every client trains every model, client 0 left out of the last round."""
    if case.loop is not independent_loops:
        swapped = np.arange(case.schedule.num_models)
        swapped[:2] = 1, 0
        return cohort._replace(model=swapped[cohort.model])
    dropped = cohort.weight.copy()
    dropped[-1, 0] = 0
    return cohort._replace(weight=dropped)


DAILY = ("ensemble_of_one", "permutations_minibatches", "strata_partial_minibatches_uniform")


@pytest.mark.parametrize("name", nightly(CASES, DAILY))
def test_equals_the_loop(name: str) -> None:
    start, end = simulated(name)
    assert distance(start, end) > 1e-2  # something was learnt
    assert distance(end, replayed(name)) < TOLERANCE


@pytest.mark.parametrize("fault", ["weights", "steps", "assignment", "server_rate"])
@pytest.mark.parametrize("name", nightly(CASES, DAILY))
def test_loop_with_one_thing_wrong_differs(name: str, fault: str) -> None:
    """By day of the runs that are also compared to the right loop by day."""
    assert distance(simulated(name)[1], replayed(name, fault)) > VISIBLE


def test_cases_have_partial_participation_empty_slots_and_unvisited_models() -> None:
    assert {c.schedule.num_slots for c in CASES.values()} == {3, 4, 6, 8, 18}
    assert np.sum(drawn("strata_partial_minibatches_uniform").weight[0] > 0) < NUM_CLIENTS
    assert np.any(drawn("strata_uneven").weight == 0)
    models_a_round = [len(np.unique(row)) for row in drawn("permutations_more_models_than_clients").model]
    assert max(models_a_round) < 8


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"client_learning_rate": 0.0}, "client_learning_rate"),
        ({"client_learning_rate": float("nan")}, "client_learning_rate"),
        ({"client_learning_rate": float("inf")}, "client_learning_rate"),
        ({"server_learning_rate": -1.0}, "server_learning_rate"),
        ({"loss": "hinge"}, "loss.*'hinge'.*squared_error, cross_entropy"),
        ({"weighting": "sizes"}, "weighting.*'sizes'.*examples, uniform"),
        ({"work": Work()}, "exactly one of steps and epochs"),
        ({"work": Work(steps=1, epochs=1, batch_size=None)}, "exactly one of steps and epochs"),
        ({"work": Work(steps=0, batch_size=None)}, "work.steps: got 0"),
        ({"work": Work(epochs=-1, batch_size=None)}, "work.epochs: got -1"),
        ({"work": Work(epochs=1, batch_size=0)}, "batch_size: got 0"),
    ],
)
@pytest.mark.parametrize("recipe", ["fed_avg", "fed_ensemble"])
def test_bad_arguments(recipe: str, changed: dict[str, object], named: str) -> None:
    arguments = {"client_learning_rate": 0.1, "work": Work(steps=1, batch_size=None)} | changed
    with pytest.raises(ValueError, match=named):
        getattr(algorithms, recipe)(MODEL, all_clients(6), **arguments_of(algorithms.fed_avg, arguments))


TRAINED = [name for name, entry in catalogue("algorithms").items() if hasattr(options_of(entry, None), "local_steps")]


@pytest.mark.parametrize("name", TRAINED)
def test_steps_alone_are_the_same_work_in_python_and_on_the_command_line(name: str) -> None:
    assert preview(describe(algorithm=name)).composition.training.work == DEFAULT_WORK == Work(None, 5, 16)
    work = preview(describe(algorithm=name, local_steps=10)).composition.training.work
    assert work == Work(steps=10)
    assert work != Work(steps=10, batch_size=None)  # control: a full batch would be another run
    assert preview(describe(algorithm=name, local_steps=10, batch_size=0)).composition.training.work == Work(
        10, None, None
    )


def test_the_command_line_trains_every_algorithm_of_local_steps() -> None:
    others = {"cp_ntk_fl", "fed_sgd", "ntk_dfl", "ntk_fl"}
    assert catalogue("algorithms").keys() - set(TRAINED) == others
