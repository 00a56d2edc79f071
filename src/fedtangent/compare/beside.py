"""Any run beside its theory: networks of several widths, the flow of the same rounds, NTK-FL and the limit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.checks import instance, whole
from fedtangent.compare.cohorts import drawn_rows, steps_of, weighed_cohorts
from fedtangent.compare.settings import Setting
from fedtangent.compare.side_by_side import FEWEST_DRAWS, FEWEST_WIDTHS, Report, SideBySide, run
from fedtangent.data import classification_targets
from fedtangent.data.dataset import Dataset, DatasetEntry, SourceInfo
from fedtangent.engine.building import Built, build
from fedtangent.engine.description import Chosen, Description, describe
from fedtangent.entries import Entry, NoOptions, catalogue, choose, option_names
from fedtangent.federated.algorithms.entry import MOMENTUM, RateOptions, Supplied
from fedtangent.kernels.gram import analytic
from fedtangent.losses import targets_of
from fedtangent.models.dense import mlp
from fedtangent.models.entry import ModelEntry
from fedtangent.theory import Rule
from fedtangent.theory.flow.rules import read_rule
from fedtangent.theory.precision import require_float64
from fedtangent.types import Algorithm, Key, Model, Partition, PyTree

MOST_POINTS = 500  # test points that laws are compared at, at most
NOT_FOLLOWED = {  # an option, what it must be beside theory, and why
    "channel": ("lossless", "which has no rule for what a channel leaves out"),
    "sparsity": (0.0, "which has no rule for what a channel leaves out"),
    "secure_aggregation": (False, "which has no rule for numbers that are rounded to be masked"),
    "beta": (1.0, "which follows all of a client's examples"),
}
OPTIMIZERS = ("sgd", "momentum")


@dataclasses.dataclass(frozen=True)
class BesideOptions:
    """Options of a comparison, besides those of the run."""

    widths: tuple[int, ...] = (64, 256, 1024)
    """Widths of the networks, all hidden layers alike; three or more."""
    draws: int = 16
    """Networks of every width (times K), each from a start of its own; five or more."""
    hidden_layers: int = 1
    """Hidden layers, where the model has a number of them."""
    evaluations: int = 8
    """How many rounds networks are evaluated at, at most, besides the start."""


def beside_theory(
    data: Dataset | tuple[Any, Any, Any, Any] | str = "digits",
    partition: Partition | str | None = None,
    *,
    progress: bool = False,
    say: Report = lambda line: None,
    **options: Any,
) -> SideBySide:
    """Compare a run with what theory predicts for it: table rows, verdicts with negative controls, and all curves.

    Args:
        data: a data set, or the name of one; or x_train [n, d], y_train, x_test, y_test, of which y are [n] labels
            from 0 on or [n, C] numbers. Like ``train``, a run has them in float32.
        partition: which training rows each client holds, or the name of one; by default what suits the data set, and
            of data that are given "dirichlet", without labels "iid".
        progress: whether to show progress bars. say: called with a line of text for each step of the work.
        options: every option of ``fedtangent train``, and ``widths``, ``draws``, ``hidden_layers`` and
            ``evaluations`` of the comparison.

    Raises:
        ValueError: an algorithm or option of which theory has no rule, a model without an analytic kernel, options out
            of range; before anything is trained. Comparisons run in float64 (``fedtangent.enable_x64()``).
    """
    require_float64()
    if "widths" in options:
        widths = options["widths"]
        options["widths"] = tuple(widths) if isinstance(widths, Iterable) else (widths,)
    own = [field.name for field in dataclasses.fields(BesideOptions)]
    beside = BesideOptions(**{name: options.pop(name) for name in own if name in options})
    described = described_run(data, partition, options)
    check_free(described, beside.hidden_layers)
    return run(setting_of(described, beside), progress, say)


def described_run(
    data: Dataset | tuple[Any, Any, Any, Any] | str, partition: Partition | str | None, options: Mapping[str, Any]
) -> Description:
    """The description of a run on data and a partition that are given as names or as arrays; see ``beside_theory``.

    Raises ``ValueError`` for options that no run has, and for those of a data set or partition given as arrays.
    """
    if "dataset" in options:
        raise ValueError(f"dataset: got {options['dataset']!r}, must be given as data, which is a name too")
    named = {"dataset": data} if isinstance(data, str) else {}
    named |= {"partition": partition} if isinstance(partition, str) else {}
    given = None if isinstance(data, str) else data if isinstance(data, Dataset) else _data_of(data)
    if given is not None and partition is None:
        named["partition"] = "dirichlet" if given.num_classes else "iid"
    described = describe(**named, **options)
    if given is not None:
        _refuse_options(described.dataset.entry, options, "data that are given")
        described = described._replace(dataset=_given_data(given))
    if partition is not None and not isinstance(partition, str):
        instance("partition", partition, Partition)
        _refuse_options(described.partition.entry, options, "a partition that is given")
        described = described._replace(partition=_given_partition(partition))
    return described


def _refuse_options(entry: Entry, options: Mapping[str, Any], what: str) -> None:
    for name in options:
        if name in option_names(entry):
            raise ValueError(f"{name}: is not used with {what}")


def _data_of(arrays: Any) -> Dataset:
    """Vectors with labels or numbers, (x_train, y_train, x_test, y_test), as a data set."""
    if not isinstance(arrays, (tuple, list)) or len(arrays) != 4:
        got = f"a {type(arrays).__name__}" + (f" of {len(arrays)}" if isinstance(arrays, tuple | list) else "")
        raise ValueError(f"data: got {got}, must be a name, a Dataset or (x_train, y_train, x_test, y_test)")
    x_train, y_train, x_test, y_test = map(np.asarray, arrays)
    for name, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        labels = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
        if not np.issubdtype(x.dtype, np.integer) and not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"x_{name}: got {x.dtype}, must be real numbers")
        if x.ndim != 2 or 0 in x.shape or x.shape[1:] != x_train.shape[1:] or len(x) != len(y):
            got = f"x_{name} of shape {x.shape} and y_{name} of shape {y.shape}"
            raise ValueError(f"data: got {got}, must be [n, d], d alike for training and test, and n targets")
        if not labels and (y.ndim != 2 or y.shape[1:] != y_train.shape[1:]):
            raise ValueError(
                f"y_{name}: got {y.dtype} of shape {y.shape}, must be [n] integer labels or [n, C] numbers"
            )
    x_train, x_test = (x.astype(np.float64) for x in (x_train, x_test))
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


def setting_of(described: Description, beside: BesideOptions, built: Built | None = None) -> Setting:
    """The setting that compares a described run at every width; raises ``ValueError`` as ``beside_theory`` does.

    ``built`` is the run of this or another seed, whose data and clients are then used; by default it is built here,
    after everything that needs no data has been checked.
    """
    check_followed(described)
    widths = _widths(described, beside)
    built = build(described) if built is None else built
    followed = rule_beside(described, built.algorithm)
    model = _models(described, built, beside.hidden_layers)
    setting = setting_of_run(described, built, followed, model)
    check_kernels(described, [model(width) for width in (widths[0], widths[-1])], setting.x_train[:2])
    every = -(-described.run.num_rounds // beside.evaluations)
    return dataclasses.replace(setting, widths=widths, draws=beside.draws, evaluate_every=every)


def setting_of_run(
    described: Description,
    built: Built,
    followed: tuple[Mapping[str, Any], str],
    model: Callable[[int], Model],
    most_points: int | None = MOST_POINTS,
) -> Setting:
    """The setting of a built run at one width; ``followed`` is what ``rule_beside`` returns for it.

    Laws are compared at the first ``most_points`` test points (None: at all). Raises ``ValueError`` for a single class.
    """
    training, common = built.algorithm.composition.training, described.run
    assert training is not None
    rule, weighting = followed
    work = training.work
    cohorts = weighed_cohorts(built.schedule, built.clients, common.num_rounds, common.seed, weighting)
    batches = drawn_rows(work, built.clients, cohorts, common.seed)
    rate = training.learning_rate
    if rate is None:  # an optimiser at a rate
        rate = RateOptions(
            **{f.name: getattr(described.algorithm.options, f.name) for f in dataclasses.fields(RateOptions)}
        ).value()
    rates = _each_round(rate, described) if callable(rate) else rate
    x_train, y_train = _examples(built, np.asarray(built.data.x), np.asarray(built.data.y))
    test = built.splits["test"]
    takes_classes = targets_of(built.loss) == "classes"
    if takes_classes and built.model.output_size < 2:
        raise ValueError(f"loss: got {built.loss}, must be squared_error for a single class")
    answers = np.asarray(test.labels if takes_classes else test.targets)
    x_test, y_test = _examples(built, np.asarray(test.x[:most_points]), answers[:most_points])
    names, (fewest, most) = described.names(), (min(built.clients.sizes), max(built.clients.sizes))
    return Setting(
        name=f"{built.algorithm.name} on {names['dataset']}",
        title=f"{built.algorithm.name} on {names['dataset']}, {built.loss.replace('_', ' ')}: {len(x_train)} examples "
        f"on {built.clients.num_clients} clients of {fewest} to {most} ({names['partition']}), {names['model']}",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        labels_test=None if test.labels is None else np.asarray(test.labels[:most_points]),
        partition=built.clients,
        schedule=built.schedule,
        model=model,
        is_linear=described.model.entry.is_linear,
        widths=(1,),
        local_steps=steps_of(work, built.clients),
        learning_rate=rates,
        num_rounds=common.num_rounds,
        seed=common.seed,
        algorithm=built.recipe,
        rule={**rule, "batches": batches},
        weighting=weighting,
    )


def check_followed(described: Description) -> None:
    """Raises ``ValueError`` for algorithms and options that theory has no rule for, before data are loaded.

    The algorithm is built for a small network and eight clients, which is enough to read its rule.
    """
    options = described.algorithm.options
    for name, (plain, why) in NOT_FOLLOWED.items():
        if getattr(options, name, plain) != plain:
            raise ValueError(f"{name}: got {getattr(options, name)!r}, must be {plain!r} beside theory, {why}")
    bound = getattr(options, "max_update_norm", None)
    if bound is not None and bound < np.inf:
        raise ValueError(f"max_update_norm: got {bound}, must be inf beside theory, which rejects nothing")
    optimizer = getattr(options, "client_optimizer", "sgd")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"client_optimizer: got {optimizer!r}, allowed beside theory are {', '.join(OPTIMIZERS)}")
    rule_beside(described, _small(described))


def _small(described: Description) -> Algorithm:
    """The described algorithm for a network of two layers and eight clients of its own schedule."""
    entry = described.algorithm.entry
    schedule = choose("schedules", entry.schedule)
    examples = jnp.zeros((getattr(described.algorithm.options, "server_examples", 1), 2))
    clients = schedule.build(schedule.options(), 8, 0)
    supplied = Supplied(mlp(2, 2, (2,)), clients, server_data=examples, shared=np.zeros(1, int))
    algorithm: Algorithm = entry.build(described.algorithm.options, supplied)
    return algorithm


def rule_beside(described: Description, algorithm: Algorithm) -> tuple[dict[str, Any], str]:
    """Returns fields of ``theory.Rule`` for the algorithm, and how clients are weighted in the mean.

    Args:
        described: The run, whose options of optimiser, loss and server rate belong to the rule.
        algorithm: The run's algorithm, for any model.

    Raises:
        ValueError: The algorithm has no rule, or parts of its rule contradict each other.
    """
    options, rule = described.algorithm.options, algorithm.rule
    if isinstance(rule, str):
        raise ValueError(f"algorithm: got {algorithm.name!r}, of which theory has no rule: {rule}")
    followed: dict[str, Any] = {
        name: _each_round(value, described) if callable(value) else value for name, value in rule.items()
    }
    followed["loss"] = options.loss
    if getattr(options, "client_optimizer", "sgd") == "momentum":
        followed["local_momentum"] = MOMENTUM
    if getattr(options, "server_learning_rate", None) is not None:
        followed["server_learning_rate"] = options.server_learning_rate
    read_rule(Rule(1, 1.0, **followed), np.ones(1, int))
    return followed, algorithm.composition.weighting


def _each_round(value: Callable[[Any], Any], described: Description) -> np.ndarray:
    """Numbers of a schedule of the round, [R]."""
    return np.array([float(value(jnp.int32(r))) for r in range(described.run.num_rounds)])


def _widths(described: Description, beside: BesideOptions) -> tuple[int, ...]:
    """The widths in rising order; ``(1,)`` for a model without a width."""
    whole("draws", beside.draws, FEWEST_DRAWS)
    whole("hidden_layers", beside.hidden_layers)
    whole("evaluations", beside.evaluations)
    for width in beside.widths:
        whole("widths", width)
    check_analytic(described)
    if described.model.entry.at_width is None:
        return (1,)
    widths = tuple(sorted(set(beside.widths)))
    if len(widths) < FEWEST_WIDTHS:
        said = "to compare (how deep networks are is hidden_layers)"
        raise ValueError(f"widths: got {beside.widths}, must be {FEWEST_WIDTHS} or more different ones {said}")
    return widths


def check_analytic(described: Description) -> None:
    """Raise ``ValueError`` for a model without an analytic kernel."""
    entry: ModelEntry = described.model.entry
    if entry.at_width is None and not entry.is_linear:
        known = [name for name, other in catalogue("models").items() if other.at_width or other.is_linear]
        raise ValueError(f"model: got {entry.name!r}, which has no analytic kernel, allowed are {', '.join(known)}")


def check_kernels(described: Description, ends: list[Model], x: np.ndarray) -> None:
    """Raise ``ValueError`` for networks without a usable limit: the kernel grows with the width, or the prior is 0.

    ``ends`` are the model at two widths, whose kernels must be equal.
    """
    entry: ModelEntry = described.model.entry
    (nngp, theta), (_, widest) = (map(np.asarray, analytic(model, jnp.asarray(x))) for model in ends)
    if not np.allclose(theta, widest, rtol=1e-6):
        raise ValueError(
            f"model: got {entry.name!r} whose kernel grows with its width, must be in the ntk parameterization"
        )
    if not entry.is_linear and not np.any(nngp):
        raise ValueError(
            f"model: got {entry.name!r} that starts as the zero function, must have weights and biases above 0"
        )


def _examples(built: Built, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets in float64; of the cross entropy, targets are probabilities of the classes."""
    if targets_of(built.loss) == "classes":
        y = classification_targets(y, built.model.output_size)
    return (np.asarray(x, np.float64) if np.issubdtype(x.dtype, np.floating) else x), np.asarray(y, np.float64)


def check_free(described: Description, hidden_layers: int) -> None:
    """Raise ``ValueError`` for a model's option, such as its width, that ``widths`` and ``hidden_layers`` decide."""
    entry, o = described.model
    if entry.at_width is None:
        return
    replaced = entry.at_width(o, 1, hidden_layers)
    for field in dataclasses.fields(o):
        value = getattr(o, field.name)
        if value not in (field.default, getattr(replaced, field.name)):
            raise ValueError(
                f"{field.name}: got {value}; beside theory it is given by widths and hidden_layers: leave it out"
            )


def _models(described: Description, built: Built, hidden_layers: int) -> Callable[[int], Model]:
    """The described model of every width, in float64."""
    entry, o = described.model
    shape = built.data.x.shape[1:]

    @functools.cache
    def model(width: int) -> Model:
        options = o if entry.at_width is None else entry.at_width(o, width, hidden_layers)
        return in_float64(entry.build(options, shape, built.model.output_size))

    return model


def in_float64(plain: Model) -> Model:
    """The same model, whose weights start in float64."""

    def init(key: Key) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), plain.init(key))

    return plain._replace(init=init)
