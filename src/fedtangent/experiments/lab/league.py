"""Methods of the Fed-ensemble papers on one data set: accuracy after equal rounds and bytes, seeds paired.

Under each seed all methods have the same data, clients, test examples and first network. Each takes the learning rate,
of one grid for all, that is best on validation examples of a seed that is not measured on. As the papers do
(FE-2024, section V-C), an accuracy is the mean over the last three rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent import data, models
from fedtangent.data.federated import max_client_size
from fedtangent.data.sharing import without
from fedtangent.experiments.lab.results import Claim, MeanInterval, Outcome, Sheet, interval, table
from fedtangent.experiments.lab.runner import Study, within
from fedtangent.experiments.lab.runs import Bench, EvaluationSets, Method, Runs, Tuned, repeat, tune
from fedtangent.experiments.lab.trials import IID, Trial, dealt, draw, scheme_name, trial_of
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.algorithms.distil import FEDBE
from fedtangent.federated.graph import ring
from fedtangent.federated.local import Work
from fedtangent.federated.rates import sgd, staircase_decay
from fedtangent.measures import uncertainty
from fedtangent.output.run_plots import curves
from fedtangent.types import Algorithm, Array, Model, Partition, PyTree, Schedule

LAST = 3  # rounds over which an accuracy is averaged
LABELS = {
    "fed_avg": "FedAvg",
    "fed_prox": "FedProx",
    "fed_be": "FedBE",
    "fed_be_no_distillation": "FedBE-noKD",
    "fed_dyn": "FedDyn",
    "fed_ensemble": "Fed-ensemble",
    "random_sampling": "Fed-ensemble, random sampling",
    "fed_dyn_ensemble": "FedDyn-ensemble",
    "random_walk": "random walk on a ring",
}
ENSEMBLES = ("fed_ensemble", "random_sampling", "fed_dyn_ensemble", "random_walk")  # of K models
DECAY_EVERY = 10  # rounds, the papers' "by 0.99 after 10 rounds"


@dataclass(frozen=True)
class LeagueSettings:
    """Everything that the methods share; the defaults are those of the papers' MNIST."""

    methods: tuple[str, ...] = within(("fed_avg", "fed_prox", "fed_ensemble"), of=tuple(LABELS))
    num_clients: int = 100
    classes_per_client: tuple[int, ...] = within((IID, 2), least=0)  # 0: dealt at random
    num_models: tuple[int, ...] = (5,)  # K of the ensembles
    num_rounds: int = within(100, least=LAST)
    local_epochs: int = 10
    batch_size: int = 16
    model: str = within("cnn", of=("mlp", "cnn"))
    width: int = 64  # of the mlp's hidden layer
    learning_rates: tuple[float, ...] = within((0.001, 0.003, 0.01, 0.03, 0.1), above=0)
    decay: float = within(0.99, above=0, at_most=1)
    weight_decay: float = within(0.001, at_least=0)
    proximal: float = within(0.01, above=0)  # mu of FedProx
    dynamic: float = within(0.01, above=0)  # mu of FedDyn, its alpha
    server_examples: int = 1000  # without labels, on which FedBE distils; no client holds them
    distillation_epochs: int = 20  # of FedBE's student
    tuning_rounds: int = within(20, least=LAST)
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)  # 0: all
    num_validation: int = 5000
    num_test: int = within(0, least=0)


# What a run depends on, besides its data and its configuration.
DECISIVE = ("local_epochs", "batch_size", "model", "width", "decay", "weight_decay", "proximal", "dynamic",
            "server_examples", "distillation_epochs")  # fmt: skip


class Entrant(NamedTuple):
    """A method, and of an ensemble the number of its models."""

    method: str
    num_models: int = 1

    @property
    def key(self) -> str:
        """Its name in files."""
        return self.method if self.num_models == 1 else f"{self.method}-{self.num_models}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return LABELS[self.method] + (f", K = {self.num_models}" if self.num_models > 1 else "")


