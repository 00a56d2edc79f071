"""Beyond Local-GD's paper: what momentum and Adam as local optimisers converge to.

Regression: gradient descent and momentum stay in the span of the data, so that many local steps end at the centralised
minimum-norm model (Theorem 1); Adam divides by each coordinate's own size and leaves it. Classification, logistic loss:
the directions of all are compared with the two that maximise a margin, of the l2 norm (eq. 15) and of the l_inf norm,
to which Adam turns on one machine (Zhang, Zou and Cao, 2024): "pooled" is Adam with all data at one node, as long.
Local optimisers start anew in every round. Rates of regression fall as 1 / (1 + k / 10) from round to round, without
which Adam's steps do not die out; in classification Adam's epsilon is next to 0, as gradients fall below any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import linprog

from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.engine.run import params_by_round
from fedtangent._src.experiments.lab.results import Claim, MeanInterval, Outcome, disagreeing, grouped, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.models.features import linear
from fedtangent._src.optimizers import at_rate, sgd
from fedtangent._src.output.files import Metric
from fedtangent._src.output.run_plots import curves
from fedtangent._src.theory.local_gd.max_margin import direction_distance, feasible_sets, hard_margin
from fedtangent._src.theory.local_gd.regression import local_regression, minimum_norm
from fedtangent._src.types import Algorithm, Array

SUBJECT = "Local-GD, Theorem 1 beside its optimiser"
MOMENTUM = 0.9
EPSILON = 1e-100  # of Adam in classification
ADAM, POOLED = "adam", "adam, pooled"
OPTIMISERS: dict[str, Callable[..., optax.GradientTransformation] | None] = {
    "gradient descent": None,
    "momentum": partial(optax.sgd, momentum=MOMENTUM),
    ADAM: optax.adam,
    POOLED: optax.adam,
}
NEAR = 0.01  # relative distance that counts as the same end
REMARKS = (
    "distance: |w - c| / |c| to the minimum-norm model; outside: the part of w outside the span of the data, over |w|",
    "l2, l_inf: angle, the chord |w / |w| - c / |c||, to the maximum margin of that norm; share of it that is reached",
)


@dataclass(frozen=True)
class OptimiserSettings:
    """The data of section 5. Momentum takes 1 - .9 times the rate of gradient descent: its steps end up as long."""

    num_nodes: int = within(4, least=2)
    held: int = 10  # examples of a node
    dimension: int = 400
    spread: float = within(0.3, at_least=0)  # of the nodes' own truths in classification
    local_steps: int = 100
    num_rounds: int = within(60, least=2)
    rate: float = within(0.02, above=0)  # of gradient descent on the regression
    margin_rate: float = within(0.5, above=0)  # of gradient descent on the logistic loss
    adam_rate: float = within(0.01, above=0)  # of Adam on the regression
    adam_margin_rate: float = within(0.001, above=0)


class Ended(NamedTuple):
    """Results of one seed, task and optimiser."""

    seed: int
    task: str
    optimiser: str
    model: np.ndarray  # [d], the last global model
    seen: dict[str, np.ndarray]  # what was measured after every round, [R + 1] each; NaN for the direction of 0


def check(study: Study) -> None:
    """Raises ``ValueError`` for fewer dimensions than examples, which the theorem excludes, or a divergent rate."""
    s = study.settings
    if s.dimension <= s.num_nodes * s.held:
        raise ValueError(f"dimension: got {s.dimension}, must be more than the {s.num_nodes * s.held} examples")
    for seed in study.seeds:
        drawn = problems.regression(seed, s.num_nodes, s.held, s.dimension)
        form = local_regression(drawn.x, drawn.y, drawn.partition, learning_rate=s.rate, local_steps=s.local_steps)
        if form.unfinished > 1:
            raise ValueError(f"rate: got {s.rate}, at which local work diverges for seed {seed}, must be smaller")


def run(study: Study) -> Outcome:
    """Trains both tasks with every optimiser on every seed."""
    found = list[Ended]()
    for seed in study.each_seed():
        found += regressed(study.settings, seed) + classified(study.settings, seed)
        study.keep([
            Metric(r, f"local_gd {f.task} {f.optimiser}", seed, "train", name, float(v), 0, 0)
            for f in found if f.seed == seed for name, values in f.seen.items() for r, v in enumerate(values)
            if np.isfinite(v)
        ])  # fmt: skip
    return conclude(study, found)


@functools.cache
def _algorithm(s: OptimiserSettings, name: str, task: str) -> Algorithm:
    """Builds the algorithm, cached so that all seeds share one compiled program."""
    regression = task == "regression"
    plain = s.rate if regression else s.margin_rate
    rate = (s.adam_rate if regression else s.adam_margin_rate) if name in (ADAM, POOLED) else plain
    rate = rate * (1 - MOMENTUM) if name == "momentum" else rate
    make = OPTIMISERS[name]
    if name in (ADAM, POOLED) and not regression:
        make = partial(optax.adam, eps=EPSILON)
    of_round = _falling(rate) if regression else rate
    return algorithms.fed_avg(
        linear(s.dimension, dtype=jnp.float64),
        schedule.all_clients(1 if name == POOLED else s.num_nodes),
        client_optimizer=sgd(of_round) if make is None else at_rate(make, of_round),
        work=Work(steps=s.local_steps, batch_size=None),
        loss="squared_error" if regression else "logistic",
        averaging=Averaging(weighting="uniform"),
    )


def _path(drawn: problems.Problem, s: OptimiserSettings, seed: int, name: str, task: str) -> np.ndarray:
    """Returns the global model after every round, [R + 1, d]."""
    algorithm, held = _algorithm(s, name, task), (drawn.pooled if name == POOLED else drawn).federated()
    return np.asarray(params_by_round(algorithm, held, num_rounds=s.num_rounds, seed=seed)["weights"][:, 0, :, 0])


def _falling(rate: float) -> Callable[[Array], Array]:
    """Returns the function from a round to its rate, which falls as 1 / (1 + k / 10)."""
    return lambda round_: rate / (1 + jnp.asarray(round_, float) / 10)


def regressed(s: OptimiserSettings, seed: int) -> list[Ended]:
    """Trains the regression with every optimiser, and computes the distances to the minimum-norm model."""
    drawn = problems.regression(seed, s.num_nodes, s.held, s.dimension)
    centre, span = minimum_norm(drawn.x, drawn.y), np.linalg.svd(drawn.x, full_matrices=False)[2]
    found = []
    for name in OPTIMISERS:
        w = _path(drawn, s, seed, name, "regression")
        size = np.maximum(np.linalg.norm(w, axis=1), 1e-300)
        found.append(Ended(seed, "regression", name, w[-1], {
            "distance": np.linalg.norm(w - centre, axis=1) / np.linalg.norm(centre),
            "outside": np.linalg.norm(w - (w @ span.T) @ span, axis=1) / size,
            "residual": np.linalg.norm(w @ drawn.x.T - drawn.y, axis=1) / np.linalg.norm(drawn.y),
        }))  # fmt: skip
    return found


def largest_margin(signed: np.ndarray) -> np.ndarray:
    """Computes the w [d], ``max |w_i| <= 1``, with the largest ``min_j a_j'w``; ``signed`` a is [n, d]."""
    n, d = signed.shape
    ends = linprog(np.append(np.zeros(d), -1.0), np.hstack([-signed, np.ones((n, 1))]), np.zeros(n),
                   bounds=[(-1, 1)] * d + [(None, None)], method="highs")  # fmt: skip
    return np.asarray(ends.x[:-1])


