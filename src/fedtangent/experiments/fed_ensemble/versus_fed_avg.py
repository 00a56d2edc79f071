"""Fed-ensemble against FedAvg at equal rounds and bytes, on clients of two classes (FE-2024, table II, non-i.i.d.).

Under each seed both methods have the same data, clients, test examples and batches: every client trains every round,
for FedAvg the one model, for Fed-ensemble one of the K in its own random order. Each takes the learning rate, of one
grid for both, that is best on validation examples, by accuracy and by NLL in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax

from fedtangent import models
from fedtangent.data.federated import max_client_size
from fedtangent.engine.history import check_rounds
from fedtangent.engine.sweeps import Sweep, single_device_engine
from fedtangent.experiments.lab import choice, trials
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.federated.rates import sgd, staircase_decay
from fedtangent.output.files import Metric, check_data_dir
from fedtangent.types import Algorithm, Array, Model

BASELINE, METHOD = "fed_avg", "fed_ensemble"
NAMES = {BASELINE: "FedAvg", METHOD: "Fed-ensemble"}
CRITERIA = ("accuracy", "nll")
LABELS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier"}
PUBLISHED = {"dataset": "mnist, 2 classes a client", "metric": "accuracy", BASELINE: 0.9017, METHOD: 0.9544}


@dataclass(frozen=True)
class Settings:
    """Everything that both methods share."""

    num_clients: int = 50
    classes_per_client: int = 2
    num_models: int = 5
    num_rounds: int = 60
    evaluate_every: int = 10
    local_epochs: int = 5
    batch_size: int = 16
    model: str = "mlp"
    width: int = 64
    learning_rates: tuple[float, ...] = (0.1, 0.3, 0.6, 1.0)
    decay: float = 0.99
    weight_decay: float = 0.0
    num_train: int = 0
    num_validation: int = 288
    num_test: int = 0


DIGITS = Settings()
IMAGES = Settings(
    num_rounds=50,
    batch_size=20,
    learning_rates=(0.03, 0.1, 0.3),
    num_train=2000,
    num_validation=1000,
    num_test=2000,
)
# The paper's MNIST: 100 clients, 10 epochs of batch 16, weight decay .001, .99 every ten rounds, 55,000 examples.
TABLE_II = Settings(
    num_clients=100,
    num_rounds=100,
    local_epochs=10,
    model="cnn",
    learning_rates=(0.001, 0.003, 0.01, 0.03, 0.1),
    weight_decay=0.001,
    num_validation=5000,
)
SETTINGS = {
    ("digits", "smoke"): DIGITS,
    ("digits", "paper"): Settings(num_rounds=400, local_epochs=10),
    ("fashion_mnist", "smoke"): IMAGES,
    ("fashion_mnist", "paper"): TABLE_II,
    ("mnist", "smoke"): IMAGES,
    ("mnist", "paper"): TABLE_II,
}


def prepare(request: Request) -> Prepared:
    """Check the request, and build the first seed's trial and algorithms; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    check_data_dir(request.data_dir)
    seeds = trials.several(request.seeds)
    settings = changed(SETTINGS[name, request.scale], request.changes)
    check_rounds(settings.num_rounds, settings.evaluate_every)
    trials.check_numbers(settings, ("num_clients", "local_epochs", "batch_size", "width"))
    trials.check_numbers(settings, ("num_models",), least=2)
    if settings.weight_decay < 0:
        raise ValueError(f"weight_decay: got {settings.weight_decay}, must be 0 or more")

    def trial(seed: int) -> trials.Trial:
        names = ("num_clients", "classes_per_client", "num_train", "num_validation", "num_test")
        return trials.divide(name, request.data_dir, seed, **{n: getattr(settings, n) for n in names})

    first = trial(seeds[0])
    for build in builders(settings, first).values():
        for rate in settings.learning_rates:
            build(learning_rate=rate)

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        return _run(settings, name, seeds, trial, say, keep, figures)

    return Prepared(settings, name, run)


def builders(s: Settings, trial: trials.Trial) -> dict[str, Callable[..., Algorithm]]:
    """Each method as a function of its learning rate, which may be traced."""
    model = _model(s, trial)
    plans = {
        BASELINE: schedule.all_clients(s.num_clients),
        METHOD: schedule.per_client_permutations(s.num_clients, s.num_models),
    }

    def descend(rate: float | Array) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(s.weight_decay), sgd(rate))

    def builder(name: str) -> Callable[..., Algorithm]:
        def build(learning_rate: float | Array) -> Algorithm:
            return getattr(algorithms, name)(
                model,
                plans[name],
                client_learning_rate=staircase_decay(learning_rate, s.decay, 10),
                work=Work(epochs=s.local_epochs, batch_size=s.batch_size),
                loss="cross_entropy",
                client_optimizer=descend if s.weight_decay else None,
            )

        return build

    return {name: builder(name) for name in plans}


