"""Shared code of DeepLin's figures: FedAvg's loss curves by N and K, with infinite width and bound (18) of DeepLin.

FedAvg takes K full-batch steps on the sum of squares of a client; all N clients take part in every round, with equal
weights. Losses are per example, so that curves of different N can be compared (eq. (4) of DeepLin divides by N). The
excess is the loss above that of least squares, computed without cancellation (``problems``). The flow of a curve is the
network at infinite width, a linear model, from the same initial function, in closed form.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent import theory
from fedtangent._src.comparison.theorems.deep_linear import Size, fed_avg_of
from fedtangent._src.comparison.verdicts import Verdict, bounded_verdict
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.deep_linear.problems import Problem, load
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.runner import Study, by_scale, with_changes, within
from fedtangent._src.experiments.lab.trials import dealt, owners, scheme_name
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.storage import sha256
from fedtangent._src.theory.deep_linear.theorem import DeepLinearConstants, stable_learning_rate
from fedtangent._src.types import Algorithm, Model, Partition, PyTree

SUBJECT = "DeepLin, section V"
PRINTED_RATE = 5e-4  # eta of the paper
DELTA = 0.1  # of the theorem's width
FAR = 1e60  # a model with a larger entry has diverged
DRAWN = 50  # points of a curve
FLOWS = "infinite width, from the network's own start"


@dataclass(frozen=True)
class CurveSettings:
    """Settings of figures 2 to 4 of DeepLin: those that the paper gives, and choices that it leaves open."""

    num_train: int = within(0, least=0)  # the first examples; 0: all
    directions: int = within(0, least=0)  # principal directions of the inputs that are kept; 0: all
    centred: int = within(0, least=0, most=1)  # 1: one-hot targets less 1 / C
    classes_per_client: tuple[int, ...] = within((0, 2), least=0)  # 0: dealt at random
    width: int = 500
    depth: int = 3
    num_rounds: int = within(100, least=4)
    learning_rate: float = within(PRINTED_RATE, at_least=0)  # 0: ``share`` of the largest stable rate
    share: float = within(0.5, above=0, at_most=1)
    level: float = within(0.2, above=0, below=1)  # share of the initial excess to which rounds are counted
    dtype: str = within("float64", of=("float32", "float64"))  # of training

    def runs(self) -> list[Setting]:
        """Returns the numbers N of clients and K of local steps of each of the figure's runs."""
        raise NotImplementedError


class Setting(NamedTuple):
    """Number of clients and number of their local steps."""

    num_clients: int  # N
    local_steps: int  # K

    @property
    def ratio(self) -> Fraction:
        """Ratio K / N, on which the rate of DeepLin's theorem depends."""
        return Fraction(self.local_steps, self.num_clients)

    def __str__(self) -> str:
        return f"N = {self.num_clients}, K = {self.local_steps}"


SMOKE = "num_train=300 directions=8 width=256 num_rounds=20 learning_rate=0"


def figure_scales(
    paper: CurveSettings, few: str, more: str, digits_smoke: str = ""
) -> dict[str, dict[str, CurveSettings]]:
    """Returns a figure's settings by data set and scale.

    Args:
        paper: The paper's settings.
        few: Changes such as "num_clients=5,10,20", for the smoke scale of all data and the default scale of the digits.
        more: Changes such as "num_clients=10,20,40", for the default scale of the images.
        digits_smoke: Further changes, for the smoke scale of the digits only.
    """
    long = "num_rounds=100 learning_rate=0"
    images = by_scale(
        with_changes(paper, SMOKE, "num_train=2000", few),
        with_changes(paper, long, "num_train=10000", more),
        with_changes(paper, "dtype=float32"),
    )
    small = with_changes(paper, SMOKE, few, digits_smoke)
    digits = by_scale(small, with_changes(paper, long, few), with_changes(paper, "learning_rate=0"))
    return {"digits": digits, "mnist": images, "fashion_mnist": images}


