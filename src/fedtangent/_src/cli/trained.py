"""The files, figures and table of the runs of ``train``, one of each seed, and how the runs ended."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedtangent._src.comparison.laziness import METRICS as LAZINESS
from fedtangent._src.comparison.laziness import LazinessDiagnostics
from fedtangent._src.engine.building import Built
from fedtangent._src.engine.history import FINISHED, Measurement, Run, lost
from fedtangent._src.engine.processes import is_main
from fedtangent._src.engine.run import predict
from fedtangent._src.entries import Values
from fedtangent._src.intervals import half_width
from fedtangent._src.losses import NOT_FINITE, divergence, targets_of
from fedtangent._src.measures import uncertainty
from fedtangent._src.measures.tangent_kernels import KernelDiagnostics, spectrum
from fedtangent._src.measures.uncertainty import Reliability
from fedtangent._src.output import files
from fedtangent._src.output.files import Ended, Figures, Metric, Row, tensorboard
from fedtangent._src.output.tables import TextTable, console, number

Diagnostics = KernelDiagnostics | LazinessDiagnostics
Log = Callable[[Sequence[Metric]], None]
SHOWN = {  # metrics in the table of each kind of diagnostics; its name is the split of its metrics
    "kernel": ("drift", "commutator_relative"),
    "laziness": LAZINESS,
}
LOWER = "lower the learning rate"


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Writer of the files of ``fedtangent train``; if several processes take part, only the first one writes."""

    folder: Path  # output folder
    built: Built  # data and algorithm of the run
    figures: Figures  # folder and format of the figures
    config: dict[str, Values]  # entries of config.json
    notices: list[str]  # lines printed before the first evaluation
    logs: bool  # whether evaluations are written for TensorBoard, too
    metrics: list[Metric] = dataclasses.field(default_factory=list)  # rows of metrics.csv written so far

    @property
    def title(self) -> str:
        """Title of tables and figures: names of the algorithm and the data set."""
        return f"{self.built.algorithm.name} on {self.built.description.dataset.entry.name}"

    def log(self) -> contextlib.AbstractContextManager[Log | None]:
        """Opens the writer for TensorBoard; yields None without the option for it, or if another process writes."""
        return tensorboard(self.folder) if self.logs and is_main() else contextlib.nullcontext()

    def write(self, log: Log | None, seed: int, row: Measurement) -> None:
        """Writes one evaluation of a run to metrics.csv; the first call also writes config.json and prints notices.

        A checkpoint that cannot be resumed raises an error before the first evaluation, and so before anything is
        written.

        Args:
            log: Writer for TensorBoard, or None.
            seed: Seed of the run.
            row: The evaluation.
        """
        if not is_main():
            return
        if not self.metrics:
            files.output_folder(self.folder)
            files.write_config(self.folder, "train", **self.config)
            console().print("\n".join(self.notices), highlight=False)
        sent = row.uplink_bytes, row.downlink_bytes, row.seconds
        rows = [
            Metric(row.round, self.built.algorithm.name, seed, split, name, value, *sent)
            for split, metrics in row.metrics.items()
            for name, value in metrics.items()
        ]
        self.metrics.extend(rows)
        files.write_metrics(self.folder, self.metrics)
        if log is not None:
            log(rows)

    def finish(self, runs: dict[int, Run], diagnostics: Diagnostics | None) -> None:
        """Writes result.json, draws the figures and prints the table.

        Args:
            runs: Run of each seed.
            diagnostics: Diagnostics of the run of the first seed, which are drawn; None for none.
        """
        reliabilities = self._reliabilities(runs)  # every process takes part in a prediction
        if not is_main():
            return
        averaged, screen = counted(runs), console()
        rows, last = rows_of(averaged), _mean_cost(averaged)
        sent = {"uplink_bytes": last.uplink_bytes, "downlink_bytes": last.downlink_bytes}
        if diagnostics is not None:
            self._draw_diagnostics(diagnostics, next(iter(runs.values())))
        files.write_result(self.folder, rows, rounds=last.round, **sent)
        self._draw(reliabilities)
        screen.print(table_of(f"{self.title}, {whose(runs, averaged)}", rows, last))
        lines = [self._setting(), self.built.remark(last.round)]
        lines.append(f"numbers in {self.folder / 'metrics.csv'}, figures in {self.folder / 'figures'}")
        screen.print("\n".join(filter(None, lines)), highlight=False)
        for seed, run in runs.items():
            for remark in remarks(run):
                say(remark if len(runs) == 1 else f"seed {seed}: {remark}")

    def _reliabilities(self, runs: dict[int, Run]) -> list[Reliability]:
        """Computes each run's calibration on test examples; [] without test labels, or if the loss takes no classes."""
        test = self.built.examples.test
        if targets_of(self.built.loss) != "classes" or test is None or test.labels is None:
            return []
        predictions = [predict(self.built.algorithm, run.state, test.x).members for run in runs.values()]
        members = [jnp.asarray(np.asarray(prediction, np.float64)) for prediction in predictions]
        return [uncertainty.reliability(member, test.labels) for member in members]

    def _setting(self) -> str:
        """Describes in a line the choices on which the numbers depend most: model, clients, loss, learning rate."""
        run = self.built.description
        rate, loss = run.algorithm.options.client_learning_rate, self.built.loss.replace("_", " ")
        clients = f"{run.partition.entry.name} on {self.built.data.num_clients} clients"
        return f"{run.model.entry.name}, {clients}; {loss}, client learning rate {rate:.4g}"

    def _draw(self, reliabilities: list[Reliability]) -> None:
        from fedtangent._src.output.run_plots import learning_curves, reliability_diagram

        loss = uncertainty.metric_of(self.built.loss)
        learning_curves(self.metrics, loss, self.title, self.figures.path("learning_curves"))
        if reliabilities:
            several = "" if len(reliabilities) == 1 else f" of {len(reliabilities)} seeds"
            title, path = f"{self.title}, test examples{several}", self.figures.path("reliability")
            reliability_diagram({self.built.algorithm.name: reliabilities}, title, path)

    def _draw_diagnostics(self, diagnostics: Diagnostics, run: Run) -> None:
        """Draws the diagnostics of all seeds by round; of kernels, also the first and last spectra of ``run``."""
        from fedtangent._src.output.run_plots import kernel_figure, laziness_figure

        kind = "laziness" if isinstance(diagnostics, LazinessDiagnostics) else "kernel"
        rows = [row for row in self.metrics if row.split == kind]
        has_models = any("_model_" in row.metric for row in rows)
        series: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            name, _, model = row.metric.partition("_model_")
            if model or not has_models:  # the models' own values, of which the others are means
                series.setdefault(name, {}).setdefault(row.round, []).append(row.value)
        path = self.figures.path(kind)
        if isinstance(diagnostics, LazinessDiagnostics):
            laziness_figure(series, f"{self.title}: distance to its linearisation and to infinite width", path)
            return
        first, last = (
            [spectrum(theta).eigenvalues for theta in kernels]
            for kernels in (diagnostics.initial, diagnostics.kernels(run.state))
        )
        title = f"{self.title}: tangent kernels on {len(diagnostics.watched.rows)} training examples"
        kernel_figure(series, first, last, rows[-1].round, title, path)


