"""A lock on a folder: the process that writes in it holds a file there, which the system frees when it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedtangent.engine.checkpoints.options import CheckpointError

LOCK = ".lock"
_TIMES = 20  # attempts, while other processes remove the file and make it again


@contextlib.contextmanager
def locked(folder: Path, name: str, notify: Callable[[str], None] = warnings.warn) -> Iterator[None]:
    """Hold ``folder``, created if need be, until the block ends in whatever way; ``name`` is what errors call it.

    The system releases it when the process is killed. At the end the file ``.lock`` is removed, and so are folders that
    were created and stayed empty. On a file system without locks nothing is held, and ``notify`` is called.

    Raises ``CheckpointError`` if another process holds it, or if it cannot be written.
    """
    made = list[Path]()
    try:
        try:
            made += [place for place in (folder, *folder.parents) if not place.exists()]
            file = _lock(folder, name, notify)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot write in {folder}: {error.strerror}") from error
        with file:
            try:
                yield
            finally:  # while it is held still: see ``_lock``
                with contextlib.suppress(OSError):
                    if _is_at(file, folder / LOCK):
                        (folder / LOCK).unlink()
    finally:
        for place in made:
            with contextlib.suppress(OSError):  # a path with .. in it names one of them twice
                place.rmdir()


def _lock(folder: Path, name: str, notify: Callable[[str], None]) -> IO[str]:
    """The lock file of ``folder``, locked. Its last owner may remove it meanwhile: then it is made again."""
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
    """Whether the open ``file`` is the one at ``path``."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
