"""Progress of long work: a bar on a terminal; elsewhere, as in Jupyter and in logs, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

SECONDS = 10.0  # between two lines, at first; shorter work prints no line
QUIET = 2.0  # before a bar appears on a terminal if ``shown`` is None
SHARE = 0.05  # least time between two lines, as a share of the time passed: lines become rarer
SPLITS = ("test", "validation", "train")  # ``headline`` shows a metric of the first of these splits that was measured


class Bar(tqdm):
    """A progress bar whose estimate of the remaining time ignores the first update, during which programs compile."""

    is_timed = False  # whether the first update has happened

    def update(self, n: float | None = 1) -> bool | None:
        """Moves the bar by ``n`` finished units of work."""
        if not self.is_timed and not self.disable:
            self.is_timed, self.initial, self.start_t = True, self.n + n, self._time() - self.delay
        return super().update(n)


class Steps:
    """Reporter of the steps of some work, which also measures the seconds of each step.

    Call the instance with the name of a step when the step begins; this ends the step before. So the seconds of all
    steps add up to the seconds of the whole work. If a step's name begins with the work's name and a colon, both are
    removed from it.
    """

    def __init__(self, say: Callable[[str], None], subject: str, first: str) -> None:
        """Starts the clock of the first step and reports its name.

        Args:
            say: Called with a line of text for each step.
            subject: Name of the work, with which each line begins.
            first: Name of the first step.
        """
        self._say, self._subject, self._times = say, f"{subject}: ", dict[str, float]()
        self._step, self._begun = first, time.perf_counter()
        self._say(self._subject + first)

    def __call__(self, line: str) -> None:
        """Ends the current step and begins the step called ``line``."""
        self.stop()
        self._step = line.removeprefix(self._subject)
        self._say(self._subject + self._step)

    def stop(self) -> dict[str, float]:
        """Ends the current step, and returns the seconds of each step by its name, in order."""
        now = time.perf_counter()
        self._times[self._step] = self._times.get(self._step, 0.0) + now - self._begun
        self._begun = now
        return dict(self._times)


def added(times: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Adds the seconds of each step in two pieces of work, ``times`` and ``more``, by the steps' names."""
    return {step: times.get(step, 0.0) + more.get(step, 0.0) for step in {**times, **more}}


@runtime_checkable
class Stream(Protocol):
    """A file that takes text, such as standard error."""

    def write(self, text: str, /) -> object:
        """Writes ``text``."""

    def flush(self) -> object:
        """Hands text that is still in a buffer to the operating system."""


class Lines(Bar):
    """A progress bar for logs, which prints lines, at first ``SECONDS`` apart and later more rarely (``SHARE``)."""

    monitor_interval = 0  # tqdm starts no thread to watch it

    @staticmethod
    def status_printer(file: Stream) -> Callable[[str], None]:
        """Returns the function that prints a line; it skips the empty line with which tqdm clears a bar."""
        return lambda line: print(line, file=file, flush=True) if line else None

    def update(self, n: float | None = 1) -> bool | None:
        """Counts ``n`` more finished units, and prints a line if the last line is old enough.

        No line is printed if the first update finishes all work.
        """
        if not self.is_timed and self.total is not None and self.n + (n or 0) >= self.total:
            self.n += n or 0
            return None
        if not self.disable:
            self.mininterval = max(SECONDS, SHARE * (self._time() - self.start_t))
        return super().update(n)

    def close(self) -> None:
        """Ends the progress bar without clearing it, so that printed lines stay."""
        self.delay = float("inf")
        super().close()


@dataclass
class TimeLeft:
    """Estimate of the time that the rest of several runs needs, from the mean time of a unit in the finished runs.

    Attributes:
        planned: Units, such as rounds, of all runs that are computed; runs that are only read from files do not count.
        finished: Units of the finished runs.
        seconds: Time of the finished runs.
    """

    planned: int = 0
    finished: int = 0
    seconds: float = 0.0

    def finish(self, units: int, seconds: float) -> None:
        """Counts one more run as finished.

        Args:
            units: Units of the run, such as its rounds.
            seconds: Time that the run took.
        """
        self.finished, self.seconds = self.finished + units, self.seconds + seconds

    def __str__(self) -> str:
        remaining = max(self.planned - self.finished, 0) * self.seconds / max(self.finished, 1)
        return f"{remaining:.0f} s left" if remaining < 100 else f"{remaining / 60:.0f} min left"


def progress_of(total: int, task: str, unit: str = "round", done: int = 0, shown: bool | None = True) -> tqdm:
    """Returns a progress bar on standard error: a ``Bar`` on a terminal, else ``Lines``.

    Args:
        total: Number of units of work.
        task: Name of the work, shown before the bar.
        unit: Name of a unit.
        done: Number of units that are done already.
        shown: Whether to show the bar; None: only if no other bar exists, and once the work has taken some seconds.
    """
    is_hidden = len(Bar._instances) > 0 if shown is None else not shown
    settings = {"total": total, "initial": done, "desc": task, "unit": unit, "leave": False, "disable": is_hidden}
    settings["smoothing"] = 0  # the mean rate since the first update
    if sys.stderr.isatty():
        return Bar(**settings, **({"mininterval": QUIET, "delay": 1e-9} if shown is None else {}))
    form = "{desc}: {unit} {n_fmt} of {total_fmt}{postfix}, {remaining} left"
    return Lines(**settings, bar_format=form, mininterval=SECONDS, miniters=1, delay=1e-9)


def ticks(bar: tqdm) -> Callable[[int, int], None]:
    """Returns a function ``(done, total) -> None`` that moves a progress bar; with ``done`` 0 the bar starts again."""

    def tick(done: int, total: int) -> None:
        if done == 0:
            bar.n, bar.last_print_n, bar.total = 0, 0, total
        if done > bar.n:
            bar.update(done - bar.n)

    return tick


def headline(metrics: Mapping[str, object]) -> str:
    """Returns the accuracy of an evaluation as text, such as ``test accuracy 0.9312``; without one, its first number.

    Test metrics are preferred to validation metrics, and these to training metrics. The text is empty if no metric is a
    number.

    Args:
        metrics: Metrics by name, or a mapping of such metrics for each split.
    """
    splits = {name: values for name, values in metrics.items() if isinstance(values, Mapping)}
    split = next((name for first in SPLITS for name in splits if name.split()[0] == first), "")
    numbers = {name: value for name, value in splits.get(split, metrics).items() if is_number(value)}
    if not numbers:
        return ""
    name = "accuracy" if "accuracy" in numbers else next(iter(numbers))
    return f"{split} {name.replace('_', ' ')} {float(numbers[name]):.4g}".strip()


def is_number(value: object) -> bool:
    """Returns whether a metric is a single number."""
    return (
        not isinstance(value, list | tuple | dict)
        and getattr(value, "ndim", 0) == 0
        and np.issubdtype(np.asarray(value).dtype, np.number)
    )
