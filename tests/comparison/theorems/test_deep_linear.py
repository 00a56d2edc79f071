"""Rows of the theorem table on deep linear networks: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

import pytest

from fedtangent._src.comparison.theorems import deep_linear
from fedtangent._src.comparison.theorems.deep_linear import Size

pytestmark = pytest.mark.theory


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row(seed: int) -> None:
    rows = [
        row for check in (deep_linear._check_convergence, deep_linear._check_rounds) for row in check("default", seed)
    ]
    assert len(rows) == 17
    assert [row for row in rows if not row.passed] == []
    assert not any("not met" in row.sizes for row in rows)


def test_a_round_and_its_terms() -> None:
    for row in deep_linear._one_round(Size(3, 4, 5, 2, 16, 3, 3), 4):
        assert row.passed, row


@pytest.mark.slow
def test_modes_by_width() -> None:
    """Few networks of few widths: undecided at worst, and no row holds for a theory of other steps."""
    for row in deep_linear._modes(Size(3, 4, 4, 3, 0, 4, 5, 2), (64, 256, 1024), 12, 2):
        assert row.holds is not False and row.control_fails is not False, row


@pytest.fixture(scope="module")
def seen() -> deep_linear.Observed:
    """A run too narrow for the theorem, long enough for its controls."""
    return deep_linear._observe(Size(7, 1, 2, 1, 200, 2, 400), 5)


def test_the_bound_and_the_lemmas(seen: deep_linear.Observed) -> None:
    rows = [deep_linear._bound_18(seen), *deep_linear._hypotheses(seen), deep_linear._lemma_1(seen)]
    rows += deep_linear._local_lemmas(seen)
    assert [row for row in rows if not row.passed] == []
    assert all("not met: width" in row.sizes for row in rows)  # it is said, and the bound holds all the same


def test_a_run_that_decays_too_slowly_breaks_the_bound(seen: deep_linear.Observed) -> None:
    slower = seen._replace(losses=seen.losses ** (1 / 8))
    assert deep_linear._bound_18(slower).holds is False
    far = {r: [2 * w for w in layers] for r, layers in seen.weights.items()}
    failing = {row.subject for row in deep_linear._hypotheses(seen._replace(weights=far)) if row.holds is False}
    assert "DeepLin hypothesis B, largest" in failing
