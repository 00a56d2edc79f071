"""Fig. 1(e) to 1(g) and fig. 2 of the Local-GD paper: classification by dimension, and of divided labels.

Fig. 1(e) to 1(g) repeat the training of fig. 1(d) for d from 500 to 4000. Fig. 1(e) has the distance of directions of
Local-GD (G), Modified Local-GD (G-Mod) and the support vector machine (S) to the centralised model (C); fig. 1(f) has
the distance of G, G-Mod and C to S; fig. 1(g) has the test accuracy of all four, on new inputs that each node's true
model labels. The paper shows that distances fall with d, that G-Mod is slightly farther from C than G, and that
accuracies fall with d and are much alike.

Fig. 2: 500 examples ``y = sign(x' w*)``, d = 1500, each class divided among 10 nodes by Dir(alpha), R = 150 rounds, the
centralised model trained 22,500 steps, the rest as in fig. 1(d). It has the distance of directions to C by round, and
test accuracy. The paper shows that G and G-Mod still go to C in direction, with much the same accuracy; it does not
give the values of alpha.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedtangent import theory
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import fig1d
from fedtangent._src.experiments.local_gd.fig1d import (
    METHODS,
    NEAR,
    REMARKS,
    Classified,
    ExponentialSettings,
    exact_verdict,
    left_out,
    tried,
)
from fedtangent._src.experiments.local_gd.problems import classification, dirichlet_halfspaces
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent.types import Verdict

ALIKE = 0.02  # difference of two accuracies that a figure does not show
ALLOWED = 4.5  # standard errors that the largest deviation of some hundred accuracies may have
TOWARDS = {  # of each part: a line's label, and its entry of a row
    "e": {"G": "G to C", "G-Mod": "G-Mod to C", "S": "S to C"},
    "f": {"G": "G to S", "G-Mod": "G-Mod to S", "C": "S to C"},
    "g": {name: f"accuracy {name}" for name in (*METHODS, "C", "S")},
}
TITLES = {"e": "distance to C", "f": "distance to S", "g": "test accuracy"}


@dataclass(frozen=True)
class HalfspacesByDimension(ExponentialSettings):
    """Settings of fig. 1(e) to 1(g) of Local-GD: as in fig. 1(d), for several dimensions, and with test inputs."""

    examples_per_node: int = 50
    dimensions: tuple[int, ...] = within((500, 750, 1000, 1500, 2000, 3000, 4000), count=3)
    spread: float = within(0.5, at_least=0)
    test_inputs: int = within(200, least=10)  # of a node
    simulated_seeds: int = 1  # other seeds descend in the dual, which the simulated ones are checked against


def check(study: Study) -> None:
    """Raises ``ValueError`` for fewer dimensions than examples, where it may be that no model fits all labels."""
    settings = study.settings
    total, least = settings.num_nodes * settings.examples_per_node, min(settings.dimensions)
    if least < total:
        raise ValueError(f"dimensions: got {least}, must be at least {total}, the examples of all nodes")


def _run(part: str, study: Study) -> lab.Outcome:
    """Runs fig. 1(e), 1(f) or 1(g) of Local-GD (``part`` "e", "f" or "g"): trains in every dimension on every seed.

    Measured are distances of directions or test accuracies of the last models. A run that diverges is left out, and its
    seed has no part in the claims.
    """
    settings, simulated, rows, missing = study.settings, list[Classified](), list[lab.Row](), list[str]()
    dimensions = sorted(settings.dimensions)
    for seed in study.each_seed():
        for d in dimensions:
            problem = classification(seed, settings.num_nodes, settings.examples_per_node, d, settings.spread).in_span()
            simulate = seed in study.seeds[: settings.simulated_seeds]
            one = tried(settings, problem, simulate=simulate)
            if one is None:
                missing.append(f"seed {seed}, d = {d}")
                continue
            simulated += [one] if simulate else []
            rows.append({"seed": seed, "dimension": d, **row(one), **accuracies(one, seed, settings.test_inputs)})
            for name, key in TOWARDS[part].items():
                values = {f"fig1{part}": rows[-1][key]}
                study.keep(lab.metric_rows(f"{name} d={d}", seed, settings.num_rounds, values, "test"))
    if not rows:
        return lab.Outcome((), [], failed=left_out(missing, len(missing)))
    mean_rows, sizes = lab.means(rows, "dimension"), f"d = {', '.join(map(str, dimensions))}"
    _draw(study, part, mean_rows)
    verdicts = [exact_verdict(settings, simulated, sizes)]
    if part == "g":
        verdicts.append(accuracy_verdict(rows, settings.num_nodes * settings.test_inputs, sizes))
    lines = TOWARDS[part] | ({f"exact {name}": f"exact {name}" for name in TOWARDS["g"]} if part == "g" else {})
    lines |= {"G to G-Mod": "G to G-Mod"} if part != "g" else {}
    columns = " | ".join(["d: {dimension}", "runs: {runs}", *(f"{name}: {{{key}:.4f}}" for name, key in lines.items())])
    sheet = lab.table(f"Fig. 1({part}): {TITLES[part]}, means of the runs", mean_rows, columns)
    remarks = (*REMARKS[:-1], *left_out(missing, len(rows) + len(missing)))
    whole = [group for group in lab.grouped(rows, "seed").values() if len(group) == len(dimensions)]
    judge = {"e": claims_e, "f": claims_f, "g": claims_g}[part]
    claims = judge([r for group in whole for r in group]) if len(whole) > 1 else ()
    return lab.Outcome((sheet,), rows, claims, {}, remarks, lab.disagreeing(verdicts), tuple(verdicts))


def _models(one: Classified) -> dict[str, np.ndarray]:
    """Returns the trained models by name, r coordinates in ``problem.basis`` each.

    They are Local-GD ("G") and Modified Local-GD ("G-Mod") after the last round, the centralised model ("C") and the
    support vector machine ("S").
    """
    return {**{name: path[-1] for name, path in one.paths.items()}, "C": one.centralised, "S": one.machine}


def row(one: Classified) -> dict[str, float]:
    """Computes the distances of directions between Local-GD, its modification, centralised model and SVM of a problem.

    Keys of the result are such as "G to C"; the models (``_models``) are the last ones.
    """
    of = _models(one)
    pairs = (("G", "C"), ("G-Mod", "C"), ("S", "C"), ("G", "S"), ("G-Mod", "S"), ("G", "G-Mod"))
    return {f"{a} to {b}": float(theory.direction_distance(of[a], of[b])) for a, b in pairs}


def accuracies(one: Classified, seed: int, test_inputs: int) -> dict[str, float]:
    """Computes the test accuracies of a problem's four models (``_models``) on new N(0, 1) inputs, and expected ones.

    The expected accuracy is 1 - angle / pi, with the angle between a model and a node's true model; all are means over
    nodes. Keys of the result are such as "accuracy G" and "exact G", the measured and the expected one of Local-GD (G).

    Args:
        one: Trained models.
        seed: Seed of the inputs.
        test_inputs: Number of inputs of each node.
    """
    truths, dimension = one.problem.truths, one.problem.dimension
    rng, by_name = np.random.default_rng([seed, dimension, 1]), dict[str, float]()
    lifted = np.stack([one.problem.lifted(w) for w in _models(one).values()])
    right = np.zeros(len(lifted))
    for truth in truths:
        x = rng.standard_normal((test_inputs, dimension))
        right += np.mean((x @ lifted.T >= 0) == (x @ truth >= 0)[:, None], axis=0) / len(truths)
    for name, w, value in zip(_models(one), lifted, right, strict=True):
        cosine = truths @ w / np.linalg.norm(truths, axis=1) / np.linalg.norm(w)
        by_name[f"accuracy {name}"] = float(value)
        by_name[f"exact {name}"] = float(1 - np.mean(np.arccos(cosine)) / np.pi)
    return by_name


def accuracy_verdict(rows: list[lab.Row], inputs: int, sizes: str) -> Verdict:
    """Judges whether test accuracies of Local-GD, its modification, C and the SVM are 1 - angle / pi, as expected.

    C is the centralised model, the angle is between a model and the nodes' true models, and deviations of up to 4.5
    standard errors are allowed. The control is 1/2, the accuracy of guessing, which the same test must reject.

    Args:
        rows: Rows with the entries of ``accuracies``.
        inputs: Number of test inputs of all nodes.
        sizes: Sizes of the problems, as text.
    """
    names = TOWARDS["g"]
    measured = np.array([[r[f"accuracy {name}"] for name in names] for r in rows])
    exact = np.array([[r[f"exact {name}"] for name in names] for r in rows])
    error = np.sqrt(exact * (1 - exact) / inputs)
    largest, control = np.max(np.abs(measured - exact) / error), np.max(np.abs(measured - 0.5) / error)
    right = f"{largest:.1f} SE at most", f"<= {ALLOWED} SE", largest <= ALLOWED
    wrong = "1/2", f"{control:.1f} SE", control > ALLOWED
    return Verdict.of("Local-GD section 5", "accuracy is 1 - angle / pi", sizes, right, wrong)


def _by_dimension(rows: list[lab.Row], key: str) -> list[float]:
    """Computes for each seed the slope of the rows' entry ``key`` against log10 of the dimension."""
    return [
        float(np.polyfit(np.log10([r["dimension"] for r in group]), [r[key] for r in group], 1)[0])
        for group in lab.grouped(rows, "seed").values()
    ]


