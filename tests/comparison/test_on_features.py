"""``compare`` for algorithms without a closed form: networks beside the features of their kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison.from_start import FromStart
from fedtangent._src.comparison.on_features import OnFeatures

from .. import documents
from ..nightly import nightly
from .runs import remembered

CLIENTS = 6
WORK = {"client_learning_rate": 0.5, "work": ft.Work(steps=4, batch_size=5)}
CLIPPED = {**WORK, "averaging": ft.Averaging(channel=ft.channels.clip(0.4))}
WHOLE = {"client_learning_rate": 0.5, "work": ft.Work(steps=2, batch_size=None)}  # no program that draws minibatches


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def compared(recipe: Any, options: dict[str, Any], model: Any = None, num_rounds: int = 4, **settings: Any) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = np.sin(x @ rng.normal(size=(4, 2)))
    model = ft.models.mlp(4, 2, (32,), "erf") if model is None else model
    algorithm = recipe(model, ft.schedules.uniform_sampling(CLIENTS, 3), **options)
    clients = ft.partition.of([np.arange(i, 40, CLIENTS) for i in range(CLIENTS)])
    data = x[:40], y[:40], x[40:], y[40:]
    evaluation = ft.Evaluation(2, progress=False)
    return ft.compare(algorithm, data, clients, num_rounds=num_rounds, evaluation=evaluation, **settings)


def ends(result: OnFeatures) -> list[float]:
    """The mean distances of networks of each width from the prediction, after the last round."""
    return [float(gap.error[-1].mean()) for gap in result.gaps]


def check_the_approach(result: Any) -> None:
    assert isinstance(result, OnFeatures) and result.rotations.is_exact and result.rotations.disagreement < 1e-12
    narrow, middle, wide = ends(result)
    assert 0 < wide < middle < narrow and wide < 0.5 * narrow and wide < 0.12, ends(result)
    assert "its channel changes the updates" in repr(result) and "<table" in result._repr_html_()
    predicted, simulated = result.history.predicted.curves(), result.history.curves()
    assert predicted.keys() == simulated.keys()
    assert len(result.verdicts) == 2 and not any(verdict.passed is False for verdict in result.verdicts)


def test_networks_approach_the_features_with_their_width() -> None:
    """Norm clipping has no closed form; a kernel that is wrong by a quarter is further away than the widest network."""
    case = runs()
    clipped = ft.fed_avg(case["model"], case["schedule"], **{**CLIPPED, **WHOLE})
    evaluation = ft.Evaluation(2, progress=False)
    check_the_approach(
        ft.compare(
            clipped,
            case["data"],
            ft.partition.iid(24, 3, 0),
            num_rounds=4,
            evaluation=evaluation,
            widths=(32, 128, 512),
            draws=5,
        )
    )


@pytest.mark.slow
def test_networks_approach_the_features_with_their_width_in_the_example_of_the_guide() -> None:
    """With minibatches; by day the test above holds the same."""
    check_the_approach(documents.run("features = ft.compare(")["features"])


@pytest.mark.parametrize("seed", nightly(list(range(6)), []))
def test_verdicts_hold_and_wrong_kernels_fail(seed: int) -> None:
    result = compared(ft.fed_avg, CLIPPED, widths=(64, 256, 1024, 4096), draws=40, seed=seed)
    slope, mean = result.verdicts
    assert slope.passed and slope.control_fails, slope
    assert mean.passed is not False, mean


def test_a_linear_model_is_that_of_its_features() -> None:
    """To rounding, and not that of wrong kernels, whatever the algorithm."""
    case = runs()
    algorithm = ft.fed_avg(case["linear"], case["schedule"], **CLIPPED)
    x, y, *_ = case["data"]  # without test examples too
    result = ft.compare(algorithm, (x, y), ft.partition.iid(24, 3, 0), num_rounds=3, draws=5)
    (verdict,) = result.verdicts
    assert verdict.passed and float(verdict.measured) < 1e-12, verdict


@pytest.mark.parametrize("loss", nightly(["squared_error", "cross_entropy"], ["squared_error"]))
def test_a_singular_kernel_is_followed_by_its_features(loss: str) -> None:
    """Of repeated points, at which the rounding of a draw is no combination of features."""
    case, rows = runs(), np.repeat(np.arange(6), 2)
    x, y = case["data"][0], (case["data"][1][:, 0] > 0).astype(int)
    clipped = ft.fed_avg(case["model"], ft.schedules.all_clients(3), 0.3, averaging=CLIPPED["averaging"], loss=loss)
    data, clients = (x[rows], y[rows], x[:4], y[:4]), ft.partition.iid(12, 3, 0)
    theory = ft.predict(clipped, data, clients, num_rounds=2, forecasting=ft.Forecasting(draws=2, rates=False))
    assert theory.plan.setting.start is None and theory.plan.draws == 2
    with pytest.raises(ValueError, match=r"clients: got 3 clients, must be 4 as in the schedule"):
        ft.predict(ft.fed_adam(case["model"], ft.schedules.all_clients(4), 0.1), data, clients, num_rounds=2)


@pytest.mark.slow
def test_networks_without_test_examples() -> None:
    """Equal points have equal initial functions."""
    case = runs()
    (x, y, *_), clients = case["data"], ft.partition.iid(24, 3, 0)
    clipped = ft.fed_avg(case["model"], case["schedule"], **CLIPPED)
    assert isinstance(ft.compare(clipped, (x, y), clients, num_rounds=2, widths=(8, 16, 32), draws=5), OnFeatures)


NO_FEATURES = "nor can it be run on the kernel's features: x: got inputs"


def distilled() -> Any:
    case = runs()
    ensemble = ft.DistilledEnsemble(server_data=case["data"][0][:5])
    return ft.fed_be(case["model"], case["schedule"], **WHOLE, ensemble=ensemble)


@pytest.mark.slow
def test_networks_whose_server_has_inputs_are_put_beside_the_linearised_network() -> None:
    """By day the test below predicts the same run, and the one after it compares another."""
    case = runs()
    options = {"widths": (8, 16, 32), "draws": 5}
    result = ft.compare(distilled(), case["data"], ft.partition.iid(24, 3, 0), num_rounds=2, **options)
    assert isinstance(result, FromStart) and NO_FEATURES in repr(result)


def test_where_features_do_not_do() -> None:
    """A server that has inputs of its own needs the network."""
    case = runs()
    clients, options = ft.partition.iid(24, 3, 0), {"widths": (8, 16, 32), "draws": 5}
    few = ft.Forecasting(draws=2, rates=False)
    theory = ft.predict(distilled(), case["data"], clients, num_rounds=2, forecasting=few)
    assert theory.plan.setting.start is not None and NO_FEATURES in repr(theory)
    kept = ft.lg_fed_avg(case["model"], case["schedule"], **WHOLE)
    with pytest.raises(
        ValueError,
        match=r"got 'lg_fed_avg', which theory does not follow: .*nor can it be linearised: .*must be one with global",
    ):
        ft.compare(kept, case["data"], clients, num_rounds=2, **options)


@pytest.mark.slow
def test_an_algorithm_that_the_kernel_does_not_determine_is_linearised_and_the_size_is_said() -> None:
    """By day ``test_a_forecast_that_the_kernel_does_not_determine_is_of_the_linearised_network`` holds the same."""
    result = compared(ft.fed_adam, WHOLE, widths=(8, 16, 32), draws=5)
    assert isinstance(result, FromStart) and result.feature_learning[-1].mean() > 0
    assert "nor does the kernel determine its runs: runs on rotated features differ by " in result.notes[0]
    assert "widths and draws" in result.notes[0]  # which this run was given, and does not use
    assert "\n" not in result.notes[0] and not result.verdicts


def test_an_algorithm_of_random_numbers_has_no_verdict_and_says_so() -> None:
    options = {**WHOLE, "privacy": ft.ClientPrivacy(0.5, 0.3, 3)}
    case = runs()
    private = ft.dp_fed_avg(case["linear"], case["schedule"], **options)
    result = ft.compare(private, case["data"], ft.partition.iid(24, 3, 0), num_rounds=2, draws=5)
    assert isinstance(result, OnFeatures) and not result.rotations.is_exact and not result.verdicts
    assert "random numbers differ" in repr(result)


def forecast(recipe: Any, options: dict[str, Any], **settings: Any) -> Any:
    case = runs()
    algorithm = recipe(case["model"], case["schedule"], **options)
    return ft.predict(algorithm, case["data"], ft.partition.iid(24, 3, 0), num_rounds=4, **settings)


def test_a_forecast_on_features_is_that_of_the_flow() -> None:
    """A channel that clips nothing has no rule; the curves are those of FedAvg's closed form, and so are the rates.

    Both searches end within 2 % of the rate; that of the closed form starts at a bound of its own.
    """
    theory, on_features, clipped = (
        forecast(
            ft.fed_avg, WHOLE | {"averaging": ft.Averaging(channel=channel)}, forecasting=ft.Forecasting(rates=rates)
        )
        for channel, rates in ((None, True), (ft.channels.clip(1e6), True), (ft.channels.clip(0.05), False))
    )
    assert theory.plan.is_flow and not on_features.plan.is_flow and "its channel changes" in repr(on_features)
    for metric, values in theory.given.values.items():
        np.testing.assert_allclose(on_features.given.values[metric], values, rtol=1e-9, atol=1e-12)
    assert on_features.rates.best == pytest.approx(theory.rates.best, rel=0.02)
    assert on_features.rates.stable == pytest.approx(theory.rates.stable, rel=0.02)
    assert abs(clipped.loss / theory.loss - 1) > 0.01  # the control: one that does clip


@pytest.mark.parametrize("work", [pytest.param(WORK, marks=pytest.mark.slow), WHOLE])
def test_a_forecast_that_the_kernel_does_not_determine_is_of_the_linearised_network(work: dict[str, Any]) -> None:
    theory = forecast(ft.fed_adam, work, forecasting=ft.Forecasting(rates=work is WORK))
    assert theory.plan.setting.start is not None and theory.plan.draws == 1
    assert "nor does the kernel determine its runs: runs on rotated features differ by " in repr(theory)


@functools.cache
def runs() -> dict[str, Any]:
    """The same models for all tests, which share their programs."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    models = {"model": remembered(ft.models.mlp(4, 2, (8,), "erf")), "linear": ft.models.linear(4, 2)}
    return {**models, "data": (x[:24], y[:24], x[24:], y[24:]), "schedule": ft.schedules.all_clients(3)}


