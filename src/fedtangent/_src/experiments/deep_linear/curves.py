"""What DeepLin's figures share: FedAvg's loss curves by N and K, beside infinite width and the bound (18).

FedAvg takes full-batch steps on the sum of squares of a client; all clients take part in every round, with equal
weights. Losses are per example, so that those of different N can be compared (the paper's eq. 4 divides by N). The
excess is the loss above that of least squares, computed without cancellation (``problems``). Each curve stands beside
its flow: the network at infinite width, which is a linear model, in closed form from the network's own start.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import theory
from fedtangent._src import data
from fedtangent._src.comparison.verdicts import Verdict, bounded_verdict
from fedtangent._src.data import partition as partitions
from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.experiments.deep_linear.problems import Problem, load
from fedtangent._src.experiments.lab.runner import Study, by_scale, within
from fedtangent._src.experiments.lab.trials import dealt, owners, scheme_name
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.models import deep_linear
from fedtangent._src.output.files import Metric
from fedtangent._src.theory.deep_linear.theorem import DeepLinearConstants, stable_learning_rate
from fedtangent._src.types import Algorithm, Model, Partition, PyTree

SUBJECT = "DeepLin, section V"
PRINTED_RATE = 5e-4  # eta of the paper
DELTA = 0.1  # of the theorem's width
FAR = 1e60  # a model with a larger entry has diverged


@dataclass(frozen=True)
class CurveSettings:
    """The paper's settings, and those that it does not give."""

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
        """Returns N and K of each of the figure's runs."""
        raise NotImplementedError


class Setting(NamedTuple):
    """Numbers of clients and of their local steps."""

    num_clients: int  # N
    local_steps: int  # K

    @property
    def ratio(self) -> Fraction:
        """Ratio K / N, on which the theorem's rate depends."""
        return Fraction(self.local_steps, self.num_clients)

    def __str__(self) -> str:
        return f"N = {self.num_clients}, K = {self.local_steps}"


SMOKE: dict[str, Any] = {"num_train": 300, "directions": 8, "width": 256, "num_rounds": 20, "learning_rate": 0.0}
DIGITS: dict[str, Any] = {"num_rounds": 100, "learning_rate": 0.0}
IMAGES: dict[str, Any] = {"num_train": 10_000, "num_rounds": 100, "learning_rate": 0.0}


def figure_scales(
    kind: Callable[..., CurveSettings], few: Any, more: Any, **digits_smoke: Any
) -> dict[str, dict[str, CurveSettings]]:
    """Returns a figure's settings by data set and scale.

    Args:
        kind: The figure's class of settings.
        few: ``num_clients`` of the smoke scale, and of the digits' default scale.
        more: ``num_clients`` of the images' default scale.
        **digits_smoke: Changes of the digits' smoke scale.
    """
    images = by_scale(
        kind(**{**SMOKE, "num_train": 2000}, num_clients=few),
        kind(**IMAGES, num_clients=more),
        kind(dtype="float32"),
    )
    small = kind(**SMOKE, num_clients=few, **digits_smoke)
    digits = by_scale(small, kind(**DIGITS, num_clients=few), kind(learning_rate=0.0))
    return {"digits": digits, "mnist": images, "fashion_mnist": images}


class Curve(NamedTuple):
    """Losses of one run, per example, after 0, .., R rounds."""

    seed: int
    classes: int  # of a client; 0: dealt at random
    setting: Setting
    floor: float  # of least squares
    excess: np.ndarray  # [R + 1], of the network
    flow: np.ndarray  # [R + 1], at infinite width
    limit: float  # of ``flow``
    contraction: float  # the largest factor by which a round shrinks the flow's distance to its limit
    constants: DeepLinearConstants
    variation: float  # total variation of clients' labels from the labels of all examples

    @property
    def loss(self) -> np.ndarray:
        """Training loss, [R + 1]."""
        return self.floor + self.excess

    @property
    def bound(self) -> np.ndarray:
        """The bound (18) on the excess, [R + 1]."""
        return np.asarray(self.excess[0] * self.constants.rate() ** np.arange(len(self.excess)))

    @property
    def error(self) -> float:
        """The largest ``|ln excess - ln flow|`` of any round."""
        return apart(self.excess, self.flow)


def apart(values: np.ndarray, other: np.ndarray) -> float:
    """Computes the largest ``|ln - ln'|`` of two curves [T]."""
    return float(np.abs(np.log(values / other)).max())


def rounds_to(excess: np.ndarray, level: float) -> float:
    """Computes the rounds until a curve first falls to ``level`` times its start, log-interpolated; inf if never."""
    gone = np.log(excess / excess[0])
    below = np.flatnonzero(gone <= math.log(level))
    if not len(below):
        return math.inf
    r = int(below[0])
    return float(r - 1 + (gone[r - 1] - math.log(level)) / (gone[r - 1] - gone[r]))