class Scores(NamedTuple):
    """What one entrant reached on clients of one kind: of each seed, the means over the last rounds."""

    entrant: Entrant
    classes: int  # of a client; 0: dealt at random
    chosen: Tuned
    values: dict[str, np.ndarray]  # [seeds], by metric; "accuracy" first
    spread: float  # of the accuracy, standard deviation over the last rounds of all seeds


def entrants(s: LeagueSettings) -> list[Entrant]:
    """Every method, an ensemble once for each number of models."""
    return [
        Entrant(name, k) for name in s.methods for k in (s.num_models if name in ENSEMBLES else (1,))
    ]  # fmt: skip


# ---- one seed's data, and the methods on it ----------------------------------------------------------------------


def divide(study: Study, classes: int, seed: int) -> Trial:
    """The data of one seed, and its clients."""
    s, loaded = study.settings, data.load(study.dataset, data_dir=study.data_dir, seed=seed)
    drawn = draw(loaded, seed, s.num_train, s.num_validation, s.num_test)
    clients = dealt(drawn.y["train"], s.num_clients, classes, seed)
    return trial_of(drawn, clients, seed, loaded.num_classes)


def network(s: LeagueSettings, trial: Trial) -> Model:
    """The ``model`` of the settings for the trial's inputs."""
    own: dict[str, Any] = {"widths": (s.width,), "parameterization": "standard"} if s.model == "mlp" else {}
    return models.build(s.model, trial.data.x.shape[1:], trial.num_classes, **own)


def methods(s: LeagueSettings, trial: Trial) -> dict[str, Method]:
    """Every entrant on one seed's data."""
    model, found = network(s, trial), dict[str, Method]()
    for entrant in entrants(s):
        held, own = trial.data, dict[str, Any]()
        if entrant.method == "fed_be":
            held, own["server_data"] = _at_server(s, trial)
            own["distillation"] = FEDBE._replace(epochs=s.distillation_epochs)
        build = partial(_build, s, model, entrant, own)
        found[entrant.key] = Method(
            entrant.label, s.learning_rates, (0,), build, held, trial.splits, holds_examples=bool(own)
        )
    return found


def _at_server(s: LeagueSettings, trial: Trial) -> tuple[Any, Array]:
    """The clients' data without the examples that the server has, and those."""
    held = trial.data
    rows = np.random.default_rng([trial.seed, 2]).permutation(np.asarray(held.indices))[: s.server_examples]
    kept = without(Partition(np.asarray(held.indices), np.asarray(held.offsets)), rows)
    moved = held._replace(indices=jnp.asarray(kept.indices, jnp.int32), offsets=jnp.asarray(kept.offsets, jnp.int32))
    return moved, held.x[np.sort(rows)]


def _build(
    s: LeagueSettings, model: Model, entrant: Entrant, own: Mapping[str, Any], steps: Any, rate: float | Array
) -> Algorithm:
    """The algorithm; ``rate`` may be traced."""
    shared: dict[str, Any] = {
        "client_learning_rate": staircase_decay(rate, s.decay, DECAY_EVERY),
        "work": Work(epochs=s.local_epochs, batch_size=s.batch_size),
        "loss": "cross_entropy",
        "client_optimizer": partial(_decayed, s.weight_decay) if s.weight_decay else None,
    }
    numbers = {"fed_prox": s.proximal, "fed_dyn": s.dynamic, "fed_dyn_ensemble": s.dynamic}
    if entrant.method in numbers:
        shared["mu"] = numbers[entrant.method]
    plan, recipe = _plan(s, entrant), getattr(algorithms, entrant.method, None)
    if recipe is None or entrant.method == "fed_ensemble":
        base = algorithms.fed_dyn if entrant.method == "fed_dyn_ensemble" else algorithms.fed_avg
        return algorithms.fed_ensemble(model, plan, base=base, **shared)
    algorithm: Algorithm = recipe(model, plan, **shared, **own)
    return algorithm


