"""Rows of the theorem table on NTK-FL: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

import pytest

from fedtangent.compare.theorems.ntk_fl import convergence, weight_gap


@pytest.mark.theory
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row(seed):
    rows = convergence.checks("default", seed) + weight_gap.checks("default", seed)
    assert len(rows) == 6
    for row in rows:
        assert row.passed, row


def test_lemma_1():
    row = weight_gap.lemma_1(3, 2000)
    assert row.passed, row