@pytest.mark.parametrize("place", nightly([0, 1, 2], [1]))
def test_a_client_without_examples_may_stand_anywhere(place: int) -> None:
    """It is as absent; its minibatches are drawn from no example of another client."""
    case = runs()
    algorithm = ft.fed_avg(case["model"], case["schedule"], 0.3, work=ft.Work(steps=3, batch_size=4))
    clients: list[Any] = [np.arange(12), np.arange(12, 24)]
    clients.insert(place, [])
    theory = ft.predict(algorithm, case["data"], clients, num_rounds=2, forecasting=ft.Forecasting(rates=False))
    two = ft.fed_avg(case["model"], ft.schedules.all_clients(2), 0.3, work=ft.Work(steps=3, batch_size=None))
    halves, few = [np.arange(12), np.arange(12, 24)], ft.Forecasting(rates=False)
    other = ft.predict(two, case["data"], halves, num_rounds=2, forecasting=few)
    ends = [forecast.given.mean("train", "mse")[-1] for forecast in (theory, other)]
    assert np.isfinite(ends[0]) and abs(ends[0] / ends[1] - 1) < 0.5


@pytest.mark.parametrize("call", [ft.simulate, ft.predict, ft.compare])
@pytest.mark.parametrize("seed", [jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 2), -1])
def test_a_seed_that_is_none_is_refused_by_its_name(call: Any, seed: Any) -> None:
    case = runs()
    algorithm = ft.fed_avg(case["model"], case["schedule"], 0.3)
    with pytest.raises(ValueError, match=r"seed: got .*, must be"):
        call(algorithm, case["data"], ft.partition.iid(24, 3, 0), num_rounds=1, seed=seed)


def test_a_rule_with_unknown_fields_is_refused() -> None:
    case = runs()
    algorithm = ft.fed_avg(case["model"], case["schedule"], 0.3)
    algorithm = algorithm._replace(composition=algorithm.composition._replace(rule={"momentun": 0.5}))
    with pytest.raises(ValueError, match=r"rule: got 'momentun', allowed are "):
        ft.predict(algorithm, case["data"], ft.partition.iid(24, 3, 0), num_rounds=1)


def test_linearised_checks_where() -> None:
    model = runs()["model"]
    with pytest.raises(ValueError, match=r"at: got parameters of shapes .*, must be .*, as mlp"):
        ft.models.linearised(model, ft.models.mlp(4, 2, (16,)).init(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"model: got 'a', must be a Model"):
        ft.models.linearised("a", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("fed_avg", {}, "recipe: got 'fed_avg', must be a function"),
        (ft.fed_avg, {"schedule": 3}, "schedule: got 3, must be left out"),
        (ft.fed_avg, {"exempt": ["order"]}, "exempt: got .*, must be a mapping"),
    ],
)
def test_laws_refuse_other_recipes(recipe: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.testing.check_laws(recipe, **options)
