"""Coverage of federated conformal sets (Lu et al., 2023), and of the intervals of ensembles and Gaussian processes.

Clients differ in the noise of their targets (sine) or in their classes (digits). Fed-ensemble trains once for each
seed; then every client's other examples are split many times into calibration and test examples. Without calibration,
the intervals of the ensemble and of the Gaussian process only say how much networks differ by their initial weights,
and ignore the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src import checks
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.output.line_plots import points_with_errors
from fedtangent._src.types import Partition

NOISES = (0.1, 0.2, 0.8)  # of the sine's clients
CLASSES = ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))  # of the digits' clients
EVERYONE = "mixture"
COLUMNS = (
    "sets: {method} | coverage: {coverage:.3f} | least client: {least:.3f} | promised: {promised} | size: {size:.2f}"
)
REMARKS = (
    "coverage: of the mixture of clients, mean over splits and seeds; least client: of the one that is covered least; "
    "size: length of an interval, or number of classes",
    "own: intervals or sets at the same level that use no calibration examples",
)


@dataclass(frozen=True)
class CoverageSettings:
    """Settings of the study of coverage: sizes of the federation, training, and splits for calibration and test.

    Attributes:
        alpha: Probability with which a set may miss its target.
        num_train: Training examples of each client.
        num_calibration: Calibration examples of each client in a split.
        num_test: Test examples of each client in a split.
        num_splits: Number of splits of the held-out examples, for each seed.
        num_models: Number of models of the ensemble.
        width: Width of the network's hidden layer.
        num_rounds: Number of rounds.
        learning_rate: Learning rate of the clients on the sine; on the digits they take ten times this rate.
    """

    alpha: float = within(0.1, above=0, below=1)
    num_train: int = 60
    num_calibration: int = within(30, least=2)
    num_test: int = 70
    num_splits: int = within(100, least=2)
    num_models: int = within(5, least=2)
    width: int = 128
    num_rounds: int = 40
    learning_rate: float = within(0.2, above=0)


class Predictors(NamedTuple):
    """The trained predictors, and the targets and clients of the held-out examples.

    ``predicted`` has their predictions at these n examples by name: "ensemble" and, on the sine, "Gaussian process".
    """

    predicted: dict[str, ft.types.Prediction | ft.types.Gaussian]  # by name of the predictor
    targets: np.ndarray
    clients: Partition


class Covered(NamedTuple):
    """Coverage and size of the prediction sets of one method with one seed, means over splits.

    Attributes:
        method: Name of the predictor and of its kind of set.
        promised: Whether the sets are conformal, so that their coverage is guaranteed.
        overall: Share of all clients' test examples whose set contains the target.
        by_client: This share for each client, [N].
        size: Mean size of a set: length of an interval, or number of classes.
    """

    method: str
    promised: bool
    seed: int
    overall: float
    by_client: np.ndarray
    size: float

    @property
    def least(self) -> float:
        """Coverage of the client with the lowest coverage."""
        return float(self.by_client.min())


def _examples(study: Study, seed: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Returns all inputs and targets, and for each client the rows of its examples in random order.

    ``rng`` draws the examples of the sine. Of a data set all training and test examples are taken, in an order that
    ``rng`` draws.
    """
    if study.dataset == "sine":
        count = study.settings.num_train + 4 * (study.settings.num_calibration + study.settings.num_test)
        x = rng.uniform(-1, 1, (len(NOISES) * count, 1))
        y = np.sin(np.pi * x) + np.repeat(NOISES, count)[:, None] * rng.normal(size=x.shape)
        return x, y, np.split(np.arange(len(x)), len(NOISES))
    loaded = ft.data.load(study.dataset, study.data_dir, seed)
    x, labels = np.concatenate([loaded.x_train, loaded.x_test]), np.concatenate([loaded.y_train, loaded.y_test])
    return x, labels, [rng.permutation(np.flatnonzero(np.isin(labels, classes))) for classes in CLASSES]


