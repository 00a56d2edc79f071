"""Beyond Local-GD's paper: a wide network under Local-GD beside the closed forms, last layer only and all layers.

If only the last layer is trained, on the fixed features of the first, the closed form of linear regression (Lemma 1 of
Local-GD) is exact at any width; at infinite width the features' kernel is the covariance of the initial functions. If
the whole network is trained, it is compared with the federated flow of its tangent kernel at the start, and with the
flow of infinite width. Distances are of predictions at test points, relative to how far the prediction has moved; their
slopes against width are fitted. Networks have one hidden layer of erf units without biases, in the neural tangent
parameterization. All seeds have the data of the first; each seed draws its networks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.local_gd import problems
from fedtangent._src.models.dense import DenseStructure, forward
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.types import Algorithm, Key, Model, Partition, PyTree

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
    """Settings of the nodes and their regression data, and of networks of several widths."""

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
    """Training and test examples of the nodes, and the learning rate.

    The rate is below the largest at which gradient descent on a node is stable at infinite width.
    """

    x: np.ndarray  # [n, d] of norm 1
    y: np.ndarray  # [n], mean square 1
    x_test: np.ndarray
    partition: Partition
    rate: float


class Trained(NamedTuple):
    """Distances of one network's predictions from theory after the last round.

    Distances are at test points, relative to how far training moved the prediction.

    Attributes:
        draw: Number of the network among those of its seed and width.
        distances: Distance from each theory by the keys of DISTANCES, such as "last_own" (the last layer, from the
            closed form on the features of this network).
        wrong: Distance of the trained last layer from two wrong closed forms, "a step less" and "a round more".
        centralised: Distance of the whole network from the minimum-norm fit with its tangent kernel at the start.
    """

    seed: int
    draw: int
    width: int
    distances: dict[str, float]
    wrong: dict[str, float]
    centralised: float


def _network(settings: WidthSettings, width: int) -> Model:
    """Builds a network of one hidden layer of erf units, without biases."""
    return ft.models.mlp(settings.dimension, 1, (width,), "erf", b_std=None, dtype=jnp.float64)


def _task(settings: WidthSettings, seed: int) -> Task:
    """Draws Local-GD's regression, scales inputs to norm 1 and targets to mean square 1, and sets the learning rate."""
    problem = problems.regression(seed, settings.num_nodes, settings.held, settings.dimension)
    test = np.random.default_rng([seed, 1]).standard_normal((settings.num_test, settings.dimension))
    x, x_test = (points / np.linalg.norm(points, axis=1, keepdims=True) for points in (problem.x, test))
    kernel = _network(settings, 1).kernel
    assert kernel is not None
    largest = np.linalg.eigvalsh(np.asarray(kernel(jnp.asarray(x)).ntk))[-1]
    y, rate = problem.y / np.sqrt(np.mean(problem.y**2)), settings.step_factor * settings.held / float(largest)
    return Task(x, y, x_test, problem.partition, rate)


def run(study: Study) -> lab.Outcome:
    """Trains networks of every width and seed, several of each, and compares them with theory after the last round.

    Each network is trained as a whole and, separately, in its last layer only. Theory is the closed form of the last
    layer's regression, and the federated flow for the whole. All seeds have the data of the first one.
    """
    settings, results = study.settings, list[Trained]()
    task = _task(settings, study.seeds[0])
    limit = _infinite(settings, task)
    for seed in study.each_seed():
        for width, draw in itertools.product(settings.widths, range(settings.draws)):
            results.append(_trained(settings, task, limit, (seed, draw), width))
            name = f"local_gd width={width} draw={draw}"
            study.keep(lab.metric_rows(name, seed, settings.num_rounds, results[-1].distances, "test"))
    return _conclude(study, results)


class Limits(NamedTuple):
    """Kernels at infinite width if the whole network is trained (``tangent``) or only its last layer (``features``)."""

    tangent: ft.kernels.KernelBlocks
    features: ft.kernels.KernelBlocks


def _infinite(settings: WidthSettings, task: Task) -> Limits:
    """Computes the tangent kernel and the last-layer kernel of infinite width, on the examples of ``task``."""
    kernel = _network(settings, 1).kernel
    assert kernel is not None
    tangent = ft.kernels.kernel_blocks(kernel, task.x, task.x_test)
    assert tangent.nngp_train is not None and tangent.nngp_test_train is not None
    return Limits(tangent, ft.kernels.KernelBlocks(tangent.nngp_train, tangent.nngp_test_train))


