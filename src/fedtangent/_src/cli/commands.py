"""The commands, and what the user asks of one: the values of its options, those of what was chosen among them.

A command is a module of this package: its option groups, ``prepare`` and ``run_job``. The parameters of ``prepare`` are
the command's groups of options, and a ``Description`` where the command is about a run that the user describes (a tuple
of them where the same options may describe a run of each of several algorithms). A command that has a second form, of a
run that is described, prepares that with ``prepare_run``: it is meant where an option is given that the first has not.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src import cli
from fedtangent._src.cli.arguments import (
    Option,
    OutputOptions,
    options_of,
    parse,
    refuse_repeated,
    unknown,
    words,
    words_of,
)
from fedtangent._src.data import files
from fedtangent._src.engine import description
from fedtangent._src.engine.description import Description
from fedtangent._src.entries import check_limits, lasting

PROGRAM = "fedtangent"
ANEW = ("output", "overwrite", "config", "resume")  # of a configuration, what does not belong to the run

DESCRIBED = Description, tuple[Description, ...]  # what ``prepare`` takes where a run, or several, is described


class Command(NamedTuple):
    """A command, and the type of each argument of its ``prepare``, by name."""

    name: str
    module: Any
    prepare: Callable[..., Any]
    takes: dict[str, Any]

    @property
    def describes(self) -> bool:
        """Whether the command's options describe a run."""
        return any(kind in DESCRIBED for kind in self.takes.values())

    @property
    def several(self) -> bool:
        """Whether the command accepts several algorithms, with a run for each."""
        return DESCRIBED[1] in self.takes.values()


class Asked(NamedTuple):
    """A parsed command line."""

    command: Command
    arguments: dict[str, Any]  # of ``prepare``
    values: dict[str, Any]  # of every option, by name
    identity: dict[str, Any]  # the same, of those that tell one run from another


def names() -> list[str]:
    """Returns the names of the commands: modules of this package with a ``run_job``."""
    modules = [importlib.import_module(f"{cli.__name__}.{info.name}") for info in pkgutil.iter_modules(cli.__path__)]
    return [m.__name__.rpartition(".")[2].replace("_", "-") for m in modules if hasattr(m, "run_job")]


def find(name: str, *arguments: str) -> Command:
    """Returns the command called ``name``; the arguments decide between its two forms, if it has two.

    Raises ``ValueError`` for an unknown name.
    """
    place = f"{cli.__name__}.{name.replace('-', '_')}"
    known = name.replace("-", "_").isidentifier() and importlib.util.find_spec(place) is not None
    module = importlib.import_module(place) if known else None
    if module is None or not hasattr(module, "run_job"):
        raise ValueError(f"command: got {name!r}, allowed are {', '.join(names())}")
    first, second = module.prepare, getattr(module, "prepare_run", None)
    plain = _command(name, module, first)
    if second is None:
        return plain
    given = words_of(arguments)
    asked = {*given, *(_repeated(plain, given["config"]) if given.get("config") else ())} - {"", "help", "h"}
    return plain if asked <= {*options_of(groups_of(plain, {})), "no_overwrite"} else _command(name, module, second)


def _command(name: str, module: Any, prepare: Callable[..., Any]) -> Command:
    takes = typing.get_type_hints(prepare, include_extras=True)
    return Command(name, module, prepare, {key: kind for key, kind in takes.items() if key != "return"})


def groups_of(command: Command, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Returns the command's groups of options: the choices, then the options of the chosen entries, then its own."""
    kinds = [kind for kind in command.takes.values() if kind not in DESCRIBED]
    names = (kind.__name__.removesuffix("Options") for kind in kinds)
    titles = (re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in names)
    own: dict[str, Any] = dict(zip(titles, kinds, strict=True))
    if any("output" in (field.name for field in dataclasses.fields(kind)) for kind in own.values()):
        own["output"] = OutputOptions
    return {**description.groups(chosen), **own} if command.describes else own


def options_by_name(groups: Mapping[str, Any]) -> dict[str, Option]:
    """Returns the options by name; an option of the command itself precedes a chosen entry's of the same name."""
    own = {title: group for title, group in groups.items() if isinstance(group, type)}
    return options_of(groups) | options_of(own)


def begun(command: Command, arguments: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, Any], dict[str, str]]:
    """Returns the words of each option, the values of the config.json that is repeated, and the choices of both."""
    given = words_of(arguments)
    before = _repeated(command, given["config"]) if given.get("config") else {}
    chosen = {name: _listed(before[name])[0] for name in description.DECIDING if before.get(name) is not None}
    return given, before, chosen | {name: given[name][0] for name in description.DECIDING if given.get(name)}


def read(command: Command, arguments: Sequence[str]) -> Asked:
    """Parses the arguments of a command; raises ``ValueError`` with one line."""
    given, before, chosen = begun(command, arguments)
    algorithms = list(
        dict.fromkeys(given.get("algorithm") or _listed(before.get("algorithm", description.Choices.algorithm)))
    )
    if len(given.get("algorithm", [])) > len(algorithms):
        raise ValueError(f"algorithm: got {' '.join(given['algorithm'])}, must be different ones")
    offered = [options_by_name(groups_of(command, {**chosen, "algorithm": name})) for name in algorithms]
    several = {one.name for options in offered for one in options.values() if one.several}
    refuse_repeated(arguments, several | {"algorithm"} if command.several else several)
    varied = _varied(command, algorithms, given, before, chosen)
    if command.several and (len(algorithms) > 1 or varied):
        return _read_several(command, algorithms, {**given, **varied}, chosen, varied)
    return _read(command, arguments, given, before, chosen)


VARIED = ("algorithm", "partition", "schedule")  # choices whose options may have several values, a run for each