def classified(s: OptimiserSettings, seed: int) -> list[Ended]:
    """Trains the classifiers by logistic loss, and compares their directions with both maximum margins."""
    drawn = problems.classification(seed, s.num_nodes, s.held, s.dimension, s.spread)
    sets = feasible_sets(drawn.x, drawn.y, drawn.partition)
    signed = drawn.x * drawn.y[:, None]
    best = {"l2": (hard_margin(sets), 2), "l_inf": (largest_margin(signed), np.inf)}
    found = []
    for name in OPTIMISERS:
        w = _path(drawn, s, seed, name, "classification")[1:]
        seen = dict[str, np.ndarray]()
        for norm, (to, order) in best.items():
            seen[f"angle_{norm}"] = np.append(np.nan, direction_distance(w, to))
            reached = (w @ signed.T).min(axis=1) / np.linalg.norm(w, order, axis=1)
            seen[f"margin_{norm}"] = np.append(np.nan, reached * np.linalg.norm(to, order) / (signed @ to).min())
        found.append(Ended(seed, "classification", name, w[-1], seen))
    return found


def conclude(study: Study, found: list[Ended]) -> Outcome:
    """Builds tables, figure and verdicts of each optimiser's last model, and the claims on it."""
    rows, sheets = list[dict[str, Any]](), []
    for (task,), of_task in grouped(found, "task").items():
        shown = []
        for (name,), own in grouped(of_task, "optimiser").items():
            ends = {key: [float(f.seen[key][-1]) for f in own] for key in own[0].seen}
            rows.append({"task": task, "optimiser": name, **ends})
            shown.append({"optimiser": name, **{key: interval(v) for key, v in ends.items()}})
        form = {"optimiser": "{optimiser}"} | {key: f"{{{key}:.3g}}" for key in of_task[0].seen}
        sheets.append(table(f"{task}, after {study.settings.num_rounds} rounds of {study.settings.local_steps} steps",
                            shown, form))  # fmt: skip
    _draw(study, found)
    verdicts = _verdicts(found)
    failed = tuple(f"{f.task}, {f.optimiser}: diverged" for f in found if not np.isfinite(f.model).all())
    return Outcome(tuple(sheets), rows, _claims(found), remarks=REMARKS, failed=(*failed, *disagreeing(verdicts)),
                   verdicts=verdicts)  # fmt: skip


