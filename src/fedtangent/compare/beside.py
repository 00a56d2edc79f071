"""Any run beside its theory: networks of several widths, the exact flow of their very rounds, NTK-FL and the limit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.checks import whole
from fedtangent.compare.cohorts import drawn_rows, steps_of, weighed_cohorts
from fedtangent.compare.settings import Setting
from fedtangent.compare.side_by_side import FEWEST_DRAWS, FEWEST_WIDTHS, Report, SideBySide, run
from fedtangent.data import classification_targets
from fedtangent.data.dataset import Dataset, DatasetEntry, SourceInfo
from fedtangent.engine.description import Built, Chosen, Description, build, describe
from fedtangent.entries import Entry, NoOptions, catalogue
from fedtangent.federated.algorithms.entry import Descent, Training, rate_of, rule_of, work_of
from fedtangent.federated.local import Work
from fedtangent.models.entry import CROSS_ENTROPY, ModelEntry
from fedtangent.theory import Rule
from fedtangent.theory.flow.rules import read_rule
from fedtangent.types import Key, Model, Partition, PyTree

MOST_POINTS = 500  # test points that laws are compared at, at most
MOMENTUM = 0.9  # of --client-optimizer momentum
NOT_FOLLOWED = {  # an option, what it must be beside theory, and why
    "channel": ("lossless", "which has no rule for what a channel leaves out"),
    "sparsity": (0.0, "which has no rule for what a channel leaves out"),
    "secure_aggregation": (False, "which has no rule for numbers that are rounded to be masked"),
    "beta": (1.0, "which follows all of a client's examples"),
}
OPTIMIZERS = ("sgd", "momentum")


class Beside(NamedTuple):
    """What a comparison of a run has besides the run."""

    widths: tuple[int, ...] = (64, 256, 1024)
    draws: int = 16
    hidden_layers: int = 1
    evaluations: int = 8  # rounds at which networks are evaluated, round 0 apart


def beside_theory(
    data: Dataset | tuple[Any, Any, Any, Any] | str = "digits",
    partition: Partition | str | None = None,
    *,
    progress: bool = False,
    say: Report = lambda line: None,
    **options: Any,
) -> SideBySide:
    """A run put beside what theory predicts for it: rows of a table, verdicts with negative controls, and all curves.

    Args:
        data: a data set, or the name of one; or x_train [n, d], y_train, x_test, y_test, of which y are [n] labels
            from 0 on or [n, C] numbers.
        partition: which training rows each client holds, or the name of one; by default what suits the data.
        progress: whether to show bars. say: is told what is done.
        options: every option of ``fedtangent train``, and ``widths``, ``draws``, ``hidden_layers`` and
            ``evaluations`` of the comparison.

    Raises:
        ValueError: an algorithm or option of which theory has no rule, a model without an analytic kernel, options out
            of range; before anything is trained. Comparisons run in float64 (``fedtangent.enable_x64()``).
    """
    beside = Beside(**{name: options.pop(name) for name in Beside._fields if name in options})
    named = {"dataset": data} if isinstance(data, str) else {}
    named |= {"partition": partition} if isinstance(partition, str) else {}
    described = describe(**named, **options)
    if not isinstance(data, str):
        described = described._replace(dataset=_given_data(data if isinstance(data, Dataset) else _data_of(*data)))
    if partition is not None and not isinstance(partition, str):
        described = described._replace(partition=_given_partition(partition))
    return run(setting_of(described, beside), progress, say)


def _data_of(x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> Dataset:
    """Vectors with labels or numbers as a data set."""
    x_train, y_train, x_test, y_test = map(np.asarray, (x_train, y_train, x_test, y_test))
    for name, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y):
            got = f"x_{name} of shape {x.shape} and y_{name} of shape {y.shape}"
            raise ValueError(f"data: got {got}, must be [n, d], and [n] labels or [n, C] numbers")
    classes = 0 if y_train.ndim == 2 else int(max(y_train.max(), y_test.max())) + 1
    given = SourceInfo("given", "given", "embedded")
    return Dataset("given data", x_train, y_train, x_test, y_test, classes, None, given)


def _given_data(data: Dataset) -> Chosen:
    """A choice of the user's own data."""
    entry = DatasetEntry(data.name, "given", lambda o, folder, seed: data, kind=data.kind,
                         is_regression=data.num_classes == 0)  # fmt: skip
    return Chosen(entry, NoOptions())


def _given_partition(partition: Partition) -> Chosen:
    """A choice of the user's own partition."""
    return Chosen(Entry("given", "given", lambda o, data, seed: partition), NoOptions())


