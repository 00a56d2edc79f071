"""Fig. 1(d) of the Local-GD paper: on separable classification Local-GD comes near the centralised model's direction.

10 nodes of 50 examples, labels of halfspaces ``w_i* = w* + z_i``, d = 1500 inputs, proximal factor lambda = 1e-4, L =
150 local steps, R = 120 rounds, eta = .01. Plotted by round are the distances of directions ``|w / |w| - w' / |w'||``
of Local-GD (G) and Modified Local-GD (G-Mod) from the centralised model (C, exponential loss, 20,000 steps) and from
the hard-margin support vector machine (S). Theory is shown too: models with the local problems of eq. (12) of Local-GD
solved exactly, and the projections that they tend to for small lambda (eq. (13) and (16)). The paper shows that G and
G-Mod go to C, G-Mod later, and a small gap from C to S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fedtangent import theory
from fedtangent._src.comparison.verdicts import EXACT, MARGIN, Verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd.problems import Problem, classification, off, simulated
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
    """Settings of Local-GD on the exponential loss with a proximal term of factor ``pull`` (lambda in its eq. (12))."""

    num_nodes: int = within(10, least=2)
    pull: float = within(1e-4, above=0)  # lambda
    local_steps: int = within(150, least=2)
    num_rounds: int = within(120, least=4)
    learning_rate: float = within(0.01, above=0)
    centralised_steps: int = 20_000


@dataclass(frozen=True)
class HalfspaceSettings(ExponentialSettings):
    """Settings of fig. 1(d) of Local-GD; theory follows projections for ``projection_rounds`` rounds.

    The weights of the nodes' common true model are N(0, 1); a node's weights differ from them by N(0, ``spread``^2).
    """

    examples_per_node: int = 50
    dimension: int = 1500
    spread: float = within(0.5, at_least=0)
    projection_rounds: int = within(500, least=8)


class Classified(NamedTuple):
    """The trained models of one classification problem, in the r coordinates of ``problem.basis``.

    Attributes:
        sets: Feasible set of each node: the models that have margin 1 or more on its examples.
        paths: Global model of Local-GD ("G") and of Modified Local-GD ("G-Mod") after every round, [R + 1, r] each.
        centralised: Centralised model C, [r].
        machine: Hard-margin support vector machine S, [r].
    """

    problem: Problem
    sets: theory.FeasibleSets
    paths: dict[str, np.ndarray]
    centralised: np.ndarray
    machine: np.ndarray

    def to(self, model: np.ndarray) -> dict[str, np.ndarray]:
        """Computes the distances ``|w / |w| - w' / |w'||`` of both algorithms' models w to ``model`` w' (r weights).

        Returns them for Local-GD ("G") and Modified Local-GD ("G-Mod"), after rounds 2, 3, .., R: [R - 1] each.
        """
        return {name: theory.direction_distance(path[2:], model) for name, path in self.paths.items()}


def _classified(settings: ExponentialSettings, problem: Problem, *, simulate: bool = True) -> Classified:
    """Computes the models of Local-GD, Modified Local-GD, centralised training and the SVM on a problem, in float64.

    Args:
        settings: Settings.
        problem: The problem.
        simulate: Whether ``ft.simulate`` trains Local-GD and its modification; else descent in the dual variables does.

    Raises:
        ValueError: No model fits all labels.
        DivergenceError: The centralised model or descent in the dual variables diverges; it is a ``ValueError`` too.
    """
    x, y, nodes = problem.x, problem.y, problem.partition
    sets = theory.feasible_sets(x, y, nodes, separable=x.shape[1] < len(y))  # with r = n all labels can be fitted
    train = partial(simulated, problem, num_rounds=settings.num_rounds, learning_rate=settings.learning_rate)
    train = partial(train, local_steps=settings.local_steps, loss="exponential_sum", mu=settings.pull)
    paths = {
        name: train(recipe=recipe) if simulate else _in_dual(settings, sets, name, settings.local_steps)
        for name, recipe in zip(METHODS, ("fed_prox", "modified_local_gd"), strict=True)
    }
    central = _descended(settings, sets, 1 / settings.num_nodes)
    if central is None:
        fault = "at which the centralised model diverges, must be less"
        raise DivergenceError(f"learning_rate: got {settings.learning_rate:g}, {fault}")
    return Classified(problem, sets, paths, central, _support_vector_machine(x, y))


def tried(settings: ExponentialSettings, problem: Problem, *, simulate: bool) -> Classified | None:
    """Computes Local-GD, Modified Local-GD, the centralised model and the SVM of a problem; None if a model diverges.

    Args:
        settings: Settings.
        problem: The problem, whose labels some linear model fits.
        simulate: Whether ``ft.simulate`` trains Local-GD and its modification; else descent in the dual variables does.
    """
    try:
        one = _classified(settings, problem, simulate=simulate)
    except DivergenceError:
        return None
    return one if all(np.isfinite(path).all() for path in one.paths.values()) else None


def left_out(missing: list[str], runs: int) -> tuple[str, ...]:
    """Returns a remark that names the runs that diverged; () if none did.

    Args:
        missing: Names of the runs that diverged.
        runs: Number of all runs.
    """
    return (f"{len(missing)} of {runs} runs diverged and are left out: {'; '.join(missing)}",) if missing else ()


def _descended(settings: ExponentialSettings, sets: theory.FeasibleSets, factor: float) -> np.ndarray | None:
    """Trains the centralised model (r weights) by gradient descent; returns None if it diverges.

    The loss is ``factor`` times the sum of the exponential losses of all examples in ``sets``.
    """
    rate, steps = settings.learning_rate * factor, settings.centralised_steps
    try:
        return theory.exponential_models(sets.pooled(), 1, NO_PULL, learning_rate=rate, local_steps=steps)[-1]
    except DivergenceError:
        return None


def _support_vector_machine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes the weights [r] of the hard-margin support vector machine without intercept.

    It is fitted to the examples (x, y) and their mirror images (-x, -y), which make the intercept 0.
    """
    from sklearn.svm import SVC

    machine = SVC(kernel="linear", C=1e12, tol=1e-9, cache_size=500)
    machine.fit(np.concatenate([x, -x]), np.concatenate([y, -y]))
    return np.asarray(machine.coef_[0])


