"""Any run beside its theory: every algorithm that has a rule, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedtangent.compare import exact
from fedtangent.compare.beside import BesideOptions, beside_theory, setting_of
from fedtangent.compare.predicted import predict, run_flow
from fedtangent.compare.simulated import cohorts, trained_networks
from fedtangent.data.partition import quantity_skew
from fedtangent.engine.building import build
from fedtangent.engine.description import describe
from fedtangent.entries import catalogue
from fedtangent.losses import LOSSES, mean_form

from .. import documents
from ..nightly import nightly

SMALL: dict[str, Any] = {
    "dataset": "digits", "num_train": 40, "num_test": 8, "partition": "quantity_skew", "num_clients": 5, "alpha": 2.0,
    "num_rounds": 5, "client_learning_rate": 0.3,
}  # fmt: skip
MINIBATCHES = {"batch_size": 4, "local_epochs": 2}
BESIDE = BesideOptions((8, 16, 32), 5, 1, 3)
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
    "two hidden layers": {"hidden_layers": 2},
}
CASES = [(name, loss) for name in RUNS for loss in ("squared_error", "cross_entropy")]


def described(name: str, **more: Any) -> Any:
    own = {**SMALL, **({} if name == "fed_sgd" else MINIBATCHES), **RUNS[name], **more}
    hidden_layers = own.pop("hidden_layers", 1)
    return setting_of(describe(**own), dataclasses.replace(BESIDE, hidden_layers=hidden_layers))


@pytest.mark.parametrize(("name", "loss"), nightly(CASES, [("K models of fed_dyn", "cross_entropy")]))
def test_the_linearised_network_follows_the_flow_of_its_very_run(
    monkeypatch: pytest.MonkeyPatch, name: str, loss: str
) -> None:
    """And does not follow another order of minibatches, a client less, a rate 5 % off, the other loss."""
    monkeypatch.setattr(exact, "LINEARISED_WIDTH", 16)
    setting = described(name, loss=loss)
    verdict = exact.linearised_verdict(setting, cohorts(setting))
    assert verdict.passed and verdict.holds and verdict.control_fails, verdict
    assert float(verdict.measured) < 1e-12


@pytest.mark.parametrize("loss", nightly(LOSSES, ["exponential_sum"]))
def test_a_linear_model_follows_the_flow_under_every_loss_in_every_round(loss: str) -> None:
    """Of algorithm 3, from the zero function; a flow that forgets the start, or takes a mean for a sum, does not."""
    rate = {"client_learning_rate": 0.02 if loss.endswith("_sum") else 0.05}
    setting = dataclasses.replace(described("modified_local_gd", model="linear", loss=loss, **rate), evaluate_every=1)
    theory, seen = predict(setting, cohorts(setting)), trained_networks(setting, 1)
    assert not np.any(seen.train[0]) and len(seen.rounds) == setting.num_rounds + 1
    verdict = exact.linear_verdict(theory, seen)
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


def test_a_linear_model_that_starts_at_zero_beside_its_theory() -> None:
    """Nothing divides by the variance of the prior, which is 0."""
    sizes = {"num_train": 30, "num_test": 8, "num_clients": 3, "num_rounds": 3, "draws": 5}
    for options in ({"loss": "exponential"}, {"client_learning_rate": 0.1}):
        found = beside_theory(model="linear", algorithm="fed_prox", **sizes, **options)
        assert [v.passed for v in found.verdicts] == [True], found.verdicts
        assert found.rows[0].variance_ratio is None and found.rows[0].mean_difference is None
        assert all(not np.any(law.cov) for law in found.theory.moments)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["exponential", "logistic_sum", "squared_error_sum"])
def test_networks_under_other_losses_end_without_a_disagreement(loss: str) -> None:
    sizes = {"num_train": 30, "num_test": 8, "num_clients": 3, "num_rounds": 3, "widths": (8, 16, 32), "draws": 5}
    found = beside_theory(loss=loss, client_learning_rate=0.05, **sizes)
    assert all(v.passed is not False for v in found.verdicts), found.verdicts


def test_numbers_that_are_signs_and_others() -> None:
    (x, y, a, b), clients = own_data()
    signs = (x, (2.0 * y - 1)[:, None], a, (2.0 * b - 1)[:, None])
    options = {"model": "linear", "loss": "logistic", "num_rounds": 2, "draws": 5, "batch_size": 0}
    found = beside_theory(signs, clients, **options)
    assert found.rows[0].accuracy is None and all(v.passed for v in found.verdicts)
    with pytest.raises(ValueError, match=r"y_train: got .*, must be -1 or 1 for the loss 'logistic'"):
        beside_theory((x, 2 * signs[1], a, signs[3]), clients, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rounds": 1, "batch_size": 1},  # there is no other round to be late by
        # nobody answers in the last round
        pytest.param({"dropout": 0.9, "num_rounds": 3}, marks=pytest.mark.slow),
        {"alpha": 0.3, "batch_size": 8, "local_epochs": 1, "schedule": "uniform", "clients_per_round": 1},
    ],
)
def test_every_control_can_fail(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Wrong theories that would be right of this very run are left out."""
    monkeypatch.setattr(exact, "LINEARISED_WIDTH", 16)
    setting = described("fed_prox", **changes)
    assert exact.linearised_verdict(setting, cohorts(setting)).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model": "logistic"},  # starts at zero
        {"model": "logistic", "loss": "cross_entropy", "client_test": 0.5},
        {"model": "logistic", "zero_init": False, "algorithm": "data_sharing"},
        {"data": "sine", "partition": "by_user", "model": "rbf_linear", "schedule": "uniform",
         "clients_per_round": 10},
        {"partition": "shards", "client_test": 0.3},
    ],
)  # fmt: skip
def test_runs_of_other_kinds_end_without_a_disagreement(options: dict[str, Any]) -> None:
    sizes = {} if "data" in options else {"num_train": 30, "num_test": 8, "num_clients": 3}
    found = beside_theory(**{"num_rounds": 3, "widths": (8, 16, 32), "draws": 5, **sizes, **options})
    assert all(v.passed is not False for v in found.verdicts), found.verdicts


