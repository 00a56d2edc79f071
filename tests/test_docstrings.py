"""Every example that stands in a docstring runs, and gives what stands there."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import fedtangent
from fedtangent import enable_x64

from .nightly import nightly

ROOT = Path(fedtangent.__file__).parent
PROMPT = "\n        >>> "


WRITTEN = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if PROMPT in path.read_text())
# Examples that compile no run of an algorithm.
DAILY = [f"_src/{name}.py" for name in (
    *("measures/privacy", "measures/conformal", "data/named", "data/federated", "data/partition/given"),
    *("data/partition/drawn", "theory/local_gd/regression", "theory/conformal", "federated/algorithms/entry"),
    *("models/dense", "kernels/gram"),
)]  # fmt: skip


def module_of(written: str) -> ModuleType:
    return importlib.import_module(".".join(("fedtangent", *Path(written).with_suffix("").parts)))


def test_no_example_stands_where_doctest_does_not_look() -> None:
    assert len(WRITTEN) > 10
    for written in WRITTEN:
        found = sum(len(test.examples) for test in doctest.DocTestFinder().find(module_of(written)))
        assert found >= (ROOT / written).read_text().count(PROMPT) > 0, written


@pytest.mark.parametrize("written", nightly(WRITTEN, DAILY))
def test_the_examples_in_docstrings_run(written: str) -> None:
    """By day those that compile no run of an algorithm; the runs themselves are held by the tests of each."""
    try:
        found = doctest.testmod(module_of(written))
    finally:
        enable_x64()
    assert found.attempted > 0 and found.failed == 0