def _in_dual(settings: ExponentialSettings, sets: theory.FeasibleSets, name: str, steps: int) -> np.ndarray:
    """Computes Local-GD ("G") or its modification ("G-Mod") after every round, [R + 1, r], in the dual variables.

    ``sets`` has the nodes' examples in r coordinates, and ``steps`` is the number of local steps in a round.
    """
    alpha = theory.halpern(settings.num_rounds, 0) if name == "G-Mod" else None
    solve = partial(theory.exponential_models, sets, settings.num_rounds, np.log(1 / settings.pull))
    return solve(learning_rate=settings.learning_rate, local_steps=steps, alpha=alpha)


def _to_dual(settings: ExponentialSettings, one: Classified, name: str, path: np.ndarray, steps: int) -> float:
    """Computes the largest relative distance of the models ``path`` from the models of descent in the dual variables.

    The distance is the largest of all rounds, divided by the largest norm of a model from the dual variables (``off``).
    It is infinite if descent in the dual variables diverges.

    Args:
        settings: Settings.
        one: The trained models of a problem; only the feasible sets in it are used.
        name: Method to compute in the dual variables: "G" (Local-GD) or "G-Mod" (its modification).
        path: Models after every round, [R + 1, r].
        steps: Number of local steps in a round of descent in the dual variables.
    """
    try:
        return off(path, _in_dual(settings, one.sets, name, steps))
    except DivergenceError:
        return np.inf