# ---- the runs -------------------------------------------------------------------------------------------------------


def problem(study: Study, seed: int) -> Problem:
    """Loads the data of one seed."""
    s = study.settings
    return load(study.dataset, study.data_dir, seed, s.num_train, s.directions, bool(s.centred))


def work_of(given: Problem, partition: Partition, learning_rate: float, local_steps: int) -> theory.FullBatchWork:
    """Builds the clients' work in a round, in the form of ``theory``."""
    return theory.full_batch_work(given.x, given.y, partition, learning_rate, local_steps)


def check(study: Study) -> None:
    """Raises ``ValueError`` for data that cannot be divided among the clients, or a rate at which a client diverges."""
    s = study.settings
    for seed in study.seeds:
        given = problem(study, seed)
        for classes in s.classes_per_client:
            for count in _client_counts(s):
                held = dealt(given.labels, count, classes, seed)
                # a cheap lower bound of the limit: the Frobenius norm is at least the spectral norm
                certain = _limit_of(s, given, float(np.bincount(owners(held), np.sum(given.x**2, axis=1)).max()))
                if s.learning_rate > certain:
                    refuse(s, stable_learning_rate(work_of(given, held, s.learning_rate, 1), s.depth))


def _client_counts(s: CurveSettings) -> list[int]:
    """Returns every N of the runs."""
    return sorted({setting.num_clients for setting in s.runs()})


def _limit_of(s: CurveSettings, given: Problem, squared_norm: float) -> float:
    """Computes the largest stable rate of a client whose inputs have that squared spectral norm."""
    return 2 * given.y.shape[1] / (s.depth * squared_norm)


def refuse(s: CurveSettings, limit: float) -> None:
    """Raises ``ValueError`` for a rate above the limit."""
    if s.learning_rate > limit:
        raise ValueError(
            f"learning_rate: got {s.learning_rate:g}, at which local descent diverges, must be at most {limit:.4g}, "
            "2 d_out / (L |X_c|^2) of the client with the largest |X_c|, or 0 for a share of that"
        )


def stable_rate(study: Study) -> float:
    """Computes the largest rate at which no client of any run diverges at infinite width."""
    s = study.settings
    return min(
        stable_learning_rate(work_of(given, dealt(given.labels, count, classes, seed), 1.0, 1), s.depth)
        for seed in study.seeds
        for given in [problem(study, seed)]
        for classes in s.classes_per_client
        for count in _client_counts(s)
    )


def rate_of(study: Study) -> float:
    """Returns the rate of all runs: the setting's, or ``share`` of the largest stable rate, cut to two digits."""
    s = study.settings
    if s.learning_rate:
        return float(s.learning_rate)
    wanted = s.share * stable_rate(study)
    unit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return float(f"{math.floor(wanted / unit) * unit:.1e}")


@functools.lru_cache(maxsize=16)
def _algorithm(sizes: tuple[int, int], s: CurveSettings, setting: Setting, rate: float) -> tuple[Model, Algorithm]:
    """Builds the network and its algorithm, cached so that all seeds share one compiled program."""
    model = deep_linear(*sizes, s.width, s.depth, dtype=jnp.dtype(s.dtype))
    return model, algorithms.fed_avg(
        model, schedule.all_clients(setting.num_clients), client_learning_rate=rate, loss="squared_error_sum",
        work=Work(steps=setting.local_steps, batch_size=None), averaging=Averaging(weighting="uniform"),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "size"))
def _product(model: Model, size: int, params: PyTree) -> jax.Array:
    """Computes the network as one matrix M [d, C], ``f(x) = M' x``, in float64."""
    return model.apply(jax.tree.map(lambda leaf: leaf[0].astype(jnp.float64), params), jnp.eye(size))


class Trained(NamedTuple):
    """Networks that the engine trained."""

    initial: list[np.ndarray]  # W^1 .. W^L, [fan_out, fan_in] each
    models: np.ndarray  # [R + 1, r, C], the network as one matrix


def trained(
    given: Problem, held: Partition, s: CurveSettings, setting: Setting, rate: float, seed: int, mapping: str = "auto"
) -> Trained:
    """Trains the deep linear network with FedAvg. Needs 64-bit types."""
    sizes = given.x.shape[1], given.y.shape[1]
    model, algorithm = _algorithm(sizes, s, setting, rate)
    read, initial = algorithm.params, list[np.ndarray]()
    assert read is not None  # FedAvg has global models

    def look(_: Algorithm, state: PyTree) -> dict[str, Any]:
        params = read(state)
        if not initial:
            initial.extend(np.array(layer[0][0], np.float64).T for layer in params[::2])
        return {"model": np.array(_product(model, sizes[0], params))}

    federated = data.federated_data(given.x, given.y, held, dtype=jnp.dtype(s.dtype))
    run = simulate(
        algorithm,
        federated,
        num_rounds=s.num_rounds,
        seed=seed,
        evaluation=Evaluation(1, look),
        devices=Devices(mapping),
    )
    return Trained(initial, np.stack([e.metrics["model"] for e in run.history.evaluations]))


