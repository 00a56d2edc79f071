"""What is known where there are no data: sine functions with a gap, FedAvg against Fed-ensemble (FE-2024, section V-B
and Fig. 2).

Clients hold data on [-1, -0.5] and [0.5, 1]. FedAvg's band is constant, from its residuals on the training data;
Fed-ensemble's is the variance of its models, as in the paper, and with the residuals' added. Beside them stand the
exact bands of an infinite ensemble after the same rounds, and of the process of Theorem 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent.compare.settings import exact_arithmetic
from fedtangent.compare.statistics import relative_distance
from fedtangent.compare.verdicts import EXACT
from fedtangent.experiments.lab import bands, sine, trials
from fedtangent.experiments.lab.bands import Band, Summary
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.federated import schedule
from fedtangent.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent.output.files import Metric
from fedtangent.theory import gp_limit
from fedtangent.types import Algorithm, Model

AVERAGE, ENSEMBLE, WITH_NOISE, FLOW, LIMIT = "fed_avg", "fed_ensemble", "fed_ensemble+residual", "flow", "limit"
COLUMNS = tuple(f"{score}.{where}" for score in bands.SCORES for where in bands.REGIONS)


@dataclass(frozen=True)
class Settings:
    """Fifty clients of two points, as in the paper; how long it trains, the paper does not say."""

    num_clients: int = 50
    points_per_client: int = 2
    spacing: float = 0.0
    num_models: int = 5
    model: str = "linear"
    width: int = 512
    local_steps: int = 10
    num_rounds: int = 200


SETTINGS = {"smoke": Settings(), "paper": Settings(num_rounds=5000)}


class Case(NamedTuple):
    """Everything of one seed."""

    seed: int
    held: sine.SineData
    found: dict[str, Band]  # by method
    scores: dict[str, dict[str, float]]
    distance: float  # of Fed-ensemble's models from the flow's prediction of each, relative
    trouble: str  # with the limit; "" if there is none


def prepare(request: Request) -> Prepared:
    """Check the request and build every seed's data; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    seeds, s = trials.several(request.seeds), changed(SETTINGS[request.scale], request.changes)
    trials.check_numbers(s, ("num_clients", "points_per_client", "width", "local_steps", "num_rounds"))
    trials.check_numbers(s, ("num_models",), least=2)
    if s.model not in ("linear", "network"):
        raise ValueError(f"model: got {s.model!r}, allowed are linear, network")
    for seed in seeds:
        load(s, seed)

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        with exact_arithmetic():
            return _run(s, name, seeds, say, keep, figures)

    return Prepared(s, name, run)


def load(s: Settings, seed: int) -> sine.SineData:
    """The data of one seed."""
    return sine.load(seed, s.num_clients, s.points_per_client, gap=True, spacing=s.spacing)


def _run(
    s: Settings,
    dataset: str,
    seeds: tuple[int, ...],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Metric]], None],
    figures: Path,
) -> Outcome:
    model = sine.linear_model() if s.model == "linear" else sine.network(s.width)
    first = load(s, seeds[0])
    plans = schedule.all_clients(s.num_clients), schedule.per_client_permutations(s.num_clients, s.num_models)
    single, ensemble = (sine.algorithm(model, first, plan, s.local_steps) for plan in plans)
    cases = []
    for seed in seeds:
        start = time.perf_counter()
        cases.append(_case(s, model, single, ensemble, seed))
        keep(_metrics(s, cases[-1]))
        say(f"seed {seed}: {time.perf_counter() - start:.0f} s")
    found = summaries(cases)
    failed = () if s.model != "linear" else _inexact(cases)
    claims = judge(found)
    _draw(s, cases[0], figures)
    rows = [
        {"method": method, "score": score, "mean": v.mean, "low_95": v.low, "high_95": v.high}
        for method, of in found.items() for score, v in of.items()
    ]  # fmt: skip
    details = {"settings": s, "dataset": dataset, "claims": [{"claim": c, "holds": ok} for c, _, ok in claims]}
    return Outcome((_sheet(s, found, len(seeds)), _claims(claims)), rows, details, _remarks(s, cases, claims), failed)


