"""Entries: one record for everything that can be chosen by name.

Each algorithm, data set, partition, model, schedule, channel, graph, case, experiment and check of a theorem has one
entry: its name, a summary in one line, its options with help and defaults, the function that builds it, and its papers.
The command line, ``fedtangent list``, ``--help``, the documentation's tables, the citations and the tests that every
algorithm must pass all read the entries.

The entry of an algorithm or a model is made from its function, which a decorator such as ``recipe`` marks. The files of
the other kinds end with ``ENTRIES``, a tuple of entries. ``KINDS`` names the package or module of each kind.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import operator
import pkgutil
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedtangent._src.checks import MAX_INDEX, MAX_NUMBER, nearest

KINDS = {  # kind -> the package or module whose files end with its entries
    "algorithms": "fedtangent._src.federated.algorithms",
    "datasets": "fedtangent._src.data.sources",
    "models": "fedtangent._src.models",
    "partitions": "fedtangent._src.data.partition",
    "schedules": "fedtangent._src.federated.schedule",
    "channels": "fedtangent._src.federated.wire",
    "graphs": "fedtangent._src.federated.graph",
    "cases": "fedtangent._src.comparison.cases",
    "experiments": "fedtangent._src.experiments",
    "theorems": "fedtangent._src.comparison.theorems",
}
OWN = {  # kinds for which users may name their own functions -> the module whose ``entry_of_function`` is for them
    "algorithms": "fedtangent._src.federated.algorithms.entry",
    "models": "fedtangent._src.models.entry",
}
WRITTEN = (bool, int, float, str, Path)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The dataclass of options of an entry that has no options."""


Values = dict[str, Any]  # values of options, by name
Groups = dict[str, Any]  # option groups by title: dataclasses, or instances whose values are the defaults


def option(default: object, *, may_differ: bool = False, used_with: str = "", most: int | None = None) -> Any:
    """Builds a dataclass field that is an option of an entry.

    Args:
        default: Value of the option if the user sets none.
        may_differ: Whether a resumed run may have another value than the run that it continues.
        used_with: Name of another option. While the other one has its default value, this option has no effect.
        most: Largest absolute value allowed; None: the largest that the package handles, ``MAX_INDEX`` for an int and
            ``MAX_NUMBER`` for a float.
    """
    return dataclasses.field(default=default, metadata={"may_differ": may_differ, "used_with": used_with, "most": most})


def check_limits(options: Any) -> None:
    """Raises ``ValueError`` if a number among the fields of ``options`` exceeds, in absolute value, its limit ``most``.

    ``option`` sets the limit. Infinity passes, because each option says what infinity means for it; minus infinity and
    NaN raise the error.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int | float) and one != math.inf:
                most = field.metadata.get("most") or (MAX_NUMBER if isinstance(one, float) else MAX_INDEX)
                if not abs(one) <= most:
                    raise ValueError(f"{field.name}: got {one}, must be a number of at most {most} in absolute value")


def lasting(*groups: Any) -> list[str]:
    """Returns the names of the options in ``groups`` (dataclasses) that must not change when a run is resumed."""
    return [f.name for group in groups for f in dataclasses.fields(group) if not f.metadata.get("may_differ")]


@runtime_checkable
class Builder(Protocol):
    """A function that builds an object, such as an algorithm or a model."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Returns the object that the function builds.

        Args:
            arguments: Arguments in order. The ``build`` of an entry gets the entry's options, then arguments that
                depend on the kind, such as the model and the schedule of an algorithm.
            options: Arguments by name.
        """


@dataclasses.dataclass(frozen=True)
class Entry:
    """The record of something that can be chosen by name, such as one algorithm; some kinds have a subclass."""

    name: str
    """Name of the choice on the command line and in Python."""
    summary: str
    """Description of the choice in one line."""
    build: Builder
    """Function that builds the chosen object from an instance of ``options`` and the arguments of its kind."""
    options: type[Any] = NoOptions
    """Frozen dataclass of the options; the docstrings of its fields are their help texts."""
    papers: tuple[str, ...] = ()
    """Papers behind the choice: keys of ``papers.PAPERS``, or BibTeX."""

    @property
    def written(self) -> str:
        """Text by which users choose the entry on the command line: its name, unless a subclass adds to it."""
        return self.name

    @property
    def told(self) -> str:
        """Text that ``fedtangent list`` shows: the summary, and for some kinds more."""
        return self.summary


@functools.cache
def catalogue(kind: str) -> Mapping[str, Any]:
    """Returns all entries of a kind by name, in alphabetical order.

    Args:
        kind: One of ``KINDS``, such as "algorithms".

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``.
        RuntimeError: Two entries have the same name.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    root = importlib.import_module(KINDS[kind])
    entries: dict[str, Any] = {}
    for module in (root, *_modules(root)):
        for entry in (*vars(module).get("ENTRIES", ()), *_marked(kind, module)):
            if entry.name in entries:
                raise RuntimeError(f"{kind}: two entries are called {entry.name!r}")
            entries[entry.name] = entry
    return dict(sorted(entries.items()))


