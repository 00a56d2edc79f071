"""The description of a run by names and options, which the commands ``train``, ``compare`` and ``predict`` share.

``describe`` turns a flat list of options, as the command line and a config.json have it, into a ``Description``: the
chosen entries (algorithm, data set, ..) and the options of each. Only the options that every run has are defined here.
``building.build`` builds the run from its description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedtangent._src import checks, losses
from fedtangent._src.data import named
from fedtangent._src.data.own import OwnOptions
from fedtangent._src.entries import (
    Entry,
    Groups,
    Values,
    catalogue,
    check_limits,
    choose,
    lasting,
    option,
    option_names,
)
from fedtangent._src.federated.algorithms.entry import options_of

CHOICES = {  # choice -> kind of entries
    "algorithm": "algorithms",
    "base": "algorithms",
    "dataset": "datasets",
    "partition": "partitions",
    "model": "models",
    "schedule": "schedules",
}
KINDS = ("input_kind", "target_kind")  # of a user's own file
DECIDING = (*CHOICES, "loss", *KINDS)  # options that decide which other options there are, and their defaults


@dataclasses.dataclass(frozen=True)
class Choices:
    """Names of the algorithm, data set, partition, model and schedule of a run; defaults fit the other choices."""

    algorithm: str = "fed_avg"
    """Name (`fedtangent list algorithms`), or package.module:function."""
    dataset: str = "digits"
    """Name, or an .npz file of your own (x, y, users ..)."""
    partition: str = "dirichlet"
    """How examples are divided among clients."""
    model: str = "mlp"
    """Name, or package.module:function of your own."""
    schedule: str = "uniform"
    """Clients and models of a round."""


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Options that every run has."""

    num_rounds: int = option(50, may_differ=True)
    """Communication rounds R."""
    seed: int = option(0, most=checks.MAX_SEED)
    """Seed of data, clients, schedule and training."""
    data_dir: Path | None = option(None, may_differ=True)
    """Folder with published data files (default: $FEDTANGENT_DATA)."""
    client_test: float = 0.0
    """Share of each client's examples that is kept to test its predictions."""
    dropout: float = 0.0
    """Probability that a client gets the model, but sends nothing."""
    keep_first: int | None = None
    """Close a round after this many clients have answered."""
    completion_time: str = option("lognormal", used_with="keep_first")
    """lognormal or exponential times to an answer, mean by number of examples."""
    completion_spread: float = option(1.0, used_with="keep_first")
    """Standard deviation of a lognormal time's log."""
    projection: int | None = None
    """Project inputs to this many numbers; clients share a secret seed."""
    key_file: Path | None = option(None, may_differ=True, used_with="projection")
    """File of its seed (default: $FEDTANGENT_KEY_FILE)."""


class Chosen(NamedTuple):
    """A chosen entry of a catalogue, such as the algorithm ``fed_avg``, with an instance of its options."""

    entry: Any
    options: Any


class Description(NamedTuple):
    """Everything that the user chose for a run: an entry for each choice, with its options.

    ``run`` has the options that every run has, such as the number of rounds.
    """

    algorithm: Chosen
    dataset: Chosen
    partition: Chosen
    model: Chosen
    schedule: Chosen
    run: CommonOptions

    def names(self) -> dict[str, str]:
        """Returns the name of each choice: ``{"algorithm": "fed_avg", "dataset": "digits", ..}``."""
        return {name: getattr(self, name).entry.name for name in CHOICES if name != "base"}

    def values(self) -> Values:
        """Returns every choice and option by name; ``describe(**values)`` gives the same description."""
        values: Values = dict(self.names())
        for part in self:
            values |= dataclasses.asdict(part.options if isinstance(part, Chosen) else part)
        return values

    def identity(self) -> Values:
        """Returns the choices and options that a resumed run must share with the run that it continues."""
        values = self.values()
        groups = (part.options if isinstance(part, Chosen) else part for part in self)
        return {name: values[name] for name in (*self.names(), *lasting(*groups))}


