"""The rows on conformal coverage: they hold, their controls fail, and wrong quantiles are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.comparison.theorems import conformal
from fedtangent._src.comparison.theorems.conformal import Pool, Question
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.measures import conformal as measures

from ...nightly import nightly

Break = Callable[[pytest.MonkeyPatch], None]


def pool() -> Pool:
    """Clients whose targets are noise of their own size, about a prediction of 0."""
    per_client = 1500
    noise = np.repeat(conformal.NOISE, per_client)[:, None]
    targets = noise * np.random.default_rng(0).standard_normal((3 * per_client, 1))
    members = np.stack([-noise, noise])  # a standard deviation that fits
    return Pool(members, targets, consecutive([per_client] * 3))


def row(**changes: Any) -> ft.types.Verdict:
    """One row on the pool: the paper's mixture, or ``changes`` of the question."""
    right = Question("residual", **changes)
    quiet = right._replace(calibration_targets=0.2 * pool().targets)
    return conformal.verdict(pool(), "coverage", right, ("quiet", quiet), conformal.SPLITS, 1)


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), conformal.WEIGHTS])
def test_a_row_holds_and_its_control_fails(weights: tuple[float, ...] | None) -> None:
    found = row(calibration_weights=weights, test_weights=weights)
    assert found.passed, found


def no_correction(patch: pytest.MonkeyPatch) -> None:
    """The quantile of the scores without the one more example that each client counts."""
    right = measures._weighted_quantile
    patch.setattr(measures, "_weighted_quantile", lambda v, m, level: right(v, m, level * sum(map(np.sum, m))))


def too_large(patch: pytest.MonkeyPatch) -> None:
    right = measures._weighted_quantile
    patch.setattr(measures, "_weighted_quantile", lambda v, m, level: right(v, m, level + 0.03))


@pytest.mark.parametrize("wrong", nightly([no_correction, too_large], [no_correction]))
def test_a_wrong_quantile_is_noticed(wrong: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    assert row().holds is not True


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("seed", [0, 1])
def test_every_row_holds_on_trained_networks(seed: int) -> None:
    rows = conformal._check("default", seed)
    assert len(rows) == 5 and [one for one in rows if not one.passed] == []
