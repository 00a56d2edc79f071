"""Fig. 1(e), 1(f) and 1(g) of the Local-GD paper: classification by dimension.

The nodes, labels and runs of fig. 1(d), d from 500 to 4000. Fig. 1(e) has the distance of directions of Local-GD (G),
Modified Local-GD (G-Mod) and the support vector machine (S) to the centralised model (C); fig. 1(f) that of G, G-Mod
and C to S; fig. 1(g) the test accuracy of all four, on new inputs labelled by the nodes' own truths. The paper shows
that distances fall with d, that G-Mod's to C is slightly the larger, and that accuracies fall with d, all much alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedtangent import theory
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab.results import Claim, Outcome, disagreeing, grouped, interval, means, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd.fig1d import (
    METHODS,
    REMARKS,
    Classified,
    ExponentialSettings,
    exact_verdict,
    left_out,
    tried,
)
from fedtangent._src.experiments.local_gd.problems import classification
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded

ALIKE = 0.02  # difference of two accuracies that a figure does not show
ALLOWED = 4.5  # standard errors that the largest deviation of some hundred accuracies may have
TOWARDS = {  # of each part: a line's label, and its entry of a row
    "e": {"G": "G to C", "G-Mod": "G-Mod to C", "S": "S to C"},
    "f": {"G": "G to S", "G-Mod": "G-Mod to S", "C": "S to C"},
    "g": {name: f"accuracy {name}" for name in (*METHODS, "C", "S")},
}


@dataclass(frozen=True)
class HalfspacesByDimension(ExponentialSettings):
    """The settings of fig. 1(d) for several dimensions, and the number of each node's test inputs."""

    examples_per_node: int = 50
    dimensions: tuple[int, ...] = within((500, 750, 1000, 1500, 2000, 3000, 4000), count=3)
    spread: float = within(0.5, at_least=0)
    test_inputs: int = within(200, least=10)
    simulated_seeds: int = 1  # other seeds descend in the dual, which the simulated ones are checked against


def check(study: Study) -> None:
    """Raises ``ValueError`` for fewer dimensions than examples, where perhaps no model fits all labels."""
    s = study.settings
    total = s.num_nodes * s.examples_per_node
    if min(s.dimensions) < total:
        raise ValueError(f"dimensions: got {min(s.dimensions)}, must be at least {total}, the examples of all nodes")


def run(part: str, study: Study) -> Outcome:
    """Trains in every dimension on every seed; ``part`` is "e", "f" or "g"."""
    s, found, rows = study.settings, list[Classified](), list[dict[str, Any]]()
    missing: list[str] = []
    for seed in study.each_seed():
        for d in sorted(s.dimensions):
            problem = classification(seed, s.num_nodes, s.examples_per_node, d, s.spread).in_span()
            simulate = seed in study.seeds[: s.simulated_seeds]
            one = tried(s, problem, simulate=simulate)
            if one is None:
                missing.append(f"seed {seed}, d = {d}")
                continue
            found += [one] if simulate else []
            rows.append({"seed": seed, "dimension": d, **row(one), **accuracies(one, seed, s.test_inputs)})
        study.keep([Metric(s.num_rounds, f"{name} d={r['dimension']}", seed, "test", f"fig1{part}", r[key], 0, 0)
                    for r in rows if r["seed"] == seed for name, key in TOWARDS[part].items()])  # fmt: skip
    if not rows:
        return Outcome((), [], failed=left_out(missing, len(missing)))
    mean_rows = means(rows, "dimension")
    _draw(study, part, mean_rows)
    sizes = f"d = {', '.join(map(str, sorted(s.dimensions)))}"
    verdicts = [exact_verdict(s, found, sizes)]
    if part == "g":
        verdicts.append(accuracy_verdict(rows, s.num_nodes * s.test_inputs, sizes))
    form, title = ".4f", {"e": "distance to C", "f": "distance to S", "g": "test accuracy"}[part]
    columns = {"d": "{dimension}", "runs": "{runs}"} | {
        name: f"{{{key}:{form}}}" for name, key in TOWARDS[part].items()
    }
    if part == "g":
        columns |= {f"exact {name}": f"{{exact {name}:{form}}}" for name in TOWARDS["g"]}
    else:
        columns["G to G-Mod"] = f"{{G to G-Mod:{form}}}"
    sheet = table(f"Fig. 1({part}): {title}, means of the runs", mean_rows, columns)
    remarks = (*REMARKS[:-1], *left_out(missing, len(rows) + len(missing)))
    whole = [seed for (seed,), own in grouped(rows, "seed").items() if len(own) == len(s.dimensions)]
    every = [r for r in rows if r["seed"] in whole]
    said = {"e": claims_e, "f": claims_f, "g": claims_g}[part](every) if len(whole) > 1 else ()
    return Outcome((sheet,), rows, said, {}, remarks, disagreeing(verdicts), tuple(verdicts))


def models(one: Classified) -> dict[str, np.ndarray]:
    """Returns the four trained models, [r] each."""
    return {**{name: path[-1] for name, path in one.paths.items()}, "C": one.centralised, "S": one.machine}


def row(one: Classified) -> dict[str, float]:
    """Computes the distances between a problem's models: of Local-GD, its modification and centralised training."""
    of = models(one)
    pairs = (("G", "C"), ("G-Mod", "C"), ("S", "C"), ("G", "S"), ("G-Mod", "S"), ("G", "G-Mod"))
    return {f"{a} to {b}": float(theory.direction_distance(of[a], of[b])) for a, b in pairs}