class Descriptions(NamedTuple):
    """The runs of a command: one, or several that differ in the algorithm or in the values of some options.

    Attributes:
        runs: A run for each algorithm and each combination of values.
        varied: Values of each option that has several, by name; the names of the algorithms, if there are several.
    """

    runs: tuple[Description, ...]
    varied: Mapping[str, Sequence[object]] = MappingProxyType({})

    def values(self) -> Values:
        """Returns the choices and options of all runs by name, with a list of values for each that varies.

        A config.json has this form. An option of some runs only is included; an option whose default differs between
        the algorithms is left out.
        """
        return in_common([run.values() for run in self.runs]) | dict(self.varied)

    def labels(self) -> list[str]:
        """Returns a text for each run that tells it from the other runs of its algorithm, such as ", mu 0.1".

        It is "" if only the algorithm varies.
        """
        names = self.varied.keys() - {"algorithm"}
        varying = [{name: value for name, value in run.values().items() if name in names} for run in self.runs]
        return ["".join(f", {name.replace('_', ' ')} {value}" for name, value in one.items()) for one in varying]


def resolve(chosen: Mapping[str, str]) -> dict[str, Entry]:
    """Returns the entry of each choice of a run, by the name of the choice, such as "algorithm".

    Args:
        chosen: Name of the chosen entry for each choice, such as ``{"algorithm": "fed_prox"}``; missing choices get
            defaults that fit the others.

    Raises:
        ValueError: No entry has a chosen name, or a user's own function or file cannot be read.
    """
    dataset = named.chosen(chosen.get("dataset", Choices.dataset), *map(chosen.get, KINDS))
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


def _suits(entries: Mapping[str, Any], loss: str | None) -> Values:
    """Returns the defaults of ``loss`` and ``client_learning_rate`` that fit the chosen data set and model.

    ``entries`` has the chosen entries by choice. ``loss`` is the user's choice, which is returned unchanged; None if
    the user made none. There is no learning rate if the model has none for the loss, or the algorithm sends Jacobians.
    The rate for a loss that is a sum over examples is the rate for the mean, divided by the default batch size if the
    algorithm has one.
    """
    model = entries["model"]
    loss = model.fitting_loss(entries["dataset"].is_regression) if loss is None else loss
    rate = model.learning_rates.get(loss)
    if rate is None and (of_mean := model.learning_rates.get(losses.mean_form(loss))) is not None:
        batch = {f.name: f.default for f in dataclasses.fields(entries["algorithm"].options)}.get("batch_size")
        rate = of_mean / batch if isinstance(batch, int) and batch else of_mean  # a sum over a batch of the usual size
    trains = rate is not None and entries["algorithm"].sends != "Jacobians"
    return {"loss": loss} | ({"client_learning_rate": rate} if trains else {})


def groups(chosen: Mapping[str, str]) -> Groups:
    """Returns the option groups of a run, dataclass instances by title, with defaults that fit the user's choices.

    ``chosen`` has the names that the user chose, such as ``{"algorithm": "fed_prox"}``, and the loss if it is chosen.
    """
    entries = resolve(chosen)
    suits = _suits(entries, chosen.get("loss"))
    choices = Choices(**{name: entry.name for name, entry in entries.items()})
    by_title = {"choices": choices, "run": CommonOptions()}
    for name, entry in entries.items():
        options = _options(name, entry, chosen)
        fitting = {field.name: suits[field.name] for field in dataclasses.fields(options) if field.name in suits}
        if "base" in option_names(entry) and chosen.get("base"):
            fitting["base"] = chosen["base"]
        if dataclasses.fields(options):
            by_title[f"{name} {entry.name}"] = options(**fitting)
    return by_title


