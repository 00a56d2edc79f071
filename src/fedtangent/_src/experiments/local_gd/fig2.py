"""Fig. 2 of the Local-GD paper: classification whose labels a Dirichlet distribution divides among the nodes (B.1).

500 examples ``y = sign(x' w*)``, d = 1500, each class divided among 10 nodes by Dir(alpha), R = 150, the centralised
model trained 22,500 steps, the rest as in fig. 1(d): distance of directions to the centralised model (C) by round, and
test accuracy. The paper shows that Local-GD (G) and Modified Local-GD (G-Mod) still go to C in direction, with much the
same accuracy; the values of alpha are not printed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent._src.experiments.lab.results import Claim, Outcome, disagreeing, grouped, interval, means, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import fig1d
from fedtangent._src.experiments.local_gd.fig1d import METHODS, NEAR, Classified, ExponentialSettings, left_out, tried
from fedtangent._src.experiments.local_gd.fig1e import ALIKE, accuracies, accuracy_verdict
from fedtangent._src.experiments.local_gd.problems import dirichlet_halfspaces
from fedtangent._src.output.files import Metric
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
    s = study.settings
    if not s.num_nodes <= s.num_examples <= s.dimension:
        raise ValueError(
            f"num_examples: got {s.num_examples}, must be from num_nodes, {s.num_nodes}, to dimension, {s.dimension}"
        )


def run(study: Study) -> Outcome:
    """Trains with every alpha on every seed."""
    s, found, rows = study.settings, list[Classified](), list[dict[str, Any]]()
    missing, drawn = list[str](), dict[float, Classified]()
    for seed in study.each_seed():
        for alpha in s.alphas:
            problem = dirichlet_halfspaces(seed, s.num_nodes, s.num_examples, s.dimension, alpha).in_span()
            simulate = seed in study.seeds[: s.simulated_seeds]
            one, sizes = tried(s, problem, simulate=simulate), problem.partition.sizes
            if one is None:
                missing.append(f"seed {seed}, alpha = {alpha:g}")
                continue
            found += [one] if simulate else []
            drawn.setdefault(alpha, one)
            rows.append({
                "seed": seed, "alpha": alpha, "smallest": int(sizes.min()), "largest": int(sizes.max()),
                "of one class": one_class(one), **fig1d.row(s, one), **accuracies(one, seed, s.test_inputs),
            })  # fmt: skip
            study.keep([
                Metric(r + 2, f"{name} alpha={alpha:g}", seed, "train", "distance to C", float(values[r]), 0, 0)
                for name, values in one.to(one.centralised).items() for r in range(s.num_rounds - 1)
            ])  # fmt: skip
    if not rows:
        return Outcome((), [], failed=left_out(missing, len(missing)))
    _draw(study, drawn)
    columns = {"alpha": "{alpha:g}", "runs": "{runs}", "smallest node": "{smallest:.1f}", "largest": "{largest:.1f}",
               "nodes of one class": "{of one class:.1f}"}  # fmt: skip
    distances = [f"{name} to C, {when}" for name in METHODS for when in ("half", "end")]
    distances += ["G to S", "G-Mod to S", "C to S"]
    columns |= {key: f"{{{key}:.4f}}" for key in distances}
    columns |= {name: f"{{accuracy {name}:.4f}}" for name in (*METHODS, "C", "S")}
    sheet = table("Fig. 2: distance of directions and test accuracy, means of the runs", means(rows, "alpha"), columns)
    sizes_text = f"d = {s.dimension}, alpha = {', '.join(f'{a:g}' for a in s.alphas)}"
    verdicts = (fig1d.exact_verdict(s, found, sizes_text),
                accuracy_verdict(rows, s.num_nodes * s.test_inputs, sizes_text))  # fmt: skip
    remarks = (
        *fig1d.REMARKS[:2],
        "the values of alpha are not printed; a node holds one example or more",
        *left_out(missing, len(rows) + len(missing)),
    )
    return Outcome((sheet,), rows, claims(rows), {}, remarks, disagreeing(verdicts), verdicts)


def one_class(one: Classified) -> int:
    """Counts the nodes whose examples all have the same label."""
    partition, y = one.problem.partition, one.problem.y
    return sum(len(set(y[partition.client(i)])) == 1 for i in range(partition.num_clients))


def claims(rows: list[dict[str, Any]]) -> tuple[Claim, ...]:
    """Judges for every alpha whether G and G-Mod come near C and are as accurate."""
    found = []
    for (alpha,), own in grouped(rows, "alpha").items():
        if len(own) < 2:  # other runs diverged
            continue
        for name in METHODS:
            end = interval([r[f"{name} to C, end"] for r in own])
            apart = interval([abs(r[f"accuracy {name}"] - r["accuracy C"]) for r in own])
            found += [
                Claim(f"alpha {alpha:g}: {name} comes near C (to {NEAR:g})", f"{end:.4f}", end.below(NEAR)),
                Claim(
                    f"alpha {alpha:g}: {name} and C are as accurate (to {ALIKE:g})", f"{apart:.4f}", apart.below(ALIKE)
                ),
            ]
    return tuple(found)


def _draw(study: Study, first: dict[float, Classified]) -> None:
    """Draws the distances by round, for each alpha of the first seed that did not diverge."""
    s = study.settings
    rounds = np.arange(2, s.num_rounds + 1)
    panels = [
        BoundedPanel(
            f"alpha = {alpha:g}", rounds, {f"{name} to C": v for name, v in one.to(one.centralised).items()}, {}
        )
        for alpha, one in first.items()
    ]
    lowest = 0.8 * min(float(values[-1]) for panel in panels for values in panel.measured.values())
    bounded(panels, f"Fig. 2: classification, labels divided by Dir(alpha), d = {s.dimension}",
            ("round", "|w/|w| - w'/|w'||"), lowest, study.figures.path("fig2"))  # fmt: skip


SMOKE = DirichletSettings(4, 1e-4, 40, 30, 0.05, 2000, 24, 80, (0.5, 10.0), 100)
PAPER = DirichletSettings(num_rounds=150, centralised_steps=22_500)
DEFAULT = dataclasses.replace(PAPER, alphas=(0.1, 1.0))
SCALES = {"halfspaces": by_scale(SMOKE, DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, exact=True, least_seeds=2),)
