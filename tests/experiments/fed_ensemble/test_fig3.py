"""Fig. 3: barriers between three models, and its two controls."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import models
from fedtangent._src.experiments.fed_ensemble import fig3
from fedtangent._src.measures.loss_surface import mean_loss
from fedtangent._src.types import FederatedData

from ..performed import performed

TINY = ("num_clients=5", "num_models=3", "num_rounds=8", "local_epochs=2", "width=8", "num_points=7", "num_train=200")


@pytest.mark.slow
def test_three_models_are_measured() -> None:
    model = models.build("mlp", 4, 3, widths=(5,))
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(20, 4))), jnp.asarray(rng.integers(0, 3, 20))
    held = FederatedData(x, y, y, y)
    params = [jax.tree.map(np.asarray, model.init(jax.random.key(k))) for k in range(3)]
    found = fig3._measurer(model, mean_loss(model, "cross_entropy"))(params, fig3.ImageData(held, x))

    def loss(weights: list[tuple[np.ndarray, ...]]) -> float:
        (w1, b1), _, (w2, b2) = weights
        hidden = np.maximum(np.asarray(x) @ w1 * (2 / 4) ** 0.5 + 0.1 * b1, 0)
        logits = hidden @ w2 * (2 / 5) ** 0.5 + 0.1 * b2
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(20), np.asarray(y)]))

    np.testing.assert_allclose(found.losses, [loss(p) for p in params], rtol=1e-5)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *params)
    assert found.at_mean == pytest.approx(loss(mean), rel=1e-5)
    for row, (i, j) in enumerate(fig3.PAIRS):
        between = [jax.tree.map(lambda a, b, s=s: a + s * (b - a), params[i], params[j]) for s in np.linspace(0, 1, 41)]
        along = np.array([loss(p) for p in between])
        np.testing.assert_allclose(found.segments[row], along, rtol=1e-5)
        assert found.barriers[row] == pytest.approx(along.max() - max(along[0], along[-1]), abs=1e-6)
        leaves = [np.ravel(a - b) for a, b in zip(*(jax.tree.leaves(params[k]) for k in (i, j)), strict=True)]
        assert found.distances[row] == pytest.approx(np.linalg.norm(np.concatenate(leaves)), rel=1e-6)


def test_models_of_one_start_start_as_one() -> None:
    settings = fig3.BarrierSettings(num_clients=3, num_models=3, width=4)
    model = fig3.network(settings, np.zeros((1, 9)), 2)
    own, joint = (fig3._ensemble(settings, model, same).init(7, 3).server.params for same in (False, True))
    for free, same in zip(jax.tree.leaves(own), jax.tree.leaves(joint), strict=True):
        np.testing.assert_array_equal(same, np.broadcast_to(free[:1], free.shape))
    assert any(not np.array_equal(leaf[0], leaf[1]) for leaf in jax.tree.leaves(own))


@pytest.mark.slow
def test_the_experiment_measures_barriers_and_its_claim_can_fail(tmp_path: Path) -> None:
    with jax.enable_x64(False):
        outcome, kept = performed("fed_ensemble.fig3", TINY, tmp_path, (0, 1, 2))
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["loss_surface.png", "segments.png"]
    assert outcome.failed == () and len(outcome.rows) == 3 * 3 * 3 == len(kept) / 3
    own, control = ([r["barrier"] for r in outcome.rows if r["models"] == k] for k in (fig3.ENSEMBLE, fig3.SAME_MODEL))
    assert np.mean(own) > 0.01 > np.mean(control)
    for row in outcome.rows:
        assert row["barrier"] == pytest.approx(row["highest_loss"] - max(row["loss_of_first"], row["loss_of_second"]),
                                               abs=1e-5)  # fmt: skip


def some_triple(height: float) -> fig3.Triple:
    bump = 0.1 + height * np.sin(np.pi * np.linspace(0, 1, 5))
    return fig3.Triple([], np.full(3, 0.1), np.zeros(3), 0.1, np.stack([bump] * 3), np.ones(3), np.zeros(3))


@pytest.mark.parametrize(("own", "holds"), [(0.5, ["seen"] * 3), (0.0, ["undecided", "undecided", "not seen"])])
def test_the_claim_is_judged_by_the_interval(own: float, holds: list[str]) -> None:
    noise = np.array([-0.02, 0.0, 0.03])
    found = {kind: [some_triple(max(base + e, 0)) for e in noise] for kind, base in (
        (fig3.ENSEMBLE, own), (fig3.SAME_START, 0.05), (fig3.SAME_MODEL, 0.0))}  # fmt: skip
    assert [claim.verdict for claim in fig3.judge(found)] == holds
