"""Docstrings of functions that share arguments: each shared text is written once and inserted into every docstring."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec

P = ParamSpec("P")


def completed(function: Callable[P, object], arguments: Mapping[str, str], results: str = "", errors: str = "") -> str:
    """Returns a function's docstring, completed by texts that several functions share.

    Args:
        function: The function; its docstring may have the sections ``Args``, ``Returns``, ``Raises`` and ``Example``.
        arguments: Texts of the arguments that the docstring does not describe, by name.
        results: Text of ``Returns:`` if the docstring has no such section.
        errors: Text of ``Raises:`` if the docstring has no such section.

    Raises:
        KeyError: Neither the docstring nor ``arguments`` describes one of the function's arguments.
    """
    summary, *sections = re.split(r"\n\n(?=Args:|Returns:|Raises:|Example)", inspect.getdoc(function) or "")
    bodies = {section.partition(":")[0]: section for section in sections}
    own_texts = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", bodies.pop("Args", ""), re.MULTILINE))
    texts = [f"{name}: {own_texts.get(name) or arguments[name]}" for name in inspect.signature(function).parameters]
    first = [_section("Args", texts), bodies.pop("Returns", ""), bodies.pop("Raises", "")]
    first[1] = first[1] or _section("Returns", [results])
    first[2] = first[2] or _section("Raises", [errors])
    return "\n\n".join(filter(None, [summary, *first, *bodies.values()]))


def _section(title: str, texts: Iterable[str]) -> str:
    """Returns a docstring's section: the heading ``title``, and a wrapped entry for each text; "" if all are empty."""
    wrapper = textwrap.TextWrapper(116, initial_indent="    ", subsequent_indent="        ")
    lines = [wrapper.fill(" ".join(text.split())) for text in texts if text]
    return "\n".join([f"{title}:", *lines]) if lines else ""
