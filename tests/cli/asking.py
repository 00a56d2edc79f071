"""What a line of the command line asks for, without running it."""

from __future__ import annotations

from typing import Any

from fedtangent._src.cli import commands


def asked(*arguments: object) -> commands.ParsedLine:
    """What these arguments ask for; one text is taken apart at its spaces."""
    words = str(arguments[0]).split() if len(arguments) == 1 else [str(word) for word in arguments]
    return commands.read(commands.find(*words), words[1:])


def prepared(*arguments: object) -> Any:
    """The checked job of these arguments, which writes nothing."""
    found = asked(*arguments)
    return found.command.module.prepare(**found.arguments)
