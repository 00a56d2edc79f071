"""Theorem 1 of FE-2024 (4.1 and 9.1 of FE-2021): its bound beside the measured decay, and which assumptions hold.

Each form of the bound is compared with three residuals: of networks trained by Fed-ensemble with per-client
permutations; of the exact flow from the same initial functions; and of this flow continued for many ages, where the
slowest mode decides. An age is a number of rounds in which every client trains each model once. The control is the
bound with the kernel's largest eigenvalue instead of the smallest, which must be broken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src.comparison import cases
from fedtangent._src.comparison.predicted import run_flow
from fedtangent._src.comparison.settings import Scale, Setting
from fedtangent._src.comparison.simulated import trained_networks
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import BoundedPanel, bounded

FORMS = {
    "proof": "9.1 as proved: e^(-u t / 3)",
    "equation_18": "9.1, eq. (18): e^(-K u t / 3)",
    "informal": "4.1, FE-2024's t: e^(-K u t / 6)",
    "first_order": "without the 1/3: e^(-u t)",
}
RATE_AGES = 40  # ages over which the exact rate is computed, at most
CONTROL = "control: lambda_max instead of lambda_min"
CASES = {"digits": cases.digits, "sine": cases.sine_network}


@dataclass(frozen=True)
class EnsembleDecaySettings:
    """Settings of the networks, trained for some rounds, and of their flow, computed for ``flow_ages`` ages.

    An age has as many rounds as the ensemble has models, so that every client trains each model once in it.
    """

    width: int = 256
    num_rounds: int = within(40, least=cases.NUM_MODELS)  # an age
    flow_ages: int = 200
    step_factor: float = within(1.0, above=0)  # times half of the largest stable step


class EnsembleDecay(NamedTuple):
    """Norms of one seed's residuals over their initial norms, and FE-2024's Theorem 1 for the same run.

    Attributes:
        theorem: Constants, bounds and assumptions of Theorem 1.
        networks: Norm of the residual of each of K networks after each of R rounds, [R + 1, K].
        flow: Norm of each model's residual by the exact flow, over A ages of K rounds, [A * K + 1, K].
        rate: Factor by which the slowest mode of the flow's first model shrinks in an age.
        uplink: Bytes that one run sent, up and down, [2].
    """

    width: int
    theorem: ft.theory.Theorem1
    networks: np.ndarray
    flow: np.ndarray
    rate: float
    uplink: np.ndarray


def run(study: Study) -> lab.Outcome:
    """Trains every seed's networks, computes their flow, and compares both with the bound of FE-2024's Theorem 1."""
    settings, results = study.settings, []
    for seed in study.each_seed():
        setting = CASES[study.dataset](study.data_dir, "smoke", seed)
        results.append(_follow(_resized(setting, settings), settings))
        study.keep(_metrics(results[-1], seed))
    return _conclude(study, results)


def _resized(case: Setting, settings: EnsembleDecaySettings) -> Setting:
    """Changes a standard comparison (``case``) to one ensemble of the settings' width, rounds and step size."""
    rate, steps = settings.step_factor * case.followed.learning_rate, cases.LOCAL_STEPS
    model, schedule = case.algorithm.model, case.algorithm.schedule
    algorithm = ft.fed_ensemble(model, schedule, client_learning_rate=rate, work=ft.Work(steps=steps, batch_size=None))
    size = Scale((settings.width,), 1, settings.num_rounds, evaluate_every=1)
    return replace(case, algorithm=algorithm, rule=ft.theory.Rule(steps, rate), size=size)