def accuracies(one: Classified, seed: int, test_inputs: int) -> dict[str, float]:
    """Computes test accuracies on N(0, 1) inputs of each node, and their expectations, 1 - angle / pi."""
    truths, dimension = one.problem.truths, one.problem.dimension
    rng, found = np.random.default_rng([seed, dimension, 1]), dict[str, float]()
    lifted = np.stack([one.problem.lifted(w) for w in models(one).values()])
    right = np.zeros(len(lifted))
    for truth in truths:
        x = rng.standard_normal((test_inputs, dimension))
        right += np.mean((x @ lifted.T >= 0) == (x @ truth >= 0)[:, None], axis=0) / len(truths)
    for name, w, value in zip(models(one), lifted, right, strict=True):
        cosine = truths @ w / np.linalg.norm(truths, axis=1) / np.linalg.norm(w)
        found |= {f"accuracy {name}": float(value), f"exact {name}": float(1 - np.mean(np.arccos(cosine)) / np.pi)}
    return found


def accuracy_verdict(rows: list[dict[str, Any]], inputs: int, sizes: str) -> Verdict:
    """Checks that test accuracies are 1 - angle / pi; control: 1/2, the accuracy of guessing."""
    names = TOWARDS["g"]
    seen = np.array([[r[f"accuracy {name}"] for name in names] for r in rows])
    exact = np.array([[r[f"exact {name}"] for name in names] for r in rows])
    error = np.sqrt(exact * (1 - exact) / inputs)
    worst, wrong = np.max(np.abs(seen - exact) / error), np.max(np.abs(seen - 0.5) / error)
    return Verdict.of("Local-GD section 5", "accuracy is 1 - angle / pi", sizes,
                      (f"{worst:.1f} SE at most", f"<= {ALLOWED} SE", worst <= ALLOWED),
                      ("1/2", f"{wrong:.1f} SE", wrong > ALLOWED))  # fmt: skip


def by_dimension(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Computes the slope of ``key`` against log10 of the dimension, one for each seed."""
    return [
        float(np.polyfit(np.log10([r["dimension"] for r in own]), [r[key] for r in own], 1)[0])
        for own in grouped(rows, "seed").values()
    ]


def claims_e(rows: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges whether distances to C fall with d, and are larger for G-Mod than for G."""
    found = []
    for name in METHODS:
        falls = interval(by_dimension(rows, f"{name} to C"))
        found.append(Claim(f"{name} to C falls with d (by a factor of 10)", f"{falls:.3f}", falls.below()))
    own = grouped(rows, "seed").values()
    behind = interval([np.mean([r["G-Mod to C"] - r["G to C"] for r in of]) for of in own])
    found.append(Claim("G-Mod is farther from C than G (mean over d)", f"{behind:.4f}", behind.above()))
    return tuple(found)


def claims_f(rows: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges whether distances to S fall with d."""
    found = []
    for name, key in TOWARDS["f"].items():
        falls = interval(by_dimension(rows, key))
        found.append(Claim(f"{name} to S falls with d (by a factor of 10)", f"{falls:.3f}", falls.below()))
    return tuple(found)


def claims_g(rows: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges whether accuracy falls with d, and is alike for all methods."""
    found, own = [], grouped(rows, "seed").values()
    for name, key in TOWARDS["g"].items():
        falls = interval(by_dimension(rows, key))
        found.append(Claim(f"accuracy of {name} falls with d (by a factor of 10)", f"{falls:.3f}", falls.below()))
    for name in METHODS:
        apart = interval([np.mean([abs(r[f"accuracy {name}"] - r["accuracy C"]) for r in of]) for of in own])
        found.append(Claim(f"{name} and C are as accurate (to {ALIKE:g}, mean over d)", f"{apart:.4f}",
                           apart.below(ALIKE)))  # fmt: skip
    return tuple(found)


def _draw(study: Study, part: str, mean_rows: list[dict[str, Any]]) -> None:
    d = np.array([m["dimension"] for m in mean_rows])
    lines = {name: np.array([m[key] for m in mean_rows]) for name, key in TOWARDS[part].items()}
    what = {"e": "distance to C", "f": "distance to S", "g": "test accuracy"}[part]
    panel = BoundedPanel(f"round {study.settings.num_rounds}, means of the runs", d, lines, {})
    lowest = 0.95 * min(float(v.min()) for v in lines.values())
    bounded(
        [panel], f"Fig. 1({part}): classification", ("dimension d", what), lowest, study.figures.path(f"fig1{part}")
    )


SMOKE = HalfspacesByDimension(4, 1e-4, 40, 30, 0.05, 2000, 5, (20, 40, 80), 0.5, 100)
DEFAULT = HalfspacesByDimension(dimensions=(500, 1000, 2000, 4000))
SCALES = {"halfspaces": by_scale(SMOKE, DEFAULT, HalfspacesByDimension())}


SUMMARIES = {
    "e": "Local-GD, fig. 1(e): classification, distance of directions to the centralised model by d",
    "f": "Local-GD, fig. 1(f): classification, distance of directions to the support vector machine by d",
    "g": "Local-GD, fig. 1(g): classification, test accuracy by d",
}
ENTRIES = tuple(
    experiment(
        __name__, partial(run, part), SCALES, ("localgd",), check=check, exact=True, least_seeds=2,
        name=f"fig1{part}", summary=summary,
    )
    for part, summary in SUMMARIES.items()
)  # fmt: skip