class Curve(NamedTuple):
    """Losses of one run after 0, .., R rounds, with the theory of the same run.

    A loss is half the squared error, summed over outputs and averaged over examples.

    Attributes:
        classes: Classes of a client; 0 if examples are dealt at random.
        floor: Loss of least squares.
        excess: Loss of the network above ``floor``, [R + 1].
        flow: Loss above ``floor`` of a network of infinite width from the same initial function, [R + 1].
        limit: Value to which ``flow`` tends.
        contraction: Largest share of the infinitely wide model's distance from its limit that one round leaves.
        seed, setting: Seed of the run, and its numbers of clients and local steps.
        constants: Constants of DeepLin's theorem for this run.
        variation: Total variation between a client's labels and the labels of all examples, mean over clients.
    """

    seed: int
    classes: int
    setting: Setting
    floor: float
    excess: np.ndarray
    flow: np.ndarray
    limit: float
    contraction: float
    constants: DeepLinearConstants
    variation: float

    @property
    def loss(self) -> np.ndarray:
        """Training loss per example, [R + 1]."""
        return self.floor + self.excess

    @property
    def bound(self) -> np.ndarray:
        """Bound (18) of DeepLin on the loss above least squares after each round, [R + 1]."""
        return np.asarray(self.excess[0] * self.constants.rate() ** np.arange(len(self.excess)))

    @property
    def error(self) -> float:
        """Largest ``|ln excess - ln flow|`` of any round: how far the loss is from the loss at infinite width."""
        return apart(self.excess, self.flow)


def apart(values: np.ndarray, other: np.ndarray) -> float:
    """Computes the largest ``|ln values - ln other|`` of two loss curves in any round.

    Args:
        values: A curve, [T].
        other: Another one, [T].
    """
    return float(np.abs(np.log(values / other)).max())


def rounds_to(excess: np.ndarray, level: float) -> float:
    """Computes the number of rounds until a curve first falls to ``level`` times its start; inf if never.

    It interpolates the logarithm between rounds.

    Args:
        excess: The curve, [R + 1].
        level: Share of its start.
    """
    gone = np.log(excess / excess[0])
    below = np.flatnonzero(gone <= math.log(level))
    if not len(below):
        return math.inf
    r = int(below[0])
    return float(r - 1 + (gone[r - 1] - math.log(level)) / (gone[r - 1] - gone[r]))


# ---- the runs -------------------------------------------------------------------------------------------------------


def problem(study: Study, seed: int) -> Problem:
    """Loads the regression problem of one seed, with the study's data set and settings."""
    settings = study.settings
    return load(study.dataset, study.data_dir, seed, settings.num_train, settings.directions, bool(settings.centred))


def _divisions(study: Study) -> Iterator[tuple[Problem, Partition]]:
    """Yields examples and their partition for every seed, classes per client, and number of clients."""
    counts = sorted({setting.num_clients for setting in study.settings.runs()})
    for seed in study.seeds:
        examples = problem(study, seed)
        for classes, count in itertools.product(study.settings.classes_per_client, counts):
            yield examples, dealt(examples.labels, count, classes, seed)


def _stable_rate(study: Study, examples: Problem, clients: Partition) -> float:
    """Computes the largest learning rate at which no client's local steps diverge at infinite width."""
    return stable_learning_rate(theory.full_batch_work(examples.x, examples.y, clients, 1.0, 1), study.settings.depth)


def check(study: Study) -> None:
    """Raises ``ValueError`` for data that cannot be divided among the clients, or a rate at which a client diverges."""
    settings = study.settings
    for examples, clients in _divisions(study):
        # a cheap lower bound of the limit: the Frobenius norm is at least the spectral norm
        squares = np.bincount(owners(clients), np.sum(examples.x**2, axis=1))
        if settings.learning_rate <= 2 * examples.y.shape[1] / (settings.depth * float(squares.max())):
            continue
        if settings.learning_rate > (limit := _stable_rate(study, examples, clients)):
            raise ValueError(
                f"learning_rate: got {settings.learning_rate:g}, at which local descent diverges, must be at most "
                f"{limit:.4g}, the least 2 d_out / (L |X_c|^2) of all clients, or 0, which takes share times this limit"
            )


def stable_rate(study: Study) -> float:
    """Computes the largest learning rate at which no client of any run diverges at infinite width."""
    return min(_stable_rate(study, *division) for division in _divisions(study))


