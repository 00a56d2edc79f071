"""Fed-ensemble against FedAvg at equal rounds and bytes, on clients of two classes or i.i.d. ones (FE-2024, table II).

With the same seed both methods have the same data, clients, test examples and batches. Every client trains in every
round: FedAvg's one model, or one of Fed-ensemble's K models, in the client's own random order. Each method takes the
learning rate that is best on validation examples, once by accuracy and once by negative log-likelihood (NLL); the grid
is the same for both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import optax
from jaxtyping import Shaped

import fedtangent as ft
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.fed_ensemble.classifiers import WIDTHS, descent
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, Config, Method, Record, Steps
from fedtangent._src.experiments.lab.runner import AnySettings, Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import Trial
from fedtangent._src.measures.uncertainty import Reliability
from fedtangent._src.output.run_plots import curves, reliability_diagram
from fedtangent._src.types import Algorithm, AnyArray, Array, Model

BASELINE, METHOD = "fed_avg", "fed_ensemble"
NAMES = {BASELINE: "FedAvg", METHOD: "Fed-ensemble"}
CRITERIA = ("accuracy", "nll")
LABELS = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier"}
PUBLISHED = {"dataset": "mnist, 2 classes a client", "metric": "accuracy", BASELINE: 0.9017, METHOD: 0.9544}
PUBLISHED_IID = {"dataset": "mnist, i.i.d.", "metric": "accuracy", BASELINE: 0.9508, METHOD: 0.9775}
PAPER = (
    "published, FE-2024 table II, {dataset}, 100 clients, a CNN: accuracy {fed_avg} for FedAvg, {fed_ensemble} for "
    "Fed-ensemble; the papers give no NLL, ECE or Brier score"
)
ENDS = ("difference", "low_95", "high_95")  # of a paired difference, in a row
HIGHER_IS_BETTER = ("accuracy",)
DECISIVE = "num_models local_epochs batch_size model width decay weight_decay"

GridRuns = dict[Config, list[Record]]
"""A record for each seed, by configuration."""


@dataclass(frozen=True)
class VersusSettings:
    """Settings of the comparison of Fed-ensemble with FedAvg, the same for both."""

    num_clients: int = 50
    classes_per_client: int = within(2, least=0)  # 0: dealt at random
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
IMAGES = with_changes(
    DIGITS, "num_rounds=50 batch_size=20 learning_rates=0.03,0.1,0.3 num_train=2000 num_validation=1000 num_test=2000"
)
# The paper's MNIST: 100 clients, 10 epochs of batch 16, weight decay .001, .99 every ten rounds, 55,000 examples.
TABLE_II = with_changes(
    DIGITS,
    "num_clients=100 num_rounds=100 local_epochs=10 model=cnn width=32 weight_decay=0.001 num_validation=5000",
    "learning_rates=0.001,0.003,0.01,0.03,0.1",
)
SCALES = {
    "digits": by_scale(
        DIGITS, with_changes(DIGITS, "num_rounds=120"), with_changes(DIGITS, "num_rounds=400 local_epochs=10")
    ),
    **dict.fromkeys(("fashion_mnist", "mnist"), by_scale(IMAGES, paper=TABLE_II)),
}


def _divide(study: Study, seed: int) -> Trial:
    """Draws one seed's examples, and divides them among clients of ``classes_per_client`` classes or at random."""
    settings, loaded = study.settings, ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    examples = trials.draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    clients = trials.dealt(examples.y["train"], settings.num_clients, settings.classes_per_client, seed)
    return trials.trial_of(examples, clients, seed, loaded.num_classes)


def methods(settings: VersusSettings, trial: Trial) -> dict[str, Method]:
    """Builds FedAvg and Fed-ensemble on one seed's data, by name.

    Args:
        settings: Settings of the experiment.
        trial: One seed's data and clients.
    """
    optimizer = partial(descent, "sgd", settings.weight_decay) if settings.weight_decay else None
    return both_methods(settings, trial, network(settings, trial.data.x, trial.num_classes), "cross_entropy", optimizer)


