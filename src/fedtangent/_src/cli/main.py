"""The command line: parses a command, checks it, performs it, and ends with its exit code.

The module of a command has a ``prepare``, which checks all options and writes nothing (see ``commands``), and a
``run_job``, which does the work and returns its outcome, an ``output.files.Ended``. The outcome has the exit code, the
last line that is printed after a failure, and the status for result.json. A command that can continue the run in its
output folder also has ``continues(options)``, which tells whether it should.

Bad input ends with exit code 2 and one line on standard error, before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fedtangent._src.cli import PROGRAM, begin, summaries

if TYPE_CHECKING:  # they import JAX, which --help and --version do without
    from fedtangent._src.cli.arguments import Option
    from fedtangent._src.cli.commands import Command, ParsedLine

ABOUT = "Federated learning in the kernel regime: simulation and theory side by side."
MANY = 16  # so many names to choose from are not listed in a help text


def main(arguments: Sequence[str] | None = None, loaded: Callable[[], None] = lambda: None) -> None:
    """Reads the command line, checks it and runs the command; ends the process with its exit code.

    Args:
        arguments: Words of the command line; None for the arguments of the process, ``sys.argv``.
        loaded: Function that is called once the modules of the command line are imported.
    """
    sys.stdout, sys.stderr = (file or open(os.devnull, "w") for file in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # escapes characters that the encoding lacks, as standard error does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments), loaded)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `fedtangent train --help | head`
        _let_go(sys.stdout)
        code = 141
    except OSError as error:
        _let_go(sys.stdout)
        _tell(f"error: cannot write to standard output: {error.strerror}")
        code = 1
    except KeyboardInterrupt:
        _tell("interrupted; results that were finished are in the output folder")
        code = 130
    try:
        sys.stderr.flush()
    except OSError:
        _let_go(sys.stderr)
    sys.exit(code)


def _let_go(stream: IO[str]) -> None:
    """Redirects to the null device a stream that cannot be written to, so that flushing it at exit raises no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(arguments: list[str], loaded: Callable[[], None] = lambda: None) -> int:
    """Executes one command and returns its exit code.

    Args:
        arguments: Words of the command line.
        loaded: Function that is called once the modules of the command line are imported.
    """
    begin()
    import fedtangent

    if arguments == ["--version"]:
        print(f"{PROGRAM} {fedtangent.__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        return _overview(to_stdout=bool(arguments))
    if (first := arguments[0]) not in (names := summaries()):
        # not ``checks.nearest``: it would load JAX, and a refusal should be quick
        advice = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(first, names, 1))
        return _refused(ValueError(f"command: got {first!r}, allowed are {', '.join(names)}{advice}"))
    from fedtangent._src import programs
    from fedtangent._src.cli import commands
    from fedtangent._src.engine import processes
    from fedtangent._src.engine.checkpoints.files import locked
    from fedtangent._src.federated.wire.key_server import written_at_the_end

    loaded()
    fedtangent.enable_x64()
    if "" not in sys.path:  # for modules in the working folder that --model and --algorithm may name
        sys.path.append("")
    with contextlib.ExitStack() as locks:
        try:
            command = commands.find(*arguments)
            if {"-h", "--help"} & set(arguments):
                print(help_page(command, [word for word in arguments[1:] if word not in ("-h", "--help")]))
                return 0
            line = commands.read(command, arguments[1:])
            if line.values.get("programs") is not None:
                programs.keep(line.values["programs"])
            if "host_devices" in line.values:  # before anything else uses a device
                processes.use_cores(line.values["host_devices"])
            is_alone = not line.values.get("distributed", False)
            if not is_alone:
                processes.start(*(line.values[name] for name in processes.VARIABLES))
            if (folder := _folder(line)) is not None:
                locks.enter_context(locked(folder, "output", _tell))
            # of several processes, all read the key file that the first has written
            with written_at_the_end() if is_alone else contextlib.nullcontext():
                job = _prepared(line)
        except ValueError as error:
            return _refused(error)
        return _performed(line, job)


def _performed(line: ParsedLine, job: object) -> int:
    """Runs the job that a command's ``prepare`` has returned, and returns the exit code.

    The outcome is added to result.json. Expected errors, such as a full disk, become one line on standard error.
    """
    import jax

    from fedtangent._src.comparison.followed import NotFollowed
    from fedtangent._src.engine import processes
    from fedtangent._src.engine.checkpoints import CheckpointError
    from fedtangent._src.output.files import Ended, write_end

    try:
        ended: Ended = line.command.module.run_job(job)
        if (folder := _folder(line)) is not None:
            write_end(folder, ended)
        if ended.code and processes.is_main():
            sys.stdout.flush()
            _tell(f"{ended.status}: {ended.advice}" if ended.advice else ended.status)
        elif ended.remark and processes.is_main():
            print(ended.remark)
        return ended.code
    except (CheckpointError, NotFollowed) as error:
        return _refused(error)
    except BrokenPipeError:
        raise  # an OSError that ``main`` handles
    except jax.errors.JaxRuntimeError as error:
        if not line.values.get("distributed", False):
            raise
        _tell(f"error: another process of this run is gone, or cannot be reached: {str(error).splitlines()[0]}")
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for that process
    except FloatingPointError as error:  # theory of a run that is not stable
        _tell(f"error: {error}")
        return 1
    except OSError as error:  # a full disk, say
        print(flush=True)  # raises if standard output is on the full disk
        _tell(f"error: {error.strerror}: {error.filename or line.values.get('output')}")
        return 1


