"""Any run beside its theory: every algorithm that has a rule, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import fedtangent as ft
from fedtangent._src.cli import compare as cli_compare
from fedtangent._src.cli import predict as cli_predict
from fedtangent._src.cli.arguments import FigureOptions, VerdictOptions
from fedtangent._src.comparison import all_verdicts, comparing, linear_models, side_by_side
from fedtangent._src.comparison.comparing import compare, comparison_of
from fedtangent._src.comparison.predicted import predict, run_flow
from fedtangent._src.comparison.simulated import cohorts, trained_networks
from fedtangent._src.data.partition import quantity_skew
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import Descriptions, describe
from fedtangent._src.engine.run import examples_of
from fedtangent._src.entries import catalogue
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.algorithms.common import AveragingParts, train_and_average, trained
from fedtangent._src.federated.local import LocalProblem, Work
from fedtangent._src.federated.schedule import all_clients, per_client_permutations
from fedtangent._src.losses import LOSSES, mean_form
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.features import linear
from fedtangent._src.types import Server

from .. import documents
from ..nightly import nightly
from ..stand_ins import stand_in
from . import tiny
from .runs import BESIDE, MINIBATCHES, SMALL, beside, remembered, setting_of

RUNS: dict[str, dict[str, Any]] = {
    "momentum, decay": {"client_optimizer": "momentum", "decay": 0.5, "decay_every": 2, "batch_size": 0},
    "uniform weights": {"weighting": "uniform", "server_learning_rate": 0.7},
    "fed_prox": {"algorithm": "fed_prox", "mu": 0.5},
    "fed_dyn": {"algorithm": "fed_dyn"},
    "scaffold": {"algorithm": "scaffold", "schedule": "uniform", "clients_per_round": 3},
    "fed_nova": {"algorithm": "fed_nova", "mu": 0.2},
    "fed_avg_m": {"algorithm": "fed_avg_m"},
    "modified_local_gd": {"algorithm": "modified_local_gd", "first_index": 1, "mu": 0.2},
    "fed_sgd": {"algorithm": "fed_sgd"},
    "K models": {"algorithm": "fed_ensemble", "num_models": 2},
    "K models of fed_dyn": {"algorithm": "fed_ensemble", "base": "fed_dyn", "num_models": 2},
    "walks": {"algorithm": "random_walk", "num_models": 2},
    "shared examples": {"algorithm": "data_sharing"},
    "clients drop out": {"dropout": 0.4},
    "two hidden layers": {"model_options": {"widths": (128, 128)}},
}
CASES = [(name, loss) for name in RUNS for loss in ("squared_error", "cross_entropy")]


def described(name: str, **more: Any) -> Any:
    own = {**SMALL, **({} if name == "fed_sgd" else MINIBATCHES), **RUNS[name], **more}
    return setting_of(**own, **BESIDE)


def evaluated(setting: Any, every: int) -> Any:
    """The setting with other evaluated rounds."""
    return dataclasses.replace(setting, size=setting.size._replace(evaluate_every=every))


@pytest.mark.parametrize(("name", "loss"), nightly(CASES, [("K models of fed_dyn", "cross_entropy")]))
def test_the_linearised_network_follows_the_flow_of_its_very_run(
    monkeypatch: pytest.MonkeyPatch, name: str, loss: str
) -> None:
    """And does not follow another order of minibatches, a client less, a rate 5 % off, the other loss."""
    monkeypatch.setattr(linear_models, "LINEARISED_WIDTH", 16)
    setting = described(name, loss=loss)
    verdict = linear_models.linearised_verdict(setting, cohorts(setting))
    assert verdict.passed and verdict.holds and verdict.control_fails, verdict
    assert float(verdict.measured) < 1e-12


@pytest.mark.parametrize("loss", nightly(LOSSES, ["exponential_sum"]))
def test_a_linear_model_follows_the_flow_under_every_loss_in_every_round(loss: str) -> None:
    """Of algorithm 3, from the zero function; a flow that forgets the start, or takes a mean for a sum, does not."""
    rate = {"client_learning_rate": 0.02 if loss.endswith("_sum") else 0.05}
    setting = evaluated(described("modified_local_gd", model="linear", loss=loss, batch_size=0, **rate), 1)
    theory, seen = predict(setting, cohorts(setting)), trained_networks(setting, 1)
    assert not np.any(seen.train[0]) and len(seen.rounds) == setting.size.num_rounds + 1
    verdict = linear_models.linear_verdict(theory, seen)
    assert verdict.passed and verdict.control_fails, verdict
    assert float(verdict.measured) < 1e-12

    def apart(**wrong: Any) -> float:
        flow = run_flow(setting, theory.blocks, theory.cohorts, **wrong)
        found = np.asarray(flow.predict(seen.train[0][:, 0], seen.test[0][:, 0], seen.rounds))
        return float(np.max(np.abs(found - seen.test[:, :, 0])) / np.max(np.abs(seen.test)))

    other = mean_form(loss) if loss.endswith("_sum") else f"{loss}_sum"
    assert apart() < 1e-12
    for wrong in ({"anchoring": 1.0}, {"algorithm": "fed_avg", "anchoring": 1.0}, {"mu": 0.0}, {"loss": other}):
        assert not apart(**wrong) < 1e-4, wrong


def check_a_start_at_zero(found: Any) -> None:
    """Nothing divides by the variance of the prior, which is 0."""
    assert [v.passed for v in found.verdicts] == [True], found.verdicts
    assert found.rows[0].variance_ratio is None and found.rows[0].mean_difference is None
    assert all(not np.any(law.cov) for law in found.theory.moments)


@pytest.mark.slow  # by day test_numbers_that_are_signs_and_others looks at such a model
@pytest.mark.parametrize("loss", ["squared_error", "exponential"])
def test_a_linear_model_that_starts_at_zero_beside_its_theory(loss: str) -> None:
    sizes = {"num_train": 30, "num_test": 8, "num_clients": 3, "num_rounds": 3, "draws": 5}
    rate = {"client_learning_rate": 0.1} if loss == "squared_error" else {}
    check_a_start_at_zero(beside(model="linear", algorithm="fed_prox", loss=loss, **sizes, **rate))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["exponential", "logistic_sum", "squared_error_sum"])
def test_networks_under_other_losses_end_without_a_disagreement(loss: str) -> None:
    sizes = {"num_train": 30, "num_test": 8, "num_clients": 3, "num_rounds": 3, "compared": (8, 16, 32), "draws": 5}
    found = beside(loss=loss, client_learning_rate=0.05, **sizes)
    assert all(v.passed is not False for v in found.verdicts), found.verdicts


def test_numbers_that_are_signs_and_others() -> None:
    (x, y, a, b), clients = own_data()
    signs = (x, (2.0 * y - 1)[:, None], a, (2.0 * b - 1)[:, None])
    algorithm = fed_avg(linear(3), all_clients(4), 0.1, loss="logistic", work=Work(epochs=5, batch_size=None))
    found = compare(algorithm, signs, clients, num_rounds=2, draws=5)
    assert found.rows[0].accuracy is None and all(v.passed for v in found.verdicts)
    check_a_start_at_zero(found)
    assert set(found.history.curves()) == {"train.loss", "test.loss"}
    with pytest.raises(ValueError, match=r"y_train: got .*, must be -1 or 1 for the loss 'logistic'"):
        compare(algorithm, (x, 2 * signs[1], a, signs[3]), clients, num_rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        # there is no other round to be late by
        {"num_rounds": 1, "batch_size": 1},
        # nobody answers in the last round
        {"dropout": 0.9, "num_rounds": 3},
        {"alpha": 0.3, "batch_size": 8, "local_epochs": 1, "schedule": "uniform", "clients_per_round": 1},
    ],
)
def test_every_control_can_fail(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Wrong theories that would be right of this very run are left out.

    By day ``test_near_misses_that_would_be_right_are_left_out`` of test_linear_models.py holds the same.
    """
    monkeypatch.setattr(linear_models, "LINEARISED_WIDTH", 16)
    setting = described("fed_prox", **changes)
    assert linear_models.linearised_verdict(setting, cohorts(setting)).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model": "logistic"},  # starts at zero
        {"model": "logistic", "loss": "cross_entropy", "client_test": 0.5},
        {"model": "logistic", "zero_init": False, "algorithm": "data_sharing"},
        {"dataset": "sine", "partition": "by_user", "model": "rbf_linear", "schedule": "uniform",
         "clients_per_round": 10},
        {"partition": "shards", "client_test": 0.3},
    ],
)  # fmt: skip
def test_runs_of_other_kinds_end_without_a_disagreement(options: dict[str, Any]) -> None:
    sizes = {} if "dataset" in options else {"num_train": 30, "num_test": 8, "num_clients": 3}
    found = beside(**{"num_rounds": 3, "compared": (8, 16, 32), "draws": 5, **sizes, **options})
    assert all(v.passed is not False for v in found.verdicts), found.verdicts


