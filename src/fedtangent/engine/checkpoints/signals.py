"""Stopping at a signal, at a place of one's own choosing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_signals(enabled: bool) -> Iterator[Callable[[], int | None]]:
    """Within, the first SIGTERM or SIGINT is only noted; what is yielded returns its number, or None.

    The handlers of before are back as soon as one was noted, so that a second signal does what it always did. Nothing
    is installed outside the main thread, where Python allows none, nor over a signal that is ignored (``nohup``).
    """
    noted: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            # None is a handler that was not installed from Python: it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        before.clear()

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        restore()

    if enabled and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        restore()
