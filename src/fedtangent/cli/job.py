"""What ``fedtangent train`` checks and builds before a run starts."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data, models
from fedtangent.checks import finite
from fedtangent.cli import catalogue
from fedtangent.cli.algorithms import ALGORITHMS, INSIDE, AlgorithmEntry, Given
from fedtangent.cli.options import TrainOptions
from fedtangent.cli.wire import check_wire, exchanged, project, seed_digest
from fedtangent.data import sharing
from fedtangent.engine.checkpoints import Checkpoints, has_checkpoint
from fedtangent.engine.run import resolve_mapping
from fedtangent.engine.sweeps import parse_seeds
from fedtangent.measures.tangent_kernels import check_watchable
from fedtangent.output.files import check_data_dir
from fedtangent.types import Algorithm, Array, FederatedData, Model, Partition

# What a resumed run may have other than the run it continues; results are the same (but for rounding, if mapped anew).
MAY_DIFFER = (
    *("num_rounds", "output", "data_dir", "mapping", "checkpoint_every", "resume", "stop_on_divergence", "seeds"),
    *("distributed", "coordinator", "num_processes", "process_id", "host_devices"),
    "key_file",  # where the seed is kept; which seed it is may not differ
)
EVALUATED_TRAIN = 10_000  # training examples that train metrics are measured on, at most


class Split(NamedTuple):
    """Examples to evaluate on."""

    x: Array
    targets: Array  # [n, C] what the squared error compares with
    labels: Array | None  # [n] class labels, None for regression


class Job(NamedTuple):
    """A checked run, ready to start."""

    options: TrainOptions
    algorithm: Algorithm
    data: FederatedData
    splits: dict[str, Split]
    schedule: str
    of_clients: FederatedData | None = None  # each client's own test examples
    watched: Model | None = None  # the network whose kernels are measured, if any are


# Options that only some choices use: another value than the default, given with another choice, is a mistake.
USED_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "alpha": ("partition", ("dirichlet", "quantity_skew")),
    "num_clients": ("partition", ("iid", "shards", "classes", "dirichlet", "quantity_skew")),
    "min_client_size": ("partition", ("dirichlet", "quantity_skew")),
    "shards_per_client": ("partition", ("shards",)),
    "classes_per_client": ("partition", ("classes",)),
    "clients_per_round": ("schedule", ("uniform", "poisson")),
    "num_models": ("schedule", ("all", "permutations", "mixed", "strata", "random", "random_walk")),
    "num_strata": ("schedule", ("strata",)),
    "clients_per_stratum": ("schedule", ("strata",)),
    "widths": ("model", ("mlp",)),
    "activation": ("model", ("mlp",)),
    "parameterization": ("model", ("mlp",)),
}


# Arguments of the library, as the options are called that set them.
OPTION_OF = {
    "factor": "decay",
    "every": "decay_every",
    "probability": "dropout",
    "keep": "keep_first",
    "distribution": "completion_time",
    "spread": "completion_spread",
    "max_norm": "max_update_norm",
    "accept": "max_update_norm",
    "min_size": "min_client_size",
    "times": "ntk_times",
    "kernel": "ntk_kernel",
    "method": "ntk_method",
    "criterion": "ntk_criterion",
    "patience": "ntk_patience",
    "unstable": "ntk_unstable",
    "num_examples": "diagnostics_examples",
}
DIAGNOSTICS = ("none", "kernel")
CHOOSE = ("training", "validation")


def prepare(options: TrainOptions) -> Job:
    """Check every option, load and divide the data, compose the algorithm; raises ``ValueError``.

    Writes nothing but the key file that a projection needs, where there is none.
    """
    try:
        return _prepare(options)
    except ValueError as error:
        said = re.match(r"(\w+)(:| must)", str(error))
        if said is None or said[1] not in OPTION_OF:
            raise
        raise ValueError(OPTION_OF[said[1]] + str(error)[len(said[1]) :]) from error


def _prepare(o: TrainOptions) -> Job:
    entry = cast(AlgorithmEntry, catalogue.choose("algorithm", o.algorithm, dict(ALGORITHMS)))
    divide = cast(catalogue.PartitionEntry, catalogue.choose("partition", o.partition, dict(catalogue.PARTITIONS)))
    name = entry.schedule if o.schedule == "default" else o.schedule
    plan_of = cast(catalogue.ScheduleEntry, catalogue.choose("schedule", name, dict(catalogue.SCHEDULES)))
    _check(o, name)
    if o.local_steps is None and o.local_epochs is None:
        o = dataclasses.replace(o, local_epochs=5)
    given = {} if o.num_train is None else {"num_train": o.num_train}
    loaded = data.load(o.dataset, data_dir=o.data_dir, seed=o.seed, **given)
    clients, own_test = _apart(o, divide.build(o, loaded))
    loaded = project(o, loaded, clients.num_clients)
    clients, server_data, shared = _at_server(o, loaded, clients)
    clients, held = _to_validate(o, clients)
    train, test = _split(loaded, "train"), _split(loaded, "test")
    model = _model(o, loaded, train.targets.shape[1])
    plan = plan_of.build(o, clients.num_clients)
    plan = catalogue.faulty(plan, clients.sizes, o.dropout, o.keep_first, o.completion_time, o.completion_spread)
    if o.algorithm == "dp_fed_avg" and not 0 < o.delta < 1:
        raise ValueError(f"delta: got {o.delta}, must be above 0 and below 1")
    if o.algorithm == "fed_ensemble" and plan.num_models != o.num_models:
        raise ValueError(f"schedule: {name!r} trains {plan.num_models} model, but num_models is {o.num_models}")
    y = train.labels if o.loss == "cross_entropy" else train.targets
    if y is None:
        raise ValueError(f"loss: cross_entropy needs class labels, but the data set {loaded.name} has none")
    validation = None if held is None else (train.x[held], y[held])
    algorithm = exchanged(
        o, entry.build(o, Given(model, plan, server_data, shared, validation, clients)), clients.num_clients
    )
    watched = model if o.diagnostics == "kernel" else None
    if watched is not None:
        check_watchable(algorithm, watched, clients.num_clients, o.diagnostics_examples)
    x = np.asarray(train.x)
    federated = data.federated_data(x, np.asarray(y), clients)
    of_clients = None if own_test is None else data.federated_data(x, np.asarray(y), own_test)
    first = checkpoints_of(o, name, seeds_of(o)[0])
    resolve_mapping(algorithm, federated, o.num_rounds, o.mapping, first if first.resume else None, measure=False)
    some = jax.tree.map(lambda a: a[:EVALUATED_TRAIN], train)
    return Job(o, algorithm, federated, {"train": some, "test": test}, name, of_clients, watched)


def _apart(o: TrainOptions, clients: Partition) -> tuple[Partition, Partition | None]:
    """What clients train on, and what is kept to test what they predict for themselves (``client_test``)."""
    if not 0 <= o.client_test < 1:
        raise ValueError(f"client_test: got {o.client_test}, must be at least 0 and below 1")
    if o.client_test == 0:
        return clients, None
    kept, tested = sharing.held_out(clients, o.client_test, o.seed)
    if len(tested.indices) == 0:
        raise ValueError(f"client_test: got {o.client_test}, which leaves no client an example to test with")
    return kept, tested


def _at_server(
    o: TrainOptions, loaded: data.Dataset, clients: Partition
) -> tuple[Partition, Array | None, np.ndarray | None]:
    """The clients' examples once the server has its own, those (FedBE), and the shared ones (data sharing)."""
    if o.algorithm == "fed_be":
        held = _drawn(o, clients)
        return (
            sharing.without(clients, held),
            jnp.asarray(loaded.x_train[held], _input_dtype(loaded)),
            None,
        )
    if o.algorithm == "data_sharing":
        if not 0 < o.shared_fraction < 1:
            raise ValueError(f"shared_fraction: got {o.shared_fraction}, must be above 0 and below 1")
        if loaded.num_classes == 0:
            raise ValueError(f"algorithm: data_sharing draws by class, but the data set {loaded.name} has no classes")
        number = max(1, round(o.shared_fraction * len(loaded.x_train)))
        shared = sharing.class_balanced(loaded.y_train, number, o.seed)
        return sharing.with_shared(clients, shared), None, shared
    return clients, None, None


