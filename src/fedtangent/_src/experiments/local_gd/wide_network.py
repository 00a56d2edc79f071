"""Beyond Local-GD's paper: a wide network under Local-GD beside the closed forms, of its last layer alone and of all.

Linear regression's closed form (Lemma 1) is exact for the last layer on the fixed features of a network's own first
layer, at any width; in the limit of infinite width these features are the kernel of its initial functions. Trained as
a whole the network is beside the federated flow of its own tangent kernel at the start, and of that of infinite width.
Distances are of predictions at test points, relative to how far the prediction has moved; their slopes against width
are fitted. Networks have one hidden layer of erf units without biases, in the neural tangent parameterisation; the
data are those of the first seed, a seed draws networks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import data as datasets
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.engine.run import params_by_round
from fedtangent._src.experiments.lab.results import (
    Claim,
    MeanInterval,
    Outcome,
    disagreeing,
    grouped,
    interval,
    log_slope,
    table,
)
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.dense import DenseStructure, forward, mlp
from fedtangent._src.models.features import linear
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.flow import Rule, federated_flow
from fedtangent._src.theory.local_gd.regression import local_regression
from fedtangent._src.types import Algorithm, Model, Partition, PyTree

SUBJECT = "Local-GD, wide networks"
SLOPE, MARGIN = -0.5, 0.25  # of the error of a kernel sampled by that many units; nearer to -1/2 than to 0 or -1
DISTANCES = {
    "last_own": "last layer, own features",
    "last_infinite": "last layer, infinite width",
    "all_own": "all layers, own kernel",
    "all_infinite": "all layers, infinite width",
    "last_wrong": "last layer, one local step",
    "all_wrong": "all layers, one local step",
}
REMARKS = (
    "distance of predictions at test points after the last round, over how far they have moved; slopes of logarithms, "
    "mean and 95 % interval over seeds, each a network's own",
    "the last two are controls: infinite width, for one local step a round",
    "own kernel: that of the network at its start; its minimum-norm model is the centralised one",
)


@dataclass(frozen=True)
class WidthSettings:
    """Nodes with truths of their own, few examples and few dimensions: the width makes it overparameterised."""

    num_nodes: int = within(4, least=2)
    held: int = 6  # examples of a node
    dimension: int = 8
    num_test: int = 30
    widths: tuple[int, ...] = within((64, 256, 1024), count=3, increasing=True)
    local_steps: int = within(50, least=2)
    num_rounds: int = 20
    draws: int = 2  # networks of a seed, at each width
    step_factor: float = within(0.5, above=0, below=2)  # of a node's examples / the largest eigenvalue


class Task(NamedTuple):
    """Examples of one seed and the rate that its kernel allows."""

    x: np.ndarray  # [n, d] of norm 1
    y: np.ndarray  # [n], mean square 1
    x_test: np.ndarray
    partition: Partition
    rate: float


class Trained(NamedTuple):
    """Distances of one network after the last round."""

    seed: int
    draw: int
    width: int
    distances: dict[str, float]
    wrong: dict[str, float]  # of the last layer to wrong closed forms
    centralised: float  # of the whole network to its own kernel's minimum-norm model


def network(s: WidthSettings, width: int) -> Model:
    """Builds a network of one hidden layer of erf units, without biases."""
    return mlp(s.dimension, 1, (width,), "erf", b_std=None, dtype=jnp.float64)


def task(s: WidthSettings, seed: int) -> Task:
    """Draws the paper's regression on inputs of norm 1."""
    drawn = problems.regression(seed, s.num_nodes, s.held, s.dimension)
    x = drawn.x / np.linalg.norm(drawn.x, axis=1, keepdims=True)
    test = np.random.default_rng([seed, 1]).standard_normal((s.num_test, s.dimension))
    kernel = network(s, 1).kernel
    assert kernel is not None
    largest = np.linalg.eigvalsh(np.asarray(kernel(jnp.asarray(x)).ntk))[-1]
    return Task(x, drawn.y / np.sqrt(np.mean(drawn.y**2)), test / np.linalg.norm(test, axis=1, keepdims=True),
                drawn.partition, s.step_factor * s.held / float(largest))  # fmt: skip


def run(study: Study) -> Outcome:
    """Trains every width and draw of every seed."""
    found, s = list[Trained](), study.settings
    of, limit = task(s, study.seeds[0]), infinite(s, task(s, study.seeds[0]))
    for seed in study.each_seed():
        found += [trained(s, of, limit, (seed, draw), width) for width in s.widths for draw in range(s.draws)]
        study.keep([
            Metric(s.num_rounds, f"local_gd width={t.width} draw={t.draw}", seed, "test", name, value, 0, 0)
            for t in found if t.seed == seed for name, value in t.distances.items()
        ])  # fmt: skip
    return conclude(study, found)


class Limits(NamedTuple):
    """Kernels at infinite width: the tangent kernel and, in the same form, the kernel of the last layer's features."""

    tangent: KernelBlocks
    features: KernelBlocks