def _trained(settings: WidthSettings, task: Task, limit: Limits, which: tuple[int, int], width: int) -> Trained:
    """Trains the last layer and, separately, the whole of one network; computes the distances from theory.

    Args:
        settings: Settings.
        task: Examples and learning rate.
        limit: Kernels of infinite width.
        which: Seed, and number of the network among the networks of this seed and width.
        width: Width of the network.
    """
    seed, draw = which
    algorithm, of_last, model = _algorithms(settings, width, task.rate)
    key, structure = jax.random.fold_in(jax.random.key(seed), draw), model.structure
    assert isinstance(structure, DenseStructure)
    start, end = _ends(settings, algorithm, task.x, task, seed, key)
    scale, points = structure.layers[-1].weight_scale, (task.x, task.x_test)
    features, at_test = (scale * np.asarray(forward(structure, start, jnp.asarray(x))[0][-1]) for x in points)
    last = _ends(settings, of_last, features, task, seed)[1]["weights"][:, 0]
    last_at_test = at_test @ last

    def closed(steps: int, rounds: int) -> np.ndarray:
        fit = partial(ft.theory.local_regression, features, task.y, task.partition)
        form = fit(learning_rate=task.rate, local_steps=steps)
        return np.asarray(at_test @ form.models(rounds)[-1])

    before, before_test = (np.asarray(model.apply(start, jnp.asarray(x))) for x in points)
    after_test = np.asarray(model.apply(end, jnp.asarray(task.x_test)))
    pairs = ((task.x, None), (task.x_test, jnp.asarray(task.x)))
    of_start = ft.kernels.KernelBlocks(
        *(np.asarray(ft.kernels.empirical_ntk(model, start, jnp.asarray(a), b)) for a, b in pairs)
    )

    def flowed(blocks: ft.kernels.KernelBlocks, steps: int, f0: np.ndarray, f0_test: np.ndarray) -> np.ndarray:
        schedule = ft.schedules.all_clients(settings.num_nodes)
        cohorts = ft.schedules.drawn_cohorts(schedule, None, settings.num_rounds, seed, None)
        rule = ft.theory.Rule(steps, task.rate)
        flow = ft.theory.federated_flow(blocks, task.y[:, None], task.partition, cohorts, rule)
        return np.asarray(flow.predict(f0, f0_test, settings.num_rounds, 0))

    def off(simulated: np.ndarray, predicted: np.ndarray, moved: np.ndarray) -> float:
        return float(np.linalg.norm(simulated - predicted) / np.linalg.norm(moved))

    zeros, steps = (np.zeros_like(before), np.zeros_like(before_test)), settings.local_steps
    distances = {
        "last_own": off(last_at_test, closed(steps, settings.num_rounds), last_at_test),
        "last_infinite": off(last_at_test[:, None], flowed(limit.features, steps, *zeros), last_at_test),
        "last_wrong": off(last_at_test[:, None], flowed(limit.features, 1, *zeros), last_at_test),
    }
    flows = {"all_own": (of_start, steps), "all_infinite": (limit.tangent, steps), "all_wrong": (limit.tangent, 1)}
    moved = after_test - before_test
    distances |= {name: off(after_test, flowed(*flow, before, before_test), moved) for name, flow in flows.items()}
    wrong = {
        "a step less": off(last_at_test, closed(steps - 1, settings.num_rounds), last_at_test),
        "a round more": off(last_at_test, closed(steps, settings.num_rounds + 1), last_at_test),
    }
    solved = np.linalg.solve(of_start.ntk_train, task.y[:, None] - before)
    centralised = off(after_test, before_test + of_start.ntk_test_train @ solved, moved)
    return Trained(seed, draw, width, distances, wrong, centralised)


@functools.cache
def _algorithms(settings: WidthSettings, width: int, rate: float) -> tuple[Algorithm, Algorithm, Model]:
    """Builds Local-GD for the whole network and for its last layer, and the network; cached for all seeds."""
    network, last = _network(settings, width), ft.models.linear(width, dtype=jnp.float64)
    schedule, work = ft.schedules.all_clients(settings.num_nodes), ft.Work(steps=settings.local_steps, batch_size=None)
    whole, of_last = (ft.fed_avg(m, schedule, client_learning_rate=rate, work=work) for m in (network, last))
    return whole, of_last, network


def _ends(
    settings: WidthSettings, algorithm: Algorithm, x: np.ndarray, task: Task, seed: int, key: Key | None = None
) -> tuple[PyTree, PyTree]:
    """Trains ``algorithm`` on inputs ``x`` [n, d] and the targets of ``task``; returns the first and last parameters.

    ``key``, or without it ``seed``, draws the initial parameters.
    """
    data = ft.data.federated_data(x, task.y[:, None], task.partition, jnp.float64)
    both = ft.params_by_round(
        algorithm, data, num_rounds=settings.num_rounds, seed=seed, every=settings.num_rounds, start=key
    )
    return jax.tree.map(lambda leaf: leaf[0, 0], both), jax.tree.map(lambda leaf: leaf[-1, 0], both)


