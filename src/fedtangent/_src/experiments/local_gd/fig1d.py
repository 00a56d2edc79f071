"""Fig. 1(d) of the Local-GD paper: on separable classification Local-GD comes near the centralised model's direction.

10 nodes of 50 examples, labels of halfspaces ``w_i* = w* + z_i``, d = 1500, lambda = 1e-4, L = 150, R = 120, eta = .01:
the distance of directions ``|w / |w| - w' / |w'||`` by round of Local-GD (G) and Modified Local-GD (G-Mod) to the
centralised model (C, the exponential loss, 20,000 steps) and to the hard-margin support vector machine (S). Beside them
what they stand for in theory: the same local problems solved exactly (eq. 12) and the projections that they tend to
(eq. 13 and 16). The paper shows G and G-Mod go to C, G-Mod later, and a small gap from C to S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtangent import theory
from fedtangent._src.comparison.verdicts import EXACT, MARGIN, Verdict
from fedtangent._src.experiments.lab.results import Claim, Outcome, disagreeing, interval, log_slope, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd.problems import Problem, classification, off, simulated
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.local_gd.max_margin import DivergenceError

METHODS = ("G", "G-Mod")
NEAR = 0.1  # a distance of directions that a figure shows as near; that of two unrelated models is 1.4
INSIDE = 1e-3  # a model counts as inside the feasible sets if its margins are at least 1 less this
HARMONIC, HARMONIC_MARGIN = -1.0, 0.25  # log-log slope of a distance that falls as 1/k, and its tolerance
NO_PULL = 700.0  # ln(1 / lambda) of a proximal term too weak to change any number

REMARKS = (
    "C minimises (1), the mean of the nodes' losses, as its loss on the 'global dataset' is not printed: on the sum of "
    "all examples' losses descent with eta = .01 diverges at d = 1500",
    "eta = .01 on a node's sum (eq. 12) lifts a margin from 0 to about eta d in one step, where little is left to "
    "descend: G is not the exact solution of eq. 12, which is shown beside it",
    "the variance of z_i is not printed. With at least as many dimensions as examples some model fits all labels "
    "whatever it is, so the global feasible set is not empty; below, fedtangent.theory.feasible_sets decides, and "
    "raises with a certificate where it is",
    "distances are from round 2 on: algorithm 3 stays at 0 in its first round",
)


@dataclass(frozen=True)
class ExponentialSettings:
    """The paper's settings of Local-GD on eq. (12)."""

    num_nodes: int = within(10, least=2)
    pull: float = within(1e-4, above=0)  # lambda
    local_steps: int = within(150, least=2)
    num_rounds: int = within(120, least=4)
    learning_rate: float = within(0.01, above=0)
    centralised_steps: int = 20_000


@dataclass(frozen=True)
class HalfspaceSettings(ExponentialSettings):
    """The settings of fig. 1(d); ``spread`` is the standard deviation of the elements of z_i (of w* it is 1)."""

    examples_per_node: int = 50
    dimension: int = 1500
    spread: float = within(0.5, at_least=0)
    projection_rounds: int = within(500, least=8)


class Classified(NamedTuple):
    """Trained models of one problem, in its coordinates."""

    problem: Problem
    sets: theory.FeasibleSets
    paths: dict[str, np.ndarray]  # by METHODS, [R + 1, r]
    centralised: np.ndarray  # [r], C
    machine: np.ndarray  # [r], S, the support vector machine

    def to(self, model: np.ndarray) -> dict[str, np.ndarray]:
        """Computes the distances of directions of both methods to ``model`` after rounds 2, 3, ..: [R - 1] each."""
        return {name: theory.direction_distance(path[2:], model) for name, path in self.paths.items()}


def classified(s: ExponentialSettings, problem: Problem, *, simulate: bool = True) -> Classified:
    """Computes all models of a problem; METHODS by the engine, or without ``simulate`` by the descent in the dual.

    Needs 64-bit types. Raises ``ValueError`` if the examples are not separable.
    """
    x, y, nodes = problem.x, problem.y, problem.partition
    sets = theory.feasible_sets(x, y, nodes, separable=x.shape[1] < len(y))  # with r = n all labels can be fitted
    local: dict[str, Any] = {"learning_rate": s.learning_rate, "local_steps": s.local_steps,
                             "loss": "exponential_sum", "mu": s.pull}  # fmt: skip
    paths = {
        name: simulated(problem, recipe, s.num_rounds, **local) if simulate else in_dual(s, sets, name, s.local_steps)
        for name, recipe in zip(METHODS, ("fed_prox", "modified_local_gd"), strict=True)
    }
    central = descended(s, sets, 1 / s.num_nodes)
    if central is None:
        raise DivergenceError(
            f"learning_rate: got {s.learning_rate:g}, at which the centralised model diverges, must be less"
        )
    return Classified(problem, sets, paths, central, support_vector_machine(x, y))