@pytest.mark.parametrize("loss", nightly(["squared_error", "cross_entropy"], ["squared_error"]))
def test_the_linear_model_of_the_analytic_kernel_follows_the_flow(loss: str) -> None:
    setting = described("fed_prox", loss=loss)
    theory = predict(dataclasses.replace(setting, evaluate_every=setting.num_rounds), cohorts(setting))
    assert exact.of_kernel_verdict(theory).passed


def own_data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3))
    x *= np.sqrt(3) / np.linalg.norm(x, axis=1, keepdims=True)
    y = np.array(np.sign(x[:, 0] * x[:, 1]) > 0, np.int32)
    return (x[:24], y[:24], x[24:], y[24:]), quantity_skew(24, 4, 2.0, 0, min_client_size=2)


def test_the_example_of_the_readme_from_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "LINEARISED_WIDTH", 16)
    found = documents.run("beside_theory")["found"]
    assert found.setting.widths == (32, 128, 512)
    assert [row.method for row in found.rows] == [
        "fed_prox, width 32", "fed_prox, width 128", "fed_prox, width 512", "federated flow, round 5",
    ]  # fmt: skip
    assert all(v.passed for v in found.verdicts), found.verdicts
    errors = [np.exp(np.log(gap.error[-1]).mean()) for gap in found.gaps]
    assert errors[0] > 2 * errors[2]
    assert np.all(np.abs(found.gaps[2].simulated / found.gaps[2].predicted - 1) < 0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, y, a, b: (x[:, 0], y, a, b), "data: got x_train of shape (24,) and y_train of shape (24,), must be"),
        (lambda x, y, a, b: (x, y[1:], a, b), "data: got x_train of shape (24, 3) and y_train of shape (23,)"),
        (lambda x, y, a, b: (x, y, np.where(a > 0, np.nan, a), b), "x_test: got"),
        (lambda x, y, a, b: (x, y - 1, a, b), "y_train: got -1 at position 0 (9 such), must be from 0 to 1"),
        (lambda x, y, a, b: (x, y, a[:, :2], b), "x_test of shape (6, 2)"),
        (lambda x, y, a, b: (x, y / 2, a, b), "y_train: got float64 of shape (24,), must be [n] integer labels or"),
        (lambda x, y, a, b: (x, y, a), "data: got a tuple of 3, must be a name, a Dataset or (x_train, y_train,"),
    ],
)
def test_refuses_other_arrays(change: Any, said: str) -> None:
    data, clients = own_data()
    with pytest.raises(ValueError) as caught:
        beside_theory(change(*data), clients)
    assert said in str(caught.value)


