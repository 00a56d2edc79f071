"""Fed-ensemble against FedAvg at equal rounds and bytes, on clients of two classes (FE-2024, table II, non-i.i.d.).

Under each seed both methods have the same data, clients, test examples and batches: every client trains every round,
for FedAvg the one model, for Fed-ensemble one of the K in its own random order. Each takes the learning rate, of one
grid for both, that is best on validation examples, by accuracy and by NLL in turn.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Shaped

from fedtangent._src import data, models
from fedtangent._src.data import partition
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.experiments.lab.league import descent
from fedtangent._src.experiments.lab.results import Claim, MeanInterval, Outcome, Sheet, interval, table
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.experiments.lab.runs import (
    SCORES,
    Bench,
    Config,
    Method,
    Record,
    all_scores,
    build_all,
    choose,
    play,
)
from fedtangent._src.experiments.lab.trials import Trial, draw, trial_of
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.measures.uncertainty import Reliability
from fedtangent._src.optimizers import at_rate, staircase_decay
from fedtangent._src.output.run_plots import curves, reliability_diagram
from fedtangent._src.types import Algorithm, AnyArray, Array, Model

BASELINE, METHOD = "fed_avg", "fed_ensemble"
NAMES = {BASELINE: "FedAvg", METHOD: "Fed-ensemble"}
CRITERIA = ("accuracy", "nll")
LABELS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier"}
PUBLISHED = {"dataset": "mnist, 2 classes a client", "metric": "accuracy", BASELINE: 0.9017, METHOD: 0.9544}
PAPER = (
    f"published, FE-2024 table II, MNIST of 100 clients with 2 classes each, a CNN: accuracy {PUBLISHED[BASELINE]} "
    f"for FedAvg, {PUBLISHED[METHOD]} for Fed-ensemble; the papers give no NLL, ECE or Brier score"
)
ENDS = ("difference", "low_95", "high_95")  # of a paired difference, in a row
HIGHER_IS_BETTER = ("accuracy",)
DECISIVE = ("num_models", "local_epochs", "batch_size", "model", "width", "decay", "weight_decay")

Found = dict[Config, list[Record]]  # a record for each seed


@dataclass(frozen=True)
class VersusSettings:
    """Everything that both methods share."""

    num_clients: int = 50
    classes_per_client: int = 2
    num_models: int = within(5, least=2)
    num_rounds: int = 60
    evaluate_every: int = 10
    local_epochs: int = 5
    batch_size: int = 16
    model: str = within("mlp", of=("mlp", "cnn"))
    width: int = 64
    learning_rates: tuple[float, ...] = within((0.1, 0.3, 0.6, 1.0), above=0)
    decay: float = within(0.99, above=0, at_most=1)
    weight_decay: float = within(0.0, at_least=0)
    num_train: int = within(0, least=0)  # 0: all
    num_validation: int = 288
    num_test: int = within(0, least=0)


DIGITS = VersusSettings()
IMAGES = VersusSettings(
    num_rounds=50, batch_size=20, learning_rates=(0.03, 0.1, 0.3), num_train=2000, num_validation=1000, num_test=2000
)
# The paper's MNIST: 100 clients, 10 epochs of batch 16, weight decay .001, .99 every ten rounds, 55,000 examples.
TABLE_II = VersusSettings(
    num_clients=100, num_rounds=100, local_epochs=10, model="cnn", weight_decay=0.001, num_validation=5000,
    learning_rates=(0.001, 0.003, 0.01, 0.03, 0.1),
)  # fmt: skip
SCALES = {
    "digits": by_scale(DIGITS, replace(DIGITS, num_rounds=120), replace(DIGITS, num_rounds=400, local_epochs=10)),
    **dict.fromkeys(("fashion_mnist", "mnist"), by_scale(IMAGES, paper=TABLE_II)),
}


def divide(study: Study, seed: int) -> Trial:
    """Divides the data of one seed among clients with exactly ``classes_per_client`` classes each."""
    s, loaded = study.settings, data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    drawn = draw(loaded, seed, s.num_train, s.num_validation, s.num_test)
    clients = partition.classes(drawn.y["train"], s.num_clients, s.classes_per_client, seed)
    return trial_of(drawn, clients, seed, loaded.num_classes)


def methods(s: VersusSettings, trial: Trial) -> dict[str, Method]:
    """Returns both methods on one seed's data."""
    make = partial(descent, "sgd", s.weight_decay) if s.weight_decay else None
    return both_methods(s, trial, network(s, trial.data.x, trial.num_classes), make, loss="cross_entropy")


