"""A lock on a folder: a locked file there, which the system releases when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedtangent._src.engine.checkpoints.options import CheckpointError

LOCK = ".lock"
_TIMES = 20  # attempts, while other processes remove the file and make it again


@contextlib.contextmanager
def locked(folder: Path, name: str, notify: Callable[[str], None] = warnings.warn) -> Iterator[None]:
    """Locks ``folder``, created if it does not exist, until the block ends, normally or by an exception.

    The system releases the lock if the process is killed. At the end the file ``.lock`` is removed, and so are folders
    that were created here and stayed empty.

    Args:
        folder: The folder.
        name: Name of the folder in error messages.
        notify: Called with a line of text if the file system has no locks; then nothing is locked.

    Raises:
        CheckpointError: Another process holds the lock, or the folder cannot be written to.
    """
    new_folders = list[Path]()
    try:
        try:
            new_folders += [place for place in (folder, *folder.parents) if not place.exists()]
            file = _lock(folder, name, notify)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot write in {folder}: {error.strerror}") from error
        with file:
            try:
                yield
            finally:  # while the lock is still held: see ``_lock``
                with contextlib.suppress(OSError):
                    if _is_at(file, folder / LOCK):
                        (folder / LOCK).unlink()
    finally:
        for place in new_folders:
            with contextlib.suppress(OSError):  # a path with .. in it names one of them twice
                place.rmdir()


def _lock(folder: Path, name: str, notify: Callable[[str], None]) -> IO[str]:
    """Returns the locked file of ``folder``; creates it again if its last owner removes it meanwhile."""
    for _ in range(_TIMES):
        with contextlib.ExitStack() as unless_held, contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            file = unless_held.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(f"{name}: {folder} is in use by another run; name another") from error
            except OSError:
                notify(f"{name}: {folder} is on a file system without locks: nothing keeps another run out of it")
            if _is_at(file, folder / LOCK):
                unless_held.pop_all()
                return file
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _is_at(file: IO[str], path: Path) -> bool:
    """Returns whether the open ``file`` is the file at ``path``."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
