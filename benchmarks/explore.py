"""How fast the explorer answers as one moves its controls.

A move changes one control of the page, drawn at random, to a random position. The page computes the prediction and
fills the panels, which the browser then draws. The page is warm: every number of models was shown once.

    python benchmarks/explore.py --output results/bench
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import numpy as np
from bokeh.models import CategoricalSlider

import fedtangent as ft
from fedtangent._src.comparison.explored import explored
from fedtangent._src.output.explorer import NAMES, page


def main() -> int:
    """Measure, print and write; returns the exit code."""
    ft.enable_x64()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for explore.json")
    parser.add_argument("--datasets", nargs="+", default=["sine", "digits"])
    parser.add_argument("--moves", type=int, default=50)
    options = parser.parse_args()
    rows = []
    print("| data | examples | milliseconds a move: median | worst | of the processor: median | worst |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.datasets:
        run, rng, later = explored(name), np.random.default_rng(0), Queue[Callable[[], object]]()
        root = page(run, later.put)
        sliders = sorted(root.select({"type": CategoricalSlider}), key=lambda slider: slider.title)
        models = next(slider for slider in sliders if slider.title == NAMES["num_models"])
        for position in (*models.categories[1:], models.categories[0]):
            models.value = position
            later.get()()
        times = list[tuple[float, float]]()
        while len(times) < options.moves:
            slider = sliders[rng.integers(len(sliders))]
            others = [position for position in slider.categories if position != slider.value]
            begun, of_processor = time.perf_counter(), time.process_time()
            slider.value = others[rng.integers(len(others))]
            later.get()()
            times.append((time.perf_counter() - begun, time.process_time() - of_processor))
        wall, processor = 1000 * np.array(times).T
        figures = [float(reduce(kind)) for kind in (wall, processor) for reduce in (np.median, np.max)]
        rows.append({"data": name, "examples": len(run.data.x_train), "milliseconds": wall.tolist()})
        print(f"| {name} | {len(run.data.x_train)} | {' | '.join(f'{figure:.0f}' for figure in figures)} |", flush=True)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "explore.json").write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
