"""Methods of the Fed-ensemble papers on one data set: accuracy after equal rounds and bytes, seeds paired.

For each seed all methods have the same data, clients, test examples and initial network. Each method takes the learning
rate that is best on validation examples of a further seed, which is used for nothing else; the grid is the same for
all. As in FE-2024, section V-C, an accuracy is the mean over the last three rounds. Where clients are users, each is
tested on its own examples with its own prediction, and an accuracy is the mean over clients (section V-D).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedtangent as ft
from fedtangent._src import checks
from fedtangent._src.data.dataset import IMAGE, TOKENS, VECTOR
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.data.sharing import without
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, EvaluationSets, Method, Record, Runs, Steps, Tuned
from fedtangent._src.experiments.lab.runner import Study, within
from fedtangent._src.experiments.lab.trials import DISTORTED, IID, USERS, Trial, partition_of, scheme_name
from fedtangent._src.federated.algorithms.distil import FEDBE
from fedtangent._src.federated.algorithms.entry import arguments_of
from fedtangent._src.federated.local import client_view
from fedtangent._src.measures import uncertainty
from fedtangent._src.output.run_plots import curves
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
class ClassifierSettings:
    """The settings of all methods in the Fed-ensemble papers' tables; the defaults are the papers' for MNIST."""

    methods: tuple[str, ...] = within(("fed_avg", "fed_prox", "fed_ensemble"), of=tuple(LABELS))
    num_clients: int = within(100, least=0)  # where clients are users: the first so many, 0 for all of them
    classes_per_client: tuple[int, ...] = within((IID, 2), least=DISTORTED)  # or 0, -1, -2: see lab/trials.py
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
    distillation_epochs: int = 200  # of FedBE's student: as many steps as FedBE's 20 epochs over 10,000 examples
    tuning_rounds: int = within(20, least=LAST)
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)  # 0: all
    num_validation: int = 5000
    num_test: int = within(0, least=0)


# The settings that a run depends on, besides its data and its configuration.
DECISIVE = (
    "clients_per_round keep_first completion_spread slowness local_epochs batch_size model width optimizer decay "
    "weight_decay proximal dynamic personal gamma server_examples distillation_epochs"
)


class Entrant(NamedTuple):
    """A method of the comparison together with the number of its models, 1 unless it is an ensemble."""

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
    """Scores of one entrant (a method with a number of models) on one kind of clients, with all seeds.

    Attributes:
        classes: Classes of a client; 0 for a random division, -1 for one client per user of the data set, -2 for a
            random division with distorted images.
        values: Means over the last three rounds, [seeds], by metric of the test split; "fell" is how far the accuracy
            ends below its best.
        chosen: Hyper-parameters chosen by validation, and the scores of the grid.
        spread: Standard deviation of the accuracy over the last three rounds of all seeds.
    """

    entrant: Entrant
    classes: int
    chosen: Tuned
    values: dict[str, np.ndarray]
    spread: float


def entrants(settings: ClassifierSettings) -> list[Entrant]:
    """Returns the entrants of a comparison: every method, an ensemble once for each number of models."""
    return [Entrant(name, k) for name in settings.methods for k in (settings.num_models if name in ENSEMBLES else (1,))]


# ---- one seed's data, and the methods on it ----------------------------------------------------------------------


def divide(study: Study, classes: int, seed: int) -> Trial:
    """Draws the examples of one seed and divides them among clients.

    Args:
        study: The checked request, which names the data set and has the settings.
        classes: Number of classes of a client; 0 for a random division, -1 for one client per user of the data set, -2
            for a random division with the images of each client distorted in its own way.
        seed: Seed of the draw and the division.

    Raises:
        ValueError: The data set cannot be loaded, has too few examples or no users, or cannot be divided in this way.
    """
    settings, loaded = study.settings, ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed)
    if classes == USERS:
        loaded = trials.first_users(loaded, settings.num_clients)
    examples = trials.draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    if classes == USERS:
        return trials.trial_of(examples, trials.of_users(loaded, examples), seed, loaded.num_classes)
    if classes == DISTORTED:
        return trials.trial_of(*trials.distorted_by(examples, settings.num_clients, seed), seed, loaded.num_classes)
    clients = trials.dealt(examples.y["train"], settings.num_clients, classes, seed)
    return trials.trial_of(examples, clients, seed, loaded.num_classes)


def _network(settings: ClassifierSettings, trial: Trial) -> Model:
    """Builds the network that ``settings.model`` names; raises ``ValueError`` if width or inputs do not fit it."""
    x = trial.data.x
    kind = TOKENS if jnp.issubdtype(x.dtype, jnp.integer) else IMAGE if x.ndim == 4 else VECTOR
    options: dict[str, Any] = {"parameterization": "standard"} if settings.model == "mlp" else {}
    if settings.width and settings.model not in WIDTHS:
        raise ValueError(f"width: got {settings.width}, must be 0 for {settings.model}, whose width is fixed here")
    if settings.width:
        options |= WIDTHS[settings.model](settings.width)
    return ft.models.build(settings.model, x.shape[1:], trial.num_classes, kind, **options)


def _methods(settings: ClassifierSettings, trial: Trial) -> dict[str, Method]:
    """Builds the ``Method`` of every entrant (method with a number of models) on one seed's data, by entrant's key."""
    model, by_key = _network(settings, trial), dict[str, Method]()
    sets = _by_client(trial) if trial.by_client else trial.splits
    for entrant in entrants(settings):
        data, options = trial.data, dict[str, Any]()
        if entrant.method == "fed_be":
            data, options["server_data"] = _at_server(settings, trial)
            options["distillation"] = FEDBE._replace(epochs=settings.distillation_epochs)
        if entrant.method in ENSEMBLES and trial.by_client:
            options["personal"] = ft.parts.weighted_models("cross_entropy", settings.gamma)
        if entrant.method == "lg_fed_avg":
            options["private"] = BELOW
        build = partial(_build, settings, model, entrant, schedule_of(settings, trial, entrant), options)
        bound = "server_data" in options or settings.keep_first > 0
        by_key[entrant.key] = Method(
            entrant.label, settings.learning_rates, (0,), build, data, sets, bound_to_seed=bound
        )
    return by_key


def _by_client(trial: Trial) -> dict[str, FederatedData]:
    """Returns the clients' examples of each split that is divided among clients, at least "train"."""
    return {"train": trial.data, **(trial.by_client or {})}