def _model(s: Settings, trial: trials.Trial) -> Model:
    size = math.prod(trial.data.x.shape[1:])
    given: dict[str, Any] = {"widths": (s.width,), "parameterization": "standard"}
    if s.model == "cnn":
        side = math.isqrt(size)
        given = {"input_shape": (side, side, 1)}
    elif s.model != "mlp":
        raise ValueError(f"model: got {s.model!r}, allowed are mlp, cnn")
    return models.build(s.model, size, trial.num_classes, **given)


def _run(
    s: Settings,
    dataset: str,
    seeds: tuple[int, ...],
    make_trial: Callable[[int], trials.Trial],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Metric]], None],
    figures: Path,
) -> Outcome:
    """Every seed, both methods, all rates; then the choice, the tables and the figures."""
    made = [make_trial(seed) for seed in seeds]
    largest = max(max_client_size(trial.data) for trial in made)
    engine = single_device_engine(made[0].data, "auto")._replace(max_client_size=largest)
    build = builders(s, made[0])
    runs = {name: trials.runner(b, engine, s.num_rounds, s.evaluate_every) for name, b in build.items()}
    parts: list[list[Sweep]] = []
    sent: dict[str, list[np.ndarray]] = {BASELINE: [], METHOD: []}
    for trial in made:
        row: list[Sweep] = []
        for name, run in runs.items():
            start = time.perf_counter()
            row.append(run(trial, s.learning_rates))
            algorithm = build[name](learning_rate=s.learning_rates[0])
            sent[name].append(trials.bytes_on_the_wire(algorithm, trial.data, trial.seed, row[-1].rounds))
            keep(_metrics(name, row[-1], sent[name][-1]))
            ends = ", ".join(f"{a:.3f}" for a in row[-1].metrics["test.accuracy"][0, :, -1])
            say(f"seed {trial.seed}, {NAMES[name]}: {time.perf_counter() - start:.0f} s, test accuracy by rate {ends}")
        parts.append(row)
    return _conclude(s, dataset, choice.merge(parts, (BASELINE, METHOD)), sent, figures)


def _metrics(name: str, found: Sweep, sent: np.ndarray) -> list[Metric]:
    rows = []
    for metric, values in found.metrics.items():
        split, _, score = metric.partition(".")
        if split != "bins":
            rows += [
                Metric(int(r), f"{name} learning_rate={c['learning_rate']:g}", found.seeds[0], split, score,
                       float(values[0, i, e]), int(sent[e, 0]), int(sent[e, 1]))
                for i, c in enumerate(found.configs) for e, r in enumerate(found.rounds)
            ]  # fmt: skip
    return rows


def _conclude(s: Settings, dataset: str, found: Sweep, sent: dict[str, list[np.ndarray]], figures: Path) -> Outcome:
    chosen = {c: {m: choice.choose_rate(found, m, c) for m in NAMES} for c in CRITERIA}
    pairs = {
        c: [choice.pair(found, of[BASELINE], of[METHOD], metric, c) for metric in trials.SCORES]
        for c, of in chosen.items()
    }
    rows = [
        choice.plain(p, BASELINE, METHOD, (chosen[c][BASELINE].rate, chosen[c][METHOD].rate))
        for c, several in pairs.items() for p in several
    ]  # fmt: skip
    _draw(s, dataset, found, chosen["accuracy"], figures)
    last = {name: np.array([run[-1] for run in runs]) for name, runs in sent.items()}
    same = bool(np.array_equal(last[BASELINE], last[METHOD]))
    failed = [] if same else ["the two methods did not send the same bytes"]
    for of in chosen.values():
        failed += [
            f"{NAMES[m]}: no learning rate of the grid gives finite numbers"
            for m, c in of.items() if not np.all(np.isfinite(found.metrics["validation.nll"][:, c.place, -1]))
        ]  # fmt: skip
    agreed = chosen["accuracy"] == chosen["nll"]  # one table says it all
    shown = {"accuracy": "accuracy and NLL"} if agreed else LABELS
    sheets = [_comparison(s, dataset, found, chosen[c], pairs[c], shown[c]) for c in CRITERIA if c in shown]
    sheets += [_grid(found, chosen), _traffic(last)]
    details = {"settings": s, "dataset": dataset, "published": PUBLISHED, "bytes_equal": same,
               "bytes": {m: {"uplink": v[:, 0], "downlink": v[:, 1]} for m, v in last.items()},
               "grid": _grid_rows(found)}  # fmt: skip
    return Outcome(tuple(sheets), rows, details, _remarks(s, chosen), tuple(dict.fromkeys(failed)))


