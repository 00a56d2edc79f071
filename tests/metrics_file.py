"""Reads metrics.csv: its rows, and what equal runs write alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def _timeless(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in ("seconds", "seconds_a_run")}


def alike(folder: Path) -> tuple[str, list[list[str]]]:
    """The text of result.json, and all of metrics.csv, to the letter, but the clock's seconds."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    place = rows[0].index("seconds")
    timeless = json.loads((folder / "result.json").read_text(), object_hook=_timeless)
    return json.dumps(timeless), [row[:place] + row[place + 1 :] for row in rows]


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv by column."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