def _trained(study: Study, seed: int) -> Predictors:
    """Trains Fed-ensemble on the first ``num_train`` examples of every client, and predicts the others.

    On the sine, a Gaussian process with the same training examples predicts them too.
    """
    settings, rng = study.settings, np.random.default_rng(seed)
    x, y, rows = _examples(study, seed, rng)
    train, held_out = (np.concatenate([part[where] for part in rows]) for where in _parts(settings.num_train))
    train_clients, clients = (
        ft.partition.by_user(np.repeat(np.arange(len(rows)), sizes))
        for sizes in ([settings.num_train] * len(rows), [len(part) - settings.num_train for part in rows])
    )
    is_sine = study.dataset == "sine"
    model = ft.models.mlp(math.prod(x.shape[1:]), 1 if is_sine else 10, (settings.width,), "erf", b_std=0.1)
    schedule = ft.schedules.per_client_permutations(len(rows), settings.num_models)
    loss, rate = (
        ("squared_error", settings.learning_rate) if is_sine else ("cross_entropy", 10 * settings.learning_rate)
    )
    work = ft.Work(steps=10, batch_size=None)
    algorithm = ft.fed_ensemble(model, schedule, client_learning_rate=rate, work=work, loss=loss)
    run = ft.simulate(algorithm, (x[train], y[train]), train_clients, num_rounds=settings.num_rounds, seed=seed)
    predicted: dict[str, ft.types.Prediction | ft.types.Gaussian] = {
        "ensemble": algorithm.predict(run.state, x[held_out])
    }
    if is_sine:
        assert model.kernel is not None
        blocks = ft.kernels.kernel_blocks(model.kernel, x[train], x[held_out])
        limit = ft.theory.gp_limit(blocks, y[train])
        variance = np.maximum(np.diag(limit.cov), 0.0)  # 0 to rounding among so many training points
        predicted["Gaussian process"] = limit._replace(cov=np.diag(variance))
    return Predictors(predicted, y[held_out], clients)


def _parts(count: int) -> tuple[slice, slice]:
    return slice(None, count), slice(count, None)


