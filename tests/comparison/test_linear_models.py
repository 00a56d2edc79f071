"""The exact checks notice small faults of the simulation, which networks of finite width cannot show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.comparison import cases, linear_models, predicted
from fedtangent._src.comparison.cases import LOCAL_STEPS, build
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.data import partition
from fedtangent._src.federated import algorithms, compose, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.linearised import linearised
from fedtangent._src.theory.flow import Flow
from fedtangent._src.types import Algorithm, Cohort, Model, Schedule

from ..drawn import parameters
from ..nightly import nightly
from ..stand_ins import stand_in
from .tiny import digits, network

RIGHT = algorithms.fed_ensemble
Faulty = Callable[..., Algorithm]


def few_outputs() -> Setting:
    """Three outputs, so that the whole kernel couples them, on unequal clients."""
    small = digits()
    given = small.problem
    problem = dataclasses.replace(given, y_train=given.y_train[:, :3], y_test=given.y_test[:, :3])
    model = mlp(given.x_train.shape[1], 3, widths=(64,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)
    return dataclasses.replace(small, problem=problem, algorithm=small.algorithm.on(model))


@pytest.fixture(scope="module")
def theory() -> predicted.Predicted:
    """Of ``few_outputs``, in every test."""
    setting = few_outputs()
    return predicted.predict(setting, cohorts(setting))


def same_flow(setting: Setting, plan: Cohort, blocks: KernelBlocks, last: int, outputs: str = "shared") -> Any:
    """In the place of the near misses, where a control says nothing."""
    return {"the same": predicted.run_flow(setting, blocks, plan, outputs=outputs)}


def with_options(**change: Callable[[Any], object]) -> Faulty:
    return lambda model, plan, **given: RIGHT(model, plan, **{**given, **{k: f(given) for k, f in change.items()}})


def with_sample(change: Callable[..., Any]) -> Faulty:
    def faulty(model: Model, plan: Schedule, **given: Any) -> Algorithm:
        def sample(key: jax.Array, state: Any, round_: jax.Array) -> Any:
            return change(plan.sample, key, state, round_)

        return RIGHT(model, plan._replace(sample=sample), **given)

    return faulty


def late(sample: Callable[..., Any], key: jax.Array, state: Any, round_: jax.Array) -> Any:
    return sample(key, state, jnp.maximum(round_ - 1, 0))


def one_absence(sample: Callable[..., Any], key: jax.Array, state: Any, round_: jax.Array) -> Any:
    cohort, state = sample(key, state, round_)
    absent = (cohort.client == 1) & (round_ == 3)
    return cohort._replace(weight=jnp.where(absent, 0.0, cohort.weight)), state


FAULTS: dict[str, Faulty] = {
    "one local step less": with_options(work=lambda given: Work(steps=given["work"].steps - 1, batch_size=None)),
    "server rate": with_options(averaging=lambda given: Averaging(server_learning_rate=0.99)),
    "client rate": with_options(client_learning_rate=lambda given: 0.99 * given["client_learning_rate"]),
    "equal weights": with_options(averaging=lambda given: Averaging(weighting="uniform")),
    "one round late": with_sample(late),
    "one absence": with_sample(one_absence),
}


def test_nothing_is_noticed_where_nothing_is_wrong_and_a_wrong_ensemble_by_its_verdict_alone(
    theory: predicted.Predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = theory.setting
    assert linear_models.linearised_verdict(setting, theory.cohorts).passed
    points = linear_models.some_points(setting.problem)
    seen = linear_models._propagated(theory, points, setting.size.num_rounds)
    monkeypatch.setattr(linear_models, "_propagated", lambda *given: seen)  # trained once
    assert all(v.passed for v in linear_models.law_verdicts(theory))
    monkeypatch.setattr(linear_models, "near_misses", same_flow)
    fewer = seen._replace(ensemble=seen.test[:, :-1].mean(axis=1))
    monkeypatch.setattr(linear_models, "_propagated", lambda *given: fewer)
    assert [v.holds for v in linear_models.law_verdicts(theory)] == [True, False]
    monkeypatch.setattr(linear_models, "_propagated", lambda *given: seen)
    monkeypatch.setattr(Flow, "ensemble_cov", lambda flow, r: flow.cov(r).mean(axis=0))
    assert [v.holds for v in linear_models.law_verdicts(theory)] == [True, False]


def test_a_wrong_theory_that_leaves_float64_is_far_away(
    theory: predicted.Predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(setting: Setting, plan: Cohort, blocks: KernelBlocks, last: int, outputs: str = "shared") -> Any:
        return {"diverging": predicted.run_flow(setting, blocks, plan, outputs=outputs, learning_rate=1e200)}

    monkeypatch.setattr(linear_models, "near_misses", diverging)
    verdict = linear_models.linearised_verdict(theory.setting, theory.cohorts)
    assert verdict.holds and verdict.control_fails


# The controls of the verdicts above are the same faults, put into the theory.


@pytest.mark.parametrize("name", nightly(FAULTS, ["client rate"]))  # by day another is that of the weights below
def test_a_small_fault_of_the_simulation_is_noticed(
    theory: predicted.Predicted, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_models, "near_misses", same_flow)
    right, rate = theory.setting.algorithm, theory.setting.followed.learning_rate
    work = Work(steps=LOCAL_STEPS, batch_size=None)
    faulty = FAULTS[name](right.model, right.schedule, client_learning_rate=rate, work=work)
    setting = dataclasses.replace(theory.setting, algorithm=faulty)
    verdicts = [
        linear_models.linearised_verdict(setting, theory.cohorts),
        *linear_models.law_verdicts(dataclasses.replace(theory, setting=setting)),
    ]
    assert [v.holds for v in verdicts] == [False, False, False]


def test_the_theory_does_not_share_a_fault_in_the_simulations_weights(
    theory: predicted.Predicted, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compose._weigh

    def squared(cohort: Cohort, offsets: Any, weighting: str) -> Cohort:
        once = right(cohort, offsets, weighting)
        return once._replace(weight=once.weight**2)

    monkeypatch.setattr(compose, "_weigh", squared)
    drawn = cohorts(theory.setting)
    np.testing.assert_array_equal(drawn.weight, theory.cohorts.weight)
    assert linear_models.linearised_verdict(theory.setting, drawn).holds is False


@pytest.mark.slow
def test_moments_of_another_model_are_noticed(network_result: Comparison) -> None:
    theory = network_result.theory
    rolled = tuple(m._replace(mean=np.roll(m.mean, 1, axis=0)) for m in theory.moments)
    wrong = dataclasses.replace(theory, moments=rolled)
    assert not linear_models.law_verdicts(wrong)[0].holds
    covs = tuple(m._replace(cov=np.roll(m.cov, 1, axis=0)) for m in theory.moments)
    assert not linear_models.law_verdicts(dataclasses.replace(theory, moments=covs))[0].holds


def test_a_linearised_network_is_the_tangent_at_its_weights() -> None:
    model = mlp(3, 2, widths=(5,), activation="erf", dtype=jnp.float64)
    at, away = (parameters(model, seed) for seed in (0, 1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)))
    tangent, network = (jax.jit(m.apply) for m in (linearised(model, at), model))
    np.testing.assert_allclose(tangent(at, x), network(at, x), rtol=1e-14)

    def on_the_way(t: float) -> Any:
        return jax.tree.map(lambda a, b: a + t * (b - a), at, away)

    change = (tangent(on_the_way(1.0), x) - network(at, x)) * 1e-4
    central = (network(on_the_way(1e-4), x) - network(on_the_way(-1e-4), x)) / 2
    np.testing.assert_allclose(central, change, rtol=0, atol=1e-7 * np.max(np.abs(change)))
    assert np.max(np.abs(network(away, x) - tangent(away, x))) > 1e-2


def test_near_misses_that_would_be_right_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "run_flow", lambda *given, **options: stand_in(Flow))
    whole = network()
    rate, work = whole.followed.learning_rate, Work(steps=1, batch_size=None)
    equal = dataclasses.replace(
        whole,
        problem=dataclasses.replace(whole.problem, partition=partition.iid(24, 4, 0)),
        algorithm=RIGHT(whole.algorithm.model, schedule.all_clients(4), client_learning_rate=rate, work=work),
        rule=dataclasses.replace(whole.followed, local_steps=1),
    )
    for setting, expected in ((whole, 6), (equal, 3)):
        blocks = stand_in(KernelBlocks)
        assert len(linear_models.near_misses(setting, cohorts(setting), blocks, setting.size.num_rounds)) == expected


def test_the_cases_clients_have_unequal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "step_size", lambda problem, model: 1.0)  # nobody trains
    for name in ("sine", "digits"):
        for setting in build(name, scale="smoke"):
            assert len(set(setting.problem.partition.sizes.tolist())) > 1
            assert np.array_equal(np.sort(setting.problem.partition.indices), np.arange(len(setting.problem.x_train)))
