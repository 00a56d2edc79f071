"""Runs from given weights beside their linearisation there: a convolution, momentum, Adam, several models."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import fedtangent as ft
from fedtangent._src.comparison import from_start
from fedtangent._src.comparison.linear_models import MOST_ROWS

from .. import documents
from ..nightly import nightly

NESTEROV = optax.sgd(2e-3, momentum=0.6, nesterov=True)


class Convolution(linen.Module):
    """A network without an analytic kernel here."""

    channels: int = 8

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.tanh(linen.Conv(self.channels, (3, 3))(x))
        return linen.Dense(2)(x.reshape(len(x), -1))


def images() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6, 6, 1))
    y = (x[:, 0, 0, 0] * x[:, 1, 1, 0] > 0).astype(int)
    return x[:30], y[:30], x[30:], y[30:]


DATA, CLIENTS = images(), ft.partition.dirichlet(images()[1], num_clients=4, alpha=1.0, seed=0, min_client_size=2)
WORK = ft.Work(steps=3, batch_size=4)
WHOLE = ft.Work(steps=2, batch_size=None)  # no program that draws minibatches


MODEL = ft.models.from_flax(Convolution(), DATA[0][:1], 2)


@functools.cache
def fed_avg(model: Any = MODEL, rate: float | None = 0.003, work: ft.Work = WORK, **more: Any) -> Any:
    """The same object of the same arguments, so that tests share its programs."""
    more = {"loss": "squared_error", **more}
    return ft.fed_avg(model, ft.schedules.uniform_sampling(4, 3), rate, work, **more)


@functools.cache
def two_models() -> Any:
    options = {"client_learning_rate": 0.003, "work": WORK, "loss": "squared_error"}
    return ft.fed_ensemble(MODEL, ft.schedules.per_client_permutations(4, 2), **options)


def gap(history: Any, other: Any, metric: str = "train.mse") -> float:
    one, two = history.curves()[metric], other.curves()[metric]
    return float(np.max(np.abs(one - two)) / np.abs(one - one[0]).max())


@functools.cache
def compared() -> Any:
    """Two models beside the flow of their kernels, for all tests that look at it."""
    key = jax.random.key(3)
    return ft.compare(two_models(), DATA, CLIENTS, num_rounds=4, seed=0, start=key, evaluation=ft.Evaluation(2))


@pytest.fixture
def judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on the linearisation, for which a program is compiled at every start, is that of ``compared``."""
    (verdict,) = compared().verdicts
    monkeypatch.setattr(from_start, "linearised_follows", lambda *given: verdict)


@pytest.mark.parametrize("case", nightly(["sgd", "nesterov", "cross_entropy", "two models"], ["two models"]))
def test_a_convolution_follows_the_flow_of_its_own_kernel(case: str) -> None:
    """And its linearisation does so to rounding, but not wrong flows."""
    key = jax.random.key(3)
    algorithm = {
        "sgd": lambda: fed_avg(),
        "nesterov": lambda: fed_avg(rate=None, client_optimizer=NESTEROV),
        "cross_entropy": lambda: fed_avg(rate=0.02, loss="cross_entropy"),
        "two models": two_models,
    }[case]()
    evaluation = ft.Evaluation(2)
    side = (
        compared()
        if case == "two models"
        else ft.compare(algorithm, DATA, CLIENTS, num_rounds=4, seed=0, start=key, evaluation=evaluation)
    )
    (verdict,) = side.verdicts
    without_answer = dataclasses.replace(side, verdicts=(verdict._replace(holds=None),))
    assert side.undecided == () and without_answer.undecided == (f"{verdict.statement} [{verdict.subject}]",)
    assert verdict.passed, verdict
    assert side.how.startswith("the flow") and side.history.evaluated.tolist() == [0, 2, 4]
    run = ft.simulate(algorithm, DATA, CLIENTS, num_rounds=4, seed=0, start=key, evaluation=ft.Evaluation(2))
    theory = ft.predict(
        algorithm, DATA, CLIENTS, num_rounds=4, seed=0, start=key, evaluation=ft.Evaluation(2),
        forecasting=ft.Forecasting(rates=False),
    )  # fmt: skip
    metric = "train.nll" if case == "cross_entropy" else "train.mse"
    assert gap(run.history, side.history, metric) < 1e-4  # float32 beside float64
    assert gap(theory.history, side.history.predicted, metric) < 1e-9  # one flow in two ways
    assert gap(run.history, theory.history, metric) < 0.2  # a lazy run is near its linearisation
    assert 0 < side.feature_learning[-1].mean() < 0.5
    elsewhere = ft.predict(
        algorithm, DATA, CLIENTS, num_rounds=4, seed=0, start=jax.random.key(4), evaluation=ft.Evaluation(2),
        forecasting=ft.Forecasting(rates=False),
    )  # fmt: skip
    assert gap(run.history, elsewhere.history, metric) > 0.2  # the control: another network's start


