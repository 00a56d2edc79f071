"""Methods of the Fed-ensemble papers on one data set: accuracy after equal rounds and bytes, seeds paired.

Under each seed all methods have the same data, clients, test examples and first network. Each takes the learning rate,
of one grid for all, that is best on validation examples of a seed that is not measured on. As the papers do
(FE-2024, section V-C), an accuracy is the mean over the last three rounds. Where clients are users, each is tested on
its own examples by what it predicts itself, and an accuracy is the mean over clients (section V-D).
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

from fedtangent import checks, data, models
from fedtangent.data.dataset import IMAGE, TOKENS, VECTOR
from fedtangent.data.federated import max_client_size
from fedtangent.data.sharing import without
from fedtangent.experiments.lab.runner import Study, within
from fedtangent.experiments.lab.runs import Bench, EvaluationSets, Method, Runs, Tuned, repeat, tune
from fedtangent.experiments.lab.trials import (
    DISTORTED,
    IID,
    USERS,
    Trial,
    dealt,
    distorted_by,
    draw,
    first_users,
    of_users,
    scheme_name,
    trial_of,
)
from fedtangent.federated import algorithms, faults, schedule
from fedtangent.federated.algorithms.distil import FEDBE
from fedtangent.federated.graph import ring
from fedtangent.federated.local import Work, client_view
from fedtangent.federated.predict import weighted_models
from fedtangent.federated.rates import sgd, staircase_decay
from fedtangent.measures import uncertainty
from fedtangent.types import Algorithm, Array, FederatedData, Model, Partition, PyTree, Schedule

LAST = 3  # rounds over which an accuracy is averaged
LABELS = {
    "fed_avg": "FedAvg",
    "fed_prox": "FedProx",
    "fed_be": "FedBE",
    "fed_be_no_distillation": "FedBE-noKD",
    "fed_dyn": "FedDyn",
    "ditto": "Ditto",
    "lg_fed_avg": "LG-FedAvg",
    "fed_ensemble": "Fed-ensemble",
    "random_sampling": "Fed-ensemble, random sampling",
    "fed_dyn_ensemble": "FedDyn-ensemble",
    "random_walk": "random walk on a ring",
}
ENSEMBLES = ("fed_ensemble", "random_sampling", "fed_dyn_ensemble", "random_walk")  # of K models
MU = {"fed_prox": "proximal", "fed_dyn": "dynamic", "fed_dyn_ensemble": "dynamic", "ditto": "personal"}
WIDTHS: dict[str, Callable[[int], dict[str, Any]]] = {  # what a width makes of a model
    "mlp": lambda width: {"widths": (width,)},
    "cnn": lambda width: {"filters": (width, 2 * width), "hidden": (16 * width,)},
    "lstm": lambda width: {"units": width},
    "resnet18": lambda width: {"width": width},
    "resnet34": lambda width: {"width": width},
}
MODELS = ("mlp", "cnn", "resnet18", "resnet34", "mobilenet_v2", "shufflenet_v2", "lstm")
# What LG-FedAvg's clients keep: all that is below the dense layers of a network, the last one of the mlp's.
BELOW = "^(?!Dense|output|2/)"
DECAY_EVERY = 10  # rounds, the papers' "by 0.99 after 10 rounds"


@dataclass(frozen=True)
class LeagueSettings:
    """Everything that the methods share; the defaults are those of the papers' MNIST."""

    methods: tuple[str, ...] = within(("fed_avg", "fed_prox", "fed_ensemble"), of=tuple(LABELS))
    num_clients: int = within(100, least=0)  # of users the first so many, all of them if 0
    classes_per_client: tuple[int, ...] = within((IID, 2), least=DISTORTED)  # 0: dealt at random; -1, -2: trials.py
    num_models: tuple[int, ...] = (5,)  # K of the ensembles
    clients_per_round: int = within(0, least=0)  # that the server asks; 0: all. An ensemble's are of K strata
    keep_first: int = within(0, least=0)  # answers that close a round; 0: all
    completion_spread: float = within(1.0, above=0)  # of the log of the time that a client takes
    slowness: float = within(0.0, at_least=0)  # how much the log of that time rises with a client's labels
    num_rounds: int = within(100, least=LAST)
    local_epochs: int = 10
    batch_size: int = 16
    model: str = within("cnn", of=MODELS)
    width: int = within(0, least=0)  # of the mlp, of an LSTM, of the first layer of a CNN or ResNet; 0: its own
    optimizer: str = within("sgd", of=("sgd", "adam"))  # of clients; Adam begins anew in every round
    learning_rates: tuple[float, ...] = within((0.001, 0.003, 0.01, 0.03, 0.1), above=0)
    decay: float = within(0.99, above=0, at_most=1)
    weight_decay: float = within(0.001, at_least=0)
    proximal: float = within(0.01, above=0)  # mu of FedProx
    dynamic: float = within(0.01, above=0)  # mu of FedDyn, its alpha
    personal: float = within(0.1, at_least=0)  # mu of Ditto, its lambda
    gamma: float = within(0.1, above=0)  # of the weights by which a client sees an ensemble (FE-2024, eq. 4)
    server_examples: int = 1000  # without labels, on which FedBE distils; no client holds them
    distillation_epochs: int = 20  # of FedBE's student
    tuning_rounds: int = within(20, least=LAST)
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)  # 0: all
    num_validation: int = 5000
    num_test: int = within(0, least=0)


