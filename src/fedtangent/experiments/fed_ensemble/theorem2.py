"""Theorem 2 (FE-2024; 4.2 of FE-2021) on trained networks: the law of K models beside its closed form.

K networks are trained by Fed-ensemble at two widths, on the sine and on the digits. Their mean, variance, off-diagonal
covariances and coverage stand beside the limit's (or the exact flow's, where the run has not come to the limit),
entry by entry, and each beside a wrong theory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent.compare.theorems.fed_ensemble.ensemble_law import (
    PARTS,
    Judged,
    coverage,
    entries,
    judge,
    judge_coverage,
)
from fedtangent.compare.theorems.fed_ensemble.limit import (
    NUM_MODELS,
    SETTINGS,
    Theorem2,
    compare,
    mean_bias,
    one_client_alone,
    variance_bias,
    without_cross_terms,
)
from fedtangent.experiments.lab.results import Outcome, Sheet
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.settings import by_scale, within
from fedtangent.output.files import Metric

BOTH = "digits_and_sine"
NAMES = {"mean": "mean", "variance": "variance", "covariance": "off-diagonal covariance"}
COLUMNS = ("statistic", "width", "measured", "predicted", "SE", "beyond 3 SE", "farthest", "allowed", "verdict")


@dataclass(frozen=True)
class EnsembleLawSettings:
    """How many networks, how wide, how long."""

    num_models: int = within(NUM_MODELS, least=2)
    widths: tuple[int, ...] = (256, 512)
    digits_rounds: int = 800
    sine_rounds: int = 800


def _made(study: Study) -> list[Any]:
    """What is compared on each data set."""
    s = study.settings
    names = BOTH.split("_and_") if study.dataset == BOTH else [study.dataset]
    return [SETTINGS[n](study.seeds[0], s.num_models, s.widths, getattr(s, f"{n}_rounds")) for n in names]


def check(study: Study) -> None:
    """Build the data."""
    _made(study)


def run(study: Study) -> Outcome:
    """The networks of each data set beside their law."""
    from fedtangent.output.comparison_plots import theorem2_figure

    seed = study.seeds[0]
    sheets, rows, remarks = list[Sheet](), list[dict[str, Any]](), list[str]()
    remarks.append(
        f"data, schedule and initialisations are those of seed {seed} alone: the {study.settings.num_models} models, "
        "independent draws of one law, are the repetitions"
    )
    for setting in _made(study):
        result = compare(setting, study.say)
        found = table(result)
        rows += found
        study.keep(_metrics(result, found, seed))
        sheets.append(_sheet(result, found))
        remarks += _remarks(result)
        theorem2_figure(result, study.figures / f"theorem2_{setting.name}.png")
    return Outcome(tuple(sheets), rows, details={"seed": seed}, remarks=tuple(remarks))


def table(result: Theorem2) -> list[dict[str, Any]]:
    """One row for each statistic, width and theory: the right one, and a wrong one."""
    wrong = {"mean": ("largest client alone", one_client_alone(result))}
    wrong |= dict.fromkeys(("variance", "covariance"), ("no cross terms", without_cross_terms(result)))
    rows = []

    def add(statistic: str, width: int, theory: str, judged: Judged, numbers: tuple[float | None, ...]) -> None:
        names = ("measured", "predicted", "standard_error", "share_beyond", "farthest")
        row = {"dataset": result.setting.name, "width": width, "statistic": statistic, "theory": theory}
        row |= {"is_control": theory != result.of, **dict(zip(names, numbers, strict=True))}
        rows.append({**row, "allowed": judged.expected, "agrees": judged.holds})

    for trained in result.trained:
        for part in PARTS:
            for theory, law in ((result.of, result.law), wrong[part]):
                found = entries(trained.samples, law)[part]
                sizes = _size(found.measured, part), _size(found.predicted, part), float(np.mean(found.standard_error))
                judged = judge(found, part, result.null)
                add(NAMES[part], trained.width, theory, judged, (*sizes, found.share_beyond, found.farthest))
        bias = variance_bias(trained, result.law).value
        for theory, samples in ((result.of, trained.samples), ("untrained networks", trained.start)):
            inside = coverage(samples, result.law)
            numbers = inside.inside / inside.trials, 0.95, float(np.sqrt(0.95 * 0.05 / inside.trials)), None, None
            judged = judge_coverage(inside, result.null, bias)
            add("coverage of 95 % intervals", trained.width, theory, judged, numbers)
    return rows


def _size(values: np.ndarray, part: str) -> float:
    """An average that does not cancel: root mean square, but of variances the mean."""
    return float(np.mean(values)) if part == "variance" else float(np.sqrt(np.mean(values**2)))


def _sheet(result: Theorem2, rows: list[dict[str, Any]]) -> Sheet:
    shown = []
    for row in rows:
        name = f"{row['statistic']}, wrong theory: {row['theory']}" if row["is_control"] else row["statistic"]
        beyond, farthest = "-", "-"
        if row["share_beyond"] is not None:
            beyond, farthest = f"{row['share_beyond']:.2%}", f"{row['farthest']:.1f} SE"
        verdict = "holds" if row["agrees"] else "does not hold"
        if row["is_control"]:
            verdict = "PASSES TOO" if row["agrees"] else "fails, as it must"
        numbers = (f"{row[n]:.4g}" for n in ("measured", "predicted", "standard_error"))
        shown.append((name, str(row["width"]), *numbers, beyond, farthest, row["allowed"], verdict))
    s = result.setting
    title = (
        f"{s.name}: K = {len(result.law.mean)} networks after {s.num_rounds} rounds against {result.of}, "
        f"{len(s.x_test)} test points, {s.y_train.shape[1]} outputs"
    )
    return Sheet(title, COLUMNS, tuple(shown))


def _remarks(result: Theorem2) -> list[str]:
    name = result.setting.name
    lines = [
        f"{name}: the exact law at the last round is {result.gap.mean:.2g} SE (mean), {result.gap.variance:.2g} SE "
        f"(variance) from the limit at most; after a tenth of the rounds {result.early.mean:.2g} and "
        f"{result.early.variance:.2g}"
    ]
    for trained in result.trained:
        bias = variance_bias(trained, result.law)
        lines.append(
            f"{name}, width {trained.width}: the finite width changes the variance by {bias.value:+.1%} +- "
            f"{bias.standard_error:.1%}, the mean by {mean_bias(trained, result.law):.2f} SE of {len(result.law.mean)} "
            "models (root mean square): against the flow from the same initial functions"
        )
    lines.append(
        f"{name}: measured and predicted are means over entries (of the mean and covariances root mean squares), SE "
        "of one entry; allowed: what 99.9 % of draws from the law stay below"
    )
    return lines


def _metrics(result: Theorem2, rows: list[dict[str, Any]], seed: int) -> list[Metric]:
    sent = {t.width: (t.uplink_bytes, t.downlink_bytes) for t in result.trained}
    return [
        Metric(result.setting.num_rounds, f"fed_ensemble width {r['width']} [{r['dataset']}]", seed, "test",
               f"{r['statistic']}: {name}", float(r[name]), *sent[r["width"]])
        for r in rows if not r["is_control"] for name in ("measured", "predicted", "share_beyond")
        if r[name] is not None
    ]  # fmt: skip


SCALES = dict.fromkeys(
    (BOTH, "digits", "sine"),
    by_scale(
        EnsembleLawSettings(),
        EnsembleLawSettings(widths=(512, 1024)),
        EnsembleLawSettings(widths=(1024, 4096), digits_rounds=2000, sine_rounds=2000),
    ),
)
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check),)
