"""The report on DeepLin's loss curves: table, figures, and remarks on what the paper leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedtangent._src.experiments.deep_linear.curves import (
    PRINTED_RATE,
    Curve,
    every_curve,
    problem,
    rate_of,
    rounds_to,
    stable_rate,
    verdict,
)
from fedtangent._src.experiments.lab.results import Claim, Outcome, Sheet, disagreeing, grouped, table
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.lab.trials import scheme_name
from fedtangent._src.output.line_plots import BoundedPanel, bounded

DRAWN = 50  # points of a curve
FLOWS = "infinite width, from the network's own start"
Judge = Callable[[Sequence[Curve]], tuple[Claim, ...]]
More = Callable[[Sequence[Curve]], tuple[Sheet, ...]]


def outcome(study: Study, title: str, judge: Judge, more: More | None = None) -> Outcome:
    """Computes a figure's outcome.

    Args:
        study: Settings, seeds and output folder of the experiment.
        title: Title of the table.
        judge: Function from all curves to the claims.
        more: Function from all curves to further tables.
    """
    s, rate = study.settings, rate_of(study)
    found, wrong = every_curve(study, rate)
    remarks = remarks_on(study, found, rate)
    lost = [c for c in found if not np.isfinite(c.excess).all()]
    if lost:
        first = f"{scheme_name(lost[0].classes)}, {lost[0].setting}"
        diverged = f"{len(lost)} of {len(found)} runs diverged at eta = {rate:g}, first {first}: give a smaller one"
        return Outcome((), [], remarks=remarks, failed=(diverged,))
    draw(study, found, title, title.split(":")[0].lower().replace(". ", ""))
    judged = verdict(found[: len(wrong)], wrong, f"{study.dataset}, m = {s.width}")
    sheets = (sheet(study, found, title), *(more(found) if more else ()))
    rows = [row(c, s.level) for c in found]
    return Outcome(sheets, rows, judge(found), {}, remarks, disagreeing([judged]), (judged,))


def row(curve: Curve, level: float) -> dict[str, Any]:
    """Builds a row of result.json."""
    to = {name: rounds_to(values, level) for name, values in (("rounds", curve.excess), ("flow_rounds", curve.flow))}
    return {
        "seed": curve.seed,
        "clients": scheme_name(curve.classes),
        "num_clients": curve.setting.num_clients,
        "local_steps": curve.setting.local_steps,
        "total_variation": curve.variation,
        **{name: value if math.isfinite(value) else None for name, value in to.items()},
        "start": float(curve.excess[0]),
        "end": float(curve.excess[-1]),
        "flow_end": float(curve.flow[-1]),
        "limit": curve.limit,
        "least_squares": curve.floor,
        "error": curve.error,
        "learning_rate": curve.constants.learning_rate,
        "lambda_min": curve.constants.lambda_min,
        "lambda_max": curve.constants.lambda_max,
        "rho": curve.constants.rate(),
        "theorem_decay": 1 - curve.constants.rate(),
        "flow_decay": 1 - curve.contraction**2,
    }


def sheet(study: Study, found: Sequence[Curve], title: str) -> Sheet:
    """Builds the table: means over seeds of each run."""
    level, means = study.settings.level, list[dict[str, Any]]()
    for own in grouped([row(c, level) for c in found], "clients", "num_clients", "local_steps").values():
        mean = {
            k: None if any(r[k] is None for r in own) else float(np.mean([r[k] for r in own]))
            for k, v in own[0].items()
            if not isinstance(v, str)
        }
        means.append({**own[0], **mean, "num_clients": own[0]["num_clients"], "local_steps": own[0]["local_steps"]})
    columns = {"clients": "{clients}", "N": "{num_clients}", "K": "{local_steps}",
               f"rounds to {level:g}": "{rounds:.1f}", "of the flow": "{flow_rounds:.1f}",
               "excess at end": "{end:.3g}", "flow at end": "{flow_end:.3g}", "flow tends to": "{limit:.3g}",
               "|ln(excess/flow)|": "{error:.3f}", "1 - rho of (18)": "{theorem_decay:.1e}",
               "1 - rho of the flow": "{flow_decay:.1e}"}  # fmt: skip
    return table(f"{title}: means of {len(study.seeds)} seeds", means, columns)


def draw(study: Study, found: Sequence[Curve], title: str, name: str) -> None:
    """Draws two figures of the first seed: the excess with flow and bound, and the loss with that of least squares."""
    own = [c for c in found if c.seed == study.seeds[0]]
    at = np.arange(0, study.settings.num_rounds + 1, max(1, study.settings.num_rounds // DRAWN))
    lowest = 0.5 * min(float(min(c.excess.min(), c.flow.min())) for c in own)
    excess, loss = list[BoundedPanel](), list[BoundedPanel]()
    for classes in study.settings.classes_per_client:
        each = [c for c in own if c.classes == classes]
        flows = {FLOWS: np.stack([c.flow[at] for c in each])}
        theorem = {f"bound (18), K/N = {c.setting.ratio}": c.bound[at] for c in each}
        measured = {str(c.setting): c.excess[None, at] for c in each}
        ends = [np.full(len(at), c.limit) for c in each if c.limit > lowest]
        limits = {"what these flows tend to": np.stack(ends)} if ends else {}
        excess.append(BoundedPanel(scheme_name(classes), at, measured, theorem, limits, flows))
        floor = each[0].floor
        loss.append(BoundedPanel(
            scheme_name(classes), at, {n: v + floor for n, v in measured.items()},
            {"least squares": np.full(len(at), floor)}, {}, {FLOWS: flows[FLOWS] + floor},
        ))  # fmt: skip
    title = f"DeepLin, {title}, {study.dataset}, seed {study.seeds[0]}"
    bounded(excess, title, ("round", "loss above least squares, an example"), lowest,
            study.figures.path(f"{name}"))  # fmt: skip
    bounded(loss, title, ("round", "training loss, an example"), 0.9 * own[0].floor,
            study.figures.path(f"{name}_loss"))  # fmt: skip


def remarks_on(study: Study, found: Sequence[Curve], rate: float) -> tuple[str, ...]:
    """Returns remarks on choices that the paper leaves open, and on its conditions that do not hold."""
    s, given = study.settings, problem(study, study.seeds[0])
    limit = stable_rate(study)
    constants = [c.constants for c in found]
    steps = max(rate / c.step_limit() for c in constants)
    need = max(c.least_width() for c in constants)
    lines = [
        "excess: loss an example above least squares; flow: the network at infinite width, from its own start; (excess "
        "/ flow): the largest of any round; 1 - rho: what (18), and the flow's slowest mode, lose in a round",
        "the paper prints neither how inputs are scaled nor targets: here inputs have length 1, targets are one-hot"
        f"{', less 1/C' if s.centred else ', not centred'}; losses are per example",
        f"eta = {rate:g}; above {limit:.3g} some client of some seed diverges at infinite width"
        + ("" if s.learning_rate else f", of which this is {s.share:g}: {rate / PRINTED_RATE:.3g} times the printed "
           f"{PRINTED_RATE:g}, which would hardly change the loss of so few examples"),
        f"inputs of {given.dimension} numbers are of rank {given.rank}: runs are in "
        f"{given.x.shape[1]} principal directions"
        + (", which is exact" if given.x.shape[1] == given.rank else ", the others are left out"),
        f"labels are no linear functions of inputs: least squares leaves {given.floor:.3g} an example, where the "
        "theorem assumes 0; its bound (18) is drawn at the excess for comparison only",
        f"the theorem asks for a width of {need:.2g} (here {s.width}) and an eta {steps:.2g} times smaller",
        f"rounds to {s.level:g}: of the excess at the start",
    ]  # fmt: skip
    if s.dtype == "float32":
        lines.append(
            "training is in float32: its products are exact to about 1e-7, so an excess below 1e-13 of the loss is "
            "rounding"
        )
    return tuple(lines)