def infinite(s: WidthSettings, of: Task) -> Limits:
    """Computes the kernels of infinite width on the examples of ``of``."""
    kernel = network(s, 1).kernel
    assert kernel is not None
    tangent = kernel_blocks(kernel, of.x, of.x_test)
    assert tangent.nngp_train is not None and tangent.nngp_test_train is not None
    return Limits(tangent, KernelBlocks(tangent.nngp_train, tangent.nngp_test_train))


def trained(s: WidthSettings, of: Task, limit: Limits, which: tuple[int, int], width: int) -> Trained:
    """Trains the last layer and the whole network and compares each with closed forms; ``which`` is (seed, draw)."""
    seed, draw = which
    algorithm, of_last, model = _algorithms(s, width, of.rate)
    key, structure = jax.random.fold_in(jax.random.key(seed), draw), model.structure
    assert isinstance(structure, DenseStructure)
    start, end = _ends(s, algorithm, of.x, of, seed, key)
    scale = structure.layers[-1].weight_scale
    features, at_test = (
        scale * np.asarray(forward(structure, start, jnp.asarray(x))[0][-1]) for x in (of.x, of.x_test)
    )

    last = _ends(s, of_last, features, of, seed)[1]["weights"][:, 0]
    last_at_test = at_test @ last

    def closed(steps: int, rounds: int) -> np.ndarray:
        form = local_regression(features, of.y, of.partition, learning_rate=of.rate, local_steps=steps)
        return np.asarray(at_test @ form.models(rounds)[-1])

    before, before_test = (np.asarray(model.apply(start, jnp.asarray(x))) for x in (of.x, of.x_test))
    after_test = np.asarray(model.apply(end, jnp.asarray(of.x_test)))
    own = KernelBlocks(*(np.asarray(empirical_ntk(model, start, jnp.asarray(a), b)) for a, b in (
        (of.x, None), (of.x_test, jnp.asarray(of.x)))))  # fmt: skip

    def flowed(blocks: KernelBlocks, steps: int, f0: np.ndarray, f0_test: np.ndarray) -> np.ndarray:
        cohorts = schedule.drawn_cohorts(schedule.all_clients(s.num_nodes), None, s.num_rounds, seed, None)
        flow = federated_flow(blocks, of.y[:, None], of.partition, cohorts, Rule(steps, of.rate))
        return np.asarray(flow.predict(f0, f0_test, s.num_rounds, 0))

    def off(found: np.ndarray, predicted: np.ndarray, moved: np.ndarray) -> float:
        return float(np.linalg.norm(found - predicted) / np.linalg.norm(moved))

    zeros = np.zeros_like(before), np.zeros_like(before_test)
    full, one = s.local_steps, 1
    last_off = {
        name: off(last_at_test[:, None], flowed(limit.features, steps, *zeros), last_at_test)
        for name, steps in (("last_infinite", full), ("last_wrong", one))
    }
    moved = after_test - before_test
    flows = {"all_own": (own, full), "all_infinite": (limit.tangent, full), "all_wrong": (limit.tangent, one)}
    all_off = {name: off(after_test, flowed(*of_flow, before, before_test), moved) for name, of_flow in flows.items()}
    exact = off(last_at_test, closed(s.local_steps, s.num_rounds), last_at_test)
    wrong = {
        "a step less": off(last_at_test, closed(s.local_steps - 1, s.num_rounds), last_at_test),
        "a round more": off(last_at_test, closed(s.local_steps, s.num_rounds + 1), last_at_test),
    }
    centralised = before_test + own.ntk_test_train @ np.linalg.solve(own.ntk_train, of.y[:, None] - before)
    return Trained(
        seed, draw, width, {"last_own": exact, **last_off, **all_off}, wrong, off(after_test, centralised, moved)
    )


@functools.cache
def _algorithms(s: WidthSettings, width: int, rate: float) -> tuple[Algorithm, Algorithm, Model]:
    """Builds the algorithms of the whole network and of its last layer, and the network, cached for all seeds."""
    work, plan, model = Work(steps=s.local_steps, batch_size=None), schedule.all_clients(s.num_nodes), network(s, width)
    whole, last = (
        algorithms.fed_avg(m, plan, client_learning_rate=rate, work=work)
        for m in (model, linear(width, dtype=jnp.float64))
    )
    return whole, last, model


def _ends(
    s: WidthSettings, algorithm: Algorithm, x: np.ndarray, of: Task, seed: int, key: Any = None
) -> tuple[PyTree, PyTree]:
    """Returns the parameters at the start and after the last round."""
    held = datasets.federated_data(x, of.y[:, None], of.partition, jnp.float64)
    both = params_by_round(algorithm, held, num_rounds=s.num_rounds, seed=seed, every=s.num_rounds, start=key)
    return jax.tree.map(lambda leaf: leaf[0, 0], both), jax.tree.map(lambda leaf: leaf[-1, 0], both)


