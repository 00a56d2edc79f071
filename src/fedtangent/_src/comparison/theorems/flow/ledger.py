"""The residual ledger on whole runs: each client's residual is the flow's, to rounding or within a network's bound."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src.comparison.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent._src.comparison.settings import Scale
from fedtangent._src.comparison.statistics import Interval, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.types import Algorithm, Model

THEOREM = "FE-2021 section 9.4 (residual ledger)"
CLIENTS, STEPS, EVALUATIONS = 6, 5, 6
SPLIT = 1  # seed of the partition: the same for all runs, so that they share compiled programs
LARGER = 1.1  # a step size that is wrong by 10 %
LARGER_STEPS = (1.01, 1.02, 1.03, 1.05, 1.07, LARGER, 1.15, 1.2)  # tried in turn until one is noticed
OFF = (1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9)  # relative errors of the step size, tried on a linear model
SLOPE, BAND = -0.5, 0.1  # the gap's slope against the width is at most their sum
SIZES = Scale((256, 1024, 4096), 8, 24), Scale((512, 2048, 8192), 16, 48)  # draws: seeds


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the ledger of a linear model and of networks of several widths."""
    size = of_scale(scale, *SIZES)
    networks = {width: _networks(size, width, seed) for width in size.widths}
    return [_linear_check(size, seed), _bound_check(size, networks), _slope_check(size, networks)]


class Trainer(NamedTuple):
    """A model and its algorithm, the same objects for all seeds, so that their runs share compiled programs."""

    model: Model
    rate: float
    algorithm: Algorithm
    width: int


def _trainer(model: Model, rate: float, width: int) -> Trainer:
    order = ft.schedules.per_client_permutations(CLIENTS, 2)
    algorithm = ft.fed_ensemble(model, order, client_learning_rate=rate, work=ft.Work(steps=STEPS, batch_size=None))
    return Trainer(model, rate, algorithm, width)