def _conclude(study: Study, results: list[Trained]) -> lab.Outcome:
    """Builds the table of distances by width with their slopes, the figure, the claims and the verdicts."""
    rows, entries, widths = list[lab.Row](), list[lab.Row](), study.settings.widths

    def slope(name: str) -> lab.MeanInterval:
        return lab.log_slopes(results, "width", lambda t: t.distances[name], "seed")

    rates = {name: slope(name) for name in DISTANCES if name != "last_own"}
    for name, label in DISTANCES.items():
        rate = rates.get(name)
        by_width = {f"w{w}": lab.interval(t.distances[name] for t in results if t.width == w).mean for w in widths}
        entries.append({"distance": label, "slope": rate, **by_width})
        rows.append({**entries[-1], "slope": None if rate is None else rate.row("mean")})
    columns = ["distance: {distance}", *(f"width {w}: {{w{w}:.3g}}" for w in widths), "slope: {slope:.3f}"]
    title = f"distance of predictions after {study.settings.num_rounds} rounds"
    sheet, verdicts = lab.table(title, entries, " | ".join(columns)), _verdicts(results, rates)
    _draw(study, results)
    is_finite = all(map(np.isfinite, (value for t in results for value in t.distances.values())))
    wrong = lab.disagreeing([v for v in verdicts if v.holds is not None])
    failed = wrong if is_finite else ("a network diverged", *wrong)
    claims = _claims(results, rates, widths)
    return lab.Outcome((sheet,), rows, claims, remarks=REMARKS, failed=failed, verdicts=verdicts)


def _claims(
    results: list[Trained], rates: dict[str, lab.MeanInterval], widths: tuple[int, ...]
) -> tuple[lab.Claim, ...]:
    centralised, faster = lab.interval(t.centralised for t in results if t.width == widths[-1]), rates["all_own"]
    near = "at the last round it is within 0.1 of its own kernel's minimum-norm model"
    return (
        faster.claim_below("trained as a whole, it tends to the flow of its own kernel", "slope {:.3f}"),
        faster.claim_below("faster than to that of infinite width", "slope {:.3f}", SLOPE),
        centralised.claim_below(near, f"distance {{:.3f}} at width {widths[-1]}", 0.1),
    )


def _verdicts(results: list[Trained], rates: dict[str, lab.MeanInterval]) -> tuple[Verdict, ...]:
    largest = max(t.distances["last_own"] for t in results)
    controls = {name: min(t.wrong[name] for t in results) for name in results[0].wrong}
    statement = "last layer and Lemma 1 on its own features, every width and seed"

    def slope(statement: str, name: str, control: str) -> Verdict:
        rate, other = rates[name], rates[control]
        right = f"{rate:.3f}", f"{SLOPE:g} +- {MARGIN:g}", rate.within(SLOPE, MARGIN)
        wrong = DISTANCES[control], f"{other:.3f}", abs(other.mean - SLOPE) > MARGIN
        return Verdict.of(SUBJECT, statement, "", right, wrong)

    return (
        exact_verdict(SUBJECT, statement, largest, controls, EXACT),
        slope("last layer to infinite width: slope against width", "last_infinite", "last_wrong"),
        slope("all layers to infinite width: slope against width", "all_infinite", "all_wrong"),
    )


def _draw(study: Study, results: list[Trained]) -> None:
    """Plots distances of trained networks from theory against width: a point for each seed, the mean of its networks.

    Distances from the exact closed form of the last layer are left out: they are only rounding errors.
    """
    settings, seeds = study.settings, sorted({t.seed for t in results})
    widths, panels = np.array(settings.widths, float), []

    def mean(seed: int, width: int, name: str) -> float:
        return float(np.mean([t.distances[name] for t in results if (t.seed, t.width) == (seed, width)]))

    for title, names in (
        ("last layer", ("last_infinite", "last_wrong")),
        ("all layers", ("all_infinite", "all_own", "all_wrong")),
    ):
        values = {n: np.array([[mean(seed, w, n) for w in settings.widths] for seed in seeds]) for n in names}
        first = np.exp(np.mean(np.log(values[names[0]][:, 0])))
        root = {"width^-1/2": first * (widths / widths[0]) ** SLOPE}
        measured = {DISTANCES[n].split(", ")[1]: values[n] for n in names}
        panels.append(BoundedPanel(title, widths, measured, root))
    title = f"Local-GD's predictions beside closed forms, L = {settings.local_steps}"
    bounded(panels, title, ("width", "relative distance"), None, study.figures.path("wide_network"), log="xy")


DEFAULT = WidthSettings(widths=(32, 128, 512, 2048), num_rounds=40)
PAPER = with_changes(
    WidthSettings(), "num_nodes=10 held=20 dimension=50 widths=64,256,1024,4096 local_steps=200 num_rounds=200"
)
SCALES = {"gaussian": by_scale(WidthSettings(), DEFAULT, PAPER)}
ENTRIES = (experiment(__name__, run, SCALES, ("localgd",), least_seeds=2, exact=True),)
