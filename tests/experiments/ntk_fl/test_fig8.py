"""NTK-FL's Fig. 8: what is claimed can fail in each part, the request is checked, and a small run counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.ntk_fl import fig8
from fedtangent._src.experiments.ntk_fl.fig8 import Score

from ..performed import performed

NOISE = np.array([-0.01, 0.0, 0.01])


def table(**means: dict[float, float]) -> dict[str, dict[float, Score]]:
    """Scores with a spread of .01 around means that agree with the paper, but for ``means``."""
    agreeing = {0.9: 0.02, 0.5: 0.6}
    base = dict.fromkeys((*fig8.DEEP, fig8.READ, *fig8.SWITCHES), agreeing)
    base |= {fig8.READ: {0.9: 0.02, 0.5: 0.6}, fig8.ROWS: {0.9: 0.05, 0.5: 0.6}}
    base |= {name: {0.9: 0.0, 0.5: 0.02} for name in (fig8.PLACE, fig8.WEIGHTS, fig8.SECRET)}
    base |= {name: {0.9: 0.05, 0.5: 0.55} for name in (fig8.COLLUSION, fig8.LEAKED)}

    def score(mean: float) -> Score:
        return Score(mean, 0.01 / 3**0.5, mean + NOISE)

    return {name: {s: score(m) for s, m in (means.get(name) or of).items()} for name, of in base.items()}


def holds(scores: dict[str, dict[float, Score]]) -> dict[str, bool]:
    return {claim: verdict == "seen" for claim, _, verdict in fig8._judge(scores)}


def test_each_claim_can_fail() -> None:
    agreed = holds(table())
    fall, protects = "less sparsity, closer images", "sparsity protects as published"
    assert all(ok for claim, ok in agreed.items() if claim.startswith((fall, protects)))
    assert agreed["shuffled rows hide whose image it is"] and agreed["projection hides the image"]
    assert not agreed["shuffled rows hide the image"] and not agreed["shuffled weights hide it if a client colludes"]
    name = fig8.NAMES[fig8.KEPT]
    assert not holds(table(**{fig8.KEPT: {0.9: 0.05, 0.5: 0.02}}))[f"{fall}: {name}"]
    beyond = holds(table(**{fig8.KEPT: {0.9: 0.12, 0.5: 0.6}}))
    assert beyond[f"{fall}: {name}"] and not beyond[f"{protects}: {name}"]
    assert not holds(table(**{fig8.SECRET: {0.9: 0.05, 0.5: 0.6}}))["projection hides the image"]


def test_summaries_are_means_over_the_images_of_all_seeds() -> None:
    def read(*ssim: float) -> fig8.Reconstruction:
        return fig8.Reconstruction(np.array(ssim), np.zeros((len(ssim), 8, 8)), True)

    found = fig8.summaries([{"a": {0.5: read(0.1, 0.4)}}, {"a": {0.5: read(0.3, 0.8)}}])["a"][0.5]
    assert found.mean == pytest.approx(0.4)
    assert found.error == pytest.approx(np.std([0.1, 0.4, 0.3, 0.8], ddof=1) / 2)


def test_nothing_stays_in_its_place() -> None:
    for seed in range(20):
        order = fig8._derangement(np.random.default_rng(seed), 5)
        assert sorted(order) == list(range(5)) and not (order == np.arange(5)).any()


@pytest.mark.slow
def test_a_small_run_counts(tmp_path: Path) -> None:
    changes = ("num_images=3", "sparsities=0.9,0.5,0", "num_steps=100", "network=mlp", "activation=erf", "width=30")
    outcome, _ = performed("ntk_fl.fig8", changes, tmp_path)
    assert outcome.failed == () and len(outcome.rows) == 10 * 3
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"fig8_images.png", "fig8_ssim.png"}
    ssim = {(row["attack"], row["sparsity"]): row["ssim"] for row in outcome.rows}
    assert ssim[fig8.READ, 0.0] > 0.999 and ssim[fig8.ROWS, 0.0] > 0.999
    assert ssim[fig8.PLACE, 0.0] < 0.6 and ssim[fig8.WEIGHTS, 0.0] < 0.5
    assert ssim[fig8.LEAKED, 0.0] > ssim[fig8.SECRET, 0.0] + 0.1


def test_images_are_of_as_many_classes_as_there_can_be() -> None:
    def loaded(count: int, known: int = 5) -> fig8.AttackedImages:
        settings = fig8.LeakageSettings(num_images=count, num_known=known)
        return fig8._load(Study(settings, "digits", (0,)), 0)

    assert len(set(loaded(10).labels.tolist())) == 10
    assert sorted(np.bincount(loaded(13).labels)) == [1] * 7 + [2] * 3
    every = np.concatenate([loaded(4, 355).x, loaded(4, 355).known])
    assert len(np.unique(every.reshape(359, -1), axis=0)) == 359
