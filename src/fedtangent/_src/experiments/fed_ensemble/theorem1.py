"""Theorem 1 of FE-2024 (4.1 and 9.1 of FE-2021): its bound beside the measured decay, and which assumptions hold.

Networks trained by Fed-ensemble with per-client permutations, the exact flow from the same initial functions, and the
same flow continued for many ages, where the slowest mode decides. Each form of the bound is followed to see where it
is broken; the bound with lambda_max for lambda_min is the control, which has to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src.comparison import cases
from fedtangent._src.comparison.predicted import run_flow
from fedtangent._src.comparison.settings import Scale, Setting
from fedtangent._src.comparison.simulated import trained_networks
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab.results import NOT_OWED, Outcome, Sheet, assumption_sheet, table, theorem_details
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.federated.algorithms import fed_ensemble
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import drawn_cohorts
from fedtangent._src.kernels.gram import kernel_blocks
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded
from fedtangent._src.theory.fed_ensemble.convergence import Networks, Theorem1, theorem_1
from fedtangent._src.theory.flow import Flow, Rule
from fedtangent._src.types import Cohort

FORMS = {
    "proof": "9.1 as proved: e^(-u t / 3)",
    "equation_18": "9.1, eq. (18): e^(-K u t / 3)",
    "informal": "4.1, FE-2024's t: e^(-K u t / 6)",
    "first_order": "without the 1/3: e^(-u t)",
}
RATE_AGES = 40  # ages over which the exact rate is computed, at most
CONTROL = "control: lambda_max for lambda_min"
CASES = {"digits": cases.digits, "sine": cases.sine_network}


@dataclass(frozen=True)
class EnsembleDecaySettings:
    """The networks, trained for some rounds, and their flow, followed for many ages."""

    width: int = 256
    num_rounds: int = within(40, least=cases.NUM_MODELS)  # an age
    flow_ages: int = 200
    step_factor: float = within(1.0, above=0)  # times half of the largest stable step


class EnsembleDecay(NamedTuple):
    """Results of one seed: residual norms relative to the initial ones, and the theorem for the long flow."""

    width: int
    theorem: Theorem1
    networks: np.ndarray  # [R + 1, K]
    flow: np.ndarray  # [A * K + 1, K], every round
    rate: float  # exact factor of an age: spectral radius of the first model's flow
    uplink: np.ndarray  # bytes of one run, up and down


def run(study: Study) -> Outcome:
    """Trains every seed's networks, and computes their flow."""
    s, found = study.settings, []
    for seed in study.each_seed():
        setting = CASES[study.dataset](study.data_dir, "smoke", seed)
        found.append(follow(_resized(setting, s), s))
        study.keep(_metrics(found[-1], seed))
    return conclude(study, found)


def _resized(case: Setting, s: EnsembleDecaySettings) -> Setting:
    """Returns the case for one ensemble of the study's width, rounds and step size."""
    rate, steps = s.step_factor * case.followed.learning_rate, cases.LOCAL_STEPS
    algorithm = fed_ensemble(
        case.algorithm.model,
        case.algorithm.schedule,
        client_learning_rate=rate,
        work=Work(steps=steps, batch_size=None),
    )
    size = Scale((s.width,), 1, s.num_rounds, evaluate_every=1)
    return replace(case, algorithm=algorithm, rule=Rule(steps, rate), size=size)


