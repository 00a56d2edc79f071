"""The tangent kernel of a finite network: ``kernels.empirical_ntk`` beside neural-tangents' three implementations.

Those are 1 (the contraction of the Jacobians), 2 (products of the kernel with vectors) and 3 (structured derivatives),
each with ``vmap_axes=0``, jitted. Cases vary the number of examples N, of outputs C, the width and the network. The
kernels are checked to be equal, then timed in turn in one process; each peak of memory is that of a process of its
own. An implementation that holds the Jacobian is left out where that has more than ``--most-bytes``.

    python benchmarks/empirical_ntk.py --output results/bench
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src import pytrees
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.models import cnn, mlp
from fedtangent._src.types import Array, Model, PyTree

OURS, NOTHING = "structured", "nothing"
IMPLEMENTATIONS = {
    "jacobian": "JACOBIAN_CONTRACTION",
    "products": "NTK_VECTOR_PRODUCTS",
    "derivatives": "STRUCTURED_DERIVATIVES",
}
HOLD_JACOBIAN = ("jacobian", "products")
DISAGREEMENT = {"float32": 1e-4, "float64": 1e-10}  # largest relative difference that passes for rounding


class Case(NamedTuple):
    """A network, N examples and the kernel asked for: the mean over outputs, or the whole one."""

    network: str
    width: int  # of the dense layer
    outputs: int
    examples: int
    trace: bool = True
    dtype: str = "float64"

    @property
    def name(self) -> str:
        """As in the table."""
        kernel = "mean" if self.trace else "whole"
        return f"{self.network} {self.width}, C {self.outputs}, N {self.examples}, {kernel}, {self.dtype}"


CASES = (
    Case("mlp", 100, 10, 100),
    Case("mlp", 100, 10, 400),
    Case("mlp", 100, 10, 2000),
    Case("mlp", 100, 10, 4000),
    Case("mlp", 100, 2, 400),
    Case("mlp", 100, 40, 400),
    Case("mlp", 400, 10, 400),
    Case("mlp", 100, 10, 400, dtype="float32"),
    Case("mlp", 100, 10, 200, trace=False),
    Case("cnn", 64, 10, 20, dtype="float32"),
    Case("cnn", 64, 10, 100, dtype="float32"),
    Case("cnn", 64, 10, 20, trace=False, dtype="float32"),
)


def problem(case: Case) -> tuple[Model, PyTree, Array]:
    """The network, its parameters and random examples of 28 x 28 numbers."""
    model = mlp(784, case.outputs, (case.width,)) if case.network == "mlp" else _convolutional(case)
    params = jax.tree.map(lambda leaf: leaf.astype(case.dtype), model.init(jax.random.key(0)))
    return model, params, jax.random.normal(jax.random.key(1), (case.examples, 784), case.dtype)


def _convolutional(case: Case) -> Model:
    return cnn((28, 28, 1), case.outputs, filters=(16, 32), hidden=(case.width,), convolution="lax")


def kernel_functions(case: Case) -> dict[str, Callable[[], Array]]:
    """Every version that is asked for of a case, compiled at its first call: [N, N] or [N, C, N, C]."""
    from fedtangent._src.kernels.neural_tangents import nt

    model, params, x = problem(case)
    ours = jax.jit(lambda params, x: empirical_ntk(model, params, x, trace=case.trace))
    functions: dict[str, Callable[[], Array]] = {OURS: lambda: ours(params, x)}
    for name, implementation in IMPLEMENTATIONS.items():
        theirs = nt.empirical_ntk_fn(
            model.apply, trace_axes=(-1,) if case.trace else (), vmap_axes=0,
            implementation=nt.NtkImplementation[implementation],
        )  # fmt: skip
        functions[name] = functools.partial(jax.jit(theirs, static_argnums=1), x, None, params)
    return functions


def jacobian_bytes(case: Case) -> int:
    """Bytes of the Jacobian [N, C, P]."""
    model, _, _ = problem(case._replace(examples=1))
    size = pytrees.size(jax.eval_shape(model.init, jax.random.key(0)))
    return case.examples * case.outputs * size * jnp.dtype(case.dtype).itemsize


def seconds(function: Callable[[], Array]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def compare(case: Case, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of every version, compiled and checked first and then timed in turn."""
    functions = {name: function for name, function in kernel_functions(case).items() if name in names}
    reference = functions[OURS]()
    expected = reference if case.trace else reference.transpose(0, 2, 1, 3)  # theirs is [N, N, C, C]
    for name in names[1:]:
        difference = float(jnp.abs(functions[name]() - expected).max() / jnp.abs(expected).max())
        if not difference < DISAGREEMENT[case.dtype]:
            raise RuntimeError(f"{case.name}: {name} differs from {OURS} by {difference}")
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            taken[name].append(seconds(function))
    return taken


def peak(case: Case, name: str) -> int:
    """Peak resident bytes of a fresh process that computes the kernel once; of one that computes none: ``NOTHING``."""
    command = [sys.executable, __file__, "--child", name, "--case", json.dumps(case)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def child(case: Case, name: str) -> None:
    """What ``peak`` runs."""
    functions = kernel_functions(case)
    if name != NOTHING:
        jax.block_until_ready(functions[name]())
    print(peak_bytes())


def peak_bytes() -> int:
    """Peak resident memory of this process. Linux carries ``ru_maxrss`` over from the parent, so not that one there."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(case: Case, repeats: int, most_bytes: int, memory: bool) -> dict[str, Any]:
    """One row of the result."""
    too_large = jacobian_bytes(case) > most_bytes
    names = [name for name in (OURS, *IMPLEMENTATIONS) if not (too_large and name in HOLD_JACOBIAN)]
    taken = compare(case, names, repeats)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    row: dict[str, Any] = {
        "case": case.name, **case._asdict(), "jacobian_bytes": jacobian_bytes(case), "seconds": medians,
        "ratio": {name: medians[name] / medians[OURS] for name in names if name != OURS}, "all_seconds": taken,
    }  # fmt: skip
    if memory:
        base = peak(case, NOTHING)
        row["peak_bytes"] = {name: peak(case, name) for name in names}
        row["base_bytes"] = base
    return row


def show(row: dict[str, Any]) -> None:
    """One case as lines of a table: seconds, ratio to ours, peak memory beyond that of the imports."""
    print(row["case"], flush=True)
    for name in (OURS, *IMPLEMENTATIONS):
        if name not in row["seconds"]:
            print(f"  {name:12} left out: its Jacobian has {row['jacobian_bytes'] / 1e9:.1f} GB")
            continue
        held = f"{(row['peak_bytes'][name] - row['base_bytes']) / 1e6:8.0f} MB" if "peak_bytes" in row else ""
        print(f"  {name:12} {row['seconds'][name]:9.4f} s {row['ratio'].get(name, 1):8.1f} x {held}", flush=True)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for empirical_ntk.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-bytes", type=float, default=2e9, help="of a Jacobian that is still held")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--no-memory", action="store_true", help="no processes for the peaks of memory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, must be at least 1")
    for part in options.only:
        if not any(part in case.name for case in CASES):
            parser.error(f"--only: got {part!r}, no case has that in its name: {'; '.join(c.name for c in CASES)}")
    return options


def main() -> None:
    """Run, print and write."""
    options = parse()
    jax.config.update("jax_enable_x64", True)
    if options.child:
        child(Case(*json.loads(options.case)), options.child)
        return
    rows = []
    for case in (case for case in CASES if any(part in case.name for part in options.only)):
        rows.append(measure(case, options.repeats, int(options.most_bytes), not options.no_memory))
        show(rows[-1])
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "empirical_ntk.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