@pytest.mark.parametrize("loss", nightly(["squared_error", "cross_entropy"], ["squared_error"]))
def test_the_linear_model_of_the_analytic_kernel_follows_the_flow(loss: str) -> None:
    setting = described("fed_prox", loss=loss, batch_size=0)
    theory = predict(evaluated(setting, setting.size.num_rounds), cohorts(setting))
    assert linear_models.of_kernel_verdict(theory).passed


def own_data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3))
    x *= np.sqrt(3) / np.linalg.norm(x, axis=1, keepdims=True)
    y = np.array(np.sign(x[:, 0] * x[:, 1]) > 0, np.int32)
    return (x[:24], y[:24], x[24:], y[24:]), quantity_skew(24, 4, 2.0, 0, min_client_size=2)


@functools.cache
def small_network() -> ft.types.Model:
    """One object, whose programs tests share."""
    return remembered(mlp(3, 2, (16,)))


@pytest.mark.slow
def test_the_example_of_the_readme_learns_as_predicted() -> None:
    """Its text up to the comparison, which is the test below; by day runs of other tests learn as predicted."""
    names = documents.run("side = ft.compare(", until="side = ft.compare(")
    run, theory = names["run"], names["theory"]
    before, after = (
        row.metrics["test"]["accuracy"] for row in (run.history.evaluations[0], run.history.evaluations[-1])
    )
    predicted = theory.history.curves()["test.accuracy"]
    assert before < 0.3 < 0.6 < after and abs(predicted[0] - 0.1) < 0.1 and abs(predicted[-1] - after) < 0.1