def _at_server(settings: ClassifierSettings, trial: Trial) -> tuple[FederatedData, Array]:
    """Moves examples from the clients to FedBE's server: returns the clients' remaining data, and the moved inputs."""
    clients = partition_of(trial.data)
    rows = np.random.default_rng([trial.seed, 2]).permutation(clients.indices)[: settings.server_examples]
    remaining = without(clients, rows, "server_examples")
    return trials.with_partition(trial.data, remaining), trial.data.x[np.sort(rows)]


def _build(
    settings: ClassifierSettings,
    model: Model,
    entrant: Entrant,
    schedule: Schedule,
    options: Mapping[str, object],
    steps: Steps,
    rate: float | Array,
) -> Algorithm:
    """Builds an entrant's algorithm for a learning rate, which decays after every ten rounds.

    Args:
        settings: Settings of the comparison.
        model: The network.
        entrant: The method and its number of models.
        schedule: Which client trains which model.
        options: Further arguments of this method's recipe, such as FedBE's ``server_data``.
        steps: Not used, as local work is counted in epochs.
        rate: Learning rate; may be a JAX tracer.
    """
    decayed = ft.optimizers.staircase_decay(rate, settings.decay, DECAY_EVERY)
    optimizer = ft.optimizers.at_rate(partial(descent, settings.optimizer, settings.weight_decay), decayed)
    is_plain = settings.optimizer == "sgd" and not settings.weight_decay
    arguments: dict[str, Any] = {
        **({"client_learning_rate": decayed} if is_plain else {"client_optimizer": optimizer}),
        "work": ft.Work(epochs=settings.local_epochs, batch_size=settings.batch_size),
        "loss": "cross_entropy",
        **options,
    }
    if entrant.method in MU:
        arguments["mu"] = getattr(settings, MU[entrant.method])
    recipe = getattr(ft, entrant.method, None)
    if recipe is None or entrant.method == "fed_ensemble":
        base = ft.fed_dyn if entrant.method == "fed_dyn_ensemble" else ft.fed_avg
        return ft.fed_ensemble(model, schedule, base=base, **arguments_of(base, arguments))
    algorithm: Algorithm = recipe(model, schedule, **arguments_of(recipe, arguments))
    return algorithm


