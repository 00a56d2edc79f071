"""Test accuracy by round of NTK-FL and its baselines, at one degree of heterogeneity: what fig. 4 and 7 are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedtangent.experiments.lab import cohort_report as report
from fedtangent.experiments.lab.cohort_methods import EVOLVED, methods
from fedtangent.experiments.lab.cohort_runs import Bench, Runs, Tuned, repeat, tune
from fedtangent.experiments.lab.cohort_settings import Settings, check
from fedtangent.experiments.lab.cohort_trials import divide
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.experiments.lab.trials import several
from fedtangent.output.files import Metric, check_data_dir

Say = Callable[[str], None]
Keep = Callable[[Sequence[Metric]], None]
WHOLE = ("ntk_fl", "ntk_fl_cross_entropy")
LOSSES = {
    "squared_error": "halved mean squared error to one-hot targets (the paper)",
    "cross_entropy": "cross entropy (its authors' code)",
}
NEAR = 0.02  # of accuracy: what "similar to the centralised" is taken to mean


def checked(
    experiment: Experiment, request: Request, presets: Mapping[tuple[str, str], Settings]
) -> tuple[str, tuple[int, ...], Settings]:
    """Data set, seeds and settings of a request; raises ``ValueError``."""
    name = choose(experiment, request)
    check_data_dir(request.data_dir)
    seeds = several(request.seeds)
    s = changed(presets[name, request.scale], request.changes)
    check(s)
    if s.tuning_seed in seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, which is among the seeds {seeds}")
    return name, seeds, s


def bench_of(name: str, data_dir: Path | None, s: Settings, say: Say, keep: Keep, figures: Path) -> Bench:
    """Where the runs take place; finished ones are in ``runs`` beside the figures."""
    return Bench(s, partial(_trial, name, data_dir, s), figures.parent / "runs", say, keep)


def _trial(name: str, data_dir: Path | None, s: Settings, seed: int) -> Any:
    return divide(name, data_dir, seed, s)


def check_builds(name: str, data_dir: Path | None, seed: int, s: Settings) -> None:
    """Build every method on the first seed's data; raises ``ValueError`` for what does not fit."""
    for method in methods(s, divide(name, data_dir, seed, s)).values():
        for rate in method.rates:
            method.build(method.steps[0], rate)


def figure_4(
    describe: str, claim: str, presets: Mapping[tuple[str, str], Settings], notes: Mapping[str, str] | None = None
) -> Experiment:
    """An experiment: accuracy by round on one data set (the first of ``presets`` needs no files).

    ``claim`` is the paper's, in words; ``notes`` says, by data set, what stands in for what the paper has.
    """

    def prepare(request: Request) -> Prepared:
        name, seeds, s = checked(experiment, request, presets)
        if not any(method in s.methods for method in WHOLE):
            raise ValueError(f"methods: got {', '.join(s.methods)}, one of {', '.join(WHOLE)} must be among them")
        check_builds(name, request.data_dir, seeds[0], s)

        def run(say: Say, keep: Keep, figures: Path) -> Outcome:
            bench = bench_of(name, request.data_dir, s, say, keep, figures)
            tuned = {method: tune(bench, method) for method in s.methods}
            rounds = {m: max(s.num_rounds, s.reference_rounds if m == "fed_avg" else 0) for m in s.methods}
            runs = repeat(bench, {m: t.config for m, t in tuned.items()}, seeds, rounds)
            return _outcome(s, name, claim, (notes or {}).get(name), tuned, runs, figures)

        return Prepared(s, name, run)

    datasets = tuple(dict.fromkeys(dataset for dataset, _ in presets))
    experiment = Experiment(describe, datasets, prepare)
    return experiment