def _ledger(trainer: Trainer, x: np.ndarray, y: np.ndarray, size: Scale, seed: int) -> ResidualLedger:
    """Trains K = 2 models and returns the ledger of the run."""
    model, rate, algorithm, width = trainer
    clients = ft.partition.quantity_skew(len(x), CLIENTS, 2.0, SPLIT, min_client_size=2)
    data, rounds = ft.data.federated_data(x, y, clients, dtype=jnp.float64), size.num_rounds
    key = jax.random.fold_in(jax.random.key(seed), width)  # with one key, narrow networks would be parts of wider ones
    ledger = residual_ledger(algorithm, model, data, rounds, ft.theory.Rule(STEPS, rate), seed=seed, start=key)
    look, scan = ft.Evaluation(rounds // EVALUATIONS, ledger), ft.Devices("scan")
    run = ft.simulate(algorithm, data, num_rounds=rounds, seed=seed, start=key, evaluation=look, devices=scan)
    if not ledger.is_of(run.history):
        raise AssertionError("the run's cohorts are not those that the ledger predicted")
    return ledger


def _examples(size: Scale) -> int:
    return 3 * size.num_rounds // 2


def _networks(size: Scale, width: int, seed: int) -> list[ResidualLedger]:
    """Returns ledgers of smooth networks; inputs have equal norms, so the kernel's diagonal is constant."""
    model = ft.models.mlp(5, 1, (width,), "erf", dtype=jnp.float64)
    theta = model.kernel(jnp.ones((1, 5)), None, get="ntk")  # type: ignore[misc]
    trainer, ledgers = _trainer(model, 1 / float(theta[0, 0]), width), []
    for draw in (np.arange(size.draws) + seed * size.draws) % 2**32:  # two values of ``seed`` share no draw
        x = np.random.default_rng(draw).standard_normal((_examples(size), 5))
        x *= np.sqrt(5) / np.linalg.norm(x, axis=1, keepdims=True)
        ledgers.append(_ledger(trainer, x, np.sin(2 * x[:, :1]), size, int(draw)))
    return ledgers


def _later(ledger: ResidualLedger) -> list[LedgerRow]:
    return [row for row in ledger.rows if row.round > 0]


def _share_failed(ledgers: list[ResidualLedger]) -> str:
    rows = [row for ledger in ledgers for row in _later(ledger)]
    return f"{sum(not row.passed for row in rows)} of {len(rows)} rows"


def _wrong_rate(ledger: ResidualLedger, factor: float) -> ResidualLedger:
    return ledger.against(learning_rate=factor * ledger.federation.rule.learning_rate)


def _linear_check(size: Scale, seed: int) -> Verdict:
    x = np.linspace(-1, 1, _examples(size))[:, None]
    model = ft.models.rbf_linear(num_features=60, bandwidth=0.1, seed=seed, dtype=jnp.float64)
    ledger = _ledger(_trainer(model, 0.1, 60), x, np.sin(4 * x), size, seed)
    wrong, rows = _wrong_rate(ledger, 1 + 1e-6), _later(ledger)
    noticed = next((off for off in OFF if not _wrong_rate(ledger, 1 + off).passed), np.inf)
    gap, tolerance = max(row.gap for row in rows), max(row.tolerance for row in rows)
    return Claim(
        THEOREM,
        "linear model: every client's residual at every evaluation is the flow's, to rounding",
        f"{len(rows)} rows: {CLIENTS} clients, 2 models, {EVALUATIONS} of {size.num_rounds} rounds",
    ).judged(
        (f"largest gap {gap:.1e}", f"<= {tolerance:.1e}", ledger.passed),
        ("step size wrong by 1e-6", f"{_share_failed([wrong])} fail", not wrong.passed),
        f"step size {noticed:.0e} off",
    )


def _sizes(size: Scale, networks: dict[int, list[ResidualLedger]]) -> str:
    return f"widths {', '.join(map(str, networks))}, {size.draws} seeds x 2 models, {size.num_rounds} rounds"


def _bound_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    widest = networks[max(networks)]
    wrong = [_wrong_rate(ledger, LARGER) for ledger in widest]
    noticed = next((f for f in LARGER_STEPS if all(not _wrong_rate(of, f).passed for of in widest)), np.inf)
    ledgers = [ledger for same in networks.values() for ledger in same]
    worst = max(row.gap / row.tolerance for ledger in ledgers for row in _later(ledger))
    control, all_fail = f"step size x {LARGER} at width {max(networks)}", not any(ledger.passed for ledger in wrong)
    statement = "networks: gap within the kernel's measured change, propagated, and its second-order share"
    return Claim(THEOREM, statement, _sizes(size, networks)).judged(
        (f"largest gap / tolerance {worst:.2f}", "<= 1", all(ledger.passed for ledger in ledgers)),
        (control, f"{_share_failed(wrong)} fail", all_fail),
        f"step size x {noticed:g}",
    )


def _last_gaps(ledgers: list[ResidualLedger], rounds: int) -> np.ndarray:
    return np.array([np.sqrt(np.mean([r.gap**2 for r in of.rows if r.round == rounds])) for of in ledgers])


def _slope(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Interval:
    return width_slope(list(networks), [_last_gaps(same, size.num_rounds) for same in networks.values()])


def _slope_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    """Checks that the gap falls at least as width^-1/2: an upper bound, which smooth activations may undercut."""
    slope, steep = _slope(size, networks), (-np.inf, SLOPE + BAND)
    for factor in LARGER_STEPS:
        other = _slope(size, {width: [_wrong_rate(of, factor) for of in same] for width, same in networks.items()})
        if other.outside(*steep):
            break
    statement = "networks: gap of the last round against width, O(l^-1/2) at most"
    return Claim(THEOREM, statement, _sizes(size, networks)).judged(
        (f"slope {slope}", f"<= {SLOPE + BAND:g}", slope.within(*steep)),
        (f"step size x {factor:g}", f"slope {other}", other.outside(*steep)),
        f"step size x {factor:g}",
    )


ENTRIES = (
    TheoremEntry(
        "flow.ledger",
        "the residual ledger: simulated minus predicted residuals during training",
        _checks,
        papers=("shi2021",),
        statement="section 9.4 of FE-2021",
        functions=(ft.theory.federated_flow,),
    ),
)
