"""Sweeps: runs with several seeds and several values of hyper-parameters, as one program.

A seed draws the same initial models, cohorts and batches under every configuration (the values of one run), so that
configurations are compared pair by pair (``measures.differences``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks
from fedtangent._src.checks import choice, instance, shown, whole
from fedtangent._src.data.partition import validate
from fedtangent._src.engine import memory
from fedtangent._src.engine.clients import Devices, default_kind, engine_for
from fedtangent._src.engine.history import data_frame
from fedtangent._src.engine.loop import Evaluation, Measure, evaluated_rounds
from fedtangent._src.types import Algorithm, Array, Engine, FederatedData, Key, Partition, PyTree

if TYPE_CHECKING:
    from pandas import DataFrame

OVER = ("auto", "map", "vmap")

Config = dict[str, Any]
Values = dict[str, Array]  # traced values of a configuration, by name
Clients = Mapping[str, Mapping[Any, Partition]] | None  # name of an axis -> label -> partition


@runtime_checkable
class Build(Protocol):
    """A function that builds an algorithm from hyper-parameters."""

    def __call__(self, *arguments: Any, **values: Any) -> Algorithm:
        """Returns the algorithm for some values of the hyper-parameters.

        Args:
            arguments: Always empty; the hyper-parameters are passed by name.
            values: Hyper-parameters by name; floats may be traced scalars.
        """


class Sweep(NamedTuple):
    """The result of a sweep: the metrics of the runs with every seed and every configuration of hyper-parameters.

    Attributes:
        configs: Configurations, each the values of the hyper-parameters by name.
        seeds: Seeds of the runs.
        rounds: Rounds done at each of the E evaluations, [E]; the first is 0.
        metrics: Arrays [seeds, configurations, E, ...] by the metric's name.
    """

    configs: tuple[Config, ...]
    seeds: tuple[int, ...]
    rounds: np.ndarray
    metrics: dict[str, np.ndarray]  # name -> [seeds, configs, E, ...]

    def __repr__(self) -> str:
        """Returns a line with the configurations, the number of seeds and evaluations, and the metrics."""
        over = f"{len(self.configs)} configurations of {', '.join(self.configs[0]) or 'nothing'}"
        rounds = f"{len(self.rounds)} evaluations up to round {self.rounds[-1]}"
        return f"Sweep({over}, {len(self.seeds)} seeds, {rounds}: {', '.join(self.metrics)})"

    def to_pandas(self) -> DataFrame:
        """Returns the metrics as a pandas DataFrame, with a row for each seed, configuration and evaluation.

        The columns are the configuration, ``seed``, ``round`` and the metrics. A metric that is an array is one cell.

        Raises:
            ImportError: pandas is not installed.
            ValueError: A metric has the name of another column.
        """
        shape = len(self.seeds), len(self.configs), len(self.rounds)
        seed, config, at = np.indices(shape).reshape(3, -1)
        columns: dict[str, Sequence[object] | np.ndarray] = {
            name: [self.configs[i][name] for i in config] for name in self.configs[0]
        }
        columns |= {"seed": np.array(self.seeds)[seed], "round": np.asarray(self.rounds)[at]}
        for name, values in self.metrics.items():
            if name in columns:
                raise ValueError(f"metrics: got the name {name!r}, must not be one of {', '.join(columns)}")
            rows = values.reshape(-1, *values.shape[3:])
            columns[name] = rows if rows.ndim == 1 else list(rows)
        return data_frame(columns)


class _Alike(NamedTuple):
    """Configurations of a sweep that share one compiled program, because they differ only in traced numbers.

    Attributes:
        static: Values that all of them share and that are not traced, by name.
        members: Positions of these configurations among all configurations of the sweep.
        values: Traced values by name, an array with one number for each configuration.
        partition: Number of each configuration's partition, int32; None if all use the partition of the data.
    """

    static: Config
    members: list[int]
    values: Values
    partition: Array | None


def sweep(
    build: Build,
    data: FederatedData,
    clients: Clients = None,
    *,
    num_rounds: int,
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    evaluation: Evaluation,
    devices: Devices = Devices(),
) -> Sweep:
    """Simulates a run for every seed and every configuration, which is a combination of the values in ``grid``.

    Names whose values are all floats (rates, mu) are traced: configurations that differ only in them are one compiled
    program. Other values (the number of models K or of local steps, names; also [0, 0.1], because 0 is an int) decide
    shapes or code: each combination of them is compiled separately, one program after another.

    Args:
        build: Function that builds the algorithm of a configuration, called with the grid's names as keyword arguments;
            floats arrive as traced scalars. It is first called with each configuration's plain numbers, which it
            checks.
        data: Training examples of all clients, as ``FederatedData``.
        clients: None; or several partitions of the same examples over equally many clients, as a further axis of the
            product. A mapping holds the axis's name and the partitions by label: ``{"alpha": {0.1: partition, 1.0:
            another}}``. They are padded to a common size; ``build`` does not receive them.
        num_rounds: Communication rounds R of every run.
        seeds: Seeds of the runs; a seed draws the same numbers under every configuration.
        grid: Values of each argument; the configurations are their product, the last name varying fastest.
        evaluation: ``measure`` is traced and must return arrays; ``every`` is as in ``simulate``. Other fields must
            have their defaults: a sweep has no divergence to stop at and nothing to report before its end.
        devices: Mapping of each run's clients (not ``sharded``), and mapping of the runs.

    Raises:
        ValueError: A bad argument, or metrics that differ in name or shape between configurations.
        DoesNotFit: The runs need more memory than the device has; it is a ``ValueError``.

    Each run gives the same metrics as ``simulate`` with its configuration and seed, up to rounding.

    Example, two step sizes and three seeds, one program:

        >>> import fedtangent as ft
        >>> digits = ft.data.load("digits", num_train=200)
        >>> clients = ft.partition.iid(200, num_clients=10, seed=0)
        >>> data = ft.data.federated_data(digits.x_train, digits.y_train, clients, num_classes=10)
        >>> everyone, work = ft.schedules.all_clients(10), ft.Work(steps=1, batch_size=None)
        >>> def fed_avg(rate):
        ...     model = ft.models.logistic(64, 10)
        ...     return ft.fed_avg(
        ...         model, everyone, client_learning_rate=rate, work=work, loss="cross_entropy"
        ...     )
        >>> def accuracy(algorithm, state):
        ...     predicted = algorithm.predict(state, digits.x_test).mean.argmax(axis=-1)
        ...     return {"accuracy": (predicted == digits.y_test).mean()}
        >>> grid, evaluation = {"rate": [0.01, 0.5]}, ft.Evaluation(measure=accuracy)
        >>> runs = ft.sweep(fed_avg, data, num_rounds=5, seeds=range(3), grid=grid, evaluation=evaluation)
        >>> runs.metrics["accuracy"].shape  # seeds, configurations, evaluations: at the start and at the end
        (3, 2, 2)
        >>> [better] = ft.measures.differences(runs, "accuracy", baseline={"rate": 0.01})
        >>> better.config, bool(better.mean > 0)
        ({'rate': 0.5}, True)
    """
    instance("data", data, FederatedData)
    every, measure = min(evaluation.every or num_rounds, whole("num_rounds", num_rounds)), _measure(evaluation)
    axis, partitions = _check_axes(grid, clients, data)
    seeds, how = check_seeds(seeds), choose_over(devices.runs)
    axes = {**grid, axis: list(partitions)} if partitions else dict(grid)
    configs = tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    for config in configs:
        built = build(**{name: config[name] for name in grid})
    variants = _variants(partitions)
    engine = single_device_engine(data, devices.mapping)
    if variants is not None:  # one engine for all partitions: its largest client is the largest of any
        engine = engine._replace(max_client_size=int(np.max(np.diff(np.asarray(variants[1]), axis=1))))
    built.cost(data, engine)  # refuses data that do not fit the model
    lengths = stretches(num_rounds, every)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    groups = _groups(configs, list(grid), axis if partitions else None)
    programs = [_program(how, partial(member, build, engine, measure, group.static, lengths)) for group in groups]
    arguments = [(keys, group.values, group.partition, data, variants) for group in groups]
    calls = list(zip(programs, arguments, strict=True))
    shapes = [jax.eval_shape(program, *call) for program, call in calls]
    for program, call in calls:
        memory.check_program(f"devices.runs: got {how}", program, *call)
    tables = _tables(configs, groups, shapes)
    for group, (program, call) in zip(groups, calls, strict=True):
        for name, rows in program(*call).items():
            tables[name][:, group.members] = np.asarray(rows)
    return Sweep(configs, seeds, np.cumsum(lengths), tables)


def _tables(configs: Sequence[Config], groups: Sequence[_Alike], shapes: Sequence[PyTree]) -> dict[str, np.ndarray]:
    """Allocates a table [seeds, configurations, evaluations, ...] for each metric of a sweep, to be filled later.

    ``shapes`` has the metrics' shapes for each of ``groups``. Raises ``ValueError`` if they differ between groups.
    """
    first = shapes[0]
    for group, mine in zip(groups, shapes, strict=True):
        for name in sorted(set(first) ^ set(mine)):
            raise ValueError(
                f"measure: returned the metric {name!r} for only one of {configs[0]} and {group.static}, must return "
                "the same metrics for all"
            )
        for name in first:
            if first[name].shape[2:] != mine[name].shape[2:]:
                raise ValueError(
                    f"measure: the metric {name!r} has shape {list(first[name].shape[3:])} for {configs[0]} but "
                    f"{list(mine[name].shape[3:])} for {group.static}, must be of one shape"
                )
    tables = {}
    for name, leaf in first.items():
        dtype = np.result_type(*(metrics[name].dtype for metrics in shapes))
        tables[name] = np.empty((leaf.shape[0], len(configs), *leaf.shape[2:]), dtype)
    return tables


def stretches(num_rounds: int, every: int) -> list[int]:
    """Returns the numbers of rounds between evaluations, the first 0: ``[0, 5, 5, 2]`` for 12 rounds and ``every`` 5.

    Args:
        num_rounds: Rounds R.
        every: Rounds between evaluations.
    """
    return [0] + [every] * (num_rounds // every) + ([num_rounds % every] if num_rounds % every else [])


def member(
    build: Build,
    engine: Engine,
    measure: Measure,
    static: Config,
    lengths: Sequence[int],
    key: Key,
    values: Values,
    data: FederatedData,
) -> dict[str, Array]:
    """Simulates one run of a sweep, traced inside a larger program, and returns its metrics at E evaluations, [E, ...].

    Args:
        build: Function that builds the algorithm from ``static`` and ``values``.
        engine: Mapping of clients onto devices.
        measure: ``(algorithm, state) -> metrics by name``.
        static: Arguments of ``build`` that are not traced.
        lengths: Number of rounds between each of the E evaluations and the one before it.
        key: Key of the run.
        values: Traced arguments of ``build``.
        data: Training examples of all clients.
    """
    algorithm = build(**static, **values)
    start = algorithm.init(key, data.num_clients)
    metrics: dict[str, Array] = evaluated_rounds(algorithm, engine, measure, lengths, start, data)
    return metrics


Program = Callable[[Array, Values, Array | None, FederatedData, PyTree], PyTree]


def _program(over: str, run_member: Callable[[Key, Values, FederatedData], PyTree]) -> Program:
    """Builds the compiled program that runs ``run_member`` for every seed, and every configuration that shares it.

    Its result is a tree of metrics [seeds, configurations, ...]. With ``over`` "map" the runs follow one another; with
    "vmap" they run all at once.
    """

    def run(keys: Array, values: Values, partition: Array | None, data: FederatedData, variants: PyTree) -> PyTree:
        def one(key: Key, config: tuple[Values, Array | None]) -> PyTree:
            of_config, at = config
            divided = data if at is None else data._replace(indices=variants[0][at], offsets=variants[1][at])
            return run_member(key, of_config, divided)

        configs = (values, partition)
        if not jax.tree.leaves(configs):
            return jax.tree.map(lambda leaf: leaf[:, None], _map_members(over, lambda key: one(key, configs), keys))
        return _map_members(over, lambda key: _map_members(over, lambda config: one(key, config), configs), keys)

    return jax.jit(run)


def _map_members(over: str, run: Callable[[PyTree], PyTree], members: PyTree) -> PyTree:
    """Applies ``run`` to each row of ``members``: all at once if ``over`` is "vmap", else one after another."""
    return jax.vmap(run)(members) if over == "vmap" else jax.lax.map(run, members)


def choose_over(over: str) -> str:
    """Returns "map" (the runs of a sweep one after another) or "vmap" (all at once).

    "auto" is "map" on a CPU and else "vmap". Another name raises ``ValueError``.
    """
    choice("devices.runs", over, OVER)
    if over == "auto":
        return {"scan": "map", "vmap": "vmap"}[default_kind()]
    return over


def single_device_engine(data: FederatedData, mapping: str) -> Engine:
    """Returns the engine that trains the clients of each run of a sweep, on one device.

    Args:
        data: Training examples of all clients.
        mapping: Name of a mapping of clients; "auto" is scan on a CPU and vmap elsewhere.

    Raises:
        ValueError: An unknown mapping, or ``sharded``.
    """
    if mapping.startswith("sharded"):
        raise ValueError(
            f"mapping: got {mapping!r}, allowed are auto, scan, vmap, chunked:<n>, as each run is on one device"
        )
    if mapping == "auto":
        mapping = default_kind()
    return engine_for(data, mapping)


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Checks the seeds of a sweep and returns them as integers.

    Raises:
        ValueError: There is no seed, a seed occurs twice, or a seed is not a whole number from 0 to 2^32 - 1.
    """
    whole_numbers = [checks.seed(seed, "seeds") for seed in seeds]
    if not whole_numbers or len(set(whole_numbers)) < len(whole_numbers):
        raise ValueError(f"seeds: got {whole_numbers}, must be one or more different whole numbers")
    return tuple(whole_numbers)


