"""Fig. 1(a) to 1(c) of the Local-GD paper: regression by round and by dimension.

Fig. 1(a): 10 nodes of 50 examples whose true models are independent, d = 1500 inputs, L = 200 local steps, R = 200
rounds, eta = 1e-4. Plotted by round is the distance ``|w - w'| / d`` of Local-GD's global model (G) from the
centralised model (C, 10,000 steps), from the closed form of local work until convergence (G-Closed, eq. (6) of
Local-GD), and from the closed form of the L steps that were taken, which it has to equal. The paper shows 0 for
G-Closed in every round, and C reached by the end.

Fig. 1(b) and 1(c): the same nodes and training, at dimensions d below and above 500, the number of all examples. Fig.
1(b) has the distance of the last G from C, and of each from its closed form (eq. (6) and (7) of Local-GD); the paper
shows a peak of the first at d = 500, and 0 where d is larger. Fig. 1(c) has the generalisation error ``1/M sum_i |w -
w_i*|^2 / d`` of G and C over the M nodes' true models w_i*; the paper shows equal errors where d is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fedtangent import theory
from fedtangent._src.comparison.verdicts import EXACT, MARGIN, Verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import AnySettings, Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd.problems import Problem, off, regression, simulated
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.local_gd.regression import LOSSES

SAME = 1e-6  # a share of the centralised model's length that a figure shows as 0
REACHED = 0.01  # share of the initial distance at which G counts as having reached C

READING = (
    "the paper prints the local loss 1 / (2N) |y - X w|^2 (section 2.1) and eta = 1e-4, with which much of a local "
    "residual is left after L steps; without 1 / N it is gone, as the figure shows, so that is the default here: "
    "--set loss=squared_error for the printed one (erratum `local_gd.loss`)"
)


@dataclass(frozen=True)
class RegressionSettings:
    """Settings of fig. 1(a) of Local-GD; ``loss`` is used by the nodes and by the centralised model."""

    num_nodes: int = within(10, least=2)
    examples_per_node: int = 50
    dimension: int = 1500
    local_steps: int = within(200, least=2)
    num_rounds: int = within(200, least=2)
    learning_rate: float = within(1e-4, above=0)
    centralised_steps: int = 10_000
    loss: str = within("squared_error_sum", of=LOSSES)


class RegressionRun(NamedTuple):
    """Local-GD's global model G, the centralised model C, and their closed forms, for one regression.

    Models are vectors of r weights.

    Attributes:
        path: G after every round, [R + 1, r].
        trained: C after its last step, [r].
        finite: Closed form of G, with L local steps a round.
        converged: Closed form of G with local work until convergence (eq. (6) of Local-GD).
        centralised: Closed form of C.
    """

    problem: Problem
    path: np.ndarray
    trained: np.ndarray
    finite: theory.LocalRegression
    converged: theory.LocalRegression
    centralised: theory.LocalRegression

    @property
    def eq_6(self) -> np.ndarray:
        """Global models by Local-GD's closed form for local work until convergence (its eq. (6)), [R + 1, r]."""
        return self.converged.models(len(self.path) - 1)

    @property
    def eq_7(self) -> np.ndarray:
        """The minimum-norm model of all examples, the centralised closed form (eq. (7) of Local-GD), [r weights]."""
        return theory.minimum_norm(self.problem.x, self.problem.y)

    def apart(self, w: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Computes the distances ``|w - other| / d`` of models over the last axis, with d input dimensions.

        Args:
            w, other: Models of r weights, [.., r] each.
        """
        return np.asarray(np.linalg.norm(w - other, axis=-1) / self.problem.dimension)


def regression_run(settings: AnySettings, dimension: int, seed: int, *, simulate: bool = True) -> RegressionRun:
    """Trains the global and the centralised model on one seed's regression, or computes them in closed form.

    Needs 64-bit types.

    Args:
        settings: Settings of fig. 1(a), or of fig. 1(b) and 1(c).
        dimension: Dimension d of the inputs.
        seed: Seed of the problem.
        simulate: Whether to train the models. If not, ``path`` and ``trained`` are their closed forms.
    """
    problem = regression(seed, settings.num_nodes, settings.examples_per_node, dimension).in_span()
    x, y, nodes, pooled = problem.x, problem.y, problem.partition, problem.pooled
    local = {"learning_rate": settings.learning_rate, "local_steps": settings.local_steps, "loss": settings.loss}
    central = {**local, "local_steps": settings.centralised_steps}
    finite = theory.local_regression(x, y, nodes, **local)
    centralised = theory.local_regression(x, y, pooled.partition, **central)
    if simulate:
        path = simulated(problem, "fed_avg", settings.num_rounds, **local)
        trained = simulated(pooled, "fed_avg", 1, **central)[-1]
    else:
        path, trained = finite.models(settings.num_rounds), centralised.models(1)[-1]
    return RegressionRun(problem, path, trained, finite, theory.local_regression(x, y, nodes), centralised)


def _one_step(problem: Problem, settings: AnySettings) -> theory.LocalRegression:
    """Computes the closed form of Local-GD with one local step per round."""
    x, y, nodes = problem.x, problem.y, problem.partition
    return theory.local_regression(x, y, nodes, learning_rate=settings.learning_rate, local_steps=1, loss=settings.loss)


def exact_verdict(runs: list[RegressionRun], settings: AnySettings) -> Verdict:
    """Judges whether Local-GD's models in every round, and the centralised model, equal their closed forms (Lemma 1).

    The control is the closed form of one local step, which must differ.

    Args:
        runs: Trained models.
        settings: Settings of these runs.
    """
    largest, control = 0.0, np.inf
    for run in runs:
        rounds = len(run.path) - 1
        central = off(run.trained[None], run.centralised.models(1)[1:])
        largest = max(largest, off(run.path, run.finite.models(rounds)), central)
        control = min(control, off(run.path, _one_step(run.problem, settings).models(rounds)))
    sizes = f"d = {', '.join(map(str, sorted({run.problem.dimension for run in runs})))}"
    right = f"{largest:.1e} apart at most", f"<= {EXACT:g}", largest <= EXACT
    wrong = "L = 1", f"{control:.1e} apart", control > MARGIN * EXACT
    return Verdict.of("Local-GD Lemma 1", "simulation is the closed form of as many steps", sizes, right, wrong)


def check(study: Study) -> None:
    """Raises ``ValueError`` unless d is above a node's number of examples, as eq. (6) of Local-GD needs.

    It also raises ``ValueError`` for a wrong learning rate (``check_descent``).
    """
    dimension, examples = study.settings.dimension, study.settings.examples_per_node
    if dimension <= examples:
        raise ValueError(f"dimension: got {dimension}, must be above examples_per_node, {examples}")
    check_descent(study, dimension)


def check_descent(study: Study, dimension: int) -> None:
    """Raises ``ValueError`` if gradient descent, on one node's or on all examples, diverges or makes no progress.

    Args:
        study: The study, with the learning rate.
        dimension: Dimension d of the inputs.
    """
    settings, rate = study.settings, study.settings.learning_rate
    for seed in study.seeds:
        problem = regression(seed, settings.num_nodes, settings.examples_per_node, dimension).in_span()
        for p in (problem, problem.pooled):
            if not (unfinished := _one_step(p, settings).unfinished) < 1:
                fault, must = ("diverges", "smaller") if unfinished > 1 else ("makes no progress", "larger")
                raise ValueError(f"learning_rate: got {rate:g}, at which descent {fault}, must be {must}")


def run(study: Study) -> lab.Outcome:
    """Runs fig. 1(a) of Local-GD: trains on every seed's problem, and measures distances from closed forms by round."""
    settings, runs, rows, lines = study.settings, list[RegressionRun](), list[lab.Row](), list[dict[str, np.ndarray]]()
    rounds = np.arange(settings.num_rounds + 1)
    for seed in study.each_seed():
        one = regression_run(settings, settings.dimension, seed)
        distances = {
            "G to C": one.apart(one.path, one.trained),
            "G to G-Closed (eq. 6)": one.apart(one.path, one.eq_6),
            "G to the closed form of L steps": one.apart(one.path, one.finite.models(settings.num_rounds)),
        }
        runs.append(one)
        lines.append(distances)
        rows.append(_row(seed, one, distances))
        study.keep(lab.metric_rows("fed_avg", seed, rounds, distances))
    panel = BoundedPanel(f"d = {settings.dimension}, L = {settings.local_steps}", rounds, lines[0], {})
    names, path = ("round", "|w - w'| / d"), study.figures.path("fig1a")
    bounded([panel], "Fig. 1(a): regression, distance / d", names, 1e-17, path)
    columns = "seed: {seed} | G to C, round 0: {g_c_start:.3g} | half: {g_c_half:.3g} | end: {g_c_end:.3g} | "
    columns += "G to G-Closed, largest: {g_closed_largest:.2g} | to that of L steps: {g_finite_largest:.2g} | "
    columns += "C to C-Closed: {c_closed:.2g} | local residual left: {unfinished:.2g} | contraction: {contraction:.4f}"
    sheet = lab.table(f"Fig. 1(a): |w - w'| / d, d = {settings.dimension}", rows, columns)
    verdict = exact_verdict(runs, settings)
    remarks = (READING, "contraction: what a round leaves of the slowest part of the distance to C-Closed, in theory")
    return lab.Outcome((sheet,), rows, claims(rows), {}, remarks, lab.disagreeing([verdict]), (verdict,))


def _row(seed: int, one: RegressionRun, distances: dict[str, np.ndarray]) -> lab.Row:
    """Builds the row of one seed; ``distances`` has the three curves of fig. 1(a) of Local-GD by round."""
    to_c, to_closed, to_finite = distances.values()
    return {
        "seed": seed,
        "g_c_start": float(to_c[0]),
        "g_c_half": float(to_c[len(to_c) // 2]),
        "g_c_end": float(to_c[-1]),
        "g_closed_largest": float(to_closed.max()),
        "g_finite_largest": float(to_finite.max()),
        "c_closed": float(one.apart(one.trained, one.eq_7)),
        "unfinished": one.finite.unfinished,
        "contraction": one.converged.contraction,
    }


def claims(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges Local-GD's fig. 1(a): the global model equals its closed form, and approaches the centralised one."""
    closed = lab.interval(r["g_closed_largest"] / r["g_c_start"] for r in rows)
    end = lab.interval(r["g_c_end"] / r["g_c_start"] for r in rows)
    late = lab.interval(r["g_c_end"] - r["g_c_half"] for r in rows)
    return (
        closed.claim_below(f"G is its closed form (eq. 6) in every round (to {SAME:g} of C)", "{:.2g}", SAME),
        end.claim_below(f"G goes to C (to {REACHED:g} of C)", "{:.2g}", REACHED),
        late.claim_below("G comes nearer to C to the last", "{:.2g}"),
    )


SMOKE = RegressionSettings(4, 5, 60, 200, 60, 1e-3, 10_000)
SCALES = {"gaussian": by_scale(SMOKE, RegressionSettings())}
SUMMARY_FIG1A = (
    "Fig. 1(a) of the Local-GD paper: on regression the global model meets its closed form and goes to the centralised."
)


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
    """Settings of fig. 1(b) and 1(c) of Local-GD; one of ``dimensions`` is the number of all examples."""

    num_nodes: int = within(10, least=2)
    examples_per_node: int = 50
    dimensions: tuple[int, ...] = within((100, 200, 300, 400, 500, 600, 750, 1000, 1500, 2000), count=3)
    local_steps: int = within(200, least=2)
    num_rounds: int = within(200, least=2)
    learning_rate: float = within(1e-4, above=0)
    centralised_steps: int = 10_000
    loss: str = within("squared_error_sum", of=LOSSES)
    simulated_seeds: int = 1  # for other seeds the closed form is taken, which the simulated ones are checked against


def check_dimensions(study: Study) -> None:
    """Raises ``ValueError`` for wrong dimensions d.

    Every d must be above a node's number of examples. The number of all nodes' examples must be among them, with
    dimensions below and above it. Also raises for a wrong learning rate (``check_descent``).
    """
    settings = study.settings
    total, d = settings.num_nodes * settings.examples_per_node, settings.dimensions
    if min(d) <= settings.examples_per_node:
        raise ValueError(f"dimensions: got {min(d)}, must be above examples_per_node, {settings.examples_per_node}")
    if total not in d or not min(d) < total < max(d):
        values = ",".join(map(str, d))
        raise ValueError(
            f"dimensions: got {values}, must have {total}, the number of examples, a smaller and a larger one"
        )
    check_descent(study, max(d))


def _run(part: str, study: Study) -> lab.Outcome:
    """Runs fig. 1(b) or 1(c) of Local-GD (``part`` "b" or "c"): computes the models of every dimension and seed.

    Models of the first ``simulated_seeds`` seeds are trained, the others come from the closed form.
    """
    settings, runs, rows = study.settings, list[RegressionRun](), list[lab.Row]()
    for seed in study.each_seed():
        for d in sorted(settings.dimensions):
            simulate = len(runs) < settings.simulated_seeds * len(settings.dimensions)
            one = regression_run(settings, d, seed, simulate=simulate)
            runs += [one] if simulate else []
            row = _row_of_dimension(seed, one)
            rows.append(row)
            values, split = {name: row[key] for name, key in LINES[part].items()}, "train" if part == "b" else "test"
            study.keep(lab.metric_rows(f"fed_avg d={d}", seed, settings.num_rounds, values, split))
    mean_rows, verdict = lab.means(rows, "dimension"), exact_verdict(runs, settings)
    _draw(study, part, mean_rows)
    judge = _claims_b if part == "b" else _claims_c
    claims = judge(rows, settings.num_nodes * settings.examples_per_node)
    sheet = lab.table(f"{TITLES[part]}, means of {len(study.seeds)} seeds", mean_rows, COLUMNS[part])
    return lab.Outcome((sheet,), rows, claims, {}, REMARKS, lab.disagreeing([verdict]), (verdict,))


def _row_of_dimension(seed: int, one: RegressionRun) -> lab.Row:
    """Builds the row of one dimension and seed: distances between models, generalisation errors, contraction factors.

    The models are the last global one, the centralised one, and their closed forms (eqs. (6) and (7) of Local-GD).
    Errors are of the first two.
    """
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
    """Computes for each seed how far the rows' entry ``key`` peaks at dimension ``at``.

    It is log10 of the entry there over the largest entry at any other dimension.
    """
    peaks = []
    for group in lab.grouped(rows, "seed").values():
        value = next(r[key] for r in group if r["dimension"] == at)
        peaks.append(float(np.log10(value / max(r[key] for r in group if r["dimension"] != at))))
    return peaks


def _claims_b(rows: list[lab.Row], total: int) -> tuple[lab.Claim, ...]:
    """Judges the claims of fig. 1(b) of Local-GD; ``total`` is the number of all examples.

    The global model equals its closed form; its distance to the centralised one peaks at d = ``total`` and vanishes at
    the largest d.
    """
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
    """Judges fig. 1(c) of Local-GD: the global and the centralised model have equal errors at the largest d.

    It also judges whether both errors peak at d = ``total``, the number of all examples, and whether the centralised
    model's error is the larger one there.
    """
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


SMOKE_BY_DIMENSION = DimensionSettings(4, 5, (10, 20, 60), 200, 60, 1e-3, 10_000)
DEFAULT = DimensionSettings(dimensions=(100, 300, 500, 750, 1000, 2000))
SCALES_BY_DIMENSION = {"gaussian": by_scale(SMOKE_BY_DIMENSION, DEFAULT, DimensionSettings())}
SUMMARIES = {
    "fig1b": "Local-GD, fig. 1(b): regression, distances of global and centralised model and their closed forms, by d",
    "fig1c": "Local-GD, fig. 1(c): regression, generalisation error of global and centralised model by d",
}
_entry = partial(experiment, __name__, papers=("localgd",), exact=True, least_seeds=2)
_by_dimension = partial(_entry, scales=SCALES_BY_DIMENSION, check=check_dimensions)
ENTRIES = (
    _entry(run, SCALES, check=check, part=("fig1a", SUMMARY_FIG1A)),
    *(_by_dimension(partial(_run, part[0][-1]), part=part) for part in SUMMARIES.items()),
)