def setting_of(described: Description, beside: Beside) -> Setting:
    """The setting of a described run for every width; raises ``ValueError`` as ``beside_theory`` does.

    All that does not need the data is checked before they are loaded.
    """
    followed = dict(_rule(described))
    widths = _widths(described, beside)
    built = build(described)
    weighting = _weighting(described, followed)
    work, run = _work(described.algorithm.options), described.run
    cohorts = weighed_cohorts(built.schedule, built.clients, run.num_rounds, run.seed, weighting)
    followed["batches"] = drawn_rows(work, built.clients, cohorts, run.seed)
    rate = rate_of(described.algorithm.options)
    rates = np.array([float(rate(jnp.int32(r))) for r in range(run.num_rounds)]) if callable(rate) else rate
    x_train, y_train = _examples(built, np.asarray(built.data.x), np.asarray(built.data.y))
    test = built.splits["test"]
    answers = np.asarray(test.labels if built.loss == CROSS_ENTROPY else test.targets)
    x_test, y_test = _examples(built, np.asarray(test.x[:MOST_POINTS]), answers[:MOST_POINTS])
    names, (fewest, most) = described.names(), (min(built.clients.sizes), max(built.clients.sizes))
    return Setting(
        name=f"{built.algorithm.name} on {names['dataset']}",
        title=f"{built.algorithm.name} on {names['dataset']}, {built.loss.replace('_', ' ')}: {len(x_train)} examples "
        f"on {built.clients.num_clients} clients of {fewest} to {most} ({names['partition']}), {names['model']}",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        labels_test=None if test.labels is None else np.asarray(test.labels[:MOST_POINTS]),
        partition=built.clients,
        schedule=built.schedule,
        model=_models(described, built, beside.hidden_layers),
        is_linear=described.model.entry.is_linear,
        widths=widths,
        draws=beside.draws,
        local_steps=steps_of(work, built.clients),
        learning_rate=rates,
        num_rounds=run.num_rounds,
        evaluate_every=max(run.num_rounds // beside.evaluations, 1),
        seed=run.seed,
        algorithm=built.recipe,
        rule=followed,
        weighting=weighting,
    )


def _rule(described: Description) -> dict[str, Any]:
    """What theory is told of the algorithm and its options; raises ``ValueError`` for what it does not follow."""
    entry, o = described.algorithm
    followed = dict(rule_of(entry, o))
    for name, (plain, why) in NOT_FOLLOWED.items():
        if getattr(o, name, plain) != plain:
            raise ValueError(f"{name}: got {getattr(o, name)!r}, must be {plain!r} beside theory, {why}")
    if o.max_update_norm is not None and o.max_update_norm < np.inf:
        raise ValueError(f"max_update_norm: got {o.max_update_norm}, must be inf beside theory, which rejects nothing")
    optimizer = getattr(o, "client_optimizer", "sgd")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"client_optimizer: got {optimizer!r}, allowed beside theory are {', '.join(OPTIMIZERS)}")
    followed["loss"] = o.loss
    if optimizer == "momentum":
        followed["local_momentum"] = MOMENTUM
    if getattr(o, "server_learning_rate", None) is not None:
        followed["server_learning_rate"] = o.server_learning_rate
    own = {name: value for name, value in followed.items() if name != "weighting"}
    read_rule(Rule(1, 1.0, **own), np.ones(1, int))  # parts of it that do not go together
    return followed


def _weighting(described: Description, followed: dict[str, Any]) -> str:
    """How the clients' means are weighed: as asked for, else as the algorithm's entry says."""
    own = followed.pop("weighting", "examples")
    return str(getattr(described.algorithm.options, "weighting", None) or own)


def _widths(described: Description, beside: Beside) -> tuple[int, ...]:
    """The widths in rising order; of a model whose kernel has none, one that stands for it."""
    entry: ModelEntry = described.model.entry
    whole("draws", beside.draws, FEWEST_DRAWS)
    whole("hidden_layers", beside.hidden_layers, 1)
    whole("evaluations", beside.evaluations, 1)
    for width in beside.widths:
        whole("widths", width, 1)
    if entry.at_width is None:
        if not entry.is_linear:
            known = [name for name, other in catalogue("models").items() if other.at_width or other.is_linear]
            raise ValueError(f"model: got {entry.name!r}, which has no analytic kernel, allowed are {', '.join(known)}")
        return (1,)
    widths = tuple(sorted(set(beside.widths)))
    if len(widths) < FEWEST_WIDTHS:
        raise ValueError(f"widths: got {beside.widths}, must be {FEWEST_WIDTHS} or more of a network, for a slope")
    return widths


def _work(o: Descent) -> Work:
    """The local work; of an algorithm that has none, one full gradient."""
    return work_of(o) if isinstance(o, Training) else Work(steps=1)


def _examples(built: Built, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets in float64; of the cross entropy, targets are probabilities of the classes."""
    if built.loss == CROSS_ENTROPY:
        y = classification_targets(y, built.model.output_size)
    return (np.asarray(x, np.float64) if np.issubdtype(x.dtype, np.floating) else x), np.asarray(y, np.float64)


def _models(described: Description, built: Built, hidden_layers: int) -> Callable[[int], Model]:
    """The described model of every width, in float64."""
    entry, o = described.model
    shape = built.data.x.shape[1:]

    @functools.cache
    def model(width: int) -> Model:
        options = o if entry.at_width is None else entry.at_width(o, width, hidden_layers)
        plain: Model = entry.build(options, shape, built.model.output_size)

        def init(key: Key) -> PyTree:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), plain.init(key))

        return plain._replace(init=init)

    return model
