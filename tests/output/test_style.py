"""What every figure has: its format, a legend off the curves, marks that do not touch, numbers on its logarithms."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedtangent._src.output import style
from fedtangent._src.output.files import FORMATS


def drawn(labels: tuple[tuple[str, ...], ...] = (("a", "b"),), rows: int = 1) -> Figure:
    """Panels with lines of these labels."""
    figure, axes = style.canvas(len(labels) // rows, rows)
    for ax, names in zip(axes.ravel(), labels, strict=True):
        for i, name in enumerate(names):
            ax.plot([1, 2, 3], [i, i + 1, i], label=name)
        style.dress(ax, "across", "up", "title")
    return figure


@pytest.mark.parametrize("name", FORMATS)
def test_equal_figures_are_equal_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for year in ("2001", "2020"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str((int(year) - 1970) * 31_556_952))  # what Matplotlib takes for now
        contents.append(style.save(drawn(), tmp_path / f"{year}.{name}", "title").read_bytes())
    assert contents[0] == contents[1]
    figure = drawn()
    figure.savefig(tmp_path / f"dated.{name}")
    assert (b"2020" in (tmp_path / f"dated.{name}").read_bytes()) == (name != "png") and b"2020" not in contents[0]


def test_the_letters_of_a_pdf_are_truetype(tmp_path: Path) -> None:
    figure = drawn()
    ours = style.save(figure, tmp_path / "a.pdf").read_bytes()
    figure.savefig(tmp_path / "b.pdf")
    assert b"/CIDFontType2" in ours and b"/Type3" not in ours
    assert b"/Type3" in (tmp_path / "b.pdf").read_bytes()


def boxes(figure: Figure) -> tuple[list[Any], list[Any]]:
    """Of the panels with the names of their axes, and of the legends."""
    figure.draw_without_rendering()
    legends = [*figure.legends, *(found for ax in figure.axes if (found := ax.get_legend()) is not None)]
    parts = [part for ax in figure.axes for part in (ax.patch, ax.xaxis, ax.title)]
    return [part.get_tightbbox() for part in parts], [legend.get_window_extent() for legend in legends]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("labels", "rows", "legends"),
    [
        ((("a", "b"),), 1, 1),
        ((("a", "b"), ("b", "a")), 1, 1),
        ((("a", "b"), ("b",), ()), 1, 1),
        ((("a" * 40, "b", "c"), ("d",)), 1, 2),
        ((("a", "b"), ("c",), ("d",), ("e" * 50, "f" * 50, "g")), 2, 4),
    ],
)
def test_legends_are_off_the_curves(
    tmp_path: Path, labels: tuple[tuple[str, ...], ...], rows: int, legends: int
) -> None:
    figure = drawn(labels, rows)
    style.save(figure, tmp_path / "a.png")
    panels, found = boxes(figure)
    assert len(found) == legends
    assert not any(legend.overlaps(panel) for legend in found for panel in panels)
    assert not any(one.overlaps(other) for i, one in enumerate(found) for other in found[:i])
    figure = drawn(labels, rows)
    figure.axes[0].legend()  # where Matplotlib puts it
    panels, found = boxes(figure)
    assert any(legend.overlaps(panel) for legend in found for panel in panels)


def test_named_ticks_do_not_touch(tmp_path: Path) -> None:
    def touching(figure: Figure) -> int:
        figure.draw_without_rendering()
        texts = [text for text in figure.axes[0].get_xticklabels() if text.get_visible()]
        ends = [(box.x0, box.x1) for box in (text.get_window_extent() for text in texts)]
        return sum(left[1] >= right[0] for left, right in pairwise(ends))

    figure = drawn()
    figure.axes[0].set_xticks([1, 1.02, 2, 3], ["first", "second", "third", "fourth"])
    assert touching(figure) == 1
    style.save(figure, tmp_path / "a.png")
    assert touching(figure) == 0
    texts = figure.axes[0].get_xticklabels()
    assert [text.get_text() for text in texts if text.get_visible()] == ["first", "third", "fourth"]


@pytest.mark.parametrize("ends", [(0.0213, 0.0987), (0.91, 0.97), (0.3, 4.0), (2e-4, 9e-3), (3, 17), (40_000, 90_000)])
def test_few_powers_of_ten_have_numbers_in_between(tmp_path: Path, ends: tuple[float, float]) -> None:
    figure, axes = style.canvas(1)
    axes[0][0].plot([1, 2], ends)
    style.dress(axes[0][0], log="y")
    style.save(figure, tmp_path / "a.png")
    ax = figure.axes[0]
    low, high = ax.get_ylim()
    shown = [float(text.get_text()) for text in ax.get_yticklabels() if low <= text.get_position()[1] <= high]
    assert 3 <= len(shown) <= 8
    np.testing.assert_allclose(shown, [at for at in ax.get_yticks() if low <= at <= high], rtol=1e-12)


def test_every_width_has_a_shade() -> None:
    for count in range(1, 10):
        places = [style.SHADES.index(shade) for shade in style.shades(count)]
        assert len(places) == count and places == sorted(places) and places[-1] == len(style.SHADES) - 1
        assert len(set(places)) == min(count, len(style.SHADES))


def test_the_reach_of_an_axis() -> None:
    low, high = style.reach(np.array([0.9, np.nan, 0.91, np.inf])) or (0, 0)
    assert 0.899 < low < 0.9 and 0.91 < high < 0.911
    assert style.reach(np.array([np.nan])) is None and style.reach(np.ones(3)) is None


@pytest.mark.parametrize("ground", ["default", "dark_background"])
def test_every_line_is_seen_on_its_ground(ground: str) -> None:
    colours = [style.DATA, style.NEUTRAL, "black", *style.SHADES, *style.METHODS]
    with matplotlib.style.context(ground):
        figure, axes = style.canvas(1)
        for colour in colours:
            axes[0][0].plot([0, 1], [0, 1], color=colour)
        style.finish(figure)
    seen = [to_rgb(line.get_color()) for line in axes[0][0].lines]
    away = np.abs(np.mean(seen, axis=1) - np.mean(to_rgb(axes[0][0].get_facecolor())))
    assert away.min() > 0.15 and len(set(seen)) >= len(colours) - 1  # data are black or nearly so
