"""What NTK-FL's comparisons report: accuracy by round, rounds and bytes to a level, what was chosen; and figure 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.experiments.lab.cohort import DECISIVE, EVOLVED, LABELS, CohortSettings, divide, methods
from fedtangent._src.experiments.lab.results import NOT_SEEN, SEEN, Claim, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import PACKAGE, Experiment, Study
from fedtangent._src.experiments.lab.runs import Bench, Record, Runs, Tuned, build_all, repeat, tune
from fedtangent._src.output.run_plots import curves

MIB = 2**20
SHOWN = (0, 1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 700)  # rounds in the table by round
WHOLE = ("ntk_fl", "ntk_fl_cross_entropy")
LOSSES = {
    "squared_error": "halved mean squared error to one-hot targets (the paper)",
    "cross_entropy": "cross entropy (its authors' code)",
}
STAND_IN = "scikit-learn's digits (64 inputs) stand in for the paper's data: name its data set and --data-dir"
CLIENTS = {  # a remark on each partition
    "dirichlet": "",
    "writers": "the writers of the data folder's sample: the paper has 300",
    "shifted": "no writers are known for these data: each client distorts its images in its own way (contrast, "
    "brightness, a shift by a pixel), in the test set clients are drawn at random",
}
NEAR = 0.02  # of accuracy: our reading of "similar to the centralised"
CURVES = "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)"


def check(study: Study, **changes: Any) -> None:
    """Builds every method on the first seed's data, with ``changes`` of settings; raises ``ValueError``."""
    s = dataclasses.replace(study.settings, **changes)
    if s.clients_per_round > s.num_clients:
        raise ValueError(f"clients_per_round: got {s.clients_per_round}, must be at most {s.num_clients}, all clients")
    if s.window > min(s.num_rounds, s.reference_rounds):
        raise ValueError(f"window: got {s.window}, must be at most num_rounds and reference_rounds")
    if s.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, which is among the seeds {study.seeds}")
    build_all(methods(s, divide(study.dataset, study.data_dir, study.seeds[0], s)))


def bench_of(study: Study, **changes: Any) -> Bench:
    """Builds the bench of the study's runs, with ``changes`` of settings."""
    s = dataclasses.replace(study.settings, **changes)
    decisive = {name: getattr(s, name) for name in DECISIVE}
    return Bench(study, partial(divide, study.dataset, study.data_dir, s=s), partial(methods, s), decisive)


def tune_all(bench: Bench) -> dict[str, Tuned]:
    """Tunes the hyper-parameters of every method on ``tuning_seed``."""
    s = bench.study.settings
    return {method: tune(bench, method, s.tuning_seed, s.tuning_rounds) for method in s.methods}


def repeat_all(bench: Bench, tuned: dict[str, Tuned], rounds: Mapping[str, int] | None = None) -> Runs:
    """Trains with every method and its hyper-parameters on all seeds.

    A method has ``rounds[method]`` rounds, by default ``num_rounds`` of the settings.
    """
    given = dict.fromkeys(tuned, bench.study.settings.num_rounds) | dict(rounds or {})
    return repeat(bench, {m: t.config for m, t in tuned.items()}, given)


def outcome(
    study: Study, paper: str, tuned: dict[str, Tuned], sheets: Sequence[Sheet], rows: list[dict[str, Any]],
    claims: Sequence[Claim], found: Mapping[str, Runs], **details: Any,
) -> Outcome:  # fmt: skip
    """Builds the outcome, with the paper's claim, the tuned hyper-parameters, our own choices and the failed runs.

    Args:
        study: The study.
        paper: The paper's claim.
        tuned: Tuned hyper-parameters by method.
        sheets: Tables.
        rows: Rows of result.json.
        claims: Judged claims.
        found: Runs by a description of their settings, which is "" if all runs have the same settings.
        **details: Further entries of result.json.
    """
    grids = {
        name: {"chosen": t.config, "at_edge": t.at_edge,
               "grid": [{**c._asdict(), "validation_accuracy": v} for c, v in t.grid.items()]}
        for name, t in tuned.items()
    }  # fmt: skip
    failed = [
        f"{at}{LABELS[name]}, seed {i}: the evolution failed in {int(np.sum(c.status != 0))} of {c.num_rounds} rounds"
        for at, runs in found.items() for name, curves in runs.items()
        for i, c in enumerate(curves) if np.any(c.status != 0)
    ]  # fmt: skip
    said = (f"the paper: {paper}", *_settled(study))
    details = {"tuned": grids, "claim": paper, **details}
    return Outcome((*sheets, _tuning(tuned)), rows, tuple(claims), details, said, tuple(failed))


def after(curve: Record, num_rounds: int, window: int) -> float:
    """Computes the mean test accuracy over the ``window`` rounds that end with round ``num_rounds``."""
    return float(curve.test[num_rounds - window + 1 : num_rounds + 1].mean())