def both_methods(s: Any, trial: Trial, model: Model, make: Any = None, **given: Any) -> dict[str, Method]:
    """Returns FedAvg and Fed-ensemble with all clients in every round.

    Args:
        s: Settings with ``num_models``, ``learning_rates``, ``decay`` (every ten rounds), ``local_epochs`` and
            ``batch_size``.
        trial: Data of one seed.
        model: The network.
        make: Function from a rate to the clients' optimiser; None for gradient descent.
        **given: Further arguments of both recipes.
    """
    num_clients = trial.data.num_clients
    plans = {
        BASELINE: schedule.all_clients(num_clients),
        METHOD: schedule.per_client_permutations(num_clients, s.num_models),
    }

    def build(name: str, steps: Any, rate: float | Array) -> Algorithm:
        decayed = staircase_decay(rate, s.decay, 10)
        descent = {"client_learning_rate": decayed} if make is None else {"client_optimizer": at_rate(make, decayed)}
        work = Work(epochs=s.local_epochs, batch_size=s.batch_size)
        algorithm: Algorithm = getattr(algorithms, name)(model, plans[name], work=work, **descent, **given)
        return algorithm

    return {
        name: Method(NAMES[name], s.learning_rates, (0,), partial(build, name), trial.data, trial.splits)
        for name in plans
    }


def network(s: Any, x: Shaped[AnyArray, "n ..."], outputs: int) -> Model:
    """Builds the network that ``s.model`` names, for the square images [n, pixels] of ``x``."""
    size = math.prod(x.shape[1:])
    if s.model == "mlp":
        return models.build("mlp", size, outputs, widths=(s.width,), parameterization="standard")
    return models.build("cnn", (math.isqrt(size), math.isqrt(size), 1), outputs)


def check(study: Study) -> None:
    """Builds both methods on the first seed's data, with every rate; raises ``ValueError``."""
    build_all(methods(study.settings, divide(study, study.seeds[0])))


def run(study: Study) -> Outcome:
    """Trains with both methods and every rate on every seed, then chooses the rates and compares."""
    s, found = study.settings, Found()
    largest = max(max_client_size(divide(study, seed).data) for seed in study.seeds)
    bench = Bench(
        study, partial(divide, study), partial(methods, s), {name: getattr(s, name) for name in DECISIVE}, all_scores,
        s.evaluate_every, largest,
    )  # fmt: skip
    for seed in study.each_seed():
        for config in itertools.starmap(Config, itertools.product(NAMES, s.learning_rates)):
            found.setdefault(config, []).append(play(bench, config, seed, s.num_rounds))
    return conclude(study, bench.methods(study.seeds[0]), found)


def last(records: list[Record], metric: str) -> np.ndarray:
    """Returns a metric in the last round, [seeds]."""
    return np.array([record.metrics[metric][-1] for record in records])