def slopes(found: list[Trained], name: str) -> MeanInterval:
    """Computes the slope of ln distance against ln width: its interval over seeds."""
    by_seed = grouped(found, "seed").values()
    return interval([log_slope([t.width for t in own], [t.distances[name] for t in own]) for own in by_seed])


def conclude(study: Study, found: list[Trained]) -> Outcome:
    """Builds the table of distances by width with their slopes, the figure and the verdicts."""
    rows, shown = list[dict[str, Any]](), list[dict[str, Any]]()
    rates = {name: slopes(found, name) for name in DISTANCES if name != "last_own"}
    for name, label in DISTANCES.items():
        row: dict[str, Any] = {"distance": label, "slope": rates.get(name)}
        for (width,), own in grouped(found, "width").items():
            row[f"w{width}"] = interval([t.distances[name] for t in own]).mean
        rows.append({**row, "slope": None if row["slope"] is None else row["slope"].row("mean")})
        shown.append(row)
    widths = study.settings.widths
    columns = {"distance": "{distance}"} | {f"width {w}": f"{{w{w}:.3g}}" for w in widths} | {"slope": "{slope:.3f}"}
    sheet = table(f"distance of predictions after {study.settings.num_rounds} rounds", shown, columns)
    _draw(study, found)
    verdicts = _verdicts(found, rates)
    wrong = disagreeing([v for v in verdicts if v.holds is not None])
    diverged = tuple("a network diverged" for t in found if not all(map(np.isfinite, t.distances.values())))
    return Outcome((sheet,), rows, _claims(found, rates, widths), remarks=REMARKS,
                   failed=(*diverged[:1], *wrong), verdicts=verdicts)  # fmt: skip


def _claims(found: list[Trained], rates: dict[str, MeanInterval], widths: tuple[int, ...]) -> tuple[Claim, ...]:
    own = interval([t.centralised for t in found if t.width == widths[-1]])
    faster = rates["all_own"]
    return (
        Claim("trained as a whole, it tends to the flow of its own kernel", f"slope {faster:.3f}", faster.below()),
        Claim("faster than to that of infinite width", f"slope {faster:.3f}", faster.below(SLOPE)),
        Claim("at the last round it is within 0.1 of its own kernel's minimum-norm model",
              f"distance {own:.3f} at width {widths[-1]}", own.below(0.1)),
    )  # fmt: skip


def _verdicts(found: list[Trained], rates: dict[str, MeanInterval]) -> tuple[Verdict, ...]:
    worst = max(t.distances["last_own"] for t in found)
    controls = {name: min(t.wrong[name] for t in found) for name in found[0].wrong}
    exact = exact_verdict(SUBJECT, "last layer and Lemma 1 on its own features, every width and seed", worst, controls,
                          EXACT)  # fmt: skip

    def slope(statement: str, right: str, wrong: str) -> Verdict:
        found, other = rates[right], rates[wrong]
        return Verdict.of(SUBJECT, statement, "",
                          (f"{found:.3f}", f"{SLOPE:g} +- {MARGIN:g}", found.within(SLOPE, MARGIN)),
                          (DISTANCES[wrong], f"{other:.3f}", abs(other.mean - SLOPE) > MARGIN))  # fmt: skip

    return (
        exact,
        slope("last layer to infinite width: slope against width", "last_infinite", "last_wrong"),
        slope("all layers to infinite width: slope against width", "all_infinite", "all_wrong"),
    )


def _draw(study: Study, found: list[Trained]) -> None:
    """Draws all distances except the exact one by width, each seed a point."""
    widths, seeds = np.array(study.settings.widths, float), sorted({t.seed for t in found})
    panels = []
    for title, names, wrong in (
        ("last layer", ("last_infinite",), "last_wrong"),
        ("all layers", ("all_infinite", "all_own"), "all_wrong"),
    ):
        values = {
            n: np.array(
                [
                    [
                        np.mean([t.distances[n] for t in found if (t.seed, t.width) == (seed, w)])
                        for w in study.settings.widths
                    ]
                    for seed in seeds
                ]
            )
            for n in (*names, wrong)
        }
        first = np.exp(np.mean(np.log(values[names[0]][:, 0])))
        root = {"width^-1/2": first * (widths / widths[0]) ** SLOPE}
        measured = {DISTANCES[n].split(", ")[1]: values[n] for n in (*names, wrong)}
        panels.append(BoundedPanel(title, widths, measured, root))
    title = f"Local-GD's predictions beside closed forms, L = {study.settings.local_steps}"
    bounded(panels, title, ("width", "relative distance"), None, study.figures.path("wide_network"), log="xy")


DEFAULT = WidthSettings(widths=(32, 128, 512, 2048), num_rounds=40)
PAPER = WidthSettings(
    num_nodes=10, held=20, dimension=50, widths=(64, 256, 1024, 4096), local_steps=200, num_rounds=200
)
SCALES = {"gaussian": by_scale(WidthSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), least_seeds=2, exact=True),)
