"""The program ``fedtangent``, also run by ``python -m fedtangent``."""

import os
import signal
from types import FrameType


def main() -> None:
    """Runs the command line. Ctrl-C while it is loading, or after it has run, ends the program with one line."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if interruptible:
        signal.signal(signal.SIGINT, _interrupted)
    from fedtangent._src.cli.main import main as run

    def loaded() -> None:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        run(loaded=loaded)
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"fedtangent: interrupted\n")
    os._exit(128 + number)  # an exception inside a half-finished import would be reported as another error


if __name__ == "__main__":
    main()
