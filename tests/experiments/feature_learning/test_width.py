"""The experiment on widths, small: its losses and laziness by another path, and claims on curves that are known."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.experiments.feature_learning import width

from ..performed import performed, study_of

SMALL = (
    *("widths=8,16", "hidden_layers=1", "num_train=30", "num_test=20", "num_clients=4", "clients_per_round=2"),
    *("local_steps=2", "num_rounds=2", "num_rates=2", "least_rate=0.25"),
)


@pytest.mark.slow
def test_a_small_run_is_that_of_single_runs(tmp_path: Path) -> None:
    """Losses and laziness, by ``simulate`` of the network and of ``models.linearised``; another seed's are others."""
    outcome, metrics = performed("feature_learning.width", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.rows) == 6 and len(outcome.claims) == 7
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"rates.png", "widths.png"}
    kept = {(m.algorithm, m.seed, m.metric): m.value for m in metrics}
    problem = width._problem_of(study_of("feature_learning.width", SMALL))
    model = ft.models.mlp(64, 10, (16,), "relu", "maximal_update")

    def path(network: ft.types.Model, rate: float, seed: int) -> tuple[float, np.ndarray]:
        run = ft.simulate(problem.algorithm(network, rate), problem.data, num_rounds=2, seed=seed)
        predict = problem.algorithm(network, rate).predict
        loss = 0.5 * np.mean(
            np.sum((np.asarray(predict(run.state, problem.data.x).mean) - problem.data.y) ** 2, axis=1)
        )
        return float(loss), np.asarray(predict(run.state, problem.x_test).mean)

    for seed, other in ((0, 1), (1, 0)):
        losses = [path(model, rate, seed)[0] for rate in (0.25, 0.5)]
        assert kept["maximal_update, width 16", seed, "loss"] == pytest.approx(min(losses), rel=1e-4)
        assert kept["maximal_update, width 16", seed, "best_rate"] == (0.25, 0.5)[int(np.argmin(losses))]
        assert kept["maximal_update, width 16", other, "loss"] != pytest.approx(min(losses), rel=1e-2)
        params = problem.algorithm(model, 0.25).params(problem.algorithm(model, 0.25).init(seed, 4))
        start = {"at": [tuple(leaf[0] for leaf in layer) for layer in params]}
        network, line = path(model, 0.25, seed)[1], path(ft.models.linearised(model, **start), 0.25, seed)[1]
        begin = np.asarray(model.apply(start["at"], problem.x_test))
        lazy = np.linalg.norm(network - line) / np.linalg.norm(line - begin)
        assert kept["maximal_update, width 16", seed, "laziness"] == pytest.approx(lazy, rel=1e-2)
        moved = np.sqrt(np.mean((network - begin) ** 2))
        assert kept["maximal_update, width 16", seed, "outputs"] == pytest.approx(moved, rel=1e-3)


def made(parameterization: str, exponent: float, best: int) -> list[width.TrainedWidth]:
    """Networks of widths 64 and 1024 and two seeds, whose changes go as width^exponent."""
    found = []
    for seed in (0, 1):
        for size, at in ((64, 4), (1024, best)):
            losses = 1 + np.abs(np.arange(9.0) - at) + seed / 100
            changes = dict.fromkeys(("features", "outputs", "laziness"), (1 + seed) * size**exponent)
            found.append(width.TrainedWidth(parameterization, size, seed, 2.0 ** np.arange(9), losses, 9.0, changes))
    return found


@pytest.mark.parametrize("as_published", [True, False])
def test_claims_are_seen_where_they_are_true(as_published: bool) -> None:
    """Best rates that move by four steps, and changes that fall as width^-1/2, under one of them or another."""
    ours, standard, ntk = ((0.0, 4), (0.0, 0), (-0.5, 4)) if as_published else ((-0.5, 0), (0.0, 4), (0.0, 4))
    trained = [*made("ntk", *ntk), *made("standard", *standard), *made("maximal_update", *ours)]
    claims = list(width._claims(trained))
    assert len(claims) == 7
    assert {claim.verdict for claim in claims} == {"seen" if as_published else "not seen"}, claims


def test_the_grid_of_the_standard_parameterization_reaches_the_widest_networks() -> None:
    settings = width.SMALL
    for name in ("ntk", "maximal_update"):
        assert width._grid(settings, name) == ([2.0**i for i in range(-4, 5)], 0.25)
    rates, rate = width._grid(settings, "standard")
    assert rates == [2.0**i / 1024 for i in range(-4, 9)] and rate == 0.25 / 1024
    assert jnp.isclose(rates[-1], 2.0**4 / 64)
