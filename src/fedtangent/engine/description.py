"""The description of a run, which ``train``, ``compare`` and ``predict`` share, and what is built from it.

``describe`` turns flat options, as the command line and a config.json have them, into a ``Description``: what was
chosen, and the options of each choice. ``build`` checks a description, loads the data and composes the algorithm. The
choices and their options come from ``entries``; only the options that every run has are defined here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import checks, data, losses
from fedtangent.data import named, sharing
from fedtangent.data.projection import projected
from fedtangent.entries import Entry, catalogue, check_limits, choose, lasting, option, option_names
from fedtangent.federated import faults
from fedtangent.federated.algorithms.entry import Given, Ran, options_of
from fedtangent.federated.wire.key_server import generate_keys, hand_out, open_key_file, with_key_exchange
from fedtangent.models.entry import check_kind
from fedtangent.types import Algorithm, Array, FederatedData, Model, Partition, Schedule

CHOICES = {  # what is chosen -> the kind of entries that it is chosen from
    "algorithm": "algorithms",
    "base": "algorithms",
    "dataset": "datasets",
    "partition": "partitions",
    "model": "models",
    "schedule": "schedules",
}
DECIDING = (*CHOICES, "loss")  # options that decide which other options there are, and their defaults
KEY_FILE = "FEDTANGENT_KEY_FILE"
EVALUATED_TRAIN = 10_000  # the most training examples on which train metrics are measured


@dataclasses.dataclass(frozen=True)
class Choices:
    """What is trained on what; a choice that is not made is set to what fits the others."""

    algorithm: str = "fed_avg"
    """Name (`fedtangent list algorithms`), or package.module:function."""
    dataset: str = "digits"
    """The data set, or a file of your own (x, y, users ..)."""
    partition: str = "dirichlet"
    """How examples are divided among clients."""
    model: str = "mlp"
    """The network, package.module:function of your own or by name."""
    schedule: str = "uniform"
    """Who trains what in which round."""


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Options that every run has."""

    num_rounds: int = option(50, may_differ=True)
    """Communication rounds R."""
    seed: int = option(0, most=checks.MAX_SEED)
    """Seed of data, clients, schedule and training."""
    data_dir: Path | None = option(None, may_differ=True)
    """Folder with original data files (default: $FEDTANGENT_DATA)."""
    client_test: float = 0.0
    """Share of a client's examples kept to test what it predicts itself."""
    dropout: float = 0.0
    """Probability that a client gets the model, but sends nothing."""
    keep_first: int | None = None
    """Close a round after so many answers."""
    completion_time: str = option("lognormal", used_with="keep_first")
    """Lognormal or exponential, mean by a client's examples."""
    completion_spread: float = option(1.0, used_with="keep_first")
    """Standard deviation of the log of a lognormal time."""
    projection: int | None = None
    """Project inputs to so many numbers, with a seed that clients share."""
    key_file: Path | None = option(None, may_differ=True, used_with="projection")
    """Its seed's file (default: $FEDTANGENT_KEY_FILE)."""


class Chosen(NamedTuple):
    """One choice: its entry and an instance of its options."""

    entry: Any
    options: Any


class Description(NamedTuple):
    """A run, as the user describes it; made by ``describe``."""

    algorithm: Chosen
    dataset: Chosen
    partition: Chosen
    model: Chosen
    schedule: Chosen
    run: CommonOptions

    def names(self) -> dict[str, str]:
        """The name of each choice: ``{"algorithm": "fed_avg", "dataset": "digits", ..}``."""
        return {name: getattr(self, name).entry.name for name in CHOICES if name != "base"}

    def values(self) -> dict[str, Any]:
        """Every choice and option by name: ``describe(**values)`` is the same description."""
        found: dict[str, Any] = dict(self.names())
        for part in self:
            found |= dataclasses.asdict(part.options if isinstance(part, Chosen) else part)
        return found

    def identity(self) -> dict[str, Any]:
        """The values that a resumed run must share with the run that it continues."""
        values = self.values()
        groups = (part.options if isinstance(part, Chosen) else part for part in self)
        return {name: values[name] for name in (*self.names(), *lasting(*groups))}


