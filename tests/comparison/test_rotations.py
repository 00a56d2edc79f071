"""Runs on a kernel's features: equal to the flow where there is one, and which algorithms they follow."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import fedtangent as ft
from fedtangent._src.comparison.predicted import prior_starts, run_flow
from fedtangent._src.comparison.rotations import SAME, RotationTest, feature_paths, rotation_test
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.kernels.features import kernel_features
from fedtangent._src.kernels.gram import kernel_blocks

from ..nightly import nightly
from .test_comparing import CASES, described

SIZES = (3, 5, 1, 4, 6, 2, 3, 4)
ENDS = np.cumsum(SIZES)
X, Y = (np.random.default_rng(seed).normal(size=(ENDS[-1] + 5, width)) for seed, width in ((0, 3), (1, 2)))
CLIENTS = ft.partition.of([np.arange(end - size, end) for size, end in zip(SIZES, ENDS, strict=True)])
WORK = {"client_learning_rate": 0.2, "work": ft.Work(epochs=2, batch_size=3)}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("name", "loss"), nightly(CASES, [("momentum, decay", "cross_entropy"), ("scaffold", "squared_error")])
)
def test_runs_on_features_are_the_flow(name: str, loss: str) -> None:
    """To rounding, for every algorithm with a rule; a flow with a rate 1 % off is not."""
    setting = described(name, loss=loss)
    problem, rounds, n = setting.problem, setting.size.rounds, len(setting.problem.x_train)
    blocks = setting.blocks()
    f0 = np.concatenate(prior_starts(setting, blocks, 1), axis=2)[0]
    paths = feature_paths(setting.algorithm, problem.y_train, problem.partition, rounds)
    simulated = paths(kernel_features(blocks, f0.shape[-1]), f0, setting.seed)
    moved = np.max(np.abs(simulated - simulated[0]))

    def distance(**changes: Any) -> float:
        flow = run_flow(setting, blocks, cohorts(setting), **changes)
        predicted = [flow.predict_train(f0[:, :n], rounds), flow.predict(f0[:, :n], f0[:, n:], rounds)]
        return float(np.max(np.abs(np.concatenate(predicted, axis=2) - simulated)) / moved)

    assert moved > 0.01
    assert distance() < 1e-10
    assert distance(learning_rate=np.multiply(1.01, setting.followed.learning_rate)) > 1e-4


def measured_of(recipe: Any, slots: int = 4, **options: Any) -> RotationTest:
    model = ft.models.mlp(3, 2, (8,), "erf")
    algorithm = recipe(model, ft.schedules.uniform_sampling(len(SIZES), slots), **options)
    n, blocks = ENDS[-1], kernel_blocks(model.kernel, X[: ENDS[-1]], X[ENDS[-1] :])
    f0 = ft.theory.prior_functions(blocks, 2)[None]
    return rotation_test(feature_paths(algorithm, Y[:n], CLIENTS, (0, 2, 4)), kernel_features(blocks, 2), f0, 5)


def channel(channel: Any) -> dict[str, Any]:
    return {**WORK, "averaging": ft.Averaging(channel=channel)}


EXACT = {
    "fed_avg": (ft.fed_avg, WORK),
    "norm clipping": (ft.fed_avg, channel(ft.channels.clip(0.3))),
    "scaffold": (ft.scaffold, WORK),
    "ditto": (ft.ditto, {**WORK, "personal_training": ft.PersonalTraining(0.5)}),
    "ntk_fl": (ft.ntk_fl, {"learning_rate": 0.3, "evolution": ft.Evolution(times=(1, 4, 9))}),
}
BIASED = {
    "fed_adam": (ft.fed_adam, WORK),
    "Adam at the clients": (ft.fed_avg, {"client_optimizer": optax.adam(0.05), "work": WORK["work"]}),
    "top_k": (ft.fed_avg, channel(ft.channels.top_k(fraction=0.3))),
    "signs": (ft.fed_avg, {"client_optimizer": optax.sign_sgd(0.01), "work": WORK["work"]}),
}
NOISY = {
    "random_k": (ft.fed_avg, channel(ft.channels.random_k(fraction=0.3))),
    "uniform_quantiser": (ft.fed_avg, channel(ft.channels.uniform_quantiser(5))),
    "qsgd": (ft.fed_avg, channel(ft.channels.qsgd(4))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXACT))
def test_an_algorithm_that_treats_all_directions_alike_is_followed(name: str) -> None:
    """By day test_on_features.py compares such a run."""
    recipe, options = EXACT[name]
    measured = measured_of(recipe, **options)
    assert measured.disagreement <= SAME and measured.reason == "", measured


@pytest.mark.parametrize("name", nightly(list(BIASED), ["fed_adam"]))
def test_an_algorithm_that_looks_at_single_weights_is_refused(name: str) -> None:
    recipe, options = BIASED[name]
    measured = measured_of(recipe, **options)
    assert measured.disagreement > 0.01 and "on average over seeds by" in measured.reason, measured


@pytest.mark.parametrize("name", nightly(list(NOISY), ["uniform_quantiser"]))
def test_noise_that_depends_on_the_basis_is_refused(name: str) -> None:
    recipe, options = NOISY[name]
    measured = measured_of(recipe, **options)
    assert measured.disagreement > 0.01 and "times the variance of two rotations" in measured.reason, measured


@pytest.mark.slow  # by day test_on_features.py compares such a run
def test_noise_of_one_law_in_all_directions_is_followed() -> None:
    measured = measured_of(ft.dp_fed_avg, **WORK, privacy=ft.ClientPrivacy(0.5, 0.3, 3))
    assert measured.disagreement > 0.1 and measured.reason == "", measured


def test_an_algorithm_without_random_numbers_differs_at_every_seed() -> None:
    measured = measured_of(ft.fed_adam, client_learning_rate=0.2, work=ft.Work(steps=2, batch_size=None), slots=8)
    assert np.isinf(measured.bias) and measured.reason.endswith("at every seed")


def test_a_run_that_diverges_is_refused() -> None:
    measured = measured_of(ft.fed_avg, client_learning_rate=1e200, work=ft.Work(steps=3, batch_size=None))
    assert measured.reason == "the run diverges on the features of the kernel"
