"""The explorer's predictions are those of ``ft.predict`` with the Python code that it shows; that code trains, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison import explored as runs
from fedtangent._src.comparison.explored import Controls, Explored, explored, moved, python_call, trained

LIKE = {"rtol": 0, "atol": 1e-12}  # of numbers up to about 10; the largest difference found was 2e-15
MOVES = (
    pytest.param({"clients_per_round": 4, "alpha": 0.1, "local_steps": 3}, marks=pytest.mark.slow),
    {"num_models": 2, "staleness": 2, "clients_per_round": 6, "learning_rate": 0.02},
)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Few initial functions, as the two ways need not agree about many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MANY_DRAWS", 3)
        patch.setattr(runs, "DRAWS", 2)
        patch.setattr(runs, "LOADED", {"num_train": 40, "num_test": 10, "num_users": 20})
        yield


@pytest.fixture(scope="module")
def sine() -> Explored:
    return explored("sine", num_clients=8, num_rounds=5, seed=3)


def called(run: Explored, controls: Controls, until: str, **names: Any) -> dict[str, Any]:
    """The names that the shown Python code defines before the line that begins with ``until``."""
    exec(python_call(run, controls).partition(until)[0], names)
    return names


def of_predict(run: Explored, controls: Controls, **names: Any) -> dict[str, np.ndarray]:
    """Squared errors of the forecast, [E, r] by split."""
    values = called(run, controls, "\ntrained =", **names)["theory"].given.values
    return {split: values[split, "mse"] for split in ("train", "test")}


@pytest.mark.parametrize("changes", MOVES, ids=str)
def test_a_move_is_the_forecast_of_the_code_that_is_shown(sine: Explored, changes: dict[str, Any]) -> None:
    controls = dataclasses.replace(sine.first(), **changes)
    errors, expected = moved(sine, controls).curves.errors, of_predict(sine, controls)
    for split, of_split in expected.items():
        assert of_split.shape == (3, 6)
        np.testing.assert_allclose(errors[split], of_split, **LIKE)
    # Control: each control matters to the prediction.
    for name, value in changes.items():
        other = moved(sine, dataclasses.replace(controls, **{name: getattr(sine.first(), name)})).curves.errors
        assert value == getattr(sine.first(), name) or not np.allclose(other["test"], expected["test"], rtol=1e-3)


def test_of_classes_accuracy_too_and_of_a_data_set_of_the_users() -> None:
    data = ft.data.load("digits", num_train=60, num_test=20)
    run = explored(data, num_clients=5, num_rounds=4)
    assert not run.is_curve and run.source == ""
    controls = dataclasses.replace(run.first(), alpha=0.2, num_models=2)
    names = called(run, controls, "\ntrained =", data=data)
    curves = moved(run, controls).curves
    values = names["theory"].given.values
    np.testing.assert_allclose(curves.errors["test"], values["test", "mse"], **LIKE)
    assert curves.accuracy == pytest.approx(values["test", "accuracy"][:, -1].mean(), abs=1e-12)


def test_functions_and_residuals_are_those_of_the_flow(sine: Explored) -> None:
    """By the JAX recursion, from the same initial functions."""
    controls = dataclasses.replace(sine.first(), num_models=2)
    run, end = moved(sine, controls).curves, sine.num_rounds
    names = called(sine, controls, "\nrun =")
    cohorts = ft.schedules.drawn_cohorts(names["algorithm"].schedule, names["clients"], end, sine.seed)
    rule = ft.theory.Rule(local_steps=controls.local_steps, learning_rate=controls.learning_rate)
    problem = sine.plan.setting.problem
    flow = ft.theory.federated_flow(sine.kernels, problem.y_train, names["clients"], cohorts, rule, num_models=2)
    drawn = ft.theory.prior_functions(sine.kernels, 3 * 2, seed=sine.seed).reshape(-1, 3, 2, 1)
    f0_train, f0_test = np.split(drawn.transpose(1, 2, 0, 3), [len(problem.y_train)], axis=2)
    expected = flow.runs(f0_train, f0_test, [end])
    np.testing.assert_allclose(run.functions, expected.test[0, :, :, :, 0].swapaxes(0, 1), **LIKE)
    left = (np.asarray(expected.train)[0].mean(axis=0) - problem.y_train) ** 2  # [E, n, C]
    of_clients = [np.sqrt(left[:, names["clients"].client(i)].mean()) for i in range(8)]
    np.testing.assert_allclose(run.residuals, of_clients, **LIKE)
    first, stable = moved(sine, controls), flow.stability().max_stable_learning_rate
    assert stable == pytest.approx(2 * controls.learning_rate / first.curvatures.max())
    assert sine.first().learning_rate == pytest.approx(stable / 2, rel=0.05)  # two digits
    assert not np.allclose(first.before, run.residuals, rtol=0.1)


@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_a_rate_that_is_unstable_is_said_to_be(sine: Explored, factor: float) -> None:
    first = sine.first()
    now = moved(sine, dataclasses.replace(first, learning_rate=factor * first.learning_rate, local_steps=50))
    assert now.remark.startswith("stable" if factor == 1 else "unstable: the training error grows")
    assert np.all(now.curvatures <= 2) == (factor == 1)
    assert np.isfinite(now.curves.errors["train"][:, -1]).all() == (factor == 1)


def test_networks_are_trained_by_the_same_code(sine: Explored) -> None:
    controls, reports = dataclasses.replace(sine.first(), num_models=2, width=64, clients_per_round=4), []
    networks = trained(sine, controls, reports.append)
    assert [report.round for report in reports] == [0, 1, 2, 3, 4, 5] == networks.rounds.tolist()
    names = called(sine, controls, "\ntheory =")
    exec(python_call(sine, controls).splitlines()[-1], names)
    curves = names["trained"].history.curves()
    for split, errors in networks.errors.items():
        np.testing.assert_array_equal(errors[0], curves[f"{split}.mse"])
    # What is measured at the end by this module is what the history says.
    problem = sine.plan.setting.problem
    mean = networks.functions[0].mean(axis=0)
    assert np.mean((mean - problem.y_test[:, 0]) ** 2) == pytest.approx(curves["test.mse"][-1], rel=1e-4)
    sizes = np.array(names["clients"].sizes)
    assert np.sum(networks.residuals**2 * sizes) / sizes.sum() == pytest.approx(curves["train.mse"][-1], rel=1e-4)


@pytest.mark.slow
def test_networks_that_diverge_are_reported(sine: Explored) -> None:
    controls = dataclasses.replace(sine.first(), learning_rate=1e6, local_steps=50)
    with pytest.raises(FloatingPointError, match="diverged at round"):
        trained(sine, controls, lambda report: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "nothing"}, "dataset: got 'nothing', allowed are"),
        ({"data": 3}, "data: got 3, must be a Dataset"),
        ({"num_clients": 0}, "num_clients: got 0, must be a whole number from 1 to 40"),
        ({"num_rounds": 0}, "num_rounds: got 0, must be a whole number of at least 1"),
        ({"seed": -1}, "seed: got -1, must be"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explored(**{"data": "sine"} | arguments)


def test_a_file_of_the_users_with_few_examples_is_read_whole(tmp_path: Path) -> None:
    np.savez(path := tmp_path / "mine.npz", x=np.random.default_rng(0).normal(size=(30, 3)), y=np.arange(30) % 3)
    run = explored(str(path), num_clients=3, num_rounds=2)
    assert (len(run.data.x_train), len(run.data.x_test)) == (24, 6) and "num_train=24, num_test=6" in run.source


def test_more_examples_than_can_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_POINTS", 49)
    with pytest.raises(ValueError, match="data: got 50 training and test examples, must be at most 49"):
        explored("digits")


@pytest.mark.parametrize("num_clients", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_every_number_of_clients_has_strata_of_one_size(num_clients: int) -> None:
    run = explored("sine", num_clients=num_clients, num_rounds=1)
    positions = run.positions()
    assert positions["clients_per_round"][-1] == num_clients == run.first().clients_per_round
    for number in positions["clients_per_round"]:
        errors = moved(run, dataclasses.replace(run.first(), clients_per_round=number)).curves.errors["test"]
        assert np.isfinite(errors).all()