def resolve(chosen: Mapping[str, str]) -> dict[str, Entry]:
    """The chosen entries, with fitting ones where nothing is chosen; raises ``ValueError`` for unknown names."""
    dataset = named.chosen(chosen.get("dataset", Choices.dataset))
    algorithm = choose("algorithms", chosen.get("algorithm", Choices.algorithm))
    readers = [name for name, entry in catalogue("models").items() if dataset.kind in entry.kinds]
    model = Choices.model if Choices.model in readers else readers[0]
    return {
        "algorithm": algorithm,
        "dataset": dataset,
        "partition": choose("partitions", chosen.get("partition", dataset.partition)),
        "model": choose("models", chosen.get("model", model)),
        "schedule": choose("schedules", chosen.get("schedule", algorithm.schedule)),
    }


def _suits(entries: Mapping[str, Any], loss: str | None) -> dict[str, Any]:
    """Default loss and step size for the model and the data; for a ``loss`` that is given, the step size for it."""
    model = entries["model"]
    loss = model.fitting_loss(entries["dataset"].is_regression) if loss is None else loss
    rate = model.learning_rates.get(loss)
    if rate is None and (of_mean := model.learning_rates.get(losses.mean_form(loss))) is not None:
        batch = {f.name: f.default for f in dataclasses.fields(entries["algorithm"].options)}.get("batch_size")
        rate = of_mean / batch if isinstance(batch, int) and batch else of_mean  # a sum over a batch of the usual size
    trains = rate is not None and entries["algorithm"].sends != "Jacobians"
    return {"loss": loss} | ({"client_learning_rate": rate} if trains else {})


def groups(chosen: Mapping[str, str]) -> dict[str, Any]:
    """The option groups of a run by title, each with the defaults that fit what is chosen.

    ``chosen`` may also name a loss, on which the default step size depends.
    """
    entries = resolve(chosen)
    suits = _suits(entries, chosen.get("loss"))
    found = {"choices": Choices(**{name: entry.name for name, entry in entries.items()}), "run": CommonOptions()}
    for name, entry in entries.items():
        options = _options(name, entry, chosen)
        fitting = {field.name: suits[field.name] for field in dataclasses.fields(options) if field.name in suits}
        if "base" in option_names(entry) and chosen.get("base"):
            fitting["base"] = chosen["base"]
        if dataclasses.fields(options):
            found[f"{name} {entry.name}"] = options(**fitting)
    return found


def _options(name: str, entry: Any, chosen: Mapping[str, str]) -> type[Any]:
    """The class of an entry's options; for an algorithm around another one, joined with the inner one's."""
    return options_of(entry, chosen.get("base")) if name == "algorithm" else entry.options


def describe(**given: Any) -> Description:
    """The run that flat choices and options describe, such as ``describe(algorithm="fed_prox", mu=0.1)``.

    Choices and options that are not given have their defaults. Raises ``ValueError`` for an unknown choice, and for an
    option that none of the choices has, naming the choices that have it.
    """
    chosen = {name: given[name] for name in DECIDING if given.get(name) is not None}
    entries, defaults = resolve(chosen), groups(chosen)
    known = {field.name for group in defaults.values() for field in dataclasses.fields(group)}
    for name in given:
        if name not in known:
            refuse_unused(name, chosen)
            raise ValueError(f"{name}: is no option of a run")
    parts: dict[str, Any] = {}
    for name, entry in entries.items():
        group = defaults.get(f"{name} {entry.name}") or _options(name, entry, chosen)()
        parts[name] = Chosen(entry, _filled(group, given))
    found = Description(run=_filled(defaults["run"], given), **parts)
    for options in (found.run, *(chosen.options for chosen in parts.values())):
        check_limits(options)
    check_used(found.values(), defaults)
    return found


