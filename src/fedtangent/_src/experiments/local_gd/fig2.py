"""Fig. 2 of the Local-GD paper: classification whose labels a Dirichlet distribution divides among the nodes (B.1).

500 examples ``y = sign(x' w*)``, d = 1500, each class divided among 10 nodes by Dir(alpha), R = 150, the centralised
model trained 22,500 steps, the rest as in fig. 1(d): distance of directions to the centralised model (C) by round, and
test accuracy. The paper shows that Local-GD (G) and Modified Local-GD (G-Mod) still go to C in direction, with much the
same accuracy; the values of alpha are not printed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import fig1d
from fedtangent._src.experiments.local_gd.fig1d import METHODS, NEAR, Classified, ExponentialSettings, left_out, tried
from fedtangent._src.experiments.local_gd.fig1e import ALIKE, accuracies, accuracy_verdict
from fedtangent._src.experiments.local_gd.problems import dirichlet_halfspaces
from fedtangent._src.output.line_plots import BoundedPanel, bounded


@dataclass(frozen=True)
class DirichletSettings(ExponentialSettings):
    """The paper's settings, but for the values of alpha."""

    num_examples: int = 500
    dimension: int = 1500
    alphas: tuple[float, ...] = within((0.1, 0.5, 1.0, 10.0), above=0)
    test_inputs: int = within(200, least=10)
    simulated_seeds: int = 1  # other seeds descend in the dual, which the simulated ones are checked against


def check(study: Study) -> None:
    """Raises ``ValueError`` unless every node gets an example and some model fits all labels."""
    settings = study.settings
    if not settings.num_nodes <= settings.num_examples <= settings.dimension:
        raise ValueError(
            f"num_examples: got {settings.num_examples}, must be from num_nodes, {settings.num_nodes}, to "
            f"dimension, {settings.dimension}"
        )


def run(study: Study) -> lab.Outcome:
    """Trains with every alpha on every seed."""
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
    _draw(study, first)
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
    """Judges for every alpha whether G and G-Mod come near C and are as accurate."""
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


def _draw(study: Study, first: dict[float, Classified]) -> None:
    """Draws the distances by round, for each alpha of the first seed that did not diverge."""
    rounds, panels = np.arange(2, study.settings.num_rounds + 1), []
    for alpha, one in first.items():
        lines = {f"{name} to C": v for name, v in one.to(one.centralised).items()}
        panels.append(BoundedPanel(f"alpha = {alpha:g}", rounds, lines, {}))
    lowest = 0.8 * min(float(values[-1]) for panel in panels for values in panel.measured.values())
    title = f"Fig. 2: classification, labels divided by Dir(alpha), d = {study.settings.dimension}"
    bounded(panels, title, ("round", "|w/|w| - w'/|w'||"), lowest, study.figures.path("fig2"))


SMOKE = DirichletSettings(4, 1e-4, 40, 30, 0.05, 2000, 24, 80, (0.5, 10.0), 100)
PAPER = DirichletSettings(num_rounds=150, centralised_steps=22_500)
DEFAULT = dataclasses.replace(PAPER, alphas=(0.1, 1.0))
SCALES = {"halfspaces": by_scale(SMOKE, DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, exact=True, least_seeds=2),)
