"""Progress of long work: a bar on a terminal; elsewhere, as in Jupyter and in logs, a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

SECONDS = 10.0  # between two lines, at first; work that takes less has none
SHARE = 0.05  # of the time that has passed: lines become rarer as work goes on
SPLITS = ("test", "validation", "train")  # whose metric is told, the first that there is


class Lines(tqdm):
    """A bar whose every state is a line."""

    monitor_interval = 0  # no thread that looks after it

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """What tells a state: the empty one, which clears a bar, is none."""
        return lambda line: print(line, file=file, flush=True) if line else None

    def update(self, n: float | None = 1) -> bool | None:
        """So many more are done."""
        if not self.disable:
            self.mininterval = max(SECONDS, SHARE * (self._time() - self.start_t))
        return super().update(n)

    def close(self) -> None:
        """As a bar of which nothing was shown: there is none to clear."""
        self.delay = float("inf")
        super().close()


def progress_of(total: int, what: str, unit: str = "round", done: int = 0, shown: bool = True) -> tqdm:
    """Progress of ``total`` units of work called ``what``, on standard error; nothing unless it is ``shown``."""
    given = {"total": total, "initial": done, "desc": what, "unit": unit, "leave": False, "disable": not shown}
    if sys.stderr.isatty():
        return tqdm(**given)
    form = "{desc}: {unit} {n_fmt} of {total_fmt}{postfix}, {remaining} left"
    return Lines(**given, bar_format=form, mininterval=SECONDS, miniters=1, delay=1e-9)


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