def say(line: str) -> None:
    """Prints one line for the user to standard error."""
    print(f"fedtangent: {line}", file=sys.stderr)


def ended_as(runs: dict[int, Run], stop_on_divergence: bool) -> Ended:
    """Returns the outcome of the command from the runs of all seeds.

    Args:
        runs: Run of each seed.
        stop_on_divergence: Whether a run ended when it diverged.
    """
    failed = {seed: how for seed, run in runs.items() if (how := status(run)) != FINISHED}
    stopped = any(runs[seed].status != FINISHED for seed in failed) and stop_on_divergence
    last = ", ".join(str(runs[seed].history.evaluations[-1].round) for seed in failed)
    good = f"the results are those of round {last}, the last good one; " if stopped else ""
    return files.ended([how if len(runs) == 1 else f"seed {seed}: {how}" for seed, how in failed.items()], good + LOWER)


def status(run: Run) -> str:
    """Returns a run's status; "diverged .." if last metrics are not finite, or the loss is over 100 times the first."""
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
    """Returns the training loss at the first and at the last evaluation of a run."""
    metrics = [e.metrics for e in (run.history.evaluations[0], run.history.evaluations[-1])]
    ends = [values for splits in metrics for split, values in splits.items() if split.startswith("train")]
    first, last = (next(row[name] for name in ("mse", "nll", "loss") if name in row) for row in ends)
    return first, last


def counted(runs: dict[int, Run]) -> dict[int, Run]:
    """Selects the runs over which numbers are averaged: the runs that finished, or all runs if none finished."""
    return {seed: run for seed, run in runs.items() if status(run) == FINISHED} or runs


def whose(runs: dict[int, Run], good: dict[int, Run]) -> str:
    """Describes in words from which round, and from how many seeds, the numbers in the printed table come.

    Args:
        runs: Run of each seed.
        good: The runs over which the numbers are averaged.
    """
    rounds = {run.history.evaluations[-1].round for run in good.values()}
    last = f"round {rounds.pop()}" if len(rounds) == 1 else "the last good round of each"
    if len(good) < len(runs):
        return f"{last}, {len(good)} of {len(runs)} seeds: the others diverged"
    return f"{last}, mean of {len(runs)} seeds" if len(runs) > 1 else last


def _mean_cost(runs: dict[int, Run]) -> Measurement:
    """Returns the last evaluation of the last run, with the bytes averaged over the runs of all seeds."""
    ends = [run.history.evaluations[-1] for run in runs.values()]
    up, down = (round(float(np.mean([getattr(e, f"{way}_bytes") for e in ends]))) for way in ("uplink", "downlink"))
    return ends[-1]._replace(uplink_bytes=up, downlink_bytes=down)


def rows_of(runs: dict[int, Run]) -> list[Row]:
    """Returns the metrics of the last evaluation as rows, averaged over the runs.

    For several seeds a row has the half-width of the mean's 95 % interval (Student's t).
    """
    last = [run.history.evaluations[-1].metrics for run in runs.values()]
    rows: list[Row] = []
    for split, names in last[0].items():
        for metric in names:
            values = np.array([metrics[split][metric] for metrics in last])
            row = {"split": split, "metric": metric, "value": float(values.mean())}
            if len(runs) > 1:
                row |= {"half_width_95": float(half_width(values)), "seeds": len(values)}
            rows.append(row)
    return rows


def table_of(title: str, rows: list[Row], last: Measurement) -> TextTable:
    """Builds the table that ``train`` prints: the main metrics (``SHOWN``) of the last evaluation, and the MiB sent.

    Args:
        title: Title of the table.
        rows: Metrics, as ``rows_of`` returns them.
        last: The last evaluation, with its bytes.
    """
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
    """Returns remarks to read before believing a run's numbers, such as that the training loss did not fall."""
    lines = lost(run.history.rounds)
    first, end = _training_losses(run)
    if status(run) == FINISHED and end >= first:
        lines.append(
            f"the training loss did not fall ({first:.4g}, then {end:.4g}): try another --client-learning-rate"
        )
    return lines
