"""The simulated side of a comparison: networks trained by a setting's algorithm, and by NTK-FL from the same start.

A draw is an independent initialisation of the K models; each draw is one run.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from fedtangent._src.comparison.settings import NTK_TIMES, Problem, Report, Scale, Setting, exact_arithmetic
from fedtangent._src.engine import Evaluation
from fedtangent._src.engine.history import History, Measurement
from fedtangent._src.engine.run import Resolved, predict, resolve_mapping, simulate
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.tangent import Pooling
from fedtangent._src.federated.compose import initial_params
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.measures import uncertainty
from fedtangent._src.measures.tangent_kernels import KernelDiagnostics, kernel_diagnostics
from fedtangent._src.progress import progress_of
from fedtangent._src.pytrees import on_device
from fedtangent._src.streams import model_keys
from fedtangent._src.types import (
    Algorithm,
    AnyArray,
    Array,
    Cohort,
    Cost,
    FederatedData,
    Key,
    Prediction,
    PyTree,
)

WATCHED = 256  # training examples, at most, at which tangent kernels are measured


class WatchedNetworks(NamedTuple):
    """Initial weights, and changes of the tangent kernels, of the networks of the first e draws of a simulation.

    A draw is an independent initialisation of the K models. ``drift`` is the relative change of each network's kernel
    from the start to each of the r evaluated rounds, in the Frobenius norm.
    """

    starts: list[PyTree]  # [e] initial weights of the K networks of a draw, [K, ...]
    drift: Float[np.ndarray, "r K e"]  # relative change of their tangent kernels, in the Frobenius norm


class Simulated(NamedTuple):
    """Outputs of every network of one method at one width, at the r evaluated rounds (0 is the initial function).

    There are E draws, independent initialisations of the K models. ``train`` and ``test`` are outputs at the training
    and the test points, and ``ensemble`` the algorithm's prediction from its K models. ``seconds`` is the time of one
    run, and ``sent`` has the bytes on the wire by round. ``info`` has the values that the algorithm reports in every
    round, except its cohorts, by name, [E, R, ...]. ``width`` is 0 for networks that start from given weights.
    Without measured tangent kernels ``watched`` is None.
    """

    method: str
    width: int  # 0: the networks that theory linearises at a start
    rounds: tuple[int, ...]
    train: Float[np.ndarray, "r K E n C"]
    test: Float[np.ndarray, "r K E m C"]
    ensemble: Float[np.ndarray, "r E m C"]  # the algorithm's own prediction from its K networks
    seconds: float  # of one run of the K models, without compilation if there are several runs
    sent: tuple[Measurement, ...]  # bytes of one run until each evaluated round, without metrics
    cost: Cost
    info: dict[str, np.ndarray]
    watched: WatchedNetworks | None = None

    @property
    def of_width(self) -> str:
        """The width in words, as a part of a name; empty for networks that start from given weights."""
        return f", width {self.width}" if self.width else ""

    def __repr__(self) -> str:
        """Returns a line with the method, the width, and the numbers of models, draws and evaluated rounds."""
        models, draws = self.train.shape[1:3]
        last = self.rounds[-1]
        return f"Simulated({self.method}{self.of_width}, {draws} x {models} networks, rounds 0 to {last})"


def init_key(setting: Setting, draw: int, width: int) -> jax.Array:
    """Returns the key that initialises the K models of one draw, the same for every method and every schedule.

    Every width has a different key: with one key, a narrow network's weights would be a part of a wider network's.

    Args:
        setting: The setting, with the seed.
        draw: Number of the draw. Numbers from ``draws`` on belong to networks that are not trained.
        width: Width of the networks.
    """
    return _init_key(np.uint32((setting.seed + 1) % 2**32), np.uint32(draw), np.uint32(width))


@jax.jit
def _init_key(seed: AnyArray, draw: AnyArray, width: AnyArray) -> Key:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw), width)


def network_functions(
    setting: Setting, width: int, count: int, x: Num[np.ndarray, "p ..."]
) -> Float[np.ndarray, "count p C"]:
    """Computes outputs of ``count`` further random networks at the points ``x``, without training them.

    Args:
        setting: The setting, with the seed.
        width: Width of the networks.
        count: Number of networks.
        x: Inputs, [p, ...].
    """
    model, block, x = setting.model(width, setting.dtype), setting.num_models, x.astype(setting.dtype)
    draws = (setting.size.draws + 1 + further for further in range(-(-count // block)))
    keys = (model_keys(init_key(setting, draw, width), block) for draw in draws)
    return np.concatenate([_outputs(model.apply, initial_params(model.init, k), x) for k in keys])[:count]


@partial(jax.jit, static_argnames="apply")
def _outputs(
    apply: Callable[[PyTree, Array], Array], params: PyTree, x: Num[AnyArray, "p ..."]
) -> Float[Array, "block p C"]:
    # in another program than the draw of the parameters, which XLA would repeat for each input
    return jax.lax.map(lambda one: apply(one, jnp.asarray(x)), params)


class Training(NamedTuple):
    """The networks of one algorithm and width, ready to be trained: one run of K models for each draw."""

    setting: Setting  # data, rounds and draws
    algorithm: Algorithm
    method: str  # name of the algorithm in the results
    width: int
    data: FederatedData
    x: Num[Array, "p ..."]  # training and test inputs, at which the networks are evaluated
    resolved: Resolved  # mapping of clients onto the device, one for all draws
    watches: tuple[KernelDiagnostics, ...] = ()  # diagnostics of the first draws' networks
    start: PyTree | None = None  # parameters [K, ...] that all draws begin with; None: each draw has a key

    def run(self, draw: int, stopped: Callable[[], bool] = lambda: False) -> tuple[History, float]:
        """Trains the K models of one draw; returns their history and the seconds that this took.

        The metrics of the history are the outputs at ``x``: "members" of each model, and "mean", the prediction.

        Args:
            draw: Number of the draw.
            stopped: Function that returns whether to give up; called at each evaluation.

        Raises:
            CancelledError: ``stopped`` returned True.
        """
        begun, setting, width = time.perf_counter(), self.setting, self.width
        watch = self.watches[draw] if draw < len(self.watches) else None

        def outputs(algorithm: Algorithm, state: PyTree) -> dict[str, PyTree]:
            if stopped():
                raise CancelledError
            prediction = predict(algorithm, state, self.x)
            measured: dict[str, PyTree] = {
                "members": np.asarray(prediction.members),
                "mean": np.asarray(prediction.mean),
            }
            if watch is not None:
                measured["drift"] = watch.drifts(state)
                if int(state.round) == 0:
                    measured["start"] = jax.tree.map(lambda leaf: np.array(leaf, np.float64), watch.parameters(state))
            return measured

        run = simulate(
            self.algorithm,
            self.data,
            num_rounds=setting.size.num_rounds,
            seed=setting.seed,
            start=init_key(setting, draw, width) if self.start is None else self.start,
            evaluation=Evaluation(every=setting.size.evaluate_every or None, measure=outputs),
            devices=self.resolved,
        )
        return run.history, time.perf_counter() - begun


def training_of(
    setting: Setting,
    algorithm: Algorithm,
    method: str,
    width: int,
    mapping: str = "auto",
    watches: Sequence[KernelDiagnostics] = (),
    start: PyTree | None = None,
) -> Training:
    """Prepares the runs of an algorithm, one for each of the setting's draws.

    Args:
        setting: Data, rounds and draws.
        algorithm: The algorithm.
        method: Name of the algorithm in the results.
        width: Width of its networks.
        mapping: How clients are mapped to the device, as in ``simulate``.
        watches: Kernel measurements, one for each of the first draws, whose networks are recorded.
        start: Parameters [K, ...] that all draws begin with; None: each draw has a different random start.

    Raises:
        DoesNotFit: A run needs more memory than the device has.
    """
    problem = setting.problem
    data, both = problem.federated(setting.dtype), np.concatenate([problem.x_train, problem.x_test])
    x = on_device(both.astype(setting.dtype))
    resolved = resolve_mapping(algorithm, data, setting.size.num_rounds, mapping, evaluated=[x])
    return Training(setting, algorithm, method, width, data, x, resolved, tuple(watches), start)


def network_training(setting: Setting, width: int, watched: int = 0, start: PyTree | None = None) -> Training:
    """Prepares E ensembles of K networks for training by the setting's algorithm.

    The draws share schedule and minibatches (their keys come from the setting's seed) and differ in the initialisation.

    Args:
        setting: The setting, with E = ``draws``.
        width: Width of the networks.
        watched: Number of first draws whose initial weights and kernel changes are recorded (``WatchedNetworks``).
        start: Parameters [K, ...] that all draws begin with; None: each draw has a different random start.

    Raises:
        DoesNotFit: A run needs more memory than the device has.
    """
    model, data = setting.model(width, setting.dtype), setting.problem.federated(setting.dtype)
    algorithm = setting.algorithm.on(model)
    watches: list[KernelDiagnostics] = []
    for draw in range(watched):
        seed, key = setting.seed, init_key(setting, draw, width)
        if watches:
            watches.append(watches[0].of_seed(algorithm, data.num_clients, seed, key))
        else:
            watches.append(kernel_diagnostics(algorithm, model, data, seed, WATCHED, start=key))
    return training_of(setting, algorithm, setting.method, width, watches=watches, start=start)


def ntk_fl_training(setting: Setting, width: int, kernel: str, draws: int) -> Training:
    """Prepares one round of NTK-FL with all clients, from the initialisations of the setting's networks.

    The step is half of the largest step at which no mode of the analytic kernel of all clients' data oscillates. A
    narrow network's empirical kernel may have a several times larger eigenvalue, and be unstable at this step. The
    setting lists the numbers of steps from which NTK-FL chooses.

    Args:
        setting: The setting.
        width: Width of the networks.
        kernel: "averaged" over outputs, as in the paper NTK-FL, or "exact".
        draws: Number of initialisations.

    Raises:
        DoesNotFit: A run needs more memory than the device has.
    """
    problem, model = setting.problem, setting.model(width, setting.dtype)
    clients = problem.partition.num_clients
    theta = np.asarray(setting.kernel(problem.x_train, None, get="ntk"))
    examples, outputs = problem.y_train.shape
    times = NTK_TIMES if setting.ntk_fl is None else setting.ntk_fl.times
    algorithm = algorithms.ntk_fl(
        model,
        schedule.all_clients(clients, setting.num_models),
        learning_rate=0.5 * examples * outputs / float(np.linalg.eigvalsh(theta)[-1]),
        evolution=Evolution(times=times, kernel=kernel, unstable="allow"),
        pooling=Pooling(slots_per_model=clients),
    )
    once = dataclasses.replace(setting, size=Scale(setting.size.widths, draws, num_rounds=1))
    return training_of(once, algorithm, f"NTK-FL, {kernel} kernel", width)


def trained_networks(
    setting: Setting, width: int, progress: bool | None = False, watched: int = 0, start: PyTree | None = None
) -> Simulated:
    """Trains E ensembles of K networks by the setting's algorithm.

    Args:
        setting, width, watched, start: As in ``network_training``, whose ``DoesNotFit`` this raises.
        progress: Whether to show progress.
    """
    return train([network_training(setting, width, watched, start)], progress)[0]


def train(
    trainings: Sequence[Training], progress: bool | None = False, say: Report = lambda line: None
) -> list[Simulated]:
    """Trains all networks, on a CPU with as many runs at the same time as there are cores and memory for.

    The first draw of each training compiles its program. Then the second draws of all trainings follow, then the third
    ones, so that the share of finished runs shows the time left.

    Args:
        trainings: The networks.
        progress: Whether to show progress.
        say: Called with a line of text before the work.
    """
    setting, at_once = trainings[0].setting, min(training.resolved.at_once for training in trainings)
    stop, runs = threading.Event(), [list[tuple[History, float]]() for _ in trainings]
    most = max(training.setting.size.draws for training in trainings)
    turns = [(i, d) for d in range(most) for i, one in enumerate(trainings) if d < one.setting.size.draws]
    first, rest = turns[: len(trainings)], turns[len(trainings) :]

    def run(turn: tuple[int, int]) -> tuple[History, float]:
        with exact_arithmetic():  # JAX keeps it for each thread
            return trainings[turn[0]].run(turn[1], stop.is_set)

    methods = "; ".join(dict.fromkeys(training.method for training in trainings))
    say(f"{setting.name}: {methods}: {len(turns)} runs of K = {setting.num_models}")
    pool = ThreadPoolExecutor(at_once)
    mapped = map if at_once == 1 else pool.map  # in this thread, where a signal ends it at once
    try:
        with progress_of(len(turns), f"{setting.name}: networks", "run", shown=progress) as bar:
            for turn, result in zip(first, mapped(run, first), strict=True):
                runs[turn[0]].append(result)
            bar.update(len(first))
            for turn, result in zip(rest, mapped(run, rest), strict=True):
                runs[turn[0]].append(result)
                bar.update(1)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return [_simulated(training, of_draws) for training, of_draws in zip(trainings, runs, strict=True)]


def _simulated(training: Training, runs: Sequence[tuple[History, float]]) -> Simulated:
    histories, seconds = zip(*runs, strict=True)
    split, watches = len(training.setting.problem.x_train), training.watches
    members, means = (
        np.stack([np.stack([np.asarray(e.metrics[name], np.float64) for e in h.evaluations]) for h in histories], axis)
        for name, axis in (("members", 2), ("mean", 1))
    )  # [r, K, E, n + m, C], [r, E, n + m, C]
    evaluations = histories[-1].evaluations
    return Simulated(
        method=training.method,
        width=training.width,
        rounds=tuple(e.round for e in evaluations),
        train=members[..., :split, :],
        test=members[..., split:, :],
        ensemble=means[..., split:, :],
        seconds=min(seconds),
        cost=histories[-1].cost,
        sent=tuple(e._replace(metrics={}) for e in evaluations),
        info={k: np.stack([h.rounds[k] for h in histories]) for k in histories[-1].rounds if k != "cohort"},
        watched=_watched(histories[: len(watches)]) if watches else None,
    )


def history_beside(
    problem: Problem,
    networks: Simulated,
    train: Float[np.ndarray, "r K E n C"],
    test: Float[np.ndarray, "r K E m C"],
) -> History:
    """Computes the metrics of simulated networks by round, and beside them the metrics of their predictions.

    Metrics are means over E draws of the initial weights; with several draws, bands go from the 5 % to the 95 %
    percentile. Training metrics and predicted metrics use the mean of the K models' outputs; measured test metrics use
    the algorithm's own prediction. Under a loss of class labels all use the mean of the models' softmax probabilities.
    Test metrics are left out if the data have no test examples.

    Args:
        problem: The targets, and the loss.
        networks: The simulation, evaluated at r rounds.
        train: Predicted outputs at the n training examples at the same rounds, [r, K, E, n, C].
        test: Predicted outputs at the m test points, [r, K, E, m, C].

    Returns:
        The measured metrics; the field ``predicted`` has the predicted ones.
    """
    predicted = _history(problem, networks, train, test, test.mean(axis=1))._replace(is_predicted=True)
    measured = _history(problem, networks, networks.train, networks.test, networks.ensemble)
    return measured._replace(predicted=predicted)


def _history(
    problem: Problem,
    networks: Simulated,
    train: Float[np.ndarray, "r K E n C"],
    test: Float[np.ndarray, "r K E m C"],
    ensemble: Float[np.ndarray, "r E m C"],
) -> History:
    """Computes the metrics of outputs of E draws as a ``History``: means over draws and, for several draws, bands.

    Without test examples it has training metrics only. ``ensemble`` is the prediction at the test points; at the
    training points it is the mean over the K models. Rounds and bytes come from ``networks``.
    """
    labels = None if problem.labels_test is None else np.argmax(problem.y_train, axis=-1)
    splits = {"train": (train, train.mean(axis=1), problem.y_train, labels)}
    if problem.points == "test":
        splits["test"] = test, ensemble, problem.y_test, problem.labels_test
    tables: dict[tuple[str, str], np.ndarray] = {}  # (split, metric) -> [r, E]
    for split, (outputs, mean, targets, classes) in splits.items():
        measured = [
            [
                uncertainty.measure(Prediction(*draw), targets, classes, problem.loss)
                for draw in zip(*of_round, strict=True)
            ]
            for of_round in zip(mean, outputs.swapaxes(1, 2), strict=True)
        ]
        for metric in measured[0][0]:
            tables[split, metric] = np.array([[draw[metric] for draw in of_round] for of_round in measured])
    evaluations = [
        sent._replace(
            metrics={
                split: {metric: float(table[i].mean()) for (of, metric), table in tables.items() if of == split}
                for split in splits
            }
        )
        for i, sent in enumerate(networks.sent)
    ]
    bands = {}
    for (split, metric), table in tables.items():
        if table.shape[1] > 1:
            low, high = np.percentile(table, (5, 95), axis=1)
            bands[f"{split}.{metric}"] = low, high
    return History(evaluations, {}, networks.cost, bands)


def _watched(histories: Sequence[History]) -> WatchedNetworks:
    drift = np.stack([[e.metrics["drift"] for e in h.evaluations] for h in histories], axis=2)
    return WatchedNetworks([h.evaluations[0].metrics["start"] for h in histories], drift)


def cohorts(setting: Setting) -> Cohort:
    """Draws the cohorts of the simulated run, S clients in each of R rounds, with the weights of its algorithm."""
    weighting = setting.algorithm.composition.weighting
    return schedule.drawn_cohorts(
        setting.algorithm.schedule, setting.problem.partition, setting.size.num_rounds, setting.seed, weighting
    )
