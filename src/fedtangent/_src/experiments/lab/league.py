"""Methods of the Fed-ensemble papers on one data set: accuracy after equal rounds and bytes, seeds paired.

For each seed all methods have the same data, clients, test examples and first network. Each method takes the learning
rate, from one grid for all, that is best on validation examples of a further seed, on which nothing is measured. As in
the papers (FE-2024, section V-C), an accuracy is the mean over the last three rounds. Where clients are users, each is
tested on its own examples with its own prediction, and an accuracy is the mean over clients (section V-D).
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

from fedtangent._src import checks, data, models
from fedtangent._src.data.dataset import IMAGE, TOKENS, VECTOR
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.data.sharing import without
from fedtangent._src.experiments.lab.runner import Study, within
from fedtangent._src.experiments.lab.runs import (
    Bench,
    EvaluationSets,
    Method,
    Runs,
    Tuned,
    build_all,
    finite_accuracy,
    repeat,
    tune,
)
from fedtangent._src.experiments.lab.trials import (
    DISTORTED,
    IID,
    USERS,
    Trial,
    dealt,
    distorted_by,
    draw,
    first_users,
    of_users,
    partition_of,
    scheme_name,
    trial_of,
    with_partition,
)
from fedtangent._src.federated import algorithms, faults, schedule
from fedtangent._src.federated.algorithms.distil import FEDBE
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.graph import ring
from fedtangent._src.federated.local import Work, client_view
from fedtangent._src.federated.predict import weighted_models
from fedtangent._src.measures import uncertainty
from fedtangent._src.optimizers import Optimizer, Rate, at_rate, sgd, staircase_decay
from fedtangent._src.types import Algorithm, Array, FederatedData, Model, PyTree, Schedule

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
WIDTHS: dict[str, Callable[[int], dict[str, Any]]] = {  # the options of a model of a given width
    "mlp": lambda width: {"widths": (width,)},
    "cnn": lambda width: {"filters": (width, 2 * width), "hidden": (16 * width,)},
    "lstm": lambda width: {"units": width},
    "resnet18": lambda width: {"width": width},
    "resnet34": lambda width: {"width": width},
}
MODELS = ("mlp", "cnn", "resnet18", "resnet34", "mobilenet_v2", "shufflenet_v2", "lstm")
# The parameters that LG-FedAvg's clients keep: all below a network's dense layers, of an mlp all below its last layer.
BELOW = "^(?!Dense|output|2/)"
DECAY_EVERY = 10  # rounds, after each of which the papers decay the learning rate by 0.99


@dataclass(frozen=True)
class LeagueSettings:
    """The settings that all methods share; the defaults are those of the papers' MNIST."""

    methods: tuple[str, ...] = within(("fed_avg", "fed_prox", "fed_ensemble"), of=tuple(LABELS))
    num_clients: int = within(100, least=0)  # where clients are users: the first so many, 0 for all of them
    classes_per_client: tuple[int, ...] = within((IID, 2), least=DISTORTED)  # or 0, -1, -2: see trials.py
    num_models: tuple[int, ...] = (5,)  # K of the ensembles
    clients_per_round: int = within(0, least=0)  # that the server asks; 0: all. For an ensemble drawn from K strata
    keep_first: int = within(0, least=0)  # a round ends with so many answers; 0: with all
    completion_spread: float = within(1.0, above=0)  # standard deviation of the log of a client's time
    slowness: float = within(0.0, at_least=0)  # how much the log of that time rises with a client's labels
    num_rounds: int = within(100, least=LAST)
    local_epochs: int = 10
    batch_size: int = 16
    model: str = within("cnn", of=MODELS)
    width: int = within(0, least=0)  # of an MLP or LSTM, or of the first layer of a CNN or ResNet; 0: the model's own
    optimizer: str = within("sgd", of=("sgd", "adam"))  # the clients'; Adam's state is reset in every round
    learning_rates: tuple[float, ...] = within((0.001, 0.003, 0.01, 0.03, 0.1), above=0)
    decay: float = within(0.99, above=0, at_most=1)
    weight_decay: float = within(0.001, at_least=0)
    proximal: float = within(0.01, above=0)  # mu of FedProx
    dynamic: float = within(0.01, above=0)  # mu of FedDyn, its alpha
    personal: float = within(0.1, at_least=0)  # mu of Ditto, its lambda
    gamma: float = within(0.1, above=0)  # of the weights that a client gives the models of an ensemble (FE-2024, eq. 4)
    server_examples: int = 1000  # unlabelled examples on which FedBE distils; no client holds them
    distillation_epochs: int = 20  # of FedBE's student
    tuning_rounds: int = within(20, least=LAST)
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)  # 0: all
    num_validation: int = 5000
    num_test: int = within(0, least=0)