def _plan(s: LeagueSettings, entrant: Entrant) -> Schedule:
    """All clients train in every round, for an ensemble one model each; of random walks, each model one client."""
    if entrant.method not in ENSEMBLES:
        return schedule.all_clients(s.num_clients)
    if entrant.method == "random_walk":
        return schedule.random_walk(ring(s.num_clients), entrant.num_models)
    plan = schedule.random_models if entrant.method == "random_sampling" else schedule.per_client_permutations
    return plan(s.num_clients, entrant.num_models)


def _decayed(weight_decay: float, rate: float | Array) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), sgd(rate))


# ---- what is measured --------------------------------------------------------------------------------------------


def measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Of every split the ensemble's accuracy; of the test split also its models': largest, least, mean entropy.

    The entropy is that of a model's predictive distribution, mean over examples and models (FE-2024, Table V). Outputs
    that are not finite have accuracy 0.
    """
    found = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        finite = jnp.all(jnp.isfinite(members))
        found[f"{name}.accuracy"] = jnp.where(finite, uncertainty.accuracy(members, labels), 0.0)
        if name == "test":
            each = jnp.mean((members.argmax(axis=-1) == labels[None]).astype(members.dtype), axis=1)
            entropies = jax.lax.map(lambda one: jnp.mean(uncertainty.predictive_entropy(one[None])), members)
            found |= {"test.largest": each.max(), "test.least": each.min(), "test.entropy": jnp.mean(entropies)}
    return found


def last_rounds(values: np.ndarray) -> np.ndarray:
    """What is averaged of a run's values [E]: those of the last rounds."""
    return values[-LAST:].astype(np.float64)


def check(study: Study) -> None:
    """Divide the first seed's data in every way, and build every method with every rate."""
    s = study.settings
    if s.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, must not be among the seeds that are measured")
    for classes in s.classes_per_client:
        for method in methods(s, divide(study, classes, study.seeds[0])).values():
            for rate in method.rates:
                method.build(0, rate)


def play_all(study: Study) -> tuple[list[Scores], dict[int, Runs]]:
    """Every entrant on clients of every kind: its rate by validation, then all seeds."""
    s, found, runs = study.settings, list[Scores](), dict[int, Runs]()
    depends_on = {name: getattr(s, name) for name in DECISIVE}
    for classes in s.classes_per_client:
        divided = partial(divide, study, classes)
        largest = max(max_client_size(divided(seed).data) for seed in (*study.seeds, s.tuning_seed))
        bench = Bench(study, divided, partial(methods, s), {**depends_on, "classes": classes}, measure, 1, largest)
        known = entrants(s)
        chosen = {e.key: tune(bench, e.key, s.tuning_seed, s.tuning_rounds) for e in known}
        configs = {key: tuned.config for key, tuned in chosen.items()}
        runs[classes] = repeat(bench, configs, dict.fromkeys(configs, s.num_rounds))
        found += [scores_of(e, classes, chosen[e.key], runs[classes][e.key]) for e in known]
    return found, runs


def scores_of(entrant: Entrant, classes: int, chosen: Tuned, records: Sequence[Any]) -> Scores:
    """What the runs of an entrant, one a seed, say."""
    names = ("accuracy", "largest", "least", "entropy")
    values = {n: np.array([last_rounds(r.metrics[f"test.{n}"]).mean() for r in records]) for n in names}
    spread = float(np.concatenate([last_rounds(r.test) for r in records]).std(ddof=1))
    return Scores(entrant, classes, chosen, values, spread)


# ---- what is shown -----------------------------------------------------------------------------------------------


