"""Entries: one record for everything that can be chosen by name.

Each algorithm, data set, partition, model, schedule, channel, graph, case, experiment and theorem's check has one
entry, at the end of the file that defines it: its name, a summary in one line, its options with help and defaults, the
function that builds it, and its papers. The command line, ``fedtangent list``, ``--help``, the documentation's tables,
the citations and the tests of the laws all read the entries.

To add an algorithm, write a file in ``federated/algorithms`` that ends with ``ENTRIES``, a tuple of entries. ``KINDS``
names the package of every other kind. Schedules and graphs are one module each: add the entry there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtangent.checks import MAX_INDEX, MAX_NUMBER, nearest

KINDS = {  # kind -> the package or module whose files end with its entries
    "algorithms": "fedtangent.federated.algorithms",
    "datasets": "fedtangent.data.sources",
    "models": "fedtangent.models",
    "partitions": "fedtangent.data.partition",
    "schedules": "fedtangent.federated.schedule",
    "channels": "fedtangent.federated.wire",
    "graphs": "fedtangent.federated.graph",
    "cases": "fedtangent.compare.cases",
    "experiments": "fedtangent.experiments",
    "theorems": "fedtangent.compare.theorems",
}
OWN = {  # kinds for which users may name their own functions -> the module whose ``entry_of_function`` is for them
    "algorithms": "fedtangent.federated.algorithms.entry",
    "models": "fedtangent.models.entry",
}
WRITTEN = (bool, int, float, str, Path)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Nothing to choose."""


def option(default: Any, *, may_differ: bool = False, used_with: str = "", most: int | None = None) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its value where none is given.
        may_differ: whether a resumed run may have another value than the run that it continues.
        used_with: the name of the option without which this one has no effect.
        most: the largest number allowed; by default that of its type (``check_limits``).
    """
    return dataclasses.field(default=default, metadata={"may_differ": may_differ, "used_with": used_with, "most": most})


def check_limits(options: Any) -> None:
    """Raise ``ValueError`` for a number above the ``most`` of its option, before anything is built.

    Infinity passes: each option says what it means.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int | float) and one != math.inf:
                most = field.metadata.get("most") or (MAX_NUMBER if isinstance(one, float) else MAX_INDEX)
                if not abs(one) <= most:
                    raise ValueError(f"{field.name}: got {one}, must be a number of at most {most}")


def lasting(*groups: Any) -> list[str]:
    """The names of the options in ``groups`` that a resumed run must share with the run that it continues."""
    return [f.name for group in groups for f in dataclasses.fields(group) if not f.metadata.get("may_differ")]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One choice of its kind; kinds that say more of themselves extend it."""

    name: str
    """What it is called on the command line and in Python."""
    summary: str
    """What it is, in one line."""
    build: Callable[..., Any]
    """Builds it from an instance of ``options`` and the arguments that its kind gets."""
    options: type[Any] = NoOptions
    """A frozen dataclass, whose fields' docstrings are their help."""
    papers: tuple[str, ...] = ()
    """Keys of ``papers.PAPERS``, or BibTeX."""

    @property
    def written(self) -> str:
        """How it is written where it is chosen: its name."""
        return self.name

    @property
    def told(self) -> str:
        """The summary, and what else ``fedtangent list`` shows of its kind."""
        return self.summary


@functools.cache
def catalogue(kind: str) -> Mapping[str, Any]:
    """The entries of one of ``KINDS`` by name, in the order of their names.

    Raises ``ValueError`` for another kind, and ``RuntimeError`` where two entries bear one name.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    root = importlib.import_module(KINDS[kind])
    found: dict[str, Any] = {}
    for module in (root, *_modules(root)):
        for entry in vars(module).get("ENTRIES", ()):
            if entry.name in found:
                raise RuntimeError(f"{kind}: two entries are called {entry.name!r}")
            found[entry.name] = entry
    return dict(sorted(found.items()))


def _modules(root: Any) -> list[Any]:
    """All modules below a package; none for a plain module."""
    found = pkgutil.walk_packages(getattr(root, "__path__", ()), root.__name__ + ".")
    return [importlib.import_module(info.name) for info in found]


def choose(kind: str, name: str) -> Any:
    """The entry of ``kind`` called ``name``, such as ``choose("algorithms", "fed_avg")``.

    For models and algorithms ``name`` may also be a user's own function, written ``package.module:function``. Its
    module is imported here and nowhere else; its options are its own parameters (``own_options``). Raises
    ``ValueError`` for an unknown name, with the allowed ones, and for a function that cannot be found.
    """
    entries, what = catalogue(kind), kind.removesuffix("s")
    if isinstance(name, str) and ":" in name and kind in OWN:
        return _own_entry(kind, name, _imported(what, name))
    if not isinstance(name, str) or name not in entries:
        more = ", or package.module:function of your own" if kind in OWN else ""
        raise ValueError(f"{what}: got {name!r}, allowed are {', '.join(entries)}{more}{nearest(name, entries)}")
    return entries[name]


def _imported(what: str, name: str) -> Callable[..., Any]:
    """The function ``package.module:function``; whatever its module raises becomes a ``ValueError``."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ImportError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{what}: got {name!r}, but there is no module {error.name}") from error
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what}: got {name!r}, whose module cannot be imported: {said}") from error
    function = getattr(found, attribute, None)
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{what}: got {name!r}, but {module} has no function {attribute!r}")
    return function