def _case(s: Settings, model: Model, single: Algorithm, ensemble: Algorithm, seed: int) -> Case:
    held = load(s, seed)
    one = sine.train(held, single, s.num_rounds, seed)
    several = sine.train(held, ensemble, s.num_rounds, seed)
    flow, blocks = sine.flow(held, model, ensemble.schedule, s.local_steps, s.num_rounds, seed)
    means, covariances = np.asarray(flow.mean(s.num_rounds)), np.asarray(flow.cov(s.num_rounds))
    limit, trouble = _limit(blocks, held)
    found = {
        AVERAGE: bands.of_members(one.test, _residual(one, held)),
        ENSEMBLE: bands.of_members(several.test),
        WITH_NOISE: bands.of_members(several.test, _residual(several, held)),
        FLOW: bands.of_processes(means, covariances),
        **({} if limit is None else {LIMIT: limit}),
    }
    predicted = np.asarray(flow.predict(several.start_train, several.start, s.num_rounds))
    scores = {method: bands.scores(band, held.x_test, held.y_test) for method, band in found.items()}
    return Case(seed, held, found, scores, relative_distance(predicted, several.test), trouble)


def _residual(trained: sine.Trained, held: sine.SineData) -> float:
    """Mean squared residual of the (mean) prediction on the training data: the paper's residual fitting error."""
    return float(np.mean((trained.train.mean(axis=0) - held.y) ** 2))


def _limit(blocks: KernelBlocks, held: sine.SineData) -> tuple[Band | None, str]:
    try:
        limit = gp_limit(blocks, held.y)
    except SingularKernelError as error:
        return None, str(error)
    largest = float(np.max(np.abs(limit.mean)))
    trouble = (
        f"Theta is singular in float64, inverted with a jitter of {limit.jitter:.1e}; the mean reaches {largest:.2g}"
    )
    return bands.of_limit(limit), trouble if limit.jitter > 0 else ""


def summaries(cases: Sequence[Case]) -> dict[str, dict[str, Summary]]:
    """Each method's scores over seeds; a limit that some seed has not is left out."""
    methods = [m for m in cases[0].scores if all(m in case.scores for case in cases)]
    return {
        m: {name: bands.summary(name, [case.scores[m][name] for case in cases]) for name in (*COLUMNS, "ratio")}
        for m in methods
    }


def judge(found: dict[str, dict[str, Summary]]) -> list[tuple[str, str, bool]]:
    """The paper's claim in parts: what is claimed, the number, whether it holds beyond its 95 % interval."""
    ratio, own = found[ENSEMBLE]["ratio"], found[ENSEMBLE]["coverage.gap"]
    single, residual = found[AVERAGE]["coverage.gap"], found[AVERAGE]["ratio"]
    return [
        ("Fed-ensemble's band is wider in the gap than on the data",
         f"width ratio {ratio.mean:.1f} in [{ratio.low:.1f}, {ratio.high:.1f}], FedAvg's {residual.mean:.1f}",
         bool(ratio.low > 1)),
        ("Fed-ensemble's band covers the true function in the gap",
         f"coverage {own.mean:.0%} in [{own.low:.0%}, {own.high:.0%}], nominal 95 %", bool(own.high >= 0.95)),
        ("FedAvg's band is overconfident in the gap",
         f"coverage {single.mean:.0%} in [{single.low:.0%}, {single.high:.0%}], nominal 95 %",
         bool(single.high < 0.95)),
    ]  # fmt: skip


def _inexact(cases: Sequence[Case]) -> tuple[str, ...]:
    """The linear model's simulation must be the flow's prediction."""
    worst = max(case.distance for case in cases)
    return (
        () if worst <= EXACT else (f"the linear models are {worst:.1e} from the exact flow, at most {EXACT:g} allowed",)
    )


def _metrics(s: Settings, case: Case) -> list[Metric]:
    return [
        Metric(s.num_rounds, method, case.seed, "test", name, value, 0, 0)
        for method, scores in case.scores.items() for name, value in scores.items()
    ]  # fmt: skip


