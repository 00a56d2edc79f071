"""The list of faults does not rot: each still applies once to the source, and its tests are there."""

from __future__ import annotations

import ast

import pytest

from .mutants import ROOT, Mutant, mutated, read_list

MUTANTS = read_list()


def test_there_are_enough_and_none_twice() -> None:
    assert len(MUTANTS) >= 60
    assert len({(m.file, m.source, m.becomes) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("file", sorted({m.file for m in MUTANTS}))
def test_every_fault_applies_once_and_is_python(file: str) -> None:
    for mutant in (m for m in MUTANTS if m.file == file):
        text = mutated(mutant)
        assert text != (ROOT / mutant.path).read_text()
        ast.parse(text)
        assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests), mutant.tests


def test_a_fault_that_no_longer_applies_is_found() -> None:
    with pytest.raises(ValueError, match="is there 0 times"):
        mutated(Mutant("types.py", "no such line", "", []))