def _filled(defaults: Any, given: Mapping[str, Any]) -> Any:
    own = {field.name: given[field.name] for field in dataclasses.fields(defaults) if field.name in given}
    return dataclasses.replace(defaults, **own)


def in_common(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options whose value is the same in all of several runs that have them."""
    found: dict[str, Any] = {}
    for values in runs:
        found = {**values, **found}
    return {name: value for name, value in found.items() if all(run.get(name, value) == value for run in runs)}


def check_used(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an option that is given without the one named in its ``used_with``."""
    fields = {f.name: (f, getattr(group, f.name)) for group in defaults.values() for f in dataclasses.fields(group)}
    for name, (field, default) in fields.items():
        switch = field.metadata.get("used_with")
        if switch and values[name] != default and values[switch] == fields[switch][1]:
            raise ValueError(f"{name}: is used with {switch} only")


def refuse_unused(name: str, chosen: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if ``name`` is an option of another choice, naming the choices that have it."""
    entries: dict[str, Any] = dict(resolve(chosen))
    if "base" in option_names(entries["algorithm"]):
        entries["base"] = choose("algorithms", chosen.get("base", "fed_avg"))
    said = []
    for what in CHOICES:
        kind = catalogue(CHOICES[what])
        users = [each.name for each in kind.values() if name in option_names(each)]
        if what in entries and what == "base":
            users = [user for user in users if kind[user].inside]
        if what in entries and users:
            said.append(f"{what} {entries[what].name!r}, only with {', '.join(users)}")
    if said:
        raise ValueError(f"{name}: is not used with {'; nor with '.join(said)}")


class Split(NamedTuple):
    """Examples to evaluate on."""

    x: Array
    targets: Array  # [n, C] what the squared error, or a loss of margins, compares with
    labels: Array | None  # [n] class labels, None for regression


class Built(NamedTuple):
    """A checked run, ready to start."""

    description: Description
    algorithm: Algorithm
    model: Model
    schedule: Schedule  # with its faults
    clients: Partition  # who trains on what
    data: FederatedData
    splits: dict[str, Split]  # "train" and "test"
    of_clients: FederatedData | None  # each client's own test examples
    recipe: Callable[[Model], Algorithm]  # the same algorithm for another model

    @property
    def loss(self) -> str:
        """Name of the loss that is trained."""
        return str(self.description.algorithm.options.loss)

    def remark(self, num_rounds: int) -> str:
        """The remark of the algorithm's entry on a run of ``num_rounds`` rounds; empty for most algorithms."""
        own, how, run = self.description.schedule, self.description.algorithm, self.description.run
        if how.entry.remark is None or num_rounds == 0:  # a run may diverge in its first round
            return ""
        cohort = cohort_size(own.options, self.schedule.num_clients)
        ran = Ran(self.schedule, own.entry.name, cohort, run.keep_first is not None, num_rounds)
        return str(how.entry.remark(how.options, ran))


def cohort_size(options: Any, num_clients: int) -> int:
    """Clients of a round, where the schedule's options say how many; all of them elsewhere."""
    number = getattr(options, "clients_per_round", None)
    return num_clients if number is None else int(number)


def build(described: Description) -> Built:
    """Load and divide the data, compose the algorithm; raises ``ValueError`` with the name of the option at fault.

    Writes nothing but the key file that a projection needs, where there is none.
    """
    run, how = described.run, described.algorithm
    checks.seed(run.seed)
    checks.whole("num_rounds", run.num_rounds)
    checks.folder("data_dir", run.data_dir)
    _check(described)
    loaded = _built(described.dataset, run.data_dir, run.seed)
    clients, own_test = _apart(run, _built(described.partition, loaded, run.seed))
    loaded = _projected(run, loaded, clients.num_clients)
    clients, at_server = _at_server(described, loaded, clients)
    loss = how.options.loss
    splits = {which: _split(loaded, which, loss) for which in ("train", "test")}
    model = _built(described.model, loaded.x_train.shape[1:], splits["train"].targets.shape[1])
    schedule = _faulty(run, _built(described.schedule, clients.num_clients, run.seed), clients.sizes)
    y = splits["train"].labels if losses.targets_of(loss) == "classes" else splits["train"].targets
    if y is None:
        raise ValueError(f"loss: got {loss}, must be squared_error: {loaded.name} has no class labels")
    if "validation" in at_server:
        held = at_server["validation"]
        at_server["validation"] = (splits["train"].x[held], y[held])
    cohort = cohort_size(described.schedule.options, clients.num_clients)
    expected = cohort if described.schedule.entry.name == "poisson" else None
    given = Given(model, schedule, run.seed, clients=clients, expected_clients=expected, **at_server)

    def recipe(model: Model) -> Algorithm:
        algorithm: Algorithm = _built(how, given._replace(model=model))
        return algorithm if run.projection is None else with_key_exchange(algorithm, clients.num_clients)

    algorithm = recipe(model)
    x, dtype = _inputs(loaded.x_train)
    federated = data.federated_data(x, np.asarray(y), clients, dtype=dtype)
    of_clients = None if own_test is None else data.federated_data(x, np.asarray(y), own_test, dtype=dtype)
    splits["train"] = jax.tree.map(lambda rows: rows[:EVALUATED_TRAIN], splits["train"])
    return Built(described, algorithm, model, schedule, clients, federated, splits, of_clients, recipe)


def _built(chosen: Chosen, *given: Any) -> Any:
    return chosen.entry.build(chosen.options, *given)


def _check(described: Description) -> None:
    """Raise ``ValueError`` for choices and options that do not go together, before anything is loaded."""
    run, how, own = described.run, described.algorithm, described.schedule
    checks.number("client_test", run.client_test, at_least=0, below=1)
    checks.number("dropout", run.dropout, at_least=0, below=1)
    several = "num_models" in option_names(choose("schedules", how.entry.schedule))
    if several and "num_models" not in option_names(own.entry):
        raise ValueError(f"schedule: got {own.entry.name!r}, must train several models, which {how.entry.name} has")
    bound = how.options.max_update_norm
    if how.entry.sends not in ("updates", "nothing") and bound is not None and bound < math.inf:
        raise ValueError(f"max_update_norm: got {bound}, must be inf: {how.entry.name} sends no updates")
    if run.projection is not None:
        checks.whole("projection", run.projection)
        key_path(run)
        if "vector" not in described.model.entry.kinds:
            raise ValueError(f"model: got {described.model.entry.name!r}, must read vectors, which projection makes")
    else:
        check_kind(described.model.entry, described.dataset.entry.kind)


def _inputs(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """Inputs as they go to the device, and their dtype: whole numbers (tokens) as int32, others as float32."""
    dtype = jnp.int32 if np.issubdtype(x.dtype, np.integer) else jnp.float32
    return np.asarray(x, dtype), dtype


def _split(loaded: data.Dataset, which: str, loss: str) -> Split:
    """One split with the targets of ``loss``; raises ``ValueError`` for numbers that it does not take."""
    x, y = getattr(loaded, f"x_{which}"), getattr(loaded, f"y_{which}")
    checks.finite(f"x_{which}", x)
    checks.finite(f"y_{which}", y)
    inputs = jnp.asarray(*_inputs(x))
    if loaded.num_classes == 0:
        losses.check_targets(loss, y, f"y_{which}")
        return Split(inputs, jnp.asarray(y, jnp.float32), None)
    if losses.targets_of(loss) == "signs":
        targets = data.sign_targets(y, loaded.num_classes)
    else:
        targets = data.classification_targets(y, loaded.num_classes, centred=True)
    return Split(inputs, jnp.asarray(targets, jnp.float32), jnp.asarray(y, jnp.int32))


def _apart(run: CommonOptions, clients: Partition) -> tuple[Partition, Partition | None]:
    """What clients train on, and what is kept to test their personal predictions."""
    if run.client_test == 0:
        return clients, None
    kept, tested = sharing.held_out(clients, run.client_test, run.seed)
    if len(tested.indices) == 0:
        raise ValueError(f"client_test: got {run.client_test}, must leave a client an example to test with")
    return kept, tested


def _at_server(described: Description, loaded: data.Dataset, clients: Partition) -> tuple[Partition, dict[str, Any]]:
    """The clients' examples without those held by the server, and what the algorithm needs, by field of ``Given``.

    Validation examples are given as indices.
    """
    run, how = described.run, described.algorithm
    if "server_data" in how.entry.needs:
        held = _drawn(how.options.server_examples, run.seed, clients)
        kept = sharing.without(clients, held, "server_examples")
        return kept, {"server_data": jnp.asarray(*_inputs(loaded.x_train[held]))}
    if "shared" in how.entry.needs:
        share = checks.number("shared_fraction", how.options.shared_fraction, above=0, below=1)
        if loaded.num_classes == 0:
            raise ValueError(f"dataset: got {loaded.name!r}, must have classes, by which {how.entry.name} draws")
        number = max(1, round(share * len(loaded.x_train)))
        shared = sharing.class_balanced(loaded.y_train, number, run.seed, "shared_fraction")
        return sharing.with_shared(clients, shared), {"shared": shared}
    if "validation" in how.entry.needs and how.options.ntk_choose == "validation":
        held = _drawn(how.options.server_examples, run.seed, clients)
        return sharing.without(clients, held, "server_examples"), {"validation": held}
    return clients, {}


def _drawn(number: int, seed: int, clients: Partition) -> np.ndarray:
    """Indices of ``number`` of the clients' examples, drawn for the server."""
    drawn = np.random.default_rng(seed).permutation(np.unique(clients.indices))
    return drawn[: checks.whole("server_examples", number, 1, len(drawn) - 1)]


def _faulty(run: CommonOptions, schedule: Schedule, sizes: np.ndarray) -> Schedule:
    """``schedule`` with the run's faults: clients drop out, and only the first ``keep_first`` answers count.

    A client's expected completion time is in proportion to its examples, ``sizes`` [N].
    """
    if run.dropout != 0:
        schedule = faults.dropout(schedule, run.dropout)
    if run.keep_first is None:
        return schedule
    checks.whole("keep_first", run.keep_first, 1, schedule.num_slots)
    checks.choice("completion_time", run.completion_time, faults.DISTRIBUTIONS)
    checks.number("completion_spread", run.completion_spread, above=0)
    times = np.maximum(sizes, 1) / max(np.mean(sizes), 1)
    return faults.stragglers(schedule, run.keep_first, times, run.completion_time, run.completion_spread)


def key_path(run: CommonOptions) -> Path:
    """Where the projection's seed is kept; raises ``ValueError`` if nothing says so."""
    found = run.key_file or os.environ.get(KEY_FILE)
    if not found:
        raise ValueError(f"key_file: got none, must be named (or ${KEY_FILE} set): it keeps the projection's seed")
    return Path(found)


def seed_digest(run: CommonOptions) -> str | None:
    """A digest of the projection's secret seed, to compare seeds by; None without a projection."""
    return None if run.projection is None else open_key_file(key_path(run)).digest


def _projected(run: CommonOptions, loaded: data.Dataset, num_clients: int) -> data.Dataset:
    """``loaded`` projected with the secret seed, which the key server hands out to every client first."""
    if run.projection is None:
        return loaded
    checks.whole("projection", run.projection, 1, loaded.x_train[0].size)  # of an example's numbers
    kept = open_key_file(key_path(run))
    opened = hand_out(kept.seed, (generate_keys() for _ in range(num_clients)))
    if any(seed != kept.seed for seed in opened):
        raise AssertionError("a client was handed another seed")
    return projected(loaded, run.projection, opened[0].reveal())
