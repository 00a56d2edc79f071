"""The regime map: its scales are those of the weights, its rates those of the curves, and what diverges is lost."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.comparison.theorems.deep_linear import Run, Size
from fedtangent._src.experiments.deep_linear import regime_map
from fedtangent._src.experiments.lab.runner import Study

from ..performed import performed, study_of

SMALL = regime_map.RegimeSettings(widths=(8, 16, 32), depths=(2, 3), num_rounds=20)


@pytest.mark.slow
def test_the_smallest_scale_counts(tmp_path: Path) -> None:
    found, metrics = performed("deep_linear.regime_map", (), tmp_path, (0, 1, 2))
    assert found.failed == () and len(found.verdicts) == 3 and metrics
    assert all(v.holds is not False and v.control_fails for v in found.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"regime_map.png"}
    cells = {(row["depth"], row["width"], row["scale"]): row for row in found.rows}
    assert np.mean(cells[3, 8, 0.5]["moved"]) > 5 * np.mean(cells[3, 128, 1.0]["moved"])
    assert all(len(row["to_own"]) == 3 and row["lost"] == 0 for row in found.rows)


def test_a_scale_of_weights_is_one_of_targets() -> None:
    found = regime_map._transcribed(SMALL, 0)
    assert found.passed and float(found.measured) < 1e-13
    works = [regime_map._scaled(SMALL, 0, SMALL.size(3, 8), scale) for scale in (0.5, 1.0)]
    np.testing.assert_allclose(works[0].y, 8 * works[1].y)
    assert works[0].learning_rate == works[1].learning_rate == pytest.approx(0.2 * 2 * 2 / 3)


def test_twice_as_many_clients_halve_each_and_take_twice_the_steps() -> None:
    one, two = (regime_map._scaled(SMALL, 0, SMALL.size(3, 8, times), 1.0) for times in (1, 2))
    assert (two.num_clients, two.local_steps) == (2 * one.num_clients, 2 * one.local_steps)
    assert np.array_equal(one.x, two.x) and np.array_equal(one.y, two.y)
    for c in range(one.num_clients):
        halves = two.partition.client(2 * c), two.partition.client(2 * c + 1)
        assert list(one.partition.client(c)) == [*halves[0], *halves[1]]


def product(weights: list[np.ndarray], size: int) -> np.ndarray:
    """Of the layers' weights, the last one first; the identity of this size if there are none."""
    return functools.reduce(lambda below, w: w @ below, weights, np.eye(size))


def by_loop(size: Size, x: np.ndarray, y: np.ndarray, learning_rate: float, seed: int, every: int) -> Run:
    """What the engine computes (``test_a_scale_of_weights_is_one_of_targets``), in NumPy: nothing is compiled."""
    rng, fans = np.random.default_rng(seed), [size.dimension, *[size.width] * (size.depth - 1), size.outputs]
    scale = (size.width ** (size.depth - 1) * size.outputs) ** -0.5
    path = [[rng.standard_normal((out, into)) for into, out in itertools.pairwise(fans)]]
    for _ in range(size.rounds):
        ends = []
        for c in range(size.clients):
            weights, rows = path[-1], size.partition.client(c)
            for _ in range(size.local_steps):
                off = (scale * product(weights, size.dimension) @ x[rows].T - y[rows].T) @ x[rows]
                slopes = [
                    product(weights[i + 1 :], fans[i + 1]).T @ off @ product(weights[:i], size.dimension).T
                    for i in range(size.depth)
                ]
                weights = [w - learning_rate * scale * g for w, g in zip(weights, slopes, strict=True)]
            ends.append(weights)
        path.append([np.mean(layer, axis=0) for layer in zip(*ends, strict=True)])
    models = np.array([scale * product(weights, size.dimension).T for weights in path])
    return Run(models, {r: weights for r, weights in enumerate(path) if r % every == 0})


def test_a_lazy_cell_is_its_flow_and_a_rich_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = regime_map._cell(SMALL, 0, 2, 1024, 1.0)
    monkeypatch.setattr(regime_map, "run_of", by_loop)
    rich = regime_map._cell(SMALL, 0, 2, 8, 0.5)
    for found in (lazy, rich):
        assert found.loss[0] == found.own[0] == found.flow[0] == 1 and len(found.rounds) == 21
    assert np.abs(np.log(lazy.loss / lazy.own)).max() < 0.02 < 0.1 < np.abs(np.log(rich.loss / rich.own)).max()
    assert np.abs(np.log(lazy.doubled / lazy.own_doubled)).max() < 0.02
    assert lazy.moved < 0.02 < 0.2 < rich.moved and lazy.apart < 0.1 < rich.apart
    assert lazy.over(lazy.rho) <= 1 < lazy.over(lazy.wrong)
    numbers = lazy.numbers()
    assert abs(numbers["to_own"] - 1) < 0.02 and numbers["to_bound"] > 3
    assert abs(numbers["ratio"] - numbers["flow_ratio"]) < 0.01


