"""The README's tables are those of the code."""

from __future__ import annotations

from pathlib import Path

from fedtangent.cli import readme
from fedtangent.entries import catalogue


def test_the_readme_holds_the_generated_tables() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert readme.rewritten(text) == text
    for kind in readme.KINDS:
        assert f"<!-- {kind} -->" in text
        assert all(f"| `{name}` |" in text for name in catalogue(kind))
    assert readme.rewritten(text.replace("| `fed_avg` | local SGD;", "| `fed_avg` | nothing;")) == text