def _options(name: str, entry: Any, chosen: Mapping[str, str]) -> type[Any]:
    """Returns the dataclass of an entry's options.

    Args:
        name: Kind of the choice, such as "model".
        entry: The chosen entry; an algorithm that wraps another one also gets the options of that one.
        chosen: Names that the user chose; "base" is the wrapped algorithm.
    """
    return options_of(entry, chosen.get("base")) if name == "algorithm" else entry.options


def describe(**options: Any) -> Description:
    """Builds the description of a run from names and options, as in ``describe(algorithm="fed_prox", mu=0.1)``.

    Args:
        options: Names of choices and values of options; the others have their defaults. None for a choice or the loss
            also means the default.

    Raises:
        ValueError: An unknown name, an option that no chosen entry has (the message names the entries that have it), a
            number beyond its limit, or an option without effect, because the option that it needs is not set.
    """
    options = {name: value for name, value in options.items() if value is not None or name not in DECIDING}
    chosen = {name: options[name] for name in DECIDING if name in options}
    entries, defaults = resolve(chosen), groups(chosen)
    names = {field.name for group in defaults.values() for field in dataclasses.fields(group)}
    for name in options:
        if name not in names:
            refuse_unused(name, chosen)
            raise ValueError(f"{name}: is no option of a run")
    parts: dict[str, Any] = {}
    for name, entry in entries.items():
        group = defaults.get(f"{name} {entry.name}") or _options(name, entry, chosen)()
        parts[name] = Chosen(entry, _filled(group, options))
    description = Description(run=_filled(defaults["run"], options), **parts)
    for part in description:
        check_limits(part.options if isinstance(part, Chosen) else part)
    check_used(description.values(), defaults)
    return description


def _filled(defaults: Any, values: Mapping[str, object]) -> Any:
    fields = dataclasses.fields(defaults)
    return dataclasses.replace(defaults, **{f.name: values[f.name] for f in fields if f.name in values})


def in_common(runs: Sequence[Values]) -> Values:
    """Returns the options with one value in all ``runs`` that have them; a run is a mapping from option to value."""
    values = {name: value for run in reversed(runs) for name, value in run.items()}
    return {name: value for name, value in values.items() if all(run.get(name, value) == value for run in runs)}


def check_used(values: Mapping[str, object], defaults: Groups) -> None:
    """Raises ``ValueError`` for an option that is set but has no effect, because the option that it needs is not set.

    Args:
        values: Values of all options by name.
        defaults: Option groups with their defaults, as ``groups`` returns them; ``entries.option(used_with=..)`` names
            the option that another one needs.
    """
    fields = {f.name: (f, getattr(group, f.name)) for group in defaults.values() for f in dataclasses.fields(group)}
    for name, (field, default) in fields.items():
        switch = field.metadata.get("used_with")
        if switch and values[name] != default and values[switch] == fields[switch][1]:
            raise ValueError(f"{name}: is used with {switch} only")


def refuse_unused(name: str, chosen: Mapping[str, str]) -> None:
    """Raises ``ValueError`` if an option belongs only to entries that were not chosen; the message names these entries.

    Args:
        name: Name of the option.
        chosen: Names of the choices that were made.
    """
    entries: dict[str, Any] = dict(resolve(chosen))
    if "base" in option_names(entries["algorithm"]):
        entries["base"] = choose("algorithms", chosen.get("base", "fed_avg"))
    reasons = []
    for choice, entry in ((choice, entries[choice]) for choice in CHOICES if choice in entries):
        others = catalogue(CHOICES[choice]).values()
        users = [other.name for other in others if name in option_names(other) and (choice != "base" or other.inside)]
        if choice == "dataset" and name in {field.name for field in dataclasses.fields(OwnOptions)}:
            users.append("a file of your own")
        if users:
            reasons.append(f"{choice} {entry.name!r}, only with {', '.join(users)}")
    if reasons:
        names = {other for entry in entries.values() for other in option_names(entry)}
        raise ValueError(f"{name}: is not used with {'; nor with '.join(reasons)}{checks.nearest(name, names)}")