def _folder(line: ParsedLine) -> Path | None:
    """Returns the output folder of a command; None if it has no folder, or if another process writes the files."""
    from fedtangent._src.engine import processes

    folder = line.values.get("output")
    return None if folder is None or not processes.is_main() else Path(folder)


def _prepared(line: ParsedLine) -> object:
    """Calls the command's ``prepare`` and returns its job; with ``--overwrite`` removes an earlier run of the folder.

    Creates the folder. Raises ``ValueError`` if it has a run that must be neither continued nor replaced.
    """
    from fedtangent._src.output.files import check_free, clear, output_folder

    folder, module, overwrite = _folder(line), line.command.module, line.values.get("overwrite", False)
    if line.values.get("resume") and overwrite:
        raise ValueError("overwrite: got both --overwrite and --resume, must be only one of the two")
    refusal: ValueError | None = None
    if folder is not None and not overwrite:
        can_continue = hasattr(module, "continues")
        continues = can_continue and module.continues(line.values)
        try:
            check_free(folder, line.command.name, line.identity, continues, can_continue)
        except ValueError as error:
            refusal = error
    job = line.command.prepare(**line.arguments)
    if refusal is not None:
        raise refusal
    if folder is not None:
        clear(folder, whole=overwrite)
        output_folder(folder)
    return job


def help_page(command: Command, arguments: Sequence[str]) -> str:
    """Returns the help page of a command.

    Args:
        command: The command.
        arguments: Further words of the command line. After ``--algorithm fed_prox``, for example, the page also shows
            the options of FedProx. Values in them (or in the config.json of ``--config``) take the place of defaults;
            switches show no value.

    Raises:
        ValueError: ``arguments`` name an unknown algorithm, data set, model or the like, or a config.json that cannot
            be read or is of another command.
    """
    from fedtangent._src.cli import commands
    from fedtangent._src.cli.arguments import page
    from fedtangent._src.engine import description
    from fedtangent._src.entries import catalogue

    line = commands.begun(command, arguments)
    groups = commands.groups_of(command, line.chosen)
    options = commands.options_by_name(groups)
    positional = "".join(f" {_place(one)}" for one in options.values() if one.positional)
    about = inspect.cleandoc(sys.modules[command.module.prepare.__module__].__doc__ or "").split("\n\n")[0]
    about = " ".join(about.split()).rpartition("``: ")[2]
    entries = {name: catalogue(kind) for name, kind in description.CHOICES.items() if command.describes}
    allowed = {name: list(several) for name, several in entries.items() if len(several) <= MANY}
    if hasattr(command.module, "allowed"):
        allowed |= command.module.allowed(line.words)
    for name in options.keys() & allowed.keys():
        text = f"{options[name].help.removesuffix('.')}: {', '.join(allowed[name])}."
        options[name] = options[name]._replace(help=text)
    for name, value in (line.config | line.words).items():
        if name in options and options[name].type is not bool:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            options[name] = options[name]._replace(default=text)
    return page(f"{PROGRAM} {command.name}{positional} [OPTIONS]", about, groups, options)


def _place(one: Option) -> str:
    """Returns a positional argument as the usage line shows it: in brackets if it can be left out."""
    text = f"{one.shown} .." if one.several else one.shown
    return text if one.default is dataclasses.MISSING else f"[{text}]"


def _overview(to_stdout: bool) -> int:
    """Prints the list of commands; returns the exit code, 0 on standard output and 2 on standard error."""
    lines = [f"usage: {PROGRAM} COMMAND [OPTIONS]", ABOUT, "commands:"]
    lines += [f"  {name:<14} {about}" for name, about in summaries().items()]
    lines += ["options:", "  --help         this page; of a command, its own", "  --version      the version"]
    print("\n".join(lines), file=sys.stdout if to_stdout else sys.stderr)
    return 0 if to_stdout else 2


def _refused(error: ValueError) -> int:
    _tell(f"error: {' '.join(str(error).split())}")
    return 2


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed standard error: the exit code still tells
        print(f"{PROGRAM}: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
