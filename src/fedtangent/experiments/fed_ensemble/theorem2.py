"""Theorem 2 (FE-2024; 4.2 of FE-2021) on trained networks: the law of K models beside its closed form.

K networks are trained by Fed-ensemble at two widths, on the sine and on the digits. Their mean, variance, off-diagonal
covariances and coverage stand beside the limit's (or the exact flow's, where the run has not come to the limit),
entry by entry, and each beside a wrong theory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtangent.compare.theorems.fed_ensemble import ensemble_law, limit
from fedtangent.compare.theorems.fed_ensemble.limit import NUM_MODELS, Theorem2, compare
from fedtangent.compare.verdicts import Verdict
from fedtangent.experiments.lab.results import Outcome
from fedtangent.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent.output.comparison_plots import theorem2_figure
from fedtangent.output.files import Metric

BOTH = "digits_and_sine"
NUMBERS = ("measured", "predicted", "standard_error", "share_beyond", "farthest")


@dataclass(frozen=True)
class EnsembleLawSettings:
    """How many networks, how wide, how long."""

    num_models: int = within(NUM_MODELS, least=2)
    widths: tuple[int, ...] = (256, 512)
    digits_rounds: int = 800
    sine_rounds: int = 800


def made(study: Study) -> list[Any]:
    """What is compared on each data set."""
    s = study.settings
    names = BOTH.split("_and_") if study.dataset == BOTH else [study.dataset]
    return [limit.SETTINGS[n](study.seeds[0], s.num_models, s.widths, getattr(s, f"{n}_rounds")) for n in names]


def run(study: Study) -> Outcome:
    """The networks of each data set beside their law."""
    seed, rows, verdicts = study.seeds[0], list[dict[str, Any]](), list[Verdict]()
    remarks = ["measured and predicted are means over entries (of mean and covariances root mean squares), SE of one "
               "entry; expected: what 99.9 % of draws from the law stay below",
               f"data, schedule and initialisations are those of seed {seed} alone: the {study.settings.num_models} "
               "models, independent draws of one law, are the repetitions"]  # fmt: skip
    for setting in made(study):
        result = compare(setting, study.say)
        found = table(result)
        sent = {t.width: (t.uplink_bytes, t.downlink_bytes) for t in result.trained}
        study.keep([
            Metric(setting.num_rounds, f"fed_ensemble width {r['width']} [{r['dataset']}]", seed, "test",
                   f"{r['statistic']}: {name}", float(r[name]), *sent[r["width"]])
            for r in found if not r["is_control"] for name in ("measured", "predicted", "share_beyond")
            if r[name] is not None
        ])  # fmt: skip
        rows += found
        verdicts += [verdict(result, *pair) for pair in zip(found[::2], found[1::2], strict=True)]
        remarks += _remarks(result)
        theorem2_figure(result, study.figures / f"theorem2_{setting.name}.png")
    return Outcome((), rows, details={"seed": seed}, remarks=tuple(remarks), verdicts=tuple(verdicts))


def table(result: Theorem2) -> list[dict[str, Any]]:
    """A row for each statistic and width, each followed by that of a wrong theory."""
    wrong = {"mean": ("largest client alone", limit.one_client_alone(result))}
    wrong |= dict.fromkeys(("variance", "covariance"), ("no cross terms", limit.without_cross_terms(result)))
    rows = []

    def add(statistic: str, width: int, theory: str, judged: ensemble_law.Judged, *numbers: float | None) -> None:
        row = {"dataset": result.setting.name, "width": width, "statistic": statistic, "theory": theory}
        row |= {"is_control": theory != result.of, **dict(zip(NUMBERS, numbers, strict=True))}
        rows.append({**row, "allowed": judged.expected, "agrees": judged.holds})

    for t in result.trained:
        for part in ensemble_law.PARTS:
            for theory, law in ((result.of, result.law), wrong[part]):
                found = ensemble_law.entries(t.samples, law)[part]
                sizes = _size(found.measured, part), _size(found.predicted, part), float(np.mean(found.standard_error))
                judged = ensemble_law.judge(found, part, result.null)
                add(limit.NAMES[part], t.width, theory, judged, *sizes, found.share_beyond, found.farthest)
        bias = limit.variance_bias(t, result.law).value
        for theory, samples in ((result.of, t.samples), ("untrained networks", t.start)):
            inside = ensemble_law.coverage(samples, result.law)
            numbers = inside.inside / inside.trials, 0.95, float(np.sqrt(0.95 * 0.05 / inside.trials)), None, None
            add(
                "coverage of 95 % intervals",
                t.width,
                theory,
                ensemble_law.judge_coverage(inside, result.null, bias),
                *numbers,
            )
    return rows


def _size(values: np.ndarray, part: str) -> float:
    """An average that does not cancel: root mean square, but of variances the mean."""
    return float(np.mean(values)) if part == "variance" else float(np.sqrt(np.mean(values**2)))


def verdict(result: Theorem2, right: dict[str, Any], wrong: dict[str, Any]) -> Verdict:
    """Of two rows, the theory's and the wrong one's."""

    def said(row: dict[str, Any]) -> str:
        beyond = "" if row["farthest"] is None else ", {share_beyond:.2%} beyond 3 SE, farthest {farthest:.1f} SE"
        return ("{measured:.4g}, predicted {predicted:.4g} +- {standard_error:.2g}" + beyond).format(**row)

    s, control = result.setting, (wrong["theory"], said(wrong), not wrong["agrees"])
    sizes = f"{s.name}, width {right['width']}, {s.num_rounds} rounds, m = {len(s.x_test)}, C = {s.y_train.shape[1]}"
    measured = said(right), right["allowed"], right["agrees"]
    return Verdict.of(limit.THEOREM, f"{right['statistic']} of K models = {result.of}", sizes, measured, control)


def _remarks(result: Theorem2) -> list[str]:
    name, gap, early = result.setting.name, result.gap, result.early
    lines = [
        f"{name}: the exact law at the last round is {gap.mean:.2g} SE (mean), {gap.variance:.2g} SE (variance) from "
        f"the limit at most; after a tenth of the rounds {early.mean:.2g} and {early.variance:.2g}"
    ]
    for trained in result.trained:
        bias = limit.variance_bias(trained, result.law)
        lines.append(
            f"{name}, width {trained.width}: the finite width changes the variance by {bias.value:+.1%} +- "
            f"{bias.standard_error:.1%}, the mean by {limit.mean_bias(trained, result.law):.2f} SE of "
            f"{len(result.law.mean)} models (root mean square): against the flow from the same initial functions"
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
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=made),)