def _ends(found: list[Ended], task: str, name: str, what: str) -> np.ndarray:
    """Returns the last value of ``what``, [seeds]."""
    return np.array([f.seen[what][-1] for f in found if (f.task, f.optimiser) == (task, name)])


def _claims(found: list[Ended]) -> tuple[Claim, ...]:
    """Judges the claims, paired over seeds."""
    adam = interval(_ends(found, "regression", ADAM, "distance"))
    outside = interval(_ends(found, "regression", ADAM, "outside"))
    fitted = interval(_ends(found, "regression", ADAM, "residual"))
    claims = [
        Claim("regression: momentum ends where gradient descent ends", f"distance {_apart(found, 'regression'):.1e}",
              _apart(found, "regression").below(NEAR)),
        Claim("regression: Adam fits the data too", f"relative residual {fitted:.1e}", fitted.below(0.01)),
        Claim("but does not end at the minimum-norm model", f"distance {adam:.3f}", adam.above(0.1)),
        Claim("its end is not in the span of the data", f"outside {outside:.3f}", outside.above(0.1)),
        Claim("classification: momentum ends where gradient descent ends",
              f"distance of directions {_apart(found, 'classification'):.1e}",
              _apart(found, "classification").below(0.05)),
    ]  # fmt: skip
    for name, near, far in (("gradient descent", "l2", "l_inf"), (POOLED, "l_inf", "l2"), (ADAM, "l_inf", "l2")):
        nearer = interval(_ends(found, "classification", name, f"angle_{far}") -
                          _ends(found, "classification", name, f"angle_{near}"))  # fmt: skip
        claims.append(Claim(f"classification: {name} points nearer to the {near} margin than to the {far} one",
                            f"by {nearer:+.3f}", nearer.above()))  # fmt: skip
    lost = interval(_ends(found, "classification", ADAM, "angle_l_inf") -
                    _ends(found, "classification", POOLED, "angle_l_inf"))  # fmt: skip
    claims.append(
        Claim("classification: averaging takes Adam from the l_inf margin", f"angle {lost:+.3f}", lost.above())
    )
    return tuple(claims)


def _apart(found: list[Ended], task: str) -> MeanInterval:
    """Computes the relative distance of momentum's last model from gradient descent's (of directions if classified)."""
    both = [
        [f.model for f in found if (f.task, f.optimiser) == (task, name)] for name in ("momentum", "gradient descent")
    ]
    if task == "classification":
        return interval(direction_distance(np.stack(both[0]), np.stack(both[1])))
    return interval([float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(*both, strict=True)])


def _verdicts(found: list[Ended]) -> tuple[Verdict, ...]:
    """Checks that gradient descent and momentum end at Theorem 1's model; Adam is the wrong theory."""
    wrong = _ends(found, "regression", ADAM, "distance")
    return tuple(
        Verdict.of(SUBJECT, f"{name}: distance of the end to the minimum-norm model", "regression, the worst seed",
                   (f"{own.max():.1e}", f"<= {NEAR:g}", own.max() <= NEAR),
                   ("Adam", f"{wrong.min():.1e}", wrong.min() > NEAR))
        for name in ("gradient descent", "momentum")
        for own in (_ends(found, "regression", name, "distance"),)
    )  # fmt: skip


def _draw(study: Study, found: list[Ended]) -> None:
    def lines(task: str, what: str) -> dict[str, np.ndarray]:
        return {name: np.stack([f.seen[what][1:] for f in found if (f.task, f.optimiser) == (task, name)])
                for name in OPTIMISERS}  # fmt: skip

    panels = {
        "distance to the minimum-norm model": lines("regression", "distance"),
        "distance to the l2 margin's direction": lines("classification", "angle_l2"),
        "distance to the l_inf margin's direction": lines("classification", "angle_l_inf"),
    }
    rounds = range(1, study.settings.num_rounds + 1)
    title = f"local optimisers: {study.settings.num_nodes} nodes, L = {study.settings.local_steps}"
    curves(panels, rounds, title, study.figures.path("local_optimisers"))


DEFAULT = OptimiserSettings(num_nodes=6, held=15, dimension=900, num_rounds=100)
PAPER = OptimiserSettings(num_nodes=10, held=50, dimension=4000, local_steps=200, num_rounds=200, rate=0.01)
SCALES = {"gaussian": by_scale(OptimiserSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), check=check, least_seeds=2, exact=True),)