def _marked(kind: str, module: types.ModuleType) -> list[Any]:
    """Builds entries of a ``kind``, such as "models", from the functions of ``module`` that a decorator has marked."""
    marked = [v for v in vars(module).values() if hasattr(v, "about") and v.__module__ == module.__name__]
    return [importlib.import_module(OWN[kind]).entry_of(function) for function in marked] if marked else []


def _modules(root: types.ModuleType) -> list[types.ModuleType]:
    """Imports and returns all modules below the package ``root``; none if it is a plain module."""
    infos = pkgutil.walk_packages(getattr(root, "__path__", ()), root.__name__ + ".")
    return [importlib.import_module(info.name) for info in infos]


def choose(kind: str, name: str) -> Any:
    """Returns the entry called ``name``, as in ``choose("algorithms", "fed_avg")``.

    Args:
        kind: One of ``KINDS``, such as "algorithms".
        name: Name of an entry. For models and algorithms it may also be a user's function, ``package.module:function``.
            The function's module is imported only here, and its parameters become the entry's options
            (``own_options``).

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``, no entry has that name (the message lists the allowed names), the
            user's function cannot be imported, or its parameters cannot be options.
    """
    entries, noun = catalogue(kind), kind.removesuffix("s")
    if isinstance(name, str) and ":" in name and kind in OWN:
        return _own_entry(kind, name, _imported(noun, name))
    if not isinstance(name, str) or name not in entries:
        more = ", or package.module:function of your own" if kind in OWN else ""
        raise ValueError(f"{noun}: got {name!r}, allowed are {', '.join(entries)}{more}{nearest(name, entries)}")
    return entries[name]


def _imported(noun: str, name: str) -> Any:
    """Imports the module of ``name``, a text such as ``package.module:function``, and returns the function.

    Any error becomes a ``ValueError``; ``noun`` is the kind of function, such as "algorithm", for its message.
    """
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ImportError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{noun}: got {name!r}, but there is no module {error.name}") from error
        failure = f"{type(error).__name__}: {error}"
        raise ValueError(f"{noun}: got {name!r}, whose module cannot be imported: {failure}") from error
    function = getattr(imported, attribute, None)
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{noun}: got {name!r}, but {module} has no function {attribute!r}")
    return function


@functools.cache
def _own_entry(kind: str, name: str, function: Builder) -> Any:
    """Builds the entry of a user's function; later calls return the same entry, because a new one would not equal it.

    ``kind`` is "algorithms" or "models", and ``name`` a text such as ``package.module:function``.
    """
    return importlib.import_module(OWN[kind]).entry_of_function(name, function)


def own_options(noun: str, name: str, function: Builder, skipped: Sequence[str], bases: tuple[type, ...]) -> Any:
    """Returns the options of a user's function: a dataclass with the fields of ``bases`` and the function's parameters.

    The first two parameters, such as the model and the schedule of an algorithm, are no options.

    Args:
        noun: Kind of the function, such as "algorithm", for error messages.
        name: Name of the function, for error messages.
        function: The user's function.
        skipped: Names of further parameters that are no options, because the package fills them in.
        bases: Dataclasses of the options that every function of this kind has.

    Raises:
        ValueError: The first two parameters cannot be positional, or another one has no default, or a type that cannot
            be written on a command line.
    """
    names = [p.name for p in _parameters(noun, name, function)[2:] if p.name not in skipped]
    return signature_options(name, function, names, bases, strict=True, noun=noun)


