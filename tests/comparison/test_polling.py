"""Theory of schedules that ask clients about the models: no closed form, but the features of the kernel follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison.from_start import FromStart
from fedtangent._src.comparison.on_features import OnFeatures

from .. import documents
from ..benchmarks.scripts import BENCHMARKS, scripts_of

CLIENTS = 5
RATE, WORK = 0.3, ft.Work(steps=3, batch_size=None)
POWER = ft.schedules.power_of_choice(CLIENTS, 4, 2)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def problem() -> tuple[tuple[np.ndarray, ...], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(36, 3))
    y = np.sin(x @ rng.normal(size=(3, 2)))
    return (x[:30], y[:30], x[30:], y[30:]), [np.arange(i, 30, CLIENTS)[: 6 - i] for i in range(CLIENTS)]


def fed_avg(schedule: Any, model: Any = None) -> Any:
    return ft.fed_avg(ft.models.mlp(3, 2, (32,), "erf") if model is None else model, schedule, RATE, work=WORK)


def forecast(algorithm: Any, **settings: Any) -> Any:
    forecasting = ft.Forecasting(draws=2, rates=False)
    return ft.predict(algorithm, *problem(), num_rounds=4, forecasting=forecasting, **settings)


SCHEDULES = {
    "power": POWER,
    "fitting": ft.schedules.best_fitting(CLIENTS, 2),
    "gradients": ft.schedules.gradient_norm_sampling(CLIENTS, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_linear_models_are_those_of_their_features(name: str) -> None:
    """To rounding, choices and all; wrong kernels choose others."""
    schedule = SCHEDULES[name]
    result = ft.compare(fed_avg(schedule, ft.models.linear(3, 2)), *problem(), num_rounds=3, draws=5)
    assert isinstance(result, OnFeatures) and result.rotations.is_exact
    (verdict,) = result.verdicts
    assert verdict.passed and float(verdict.measured) < 1e-11, verdict
    assert "no cohort is known before training" in result.notes[0]


def test_the_closed_form_refuses_in_a_sentence_and_bytes_are_those_of_a_run() -> None:
    theory = forecast(fed_avg(POWER))
    assert not theory.plan.is_flow and "chooses clients by what they answer about the models" in theory.plan.how
    run = ft.simulate(fed_avg(POWER), *problem(), num_rounds=4, evaluation=ft.Evaluation(1))
    assert [e.uplink_bytes for e in run.history.evaluations] == theory.uplink_bytes.tolist()
    assert [e.downlink_bytes for e in run.history.evaluations] == theory.downlink_bytes.tolist()
    drawn = fed_avg(ft.schedules.uniform_sampling(CLIENTS, 2))
    assert not isinstance(drawn.rule, str)  # the control: the same algorithm where nobody is asked


@pytest.mark.slow
def test_the_bytes_of_a_random_number_of_clients_are_those_of_the_linear_model() -> None:
    """The linearised network of a linear model is itself, so that both choose the same clients."""
    linear = fed_avg(ft.schedules.gradient_norm_sampling(CLIENTS, 2), ft.models.linear(3, 2))
    theory = forecast(linear, start=jax.random.key(3))
    run = ft.simulate(linear, *problem(), num_rounds=4, start=jax.random.key(3), evaluation=ft.Evaluation(1))
    assert [e.uplink_bytes for e in run.history.evaluations] == theory.uplink_bytes.tolist()
    assert len(set(np.diff(theory.uplink_bytes))) > 1


@pytest.mark.slow
def test_one_model_is_linearised_and_several_to_choose_from_are_not() -> None:
    result = ft.compare(fed_avg(POWER), *problem(), num_rounds=2, start=jax.random.key(0))
    assert isinstance(result, FromStart) and "no cohort is known before training" in result.how
    with pytest.raises(ValueError, match=r"schedule: got one whose clients compare K = 2 models"):
        ft.compare(fed_avg(ft.schedules.best_fitting(CLIENTS, 2)), *problem(), num_rounds=2, start=jax.random.key(0))


def test_ifca_in_the_example_of_the_guide() -> None:
    names = documents.run("ft.schedules.best_fitting(")
    run, ifca = names["run"], names["ifca"]
    last = run.history.rounds["cohort"].model[-1]
    assert sorted(map(tuple, (last[::2], last[1::2]))) == [(0,) * 5, (1,) * 5]
    own = ft.measures.evaluate_clients(ifca, run.state, names["data"], names["test"], "mse").values
    plain = ft.fed_avg(names["model"], names["schedule"], 0.2)
    mean = ft.measures.evaluate_clients(plain, run.state, names["data"], names["test"], "mse").values
    assert np.all(own < 0.5 * mean)  # the control: the mean of both clusters' models


@pytest.fixture(scope="module")
def clusters() -> Any:
    return scripts_of(Path(BENCHMARKS), ["clusters"]).clusters


def test_the_features_choose_as_a_wide_network_and_the_flow_of_their_choices_is_theirs(clusters: Any) -> None:
    with jax.enable_x64(True):
        row = clusters.row_of(256, 3)
    assert row.agreement > 0.95 and max(row.at_random, row.wrong_kernel) < 0.8, row
    assert row.flow < 1e-10 and row.random_flow > 0.1, row
    assert row.is_sorted and row.own_error < 0.2 * row.other_error, row


@pytest.mark.slow
def test_networks_of_all_widths_choose_as_the_features_and_approach_them(clusters: Any) -> None:
    """Over starts; the distance of the functions falls as width^-1/2."""
    distances = []
    with jax.enable_x64(True):
        for width in (16, 256):
            rows = [clusters.row_of(width, seed) for seed in range(8)]
            agreement, wrong = (np.array([getattr(r, name) for r in rows]) for name in ("agreement", "wrong_kernel"))
            assert agreement.mean() > 0.98 and np.mean(agreement - wrong) > 0.05 and np.min(agreement - wrong) >= -0.01
            assert max(row.flow for row in rows) < 1e-10
            distances.append(np.mean([row.distance for row in rows]))
    assert -0.6 < np.log(distances[1] / distances[0]) / np.log(256 / 16) < -0.35, distances
