"""The description of a run, which ``train``, ``compare`` and ``predict`` share.

``describe`` turns flat options, as the command line and a config.json have them, into a ``Description``: the choices,
and the options of each choice. The choices and their options come from ``entries``; only the options that every run has
are defined here. ``building.build`` builds a run from a description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src import checks, losses
from fedtangent._src.data import named
from fedtangent._src.entries import Entry, catalogue, check_limits, choose, lasting, option, option_names
from fedtangent._src.federated.algorithms.entry import options_of

CHOICES = {  # what is chosen -> the kind of entries that it is chosen from
    "algorithm": "algorithms",
    "base": "algorithms",
    "dataset": "datasets",
    "partition": "partitions",
    "model": "models",
    "schedule": "schedules",
}
DECIDING = (*CHOICES, "loss")  # options that decide which other options there are, and their defaults


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
    """A choice: its entry and an instance of its options."""

    entry: Any
    options: Any


class Description(NamedTuple):
    """A run as the user describes it; ``describe`` makes it."""

    algorithm: Chosen
    dataset: Chosen
    partition: Chosen
    model: Chosen
    schedule: Chosen
    run: CommonOptions

    def names(self) -> dict[str, str]:
        """Returns the name of each choice: ``{"algorithm": "fed_avg", "dataset": "digits", ..}``."""
        return {name: getattr(self, name).entry.name for name in CHOICES if name != "base"}

    def values(self) -> dict[str, Any]:
        """Returns every choice and option by name; ``describe(**values)`` gives the same description."""
        found: dict[str, Any] = dict(self.names())
        for part in self:
            found |= dataclasses.asdict(part.options if isinstance(part, Chosen) else part)
        return found

    def identity(self) -> dict[str, Any]:
        """Returns the choices and options that a resumed run must share with the run that it continues."""
        values = self.values()
        groups = (part.options if isinstance(part, Chosen) else part for part in self)
        return {name: values[name] for name in (*self.names(), *lasting(*groups))}


def resolve(chosen: Mapping[str, str]) -> dict[str, Entry]:
    """Returns the entry of each choice; for choices missing from ``chosen``, an entry that fits the others.

    Raises:
        ValueError: An unknown name.
    """
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
    """Returns the default loss and step size for the model and the data; for a given ``loss``, the step size for it."""
    model = entries["model"]
    loss = model.fitting_loss(entries["dataset"].is_regression) if loss is None else loss
    rate = model.learning_rates.get(loss)
    if rate is None and (of_mean := model.learning_rates.get(losses.mean_form(loss))) is not None:
        batch = {f.name: f.default for f in dataclasses.fields(entries["algorithm"].options)}.get("batch_size")
        rate = of_mean / batch if isinstance(batch, int) and batch else of_mean  # a sum over a batch of the usual size
    trains = rate is not None and entries["algorithm"].sends != "Jacobians"
    return {"loss": loss} | ({"client_learning_rate": rate} if trains else {})


def groups(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Returns the option groups of a run by title, with defaults that fit the choices.

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
    """Returns the class of an entry's options; for an algorithm around another one, joined with the inner options."""
    return options_of(entry, chosen.get("base")) if name == "algorithm" else entry.options


def describe(**given: Any) -> Description:
    """Returns the run that flat choices and options describe, as in ``describe(algorithm="fed_prox", mu=0.1)``.

    Choices and options that are left out have their defaults.

    Raises:
        ValueError: An unknown choice, or an option that none of the choices has (the message names the choices that
            have it).
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
    """Returns the options whose value is the same in all runs that have the option."""
    found: dict[str, Any] = {}
    for values in runs:
        found = {**values, **found}
    return {name: value for name, value in found.items() if all(run.get(name, value) == value for run in runs)}


def check_used(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for an option that differs from its default while the option in its ``used_with`` does not.

    Args:
        values: Values of all options by name.
        defaults: Option groups with their defaults, as ``groups`` returns them.
    """
    fields = {f.name: (f, getattr(group, f.name)) for group in defaults.values() for f in dataclasses.fields(group)}
    for name, (field, default) in fields.items():
        switch = field.metadata.get("used_with")
        if switch and values[name] != default and values[switch] == fields[switch][1]:
            raise ValueError(f"{name}: is used with {switch} only")


def refuse_unused(name: str, chosen: Mapping[str, str]) -> None:
    """Raises ``ValueError`` if ``name`` is an option of other choices; the message names the choices that have it.

    Args:
        name: Name of the option.
        chosen: Names of the choices that were made.
    """
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
        taken = {other for entry in entries.values() for other in option_names(entry)}
        raise ValueError(f"{name}: is not used with {'; nor with '.join(said)}{checks.nearest(name, taken)}")
