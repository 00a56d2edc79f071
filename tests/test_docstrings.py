"""Every example that stands in a docstring runs, and gives what stands there."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import fedtangent
from fedtangent import enable_x64

ROOT = Path(fedtangent.__file__).parent
PROMPT = "\n        >>> "


def test_the_examples_in_docstrings_run() -> None:
    written = sorted(path for path in ROOT.rglob("*.py") if PROMPT in path.read_text())
    assert len(written) > 10
    failing = {}
    for path in written:
        module = importlib.import_module(".".join(("fedtangent", *path.relative_to(ROOT).with_suffix("").parts)))
        try:
            found = doctest.testmod(module)
        finally:
            enable_x64()
        assert found.attempted >= path.read_text().count(PROMPT), path  # none stands where doctest does not look
        if found.failed:
            failing[path.name] = found.failed
    assert failing == {}
