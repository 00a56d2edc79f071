"""How theory follows a run: builds its ``Setting`` from algorithm and examples, and rejects runs without a theory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fedtangent._src import streams
from fedtangent._src.checks import instance, nearest
from fedtangent._src.comparison.settings import Problem, Scale, Setting
from fedtangent._src.data.examples import Examples
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.federated.faults import num_contacted
from fedtangent._src.federated.local import Work, drawn_batches
from fedtangent._src.federated.schedule import drawn_cohorts
from fedtangent._src.kernels.gram import analytic
from fedtangent._src.losses import words
from fedtangent._src.optimizers import first_steps, in_round
from fedtangent._src.theory.flow import Rule
from fedtangent._src.theory.flow.rules import read_rule
from fedtangent._src.types import (
    NO_RULE,
    Algorithm,
    Array,
    ArrayLike,
    Cohort,
    Key,
    Model,
    Partition,
    PyTree,
    Schedule,
    Training,
)

MOST_POINTS = 500  # test points that laws are compared at, at most
EVALUATIONS = 8  # rounds of a comparison at which networks are evaluated, besides the start
FUNCTIONS = ("loss", "client_optimizer", "delays")  # fields of a rule that may be functions, and are no schedules


class NotFollowed(ValueError):
    """Error for a run that no theory predicts, if this shows only after a part of the run has been computed."""


def setting_of(
    algorithm: Algorithm,
    examples: Examples,
    size: Scale,
    seed: int,
    most_points: int | None = MOST_POINTS,
    own_width: bool = False,
    start: PyTree | None = None,
) -> Setting:
    """Builds the setting of a run. Its ``rule`` says how the closed form follows the run, or why it does not.

    Args:
        algorithm: The run's algorithm.
        examples: Its training and test examples and their clients; without test examples the training examples take
            their place.
        size: Widths, draws and rounds.
        seed: Seed of initialisations, schedule and minibatches.
        most_points: Largest number of test examples; more are sampled at random. None: all.
        own_width: Whether all networks have the width of the algorithm's model instead of the widths of ``size``.
        start: Parameters of the K models, [K, ...], at which theory linearises; None: independent initialisations.

    Raises:
        ValueError: The clients do not train the model, the schedule has another number of clients, a learning rate is 0
            in every round, or the algorithm's rule is not valid. Or targets are class labels, and the loss is a
            function or the cross entropy of a single class.
    """
    training, clients, model = training_of(algorithm), examples.clients, algorithm.model
    if algorithm.schedule.num_clients != clients.num_clients:
        of_schedule = algorithm.schedule.num_clients
        raise ValueError(f"clients: got {clients.num_clients} clients, must be {of_schedule} as in the schedule")
    if training.optimizer is None:
        rates_of(training, size.num_rounds)
    rule: Rule | str = (
        str(algorithm.rule) if isinstance(algorithm.rule, str) else _unmeasured(training, size.num_rounds)
    )
    if not rule:
        rule = rule_of(algorithm, clients, size.num_rounds, seed)
    points = "train" if examples.test is None else "test"
    (x_train, y_train), (x_test, y_test) = examples.in_float64(), examples.in_float64(points, most_points)
    dataset, num_points = examples.dataset, len(getattr(examples.dataset, f"y_{points}"))
    classes = getattr(dataset, f"y_{points}")[examples.sample(points, most_points)] if dataset.num_classes else None
    loss = examples.loss if isinstance(rule, str) else rule.loss
    fewest, most = min(clients.sizes), max(clients.sizes)
    labels = None if classes is None else np.asarray(classes, np.int32)
    sample = "" if len(x_test) == num_points else f"; {len(x_test)} of {num_points} {points} examples"
    return Setting(
        name=f"{algorithm.name} on {dataset.name}",
        title=f"{algorithm.name} on {dataset.name}, {words(training.loss)}: {len(x_train)} examples on "
        f"{clients.num_clients} clients of {fewest} to {most}, {model.name.partition('(')[0]}"
        f"{'' if points == 'test' else '; no test examples, so that all numbers are of training examples'}{sample}",
        problem=Problem(x_train, y_train, x_test, y_test, clients, labels, points, loss),
        algorithm=of_fixed_width(algorithm) if own_width else algorithm,
        rule=rule,
        size=size,
        seed=seed,
        start=start,
    )


def rule_of(algorithm: Algorithm, clients: Partition, num_rounds: int, seed: int = 0) -> Rule:
    """Returns the rule by which the closed form follows a run, with its rates, minibatches and delays.

    Args:
        algorithm: The run's algorithm.
        clients: Training examples of each client.
        num_rounds: Rounds R.
        seed: Seed of the schedule, the minibatches and the delays.

    Raises:
        ValueError: Theory does not follow the algorithm, its rule is not valid, or its learning rate is 0 in every
            round.
    """
    rule, training = followed_rule(algorithm, num_rounds), training_of(algorithm)
    rates, steps = rates_of(training, num_rounds), steps_of(training.work, clients)
    cohorts = drawn_cohorts(algorithm.schedule, clients, num_rounds, seed, algorithm.composition.weighting)
    batches = drawn_rows(training.work, clients, cohorts, seed)
    if callable(delays := rule.get("delays")):
        rule["delays"] = delays(streams.keys(seed).train, cohorts.client)
    return Rule(**{"local_steps": steps, "learning_rate": rates, **rule, "batches": batches})


def _unmeasured(training: Training, num_rounds: int) -> str:
    """Returns why the length of the clients' optimiser's first steps is unknown; empty if known, or no optimiser."""
    try:
        _ = None if training.optimizer is None else first_steps(training.optimizer, num_rounds)
    except ValueError as error:
        return str(error)
    return ""


def rates_of(training: Training, num_rounds: int) -> ArrayLike:
    """Returns the clients' learning rate, a number or one for each round [R]; raises ``ValueError`` if all are 0.

    With an optimiser it is the length of the optimiser's first step along a gradient of 1 (``optimizers.first_steps``).

    Args:
        training: Local training of the clients.
        num_rounds: Rounds R.
    """
    rate = training.learning_rate if training.optimizer is None else first_steps(training.optimizer, num_rounds)
    rates = _each_round(rate, num_rounds) if callable(rate) else rate
    if not np.max(rates) > 0:
        raise ValueError("client_learning_rate: got 0 in every round, must be above 0 in at least one")
    return rates


def training_of(algorithm: Algorithm) -> Training:
    """Returns the record of the clients' local training; raises ``ValueError`` if the algorithm has none."""
    if algorithm.composition.training is None:
        rule = algorithm.rule if isinstance(algorithm.rule, str) else NO_RULE
        raise ValueError(f"algorithm: got {algorithm.name!r}, which theory does not follow: {rule}")
    return algorithm.composition.training


