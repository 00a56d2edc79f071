"""Random command lines and calls end well or are refused in one line, and random numbers agree with a second way.

``python tests/fuzz`` draws command lines from the commands' own options and calls from the public functions' own
parameters: edges, wrong types, huge numbers, NaN, other alphabets, files of every kind. Each runs in a forked process
with a folder, a home and limits of its own. Printed, and counted as failures, are tracebacks, warnings, hangs, ends by
a signal, exit codes other than 0, 1, 2 and 128 + signal, refusals of more than a line or that wrote something, and
files outside of the output folder. As many cases as both together compare a number with a second computation in NumPy
(``numbers_twice``). What is still at work after ``SECONDS`` is interrupted, and must then end as a user
expects of Ctrl-C.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import multiprocessing
import pkgutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401  quick compilation, as in the tests
from calls import some_calls
from case import Case, tried
from command_lines import lines, write_inputs
from numbers_twice import some_numbers

import fedtangent

CASES: list[Case] = []  # what forked processes see


def _try(at: int) -> tuple[int, str]:
    with tempfile.TemporaryDirectory(prefix="fuzz", ignore_cleanup_errors=True) as folder:
        return at, tried(CASES[at], Path(folder))


def run(cases: list[Case], processes: int) -> collections.Counter[str]:
    """Try all cases; prints each failure with what repeats it. Returns how many ended how."""
    CASES[:] = cases
    found, begun = collections.Counter[str](), time.monotonic()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, (at, wrong) in enumerate(pool.imap_unordered(_try, range(len(cases))), start=1):
            found[wrong.partition(":")[0] or "well"] += 1
            if wrong:
                print(f"{wrong}\n    {cases[at].name}", flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(cases)} in {time.monotonic() - begun:.0f} s: {dict(found)}", flush=True)
    return found


def _import_all() -> None:
    """What a case may need, once for all of them; nothing of it uses a device, which could not be shared."""
    importlib.import_module("matplotlib.pyplot")
    for info in pkgutil.walk_packages(fedtangent.__path__, "fedtangent."):
        if not info.name.endswith(".__main__"):
            importlib.import_module(info.name)


def fuzz() -> int:
    """Fuzz as the command line says; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=3000, help="command lines to try (default: 3000)")
    parser.add_argument("--calls", type=int, default=1000, help="calls to try (default: 1000)")
    parser.add_argument("--numbers", type=int, help="numbers to compute twice (default: as many as lines and calls)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    given_ = parser.parse_args()
    _import_all()
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs") as folder:
        write_inputs(Path(folder))
        cases = lines(given_.lines, given_.seed, Path(folder)) if given_.lines else []
        cases += some_calls(given_.calls, given_.seed) if given_.calls else []
        number = given_.lines + given_.calls if given_.numbers is None else given_.numbers
        cases += some_numbers(number, given_.seed) if number else []
        found = run(cases, given_.processes)
    print(f"{sum(found.values())} cases: {dict(found)}")
    return int(set(found) != {"well"})


if __name__ == "__main__":
    sys.exit(fuzz())
