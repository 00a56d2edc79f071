"""Command-line options: a command's groups of options as one parser and one page of help.

A group is a frozen dataclass whose fields have help texts below them. Options of one name in several groups are one
option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from fedtangent._src.checks import choice, nearest, writable
from fedtangent._src.comparison.verdicts import Verdict, undecided
from fedtangent._src.entries import Values, help_of, option
from fedtangent._src.output.files import ERROR, FORMATS, Ended, Figures, ended
from fedtangent._src.output.junit import write_junit

WIDTH = 100  # columns of a page of help that goes neither to a terminal nor to $COLUMNS columns
NARROWEST = 60
COLUMN = 32  # first column of the help of an option
INDENT = 6  # first column of help with words that are too long to stand beside the option


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Options of every command that writes an output folder: the folder, a run to repeat, and compiled programs."""

    output: Path | None = option(None, may_differ=True)
    """Folder for the run's files (default: below results/)."""
    overwrite: bool = option(False, may_differ=True)
    """Replace the run in OUTPUT."""
    config: Path | None = option(None, may_differ=True)
    """Repeat the run of this config.json; further options replace its own."""
    programs: str | None = option(None, may_differ=True)
    """Folder of compiled programs, or off (default: ~/.cache/fedtangent)."""


@dataclasses.dataclass(frozen=True)
class FigureOptions:
    """Options of the figures, for every command that draws figures."""

    figures: str = option("png", may_differ=True)
    """Format of the figures: png, or for papers pdf or svg."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if the file format of the figures is unknown."""
        choice("figures", self.figures, FORMATS)

    def within(self, folder: Path) -> Figures:
        """Returns the folder and the format for the figures of the run in ``folder``."""
        return Figures(folder / "figures", self.figures)


