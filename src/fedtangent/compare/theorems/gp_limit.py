"""Theorem 2 for K = 50 trained networks at two widths: mean, variance, covariances and coverage, entry by entry."""

from __future__ import annotations

from fedtangent.compare.ensemble_law import PARTS, Law, Outcome, coverage, entries, judge, judge_coverage
from fedtangent.compare.statistics import NUM_STANDARD_ERRORS
from fedtangent.compare.theorem2 import (
    NUM_MODELS,
    REACHED,
    SETTINGS,
    Gap,
    Sizes,
    Theorem2,
    Trained,
    compare,
    jackknife_error,
    one_client_alone,
    variance_bias,
    without_cross_terms,
)
from fedtangent.compare.theorems import TheoremCheck

THEOREM = "FE-2024 Theorem 2 (FE-2021 4.2)"
NAMES = {"mean": "mean", "variance": "variance", "covariance": "off-diagonal covariance"}
SIZES = {
    "default": {"sine": Sizes((256, 1024), 1000), "digits": Sizes((256, 1024), 1000)},
    "large": {"sine": Sizes((1024, 4096), 2000), "digits": Sizes((512, 2048), 1500)},
}


def checks(scale: str, seed: int) -> list[TheoremCheck]:
    """Both data sets at both widths, the distance of the last round from the limit, and the finite-width bias."""
    found = []
    for name, size in SIZES[scale].items():
        result = compare(SETTINGS[name](seed, NUM_MODELS, size.widths, size.num_rounds))
        found += rows(result)
    return found


def rows(result: Theorem2) -> list[TheoremCheck]:
    """Every check of one data set."""
    wrong = {"mean": ("the largest client alone", one_client_alone(result))}
    wrong |= dict.fromkeys(("variance", "covariance"), ("no cross terms", without_cross_terms(result)))
    found = [_distance(result)] if result.limit is not None else []
    for trained in result.trained:
        found += [_entries(result, trained, part, *wrong[part]) for part in PARTS]
        found.append(_coverage(result, trained))
    return [*found, _bias(result)] if result.setting.y_train.shape[1] > 1 else found


def _row(statement: str, result: Theorem2, width: object, right: Outcome, control: str, wrong: Outcome) -> TheoremCheck:
    s = result.setting
    sizes = f"{s.name}: K = {len(result.law.mean)}, width {width}, m = {len(s.x_test)}, C = {s.y_train.shape[1]}"
    return TheoremCheck(
        THEOREM,
        statement,
        sizes,
        right.measured,
        right.allowed,
        right.agrees,
        f"{control}, {wrong.measured}",
        not wrong.agrees,
    )


def _entries(result: Theorem2, trained: Trained, part: str, control: str, wrong: Law) -> TheoremCheck:
    right, other = (judge(entries(trained.samples, law)[part], part, result.null) for law in (result.law, wrong))
    return _row(f"{NAMES[part]} = {result.of}", result, trained.width, right, control, other)


def _coverage(result: Theorem2, trained: Trained) -> TheoremCheck:
    """Of the trained networks, and of the same ones before training."""
    bias = variance_bias(trained, result.law).value
    right = judge_coverage(coverage(trained.samples, result.law), result.null, bias)
    wrong = judge_coverage(coverage(trained.start, result.law), result.null, bias)
    return _row("95 % intervals cover 95 %", result, trained.width, right, "untrained networks", wrong)


def _distance(result: Theorem2) -> TheoremCheck:
    """Of the exact law at the last round from the limit; where it is too large, networks are judged by the former."""

    def outcome(gap: Gap) -> Outcome:
        said = f"mean {gap.mean:.2g} SE, variance {gap.variance:.2g} SE"
        return Outcome(said, f"<= {REACHED} SE of K models", gap.reached)

    rounds = result.setting.num_rounds
    statement = f"the flow's law at round {rounds} is the limit"
    return _row(
        statement, result, "infinite", outcome(result.gap), f"round {rounds // 10} instead", outcome(result.early)
    )


def _bias(result: Theorem2) -> TheoremCheck:
    """What a finite width adds to the variance, times the width, is one number; without the factor it is not."""
    small, large = (variance_bias(t, result.law) for t in result.trained)
    widths = tuple(t.width for t in result.trained)

    def outcome(scale: tuple[float, float]) -> Outcome:
        difference = small.value * scale[0] - large.value * scale[1]
        error = jackknife_error(small.jackknife * scale[0] - large.jackknife * scale[1])
        said = f"{small.value * scale[0]:.3g} and {large.value * scale[1]:.3g} (difference {difference:.2g})"
        return Outcome(said, f"equal, +- 3 x {error:.2g}", bool(abs(difference) <= NUM_STANDARD_ERRORS * error))

    right, wrong = outcome((widths[0], widths[1])), outcome((1.0, 1.0))
    statement = "relative bias of the variance x width is constant"
    return _row(statement, result, f"{widths[0]} and {widths[1]}", right, "constant bias", wrong)
