"""Files of a checkpoint, written atomically with checksums (orbax writes a run's state), and the lock of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.data.files import json_of
from fedtangent._src.engine.checkpoints.options import CheckpointError
from fedtangent._src.pytrees import is_key
from fedtangent._src.storage import sha256, sha256_of_file, write_atomically
from fedtangent._src.types import AnyArray, PyTree


class DamagedError(CheckpointError):
    """An error for a file of a checkpoint that is missing, cut short or altered."""


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below ``folder``, by the file's path relative to ``folder``."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_of_file(path) for path in paths}


def check_digests(folder: Path, expected: dict[str, str]) -> None:
    """Raises ``DamagedError`` if a file below ``folder`` is missing or altered; the message names the first one.

    Args:
        folder: The folder.
        expected: SHA-256 of each file when it was written, by relative path.
    """
    present = digests(folder)
    for name, digest in expected.items():
        if present.get(name) != digest:
            raise DamagedError(f"{name} is {'altered' if name in present else 'missing'}")


def read_checked(path: Path, digest: str) -> bytes:
    """Returns the content of a file after checking that it has not changed since it was written.

    Args:
        path: Path of the file.
        digest: SHA-256 of the file when it was written.

    Raises:
        DamagedError: The file cannot be read, or has another SHA-256.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path.name}: {error.strerror}") from error
    if sha256(content) != digest:
        raise DamagedError(f"{path.name} is altered")
    return content


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Writes a record as JSON, together with the SHA-256 by which ``read_record`` finds out whether it was altered.

    Args:
        path: Path of the file.
        record: Values that JSON can hold, by name.
    """
    whole = {"sha256": sha256(_canonical(record)), "record": record}
    write_atomically(path, json.dumps(whole, indent=1), durable=True)


def read_record(path: Path) -> dict[str, Any]:
    """Returns the record in the file at ``path``; raises ``DamagedError`` if the file is unreadable or altered."""
    try:
        whole = json_of("checkpoint", path)
    except ValueError as error:
        raise DamagedError(f"{path.name} cannot be read") from error
    intact = isinstance(whole, dict) and set(whole) == {"sha256", "record"} and isinstance(whole["record"], dict)
    if not intact or sha256(_canonical(whole["record"])) != whole["sha256"]:
        raise DamagedError(f"{path.name} is altered")
    return whole["record"]


# ---- a run's state; orbax writes the arrays ----


def layout(state: PyTree) -> dict[str, str]:
    """Returns the dtype and shape of every leaf by its path: ``{".server.params['W']": "float32[5,64,10]"}``."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path) or "state": f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def _on_host(leaf: AnyArray) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def on_host(state: PyTree) -> dict[str, np.ndarray]:
    """Returns the arrays of a run's state as NumPy arrays by their paths, such as ``.server.params['W']``.

    Typed keys become their numbers, and empty arrays are left out. Every process of a run must call this function,
    because it gathers arrays that are spread over hosts.
    """
    leaves = jax.tree.leaves(state)
    arrays = {path: _on_host(leaf) for path, leaf in zip(layout(state), leaves, strict=True)}
    return {path: array for path, array in arrays.items() if array.size}


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # One process writes (or reads) by itself: orbax is not to wait for the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"fedtangent_{jax.process_index()}",
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences orbax's log inside the block: it logs tracebacks of errors that it also raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes the arrays of a run's state to a new folder, from which ``read_state`` reads the state again.

    Args:
        folder: Folder to write, which must not exist yet.
        arrays: Arrays by path, as ``on_host`` returns them.
    """
    import orbax.checkpoint as ocp

    with _quiet(), _checkpointer() as writer:
        writer.save(folder.absolute(), args=ocp.args.StandardSave(arrays))


def read_state(folder: Path, like: PyTree) -> PyTree:
    """Returns the state of a run that ``write_arrays`` wrote to ``folder``.

    Args:
        folder: Folder that ``write_arrays`` wrote.
        like: A state with the same structure, dtypes and key types; its ``layout`` must equal the written one.
    """
    with _quiet(), _checkpointer() as reader:
        arrays = reader.restore(folder.absolute())
    leaves, structure = jax.tree.flatten(like)
    paths = zip(layout(like), leaves, strict=True)
    return jax.tree.unflatten(structure, [_like(leaf, arrays[path]) if leaf.size else leaf for path, leaf in paths])


def _like(leaf: AnyArray, array: np.ndarray) -> AnyArray:
    if not isinstance(leaf, jax.Array):
        return np.asarray(array, leaf.dtype)
    # A copy in JAX's own memory, tied to no device, as a fresh state is: the compiled rounds are then the same ones.
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(leaf))
    return jnp.array(array, leaf.dtype)


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
    """Locks the file ``.lock`` in ``folder`` and returns the open file.

    If the process that had the lock removes the file meanwhile, a new one is created and locked.

    Args:
        folder: The folder.
        name: Name of the folder in error messages.
        notify: Called with a line of text if the file system has no locks; then nothing is locked.

    Raises:
        CheckpointError: Another process holds the lock.
        OSError: The folder cannot be written to, or other processes remove the file again and again.
    """
    for _ in range(_TIMES):
        with contextlib.ExitStack() as unless_held, contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            file = unless_held.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(f"{name}: {folder} is in use by another run; name another folder") from error
            except OSError:
                notify(f"{name}: {folder} is on a file system without locks: nothing keeps another run out of it")
            if _is_at(file, folder / LOCK):
                unless_held.pop_all()
                return file
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _is_at(file: IO[str], path: Path) -> bool:
    """Returns whether the open ``file`` is the file at ``path``."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