def follow(setting: Setting, s: EnsembleDecaySettings) -> EnsembleDecay:
    """Trains the networks, continues their flow, and computes the theorem for all of it. Needs 64-bit types."""
    seen = trained_networks(setting, s.width)
    start = seen.train[0, :, 0]  # [K, n, C]
    blocks = kernel_blocks(setting.model(s.width).kernel, setting.problem.x_train, setting.problem.x_test[:1])  # type: ignore[arg-type]
    length = setting.num_models
    rounds = length * max(s.flow_ages, s.num_rounds // length)
    plan = drawn_cohorts(setting.algorithm.schedule, setting.problem.partition, rounds, setting.seed)
    flow = run_flow(setting, blocks, plan)
    theorem = theorem_1(
        blocks, setting.problem.y_train, setting.problem.partition, plan, setting.followed,
        num_models=length, networks=Networks(start, setting.problem.x_train),
    )  # fmt: skip
    residual = np.asarray(flow.residual(list(range(rounds + 1)), start))
    r0 = theorem.constants.r0
    return EnsembleDecay(
        s.width,
        theorem,
        np.linalg.norm(seen.train[:, :, 0] - setting.problem.y_train, axis=(2, 3)) / r0,
        np.linalg.norm(residual, axis=(2, 3)) / r0,
        _rate(setting, flow, plan, rounds // length),
        np.array([seen.sent[-1].uplink_bytes, seen.sent[-1].downlink_bytes]),
    )


def _rate(setting: Setting, flow: Flow, plan: Cohort, ages: int) -> float:
    """Computes the factor of an age for the first model's slowest mode: spectral radius of n ages, power 1 / n."""
    few = min(ages, RATE_AGES)
    if few < ages:
        first = Cohort(*(np.asarray(leaf)[: few * setting.num_models] for leaf in plan))  # type: ignore[arg-type]
        flow = run_flow(setting, flow.blocks, first)
    return float(flow.contraction(0)) ** (1 / few)


def bounds(found: EnsembleDecay) -> dict[str, np.ndarray]:
    """Computes every form of the bound and the control after each age, relative to R_0, [A + 1] each."""
    theorem = found.theorem
    forms = {label: np.exp(-theorem.exponent(form)) for form, label in FORMS.items()}
    return forms | {CONTROL: np.exp(-theorem.exponent("proof", theorem.constants.lambda_max))}


def ratios(found: EnsembleDecay, norms: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Computes measured norms over the bound at the end of each age, [ages, K]."""
    at_ages = norms[:: found.theorem.plan.rounds_per_age][1:]
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(at_ages / bound[1 : len(at_ages) + 1, None])


def _metrics(found: EnsembleDecay, seed: int) -> list[Metric]:
    total, none = len(found.networks) - 1, np.zeros(2, int)
    paths = (("networks", found.networks, found.uplink), ("flow", found.flow[: total + 1], none))
    return [
        Metric(r, name, seed, "train", "relative_residual", float(value), *(int(b) * r // total for b in sent))
        for name, path, sent in paths for r, value in enumerate(path.mean(axis=1))
    ]  # fmt: skip


def conclude(study: Study, found: list[EnsembleDecay]) -> Outcome:
    """Builds tables and figure, and a verdict on each form of the bound."""
    rows = [_form_row(found, label) for label in bounds(found[0])]
    failed = () if all(np.all(np.isfinite(f.networks)) for f in found) else ("networks diverged",)
    _draw(study, found[0])
    theorems = [f.theorem for f in found]
    wrong = f"{rows[-1]['networks_worst']:.3g}"
    control = CONTROL.removeprefix("control: "), wrong, bool(rows[-1]["networks_worst"] > 1)
    sizes = f"width {study.settings.width}, {study.settings.num_rounds} rounds, {len(found)} seeds"
    verdicts = tuple(
        Verdict.of("FE-2024 Theorem 1", f"residual / {r['bound']}, largest at the ends of ages", sizes,
                   (f"{r['networks_worst']:.3g}", "<= 1", r["networks_worst"] <= 1), control)
        for r in rows[:-1]
    )  # fmt: skip
    details = theorem_details(theorems) | {"rate_of_an_age": [f.rate for f in found]}
    sheets = _bounds_sheet(study, found, rows), assumption_sheet(theorems, "assumptions, measured on the first seed")
    return Outcome(sheets, rows, (), details, _remarks(found[0]), failed, verdicts)


def _form_row(found: list[EnsembleDecay], label: str) -> dict[str, Any]:
    networks = [float(ratios(f, f.networks, bounds(f)[label]).max()) for f in found]
    flows = [ratios(f, f.flow, bounds(f)[label]).max(axis=1) for f in found]
    broken = [int(np.argmax(r > 1)) + 1 for r in flows if np.any(r > 1)]
    return {
        "bound": label,
        "per_age": float(np.mean([bounds(f)[label][1] for f in found])),
        "networks_worst": max(networks),
        "networks_hold": sum(r <= 1 for r in networks),
        "flow_worst": float(max(r.max() for r in flows)),
        "flow_hold": len(flows) - len(broken),
        "first_broken_age": min(broken) if broken else None,
        # a bound that falls faster than the slowest mode is broken sooner or later
        "hold_for_ever": sum(f.rate <= bounds(f)[label][1] / bounds(f)[label][0] for f in found),
        "seeds": len(found),
    }


def _bounds_sheet(study: Study, found: list[EnsembleDecay], rows: list[dict[str, Any]]) -> Sheet:
    exact = dict.fromkeys(rows[0]) | {"bound": "exact: spectral radius", "per_age": np.mean([f.rate for f in found])}
    title = (
        f"Theorem 1 on {study.dataset}: residual / bound at the ends of ages, K = {cases.NUM_MODELS}, the flow for "
        f"{found[0].theorem.plan.num_ages} ages"
    )
    return table(title, [*rows, exact], {
        "bound on the residual's norm": "{bound}", "factor an age": "{per_age:.4f}",
        "networks: worst": "{networks_worst:.3g}", "flow: worst": "{flow_worst:.3g}",
        "holds": "{flow_hold:d} of {seeds}", "first broken (age)": "{first_broken_age:d}",
        "holds for ever": "{hold_for_ever:d} of {seeds}",
    })  # fmt: skip


def _remarks(first: EnsembleDecay) -> tuple[str, ...]:
    c, plan = first.theorem.constants, first.theorem.plan
    vacuous = "Theta is singular to rounding, so u is 0 and every form says only that the residual does not grow"
    return (
        *((vacuous,) if "full_rank" in first.theorem.failing else ()),
        "u = eta_0 tau lambda_min(Theta) / nbar, nbar the most examples of a round "
        f"({c.examples_per_round:.0f}; the least is {c.least_examples_per_round:.0f}), t counts ages of K rounds",
        f"lambda_min {c.lambda_min:.3g}, lambda_max {c.lambda_max:.3g}, eta_0 tau {plan.most_progress:.3g}; "
        f"kappa_2 < 1 asks for eta_0 tau < {c.largest_progress:.2g} here",
        f"assumptions that fail: {', '.join(first.theorem.failing) or 'none'}",
        "holds for ever: the bound falls no faster than the slowest mode of the flow's age, its spectral radius",
        NOT_OWED,
    )


def _draw(study: Study, found: EnsembleDecay) -> None:
    """Draws one seed's relative residuals and every form of the bound in two panels.

    The first shows the trained networks with the exact flow beside them, and also the control. The second shows the
    flow at the ends of all its ages, and the line that decays at its exact rate and meets the largest residual at the
    last of them.
    """
    length, short = found.theorem.plan.rounds_per_age, len(found.networks)
    ends = np.arange(0, len(found.flow), length)
    all_bounds = bounds(found)
    rate = found.flow[ends[-1]].max() * found.rate ** (np.arange(len(ends)) - (len(ends) - 1))
    near = ends[ends < short]
    forms = {k: v for k, v in all_bounds.items() if k != CONTROL}
    panels = [
        BoundedPanel(
            f"networks of width {found.width}", np.arange(short), {"trained networks": found.networks.T},
            {k: v[: len(near)] for k, v in forms.items()}, {CONTROL: all_bounds[CONTROL][: len(near)]},
            {"exact flow, each model": found.flow[:short].T}, near,
        ),
        BoundedPanel(
            "the flow continued", ends, {}, forms | {"exact rate, spectral radius of an age": rate},
            predicted={"exact flow, each model": found.flow[ends].T},
        ),
    ]  # fmt: skip
    title = f"Theorem 1 on {study.dataset}, K = {length}, per-client permutations"
    bounded(panels, title, ("round", "training residual / initial residual"), None, study.figures.path("decay"))


DEFAULT = EnsembleDecaySettings(width=1024, num_rounds=100, flow_ages=500)
PAPER = EnsembleDecaySettings(width=4096, num_rounds=400, flow_ages=2000)
SCALES = dict.fromkeys(CASES, by_scale(EnsembleDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), exact=True),)
