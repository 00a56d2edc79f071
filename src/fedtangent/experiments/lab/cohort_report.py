"""What NTK-FL's comparisons report: accuracy by round, rounds and bytes to a level, what was chosen; and figure 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedtangent.experiments.lab.cohort import DECISIVE, EVOLVED, LABELS, CohortSettings, check_cohort, divide, methods
from fedtangent.experiments.lab.results import NOT_SEEN, SEEN, Claim, MeanInterval, Outcome, Sheet, interval
from fedtangent.experiments.lab.runner import Experiment, Study, experiment
from fedtangent.experiments.lab.runs import Bench, Record, Runs, Tuned, repeat, tune

MIB = 2**20
WHOLE = ("ntk_fl", "ntk_fl_cross_entropy")
LOSSES = {
    "squared_error": "halved mean squared error to one-hot targets (the paper)",
    "cross_entropy": "cross entropy (its authors' code)",
}
NEAR = 0.02  # of accuracy: what "similar to the centralised" is taken to mean
CURVES = "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)"


def check(study: Study, **changes: Any) -> None:
    """Build every method on the first seed's data, with some settings changed; raises ``ValueError``."""
    s = dataclasses.replace(study.settings, **changes)
    check_cohort(s)
    if s.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, which is among the seeds {study.seeds}")
    for method in methods(s, divide(study.dataset, study.data_dir, study.seeds[0], s)).values():
        for rate in method.rates:
            method.build(method.steps[0], rate)


def bench_of(study: Study, **changes: Any) -> Bench:
    """Where the runs of the settings take place, with some of them changed."""
    s = dataclasses.replace(study.settings, **changes)
    decisive = {name: getattr(s, name) for name in DECISIVE}
    return Bench(study, partial(divide, study.dataset, study.data_dir, s=s), partial(methods, s), decisive)


def tune_all(bench: Bench) -> dict[str, Tuned]:
    """What every method of the settings takes, tuned on the seed that is for it."""
    s = bench.study.settings
    return {method: tune(bench, method, s.tuning_seed, s.tuning_rounds) for method in s.methods}


def repeat_all(bench: Bench, tuned: dict[str, Tuned], rounds: Mapping[str, int] | None = None) -> Runs:
    """Every method with what it takes, for ``num_rounds`` or as many rounds as ``rounds`` says."""
    given = dict.fromkeys(tuned, bench.study.settings.num_rounds) | dict(rounds or {})
    return repeat(bench, {m: t.config for m, t in tuned.items()}, given)


def details_of(claim: str, tuned: dict[str, Tuned], **more: Any) -> dict[str, Any]:
    """What result.json says besides its rows: the paper's claim in words and the grids."""
    grids = {
        name: {"chosen": t.config, "at_edge": t.at_edge,
               "grid": [{**c._asdict(), "validation_accuracy": v} for c, v in t.grid.items()]}
        for name, t in tuned.items()
    }  # fmt: skip
    return {"tuned": grids, "claim": claim, **more}


def after(curve: Record, num_rounds: int, window: int) -> float:
    """Mean test accuracy over the ``window`` rounds that end with round ``num_rounds``."""
    return float(curve.test[num_rounds - window + 1 : num_rounds + 1].mean())


def ends(runs: Runs, num_rounds: int, window: int) -> dict[str, np.ndarray]:
    """``after`` for each method, [seeds]."""
    return {name: np.array([after(c, num_rounds, window) for c in curves]) for name, curves in runs.items()}


def first_round(curve: Record, level: float) -> int | None:
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
            d = interval(found[method] - values)
            row |= {"difference": d.mean, "low_95": d.low, "high_95": d.high, f"{method}_is_above": d.above()}
            cells = (*cells[:2], f"{d.mean:+.4f}", d.ends(), d.above())
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


def reached(curves: Sequence[Record], levels: Sequence[float]) -> Reached:
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


def unstable(runs: Runs) -> tuple[str, ...]:
    """Rounds of NTK-FL that kept the model, as failures to report."""
    return tuple(
        f"{LABELS[name]}, seed {i}: the evolution failed in {int(np.sum(c.status != 0))} of {c.num_rounds} rounds"
        for name, curves in runs.items()
        for i, c in enumerate(curves)
        if np.any(c.status != 0)
    )


def draw(study: Study, runs: Runs, title: str) -> None:
    """Test accuracy from round 1 to ``num_rounds``, mean over seeds and its standard error."""
    from fedtangent.output.line_plots import lines_with_errors

    num_rounds, path = study.settings.num_rounds, study.figures / "accuracy_by_round.png"
    lines = {LABELS[name]: np.array([c.test[1 : num_rounds + 1] for c in curves]) for name, curves in runs.items()}
    lines_with_errors(lines, list(range(1, num_rounds + 1)), ("round", "test accuracy"), title, path)


