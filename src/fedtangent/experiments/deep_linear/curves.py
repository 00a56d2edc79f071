"""What DeepLin's figures share: FedAvg's loss curves by N and K, beside infinite width and the bound (18).

FedAvg takes full-batch steps on the sum of squares of a client, all clients take part and count alike, through the one
federated loop. Losses are per example, so that those of different N can be compared (the paper's eq. 4 divides by N);
the excess is what is above least squares, measured without cancellation (``problems``). Beside each curve the flow: the
linear model that the network is at infinite width, from the network's own start, in closed form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data, theory
from fedtangent.compare.verdicts import Verdict, bounded_verdict
from fedtangent.data import partition as partitions
from fedtangent.engine.run import simulate
from fedtangent.experiments.deep_linear.problems import Problem, load
from fedtangent.experiments.lab.runner import Study, within
from fedtangent.experiments.lab.trials import dealt, scheme_name
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.models import deep_linear
from fedtangent.output.files import Metric
from fedtangent.theory.deep_linear.theorem import DeepLinearConstants, stable_learning_rate
from fedtangent.types import Algorithm, Model, Partition, PyTree

SUBJECT = "DeepLin, section V"
PRINTED_RATE = 5e-4  # eta of the paper
DELTA = 0.1  # of the theorem's width
FAR = 1e60  # a model so large has diverged


@dataclass(frozen=True)
class CurveSettings:
    """The paper's, and what it leaves open."""

    num_train: int = within(0, least=0)  # the first so many examples; 0: all
    directions: int = within(0, least=0)  # principal directions of the inputs that are kept; 0: their whole row space
    centred: int = within(0, least=0, most=1)  # 1: one-hot targets less 1 / C
    classes_per_client: tuple[int, ...] = within((0, 2), least=0)  # 0: dealt at random
    width: int = 500
    depth: int = 3
    num_rounds: int = within(100, least=4)
    learning_rate: float = within(PRINTED_RATE, at_least=0)  # 0: ``share`` of the largest stable one
    share: float = within(0.5, above=0, at_most=1)
    level: float = within(0.2, above=0, below=1)  # of the excess at the start, to which rounds are counted
    dtype: str = within("float64", of=("float32", "float64"))  # of training


class Setting(NamedTuple):
    """Clients and their local steps."""

    num_clients: int  # N
    local_steps: int  # K

    @property
    def ratio(self) -> Fraction:
        """K / N, on which the theorem's rate depends."""
        return Fraction(self.local_steps, self.num_clients)

    def __str__(self) -> str:
        return f"N = {self.num_clients}, K = {self.local_steps}"


class Curve(NamedTuple):
    """One run: losses are per example, after 0, .., R rounds."""

    seed: int
    classes: int  # a client's; 0: dealt at random
    setting: Setting
    floor: float  # of least squares
    excess: np.ndarray  # [R + 1], of the network
    flow: np.ndarray  # [R + 1], at infinite width
    limit: float  # what the flow's falls to
    contraction: float  # of the flow's distance to its limit, in a round, at most
    constants: DeepLinearConstants
    variation: float  # of clients' labels from all examples', total variation

    @property
    def loss(self) -> np.ndarray:
        """Training loss, [R + 1]."""
        return self.floor + self.excess

    @property
    def bound(self) -> np.ndarray:
        """Eq. (18) of the excess, [R + 1]."""
        return np.asarray(self.excess[0] * self.constants.rate() ** np.arange(len(self.excess)))

    @property
    def error(self) -> float:
        """The largest ``|ln excess - ln flow|`` of any round."""
        return apart(self.excess, self.flow)


def apart(values: np.ndarray, other: np.ndarray) -> float:
    """The largest ``|ln - ln'|`` of two curves [T]."""
    return float(np.abs(np.log(values / other)).max())


def rounds_to(excess: np.ndarray, level: float) -> float:
    """Rounds until a curve is first at ``level`` times its start, between rounds along its logarithm; inf if never."""
    gone = np.log(excess / excess[0])
    below = np.flatnonzero(gone <= math.log(level))
    if not len(below):
        return math.inf
    r = int(below[0])
    return float(r - 1 + (gone[r - 1] - math.log(level)) / (gone[r - 1] - gone[r]))


# ---- the runs -------------------------------------------------------------------------------------------------------


def problem(study: Study, seed: int) -> Problem:
    """The data of a seed."""
    s = study.settings
    return load(study.dataset, study.data_dir, seed, s.num_train, s.directions, bool(s.centred))


def work_of(given: Problem, partition: Partition, learning_rate: float, local_steps: int) -> theory.FullBatchWork:
    """The clients' work of a round."""
    return theory.full_batch_work(given.x, given.y, partition, learning_rate, local_steps)


def check(study: Study, settings: Sequence[Setting]) -> None:
    """Examples can be dealt to the clients, the network fits the data, and no client's descent diverges."""
    s = study.settings
    for seed in study.seeds:
        given = problem(study, seed)
        for classes in s.classes_per_client:
            for count in sorted({setting.num_clients for setting in settings}):
                held = dealt(given.labels, count, classes, seed)
                # the Frobenius norm is not below the spectral one, and costs nothing
                certain = _limit_of(s, given, float(np.bincount(_owners(held), np.sum(given.x**2, axis=1)).max()))
                if s.learning_rate > certain:
                    refuse(s, stable_learning_rate(work_of(given, held, s.learning_rate, 1), s.depth))