def _own(
    predictor: ft.types.Prediction | ft.types.Gaussian, of: Predictors, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the prediction sets that a predictor gives without calibration, at level 1 - alpha.

    ``of`` has the targets. Returns whether each set contains the target, and the sizes of the sets, both [n] for the n
    held-out examples.
    """
    if np.issubdtype(of.targets.dtype, np.integer):
        classes = np.arange(predictor.mean.shape[1])
        shape = len(of.targets), len(classes)
        scores = [ft.measures.conformal_scores(predictor, np.full(shape[0], c), "adaptive") for c in classes]
        sets = np.stack(scores, axis=1) <= 1 - alpha
        return sets[np.arange(shape[0]), of.targets], sets.sum(axis=1)
    intervals = ft.measures.predictive_interval(predictor, level=1 - alpha)
    low, high = np.asarray(intervals.low), np.asarray(intervals.high)
    return ((low <= of.targets) & (of.targets <= high))[:, 0], (high - low)[:, 0]


def _covered(study: Study, of: Predictors, seed: int) -> Iterator[Covered]:
    """Measures coverage and size of each method's prediction sets, on random splits of the held-out examples.

    A method is a predictor in ``of`` with a conformal score, or with its own sets, which need no calibration.
    """
    settings, rng = study.settings, np.random.default_rng(seed + 1)
    scores = ("residual", "normalised") if study.dataset == "sine" else ("probability", "adaptive")
    of_own_sets = {name: _own(predictor, of, settings.alpha) for name, predictor in of.predicted.items()}
    results: dict[tuple[str, bool], list[tuple[np.ndarray, float]]] = {}
    for _ in range(settings.num_splits):
        shuffled = [rng.permutation(of.clients.client(k)) for k in range(of.clients.num_clients)]
        calibration = [rows[: settings.num_calibration] for rows in shuffled]
        test = [rows[settings.num_calibration :][: settings.num_test] for rows in shuffled]
        for name, predictor in of.predicted.items():
            for score in scores if name == "ensemble" else scores[:1]:  # the process has variance 0 at some points
                sets = ft.measures.conformal_predictor(predictor, of.targets, calibration, settings.alpha, score=score)
                is_covered, of_all = np.asarray(sets.covers(predictor, of.targets)), sets.sets(predictor)
                size = of_all.sum(axis=1) if isinstance(of_all, np.ndarray) else np.asarray(of_all.length)[:, 0]
                key = f"{name}, conformal: {score}", True
                results.setdefault(key, []).append(_on(is_covered, size, test))
            results.setdefault((f"{name}, own", False), []).append(_on(*of_own_sets[name], test))
    for (method, promised), splits in results.items():
        shares, sizes = (np.mean(part, axis=0) for part in zip(*splits, strict=True))
        yield Covered(method, promised, seed, float(np.mean(shares)), np.asarray(shares), float(sizes))


def _on(is_covered: np.ndarray, size: np.ndarray, test: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Computes the coverage of each client on its ``test`` rows, and the mean size of the sets over all these rows.

    ``is_covered`` says for each example whether its set contains the target; ``size`` has the sizes of the sets.
    """
    return np.array([np.mean(is_covered[rows]) for rows in test]), float(np.mean(size[np.concatenate(test)]))


def check(study: Study) -> None:
    """Raises ``ValueError`` if a client of the first seed has too few examples for the settings."""
    settings, seed = study.settings, study.seeds[0]
    least = min(map(len, _examples(study, seed, np.random.default_rng(seed))[2]))
    held_out = settings.num_calibration + settings.num_test
    checks.whole("num_calibration + num_test", held_out, most=least - 1)
    checks.whole("num_train", settings.num_train, most=least - held_out)


def run(study: Study) -> lab.Outcome:
    """Trains with every seed, measures how many targets each method's sets contain, and judges this coverage."""
    results = list[Covered]()
    for seed in study.each_seed():
        for one in _covered(study, _trained(study, seed), seed):
            results.append(one)
            study.keep(
                lab.metric_rows(one.method, seed, [study.settings.num_rounds], {"coverage": [one.overall]}, "test")
            )
    by_method = {method: group for (method,), group in lab.grouped(results, "method").items()}
    rows = [
        {
            "method": method,
            "coverage": float(np.mean([one.overall for one in group])),
            "least": float(np.mean([one.least for one in group])),
            "promised": "yes" if group[0].promised else "no",
            "size": float(np.mean([one.size for one in group])),
        }
        for method, group in by_method.items()
    ]
    settings, title = study.settings, f"sets at level {1 - study.settings.alpha:g} on {study.dataset}"
    counts = [settings.num_calibration] * len(results[0].by_client)
    low, high = ft.theory.conformal_coverage(counts, settings.alpha)
    claims = tuple(_claims(by_method, low, high))
    _draw(study, by_method, title)
    remarks = (*REMARKS, f"promised to conformal sets of the mixture: {low:.3f} to {high:.3f}")
    sheet = lab.table(f"{title}: mean of {len(study.seeds)} seeds, {settings.num_splits} splits each", rows, COLUMNS)
    return lab.Outcome((sheet,), rows, claims, remarks=remarks)


def _claims(by_method: dict[str, list[Covered]], low: float, high: float) -> Iterator[lab.Claim]:
    """Judges by intervals over seeds whether conformal sets cover a share in [low, high] of all clients' examples.

    The other sets should cover less than ``low``.
    """
    for method, group in by_method.items():
        covered = lab.interval(one.overall for one in group)
        if group[0].promised:
            away = covered.within((low + high) / 2, (high - low) / 2)
            answer = {True: lab.SEEN, False: lab.NOT_SEEN, None: lab.UNDECIDED}[away]
            yield lab.Claim(f"{method}: covers {low:.3f} to {high:.3f}", f"{covered:.3f}", answer)
        else:
            yield covered.claim_below(f"{method}: covers less than {low:.3f}", "{:.3f}", low)


def _draw(study: Study, by_method: dict[str, list[Covered]], title: str) -> None:
    """Plots the coverage of each method for every client and for all together, with the required level."""
    count = len(next(iter(by_method.values()))[0].by_client)
    series: dict[str, dict[int, tuple[float, float]]] = {}
    for method, group in by_method.items():
        shares = np.array([[*one.by_client, one.overall] for one in group])
        errors = shares.std(axis=0, ddof=1) / len(group) ** 0.5
        series[method] = {k: (float(shares[:, k].mean()), float(errors[k])) for k in range(count + 1)}
    series["level"] = dict.fromkeys(range(count + 1), (1 - study.settings.alpha, 0.0))
    ticks = {**{k: f"client {k}" for k in range(count)}, count: EVERYONE}
    points_with_errors(series, ticks, ("", "coverage"), title, study.figures.path("coverage"))


PAPER = CoverageSettings()
SMALL = with_changes(PAPER, "num_splits=20 width=32 num_rounds=10 num_train=30")
SCALES = {name: by_scale(SMALL, PAPER) for name in ("sine", "digits")}
ENTRIES = (experiment(__name__, run, SCALES, ("lu2023",), check=check, least_seeds=2, exact=True),)