def labels(s: Settings) -> dict[str, str]:
    """Names of the methods in tables and figures."""
    return {
        AVERAGE: "FedAvg, residual variance",
        ENSEMBLE: f"Fed-ensemble (K = {s.num_models}), variance of models",
        WITH_NOISE: "Fed-ensemble, models + residual",
        FLOW: f"exact process, round {s.num_rounds}",
        LIMIT: "process of Theorem 2 (limit)",
    }


def _sheet(s: Settings, found: dict[str, dict[str, Summary]], num_seeds: int) -> Sheet:
    rows = tuple(
        (labels(s)[method], *(_cell(name, of[name]) for name in (*COLUMNS, "ratio"))) for method, of in found.items()
    )
    columns = (
        "band",
        "covers truth: data",
        "gap",
        "mean width: data",
        "gap",
        "NLL: data",
        "gap",
        "width gap / data (geometric)",
    )
    title = f"95 % bands where there are data and in the gap: means over {num_seeds} seeds with 95 % intervals"
    return Sheet(title, columns, rows)


def _cell(name: str, v: Summary) -> str:
    if name.startswith("coverage"):
        return f"{v.mean:.0%} [{v.low:.0%}, {v.high:.0%}]"
    if not np.isfinite(v.low) or max(abs(v.mean), abs(v.high)) >= 1e4:
        return f"{v.mean:.1e}"
    digits = 2 if abs(v.mean) < 100 else 0
    return f"{v.mean:.{digits}f} [{v.low:.{digits}f}, {v.high:.{digits}f}]"


def _claims(claims: Sequence[tuple[str, str, bool]]) -> Sheet:
    rows = tuple((claim, number, "holds" if ok else "DOES NOT HOLD") for claim, number, ok in claims)
    return Sheet("FE-2024, section V-B: Fed-ensemble knows what it does not know", ("claim", "measured", ""), rows)


def _remarks(s: Settings, cases: Sequence[Case], claims: Sequence[tuple[str, str, bool]]) -> tuple[str, ...]:
    lines = [
        f"settings: {', '.join(f'{name} {value}' for name, value in vars(s).items())}",
        "NLL: expectation over an observation of a new client, in nats; bands without the residual's variance are of "
        "the function, not of observations. Coverage intervals count a seed as one point (Wilson)",
        f"Fed-ensemble's models are within {max(c.distance for c in cases):.1e} of the flow's prediction of each",
    ]
    trouble = [case for case in cases if case.trouble]
    if trouble:
        lines.append(
            f"Theorem 2 assumes Theta to have full rank; in {len(trouble)} of {len(cases)} seeds it has not (seed "
            f"{trouble[0].seed}: {trouble[0].trouble}). Choose clients by --set num_clients=8 spacing=0.03 to see it"
        )
    return tuple(lines)


def _draw(s: Settings, case: Case, figures: Path) -> None:
    from fedtangent.output.plots import METHODS, NEUTRAL, PREDICTED
    from fedtangent.output.uncertainty_plots import BandPanel, bands_side_by_side

    colours = {AVERAGE: METHODS[3], ENSEMBLE: METHODS[0], WITH_NOISE: METHODS[2], FLOW: PREDICTED, LIMIT: NEUTRAL}
    titles = labels(s) | ({LIMIT: f"{labels(s)[LIMIT]}: singular"} if case.trouble else {})
    panels = [
        BandPanel(titles[m], b.mean, b.sd, b.members if len(b.members) > 1 else b.members[:0], colours[m])
        for m, b in case.found.items()
    ]
    held, exact = case.held, case.found[FLOW]
    height = 1.05 * float(np.max(np.abs(exact.mean) + bands.NORMAL_95 * exact.sd))
    regions = ((-1.0, -bands.EDGE), (bands.EDGE, 1.0))
    title = f"Sine functions with a gap, {s.num_clients} clients, {s.model} model, {s.num_rounds} rounds"
    bands_side_by_side(panels, held.x[:, 0], held.y[:, 0], held.x_test[:, 0], held.y_test[:, 0], regions, height, title,
                       figures / "uncertainty.png")  # fmt: skip


EXPERIMENT = Experiment(
    "what is known where there are no data (FE-2024, Fig. 2): bands of FedAvg, Fed-ensemble and the exact processes",
    ("sine",),
    prepare,
)