@pytest.mark.slow
def test_the_example_of_the_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(linear_models, "LINEARISED_WIDTH", 16)
    monkeypatch.chdir(tmp_path)
    side = documents.run("side = ft.compare(")["side"]
    assert (tmp_path / "side.png").stat().st_size > 10_000
    assert side.setting.size.widths == (32, 128, 512)
    assert [row.method for row in side.rows] == [
        *(f"fed_avg, width {width}" for width in side.setting.size.widths),
        "NTK-FL, averaged kernel, width 512", "federated flow, expected, round 10", "GP limit (Theorem 2)",
    ]  # fmt: skip
    assert all(v.passed is not False for v in side.verdicts), side.verdicts
    errors = [np.exp(np.log(gap.error[-1]).mean()) for gap in side.gaps]
    assert errors[0] > 2 * errors[2]
    simulated, flow = (side.history.curves()["test.mse"], side.history.predicted.curves()["test.mse"])
    assert np.all(np.abs(simulated / flow - 1) < 0.1) and simulated[-1] < 0.2 * simulated[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parameterization": "standard"}, "whose kernel grows with its width"),
        ({"w_std": 0.0, "b_std": 0.0}, "which starts as the zero function"),
    ],
)
def test_refuses_models_without_a_limit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        setting_of(**SMALL, **given, **BESIDE)


def test_refuses_one_class() -> None:
    (x, y, a, b), clients = own_data()
    one = fed_avg(mlp(3, 1, (8,)), all_clients(4), 0.1, loss="cross_entropy")
    with pytest.raises(ValueError, match="loss: got cross_entropy, must be squared_error if there is one class only"):
        compare(one, (x, 0 * y, a, 0 * b), clients, num_rounds=2)


