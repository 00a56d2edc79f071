"""Every algorithm that theory has a rule for, beside its theory: do its networks approach the flow as width^-1/2?

For each, by the squared error and the cross entropy, on minibatches: networks of several widths and the exact flow of
their very rounds, and every verdict of ``compare`` but NTK-FL's, with its negative control. Exits with 1 where one
disagrees or a wrong theory passes.

    python benchmarks/beside_every_rule.py --output results/bench
    python benchmarks/beside_every_rule.py --only fed_dyn scaffold --draws 48
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

import fedtangent
from fedtangent._src.comparison.all_verdicts import all_verdicts
from fedtangent._src.comparison.comparing import comparison_of
from fedtangent._src.comparison.predicted import predict
from fedtangent._src.comparison.simulated import cohorts, trained_networks
from fedtangent._src.comparison.verdicts import as_rows
from fedtangent._src.engine import Evaluation
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import describe
from fedtangent._src.entries import catalogue

LOSSES = ("squared_error", "cross_entropy")


def beside(algorithm: str, loss: str, draws: int, rounds: int) -> list[dict[str, Any]]:
    """The verdicts of one algorithm, as rows."""
    options = {"num_train": 200, "num_test": 50, "num_clients": 5, "num_rounds": rounds, "loss": loss}
    batches = {} if algorithm == "fed_sgd" else {"batch_size": 16, "local_epochs": 1}
    built = build(describe(algorithm=algorithm, **options, **batches))
    setting = comparison_of(built.algorithm, built.examples, rounds, 0, Evaluation(), (64, 256, 1024), draws)
    with jax.default_matmul_precision("highest"):
        theory = predict(setting, cohorts(setting))
        seen = tuple(trained_networks(setting, width) for width in setting.size.widths)
        return as_rows(all_verdicts(theory, seen, ()))


def is_followed(algorithm: str) -> bool:
    """Whether theory has a rule for it."""
    return not isinstance(build(describe(algorithm=algorithm)).algorithm.rule, str)


def main() -> int:
    """Run, print and write; returns the exit code."""
    fedtangent.enable_x64()
    known = [name for name in catalogue("algorithms") if is_followed(name)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for beside_every_rule.json")
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=12)
    given, rows = parser.parse_args(), list[dict[str, Any]]()
    for algorithm in given.only:
        for loss in LOSSES:
            start = time.perf_counter()
            found = beside(algorithm, loss, given.draws, given.rounds)
            rows += [{"algorithm": algorithm, "loss": loss, **row} for row in found]
            print(f"{algorithm}, {loss} ({time.perf_counter() - start:.0f} s)")
            for row in found:
                said = {True: "holds", False: "FAILS", None: "undecided"}[row["passed"]]
                print(f"   {said:9} {row['measured']} for {row['expected']}: {row['statement']}", flush=True)
            if given.output:
                given.output.mkdir(parents=True, exist_ok=True)
                (given.output / "beside_every_rule.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0 if all(row["passed"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
