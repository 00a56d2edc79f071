"""Figures are drawn whole, without a display and without pyplot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedtangent.compare.predicted import ModelMoments
from fedtangent.compare.side_by_side import FlowGap
from fedtangent.measures.uncertainty import Reliability
from fedtangent.output import plots

K, E, N, M = 2, 3, 6, 12
ROUNDS = (0, 5, 10)


def result(name: str, inputs: int, linear: bool = False, widths: tuple[int, ...] = (16, 32, 64)) -> SimpleNamespace:
    """What the figures look at of a side-by-side, made of random numbers."""
    rng = np.random.default_rng(0)
    setting = SimpleNamespace(
        name=name,
        title=f"{name}, in words",
        x_train=rng.uniform(-1, 1, (N, inputs)),
        y_train=rng.standard_normal((N, 2)),
        x_test=rng.uniform(-1, 1, (M, inputs)),
        y_test=rng.standard_normal((M, 2)),
        widths=widths,
        largest=max(widths),
        is_linear=linear,
        num_rounds=10,
        rounds=ROUNDS,
    )

    def seen(method: str, width: int) -> SimpleNamespace:
        test = rng.standard_normal((len(ROUNDS), K, E, M, 2))
        return SimpleNamespace(method=method, width=width, rounds=ROUNDS, test=test)

    gap = FlowGap(rng.uniform(0.1, 0.2, (3, K, E)), np.array([1.0, 0.5, 0.2]), np.array([1, 0.5, 0.2]))
    moments = tuple(ModelMoments(rng.standard_normal((K, M, 2)), np.tile(np.eye(M), (K, 1, 1))) for _ in ROUNDS)
    return SimpleNamespace(
        setting=setting,
        theory=SimpleNamespace(moments=moments, rounds=ROUNDS),
        simulated=tuple(seen("Fed-ensemble", w) for w in widths),
        ntk_fl=tuple(seen("NTK-FL, averaged kernel", w) for w in widths),
        gaps=(gap,) * len(widths),
    )


def pixels(path: Path) -> np.ndarray:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    from matplotlib.image import imread

    return imread(path)


def assert_drawn(path: Path) -> None:
    image = pixels(path)
    height, width = image.shape[:2]
    assert 300 <= height <= 1500
    assert 500 <= width <= 5000
    inked = np.any(image[..., :3] < 0.9, axis=-1)
    assert 0.005 < inked.mean() < 0.9
    assert len(np.unique((image[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)) > 10  # in colour


def test_every_figure_that_applies(tmp_path: Path) -> None:
    results = [result("sine, linear", 1, linear=True, widths=(100,)), result("digits", 4)]
    paths = plots.draw_all(results, tmp_path)  # type: ignore[arg-type]
    assert sorted(p.name for p in paths) == [
        "digits_uncertainty.png",
        "residual.png",
        "sine_linear_bands.png",
        "width_error.png",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        assert_drawn(path)


def test_linear_models_have_no_width_to_plot(tmp_path: Path) -> None:
    paths = plots.draw_all([result("sine, linear", 1, linear=True, widths=(100,))], tmp_path)  # type: ignore[list-item]
    assert sorted(p.name for p in paths) == ["residual.png", "sine_linear_bands.png"]


def test_two_widths_are_plotted_without_a_slope(tmp_path: Path) -> None:
    assert_drawn(plots.width_errors([result("digits", 4, widths=(16, 32))], tmp_path))  # type: ignore[list-item]


@pytest.mark.parametrize("points", [[(0, 0.1), (5, 0.8)], [(0, 0.1)], [(0, float("nan")), (5, 0.5)]])
def test_curves(tmp_path: Path, points: list[tuple[int, float]]) -> None:
    path = plots.curves({"train": points, "test": points}, "accuracy", "fed_avg on digits", tmp_path / "c.png")
    assert_drawn(path)


def bins(seed: int, shift: float = 0.0) -> Reliability:
    confidence = np.linspace(0.05, 0.95, 10)
    examples = np.random.default_rng(seed).integers(0, 60, 10) * (confidence > 0.3)
    return Reliability(np.linspace(0, 1, 11), examples, confidence, np.clip(confidence + shift, 0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [1, 3])
def test_reliability_diagrams(tmp_path: Path, seeds: int) -> None:
    methods = {m: [bins(s, shift) for s in range(seeds)] for m, shift in (("FedAvg", -0.1), ("Fed-ensemble", 0.05))}
    paths = [plots.reliability_diagram({m: methods[m] for m in some}, "digits", tmp_path / f"{len(some)}.png")
             for some in (["FedAvg"], ["FedAvg", "Fed-ensemble"])]  # fmt: skip
    for path in paths:
        assert_drawn(path)
    one, both = map(pixels, paths)
    assert np.any(one != both)


def test_pooled_bins_are_those_of_all_examples() -> None:
    several = [bins(0, 0.1), bins(1, -0.2)]
    edges, examples, confidence, accuracy = plots._pooled(several)
    np.testing.assert_array_equal(edges, several[0].edges)
    np.testing.assert_array_equal(examples, np.asarray(several[0].examples) + np.asarray(several[1].examples))
    assert accuracy @ examples == pytest.approx(sum(float(np.dot(b.accuracy, b.examples)) for b in several))
    full = examples > 0
    np.testing.assert_allclose(confidence[full], np.asarray(several[0].confidence)[full])


@pytest.mark.parametrize("seeds", [1, 4])
def test_curves_with_bands(tmp_path: Path, seeds: int) -> None:
    values = np.random.default_rng(0).uniform(size=(seeds, 3))
    panels = {"accuracy": {"a": values, "b": values / 2}, "NLL": {"a": values, "b": 2 * values}}
    assert_drawn(plots.curves_with_bands(panels, [0, 5, 10], "digits", tmp_path / "c.png"))


def test_pyplot_is_not_touched(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from fedtangent.output import plots;"
        "assert 'matplotlib' not in sys.modules;"
        f"plots.curves({{'test': [(0, 1.0), (1, 2.0)]}}, 'mse', 't', Path({str(tmp_path / 'c.png')!r}));"
        "assert 'matplotlib' in sys.modules; print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