def _measure(evaluation: Evaluation) -> Measure:
    """Returns the ``measure`` of a sweep's evaluation.

    Raises ``ValueError`` without a measure, or if a field of ``evaluation`` other than ``measure`` and ``every`` is
    set.
    """
    if evaluation.measure is None:
        raise ValueError("evaluation: got no measure, must be Evaluation(measure=..) in a sweep")
    if evaluation != Evaluation(evaluation.every, evaluation.measure):
        raise ValueError("evaluation: a sweep uses only its fields every and measure: leave the others out")
    return evaluation.measure


def _check_axes(
    grid: Mapping[str, Sequence[Any]], clients: Clients, data: FederatedData
) -> tuple[str, Mapping[Any, Partition]]:
    """Raises ``ValueError`` if ``sweep``'s arguments ``grid`` or ``clients`` have a wrong form or do not fit ``data``.

    Returns the name of the axis of partitions, such as "alpha", and the partitions by label; "" and {} without any.
    """
    for name, values in grid.items():
        if isinstance(values, str) or len(values) == 0:
            raise ValueError(f"grid: got {values!r} for {name}, must be a list of one or more values")
    if clients is None:
        return "", {}
    if not isinstance(clients, Mapping) or len(clients) != 1 or not all(clients.values()):
        raise ValueError(f"clients: got {shown(clients)}, must be None or {{name: {{label: partition, ..}}}}")
    [(axis, partitions)] = clients.items()
    if axis in grid:
        raise ValueError(f"clients: got the name {axis!r}, which grid has too, must be another name")
    for label, partition in partitions.items():
        if len(partition.offsets) - 1 != data.num_clients:
            raise ValueError(
                f"clients: {label!r} has {len(partition.offsets) - 1} clients, but data has {data.num_clients}"
            )
        try:
            validate(partition, data.x.shape[0])
        except ValueError as error:
            raise ValueError(f"clients: {label!r}: {error}") from error
    return axis, partitions