def both_methods(
    settings: AnySettings,
    trial: Trial,
    model: Model,
    loss: str,
    optimizer: Callable[[float | Array], optax.GradientTransformation] | None = None,
) -> dict[str, Method]:
    """Builds FedAvg and Fed-ensemble for a given network and loss; in both, every client trains in every round.

    Learning rates decay after every ten rounds.

    Args:
        settings: Settings of local work, of the ensemble and of the rates.
        trial: Data of one seed.
        model: The network.
        loss: Name of the loss.
        optimizer: Function from a rate to the clients' optimiser; None for gradient descent.
    """
    num_clients = trial.data.num_clients
    plans = {
        BASELINE: ft.schedules.all_clients(num_clients),
        METHOD: ft.schedules.per_client_permutations(num_clients, settings.num_models),
    }

    def build(name: str, steps: Steps, rate: float | Array) -> Algorithm:
        decayed = ft.optimizers.staircase_decay(rate, settings.decay, 10)
        steps_by = (
            {"client_optimizer": ft.optimizers.at_rate(optimizer, decayed)}
            if optimizer
            else {"client_learning_rate": decayed}
        )
        work = ft.Work(epochs=settings.local_epochs, batch_size=settings.batch_size)
        algorithm: Algorithm = getattr(ft, name)(model, plans[name], work=work, loss=loss, **steps_by)
        return algorithm

    return {
        name: Method(NAMES[name], settings.learning_rates, (0,), partial(build, name), trial.data, trial.splits)
        for name in plans
    }


def network(settings: AnySettings, x: Shaped[AnyArray, "n ..."], outputs: int) -> Model:
    """Builds the network that ``settings.model`` names, "mlp" or "cnn".

    Args:
        settings: Settings, which have ``model`` and ``width``: the units of the MLP, or the channels of the CNN's first
            layer. The CNN's other layers grow in proportion; a width of 32 gives the papers' CNN.
        x: Square images, flat: [n, pixels].
        outputs: Number of outputs.
    """
    size = math.prod(x.shape[1:])
    if settings.model == "mlp":
        return ft.models.build("mlp", size, outputs, widths=(settings.width,), parameterization="standard")
    side = math.isqrt(size)
    return ft.models.build("cnn", (side, side, 1), outputs, **WIDTHS["cnn"](settings.width))


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: builds FedAvg and Fed-ensemble on the first seed's data."""
    harness.build_all(methods(study.settings, _divide(study, study.seeds[0])))


def run(study: Study) -> lab.Outcome:
    """Trains FedAvg and Fed-ensemble at every learning rate on every seed; chooses rates and compares test scores."""
    settings, runs = study.settings, GridRuns()
    of_seed, of_trial = functools.cache(partial(_divide, study)), partial(methods, settings)
    largest = max(max_client_size(of_seed(seed).data) for seed in study.seeds)
    depends_on = harness.decisive(settings, DECISIVE)
    bench = Bench(study, of_seed, of_trial, depends_on, harness.all_scores, settings.evaluate_every, largest)
    for seed in study.each_seed():
        for config in itertools.starmap(Config, itertools.product(NAMES, settings.learning_rates)):
            runs.setdefault(config, []).append(harness.play(bench, config, seed, settings.num_rounds))
    return _conclude(study, bench.methods(study.seeds[0]), runs)


def _last(records: list[Record], metric: str) -> np.ndarray:
    """Returns the value of a metric after the last round, [seeds]."""
    return np.array([record.metrics[metric][-1] for record in records])


def _conclude(study: Study, by_name: dict[str, Method], runs: GridRuns) -> lab.Outcome:
    """Chooses learning rates, compares FedAvg with Fed-ensemble, and checks that both sent equally many bytes.

    Each method's rate is chosen twice: by accuracy, and by negative log-likelihood on validation examples. The figures,
    and the check of the bytes, take the rates that accuracy chose.

    Args:
        study: The study, whose figures are drawn.
        by_name: Both methods.
        runs: A record for each seed, for every method and learning rate.
    """
    chosen, edges, failed = dict[str, dict[str, Config]](), list[str](), list[str]()
    for c, name in itertools.product(CRITERIA, NAMES):
        sign = 1 if c in HIGHER_IS_BETTER else -1
        scores = {k: sign * float(_last(r, f"validation.{c}").mean()) for k, r in runs.items() if k.method == name}
        tuned = harness.choose(by_name[name], scores)
        chosen.setdefault(c, {})[name] = tuned.config
        if tuned.at_edge:
            rate = f"{NAMES[name]}'s rate {tuned.config.rate:g}"
            edges.append(f"{rate}, the best by validation {LABELS[c]}, is at the edge of the grid")
        if not np.all(np.isfinite(_last(runs[tuned.config], "validation.nll"))):
            failed.append(f"{NAMES[name]}: no learning rate of the grid gives finite numbers")
    rows = [_pair(runs, chosen[c], c, metric) for c in CRITERIA for metric in harness.SCORES]
    sent = {name: np.array([r.sent[-1] for r in runs[chosen["accuracy"][name]]]) for name in NAMES}
    is_equal = bool(np.array_equal(sent[BASELINE], sent[METHOD]))
    failed += [] if is_equal else ["the two methods did not send the same bytes"]
    _draw(study, runs, chosen["accuracy"])
    criteria = {"accuracy": "accuracy and NLL"} if chosen["accuracy"] == chosen["nll"] else LABELS  # one table suffices
    sheets = [_comparison(study, chosen[c], rows, c, criteria[c]) for c in CRITERIA if c in criteria]
    traffic = [{"method": NAMES[m], "sent": v[0]} for m, v in sent.items()]
    sheets.append(
        lab.table("bytes of one run", traffic, "method: {method} | uplink: {sent[0]:,} | downlink: {sent[1]:,}")
    )
    grid = []
    for config, records in runs.items():
        means = {m: float(_last(records, m).mean()) for m in records[0].metrics if not m.startswith("bins.")}
        grid.append({"method": config.method, "learning_rate": config.rate, **means})
    lead = lab.MeanInterval(*(rows[0][end] for end in ENDS))
    claim = lead.claim_above("Fed-ensemble is more accurate than FedAvg")  # Table II
    by_method = {m: {"uplink": v[:, 0], "downlink": v[:, 1]} for m, v in sent.items()}
    published = PUBLISHED if study.settings.classes_per_client else PUBLISHED_IID
    details = {"published": published, "bytes_equal": is_equal, "grid": grid, "bytes": by_method}
    return lab.Outcome(
        tuple(sheets), rows, (claim,), details, (PAPER.format(**published), *edges), tuple(dict.fromkeys(failed))
    )


