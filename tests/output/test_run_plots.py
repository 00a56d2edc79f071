"""Figures of runs are drawn whole, without a display and without pyplot."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtangent._src.intervals import half_width
from fedtangent._src.measures.uncertainty import Reliability
from fedtangent._src.output import run_plots as plots
from fedtangent._src.output import style
from fedtangent._src.output.files import Metric

from ..nightly import nightly
from .drawn import assert_drawn, pixels


def bins(seed: int, shift: float = 0.0) -> Reliability:
    confidence = np.linspace(0.05, 0.95, 10)
    examples = np.random.default_rng(seed).integers(0, 60, 10) * (confidence > 0.3)
    return Reliability(np.linspace(0, 1, 11), examples, confidence, np.clip(confidence + shift, 0, 1))  # type: ignore[arg-type]


def test_reliability_diagrams(tmp_path: Path) -> None:
    """Of one method and seed, and of two methods with three seeds each."""
    methods = {m: [bins(s, shift) for s in range(3)] for m, shift in (("FedAvg", -0.1), ("Fed-ensemble", 0.05))}
    several = ({"FedAvg": methods["FedAvg"][:1]}, methods)
    paths = [plots.reliability_diagram(some, "digits", tmp_path / f"{len(some)}.png") for some in several]
    for path in paths:
        assert_drawn(path)
    one, both = map(pixels, paths)
    assert not np.array_equal(one, both)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, none of which is written."""
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, path, title="": figures.append(figure) or path)
    return figures


def test_every_bin_has_its_count(kept: list[Figure]) -> None:
    methods = {name: [bins(seed), bins(seed + 1)] for seed, name in enumerate(("FedAvg", "Fed-ensemble"))}
    plots.reliability_diagram(methods, "digits", Path("r.png"))
    for i, seeds in enumerate(methods.values()):
        counts = np.sum([one.examples for one in seeds], axis=0)
        shown = [text.get_text() for text in kept[0].axes[1].texts][i * len(counts) : (i + 1) * len(counts)]
        assert shown == [str(n) if n else "" for n in counts] and max(counts) > 60
        np.testing.assert_array_equal([bar.get_height() for bar in kept[0].axes[1].containers[i]], counts)


def test_few_values_of_many_sizes_are_on_a_logarithmic_axis(kept: list[Figure]) -> None:
    for x in ((0.1, 0.5, 10.0), (1.0, 2.0, 3.0), (0.0, 5.0, 100.0)):
        plots.curves({"y": {"a": np.ones((2, 3)), "b": np.ones((2, 3))}}, x, "title", Path("c.png"))
        ax = kept[-1].axes[0]
        assert [text.get_text() for text in ax.get_xticklabels()] == [f"{value:g}" for value in x]
        places = np.array([line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 3])
        assert np.all(places[0] < places[-1])  # beside each other, around the value
        middle = np.sqrt(places[0] * places[-1]) if x[0] == 0.1 else (places[0] + places[-1]) / 2
        np.testing.assert_allclose(middle, x, atol=1e-12)
    assert [figure.axes[0].get_xscale() for figure in kept] == ["log", "linear", "linear"]


def test_kernels_are_drawn_over_what_they_were_at_the_start(kept: list[Figure]) -> None:
    names = [name for _, _, metrics in plots.KERNEL_PANELS for name in metrics]
    series = {name: {0: [2.0, 4.0], 5: [2.02, 4.04]} for name in names}
    plots.kernel_figure(series, [np.ones(3)], [np.ones(3)], 5, "digits", Path("k.png"))
    drift, alignment, *_ = kept[0].axes
    assert [list(line.get_ydata()) for line in drift.lines] == [[3.0, pytest.approx(3.03)]] * 2
    assert [list(line.get_ydata()) for line in alignment.lines] == [[1.0, pytest.approx(1.01)]] * 2
    assert alignment.get_legend_handles_labels()[1] == ["plain, 3 at round 0", "centred, 3 at round 0"]


def test_pooled_bins_are_those_of_all_examples() -> None:
    several = [bins(0, 0.1), bins(1, -0.2)]
    edges, examples, confidence, accuracy = plots._pooled(several)
    np.testing.assert_array_equal(edges, several[0].edges)
    np.testing.assert_array_equal(examples, np.asarray(several[0].examples) + np.asarray(several[1].examples))
    assert accuracy @ examples == pytest.approx(sum(float(np.dot(b.accuracy, b.examples)) for b in several))
    full = examples > 0
    np.testing.assert_allclose(confidence[full], np.asarray(several[0].confidence)[full])