def _variants(partitions: Mapping[Any, Partition]) -> tuple[Array, Array] | None:
    """Stacks V partitions of the same examples over N clients: returns their indices [V, m] and offsets [V, N + 1].

    Partitions with fewer than the largest number m of indices are padded with indices that belong to no client. Returns
    None without partitions.
    """
    if not partitions:
        return None
    longest = max(len(p.indices) for p in partitions.values())
    indices = [np.pad(np.asarray(p.indices), (0, longest - len(p.indices))) for p in partitions.values()]
    offsets = [np.asarray(p.offsets) for p in partitions.values()]
    return jnp.asarray(np.stack(indices), jnp.int32), jnp.asarray(np.stack(offsets), jnp.int32)


def _same(value: object) -> tuple[type, object]:
    """Returns a key for a value of a hyper-parameter: values with equal keys may share a compiled program.

    The key is type and value. An unhashable value equals only itself.
    """
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def _groups(configs: Sequence[Config], names: list[str], partition_name: str | None) -> list[_Alike]:
    """Groups a sweep's configurations by the values that are not traced; each group is one compiled program.

    ``names`` are the names in the grid. ``partition_name`` is the name of the axis of partitions, if any.
    """
    labels = list(dict.fromkeys(config[partition_name] for config in configs)) if partition_name else []
    traced = [n for n in names if all(isinstance(config[n], float | np.floating) for config in configs)]
    members: dict[tuple[object, ...], list[int]] = {}
    for i, config in enumerate(configs):
        members.setdefault(tuple(_same(config[n]) for n in names if n not in traced), []).append(i)
    groups = []
    for places in members.values():
        static = {n: configs[places[0]][n] for n in names if n not in traced}
        values = {n: jnp.asarray([float(configs[i][n]) for i in places]) for n in traced}
        at = [labels.index(configs[i][partition_name]) for i in places] if partition_name else None
        groups.append(_Alike(static, places, values, None if at is None else jnp.asarray(at, jnp.int32)))
    return groups


MOST_SEEDS = 100_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """Returns seeds written as text: "0:10" is 0 to 9, "0,3,7" are three seeds; both forms may be combined.

    Raises:
        ValueError: Another form, a range that is empty or has more than 100,000 seeds, a seed that occurs twice, or a
            seed above 2^32 - 1.
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.strip().split(":")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            raise ValueError(f"seeds: got {text!r}, must be like 0:10 (0 to 9) or 0,3,7")
        first, beyond = int(ends[0]), int(ends[-1]) + (len(ends) == 1)
        if not first < beyond <= min(2**32, first + MOST_SEEDS):
            raise ValueError(f"seeds: got {part.strip()!r}, must be 1 to {MOST_SEEDS} seeds from 0 to 2**32 - 1")
        seeds += range(first, beyond)
    return check_seeds(seeds)
