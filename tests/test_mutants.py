"""The list of faults does not rot: each still applies to the source, and its tests are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .mutants import ROOT, SOURCES, Fault, mutated, read_list

FAULTS = read_list()


def test_there_are_enough_and_none_twice() -> None:
    assert len(FAULTS) >= 60
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}), ids=str)
def test_every_fault_applies_and_is_python(path: Path) -> None:
    tree = ast.dump(ast.parse((ROOT / path).read_text())) if (ROOT / path).is_file() else ""
    problems = []
    for fault in (fault for fault in FAULTS if fault.path == path):
        try:
            assert ast.dump(ast.parse(mutated(fault))) != tree, f"{fault}: changes nothing"
        except ValueError as error:
            problems.append(str(error))
        problems += [f"{fault}: no file tests/{name}" for name in fault.tests if not (ROOT / "tests" / name).is_file()]
        assert fault.tests, f"{fault}: no tests"
    assert not problems, "\n".join(problems)


BEFORE = '''
SMALL = 1e-3

class Step:
    def moved(self, x, rate=0.5, *, decay: float = 0.1):
        """x - rate * decay, and no old pull"""
        if x is None: return SMALL
        pulls = {"old": x, "new": -x}
        for pull in [p for p in pulls.values() if p > 0]:
            x += rate * pull - decay
        return max(x, SMALL) if rate < 1 else pulls["old"]
'''
AFTER = [
    (Fault("a.py::Step.moved", "drop-left", at="rate"), "rate * pull - decay", "(decay)"),
    (Fault("a.py::Step.moved", "drop-left", at="rate", nth=2), "rate * pull", "(pull)"),
    (Fault("a.py::Step.moved", "drop-right"), "rate * pull - decay", "(rate * pull)"),
    (Fault("a.py::Step.moved", "swap-operator", "<=", "0"), "p > 0", "(p <= 0)"),
    (Fault("a.py::Step.moved", "swap-operator", "-"), "x += ", "x -= "),
    (Fault("a.py::Step.moved", "swap-operands", at="p"), "p > 0", "(0 > p)"),
    (Fault("a.py::Step.moved", "swap-arguments"), "max(x, SMALL)", "(max(SMALL, x))"),
    (Fault("a.py::Step.moved", "flip-sign"), "-x}", "(x)}"),
    (Fault("a.py::Step.moved", "flip-sign", nth=2), "rate * pull - decay", "(rate * pull + decay)"),
    (Fault("a.py::Step.moved", "scale", "2", at="max"), "max(x, SMALL)", "(2 * max(x, SMALL))"),
    (Fault("a.py::Step.moved", "change-constant", "0.9"), "=0.5", "=(0.9)"),
    (Fault("a.py::SMALL", "change-constant", "1"), "1e-3", "(1)"),
    (Fault("a.py::Step.moved", "change-constant", "'older'", at="old"), '"old": x', "('older'): x"),  # no docstring
    (Fault("a.py::Step.moved", "change-name", "rate", at="decay"), "- decay", "- (rate)"),
    (Fault("a.py::Step.moved", "change-attribute", "keys"), "pulls.values", "(pulls.keys)"),
    (Fault("a.py::Step.moved", "set-value", "0"), "return SMALL", "return 0"),
    (Fault("a.py::Step.moved", "choose", "if"), 'max(x, SMALL) if rate < 1 else pulls["old"]', "(max(x, SMALL))"),
    (Fault("a.py::Step.moved", "return-argument", "2"), "max(x, SMALL)", "(SMALL)"),
    (Fault("a.py::Step.moved", "return-argument", "0"), "pulls.values()", "(pulls)"),
    (Fault("a.py::Step.moved", "drop-argument", "1"), "max(x, SMALL)", "(max(SMALL))"),
    (Fault("a.py::Step.moved", "drop-call", at="+="), "x += rate * pull - decay", "pass"),
    (Fault("a.py::Step.moved", "drop-subscript"), 'pulls["old"]', "(pulls)"),
    (Fault("a.py::Step.moved", "drop-entry", "'old'"), '{"old": x, "new": -x}', "({'new': -x})"),
    (Fault("a.py::Step.moved", "negate-condition"), "x is None", "(not x is None)"),
    (Fault("a.py::Step.moved", "negate-condition", nth=2), "p > 0", "(not p > 0)"),
    (Fault("a.py::Step.moved", "hold-condition", at="1"), "rate < 1", "(True)"),
    (Fault("a.py::Step.moved", "fail-condition"), "x is None", "(False)"),
    (
        Fault("a.py::Step.moved", "rewrite", "A * B - C -> A * (B - C)"),
        "rate * pull - decay",
        "(rate * (pull - decay))",
    ),
    (Fault("a.py::Step.moved", "rewrite", "A < 1 -> not A"), "rate < 1", "(not rate)"),
]


@pytest.mark.parametrize(("fault", "old", "new"), AFTER, ids=[str(fault) for fault, *_ in AFTER])
def test_an_operator_changes_one_place_and_nothing_else(fault: Fault, old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / SOURCES / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(BEFORE)
    assert BEFORE.count(old) == 1
    assert mutated(fault, tmp_path) == BEFORE.replace(old, new)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("gone.py::f", "flip-sign"), "there is no file gone.py"),
        (Fault("types.py::masked_mean", "flip-sign"), "types.py has no masked_mean; masked_mean is in losses.py"),
        (Fault("losses.py::masked_mean", "flip"), "allowed operators are drop-left, drop-right"),
        (Fault("losses.py::masked_mean", "flip-sign"), "applies to 0 places"),
        (Fault("losses.py::masked_mean", "drop-right", at="no such text"), "0 of them with `at`"),
        (Fault("losses.py::masked_mean", "rewrite", "A / B -> A / other"), "losses.py does not know other"),
    ],
    ids=str,
)
def test_a_fault_that_no_longer_applies_is_told_in_one_line(fault: Fault, message: str) -> None:
    with pytest.raises(ValueError) as error:
        mutated(fault)
    assert message in str(error.value) and "\n" not in str(error.value)