def rate_of(study: Study) -> float:
    """Returns the learning rate of all runs.

    It is ``settings.learning_rate`` unless that is 0. Else it is ``settings.share`` times the largest stable rate,
    rounded down to two digits.
    """
    settings = study.settings
    if settings.learning_rate:
        return float(settings.learning_rate)
    rate = settings.share * stable_rate(study)
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return float(f"{math.floor(rate / unit) * unit:.1e}")


@functools.partial(jax.jit, static_argnames=("model", "size"))
def _product(model: Model, size: int, params: PyTree) -> jax.Array:
    """Multiplies the network's layers, of C outputs, to one matrix M [d, C] with ``f(x) = M' x``, in float64.

    ``size`` is the number d of inputs; ``params`` are the parameters of all models; the first model is taken.
    """
    return model.apply(jax.tree.map(lambda leaf: leaf[0].astype(jnp.float64), params), jnp.eye(size))


class Trained(NamedTuple):
    """A trained deep linear network with r inputs and C outputs.

    Attributes:
        initial: Initial weight matrices of the layers, [outputs, inputs] each.
        models: The network as one matrix (the product of its layers) after every round, [R + 1, r, C].
    """

    initial: list[np.ndarray]  # W^1 .. W^L, [fan_out, fan_in] each
    models: np.ndarray


def _trained(
    examples: Problem,
    clients: Partition,
    settings: CurveSettings,
    setting: Setting,
    rate: float,
    seed: int,
    mapping: str = "auto",
) -> Trained:
    """Trains the deep linear network with FedAvg. Needs 64-bit types.

    ``setting`` has the numbers of clients and local steps, ``settings`` the sizes of the network and number of rounds;
    ``mapping`` says how the simulator maps over clients.
    """
    inputs, outputs, count = examples.x.shape[1], examples.y.shape[1], setting.num_clients
    size = Size(count, 0, inputs, outputs, settings.width, setting.local_steps, settings.num_rounds, settings.depth)
    algorithm = fed_avg_of(size, rate, settings.dtype)
    read, initial = algorithm.params, list[np.ndarray]()
    assert read is not None  # FedAvg has global models

    def look(_: Algorithm, state: PyTree) -> dict[str, np.ndarray]:
        params = read(state)
        if not initial:
            initial.extend(np.array(layer[0][0], np.float64).T for layer in params[::2])
        return {"model": np.array(_product(algorithm.model, inputs, params))}

    data = ft.data.federated_data(examples.x, examples.y, clients, dtype=jnp.dtype(settings.dtype))
    rounds, evaluation, devices = settings.num_rounds, ft.Evaluation(1, look), ft.Devices(mapping)
    run = ft.simulate(algorithm, data, num_rounds=rounds, seed=seed, evaluation=evaluation, devices=devices)
    return Trained(initial, np.stack([e.metrics["model"] for e in run.history.evaluations]))


def _finished(study: Study, examples: Problem, clients: Partition, setting: Setting, rate: float, seed: int) -> Trained:
    """Returns the trained network of a run: reads it from its file, or trains and writes it."""
    settings = study.settings
    depends_on = harness.decisive(settings, "width depth num_rounds dtype") | {
        "rate": rate,
        "steps": setting.local_steps,
    }
    text = json.dumps(depends_on, sort_keys=True)
    digest = sha256(text, examples.x, examples.y, owners(clients))[:16]
    name = f"fed_avg-N{setting.num_clients}-K{setting.local_steps}-{seed}-{digest}"
    if (arrays := harness.read_finished(study, name)) is None:
        network = _trained(examples, clients, settings, setting, rate, seed)
        layers = {f"layer{i}": layer for i, layer in enumerate(network.initial)}
        harness.write_finished(study, name, {"models": network.models, **layers})
        return network
    return Trained([arrays[f"layer{i}"] for i in range(len(arrays) - 1)], arrays["models"])


