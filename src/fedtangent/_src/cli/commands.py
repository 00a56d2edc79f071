"""The commands, and the parsing of a command line.

A command is a module of this package with ``prepare`` and ``run_job``. The parameters of ``prepare`` are the command's
groups of options, and a ``Description`` if options describe a run (``Descriptions`` if they may describe several runs).
A command may have a second function ``prepare_run``, for a run that the user describes. This function is called in
place of ``prepare`` if the user gives an option that ``prepare`` does not have.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedtangent._src import cli
from fedtangent._src.cli import PROGRAM
from fedtangent._src.cli import arguments as flat
from fedtangent._src.cli.arguments import Option, OutputOptions
from fedtangent._src.data import files
from fedtangent._src.engine import description
from fedtangent._src.engine.description import Description, Descriptions
from fedtangent._src.entries import Groups, Values, check_limits, lasting

ANEW = (
    "output",
    "overwrite",
    "config",
    "programs",
    "resume",
    "junit",
)  # options of a config.json that do not belong to the run
DESCRIBED = Description, Descriptions  # types of the argument of ``prepare`` that describes a run, or several runs
VARIED = ("algorithm", "partition", "schedule")  # choices whose options may have several values, a run for each


@runtime_checkable
class Prepare(Protocol):
    """A function that checks the options of a command and returns its job, such as ``prepare`` of its module."""

    def __call__(self, **groups: Any) -> Any:
        """Returns a job for the ``run_job`` of the same module; raises ``ValueError`` for a bad option.

        Args:
            groups: Option groups and descriptions of runs, by parameter name.
        """


class Command(NamedTuple):
    """A command, such as ``fedtangent train``.

    Attributes:
        name: Name of the command.
        module: Module of the command, with its ``run_job``.
        prepare: The module's ``prepare`` or ``prepare_run``.
        takes: Type of each parameter of ``prepare`` by name: a group of options, or a description of runs.
    """

    name: str
    module: ModuleType
    prepare: Prepare
    takes: dict[str, type[Any]]

    @property
    def describes(self) -> bool:
        """Whether ``prepare`` takes a description of runs, so that the command has the options of a run."""
        return any(kind in DESCRIBED for kind in self.takes.values())

    @property
    def several(self) -> bool:
        """Whether the command accepts several algorithms, with a run for each."""
        return Descriptions in self.takes.values()


class Line(NamedTuple):
    """A command line, split into the words of each option, before these are converted to values.

    Attributes:
        words: Words after each option, by its name; "" has the words before the first option.
        config: Options of the config.json that ``--config`` names; empty without one.
        chosen: Names of the chosen algorithm, model and so on, on which the other options depend.
    """

    words: dict[str, list[str]]
    config: Values
    chosen: dict[str, str]


class ParsedLine(NamedTuple):
    """A command line whose words are converted to the values of the options.

    Attributes:
        command: The command.
        arguments: Arguments of the command's ``prepare``.
        values: Value of every option, by name.
        identity: Values of the options that tell one run from another.
    """

    command: Command
    arguments: dict[str, Any]
    values: Values
    identity: Values


def find(name: str, *arguments: str) -> Command:
    """Returns the command called ``name``.

    Args:
        name: Name of the command, one of ``cli.summaries``.
        *arguments: Words after the command's name. If an option in them, or in the config.json that they name, is no
            option of the command's ``prepare``, the command uses ``prepare_run``, where its module has one.

    Raises:
        ValueError: The config.json cannot be read, or is not of a run of this command.
    """
    module = importlib.import_module(f"{cli.__name__}.{name.replace('-', '_')}")
    plain = _command(name, module, module.prepare)
    if not hasattr(module, "prepare_run"):
        return plain
    words, config, _ = begun(plain, arguments)
    allowed = {*flat.options_of(groups_of(plain, {})), "no_overwrite", "", "help", "h"}
    return plain if {*words, *config} <= allowed else _command(name, module, module.prepare_run)


def _command(name: str, module: ModuleType, prepare: Prepare) -> Command:
    takes = typing.get_type_hints(prepare, include_extras=True)
    return Command(name, module, prepare, {key: kind for key, kind in takes.items() if key != "return"})


def groups_of(command: Command, chosen: Mapping[str, str]) -> Groups:
    """Returns the option groups of a command by title.

    They are the choices that describe a run, the options of the chosen algorithm, model and so on, the groups that only
    this command has, and ``OutputOptions`` if the command has an output folder.

    Args:
        command: The command.
        chosen: Choices that the user made by kind, such as ``{"algorithm": "fed_avg"}``.
    """
    groups: Groups = description.groups(chosen) if command.describes else {}
    kinds = [kind for kind in command.takes.values() if kind not in DESCRIBED]
    for kind in kinds:
        groups[re.sub("(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Options")).lower()] = kind
    if any(field.name == "output" for kind in kinds for field in dataclasses.fields(kind)):
        groups["output"] = OutputOptions
    return groups


def options_by_name(groups: Mapping[str, object]) -> dict[str, Option]:
    """Returns the options of ``groups`` by name.

    If a group of the command (a class) and one that describes a run (an instance) have options of the same name, the
    command's option is returned.
    """
    of_command = {title: group for title, group in groups.items() if isinstance(group, type)}
    return flat.options_of(groups) | flat.options_of(of_command)


def begun(command: Command, arguments: Sequence[str]) -> Line:
    """Splits a command line into the words of each option, and reads the config.json that ``--config`` names.

    Args:
        command: The command.
        arguments: Words after the command's name.

    Raises:
        ValueError: The config.json cannot be read, or is not of a run of this command.
    """
    words = flat.words_of(arguments)
    config = _repeated(command, Path(words["config"][0])) if words.get("config") else {}
    chosen = {name: _listed(config[name])[0] for name in description.DECIDING if config.get(name) is not None}
    chosen |= {name: words[name][0] for name in description.DECIDING if words.get(name)}
    return Line(words, config, chosen)


def _repeated(command: Command, path: Path) -> Values:
    """Reads the options of the run in a config.json, except those in ``ANEW``.

    Raises ``ValueError`` if ``path`` is not the config.json of a run of ``command``.
    """
    content = files.json_of("config", path)
    try:
        options, writer = dict(content["options"]), str(content["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"config: got {path}, must be the config.json of a run") from error
    if writer != command.name:
        raise ValueError(f"config: got {path}, written by {PROGRAM} {writer}, must be one of {PROGRAM} {command.name}")
    return {name: value for name, value in options.items() if name not in ANEW}


def _listed(value: object) -> list[str]:
    if value == []:
        raise ValueError("config: got one without an algorithm, must be the config.json of a run")
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def read(command: Command, arguments: Sequence[str]) -> ParsedLine:
    """Parses the arguments of a command; raises ``ValueError`` with a message of one line for a bad argument.

    Args:
        command: The command.
        arguments: Words after the command's name.
    """
    line = begun(command, arguments)
    algorithms = line.words.get("algorithm") or _listed(line.config.get("algorithm", description.Choices.algorithm))
    if len(set(algorithms)) < len(algorithms):
        raise ValueError(f"algorithm: got {' '.join(algorithms)}, must be different ones")
    offered = {name: options_by_name(groups_of(command, {**line.chosen, "algorithm": name})) for name in algorithms}
    several = {one.name for options in offered.values() for one in options.values() if one.several}
    flat.refuse_repeated(arguments, several | {"algorithm"} if command.several else several)
    varied = _varied(algorithms, line) if command.several else {}
    if command.several and (len(algorithms) > 1 or varied):
        return _read_several(command, offered, line, varied)
    return _read(command, arguments, line)


def _varied(algorithms: Sequence[str], line: Line) -> dict[str, list[str]]:
    """Finds the options for which the user gave several values, to get a run for each; returns these values by option.

    Only options of the algorithm, partition and schedule count (``VARIED``); equal values raise ``ValueError``.
    ``algorithms`` are the names of the algorithms on the command line ``line``.
    """
    varied: dict[str, list[str]] = {}
    repeated = {name: list(map(str, value)) for name, value in line.config.items() if isinstance(value, list | tuple)}
    for algorithm in algorithms:
        groups = description.groups({**line.chosen, "algorithm": algorithm})
        options = options_by_name({title: group for title, group in groups.items() if title.split()[0] in VARIED})
        for name, values in {**repeated, **line.words}.items():
            if name in options and not options[name].several and len(values) > 1:
                if len(set(values)) < len(values):
                    raise ValueError(f"{name}: got {' '.join(values)}, must be different ones")
                varied[name] = values
    return varied


def _read_several(
    command: Command, offered: Mapping[str, Mapping[str, Option]], line: Line, varied: Mapping[str, list[str]]
) -> ParsedLine:
    """Parses a command line of several runs: one for each algorithm and combination of values of its options.

    ``offered`` has for each algorithm the command's options by name. ``varied`` has the values of each option for which
    the user gave several.
    """
    runs: list[ParsedLine] = []
    for algorithm, options in offered.items():
        others = {name for other in offered.values() for name in other} - options.keys()
        words = {name: values for name, values in line.words.items() if name.removeprefix("no_") not in others}
        choices = [[(name, value) for value in values] for name, values in varied.items() if name in options]
        for combination in itertools.product(*choices):
            of_run = {**words, "algorithm": [algorithm], **{name: [value] for name, value in combination}}
            arguments = [word for name, values in of_run.items() for word in ([f"--{name}"] if name else []) + values]
            runs.append(_read(command, arguments, begun(command, arguments)))
    several: dict[str, list[object]] = {"algorithm": list(offered)} if len(offered) > 1 else {}
    for name in varied:
        several[name] = list(dict.fromkeys(run.values[name] for run in runs if name in run.values))
    prepared = dict(runs[0].arguments)
    for key, kind in command.takes.items():
        if kind is Descriptions:
            prepared[key] = Descriptions(sum((run.arguments[key].runs for run in runs), ()), several)
    values = description.in_common([run.values for run in runs]) | several
    return ParsedLine(command, prepared, values, description.in_common([run.identity for run in runs]) | several)


def _read(command: Command, arguments: Sequence[str], line: Line) -> ParsedLine:
    """Parses the arguments of a command about a single run; ``line`` is what ``begun`` returns for them."""
    groups = groups_of(command, line.chosen)
    options = options_by_name(groups)
    config = {name: _listed(value)[0] if name == "algorithm" else value for name, value in line.config.items()}
    config = {n: v for n, v in config.items() if n not in line.words or n in ("", *description.DECIDING)}
    if any(name in line.words for name in description.CHOICES):  # options of the config's own choice fall away
        config = {name: value for name, value in config.items() if name in options}
    for name, words in line.words.items():
        if name and words == [""]:
            raise ValueError(f"{name}: got '', must be a value")
    switches = {f"no_{one.name}" for one in options.values() if one.type is bool}
    for name in (*config, *(name for name in line.words if name and name not in switches)):
        if name not in options:
            raise _refusal(command, name, line.chosen, options)
    values = flat.parse([*flat.words(config, options), *arguments], options)
    if "output" in values and values["output"] is None:
        positional = [str(values[one.name]) for one in options.values() if one.positional]
        values["output"] = Path("results", command.name, *positional)
    identity = {name: values[name] for name in lasting(*groups.values())}
    return ParsedLine(command, _arguments(command, values, groups), values, identity)


def _refusal(command: Command, name: str, chosen: Mapping[str, str], options: Mapping[str, Option]) -> ValueError:
    """Returns or raises the ``ValueError`` for an option ``name`` that a command does not have.

    ``chosen`` are the names of the chosen algorithm, model and so on, and ``options`` the options that the command has
    with them.
    """
    if command.describes:
        description.refuse_unused(name, chosen)
    if command.prepare is not command.module.prepare:
        plain = _command(command.name, command.module, command.module.prepare)
        if name in flat.options_of(groups_of(plain, {})):
            return ValueError(f"{name}: is for the standard cases, must be left out if options describe a run")
    return flat.unknown(name, command.name, options)


def _arguments(command: Command, values: Mapping[str, object], groups: Groups) -> dict[str, object]:
    """Builds the arguments of a command's ``prepare`` from the values of all options.

    ``groups`` holds a class for each group of the command itself, and instances for the groups that describe a run.
    """
    kinds = [group for group in groups.values() if isinstance(group, type)]
    of_command = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    of_run = {f.name for g in groups.values() if not isinstance(g, type) for f in dataclasses.fields(g)} - of_command
    arguments: dict[str, object] = {}
    for key, kind in command.takes.items():
        if kind in DESCRIBED:
            run = description.describe(**{name: values[name] for name in values if name in of_run})
            arguments[key] = run if kind is Description else Descriptions((run,))
        else:
            arguments[key] = kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
            check_limits(arguments[key])
    return arguments
