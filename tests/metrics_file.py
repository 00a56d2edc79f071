"""What equal runs write alike."""

from __future__ import annotations

import csv
from pathlib import Path


def alike(folder: Path) -> tuple[str, list[list[str]]]:
    """The text of result.json, and all of metrics.csv, to the letter, but the clock's seconds."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    place = rows[0].index("seconds")
    return (folder / "result.json").read_text(), [row[:place] + row[place + 1 :] for row in rows]
