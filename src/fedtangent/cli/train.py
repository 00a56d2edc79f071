"""``fedtangent train``: one federated run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from fedtangent.cli.job import Job, Split, checkpoints_of, prepare, say, seeds_of
from fedtangent.cli.kernels import KERNEL, KERNEL_SHOWN, draw_kernels, kernel_watch
from fedtangent.cli.measures import labels_of, measure, measure_clients, privacy
from fedtangent.cli.wire import seed_digest
from fedtangent.data.cache import given_directory
from fedtangent.engine import memory
from fedtangent.engine.history import Evaluation, Run
from fedtangent.engine.processes import is_main
from fedtangent.engine.run import Resolved, predict, resolve_mapping, simulate
from fedtangent.measures import uncertainty
from fedtangent.measures.paired import half_width
from fedtangent.measures.tangent_kernels import KernelDiagnostics
from fedtangent.measures.uncertainty import Reliability
from fedtangent.output.files import Metric, output_folder, write_config, write_metrics, write_result
from fedtangent.output.tables import console, number

__all__ = ["Job", "Split", "measure", "prepare", "run_job"]

DIVERGED = 100.0  # times the first training loss
LOWER = "lower the learning rate"


def _resolved(job: Job, mapping: Resolved) -> dict[str, Any]:
    """What the options stand for on this machine."""
    folder = given_directory(job.options.data_dir)
    return {
        "schedule": job.schedule,
        "mapping": mapping.mapping,
        "seconds_a_round": mapping.seconds,
        "data_dir": None if folder is None else str(folder.absolute()),
        **({} if job.options.projection is None else {"projection_seed": seed_digest(job.options)}),
    }


def run_job(job: Job) -> int:
    """Run, for each of the seeds, with metrics.csv written at every evaluation; returns the exit code."""
    o, folder, seeds = job.options, output_folder(job.options.output), seeds_of(job.options)
    first = checkpoints_of(o, job.schedule, seeds[0])
    mapping = resolve_mapping(job.algorithm, job.data, o.num_rounds, o.mapping, first if first.resume else None)
    metrics: list[Metric] = []

    watch = kernel_watch(job, seeds[0])

    def evaluate(kernels: KernelDiagnostics | None, state: Any) -> dict[str, Any]:
        found = {
            name: measure(predict(job.algorithm, state, split.x), split, o.loss) for name, split in job.splits.items()
        }
        found |= {} if job.of_clients is None else {"clients": measure_clients(job, state)}
        return found | ({} if kernels is None else {KERNEL: kernels(state)})

    def note(seed: int, e: Evaluation) -> None:
        if not is_main():
            return
        if not metrics:  # the first thing that happens, once a checkpoint that cannot be resumed has been refused
            write_config(folder, "train", o, resolved=_resolved(job, mapping))
            _announce(mapping)
        for split, found in e.metrics.items():
            metrics.extend(
                Metric(e.round, job.algorithm.name, seed, split, name, value, e.uplink_bytes, e.downlink_bytes)
                for name, value in found.items()
            )
        write_metrics(folder, metrics)

    runs: dict[int, Run] = {}
    bins: list[Reliability] = []
    for seed in seeds:
        runs[seed] = simulate(
            job.algorithm,
            job.data,
            o.num_rounds,
            seed=seed,
            mapping=mapping.mapping,
            evaluate_every=o.evaluate_every,
            evaluate=functools.partial(evaluate, watch and watch.of_seed(job.algorithm, job.data.num_clients, seed)),
            on_evaluation=functools.partial(note, seed),
            progress=is_main(),
            checkpoint=None if o.checkpoint_every == 0 else checkpoints_of(o, job.schedule, seed),
            stop_on_divergence=o.stop_on_divergence,
        )
        if runs[seed].signal:
            say(f"{runs[seed].status}; continue with the same options and --resume")
            return 128 + runs[seed].signal
        if o.loss == "cross_entropy":  # here, because every process takes part in a prediction
            test = job.splits["test"]
            members = np.asarray(predict(job.algorithm, runs[seed].state, test.x).members, np.float64)
            bins.append(uncertainty.reliability(jnp.asarray(members), jnp.asarray(labels_of(test))))
    if not is_main():
        return 0
    if watch is not None:
        draw_kernels(job, watch, runs[seeds[0]], metrics, folder)
    return _finish(job, runs, metrics, bins, folder)


def _announce(found: Resolved) -> None:
    """How the run is mapped and what memory it is to take."""
    devices = f" over {jax.device_count()} devices" if found.mapping.startswith("sharded") else ""
    times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in found.seconds.items())
    measured = f" (seconds a round: {times})" if times else ""
    console().print(f"mapping: {found.mapping}{devices}{measured}", highlight=False)
    console().print(memory.describe(found.plan), highlight=False)


def _finish(job: Job, runs: dict[int, Run], metrics: list[Metric], bins: list[Reliability], folder: Path) -> int:
    """Write and print what came out; returns the exit code."""
    screen, rows = console(), _rows(job, runs)
    last = _mean_cost(runs)
    statuses = sorted({run.status for run in runs.values()})
    sent = {"uplink_bytes": last.uplink_bytes, "downlink_bytes": last.downlink_bytes}
    write_result(folder, rows, rounds=last.round, status="; ".join(statuses), **sent)
    _draw(job, metrics, bins, folder)
    screen.print(_table(job, rows, last))
    guarantee = privacy(job, last.round)
    if guarantee is not None:
        screen.print(guarantee, highlight=False)
    screen.print(f"numbers in {folder / 'metrics.csv'}, figures in {folder / 'figures'}", highlight=False)
    for seed, run in runs.items():
        for line in _remarks(run):
            say(("" if len(runs) == 1 else f"seed {seed}: ") + line)
    code = 0
    for seed, run in runs.items():
        name = "" if len(runs) == 1 else f"seed {seed}: "
        end = run.history.evaluations[-1]
        if run.status != "finished":
            say(f"{name}{run.status}: the results are those of round {end.round}, the last good one; {LOWER}")
            code = 1
        elif _diverged(run):
            say(f"{name}the run diverged: the training loss is {DIVERGED:.0f} times the first one or more; {LOWER}")
            code = 1
    return code


def _diverged(run: Run) -> bool:
    """Whether the last training loss is not finite, or far above the untrained models'."""
    first, last = _training_losses(run)
    measured = run.history.evaluations[-1].metrics
    # a condition number may be infinite
    finite = all(np.isfinite(list(found.values())).all() for split, found in measured.items() if split != KERNEL)
    return not finite or last > DIVERGED * first


