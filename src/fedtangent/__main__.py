"""``python -m fedtangent``, and the program ``fedtangent``."""

import os
import signal
from types import FrameType


def main() -> None:
    """Load the command line and run it; one that is interrupted before or after that ends at once, in one line."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if interruptible:
        signal.signal(signal.SIGINT, _interrupted)
    from fedtangent.cli.main import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"fedtangent: interrupted\n")
    os._exit(128 + number)  # what is half imported would make an error of its own of an exception


if __name__ == "__main__":
    main()