@pytest.mark.parametrize(("seeds", "points"), nightly([(1, 1), (4, 3), (4, 20)], [(4, 3)]))
def test_curves(tmp_path: Path, seeds: int, points: int) -> None:
    values = np.random.default_rng(0).uniform(size=(seeds, points))
    values[0, 0] = np.nan
    panels = {"accuracy": {"a": values, "b": values / 2}, "NLL": {"a": values, "b": 2 * values}}
    assert_drawn(plots.curves(panels, range(points), "digits", tmp_path / "c.png"))


def test_curves_of_the_last_half_fill_the_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(plots, "save", lambda figure, path, title: kept.append((figure, title)) or path)
    rise = 1 - np.exp(-np.arange(20.0)) + np.array([[-0.001], [0.001]])
    lines = {"a": rise, "b": rise + 0.01}
    draw = functools.partial(plots.curves, title="digits", path=tmp_path / "c.png")
    draw({"accuracy": lines}, range(20), late=True)
    draw({"accuracy": lines}, range(20))
    draw({"accuracy": {name: values[:, :5] for name, values in lines.items()}}, range(5), late=True)
    draw({"accuracy": {"a": np.full((2, 20), np.nan)}}, range(20), late=True)
    (low, high), (whole, _), (few, _), _ = (figure.axes[0].get_ylim() for figure, _ in kept)
    half = half_width(rise)[-1]
    assert rise[:, 10].min() > low > 0.98 and 1.011 < high < 1.01 + half  # the interval of two seeds is cut
    assert -0.1 < whole < -0.001 and few < 0
    assert [title for _, title in kept] == ["digits; vertical axis fits the last half", "digits", "digits"] + [
        kept[0][1]
    ]


def told(seeds: int, names: tuple[str, ...], rounds: tuple[int, ...] = (0, 2, 4)) -> list[Metric]:
    """Metrics of two splits; a later seed sends more, and its last round is not there."""
    return [
        Metric(r, "fed_avg", s, split, name, 1 / (1 + r + s), (s + 1) * r * 2**20, 0)
        for s in range(seeds)
        for r in rounds[: len(rounds) - (s > 0)]
        for split in ("train", "test")
        for name in names
    ]


@pytest.mark.parametrize(
    ("seeds", "names"), nightly([(1, ("mse",)), (3, ("mse", "accuracy"))], [(3, ("mse", "accuracy"))])
)
def test_learning_curves_are_of_loss_accuracy_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, names: tuple[str, ...]
) -> None:
    figures: list[Figure] = []
    save = plots.save

    def kept(figure: Figure, *more: object) -> Path:
        figures.append(figure)
        return save(figure, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(plots, "save", kept)
    assert_drawn(plots.learning_curves(told(seeds, names), "mse", "digits", tmp_path / "l.png"))
    axes = figures[0].axes
    assert [(ax.get_xlabel().split(",")[0], ax.get_ylabel()) for ax in axes] == [
        *(("round", style.in_words(name)) for name in names),
        ("MiB sent up", style.in_words(names[-1])),
    ]
    rounds = [0, 2, 4] if seeds == 1 else [0, 2]  # of every seed
    for ax in axes:
        lines = [line for line in ax.lines if not line.get_label().startswith("_")]
        assert [line.get_label() for line in lines] == ["train", "test"]
        assert len(ax.collections) == (2 if seeds > 1 else 0)  # an interval each
        np.testing.assert_allclose(
            lines[0].get_ydata(), [np.mean([1 / (1 + r + s) for s in range(seeds)]) for r in rounds]
        )
    sent = np.mean([[(s + 1) * r for r in rounds] for s in range(seeds)], axis=0)
    shift = np.mean([line.get_xdata() for line in axes[-1].lines if len(line.get_xdata()) == len(rounds)], axis=0)
    np.testing.assert_allclose(shift, sent, atol=1e-12)


def test_pyplot_and_its_global_state_are_not_touched() -> None:
    """Matplotlib itself is imported when the first figure is drawn: ``test_imports.py``."""
    sources = {path.name: path.read_text() for path in Path(plots.__file__).parents[1].rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"(import|from) .*\bpyplot\b", text)] == []
