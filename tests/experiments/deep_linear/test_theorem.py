"""Theorem IV.2 along runs: the problem is what it says, the loop is DeepLin's, and the controls fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent import theory
from fedtangent._src.comparison.theorems.deep_linear import run_of
from fedtangent._src.experiments.deep_linear import followed, theorem
from fedtangent._src.experiments.lab import log_slopes
from fedtangent._src.experiments.lab.runner import Study

from ..performed import performed, study_of

SMALL = theorem.TheoremSettings(widths=(16, 64, 256), num_rounds=20, looks=4)


@pytest.mark.slow
def test_the_smallest_scale_counts(tmp_path: Path) -> None:
    found, metrics = performed("deep_linear.theorem", (), tmp_path, (0, 1, 2))
    assert found.failed == () and len(found.verdicts) == 8 and metrics
    assert all(v.holds is not False and v.control_fails for v in found.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"decay.png", "proof.png"}
    assert found.claims[0].verdict == "seen" and found.claims[4].measured == "60 of 60"
    assert all(a.holds for told in found.details["assumptions"] for a in told)


def test_steps_are_those_of_the_theorem_and_examples_as_many_as_dimensions() -> None:
    for seed in (0, 1):
        work = theorem._task(SMALL, seed, 0.9)
        assert work.x.shape == (4, 4) and list(work.partition.sizes) == [1] * 4
        start = run_of(SMALL.size(16), work.x, work.y, work.learning_rate, seed, 20).weights[0]
        told = theory.deep_linear_theorem(start, work, SMALL.delta)
        assert work.learning_rate == pytest.approx(0.9 * told.constants.step_limit())
        step, realisable, width = told.assumptions
        assert step.holds and realisable.holds and 64 < width.measured < 1024


def test_a_network_beside_its_flows() -> None:
    work = theorem._task(SMALL, 0, 20.0)
    found = followed.follow(SMALL.size(256), work, (0, 0), 4, 0.1)
    assert found.loss[0] == pytest.approx(1) and found.loss[-1] < 0.1
    assert np.array_equal([look.round for look in found.looks], [5, 10, 15, 20])
    errors = {name: found.error(name) for name in followed.FLOWS}
    assert errors["own"] < 0.2 * errors["infinite"] < 0.2 * min(errors["one_step"], errors["summed"])
    assert errors["own"] < 0.2 * errors["lambda_max"]
    last = found.looks[-1]
    assert last.hypotheses[0].measured == pytest.approx(found.loss[-1])
    assert last.unbalanced < 0.05 * last.moved
    c = found.theorem.constants
    assert found.unit == pytest.approx(c.learning_rate * c.local_steps * c.lambda_min / c.num_clients)
    np.testing.assert_allclose(found.bounds()["its proof"], found.bounds()["(18)"] ** 2)


def test_the_first_term_counts_from_one() -> None:
    work = theorem._task(SMALL, 0, 20.0)
    seen = run_of(SMALL.size(64, 1), work.x, work.y, work.learning_rate, 0, 1)
    told = theory.deep_linear_theorem(seen.weights[0], work)
    look = followed._looked(told, work, seen.weights[0], 0)
    terms = theory.residual_terms(seen.weights[0], seen.weights[0], work)
    size = np.linalg.norm(work.x @ seen.models[0] - work.y)
    unit = 2 * (1 - told.constants.rate())
    assert look.terms["first"] == pytest.approx((1 - np.linalg.norm(terms.first) / size) / unit)
    assert look.terms["first"] > 1 and look.terms["third"] == pytest.approx(np.linalg.norm(terms.third) / size / unit)


def test_what_moves_together_keeps_its_balance() -> None:
    before = [np.eye(3), np.eye(3)]
    size = np.sqrt(6)
    assert followed._balance(before, [2 * w for w in before]) == pytest.approx((3 * np.sqrt(6) / size, 0))
    alone = followed._balance(before, [np.eye(3), 2 * np.eye(3)])
    assert alone == pytest.approx((3 * np.sqrt(3) / size,) * 2)
    rng = np.random.default_rng(0)
    begin, end = ([rng.standard_normal(shape) for shape in ((5, 3), (5, 5), (2, 5))] for _ in range(2))
    both = zip(theory.balancedness(end), theory.balancedness(begin), strict=True)
    apart = np.sqrt(sum(np.sum((now - was) ** 2) for now, was in both))
    sides = [w.T @ w for w in begin[1:]] + [w @ w.T for w in begin[:-1]]
    assert followed._balance(begin, end)[1] == pytest.approx(apart / np.sqrt(sum(np.sum(s**2) for s in sides)))


def test_slopes_are_those_of_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        followed.FollowedNetwork(seed, draw, width, *[None] * 5)  # type: ignore[arg-type]
        for seed in (0, 1) for draw in (0, 1) for width in SMALL.widths
    ]  # fmt: skip
    monkeypatch.setattr(
        followed.FollowedNetwork, "error", lambda self, name: (1 + self.seed + self.draw) * self.width**-0.7
    )
    slope = log_slopes(found, "width", lambda network: network.error("own"), "seed", "draw")
    assert slope.mean == pytest.approx(-0.7) and slope.high - slope.low < 1e-9


def test_a_term_beyond_its_share_and_a_control_within_it_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theorem, "_draw", lambda *_: None)
    study = Study(SMALL, "gaussian", (0, 1))
    runs = [
        followed.follow(SMALL.size(width), theorem._task(SMALL, seed, 0.9), (seed, 0), 4, 0.1)
        for seed in (0, 1) for width in SMALL.widths
    ]  # fmt: skip
    far = theorem._task(SMALL, 0, 90.0)
    wrong = [followed.follow(SMALL.size(4, 4), far, (0, 0), 4, 0.1)]
    good = theorem._conclude(study, runs, wrong)
    assert good.failed == () and all(v.control_fails for v in good.verdicts[:5])
    terms = [v for v in theorem._conclude(study, runs, runs[-1:]).verdicts if "term" in v.statement]
    assert [v.control_fails for v in terms] == [True, False, False, False]

    def moved(look: followed.Look) -> followed.Look:
        return look._replace(terms={**look.terms, "second": 0.3})

    beyond = [f if f.width < 256 else f._replace(looks=tuple(map(moved, f.looks))) for f in runs]
    found = theorem._conclude(study, beyond, wrong)
    assert any("second term" in line for line in found.failed)
    assert found.claims[5].verdict == "not seen"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("widths=64,128",), "widths: got 64,128, must be 3 or more"),
        (("step_factor=500",), "step_factor: got 500, must be below 443"),
        (("control_factor=500",), "control_factor: got 500, must be below 49"),
        (("widths=1,16,64",), "widths: got 1, must be at least 2, else the initial kernel"),
        (("depth=1",), "depth: got 1"),
    ],
)
def test_bad_requests_are_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of("deep_linear.theorem", changes)