def test_refuses_options_of_what_is_given() -> None:
    data, clients = own_data()
    for given, said in (({"num_train": 3}, "data that are given"), ({"num_clients": 3}, "a partition that is given")):
        with pytest.raises(ValueError, match=f"is not used with {said}"):
            beside_theory(data, clients, **given)
    with pytest.raises(ValueError, match="partition: got"):
        beside_theory(data, [[0, 1], [2]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parameterization": "standard"}, "model: got 'mlp' whose kernel grows with its width"),
        ({"w_std": 0.0, "b_std": 0.0}, "model: got 'mlp' that starts as the zero function"),
    ],
)
def test_refuses_models_without_a_limit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        beside_theory(**{name: value for name, value in SMALL.items() if name != "dataset"}, **given)


def test_refuses_one_class() -> None:
    (x, y, a, b), clients = own_data()
    with pytest.raises(ValueError, match="loss: got cross_entropy, must be squared_error for a single class"):
        beside_theory((x, 0 * y, a, 0 * b), clients, loss="cross_entropy")


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
        *("data_sharing", "fed_avg", "fed_avg_m", "fed_dyn", "fed_ensemble", "fed_nova", "fed_prox", "fed_sgd"),
        *("modified_local_gd", "random_walk", "scaffold"),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm": "fed_adam"}, "algorithm: got 'fed_adam', of which theory has no rule: its server divides"),
        (
            {"algorithm": "fed_ensemble", "base": "fed_yogi"},
            "algorithm: got 'fed_yogi_ensemble', of which theory",
        ),
        ({"channel": "qsgd:4"}, "channel: got 'qsgd:4', must be 'lossless' beside theory"),
        ({"sparsity": 0.5}, "sparsity: got 0.5, must be 0.0 beside theory"),
        ({"secure_aggregation": True}, "secure_aggregation: got True, must be False beside theory"),
        ({"beta": 0.5}, "beta: got 0.5, must be 1.0 beside theory"),
        ({"max_update_norm": 3.0}, "max_update_norm: got 3.0, must be inf beside theory"),
        ({"client_optimizer": "adam"}, "client_optimizer: got 'adam', allowed beside theory are sgd, momentum"),
        (
            {"algorithm": "scaffold", "client_optimizer": "momentum"},
            "client_optimizer: is not used with algorithm",
        ),
        ({"loss": "hinge"}, "loss: got 'hinge', allowed are squared_error, cross_entropy"),
        (
            {"model": "cnn"},
            "model: got 'cnn', which has no analytic kernel, allowed are deep_linear, linear, logistic, mlp, rbf_",
        ),
        ({"widths": (64,)}, "widths: got (64,), must be 3 or more different ones to compare"),
        ({"widths": (64, 64, 128)}, "widths: got (64, 64, 128), must be 3 or more"),
        ({"widths": (0, 1, 2)}, "widths: got 0, must be a whole number of at least 1"),
        ({"draws": 2}, "draws: got 2, must be a whole number of at least 5"),
        ({"hidden_layers": 0}, "hidden_layers: got 0"),
        ({"model": "deep_linear", "depth": 4}, "depth: got 4; beside theory it is given by widths and hidden_layers"),
        ({"evaluations": 0}, "evaluations: got 0"),
        ({"mu": 0.1}, "mu: is not used with algorithm 'fed_avg'"),
    ],
)
def test_refuses_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str) -> None:
    monkeypatch.setattr("fedtangent.compare.beside.build", lambda described: pytest.fail("the data were loaded"))
    with pytest.raises(ValueError) as caught:
        beside_theory(**given)
    assert said in str(caught.value)