def schedule_of(settings: ClassifierSettings, trial: Trial, entrant: Entrant) -> Schedule:
    """Builds an entrant's schedule: of the invited clients the first ``keep_first`` to answer train (0: all of them).

    Args:
        settings: Settings of the comparison.
        trial: Data of one seed; a client's time depends on its examples.
        entrant: The method and its number of models.

    Raises:
        ValueError: ``clients_per_round`` or ``keep_first`` does not suit the method or the number of clients.
    """
    schedule = _all_invited(settings, trial.data.num_clients, entrant)
    if not settings.keep_first:
        return schedule
    if entrant.method == "random_walk":
        raise ValueError(
            f"keep_first: got {settings.keep_first}, must be 0 for random_walk, which has no server that waits"
        )
    checks.whole("keep_first", settings.keep_first, 1, schedule.num_slots)
    return ft.faults.stragglers(
        schedule, settings.keep_first, _completion_times(settings, trial), spread=settings.completion_spread
    )


def _completion_times(settings: ClassifierSettings, trial: Trial) -> np.ndarray:
    """Computes each client's mean time for a round, [N], in proportion to its examples; the mean over clients is 1.

    With ``settings.slowness`` above 0 the time also rises with the mean of the client's labels, so that the same
    clients are always late.
    """
    clients = partition_of(trial.data)
    labels, sizes = np.asarray(trial.data.y)[clients.indices], clients.sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    means = np.bincount(owner, labels, len(sizes)) / np.maximum(sizes, 1)
    score = (means - means.mean()) / max(float(means.std()), 1e-12)
    times = np.maximum(sizes, 1) * np.exp(settings.slowness * score)
    return np.asarray(times / times.mean())