def _pair(runs: GridRuns, chosen: dict[str, Config], criterion: str, metric: str) -> lab.Row:
    """Builds the row of one metric: its value on test data after the last round for both methods, and their difference.

    The difference is paired by seed. ``chosen`` has the learning rates that are best by ``criterion``, "accuracy" or
    "nll", on validation examples.
    """
    values = {name: _last(runs[chosen[name]], f"test.{metric}") for name in NAMES}
    difference = lab.interval(values[METHOD].astype(np.float64) - values[BASELINE].astype(np.float64))
    verdict = "undecided"
    if difference.low > 0 or difference.high < 0:
        verdict = "better" if (difference.mean > 0) == (metric in HIGHER_IS_BETTER) else "worse"
    return {
        "rates_chosen_by": f"validation {criterion}",
        **{f"learning_rate_{name}": config.rate for name, config in chosen.items()},
        "metric": metric,
        **{name: float(v.mean()) for name, v in values.items()},
        **difference.row(),
        "seeds": len(values[METHOD]),
        "verdict": verdict,
    }


def _comparison(study: Study, chosen: dict[str, Config], rows: list[lab.Row], criterion: str, by: str) -> lab.Sheet:
    """Builds the table of FedAvg and Fed-ensemble at the learning rates that are best by ``criterion``.

    The criterion is "accuracy" or "nll" on validation examples, ``by`` its label in the title; ``rows`` come from
    ``_pair``.
    """
    settings, rates = study.settings, ", ".join(f"{NAMES[m]} {c.rate:g}" for m, c in chosen.items())
    title = (
        f"Fed-ensemble (K = {settings.num_models}) against FedAvg on {study.dataset}: test examples, round "
        f"{settings.num_rounds}, "
        f"{len(study.seeds)} paired seeds; rates by validation {by}: {rates}"
    )
    entries = [
        {**row, "name": LABELS[row["metric"]], "interval": lab.MeanInterval(*(row[end] for end in ENDS))}
        for row in rows
        if row["rates_chosen_by"] == f"validation {criterion}"
    ]
    columns = "metric: {name} | FedAvg: {fed_avg:.4f} | Fed-ensemble: {fed_ensemble:.4f} | "
    columns += "difference, 95 % interval: {interval:+.4f} | Fed-ensemble is: {verdict}"
    return lab.table(title, entries, columns)


def _draw(study: Study, runs: GridRuns, chosen: dict[str, Config]) -> None:
    """Plots all test scores by round, and the reliability diagrams of the last round."""
    settings, records = study.settings, {NAMES[name]: runs[config] for name, config in chosen.items()}
    panels = {
        LABELS[m]: {name: np.stack([r.metrics[f"test.{m}"] for r in of_seeds]) for name, of_seeds in records.items()}
        for m in harness.SCORES
    }
    rounds = harness.evaluated_rounds(records)
    title = (
        f"{study.dataset}, {settings.num_clients} clients, {trials.scheme_name(settings.classes_per_client)}, "
        f"{len(study.seeds)} seeds"
    )
    curves(panels, rounds, f"{title}: test examples", study.figures.path("by_round"), late=True)
    bins = {
        name: [Reliability(*(r.metrics[f"bins.{part}"][-1] for part in Reliability._fields)) for r in of_seeds]
        for name, of_seeds in records.items()
    }
    reliability_diagram(bins, title, study.figures.path("reliability"))


ENTRIES = (experiment(__name__, run, SCALES, ("shi2024", "shi2021"), check=check, least_seeds=2),)
