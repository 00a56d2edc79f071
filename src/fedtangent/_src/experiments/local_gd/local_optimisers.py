"""Beyond Local-GD's paper: the end of training with momentum and Adam as local optimisers.

Regression: gradient descent and momentum stay in the span of the data, so that many local steps end at the centralised
minimum-norm model (Local-GD, Theorem 1); Adam divides by each coordinate's size and leaves the span. Classification,
logistic loss: the directions of all models are compared with two that maximise a margin: of the l2 norm (eq. (15) of
Local-GD), and of the l_inf norm, to which Adam turns on one machine (Zhang, Zou and Cao, 2024). "Pooled" is Adam with
all data at one node, for as many steps. Local optimisers are reset in every round. Learning rates of regression fall as
1 / (1 + k / 10) with the round k, so that Adam's steps vanish; in classification Adam's epsilon is next to 0, because
gradients become tiny.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import scipy

import fedtangent as ft
from fedtangent import theory
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.output.run_plots import curves

SUBJECT = "Local-GD, Theorem 1 beside its optimiser"
MOMENTUM = 0.9
EPSILON = 1e-100  # of Adam in classification
ADAM, POOLED = "adam", "adam, pooled"
OPTIMISERS = {
    "gradient descent": optax.sgd,
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
    """Settings of the data of Local-GD, section 5, and the learning rates.

    Momentum of 0.9 adds up about ten gradients, so its learning rate is 0.1 times that of gradient descent.
    """

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
    """The last model and the measured curves of one seed, task and optimiser.

    Attributes:
        task: "regression" or "classification".
        optimiser: Name of the local optimiser, such as "momentum".
        model: The last global model, [d].
        curves: Measured quantities after every round, by name, [R + 1] each. Those of the classification are NaN at
            round 0, where the model is 0.
    """

    seed: int
    task: str
    optimiser: str
    model: np.ndarray
    curves: dict[str, np.ndarray]


def check(study: Study) -> None:
    """Raises ``ValueError`` unless dimensions outnumber examples and gradient descent on the regression is stable."""
    settings = study.settings
    examples, rate = settings.num_nodes * settings.held, settings.rate
    if settings.dimension <= examples:
        raise ValueError(f"dimension: got {settings.dimension}, must be above {examples}, the examples of all nodes")
    for seed in study.seeds:
        x, y, nodes, *_ = problems.regression(seed, settings.num_nodes, settings.held, settings.dimension)
        form = theory.local_regression(x, y, nodes, learning_rate=rate, local_steps=settings.local_steps)
        if form.unfinished > 1:
            raise ValueError(f"rate: got {rate}, at which local work diverges for seed {seed}, must be smaller")


def run(study: Study) -> lab.Outcome:
    """Trains the regression and the classification with every local optimiser, and compares the last models.

    They are compared with the minimum-norm model and with two maximum-margin classifiers, on every seed.
    """
    results = list[Ended]()
    for seed in study.each_seed():
        of_seed = _regressed(study.settings, seed) + _classified(study.settings, seed)
        results += of_seed
        for f in of_seed:
            rounds = range(study.settings.num_rounds + 1)
            metrics = lab.metric_rows(f"local_gd {f.task} {f.optimiser}", seed, rounds, f.curves)
            study.keep([metric for metric in metrics if np.isfinite(metric.value)])
    return _conclude(study, results)


@functools.cache
def _algorithm(settings: OptimiserSettings, name: str, task: str) -> ft.types.Algorithm:
    """Builds Local-GD with the optimiser ``name`` for ``task``; cached so that all seeds share a compiled program.

    In the task "regression" learning rates fall with the round.
    """
    is_regression, is_adam = task == "regression", name in (ADAM, POOLED)
    plain = settings.rate if is_regression else settings.margin_rate
    rate = (settings.adam_rate if is_regression else settings.adam_margin_rate) if is_adam else plain
    rate = rate * (1 - MOMENTUM) if name == "momentum" else rate
    make = partial(optax.adam, eps=EPSILON) if is_adam and not is_regression else OPTIMISERS[name]
    of_round = (lambda round_: rate / (1 + jnp.asarray(round_, float) / 10)) if is_regression else rate
    return ft.fed_avg(
        ft.models.linear(settings.dimension, dtype=jnp.float64),
        ft.schedules.all_clients(1 if name == POOLED else settings.num_nodes),
        client_optimizer=ft.optimizers.sgd(of_round)
        if name == "gradient descent"
        else ft.optimizers.at_rate(make, of_round),
        work=ft.Work(steps=settings.local_steps, batch_size=None),
        loss="squared_error" if is_regression else "logistic",
        averaging=ft.Averaging(weighting="uniform"),
    )


def _path(problem: problems.Problem, settings: OptimiserSettings, seed: int, name: str, task: str) -> np.ndarray:
    """Trains with the optimiser ``name`` on ``task``; returns the global model after every round, [R + 1, d].

    For "adam, pooled" all data are at one node.
    """
    data = (problem.pooled if name == POOLED else problem).federated()
    path = ft.params_by_round(_algorithm(settings, name, task), data, num_rounds=settings.num_rounds, seed=seed)
    return np.asarray(path["weights"][:, 0, :, 0])


def _regressed(settings: OptimiserSettings, seed: int) -> list[Ended]:
    """Trains the regression with every optimiser, and compares the models with the minimum-norm model by round.

    Curves are relative: the distance to that model, the part of the model outside the span of the data, the residual.
    """
    problem = problems.regression(seed, settings.num_nodes, settings.held, settings.dimension)
    centre, span = theory.minimum_norm(problem.x, problem.y), np.linalg.svd(problem.x, full_matrices=False)[2]
    results = []
    for name in OPTIMISERS:
        w = _path(problem, settings, seed, name, "regression")
        size = np.maximum(np.linalg.norm(w, axis=1), 1e-300)
        curves = {
            "distance": np.linalg.norm(w - centre, axis=1) / np.linalg.norm(centre),
            "outside": np.linalg.norm(w - (w @ span.T) @ span, axis=1) / size,
            "residual": np.linalg.norm(w @ problem.x.T - problem.y, axis=1) / np.linalg.norm(problem.y),
        }
        results.append(Ended(seed, "regression", name, w[-1], curves))
    return results


def largest_margin(signed: np.ndarray) -> np.ndarray:
    """Computes the classifier w [d] of largest margin among all with ``max |w_i| <= 1``.

    The rows of ``signed`` [n, d] are inputs times their labels.
    """
    n, d = signed.shape
    objective, limits = np.append(np.zeros(d), -1.0), np.hstack([-signed, np.ones((n, 1))])
    bounds = [(-1, 1)] * d + [(None, None)]
    return np.asarray(scipy.optimize.linprog(objective, limits, np.zeros(n), bounds=bounds, method="highs").x[:-1])


def _classified(settings: OptimiserSettings, seed: int) -> list[Ended]:
    """Trains the classification with every optimiser, and compares the models with two maximum-margin classifiers.

    One has the largest margin for the l2 norm, the other for the l_inf norm. Curves have the distance in direction from
    each of them, and the share of its normalised margin that the model reaches.
    """
    problem = problems.classification(seed, settings.num_nodes, settings.held, settings.dimension, settings.spread)
    sets = theory.feasible_sets(problem.x, problem.y, problem.partition)
    signed = problem.x * problem.y[:, None]
    best = {"l2": (theory.hard_margin(sets), 2), "l_inf": (largest_margin(signed), np.inf)}
    results = []
    for name in OPTIMISERS:
        w, curves = _path(problem, settings, seed, name, "classification")[1:], dict[str, np.ndarray]()
        for norm, (to, order) in best.items():
            curves[f"angle_{norm}"] = np.append(np.nan, theory.direction_distance(w, to))
            reached = (w @ signed.T).min(axis=1) / np.linalg.norm(w, order, axis=1)
            curves[f"margin_{norm}"] = np.append(np.nan, reached * np.linalg.norm(to, order) / (signed @ to).min())
        results.append(Ended(seed, "classification", name, w[-1], curves))
    return results


def _conclude(study: Study, results: list[Ended]) -> lab.Outcome:
    """Builds tables, figure, claims and verdicts from all trained models."""
    rows, sheets, settings = list[lab.Row](), [], study.settings
    for (task,), of_task in lab.grouped(results, "task").items():
        entries = []
        for (name,), group in lab.grouped(of_task, "optimiser").items():
            ends = {key: [float(f.curves[key][-1]) for f in group] for key in group[0].curves}
            rows.append({"task": task, "optimiser": name, **ends})
            entries.append({"optimiser": name, **{key: lab.interval(v) for key, v in ends.items()}})
        columns = " | ".join(["optimiser: {optimiser}", *(f"{key}: {{{key}:.3g}}" for key in of_task[0].curves)])
        sheets.append(
            lab.table(f"{task}, after {settings.num_rounds} rounds of {settings.local_steps} steps", entries, columns)
        )
    _draw(study, results)
    verdicts = _verdicts(results)
    failed = tuple(f"{f.task}, {f.optimiser}: diverged" for f in results if not np.isfinite(f.model).all())
    failed += lab.disagreeing(verdicts)
    return lab.Outcome(tuple(sheets), rows, _claims(results), remarks=REMARKS, failed=failed, verdicts=verdicts)


def _ends(results: list[Ended], task: str, name: str, quantity: str) -> np.ndarray:
    """Returns the last value of the curve ``quantity`` of every seed, for one task and optimiser ``name``, [seeds]."""
    return np.array([f.curves[quantity][-1] for f in results if (f.task, f.optimiser) == (task, name)])


def _claims(results: list[Ended]) -> tuple[lab.Claim, ...]:
    """Judges by intervals over seeds where gradient descent, momentum and Adam end in both tasks."""
    adam, outside, fitted = (
        lab.interval(_ends(results, "regression", ADAM, quantity)) for quantity in ("distance", "outside", "residual")
    )
    regressed, classified = _apart(results, "regression"), _apart(results, "classification")
    claims = [
        regressed.claim_below("regression: momentum ends where gradient descent ends", "distance {:.1e}", NEAR),
        fitted.claim_below("regression: Adam fits the data too", "relative residual {:.1e}", 0.01),
        adam.claim_above("but does not end at the minimum-norm model", "distance {:.3f}", 0.1),
        outside.claim_above("its end is not in the span of the data", "outside {:.3f}", 0.1),
        classified.claim_below(
            "classification: momentum ends where gradient descent ends", "distance of directions {:.1e}", 0.05
        ),
    ]
    angle = partial(_ends, results, "classification")
    for name, near, far in (("gradient descent", "l2", "l_inf"), (POOLED, "l_inf", "l2"), (ADAM, "l_inf", "l2")):
        nearer = lab.interval(angle(name, f"angle_{far}") - angle(name, f"angle_{near}"))
        statement = f"classification: {name} points nearer to the {near} margin than to the {far} one"
        claims.append(nearer.claim_above(statement, "by {:+.3f}"))
    farther = lab.interval(angle(ADAM, "angle_l_inf") - angle(POOLED, "angle_l_inf"))
    statement = "classification: averaging takes Adam from the l_inf margin"
    return (*claims, farther.claim_above(statement, "angle {:+.3f}"))


def _apart(results: list[Ended], task: str) -> lab.MeanInterval:
    """Computes the distance between the last models of momentum and of gradient descent: mean and interval over seeds.

    For the regression it is divided by the norm of gradient descent's model; for the classification it is a distance of
    directions.
    """
    momentum, descent = (
        np.stack([f.model for f in results if (f.task, f.optimiser) == (task, name)])
        for name in ("momentum", "gradient descent")
    )
    if task == "classification":
        return lab.interval(theory.direction_distance(momentum, descent))
    return lab.interval(
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(momentum, descent, strict=True)
    )


def _verdicts(results: list[Ended]) -> tuple[ft.types.Verdict, ...]:
    """Judges whether the regression by gradient descent and momentum ends at the minimum-norm model (Theorem 1).

    The control is Adam, which must not end there.
    """
    adam, verdicts = _ends(results, "regression", ADAM, "distance"), []
    wrong = "Adam", f"{adam.min():.1e}", adam.min() > NEAR
    for name in ("gradient descent", "momentum"):
        largest = _ends(results, "regression", name, "distance").max()
        right = f"{largest:.1e}", f"<= {NEAR:g}", largest <= NEAR
        statement = f"{name}: distance of the end to the minimum-norm model"
        verdicts.append(ft.types.Verdict.of(SUBJECT, statement, "regression, the worst seed", right, wrong))
    return tuple(verdicts)


def _draw(study: Study, results: list[Ended]) -> None:
    def lines(task: str, quantity: str) -> dict[str, np.ndarray]:
        by_name = {name: [f for f in results if (f.task, f.optimiser) == (task, name)] for name in OPTIMISERS}
        return {name: np.stack([f.curves[quantity][1:] for f in group]) for name, group in by_name.items()}

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