# The settings that a run depends on, besides its data and its configuration.
DECISIVE = ("clients_per_round", "keep_first", "completion_spread", "slowness", "local_epochs", "batch_size", "model",
            "width", "optimizer", "decay", "weight_decay", "proximal", "dynamic", "personal", "gamma",
            "server_examples", "distillation_epochs")  # fmt: skip


class Entrant(NamedTuple):
    """A method and, for an ensemble, the number of its models."""

    method: str
    num_models: int = 1

    @property
    def key(self) -> str:
        """The entrant's name in files."""
        return self.method if self.num_models == 1 else f"{self.method}-{self.num_models}"

    @property
    def label(self) -> str:
        """The entrant's name in tables."""
        return LABELS[self.method] + (f", K = {self.num_models}" if self.num_models > 1 else "")


class Scores(NamedTuple):
    """Scores of one entrant on clients of one kind."""

    entrant: Entrant
    classes: int  # of a client, as in the settings
    chosen: Tuned
    values: dict[str, np.ndarray]  # [seeds] means over the last rounds, by metric of the test split; and ``fell``
    spread: float  # standard deviation of the accuracy over the last rounds of all seeds


def entrants(s: LeagueSettings) -> list[Entrant]:
    """Returns every method, an ensemble once for each number of models."""
    return [Entrant(name, k) for name in s.methods for k in (s.num_models if name in ENSEMBLES else (1,))]


# ---- one seed's data, and the methods on it ----------------------------------------------------------------------


def divide(study: Study, classes: int, seed: int) -> Trial:
    """Divides the data of one seed among clients of ``classes`` classes (or IID, USERS, DISTORTED)."""
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
    """Builds the network that ``s.model`` names; raises ``ValueError`` for inputs that it does not read."""
    x = trial.data.x
    kind = TOKENS if jnp.issubdtype(x.dtype, jnp.integer) else IMAGE if x.ndim == 4 else VECTOR
    own: dict[str, Any] = {"parameterization": "standard"} if s.model == "mlp" else {}
    if s.width and s.model not in WIDTHS:
        raise ValueError(f"width: got {s.width}, must be 0 for the model {s.model}, which has its own")
    if s.width:
        own |= WIDTHS[s.model](s.width)
    return models.build(s.model, x.shape[1:], trial.num_classes, kind, **own)


def methods(s: LeagueSettings, trial: Trial) -> dict[str, Method]:
    """Returns every entrant's method on one seed's data."""
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
        build = partial(_build, s, model, entrant, schedule_of(s, trial, entrant), own)
        bound = "server_data" in own or s.keep_first > 0
        found[entrant.key] = Method(entrant.label, s.learning_rates, (0,), build, held, sets, bound_to_seed=bound)
    return found


def _by_client(trial: Trial) -> dict[str, FederatedData]:
    """Returns the clients' training examples, and, if clients have their own, those of the other parts."""
    return {"train": trial.data, **(trial.by_client or {})}


def _at_server(s: LeagueSettings, trial: Trial) -> tuple[Any, Array]:
    """Returns the clients' data without the examples that the server holds, and the inputs of these."""
    held, clients = trial.data, partition_of(trial.data)
    rows = np.random.default_rng([trial.seed, 2]).permutation(clients.indices)[: s.server_examples]
    return with_partition(held, without(clients, rows, "server_examples")), held.x[np.sort(rows)]