def _falls(rows: list[lab.Row], key: str, name: str) -> lab.Claim:
    """Judges whether the rows' entry ``key`` gets smaller as the dimension d grows; ``name`` names it in the claim."""
    return lab.interval(_by_dimension(rows, key)).claim_below(f"{name} falls with d (by a factor of 10)", "{:.3f}")


def claims_e(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges the two claims of Local-GD's fig. 1(e) about distances in direction from the centralised model.

    The distances of Local-GD and of Modified Local-GD should fall with the dimension d. Averaged over d, Modified
    Local-GD should be farther away than Local-GD.

    Args:
        rows: Rows of the table, one for each seed and dimension.
    """
    falls = [_falls(rows, f"{name} to C", f"{name} to C") for name in METHODS]
    seeds = lab.grouped(rows, "seed").values()
    behind = lab.interval(np.mean([r["G-Mod to C"] - r["G to C"] for r in group]) for group in seeds)
    return (*falls, behind.claim_above("G-Mod is farther from C than G (mean over d)", "{:.4f}"))


def claims_f(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges Local-GD's fig. 1(f): distances in direction to the support vector machine fall with the dimension d.

    They are the distances of Local-GD, Modified Local-GD and the centralised model.
    """
    return tuple(_falls(rows, key, f"{name} to S") for name, key in TOWARDS["f"].items())


def claims_g(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges Local-GD's fig. 1(g): test accuracies fall with the dimension d and are much alike.

    Local-GD and Modified Local-GD should be as accurate as the centralised model.
    """
    claims = [_falls(rows, key, f"accuracy of {name}") for name, key in TOWARDS["g"].items()]
    for name in METHODS:
        groups = lab.grouped(rows, "seed").values()
        apart = lab.interval(np.mean([abs(r[f"accuracy {name}"] - r["accuracy C"]) for r in group]) for group in groups)
        alike = f"{name} and C are as accurate (to {ALIKE:g}, mean over d)"
        claims.append(apart.claim_below(alike, "{:.4f}", ALIKE))
    return tuple(claims)


def _draw(study: Study, part: str, mean_rows: list[lab.Row]) -> None:
    d = np.array([m["dimension"] for m in mean_rows])
    lines = {name: np.array([m[key] for m in mean_rows]) for name, key in TOWARDS[part].items()}
    panel = BoundedPanel(f"round {study.settings.num_rounds}, means of the runs", d, lines, {})
    lowest, names = 0.95 * min(float(v.min()) for v in lines.values()), ("dimension d", TITLES[part])
    bounded([panel], f"Fig. 1({part}): classification", names, lowest, study.figures.path(f"fig1{part}"))


SMOKE = HalfspacesByDimension(4, 1e-4, 40, 30, 0.05, 2000, 5, (20, 40, 80), 0.5, 100)
SCALES = {
    "halfspaces": by_scale(SMOKE, HalfspacesByDimension(dimensions=(500, 1000, 2000, 4000)), HalfspacesByDimension())
}
SUMMARIES = {
    "fig1e": "Local-GD, fig. 1(e): classification, distance of directions to the centralised model by d",
    "fig1f": "Local-GD, fig. 1(f): classification, distance of directions to the support vector machine by d",
    "fig1g": "Local-GD, fig. 1(g): classification, test accuracy by d",
}


@dataclass(frozen=True)
class DirichletSettings(ExponentialSettings):
    """Settings of fig. 2 of Local-GD; the paper does not give the values of alpha of the Dirichlet distribution."""

    num_examples: int = 500
    dimension: int = 1500
    alphas: tuple[float, ...] = within((0.1, 0.5, 1.0, 10.0), above=0)
    test_inputs: int = within(200, least=10)
    simulated_seeds: int = 1  # other seeds descend in the dual, which the simulated ones are checked against


def check_dirichlet(study: Study) -> None:
    """Raises ``ValueError`` for fewer examples than nodes, or more examples than input dimensions."""
    settings = study.settings
    if not settings.num_nodes <= settings.num_examples <= settings.dimension:
        raise ValueError(
            f"num_examples: got {settings.num_examples}, must be from {settings.num_nodes} (num_nodes) to "
            f"{settings.dimension} (dimension)"
        )


def run(study: Study) -> lab.Outcome:
    """Divides labels among nodes by Dir(alpha), trains for every alpha and seed, and compares the models.

    Repeats fig. 2 of Local-GD: distances of directions between Local-GD, Modified Local-GD, the centralised model and
    the support vector machine, and their test accuracies. A run (one alpha on one seed) that diverges is left out.
    """
    settings, simulated, rows = study.settings, list[Classified](), list[lab.Row]()
    missing, first = list[str](), dict[float, Classified]()
    for seed in study.each_seed():
        for alpha in settings.alphas:
            problem = dirichlet_halfspaces(
                seed, settings.num_nodes, settings.num_examples, settings.dimension, alpha
            ).in_span()
            simulate = seed in study.seeds[: settings.simulated_seeds]
            one, sizes = tried(settings, problem, simulate=simulate), problem.partition.sizes
            if one is None:
                missing.append(f"seed {seed}, alpha = {alpha:g}")
                continue
            simulated += [one] if simulate else []
            first.setdefault(alpha, one)
            nodes = {"smallest": int(sizes.min()), "largest": int(sizes.max()), "of one class": _one_class(one)}
            models = {**fig1d.row(settings, one), **accuracies(one, seed, settings.test_inputs)}
            rows.append({"seed": seed, "alpha": alpha, **nodes, **models})
            for name, values in one.to(one.centralised).items():
                rounds = range(2, settings.num_rounds + 1)
                study.keep(lab.metric_rows(f"{name} alpha={alpha:g}", seed, rounds, {"distance to C": values}))
    if not rows:
        return lab.Outcome((), [], failed=left_out(missing, len(missing)))
    _draw_dirichlet(study, first)
    distances = [f"{name} to C, {when}" for name in METHODS for when in ("half", "end")]
    numbers = {name: f"{{{name}:.4f}}" for name in (*distances, "G to S", "G-Mod to S", "C to S")}
    numbers |= {name: f"{{accuracy {name}:.4f}}" for name in (*METHODS, "C", "S")}
    columns = "alpha: {alpha:g} | runs: {runs} | smallest node: {smallest:.1f} | largest: {largest:.1f} | "
    columns += " | ".join(["nodes of one class: {of one class:.1f}", *(f"{n}: {form}" for n, form in numbers.items())])
    sheet = lab.table(
        "Fig. 2: distance of directions and test accuracy, means of the runs", lab.means(rows, "alpha"), columns
    )
    sizes_text = f"d = {settings.dimension}, alpha = {', '.join(f'{a:g}' for a in settings.alphas)}"
    accuracy = accuracy_verdict(rows, settings.num_nodes * settings.test_inputs, sizes_text)
    verdicts = (fig1d.exact_verdict(settings, simulated, sizes_text), accuracy)
    remarks = (
        *fig1d.REMARKS[:2],
        "the values of alpha are not printed; a node holds one example or more",
        *left_out(missing, len(rows) + len(missing)),
    )
    return lab.Outcome((sheet,), rows, claims(rows), {}, remarks, lab.disagreeing(verdicts), verdicts)


def _one_class(one: Classified) -> int:
    """Counts the nodes whose examples all have the same label."""
    partition, y = one.problem.partition, one.problem.y
    return sum(len(set(y[partition.client(i)])) == 1 for i in range(partition.num_clients))


def claims(rows: list[lab.Row]) -> tuple[lab.Claim, ...]:
    """Judges Local-GD's fig. 2 for each alpha of the Dirichlet distribution, by intervals over seeds.

    Local-GD and Modified Local-GD should come near the centralised model in direction, and be as accurate. An alpha
    with fewer than two rows, because its other runs diverged, has no claims.
    """
    claims = []
    for (alpha,), group in lab.grouped(rows, "alpha").items():
        if len(group) < 2:  # other runs diverged
            continue
        for name in METHODS:
            end = lab.interval(r[f"{name} to C, end"] for r in group)
            claims.append(end.claim_below(f"alpha {alpha:g}: {name} comes near C (to {NEAR:g})", "{:.4f}", NEAR))
            apart = lab.interval(abs(r[f"accuracy {name}"] - r["accuracy C"]) for r in group)
            alike = f"alpha {alpha:g}: {name} and C are as accurate (to {ALIKE:g})"
            claims.append(apart.claim_below(alike, "{:.4f}", ALIKE))
    return tuple(claims)


def _draw_dirichlet(study: Study, first: dict[float, Classified]) -> None:
    """Plots by round how far Local-GD and Modified Local-GD are from the centralised model, a panel for each alpha.

    alpha is the parameter of the Dirichlet distribution that divides the labels. ``first`` has for each alpha the
    models of the first seed that did not diverge.
    """
    rounds, panels = np.arange(2, study.settings.num_rounds + 1), []
    for alpha, one in first.items():
        lines = {f"{name} to C": v for name, v in one.to(one.centralised).items()}
        panels.append(BoundedPanel(f"alpha = {alpha:g}", rounds, lines, {}))
    lowest = 0.8 * min(float(values[-1]) for panel in panels for values in panel.measured.values())
    title = f"Fig. 2: classification, labels divided by Dir(alpha), d = {study.settings.dimension}"
    bounded(panels, title, ("round", "|w/|w| - w'/|w'||"), lowest, study.figures.path("fig2"))


SMOKE_DIRICHLET = DirichletSettings(4, 1e-4, 40, 30, 0.05, 2000, 24, 80, (0.5, 10.0), 100)
PAPER = DirichletSettings(num_rounds=150, centralised_steps=22_500)
DEFAULT = dataclasses.replace(PAPER, alphas=(0.1, 1.0))
SCALES_DIRICHLET = {"halfspaces": by_scale(SMOKE_DIRICHLET, DEFAULT, PAPER)}
SUMMARY_FIG2 = (
    "Fig. 2 of the Local-GD paper: classification whose labels a Dirichlet distribution divides among the nodes (B.1)."
)
_entry = partial(experiment, __name__, papers=("localgd",), exact=True, least_seeds=2)
ENTRIES = (
    *(_entry(partial(_run, part[0][-1]), SCALES, check=check, part=part) for part in SUMMARIES.items()),
    _entry(run, SCALES_DIRICHLET, check=check_dirichlet, part=("fig2", SUMMARY_FIG2)),
)