def _follow(setting: Setting, settings: EnsembleDecaySettings) -> EnsembleDecay:
    """Trains the networks, computes their flow for all ages, and evaluates FE-2024's Theorem 1. Needs 64-bit types."""
    simulated = trained_networks(setting, settings.width)
    start = simulated.train[0, :, 0]  # [K, n, C]
    kernel, problem = setting.model(settings.width).kernel, setting.problem
    assert kernel is not None
    blocks = ft.kernels.kernel_blocks(kernel, problem.x_train, problem.x_test[:1])
    length = setting.num_models
    rounds = length * max(settings.flow_ages, settings.num_rounds // length)
    plan = ft.schedules.drawn_cohorts(setting.algorithm.schedule, problem.partition, rounds, setting.seed)
    flow = run_flow(setting, blocks, plan)
    run = blocks, problem.y_train, problem.partition, plan, setting.followed
    theorem = ft.theory.theorem_1(*run, num_models=length, networks=ft.theory.Networks(start, problem.x_train))
    residuals = simulated.train[:, :, 0] - problem.y_train, np.asarray(flow.residual(list(range(rounds + 1)), start))
    networks, exact = (np.linalg.norm(r, axis=(2, 3)) / theorem.constants.r0 for r in residuals)
    sent = np.array([simulated.sent[-1].uplink_bytes, simulated.sent[-1].downlink_bytes])
    return EnsembleDecay(settings.width, theorem, networks, exact, _rate(setting, flow, plan, rounds // length), sent)


def _rate(setting: Setting, flow: ft.theory.Flow, plan: ft.types.Cohort, ages: int) -> float:
    """Computes the factor by which the first model's slowest mode shrinks in one age (K rounds for K models).

    ``flow`` is the run's flow, ``plan`` has the cohorts of its rounds, and ``ages`` is the number of ages in it;
    at most the first 40 are used.
    """
    few = min(ages, RATE_AGES)
    if few < ages:
        first = ft.types.Cohort(*(np.asarray(leaf)[: few * setting.num_models] for leaf in plan))  # type: ignore[arg-type]
        flow = run_flow(setting, flow.blocks, first)
    return float(flow.contraction(0)) ** (1 / few)


def _bounds(decay: EnsembleDecay) -> dict[str, np.ndarray]:
    """Computes the bound of FE-2024's Theorem 1 by age, [A + 1], for each reading of its exponent, and a wrong bound.

    An age has K rounds for K models, in which every client trains each model once; the first entry is the start. The
    wrong bound, a negative control, has the kernel's largest eigenvalue in place of the smallest. All are divided by
    the norm of the initial residual. Keys are the labels of the readings (``FORMS``), and ``CONTROL``.
    """
    theorem = decay.theorem
    forms = {label: np.exp(-theorem.exponent(form)) for form, label in FORMS.items()}
    return forms | {CONTROL: np.exp(-theorem.exponent("proof", theorem.constants.lambda_max))}


def _ratios(decay: EnsembleDecay, norms: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Divides the measured norms of the residuals by the bound, at the end of each age, [ages, K].

    An age is a number of rounds in which every client trains each model once.

    Args:
        decay: Results of the seed, which say how many rounds an age has.
        norms: Norm of each model's residual after every round, over the initial one, [rounds + 1, K].
        bound: The bound after each age, with age 0 first, [A + 1].
    """
    at_ages = norms[:: decay.theorem.plan.rounds_per_age][1:]
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(at_ages / bound[1 : len(at_ages) + 1, None])


def _metrics(decay: EnsembleDecay, seed: int) -> list[Metric]:
    """Builds the rows of metrics.csv with the mean residual norm of networks and of flow; only networks send bytes."""
    last = len(decay.networks) - 1
    rows = []
    for name, path, sent in (
        ("networks", decay.networks, decay.uplink),
        ("flow", decay.flow[: last + 1], np.zeros(2, int)),
    ):
        for row in lab.metric_rows(name, seed, range(last + 1), {"relative_residual": path.mean(axis=1)}):
            up, down = (int(b) * row.round // last for b in sent)
            rows.append(row._replace(uplink_bytes=up, downlink_bytes=down))
    return rows


def _conclude(study: Study, results: list[EnsembleDecay]) -> lab.Outcome:
    """Builds tables and figure, and a verdict on the bound of FE-2024's Theorem 1 for each reading of its exponent.

    In an age every client trains each model once. A verdict compares the networks' residuals at the ends of ages, of
    all seeds, with the bound. A broken bound does not fail the experiment.
    """
    rows = [_form_row(results, label) for label in _bounds(results[0])]
    failed = () if all(np.all(np.isfinite(f.networks)) for f in results) else ("networks diverged",)
    _draw(study, results[0])
    theorems, control = [f.theorem for f in results], rows[-1]["networks_worst"]
    wrong = CONTROL.removeprefix("control: "), f"{control:.3g}", bool(control > 1)
    sizes = f"width {study.settings.width}, {study.settings.num_rounds} rounds, {len(results)} seeds"
    verdicts = []
    for row in rows[:-1]:
        right = f"{row['networks_worst']:.3g}", "<= 1", row["networks_worst"] <= 1
        statement = f"residual / {row['bound']}, largest at the ends of ages"
        verdicts.append(ft.types.Verdict.of("FE-2024 Theorem 1", statement, sizes, right, wrong))
    details = lab.theorem_details(theorems) | {"rate_of_an_age": [f.rate for f in results]}
    sheets = (
        _bounds_sheet(study, results, rows),
        lab.assumption_sheet(theorems, "assumptions, measured on the first seed"),
    )
    return lab.Outcome(sheets, rows, (), details, _remarks(results[0]), failed, tuple(verdicts))


def _form_row(results: list[EnsembleDecay], label: str) -> lab.Row:
    bounds = [_bounds(f)[label] for f in results]
    networks = [float(_ratios(f, f.networks, b).max()) for f, b in zip(results, bounds, strict=True)]
    flows = [_ratios(f, f.flow, b).max(axis=1) for f, b in zip(results, bounds, strict=True)]
    broken = [int(np.argmax(r > 1)) + 1 for r in flows if np.any(r > 1)]
    return {
        "bound": label,
        "per_age": float(np.mean([b[1] for b in bounds])),
        "networks_worst": max(networks),
        "networks_hold": sum(r <= 1 for r in networks),
        "flow_worst": float(max(r.max() for r in flows)),
        "flow_hold": len(flows) - len(broken),
        "first_broken_age": min(broken) if broken else None,
        # a bound that falls faster than the slowest mode is broken sooner or later
        "hold_for_ever": sum(f.rate <= b[1] / b[0] for f, b in zip(results, bounds, strict=True)),
        "seeds": len(results),
    }


def _bounds_sheet(study: Study, results: list[EnsembleDecay], rows: list[lab.Row]) -> lab.Sheet:
    exact = dict.fromkeys(rows[0]) | {"bound": "exact: spectral radius", "per_age": np.mean([f.rate for f in results])}
    title = f"Theorem 1 on {study.dataset}: residual / bound at the ends of ages, K = {cases.NUM_MODELS}, the flow for"
    columns = "bound on the residual's norm: {bound} | factor an age: {per_age:.4f} | "
    columns += "networks: worst: {networks_worst:.3g} | flow: worst: {flow_worst:.3g} | "
    columns += "holds: {flow_hold:d} of {seeds} | first broken (age): {first_broken_age:d} | "
    columns += "holds for ever: {hold_for_ever:d} of {seeds}"
    return lab.table(f"{title} {results[0].theorem.plan.num_ages} ages", [*rows, exact], columns)


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
        lab.NOT_OWED,
    )


def _draw(study: Study, decay: EnsembleDecay) -> None:
    """Plots one seed's relative residuals and the bound for each reading of its exponent, in two panels."""
    # The first shows the trained networks with the exact flow beside them, and also the control. The second shows the
    # flow at the ends of all its ages, and the line that decays at its exact rate and meets the largest residual at the
    # last of them.
    length, short = decay.theorem.plan.rounds_per_age, len(decay.networks)
    ends, bounds = np.arange(0, len(decay.flow), length), _bounds(decay)
    rate = decay.flow[ends[-1]].max() * decay.rate ** (np.arange(len(ends)) - (len(ends) - 1))
    near, flow = ends[ends < short], "exact flow, each model"
    forms = {label: bound for label, bound in bounds.items() if label != CONTROL}
    first = BoundedPanel(
        f"networks of width {decay.width}",
        np.arange(short),
        {"trained networks": decay.networks.T},
        {label: bound[: len(near)] for label, bound in forms.items()},
        {CONTROL: bounds[CONTROL][: len(near)]},
        {flow: decay.flow[:short].T},
        near,
    )
    lines = forms | {"exact rate, spectral radius of an age": rate}
    second = BoundedPanel("the flow continued", ends, {}, lines, predicted={flow: decay.flow[ends].T})
    title = f"Theorem 1 on {study.dataset}, K = {length}, per-client permutations"
    path = study.figures.path("decay")
    bounded([first, second], title, ("round", "training residual / initial residual"), None, path)


DEFAULT = EnsembleDecaySettings(width=1024, num_rounds=100, flow_ages=500)
PAPER = EnsembleDecaySettings(width=4096, num_rounds=400, flow_ages=2000)
SCALES = dict.fromkeys(CASES, by_scale(EnsembleDecaySettings(), DEFAULT, PAPER))
ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), exact=True),)
