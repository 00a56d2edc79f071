"""The command line, one file per command: ``prepare`` checks the options, ``run_job`` does the work."""

import ast
import functools
import importlib.resources
import time

PROGRAM = "fedtangent"
_clock = [time.perf_counter()]  # when the command began


def begin() -> None:
    """Starts the clock that ``seconds`` reads, when a command begins."""
    _clock[0] = time.perf_counter()


def seconds() -> float:
    """Returns the seconds since the command began; they include the time to load modules and data."""
    return time.perf_counter() - _clock[0]


@functools.cache
def summaries() -> dict[str, str]:
    """Returns the summary of each command, by its name: the first line of its module's docstring without the name.

    The commands are the modules of this package with a ``run_job``. Their files are read and not imported, because most
    of them import JAX, which takes time.
    """
    commands = {}
    for file in sorted(importlib.resources.files(__name__).iterdir(), key=lambda file: file.name):
        tree = ast.parse(file.read_bytes()) if file.name.endswith(".py") else ast.Module([], [])
        if any(isinstance(node, ast.FunctionDef) and node.name == "run_job" for node in tree.body):
            about = (ast.get_docstring(tree) or "").partition("\n")[0]
            commands[file.name.removesuffix(".py").replace("_", "-")] = about.rpartition("``: ")[2]
    return commands
