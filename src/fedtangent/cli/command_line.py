"""The command line: ``fedtangent compare``, ``train``, ``experiment``, ``check-theory`` and ``list``.

Bad input ends with exit code 2 and one line on standard error, before anything is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro


def _parse(arguments: Sequence[str] | None) -> tuple[Any, Callable[[Any], Any], Callable[[Any], int]]:
    from fedtangent.cli import check_theory, compare, experiment, listing, train
    from fedtangent.cli.options import TrainOptions

    command = _one_line(
        tyro.cli,
        Annotated[compare.CompareOptions, tyro.conf.subcommand("compare")]
        | Annotated[TrainOptions, tyro.conf.subcommand("train")]
        | Annotated[experiment.ExperimentOptions, tyro.conf.subcommand("experiment")]
        | Annotated[check_theory.CheckTheoryOptions, tyro.conf.subcommand("check-theory")]
        | Annotated[listing.ListOptions, tyro.conf.subcommand("list")],
        prog="fedtangent",
        description="Federated learning in the kernel regime: simulation and theory side by side.",
        args=arguments,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    for module, options in (
        (compare, compare.CompareOptions),
        (train, TrainOptions),
        (experiment, experiment.ExperimentOptions),
        (check_theory, check_theory.CheckTheoryOptions),
        (listing, listing.ListOptions),
    ):
        if isinstance(command, options):
            return command, module.prepare, module.run_job
    raise AssertionError(f"no command for {command!r}")


def _one_line(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call tyro, and say in one line what it says in a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(*arguments, **options)
    except SystemExit as ended:
        if ended.code == 2:
            words = re.sub(r"[^\x20-\x7e]+|─+", " ", said.getvalue()).split()
            print(f"fedtangent: error: {' '.join(words)}", file=sys.stderr)
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, check it, run it; ends the process with its exit code."""
    try:
        code = _main(arguments)
    except KeyboardInterrupt:
        print("fedtangent: interrupted; what was finished is in the output folder", file=sys.stderr)
        code = 130
    sys.exit(code)


def _main(arguments: Sequence[str] | None) -> int:
    import jax

    import fedtangent
    from fedtangent.engine.checkpoints import CheckpointError
    from fedtangent.output.files import output_folder

    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"fedtangent {fedtangent.__version__}")
        return 0
    fedtangent.enable_x64()
    options, prepare, run = _parse(arguments)
    try:
        _use_devices(options)
        job = prepare(options)
        if hasattr(options, "output"):
            output_folder(
                job.output if hasattr(job, "output") else options.output
            )  # the last thing that can be refused
    except ValueError as error:
        return _refused(error)
    try:
        return run(job)
    except CheckpointError as error:
        return _refused(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except jax.errors.JaxRuntimeError as error:
        if not getattr(options, "distributed", False):
            raise
        said = str(error).splitlines()[0]
        print(f"fedtangent: error: another process of this run is gone, or cannot be reached: {said}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for that process
    except OSError as error:  # a full disk, say
        print(f"fedtangent: error: {error.strerror}: {error.filename or options.output}", file=sys.stderr)
        return 1


def _use_devices(options: Any) -> None:
    """Before anything else uses a device: how many, and of how many processes."""
    from fedtangent.engine import processes

    if hasattr(options, "host_devices"):
        processes.use_cores(options.host_devices)
    if getattr(options, "distributed", False):
        processes.start(options.coordinator, options.num_processes, options.process_id)


def _refused(error: ValueError) -> int:
    print(f"fedtangent: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