# What a run depends on, besides its data and its configuration.
DECISIVE = ("clients_per_round", "keep_first", "completion_spread", "slowness", "local_epochs", "batch_size", "model",
            "width", "optimizer", "decay", "weight_decay", "proximal", "dynamic", "personal", "gamma",
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
    values: dict[str, np.ndarray]  # [seeds], by metric of the test split; "fell" too
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
    if classes == USERS:
        loaded = first_users(loaded, s.num_clients)
    drawn = draw(loaded, seed, s.num_train, s.num_validation, s.num_test)
    if classes == USERS:
        return trial_of(drawn, of_users(loaded, drawn), seed, loaded.num_classes)
    if classes == DISTORTED:
        return trial_of(*distorted_by(drawn, s.num_clients, seed), seed, loaded.num_classes)
    return trial_of(drawn, dealt(drawn.y["train"], s.num_clients, classes, seed), seed, loaded.num_classes)


def network(s: LeagueSettings, trial: Trial) -> Model:
    """The ``model`` of the settings for the trial's inputs; raises ``ValueError`` for inputs that it does not read."""
    x = trial.data.x
    kind = TOKENS if jnp.issubdtype(x.dtype, jnp.integer) else IMAGE if x.ndim == 4 else VECTOR
    own: dict[str, Any] = {"parameterization": "standard"} if s.model == "mlp" else {}
    if s.width and s.model not in WIDTHS:
        raise ValueError(f"width: got {s.width}, must be 0 for the model {s.model}, which has its own")
    if s.width:
        own |= WIDTHS[s.model](s.width)
    return models.build(s.model, x.shape[1:], trial.num_classes, kind, **own)


def methods(s: LeagueSettings, trial: Trial) -> dict[str, Method]:
    """Every entrant on one seed's data."""
    model, found = network(s, trial), dict[str, Method]()
    sets = _by_client(trial) if trial.by_client else trial.splits
    for entrant in entrants(s):
        held, own = trial.data, dict[str, Any]()
        if entrant.method == "fed_be":
            held, own["server_data"] = _at_server(s, trial)
            own["distillation"] = FEDBE._replace(epochs=s.distillation_epochs)
        if entrant.method in ENSEMBLES and trial.by_client:
            own["personal"] = weighted_models("cross_entropy", s.gamma)
        if entrant.method == "lg_fed_avg":
            own["private"] = BELOW
        build = partial(_build, s, model, entrant, plan_of(s, trial, entrant), own)
        found[entrant.key] = Method(
            entrant.label,
            s.learning_rates,
            (0,),
            build,
            held,
            sets,
            holds_examples="server_data" in own or s.keep_first > 0,
        )
    return found


def _by_client(trial: Trial) -> dict[str, FederatedData]:
    """The clients' examples: of train, and of the parts in which each has its own."""
    return {"train": trial.data, **(trial.by_client or {})}


def _at_server(s: LeagueSettings, trial: Trial) -> tuple[Any, Array]:
    """The clients' data without the examples that the server has, and those."""
    held = trial.data
    rows = np.random.default_rng([trial.seed, 2]).permutation(np.asarray(held.indices))[: s.server_examples]
    kept = without(Partition(np.asarray(held.indices), np.asarray(held.offsets)), rows, "server_examples")
    moved = held._replace(indices=jnp.asarray(kept.indices, jnp.int32), offsets=jnp.asarray(kept.offsets, jnp.int32))
    return moved, held.x[np.sort(rows)]


def _build(
    s: LeagueSettings,
    model: Model,
    entrant: Entrant,
    plan: Schedule,
    own: Mapping[str, Any],
    steps: Any,
    rate: float | Array,
) -> Algorithm:
    """The algorithm; ``rate`` may be traced."""
    shared: dict[str, Any] = {
        "client_learning_rate": staircase_decay(rate, s.decay, DECAY_EVERY),
        "work": Work(epochs=s.local_epochs, batch_size=s.batch_size),
        "loss": "cross_entropy",
        "client_optimizer": partial(_descent, s) if s.weight_decay or s.optimizer != "sgd" else None,
        **own,
    }
    if entrant.method in MU:
        shared["mu"] = getattr(s, MU[entrant.method])
    recipe = getattr(algorithms, entrant.method, None)
    if recipe is None or entrant.method == "fed_ensemble":
        base = algorithms.fed_dyn if entrant.method == "fed_dyn_ensemble" else algorithms.fed_avg
        return algorithms.fed_ensemble(model, plan, base=base, **shared)
    algorithm: Algorithm = recipe(model, plan, **shared)
    return algorithm


def plan_of(s: LeagueSettings, trial: Trial, entrant: Entrant) -> Schedule:
    """Who trains what: the clients that ``_plan`` asks, or the first of them to answer."""
    plan = _plan(s, trial.data.num_clients, entrant)
    if not s.keep_first:
        return plan
    if entrant.method == "random_walk":
        raise ValueError(f"keep_first: got {s.keep_first}, must be 0 for random_walk, which has no server that waits")
    checks.whole("keep_first", s.keep_first, 1, plan.num_slots)
    return faults.stragglers(plan, s.keep_first, completion_times(s, trial), spread=s.completion_spread)


def completion_times(s: LeagueSettings, trial: Trial) -> np.ndarray:
    """How long each client takes in the mean, [N]: in proportion to its examples, of all clients 1.

    With a ``slowness`` it rises with the mean of a client's labels, so that who is late is no matter of chance.
    """
    labels = np.asarray(trial.data.y)[np.asarray(trial.data.indices)]
    sizes = np.diff(np.asarray(trial.data.offsets))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    means = np.bincount(owner, labels, len(sizes)) / np.maximum(sizes, 1)
    score = (means - means.mean()) / max(float(means.std()), 1e-12)
    times = np.maximum(sizes, 1) * np.exp(s.slowness * score)
    return np.asarray(times / times.mean())


def _plan(s: LeagueSettings, num_clients: int, entrant: Entrant) -> Schedule:
    """All clients train in every round, for an ensemble one model each; of random walks, each model one client.

    Of sampled clients an ensemble's are of K strata, each with a model of its own (FE-2021, algorithm 1).
    """
    asked, k = checks.whole("clients_per_round", s.clients_per_round, 0, num_clients), entrant.num_models
    if entrant.method not in ENSEMBLES:
        return schedule.uniform_sampling(num_clients, asked) if asked else schedule.all_clients(num_clients)
    if asked and entrant.method not in ("fed_ensemble", "fed_dyn_ensemble"):
        raise ValueError(f"clients_per_round: got {asked}, must be 0 for {entrant.method}, in which all take part")
    if asked % k:
        raise ValueError(f"clients_per_round: got {asked}, must be a multiple of {k}, the number of models")
    if asked:
        return schedule.strata(num_clients, k, k, asked // k)
    if entrant.method == "random_walk":
        return schedule.random_walk(ring(num_clients), k)
    plan = schedule.random_models if entrant.method == "random_sampling" else schedule.per_client_permutations
    return plan(num_clients, k)


def _descent(s: LeagueSettings, rate: float | Array) -> optax.GradientTransformation:
    """The clients' optimiser, with the weight decay added to the gradient."""
    steps = optax.adam(rate) if s.optimizer == "adam" else sgd(rate)
    return optax.chain(optax.add_decayed_weights(s.weight_decay), steps) if s.weight_decay else steps


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


def measure_clients(
    largest: Mapping[str, int], algorithm: Algorithm, state: PyTree, sets: EvaluationSets
) -> dict[str, Array]:
    """Of every split the mean over clients of the accuracy of what each predicts for its own examples (section V-D).

    Of the test split also ``shared``, that of what everybody predicts, and the control ``others``, that of what each
    client predicts for the next one's examples. Clients without examples do not count; outputs that are not finite have
    accuracy 0. ``largest`` are sizes of clients that none exceeds: of PARTS.
    """
    asked = (("validation", 0), ("test", 0), ("test", 1))  # whose examples, from the client on

    def one(client: Array) -> Array:
        views = [
            client_view(sets[part], (client + on) % sets[part].num_clients, jnp.bool_(True), largest[part])
            for part, on in asked
        ]
        x = jnp.concatenate([sets[part].x[view.rows] for (part, _), view in zip(asked, views, strict=True)])
        everybodys = own = algorithm.predict(state, x).mean
        if algorithm.personal is not None:
            own = algorithm.personal(state, sets["train"], largest["train"], client, x).mean
        found, ends = [], np.cumsum([largest[part] for part, _ in asked])
        for outputs, at in ((own, 0), (own, 1), (own, 2), (everybodys, 1)):
            mine = outputs[ends[at] - largest[asked[at][0]] : ends[at]]
            real = jnp.arange(len(mine)) < views[at].size
            right = (mine.argmax(axis=-1) == sets[asked[at][0]].y[views[at].rows]) & jnp.isfinite(mine).all(axis=-1)
            found.append(jnp.sum(right & real) / views[at].size)  # NaN for a client without examples
        return jnp.stack(found)

    by_client = jax.lax.map(one, jnp.arange(sets["test"].num_clients, dtype=jnp.int32))
    names = ("validation.accuracy", "test.accuracy", "test.others", "test.shared")
    return dict(zip(names, jnp.nanmean(by_client, axis=0), strict=True))


def last_rounds(values: np.ndarray) -> np.ndarray:
    """What is averaged of a run's values [E]: those of the last rounds."""
    return values[-LAST:].astype(np.float64)


def fell(accuracy: np.ndarray) -> float:
    """By how much a run's accuracy [E], mean over ``LAST`` evaluations, is at the end below its best."""
    means = np.convolve(accuracy, np.ones(LAST) / LAST, "valid")
    return float(means.max() - means[-1])


def check(study: Study) -> None:
    """Divide the first seed's data in every way, and build every method with every rate."""
    s = study.settings
    if s.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, must not be among the seeds that are measured")
    for classes in s.classes_per_client:
        for method in methods(s, divide(study, classes, study.seeds[0])).values():
            for rate in method.rates:
                method.build(0, rate)


def play_all(study: Study, name: str = "") -> tuple[list[Scores], dict[int, Runs]]:
    """Every entrant on clients of every kind: its rate by validation, then all seeds.

    The metrics that are kept call each run by its method, its rate, its clients and ``name``.
    """
    s, found, runs = study.settings, list[Scores](), dict[int, Runs]()
    depends_on = {name: getattr(s, name) for name in DECISIVE}
    for classes in s.classes_per_client:
        divided = partial(divide, study, classes)
        largest = _largest([divided(seed) for seed in (*study.seeds, s.tuning_seed)])
        score = partial(measure_clients, largest) if "test" in largest else measure
        at = {**depends_on, "classes": classes}
        called = ", ".join(filter(None, (scheme_name(classes), name)))
        bench = Bench(study, divided, partial(methods, s), at, score, 1, largest["train"], called=called)
        known = entrants(s)
        chosen = {e.key: tune(bench, e.key, s.tuning_seed, s.tuning_rounds) for e in known}
        configs = {key: tuned.config for key, tuned in chosen.items()}
        runs[classes] = repeat(bench, configs, dict.fromkeys(configs, s.num_rounds))
        found += [scores_of(e, classes, chosen[e.key], runs[classes][e.key]) for e in known]
    return found, runs


def _largest(trials: Sequence[Trial]) -> dict[str, int]:
    """The size of the largest client of any trial: of train, and of the parts in which each has examples of its own."""
    sizes = [{part: max_client_size(held) for part, held in _by_client(t).items()} for t in trials]
    return {part: max(of[part] for of in sizes) for part in sizes[0]}


def scores_of(entrant: Entrant, classes: int, chosen: Tuned, records: Sequence[Any]) -> Scores:
    """What the runs of an entrant, one a seed, say."""
    names = [n.partition(".")[2] for n in records[0].metrics if n.startswith("test.")]
    values = {n: np.array([last_rounds(r.metrics[f"test.{n}"]).mean() for r in records]) for n in names}
    values["fell"] = np.array([fell(r.test) for r in records])
    spread = float(np.concatenate([last_rounds(r.test) for r in records]).std(ddof=1))
    return Scores(entrant, classes, chosen, values, spread)
