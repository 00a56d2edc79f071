"""Figures of runs are drawn whole, without a display and without pyplot."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedtangent.measures.uncertainty import Reliability
from fedtangent.output import run_plots as plots

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
    assert np.any(one != both)


def test_pooled_bins_are_those_of_all_examples() -> None:
    several = [bins(0, 0.1), bins(1, -0.2)]
    edges, examples, confidence, accuracy = plots._pooled(several)
    np.testing.assert_array_equal(edges, several[0].edges)
    np.testing.assert_array_equal(examples, np.asarray(several[0].examples) + np.asarray(several[1].examples))
    assert accuracy @ examples == pytest.approx(sum(float(np.dot(b.accuracy, b.examples)) for b in several))
    full = examples > 0
    np.testing.assert_allclose(confidence[full], np.asarray(several[0].confidence)[full])


@pytest.mark.parametrize(("seeds", "points"), [(1, 1), (4, 3), (4, 20)])
def test_curves(tmp_path: Path, seeds: int, points: int) -> None:
    values = np.random.default_rng(0).uniform(size=(seeds, points))
    values[0, 0] = np.nan
    panels = {"accuracy": {"a": values, "b": values / 2}, "NLL": {"a": values, "b": 2 * values}}
    assert_drawn(plots.curves(panels, range(points), "digits", tmp_path / "c.png"))


def test_pyplot_and_its_global_state_are_not_touched() -> None:
    """Matplotlib itself is imported when the first figure is drawn: ``test_imports.py``."""
    sources = {path.name: path.read_text() for path in Path(plots.__file__).parents[1].rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"(import|from) .*\bpyplot\b", text)] == []