def _outcome(
    s: Settings, dataset: str, claim: str, note: str | None, tuned: dict[str, Tuned], runs: Runs, figures: Path
) -> Outcome:
    compared = {name: report.against(runs, name, s.num_rounds, s.window) for name in WHOLE if name in runs}
    sheets: list[Sheet] = [sheet for sheet, _ in compared.values()]
    rows = [{"compared": name, **row} for name, (_, found) in compared.items() for row in found]
    details: dict[str, Any] = {"settings": s, "dataset": dataset, "tuned": report.plain(tuned), "claim": claim}
    lines = [f"the paper: {claim}", *(line for name, (_, found) in compared.items() for line in judge(found, s, name))]
    if "fed_avg" in runs:
        levels = [report.after(c, s.reference_rounds, s.window) for c in runs["fed_avg"]]
        title = f"rounds to FedAvg's accuracy after {s.reference_rounds} rounds, {sum(levels) / len(levels):.4f}"
        sheet, reached = report.to_the_level(runs, levels, title)
        sheets.append(sheet)
        lines += [soon(reached[name], s, name) for name in compared]
        details |= {"levels": levels, "rounds_to_level": reached}
    sheets += [report.by_round(runs), report.tuning(tuned)]
    title = f"{dataset}, {_clients(s)}, {len(next(iter(runs.values())))} seeds"
    report.draw(runs, s.num_rounds, title, figures / "accuracy_by_round.png")
    return Outcome(tuple(sheets), rows, details, (*lines, *remarks(s, note)), report.unstable(runs))


def judge(rows: list[dict[str, Any]], s: Settings, method: str = "ntk_fl") -> list[str]:
    """The claim's parts of one way to evolve, each with a verdict by the interval over seeds."""
    own = report.LABELS[method]
    found = {row["method"]: row for row in rows if "difference" in row}
    lines = []
    for name, row in found.items():
        text = f"{row['difference']:+.4f} [{row['low_95']:+.4f}, {row['high_95']:+.4f}]"
        if name == "centralised":
            difference = report.Estimate(row["difference"], row["low_95"], row["high_95"])
            holds = report.verdict(difference, -NEAR)
            lines.append(f"{own} is within {NEAR:g} of the centralised training: {holds}, it is {text} from it")
        else:
            label = report.LABELS[name]
            lines.append(f"{own} is above {label} after {s.num_rounds} rounds: {row[f'{method}_is_above']}, by {text}")
    return lines


def soon(reached: report.Reached, s: Settings, method: str = "ntk_fl") -> str:
    """Whether NTK-FL gets to the accuracy of FedAvg's last round in at most a tenth of its rounds."""
    mean, tenth = reached.mean_rounds, s.reference_rounds / 10
    found = f"not with every seed in {s.num_rounds}" if None in reached.rounds else f"in {mean:.1f}"
    holds = "yes" if mean <= tenth else "no"
    return f"{report.LABELS[method]} gets there in at most a tenth of the rounds ({tenth:g}): {holds}, {found}"


def _clients(s: Settings) -> str:
    how = {"dirichlet": f"Dirichlet {s.alpha:g}", "writers": "by writer", "shifted": "feature skew"}[s.partition]
    return f"{s.num_clients} clients ({how}), {s.clients_per_round} a round"


def remarks(s: Settings, note: str | None) -> tuple[str, ...]:
    """What the paper leaves open, and how it was settled here."""
    losses = list(dict.fromkeys(LOSSES[loss] for name, loss in EVOLVED.items() if name in s.methods))
    own = f", NTK-FL under the {' or the '.join(losses)}, its step clipped at the largest stable one" if losses else ""
    lines = [
        f"one network of {s.width} hidden units in the standard parameterization for all, inputs standardised, last "
        f"layer drawn with {s.last_w_std:g} / sqrt(width); gradient methods under the {s.loss.replace('_', ' ')}"
        f"{own}",
    ]
    if "centralised" in s.methods:
        lines.append(
            f"the paper leaves the centralised steps of a round open: here from {s.server_steps}, on batches of "
            f"{s.batch_size} of the cohort's pooled examples"
        )
    if "fed_nova" in s.methods:
        lines.append(
            f"FedNova's clients have momentum {s.momentum:g}: without it equally many local steps would make it FedAvg"
        )
    if s.sparsity or s.value_bits or s.projected or s.beta < 1:
        lines.append(
            f"beta {s.beta:g}, d1' {s.projected or 'all'}, sparsity {s.sparsity:g}, "
            f"{s.value_bits or 'all'} bits a number of a Jacobian"
        )
    if note is not None:
        lines.append(note)
    return tuple(lines)
