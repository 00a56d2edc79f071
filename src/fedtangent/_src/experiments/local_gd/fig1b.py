"""Fig. 1(b) and 1(c) of the Local-GD paper: regression from too few dimensions to more than enough.

The same nodes and runs as in fig. 1(a), at dimensions through the number of examples of all nodes, 500. Fig. 1(b) has
the distance ``|w - w'| / d`` of the last global model (G) to the centralised one (C) and of each to its closed form,
(6) and (7); the paper shows a peak of the first at d = 500, and 0 where d is larger. Fig. 1(c) has the generalisation
error ``1/M sum_i |w - w_i*|^2 / d`` of G and C, the same where d is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd.fig1a import (
    READING,
    SAME,
    RegressionRun,
    check_descent,
    exact_verdict,
    regression_run,
)
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.local_gd.regression import LOSSES

EQUAL = 0.01  # relative difference up to which two models of the largest d count as the same
LINES = {  # of each part: a line's label, and its entry of a row
    "b": {"G to C": "g_c", "G to G-Closed (eq. 6)": "g_closed", "C to C-Closed (eq. 7)": "c_closed"},
    "c": {"global model, G": "error_g", "centralised, C": "error_c"},
}
TITLES = {"b": "Fig. 1(b): |w - w'| / d at the end", "c": "Fig. 1(c): generalisation error / d"}
COLUMNS = {
    "b": "d: {dimension} | G to C: {g_c:.3g} | G to G-Closed: {g_closed:.2g} | C to C-Closed: {c_closed:.2g} | "
    "G-Closed to C-Closed: {closed_closed:.3g} | limit to C-Closed: {limit_closed:.2g} | |C| / d: {size:.3g} | "
    "contraction: {contraction:.5f} | left of C's way: {contraction_c:.2g} | of a local residual: {unfinished:.2g}",
    "c": "d: {dimension} | G: {error_g:.4g} | C: {error_c:.4g} | contraction: {contraction:.5f} | "
    "left of C's way: {contraction_c:.2g}",
}
REMARKS = (
    READING,
    "below as many dimensions as examples no model fits all: where Local-GD ends (limit) is then no least-squares "
    "solution of the pooled examples, however many rounds there are; the theory gives it, and what a round leaves of "
    "the slowest part of the way to it",
)


@dataclass(frozen=True)
class DimensionSettings:
    """The paper's settings; one of ``dimensions`` is the number of all examples."""

    num_nodes: int = within(10, least=2)
    examples_per_node: int = 50
    dimensions: tuple[int, ...] = within((100, 200, 300, 400, 500, 600, 750, 1000, 1500, 2000), count=3)
    local_steps: int = within(200, least=2)
    num_rounds: int = within(200, least=2)
    learning_rate: float = within(1e-4, above=0)
    centralised_steps: int = 10_000
    loss: str = within("squared_error_sum", of=LOSSES)
    simulated_seeds: int = 1  # for other seeds the closed form is taken, which the simulated ones are checked against


def check(study: Study) -> None:
    """Raises ``ValueError`` unless eq. (6) applies at every d, and the dimensions lie around the number of examples."""
    settings = study.settings
    total, d = settings.num_nodes * settings.examples_per_node, settings.dimensions
    if min(d) <= settings.examples_per_node:
        raise ValueError(f"dimensions: got {min(d)}, must be above examples_per_node, {settings.examples_per_node}")
    if total not in d or not min(d) < total < max(d):
        values = ",".join(map(str, d))
        raise ValueError(f"dimensions: got {values}, must have {total}, the examples, and some around it")
    check_descent(study, max(d))


def _run(part: str, study: Study) -> lab.Outcome:
    """Trains in every dimension on every seed, for part "b" or "c" of the figure."""
    settings, runs, rows = study.settings, list[RegressionRun](), list[lab.Row]()
    for seed in study.each_seed():
        for d in sorted(settings.dimensions):
            simulate = len(runs) < settings.simulated_seeds * len(settings.dimensions)
            one = regression_run(settings, d, seed, simulate=simulate)
            runs += [one] if simulate else []
            row = _row(seed, one)
            rows.append(row)
            values, split = {name: row[key] for name, key in LINES[part].items()}, "train" if part == "b" else "test"
            study.keep(lab.metric_rows(f"fed_avg d={d}", seed, settings.num_rounds, values, split))
    mean_rows, verdict = lab.means(rows, "dimension"), exact_verdict(runs, settings)
    _draw(study, part, mean_rows)
    judge = _claims_b if part == "b" else _claims_c
    claims = judge(rows, settings.num_nodes * settings.examples_per_node)
    sheet = lab.table(f"{TITLES[part]}, means of {len(study.seeds)} seeds", mean_rows, COLUMNS[part])
    return lab.Outcome((sheet,), rows, claims, {}, REMARKS, lab.disagreeing([verdict]), (verdict,))