def exact_verdict(settings: ExponentialSettings, results: list[Classified], sizes: str) -> Verdict:
    """Judges whether simulated models of Local-GD and Modified Local-GD equal an independent computation.

    This computation is gradient descent in the dual variables. The control is such descent with one local step a round.

    Args:
        settings: Settings.
        results: Trained models of each problem; if there are none, the verdict is undecided.
        sizes: Sizes of the problems, as text.
    """
    largest, control = 0.0, np.inf
    for one in results:
        for name, path in one.paths.items():
            largest = max(largest, _to_dual(settings, one, name, path, settings.local_steps))
            control = min(control, _to_dual(settings, one, name, path, 1))
    right = f"{largest:.1e} apart at most", f"<= {EXACT:g}", largest <= EXACT if results else None
    wrong = "L = 1", f"{control:.1e} apart", control > MARGIN * EXACT if results else None
    statement = "simulation is descent in the dual, every round of G and G-Mod"
    return Verdict.of("Local-GD eq. (12)", statement, sizes, right, wrong)


def run(study: Study) -> lab.Outcome:
    """Computes how far G and G-Mod are from C and S in each round (fig. 1(d) of Local-GD), and compares with theory.

    G is Local-GD, G-Mod Modified Local-GD, C centralised training and S the support vector machine. A seed on which a
    model diverges is left out, and a remark names it; with fewer than two other seeds there are no claims.
    """
    settings, results, rows, lines = study.settings, list[Classified](), list[lab.Row](), list[dict[str, np.ndarray]]()
    missing = list[str]()
    for seed in study.each_seed():
        problem = classification(
            seed, settings.num_nodes, settings.examples_per_node, settings.dimension, settings.spread
        )
        one = tried(settings, problem.in_span(), simulate=True)
        if one is None:
            missing.append(f"seed {seed}")
            continue
        ideal = _in_theory(settings, one)
        results.append(one)
        rows.append({"seed": seed, **row(settings, one), **_theory_row(settings, one, ideal)})
        lines.append(ideal)
        for to, model in (("C", one.centralised), ("S", one.machine)):
            for name, values in one.to(model).items():
                rounds = range(2, settings.num_rounds + 1)
                study.keep(lab.metric_rows(name, seed, rounds, {f"distance to {to}": values}))
    if not rows:
        return lab.Outcome((), [], failed=left_out(missing, len(missing)))
    _draw(study, results[0], lines[0])
    verdicts = (
        exact_verdict(settings, results, f"d = {settings.dimension}"),
        *_verdicts_of(rows, f"d = {settings.dimension}"),
    )
    remarks = (*REMARKS, *left_out(missing, len(rows) + len(missing)))
    judged = claims(rows) if len(rows) > 1 else ()
    return lab.Outcome(_sheets(settings, rows), rows, judged, {}, remarks, lab.disagreeing(verdicts), verdicts)