def _build(
    s: LeagueSettings,
    model: Model,
    entrant: Entrant,
    plan: Schedule,
    own: Mapping[str, Any],
    steps: Any,
    rate: float | Array,
) -> Algorithm:
    """Builds the entrant's algorithm; ``own`` are arguments of its recipe alone, and ``rate`` may be traced."""
    decayed = staircase_decay(rate, s.decay, DECAY_EVERY)
    plain = s.optimizer == "sgd" and not s.weight_decay
    shared: dict[str, Any] = {
        **({"client_learning_rate": decayed} if plain else {"client_optimizer": descents(s, decayed)}),
        "work": Work(epochs=s.local_epochs, batch_size=s.batch_size),
        "loss": "cross_entropy",
        **own,
    }
    if entrant.method in MU:
        shared["mu"] = getattr(s, MU[entrant.method])
    recipe = getattr(algorithms, entrant.method, None)
    if recipe is None or entrant.method == "fed_ensemble":
        base = algorithms.fed_dyn if entrant.method == "fed_dyn_ensemble" else algorithms.fed_avg
        return algorithms.fed_ensemble(model, plan, base=base, **arguments_of(base, shared))
    algorithm: Algorithm = recipe(model, plan, **arguments_of(recipe, shared))
    return algorithm


def schedule_of(s: LeagueSettings, trial: Trial, entrant: Entrant) -> Schedule:
    """Builds the schedule: all clients that are asked train, or the first ``keep_first`` of them to answer."""
    plan = _all_asked(s, trial.data.num_clients, entrant)
    if not s.keep_first:
        return plan
    if entrant.method == "random_walk":
        raise ValueError(f"keep_first: got {s.keep_first}, must be 0 for random_walk, which has no server that waits")
    checks.whole("keep_first", s.keep_first, 1, plan.num_slots)
    return faults.stragglers(plan, s.keep_first, completion_times(s, trial), spread=s.completion_spread)


def completion_times(s: LeagueSettings, trial: Trial) -> np.ndarray:
    """Computes each client's mean time for a round, [N], in proportion to its examples; the mean over clients is 1.

    With a ``slowness`` it also rises with the mean of a client's labels, so that the same clients are always late.
    """
    clients = partition_of(trial.data)
    labels, sizes = np.asarray(trial.data.y)[clients.indices], clients.sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    means = np.bincount(owner, labels, len(sizes)) / np.maximum(sizes, 1)
    score = (means - means.mean()) / max(float(means.std()), 1e-12)
    times = np.maximum(sizes, 1) * np.exp(s.slowness * score)
    return np.asarray(times / times.mean())


def _all_asked(s: LeagueSettings, num_clients: int, entrant: Entrant) -> Schedule:
    """Builds the schedule if every client that is asked answers.

    Without ``clients_per_round`` all clients train in every round, for an ensemble one model each; in a random walk
    each model is trained by one client. Sampled clients of an ensemble come from K strata, one for each model (FE-2021,
    algorithm 1).
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


def descents(s: LeagueSettings, rate: Rate) -> Optimizer:
    """Returns the clients' optimiser of every round."""
    return at_rate(partial(descent, s.optimizer, s.weight_decay), rate)


def descent(optimizer: str, weight_decay: float, rate: float | Array) -> optax.GradientTransformation:
    """Builds the clients' optimiser, "sgd" or "adam", with the weight decay added to the gradient."""
    steps = optax.adam(rate) if optimizer == "adam" else sgd(rate)
    return optax.chain(optax.add_decayed_weights(weight_decay), steps) if weight_decay else steps


# ---- what is measured --------------------------------------------------------------------------------------------


def measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes the ensemble's accuracy on every split; on the test split also its models' accuracies and entropy.

    They are the best and the worst model's accuracy, and the entropy of a model's predictive distribution, mean over
    examples and models (FE-2024, Table V). If some output is not finite, the accuracy is 0.
    """
    found = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        found[f"{name}.accuracy"] = finite_accuracy(members, labels)
        if name == "test":
            each = jnp.mean((members.argmax(axis=-1) == labels[None]).astype(members.dtype), axis=1)
            entropies = jax.lax.map(lambda one: jnp.mean(uncertainty.predictive_entropy(one[None])), members)
            found |= {"test.largest": each.max(), "test.least": each.min(), "test.entropy": jnp.mean(entropies)}
    return found


def measure_clients(
    largest: Mapping[str, int], algorithm: Algorithm, state: PyTree, sets: EvaluationSets
) -> dict[str, Array]:
    """Computes by split the mean over clients of the accuracy of their own predictions on their own examples.

    This is the measure of section V-D. For the test split also ``shared``, the accuracy of the prediction that all
    clients share, and the control ``others``, that of each client's prediction on the next client's examples. Clients
    without examples do not count; a prediction that is not finite is wrong.

    Args:
        largest: Upper bounds of the clients' sizes in each of PARTS.
        algorithm: The algorithm.
        state: Its state.
        sets: Examples of all clients by part.
    """
    asked = (("validation", 0), ("test", 0), ("test", 1))  # a part, and how many clients further on its examples are

    def one(client: Array) -> Array:
        views = [
            client_view(sets[part], (client + on) % sets[part].num_clients, jnp.bool_(True), largest[part])
            for part, on in asked
        ]
        x = jnp.concatenate([sets[part].x[view.rows] for (part, _), view in zip(asked, views, strict=True)])
        shared = own = algorithm.predict(state, x).mean
        if algorithm.personal is not None:
            own = algorithm.personal(state, sets["train"], largest["train"], client, x).mean
        found, ends = [], np.cumsum([largest[part] for part, _ in asked])
        for outputs, at in ((own, 0), (own, 1), (own, 2), (shared, 1)):
            mine = outputs[ends[at] - largest[asked[at][0]] : ends[at]]
            real = jnp.arange(len(mine)) < views[at].size
            right = (mine.argmax(axis=-1) == sets[asked[at][0]].y[views[at].rows]) & jnp.isfinite(mine).all(axis=-1)
            found.append(jnp.sum(right & real) / views[at].size)  # NaN for a client without examples
        return jnp.stack(found)

    by_client = jax.lax.map(one, jnp.arange(sets["test"].num_clients, dtype=jnp.int32))
    names = ("validation.accuracy", "test.accuracy", "test.others", "test.shared")
    return dict(zip(names, jnp.nanmean(by_client, axis=0), strict=True))


def last_rounds(values: np.ndarray) -> np.ndarray:
    """Returns the last LAST of a run's values [E]."""
    return values[-LAST:].astype(np.float64)


def fell(accuracy: np.ndarray) -> float:
    """Computes by how much a run's accuracy [E], averaged over ``LAST`` evaluations, ends below its best average."""
    means = np.convolve(accuracy, np.ones(LAST) / LAST, "valid")
    return float(means.max() - means[-1])


def check(study: Study) -> None:
    """Divides the first seed's data in every way and builds every method with each rate; raises ``ValueError``."""
    s = study.settings
    if s.tuning_seed in study.seeds:
        raise ValueError(f"tuning_seed: got {s.tuning_seed}, must not be among the seeds that are measured")
    for classes in s.classes_per_client:
        build_all(methods(s, divide(study, classes, study.seeds[0])))


def play_all(study: Study, name: str = "") -> tuple[list[Scores], dict[int, Runs]]:
    """Chooses every entrant's rate on clients of every kind, and runs it on all seeds.

    In the kept metrics a run is named after its method, its rate, its clients and ``name``.

    Returns:
        Scores of all entrants, and the runs by ``classes``.
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
    """Computes the size of the largest client of any trial, in each part in which clients have examples."""
    sizes = [{part: max_client_size(held) for part, held in _by_client(t).items()} for t in trials]
    return {part: max(of[part] for of in sizes) for part in sizes[0]}


def scores_of(entrant: Entrant, classes: int, chosen: Tuned, records: Sequence[Any]) -> Scores:
    """Computes an entrant's scores from its runs, one for each seed."""
    names = [n.partition(".")[2] for n in records[0].metrics if n.startswith("test.")]
    values = {n: np.array([last_rounds(r.metrics[f"test.{n}"]).mean() for r in records]) for n in names}
    values["fell"] = np.array([fell(r.test) for r in records])
    spread = float(np.concatenate([last_rounds(r.test) for r in records]).std(ddof=1))
    return Scores(entrant, classes, chosen, values, spread)