WARM_UP = optax.warmup_constant_schedule(0.0, 0.003, 3)


@pytest.mark.slow
def test_a_warm_up_of_optax_has_one_value_in_training_and_in_theory() -> None:
    """In float32 its last digit depends on how it is compiled."""
    side = ft.compare(fed_avg(rate=WARM_UP), DATA, CLIENTS, num_rounds=4, start=jax.random.key(0))
    assert side.verdicts[0].passed, side.verdicts[0]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.adam(WARM_UP), optax.sgd(WARM_UP)])
def test_an_optimiser_whose_first_local_step_is_0_is_put_beside_linearised_networks(optimizer: Any) -> None:
    algorithm = fed_avg(rate=None, client_optimizer=optimizer)
    side = ft.compare(algorithm, DATA, CLIENTS, num_rounds=2, start=jax.random.key(0))
    assert side.verdicts == () and "trained by the same algorithm" in repr(side)


def test_a_prediction_that_does_not_learn_says_so() -> None:
    side = compared()
    gap = side.gaps[0]._replace(predicted=side.gaps[0].predicted[::-1])
    said = "the prediction does not learn"
    assert said in repr(dataclasses.replace(side, gaps=(gap,))) and said not in repr(side)


@pytest.mark.slow
def test_a_prediction_that_diverges_says_so() -> None:
    """By day the test above holds the same of curves that are turned round."""
    side = ft.compare(fed_avg(rate=1.0, work=WHOLE), DATA, CLIENTS, num_rounds=4, start=jax.random.key(0))
    assert "the prediction does not learn" in repr(side) and "too large for the kernel" in repr(side)


def test_an_algorithm_that_theory_does_not_follow_is_put_beside_linearised_networks() -> None:
    algorithm = fed_avg(rate=None, work=WHOLE, client_optimizer=optax.adam(1e-4))
    side = ft.compare(algorithm, DATA, CLIENTS, num_rounds=4, seed=0, start=jax.random.key(0))
    assert side.verdicts == () and "its client_optimizer" in side.how and "trained by the same algorithm" in repr(side)
    assert side.feature_learning[0].max() == 0 and 0 < side.feature_learning[-1].mean() < 0.3
    with pytest.raises(ValueError, match=r"rates: must be off .* client_learning_rate: got none in fed_avg"):
        ft.predict(algorithm, DATA, CLIENTS, num_rounds=4, start=jax.random.key(0))
    theory = ft.predict(
        algorithm, DATA, CLIENTS, num_rounds=4, start=jax.random.key(0), forecasting=ft.Forecasting(rates=False)
    )
    assert "its client_optimizer" in repr(theory)
    ends = [history.curves()["train.mse"][-1] for history in (theory.history, side.history.predicted)]
    assert abs(ends[0] / ends[1] - 1) < 1e-9


@pytest.mark.slow
def test_the_example_of_the_documentation() -> None:
    lazy = documents.run("lazy = ft.compare")["lazy"]
    assert lazy.verdicts[0].passed and 0 < lazy.feature_learning[-1, 0] < 0.5


