"""Theorem IV.2 along runs: the problem is what it says, the loop is DeepLin's, and the controls fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent import theory
from fedtangent.experiments.deep_linear import followed, networks, theorem
from fedtangent.experiments.lab.runner import Study
from fedtangent.theory.deep_linear import rounds

from ..performed import performed, study_of

SMALL = theorem.TheoremSettings(widths=(16, 64, 256), num_rounds=20, looks=4)


@pytest.mark.slow
def test_the_smallest_scale_counts(tmp_path: Path) -> None:
    found, metrics = performed("deep_linear.theorem", (), tmp_path, (0, 1, 2))
    assert found.failed == () and len(found.verdicts) == 8 and metrics
    assert all(v.holds is not False and v.control_fails for v in found.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"decay.png", "proof.png"}
    assert found.claims[0].verdict == "seen" and found.claims[4].measured == "150 of 150"
    assert all(a.holds for told in found.details["assumptions"] for a in told)


@pytest.mark.parametrize(("num_examples", "dimension"), [(4, 6), (12, 5)])
def test_the_problem_is_as_well_conditioned_as_asked_and_can_be_fitted(num_examples: int, dimension: int) -> None:
    found = networks.problem(3, num_examples, dimension, 2, 4.0, 0.7)
    rank = min(num_examples, dimension)
    singular = np.linalg.svd(found.x, compute_uv=False)[:rank]
    np.testing.assert_allclose(singular**2, 4.0 ** -np.linspace(0, 1, rank), rtol=1e-10)
    star = np.linalg.lstsq(found.x, found.y, rcond=None)[0]
    np.testing.assert_allclose(found.x @ star, found.y, atol=1e-12)
    if num_examples > dimension:
        assert np.linalg.norm(star, 2) == pytest.approx(0.7)
    other = networks.problem(4, num_examples, dimension, 2, 4.0, 0.7)
    assert np.linalg.norm(other.x - found.x) > 0.1


def test_twice_as_many_clients_halve_each() -> None:
    few, many = (networks.contiguous(16, n) for n in (4, 8))
    for c in range(4):
        assert list(few.client(c)) == [*many.client(2 * c), *many.client(2 * c + 1)]


def test_a_walk_is_eqs_6_to_8_from_the_draw_it_names() -> None:
    work = theorem.task(SMALL, 0, 5.0)
    seen: dict[int, networks.Weights] = {}
    path = networks.walk(work, (16, 3), 6, 0, 2, seen.__setitem__, 1)
    assert list(seen) == [0, 2, 4, 6] and path.shape == (4, 6, 2)
    weights = seen[0]
    for _ in range(6):
        weights = rounds.averaged(rounds.local_paths(weights, work))
    assert max(np.abs(a - b).max() for a, b in zip(weights, seen[6], strict=True)) < 1e-12
    np.testing.assert_allclose(path[-1], networks.linear_model(weights), atol=1e-13)
    assert np.abs(networks.walk(work, (16, 3), 2, 0, 2)[0] - path[0]).max() > 0.1


def test_a_walk_that_diverges_is_not_a_number_from_there_on() -> None:
    work = theorem.task(SMALL, 0, 5.0)._replace(learning_rate=1e3)
    looked: list[int] = []
    path = networks.walk(work, (16, 3), 6, 0, look=lambda t, weights: looked.append(t))
    assert np.isfinite(path[0]).all() and np.isnan(path[-1]).all() and len(looked) < 7


def test_a_network_beside_its_flows() -> None:
    work = theorem.task(SMALL, 0, 20.0)
    found = followed.follow(work, (256, 3), (0, 0), 20, 4, 0.1)
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


def test_the_first_term_is_that_of_the_slowest_mode_in_the_end() -> None:
    work = theorem.task(SMALL, 0, 20.0)
    start: list[networks.Weights] = []
    networks.walk(work, (64, 3), 1, 0, look=lambda t, weights: start.append(weights))
    told = theory.deep_linear_theorem(start[0], work)
    look = followed.looked(told, work, start[0], 0)
    terms = rounds.residual_terms(start[0], start[0], work)
    size = np.linalg.norm(work.x @ networks.linear_model(start[0]) - work.y)
    unit = 2 * (1 - told.constants.rate())
    assert look.terms["first"] == pytest.approx((1 - np.linalg.norm(terms.first) / size) / unit)
    assert look.terms["first"] > 1 and look.terms["third"] == pytest.approx(np.linalg.norm(terms.third) / size / unit)


def test_what_moves_together_keeps_its_balance() -> None:
    before = [np.eye(3), np.eye(3)]
    size = np.sqrt(6)
    assert followed.balance(before, [2 * w for w in before]) == pytest.approx((3 * np.sqrt(6) / size, 0))
    alone = followed.balance(before, [np.eye(3), 2 * np.eye(3)])
    assert alone == pytest.approx((3 * np.sqrt(3) / size,) * 2)


def test_slopes_are_those_of_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        followed.Followed(seed, draw, width, *[None] * 5)  # type: ignore[arg-type]
        for seed in (0, 1) for draw in (0, 1) for width in SMALL.widths
    ]  # fmt: skip
    monkeypatch.setattr(followed.Followed, "error", lambda self, name: (1 + self.seed + self.draw) * self.width**-0.7)
    slope = theorem.slope(SMALL, found, "own")
    assert slope.mean == pytest.approx(-0.7) and slope.high - slope.low < 1e-9


def test_a_term_beyond_its_share_and_a_control_within_it_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theorem, "_draw", lambda *_: None)
    study = Study(SMALL, "gaussian", (0, 1))
    runs = [
        followed.follow(theorem.task(SMALL, seed, 0.9), (width, 3), (seed, 0), 20, 4, 0.1)
        for seed in (0, 1) for width in SMALL.widths
    ]  # fmt: skip
    far = theorem.task(SMALL, 0, 90.0)
    wrong = [followed.follow(far, (4, 3), (0, 0), 4, 4, 0.1)]
    good = theorem.conclude(study, runs, wrong)
    assert good.failed == () and all(v.control_fails for v in good.verdicts[:5])
    terms = [v for v in theorem.conclude(study, runs, runs[-1:]).verdicts if "term" in v.statement]
    assert [v.control_fails for v in terms] == [True, False, False, False]

    def moved(look: followed.Look) -> followed.Look:
        return look._replace(terms={**look.terms, "second": 0.3})

    beyond = [f if f.width < 256 else f._replace(looks=tuple(map(moved, f.looks))) for f in runs]
    found = theorem.conclude(study, beyond, wrong)
    assert any("second term" in line for line in found.failed)
    assert found.claims[5].verdict == "not seen"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("num_examples=8",), "num_examples: got 8, must be at most dimension, 6"),
        (("num_clients=5",), "num_clients: got 5, must be at most num_examples, 4"),
        (("num_clients=3",), "num_examples: got 4, must be a multiple of num_clients, 3"),
        (("widths=64,128",), "widths: got 64,128, must be 3 or more"),
        (("step_factor=500",), "step_factor: got 500, at which local descent diverges, must be below 440"),
        (("control_factor=500",), "control_factor: got 500, at which local descent diverges"),
        (("depth=1",), "depth: got 1"),
    ],
)
def test_bad_requests_are_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of("deep_linear.theorem", changes)
