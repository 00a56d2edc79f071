"""Fig. 1: the process, the models trained, and the test that tells draws of it from other functions."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from fedtangent._src.experiments.fed_ensemble import fig1
from fedtangent._src.experiments.lab import sine
from fedtangent._src.federated import schedule
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.types import Gaussian

from ..performed import performed

TINY = ("width=64", "num_rounds=200", "num_clients=3", "spacing=0.15")


def features(x: np.ndarray) -> np.ndarray:
    """The paper's radial basis functions, written out."""
    centres = np.random.default_rng(0).uniform(-1.0, 1.0, 100)
    return np.exp(-((x - centres) ** 2) / (2 * 0.08**2))


def test_spaced_clients_are_whole_and_far_apart() -> None:
    everything = sine.load(3, 40 * 5, 2, gap=False)
    held = sine.load(3, 5, 2, gap=False, spacing=0.12)
    assert len(held.x) == 10 and list(held.clients.sizes) == [2] * 5
    assert np.min(np.diff(np.sort(held.x[:, 0]))) >= 0.12 > np.min(np.diff(np.sort(everything.x[:, 0])))
    pairs = {tuple(pair) for pair in everything.x.reshape(-1, 2).tolist()}
    assert {tuple(held.x[held.clients.client(i), 0]) for i in range(5)} <= pairs
    np.testing.assert_array_equal(sine.load(3, 50, 2, gap=True).x, sine.load(3, 50, 2, gap=True, spacing=0.0).x)


def test_the_linear_models_end_where_plain_algebra_puts_them_and_theorem_2_is_their_law() -> None:
    held, model = sine.load(1, 3, 2, gap=False, spacing=0.15), sine.linear_model()
    plan = schedule.per_client_permutations(3, 3)
    algorithm = sine.algorithm(model, held, plan, 10)
    trained = sine.train(held, algorithm, 200, 1)
    early = sine.train(held, algorithm, 3, 1)
    for steps, right in ((10, True), (9, False)):  # the flow of the very run, and one with a step too few
        flow, _ = sine.flow(held, model, plan, steps, 3, 1)
        error = np.max(np.abs(np.asarray(flow.predict(early.start_train, early.start, 3)) - early.test))
        assert bool(error < 1e-9) is right and (right or error > 1e-3)
    train, test = features(held.x), features(held.x_test)
    b = test @ train.T @ np.linalg.inv(train @ train.T)
    expected = trained.start - b @ (trained.start_train - held.y)
    np.testing.assert_allclose(trained.test, expected, rtol=0, atol=1e-9)
    limit = gp_limit(kernel_blocks(model.kernel, held.x, held.x_test), held.y)  # type: ignore[arg-type]
    left = np.eye(100) - train.T @ np.linalg.inv(train @ train.T) @ train  # what training leaves of N(0, I) weights
    np.testing.assert_allclose(limit.mean, b @ held.y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(limit.cov, test @ left @ test.T, rtol=0, atol=1e-12)


def some_law() -> fig1.Law:
    x = np.linspace(-1, 1, 30)
    cov = np.exp(-((x[:, None] - x) ** 2) / 0.1) * np.outer(1 - x**2, 1 - x**2)
    return fig1.law_of(Gaussian(np.sin(3 * x)[:, None], cov))  # type: ignore[arg-type]


def test_draws_have_a_chi_square_distance_and_wrong_functions_have_not() -> None:
    law, count = some_law(), 4000
    draws = fig1._draws(law, count, 0)
    found = fig1._distance(law, draws)
    error = np.sqrt(2 * law.rank / count)
    assert abs(np.mean(found.squared) - law.rank) < 3 * error
    assert abs(np.var(found.squared) / (2 * law.rank) - 1) < 0.15
    inside = np.abs((draws - law.mean)[:, law.kept]) <= 1.96 * law.sd[law.kept]
    np.testing.assert_allclose(np.mean(found.inside), np.mean(inside), atol=1e-4)
    assert abs(np.mean(found.inside) - 0.95) < 0.01
    for wrong in (law.mean + 1.2 * (draws - law.mean), draws + law.sd, law.mean + 0.8 * (draws - law.mean)):
        assert abs(np.mean(fig1._distance(law, wrong).squared) - law.rank) > 5 * error
    assert not law.kept[0] and not law.kept[-1] and np.sum(law.kept) > 20  # no variance at the ends


def test_rank_and_variance_of_the_directions() -> None:
    law = fig1.law_of(Gaussian(np.zeros((4, 1)), np.diag([9.0, 4.0, 0.1, 1e-9])))  # type: ignore[arg-type]
    assert law.rank == 2 and law.variances.tolist() == [9.0, 4.0]
    assert fig1._distance(law, np.array([[3.0, 4.0, 9.0, 0.0]])).squared == pytest.approx([1 + 4])


@pytest.mark.slow
def test_the_experiment_tells_trained_models_from_untrained(tmp_path: Path) -> None:
    with jax.enable_x64(False):  # as the command runs: the experiment asks for float64 itself
        outcome, kept = performed("fed_ensemble.fig1", TINY, tmp_path, (0, 1, 2))
    assert len(kept) == 2 * 3 * 2 * 3 * 3
    verdicts = {(row["model"], row["when"]): row["verdict"] for row in outcome.rows}
    for name in ("linear", "network"):
        assert verdicts[name, "trained"] == "draws of the process"
        assert verdicts[name, "untrained"] == "no draws of it"
    assert outcome.failed == () and [claim.verdict for claim in outcome.claims] == ["seen", "seen"]
    for row in outcome.rows:
        at = [m for m in outcome.details["models"] if (m["model"], m["when"]) == (row["model"], row["when"])]
        ratio = sum(m["squared"] for m in at) / sum(m["rank"] for m in at)
        assert len(at) == row["models"] == 9 and row["ratio"] == pytest.approx(ratio)