def _every_curve(study: Study, rate: float) -> tuple[list[Curve], list[Wrong]]:
    """Trains all runs of every seed and computes their curves; for the first seed also curves of wrong theories.

    ``rate`` is the learning rate. Runs that are finished are read from their files.
    """
    settings, curves, wrong = study.settings, list[Curve](), list[Wrong]()
    for seed in study.each_seed():
        examples, spectrum = problem(study, seed), None
        for classes, setting in itertools.product(settings.classes_per_client, settings.runs()):
            clients = dealt(examples.labels, setting.num_clients, classes, seed)
            network = _finished(study, examples, clients, setting, rate, seed)
            if spectrum is None:  # all runs of a seed start at the same network
                spectrum = theory.deep_linear_spectrum(network.initial, np.diag(examples.singular))
            work = theory.full_batch_work(examples.x, examples.y, clients, rate, setting.local_steps)
            flow, start = theory.deep_linear_limit(work, settings.depth), network.models[0]
            excess, of_flow = examples.excess(network.models), examples.excess(flow.models(settings.num_rounds, start))
            limit = float(examples.excess(flow.limit(start)))
            constants = _constants(examples, settings, work, spectrum, start)
            variation = ft.partition.heterogeneity(clients, examples.labels).total_variation
            theory_of = limit, flow.contraction, constants, variation
            curves.append(Curve(seed, classes, setting, examples.floor, excess, of_flow, *theory_of))
            if seed == study.seeds[0]:
                wrong.append(_wrong(examples, settings, work, flow, start))
            values = {"loss": curves[-1].loss, "excess": excess, "excess of the flow": of_flow}
            name = f"fed_avg {scheme_name(classes)} {setting}"
            study.keep(lab.metric_rows(name, seed, range(settings.num_rounds + 1), values))
    return curves, wrong


def _constants(
    examples: Problem,
    settings: CurveSettings,
    work: theory.FullBatchWork,
    spectrum: tuple[float, float],
    start: np.ndarray,
) -> DeepLinearConstants:
    """Computes the constants of DeepLin's theorem for one run.

    ``work`` has clients, local steps and rate, ``spectrum`` the initial kernel's extreme eigenvalues; ``start`` is the
    initial network as one matrix [r, C], for r inputs and C outputs.
    """
    truth = float(np.linalg.norm(examples.best, 2))
    residual = math.sqrt(2 * len(examples.y) * float(examples.excess(start)))
    sizes = settings.depth, settings.width, examples.y.shape[1], work.num_clients, len(examples.singular)
    norms = float(examples.singular[0]), float(examples.singular[-1]), *spectrum, truth, residual
    return DeepLinearConstants(*sizes, *norms, work.learning_rate, work.local_steps, DELTA)


class Wrong(NamedTuple):
    """Loss above least squares that two wrong theories predict after every round, [R + 1] each.

    Attributes:
        one_step: With one local step a round instead of K; None if K = 1.
        summed: With clients' changes added, not averaged; shorter if it diverges.
    """

    one_step: np.ndarray | None
    summed: np.ndarray


def _wrong(
    examples: Problem,
    settings: CurveSettings,
    work: theory.FullBatchWork,
    flow: theory.LocalRegression,
    start: np.ndarray,
) -> Wrong:
    """Computes the loss above least squares, by round, that two wrong theories predict.

    One has a single local step instead of K; the other adds the clients' changes instead of averaging them. ``flow`` is
    the right theory, ``start`` the initial model [r, C], for r inputs and C outputs.
    """
    one = None
    if work.local_steps > 1:
        one_step = theory.deep_linear_limit(work._replace(local_steps=1), settings.depth)
        one = examples.excess(one_step.models(settings.num_rounds, start))
    path = [start]
    while len(path) <= settings.num_rounds and np.abs(path[-1]).max() < FAR:
        path.append(path[-1] + np.sum(flow.local(path[-1]) - path[-1], axis=0))
    return Wrong(one, examples.excess(np.stack(path)))


def _verdict(curves: Sequence[Curve], wrong: Sequence[Wrong], sizes: str) -> Verdict:
    """Judges whether each curve is closer to its own theory than to the theory of another K / N.

    The curve's distance from the flow (theory at infinite width) of its run must be below half of the distance between
    this flow and the nearest flow of a run with another K / N. The controls are the wrong theories in ``wrong``. The
    text ``sizes`` names data and width.
    """
    # The verdict's control is the wrong theory that comes nearest to a curve.
    ratios, forgotten = list[float](), {"K forgotten": list[float](), "N forgotten": list[float]()}
    for curve, other in zip(curves, wrong, strict=True):
        alike = [c for c in curves if c.classes == curve.classes and c.setting.ratio != curve.setting.ratio]
        unit = max(min(apart(c.flow, curve.flow) for c in alike) / 2, np.finfo(float).tiny)
        ratios.append(curve.error / unit)
        if other.one_step is not None:
            forgotten["K forgotten"].append(apart(curve.excess, other.one_step) / unit)
        forgotten["N forgotten"].append(apart(curve.excess[: len(other.summed)], other.summed) / unit)
    least = {name: min(values) for name, values in forgotten.items() if values}
    name = min(least, key=lambda n: least[n])
    statement = "|ln excess - ln flow| in any round / half of that to the nearest other K/N"
    return bounded_verdict(SUBJECT, statement, sizes, max(ratios), f"{name}: nearest of {len(least)}", least[name])


