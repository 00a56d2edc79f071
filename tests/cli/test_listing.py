"""``fedtangent list`` names everything that there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent import data, models
from fedtangent.cli import algorithms, catalogue
from fedtangent.entries import catalogue as entries

KINDS = {
    "algorithms": list(algorithms.ALGORITHMS),
    "datasets": list(data.available()),
    "models": list(models.available()),
    "partitions": list(catalogue.PARTITIONS),
    "schedules": list(catalogue.SCHEDULES),
    "cases": list(entries("cases")),
    "experiments": list(entries("experiments")),
    "theorems": list(entries("theorems")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_name_is_listed_with_a_description(run: Callable, folder: Path, kind: str) -> None:
    ended = run("list", kind)
    assert ended.code == 0
    lines = [line.split() for line in ended.out.splitlines() if line.strip()]
    described = {words[0]: words[1:] for words in lines}
    for name in KINDS[kind]:
        assert len(described[name]) >= 3, described[name]
    assert list(folder.iterdir()) == []


def test_an_unknown_kind_is_refused_with_the_allowed_ones(run: Callable) -> None:
    ended = run("list", "things")
    assert ended.code == 2
    assert ended.err == f"fedtangent: error: list: got 'things', allowed are {', '.join(KINDS)}\n"
    assert ended.out == ""