def _owners(held: Partition) -> np.ndarray:
    """The client of each example."""
    found = np.empty(len(held.indices), np.int64)
    found[held.indices] = np.repeat(np.arange(held.num_clients), held.sizes)
    return found


def _limit_of(s: CurveSettings, given: Problem, squared_norm: float) -> float:
    return 2 * given.y.shape[1] / (s.depth * squared_norm)


def refuse(s: CurveSettings, limit: float) -> None:
    """Raise ``ValueError`` for a rate above the limit."""
    if s.learning_rate > limit:
        raise ValueError(
            f"learning_rate: got {s.learning_rate:g}, at which local descent diverges, must be at most {limit:.4g}, "
            "2 d_out / (L |X_c|^2) of the client with the largest |X_c|, or 0 for a share of that"
        )


def stable_rate(study: Study, settings: Sequence[Setting], seeds: Iterable[int]) -> float:
    """The largest rate at which no client of any run diverges at infinite width."""
    s, counts = study.settings, sorted({setting.num_clients for setting in settings})
    return min(
        stable_learning_rate(work_of(given, dealt(given.labels, count, classes, seed), 1.0, 1), s.depth)
        for seed in seeds
        for given in [problem(study, seed)]
        for classes in s.classes_per_client
        for count in counts
    )


def rate_of(study: Study, settings: Sequence[Setting]) -> float:
    """Eta of all runs: the setting's, or a share of the largest stable one, cut to two digits."""
    s = study.settings
    if s.learning_rate:
        return float(s.learning_rate)
    wanted = s.share * stable_rate(study, settings, study.seeds)
    unit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return float(f"{math.floor(wanted / unit) * unit:.1e}")


@functools.lru_cache(maxsize=16)
def _algorithm(sizes: tuple[int, int], s: CurveSettings, setting: Setting, rate: float) -> tuple[Model, Algorithm]:
    """One of each for all seeds, so that they are compiled once."""
    model = deep_linear(*sizes, s.width, s.depth, dtype=jnp.dtype(s.dtype))
    return model, algorithms.fed_avg(
        model, schedule.all_clients(setting.num_clients), client_learning_rate=rate, loss="squared_error_sum",
        work=Work(steps=setting.local_steps), weighting="uniform",
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "size"))
def _product(model: Model, size: int, params: PyTree) -> jax.Array:
    """The network as one matrix M [d, C], ``f(x) = M' x``, in float64."""
    return model.apply(jax.tree.map(lambda leaf: leaf[0].astype(jnp.float64), params), jnp.eye(size))


class Trained(NamedTuple):
    """What the engine trained."""

    initial: list[np.ndarray]  # W^1 .. W^L, [fan_out, fan_in] each
    models: np.ndarray  # [R + 1, r, C], the network as one matrix


def trained(
    given: Problem, held: Partition, s: CurveSettings, setting: Setting, rate: float, seed: int, mapping: str = "auto"
) -> Trained:
    """FedAvg on the deep linear network. Needs 64-bit types."""
    sizes = given.x.shape[1], given.y.shape[1]
    model, algorithm = _algorithm(sizes, s, setting, rate)
    read, initial = algorithm.params, list[np.ndarray]()
    assert read is not None  # FedAvg has global models

    def look(state: PyTree) -> dict[str, Any]:
        params = read(state)
        if not initial:
            initial.extend(np.array(layer[0][0], np.float64).T for layer in params[::2])
        return {"model": np.array(_product(model, sizes[0], params))}

    federated = data.federated_data(given.x, given.y, held, dtype=jnp.dtype(s.dtype))
    run = simulate(algorithm, federated, s.num_rounds, seed, mapping, 1, look)
    return Trained(initial, np.stack([e.metrics["model"] for e in run.history.evaluations]))


def every_curve(study: Study, settings: Sequence[Setting], rate: float) -> tuple[list[Curve], list[Wrong]]:
    """Of every run of every seed, and of those of the first seed what wrong theories make of them."""
    s, found, wrong = study.settings, list[Curve](), list[Wrong]()
    for seed in study.each_seed():
        given, spectrum = problem(study, seed), None
        for classes in s.classes_per_client:
            for setting in settings:
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
    """Of the theorem for targets W* X, which is what it assumes."""
    truth = float(np.linalg.norm(given.best, 2))
    residual = math.sqrt(2 * len(given.y) * float(given.excess(start)))
    return DeepLinearConstants(
        s.depth, s.width, given.y.shape[1], setting.num_clients, len(given.singular), float(given.singular[0]),
        float(given.singular[-1]), *spectrum, truth, residual, rate, setting.local_steps, DELTA,
    )  # fmt: skip


def _keep(study: Study, curve: Curve) -> None:
    name = f"fed_avg {scheme_name(curve.classes)} {curve.setting}"
    study.keep([
        Metric(r, name, curve.seed, "train", metric, float(value), 0, 0)
        for metric, values in (("loss", curve.loss), ("excess", curve.excess), ("excess of the flow", curve.flow))
        for r, value in enumerate(values)
    ])  # fmt: skip


# ---- beside the theory ----------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """Flows of wrong theories, [R + 1] excess each; None where it is the right one."""

    one_step: np.ndarray | None  # K forgotten
    summed: np.ndarray  # N forgotten: clients' changes are added, not averaged; cut where it has diverged


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
    """Every curve is its flow's, to half of what tells it from the flow of the nearest other K / N.

    Controls: the same with K forgotten, and with N forgotten, of the curve where that is noticed least.
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
