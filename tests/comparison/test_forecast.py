"""Theory alone: predicted curves, rates, targets and bytes, against laws, runs and brute force."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison import forecast as forecasts_
from fedtangent._src.comparison.forecast import Plan, forecast, ranked, rounds_to_target
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.table import draws_of
from fedtangent._src.data import examples
from fedtangent._src.engine import Evaluation, simulate
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.run import predict
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.measures import uncertainty
from fedtangent._src.models.dense import mlp
from fedtangent._src.theory.flow import recursion, tuning
from fedtangent._src.types import Algorithm

from .. import documents
from ..nightly import nightly
from . import runs
from .runs import MINIBATCHES, SMALL

SETTINGS: dict[str, Any] = {**SMALL, **MINIBATCHES}


def planned(draws: int = 4, target: float | None = None, **more: Any) -> Plan:
    return runs.planned(draws, target, **{**SETTINGS, **more})


def runs_of(plan: Plan) -> forecasts_._Runs:
    """The runs of a plan by its flow."""
    return forecasts_._runs_of(plan, plan.setting.blocks(), lambda line: None)


def foretold(plan: Plan) -> forecasts_.Forecast:
    return forecast(plan, plan.setting.blocks())


def test_the_mean_curve_is_that_of_the_law() -> None:
    """Bias and variance of the flow's law, within what so few initial functions leave open; the prior's are far off."""
    plan = planned(32)
    runs, setting = runs_of(plan), plan.setting
    flow, curve = runs.flows[0], runs.curve(plan.rate, False)
    for at in (0, 2, 5):
        mean, cov = np.asarray(flow.mean(at)[0]), np.asarray(flow.cov(at)[0])
        expected = float(np.mean((mean - setting.problem.y_test) ** 2) + np.mean(np.diag(cov)))
        each = curve.values["test", "mse"][:, at]
        error = each.std(ddof=1) / np.sqrt(len(each))
        assert abs(each.mean() - expected) < 4 * error
        assert (
            at == 5 or abs(each.mean() - np.mean((mean - setting.problem.y_test) ** 2)) > 4 * error
        )  # without the variance
    low, high = curve.band("test", "mse")
    sampled = np.mean((draws_of(mean, cov, 2000) - setting.problem.y_test) ** 2, axis=(1, 2))
    assert np.allclose([low[5], high[5]], np.percentile(sampled, [5, 95]), rtol=0.1)


def test_a_curve_is_each_functions_own_prediction_measured() -> None:
    plan = planned(2, algorithm="fed_ensemble", num_models=2, loss="cross_entropy")
    setting, runs = plan.setting, runs_of(plan)
    flow, starts, curve = runs.flows[0], runs.starts, runs.curve(plan.rate, False)
    assert not np.allclose(starts.test[0], starts.test[1])
    for draw in range(2):
        train, test = starts.train[draw], starts.test[draw]
        ends = flow.predict(train, test, 3), flow.predict_train(train, 3)
        for split, outputs in zip(("test", "train"), ends, strict=True):
            targets = setting.problem.labels_test if split == "test" else plan.examples.train.labels
            found = float(uncertainty.negative_log_likelihood(outputs, jnp.asarray(targets)))
            assert curve.values[split, "nll"][draw, 3] == pytest.approx(found, rel=1e-12)
    assert {metric for _, metric in curve.values} >= {"nll", "accuracy", "knowledge_variance"}


def test_training_metrics_of_a_sample_are_those_of_its_rows_and_named_by_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "MOST_MEASURED", 7)
    plan = planned(32, rates=False)
    n, y = len(plan.setting.problem.x_train), np.asarray(plan.setting.problem.y_train)
    rows, runs = plan.examples.train_rows, runs_of(plan)
    curve = runs.curve(plan.rate, False)
    for draw in range(2):
        outputs = np.asarray(runs.flows[0].predict_train(runs.starts.train[draw], 3)).mean(axis=0)
        right, wrong = (float(np.mean((outputs[of] - y[of]) ** 2)) for of in (rows, slice(7)))
        measured = curve.values["train", "mse"][draw, 3]
        assert abs(measured - right) < 1e-6 * right and abs(measured - wrong) > 1e-3 * right
    assert {split for e in foretold(plan).history.evaluations for split in e.metrics} == {f"train 7 of {n}", "test"}


@pytest.mark.parametrize("loss", nightly(["squared_error", "cross_entropy"], ["squared_error"]))
def test_a_linear_model_that_is_trained_has_the_predicted_metrics(loss: str) -> None:
    """To rounding, from the start of its own; not at another rate. Names are those of ``train``."""
    plan = planned(2, model="logistic", loss=loss, client_learning_rate=0.05, dropout=0.2)
    setting = plan.setting
    start = setting.model(1).init(jax.random.key(0))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(start))  # its prior is the zero function

    def measured(algorithm: Algorithm, state: Any) -> dict[str, Any]:
        return {
            name: uncertainty.measure(predict(algorithm, state, split.x), split.targets, split.labels, loss)
            for name, split in plan.splits.items()
        }

    algorithm = setting.algorithm.on(setting.model(1))
    data, evaluation = setting.problem.federated(), Evaluation(1, measured)
    seen = simulate(algorithm, data, num_rounds=5, seed=setting.seed, evaluation=evaluation)
    runs = runs_of(plan)
    found, wrong = runs.curve(plan.rate, False), runs.curve(1.02 * plan.rate, False)
    for (split, metric), values in found.values.items():
        trained = np.array([e.metrics[split][metric] for e in seen.history.evaluations])
        assert np.abs(values - trained).max() < 1e-9, metric
        if metric in ("mse", "nll"):
            assert np.abs(wrong.values[split, metric] - trained).max() > 1e-5
    names = {(split, metric) for split, all_ in seen.history.evaluations[0].metrics.items() for metric in all_}
    assert names == set(found.values)


@pytest.mark.slow
def test_just_below_the_stable_rate_a_linear_model_trains_and_just_above_it_does_not() -> None:
    plan = planned(2, model="logistic", client_learning_rate=0.01, num_rounds=40, batch_size=0, local_steps=5,
                   local_epochs=None)  # fmt: skip
    found = foretold(plan)
    assert found.rates.guaranteed is not None and found.rates.guaranteed < 1.03 * found.rates.stable
    losses = []
    for factor in (0.97, 1.05):
        rate = factor * found.rates.stable
        own = build(describe(**{**SETTINGS, "model": "logistic", "num_rounds": 40, "batch_size": 0, "local_steps": 5,
                                "local_epochs": None, "client_learning_rate": rate}))  # fmt: skip
        algorithm, data = own.algorithm.on(plan.setting.model(1)), plan.setting.problem.federated()
        run = simulate(algorithm, data, num_rounds=40, seed=plan.setting.seed)
        outputs = np.asarray(predict(algorithm, run.state, jnp.asarray(plan.setting.problem.x_train)).mean)
        losses.append(float(plan.setting.problem.mse(outputs, "train")))
    first = float(found.given.mean("train", "mse")[0])
    assert losses[0] <= first < losses[1]


@pytest.mark.parametrize("start", [0.1, 1.0, 4.2])
def test_the_stable_rates_are_those_that_begin_at_zero(start: float) -> None:
    """A round multiplies the residual by .24 (1 - r)^3 + .76 (1 - r)^2, which is stable below 8/3, and again near 4."""

    def losses(rate: float) -> tuple[float, float]:
        loss = (0.24 * (1 - rate) ** 3 + 0.76 * (1 - rate) ** 2) ** 20
        return loss, loss

    assert losses(4.2)[0] < 1 < losses(3.0)[0]
    found = tuning.searched_rates(losses, start, 1.0, 0.05)
    assert found.stable <= 8 / 3 < found.stable * (1 + tuning.TOLERANCE)
    assert abs(found.best - 1.0) < 0.3 and found.tried.max() <= found.stable


def test_stable_rates_without_a_bound() -> None:
    for training_loss, stable in ((0.5, np.inf), (2.0, 0.0), (np.nan, 0.0)):
        found = tuning.searched_rates(lambda rate, loss=training_loss: (loss, rate), 0.3, 1.0, 0.003)
        assert found.stable == stable


def test_the_limit_of_k_models_has_their_mean_and_a_kth_of_the_covariance() -> None:
    """Theorem 2 by hand; with the covariance of one model the error is far off."""
    plan = planned(2, algorithm="fed_ensemble", num_models=2)
    setting, blocks = plan.setting, plan.setting.blocks()
    limit = forecasts_._at_limit(setting, blocks, runs_of(plan).flows[0])
    b = blocks.ntk_test_train @ np.linalg.inv(blocks.ntk_train)
    cross = b @ blocks.nngp_test_train.T
    variance = np.diag(blocks.nngp_test - cross - cross.T + b @ blocks.nngp_train @ b.T).mean()
    bias = np.mean((b @ setting.problem.y_train - setting.problem.y_test) ** 2)
    assert limit is not None and limit["mse"] == pytest.approx(bias + variance / 2, rel=1e-8)
    assert limit["mse"] != pytest.approx(bias + variance, rel=0.01)


def test_the_best_rate_is_that_of_brute_force() -> None:
    """Among the rates of a fine grid none is better; and a step off it is worse."""
    runs = runs_of(planned(3, num_rounds=3, algorithm="fed_prox", mu=0.5))
    first = float(runs.curve(runs.plan.rate, False).mean("train", "mse")[0])
    found = forecasts_._rates(runs, first, False)
    grid = found.best * np.geomspace(0.5, 2.0, 15)
    losses = np.array([runs.losses(rate)[1] for rate in grid if rate <= found.stable])
    best = runs.losses(found.best)[1]
    assert best == found.losses.min() and best <= losses.min() * (1 + 1e-3)
    assert losses[0] > best * (1 + 1e-3)


def test_one_program_serves_all_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, real = [], recursion.one_round

    def counted(*given: Any) -> Any:
        traced.append(1)
        return real(*given)

    runs = runs_of(planned(3, num_rounds=4, num_train=37))
    monkeypatch.setattr(recursion, "one_round", counted)
    runs.losses(0.1)
    first = len(traced)
    assert first > 0
    assert len({runs.losses(rate)[0] for rate in (0.2, 0.3, 0.7)}) == 3
    assert len(traced) == first


def test_a_target_is_reached_at_the_first_round_beyond_it() -> None:
    rounds, values = [0, 5, 10, 15], [0.1, 0.8, 0.7, 0.9]
    assert rounds_to_target(rounds, values, 0.8, rising=True) == 5
    assert rounds_to_target(rounds, values, 0.85, rising=True) == 15
    assert rounds_to_target(rounds, values, 0.95, rising=True) is None
    assert rounds_to_target(rounds, values, 0.75, rising=False) == 0
    assert rounds_to_target(rounds, [np.nan, np.inf, 0.5, 0.1], 0.5, rising=False) == 10
    for given, said in (
        ((rounds, values[1:], 0.1), "values: got shape"),
        ((rounds, values, np.nan), "target: got nan"),
    ):
        with pytest.raises(ValueError, match=said):
            rounds_to_target(*given, rising=True)


@pytest.mark.slow
def test_a_target_that_is_never_reached_says_where_the_run_leads() -> None:
    found = foretold(planned(4, target=1.0, client_learning_rate=0.01, num_rounds=2))
    at_end = found.given.mean("test", found.plan.loss)[-1]
    assert repr(found).startswith(f"Forecast(fed_avg, test loss after round 2: {at_end:.4g} at the rate 0.01 (stable; ")
    reached = found.reached(1.0, found.best)
    assert reached.round is None and reached.uplink_bytes is None
    assert reached.nearest == found.best.mean("test", "accuracy")[1:].max()  # of a start nothing is said
    assert found.limit is not None and 0 < found.limit["accuracy"] <= 1


TARGET = 0.35


def test_the_fastest_rate_reaches_the_target_in_the_fewest_rounds() -> None:
    """Of all rates that were tried, each run to the end; and no rate is fastest to a target beyond all of them."""
    plan = planned(2, target=TARGET, num_rounds=8, num_train=100, num_test=30, batch_size=0, local_epochs=5)
    found, runs_ = foretold(plan), runs_of(plan)
    assert found.rates is not None and found.fastest is not None
    rounds = {}
    for rate in found.rates.tried[found.rates.tried <= found.rates.stable]:
        curve = runs_.curve(float(rate), False)
        rounds[float(rate)] = found.reached(TARGET, curve).round
    fewest = min(r for r in rounds.values() if r is not None)
    assert rounds[found.fastest.rate] == fewest < max(r for r in rounds.values() if r is not None)
    beyond = dataclasses.replace(plan.forecasting, target=1.0)
    assert foretold(plan._replace(forecasting=beyond)).fastest is None


@pytest.mark.slow
def test_rounds_without_end_lead_to_the_limit() -> None:
    """To what so few initial functions leave open; before the end the run is elsewhere."""
    plan = planned(16, num_rounds=400, batch_size=0, local_steps=20, local_epochs=None, client_learning_rate=1.0)
    runs, setting = runs_of(plan), plan.setting
    limit = forecasts_._at_limit(setting, setting.blocks(), runs.flows[0])
    assert limit is not None
    for rounds, near in ((400, True), (4, False)):
        each = runs.measured(plan.rate, (rounds,), slice(None))["test", "mse"][:, 0]
        assert (abs(each.mean() - limit["mse"]) < 4 * each.std(ddof=1) / 4) == near


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"dropout": 0.3}, marks=pytest.mark.slow),
        {"algorithm": "scaffold", "schedule": "uniform", "clients_per_round": 3},
        pytest.param({"algorithm": "fed_ensemble", "num_models": 2}, marks=pytest.mark.slow),
        pytest.param({"algorithm": "data_sharing", "schedule": "poisson", "clients_per_round": 2},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_run_to_the_last(more: dict[str, Any]) -> None:
    plan = planned(2, num_rounds=4, batch_size=0, **more)
    up, down = forecasts_._traffic(plan, cohorts(plan.setting))
    setting = plan.setting
    run = simulate(setting.algorithm, plan.examples.data, num_rounds=4, seed=setting.seed, evaluation=Evaluation(1))
    assert [e.uplink_bytes for e in run.history.evaluations] == up.tolist()
    assert [e.downlink_bytes for e in run.history.evaluations] == down.tolist()
    assert up[-1] > up[1] > 0


def test_no_model_goes_to_a_client_without_examples_in_theory_as_in_the_run() -> None:
    data, rows = (np.eye(4), np.eye(4), np.eye(4), np.eye(4)), [np.arange(4), np.arange(0)]
    algorithm = fed_avg(mlp(4, 4, (8,)), ft.faults.dropout(all_clients(2), 0.5), 0.1)
    forecasting = ft.Forecasting(draws=2, rates=False)
    theory = ft.predict(algorithm, data, rows, num_rounds=1, forecasting=forecasting)
    run = simulate(algorithm, data, rows, num_rounds=1)
    assert run.history.cost.downlink == theory.downlink_bytes[-1]
    assert [e.downlink_bytes for e in run.history.evaluations] == theory.downlink_bytes.tolist()


def test_the_network_is_the_described_one_of_any_width() -> None:
    x = planned().setting
    deeper, wider = (planned(widths=widths).setting for widths in ((64, 64), (64,)))
    kernels = [np.asarray(setting.blocks().ntk_train) for setting in (x, deeper, wider)]
    assert np.allclose(kernels[0], kernels[2], rtol=1e-12) and not np.allclose(kernels[0], kernels[1], rtol=0.1)
    assert deeper.model(1).output_size == mlp(64, 10, (64, 64)).output_size


@pytest.mark.slow
def test_predictions_of_arrays() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=(30, 2))
    algorithm = fed_avg(mlp(3, 2, (32,)), all_clients(4), 0.5)
    found = ft.predict(
        algorithm,
        (x[:24], y[:24], x[24:], y[24:]),
        ft.partition.iid(24, 4, 0),
        num_rounds=3,
        forecasting=ft.Forecasting(0.5, 3),
    )
    assert found.plan.main == "mse" and found.given.rounds.tolist() == [0, 1, 2, 3]
    assert set(found.given.values) == {("train", "mse"), ("test", "mse")}
    at_first = found.given._replace(values={key: value[:, :1] for key, value in found.given.values.items()})
    worse = found._replace(best=at_first)
    assert ranked([worse, found]) == [found, worse] == ranked([found, worse])


@pytest.mark.slow
def test_the_example_of_the_documentation() -> None:
    """By day ``test_the_best_rate_is_that_of_brute_force`` looks at the rates."""
    found = documents.run("theory.reached")["theory"]
    assert 0 < found.rates.best <= found.rates.stable and found.loss <= found.given.mean("test", "mse")[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draws": 1}, "draws: got 1, must be a whole number of at least 2"),
        ({"every": 0}, "evaluation.every: got 0"),
        ({"target": -1.0}, "target: got -1.0, must be above 0"),
        ({"target": 1.5}, "target: got 1.5, must be above 0 and at most 1"),
        ({"parameterization": "standard"}, "whose kernel grows with its width"),
        ({"w_std": 0.0, "b_std": 0.0}, "which starts as the zero function"),
    ],
)
def test_refuses_before_anything_is_predicted(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        planned(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize("seed", nightly([2, 1], [2]))
def test_a_rate_is_stable_against_the_same_starts(seed: int) -> None:
    """However the other starts lie: at a tiny rate the loss of those that rates are tried on falls a little."""
    found = foretold(planned(16, num_rounds=3, client_learning_rate=1e-3, seed=seed))
    assert found.rates is not None and 1e-2 < found.rates.stable < np.inf
    first = found.given.values["train", "mse"][:, 0]
    assert abs(first[: forecasts_.TRIED_DRAWS].mean() / first.mean() - 1) > 0.01
