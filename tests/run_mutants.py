"""Put each fault of ``mutants.toml`` into a copy of the tree, one at a time: the tests must fail.

``python tests/run_mutants.py`` runs for each fault the tests that are expected to catch it, up to the first failure,
prints a table with the time, and exits with 1 if a fault survived. ``--whole`` runs the whole default suite on those
that survive; ``--only TEXT`` takes the faults that have this in their function, operator or tests. First the same tests
are run without a fault: those that fail then are named and left out, as nothing could be told from their failing, and
the exit code is 1.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants import ROOT, Fault, mutated, read_list

LEFT_OUT = (".git", ".venv*", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__", "*.egg-info")
LEFT_OUT += ("results", "build", "htmlcov", ".coverage*")
SECONDS = 900  # a fault may make a loop endless: caught


class Outcome(NamedTuple):
    """What became of a fault: ``caught_by`` is the first test that failed, or "" if none did."""

    fault: Fault
    caught_by: str
    seconds: float


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


def write(tree: Path, fault: Fault, text: str) -> None:
    """Write ``text`` as the fault's file, and forget what Python had compiled of it."""
    path = tree / fault.path
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def try_one(tree: Path, fault: Fault, whole: bool, left_out: list[str]) -> Outcome:
    """Run the tests but those ``left_out`` with the fault in ``tree``, which is sound again afterwards."""
    options = ["-x", *(f"--deselect={name}" for name in left_out if "::" in name)]
    tests = [test for test in paths(fault) if test not in left_out]  # a file that cannot even be imported
    start, sound = time.monotonic(), (tree / fault.path).read_text()
    write(tree, fault, mutated(fault, tree))
    try:
        failed = failures(tree, tests, *options, seconds=SECONDS) if tests else []
        failed = failed or (failures(tree, [], *options) if whole else [])
    finally:
        write(tree, fault, sound)
    return Outcome(fault, failed[0] if failed else "", time.monotonic() - start)


def paths(fault: Fault) -> list[str]:
    """The fault's tests below the root of the repository."""
    return [f"tests/{test}" for test in fault.tests]


def main() -> int:
    """Try every fault, print what caught it, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with this in their function, operator or tests")
    parser.add_argument("--whole", action="store_true", help="the whole default suite on what survives")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    arguments = parser.parse_args()
    faults = [fault for fault in read_list() if arguments.only in f"{fault} {' '.join(fault.tests)}"]
    if not faults:
        parser.error(f"--only: got {arguments.only!r}, which no listed fault has")
    start, trees = time.monotonic(), queue.SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(prefix="fedtangent-mutants-") as folder:
        for i in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / str(i)))

        def in_a_tree(fault: Fault) -> Outcome:
            tree = trees.get()
            try:
                outcome = try_one(tree, fault, arguments.whole, unsound)
            finally:
                trees.put(tree)
            print(f"{outcome.seconds:6.0f} s  {fault}: {outcome.caught_by or 'SURVIVED'}", flush=True)
            return outcome

        tree = trees.get()
        tests = sorted({test for fault in faults for test in paths(fault)})
        unsound = failures(tree, tests, f"-n{arguments.jobs}")
        trees.put(tree)
        print(f"{time.monotonic() - start:6.0f} s  without a fault: {len(unsound)} tests fail", *unsound, flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            outcomes = list(pool.map(in_a_tree, faults))
    survivors = [outcome.fault for outcome in outcomes if not outcome.caught_by]
    caught = len(outcomes) - len(survivors)
    print(f"\n{caught} of {len(outcomes)} faults caught in {time.monotonic() - start:.0f} s")
    for fault in survivors:
        print(f"survived: {fault}; tried {' '.join(fault.tests)}")
    return int(bool(survivors or unsound))


if __name__ == "__main__":
    sys.exit(main())