@dataclasses.dataclass(frozen=True)
class VerdictOptions:
    """Options of the exit code and of the JUnit XML file, for every command that compares theory with simulation."""

    strict: bool = option(False, may_differ=True)
    """Exit with 3, not 0, if a verdict is undecided and none fails; the last line names it in any case."""
    junit: Path | None = option(None, may_differ=True)
    """File to write the verdicts to as JUnit XML, which CI systems read."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if the file for JUnit XML cannot be written."""
        if self.junit is not None:
            writable("junit", self.junit.parent, self.junit.name)
            if self.junit.is_dir():
                raise ValueError(f"junit: got the folder {self.junit}, must be a file")

    def ended(
        self,
        command: str,
        suites: Mapping[str, Sequence[Verdict] | str],
        seconds: Mapping[str, float],
        failures: Sequence[str],
        advice: str = "",
    ) -> Ended:
        """Writes the JUnit XML, and returns the outcome of the command.

        Args:
            command: Name of the command.
            suites: For the name of each comparison its verdicts, or the text of the error that ended it.
            seconds: Seconds that each comparison took, by its name.
            failures: Descriptions of the failures, a few words each.
            advice: Advice to the user after a failure.

        Returns:
            The outcome. The exit code is 1 if there are failures, else 2 if a comparison ended with an error, else 3 if
            the option ``--strict`` is on and a verdict is undecided, else 0.
        """
        if self.junit is not None:
            write_junit(self.junit, command, suites, seconds, self.strict)
        verdicts = [v for outcome in suites.values() if not isinstance(outcome, str) for v in outcome]
        errors = [f"{name}: {outcome}" for name, outcome in suites.items() if isinstance(outcome, str)]
        outcome = ended([*failures, *errors], advice, undecided(verdicts), self.strict)
        return outcome if failures or not errors else outcome._replace(code=ERROR)


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Options of where and how a run is computed; unless it diverges, they change its results only by rounding."""

    mapping: str = option("auto", may_differ=True)
    """Clients on devices: auto, scan, vmap, chunked:<n>, sharded[:..]."""
    stop_on_divergence: bool = option(True, may_differ=True)
    """Off: continue when numbers are no longer finite."""
    checkpoint_every: int | None = option(None, may_differ=True)
    """Rounds between checkpoints, 0: none (default: by time, 10 s or more)."""
    host_devices: int = option(0, may_differ=True)
    """Without an accelerator: number of cores in use (0: all)."""
    distributed: bool = option(False, may_differ=True)
    """One of several processes; Slurm and Open MPI need no other option."""
    coordinator: str | None = option(None, may_differ=True, used_with="distributed")
    """Address host:port of process 0 (default: $JAX_COORDINATOR_ADDRESS)."""
    num_processes: int | None = option(None, may_differ=True, used_with="distributed")
    """Their number (default: $JAX_NUM_PROCESSES)."""
    process_id: int | None = option(None, may_differ=True, used_with="distributed")
    """This process, from 0 (default: $JAX_PROCESS_ID)."""


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        name: Name in Python, with underscores.
        type: Type of the value, as in an annotation.
        default: Value without the option; ``dataclasses.MISSING`` for an option that must be given.
        help: Text on the help page.
        group: Title of the option's group.
        positional: Whether the value is written without the option's name.
    """

    name: str
    type: Any
    default: object
    help: str
    group: str
    positional: bool = False

    @property
    def shown(self) -> str:
        """The option's name on the command line; for a switch that is on by default, the form that turns it off."""
        if self.default is True:
            return f"--no-{self.name.replace('_', '-')}"
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether the option takes several values."""
        return typing.get_origin(self.type) is tuple


def options_of(groups: Mapping[str, object]) -> dict[str, Option]:
    """Collects the options of all ``groups`` by name; if groups share a name, the first group's option counts.

    A group is a dataclass, or an instance of one, whose values are then the defaults. The keys of ``groups`` are
    titles.
    """
    options: dict[str, Option] = {}
    for title, group in groups.items():
        cls = group if isinstance(group, type) else type(group)
        kinds, texts = typing.get_type_hints(cls, include_extras=True), help_of(cls)
        for field in dataclasses.fields(cls):
            name, kind, positional = field.name, kinds[field.name], False
            if typing.get_origin(kind) is typing.Annotated:
                positional, kind = tyro.conf.Positional in kind.__metadata__, kind.__origin__
            default, text = field.default if isinstance(group, type) else getattr(group, name), texts.get(name, "")
            if switch := field.metadata.get("used_with"):
                text = f"with --{switch.replace('_', '-')}: {text[:1].lower()}{text[1:]}"
            options.setdefault(name, Option(name, kind, default, text, title, positional))
    return options


def words_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Splits a command line into options: returns the words after each option, by its name in Python.

    The key ``""`` has the words before the first option.
    """
    words: dict[str, list[str]] = {"": []}
    name = ""
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            words[name] = [value] if equals else []
        else:
            words[name].append(word)
    return words