def test_every_algorithm_has_a_rule_or_says_what_is_nearest() -> None:
    followed = set()
    for name in catalogue("algorithms"):
        more = {"server_examples": 20} if name == "fed_be" else {}
        rule = build(describe(algorithm=name, num_clients=4, num_train=120, widths=(6,), **more)).algorithm.rule
        if isinstance(rule, str):
            assert "; nearest is fed_" in rule, name
        else:
            followed.add(name)
    assert followed == {
        *(
            "data_sharing",
            "fed_async",
            "fed_avg",
            "fed_avg_m",
            "fed_dyn",
            "fed_ensemble",
            "fed_nova",
            "fed_prox",
            "fed_sgd",
        ),
        *("modified_local_gd", "random_walk", "scaffold"),
    }


REFUSED = [
    ({"algorithm": "scaffold", "client_optimizer": "momentum"}, "client_optimizer: is not used with algorithm"),
    ({"loss": "hinge"}, "loss: got 'hinge', allowed are squared_error, cross_entropy"),
    ({"mu": 0.1}, "mu: is not used with algorithm 'fed_avg'"),
]


WITHOUT_RULE = [
    ({"algorithm": "fed_adam"}, "its server scales"),
    ({"algorithm": "fed_ensemble", "base": "fed_yogi"}, "its server scales"),
    ({"channel": "qsgd:4"}, "its channel changes the updates; nearest is a lossless channel"),
    ({"sparsity": 0.5}, "its channel changes the updates"),
    ({"secure_aggregation": True}, "secure_aggregation rounds its messages"),
    ({"beta": 0.5}, "its clients use a share beta = 0.5 of their examples"),
    ({"max_update_norm": 3.0}, "its server may reject finite messages"),
    ({"client_optimizer": "adam"}, "its client_optimizer: got an optimiser that is not linear in the gradients"),
]


@pytest.mark.parametrize(("given", "said"), WITHOUT_RULE)
def test_the_closed_form_does_not_follow_and_says_why(given: dict[str, Any], said: str) -> None:
    setting = setting_of(**{**SMALL, **given}, **BESIDE)
    assert isinstance(setting.rule, str) and said in setting.rule
    with pytest.raises(ValueError, match="which theory does not follow: "):
        _ = setting.followed


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_refuses_runs_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    """On the command line, by both commands."""
    for command in (cli_compare, cli_predict):
        monkeypatch.setattr(command, "build", lambda described: pytest.fail("the data were loaded"))
    for prepare in (
        lambda described: cli_compare.prepare_run(
            cli_compare.ComparisonOptions(), FigureOptions(), VerdictOptions(), described
        ),
        lambda described: cli_predict.prepare(
            cli_predict.PredictOptions(), FigureOptions(), Descriptions((described,))
        ),
    ):
        with pytest.raises(ValueError) as caught:
            prepare(describe(**given))
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ({}, {"widths": (64,)}, "widths: got (64,), must be 3 or more different ones"),
        ({}, {"widths": (64, 64, 128)}, "widths: got (64, 64, 128), must be 3 or more"),
        ({}, {"widths": (0, 1, 2)}, "widths: got 0, must be a whole number of at least 1"),
        ({}, {"hidden_layers": 0}, "hidden_layers: got 0"),
        ({}, {"evaluations": 0}, "evaluations: got 0"),
        ({"model": "deep_linear"}, {"hidden_layers": 3}, "hidden_layers: got 3, must be left out: only mlp takes it"),
        (
            {"model": "deep_linear", "width": 4},
            {},
            "width: got 4, must be left out: the networks have the widths of --widths",
        ),
    ],
)
def test_refuses_widths_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(cli_compare, "build", lambda described: pytest.fail("the data were loaded"))
    with pytest.raises(ValueError) as caught:
        cli_compare.prepare_run(
            cli_compare.ComparisonOptions(**given), FigureOptions(), VerdictOptions(), describe(**model)
        )
    assert said in str(caught.value)


def test_a_deep_linear_network_keeps_its_depth() -> None:
    setting = setting_of(**SMALL, model="deep_linear", depth=4, **BESIDE)
    assert [setting.model(width).name for width in setting.size.widths] == [
        f"deep_linear(64-{w}-{w}-{w}-10)" for w in (8, 16, 32)
    ]