def _varied(
    command: Command,
    algorithms: Sequence[str],
    given: Mapping[str, list[str]],
    before: Mapping[str, Any],
    chosen: Mapping[str, str],
) -> dict[str, list[str]]:
    """Returns the words of options with several values, each for a run of its own; empty for other commands."""
    varied: dict[str, list[str]] = {}
    if not command.several:
        return varied
    repeated = {name: list(map(str, value)) for name, value in before.items() if isinstance(value, list | tuple)}
    for algorithm in algorithms:
        groups = description.groups({**chosen, "algorithm": algorithm})
        options = options_by_name({title: group for title, group in groups.items() if title.split()[0] in VARIED})
        for name, values in {**repeated, **given}.items():
            if name in options and not options[name].several and len(values) > 1:
                if len(set(values)) < len(values):
                    raise ValueError(f"{name}: got {' '.join(values)}, must be different ones")
                varied[name] = values
    return varied


def _read_several(
    command: Command,
    algorithms: Sequence[str],
    given: Mapping[str, list[str]],
    chosen: Mapping[str, str],
    varied: Mapping[str, list[str]],
) -> Asked:
    """Parses a command of several runs: one for each algorithm and combination of values, with the options that it has.

    An option that no algorithm has is an error. Options whose defaults differ between the runs are left out of the
    values, and so of the config.json that repeats them.
    """
    has = {name: options_by_name(groups_of(command, {**chosen, "algorithm": name})) for name in algorithms}
    asked = []
    for name, options in has.items():
        others = {option for other in has.values() for option in other} - options.keys()
        mine = {option: words for option, words in given.items() if option.removeprefix("no_") not in others}
        of_run = [[(option, value) for value in values] for option, values in varied.items() if option in options]
        for combination in itertools.product(*of_run):
            own = {**mine, "algorithm": [name], **{option: [value] for option, value in combination}}
            line = [word for option, words in own.items() for word in ([f"--{option}"] if option else []) + words]
            asked.append(_read(command, line, *begun(command, line)))
    several: dict[str, Any] = {"algorithm": list(algorithms) if len(algorithms) > 1 else algorithms[0]}
    for option in varied:
        several[option] = list(dict.fromkeys(one.values[option] for one in asked if option in one.values))
    values, identity = (
        description.in_common(parts) | several
        for parts in ([one.values for one in asked], [one.identity for one in asked])
    )
    arguments = {
        key: sum((one.arguments[key] for one in asked), ()) if kind == DESCRIBED[1] else asked[0].arguments[key]
        for key, kind in command.takes.items()
    }
    return Asked(command, arguments, values, identity)


def _listed(value: Any) -> list[str]:
    if value == []:
        raise ValueError("config: got one without an algorithm, must be the config.json of a run")
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def _read(
    command: Command,
    arguments: Sequence[str],
    given: Mapping[str, list[str]],
    before: Mapping[str, Any],
    chosen: Mapping[str, str],
) -> Asked:
    """Parses the arguments of a command about a single run."""
    before = {name: _listed(value)[0] if name == "algorithm" else value for name, value in before.items()}
    before = {name: value for name, value in before.items() if name not in given or name in ("", *description.DECIDING)}
    groups = groups_of(command, chosen)
    options = options_by_name(groups)
    if any(name in given for name in description.CHOICES):  # another choice: options of the former one fall away
        before = {name: value for name, value in before.items() if name in options}
    switches = {f"no_{one.name}" for one in options.values() if one.type is bool}
    for name, found in given.items():
        if name and found == [""]:
            raise ValueError(f"{name}: got '', must be a value")
    for name in (*before, *given):
        if name not in options and (name in before or (name and name not in switches)):
            if command.describes:
                description.refuse_unused(name, chosen)
            if command.prepare is not command.module.prepare:
                other = _command(command.name, command.module, command.module.prepare)
                if name in options_of(groups_of(other, {})):
                    raise ValueError(
                        f"{name}: got it beside options of a run, allowed is {command.name} with one or the other"
                    )
            raise unknown(name, command.name, options)
    values = parse([*words(before, options), *arguments], options)
    if "output" in values and values["output"] is None:
        named = [str(values[one.name]) for one in options.values() if one.positional]
        values["output"] = Path("results", command.name, *named)
    identity = {name: values[name] for name in lasting(*groups.values())}
    return Asked(command, _arguments(command, values, groups), values, identity)


def _arguments(command: Command, values: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the arguments of ``prepare``.

    Groups of a description are instances that hold the chosen entries' defaults.
    """
    of_run = [group for group in groups.values() if not isinstance(group, type)]
    own = {field.name for kind in groups.values() if isinstance(kind, type) for field in dataclasses.fields(kind)}
    flat = {f.name: values[f.name] for group in of_run for f in dataclasses.fields(group) if f.name not in own}
    found = {
        key: description.describe(**flat)
        if kind == Description
        else (description.describe(**flat),)
        if kind == DESCRIBED[1]
        else kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})
        for key, kind in command.takes.items()
    }
    for key, kind in command.takes.items():
        if kind not in DESCRIBED:
            check_limits(found[key])
    return found


def _repeated(command: Command, given: Sequence[str]) -> dict[str, Any]:
    """Reads the options of a config.json."""
    path = Path(given[0])
    whole = files.json_of("config", path)
    try:
        options, wrote = dict(whole["options"]), str(whole["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"config: got {path}, must be the config.json of a run") from error
    if wrote != command.name:
        raise ValueError(f"config: got {path} of {PROGRAM} {wrote}, must be of {PROGRAM} {command.name}")
    return {name: value for name, value in options.items() if name not in ANEW}
