"""Tables, verdicts and figures of a comparison of NTK-FL with its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtangent.experiments.lab.cohort_methods import LABELS
from fedtangent.experiments.lab.cohort_runs import Curve, Runs, Tuned
from fedtangent.experiments.lab.contract import Sheet
from fedtangent.measures.paired import half_width

MIB = 2**20


class Estimate(NamedTuple):
    """A mean over seeds and its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:+.4f}, {self.high:+.4f}]"


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean of at least two seeds' values and its interval."""
    array = np.asarray(values, float)
    mean, half = float(array.mean()), float(half_width(array))
    return Estimate(mean, mean - half, mean + half)


def verdict(difference: Estimate, at_least: float = 0.0) -> str:
    """Whether a difference is above ``at_least``, by its interval: ``yes``, ``no`` or ``undecided``."""
    return "yes" if difference.low > at_least else "no" if difference.high < at_least else "undecided"


def after(curve: Curve, num_rounds: int, window: int) -> float:
    """Mean test accuracy over the ``window`` rounds that end with round ``num_rounds``."""
    return float(curve.test[num_rounds - window + 1 : num_rounds + 1].mean())


def ends(runs: Runs, num_rounds: int, window: int) -> dict[str, np.ndarray]:
    """``after`` for each method, [seeds]."""
    return {name: np.array([after(c, num_rounds, window) for c in curves]) for name, curves in runs.items()}


def first_round(curve: Curve, level: float) -> int | None:
    """The first round, from 1 on, after which the test accuracy is at least ``level``; None if there is none."""
    reached = np.flatnonzero(curve.test[1:] >= level)
    return int(reached[0]) + 1 if reached.size else None


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.4f} +- {values.std(ddof=1) / np.sqrt(len(values)):.4f}"


def against(runs: Runs, method: str, num_rounds: int, window: int) -> tuple[Sheet, list[dict[str, Any]]]:
    """Test accuracy of all methods, and how far ``method`` is above each of the others, seed by seed."""
    found, rows, shown = ends(runs, num_rounds, window), [], []
    for name, values in found.items():
        row: dict[str, Any] = {"method": name, "round": num_rounds, "accuracy": values.mean(), "seeds": values}
        cells = (LABELS[name], _spread(values), "", "", "")
        if name != method:
            d = estimate(found[method] - values)
            row |= {"difference": d.mean, "low_95": d.low, "high_95": d.high, f"{method}_is_above": verdict(d)}
            cells = (*cells[:2], f"{d.mean:+.4f}", str(d), verdict(d))
        rows.append(row)
        shown.append(cells)
    title = (
        f"test accuracy, mean of rounds {num_rounds - window + 1} to {num_rounds}, +- its standard error over "
        f"{len(found[method])} seeds"
    )
    label = LABELS[method]
    columns = ("method", "accuracy", f"{label} minus it", "95 % interval", f"{label} is above")
    return Sheet(title, columns, tuple(shown)), rows


class Reached(NamedTuple):
    """When each seed's run of a method first reaches that seed's level."""

    rounds: list[int | None]
    uplink: list[int | None]  # bytes until then

    @property
    def mean_rounds(self) -> float:
        """Mean over seeds; infinite if one does not get there."""
        return float("inf") if None in self.rounds else float(np.mean([r for r in self.rounds if r is not None]))

    @property
    def mean_mib(self) -> float:
        """Mean uplink in MiB; infinite if one does not get there."""
        return float("inf") if None in self.uplink else float(np.mean([u for u in self.uplink if u is not None])) / MIB


def reached(curves: Sequence[Curve], levels: Sequence[float]) -> Reached:
    """The first rounds, and bytes up, to each seed's level."""
    rounds = [first_round(c, level) for c, level in zip(curves, levels, strict=True)]
    return Reached(rounds, [None if r is None else int(c.uplink[r]) for c, r in zip(curves, rounds, strict=True)])


def to_the_level(runs: Runs, levels: Sequence[float], title: str) -> tuple[Sheet, dict[str, Reached]]:
    """Rounds and uplink until each method reaches ``levels``, one for each seed."""
    found = {name: reached(curves, levels) for name, curves in runs.items()}
    rows = []
    for name, r in found.items():
        per_round = np.mean([c.uplink[1] - c.uplink[0] for c in runs[name]]) / MIB
        each = ", ".join("never" if x is None else str(x) for x in r.rounds)
        rows.append((LABELS[name], _finite(r.mean_rounds, ".1f"), each, f"{per_round:.3f}", _finite(r.mean_mib, ".1f")))
    columns = ("method", "rounds", "seed by seed", "uplink MiB in round 1", "uplink MiB until then")
    return Sheet(title, columns, tuple(rows)), found


def _finite(value: float, form: str) -> str:
    return f"{value:{form}}" if np.isfinite(value) else "-"


def tuning(tuned: dict[str, Tuned]) -> Sheet:
    """What each method took."""
    rows = tuple(
        (LABELS[name], f"{t.config.rate:g}", str(t.config.steps or ""), f"{t.score:.4f}", str(len(t.grid)),
         " and ".join(t.at_edge))
        for name, t in tuned.items()
    )  # fmt: skip
    columns = ("method", "learning rate", "steps a round", "validation accuracy", "tried", "at the edge of the grid")
    return Sheet("hyper-parameters by validation accuracy, on a seed of their own", columns, rows)


def by_round(runs: Runs) -> Sheet:
    """Mean test accuracy over seeds after some of the rounds."""
    longest = max(c.num_rounds for curves in runs.values() for c in curves)
    wanted = [r for r in (0, 1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 700) if r <= longest]
    wanted += [longest] if longest not in wanted else []
    rows = tuple(
        (LABELS[name], *(f"{np.mean([c.test[r] for c in curves]):.3f}" if r <= curves[0].num_rounds else ""
                         for r in wanted))
        for name, curves in runs.items()
    )  # fmt: skip
    return Sheet("mean test accuracy by round", ("method", *map(str, wanted)), rows)


def plain(tuned: dict[str, Tuned]) -> dict[str, Any]:
    """The grids, for result.json."""
    return {
        name: {"chosen": t.config, "at_edge": t.at_edge, "grid": [{**c._asdict(), "validation_accuracy": v}
                                                                  for c, v in t.grid.items()]}
        for name, t in tuned.items()
    }  # fmt: skip


def unstable(runs: Runs) -> tuple[str, ...]:
    """Rounds of NTK-FL that kept the model, as failures to report."""
    return tuple(
        f"{LABELS[name]}, seed {i}: the evolution failed in {int(np.sum(c.status != 0))} of {c.num_rounds} rounds"
        for name, curves in runs.items()
        for i, c in enumerate(curves)
        if np.any(c.status != 0)
    )


def draw(runs: Runs, num_rounds: int, title: str, path: Path) -> Path:
    """Test accuracy from round 1 to ``num_rounds``, mean over seeds and its standard error."""
    from fedtangent.output.grid_plots import lines_with_errors

    lines = {LABELS[name]: np.array([c.test[1 : num_rounds + 1] for c in curves]) for name, curves in runs.items()}
    return lines_with_errors(lines, list(range(1, num_rounds + 1)), ("round", "test accuracy"), title, path)