def sheet(title: str, found: Sequence[Scores], published: Mapping[tuple[str, int], float]) -> Sheet:
    """Accuracies in percent with their deviation over last rounds and seeds, and the paper's (entrant, classes)."""
    rows = [
        {
            "clients": scheme_name(f.classes), "method": f.entrant.label, "rate": f.chosen.config.rate,
            "accuracy": 100 * f.values["accuracy"].mean(), "spread": 100 * f.spread,
            "published": published.get((f.entrant.key, f.classes)),
        }
        for f in found
    ]  # fmt: skip
    columns = {"clients": "{clients}", "method": "{method}", "rate": "{rate:g}", "accuracy %": "{accuracy:.2f}",
               "deviation": "{spread:.2f}"}  # fmt: skip
    return table(title, rows, columns | ({"published": "{published:.2f}"} if published else {}))


def rows_of(found: Sequence[Scores]) -> list[dict[str, Any]]:
    """Rows of result.json."""
    return [
        {"method": f.entrant.method, "num_models": f.entrant.num_models, "classes_per_client": f.classes,
         "learning_rate": f.chosen.config.rate, "validation_accuracy": f.chosen.score, "deviation": f.spread,
         **{name: float(v.mean()) for name, v in f.values.items()},
         "by_seed": [float(v) for v in f.values["accuracy"]]}
        for f in found
    ]  # fmt: skip


def difference(one: Scores, other: Scores, metric: str = "accuracy") -> MeanInterval:
    """Of two entrants, paired by seed."""
    return interval(one.values[metric] - other.values[metric])


def ahead(found: Sequence[Scores], of: str) -> tuple[Claim, ...]:
    """That the method ``of`` is more accurate than every other, on clients of every kind."""
    said = []
    for classes in dict.fromkeys(f.classes for f in found):
        own = [f for f in found if f.classes == classes]
        for one in (f for f in own if f.entrant.method == of):
            for other in (f for f in own if f.entrant.method != of):
                d = difference(one, other)
                said.append(Claim(
                    f"{scheme_name(classes)}: {one.entrant.label} is more accurate than {other.entrant.label}",
                    f"{d:+.4f}", d.above(),
                ))  # fmt: skip
    return tuple(said)


def outcome(
    study: Study,
    name: str,
    published: Mapping[str, Mapping[tuple[str, int], float]],
    claims: Callable[[Sequence[Scores]], tuple[Claim, ...]],
    more: Callable[[Sequence[Scores]], tuple[Sheet, ...]] = lambda _: (),
) -> Outcome:
    """The table called ``name``: every entrant, the figure of its rounds, and what ``claims`` makes of them.

    ``published`` are percents, by data set, of (entrant's key, classes a client).
    """
    found, runs = play_all(study)
    draw_rounds(study, runs)
    title = f"{name} on {study.dataset}: test accuracy of the last {LAST} rounds, {len(study.seeds)} seeds"
    edges = [f"{f.entrant.label}, {scheme_name(f.classes)}" for f in found if f.chosen.at_edge]
    remarks = [f"rates at an edge of the grid: {'; '.join(edges)}"] if edges else []
    if study.dataset in published:
        remarks.append("published: percent, on the paper's full set-up, in its last three rounds")
    return Outcome(
        (sheet(title, found, published.get(study.dataset, {})), *more(found)),
        rows_of(found),
        claims(found),
        remarks=tuple(remarks),
    )


def draw_rounds(study: Study, runs: Mapping[int, Runs], path: str = "by_round.png") -> None:
    """Test accuracy by round, a panel for each kind of clients."""
    names = {e.key: e.label for e in entrants(study.settings)}
    panels = {
        f"test accuracy, {scheme_name(classes)}": {
            names[key]: np.stack([r.test for r in own]) for key, own in of.items()
        }
        for classes, of in runs.items()
    }
    rounds = [int(r) for r in next(iter(next(iter(runs.values())).values()))[0].rounds]
    curves(panels, rounds, f"{study.dataset}, {len(study.seeds)} seeds", study.figures / path)
