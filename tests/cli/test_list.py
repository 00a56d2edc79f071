"""``fedtangent list`` names everything that there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtangent._src.entries import KINDS, catalogue


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_is_listed_with_what_it_is(run: Callable, folder: Path, kind: str) -> None:
    ended = run("list", kind)
    assert ended.code == 0
    lines = [line.split() for line in ended.out.splitlines() if line.strip()]
    described = {words[0].partition(":")[0]: words[1:] for words in lines}
    assert len(catalogue(kind)) > 1
    for name in catalogue(kind):
        assert len(described[name]) >= 3, described[name]
    assert list(folder.iterdir()) == []


def test_an_unknown_kind_is_refused_with_the_allowed_ones(run: Callable) -> None:
    ended = run("list", "things")
    assert ended.code == 2
    assert ended.err == f"fedtangent: error: kind: got 'things', allowed are kinds, {', '.join(KINDS)}\n"
    assert ended.out == ""


def test_without_a_kind_the_kinds_are_listed(run: Callable) -> None:
    ended = run("list")
    assert ended.code == 0
    assert all(kind in ended.out and next(iter(catalogue(kind))) in ended.out for kind in KINDS)
