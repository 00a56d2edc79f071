"""The command line, one file per command: ``prepare`` checks the options, ``run_job`` does the work."""

import ast
import functools
import importlib.resources

PROGRAM = "fedtangent"


@functools.cache
def summaries() -> dict[str, str]:
    """Returns each command's name, and the first line of its docstring: the modules of this package with a ``run_job``.

    The modules are read, not imported: most import JAX.
    """
    commands = {}
    for file in sorted(importlib.resources.files(__name__).iterdir(), key=lambda file: file.name):
        tree = ast.parse(file.read_bytes()) if file.name.endswith(".py") else ast.Module([], [])
        if any(isinstance(node, ast.FunctionDef) and node.name == "run_job" for node in tree.body):
            about = (ast.get_docstring(tree) or "").partition("\n")[0]
            commands[file.name.removesuffix(".py").replace("_", "-")] = about.rpartition("``: ")[2]
    return commands
