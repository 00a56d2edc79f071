"""Theorem 1's bounds beside the measured decay: on a run that meets its assumptions, and on sine and digits."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedtangent.compare import cases
from fedtangent.compare.settings import Setting
from fedtangent.compare.simulated import cohorts, fed_ensemble
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.theorems.fed_ensemble import limit
from fedtangent.compare.theorems.fed_ensemble.second_order import random_federation
from fedtangent.compare.verdicts import Verdict, bounded_verdict
from fedtangent.kernels.gram import KernelBlocks
from fedtangent.theory.fed_ensemble.convergence import (
    Networks,
    Theorem1,
    kappa_2,
    largest_progress,
    theorem_1,
    weight_movement,
)
from fedtangent.theory.flow import Flow, Rule, federated_flow
from fedtangent.types import Cohort, Partition

STEPS = 10  # local steps of the run that meets the assumptions
MOVING_AGES = 200
SMALL, LARGE = 0.02, 0.5  # steps, as fractions of the largest stable one


def equal_rounds(seed: int, num_models: int, num_ages: int, fraction: float) -> tuple[Flow, Theorem1]:
    """A run with the same number of examples in every round: equal clients take turns at the models in a cycle.

    Two clients of four points a model, random features; the step is a fraction of the largest stable one.
    """
    rng = np.random.default_rng(seed)
    clients, own = 2 * num_models, 4
    n, rounds = clients * own, num_models * num_ages
    features = rng.standard_normal((n + 1, 3 * n)) / np.sqrt(3 * n)
    theta = features @ features.T
    blocks = KernelBlocks(theta[:n, :n], theta[n:, :n])
    y = rng.standard_normal((n, 2))
    partition = Partition(rng.permutation(n).astype(np.int32), np.arange(0, n + 1, own, dtype=np.int32))
    client = np.broadcast_to(np.arange(clients), (rounds, clients))
    plan = Cohort(client, (client + np.arange(rounds)[:, None]) % num_models, np.full(client.shape, float(own)))  # type: ignore[arg-type]
    largest = max(
        np.linalg.eigvalsh(theta[np.ix_(rows, rows)])[-1] / own
        for rows in (np.asarray(partition.client(i)) for i in range(clients))
    )
    arguments = (blocks, y, partition, plan, Rule(STEPS, float(fraction * 2 / largest)))
    return federated_flow(*arguments, num_models=num_models), theorem_1(*arguments, num_models=num_models)


def residual_norms(flow: Flow, rounds: list[int]) -> np.ndarray:
    """Norm of the mean residual of each model after each of ``rounds``, [E, K]."""
    return np.linalg.norm(np.asarray(flow.residual(rounds)), axis=(2, 3))


def worst(norms: np.ndarray, bound: np.ndarray) -> float:
    """The largest ratio of what is measured to its bound after the start."""
    return float(np.max(norms[1:] / bound[1:]))


def checks(scale: str, seed: int) -> list[Verdict]:
    """Every statement on the decay of the residual and the movement of the weights."""
    ages = of_scale(scale, 200, 2000)
    return [*_where_it_applies(seed, ages), _growth(seed, scale), _movement(seed), *_networks(scale, seed)]


def _where_it_applies(seed: int, ages: int) -> list[Verdict]:
    (five, theorem), (ten, of_ten) = equal_rounds(seed, 5, ages, SMALL), equal_rounds(seed, 10, ages, SMALL)
    norms, many = (residual_norms(flow, list(range(0, k * ages + 1, k))) for flow, k in ((five, 5), (ten, 10)))
    where = [f"n = {8 * k}, {2 * k} clients, K = {k}, exact flow of {ages} ages" for k in (5, 10)]
    printed = worst(norms, theorem.residual_bound("equation_18"))
    informal = worst(many, of_ten.residual_bound("informal"))
    what = "residual / bound e^(-u t / 3) R_0, largest over ages t and models; u = eta_0 tau lambda_min / nbar"
    return [
        bounded_verdict("FE-2021 Theorem 9.1, as proved", what, where[0], worst(norms, theorem.residual_bound()),
                        "eq. (18) as printed, e^(-K u t / 3)", printed),
        bounded_verdict("FE-2024 Theorem 1 (4.1)", what, where[1], worst(many, of_ten.residual_bound()),
                        "4.1 as stated, t = rounds x local steps: e^(-K u t / 6)", informal),
        _rate(five, theorem, where[0], ages),
        _too_large(seed, ages),
    ]  # fmt: skip


def _rate(flow: Flow, theorem: Theorem1, where: str, ages: int) -> Verdict:
    """The decay of a late age, from the residuals themselves."""
    last = flow.num_rounds
    ends = residual_norms(flow, [last - 5 * (ages // 4), last])
    unit = float(theorem.exponent("first_order")[1])
    found = float(np.min(np.log(ends[0] / ends[1]))) / (ages // 4) / unit
    return Verdict.of(
        "FE-2021 eq. (27)",
        "decay of the residual's logarithm in a late age, slowest model, in units of u",
        where,
        (f"{found:.3f}", ">= 1/3 (first order: 1)", found >= 1 / 3),
        ("K / 3 = 1.667 of eq. (18) is more", f"{found:.3f}", found < 5 / 3),
    )


def _too_large(seed: int, ages: int) -> Verdict:
    """With half of the largest stable step and ten local steps the bound fails; the report has to say why."""
    flow, theorem = equal_rounds(seed, 5, ages, LARGE)
    ratio = worst(residual_norms(flow, list(range(0, 5 * ages + 1, 5))), theorem.residual_bound())
    others = [name for name in theorem.failing if name not in ("kappa_2_below_1", "kappa_3_small")]
    return Verdict.of(
        "FE-2021 Theorem 9.1",
        f"a step of {LARGE:g} of the largest stable one, {STEPS} local steps: the bound fails, and the report says why",
        f"n = 40, 10 clients, K = 5, exact flow of {ages} ages",
        (
            f"residual / bound {ratio:.3g}; fails: {', '.join(theorem.failing)}",
            "> 1 only where an assumption fails",
            ratio <= 1 or bool(theorem.failing),
        ),
        ("without the assumptions on the step, failing", f"{others or 'none'}", ratio > 1 and not others),
    )


def _growth(seed: int, scale: str) -> Verdict:
    """Eq. (20): inside an age the residual grows by at most 1 + kappa_2, at the largest step the theorem allows."""
    case = random_federation(scale, seed)
    case = case._replace(steps=np.full(len(case.rows), 4))
    c2 = float(sum(np.sqrt(np.trace(case.theta[np.ix_(r, r)])) for r in case.rows))
    progress = 0.999 * largest_progress(0.0, c2, 1.0, 1.0)
    growth = max(
        float(np.linalg.norm(case._replace(model=case.model[:r]).true_age(progress / 4, "gradient_flow"), 2))
        for r in range(1, len(case.model) + 1)
    )
    allowed = 1 + kappa_2(progress, 0.0, c2, 1.0, 1.0)
    return Verdict.of(
        "FE-2021 eq. (20), (26)",
        "growth of the residual inside an age, worst direction, where kappa_2 < 1",
        f"n = {len(case.theta)}, {len(case.rows)} clients, K = 3, eta_0 tau = {progress:.2e}",
        (f"{growth:.9f}", f"<= 1 + kappa_2 = {allowed:.4f}", growth <= allowed < 2),
        ("no growth at all", f"{growth - 1:.1e} above 1", growth > 1 + 1e-12),
    )


def _movement(seed: int) -> Verdict:
    (flow, theorem), last = equal_rounds(seed, 5, MOVING_AGES, fraction=0.005), 5 * MOVING_AGES
    inside = residual_norms(flow, list(range(last + 1)))
    growth = float(max((inside[a : a + 5] / inside[a]).max() for a in range(0, last, 5)))
    ages, theta = np.array([0, 1, 2, 5, 10, 20, 50, 100, MOVING_AGES]), np.asarray(flow.kernels.ntk_train)
    moved = np.array([[weight_movement(theta, flow.operator(5 * int(a), 0), -flow.y_train)] for a in ages])
    bound, printed = (theorem.movement_bound(form, growth)[ages, :1] for form in ("summed", "equation_18"))
    ratio, wrong = worst(moved, bound), worst(moved, np.broadcast_to(bound[1], bound.shape))
    found = bounded_verdict(
        "FE-2021 Theorem 9.1, eq. (18) second line",
        "movement of the weights / bound, largest over ages; growth inside an age measured",
        f"n = 40, 10 clients, K = 5, exact flow of {MOVING_AGES} ages",
        ratio,
        "the bound of the first age for all",
        wrong,
    )
    said = f"{ratio:.3g} (as printed, with 3 eta_0 nbar for 3: {worst(moved, printed):.3g})"
    return found._replace(measured=said)


def _networks(scale: str, seed: int) -> list[Verdict]:
    width, rounds = of_scale(scale, (256, 30), (1024, 100))
    rows = []
    for make in (cases.digits, cases.sine_network):
        setting = make(None, "smoke", seed)
        setting = dataclasses.replace(setting, widths=(width,), draws=1, num_rounds=rounds, evaluate_every=5)
        rows.append(_one_network(setting, width))
    # The runs that Theorem 2 is checked on. Sine networks of width 256 are not among them: late in the run they break
    # the bound (1.8 times at seed 0), where kappa_2 and (iv) fail, so that nothing was promised.
    runs = [(limit.digits, 256), (limit.sine, 1024), *of_scale(scale, [], [(limit.digits, 1024)])]
    for make_setting, large in runs:
        setting = make_setting(seed, limit.NUM_MODELS, (large,), 1000)
        rows.append(_one_network(dataclasses.replace(setting, evaluate_every=limit.NUM_MODELS), large))
    return rows


def _one_network(setting: Setting, width: int) -> Verdict:
    seen = fed_ensemble(setting, width)
    theorem = theorem_1(
        setting.blocks(),
        setting.y_train,
        setting.partition,
        cohorts(setting),
        Rule(setting.local_steps, setting.learning_rate),
        num_models=setting.schedule.num_models,
        networks=Networks(seen.train[0, :, 0], setting.x_train),
    )
    length = theorem.plan.rounds_per_age
    norms = np.linalg.norm(seen.train[:, :, 0] - setting.y_train, axis=(2, 3))  # at every age
    ratio = worst(norms, theorem.residual_bound()[: len(norms)])
    wrong = worst(norms, theorem.residual_bound("proof", theorem.constants.lambda_max)[: len(norms)])
    found = bounded_verdict(
        "FE-2024 Theorem 1",
        f"{setting.name}: trained networks' residual / bound, largest over ages and models; assumptions that fail: "
        f"{', '.join(theorem.failing)}",
        f"n = {len(setting.x_train)}, {setting.partition.num_clients} clients, K = {length}, width {width}, "
        f"{setting.num_rounds} rounds",
        ratio,
        "lambda_max for lambda_min",
        wrong,
    )
    return found._replace(measured=f"{ratio:.3g} (lambda_min {theorem.constants.lambda_min:.2g})")


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.convergence",
        "bounds on the residual and on the movement of the weights, beside the measured decay",
        checks,
        papers=("shi2024", "shi2021"),
        statement="Theorem 1 of FE-2024 (4.1 and 9.1, eq. 18, 20, 26 and 27 of FE-2021)",
    ),
)
