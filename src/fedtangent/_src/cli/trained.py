"""What came out of the runs of ``train``, one of each seed: how they ended, their table, what to know of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtangent._src.comparison.laziness.parts import METRICS as LAZINESS
from fedtangent._src.engine.history import FINISHED, Measurement, Run
from fedtangent._src.intervals import half_width
from fedtangent._src.losses import NOT_FINITE, divergence
from fedtangent._src.output.files import Ended, ended
from fedtangent._src.output.tables import TextTable, number

SHOWN = {  # of each kind of diagnostics, whose metrics are filed under its name as a split: those in the table
    "kernel": ("drift", "commutator_relative"),
    "laziness": LAZINESS,
}
LOWER = "lower the learning rate"


def ended_as(runs: dict[int, Run], stop_on_divergence: bool) -> Ended:
    """Returns the common outcome of all runs."""
    failed = {seed: how for seed, run in runs.items() if (how := status(run)) != FINISHED}
    stopped = any(runs[seed].status != FINISHED for seed in failed) and stop_on_divergence
    last = ", ".join(str(runs[seed].history.evaluations[-1].round) for seed in failed)
    good = f"the results are those of round {last}, the last good one; " if stopped else ""
    return ended([how if len(runs) == 1 else f"seed {seed}: {how}" for seed, how in failed.items()], good + LOWER)


def status(run: Run) -> str:
    """Returns the status of a run, which also diverges by its last metrics: not finite, or far too large a loss."""
    if run.status != FINISHED:
        return run.status
    last = run.history.evaluations[-1]
    # a condition number may be infinite, and so may the measures of laziness
    metrics = [list(values.values()) for split, values in last.metrics.items() if split not in SHOWN]
    reason = divergence(metrics, _training_losses(run))
    if reason == NOT_FINITE:
        return f"diverged by round {last.round}"
    return f"diverged: {reason}" if reason else FINISHED


def _training_losses(run: Run) -> tuple[float, float]:
    """Returns the first and the last training loss."""
    ends = [e.metrics["train"] for e in (run.history.evaluations[0], run.history.evaluations[-1])]
    first, last = (next(found[name] for name in ("mse", "nll", "loss") if name in found) for found in ends)
    return first, last


def counted(runs: dict[int, Run]) -> dict[int, Run]:
    """Selects the runs whose numbers are averaged: those that finished, or all runs if none finished."""
    return {seed: run for seed, run in runs.items() if status(run) == FINISHED} or runs


def whose(runs: dict[int, Run], good: dict[int, Run]) -> str:
    """Describes the round and the seeds of the table's numbers, which are means over the ``good`` runs."""
    rounds = {run.history.evaluations[-1].round for run in good.values()}
    found = f"round {rounds.pop()}" if len(rounds) == 1 else "the last good round of each"
    if len(good) < len(runs):
        return f"{found}, {len(good)} of {len(runs)} seeds: the others diverged"
    return f"{found}, mean of {len(runs)} seeds" if len(runs) > 1 else found


def mean_cost(runs: dict[int, Run]) -> Measurement:
    """Returns the last evaluation, with the bytes averaged over all seeds."""
    ends = [run.history.evaluations[-1] for run in runs.values()]
    up, down = (round(float(np.mean([getattr(e, f"{way}_bytes") for e in ends]))) for way in ("uplink", "downlink"))
    return ends[-1]._replace(uplink_bytes=up, downlink_bytes=down)


def rows_of(runs: dict[int, Run]) -> list[dict[str, Any]]:
    """Returns the last metrics; for several seeds their means, with the half-width of a 95 % interval (Student's t)."""
    last = [run.history.evaluations[-1].metrics for run in runs.values()]
    rows: list[dict[str, Any]] = []
    for split, found in last[0].items():
        for metric in found:
            values = np.array([metrics[split][metric] for metrics in last])
            row = {"split": split, "metric": metric, "value": float(values.mean())}
            if len(runs) > 1:
                row |= {"half_width_95": float(half_width(values)), "seeds": len(values)}
            rows.append(row)
    return rows


def table_of(title: str, rows: list[dict[str, Any]], last: Measurement) -> TextTable:
    """Builds the printed table of the last metrics and the bytes sent."""
    several = "seeds" in rows[0]
    columns = {"value": "value"} | ({"half_width_95": "+- (95 %)"} if several else {})
    cells = [
        (row["split"], row["metric"].replace("_", " "), *(number(row[key], 4) for key in columns))
        for row in rows
        if row["metric"] in SHOWN.get(row["split"], (row["metric"],))  # the others are in result.json and metrics.csv
    ]
    for way, sent in (("uplink", last.uplink_bytes), ("downlink", last.downlink_bytes)):
        cells.append(("", f"{way} MiB", number(sent / 2**20, 2), *[""] * several))
    return TextTable(title, ("split", "metric", *columns.values()), cells)


def remarks(run: Run) -> list[str]:
    """Returns remarks on a run that matter before the user believes its numbers."""
    weight = np.asarray(run.history.rounds["model_weight"])
    trained, lines = int(np.sum((weight > 0).sum(axis=0) > 0)), list[str]()
    if len(weight) and trained < weight.shape[1]:
        lines.append(
            f"{weight.shape[1] - trained} of {weight.shape[1]} models were never trained, and count in the average: "
            "use more clients or rounds, or fewer models"
        )
    rejected = int(np.sum(run.history.rounds.get("rejected", 0)))
    if rejected:
        lines.append(f"{rejected} messages were rejected: not finite, or larger than allowed")
    saturated = int(np.sum(run.history.rounds.get("saturated", 0)))
    if saturated:
        lines.append(f"{saturated} numbers were cut to what the sum of masked messages can hold")
    first, end = _training_losses(run)
    if status(run) == FINISHED and end >= first:
        lines.append(
            f"the training loss did not fall ({first:.4g}, then {end:.4g}): try another --client-learning-rate"
        )
    return lines