def every_curve(study: Study, rate: float) -> tuple[list[Curve], list[Wrong]]:
    """Computes the curves of all runs and seeds, and for the first seed's runs the flows of wrong theories."""
    s, found, wrong = study.settings, list[Curve](), list[Wrong]()
    for seed in study.each_seed():
        given, spectrum = problem(study, seed), None
        for classes in s.classes_per_client:
            for setting in s.runs():
                held = dealt(given.labels, setting.num_clients, classes, seed)
                network = trained(given, held, s, setting, rate, seed)
                if spectrum is None:  # all runs of a seed start at the same network
                    spectrum = theory.deep_linear_spectrum(network.initial, np.diag(given.singular))
                work = work_of(given, held, rate, setting.local_steps)
                flow = theory.deep_linear_limit(work, s.depth)
                start = network.models[0]
                constants = _constants(given, s, setting, rate, spectrum, start)
                found.append(Curve(
                    seed, classes, setting, given.floor, given.excess(network.models),
                    given.excess(flow.models(s.num_rounds, start)), float(given.excess(flow.limit(start))),
                    flow.contraction, constants, partitions.heterogeneity(held, given.labels).total_variation,
                ))  # fmt: skip
                if seed == study.seeds[0]:
                    wrong.append(_wrong(given, s, work, flow, start))
                _keep(study, found[-1])
    return found, wrong


def _constants(
    given: Problem, s: CurveSettings, setting: Setting, rate: float, spectrum: tuple[float, float], start: np.ndarray
) -> DeepLinearConstants:
    """Computes the theorem's constants for targets W* X, as it assumes; ``spectrum`` is that of P(0)."""
    truth = float(np.linalg.norm(given.best, 2))
    residual = math.sqrt(2 * len(given.y) * float(given.excess(start)))
    return DeepLinearConstants(
        s.depth, s.width, given.y.shape[1], setting.num_clients, len(given.singular), float(given.singular[0]),
        float(given.singular[-1]), *spectrum, truth, residual, rate, setting.local_steps, DELTA,
    )  # fmt: skip


def _keep(study: Study, curve: Curve) -> None:
    """Writes the metrics of a run."""
    name = f"fed_avg {scheme_name(curve.classes)} {curve.setting}"
    study.keep([
        Metric(r, name, curve.seed, "train", metric, float(value), 0, 0)
        for metric, values in (("loss", curve.loss), ("excess", curve.excess), ("excess of the flow", curve.flow))
        for r, value in enumerate(values)
    ])  # fmt: skip


# ---- beside the theory ----------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """Excess of flows under wrong theories, [R + 1] each."""

    one_step: np.ndarray | None  # K forgotten; None if K = 1
    summed: np.ndarray  # N forgotten: clients' changes are added, not averaged; cut off where it diverges


def _wrong(
    given: Problem, s: CurveSettings, work: theory.FullBatchWork, flow: theory.LocalRegression, start: np.ndarray
) -> Wrong:
    one = None
    if work.local_steps > 1:
        one = given.excess(
            theory.deep_linear_limit(work._replace(local_steps=1), s.depth).models(s.num_rounds, start)
        )  # fmt: skip
    path = [start]
    while len(path) <= s.num_rounds and np.abs(path[-1]).max() < FAR:
        path.append(path[-1] + np.sum(flow.local(path[-1]) - path[-1], axis=0))
    return Wrong(one, given.excess(np.stack(path)))


def verdict(found: Sequence[Curve], wrong: Sequence[Wrong], sizes: str) -> Verdict:
    """Checks that every curve is near its own flow: nearer than half the distance to the nearest flow of another K / N.

    Controls: the flows with K forgotten and with N forgotten; the one that is nearest to its curve counts.
    """
    ratios, forgotten = list[float](), {"K forgotten": list[float](), "N forgotten": list[float]()}
    for curve, other in zip(found, wrong, strict=True):
        alike = [c for c in found if c.classes == curve.classes and c.setting.ratio != curve.setting.ratio]
        unit = min(apart(c.flow, curve.flow) for c in alike) / 2
        ratios.append(curve.error / unit)
        if other.one_step is not None:
            forgotten["K forgotten"].append(apart(curve.excess, other.one_step) / unit)
        forgotten["N forgotten"].append(apart(curve.excess[: len(other.summed)], other.summed) / unit)
    least = {name: min(values) for name, values in forgotten.items() if values}
    name = min(least, key=lambda n: least[n])
    statement = "|ln excess - ln flow| in any round / half of that to the nearest other K/N"
    return bounded_verdict(SUBJECT, statement, sizes, max(ratios), f"{name}: nearest of {len(least)}", least[name])
