"""Who trains which model when: the laws of each schedule and the distributions of their draws."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedtangent._src.federated.schedule import (
    all_clients,
    drawn_cohorts,
    per_client_permutations,
    poisson_sampling,
    random_models,
    strata,
    uniform_sampling,
)
from fedtangent._src.streams import keys, schedule_keys
from fedtangent._src.types import Cohort, Key, Partition, Schedule

from .toys import cohorts

# A chi-square test passes above ACCEPT and a wrong law must fall below REJECT; draws are repeatable (fixed seed).
ACCEPT, REJECT = 1e-3, 1e-9
AGES = 1200

SCHEDULES: dict[str, Schedule] = {
    "all_clients": all_clients(7, 3),
    "uniform_sampling": uniform_sampling(7, 3),
    "per_client_permutations": per_client_permutations(7, 3),
    "random_models": random_models(7, 3),
    "strata": strata(7, 3, 2, 3),
    "strata_uneven": strata(7, 3, 3),
    "strata_uneven_partial": strata(7, 3, 3, 2),
    "strata_of_one": strata(7, 3, 7),
}


@functools.cache
def many(name: str, seed: int = 0) -> Cohort:
    """The cohorts of AGES ages."""
    return cohorts(SCHEDULES[name], seed, 3 * AGES)


def drawn(name: str, seed: int = 0) -> Cohort:
    """The cohorts of the first 12 rounds."""
    return Cohort(*(leaf[:12] for leaf in many(name, seed)))


def uniform_p_value(observed: list[int] | np.ndarray, cells: int) -> float:
    """p-value of a chi-square test that the outcomes 0 .. cells - 1 are equally likely."""
    return float(stats.chisquare(np.bincount(observed, minlength=cells)).pvalue)


def test_poisson_sampling_takes_each_client_by_itself_with_the_chance_given() -> None:
    """Rounds' sizes are binomial, and so are the rounds that each client is in."""
    rate, num_rounds = 0.2, 2000
    there = cohorts(poisson_sampling(7, rate), 0, num_rounds).weight > 0
    allowed = 4 * np.sqrt(rate * (1 - rate) / num_rounds)
    assert np.all(np.abs(there.mean(axis=0) - rate) < allowed) and allowed < rate / 4
    sizes = np.bincount(there.sum(axis=1), minlength=8)
    expected = num_rounds * stats.binom.pmf(np.arange(8), 7, rate)
    few = expected < 5
    observed, expected = (np.append(part[~few], part[few].sum()) for part in (sizes, expected))
    assert stats.chisquare(observed, expected).pvalue > ACCEPT


@pytest.mark.parametrize("name", SCHEDULES)
def test_shapes_ranges_and_types(name: str) -> None:
    schedule, cohort = SCHEDULES[name], drawn(name)
    assert all(leaf.shape == (12, schedule.num_slots) for leaf in cohort)
    assert cohort.client.dtype == cohort.model.dtype == np.int32
    assert set(np.unique(cohort.weight)) <= {0, 1}
    assert 0 <= cohort.client.min() <= cohort.client.max() < schedule.num_clients == 7
    assert 0 <= cohort.model.min() <= cohort.model.max() < schedule.num_models


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_client_trains_a_model_twice_in_a_round(name: str) -> None:
    for client, model, weight in zip(*drawn(name), strict=True):
        pairs = list(zip(client[weight > 0], model[weight > 0], strict=True))
        assert len(set(pairs)) == len(pairs) > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_cohorts_depend_on_the_seed(name: str) -> None:
    same = all(np.array_equal(a, b) for a, b in zip(drawn(name), drawn(name, seed=1), strict=True))
    assert same == (name == "all_clients")


def test_a_rebuilt_schedule_draws_the_same_and_a_shorter_run_the_first_rounds() -> None:
    short = cohorts(strata(7, 3, 3, 2), 0, 12)
    assert all(np.array_equal(a, b) for a, b in zip(drawn("strata_uneven_partial"), short, strict=True))


def test_all_clients_trains_every_pair_every_round() -> None:
    for client, model, weight in zip(*drawn("all_clients"), strict=True):
        assert sorted(zip(model, client, strict=True)) == list(itertools.product(range(3), range(7)))
        assert (weight == 1).all()


def each_model_once_an_age(cohort: Cohort, num_clients: int, K: int) -> bool:
    """In every K rounds from a multiple of K on, each client trains each of the K models exactly once."""
    for start in range(0, len(cohort.client) - K + 1, K):
        visits = np.zeros((num_clients, K), int)
        np.add.at(visits, (cohort.client[start : start + K], cohort.model[start : start + K]), 1)
        if not (visits == 1).all():
            return False
    return True


def test_permutations_train_every_model_once_on_every_client_in_an_age() -> None:
    assert each_model_once_an_age(drawn("per_client_permutations"), 7, 3)
    assert not each_model_once_an_age(drawn("random_models"), 7, 3)  # negative control


def permutation_codes(models: np.ndarray) -> np.ndarray:
    """Each row of ``models`` [..., K] as the number of its order among all K!."""
    orders = list(itertools.permutations(range(models.shape[-1])))
    return np.array([orders.index(tuple(row)) for row in models.reshape(-1, models.shape[-1])])


