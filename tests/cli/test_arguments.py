"""Flat options of several groups: how they are read, refused and shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import tyro

from fedtangent._src.cli.arguments import (
    COLUMN,
    INDENT,
    WIDTH,
    help_of,
    options_of,
    page,
    parse,
    unknown,
    words,
    words_of,
)
from fedtangent._src.entries import option


@dataclass(frozen=True)
class Shared:
    """What both have."""

    rate: float = 0.5
    """The step size."""
    widths: tuple[int, ...] = (4, 5)
    """Hidden widths, of which there may be many, so that this help is longer than what fits on one line of the page."""


@dataclass(frozen=True)
class First(Shared):
    """The first."""

    name: Annotated[str, tyro.conf.Positional] = "x"
    """Its name."""
    seeds: str | None = option(None, may_differ=True)
    """Seeds."""
    resume: bool = False
    """Go on."""


@dataclass(frozen=True)
class Second:
    """The second."""

    rate: float = 9.0
    """Another text."""
    guard: bool = True
    """Off: let it run."""
    folder: Path | None = None
    """A folder."""


OPTIONS = options_of({"first": First(rate=0.25), "second": Second})
DEFAULTS = {"rate": 0.25, "widths": (4, 5), "name": "x", "seeds": None, "resume": False, "guard": True, "folder": None}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("y", {"name": "y"}),
        ("--rate 3 y --widths 1 2 3", {"rate": 3.0, "name": "y", "widths": (1, 2, 3)}),
        ("--resume y --folder a/b", {"resume": True, "name": "y", "folder": Path("a/b")}),
        ("--no-guard --seeds=0:3", {"guard": False, "seeds": "0:3"}),
        ("--rate 3 --rate -4", {"rate": -4.0}),
        ("--widths", {"widths": ()}),
    ],
)
def test_what_words_stand_for(line: str, expected: dict[str, Any]) -> None:
    assert parse(line.split(), OPTIONS) == DEFAULTS | expected


def test_which_options_are_given() -> None:
    found = words_of(["a", "--rate=3", "--widths", "1", "2", "--no-guard", "--rate", "4"])
    assert found == {"": ["a"], "rate": ["4"], "widths": ["1", "2"], "no_guard": []}


def test_values_written_as_words_are_the_values() -> None:
    values = DEFAULTS | {"resume": True, "widths": (7,), "seeds": "1,2", "folder": Path("c")}
    assert parse(words(values, OPTIONS), OPTIONS) == values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rate x", "^rate: got 'x', must be a number$"),
        ("--rate", "rate"),
        ("--widths 1 y", "widths"),
        ("--rate 1 2 3", "3"),
    ],
)
def test_words_that_are_no_values_are_one_line(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(line.split(), OPTIONS)
    assert "\n" not in str(error.value) and "─" not in str(error.value)


def test_an_option_that_there_is_not() -> None:
    assert str(unknown("widht", "train", OPTIONS)) == "widht: is no option of train; did you mean widths?"
    assert str(unknown("nonsense", "train", OPTIONS)) == "nonsense: is no option of train"


def test_the_help_of_a_group_is_that_of_its_fields_and_its_parents() -> None:
    assert help_of(First)["rate"] == "The step size." and help_of(First)["seeds"] == "Seeds."
    made = type("Made", (First, Second), {})
    assert help_of(made)["guard"] == "Off: let it run."


def test_a_page_has_each_option_once_with_its_default() -> None:
    lines = page("program X [OPTIONS]", "What it does.", {"first": First, "second": Second}, OPTIONS).splitlines()
    assert lines[0] == "usage: program X [OPTIONS]" and lines[1].startswith("What it does. ") and lines[2] == "first:"
    assert f"{'  --rate 0.25':<{COLUMN}}The step size" in lines
    assert f"{'  --no-guard':<{COLUMN}}Off: let it run" in lines
    assert f"{'  --widths 4 5':<{COLUMN}}Hidden widths, of which there may be many, so that this help is" in lines
    assert f"{'  --folder PATH':<{COLUMN}}A folder" in lines
    assert sum("--rate" in line for line in lines) == 1
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("width", [80, 120])
def test_a_page_is_as_wide_as_the_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = OPTIONS["rate"]._replace(help="word " * 60)
    unbroken = OPTIONS["name"]._replace(help="x" * (width - COLUMN + 1))
    lines = page("program", "What. " * 60, {"first": First}, {"rate": long, "name": unbroken}).splitlines()
    assert width - len("What. ") < max(map(len, lines)) <= width
    assert f"{'':{INDENT}}{unbroken.help}" in lines
