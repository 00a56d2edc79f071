"""Put each fault of ``mutants.toml`` into a copy of the tree, one at a time: the tests must fail.

``python tests/mutants.py`` runs for each fault the tests that are expected to catch it, up to the first failure, prints
a table with the time, and exits with 1 if a fault survived. ``--whole`` runs the whole default suite on those that
survive; ``--only TEXT`` takes the faults whose file or text has it. First the same tests are run without a fault: those
that fail then are named and left out, as nothing could be told from their failing, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
LEFT_OUT = (".git", ".venv*", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__", "*.egg-info")
LEFT_OUT += ("results", "build", "htmlcov", ".coverage*")
SECONDS = 900  # a fault may make a loop endless: caught


class Mutant(NamedTuple):
    """A fault: what stands once in ``file`` below src/fedtangent/_src, what it becomes, and who is to notice."""

    file: str
    source: str
    becomes: str
    tests: list[str]

    @property
    def path(self) -> str:
        """The file below the root of the repository."""
        return f"src/fedtangent/_src/{self.file}"


class Caught(NamedTuple):
    """What became of a fault: ``by`` is the first test that failed, or "" if none did."""

    mutant: Mutant
    by: str
    seconds: float


def read_list() -> list[Mutant]:
    """The listed faults."""
    rows = tomllib.loads(LIST.read_text())["mutant"]
    return [Mutant(row["file"], row["source"], row["becomes"], row["tests"]) for row in rows]


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the file with the fault in it; raises ``ValueError`` unless the fault applies exactly once."""
    text = (root / mutant.path).read_text()
    if (times := text.count(mutant.source)) != 1:
        raise ValueError(f"{mutant.file}: {mutant.source!r} is there {times} times, must be there once")
    return text.replace(mutant.source, mutant.becomes)


def copy_tree(folder: Path) -> Path:
    """A copy of the tree to put faults into."""
    return shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)


def failures(tree: Path, tests: list[str], *options: str, seconds: float | None = None) -> list[str]:
    """The tests that fail in ``tree``; what else ended pytest, if it was not one of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [f"no end within {seconds} s"]
    if done.returncode == 0:
        return []
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    names = [line.split(" - ")[0].partition(" ")[2] for line in failed]
    return names or [f"pytest ended with {done.returncode}"]


def put(tree: Path, mutant: Mutant, text: str) -> None:
    """Write ``text`` as the mutant's file, and forget what Python had compiled of it."""
    path = tree / mutant.path
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def try_one(tree: Path, mutant: Mutant, whole: bool, left_out: list[str]) -> Caught:
    """Run the tests but those ``left_out`` with the fault in ``tree``, which is sound again afterwards."""
    options = ["-x", *(f"--deselect={name}" for name in left_out if "::" in name)]
    tests = [test for test in mutant.tests if test not in left_out]  # a file that cannot even be imported
    began, sound = time.monotonic(), (tree / mutant.path).read_text()
    put(tree, mutant, mutated(mutant, tree))
    try:
        found = failures(tree, tests, *options, seconds=SECONDS) if tests else []
        found = found or (failures(tree, [], *options) if whole else [])
    finally:
        put(tree, mutant, sound)
    return Caught(mutant, found[0] if found else "", time.monotonic() - began)


def main() -> int:
    """Try every fault, print what caught it, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or text has this")
    parser.add_argument("--whole", action="store_true", help="the whole default suite on what survives")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    arguments = parser.parse_args()
    mutants = [m for m in read_list() if arguments.only in m.file or arguments.only in m.source]
    if not mutants:
        parser.error(f"--only: got {arguments.only!r}, which no listed fault has")
    began, trees = time.monotonic(), queue.SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(prefix="fedtangent-mutants-") as name:
        for i in range(arguments.jobs):
            trees.put(copy_tree(Path(name) / str(i)))

        def in_a_tree(mutant: Mutant) -> Caught:
            tree = trees.get()
            try:
                found = try_one(tree, mutant, arguments.whole, unsound)
            finally:
                trees.put(tree)
            print(
                f"{found.seconds:6.0f} s  {mutant.file}: {mutant.becomes.strip()!r}: {found.by or 'SURVIVED'}",
                flush=True,
            )
            return found

        tree = trees.get()
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        unsound = failures(tree, tests, f"-n{arguments.jobs}")
        trees.put(tree)
        print(f"{time.monotonic() - began:6.0f} s  without a fault: {len(unsound)} tests fail", *unsound, flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = list(pool.map(in_a_tree, mutants))
    survivors = [outcome.mutant for outcome in found if not outcome.by]
    print(f"\n{len(found) - len(survivors)} of {len(found)} faults caught in {time.monotonic() - began:.0f} s")
    for mutant in survivors:
        print(f"survived: {mutant.file}: {mutant.source!r} -> {mutant.becomes!r}; tried {' '.join(mutant.tests)}")
    return int(bool(survivors or unsound))


if __name__ == "__main__":
    sys.exit(main())