def test_permutations_are_uniform_and_renewed_every_age() -> None:
    model = many("per_client_permutations").model.reshape(AGES, 3, 7).transpose(2, 0, 1)  # [client, age, K]
    code = permutation_codes(model).reshape(7, AGES)
    assert uniform_p_value(code.ravel(), 6) > ACCEPT
    assert uniform_p_value((6 * code[0] + code[1]).ravel(), 36) > ACCEPT  # two clients are independent
    assert uniform_p_value((6 * code[0, :-1] + code[0, 1:]).ravel(), 36) > ACCEPT  # and so are two ages
    frozen, rotated = np.repeat(code[0, :1], AGES), permutation_codes((model[0, :, :1] + np.arange(3)) % 3)
    assert uniform_p_value(frozen, 6) < REJECT
    assert uniform_p_value(rotated, 6) < REJECT


def test_random_models_are_uniform_and_independent() -> None:
    model = many("random_models").model
    assert uniform_p_value(model.ravel(), 3) > ACCEPT
    assert uniform_p_value(3 * model[:, 0] + model[:, 1], 9) > ACCEPT
    assert uniform_p_value(3 * model[:-1, 0] + model[1:, 0], 9) > ACCEPT
    assert uniform_p_value(3 * model[:, 0] + model[:, 0], 9) < REJECT
    # Unlike a permutation: all K! orders are 3! / 3^3 of the ages.
    proper = np.mean([len(set(age)) == 3 for age in model[:, 0].reshape(AGES, 3)])
    assert abs(proper - 6 / 27) < 4 * math.sqrt(6 / 27 * 21 / 27 / AGES)


def test_uniform_sampling_draws_every_subset_equally() -> None:
    client = many("uniform_sampling").client
    subsets = {subset: i for i, subset in enumerate(itertools.combinations(range(7), 3))}
    code = np.array([subsets[tuple(sorted(row))] for row in client])
    assert uniform_p_value(code, 35) > ACCEPT
    biased = np.array([subsets[tuple(sorted({int(i) for i in row} | {0})[:3])] for row in client])
    assert uniform_p_value(biased, 35) < REJECT


def members_of(schedule: Schedule, seed: int = 0) -> list[set[int]]:
    """The strata that a run with ``seed`` draws."""
    table = np.asarray(schedule.init(jax.random.split(keys(seed).schedule)[0]))
    return [{int(i) for i in row if i >= 0} for row in table]


STRATA = [name for name in SCHEDULES if name.startswith("strata")]


@pytest.mark.parametrize("name", STRATA)
def test_strata_divide_the_clients_evenly(name: str) -> None:
    strata_ = members_of(SCHEDULES[name])
    assert sorted(itertools.chain(*strata_)) == list(range(7))
    sizes = [len(s) for s in strata_]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", STRATA)
def test_strata_train_every_model_once_in_an_age(name: str) -> None:
    """FE-2021, algorithm 1: row q of the matrix is a permutation, and all chosen clients of stratum q train P[q, r]."""
    cohort, strata_ = drawn(name), members_of(SCHEDULES[name])
    for start, q in itertools.product(range(0, 12, 3), range(len(strata_))):
        row = []
        for t in range(start, start + 3):
            mine = (cohort.weight[t] > 0) & np.isin(cohort.client[t], list(strata_[q]))
            row += np.unique(cohort.model[t][mine]).tolist()
        assert sorted(row) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "per_stratum"),
    [("strata", 3), ("strata_uneven", None), ("strata_uneven_partial", 2), ("strata_of_one", 1)],
)
def test_each_stratum_sends_its_number_of_clients_and_the_rest_are_empty_slots(
    name: str, per_stratum: int | None
) -> None:
    cohort, strata_ = drawn(name), members_of(SCHEDULES[name])
    wanted = [len(s) if per_stratum is None else per_stratum for s in strata_]
    for client, weight in zip(cohort.client, cohort.weight, strict=True):
        active = client[weight > 0].tolist()
        assert len(set(active)) == len(active)
        assert [len(s & set(active)) for s in strata_] == wanted
    assert np.all(np.sum(cohort.weight == 0, axis=1) == cohort.weight.shape[1] - sum(wanted))
    if name == "strata_uneven":
        assert cohort.weight.shape[1] - sum(wanted) == 2  # 9 slots, 7 clients


def test_strata_orders_and_selections_are_uniform() -> None:
    cohort, strata_ = many("strata"), members_of(SCHEDULES["strata"])
    codes, picks = [], []
    for members in strata_:
        mine = np.isin(cohort.client, list(members))
        assert (mine.sum(axis=1) == 3).all()
        models = cohort.model[mine].reshape(-1, 3)[:, 0].reshape(AGES, 3)
        codes.append(permutation_codes(models))
        subsets = {s: i for i, s in enumerate(itertools.combinations(sorted(members), 3))}
        picks.append(np.array([subsets[tuple(sorted(r))] for r in cohort.client[mine].reshape(-1, 3)]))
    assert uniform_p_value(6 * codes[0] + codes[1], 36) > ACCEPT
    assert uniform_p_value(6 * codes[0] + codes[0], 36) < REJECT
    large = int(np.argmax([len(s) for s in strata_]))
    assert len(strata_[large]) == 4
    assert uniform_p_value(picks[large], 4) > ACCEPT
    assert uniform_p_value(4 * picks[large][:-1] + picks[large][1:], 16) > ACCEPT  # drawn anew each round
    assert uniform_p_value(np.minimum(picks[large], 2), 4) < REJECT