def _to_validate(o: TrainOptions, clients: Partition) -> tuple[Partition, np.ndarray | None]:
    """The clients' examples once the server has its own, and the indices of those that NTK-FL chooses the time by."""
    if "ntk_choose" not in ALGORITHMS[o.algorithm].uses:
        return clients, None
    if o.ntk_choose not in CHOOSE:
        raise ValueError(f"ntk_choose: got {o.ntk_choose!r}, allowed are {', '.join(CHOOSE)}")
    if o.ntk_choose == "training":
        if o.server_examples != TrainOptions().server_examples:
            raise ValueError("server_examples: is used with ntk_choose validation only")
        return clients, None
    held = _drawn(o, clients)
    return sharing.without(clients, held), held


def _drawn(o: TrainOptions, clients: Partition) -> np.ndarray:
    """Indices of ``server_examples`` of the clients' examples."""
    drawn = np.random.default_rng(o.seed).permutation(np.unique(clients.indices))
    if not 1 <= o.server_examples < len(drawn):
        raise ValueError(f"server_examples: got {o.server_examples}, must be from 1 to {len(drawn) - 1}")
    return drawn[: o.server_examples]


def _check(o: TrainOptions, schedule: str) -> None:
    """Raise ``ValueError`` for an option that is out of range, or that nothing in this run would use."""
    if not 0 <= o.seed < 2**32:
        raise ValueError(f"seed: got {o.seed}, must be from 0 to 2**32 - 1")
    seeds_of(o)
    check_wire(o)
    if o.checkpoint_every is not None and o.checkpoint_every < 0:
        raise ValueError(f"checkpoint_every: got {o.checkpoint_every}, must be 0 (none) or more")
    if o.resume and o.checkpoint_every == 0:
        raise ValueError("resume: needs checkpoints, but checkpoint_every is 0")
    if o.resume and not any(has_checkpoint(_checkpoint_folder(o, seed)) for seed in seeds_of(o)):
        raise ValueError(f"resume: there is no checkpoint in {o.output / 'checkpoints'}")
    if o.batch_size < 0:
        raise ValueError(f"batch_size: got {o.batch_size}, must be 0 or more")
    for name in ("num_rounds", "evaluate_every", "num_clients", "num_models"):
        if not 1 <= getattr(o, name) < 2**31:
            raise ValueError(f"{name}: got {getattr(o, name)}, must be from 1 to 2**31 - 1")
    if o.diagnostics not in DIAGNOSTICS:
        raise ValueError(f"diagnostics: got {o.diagnostics!r}, allowed are {', '.join(DIAGNOSTICS)}")
    check_data_dir(o.data_dir)
    for switch, off, names in (
        ("keep_first", None, ("completion_time", "completion_spread")),
        ("decay", 1.0, ("decay_every",)),
        ("distributed", False, ("coordinator", "num_processes", "process_id")),
        ("diagnostics", "none", ("diagnostics_examples",)),
    ):
        for name in names:
            if getattr(o, switch) == off and getattr(o, name) != getattr(TrainOptions(), name):
                raise ValueError(f"{name}: is used with {switch} only")
    inside = o.base if "base" in ALGORITHMS[o.algorithm].uses else ""
    choices = {
        "partition": o.partition,
        "schedule": schedule,
        "model": o.model,
        "algorithm": o.algorithm,
        "base": inside,
    }
    defaults = TrainOptions()
    for option, rules in users_of_options().items():
        if getattr(o, option) != getattr(defaults, option) and not any(choices[c] in users for c, users in rules):
            choice, users = rules[0]
            raise ValueError(f"{option}: is not used with {choice} {choices[choice]!r}, only with {', '.join(users)}")


