"""What a person reads: README.md and the pages of docs/, and the examples that stand there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def pages() -> dict[str, str]:
    """The text of every page by its path."""
    found = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def examples(text: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def example(containing: str) -> str:
    """The one block of Python, of all pages, in which ``containing`` stands."""
    (found,) = (block for text in pages().values() for block in examples(text) if containing in block)
    return found


def run(containing: str, names: dict[str, Any] | None = None, until: str | None = None) -> dict[str, Any]:
    """The names that the example leaves, after it ran beside those given; up to where ``until`` stands, if given."""
    names, text = {} if names is None else names, example(containing)
    text = text if until is None else text[: text.index(until)]
    exec(compile(text, f"the example with {containing}", "exec"), names)
    return names


def of_docs(name: str) -> ModuleType:
    """A module of docs/, imported as Sphinx imports it."""
    folder = str(ROOT / "docs")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
