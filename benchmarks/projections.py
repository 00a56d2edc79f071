"""Projections onto all nodes' feasible sets at once, beside solvers that are called in a Python loop, in one run.

``theory.parallel_projections`` of Local-GD's classification (the paper's sizes by default) for all rounds, and single
projections of its models by others: Clarabel, an interior-point solver (where it is installed: ``pip install
clarabel``), given the quadratic program as eq. (13) poses it, and its dual with the Gram matrix made by hand; SciPy's
non-negative least squares, as least-distance programming; SciPy's SLSQP on the dual.

    python benchmarks/projections.py --output results/bench
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import sparse
from scipy.optimize import minimize, nnls

import fedtangent
from fedtangent import theory
from fedtangent._src.theory.local_gd.max_margin import project
from fedtangent._src.types import Partition

Solver = Callable[[np.ndarray, np.ndarray], np.ndarray]  # signed examples [n, d], w [d] -> the nearest point [d]
TRIED = 4  # projections that a solver in a loop is timed at


def least_squares(signed: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Lawson and Hanson (1974), chapter 23."""
    lacking = 1 - signed @ w
    b, _ = nnls(np.vstack([signed.T, lacking]), np.eye(len(w) + 1)[-1])
    return np.asarray(w + signed.T @ b / (1 - lacking @ b))


def sequential(signed: np.ndarray, w: np.ndarray) -> np.ndarray:
    """SLSQP on the dual."""
    gram, lacking = signed @ signed.T, 1 - signed @ w
    found = minimize(
        lambda b: (b @ gram @ b / 2 - lacking @ b, gram @ b - lacking), np.zeros(len(signed)), jac=True,
        method="SLSQP", bounds=[(0, None)] * len(signed), options={"ftol": 1e-16, "maxiter": 500},
    )  # fmt: skip
    return np.asarray(w + signed.T @ found.x)


def clarabel_solvers() -> dict[str, Solver]:
    """Of the program as it is posed, and of its dual; none where Clarabel is not installed."""
    try:
        clarabel: Any = importlib.import_module("clarabel")
    except ImportError:
        return {}
    settings = clarabel.DefaultSettings()
    settings.verbose = False

    def solve(quadratic: Any, linear: np.ndarray, rows: Any, least: np.ndarray) -> np.ndarray:
        cones = [clarabel.NonnegativeConeT(len(least))]
        found = clarabel.DefaultSolver(quadratic, linear, -rows, -least, cones, settings).solve()
        return np.array(found.x)

    def posed(signed: np.ndarray, w: np.ndarray) -> np.ndarray:
        return solve(sparse.eye(len(w), format="csc"), -w, sparse.csc_matrix(signed), np.ones(len(signed)))

    def dual(signed: np.ndarray, w: np.ndarray) -> np.ndarray:
        gram = sparse.csc_matrix(np.triu(signed @ signed.T))
        n = len(signed)
        return np.asarray(w + signed.T @ solve(gram, signed @ w - 1, sparse.eye(n, format="csc"), np.zeros(n)))

    return {"Clarabel, as posed": posed, "Clarabel, dual": dual}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for projections.json")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--dimension", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=120)
    given = parser.parse_args()
    fedtangent.enable_x64()
    rng = np.random.default_rng(0)
    n = given.nodes * given.examples
    x = rng.standard_normal((n, given.dimension))
    truths = rng.standard_normal(given.dimension) + rng.standard_normal((given.nodes, given.dimension))
    y = np.sign(np.sum(x * np.repeat(truths, given.examples, axis=0), axis=1))
    sets = theory.feasible_sets(x, y, Partition(np.arange(n), np.arange(0, n + 1, given.examples)))
    models = theory.parallel_projections(sets, given.rounds)  # compiles
    start = time.perf_counter()
    models = theory.parallel_projections(sets, given.rounds)
    ours = (time.perf_counter() - start) / (given.rounds * given.nodes)
    rows: list[dict[str, Any]] = [{"solver": "fedtangent, all nodes at once", "milliseconds": 1e3 * ours, "times": 1.0}]
    at = [(r * given.rounds // TRIED, r % given.nodes) for r in range(TRIED)]
    expected = [np.asarray(project(sets, models[r]).point)[i] for r, i in at]
    for name, solve in {**clarabel_solvers(), "SciPy nnls": least_squares, "SciPy SLSQP, dual": sequential}.items():
        start = time.perf_counter()
        found = [solve(np.asarray(sets.signed[i]), models[r]) for r, i in at]
        seconds = (time.perf_counter() - start) / TRIED
        apart = max(float(np.linalg.norm(f - e) / np.linalg.norm(e)) for f, e in zip(found, expected, strict=True))
        rows.append({"solver": name, "milliseconds": 1e3 * seconds, "times": seconds / ours, "apart": apart})
    sizes = f"{given.nodes} x {given.examples} examples, d = {given.dimension}, {given.rounds} rounds"
    print(f"{sizes} on {jax.devices()[0].device_kind}: a projection")
    for row in rows:
        away = f", {row['apart']:.0e} apart from ours" if "apart" in row else ""
        print(f"{row['solver']:30} {row['milliseconds']:9.2f} ms {row['times']:7.1f} x{away}")
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "projections.json").write_text(json.dumps({"sizes": vars(given), "rows": rows}, default=str))


if __name__ == "__main__":
    main()