def _parameters(noun: str, name: str, function: Builder) -> list[inspect.Parameter]:
    """Returns the parameters of a user's function; raises ``ValueError`` unless the first two can be positional."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{noun}: got {name!r}, whose signature cannot be read: {error}") from error
    if len(parameters) < 2 or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters[:2]):
        raise ValueError(
            f"{noun}: got {name!r} with parameters {inspect.signature(function)}, must begin with two positional "
            f"parameters, {'the input shape and the number of outputs' if noun == 'model' else 'model and schedule'}"
        )
    return parameters


def signature_options(
    name: str,
    function: Builder,
    parameters: Sequence[str],
    bases: tuple[type, ...] = (),
    *,
    strict: bool = False,
    noun: str = "algorithm",
) -> Any:
    """Returns a dataclass whose fields are parameters of a function, with their names, types, defaults and help.

    ``*args``, ``**kwargs`` and ``base`` (the recipe inside another one) are left out, and so is a parameter of a type
    such as ``float | Callable`` whose default cannot be written on a command line.

    Args:
        name: Name of the function in error messages.
        function: The function; the help of a parameter is its text under ``Args:`` in the docstring.
        parameters: Names of the parameters that become options.
        bases: Dataclasses of further options; a field that several of them share is one option.
        strict: Whether a parameter that cannot be written on a command line raises an error; otherwise it is left out.
        noun: Kind of the function, such as "algorithm", for error messages.

    Raises:
        ValueError: With ``strict``, a parameter without a default, or without a type that a command line can write.
    """
    import docstring_parser

    try:
        kinds = typing.get_type_hints(function)
    except (TypeError, NameError) as error:
        raise ValueError(f"{noun}: got {name!r}, whose signature cannot be read: {error}") from error
    described = {p.arg_name: p.description or "" for p in docstring_parser.parse(inspect.getdoc(function) or "").params}
    signature, fields = inspect.signature(function).parameters, []
    for parameter in (signature[key] for key in parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "base":
            continue
        kind = _written_type(kinds.get(parameter.name))
        if strict and parameter.default is parameter.empty:
            raise ValueError(f"{noun}: got {name!r}, whose option {parameter.name} has no default, must have one")
        if kind is None:
            if strict:
                raise ValueError(
                    f"{noun}: got {name!r}, whose option {parameter.name} must be annotated: as bool, int, float, str, "
                    "Path, a tuple of one of these, or one of them | None"
                )
            continue
        if _is_written(type(parameter.default)) or parameter.default is None or isinstance(parameter.default, tuple):
            help_ = _first_sentence(described.get(parameter.name, ""))
            fields.append(
                (parameter.name, kind, dataclasses.field(default=parameter.default, metadata={"help": help_}))
            )
    title = f"{name.rpartition(':')[2].title().replace('_', '')}Options"
    return dataclasses.make_dataclass(title, fields, bases=tuple(dict.fromkeys(bases)), frozen=True)


def written_fields(record: type[Any]) -> dict[str, Any]:
    """Returns a dataclass's fields that a command line can set, each with the part of its type that can be written.

    For example, ``float | None`` of ``float | Array | None``.
    """
    kinds = {name: _written_type(kind) for name, kind in typing.get_type_hints(record).items()}
    return {field.name: kinds[field.name] for field in dataclasses.fields(record) if kinds.get(field.name) is not None}


def options_of_record(title: str, record: Any, names: Sequence[str], prefix: str = "") -> type[Any]:
    """Returns a dataclass whose fields are the chosen fields of a record.

    Args:
        title: Name of the new class.
        record: An instance of a dataclass: its values are the defaults, its fields' docstrings their help.
        names: Names of the fields that become options.
        prefix: Text put before each field's name.
    """
    of: Any = type(record)
    kinds, texts = written_fields(of), help_of(of)
    options = [
        (
            prefix + name,
            kinds[name],
            dataclasses.field(default=getattr(record, name), metadata={"help": _first_sentence(texts[name])}),
        )
        for name in names
    ]
    return dataclasses.make_dataclass(title, options, frozen=True)


def prefixed(message: str, names: Sequence[str], prefix: str) -> str:
    """Returns an error message with a prefix before the name of the argument with which it begins.

    Args:
        message: Message that begins with the name of an argument.
        names: Names of the arguments that get the prefix; a message about another one is returned unchanged.
        prefix: The prefix.
    """
    return prefix + message if message.partition(":")[0] in names else message


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a text, in one line; a semicolon before a capital letter ends a sentence, too."""
    line = " ".join(text.split())
    end = re.search(r"[.;](?= [A-Z`\"])|\.$", line)
    return line if end is None else line[: end.start()] + "."


