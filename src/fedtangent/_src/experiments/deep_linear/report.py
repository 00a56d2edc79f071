"""The report on DeepLin's loss curves: table, figures, and remarks on what the paper leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedtangent._src.experiments import lab
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
from fedtangent._src.experiments.lab.runner import Study
from fedtangent._src.experiments.lab.trials import scheme_name
from fedtangent._src.output.line_plots import BoundedPanel, bounded

DRAWN = 50  # points of a curve
FLOWS = "infinite width, from the network's own start"
Judge = Callable[[Sequence[Curve]], tuple[lab.Claim, ...]]
More = Callable[[Sequence[Curve]], tuple[lab.Sheet, ...]]


def outcome(study: Study, title: str, judge: Judge, more: More = lambda _: ()) -> lab.Outcome:
    """Computes a figure's outcome.

    Args:
        study: Settings, seeds and output folder of the experiment.
        title: Title of the table.
        judge: Function from all curves to the claims.
        more: Function from all curves to further tables.
    """
    settings, rate = study.settings, rate_of(study)
    curves, wrong = every_curve(study, rate)
    remarks = _remarks_on(study, curves, rate)
    lost = [c for c in curves if not np.isfinite(c.excess).all()]
    if lost:
        first = f"{scheme_name(lost[0].classes)}, {lost[0].setting}"
        diverged = f"{len(lost)} of {len(curves)} runs diverged at eta = {rate:g}, first {first}: give a smaller one"
        return lab.Outcome((), [], remarks=remarks, failed=(diverged,))
    _draw(study, curves, title, title.split(":")[0].lower().replace(". ", ""))
    near_flow = verdict(curves[: len(wrong)], wrong, f"{study.dataset}, m = {settings.width}")
    sheets = (_sheet(study, curves, title), *more(curves))
    rows = [_row(c, settings.level) for c in curves]
    return lab.Outcome(sheets, rows, judge(curves), {}, remarks, lab.disagreeing([near_flow]), (near_flow,))


def _row(curve: Curve, level: float) -> lab.Row:
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


def _sheet(study: Study, curves: Sequence[Curve], title: str) -> lab.Sheet:
    """Builds the table: means over seeds of each run."""
    level = study.settings.level
    means = lab.means([_row(c, level) for c in curves], "clients", "num_clients", "local_steps")
    columns = f"clients: {{clients}} | N: {{num_clients}} | K: {{local_steps}} | rounds to {level:g}: {{rounds:.1f}} | "
    columns += "of the flow: {flow_rounds:.1f} | excess at end: {end:.3g} | flow at end: {flow_end:.3g} | "
    columns += "flow tends to: {limit:.3g} | |ln(excess/flow)|: {error:.3f} | "
    columns += "1 - rho of (18): {theorem_decay:.1e} | 1 - rho of the flow: {flow_decay:.1e}"
    return lab.table(f"{title}: means of {len(study.seeds)} seeds", means, columns)


def _draw(study: Study, curves: Sequence[Curve], title: str, name: str) -> None:
    """Draws two figures of the first seed: the excess with flow and bound, and the loss with the least squares'."""
    first = [c for c in curves if c.seed == study.seeds[0]]
    at = np.arange(0, study.settings.num_rounds + 1, max(1, study.settings.num_rounds // DRAWN))
    lowest = 0.5 * min(float(min(c.excess.min(), c.flow.min())) for c in first)
    excess, loss = list[BoundedPanel](), list[BoundedPanel]()
    for classes in study.settings.classes_per_client:
        group, clients = [c for c in first if c.classes == classes], scheme_name(classes)
        flows = {FLOWS: np.stack([c.flow[at] for c in group])}
        theorem = {f"bound (18), K/N = {c.setting.ratio}": c.bound[at] for c in group}
        measured = {str(c.setting): c.excess[None, at] for c in group}
        ends = [np.full(len(at), c.limit) for c in group if c.limit > lowest]
        limits = {"what these flows tend to": np.stack(ends)} if ends else {}
        excess.append(BoundedPanel(clients, at, measured, theorem, limits, flows))
        floor = group[0].floor
        losses, least = {n: v + floor for n, v in measured.items()}, {"least squares": np.full(len(at), floor)}
        loss.append(BoundedPanel(clients, at, losses, least, {}, {FLOWS: flows[FLOWS] + floor}))
    title, paths = f"DeepLin, {title}, {study.dataset}, seed {study.seeds[0]}", study.figures
    bounded(excess, title, ("round", "loss above least squares, an example"), lowest, paths.path(name))
    bounded(loss, title, ("round", "training loss, an example"), 0.9 * first[0].floor, paths.path(f"{name}_loss"))


def _remarks_on(study: Study, curves: Sequence[Curve], rate: float) -> tuple[str, ...]:
    """Returns remarks on choices that the paper leaves open, and on its conditions that do not hold."""
    settings, data, limit = study.settings, problem(study, study.seeds[0]), stable_rate(study)
    steps = max(rate / c.constants.step_limit() for c in curves)
    width = max(c.constants.least_width() for c in curves)
    share = (
        f", of which this is {settings.share:g}: {rate / PRINTED_RATE:.3g} times the printed {PRINTED_RATE:g}, "
        "which would hardly change the loss of so few examples"
    )
    directions = data.x.shape[1]
    exactness = ", which is exact" if directions == data.rank else ", the others are left out"
    lines = [
        "excess: loss an example above least squares; flow: the network at infinite width, from its own start; (excess "
        "/ flow): the largest of any round; 1 - rho: what (18), and the flow's slowest mode, lose in a round",
        "the paper prints neither how inputs are scaled nor targets: here inputs have length 1, targets are one-hot"
        f"{', less 1/C' if settings.centred else ', not centred'}; losses are per example",
        f"eta = {rate:g}; above {limit:.3g} some client of some seed diverges at infinite width"
        f"{'' if settings.learning_rate else share}",
        f"inputs of {data.dimension} numbers are of rank {data.rank}: runs are in {directions} principal directions"
        f"{exactness}",
        f"labels are no linear functions of inputs: least squares leaves {data.floor:.3g} an example, where the "
        "theorem assumes 0; its bound (18) is drawn at the excess for comparison only",
        f"the theorem asks for a width of {width:.2g} (here {settings.width}) and an eta {steps:.2g} times smaller",
        f"rounds to {settings.level:g}: of the excess at the start",
    ]
    if settings.dtype == "float32":
        lines.append("training is in float32: its products are exact to about 1e-7, so an excess below 1e-13 of the")
        lines[-1] += " loss is rounding"
    return tuple(lines)
