"""``simulate`` runs an algorithm on federated data; ``params_by_round`` returns its models along the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from fedtangent._src.checks import instance, shown, whole
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.examples import Examples, run_examples
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.engine import auto, loop, memory
from fedtangent._src.engine.checkpoints import Checkpoints, store
from fedtangent._src.engine.checkpoints.options import identity
from fedtangent._src.engine.clients import Devices, default_mapping, engine_for, parse
from fedtangent._src.engine.clients import Mapping as ClientMapping
from fedtangent._src.engine.history import Measurement, Run
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.processes import is_main, replicate, stop_signals
from fedtangent._src.measures import uncertainty
from fedtangent._src.models.rows import check_reads
from fedtangent._src.optimizers import check_rate
from fedtangent._src.programs import usable_cores
from fedtangent._src.progress import headline, progress_of
from fedtangent._src.pytrees import is_key
from fedtangent._src.types import Algorithm, AnyArray, Array, FederatedData, Key, Prediction, PyTree


def predict(algorithm: Algorithm, state: PyTree, x: Shaped[AnyArray, "n ..."]) -> Prediction:
    """Computes the outputs of an algorithm's models at ``x`` [n, ...], and their mean, in a given state of training.

    It is compiled once per shape and algorithm. If the algorithm's models are networks (``params``), algorithms on the
    same network share the compiled program.

    Args:
        algorithm: The algorithm.
        state: State of its run.
        x: Inputs [n, ...].
    """
    return _predict(algorithm, state, x) if algorithm.params is None else algorithm.predict(state, x)


@partial(jax.jit, static_argnames=("algorithm",))
def _predict(algorithm: Algorithm, state: PyTree, x: Shaped[AnyArray, "n ..."]) -> Prediction:
    return algorithm.predict(state, x)


class Resolved(NamedTuple):
    """The mapping of clients onto devices that a run uses, with the predicted memory.

    Attributes:
        mapping: Name of the mapping.
        plan: Memory of the run, predicted.
        seconds: Measured seconds of a round by mapping; empty if ``auto`` measured none.
    """

    mapping: str
    plan: memory.MemoryPlan
    seconds: dict[str, float]

    def __repr__(self) -> str:
        """Returns the mapping, and the predicted memory in one line."""
        return f"{self.mapping}; {memory.describe(self.plan)}"

    @property
    def at_once(self) -> int:
        """How many runs like this one the device can compute at the same time; 1 except on a single CPU device."""
        if jax.default_backend() != "cpu" or jax.device_count() > 1:
            return 1
        return max(1, min(usable_cores(), int(memory.USABLE * self.plan.limit // max(self.plan.total, 1))))


def resolve_mapping(
    algorithm: Algorithm,
    data: FederatedData,
    num_rounds: int,
    mapping: str = "auto",
    checkpoint: Checkpoints | None = None,
    evaluated: Sequence[Shaped[Array, "n ..."]] = (),
) -> Resolved:
    """Chooses the mapping of a round's clients onto devices that ``simulate`` uses, and predicts the memory of the run.

    With "auto", a resumed run keeps its mapping if it was on the same kind of device. Otherwise a short run takes the
    first mapping that fits into memory (usually scan on a CPU, vmap on an accelerator), and a long one the fastest that
    fits, by a measurement that is stored on this machine.

    Args:
        algorithm: The algorithm.
        data: Training examples of all clients.
        num_rounds: Rounds R.
        mapping: Name of a mapping, or "auto".
        checkpoint: Checkpoints of the run, or None.
        evaluated: Inputs [n, ...] at which the models are evaluated during the run.

    Raises:
        ValueError: An unknown mapping, or one that does not fit into memory.
        CheckpointError: The folder of the checkpoints is a file, or has no checkpoint to resume from, or one of another
            format.
    """
    largest = max_client_size(data)
    before = store.mapping_of(store.open_store(checkpoint)) if mapping == "auto" and checkpoint is not None else mapping
    chosen, seconds = parse(before) if before and before != "auto" else None, dict[str, float]()
    engine = engine_for(data, default_mapping() if chosen is None else chosen)
    length = loop.chunk_length(
        loop.info_shapes(algorithm, engine, loop.state_shapes(algorithm, data.num_clients), data)
    )
    if chosen is None:
        probe = partial(_probe, algorithm, data, length)
        chosen, seconds = auto.choose(algorithm, data, largest, num_rounds, length, probe)
    return Resolved(str(chosen), memory.check(algorithm, data, chosen, largest, length, evaluated), seconds)


def _probe(algorithm: Algorithm, data: FederatedData, length: int, mapping: ClientMapping) -> float:
    """Measures the seconds of a round under a mapping of clients, with the same program that the run would use.

    ``length`` is the largest number of rounds that the program computes in one call.
    """
    engine = engine_for(data, mapping)
    placed = replicate(data, engine.mesh)
    return auto.seconds_a_round(
        lambda state, rounds: loop.run_chunk(algorithm, engine, length, state, placed, np.int32(rounds)),
        lambda: replicate(algorithm.init(0, data.num_clients), engine.mesh),
    )


def examples_of(algorithm: Algorithm, data: Any, clients: Any = None) -> Examples:
    """Returns the training and test examples of a run, with the client of each training example.

    Args:
        algorithm: The algorithm; its model and loss decide which examples fit.
        data: A ``Dataset``, the name of one, or arrays (x_train, y_train) or (x_train, y_train, x_test, y_test); or
            ``Examples``, which are returned.
        clients: A ``Partition``, a list of index arrays, or the user of each example [n]; None with ``Examples``, which
            have a partition.

    Raises:
        ValueError: Data or clients that do not fit, or an algorithm that does not say its model and loss; the message
            names the argument.
    """
    _check_algorithm(algorithm)
    if isinstance(data, Examples):
        _refuse_clients(data, clients)
        return data
    training = algorithm.composition.training
    if training is None:
        raise ValueError(
            f"algorithm: got {algorithm.name!r}, which does not say which model and loss it has: only simulate runs "
            "it, on FederatedData"
        )
    if isinstance(data, FederatedData):
        raise ValueError("data: got FederatedData, must be a Dataset, a name or arrays, which also have test examples")
    if clients is None:
        raise ValueError(
            "clients: got None, must be a Partition, a list of index arrays or the user of each training example, "
            "unless data is FederatedData"
        )
    examples = run_examples(data, clients, training.loss, training.model)
    check_reads(training.model, examples.test and examples.test.x)
    return examples


def _refuse_clients(data: object, clients: object) -> None:
    if clients is not None:
        name = type(data).__name__
        raise ValueError(f"clients: got {shown(clients)}, must be None: {name} has a partition already")


def _check_algorithm(algorithm: object) -> None:
    """Raises ``ValueError`` unless ``algorithm`` is an ``Algorithm``, also for a recipe that was not called."""
    if callable(algorithm):
        name = getattr(algorithm, "__name__", "recipe")
        raise ValueError(f"algorithm: got the function {name}, must be an Algorithm: call {name}(model, schedule, ..)")
    instance("algorithm", algorithm, Algorithm)


def measured(examples: Examples, algorithm: Algorithm, state: PyTree) -> dict[str, dict[str, float]]:
    """Measures accuracy, loss and other metrics of an algorithm's prediction; returns them by split and name.

    Args:
        examples: Training examples (of more than 10,000 a sample is measured) and test examples.
        algorithm: The algorithm.
        state: State of its run.
    """
    splits = {examples.train_name: examples.train} | ({} if examples.test is None else {"test": examples.test})
    return {
        name: uncertainty.measure(predict(algorithm, state, split.x), split.targets, split.labels, examples.loss)
        for name, split in splits.items()
    }


def simulate(
    algorithm: Algorithm,
    data: FederatedData | Dataset | str | tuple[Any, ...] | Examples,
    clients: Any = None,
    *,
    num_rounds: int,
    seed: int | Key = 0,
    start: Key | PyTree | None = None,
    evaluation: Evaluation = Evaluation(),
    devices: Devices | Resolved = Devices(),
    checkpoints: Checkpoints | None = None,
) -> Run:
    """Simulates ``num_rounds`` rounds of ``algorithm`` on ``data``: the clients train networks.

    Args:
        algorithm: The algorithm, from a recipe such as ``fed_avg``.
        data: A ``Dataset``, the name of one, or arrays (x_train, y_train) or (x_train, y_train, x_test, y_test); or
            ``FederatedData``, training examples on the device together with their partition; or ``Examples``, which
            have a partition, too.
        clients: The client of each training example: a ``Partition``, a list of index arrays, or the user of each
            example [n]; None with ``FederatedData`` and ``Examples``.
        num_rounds: Communication rounds R.
        seed: An int or a typed key, from which the keys of initialisation, schedule and training are derived.
        start: Beginning of the models. None: the initialisation that the seed draws. A typed key: the initialisation
            that this key draws, while schedule and training keep the seed's keys. Parameters: of one model (all K begin
            there) or of each model, with a leading axis K.
        evaluation: Metrics, the rounds at which they are measured, and progress. Without a ``measure`` the metrics are
            the loss at the training and the test examples and, for classes, accuracy and uncertainties; no metrics with
            ``FederatedData``. Of more than 10,000 training examples 10,000 are drawn at random, and the split is called
            such as "train 10000 of 24000".
        devices: Mapping of a round's clients onto the devices, which does not change the result beyond rounding; or the
            result of ``processes.resolve_mapping`` for this run.
        checkpoints: Folder and interval of checkpoints, and whether to continue from one. A run that was stopped or
            killed and resumed returns the same bits as an uninterrupted one, except for the seconds; so does a finished
            run that is resumed with more rounds. With checkpoints, the first SIGTERM or SIGINT makes the run finish its
            current rounds, save, and return with ``status`` "stopped by ..".

    Returns:
        The final state, the history and the status of the run.

    Raises:
        ValueError: A bad argument, or a run that does not fit into memory (the message names the largest chunk that
            would), before any work.
        CheckpointError: A checkpoint from which the run cannot continue, or a folder of checkpoints that is in use or
            cannot be written to; it is a ``ValueError``.

    Example, FedAvg with half of ten clients in every round:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=200)
        >>> clients = ft.partition.iid(200, num_clients=10, seed=0)
        >>> model = ft.models.logistic(64, 10)
        >>> half = ft.schedules.uniform_sampling(10, clients_per_round=5)
        >>> work = ft.Work(epochs=1, batch_size=10)
        >>> fed_avg = ft.fed_avg(
        ...     model, half, client_learning_rate=0.1, work=work, loss="cross_entropy"
        ... )
        >>> run = ft.simulate(fed_avg, digits, clients, num_rounds=20, seed=0)
        >>> [(row.round, row.metrics["test"]["accuracy"] > 0.7) for row in run.history.evaluations]
        [(0, False), (20, True)]
    """
    whole("num_rounds", num_rounds)
    instance("evaluation", evaluation, Evaluation)
    if not isinstance(devices, Resolved):
        instance("devices", devices, Devices)
    if checkpoints is not None:
        instance("checkpoints", checkpoints, Checkpoints)
    evaluated: list[Array] = []
    if isinstance(data, FederatedData):
        _check_algorithm(algorithm)
        _refuse_clients(data, clients)
    else:
        examples = examples_of(algorithm, data, clients)
        data = examples.data
        if evaluation.measure is None:
            evaluation = dataclasses.replace(evaluation, measure=partial(measured, examples))
            evaluated = [split.x for split in (examples.train, examples.test) if split is not None]
    training = algorithm.composition.training
    if training is not None and training.learning_rate is not None:
        check_rate("client_learning_rate", training.learning_rate, num_rounds)
    check_start(algorithm, data.num_clients, start)
    if not isinstance(devices, Resolved):
        devices = resolve_mapping(algorithm, data, num_rounds, devices.mapping, checkpoints, evaluated=evaluated)
    return simulate_rounds(
        algorithm,
        data,
        num_rounds=num_rounds,
        seed=seed,
        start=start,
        evaluation=evaluation,
        mapping=devices.mapping,
        checkpoints=checkpoints,
    )


def simulate_rounds(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    num_rounds: int,
    seed: int | Key,
    start: Key | PyTree | None = None,
    evaluation: Evaluation,
    mapping: str,
    checkpoints: Checkpoints | None,
) -> Run:
    """Simulates the rounds of a run, as ``simulate`` does once it has checked its arguments.

    Args:
        algorithm, num_rounds, seed, start, evaluation, checkpoints: As in ``simulate``.
        data: Training examples of all clients, on the device.
        mapping: Name of a mapping of clients onto the devices, other than "auto".

    Raises:
        CheckpointError: A checkpoint from which the run cannot continue, or a folder of checkpoints that is in use or
            cannot be written to.
    """
    engine = engine_for(data, mapping)
    state = algorithm.init(seed, data.num_clients, start)
    shapes = loop.info_shapes(algorithm, engine, state, data)
    saves = None
    if checkpoints is not None:
        identifying = identity(algorithm.name, data, seed, start, evaluation.every)
        if not checkpoints.config:
            identifying["traced round"] = auto.fingerprint(algorithm, data, state)
        saves = store.for_run(store.open_store(checkpoints), identifying, mapping, shapes)
    place, length = partial(replicate, mesh=engine.mesh), loop.chunk_length(shapes)
    placed = place(data)
    setup = loop.RunSetup(
        chunk=lambda state, rounds: loop.run_chunk(algorithm, engine, length, state, placed, rounds),
        measure=None if evaluation.measure is None else partial(evaluation.measure, algorithm),
        num_rounds=num_rounds,
        evaluation=evaluation,
        report=evaluation.report or (lambda row: None),
        cost=algorithm.cost(data, engine),
        shapes=shapes,
        length=length,
        store=saves,
    )
    with store.claimed(saves):
        past = loop.first_past(setup, state)
        return _run(setup, past._replace(state=place(past.state)), algorithm.name)


def check_start(algorithm: Algorithm, num_clients: int, start: Key | PyTree | None) -> None:
    """Raises ``ValueError`` for a ``start`` that is neither one key nor finite parameters of the algorithm's models.

    Args:
        algorithm: The algorithm.
        num_clients: Number of clients.
        start: Argument of ``simulate``.
    """
    keys = start if isinstance(start, jax.Array) and is_key(start) else None
    is_untyped = isinstance(start, jax.Array) and start.dtype == np.uint32 and start.shape == (2,)
    if isinstance(start, int) or is_untyped or (keys is not None and keys.shape != ()):
        text = "an untyped key (jax.random.PRNGKey)" if is_untyped else shown(start)
        raise ValueError(f"start: got {text}, must be None, a typed key (jax.random.key(..)), or parameters")
    if start is None or keys is not None:
        return
    try:
        jax.eval_shape(lambda: algorithm.init(0, num_clients, start))  # compares the shapes, computes nothing
    except ValueError as error:
        hint = "; of flax's variables give variables['params']" if isinstance(start, dict) and "params" in start else ""
        raise ValueError(f"{error}{hint}") from error
    for leaf in jax.tree.leaves(start):
        if not np.all(np.isfinite(leaf)):
            raise ValueError("start: got a parameter that is NaN or infinite, must be finite")


def params_by_round(
    algorithm: Algorithm,
    data: FederatedData | Dataset | str | tuple[Any, ...] | Examples,
    clients: Any = None,
    *,
    num_rounds: int,
    seed: int | Key = 0,
    every: int = 1,
    start: Key | PyTree | None = None,
    devices: Devices = Devices(),
) -> PyTree:
    """Simulates a run and returns the server's parameters at its start, after every ``every`` rounds and at its end.

    Args:
        algorithm: An algorithm with global models.
        data, clients, num_rounds, seed, start, devices: As in ``simulate``.
        every: Rounds between two sets of parameters.

    Returns:
        NumPy arrays [1 + ceil(R / every), K, ..] in the structure of the parameters; after a divergence they are not
        finite.

    Raises:
        ValueError: ``simulate`` refuses an argument, or the algorithm has no global models.
    """
    read = algorithm.params
    if read is None:
        raise ValueError(f"algorithm: got {algorithm.name!r}, must be one with global models")

    def look(_: Algorithm, state: PyTree) -> dict[str, PyTree]:
        return {"params": jax.tree.map(lambda leaf: np.array(leaf), read(state))}

    looked = Evaluation(every, look)
    run = simulate(
        algorithm, data, clients, num_rounds=num_rounds, seed=seed, start=start, evaluation=looked, devices=devices
    )
    measured = [row.metrics["params"] for row in run.history.evaluations]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *measured)


def _run(setup: loop.RunSetup, past: loop.Past, name: str) -> Run:
    """Computes a run from the progress ``past`` to its end, under a progress bar called ``name``."""
    is_shown = setup.evaluation.progress if is_main() else False
    with (
        stop_signals(setup.store is not None) as signalled,
        progress_of(setup.num_rounds, name, done=past.round, shown=is_shown) as bar,
    ):

        def report(row: Measurement) -> None:
            if metric := headline(row.metrics):
                bar.set_postfix_str(f"{metric} after round {row.round}", refresh=False)
            setup.report(row)

        return loop.go(setup._replace(report=report), past, signalled, bar.update)
