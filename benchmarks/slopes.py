"""Networks approach theory as width^-1/2: four architectures, each trained by four algorithms.

``compare`` puts networks of three widths beside the closed form (FedAvg, SCAFFOLD), or beside the kernel's features
(norm clipping; FedAvg under power-of-choice, which trains the clients of the largest losses). The slope of log distance
against log width is -1/2 where the theory is that of the network. Digits of 4 x 4 pixels.

    python benchmarks/slopes.py --output results/bench
    python benchmarks/slopes.py --models dense --algorithms power_of_choice --draws 16
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import fedtangent as ft
from fedtangent._src.output.tables import TextTable, console
from fedtangent.types import Algorithm, Model

EXAMPLES, POINTS, CLIENTS, ROUNDS = 60, 30, 6, 4
# The largest stable rates are 3.0, 6.8, 1.0 and 0.32.
RATES = {"dense": 0.5, "convolution": 0.5, "residual": 0.5, "attention": 0.15}
WORK = ft.Work(steps=4, batch_size=5)
IMAGE = (4, 4, 1)
MODELS: dict[str, Callable[[], Model]] = {
    "dense": lambda: ft.models.mlp(16, 10, widths=(64,)),
    "convolution": lambda: ft.models.ntk_cnn(IMAGE, 10),
    "residual": lambda: ft.models.ntk_resnet(IMAGE, 10),
    "attention": lambda: ft.models.ntk_transformer(IMAGE, 10),
}


class Row(NamedTuple):
    """Networks of one architecture, trained by one algorithm, beside theory."""

    model: str
    algorithm: str
    theory: str
    distances: str  # of networks from theory after the last round, by width
    slope: str  # with its 95 % interval
    holds: str
    control_fails: str
    seconds: float


def algorithms(model: Model, rate: float) -> dict[str, Algorithm]:
    """The algorithms by name, at one learning rate of the clients."""
    plan, clipped = ft.schedules.uniform_sampling(CLIENTS, 3), ft.Averaging(channel=ft.channels.clip(0.3))
    return {
        "fed_avg": ft.fed_avg(model, plan, rate, work=WORK),
        "scaffold": ft.scaffold(model, plan, rate, work=WORK),
        "clipped": ft.fed_avg(model, plan, rate, work=WORK, averaging=clipped),
        "power_of_choice": ft.fed_avg(model, ft.schedules.power_of_choice(CLIENTS, 4, 2), rate, work=WORK),
    }


def row_of(model: str, algorithm: str, widths: tuple[int, ...], draws: int, seed: int) -> Row:
    """The comparison of one architecture and one algorithm."""
    began, digits = time.perf_counter(), ft.data.load("digits", num_train=EXAMPLES, num_test=POINTS)
    x, x_test = (images.reshape(-1, 4, 2, 4, 2).mean((2, 4))[..., None] for images in (digits.x_train, digits.x_test))
    y, y_test = (np.eye(10)[labels] - 0.1 for labels in (digits.y_train, digits.y_test))
    clients = ft.partition.of([np.arange(i, EXAMPLES, CLIENTS) for i in range(CLIENTS)])
    result = ft.compare(
        algorithms(MODELS[model](), RATES[model])[algorithm],
        (x, y, x_test, y_test),
        clients,
        num_rounds=ROUNDS,
        seed=seed,
        evaluation=ft.Evaluation(2, progress=False),
        widths=widths,
        draws=draws,
    )
    (slope,) = (verdict for verdict in result.verdicts if "slope" in verdict.statement)
    theory = "closed form" if isinstance(result, ft.types.Comparison) else "features"
    distances = ", ".join(f"{float(gap.error[-1].mean()):.3f}" for gap in result.gaps)
    outcome = {True: "yes", False: "no", None: "undecided"}
    holds, fails = outcome[slope.holds], outcome[slope.control_fails]
    return Row(model, algorithm, theory, distances, slope.measured, holds, fails, time.perf_counter() - began)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for slopes.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    names = ["fed_avg", "scaffold", "clipped", "power_of_choice"]
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--draws", type=int, default=64, help="networks of each width")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ft.enable_x64()
    pairs = tqdm([(model, algorithm) for model in options.models for algorithm in options.algorithms])
    rows = [row_of(m, a, tuple(options.widths), options.draws, options.seed) for m, a in pairs]
    cells = [[cell if isinstance(cell, str) else f"{cell:.0f}" for cell in row] for row in rows]
    console().print(TextTable(f"slopes, {options.draws} draws", Row._fields, cells))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "slopes.json").write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
