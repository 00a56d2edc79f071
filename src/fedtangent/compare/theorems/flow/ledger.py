"""The residual ledger on whole runs: every client's residual is the flow's to rounding, or within a network's bound."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.compare.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent.compare.settings import Scale
from fedtangent.compare.statistics import fitted_slope
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.verdicts import Verdict
from fedtangent.data import partition
from fedtangent.engine.run import simulate
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.models.dense import mlp
from fedtangent.models.linear import rbf_linear
from fedtangent.theory import Rule
from fedtangent.types import Model

THEOREM = "FE-2021 section 9.4 (residual ledger)"
CLIENTS, STEPS, EVALUATIONS = 6, 5, 6
SPLIT = 1  # seed of the partition: one for all runs, which so share their compiled programs
LARGER = 1.1  # a step size that is wrong by 10 %
SLOPE, BAND = -0.5, 0.1  # of width, which the gap falls with at least
SIZES = Scale((256, 1024, 4096), 4, 24), Scale((512, 2048, 8192), 8, 48)  # draws: seeds


def checks(scale: str, seed: int) -> list[Verdict]:
    """The ledger of a linear model, of networks, and both beside wrong predictions."""
    size = of_scale(scale, *SIZES)
    networks = {width: [_network(size, width, seed + s) for s in range(size.draws)] for width in size.widths}
    return [_linear_check(size, seed), _bound_check(size, networks), _slope_check(size, networks)]


def _ledger(model: Model, x: np.ndarray, y: np.ndarray, rate: float, size: Scale, seed: int) -> ResidualLedger:
    """A run of K = 2 models and its ledger."""
    clients = partition.quantity_skew(len(x), CLIENTS, 2.0, SPLIT, min_client_size=2)
    held = data.federated_data(x, y, clients, dtype=jnp.float64)
    plan = schedule.per_client_permutations(CLIENTS, 2)
    algorithm = algorithms.fed_ensemble(model, plan, client_learning_rate=rate, work=Work(steps=STEPS))
    ledger = residual_ledger(algorithm, model, held, size.num_rounds, Rule(STEPS, rate), seed=seed)
    run = simulate(algorithm, held, size.num_rounds, seed, "scan", size.num_rounds // EVALUATIONS, evaluate=ledger)
    if not ledger.is_of(run.history):
        raise AssertionError("the run's cohorts are not those that the ledger predicted")
    return ledger


def _examples(size: Scale) -> int:
    return 3 * size.num_rounds // 2


def _network(size: Scale, width: int, seed: int) -> ResidualLedger:
    """A smooth network of one hidden layer on inputs of one norm."""
    x = np.random.default_rng(seed).standard_normal((_examples(size), 5))
    x *= np.sqrt(5) / np.linalg.norm(x, axis=1, keepdims=True)
    model = mlp(5, 1, (width,), "erf", dtype=jnp.float64)
    theta = np.asarray(model.kernel(jnp.asarray(x), None, get="ntk"))  # type: ignore[misc]
    return _ledger(model, x, np.sin(2 * x[:, :1]), 1 / float(np.max(np.diag(theta))), size, seed)


def _later(ledger: ResidualLedger) -> list[LedgerRow]:
    return [row for row in ledger.rows if row.round > 0]


def _worst(ledgers: list[ResidualLedger]) -> float:
    """The largest gap / tolerance."""
    return max(row.gap / row.tolerance for ledger in ledgers for row in _later(ledger))


def _share_failed(ledgers: list[ResidualLedger]) -> str:
    rows = [row for ledger in ledgers for row in _later(ledger)]
    return f"{sum(not row.passed for row in rows)} of {len(rows)} rows"


def _wrong_rate(ledger: ResidualLedger, factor: float) -> ResidualLedger:
    return ledger.against(learning_rate=factor * ledger.federation.rule.learning_rate)


def _linear_check(size: Scale, seed: int) -> Verdict:
    x = np.linspace(-1, 1, _examples(size))[:, None]
    model = rbf_linear(num_features=60, bandwidth=0.1, seed=seed, dtype=jnp.float64)
    ledger = _ledger(model, x, np.sin(4 * x), 0.1, size, seed)
    wrong = _wrong_rate(ledger, 1 + 1e-6)
    rows = _later(ledger)
    return Verdict.of(
        THEOREM,
        "linear model: every client's residual at every evaluation is the flow's, to rounding",
        f"{len(rows)} rows: {CLIENTS} clients, 2 models, {EVALUATIONS} of {size.num_rounds} rounds",
        (
            f"largest gap {max(row.gap for row in rows):.1e}",
            f"<= {max(row.tolerance for row in rows):.1e}",
            ledger.passed,
        ),
        ("step size wrong by 1e-6", f"{_share_failed([wrong])} fail", not wrong.passed),
    )


def _bound_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    widest = networks[max(networks)]
    wrong = [_wrong_rate(ledger, LARGER) for ledger in widest]
    ledgers = [ledger for same in networks.values() for ledger in same]
    return Verdict.of(
        THEOREM,
        "networks: gap within the kernel's measured change, propagated, and its second-order share",
        f"widths {', '.join(map(str, networks))}, {size.draws} seeds x 2 models, {size.num_rounds} rounds",
        (f"largest gap / tolerance {_worst(ledgers):.2f}", "<= 1", all(ledger.passed for ledger in ledgers)),
        (
            f"step size x {LARGER} at width {max(networks)}",
            f"{_share_failed(wrong)} fail",
            all(not ledger.passed for ledger in wrong),
        ),
    )


def _last_gaps(ledgers: list[ResidualLedger], rounds: int) -> np.ndarray:
    return np.array([np.sqrt(np.mean([r.gap**2 for r in of.rows if r.round == rounds])) for of in ledgers])


def _slope_check(size: Scale, networks: dict[int, list[ResidualLedger]]) -> Verdict:
    """O(l^-1/2) is an upper bound: a network with a smooth activation may come nearer faster."""
    widths = np.array(list(networks))
    fit = fitted_slope(widths, [_last_gaps(same, size.num_rounds) for same in networks.values()])
    exchanged = [[ledger.against(models=[1, 0]) for ledger in same] for same in networks.values()]
    other = fitted_slope(widths, [_last_gaps(same, size.num_rounds) for same in exchanged])
    return Verdict.of(
        THEOREM,
        "networks: gap of the last round against width, O(l^-1/2) at most",
        f"widths {', '.join(map(str, networks))}, {size.draws} seeds x 2 models, {size.num_rounds} rounds",
        (f"slope {fit.slope:+.2f} +- {fit.standard_error:.2f}", f"<= {SLOPE + BAND}", bool(fit.slope <= SLOPE + BAND)),
        ("another model's initial function", f"slope {other.slope:+.2f}", bool(other.slope > SLOPE + BAND)),
    )


ENTRIES = (
    TheoremEntry(
        "flow.ledger",
        "the residual ledger: simulated minus predicted residuals during training",
        checks,
        papers=("shi2021",),
        statement="section 9.4 of FE-2021",
    ),
)
