"""``fedtangent compare``: a run, or the standard cases, beside what theory predicts.

The command has two forms. It compares the standard cases with theory, or a run that options of `fedtangent train`
describe; `fedtangent compare --algorithm fed_avg --help` lists the options of the second form.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from fedtangent._src import cli
from fedtangent._src.checks import MAX_SEED, folder, seed, whole
from fedtangent._src.cli.arguments import FigureOptions, VerdictOptions
from fedtangent._src.comparison.cases import DEFAULT_CASES
from fedtangent._src.comparison.cases import build as case_settings
from fedtangent._src.comparison.comparing import DRAWS, WIDTHS, Compared, check_widths, compared, comparison_of
from fedtangent._src.comparison.followed import EVALUATIONS, has_limit
from fedtangent._src.comparison.outcomes import errors_by_client
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.verdicts import as_rows, summary
from fedtangent._src.engine.building import build, preview, small_model
from fedtangent._src.engine.description import Chosen, Description
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.entries import Values, catalogue, choose, option
from fedtangent._src.losses import divergence
from fedtangent._src.measures.uncertainty import metric_of
from fedtangent._src.output import tables
from fedtangent._src.output.comparison_plots import draw_each, draw_together
from fedtangent._src.output.files import Ended, Metric, output_folder, write_config, write_metrics, write_result
from fedtangent._src.output.tables import clock, console
from fedtangent._src.progress import TimeLeft, added

NEXT = """Next:
fedtangent compare --algorithm fed_prox  # another algorithm beside its theory
fedtangent predict --algorithm fed_avg scaffold  # theory alone, no network trained
fedtangent list experiments  # tables and figures of the papers"""


@dataclass(frozen=True)
class CompareOptions:
    """Options of the comparison of the standard cases with theory.

    For each case, trained networks (Fed-ensemble), NTK-FL and the Gaussian-process limit are compared in a table, in
    figures, and by verdicts with negative controls. The command exits with 1 if simulation and theory disagree
    anywhere, or a wrong theory passes.
    """

    case: tuple[str, ...] = DEFAULT_CASES
    """Standard cases: sine, digits, fashion_mnist (downloaded). To compare a run of your own, give --algorithm A and
    the options of `train`; `compare --algorithm A --help` lists them."""
    scale: str = "default"
    """Size: smoke (small, for CI), default (minutes), paper (needs an accelerator)."""
    seed: int = option(0, most=MAX_SEED)
    """Seed of data, partitions, schedules and initialisations."""
    output: Path = Path("results/compare")
    """Folder for config.json, metrics.csv, result.json and figures/."""
    data_dir: Path | None = None
    """Folder with the data sets' published files (default: $FEDTANGENT_DATA)."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of the comparison of a user's run with theory: widths and draws of networks, evaluations, output."""

    widths: tuple[int, ...] = WIDTHS
    """Widths of the networks, all hidden layers alike; three or more."""
    draws: int = DRAWS
    """Independent initialisations at every width; five or more."""
    hidden_layers: int = 1
    """Hidden layers of an mlp."""
    evaluations: int = EVALUATIONS
    """Evaluate networks at the start and after at most this many of the rounds."""
    output: Path = Path("results/compare")
    """Folder for config.json, metrics.csv, result.json and figures/."""


class CompareJob(NamedTuple):
    """The comparisons to make, and the options of the command.

    Attributes:
        settings: The runs to compare with theory.
        options: Values of all options, for config.json.
        seed: Seed of the runs, for metrics.csv.
        output: Folder of the files.
        figures: Format of the figures.
        verdicts: Whether an undecided verdict changes the exit code, and the file for JUnit XML.
    """

    settings: list[Setting]
    options: Values
    seed: int
    output: Path
    figures: FigureOptions
    verdicts: VerdictOptions


def prepare(options: CompareOptions, figures: FigureOptions, verdicts: VerdictOptions) -> CompareJob:
    """Checks every option and loads the data of the standard cases.

    Args:
        options: Cases, scale, seed and output folder.
        figures: Format of the figures.
        verdicts: Whether an undecided verdict changes the exit code, and the file for JUnit XML.

    Raises:
        ValueError: An option is out of range, or a case's data are missing.
    """
    if not options.case:
        raise ValueError(f"case: got none, allowed are {', '.join(catalogue('cases'))}")
    seed(options.seed)
    folder("data_dir", options.data_dir)
    for name in options.case:
        choose("cases", name)  # before any data is loaded
    names, scale = dict.fromkeys(options.case), (options.data_dir, options.scale, options.seed)
    settings = [setting for name in names for setting in case_settings(name, *scale)]
    values = asdict(options) | asdict(figures) | asdict(verdicts)
    return CompareJob(settings, values, options.seed, options.output, figures, verdicts)