def users_of_options() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """For each option that not every run uses: by what choice, and by which of its values; any one of them will do."""
    rules = {option: [rule] for option, rule in USED_WITH.items()}
    for option in dict.fromkeys(option for entry in ALGORITHMS.values() for option in entry.uses):
        users = tuple(name for name, entry in ALGORITHMS.items() if option in entry.uses)
        rules.setdefault(option, []).append(("algorithm", users))
        inside = tuple(name for name, own in INSIDE.items() if option in own.values())
        rules[option].append(("base", inside))
    rules["graph"].append(("schedule", ("random_walk",)))
    return rules


def seeds_of(o: TrainOptions) -> tuple[int, ...]:
    """The seeds of the runs that the options ask for; raises ``ValueError`` for a text that names none."""
    return (o.seed,) if o.seeds is None else parse_seeds(o.seeds)


def checkpoints_of(o: TrainOptions, schedule: str, seed: int) -> Checkpoints:
    """Checkpoints of the run of ``seed``, also where none are to be written; of several runs each has its folder."""
    config = {k: v for k, v in dataclasses.asdict(o).items() if k not in MAY_DIFFER} | {"schedule": schedule}
    config |= {} if o.projection is None else {"projection_seed": seed_digest(o)}
    folder = _checkpoint_folder(o, seed)
    resume = o.resume and has_checkpoint(folder)  # of several runs, some may not have begun
    return Checkpoints(folder, o.checkpoint_every or None, config, resume=resume, notify=say)


def _checkpoint_folder(o: TrainOptions, seed: int) -> Path:
    return o.output / "checkpoints" / ("" if o.seeds is None else f"seed-{seed}")


def _input_dtype(loaded: data.Dataset) -> Any:
    return jnp.int32 if loaded.kind == "tokens" else jnp.float32


def _split(loaded: data.Dataset, which: str) -> Split:
    x, y = getattr(loaded, f"x_{which}"), getattr(loaded, f"y_{which}")
    finite(f"x_{which}", x)
    finite(f"y_{which}", y)
    inputs = jnp.asarray(x, _input_dtype(loaded))
    if loaded.num_classes == 0:
        return Split(inputs, jnp.asarray(y, jnp.float32), None)
    targets = data.classification_targets(y, loaded.num_classes, centred=True)
    return Split(inputs, jnp.asarray(targets, jnp.float32), jnp.asarray(y, jnp.int32))


def _model(o: TrainOptions, loaded: data.Dataset, output_size: int) -> Model:
    given: dict[str, Any] = {}
    if o.model == "mlp":
        given = {"widths": o.widths, "activation": o.activation, "parameterization": o.parameterization}
    return models.build(o.model, loaded.input_shape, output_size, loaded.kind, **given)


def say(line: str) -> None:
    """One line for the user, on standard error."""
    print(f"fedtangent: {line}", file=sys.stderr)