@functools.cache
def help_of(group: type[Any]) -> dict[str, str]:
    """Returns the help texts of a dataclass's fields by name, inherited fields included.

    A help text is the field's metadata "help", or the docstring below the field.
    """
    texts: dict[str, str] = {}
    for cls in reversed(group.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        texts |= {f.name: f.metadata["help"] for f in dataclasses.fields(cls) if "help" in f.metadata}
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError, SyntaxError):  # made at run time
            continue
        lines = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(lines):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return texts


def _written_type(kind: Any) -> Any:
    """Returns the part of a type that can be given on a command line; None if no part can.

    Of ``float | Array | None``, for example, it is ``float | None``.
    """
    if _is_written(kind):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is types.NoneType or _is_written(part)]
        if any(part is not types.NoneType for part in parts):
            return functools.reduce(operator.or_, parts)
    return None


def _is_written(kind: Any) -> bool:
    """Returns whether an option of this type can be written on a command line and stored in a config.json."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return all(part is types.NoneType or _is_written(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return all(part is ... or part in WRITTEN for part in typing.get_args(kind))
    return kind in WRITTEN


def option_names(entry: Entry) -> tuple[str, ...]:
    """Returns the names of an entry's options."""
    return tuple(field.name for field in dataclasses.fields(entry.options))


@dataclasses.dataclass(frozen=True)
class WrittenEntry(Entry):
    """The entry of a choice that may have a number, as in ``top_k:0.01``; ``build`` then takes the number first."""

    number: str = ""
    """Meaning of the number; empty for a choice that is written without one."""

    @property
    def written(self) -> str:
        """Text by which users choose the entry, such as ``top_k:<share>``."""
        return f"{self.name}:<{self.number}>" if self.number else self.name


def build_written(kind: str, text: str, *arguments: Any) -> Any:
    """Builds the object that a text such as ``top_k:0.01`` describes.

    Args:
        kind: "channels" or "graphs", the kinds whose names may be followed by a number.
        text: Name of an entry; for entries with a number, a colon and the number follow.
        arguments: Further arguments of the entry's ``build``, after the number.

    Raises:
        ValueError: An unknown name, a missing number, or a number that the entry does not allow.
    """
    name, colon, number = text.partition(":")
    entries, noun = catalogue(kind), kind.removesuffix("s")
    if name not in entries or bool(colon) != bool(entries[name].number):
        allowed = ", ".join(entry.written for entry in entries.values())
        raise ValueError(f"{noun}: got {text!r}, allowed are {allowed}")
    try:
        return entries[name].build(*((_number(number),) if colon else ()), *arguments)
    except ValueError as error:
        raise ValueError(f"{noun}: got {text!r}: {error}") from error


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("needs a number after the colon") from None
    return int(value) if value.is_integer() and "." not in text else value


def given_options(entry: Entry, values: Mapping[str, object]) -> Any:
    """Builds the options of an entry; options without a value keep their defaults.

    Args:
        entry: The entry.
        values: Values by the options' names.

    Raises:
        ValueError: A name that is no option of ``entry``, or a number that is too large.
    """
    allowed = option_names(entry)
    for name in values:
        if name not in allowed:
            options = f"allowed are {', '.join(allowed)}" if allowed else "must be left out: it has no options"
            raise ValueError(f"{name}: got an option that {entry.name} does not have, {options}")
    options = entry.options(**values)
    check_limits(options)
    return options
