"""An experiment's settings as data: what each may be, ``name=value`` of the command line, one check of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fedtangent import checks
from fedtangent.checks import choice

Settings = TypeVar("Settings")
SCALES = ("smoke", "default", "paper")


def by_scale(smoke: Settings, default: Settings, paper: Settings) -> dict[str, Settings]:
    """The settings of each of ``SCALES``."""
    return dict(zip(SCALES, (smoke, default, paper), strict=True))


def same(settings: Settings) -> dict[str, Settings]:
    """The same settings at every scale: embedded data have no more to give."""
    return by_scale(settings, settings, settings)


def within(default: Any, **limits: Any) -> Any:
    """A setting with limits beyond those of its kind, which ``check_settings`` holds it to, or each of its values.

    Those of ``checks.whole`` or ``checks.number``; ``of``, the names that are allowed; for several values ``count``,
    how many there must be at least, and ``increasing``.
    """
    return dataclasses.field(default=default, metadata=limits)


def check_settings(settings: Any) -> None:
    """Raise ``ValueError`` for a setting out of its limits.

    Without other limits whole numbers are at least 1, other numbers finite, and several values one or more, all
    different.
    """
    for field in dataclasses.fields(settings):
        value, limits = getattr(settings, field.name), field.metadata
        if isinstance(field.default, tuple):
            _check_several(field.name, value, limits)
        for one in value if isinstance(field.default, tuple) else (value,):
            _check_one(field.name, one, field.default, limits)


def _check_several(name: str, values: tuple[Any, ...], limits: Mapping[str, Any]) -> None:
    count = limits.get("count", 1)
    increasing = limits.get("increasing", False)
    if len(values) < count or len(set(values)) < len(values) or (increasing and list(values) != sorted(values)):
        how = "increasing" if increasing else "different"
        raise ValueError(f"{name}: got {','.join(map(str, values))}, must be {count} or more {how} values")


def _check_one(name: str, value: Any, default: Any, limits: Mapping[str, Any]) -> None:
    like = default[0] if isinstance(default, tuple) else default
    ends = {end: limit for end, limit in limits.items() if end not in ("of", "count", "increasing")}
    if isinstance(like, str):
        checks.choice(name, value, limits.get("of", (value,)))
    elif isinstance(like, int):
        checks.whole(name, value, **ends)
    else:
        checks.number(name, value, **ends)


def changed(settings: Settings, changes: Sequence[str]) -> Settings:
    """``settings``, a frozen dataclass, with each ``name=value`` of ``changes``; lists are written ``0.1,0.3``.

    Raises ``ValueError`` for what is not ``name=value``, an unknown name, or a value that cannot be read.
    """
    known: dict[str, Any] = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"set: got {change!r}, must be name=value")
        choice("set", name, known)
        given[name] = _read(name, text, known[name])
    return dataclasses.replace(settings, **given)  # type: ignore[type-var]


def _read(name: str, text: str, like: Any) -> Any:
    """``text`` as the kind of value that ``like`` is."""
    several = isinstance(like, tuple)
    try:
        return tuple(type(like[0])(part) for part in text.split(",")) if several else type(like)(text)
    except ValueError as error:
        kind = f"numbers like {','.join(map(str, like))}" if several else f"a number like {like}"
        raise ValueError(f"{name}: got {text!r}, must be {kind}") from error
