"""``fedtangent experiment``: one table, figure or claim of the papers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedtangent._src import entries
from fedtangent._src.checks import MAX_SEED, whole
from fedtangent._src.cli.arguments import FigureOptions
from fedtangent._src.engine.sweeps import parse_seeds
from fedtangent._src.experiments.lab.runner import Experiment, Request, Study, perform, prepare_study, written
from fedtangent._src.output.files import Ended, Metric, ended, output_folder, write_config, write_metrics, write_result
from fedtangent._src.output.tables import TextTable, clock, console, counted, show_verdicts

NUM_SEEDS = 5


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of one experiment, which repeats a table, figure or claim of a paper and shows the published numbers too.

    `fedtangent list experiments` names the experiments. The command exits with 1 if the experiment does not count: it
    diverged, the compared algorithms did not get the same budget, or a wrong theory passes too. A claim that is not
    confirmed is a result, and no failure.
    """

    name: Annotated[str, tyro.conf.Positional]
    """Name of the experiment, such as fed_ensemble.versus_fed_avg; with it, --help shows its data sets and settings."""
    scale: str = "default"
    """Size: smoke (a few minutes on two cores), default (up to an hour) or paper (needs an accelerator)."""
    dataset: str | None = None
    """One of the experiment's data sets (default: its first, which needs no files)."""
    set: tuple[str, ...] = ()
    """Settings that replace those of the scale, such as num_rounds=20 learning_rates=0.1,0.3."""
    seeds: str | None = None
    """Seeds, as 0:10 or 0,3,7 (default: five, from --seed on)."""
    seed: int = entries.option(0, most=MAX_SEED)
    """First of the five seeds, where --seeds is not given."""
    strict: bool = entries.option(False, may_differ=True)
    """Exit with 3, not 0, if a claim or verdict is undecided; the last line names it in any case."""
    output: Path | None = entries.option(None, may_differ=True)
    """Folder for config.json, metrics.csv, result.json and figures/ (default: results/experiment/NAME)."""
    data_dir: Path | None = entries.option(None, may_differ=True)
    """Folder with the data sets' published files (default: $FEDTANGENT_DATA)."""


ExperimentJob = tuple[ExperimentOptions, FigureOptions, Experiment, Study]


def continues(options: object) -> bool:
    """Returns True: ``fedtangent experiment`` always continues in its output folder, and repeats no finished run."""
    return True


def allowed(words: Mapping[str, Sequence[str]]) -> dict[str, Iterable[str]]:
    """Returns the values of --dataset and --set that an experiment allows, by option; {} for an unknown experiment.

    ``words`` has the words after each option of the command line; ``words[""]`` is the name of the experiment.
    """
    experiment = entries.catalogue("experiments").get(" ".join(words[""]))
    if experiment is None:
        return {}
    dataset, *_ = words.get("dataset") or experiment.scales
    scale, *_ = words.get("scale") or [ExperimentOptions.scale]
    settings = experiment.scales.get(dataset, {}).get(scale)
    return {"dataset": experiment.scales} | ({} if settings is None else {"set": written(settings)})


def prepare(options: ExperimentOptions, figures: FigureOptions) -> ExperimentJob:
    """Checks every option and loads the data of the first seed.

    Args:
        options: The experiment and its settings.
        figures: Format of the figures.

    Raises:
        ValueError: An option or a setting is not allowed, or data are missing.
    """
    experiment = entries.choose("experiments", options.name)
    whole("seed", options.seed, 0, 2**32 - NUM_SEEDS)
    if options.seeds is not None and options.seed != 0:
        raise ValueError(f"seed: got {options.seed} and seeds {options.seeds}, must be only one of the two")
    text = f"{options.seed}:{options.seed + NUM_SEEDS}" if options.seeds is None else options.seeds
    request = Request(options.scale, parse_seeds(text), options.dataset, options.data_dir, options.set)
    return options, figures, experiment, prepare_study(experiment, request)


def run_job(job: ExperimentJob) -> Ended:
    """Performs the experiment, writes metrics.csv after each part, and prints its tables; returns the outcome."""
    (options, figures, experiment, study), screen, start = job, console(), time.perf_counter()
    assert options.output is not None  # the command line names one
    say, folder = clock(screen), output_folder(options.output)
    resolved = {"seeds": study.seeds, "dataset": study.dataset, "settings": study.settings}
    values = dataclasses.asdict(options) | dataclasses.asdict(figures)
    write_config(folder, "experiment", values, resolved=resolved)
    metrics: list[Metric] = []

    def keep(more: Sequence[Metric]) -> None:
        metrics.extend(more)
        write_metrics(folder, metrics)

    screen.print(
        f"[bold]{options.name}[/bold] on {study.dataset}, {counted(len(study.seeds), 'seed')}", highlight=False
    )
    results = perform(experiment, dataclasses.replace(study, say=say, keep=keep, figures=figures.within(folder)))
    seconds = time.perf_counter() - start
    write_result(folder, results.rows, **results.details, failed=results.failed, seconds=seconds)
    screen.print()
    for sheet in results.sheets:
        screen.print(sheet.title, style="bold", highlight=False, markup=False)  # a table's own folds to its width
        screen.print(TextTable(None, sheet.columns, sheet.rows))
    if results.verdicts:
        show_verdicts(screen, results.verdicts, "simulation beside theory")
    for line in results.remarks:
        screen.print(line, style="dim", highlight=False)
    places = f"numbers in {folder / 'result.json'}, figures in {folder / 'figures'}"
    screen.print(f"{seconds:.0f} s; {places}", highlight=False)
    failures = [f"does not count: {line}" for line in results.failed]
    return ended(failures, undecided=results.undecided, strict=options.strict)