def test_strata_are_drawn_at_random() -> None:
    """Over 1,500 seeds every client is equally likely in each place, and two clients share a stratum of 4 or of 3."""
    table = np.asarray(jax.vmap(SCHEDULES["strata"].init)(jax.random.split(jax.random.key(0), 1500)))
    first = table[:, 0, 0]
    assert uniform_p_value(first, 7) > ACCEPT
    assert uniform_p_value(np.minimum(first, 5), 7) < REJECT
    together = np.mean((table[:, 0] == 0).any(axis=1) == (table[:, 0] == 1).any(axis=1))
    expected = (4 * 3 + 3 * 2) / (7 * 6)
    assert abs(together - expected) < 4 * math.sqrt(expected * (1 - expected) / 1500)
    assert abs(together - 1 / 2) > 4 * math.sqrt(expected * (1 - expected) / 1500)  # not two independent coins


def test_cohorts_are_drawn_with_the_schedules_key() -> None:
    plan, seen = SCHEDULES["random_models"], drawn("random_models").model[:12]

    def by_hand(key: Key) -> list[list[int]]:
        init_key, sample_key = schedule_keys(key)
        return [plan.sample(sample_key, plan.init(init_key), jnp.int32(r))[0].model.tolist() for r in range(12)]

    assert by_hand(keys(0).schedule) == seen.tolist()
    assert by_hand(keys(0).train) != seen.tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: all_clients(0), "num_clients: got 0"),
        (lambda: all_clients(3, 0), "num_models: got 0, must be a whole number of at least 1"),
        (lambda: per_client_permutations(0, 2), "num_clients: got 0"),
        (lambda: per_client_permutations(3, -1), "num_models: got -1, must be a whole number of at least 1"),
        (lambda: random_models(-2, 2), "num_clients: got -2"),
        (lambda: random_models(3, 0), "num_models: got 0, must be a whole number of at least 1"),
        (lambda: uniform_sampling(0, 1), "num_clients: got 0"),
        (lambda: uniform_sampling(3, 0), "clients_per_round: got 0, must be a whole number from 1 to 3"),
        (lambda: uniform_sampling(3, 4), "clients_per_round: got 4, must be a whole number from 1 to 3"),
        (lambda: strata(0, 1, 1), "num_clients: got 0"),
        (lambda: strata(3, 0, 1), "num_models: got 0, must be a whole number of at least 1"),
        (lambda: strata(3, 2, 0), "num_strata: got 0, must be a whole number from 1 to 3"),
        (lambda: strata(3, 2, 4), "num_strata: got 4, must be a whole number from 1 to 3"),
        (lambda: strata(7, 2, 3, 0), "clients_per_stratum: got 0, must be a whole number from 1 to 2"),
        (lambda: strata(7, 2, 3, 3), "clients_per_stratum: got 3, must be a whole number from 1 to 2"),
        (lambda: strata(7, 2, 3, 4), "clients_per_stratum: got 4, must be a whole number from 1 to 2"),
    ],
)
def test_bad_arguments(build: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_limits_themselves_are_allowed() -> None:
    limits = (uniform_sampling(3, 3), strata(7, 2, 7, 1), strata(7, 2, 1, 7), strata(7, 2, 3, 2), all_clients(1))
    assert [schedule.num_slots for schedule in limits] == [3, 7, 7, 6, 1]


def test_drawn_cohorts_are_those_of_a_run():
    held = Partition(np.arange(15, dtype=np.int32), np.array([0, 1, 3, 6, 10, 15], np.int32))
    plan = uniform_sampling(5, 2)
    found = drawn_cohorts(plan, held, 4, seed=3)
    np.testing.assert_array_equal(found.weight, np.asarray(held.sizes)[found.client])
    np.testing.assert_array_equal(drawn_cohorts(plan, held, 4, 3, "uniform").weight, np.ones((4, 2)))
    # a client without examples counts for nothing, whatever the weighting
    idle = Partition(np.arange(6), np.array([0, 1, 2, 3, 3, 4, 6]))
    uniform = drawn_cohorts(all_clients(6), idle, 2, weighting="uniform")
    np.testing.assert_array_equal(uniform.weight, np.broadcast_to([1, 1, 1, 0, 1, 1], (2, 6)))
    with pytest.raises(ValueError, match="weighting: got 'size'"):
        drawn_cohorts(plan, held, 4, weighting="size")
    with pytest.raises(ValueError, match="partition: got 5 clients, but the schedule has 6"):
        drawn_cohorts(all_clients(6), held, 4)
