"""JAX's compilation cache, which keeps compiled programs on disk between runs, in the package's cache folder.

``types``, which every module that uses JAX imports, calls ``keep``. JAX creates the folder when it compiles the first
program. A program whose file cannot be read or written is compiled again.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import platform
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

from fedtangent._src.storage import cache_directory, expanded, sha256

MOST_BYTES = 2**30  # of all kept programs; the least recently used are removed first
LEAST_SECONDS = 0.05  # a program that compiles faster is not kept: reading it takes as long
OFF = "off"
STAMP = "checked"  # file whose time is that of the last ``tidy`` in its folder
ZSTANDARD = b"\x28\xb5\x2f\xfd"  # first bytes of a program that is not compressed by zlib


def keep(root: str | None = None) -> None:
    """Makes JAX keep compiled programs on disk; when the process ends, ``tidy`` removes those beyond ``MOST_BYTES``.

    Args:
        root: Folder of the programs, or "off" to keep none. None: ``programs`` in the folder of all caches; but nothing
            changes if the user has set up or switched off JAX's cache, if this JAX has a bug in reading it, or if the
            home folder is unknown.

    Raises:
        ValueError: ``root`` begins with ``~``, and the home folder is unknown.
    """
    from jax.experimental.compilation_cache import compilation_cache

    if root == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # of programs that were compiled before
        return
    settings = jax.config.values
    is_set = "JAX_COMPILATION_CACHE_DIR" in os.environ or settings["jax_compilation_cache_dir"] is not None
    if root is None and (is_set or not settings["jax_enable_compilation_cache"] or _reads_badly()):
        return
    try:
        folder = folder_of_machine(cache_directory() / "programs" if root is None else expanded("programs", root))
    except (ValueError, RuntimeError):  # there is no home
        if root is None:
            return
        raise
    if settings["jax_persistent_cache_min_compile_time_secs"] == 1:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if root is not None:
        compilation_cache.reset_cache()
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
    atexit.register(tidy, folder, MOST_BYTES)


def _reads_badly() -> bool:
    """Returns whether this version of JAX has a bug in reading compiled programs back from disk.

    From 0.9.0 to 0.10.1 it writes a line on standard error for each program that it reads, on most processors
    (github.com/jax-ml/jax/issues/38445). On macOS, before 0.10, it may crash when it reads a large program
    (github.com/uwplasma/vmex/pull/142).
    """
    version = tuple(map(int, jaxlib.__version__.split(".")[:3]))
    return (0, 9) <= version < (0, 10, 2) or (sys.platform == "darwin" and version < (0, 10))


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def folder_of_machine(root: Path) -> Path:
    """Returns the folder below ``root`` for the programs of this JAX, Python, processor and number of cores.

    JAX finds a program again by a key that has JAX's version, but neither processor nor cores; a home folder may be
    shared by different machines.
    """
    machine = f"{platform.machine()} {usable_cores()} {os.environ.get('NPROC')}"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in iter(file.readline, "\n"):  # of the first core
            machine += line if line.startswith(("flags", "Features", "model name")) else ""
    versions = f"jax-{jax.__version__}-{jaxlib.__version__}-python-{platform.python_version()}"
    return root / f"{versions}-{sha256(machine)[:12]}"


def tidy(folder: Path, most_bytes: int) -> None:
    """Removes incomplete programs from ``folder``, then the least recently used programs of all machines' folders.

    A kill or a full disk can leave a part of a program, which JAX would never replace. JAX's own limit of the size,
    ``jax_compilation_cache_max_size``, is not used: it counts at every write, and cannot read from a read-only folder.
    Nothing is removed if no program was written to ``folder`` since the last call, whose time the file ``STAMP`` has.

    Args:
        folder: Folder that ``folder_of_machine`` returned; the other folders are beside it.
        most_bytes: Bytes that the programs of all folders may take.
    """
    stamp = folder / STAMP
    with contextlib.suppress(OSError):  # no program was kept, or a folder that cannot be written to
        checked = stamp.stat().st_mtime_ns if stamp.exists() else 0
        if folder.stat().st_mtime_ns <= checked:  # no program was written since
            return
        for path, status in _files(folder):
            if status.st_mtime_ns >= checked and path.name.endswith("-cache") and not _is_complete(path):
                path.unlink(missing_ok=True)
        files = [file for other in folder.parent.glob("jax-*") for file in _files(other)]
        total = sum(status.st_size for _, status in files)
        for path, status in sorted(files, key=lambda file: max(file[1].st_atime, file[1].st_mtime)):
            if total <= most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size
        stamp.touch()
        os.utime(stamp)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process removed it
            if path.is_file():
                yield path, path.stat()


def _is_complete(path: Path) -> bool:
    content = path.read_bytes()
    try:
        if content.startswith(ZSTANDARD):
            library = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")
            library.decompress(content)
        else:
            zlib.decompress(content)
    except Exception:  # each library has its own errors
        return False
    return True
