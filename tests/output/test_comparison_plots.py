"""Figures of comparisons are drawn whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedtangent._src.comparison.laziness import Laziness, Parts
from fedtangent._src.comparison.outcomes import Gap, PredictedCurve
from fedtangent._src.comparison.predicted import ModelLaw
from fedtangent._src.comparison.settings import Problem, Scale
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.simulated import Simulated
from fedtangent._src.data import partition
from fedtangent._src.output import comparison_plots as plots
from fedtangent._src.output.files import Figures

from ..nightly import nightly
from ..stand_ins import stand_in
from .drawn import assert_drawn

K, E, N, M = 2, 3, 6, 12
ROUNDS = (0, 5, 10)


def result(
    name: str, inputs: int, linear: bool = False, widths: tuple[int, ...] = (16, 32, 64), standard: bool = True
) -> Comparison:
    """What the figures look at of a side-by-side, made of random numbers."""
    rng = np.random.default_rng(0)
    setting = SimpleNamespace(
        name=name,
        title=f"{name}, in words",
        problem=Problem(
            x_train=rng.uniform(-1, 1, (N, inputs)),
            y_train=rng.standard_normal((N, 2)),
            x_test=rng.uniform(-1, 1, (M, inputs)),
            y_test=rng.standard_normal((M, 2)),
            partition=partition.of([[0, 1, 2], [], [3, 4, 5]]),
        ),
        start=None,
        size=Scale(widths, 1, 10, 5),
        is_linear=linear,
        is_standard=standard,
    )

    def seen(method: str, width: int) -> Simulated:
        train, test = (rng.standard_normal((len(ROUNDS), K, E, points, 2)) for points in (N, M))
        of_width = f", width {width}"
        outputs = {"train": train, "test": test, "ensemble": test.mean(axis=1)}
        return stand_in(Simulated, method=method, width=width, of_width=of_width, rounds=ROUNDS, **outputs)

    curves = np.array([1.0, 0.5, 0.2]), np.array([1, 0.5, 0.2])
    errors = rng.uniform(0.1, 0.2, (3, K, E)), rng.uniform(0.1, 0.2, (K, E))
    gap = Gap(*errors, *curves, np.zeros((3, K, E, M, 2)), np.zeros((3, K, E, N, 2)))
    distances = rng.uniform(0.1, 0.2, (4, 3, K, 1))
    lazy = tuple(Laziness(w, Parts(*distances[:3]), distances[3]) for w in widths)
    moments = tuple(ModelLaw(rng.standard_normal((K, M, 2)), np.tile(np.eye(M), (K, 1, 1))) for _ in ROUNDS)
    return stand_in(
        Comparison,
        setting=setting,
        method="federated flow",
        theory=SimpleNamespace(moments=moments, rounds=ROUNDS),
        simulated=tuple(seen("Fed-ensemble", w) for w in widths),
        ntk_fl=tuple(seen("NTK-FL, averaged kernel", w) for w in widths),
        gaps=(gap,) * len(widths),
        curve=PredictedCurve(np.arange(11), np.linspace(1, 0.2, 11), rng.uniform(0.1, 0.2, (11, E))),
        laziness=() if linear else lazy,
    )


@pytest.mark.parametrize("with_digits", nightly([False, True], [False]))
def test_every_figure_that_applies(tmp_path: Path, with_digits: bool) -> None:
    results = [
        result("sine, linear", 1, linear=True, widths=(100,)),
        *([result("digits", 4)] if with_digits else []),
        result("fed_prox on mine", 4, standard=False),
    ]
    paths = plots.draw_all(results, Figures(tmp_path))
    expected = [
        "digits_laziness.png",
        "digits_uncertainty.png",
        "fed_prox_on_mine_beside.png",
        "fed_prox_on_mine_laziness.png",
        "fed_prox_on_mine_uncertainty.png",
        "residual.png",
        "sine_linear_bands.png",
        "width_error.png",
    ]
    assert sorted(p.name for p in paths) == [name for name in expected if with_digits or "digits" not in name]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        assert_drawn(path)


def test_linear_models_have_no_width_to_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save", lambda figure, path, title="": path)
    paths = plots.draw_all([result("sine, linear", 1, linear=True, widths=(100,))], Figures(tmp_path, "pdf"))  # type: ignore[list-item]
    assert sorted(p.name for p in paths) == ["residual.pdf", "sine_linear_bands.pdf"]


def test_two_widths_are_plotted_without_a_slope(tmp_path: Path) -> None:
    assert_drawn(plots.width_errors([result("digits", 4, widths=(16, 32))], tmp_path / "w.png"))  # type: ignore[list-item]
