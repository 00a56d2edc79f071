"""The command line: what is asked for is checked, and done; how it ended is the exit code.

``prepare`` of a command (see ``commands``) checks everything and writes nothing. ``run_job`` does the work and returns
how it ended, an ``output.files.Ended``: here that becomes the exit code, the last line where it failed, and what
result.json says. A command's module may say with ``continues(options)`` that the work goes on with what an equal run
left in the output folder.

Bad input ends with exit code 2 and one line on standard error, before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fedtangent._src.cli.arguments import Option, page
from fedtangent._src.cli.commands import PROGRAM, Asked, Command, begun, find, groups_of, names, options_by_name, read
from fedtangent._src.engine import description, processes
from fedtangent._src.entries import catalogue

ABOUT = "Federated learning in the kernel regime: simulation and theory side by side."
MANY = 16  # names that are not said in a help


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, checks it and runs the command; ends the process with its exit code."""
    sys.stdout, sys.stderr = (file or open(os.devnull, "w") for file in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # as of standard error: what its encoding lacks, escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `fedtangent train --help | head`
        _let_go(sys.stdout)
        code = 141
    except OSError as error:  # nothing can be said where it was to be said
        _let_go(sys.stdout)
        _tell(f"error: cannot write to standard output: {error.strerror}")
        code = 1
    except KeyboardInterrupt:
        _tell("interrupted; what was finished until then, if anything, is in the output folder")
        code = 130
    try:
        sys.stderr.flush()
    except OSError:
        _let_go(sys.stderr)
    sys.exit(code)


def _let_go(stream: IO[str]) -> None:
    """Redirects a stream that cannot be written to, so that its unwritten rest raises no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(arguments: list[str]) -> int:
    """Executes one command and returns its exit code."""
    import fedtangent
    from fedtangent._src.engine.checkpoints.lock import locked
    from fedtangent._src.federated.wire.key_server import written_at_the_end

    if arguments == ["--version"]:
        print(f"{PROGRAM} {fedtangent.__version__}")
        return 0
    fedtangent.enable_x64()
    if "" not in sys.path:  # where modules of one's own lie that --model and --algorithm may name
        sys.path.append("")
    with contextlib.ExitStack() as held:
        try:
            if not arguments or arguments[0] in ("-h", "--help"):
                return _overview(bool(arguments))
            command = find(*arguments)
            if {"-h", "--help"} & set(arguments):
                print(help_page(command, [word for word in arguments[1:] if word not in ("-h", "--help")]))
                return 0
            asked = read(command, arguments[1:])
            if "host_devices" in asked.values:  # before anything else uses a device
                processes.use_cores(asked.values["host_devices"])
            if asked.values.get("distributed", False):
                processes.start(*(asked.values[name] for name in processes.VARIABLES))
            if (folder := _folder(asked)) is not None:
                held.enter_context(locked(folder, "output", _tell))
            alone = not asked.values.get("distributed", False)  # of several, all read what the first has written
            with written_at_the_end() if alone else contextlib.nullcontext():
                job = _prepared(asked)
        except ValueError as error:
            return _refused(error)
        return _performed(asked, job)


def _performed(asked: Asked, job: Any) -> int:
    """Runs a checked job whose output folder is locked, and returns the exit code."""
    import jax

    from fedtangent._src.engine.checkpoints import CheckpointError
    from fedtangent._src.output.files import Ended, write_end

    try:
        ended: Ended = asked.command.module.run_job(job)
        if (folder := _folder(asked)) is not None:
            write_end(folder, ended)
        if ended.code and processes.is_main():
            sys.stdout.flush()
            _tell(f"{ended.status}: {ended.advice}" if ended.advice else ended.status)
        return ended.code
    except CheckpointError as error:
        return _refused(error)
    except BrokenPipeError:
        raise  # to the caller, which knows what to do; the others of its kind are told below
    except jax.errors.JaxRuntimeError as error:
        if not asked.values.get("distributed", False):
            raise
        said = str(error).splitlines()[0]
        _tell(f"error: another process of this run is gone, or cannot be reached: {said}")
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for that process
    except FloatingPointError as error:  # theory of a run that is not stable
        _tell(f"error: {error}")
        return 1
    except OSError as error:  # a full disk, say
        print(flush=True)  # which raises where standard output is what is full
        _tell(f"error: {error.strerror}: {error.filename or asked.values.get('output')}")
        return 1


def _folder(asked: Asked) -> Path | None:
    """Returns the output folder of the command; None if this process does not write."""
    folder = asked.values.get("output")
    return None if folder is None or not processes.is_main() else Path(folder)


def _prepared(asked: Asked) -> Any:
    """Returns the checked job, with its folder emptied of another run if so asked.

    Arguments are checked before the folder, whose refusal would hide a mistake in them.
    """
    from fedtangent._src.output.files import check_free, clear, output_folder

    folder, module = _folder(asked), asked.command.module
    goes_on = getattr(module, "continues", lambda values: False)(asked.values)
    if asked.values.get("resume") and asked.values["overwrite"]:
        raise ValueError("overwrite: got it beside --resume, allowed is one of them")
    refused: ValueError | None = None
    if folder is not None and not asked.values["overwrite"]:
        try:
            check_free(folder, asked.command.name, asked.identity, goes_on, hasattr(module, "continues"))
        except ValueError as error:
            refused = error
    job = asked.command.prepare(**asked.arguments)
    if refused is not None:
        raise refused
    if folder is not None:
        clear(folder, whole=asked.values["overwrite"])
        output_folder(folder)
    return job


def help_page(command: Command, arguments: Sequence[str]) -> str:
    """Builds the help page of a command, with the options of the entries that the arguments choose."""
    given, before, chosen = begun(command, arguments)
    groups = groups_of(command, chosen)
    options = options_by_name(groups)
    positional = "".join(f" {_place(one)}" for one in options.values() if one.positional)
    about = inspect.cleandoc(sys.modules[command.module.prepare.__module__].__doc__ or "").split("\n\n")[0]
    about = " ".join(about.split()).rpartition("``: ")[2]
    every = {name: catalogue(kind) for name, kind in description.CHOICES.items() if command.describes}
    known = {name: entries for name, entries in every.items() if len(entries) <= MANY}
    known |= getattr(command.module, "allowed", lambda given: {})(given)
    for name in options.keys() & known.keys():  # each choice names what there is to choose from, unless that is much
        text = f"{options[name].help.removesuffix('.')}: {', '.join(known[name])}."
        options[name] = options[name]._replace(help=text)
    for name, value in (before | given).items():
        if name in options and options[name].type is not bool:
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            options[name] = options[name]._replace(default=shown)
    return page(f"{PROGRAM} {command.name}{positional} [OPTIONS]", about, groups, options)


def _place(one: Option) -> str:
    """Returns a positional option as in a line of usage: in brackets if it may be left out."""
    shown = f"{one.shown} .." if one.several else one.shown
    return shown if one.default is dataclasses.MISSING else f"[{shown}]"


def _overview(asked: bool) -> int:
    """Prints the list of commands: to standard output if the user asked for it, else to standard error."""
    lines = [f"usage: {PROGRAM} COMMAND [OPTIONS]", ABOUT, "commands:"]
    for name in names():
        about = inspect.cleandoc(find(name).module.__doc__ or "").splitlines()[0].rpartition("``: ")[2]
        lines.append(f"  {name:<14} {about}")
    lines += ["options:", "  --help         this page; of a command, its own", "  --version      the version"]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _refused(error: ValueError) -> int:
    _tell(f"error: {' '.join(str(error).split())}")
    return 2


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told: the exit code still tells
        print(f"{PROGRAM}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
