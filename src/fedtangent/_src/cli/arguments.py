"""Flat options: a command's groups of options as one parser and one page of help, and what every command has.

A group is a frozen dataclass whose fields' docstrings are their help. An option that several groups have is one option.
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

from fedtangent._src.checks import choice, nearest
from fedtangent._src.entries import help_of, option
from fedtangent._src.output.files import FORMATS, Figures

WIDTH = 100  # of a page of help, where neither a terminal nor $COLUMNS says another
NARROWEST = 60
COLUMN = 32  # where the help of an option begins,
INDENT = 6  # and where, below it, one with words that are too long to stand beside


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Where results go, of every command that has an ``output``."""

    output: Path | None = option(None, may_differ=True)
    """Folder of what the run writes (default: below results/)."""
    overwrite: bool = option(False, may_differ=True)
    """Replace the run that OUTPUT holds."""
    config: Path | None = option(None, may_differ=True)
    """Repeat the run of this config.json; options given beside it win."""


@dataclasses.dataclass(frozen=True)
class FigureOptions:
    """How figures are written, of every command that draws some."""

    figures: str = option("png", may_differ=True)
    """Format of the figures: png, or for papers pdf or svg."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an unknown format."""
        choice("figures", self.figures, FORMATS)

    def within(self, folder: Path) -> Figures:
        """Returns folder and format of the figures of the run in ``folder``."""
        return Figures(folder / "figures", self.figures)


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """How it is computed, which changes no result beyond rounding."""

    mapping: str = option("auto", may_differ=True)
    """Clients on devices: auto, scan, vmap, chunked:<n>, sharded[:..]."""
    stop_on_divergence: bool = option(True, may_differ=True)
    """Off: go on when numbers are no longer finite."""
    checkpoint_every: int | None = option(None, may_differ=True)
    """Rounds between checkpoints, 0: none (default: ten seconds or more)."""
    host_devices: int = option(0, may_differ=True)
    """Without an accelerator: cores that work side by side (0: all)."""
    distributed: bool = option(False, may_differ=True)
    """One of several processes of a run, over a shared output folder; Slurm and Open MPI tell them the rest."""
    coordinator: str | None = option(None, may_differ=True, used_with="distributed")
    """Process 0, host:port (default: $JAX_COORDINATOR_ADDRESS)."""
    num_processes: int | None = option(None, may_differ=True, used_with="distributed")
    """How many (default: $JAX_NUM_PROCESSES)."""
    process_id: int | None = option(None, may_differ=True, used_with="distributed")
    """Which one, from 0 (default: $JAX_PROCESS_ID)."""


class Option(NamedTuple):
    """An option of a command."""

    name: str
    type: Any
    default: Any
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


def options_of(groups: Mapping[str, Any]) -> dict[str, Option]:
    """Collects the options of ``groups`` by name; of options with equal names, the first group's.

    A group is a dataclass, or an instance of one, whose values are then the defaults.
    """
    found: dict[str, Option] = {}
    for title, group in groups.items():
        cls = group if isinstance(group, type) else type(group)
        kinds, texts = typing.get_type_hints(cls, include_extras=True), help_of(cls)
        for field in dataclasses.fields(cls):
            name, kind, positional = field.name, kinds[field.name], False
            if typing.get_origin(kind) is typing.Annotated:
                positional, kind = tyro.conf.Positional in kind.__metadata__, kind.__origin__
            default, text = field.default if isinstance(group, type) else getattr(group, name), texts.get(name, "")
            if field.metadata.get("used_with"):
                text = f"with --{field.metadata['used_with'].replace('_', '-')}: {text[:1].lower()}{text[1:]}"
            found.setdefault(name, Option(name, kind, default, text, title, positional))
    return found


def words_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the words after each option by the option's name; ``""`` has the words before the first option."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        else:
            found[name].append(word)
    return found