def _all_invited(settings: ClassifierSettings, num_clients: int, entrant: Entrant) -> Schedule:
    """Builds an entrant's schedule in which every invited client answers.

    If ``clients_per_round`` is 0 all clients train in every round, for an ensemble one model each; in a random walk
    each model is trained by one client. Sampled clients of an ensemble come from K strata, one for each model (FE-2021,
    algorithm 1). Raises ``ValueError`` if ``clients_per_round`` does not suit the method.
    """
    invited, k = checks.whole("clients_per_round", settings.clients_per_round, 0, num_clients), entrant.num_models
    if entrant.method not in ENSEMBLES:
        return ft.schedules.uniform_sampling(num_clients, invited) if invited else ft.schedules.all_clients(num_clients)
    if invited and entrant.method not in ("fed_ensemble", "fed_dyn_ensemble"):
        raise ValueError(
            f"clients_per_round: got {invited}, must be 0 for {entrant.method}, in which all clients take part"
        )
    if invited % k:
        raise ValueError(f"clients_per_round: got {invited}, must be a multiple of {k}, the number of models")
    if invited:
        return ft.schedules.strata(num_clients, k, k, invited // k)
    if entrant.method == "random_walk":
        return ft.schedules.random_walk(ft.graphs.ring(num_clients), k)
    is_random = entrant.method == "random_sampling"
    return (ft.schedules.random_models if is_random else ft.schedules.per_client_permutations)(num_clients, k)


def descent(optimizer: str, weight_decay: float, rate: float | Array) -> optax.GradientTransformation:
    """Builds the clients' optimiser: SGD or Adam, with weight decay.

    Args:
        optimizer: "sgd" or "adam".
        weight_decay: The weights times this number are added to the gradient.
        rate: Learning rate; may be a JAX tracer.
    """
    steps = optax.adam(rate) if optimizer == "adam" else ft.optimizers.sgd(rate)
    return optax.chain(optax.add_decayed_weights(weight_decay), steps) if weight_decay else steps


# ---- what is measured --------------------------------------------------------------------------------------------


def _measure(algorithm: Algorithm, state: PyTree, splits: EvaluationSets) -> dict[str, Array]:
    """Computes the ensemble's accuracy on each split, such as "test.accuracy"; 0 if an output is not finite.

    On the test split it adds the accuracy of the best and of the worst model, "test.largest" and "test.least", and the
    entropy in nats of a model's predictions, "test.entropy", a mean over examples and models (FE-2024, Table V).
    """
    metrics = {}
    for name, (x, labels) in splits.items():
        members = algorithm.predict(state, x).members
        metrics[f"{name}.accuracy"] = harness.finite_accuracy(members, labels)
        if name == "test":
            of_models = jnp.mean((members.argmax(axis=-1) == labels[None]).astype(members.dtype), axis=1)
            entropies = jax.lax.map(lambda one: jnp.mean(uncertainty.predictive_entropy(one[None])), members)
            metrics |= {"test.largest": of_models.max(), "test.least": of_models.min()}
            metrics["test.entropy"] = jnp.mean(entropies)
    return metrics


def _measure_clients(
    largest: Mapping[str, int], algorithm: Algorithm, state: PyTree, sets: EvaluationSets
) -> dict[str, Array]:
    """Computes accuracies of clients that are tested on their own examples, each a mean over clients with examples.

    A client's personalised prediction has "validation.accuracy" and "test.accuracy", and as a control "test.others", on
    the next client's test examples. The prediction that all clients share has "test.shared", on the client's test
    examples (FE-2024, section V-D). A prediction that is not finite counts as wrong.

    Args:
        largest: Number of examples of the largest client, by split.
        algorithm: The algorithm.
        state: State of the algorithm.
        sets: The clients' examples, by "train", "validation" and "test".
    """
    views_of = (("validation", 0), ("test", 0), ("test", 1))  # a part, and how many clients further on its examples are

    def of_client(client: Array) -> Array:
        views = [
            client_view(sets[part], (client + on) % sets[part].num_clients, jnp.bool_(True), largest[part])
            for part, on in views_of
        ]
        x = jnp.concatenate([sets[part].x[view.rows] for (part, _), view in zip(views_of, views, strict=True)])
        shared = personal = algorithm.predict(state, x).mean
        if algorithm.personal is not None:
            personal = algorithm.personal(state, sets["train"], largest["train"], client, x).mean
        accuracies, ends = [], np.cumsum([largest[part] for part, _ in views_of])
        for outputs, at in ((personal, 0), (personal, 1), (personal, 2), (shared, 1)):
            part = views_of[at][0]
            of_view = outputs[ends[at] - largest[part] : ends[at]]
            is_real = jnp.arange(len(of_view)) < views[at].size
            right = of_view.argmax(axis=-1) == sets[part].y[views[at].rows]
            right &= jnp.isfinite(of_view).all(axis=-1)
            accuracies.append(jnp.sum(right & is_real) / views[at].size)  # NaN for a client without examples
        return jnp.stack(accuracies)

    by_client = jax.lax.map(of_client, jnp.arange(sets["test"].num_clients, dtype=jnp.int32))
    names = ("validation.accuracy", "test.accuracy", "test.others", "test.shared")
    return dict(zip(names, jnp.nanmean(by_client, axis=0), strict=True))


def _last_rounds(values: np.ndarray) -> np.ndarray:
    """Returns the last three of the values [E] of a run's evaluations, as float64."""
    return values[-LAST:].astype(np.float64)


def fell(accuracy: np.ndarray) -> float:
    """Computes how far accuracies [E] end below their best: largest mean of three successive values minus the last."""
    means = np.convolve(accuracy, np.ones(LAST) / LAST, "valid")
    return float(means.max() - means[-1])


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings: divides the first seed's data in every way and builds all methods."""
    settings = study.settings
    harness.check_tuning_seed(study)
    for classes in settings.classes_per_client:
        harness.build_all(_methods(settings, divide(study, classes, study.seeds[0])))


def play_all(studies: Mapping[str, Study]) -> dict[str, tuple[list[Scores], dict[int, Runs]]]:
    """Tunes every entrant (method with a number of models) on every kind of clients and trains it with all seeds.

    In metrics.csv a run is named after its method, rate, kind of clients and study.

    Args:
        studies: Studies of the same data set and seeds, by name.

    Returns:
        For each study the scores of all entrants, and the runs by classes of a client.
    """
    places = [(name, classes) for name, study in studies.items() for classes in study.settings.classes_per_client]
    results: dict[str, tuple[list[Scores], dict[int, Runs]]] = {name: ([], {}) for name in studies}
    for name, classes in places:
        study, (scores, runs) = studies[name], results[name]
        bench = _bench(study, classes, name)
        if (name, classes) == places[0]:
            harness.plan(bench, len(places), len(places))
        tuned = harness.tune_all(bench)
        runs[classes] = harness.repeat_all(bench, tuned)
        keys = {entrant.key: entrant for entrant in entrants(study.settings)}
        scores += [_scores(keys[key], classes, tuned[key], runs[classes][key]) for key in keys]
    return results


def _bench(study: Study, classes: int, name: str) -> Bench:
    """Builds the ``Bench``, which runs all methods, for one kind of clients (``classes`` as in ``divide``).

    ``name`` is the study's name.
    """
    settings, of_seed = study.settings, functools.cache(partial(divide, study, classes))
    largest = _largest([of_seed(seed) for seed in (*study.seeds, settings.tuning_seed)])
    score = partial(_measure_clients, largest) if "test" in largest else _measure
    depends_on = {**harness.decisive(settings, DECISIVE), "classes": classes}
    called = ", ".join(filter(None, (scheme_name(classes), name)))
    return Bench(study, of_seed, partial(_methods, settings), depends_on, score, 1, largest["train"], called=called)


def _largest(trials: Sequence[Trial]) -> dict[str, int]:
    """Computes the size of the largest client in any trial, for each split that is divided among clients."""
    sizes = [{part: max_client_size(data) for part, data in _by_client(trial).items()} for trial in trials]
    return {part: max(by_part[part] for by_part in sizes) for part in sizes[0]}


def _scores(entrant: Entrant, classes: int, chosen: Tuned, records: Sequence[Record]) -> Scores:
    """Computes the scores of an entrant on one kind of clients (``classes``) from its runs, one for each seed."""
    names = [n.partition(".")[2] for n in records[0].metrics if n.startswith("test.")]
    values = {n: np.array([_last_rounds(r.metrics[f"test.{n}"]).mean() for r in records]) for n in names}
    values["fell"] = np.array([fell(r.test) for r in records])
    spread = float(np.concatenate([_last_rounds(r.test) for r in records]).std(ddof=1))
    return Scores(entrant, classes, chosen, values, spread)


# ---- what is reported --------------------------------------------------------------------------------------------

Published = Mapping[tuple[str, int], float]
"""Published percents by the entrant's key and the classes of a client."""


def published(classes: int, **percents: float) -> Published:
    """Builds a dictionary of published accuracies in %, by entrant's key and classes of a client.

    An entrant is a method with a number of models, 5 for ensembles.

    Args:
        classes: Number of classes of a client; 0 for a random division, -1 for one client per user.
        **percents: Accuracy in % by name of the method.
    """
    return {(f"{name}-5" if name in ENSEMBLES else name, classes): value for name, value in percents.items()}


def difference(one: Scores, other: Scores, metric: str = "accuracy") -> lab.MeanInterval:
    """Computes the difference of two entrants' scores, one minus the other, paired by seed.

    Args:
        one: Scores of an entrant.
        other: Scores of another one on the same clients.
        metric: Metric of the test split.
    """
    return lab.interval(one.values[metric] - other.values[metric])


def more_accurate(one: Scores, other: Scores) -> lab.Claim:
    """Judges whether the first of two entrants on the same clients is more accurate over the last three rounds.

    Seeds are paired.

    Args:
        one: Scores of the first entrant.
        other: Scores of the second.
    """
    claim = f"{scheme_name(one.classes)}: {one.entrant.label} is more accurate than {other.entrant.label}"
    return difference(one, other).claim_above(claim)


def ahead(scores: Sequence[Scores], method: str) -> tuple[lab.Claim, ...]:
    """Judges whether a method is more accurate than each other method, on average over the last three rounds.

    Returns one claim for each other method and each kind of clients.

    Args:
        scores: Scores of all entrants.
        method: Name of the method.
    """
    return tuple(
        more_accurate(one, other)
        for group in lab.grouped(scores, "classes").values()
        for one in group
        for other in group
        if one.entrant.method == method != other.entrant.method
    )


def outcome(
    study: Study,
    name: str,
    published: Mapping[str, Published],
    claims: Callable[[Sequence[Scores]], Iterable[lab.Claim]],
    more: Callable[[Sequence[Scores]], tuple[lab.Sheet, ...]] = lambda _: (),
) -> lab.Outcome:
    """Tunes and trains every entrant (method with a number of models); returns table and claims, and draws a figure.

    Accuracies in the table are means over seeds and the last three rounds, in %; the figure shows them by round.

    Args:
        study: The checked request, with data set, seeds and settings.
        name: Name of the table.
        published: Published percents by data set.
        claims: Function from all scores to the claims.
        more: Function from all scores to further sheets.
    """
    scores, runs = play_all({"": study})[""]
    _draw_rounds(study, runs)
    whose = " of a client's prediction on its own examples" if "others" in scores[0].values else ""
    title = f"{name} on {study.dataset}: test accuracy{whose}, last {LAST} rounds, {len(study.seeds)} seeds"
    remarks = harness.edges({f"{f.entrant.label}, {scheme_name(f.classes)}": f.chosen for f in scores})
    if study.dataset in published:
        remarks += ("published: percent, on the paper's full set-up, in its last three rounds",)
    sheet = _sheet(title, scores, published.get(study.dataset, {}))
    return lab.Outcome((sheet, *more(scores)), [_row(f) for f in scores], tuple(claims(scores)), remarks=remarks)


def _sheet(title: str, scores: Sequence[Scores], published: Published) -> lab.Sheet:
    """Builds the table of accuracies in %, with standard deviations over last rounds and seeds, and published ones."""
    rows = [
        {
            "clients": scheme_name(f.classes),
            "method": f.entrant.label,
            "rate": f.chosen.config.rate,
            "accuracy": 100 * f.values["accuracy"].mean(),
            "spread": 100 * f.spread,
            "published": published.get((f.entrant.key, f.classes)),
        }
        for f in scores
    ]
    columns = "clients: {clients} | method: {method} | rate: {rate:g} | accuracy %: {accuracy:.2f} | "
    columns += "deviation: {spread:.2f}"
    return lab.table(title, rows, columns + (" | published: {published:.2f}" if published else ""))


def _row(f: Scores) -> lab.Row:
    """Builds the row of one entrant in result.json from its scores."""
    return {
        "method": f.entrant.method,
        "num_models": f.entrant.num_models,
        "classes_per_client": f.classes,
        "learning_rate": f.chosen.config.rate,
        "validation_accuracy": f.chosen.score,
        "deviation": f.spread,
        **{name: float(v.mean()) for name, v in f.values.items()},
        "by_seed": [float(v) for v in f.values["accuracy"]],
    }


def _draw_rounds(study: Study, runs: Mapping[int, Runs]) -> None:
    """Plots test accuracy by round, a panel for each kind of clients."""
    labels = {entrant.key: entrant.label for entrant in entrants(study.settings)}
    panels = {
        f"test accuracy, {scheme_name(classes)}": harness.by_round({labels[key]: of[key] for key in of})
        for classes, of in runs.items()
    }
    rounds = harness.evaluated_rounds(next(iter(runs.values())))
    curves(panels, rounds, f"{study.dataset}, {len(study.seeds)} seeds", study.figures.path("by_round"), late=True)