# ---- what comes out -------------------------------------------------------------------------------------------------

Judge = Callable[[Sequence[Curve]], tuple[lab.Claim, ...]]
More = Callable[[Sequence[Curve]], tuple[lab.Sheet, ...]]


def outcome(study: Study, title: str, judge: Judge, more: More = lambda _: ()) -> lab.Outcome:
    """Runs one of DeepLin's figures: trains all runs and builds table, figures, claims and a verdict.

    The verdict says whether loss curves are near theory at infinite width (``_verdict``). If a run has diverged the
    outcome has only remarks and this reason for its failure.

    Args:
        study: Settings, seeds and output folder of the experiment.
        title: Title of the table.
        judge: Function from all curves to the claims.
        more: Function from all curves to further tables.
    """
    settings, rate = study.settings, rate_of(study)
    curves, wrong = _every_curve(study, rate)
    remarks = _remarks_on(study, curves, rate)
    lost = [c for c in curves if not np.isfinite(c.excess).all()]
    if lost:
        first = f"{scheme_name(lost[0].classes)}, {lost[0].setting}"
        diverged = f"{len(lost)} of {len(curves)} runs diverged at eta = {rate:g}, first {first}: give a smaller one"
        return lab.Outcome((), [], remarks=remarks, failed=(diverged,))
    _draw(study, curves, title, title.split(":")[0].lower().replace(". ", ""))
    near_flow = _verdict(curves[: len(wrong)], wrong, f"{study.dataset}, m = {settings.width}")
    sheets = (_sheet(study, curves, title), *more(curves))
    rows = [_row(c, settings.level) for c in curves]
    return lab.Outcome(sheets, rows, judge(curves), {}, remarks, lab.disagreeing([near_flow]), (near_flow,))


def _row(curve: Curve, level: float) -> lab.Row:
    """Builds the row of one run in result.json.

    Two of its entries are numbers of rounds until the loss above least squares falls to ``level`` times its start, for
    the network and at infinite width; None if it never does.
    """
    to = {name: rounds_to(values, level) for name, values in (("rounds", curve.excess), ("flow_rounds", curve.flow))}
    return {
        "seed": curve.seed,
        "clients": scheme_name(curve.classes),
        "num_clients": curve.setting.num_clients,
        "local_steps": curve.setting.local_steps,
        "total_variation": curve.variation,
        **{name: value if math.isfinite(value) else None for name, value in to.items()},
        "start": float(curve.excess[0]),
        "end": float(curve.excess[-1]),
        "flow_end": float(curve.flow[-1]),
        "limit": curve.limit,
        "least_squares": curve.floor,
        "error": curve.error,
        "learning_rate": curve.constants.learning_rate,
        "lambda_min": curve.constants.lambda_min,
        "lambda_max": curve.constants.lambda_max,
        "rho": curve.constants.rate(),
        "theorem_decay": 1 - curve.constants.rate(),
        "flow_decay": 1 - curve.contraction**2,
    }


def _sheet(study: Study, curves: Sequence[Curve], title: str) -> lab.Sheet:
    """Builds the table of all runs, with means over seeds."""
    level = study.settings.level
    means = lab.means([_row(c, level) for c in curves], "clients", "num_clients", "local_steps")
    columns = f"clients: {{clients}} | N: {{num_clients}} | K: {{local_steps}} | rounds to {level:g}: {{rounds:.1f}} | "
    columns += "of the flow: {flow_rounds:.1f} | excess at end: {end:.3g} | flow at end: {flow_end:.3g} | "
    columns += "flow tends to: {limit:.3g} | |ln(excess/flow)|: {error:.3f} | "
    columns += "1 - rho of (18): {theorem_decay:.1e} | 1 - rho of the flow: {flow_decay:.1e}"
    return lab.table(f"{title}: means of {len(study.seeds)} seeds", means, columns)