def conclude(study: Study, of: dict[str, Method], found: Found) -> Outcome:
    """Chooses each method's rate by each criterion, compares in pairs, and checks that both sent the same bytes."""
    chosen, edges, failed = dict[str, dict[str, Config]](), list[str](), list[str]()
    for c, name in itertools.product(CRITERIA, NAMES):
        sign = 1 if c in HIGHER_IS_BETTER else -1
        scores = {k: sign * float(last(r, f"validation.{c}").mean()) for k, r in found.items() if k.method == name}
        tuned = choose(of[name], scores)
        chosen.setdefault(c, {})[name] = tuned.config
        if tuned.at_edge:
            rate = f"{NAMES[name]}'s rate {tuned.config.rate:g}"
            edges.append(f"{rate}, the best by validation {LABELS[c]}, is at the edge of the grid")
        if not np.all(np.isfinite(last(found[tuned.config], "validation.nll"))):
            failed.append(f"{NAMES[name]}: no learning rate of the grid gives finite numbers")
    rows = [_pair(found, chosen[c], c, metric) for c in CRITERIA for metric in SCORES]
    sent = {name: np.array([r.sent[-1] for r in found[chosen["accuracy"][name]]]) for name in NAMES}
    same = bool(np.array_equal(sent[BASELINE], sent[METHOD]))
    failed += [] if same else ["the two methods did not send the same bytes"]
    _draw(study, found, chosen["accuracy"])
    agreed = chosen["accuracy"] == chosen["nll"]  # one table says it all
    shown = {"accuracy": "accuracy and NLL"} if agreed else LABELS
    sheets = [_comparison(study, chosen[c], rows, c, shown[c]) for c in CRITERIA if c in shown]
    traffic = [{"method": NAMES[m], "sent": v[0]} for m, v in sent.items()]
    ways = {"method": "{method}", "uplink": "{sent[0]:,}", "downlink": "{sent[1]:,}"}
    grid = [
        {"method": config.method, "learning_rate": config.rate,
         **{m: float(last(records, m).mean()) for m in records[0].metrics if not m.startswith("bins.")}}
        for config, records in found.items()
    ]  # fmt: skip
    d = MeanInterval(*(rows[0][k] for k in ENDS))
    claim = Claim("Fed-ensemble is more accurate than FedAvg", f"{d:+.4f}", d.above())  # Table II
    details = {"published": PUBLISHED, "bytes_equal": same, "grid": grid,
               "bytes": {m: {"uplink": v[:, 0], "downlink": v[:, 1]} for m, v in sent.items()}}  # fmt: skip
    return Outcome(
        (*sheets, table("bytes of one run", traffic, ways)),
        rows,
        (claim,),
        details,
        (PAPER, *edges),
        tuple(dict.fromkeys(failed)),
    )


def _pair(found: Found, of: dict[str, Config], criterion: str, metric: str) -> dict[str, Any]:
    """Builds a row of result.json: a test metric of both methods, and their paired difference with 95 % interval."""
    values = {name: last(found[of[name]], f"test.{metric}") for name in NAMES}
    d = interval(values[METHOD].astype(np.float64) - values[BASELINE].astype(np.float64))
    verdict = "undecided"
    if d.low > 0 or d.high < 0:
        verdict = "better" if (d.mean > 0) == (metric in HIGHER_IS_BETTER) else "worse"
    return {
        "rates_chosen_by": f"validation {criterion}",
        **{f"learning_rate_{name}": config.rate for name, config in of.items()},
        "metric": metric,
        **{name: float(v.mean()) for name, v in values.items()},
        **d.row(),
        "seeds": len(values[METHOD]),
        "verdict": verdict,
    }


def _comparison(study: Study, of: dict[str, Config], rows: list[dict[str, Any]], criterion: str, by: str) -> Sheet:
    s, rates = study.settings, ", ".join(f"{NAMES[m]} {c.rate:g}" for m, c in of.items())
    title = (
        f"Fed-ensemble (K = {s.num_models}) against FedAvg on {study.dataset}: test examples, round {s.num_rounds}, "
        f"{len(study.seeds)} paired seeds; rates by validation {by}: {rates}"
    )
    shown = [{**r, "name": LABELS[r["metric"]], "d": MeanInterval(*(r[k] for k in ENDS))}
             for r in rows if r["rates_chosen_by"] == f"validation {criterion}"]  # fmt: skip
    columns = {"metric": "{name}", "FedAvg": "{fed_avg:.4f}", "Fed-ensemble": "{fed_ensemble:.4f}",
               "difference, 95 % interval": "{d:+.4f}", "Fed-ensemble is": "{verdict}"}  # fmt: skip
    return table(title, shown, columns)


def _draw(study: Study, found: Found, of: dict[str, Config]) -> None:
    s, records = study.settings, {NAMES[name]: found[config] for name, config in of.items()}
    panels = {
        LABELS[m]: {name: np.stack([r.metrics[f"test.{m}"] for r in runs]) for name, runs in records.items()}
        for m in SCORES
    }
    rounds = [int(r) for r in next(iter(records.values()))[0].rounds]
    title = f"{study.dataset}, {s.num_clients} clients of {s.classes_per_client} classes, {len(study.seeds)} seeds"
    curves(panels, rounds, f"{title}: test examples", study.figures.path("by_round"), late=True)
    parts, bins = Reliability._fields, {}
    for name, runs in records.items():
        bins[name] = [Reliability(*(r.metrics[f"bins.{part}"][-1] for part in parts)) for r in runs]
    reliability_diagram(bins, title, study.figures.path("reliability"))


ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, least_seeds=2),)