def _mean_cost(runs: dict[int, Run]) -> Evaluation:
    """The last evaluation, with the bytes of all seeds averaged."""
    ends = [run.history.evaluations[-1] for run in runs.values()]
    up, down = (round(float(np.mean([getattr(e, f"{way}_bytes") for e in ends]))) for way in ("uplink", "downlink"))
    return ends[-1]._replace(uplink_bytes=up, downlink_bytes=down)


def _training_losses(run: Run) -> tuple[float, float]:
    """The first and the last training loss."""
    ends = [e.metrics["train"] for e in (run.history.evaluations[0], run.history.evaluations[-1])]
    first, last = (next(found[name] for name in ("mse", "nll") if name in found) for found in ends)
    return first, last


def _remarks(run: Run) -> list[str]:
    """What the user should know before believing the numbers."""
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
    if run.status == "finished" and not _diverged(run) and end >= first:
        lines.append(
            f"the training loss did not fall ({first:.4g}, then {end:.4g}): try another --client-learning-rate"
        )
    return lines


def _rows(job: Job, runs: dict[int, Run]) -> list[dict[str, Any]]:
    """The last metrics; of several seeds their mean, with the half-width of its 95 % interval (Student's t)."""
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


def _table(job: Job, rows: list[dict[str, Any]], last: Evaluation) -> Table:
    several = "seeds" in rows[0]
    title = f"{job.algorithm.name} on {job.options.dataset}, round {last.round}"
    title += f", mean of {rows[0]['seeds']} seeds" if several else ""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("split", "metric"):
        table.add_column(name)
    for name in ("value", "+- (95 %)") if several else ("value",):
        table.add_column(name, justify="right")
    for row in rows:
        if row["split"] == KERNEL and row["metric"] not in KERNEL_SHOWN:
            continue  # they are in result.json and metrics.csv
        figures = [number(row[key], 4) for key in ("value", "half_width_95") if key in row]
        table.add_row(row["split"], row["metric"].replace("_", " "), *figures)
    table.add_row("", "uplink MiB", number(last.uplink_bytes / 2**20, 2))
    table.add_row("", "downlink MiB", number(last.downlink_bytes / 2**20, 2))
    return table


def _draw(job: Job, metrics: list[Metric], bins: list[Reliability], folder: Path) -> None:
    from fedtangent.output.run_plots import curves, reliability_diagram

    chosen = "accuracy" if job.splits["test"].labels is not None else "mse"
    series = {
        split: _mean_curve([m for m in metrics if m.split == split and m.metric == chosen]) for split in job.splits
    }
    title = f"{job.algorithm.name} on {job.options.dataset}"
    curves(series, chosen, title, folder / "figures" / f"{chosen}.png")
    if bins:
        title = f"{title}, test examples" + ("" if len(bins) == 1 else f" of {len(bins)} seeds")
        reliability_diagram({job.algorithm.name: bins}, title, folder / "figures" / "reliability.png")


def _mean_curve(metrics: list[Metric]) -> list[tuple[int, float]]:
    """The mean over seeds at every round."""
    rounds = sorted({m.round for m in metrics})
    return [(r, float(np.mean([m.value for m in metrics if m.round == r]))) for r in rounds]
