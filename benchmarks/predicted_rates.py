"""Does theory choose rates and rank algorithms? What ``predict`` says of five algorithms, beside trained networks.

On one partition for each seed, every algorithm is predicted at its own best client rate. Then networks of one width are
trained at that rate and at factors of it, by each of several seeds. Reported are the factor at which the networks are
best, the regret of the predicted rate (how much larger the networks' test loss is there than at the best of the rates
that were tried), and the rank correlation of predicted and simulated losses at best rates; with 95 % intervals over
seeds (Student's t).

    python benchmarks/predicted_rates.py --output results/bench
    python benchmarks/predicted_rates.py --dataset fashion_mnist --data-dir data/fashion_mnist --num-train 2000 \\
        --num-clients 50 --clients-per-round 10 --loss cross_entropy --batch-size 16
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import fedtangent
from fedtangent._src.comparison.forecast import Forecasting, forecasts, plan_of
from fedtangent._src.engine import Evaluation
from fedtangent._src.engine.building import build
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.run import simulate
from fedtangent._src.measures import uncertainty

ALGORITHMS = ("fed_avg", "fed_prox", "scaffold", "fed_dyn", "fed_nova")
FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 8.0)


class Found(NamedTuple):
    """One algorithm at one seed."""

    algorithm: str
    seed: int
    rate: float  # predicted best
    stable: float  # predicted largest
    predicted: float  # test loss at the predicted best rate
    losses: list[float]  # of networks at FACTORS of it
    seconds: tuple[float, float]  # prediction, simulation

    @property
    def kept(self) -> np.ndarray:
        """Losses, infinite where the networks diverged."""
        return np.where(np.isfinite(self.losses), self.losses, np.inf)

    @property
    def regret(self) -> float:
        """How much larger the networks' loss is at the predicted rate than at the best that was tried, relative."""
        best = self.kept.min()
        return float(self.kept[FACTORS.index(1.0)] / best - 1)

    @property
    def best_factor(self) -> float:
        """Of the predicted rate, where the networks are best."""
        return FACTORS[int(np.argmin(self.kept))]


def at_seed(seed: int, options: dict[str, Any], width: int, draws: int) -> list[Found]:
    """Every algorithm, predicted and simulated."""
    shared = {**options, "seed": seed, "widths": (width,)}
    plans, forecasting = [], Forecasting(draws=draws)
    for built in (build(describe(algorithm=name, **shared)) for name in ALGORITHMS):
        run = built.description.run
        every = Evaluation(run.num_rounds)
        plans.append(plan_of(built.algorithm, built.examples, run.num_rounds, run.seed, every, forecasting))
    found, before = [], time.perf_counter()
    for forecast in forecasts(plans):
        assert forecast.rates is not None
        predicted, rate = time.perf_counter(), forecast.rates.best
        losses = [simulated(forecast.name, rate * factor, shared) for factor in FACTORS]
        end = time.perf_counter()
        found.append(Found(forecast.name, seed, rate, forecast.rates.stable, forecast.loss, losses,
                           (predicted - before, end - predicted)))  # fmt: skip
        print(f"seed {seed} {forecast.name:9} rate {rate:8.3g} stable {forecast.rates.stable:8.3g} "
              f"predicted {forecast.loss:.4g} networks {' '.join(f'{loss:.4g}' for loss in losses)} "
              f"({predicted - before:.0f} and {end - predicted:.0f} s)", flush=True)  # fmt: skip
        before = end
    return found


def simulated(name: str, rate: float, options: dict[str, Any]) -> float:
    """Test loss of networks trained at a rate, at the horizon."""
    built = build(describe(algorithm=name, **{**options, "client_learning_rate": rate}))
    common = built.description.run
    run = simulate(built.algorithm, built.examples, num_rounds=common.num_rounds, seed=common.seed)
    return float(run.history.evaluations[-1].metrics["test"][uncertainty.metric_of(built.loss)])


def interval(values: Any) -> str:
    """Mean and its 95 % interval over seeds."""
    seen = np.asarray(values, float)
    if len(seen) < 2:
        return f"{seen.mean():.3g}"
    half = stats.t.ppf(0.975, len(seen) - 1) * seen.std(ddof=1) / np.sqrt(len(seen))
    return f"{seen.mean():.3g} +- {half:.2g}"


def report(found: list[Found], seeds: int) -> dict[str, Any]:
    """Tables over seeds."""
    by_seed = [[f for f in found if f.seed == seed] for seed in range(seeds)]
    ranks = [stats.spearmanr([f.predicted for f in own], [f.kept.min() for f in own]).statistic for own in by_seed]
    regrets = [own[int(np.argmin([f.predicted for f in own]))].kept.min() / min(f.kept.min() for f in own) - 1
               for own in by_seed]  # fmt: skip
    print(f"\nrank correlation of five algorithms at their best rates: {interval(ranks)}")
    print(f"regret of the algorithm that is predicted to be best: {interval(regrets)}")
    rows = []
    for name in ALGORITHMS:
        own = [f for f in found if f.algorithm == name]
        row = {
            "algorithm": name,
            "best_factor": interval([np.log2(f.best_factor) for f in own]),
            "regret": interval([f.regret for f in own]),
            "predicted": interval([f.predicted for f in own]),
            "simulated": interval([f.losses[FACTORS.index(1.0)] for f in own]),
        }
        print(
            f"{name:9} log2 of networks' best rate over the predicted {row['best_factor']}, regret {row['regret']}, "
            f"test loss predicted {row['predicted']}, simulated {row['simulated']}"
        )
        rows.append(row)
    return {"rank_correlation": list(map(float, ranks)), "algorithm_regret": list(map(float, regrets)), "rows": rows}


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for predicted_rates.json")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--num-rounds", type=int, default=30)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--num-train", type=int)
    parser.add_argument("--num-clients", type=int)
    parser.add_argument("--clients-per-round", type=int, default=10)
    parser.add_argument("--loss", default="squared_error")
    parser.add_argument("--batch-size", type=int, default=16)
    given = vars(parser.parse_args())
    output, seeds, width, draws = (given.pop(name) for name in ("output", "seeds", "width", "draws"))
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"alpha": 0.1, "local_epochs": 1} | ({} if options["dataset"] == "digits" else {"flatten": True})
    fedtangent.enable_x64()
    found = [one for seed in range(seeds) for one in at_seed(seed, options, width, draws)]
    whole = report(found, seeds) | {"found": [one._asdict() for one in found]}
    if output:
        output.mkdir(parents=True, exist_ok=True)
        (output / "predicted_rates.json").write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