def _row(seed: int, one: RegressionRun) -> lab.Row:
    """Computes the distances and errors of one dimension and seed."""
    g, c, truths = one.path[-1], one.trained, one.problem.truths
    errors = [np.mean(np.sum((one.problem.lifted(w) - truths) ** 2, axis=1)) / one.problem.dimension for w in (g, c)]
    closed = one.eq_7
    return {
        "seed": seed,
        "dimension": one.problem.dimension,
        "g_c": float(one.apart(g, c)),
        "g_closed": float(one.apart(g, one.eq_6[-1])),
        "c_closed": float(one.apart(c, closed)),
        "closed_closed": float(one.apart(one.eq_6[-1], closed)),
        "limit_closed": float(one.apart(one.converged.limit(), closed)),
        "size": float(one.apart(c, np.zeros_like(c))),
        "error_g": float(errors[0]),
        "error_c": float(errors[1]),
        "contraction": one.converged.contraction,
        "contraction_c": float(np.abs(one.centralised.kept[one.centralised.known]).max()),
        "unfinished": one.finite.unfinished,
    }


def _draw(study: Study, part: str, mean_rows: list[lab.Row]) -> None:
    d = np.array([m["dimension"] for m in mean_rows])
    lines = {name: np.array([m[key] for m in mean_rows]) for name, key in LINES[part].items()}
    quantity = "|w - w'| / d" if part == "b" else "error / d"
    panel = BoundedPanel(f"round {study.settings.num_rounds}, mean of {len(study.seeds)} seeds", d, lines, {})
    bounded([panel], f"Fig. 1({part}): regression", ("dimension d", quantity), None, study.figures.path(f"fig1{part}"))


def _peak(rows: list[lab.Row], key: str, at: int) -> list[float]:
    """Computes the log10 of the value at dimension ``at`` over the largest at any other, for each seed."""
    peaks = []
    for group in lab.grouped(rows, "seed").values():
        value = next(r[key] for r in group if r["dimension"] == at)
        peaks.append(float(np.log10(value / max(r[key] for r in group if r["dimension"] != at))))
    return peaks


def _claims_b(rows: list[lab.Row], total: int) -> tuple[lab.Claim, ...]:
    """Judges fig. 1(b): G is its closed form everywhere, has a peak at d = 500, and is C at the largest d."""
    most = max(r["dimension"] for r in rows)
    closed = lab.interval(max(r["g_closed"] / r["size"] for r in group) for group in lab.grouped(rows, "seed").values())
    high = lab.interval(_peak(rows, "g_c", total))
    end = lab.interval(r["g_c"] / r["size"] for r in rows if r["dimension"] == most)
    return (
        closed.claim_below(f"G is its closed form (eq. 6) at every d (to {SAME:g} of C)", "{:.2g}", SAME),
        high.claim_above(f"G to C has its peak at d = {total} (log10 of it over the next)", "{:.2f}"),
        end.claim_below(f"G is C at d = {most} (to {EQUAL:g} of C)", "{:.2g}", EQUAL),
    )


def _claims_c(rows: list[lab.Row], total: int) -> tuple[lab.Claim, ...]:
    """Judges fig. 1(c): equal errors at the largest d, and peaks, which the paper's text claims of distances only."""
    most = max(r["dimension"] for r in rows)
    away = lab.interval(abs(r["error_g"] / r["error_c"] - 1) for r in rows if r["dimension"] == most)
    centralised, whole = lab.interval(_peak(rows, "error_c", total)), lab.interval(_peak(rows, "error_g", total))
    worse = lab.interval(np.log10(r["error_c"] / r["error_g"]) for r in rows if r["dimension"] == total)
    return (
        away.claim_below(f"G and C have the same error at d = {most} (to {EQUAL:g})", "{:.2g}", EQUAL),
        centralised.claim_above(f"C's error has its peak at d = {total} (log10 over the next)", "{:.2f}"),
        whole.claim_above(f"G's error has its peak at d = {total} (log10 over the next)", "{:.2f}"),
        worse.claim_above(f"at d = {total} C's error is above G's (log10 of the ratio)", "{:.2f}"),
    )


SMOKE = DimensionSettings(4, 5, (10, 20, 60), 200, 60, 1e-3, 10_000)
DEFAULT = DimensionSettings(dimensions=(100, 300, 500, 750, 1000, 2000))
SCALES = {"gaussian": by_scale(SMOKE, DEFAULT, DimensionSettings())}
SUMMARIES = {
    "fig1b": "Local-GD, fig. 1(b): regression, distances of global and centralised model and their closed forms, by d",
    "fig1c": "Local-GD, fig. 1(c): regression, generalisation error of global and centralised model by d",
}
ENTRIES = tuple(
    experiment(
        __name__, partial(_run, part[0][-1]), SCALES, ("localgd",), check=check, exact=True, least_seeds=2, part=part
    )
    for part in SUMMARIES.items()
)