# ---- from Python, with a recipe that no entry knows ----


@ft.recipe
def half_way(model, schedule, client_learning_rate, share=0.5, batch_size=4):
    """Builds FedAvg whose server goes a share of the way to the clients' mean."""
    training = trained(model, client_learning_rate, None, Work(steps=3, batch_size=batch_size), None)

    def server(rate):
        def update(params, mean, info):
            return jax.tree.map(lambda w, d: w - share * d, params, mean), {}

        return Server(lambda params: params, lambda params: params, lambda params: params, update)

    return train_and_average(
        "half_way",
        training,
        schedule,
        ft.Averaging(),
        AveragingParts(server=server),
        rule={"server_learning_rate": share},
    )


@pytest.mark.slow
def test_a_recipe_of_ones_own_is_simulated_predicted_and_compared() -> None:
    """By the three functions, with the same arguments."""
    data, clients = own_data()
    algorithm = half_way(linear(3, 2), all_clients(4), 0.1)
    run = ft.simulate(algorithm, data, clients, num_rounds=6, seed=0, evaluation=ft.Evaluation(3))
    theory = ft.predict(
        algorithm, data, clients, num_rounds=6, seed=0, evaluation=ft.Evaluation(3), forecasting=ft.Forecasting(None, 4)
    )
    side = ft.compare(algorithm, data, clients, num_rounds=6, seed=0, draws=5)
    assert {*run.history.curves()} == {*theory.history.curves()} == {*side.history.curves()}
    assert run.history.evaluated.tolist() == theory.history.evaluated.tolist() == [0, 3, 6]
    assert theory.history.is_predicted and side.history.predicted is not None
    assert [v.passed for v in side.verdicts] == [True]
    for one in (run.history, theory.history, side.history):
        assert len(one.plot().axes) == 2 and "<img" in one._repr_html_() and len(one.to_pandas())


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of width 16 are linearised, and those of the first verdict are those of the next one too."""
    found, train = list[Any](), linear_models.trained_networks

    def trained_networks(*given: Any, **more: Any) -> Any:
        if not found:
            found.append(train(*given, **more))
        return found[0]

    monkeypatch.setattr(linear_models, "trained_networks", trained_networks)
    monkeypatch.setattr(linear_models, "LINEARISED_WIDTH", 16)


@pytest.mark.usefixtures("trained_once")
def test_a_rule_of_ones_own_that_is_wrong_by_5_percent_does_not_pass() -> None:
    data, clients = own_data()
    network = half_way(small_network(), all_clients(4), 0.5, batch_size=None)
    wrong = network._replace(
        composition=network.composition._replace(rule={**network.rule, "server_learning_rate": 0.475})
    )
    right, mistaken = (
        comparison_of(of_rule, examples_of(of_rule, data, clients), 6, 0, ft.Evaluation(), (16, 32, 64), 5)
        for of_rule in (network, wrong)
    )
    assert (right.followed.server_learning_rate, mistaken.followed.server_learning_rate) == (0.5, 0.475)
    for rule, holds in ((right.rule, True), (mistaken.rule, False)):
        setting = dataclasses.replace(right, rule=rule)
        assert linear_models.linearised_verdict(setting, cohorts(setting)).holds == holds


def test_arrays_without_a_test_split_and_images() -> None:
    """Training examples take the place of test examples; a dense network flattens images."""
    (x, y, *_), clients = own_data()
    images = np.repeat(x[:, :, None, None], 2, axis=2)  # [n, 3, 2, 1]
    algorithm = fed_avg(mlp(6, 2, (16,)), all_clients(4), 0.3, work=Work(steps=2, batch_size=None))
    found = ft.predict(algorithm, (images, y), clients, num_rounds=2, forecasting=ft.Forecasting(None, 2, rates=False))
    assert set(found.history.curves()) == {"train.mse", "train.accuracy", "train.accuracy_of_members"}
    assert np.isfinite(found.loss)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_rounds": 0}, "num_rounds: got 0"),
        ({"evaluation": ft.Evaluation(measure=lambda a, s: {})}, "evaluation.measure: is an option of simulate only"),
        ({"draws": 2}, "draws: got 2, must be a whole number of at least 5"),
        ({"clients": None}, "clients: got None, must be a Partition"),
    ],
)
def test_refuses_arguments(change: dict[str, Any], said: str) -> None:
    data, clients = own_data()
    algorithm = fed_avg(small_network(), all_clients(4), 0.3)
    with pytest.raises(ValueError) as caught:
        compare(algorithm, data, **{"clients": clients, "num_rounds": 2, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param(
            {"averaging": ft.Averaging(server_optimizer=optax.sgd(optax.piecewise_constant_schedule(1.0, {30: 0.5})))},
            "its server_optimizer: got an optimiser that is not gradient descent at a constant rate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"averaging": ft.Averaging(server_optimizer=optax.adam(0.1))},
            "its server_optimizer: got an optimiser that is not linear",
            marks=pytest.mark.slow,
        ),
        (
            {"client_learning_rate": None, "client_optimizer": optax.sgd(optax.linear_schedule(0.0, 0.1, 5))},
            "client_optimizer: got an optimiser whose first local step is 0 and whose later ones are not",
        ),
    ],
)
def test_the_closed_form_is_not_used_for_steps_that_it_would_get_wrong(more: dict[str, Any], said: str) -> None:
    data, clients = own_data()
    algorithm = fed_avg(small_network(), all_clients(4), **{"client_learning_rate": 0.3, **more})
    theory = ft.predict(algorithm, data, clients, num_rounds=2, forecasting=ft.Forecasting(rates=False))
    assert not theory.plan.is_flow and said in theory.plan.how


def test_refuses_a_rate_of_0() -> None:
    data, clients = own_data()
    algorithm = fed_avg(small_network(), all_clients(4), lambda round_: 0.0 * round_)
    for call in (ft.predict, ft.compare):
        with pytest.raises(ValueError, match="client_learning_rate: got 0 in every round"):
            call(algorithm, data, clients, num_rounds=2)


@pytest.mark.usefixtures("trained_once")
@pytest.mark.parametrize("looks_ahead", nightly([False, True], [True]))
def test_a_server_optimiser_is_followed_as_fed_avg_m_is(looks_ahead: bool) -> None:
    data, clients = own_data()
    by_optax = ft.Averaging(server_optimizer=optax.sgd(0.7, momentum=0.6, nesterov=looks_ahead))
    whole = Work(steps=2, batch_size=None)
    found = fed_avg(small_network(), all_clients(4), 0.3, whole, averaging=by_optax)
    setting = comparison_of(found, examples_of(found, data, clients), 6, 0, ft.Evaluation(), (16, 32, 64), 5)
    assert linear_models.linearised_verdict(setting, cohorts(setting)).passed
    assert setting.followed.nesterov == looks_ahead
    wrong = dataclasses.replace(setting, rule=dataclasses.replace(setting.followed, nesterov=not looks_ahead))
    assert not linear_models.linearised_verdict(wrong, cohorts(wrong)).holds


@ft.recipe
def decayed(model, schedule, client_learning_rate, weight_decay=0.5, homogeneity=1.0):
    """Builds FedAvg with weight decay in the clients' objective."""

    def pose(broadcast, client_state):
        return LocalProblem(broadcast, anchor=jax.tree.map(lambda w: 0 * w, broadcast), prox=weight_decay)

    training = trained(model, client_learning_rate, None, Work(steps=3, batch_size=None), "squared_error")
    rule = {"weight_decay": weight_decay, "homogeneity": homogeneity}
    local = AveragingParts(local={"pose": pose})
    return train_and_average("decayed", training, schedule, ft.Averaging(), local, rule)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks, and a single control."""
    monkeypatch.setattr(linear_models, "LINEARISED_WIDTH", 16)
    monkeypatch.setattr(linear_models, "near_misses", lambda *given: {})


def of_decay(model: Any, **options: Any) -> Any:
    found = decayed(model, per_client_permutations(2, 2), 0.1, **options)
    examples = examples_of(found, own_data()[0], ft.partition.iid(24, 2, 0))
    return comparison_of(found, examples, 6, 0, ft.Evaluation(6), (16, 32, 64), 5)


@pytest.mark.usefixtures("few_programs")
def test_weight_decay_shrinks_the_initial_function_in_laws_too() -> None:
    setting = of_decay(linear(3, 2, sigma=1.0))
    theory = predict(setting, cohorts(setting))
    assert theory.limit is None and all(verdict.passed for verdict in linear_models.law_verdicts(theory))
    variance = all_verdicts._propagated_variance(theory.blocks, *theory.influences[6])
    np.testing.assert_allclose(variance, np.trace(theory.moments[-1].cov, axis1=1, axis2=2), rtol=1e-9)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", ["linearised", "of_kernel"])
def test_weight_decay_of_a_network_of_homogeneity_2(name: str) -> None:
    """Which one of two layers without biases has, at the weights about which it is linearised."""
    setting = of_decay(mlp(3, 2, (16,), "relu", b_std=0.0), homogeneity=2.0)
    plan = cohorts(setting)
    if name == "linearised":
        assert linear_models.linearised_verdict(setting, plan).passed
        return
    theory = predict(setting, plan)
    assert linear_models.of_kernel_verdict(theory).passed and not linear_models.law_verdicts(theory)


NO_TEST = "no test examples, so that all numbers are of training examples"


def test_a_comparison_without_test_examples_says_so() -> None:
    data, clients = own_data()
    algorithm = fed_avg(linear(3, 2), all_clients(4), 0.1)
    for given, said in ((data[:2], True), (data, False)):
        examples = examples_of(algorithm, given, clients)
        title = comparison_of(algorithm, examples, 2, 0, ft.Evaluation(), (16, 32, 64), 5).title
        assert (NO_TEST in title) == said


@pytest.mark.slow
def test_a_comparison_without_test_examples_has_training_metrics_only() -> None:
    """By day ``test_arrays_without_a_test_split_and_images`` and the test above hold the same."""
    (x, y, *_), clients = own_data()
    side = compare(fed_avg(linear(3, 2), all_clients(4), 0.1), (x, y), clients, num_rounds=2, draws=5)
    assert set(side.history.curves()) == {"train.mse", "train.accuracy", "train.accuracy_of_members"}
    assert NO_TEST in side.setting.title


def test_a_recipe_that_is_not_marked_cannot_be_compared() -> None:
    data, clients = own_data()
    algorithm = half_way.__wrapped__(small_network(), all_clients(4), 0.5)
    with pytest.raises(ValueError, match=r"mark the function that builds it with @fedtangent\.recipe"):
        compare(algorithm, data, clients, num_rounds=2)


def test_a_standard_case_is_one_call_in_python(monkeypatch: pytest.MonkeyPatch):
    """Of its settings nothing is run here: ``run`` itself is that of test_side_by_side.py."""
    with monkeypatch.context() as patch:
        patch.setattr(comparing, "build", lambda *given: [given, "another setting"])
        patch.setattr(comparing, "run", lambda *given: stand_in(side_by_side.Comparison, given=given))
        found = ft.compare_case("sine", scale="smoke", seed=3, progress=False)
    assert [one.given for one in found] == [(("sine", None, "smoke", 3), False), ("another setting", False)]
    with pytest.raises(ValueError, match="case: got 'sin', allowed are digits, fashion_mnist, sine"):
        ft.compare_case("sin")
    with pytest.raises(ValueError, match="scale: got 'small', allowed are smoke, default, paper"):
        ft.compare_case("sine", scale="small")


@pytest.mark.slow
def test_a_standard_case_is_compared_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By day the test above, and those of ``linear_result``, hold the same."""
    monkeypatch.setattr(comparing, "build", lambda name, *given: [tiny.linear()] if given == (None, "smoke", 3) else [])
    monkeypatch.setattr(side_by_side, "_evolutions", lambda *given: [])  # of NTK-FL, as in conftest.py
    (found,) = ft.compare_case("sine", scale="smoke", seed=3, progress=False)
    assert found.setting.name == tiny.linear().name and all(v.passed is not False for v in found.verdicts)
