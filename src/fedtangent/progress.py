"""Progress of long work: a bar on a terminal; elsewhere, as in Jupyter and in logs, a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

SECONDS = 10.0  # between two lines, at first; work that takes less has none
QUIET = 2.0  # before a bar that nobody asked for appears on a terminal
SHARE = 0.05  # of the time passed, between two lines: they become rarer as work goes on
SPLITS = ("test", "validation", "train")  # ``headline`` shows a metric of the first of these that there is


class Bar(tqdm):
    """A progress bar whose estimate of the time left is without the first update: before it, programs are compiled."""

    is_timed = False  # whether a first update was there

    def update(self, n: float | None = 1) -> bool | None:
        """Note that ``n`` more units are done."""
        if not self.is_timed and not self.disable:
            self.is_timed, self.initial, self.start_t = True, self.n + n, self._time() - self.delay
        return super().update(n)


class Lines(Bar):
    """A progress bar for logs: each update is printed as a line of its own."""

    monitor_interval = 0  # tqdm starts no thread to watch it

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """The function that prints a line; the empty line, with which tqdm clears a bar, is not printed."""
        return lambda line: print(line, file=file, flush=True) if line else None

    def update(self, n: float | None = 1) -> bool | None:
        """Note that ``n`` more units are done."""
        if not self.disable:
            self.mininterval = max(SECONDS, SHARE * (self._time() - self.start_t))
        return super().update(n)

    def close(self) -> None:
        """End without tqdm's clearing of the bar: lines that were printed stay."""
        self.delay = float("inf")
        super().close()


def progress_of(total: int, what: str, unit: str = "round", done: int = 0, shown: bool | None = True) -> tqdm:
    """Returns a progress bar on standard error for ``total`` units of the work ``what``.

    It is silent unless ``shown``; with None it appears once the work has taken a while, if no other bar is there.
    """
    quiet, shown = shown is None, not len(Bar._instances) if shown is None else shown
    given = {"total": total, "initial": done, "desc": what, "unit": unit, "leave": False, "disable": not shown}
    given["smoothing"] = 0  # the mean rate since the first update
    if sys.stderr.isatty():
        return Bar(**given, **({"mininterval": QUIET, "delay": 1e-9} if quiet else {}))
    form = "{desc}: {unit} {n_fmt} of {total_fmt}{postfix}, {remaining} left"
    return Lines(**given, bar_format=form, mininterval=SECONDS, miniters=1, delay=1e-9)


def headline(metrics: Mapping[str, Any]) -> str:
    """One metric of an evaluation as text, such as ``test accuracy 0.9312``: the accuracy if there is one.

    Empty where no metric is a number.
    """
    split = next((name for name in SPLITS if isinstance(metrics.get(name), Mapping)), "")
    found = metrics[split] if split else metrics
    numbers = {name: value for name, value in found.items() if _is_number(value)}
    if not numbers:
        return ""
    name = "accuracy" if "accuracy" in numbers else next(iter(numbers))
    return f"{split} {name.replace('_', ' ')} {float(numbers[name]):.4g}".strip()


def _is_number(value: Any) -> bool:
    return (
        not isinstance(value, list | tuple | dict)
        and np.ndim(value) == 0
        and np.issubdtype(np.asarray(value).dtype, np.number)
    )