def refuse_repeated(arguments: Sequence[str], several: Iterable[str]) -> None:
    """Raises ``ValueError`` if an option occurs twice, or a switch both on and off (``--x`` and ``--no-x``).

    Args:
        arguments: Words of the command line.
        several: Names of options that take several values, for the message.
    """
    names = [word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
    names = [name.removeprefix("no_") if name.removeprefix("no_") in names else name for name in names]
    for name in filter(None, dict.fromkeys(names)):
        if names.count(name) > 1:
            flag, values = f"--{name.replace('_', '-')}", " with every value" if name in several else ""
            raise ValueError(f"{name}: got {flag} {names.count(name)} times, must be one {flag}{values}")


def words(values: Mapping[str, object], options: Mapping[str, Option]) -> list[str]:
    """Converts the values of options to the words of a command line; inverts ``parse``.

    Args:
        values: Values by name, as in a config.json.
        options: Options by name.
    """
    line: list[str] = []
    for name, value in values.items():
        parts, flag = list(map(str, value if isinstance(value, list | tuple) else [value])), name.replace("_", "-")
        if options[name].positional:
            line = [*parts, *line]
        else:
            line += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", *parts]
    return line


def parse(arguments: Sequence[str], options: Mapping[str, Option]) -> Values:
    """Parses the words of a command line; returns by name the value of every option, given there or by default.

    Args:
        arguments: Words of a command line.
        options: Options by name.

    Raises:
        ValueError: An unknown option, a value of the wrong type, or a required option that is missing.
    """
    fields: list[tuple[str, object, object]] = []
    positional: Any = tyro.conf.Positional
    for one in sorted(options.values(), key=lambda one: one.default is not dataclasses.MISSING):
        kind = positional[one.type] if one.positional else one.type
        required = one.default is dataclasses.MISSING
        fields.append((one.name, kind, dataclasses.field() if required else dataclasses.field(default=one.default)))
    record, message = dataclasses.make_dataclass("Options", fields), io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            values: object = tyro.cli(record, prog="fedtangent", args=list(arguments), add_help=False)
    except SystemExit:
        raise ValueError(_first_words(message.getvalue())) from None
    return {name: getattr(values, name) for name in options}


def _first_words(box: str) -> str:
    """Reduces the error message that tyro prints in a box to one line."""
    lines = [re.sub("[\u2500-\u257f]", " ", line.replace("─", "-")).strip() for line in box.splitlines()][1:]
    rules = [i for i, line in enumerate(lines) if i > 0 and not line.strip("- ")]
    text = " ".join(" ".join(lines[: rules[0] if rules else None]).strip("- ").split())
    if text.startswith("Missing from"):
        missing = re.findall(r"(\S+) \(required\)", text)
        return f"{', '.join(missing)}: got none, must be given"
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"got \1, must be a whole number", text)
    text = re.sub(r"^Unrecognized options: (.*)", r"arguments: got \1, which belongs to no option", text)
    text = re.sub(r"could not convert string to float: ('.*')", r"got \1, must be a number", text)
    return re.sub(r"^Error parsing --([\w-]+):", lambda m: m[1].replace("-", "_") + ":", text)


def unknown(name: str, command: str, names: Iterable[str]) -> ValueError:
    """Builds the error for an option that a command does not have; it suggests the most similar name.

    Args:
        name: Name of the option.
        command: Name of the command.
        names: Names of the options that the command has.
    """
    return ValueError(f"{name}: is no option of {command}{nearest(name, names)}")


def page(usage: str, about: str, groups: Iterable[str], options: Mapping[str, Option]) -> str:
    """Builds a help page: a description, then each group's options with their values, one line each if it fits.

    Args:
        usage: Line of usage.
        about: Description of the command.
        groups: Titles of the groups, in order.
        options: Options by name, each with its group.
    """
    width = max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns)
    introduction = f"{about} Values shown are defaults; INT, FLOAT, STR, PATH: kinds of values."
    lines = [f"usage: {usage}", *textwrap.wrap(introduction, width)]
    for title in groups:
        mine = [one for one in options.values() if one.group == title]
        if mine:
            lines += [f"{title}:", *(line for one in mine for line in _lines(one, width))]
    return "\n".join(lines)


def _lines(one: Option, width: int) -> list[str]:
    value, text = _default(one), one.help.removesuffix(".")
    head = f"  {one.shown} {value}".rstrip()
    column = COLUMN if max(map(len, text.split()), default=0) <= width - COLUMN else INDENT
    body = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
    if len(head) >= column:
        return [head, *(" " * column + line for line in body)]
    return [f"{head:<{COLUMN}}{body[0]}".rstrip(), *(" " * COLUMN + line for line in body[1:])]


def _default(one: Option) -> str:
    """Returns the text that follows an option on the help page: its default, or the type of value that it takes."""
    if one.type is bool or one.positional:
        return ""
    if one.default is None or one.default is dataclasses.MISSING:
        plain = [kind for kind in typing.get_args(one.type) if kind is not type(None)] or [one.type]
        return getattr(plain[0], "__name__", str(plain[0])).upper()
    if one.default == ():
        return f"{typing.get_args(one.type)[0].__name__.upper()} .."
    if isinstance(one.default, tuple):
        text = " ".join(map(str, one.default))
        return text if len(text) < 24 else f"{one.default[0]} {one.default[1]} .."
    return str(one.default)