@functools.cache
def _own_entry(kind: str, name: str, function: Callable[..., Any]) -> Any:
    """The entry of a user's function: made once, so that equal options are equal."""
    return importlib.import_module(OWN[kind]).entry_of_function(name, function)


def own_options(
    what: str, name: str, function: Callable[..., Any], given: Sequence[str], bases: tuple[type, ...]
) -> Any:
    """The options of a user's function: a dataclass that extends ``bases`` by the function's own parameters.

    The first two parameters are what every function of its kind gets, and parameters named in ``given`` are filled in
    by the package: neither are options. Raises ``ValueError`` for any other parameter that has no default, or whose
    annotation is no type that can be written on a command line.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
        kinds = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"{what}: got {name!r}, whose signature cannot be read: {error}") from error
    if len(parameters) < 2 or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters[:2]):
        raise ValueError(
            f"{what}: got {name!r}, which takes {inspect.signature(function)}, must take two arguments first"
        )
    fields = []
    for p in parameters[2:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in given:
            continue
        if p.default is p.empty:
            raise ValueError(f"{what}: got {name!r}, whose option {p.name} has no default, must have one")
        if not _is_written(kinds.get(p.name)):
            raise ValueError(
                f"{what}: got {name!r}, whose option {p.name} must be annotated: as bool, int, float, str, Path, a "
                "tuple of one of these, or one of them | None"
            )
        fields.append((p.name, kinds[p.name], dataclasses.field(default=p.default)))
    return dataclasses.make_dataclass("OwnOptions", fields, bases=bases, frozen=True)


def _is_written(kind: Any) -> bool:
    """Whether an option of this type can be written on a command line and kept in a config.json."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return all(part is types.NoneType or _is_written(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return all(part is ... or part in WRITTEN for part in typing.get_args(kind))
    return kind in WRITTEN


def option_names(entry: Entry) -> tuple[str, ...]:
    """What an entry's options are called."""
    return tuple(field.name for field in dataclasses.fields(entry.options))


@dataclasses.dataclass(frozen=True)
class WrittenEntry(Entry):
    """A choice that may be written with a number, as in ``top_k:0.01``; ``build`` takes that number first."""

    number: str = ""
    """What the number means; empty for a choice that has none (``build`` then does not take one)."""

    @property
    def written(self) -> str:
        """How it is written, such as ``top_k:<share>``."""
        return f"{self.name}:<{self.number}>" if self.number else self.name


def build_written(kind: str, text: str, *given: Any) -> Any:
    """What ``text``, such as ``top_k:0.01``, stands for, built from its number and the ``given`` arguments.

    Raises ``ValueError`` for an unknown name, a missing number or one that its entry does not allow.
    """
    name, colon, number = text.partition(":")
    entries, what = catalogue(kind), kind.removesuffix("s")
    if name not in entries or bool(colon) != bool(entries[name].number):
        allowed = ", ".join(entry.written for entry in entries.values())
        raise ValueError(f"{what}: got {text!r}, allowed are {allowed}")
    try:
        return entries[name].build(*((_number(number),) if colon else ()), *given)
    except ValueError as error:
        raise ValueError(f"{what}: got {text!r}: {error}") from error


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("needs a number after the colon") from None
    return int(value) if value.is_integer() and "." not in text else value


def given_options(entry: Entry, given: Mapping[str, Any]) -> Any:
    """``entry``'s options with the values ``given`` by name; raises ``ValueError`` for a name that it has not."""
    allowed = option_names(entry)
    for name in given:
        if name not in allowed:
            raise ValueError(f"{name}: got an option that {entry.name} has not, allowed are {', '.join(allowed)}")
    options = entry.options(**given)
    check_limits(options)
    return options