def _remarks(s: Settings, chosen: dict[str, dict[str, choice.Chosen]]) -> tuple[str, ...]:
    lines = [
        f"published, FE-2024 table II, MNIST of 100 clients with 2 classes each, a CNN: accuracy {PUBLISHED[BASELINE]} "
        f"for FedAvg, {PUBLISHED[METHOD]} for Fed-ensemble; the papers give no NLL, ECE or Brier score",
        f"settings: {', '.join(f'{name} {value}' for name, value in vars(s).items())}",
    ]
    for c, of in chosen.items():
        lines += [
            f"{NAMES[m]}'s rate {best.rate:g}, the best by validation {LABELS[c]}, is at the edge of the grid"
            for m, best in of.items() if best.at_edge
        ]  # fmt: skip
    return tuple(lines)


def _comparison(
    s: Settings, dataset: str, found: Sweep, of: dict[str, choice.Chosen], pairs: list[choice.Pair], by: str
) -> Sheet:
    rates = ", ".join(f"{NAMES[m]} {c.rate:g}" for m, c in of.items())
    title = (
        f"Fed-ensemble (K = {s.num_models}) against FedAvg on {dataset}: test examples, round {s.num_rounds}, "
        f"{len(found.seeds)} paired seeds; rates by validation {by}: {rates}"
    )
    rows = tuple(
        (LABELS[p.metric], f"{p.baseline:.4f}", f"{p.method:.4f}", f"{p.difference.mean:+.4f}",
         f"[{p.difference.low:+.4f}, {p.difference.high:+.4f}]", p.verdict)
        for p in pairs
    )  # fmt: skip
    columns = ("metric", "FedAvg", "Fed-ensemble", "difference", "95 % interval", "Fed-ensemble is")
    return Sheet(title, columns, rows)


def _grid_rows(found: Sweep) -> list[dict[str, Any]]:
    """The whole grid in the last round, means over seeds."""
    names = [m for m in found.metrics if not m.startswith("bins.")]
    return [
        {**config, **{name: float(found.metrics[name][:, i, -1].mean()) for name in names}}
        for i, config in enumerate(found.configs)
    ]


def _grid(found: Sweep, chosen: dict[str, dict[str, choice.Chosen]]) -> Sheet:
    shown = [f"test.{m}" for m in (*trials.SCORES, "accuracy_of_members")] + [f"validation.{c}" for c in CRITERIA]
    columns = ("method", "rate", *(name.replace(".", " ").replace("_", " ") for name in shown), "chosen by")
    rows = []
    for i, row in enumerate(_grid_rows(found)):
        by = [LABELS[c] for c, of in chosen.items() if of[row["method"]].place == i]
        rows.append((NAMES[row["method"]], f"{row['learning_rate']:g}", *(f"{row[m]:.4f}" for m in shown),
                     ", ".join(by)))  # fmt: skip
    return Sheet("the whole grid: means over seeds in the last round", columns, tuple(rows))


def _traffic(last: dict[str, np.ndarray]) -> Sheet:
    rows = tuple(
        (NAMES[m], *(f"{v[0, way]:,}" for way in (0, 1)), "yes" if np.array_equal(v, last[BASELINE]) else "NO")
        for m, v in last.items()
    )
    return Sheet("bytes of one run", ("method", "uplink", "downlink", "the same in every seed"), rows)


def _draw(s: Settings, dataset: str, found: Sweep, of: dict[str, choice.Chosen], figures: Path) -> None:
    from fedtangent.output.plots import curves_with_bands, reliability_diagram

    panels = {
        LABELS[m]: {NAMES[a]: found.metrics[f"test.{m}"][:, c.place] for a, c in of.items()} for m in trials.SCORES
    }
    title = f"{dataset}, {s.num_clients} clients of {s.classes_per_client} classes, {len(found.seeds)} seeds"
    curves_with_bands(panels, [int(r) for r in found.rounds], f"{title}: test examples", figures / "by_round.png")
    bins = {
        NAMES[a]: [trials.bins_of(found.metrics, (i, c.place, -1)) for i in range(len(found.seeds))]
        for a, c in of.items()
    }
    reliability_diagram(bins, title, figures / "reliability.png")


EXPERIMENT = Experiment(
    "Fed-ensemble against FedAvg at equal bytes, clients of two classes: accuracy, NLL, ECE, Brier, paired seeds",
    ("digits", "fashion_mnist", "mnist"),
    prepare,
)