def curves(loss: np.ndarray, other: np.ndarray) -> regime_map.Cell:
    return regime_map.Cell(
        0, 3, 8, 1.0, 2 * np.arange(len(loss)), loss, other, loss, other, other, 0.9, 0.1, 1, 0.1, 0.1
    )


def test_rates_are_those_of_the_late_rounds_above_the_floor() -> None:
    at = 2 * np.arange(101)
    loss, flow = np.exp(-0.5 * at), np.exp(-0.25 * at)
    found = curves(np.maximum(loss, 1e-25), flow)
    assert regime_map.alive(found.loss) == np.argmin(loss > regime_map.FLOOR)
    assert found.late(found.loss) == pytest.approx(0.5)
    numbers = found.numbers()
    assert numbers["to_flow"] == pytest.approx(2) and numbers["to_own"] == pytest.approx(1)
    assert numbers["to_bound"] == pytest.approx(0.5 / -np.log(0.9)) and numbers["ratio"] == pytest.approx(0.5)
    delayed = np.where(at < 20, 1.0, np.exp(-0.5 * (at - 20)))
    assert curves(delayed, flow).late(delayed) == pytest.approx(0.5)


def test_what_diverges_is_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime_map, "_draw", lambda *_: None)
    s = regime_map.RegimeSettings(widths=(8, 16, 32), depths=(2, 3), num_rounds=20)
    at = np.arange(21)

    def made(seed: int, depth: int, width: int, scale: float) -> regime_map.Cell:
        loss = np.exp(-(0.3 + 0.01 * seed) * at)
        rich = (width, scale) == (8, 0.5)
        return regime_map.Cell(
            seed, depth, width, scale, at, np.where(at > 5, np.nan, loss) if rich and seed == 0 else loss, loss, loss,
            loss * np.exp(0.001 * at), loss, 0.8 if rich and seed == 1 else 0.95, 0.1, 100.0,
            (1 + 0.1 * seed) / width, width**-0.5,
        )  # fmt: skip

    cells = [made(seed, d, w, scale) for seed in range(3) for d, w in s.networks() for scale in s.scales]
    exact = regime_map._transcribed(s, 0)
    found = regime_map._conclude(Study(s, "gaussian", (0, 1, 2)), cells, exact)
    row = next(r for r in found.rows if (r["depth"], r["width"], r["scale"]) == (3, 8, 0.5))
    assert np.isnan(row["to_own"][0]) and row["to_own"][1:] == pytest.approx([1, 1])
    assert (row["lost"], row["above"]) == (1, 0)
    assert found.failed == () and [v.passed for v in found.verdicts] == [True] * 3
    nowhere = next(c for c in found.claims if "nowhere" in c.claim)
    assert nowhere.verdict == "not seen" and "L 3 m 8 s 0.5" in nowhere.measured
    motionless = [c._replace(moved=c.width**-0.5) for c in cells]
    wrong = regime_map._conclude(Study(s, "gaussian", (0, 1, 2)), motionless, exact)
    assert any("kernel's motion" in line for line in wrong.failed)
    above = [c._replace(rho=0.1) for c in cells]
    assert any("bound (18)" in line for line in regime_map._conclude(Study(s, "gaussian", (0, 1)), above, exact).failed)


def test_a_network_that_diverges_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime_map, "run_of", by_loop)
    s = regime_map.RegimeSettings(widths=(8, 16, 32), depths=(2, 3), num_rounds=20, step_factor=0.9)
    found = regime_map._cell(s, 0, 3, 8, 0.1)
    assert found.diverged and found.loss[0] == 1 and np.isnan(found.moved)
    assert all(np.isnan(value) for value in found.numbers().values())


def test_maps_share_the_network_in_the_middle() -> None:
    assert SMALL.networks() == [(3, 8), (3, 16), (3, 32), (2, 16)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("held=3",), "held: got 3, must be even"),
        (("scales=1.0,1.5",), "scales: got 1 as the smallest, must have one below 1"),
        (("dimension=17",), "dimension: got 17, must be at most 16, num_clients"),
        (("scales=0.5",), "scales: got 0.5, must be 2 or more"),
        (("step_factor=1.0",), "step_factor: got 1.0"),
        (("widths=1,16,64",), "widths: got 1, must be at least 2, else the initial kernel"),
        (("depths=1,2",), "depths: got 1"),
    ],
)
def test_bad_requests_are_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of("deep_linear.regime_map", changes)
