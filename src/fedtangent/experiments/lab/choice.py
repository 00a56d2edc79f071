"""Two methods over a grid of learning rates: each takes its own best rate on validation data, then they are paired."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedtangent.engine.sweeps import Sweep
from fedtangent.experiments.lab.trials import HIGHER_IS_BETTER
from fedtangent.measures.paired import Difference, differences


class Chosen(NamedTuple):
    """The rate that a method takes under one criterion."""

    rate: float
    place: int  # among the sweep's configurations
    at_edge: bool  # whether it is the smallest or the largest of several that were tried


class Pair(NamedTuple):
    """One metric of both methods at the end, means over seeds, and the paired difference method - baseline."""

    criterion: str
    metric: str
    baseline: float
    method: float
    difference: Difference
    verdict: str  # of the method: better, worse or undecided, by the interval


def merge(parts: list[list[Sweep]], names: tuple[str, ...]) -> Sweep:
    """One sweep of methods by rates over seeds, from a sweep of rates for each [seed][method]."""
    configs = tuple({"method": m, **c} for m, part in zip(names, parts[0], strict=True) for c in part.configs)
    values = {
        metric: np.concatenate(
            [np.concatenate([part.metrics[metric] for part in row], axis=1) for row in parts], axis=0
        )
        for metric in parts[0][0].metrics
    }
    return Sweep(configs, tuple(row[0].seeds[0] for row in parts), parts[0][0].rounds, values)


def choose_rate(found: Sweep, method: str, criterion: str) -> Chosen:
    """The rate of ``method`` whose mean over seeds of the validation metric ``criterion`` is best in the last round.

    A rate with which any seed's metric is not finite is not chosen, unless there is no other.
    """
    places = [i for i, config in enumerate(found.configs) if config["method"] == method]
    mean = found.metrics[f"validation.{criterion}"][:, places, -1].mean(axis=0)
    score = np.where(np.isfinite(mean), mean if criterion in HIGHER_IS_BETTER else -mean, -np.inf)
    best = int(np.argmax(score))
    rates = [found.configs[i]["learning_rate"] for i in places]
    at_edge = len(rates) > 1 and rates[best] in (min(rates), max(rates))
    return Chosen(rates[best], places[best], at_edge)


def pair(found: Sweep, baseline: Chosen, method: Chosen, metric: str, criterion: str) -> Pair:
    """The test metric of two choices, and its paired difference over seeds with a 95 % interval (Student's t)."""
    rows = differences(found, f"test.{metric}", found.configs[baseline.place])
    others = [i for i in range(len(found.configs)) if i != baseline.place]
    difference = rows[others.index(method.place)]
    ends = found.metrics[f"test.{metric}"][:, :, -1].mean(axis=0)
    verdict = "undecided"
    if difference.significant:
        verdict = "better" if (difference.mean > 0) == (metric in HIGHER_IS_BETTER) else "worse"
    return Pair(criterion, metric, float(ends[baseline.place]), float(ends[method.place]), difference, verdict)


def plain(row: Pair, baseline: str, method: str, rates: tuple[float, float]) -> dict[str, Any]:
    """A pair as a row of result.json."""
    d = row.difference
    return {
        "rates_chosen_by": f"validation {row.criterion}",
        f"learning_rate_{baseline}": rates[0],
        f"learning_rate_{method}": rates[1],
        "metric": row.metric,
        baseline: row.baseline,
        method: row.method,
        "difference": d.mean,
        "low_95": d.low,
        "high_95": d.high,
        "seeds": d.num_seeds,
        "verdict": row.verdict,
    }
