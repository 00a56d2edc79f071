"""Rows of the theorem table on NTK-FL: what is checked holds, and every wrong theory is told apart."""

from __future__ import annotations

import pytest

from fedtangent.compare.theorems import ntk_fl


@pytest.mark.theory
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row(seed):
    rows = ntk_fl.checks("default", seed)
    assert len(rows) == 6
    for row in rows:
        assert row.ok, row


def test_lemma_1():
    row = ntk_fl.lemma_1(3, 2000)
    assert row.ok, row


def test_an_unknown_scale():
    with pytest.raises(ValueError, match="scale: got 'huge', allowed are default, large"):
        ntk_fl.checks("huge", 0)