def prepare_run(
    options: ComparisonOptions, figures: FigureOptions, verdicts: VerdictOptions, described: Description
) -> CompareJob:
    """Checks the options that describe a run, and loads its data, to compare the run with theory.

    Args:
        options: Options of the comparison.
        figures: Format of the figures.
        verdicts: Whether an undecided verdict changes the exit code, and the file for JUnit XML.
        described: The run, described by the options of ``fedtangent train``.

    Raises:
        ValueError: An option is not allowed, data are missing, or no theory follows the algorithm.
    """
    values = described.values() | asdict(options) | asdict(figures) | asdict(verdicts)
    whole("evaluations", options.evaluations)
    described = _of_layers(described, whole("hidden_layers", options.hidden_layers))
    preview(described)
    if has_limit(model := small_model(described)):  # before any data are loaded
        check_widths(model, options.widths)
    built, run = build(described), described.run
    evaluation = Evaluation(max(-(-run.num_rounds // options.evaluations), 1))
    setting = comparison_of(
        built.algorithm, built.examples, run.num_rounds, run.seed, evaluation, options.widths, options.draws
    )
    return CompareJob([setting], values, run.seed, options.output, figures, verdicts)


def _of_layers(described: Description, hidden_layers: int) -> Description:
    """Sets the number of hidden layers of the ``mlp`` that a run trains, and returns the run.

    Raises ``ValueError`` if the user set the model's ``width``, or ``hidden_layers`` for another model than ``mlp``.
    """
    entry, options = described.model
    defaults = type(options)()
    if getattr(options, "width", None) != getattr(defaults, "width", None):
        raise ValueError(f"width: got {options.width}, must be left out: the networks have the widths of --widths")
    if hasattr(options, "widths"):
        options = replace(options, widths=defaults.widths * hidden_layers)
    elif hidden_layers != 1:
        raise ValueError(f"hidden_layers: got {hidden_layers}, must be left out: only mlp takes it, not {entry.name}")
    return described._replace(model=Chosen(entry, options))


def run_job(job: CompareJob) -> Ended:
    """Compares each run with theory, writes its numbers, draws figures and prints tables; returns the outcome."""
    screen, times = console(), {"start: programs and data": cli.seconds()}
    say, folder = clock(screen), output_folder(job.output)
    write_config(folder, "compare", job.options)
    results, figures, drawings = list[Compared](), job.figures.within(folder), list[Future[list[Path]]]()
    time_left = TimeLeft(sum(map(_programs, job.settings)))
    with ThreadPoolExecutor(1) as artist:  # draws while the next setting is computed
        for setting in job.settings:
            estimate = f", {time_left}" if results else ""
            place = f" ({len(results) + 1} of {len(job.settings)}{estimate})" if len(job.settings) > 1 else ""
            screen.print(f"[bold]{setting.title}[/bold]{place}")
            results.append(compared(setting, progress=True, say=say))
            time_left.finish(_programs(setting), results[-1].seconds)
            _write(folder, job.seed, results)
            drawings.append(artist.submit(draw_each, results[-1], figures))
            _show(screen, results[-1])
    verdicts = [v for r in results for v in r.verdicts]
    screen.print(tables.LEGEND, style="dim")
    screen.print()
    if verdicts:
        tables.show_verdicts(screen, verdicts, "Do simulation and theory agree?", tables.COMPARISON_LEGEND)
        screen.print()
    paths = [*(path for drawing in drawings for path in drawing.result()), *draw_together(results, figures)]
    for result in results:
        times = added(times, result.times)
    tables.show_times(screen, times, cli.seconds())
    screen.print(f"[bold]{summary(verdicts)}[/bold]")
    screen.print(f"{len(paths)} figures in {folder / 'figures'}; numbers in {folder / 'result.json'}", highlight=False)
    if all(setting.is_standard for setting in job.settings):
        screen.print(NEXT, highlight=False)
    failed = any(verdict.passed is False for verdict in verdicts)
    failures = [*_diverged(results), *[summary(verdicts)] * failed]
    seconds = {r.setting.name: r.seconds for r in results}
    return job.verdicts.ended("compare", {r.setting.name: r.verdicts for r in results}, seconds, failures)


def _programs(setting: Setting) -> int:
    """Counts the programs that are compiled to train the networks of a comparison, for an estimate of its time."""
    evolutions = len(setting.size.widths) + (2 if setting.ntk_fl and setting.ntk_fl.exact_draws else 0)
    return len(setting.size.widths) + evolutions


def _diverged(results: list[Compared]) -> list[str]:
    """Describes the networks whose outputs at the end are not finite, a line each."""
    return [
        f"{networks.method}{networks.of_width} [{result.setting.name}]: diverged"
        for result in results
        for networks in (*result.simulated, *result.ntk_fl)
        if divergence([networks.train[-1], networks.test[-1]])
    ]


def _show(screen: Console, result: Compared) -> None:
    screen.print()
    screen.print(tables.comparison_table(result.rows))
    screen.print("\n".join(result.notes), style="dim")
    screen.print()


def _metrics(seed: int, result: Compared) -> list[Metric]:
    """Builds the rows of metrics.csv of a comparison: learning curves of all trained networks, and predicted ones."""
    setting, rows = result.setting, list[Metric]()
    of_loss = {"mse": "residual"}.get(metric_of(setting.problem.loss), metric_of(setting.problem.loss))
    trained = zip(result.simulated, result.gaps, strict=True)
    for networks, gap in [*trained, *((evolved, None) for evolved in result.ntk_fl)]:
        algorithm = f"{networks.method}{networks.of_width} [{setting.name}]"
        for at, round_ in enumerate(networks.rounds):
            sent = [networks.sent[at].uplink_bytes, networks.sent[at].downlink_bytes]
            mean = setting.problem.ensemble(networks.train[at])
            metrics = {("train", "mse"): float(setting.problem.mse(mean, "train").mean())}
            metrics |= _on_test(setting.problem, networks.ensemble[at])
            if gap is not None:
                metrics["train", of_loss] = float(gap.simulated[at])
            rows += [Metric(round_, algorithm, seed, *name, value, *sent) for name, value in metrics.items()]
    laziness = result.laziness if isinstance(result, Comparison) else ()
    for networks, lazy in zip(result.simulated, laziness, strict=bool(laziness)):
        algorithm = f"{networks.method}{networks.of_width} [{setting.name}]"
        for name, values in lazy.curves().items():
            by_round = zip(networks.rounds, values.mean(axis=(1, 2)), strict=True)
            rows += [Metric(r, algorithm, seed, "laziness", name, float(value), 0, 0) for r, value in by_round]
    widest, predicted = result.simulated[-1], result.gaps[-1]
    starts = f", starts of width {widest.width}" if widest.width else ""
    for at, round_ in enumerate(widest.rounds):
        metrics = {("train", of_loss): float(predicted.predicted[at])}
        metrics |= _on_test(setting.problem, setting.problem.ensemble(predicted.test[at]))
        algorithm = f"{result.method}{starts} [{setting.name}]"
        rows += [Metric(round_, algorithm, seed, *name, value, 0, 0) for name, value in metrics.items()]
    return rows


def _on_test(problem: Problem, mean: np.ndarray) -> dict[tuple[str, str], float]:
    """Computes the mean squared error and, with class labels, the accuracy of an ensemble at the test points.

    ``mean`` [E, m, C] has the C outputs at m test points in each of E draws. The results are means over the draws,
    under the names ("test", "mse") and ("test", "accuracy").
    """
    metrics = {("test", "mse"): float(problem.mse(mean).mean())}
    if problem.labels_test is not None:
        metrics["test", "accuracy"] = float(problem.accuracy(mean).mean())
    return metrics


def _write(folder: Path, seed: int, results: list[Compared]) -> None:
    write_metrics(folder, [m for r in results for m in _metrics(seed, r)])
    clients = []
    for r in results:
        of_setting = {"setting": r.setting.name, "left": r.setting.problem.what_is_left}
        for client, (predicted, simulated) in errors_by_client(r.setting.problem, r.simulated[-1], r.gaps[-1]).items():
            clients.append({**of_setting, "client": client, "predicted": predicted, "simulated": simulated})
    write_result(
        folder,
        [row for r in results for row in r.rows],
        verdicts=[row for r in results for row in as_rows(r.verdicts)],
        seconds={r.setting.name: r.seconds for r in results},
        clients=clients,
    )
