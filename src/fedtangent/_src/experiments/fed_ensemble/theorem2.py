"""Theorem 2 (FE-2024; 4.2 of FE-2021) on trained networks: mean and covariance of K models beside the closed form.

K networks are trained by Fed-ensemble at two widths, on the sine and on the digits. Their mean, variance, covariances
between points, and coverage are compared with the theorem's limit at every width; or with the exact flow, if training
has not come near the limit. The verdicts are those of ``fedtangent check-theory``, at infinite width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent._src.comparison.theorems.fed_ensemble import limit
from fedtangent._src.comparison.theorems.fed_ensemble.limit import (
    COVERED,
    NUM_MODELS,
    Theorem2,
    compare,
    covered,
    entries,
)
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.comparison_plots import theorem2_figure
from fedtangent.types import Verdict

BOTH = "digits_and_sine"
NUMBERS = ("measured", "predicted", "standard_error", "farthest")


@dataclass(frozen=True)
class EnsembleLawSettings:
    """Settings: the number of networks, their widths, and the rounds of each data set."""

    num_models: int = within(NUM_MODELS, least=2)
    widths: tuple[int, ...] = (256, 512)
    digits_rounds: int = 800
    sine_rounds: int = 800


def _settings_of(study: Study) -> list[Any]:
    """Returns the settings of the comparison with Theorem 2 of FE-2024, an entry for each data set of the study."""
    settings = study.settings
    names = BOTH.split("_and_") if study.dataset == BOTH else [study.dataset]
    return [
        limit.SETTINGS[n](study.seeds[0], settings.num_models, settings.widths, getattr(settings, f"{n}_rounds"))
        for n in names
    ]


def run(study: Study) -> lab.Outcome:
    """Trains each data set's networks with the first seed, and compares them with FE-2024's Theorem 2.

    Compared are mean, variance, covariances and coverage of the K networks' outputs after the last round. A verdict
    that does not hold fails the experiment; an undecided one does not.
    """
    seed, rows, verdicts = study.seeds[0], list[lab.Row](), list[Verdict]()
    remarks = [
        "measured and predicted are means over entries (of mean and covariances root mean squares), SE of one "
        "entry; farthest: that of any entry, in its own SE",
        f"data, schedule and initialisations are those of seed {seed} alone: the {study.settings.num_models} "
        "models, independent draws of one law, are the repetitions",
    ]
    for setting in _settings_of(study):
        result = compare(setting, study.say)
        sent = {t.width: (t.uplink_bytes, t.downlink_bytes) for t in result.trained}
        for row in _rows(result):
            name, width = f"fed_ensemble width {row['width']} [{row['dataset']}]", row["width"]
            values = {f"{row['statistic']}: {kind}": row[kind] for kind in ("measured", "predicted")}
            metrics = lab.metric_rows(name, seed, setting.size.num_rounds, values, "test")
            up, down = sent[width]
            study.keep([metric._replace(uplink_bytes=up, downlink_bytes=down) for metric in metrics])
            rows.append(row)
        verdicts += limit.sampled_rows(result)
        remarks += _remarks(result)
        theorem2_figure(result, study.figures.path(f"theorem2_{setting.name}"))
    failed = lab.disagreeing([v for v in verdicts if v.holds is not None])
    return lab.Outcome((), rows, (), {"seed": seed}, tuple(remarks), failed, tuple(verdicts))


def _rows(result: Theorem2) -> list[lab.Row]:
    """Builds a row for each statistic (mean, variance, covariances, coverage) and width."""
    rows = []

    def add(statistic: str, width: int, *numbers: float | None) -> None:
        row = {"dataset": result.setting.name, "width": width, "statistic": statistic, "theory": result.of}
        rows.append(row | dict(zip(NUMBERS, numbers, strict=True)))

    for t in result.trained:
        for part, name in limit.NAMES.items():
            e = entries(t.samples, result.law)[part]
            sizes = _size(e.measured, part), _size(e.predicted, part), float(np.mean(e.standard_error))
            add(name, t.width, *sizes, e.farthest)
        inside = covered(t.samples, result.law)
        error = float(inside.std(ddof=1) / np.sqrt(len(inside)))
        add("coverage of 95 % intervals", t.width, float(inside.mean()), COVERED, error, None)
    return rows


def _size(values: np.ndarray, part: str) -> float:
    """Computes the typical size of the entries: their mean if ``part`` is "variance", else the root mean square."""
    return float(np.mean(values)) if part == "variance" else float(np.sqrt(np.mean(values**2)))


def _remarks(result: Theorem2) -> list[str]:
    name, gap, early = result.setting.name, result.gap, result.early
    lines = [
        f"{name}: the exact law at the last round is {gap.mean:.2g} of the movement (mean), {gap.variance:.1%} "
        f"(variance) from the limit; {limit.SOONER} times sooner {early.mean:.2g} and {early.variance:.1%}"
    ]
    for trained in result.trained:
        bias, error = limit.finite_width(trained, result.law)
        lines.append(
            f"{name}, width {trained.width}: the finite width changes the variance by {bias:+.1%} +- {error:.1%}, "
            "against the flow from the same initial functions"
        )
    return lines


SCALES = dict.fromkeys(
    (BOTH, "digits", "sine"),
    by_scale(
        EnsembleLawSettings(),
        EnsembleLawSettings(widths=(512, 1024)),
        EnsembleLawSettings(widths=(1024, 4096), digits_rounds=2000, sine_rounds=2000),
    ),
)
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=_settings_of),)