def of_fixed_width(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm, with its model marked as a network that cannot be built at another width."""
    training = training_of(algorithm)
    fixed = training._replace(model=training.model._replace(at_width=None))
    return algorithm._replace(composition=algorithm.composition._replace(training=fixed))


def followed_rule(algorithm: Algorithm, num_rounds: int) -> dict[str, Any]:
    """Returns the fields of ``theory.Rule`` by which the closed form follows an algorithm, schedules as arrays [R].

    Args:
        algorithm: The algorithm.
        num_rounds: Rounds R.

    Raises:
        ValueError: Theory does not follow the algorithm, or parts of its rule contradict each other.
    """
    rule = NO_RULE if algorithm.composition.training is None else algorithm.rule
    if isinstance(rule, str):
        raise ValueError(f"algorithm: got {algorithm.name!r}, which theory does not follow: {rule}")
    if not isinstance(rule, Mapping):
        raise ValueError(f"rule: got {rule!r}, must be a mapping with fields of theory.Rule, or a sentence")
    allowed = [field.name for field in dataclasses.fields(Rule)]
    for name in rule:
        if name not in allowed:
            raise ValueError(f"rule: got {name!r}, allowed are {', '.join(allowed)}{nearest(name, allowed)}")
    followed: dict[str, Any] = {
        name: _each_round(value, num_rounds) if callable(value) and name not in FUNCTIONS else value
        for name, value in rule.items()
    }
    read_rule(Rule(1, 1.0, **followed), np.ones(1, int))
    return followed


def _each_round(schedule: Callable[[Array], ArrayLike], num_rounds: int) -> Float[np.ndarray, "num_rounds"]:
    """Evaluates a schedule of numbers, such as a learning-rate schedule, at every round, [R]."""
    return np.array([float(np.asarray(in_round(schedule, jnp.int32(r)))) for r in range(num_rounds)])


def check_evaluation(evaluation: Evaluation) -> None:
    """Raises ``ValueError`` if ``evaluation`` is no ``Evaluation``, or has an option that only ``simulate`` uses."""
    instance("evaluation", evaluation, Evaluation)
    for name in ("measure", "report", "stop_on_divergence"):
        if getattr(evaluation, name):
            raise ValueError(f"evaluation.{name}: is an option of simulate only, must be left out")


def evaluated_every(evaluation: Evaluation, num_rounds: int) -> int:
    """Returns the rounds between two evaluations of a comparison, by default an eighth of all rounds, rounded up.

    Args:
        evaluation: Settings of the evaluations.
        num_rounds: Rounds R.
    """
    return -(-num_rounds // EVALUATIONS) if evaluation.every is None else evaluation.every


def has_limit(model: Model) -> bool:
    """Returns whether a model has an analytic kernel and other widths, or such a kernel and is linear.

    Its networks then approach this kernel with their width, or have it exactly, so theory can predict infinite width.
    """
    return model.kernel is not None and (model.at_width is not None or model.is_linear)


def check_analytic(model: Model) -> None:
    """Raises ``ValueError`` for a model without an analytic kernel, saying what can be done."""
    if model.kernel is None:
        must = "whose tangent kernel changes in training at every width, must be in the ntk parameterization"
        if model.at_width is None:
            must = (
                "must have an analytic kernel, as models.mlp, deep_linear, logistic, linear, rbf_linear, ntk_cnn, "
                "ntk_resnet, ntk_transformer and those of from_stax have"
            )
        raise ValueError(
            f"model: got {model.name}, {must}. Theory follows any network from given weights, by the kernel at them: "
            "start=jax.random.key(0) in Python, train --diagnostics laziness on the command line"
        )


def check_kernels(model: Model, x: np.ndarray) -> None:
    """Raises ``ValueError`` for a network without a usable infinite width.

    Either its kernel grows with the width, or all its initial functions are 0 although it is not linear.

    Args:
        model: Network with an analytic kernel.
        x: Inputs at which kernels are compared, [p, ...].
    """
    narrow, wide = (model, model) if model.at_width is None else (model.at_width(8), model.at_width(16))
    (nngp, theta), (_, widest) = (map(np.asarray, analytic(one, jnp.asarray(x))) for one in (narrow, wide))
    if not np.allclose(theta, widest, rtol=1e-6):
        raise ValueError(
            f"model: got {model.name}, whose kernel grows with its width, must be in the ntk parameterization"
        )
    if not model.is_linear and not np.any(nngp):
        raise ValueError(
            f"model: got {model.name}, which starts as the zero function, must have w_std or b_std above 0"
        )


def drawn_rows(
    work: Work, partition: Partition, cohorts: Cohort, seed: int | Key = 0
) -> Int[np.ndarray, "R S T B"] | None:
    """Computes which training rows are in every minibatch that a run of ``seed`` draws for its cohorts.

    Args:
        work: Local steps and batch size.
        partition: Training rows of every client.
        cohorts: Cohorts of the run, [R, S].
        seed: Seed or key of the run.

    Returns:
        Row numbers [R, S, T, B] for R rounds, S clients in a round, T local steps and batches of B, where -1 fills
        unused places; None if every step takes all examples of a client.
    """
    sizes, train = np.asarray(partition.sizes), streams.keys(seed).train
    largest = int(sizes.max())
    if work.batch_size is None or work.batch_size >= largest:
        return None
    most, client = int(np.max(steps_of(work, partition))), jnp.asarray(cohorts.client)

    def places(round_: Array, i: Array, size: Array) -> Array:
        return drawn_batches(work, streams.slot_keys(train, round_, i)[0], size, largest, most)

    of_round = jax.jit(jax.vmap(jax.vmap(places, in_axes=(None, 0, 0))))  # one program, not one for each operation
    place = np.asarray(of_round(jnp.arange(len(client), dtype=jnp.int32), client, jnp.asarray(sizes[client])))
    first = np.asarray(partition.offsets)[np.asarray(client)][..., None, None]
    last = len(partition.indices) - 1  # a client without examples may begin after it
    rows = np.asarray(partition.indices)[np.minimum(first + np.maximum(place, 0), last)]
    return np.where((place >= 0) & (np.asarray(cohorts.weight) > 0)[..., None, None], rows, -1)


def steps_of(work: Work, partition: Partition) -> Int[np.ndarray, "N"]:
    """Computes the number of local steps of every client, [N]; each takes at least 1.

    One epoch of minibatches of size B has ``ceil(n_i / B)`` steps.

    Args:
        work: Local steps, or epochs and batch size.
        partition: Training rows of every client.
    """
    if work.steps is not None:
        return np.full(partition.num_clients, work.steps)
    per_epoch = 1 if work.batch_size is None else -(-np.asarray(partition.sizes) // work.batch_size)
    return np.maximum(per_epoch, 1) * np.full(partition.num_clients, work.epochs)


def contacted_clients(
    schedule: Schedule, cohorts: Cohort, sizes: ArrayLike, seed: int | Key = 0
) -> Int[np.ndarray, "R"]:
    """Counts the clients that get a model in each round of ``cohorts``, [R].

    Clients that drop out or are late after they got the model count too, but clients without examples do not.

    Args:
        schedule: Schedule of the run.
        cohorts: Its cohorts: S clients in each of R rounds, [R, S].
        sizes: Numbers of examples of the clients, [N].
        seed: Seed or key of the run.
    """
    if schedule.contacted is None:
        return np.sum(np.asarray(cohorts.weight) > 0, axis=1)
    init_key, sample_key = streams.schedule_keys(streams.keys(seed).schedule)

    def one(state: PyTree, round_: Array) -> tuple[PyTree, Array]:
        cohort, state = schedule.sample(sample_key, state, round_)
        return state, num_contacted(schedule, cohort, state, jnp.asarray(sizes))

    return np.asarray(jax.lax.scan(one, schedule.init(init_key), jnp.arange(len(cohorts.client)))[1])