def figure_4(module: str, scales: Mapping[str, Any], notes: Mapping[str, str], claim: str) -> Experiment:
    """An entry: accuracy by round on one data set (the first of ``scales`` needs no files).

    ``claim`` is the paper's, in words; ``notes`` says, by data set, what stands in for what the paper has.
    """
    run = partial(_figure_4, claim, notes)
    return experiment(module, run, scales, ("yue2022",), check=_check_figure_4, least_seeds=2)


def _check_figure_4(study: Study) -> None:
    if not any(method in study.settings.methods for method in WHOLE):
        got = ", ".join(study.settings.methods)
        raise ValueError(f"methods: got {got}, must have one of {', '.join(WHOLE)} among them")
    check(study)


def _figure_4(claim: str, notes: Mapping[str, str], study: Study) -> Outcome:
    s, bench = study.settings, bench_of(study)
    tuned = tune_all(bench)
    runs = repeat_all(bench, tuned, {"fed_avg": max(s.num_rounds, s.reference_rounds)} if "fed_avg" in tuned else {})
    compared = {name: against(runs, name, s.num_rounds, s.window) for name in WHOLE if name in runs}
    sheets = [sheet for sheet, _ in compared.values()]
    rows = [{"compared": name, **row} for name, (_, found) in compared.items() for row in found]
    claims = [one for name, (_, found) in compared.items() for one in judge(found, s, name)]
    details = details_of(claim, tuned)
    if "fed_avg" in runs:
        levels = [after(c, s.reference_rounds, s.window) for c in runs["fed_avg"]]
        title = f"rounds to FedAvg's accuracy after {s.reference_rounds} rounds, {sum(levels) / len(levels):.4f}"
        sheet, found = to_the_level(runs, levels, title)
        sheets.append(sheet)
        claims += [soon(found[name], s, name) for name in compared]
        details |= {"levels": levels, "rounds_to_level": found}
    sheets += [by_round(runs), tuning(tuned)]
    draw(study, runs, f"{study.dataset}, {_clients(s)}, {len(study.seeds)} seeds")
    said = (f"the paper: {claim}", *remarks(s, notes.get(study.dataset)))
    return Outcome(tuple(sheets), rows, tuple(claims), details, said, unstable(runs))


def judge(rows: list[dict[str, Any]], s: CohortSettings, method: str = "ntk_fl") -> list[Claim]:
    """The claim's parts of one way to evolve."""
    own, claims = LABELS[method], []
    for row in rows:
        if "difference" not in row:
            continue
        difference = MeanInterval(row["difference"], row["low_95"], row["high_95"])
        if row["method"] == "centralised":
            claims.append(Claim(f"{own} is within {NEAR:g} of the centralised training",
                                f"{difference.text()} from it", difference.above(-NEAR)))  # fmt: skip
        else:
            claims.append(Claim(f"{own} is above {LABELS[row['method']]} after {s.num_rounds} rounds",
                                f"by {difference.text()}", difference.above()))  # fmt: skip
    return claims


def soon(reached: Reached, s: CohortSettings, method: str = "ntk_fl") -> Claim:
    """Whether NTK-FL gets to the accuracy of FedAvg's last round in at most a tenth of its rounds, on average."""
    mean, tenth = reached.mean_rounds, s.reference_rounds / 10
    found = f"not with every seed in {s.num_rounds}" if None in reached.rounds else f"in {mean:.1f}"
    claim = f"{LABELS[method]} gets to that level in at most a tenth of the rounds ({tenth:g})"
    return Claim(claim, found, SEEN if mean <= tenth else NOT_SEEN)


def _clients(s: CohortSettings) -> str:
    how = {"dirichlet": f"Dirichlet {s.alpha:g}", "writers": "by writer", "shifted": "feature skew"}[s.partition]
    return f"{s.num_clients} clients ({how}), {s.clients_per_round} a round"


def remarks(s: CohortSettings, note: str | None, switches: bool = True) -> tuple[str, ...]:
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
    if switches and (s.sparsity or s.value_bits or s.projected or s.beta < 1):
        lines.append(
            f"beta {s.beta:g}, d1' {s.projected or 'all'}, sparsity {s.sparsity:g}, "
            f"{s.value_bits or 'all'} bits a number of a Jacobian"
        )
    if note is not None:
        lines.append(note)
    return tuple(lines)