def ends(runs: Runs, s: CohortSettings) -> dict[str, np.ndarray]:
    """Computes each method's accuracy ``after`` the last round, [seeds]."""
    return {name: np.array([after(c, s.num_rounds, s.window) for c in curves]) for name, curves in runs.items()}


def mean_and_error(values: np.ndarray) -> str:
    """Formats the mean over seeds and its standard error."""
    return f"{values.mean():.4f} +- {values.std(ddof=1) / np.sqrt(len(values)):.4f}"


def against(runs: Runs, method: str, s: CohortSettings) -> tuple[Sheet, list[dict[str, Any]], list[Claim]]:
    """Compares the test accuracy of all methods, and judges whether ``method`` is above each other, paired by seed."""
    found, rows, shown, claims, own = ends(runs, s), [], [], [], LABELS[method]
    for name, values in found.items():
        row: dict[str, Any] = {"method": name, "round": s.num_rounds, "accuracy": values.mean(), "seeds": values}
        d = None if name == method else interval(found[method] - values)
        if d is not None:
            row |= {**d.row(), f"{method}_is_above": d.above()}
            above = f"{own} is above {LABELS[name]} after {s.num_rounds} rounds", f"by {d:+.4f}", d.above()
            near = f"{own} is within {NEAR:g} of the centralised training", f"{d:+.4f} from it", d.above(-NEAR)
            claims.append(Claim(*(near if name == "centralised" else above)))
        rows.append(row)
        shown.append({"label": LABELS[name], "accuracy": mean_and_error(values), "d": d})
    title = (
        f"test accuracy, mean of rounds {s.num_rounds - s.window + 1} to {s.num_rounds}, +- its standard error over "
        f"{len(found[method])} seeds"
    )
    columns = {"method": "{label}", "accuracy": "{accuracy}", f"{own} minus it, 95 % interval": "{d:+.4f}"}
    return table(title, shown, columns), rows, claims


class Reached(NamedTuple):
    """First rounds at which a method's runs reach their seeds' levels; None, and infinite means, if never."""

    rounds: list[int | None]
    uplink: list[int | None]  # bytes until then

    @property
    def mean_rounds(self) -> float:
        """Mean rounds over seeds."""
        return float(np.mean([np.inf if r is None else r for r in self.rounds]))

    @property
    def mean_mib(self) -> float:
        """Mean uplink in MiB over seeds."""
        return float(np.mean([np.inf if u is None else u for u in self.uplink])) / MIB


def reached(curves: Sequence[Record], levels: Sequence[float]) -> Reached:
    """Finds the first round, from 1 on, after which each seed's test accuracy is at least its level, and its uplink."""
    there = [np.flatnonzero(c.test[1:] >= level) for c, level in zip(curves, levels, strict=True)]
    rounds = [int(at[0]) + 1 if at.size else None for at in there]
    return Reached(rounds, [None if r is None else int(c.sent[r, 0]) for c, r in zip(curves, rounds, strict=True)])


def to_the_level(
    runs: Runs, levels: Sequence[float], title: str, published: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Sheet, dict[str, Reached]]:
    """Computes rounds and uplink until each method reaches its levels.

    Args:
        runs: Runs of each method, one for each seed.
        levels: Test accuracy to reach, for each seed.
        title: Title of the table.
        published: The paper's rounds and MB by method.
    """
    found, rows = {name: reached(curves, levels) for name, curves in runs.items()}, []
    for name, r in found.items():
        never = None in r.rounds
        rows.append({
            "label": LABELS[name], "rounds": None if never else r.mean_rounds, "mib": None if never else r.mean_mib,
            "each": ", ".join("never" if x is None else str(x) for x in r.rounds),
            "first": np.mean([c.sent[1, 0] - c.sent[0, 0] for c in runs[name]]) / MIB,
            "paper": (published or {}).get(name, (None, None)),
        })  # fmt: skip
    columns = {"method": "{label}", "rounds": "{rounds:.1f}", "seed by seed": "{each}",
               "uplink MiB in round 1": "{first:.3f}", "uplink MiB until then": "{mib:.1f}"}  # fmt: skip
    columns |= {"the paper: rounds": "{paper[0]:d}", "MB": "{paper[1]:d}"} if published else {}
    return table(title, rows, columns), found


def _tuning(tuned: dict[str, Tuned]) -> Sheet:
    """Builds the table of tuned hyper-parameters."""
    rows = [{**t._asdict(), "label": LABELS[name], "steps": t.config.steps or "", "tried": len(t.grid),
             "edge": " and ".join(t.at_edge)} for name, t in tuned.items()]  # fmt: skip
    return table("hyper-parameters by validation accuracy, on a seed of their own", rows, {
        "method": "{label}", "learning rate": "{config.rate:g}", "steps a round": "{steps}",
        "validation accuracy": "{score:.4f}", "tried": "{tried}", "at the edge of the grid": "{edge}",
    })  # fmt: skip