@pytest.mark.slow
def test_the_example_of_the_documentation_learns_as_predicted() -> None:
    """Its text up to the comparison; by day ``test_a_convolution_follows_the_flow_of_its_own_kernel`` holds the law."""
    names = documents.run("lazy = ft.compare", until="lazy = ft.compare")
    run, theory = names["run"], names["theory"]
    assert theory.rates.stable > 0.005
    ends = [history.curves()["train.mse"][-1] for history in (run.history, theory.history)]
    assert abs(ends[0] / ends[1] - 1) < 0.1 and ends[0] < 0.5 * run.history.curves()["train.mse"][0]


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("models", nightly([1, 2], [2]))
def test_pre_trained_weights_are_a_start(models: int) -> None:
    """The same for the three functions: a run of two stretches is the run of both.

    By day of two models, whose programs other tests have too; by night of one model without minibatches.
    """
    algorithm = two_models() if models == 2 else fed_avg(work=WHOLE)
    options = {"num_rounds": 4, "evaluation": ft.Evaluation(2)}
    first = ft.simulate(algorithm, DATA, CLIENTS, num_rounds=8, seed=1, evaluation=ft.Evaluation(2))
    weights = jax.tree.map(lambda leaf: np.asarray(leaf if models == 2 else leaf[0]), algorithm.params(first.state))
    theory = ft.predict(algorithm, DATA, CLIENTS, seed=0, start=weights, **options)
    end = first.history.evaluations[-1].metrics["train"]["mse"]
    assert abs(theory.history.curves()["train.mse"][0] / end - 1) < 1e-5
    assert theory.rates is not None and 0 < theory.rates.best <= theory.rates.stable
    side = ft.compare(algorithm, DATA, CLIENTS, seed=0, start=weights, **options)
    assert "does not learn" not in repr(side)
    assert gap(side.history.predicted, theory.history) < 1e-9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": {"params": np.zeros(3)}}, "start: got"),
        ({"start": 3}, "start: got 3, must be None, a typed key"),
        ({"start": jax.random.PRNGKey(0)}, "start: got an untyped key (jax.random.PRNGKey), must be None, a typed key"),
        ({"start": {"params": {}}}, "; of flax's variables give variables['params']"),
        ({"evaluation": 5}, "evaluation: got 5, must be an Evaluation"),
        ({"widths": (8, 16, 32)}, "widths: got (8, 16, 32), must be left out with a start"),
        ({"draws": 5}, "draws: got 5, must be left out with a start"),
    ],
)
def test_refuses_other_starts(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        ft.compare(fed_avg(), DATA, CLIENTS, **{"num_rounds": 2, "start": jax.random.key(0), **change})
    assert said in str(caught.value)


def test_for_too_many_rows_the_linearised_network_is_trained() -> None:
    x = np.random.default_rng(0).normal(size=(MOST_ROWS // 2 + 1, 2)).astype(np.float32)
    data, clients = (x, (x[:, 0] > 0).astype(int), x[:4], np.array([0, 1, 0, 1])), ft.partition.iid(len(x), 4, 0)
    algorithm = fed_avg(ft.models.mlp(2, 2, (16,)), rate=0.1, work=WHOLE)
    theory = ft.predict(
        algorithm, data, clients, num_rounds=1, start=jax.random.key(0), forecasting=ft.Forecasting(rates=False)
    )
    side = ft.compare(algorithm, data, clients, num_rounds=1, start=jax.random.key(0))
    assert side.verdicts == () and "4002 rows" in side.how
    assert jnp.isfinite(side.feature_learning).all()
    ends = [history.curves()["test.mse"][-1] for history in (theory.history, side.history.predicted)]
    assert abs(ends[0] / ends[1] - 1) < 1e-9 and "4002 rows" in repr(theory)


@pytest.mark.usefixtures("judged_once")
def test_a_network_without_an_analytic_kernel_begins_at_the_seed() -> None:
    """At the network that ``simulate`` draws; another seed's is another run."""
    algorithm, options = two_models(), {"num_rounds": 4, "evaluation": ft.Evaluation(2)}
    assert algorithm.model.kernel is None
    side = ft.compare(algorithm, DATA, CLIENTS, seed=2, **options)
    run, other = (ft.simulate(algorithm, DATA, CLIENTS, seed=seed, **options) for seed in (2, 3))
    assert gap(run.history, side.history, "train.mse") < 1e-4 < gap(other.history, side.history, "train.mse")
    theory = ft.predict(algorithm, DATA, CLIENTS, seed=2, **options, forecasting=ft.Forecasting(rates=False))
    assert gap(theory.history, side.history.predicted, "train.mse") < 1e-9
