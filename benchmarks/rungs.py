"""Every algorithm and channel: is it followed by the closed form (rung 3), and by the features of a kernel (rung 2)?

Rung 3 follows an algorithm with a rule. Rung 2 follows it if its runs on a kernel's features do not depend on the basis
of the features, which is measured here on a few digits. Rung 1, the linearised network, follows every algorithm.

    python benchmarks/rungs.py --output results/bench
    python benchmarks/rungs.py --only scaffold fed_adam qsgd:4
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.rotations import RotationTest, feature_paths, rotation_test
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import describe
from fedtangent._src.entries import catalogue

OPTIONS: dict[str, Any] = {"dataset": "digits", "num_train": 40, "num_test": 8, "num_clients": 5, "num_rounds": 3}
WORK = {"local_steps": 3, "batch_size": 4, "client_learning_rate": 0.3}
MORE: dict[str, dict[str, Any]] = {  # options of single algorithms, where defaults do not fit so few examples
    "cp_ntk_fl": {"sparsity": 0.3, "ntk_times": (10, 50)},
    "dp_fed_avg": {"clip_norm": 0.5, "noise_multiplier": 0.3, "delta": 1e-4},
    "ntk_dfl": {"ntk_times": (10, 50)},
    "ntk_fl": {"ntk_times": (10, 50)},
}
WITHOUT = {
    "fed_be": "it distils on the server's inputs, for which there are no features",
    "lg_fed_avg": "its clients keep layers of their own, which features do not have",
}
CHANNELS = ("lossless", "clip:0.3", "top_k:0.3", "random_k:0.3", "qsgd:4", "qsgd:8", "quantise:5")


def measured(algorithm: str, channel: str | None = None) -> RotationTest:
    """The rotation test of one algorithm, or of FedAvg with a channel."""
    options = OPTIONS | {"algorithm": algorithm} | MORE.get(algorithm, {})
    options |= {} if channel is None else {"channel": channel}
    try:
        built = build(describe(**options, **WORK))
    except ValueError:  # no local work
        built = build(describe(**options))
    x_train, y_train = built.examples.in_float64()
    x_test, _ = built.examples.in_float64("test")
    assert built.model.kernel is not None
    kernels = ft.kernels.kernel_blocks(built.model.kernel, x_train, x_test)
    outputs, models = y_train.shape[1], built.algorithm.schedule.num_models
    f0 = np.stack([ft.theory.prior_functions(kernels, outputs, seed=k) for k in range(models)])
    paths = feature_paths(built.algorithm, y_train, built.examples.clients, (0, OPTIONS["num_rounds"]))
    return rotation_test(paths, ft.models.kernel_features(kernels, outputs), f0, 0)


def row_of(name: str) -> dict[str, Any]:
    """The rungs that follow one algorithm or channel."""
    is_channel, began = name in CHANNELS, time.perf_counter()
    algorithm = "fed_avg" if is_channel else name
    if name in WITHOUT:
        return {"name": name, "rule": False, "features": f"no: {WITHOUT[name]}", "seconds": 0.0}
    test = measured(algorithm, name if is_channel else None)
    rule = build(
        describe(**OPTIONS | {"algorithm": algorithm} | ({"channel": name} if is_channel else {}))
    ).algorithm.rule
    law = f"in law: {test.noise_ratio:.2f} ({test.noise_error:.2f}) of the variance, {test.bias:.1f} standard errors"
    features = f"yes: {test.disagreement:.0e}" if test.is_exact else f"no: {test.reason}" if test.reason else law
    seconds = round(time.perf_counter() - began, 1)
    return {"name": name, "rule": not isinstance(rule, str), "features": features, "seconds": seconds, **test._asdict()}


def main() -> int:
    """Run, print and write; returns the exit code."""
    ft.enable_x64()
    known = [*catalogue("algorithms"), *CHANNELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for rungs.json")
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    options = parser.parse_args()
    rows = []
    print(
        "| algorithm or channel | rung 3, closed form | rung 2, features of the kernel |\n| --- | --- | --- |",
        flush=True,
    )
    for name in options.only:
        rows.append(row_of(name))
        print(f"| {name} | {'yes' if rows[-1]['rule'] else 'no'} | {rows[-1]['features']} |", flush=True)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "rungs.json").write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