def refuse_repeated(arguments: Sequence[str], several: Iterable[str]) -> None:
    """Raises ``ValueError`` for an option that occurs twice, or a switch that occurs both on and off.

    Args:
        arguments: Words of the command line.
        several: Names of options that take several values, for the message.
    """
    given = [word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
    bare = [name.removeprefix("no_") if name.removeprefix("no_") in given else name for name in given]
    for name in dict.fromkeys(bare):
        if name and bare.count(name) > 1:
            shown = name.replace("_", "-")
            whole = " with every value" if name in several else ""
            raise ValueError(f"{name}: got --{shown} {bare.count(name)} times, must be one --{shown}{whole}")


def words(values: Mapping[str, Any], options: Mapping[str, Option]) -> list[str]:
    """Converts option values, as in a config.json, to words of a command line."""
    found: list[str] = []
    for name, value in values.items():
        parts, written = list(map(str, value if isinstance(value, list | tuple) else [value])), name.replace("_", "-")
        if options[name].positional:
            found = [*parts, *found]
        else:
            found += [f"--{'' if value else 'no-'}{written}"] if isinstance(value, bool) else [f"--{written}", *parts]
    return found


def parse(arguments: Sequence[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Parses the words of a command line to the value of every option; raises ``ValueError`` for invalid words."""
    fields: list[tuple[str, Any, Any]] = []
    positional: Any = tyro.conf.Positional
    for one in sorted(options.values(), key=lambda one: one.default is not dataclasses.MISSING):
        kind = positional[one.type] if one.positional else one.type
        required = one.default is dataclasses.MISSING
        fields.append((one.name, kind, dataclasses.field() if required else dataclasses.field(default=one.default)))
    made, said = dataclasses.make_dataclass("Options", fields), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read: Any = tyro.cli(made, prog="fedtangent", args=list(arguments), add_help=False)
    except SystemExit:
        raise ValueError(_first_words(said.getvalue())) from None
    return {name: getattr(read, name) for name in options}


def _first_words(box: str) -> str:
    """Reduces tyro's boxed error message to one line: the text between the title and the next rule."""
    lines = [re.sub("[\u2500-\u257f]", " ", line.replace("─", "-")).strip() for line in box.splitlines()][1:]
    rules = [i for i, line in enumerate(lines) if i > 0 and not line.strip("- ")]
    said = " ".join(" ".join(lines[: rules[0] if rules else None]).strip("- ").split())
    if said.startswith("Missing from"):
        missing = re.findall(r"(\S+) \(required\)", said)
        return f"{', '.join(missing)}: got none, must be given"
    said = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"got \1, must be a whole number", said)
    said = re.sub(r"could not convert string to float: ('.*')", r"got \1, must be a number", said)
    return re.sub(r"^Error parsing --([\w-]+):", lambda m: m[1].replace("-", "_") + ":", said)


def unknown(name: str, command: str, names: Iterable[str]) -> ValueError:
    """Builds the error for an option that the command does not have, with the nearest name."""
    return ValueError(f"{name}: is no option of {command}{nearest(name, names)}")


def page(usage: str, about: str, groups: Mapping[str, Any], options: Mapping[str, Option]) -> str:
    """Builds a page of help: description, then each group's options with their values, one line each if it fits.

    The page is as wide as the terminal, or as ``$COLUMNS`` says.

    Args:
        usage: Line of usage.
        about: Description of the command.
        groups: Titles of the groups, in order.
        options: Options by name, each with its group.
    """
    width = max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns)
    said = f"{about} Behind an option: its value, as chosen here or by default."
    lines = [f"usage: {usage}", *textwrap.wrap(said, width)]
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
    """Returns the text after an option: its value, or the kind of value it takes if it has none."""
    if one.type is bool:
        return ""
    if one.default is None or one.default is dataclasses.MISSING:
        if one.positional:
            return ""
        plain = [kind for kind in typing.get_args(one.type) if kind is not type(None)] or [one.type]
        return getattr(plain[0], "__name__", str(plain[0])).upper()
    if isinstance(one.default, tuple):
        shown = " ".join(map(str, one.default))
        return shown if len(shown) < 24 else f"{one.default[0]} {one.default[1]} .."
    return str(one.default)
