"""What goes beyond the Local-GD paper: small runs count, and the parts of the experiments are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments.local_gd import lambda_rate, local_optimisers, participation, problems

from ..performed import performed, study_of

FIGURES = {name: {f"{name}.png"} for name in ("lambda_rate", "local_optimisers", "participation", "wide_network")}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_the_smallest_scale_counts(name: str, tmp_path: Path) -> None:
    found, metrics = performed(f"local_gd.{name}", (), tmp_path)
    assert found.failed == () and found.verdicts and metrics
    assert all(v.holds is not False and v.control_fails for v in found.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == FIGURES[name]
    assert all(c.verdict in ("seen", "not seen", "undecided") for c in found.claims)


def test_the_angle_falls_as_one_over_l() -> None:
    s = lambda_rate.LambdaSettings(num_nodes=3, held=4, dimensions=(30,), rounds=(1, 3))
    for found in lambda_rate._turned(s, 0, 30):
        times = np.array(s.log_inverses) * found.angle
        assert times[-1] == pytest.approx(times[-3], rel=0.01)
        assert found.angle[-1] < 1e-5 < found.later[-1]
        assert (found.along[-1] - found.along[-2]) / np.log(10) == pytest.approx(-1, abs=0.01)


def test_the_largest_l_inf_margin() -> None:
    """Of the plane's points (2, 1) and (-1, 2), the first coordinate as large as its bound; no direction has more."""
    signed = np.array([[2.0, 1.0], [-1.0, 2.0]])
    w = local_optimisers.largest_margin(signed)
    best = (signed @ w).min() / np.abs(w).max()
    angles = np.linspace(0, 2 * np.pi, 10_001)
    every = np.stack([np.cos(angles), np.sin(angles)])
    margins = (signed @ every).min(axis=0) / np.abs(every).max(axis=0)
    assert best == pytest.approx(margins.max(), abs=1e-3) and margins.min() < best - 1


def test_only_adam_leaves_the_span() -> None:
    s = local_optimisers.OptimiserSettings(num_nodes=2, held=3, dimension=60, local_steps=40, num_rounds=30)
    found = {f.optimiser: f for f in local_optimisers._regressed(s, 0)}
    for name in ("gradient descent", "momentum"):
        assert found[name].curves["outside"][-1] < 1e-12 and found[name].curves["distance"][-1] < 1e-2
    assert min(found[name].curves["outside"][-1] for name in ("adam", "adam, pooled")) > 0.1


def test_rates_are_read_from_what_is_above_rounding() -> None:
    distance = np.exp(-0.5 * np.arange(100))
    assert participation.fall(distance) == pytest.approx(0.5)
    assert participation.fall(np.maximum(distance, 1e-12)) == pytest.approx(0.5)


def test_every_number_of_steps_stays_at_a_model_that_fits_all() -> None:
    """A loop in NumPy of some nodes a round: from the centralised model nothing moves, below M N dimensions it does."""
    s = participation.ParticipationSettings(
        num_nodes=4, held=3, wide=30, narrow=6, clients_per_round=2, local_steps=(1, 5, 50), num_rounds=20
    )
    rng = np.random.default_rng(0)
    for dimension, moves in ((s.wide, False), (s.narrow, True)):
        drawn = participation._nodes(s, 0, dimension)
        w = centre = np.linalg.lstsq(drawn.x, drawn.y, rcond=None)[0]
        for _ in range(s.num_rounds):
            ends = []
            for i in rng.choice(s.num_nodes, s.clients_per_round, replace=False):
                own, rows = w.copy(), drawn.partition.client(i)
                for _ in range(50):
                    own -= s.learning_rate * drawn.x[rows].T @ (drawn.x[rows] @ own - drawn.y[rows]) / len(rows)
                ends.append(own)
            w = np.mean(ends, axis=0)
        assert (np.linalg.norm(w - centre) / np.linalg.norm(centre) > 1e-3) == moves


def test_the_data_are_those_of_section_5() -> None:
    drawn = problems.regression(0, 20, 200, 50)
    assert drawn.x.shape == (4000, 50) and drawn.partition.num_clients == 20
    truths = np.stack(
        [np.linalg.lstsq(drawn.x[r], drawn.y[r], rcond=None)[0] for r in map(drawn.partition.client, range(20))]
    )
    assert np.std(truths) == pytest.approx(2, rel=0.1) and abs(np.corrcoef(truths)[0, 1]) < 0.5
    left = [drawn.y[r] - drawn.x[r] @ w for r, w in zip(map(drawn.partition.client, range(20)), truths, strict=True)]
    assert np.mean(np.square(left)) * 200 / 150 == pytest.approx(0.04, rel=0.1)
    common = problems.regression(0, 2, 200, 50, 0.1, common=True)
    one, other = (
        np.linalg.lstsq(common.x[r], common.y[r], rcond=None)[0] for r in map(common.partition.client, range(2))
    )
    assert np.linalg.norm(one - other) < 0.2 * np.linalg.norm(one)
    signs = problems.classification(0, 3, 40, 10, 0.3)
    assert set(signs.y) == {-1.0, 1.0} and abs(signs.y.mean()) < 0.5


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lambda_rate", ("log_inverses=10,100,1000",), "log_inverses: got .*, must have three values of 10000 or more"),
        ("lambda_rate", ("dimensions=5",), "y: got labels that no hyperplane through 0 separates"),
        ("local_optimisers", ("dimension=40",), "dimension: got 40, must be above 40, the examples of all nodes"),
        ("local_optimisers", ("rate=1.0",), "rate: got 1.0, at which local work diverges"),
        ("participation", ("wide=100",), "wide: got 100, must be above 100, the examples of all nodes"),
        ("participation", ("narrow=10",), "narrow: got 10, must be above 10, the examples of one node"),
        ("participation", ("clients_per_round=10",), "clients_per_round: got 10, must be below num_nodes, 10"),
        ("participation", ("learning_rate=1.0",), "learning_rate: got 1.0, at which local work diverges"),
        ("wide_network", ("widths=64,128",), "widths: got 64,128, must be 3 or more"),
        ("wide_network", ("step_factor=2.0",), "step_factor: got 2.0"),
    ],
)
def test_bad_requests_are_refused(name: str, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of(f"local_gd.{name}", changes)