def tried(s: ExponentialSettings, problem: Problem, *, simulate: bool) -> Classified | None:
    """Returns ``classified`` of a problem whose labels some model fits; None if descent diverges at this rate."""
    try:
        one = classified(s, problem, simulate=simulate)
    except DivergenceError:
        return None
    return one if all(np.isfinite(path).all() for path in one.paths.values()) else None


def left_out(missing: list[str], runs: int) -> tuple[str, ...]:
    """Returns a remark on the runs that diverged, if any."""
    return (f"{len(missing)} of {runs} runs diverged and are left out: {'; '.join(missing)}",) if missing else ()


def descended(s: ExponentialSettings, sets: theory.FeasibleSets, factor: float) -> np.ndarray | None:
    """Trains a model on ``factor`` times the sum of all examples' losses, [r]; None if it diverges."""
    rate, steps = s.learning_rate * factor, s.centralised_steps
    try:
        return theory.exponential_models(sets.pooled(), 1, NO_PULL, learning_rate=rate, local_steps=steps)[-1]
    except DivergenceError:
        return None


def support_vector_machine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes scikit-learn's hard-margin machine [r]; mirrored examples make its intercept 0, as eq. (15) has none."""
    from sklearn.svm import SVC

    machine = SVC(kernel="linear", C=1e12, tol=1e-9, cache_size=500)
    machine.fit(np.concatenate([x, -x]), np.concatenate([y, -y]))
    return np.asarray(machine.coef_[0])


def in_dual(s: ExponentialSettings, sets: theory.FeasibleSets, name: str, steps: int) -> np.ndarray:
    """Computes the model of one of METHODS after every round of ``steps`` local steps, [R + 1, r], in the dual."""
    alpha = theory.halpern(s.num_rounds, 0) if name == "G-Mod" else None
    return theory.exponential_models(
        sets, s.num_rounds, np.log(1 / s.pull), learning_rate=s.learning_rate, local_steps=steps, alpha=alpha
    )


def _to_dual(s: ExponentialSettings, one: Classified, name: str, path: np.ndarray, steps: int) -> float:
    """Computes the distance of ``path`` from ``in_dual`` with that number of local steps; infinite if this diverges."""
    try:
        return off(path, in_dual(s, one.sets, name, steps))
    except DivergenceError:
        return np.inf


def exact_verdict(s: ExponentialSettings, found: list[Classified], sizes: str) -> Verdict:
    """Checks that the engine's models equal descent in the dual in every round; control: with one local step."""
    worst, wrong = 0.0, np.inf
    for one in found:
        for name, path in one.paths.items():
            away = [_to_dual(s, one, name, path, count) for count in (s.local_steps, 1)]
            worst, wrong = max(worst, away[0]), min(wrong, away[1])
    said = f"{worst:.1e} apart at most", f"<= {EXACT:g}", worst <= EXACT if found else None
    return Verdict.of("Local-GD eq. (12)", "simulation is descent in the dual, every round of G and G-Mod", sizes, said,
                      ("L = 1", f"{wrong:.1e} apart", wrong > MARGIN * EXACT if found else None))  # fmt: skip


def run(study: Study) -> Outcome:
    """Trains on every seed's problem and measures the distances by round."""
    s, found, rows, lines = study.settings, list[Classified](), list[dict[str, Any]](), list[dict[str, Any]]()
    missing = list[str]()
    for seed in study.each_seed():
        problem = classification(seed, s.num_nodes, s.examples_per_node, s.dimension, s.spread)
        one = tried(s, problem.in_span(), simulate=True)
        if one is None:
            missing.append(f"seed {seed}")
            continue
        ideal = in_theory(s, one)
        found.append(one)
        rows.append({"seed": seed, **row(s, one), **theory_row(s, one, ideal)})
        lines.append(ideal)
        study.keep([
            Metric(r + 2, name, seed, "train", f"distance to {to}", float(values[r]), 0, 0)
            for to, model in (("C", one.centralised), ("S", one.machine)) for name, values in one.to(model).items()
            for r in range(s.num_rounds - 1)
        ])  # fmt: skip
    if not rows:
        return Outcome((), [], failed=left_out(missing, len(missing)))
    _draw(study, found[0], lines[0])
    verdicts = (exact_verdict(s, found, f"d = {s.dimension}"), *verdicts_of(rows, f"d = {s.dimension}"))
    remarks = (*REMARKS, *left_out(missing, len(rows) + len(missing)))
    said = claims(rows) if len(rows) > 1 else ()
    return Outcome(_sheets(s, rows), rows, said, {}, remarks, disagreeing(verdicts), verdicts)