def by_round(runs: Runs) -> Sheet:
    """Builds the table of mean test accuracy over seeds after selected rounds."""
    longest = max(c.num_rounds for curves in runs.values() for c in curves)
    wanted = sorted({r for r in SHOWN if r <= longest} | {longest})
    rows = tuple(
        (LABELS[name], *(f"{np.mean([c.test[r] for c in curves]):.3f}" if r <= curves[0].num_rounds else ""
                         for r in wanted))
        for name, curves in runs.items()
    )  # fmt: skip
    return Sheet("mean test accuracy by round", ("method", *map(str, wanted)), rows)


def draw(study: Study, runs: Runs) -> None:
    """Draws test accuracy from round 1 to ``num_rounds``, mean over seeds and its 95 % interval."""
    s, path = study.settings, study.figures.path("accuracy_by_round")
    lines = {LABELS[name]: np.array([c.test[1 : s.num_rounds + 1] for c in of]) for name, of in runs.items()}
    title = f"{study.dataset}, {s.num_clients} clients ({s.partition}), {s.clients_per_round} a round"
    curves({"test accuracy": lines}, range(1, s.num_rounds + 1), title, path)


def figure_4(name: str, summary: str, scales: Mapping[str, Any], claim: str = CURVES) -> Experiment:
    """Builds the entry of a figure of accuracy by round, like fig. 4; ``claim`` is the paper's."""
    more: dict[str, Any] = {"check": _check_figure_4, "least_seeds": 2}
    run, name = partial(_figure_4, claim), name.removeprefix(PACKAGE)
    return Experiment(name, f"NTK-FL, {summary}", run, papers=("yue2022",), scales=scales, **more)


def _check_figure_4(study: Study) -> None:
    if not any(method in study.settings.methods for method in WHOLE):
        got = ", ".join(study.settings.methods)
        raise ValueError(f"methods: got {got}, must have one of {', '.join(WHOLE)} among them")
    check(study)


def _figure_4(claim: str, study: Study) -> Outcome:
    s, bench = study.settings, bench_of(study)
    tuned = tune_all(bench)
    runs = repeat_all(bench, tuned, {"fed_avg": max(s.num_rounds, s.reference_rounds)} if "fed_avg" in tuned else {})
    compared = {name: against(runs, name, s) for name in WHOLE if name in runs}
    sheets = [sheet for sheet, _, _ in compared.values()]
    rows = [{"compared": name, **row} for name, (_, found, _) in compared.items() for row in found]
    claims = [claim for _, _, own in compared.values() for claim in own]
    details: dict[str, Any] = {}
    if "fed_avg" in runs:
        levels = [after(c, s.reference_rounds, s.window) for c in runs["fed_avg"]]
        title = f"rounds to FedAvg's accuracy after {s.reference_rounds} rounds, {sum(levels) / len(levels):.4f}"
        sheet, found = to_the_level(runs, levels, title)
        sheets.append(sheet)
        claims += [ten_times_sooner(found[name], s, name) for name in compared]
        details = {"levels": levels, "rounds_to_level": found}
    draw(study, runs)
    return outcome(study, claim, tuned, [*sheets, by_round(runs)], rows, claims, {"": runs}, **details)


def ten_times_sooner(reached: Reached, s: CohortSettings, method: str = "ntk_fl") -> Claim:
    """Judges whether NTK-FL reaches FedAvg's last accuracy in at most a tenth of its rounds, on average."""
    mean, tenth = reached.mean_rounds, s.reference_rounds / 10
    found = f"not with every seed in {s.num_rounds}" if None in reached.rounds else f"in {mean:.1f}"
    claim = f"{LABELS[method]} gets to that level in at most a tenth of the rounds ({tenth:g})"
    return Claim(claim, found, SEEN if mean <= tenth else NOT_SEEN)


def _settled(study: Study) -> list[str]:
    """Returns remarks on choices that the paper leaves open."""
    s = study.settings
    losses = list(dict.fromkeys(LOSSES[loss] for name, loss in EVOLVED.items() if name in s.methods))
    own = f", NTK-FL under the {' or the '.join(losses)}, its step clipped at the largest stable one" if losses else ""
    lines = (
        f"one network of {s.width} hidden units in the standard parameterization for all, inputs standardised, last "
        f"layer drawn with {s.last_w_std:g} / sqrt(width); gradient methods under the {s.loss.replace('_', ' ')}{own}",
        STAND_IN if study.dataset == "digits" else "",
        CLIENTS[s.partition],
    )
    return [line for line in lines if line]