def row(settings: ExponentialSettings, one: Classified) -> lab.Row:
    """Builds one problem's row: distances in direction between Local-GD, Modified Local-GD, centralised model and SVM.

    The distances of Local-GD and Modified Local-GD to the centralised model are at the start (round 2), in the middle
    and at the end of training. All other distances are at the end.

    Args:
        settings: Settings with the number of rounds.
        one: The problem's trained models.
    """
    to_c, to_s = one.to(one.centralised), one.to(one.machine)
    times = {"start": 0, "half": settings.num_rounds // 2 - 2, "end": -1}
    (g, mod), distance = METHODS, theory.direction_distance
    return {
        **{f"{name} to C, {when}": float(to_c[name][at]) for name in METHODS for when, at in times.items()},
        **{f"{name} to S": float(to_s[name][-1]) for name in METHODS},
        "C to S": float(distance(one.centralised, one.machine)),
        "G to G-Mod": float(distance(one.paths[g][-1], one.paths[mod][-1])),
    }


def _in_theory(settings: HalfspaceSettings, one: Classified) -> dict[str, np.ndarray]:
    """Computes the models of theory: of local problems solved exactly, and of projections onto feasible sets.

    Returns "exact" [R + 1, r], Local-GD with exact solutions, for R rounds; "projected" and "drawn back" [K + 1, r],
    the projections of Local-GD and of Modified Local-GD, for K = ``projection_rounds`` rounds; and "ideal" [r], the
    hard-margin support vector machine. Models have r weights.
    """
    rounds = settings.projection_rounds
    return {
        "exact": theory.exponential_models(one.sets, settings.num_rounds, np.log(1 / settings.pull)),
        "projected": theory.parallel_projections(one.sets, rounds),
        "drawn back": theory.parallel_projections(one.sets, rounds, alpha=theory.halpern(rounds, 0)),
        "ideal": theory.hard_margin(one.sets),
    }


def _theory_row(settings: HalfspaceSettings, one: Classified, ideal: dict[str, np.ndarray]) -> lab.Row:
    """Computes entries of a row: distances of theory's models to the SVM and to Local-GD, their slopes, and margins.

    ``ideal`` has theory's models by name, from ``_in_theory``; ``one`` has the trained models of the same problem. If
    the centralised model of the summed losses diverges, the entry "C of sums to S" is None.
    """
    best, r = ideal["ideal"], settings.num_rounds
    away = {name: theory.direction_distance(ideal[name][2:], best) for name in ("projected", "drawn back")}
    whole, last = _descended(settings, one.sets, 1.0), one.paths["G"][-1]
    return {
        "G to exact": float(theory.direction_distance(last, ideal["exact"][-1])),
        "G to projected": float(
            theory.direction_distance(last, ideal["projected"][min(r, settings.projection_rounds)])
        ),
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
    """Fits the slope of ln distance against ln round to the later half of ``values``, distances after round 2, 3, .."""
    late = slice(len(values) // 2, None)
    rounds = np.arange(2, len(values) + 2)
    return lab.log_slope(rounds[late], values[late])


def _verdicts_of(rows: list[lab.Row], sizes: str) -> tuple[Verdict, ...]:
    """Judges theory's claims on all seeds' rows; ``sizes`` names the dimension.

    The support vector machine is the model of least norm with margin 1 on all examples (eq. (15) of Local-GD).
    Projections end in the intersection of all nodes' feasible sets (Lemma 3 of Local-GD). The distance of Modified
    Local-GD's projections from the machine falls as 1/k with the round k (Lemma 4 of Local-GD).
    """

    def over(key: str) -> np.ndarray:
        return np.array([r[key] for r in rows])

    machine, first = over("S to ideal").max(), over("first round to ideal").min()
    least = "scikit-learn's machine is the point of least norm"
    right = f"{machine:.1e} apart at most", "<= 1e-4", machine <= 1e-4
    wrong = "the mean of the nodes' own machines", f"{first:.2g} apart", first > 1e-2
    verdicts = [Verdict.of("Local-GD eq. (15)", least, sizes, right, wrong)]
    lacking, at_first = 1 - over("least margin").min(), 1 - over("least margin of round 1").max()
    inside = "projections end in all sets, constraint by constraint"
    right = f"{lacking:.1e} of a margin lacks", f"<= {INSIDE:g}", lacking <= INSIDE
    wrong = "after one round", f"{at_first:.2g} lacks", at_first > INSIDE
    verdicts.append(Verdict.of("Local-GD Lemma 3", inside, sizes, right, wrong))
    back, projected = over("drawn back slope"), over("projected slope")
    falling, steady = np.abs(back - HARMONIC).max(), np.abs(projected - HARMONIC).min()
    harmonic, measured = "drawn back, the distance to S falls as 1/k: its slope", f"off by {falling:.2f} at most"
    expected = f"{HARMONIC:g} +- {HARMONIC_MARGIN:g}"
    right = f"{back.mean():.2f}, {measured}", expected, falling <= HARMONIC_MARGIN
    wrong = "not drawn back", f"{projected.mean():.2f}", steady > HARMONIC_MARGIN
    return (*verdicts, Verdict.of("Local-GD Lemma 4", harmonic, sizes, right, wrong))


def claims(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges the claims of fig. 1(d) of Local-GD by intervals over seeds.

    Each row has the entries of ``row`` for one seed. The claim about projections also needs those of ``_theory_row``,
    and is left out without them.
    """

    def over(key: str, less: str = "") -> lab.MeanInterval:
        return lab.interval(r[key] - r[less] if less else r[key] for r in rows)

    verdicts = [over(f"{n} to C, end").claim_below(f"{n} comes near C (to {NEAR:g})", "{:.3f}", NEAR) for n in METHODS]
    for name in METHODS:
        change = over(f"{name} to C, end", f"{name} to C, half")
        verdicts.append(change.claim_below(f"{name} comes nearer to the last (end less half)", "{:.4f}"))
    for words, when in (("half the rounds", "half"), ("the end", "end")):
        behind = over(f"G-Mod to C, {when}", f"G to C, {when}")
        verdicts.append(behind.claim_above(f"G-Mod is behind G at {words} (distance to C)", "{:.4f}"))
    verdicts.append(over("C to S").claim_below(f"C is near S (to {NEAR:g})", "{:.3f}", NEAR))
    if "projected to S" in rows[0]:
        away = over("projected to S")
        verdicts.append(away.claim_above("the limit of Local-GD's projections is not S (by .01)", "{:.3f}", 0.01))
    return tuple(verdicts)


def _sheets(settings: HalfspaceSettings, rows: list[lab.Row]) -> tuple[lab.Sheet, ...]:
    def columns(*keys: str) -> str:
        return " | ".join(["seed: {seed}", *(f"{key}: {{{key}:.4g}}" for key in keys)])

    ways = [f"{name} to C, {when}" for name in METHODS for when in ("start", "half", "end")]
    trained = columns(*ways, "G to S", "G-Mod to S", "C to S", "G to G-Mod", "C of sums to S")
    ideal = ("G to exact", "G to projected", "exact to S", "projected to S", "drawn back to S", "projected slope")
    title = f"in theory: eq. 12 exactly, after {settings.num_rounds} rounds; projections, eq. 13 and 16, after"
    return (
        lab.table(
            f"Fig. 1(d): distance of directions, d = {settings.dimension}, R = {settings.num_rounds}", rows, trained
        ),
        lab.table(
            f"{title} {settings.projection_rounds}",
            rows,
            columns(*ideal, "drawn back slope", "least margin", "S to ideal"),
        ),
    )


def _draw(study: Study, one: Classified, ideal: dict[str, np.ndarray]) -> None:
    """Plots by round how far models' directions are from a reference model, for one seed.

    Left: distances of the trained models from the centralised model (C) and the support vector machine (S), and the
    distance from S of Local-GD with exact local solutions, as theory computes it. Right: distances from S of the models
    that projections onto the nodes' feasible sets give.

    Args:
        study: Settings, and where the figure is written.
        one: Trained models of one seed, with C and S.
        ideal: Theory's models by name, from ``_in_theory``.
    """
    settings, distance = study.settings, theory.direction_distance
    rounds, long = np.arange(2, settings.num_rounds + 1), np.arange(2, settings.projection_rounds + 1)
    gap = np.full(len(rounds), float(distance(one.centralised, one.machine)))
    ends = {"C": one.centralised, "S": one.machine}
    lines = {f"{name} to {to}": v for to, model in ends.items() for name, v in one.to(model).items()}
    lines["exact (12) to S"] = distance(ideal["exact"][2:], ideal["ideal"])
    away = {name: distance(ideal[name][2:], ideal["ideal"]) for name in ("projected", "drawn back")}
    harmonic = away["drawn back"][-1] * long[-1] / long
    panels = [
        BoundedPanel(f"trained, d = {settings.dimension}", rounds, lines, {"C to S": gap}),
        BoundedPanel("projections, to S", long, away, {"1/k": harmonic}),
    ]
    names, title = ("round", "|w/|w| - w'/|w'||"), "Fig. 1(d): classification, distance of directions"
    bounded(panels, title, names, None, study.figures.path("fig1d"))


SMOKE = HalfspaceSettings(4, 1e-4, 40, 30, 0.05, 2000, 5, 60, 0.5, 400)
SCALES = {"halfspaces": by_scale(SMOKE, HalfspaceSettings())}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), exact=True, least_seeds=2),)