def row(s: ExponentialSettings, one: Classified) -> dict[str, Any]:
    """Computes distances to C at round 2, half of the rounds and the end, and to S, the SVM, at the end."""
    to_c, to_s = one.to(one.centralised), one.to(one.machine)
    g, mod = METHODS
    return {
        **{f"{name} to C, {when}": float(to_c[name][at]) for name in METHODS
           for when, at in (("start", 0), ("half", s.num_rounds // 2 - 2), ("end", -1))},
        **{f"{name} to S": float(to_s[name][-1]) for name in METHODS},
        "C to S": float(theory.direction_distance(one.centralised, one.machine)),
        "G to G-Mod": float(theory.direction_distance(one.paths[g][-1], one.paths[mod][-1])),
    }  # fmt: skip


def in_theory(s: HalfspaceSettings, one: Classified) -> dict[str, np.ndarray]:
    """Computes the models of exact local solutions, [R + 1, r], of K rounds of projections, [K + 1, r], and S, [r]."""
    rounds = s.projection_rounds
    return {
        "exact": theory.exponential_models(one.sets, s.num_rounds, np.log(1 / s.pull)),
        "projected": theory.parallel_projections(one.sets, rounds),
        "drawn back": theory.parallel_projections(one.sets, rounds, alpha=theory.halpern(rounds, 0)),
        "ideal": theory.hard_margin(one.sets),
    }


def theory_row(s: HalfspaceSettings, one: Classified, ideal: dict[str, np.ndarray]) -> dict[str, Any]:
    """Computes distances of theory's models to S, and of G to these models."""
    best, r = ideal["ideal"], s.num_rounds
    away = {name: theory.direction_distance(ideal[name][2:], best) for name in ("projected", "drawn back")}
    whole, last = descended(s, one.sets, 1.0), one.paths["G"][-1]
    return {
        "G to exact": float(theory.direction_distance(last, ideal["exact"][-1])),
        "G to projected": float(theory.direction_distance(last, ideal["projected"][min(r, s.projection_rounds)])),
        "exact to S": float(theory.direction_distance(ideal["exact"][-1], best)),
        "S to ideal": float(theory.direction_distance(one.machine, best)),
        "first round to ideal": float(theory.direction_distance(ideal["projected"][1], best)),
        **{f"{name} to S": float(values[-1]) for name, values in away.items()},
        **{f"{name} slope": slope(values) for name, values in away.items()},
        "least margin": float(one.sets.margins(ideal["projected"][-1]).min()),
        "least margin of round 1": float(one.sets.margins(ideal["projected"][1]).min()),
        "C of sums to S": None if whole is None else float(theory.direction_distance(whole, one.machine)),
    }


def slope(values: np.ndarray) -> float:
    """Computes the slope of ln distance against ln round over the later half of ``values``, of rounds 2, 3, .. ."""
    late = slice(len(values) // 2, None)
    rounds = np.arange(2, len(values) + 2)
    return log_slope(rounds[late], values[late])


def verdicts_of(rows: list[dict[str, Any]], sizes: str) -> tuple[Verdict, ...]:
    """Checks that S solves eq. (15), projections end in all feasible sets, and drawn back they approach S as 1/k."""

    def over(key: str) -> np.ndarray:
        return np.array([r[key] for r in rows])

    machine, first = over("S to ideal").max(), over("first round to ideal").min()
    lacking, at_first = 1 - over("least margin").min(), 1 - over("least margin of round 1").max()
    falling, steady = (
        np.abs(over("drawn back slope") - HARMONIC).max(),
        np.abs(over("projected slope") - HARMONIC).min(),
    )
    return (
        Verdict.of("Local-GD eq. (15)", "scikit-learn's machine is the point of least norm", sizes,
                   (f"{machine:.1e} apart at most", "<= 1e-4", machine <= 1e-4),
                   ("the mean of the nodes' own machines", f"{first:.2g} apart", first > 1e-2)),
        Verdict.of("Local-GD Lemma 3", "projections end in all sets, constraint by constraint", sizes,
                   (f"{lacking:.1e} of a margin lacks", f"<= {INSIDE:g}", lacking <= INSIDE),
                   ("after one round", f"{at_first:.2g} lacks", at_first > INSIDE)),
        Verdict.of("Local-GD Lemma 4", "drawn back, the distance to S falls as 1/k: its slope", sizes,
                   (f"{over('drawn back slope').mean():.2f}, off by {falling:.2f} at most",
                    f"{HARMONIC:g} +- {HARMONIC_MARGIN:g}", falling <= HARMONIC_MARGIN),
                   ("not drawn back", f"{over('projected slope').mean():.2f}", steady > HARMONIC_MARGIN)),
    )  # fmt: skip


def claims(rows: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges the claims of fig. 1(d), on one row of ``row`` and ``theory_row`` for each seed."""

    def over(key: str) -> Any:
        return interval([r[key] for r in rows])

    later = [interval([r[f"{name} to C, end"] - r[f"{name} to C, half"] for r in rows]) for name in METHODS]
    slower = [interval([r[f"G-Mod to C, {when}"] - r[f"G to C, {when}"] for r in rows]) for when in ("half", "end")]
    found = [
        Claim(f"{name} comes near C (to {NEAR:g})", f"{over(f'{name} to C, end'):.3f}",
              over(f"{name} to C, end").below(NEAR)) for name in METHODS
    ]  # fmt: skip
    found += [
        Claim(f"{name} comes nearer to the last (end less half)", f"{change:.4f}", change.below())
        for name, change in zip(METHODS, later, strict=True)
    ]
    found += [
        Claim(f"G-Mod is behind G at {when} (distance to C)", f"{change:.4f}", change.above())
        for when, change in zip(("half the rounds", "the end"), slower, strict=True)
    ]
    found.append(Claim(f"C is near S (to {NEAR:g})", f"{over('C to S'):.3f}", over("C to S").below(NEAR)))
    if "projected to S" in rows[0]:
        away = over("projected to S")
        found.append(Claim("the limit of Local-GD's projections is not S (by .01)", f"{away:.3f}", away.above(0.01)))
    return tuple(found)


def _sheets(s: HalfspaceSettings, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    def columns(*keys: str) -> dict[str, str]:
        return {"seed": "{seed}"} | {key: f"{{{key}:.4g}}" for key in keys}

    half = [f"{name} to C, {when}" for name in METHODS for when in ("start", "half", "end")]
    return (
        table(f"Fig. 1(d): distance of directions, d = {s.dimension}, R = {s.num_rounds}", rows,
              columns(*half, "G to S", "G-Mod to S", "C to S", "G to G-Mod", "C of sums to S")),
        table(f"in theory: eq. 12 exactly, after {s.num_rounds} rounds; projections, eq. 13 and 16, after "
              f"{s.projection_rounds}", rows,
              columns("G to exact", "G to projected", "exact to S", "projected to S", "drawn back to S",
                      "projected slope", "drawn back slope", "least margin", "S to ideal")),
    )  # fmt: skip


def _draw(study: Study, one: Classified, ideal: dict[str, np.ndarray]) -> None:
    """Draws the distances by round of one seed."""
    s: HalfspaceSettings = study.settings
    rounds, long = np.arange(2, s.num_rounds + 1), np.arange(2, s.projection_rounds + 1)
    gap = np.full(len(rounds), float(theory.direction_distance(one.centralised, one.machine)))
    lines = {f"{name} to {to}": values for to, model in (("C", one.centralised), ("S", one.machine))
             for name, values in one.to(model).items()}  # fmt: skip
    lines["exact (12) to S"] = theory.direction_distance(ideal["exact"][2:], ideal["ideal"])
    away = {name: theory.direction_distance(ideal[name][2:], ideal["ideal"]) for name in ("projected", "drawn back")}
    harmonic = away["drawn back"][-1] * long[-1] / long
    panels = [
        BoundedPanel(f"trained, d = {s.dimension}", rounds, lines, {"C to S": gap}),
        BoundedPanel("projections, to S", long, away, {"1/k": harmonic}),
    ]
    bounded(panels, "Fig. 1(d): classification, distance of directions", ("round", "|w/|w| - w'/|w'||"), None,
            study.figures.path("fig1d"))  # fmt: skip


SMOKE = HalfspaceSettings(4, 1e-4, 40, 30, 0.05, 2000, 5, 60, 0.5, 400)
SCALES = {"halfspaces": by_scale(SMOKE, HalfspaceSettings())}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), exact=True, least_seeds=2),)
