"""Progress of long work: a bar on a terminal; elsewhere, as in Jupyter and in logs, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm import tqdm

SECONDS = 10.0  # between two lines, at first
SHARE = 0.05  # of the time that has passed: lines become rarer as work goes on
SPLITS = ("test", "validation", "train")  # whose metric is told, the first that there is


class Progress:
    """What has been done of ``total``; work of less than ``SECONDS`` prints no line."""

    def __init__(self, total: int, what: str, unit: str, done: int) -> None:
        """``done`` of ``total`` units are done already."""
        self.total, self.what, self.unit, self.done = total, what, unit, done
        self.metric = ""
        self._begun = self._told = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first part was done, which was compiled before

    def update(self, number: int) -> None:
        """So many more are done."""
        self.done += number
        now = time.monotonic()
        if now - self._told >= max(SECONDS, SHARE * (now - self._begun)):
            self._told = now
            found = f", {self.metric}" if self.metric else ""
            line = f"{self.what}: {self.unit} {self.done} of {self.total}{found}{self._left(now)}"
            print(line, file=sys.stderr, flush=True)
        if self._first is None:
            self._first = now, self.done

    def note(self, metrics: Mapping[str, Any]) -> None:
        """The newest metrics, of which one is told with the next line."""
        self.metric = headline(metrics)

    def _left(self, now: float) -> str:
        """The time that is left, at the pace so far."""
        if self.done >= self.total:
            return ""
        start, before = (self._begun, 0) if self._first is None else self._first
        if self.done <= before:
            return ""
        seconds = (now - start) / (self.done - before) * (self.total - self.done)
        return f", {seconds:.0f} s left" if seconds < 120 else f", {seconds / 60:.0f} min left"


class Bar(Progress):
    """The same as a bar."""

    def __init__(self, total: int, what: str, unit: str, done: int) -> None:
        """``done`` of ``total`` units are done already."""
        super().__init__(total, what, unit, done)
        self.bar = tqdm(total=total, initial=done, desc=what, unit=unit, leave=False)

    def update(self, number: int) -> None:
        """So many more are done."""
        self.bar.update(number)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """The newest metrics, of which one stands beside the bar."""
        self.bar.set_postfix_str(headline(metrics), refresh=False)


class Silent(Progress):
    """Nothing is shown."""

    def update(self, number: int) -> None:
        """So many more are done."""


@contextmanager
def progress_of(total: int, what: str, unit: str = "round", done: int = 0, shown: bool = True) -> Iterator[Progress]:
    """Progress of ``total`` units of work called ``what``, on standard error; nothing unless it is ``shown``."""
    kind = Silent if not shown else Bar if sys.stderr.isatty() else Progress
    tells = kind(total, what, unit, done)
    try:
        yield tells
    finally:
        if isinstance(tells, Bar):
            tells.bar.close()


def headline(metrics: Mapping[str, Any]) -> str:
    """One number of the metrics of an evaluation, with its name: the accuracy of the test examples, if it is there."""
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