def _draw(study: Study, curves: Sequence[Curve], title: str, name: str) -> None:
    """Plots two figures of the first seed's loss curves.

    One has the loss above least squares, with bound (18) of DeepLin and the curves at infinite width. The other has the
    training loss, with the loss of least squares.
    """
    first = [c for c in curves if c.seed == study.seeds[0]]
    at = np.arange(0, study.settings.num_rounds + 1, max(1, study.settings.num_rounds // DRAWN))
    lowest = 0.5 * min(float(min(c.excess.min(), c.flow.min())) for c in first)
    excess, loss = list[BoundedPanel](), list[BoundedPanel]()
    for classes in study.settings.classes_per_client:
        group, clients = [c for c in first if c.classes == classes], scheme_name(classes)
        flows = {FLOWS: np.stack([c.flow[at] for c in group])}
        theorem = {f"bound (18), K/N = {c.setting.ratio}": c.bound[at] for c in group}
        measured = {str(c.setting): c.excess[None, at] for c in group}
        ends = [np.full(len(at), c.limit) for c in group if c.limit > lowest]
        limits = {"what these flows tend to": np.stack(ends)} if ends else {}
        excess.append(BoundedPanel(clients, at, measured, theorem, limits, flows))
        floor = group[0].floor
        losses, least = {n: v + floor for n, v in measured.items()}, {"least squares": np.full(len(at), floor)}
        loss.append(BoundedPanel(clients, at, losses, least, {}, {FLOWS: flows[FLOWS] + floor}))
    title, paths = f"DeepLin, {title}, {study.dataset}, seed {study.seeds[0]}", study.figures
    bounded(excess, title, ("round", "loss above least squares, an example"), lowest, paths.path(name))
    bounded(loss, title, ("round", "training loss, an example"), 0.9 * first[0].floor, paths.path(f"{name}_loss"))


def _remarks_on(study: Study, curves: Sequence[Curve], rate: float) -> tuple[str, ...]:
    """Returns remarks on the table's columns, on choices that DeepLin's paper leaves open, and on its conditions.

    They name the width and the step size that the theorem needs. ``rate`` is the step size of the runs.
    """
    settings, data, limit = study.settings, problem(study, study.seeds[0]), stable_rate(study)
    steps = max(rate / c.constants.step_limit() for c in curves)
    width = max(c.constants.least_width() for c in curves)
    share = (
        f", of which this is {settings.share:g}: {rate / PRINTED_RATE:.3g} times the printed {PRINTED_RATE:g}, "
        "which would hardly change the loss of so few examples"
    )
    directions = data.x.shape[1]
    exactness = ", which is exact" if directions == data.rank else ", the others are left out"
    lines = [
        "excess: loss an example above least squares; flow: the network at infinite width, from its own start; (excess "
        "/ flow): the largest of any round; 1 - rho: what (18), and the flow's slowest mode, lose in a round",
        "the paper prints neither how inputs are scaled nor targets: here inputs have length 1, targets are one-hot"
        f"{', less 1/C' if settings.centred else ', not centred'}; losses are per example",
        f"eta = {rate:g}; above {limit:.3g} some client of some seed diverges at infinite width"
        f"{'' if settings.learning_rate else share}",
        f"inputs of {data.dimension} numbers are of rank {data.rank}: runs are in {directions} principal directions"
        f"{exactness}",
        f"labels are no linear functions of inputs: least squares leaves {data.floor:.3g} an example, where the "
        "theorem assumes 0; its bound (18) is drawn at the excess for comparison only",
        f"the theorem asks for a width of {width:.2g} (here {settings.width}) and an eta {steps:.2g} times smaller",
        f"rounds to {settings.level:g}: of the excess at the start",
    ]
    if settings.dtype == "float32":
        lines.append("training is in float32: its products are exact to about 1e-7, so an excess below 1e-13 of the")
        lines[-1] += " loss is rounding"
    return tuple(lines)
