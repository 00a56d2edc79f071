"""NTK-FL and its baselines: their settings, the data of one seed, and how each method is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedtangent._src import data, models
from fedtangent._src.data import partition
from fedtangent._src.experiments.lab.runner import within
from fedtangent._src.experiments.lab.runs import Method
from fedtangent._src.experiments.lab.trials import (
    Drawn,
    Trial,
    distorted_by,
    draw,
    of_owners,
    one_hot,
    partition_of,
    projected,
    trial_of,
    with_global_set,
)
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.compressed import Quantiser
from fedtangent._src.federated.algorithms.tangent import Compression, Pooling
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.wire.subsample import largest_sample
from fedtangent._src.optimizers import sgd
from fedtangent._src.types import Algorithm, Array, Model, Partition, Schedule

LABELS = {
    "centralised": "centralised",
    "ntk_fl": "NTK-FL",
    "ntk_fl_cross_entropy": "NTK-FL, cross entropy",
    "data_sharing": "data sharing",
    "fed_nova": "FedNova",
    "fed_avg": "FedAvg",
    "cp_ntk_fl": "CP-NTK-FL",
    "cp_ntk_fl_cross_entropy": "CP-NTK-FL, cross entropy",
    "cp_fed_avg": "FedAvg, subsampled and projected",
    "fed_com": "FedCOM, 8 bit",
    "qsgd": "QSGD, 4 bit",
}
# The methods that evolve a kernel, each with its loss.
EVOLVED = {
    "ntk_fl": "squared_error",
    "ntk_fl_cross_entropy": "cross_entropy",
    "cp_ntk_fl": "squared_error",
    "cp_ntk_fl_cross_entropy": "cross_entropy",
}
# The recipes of methods that are not named after their recipe.
RECIPES: dict[str, Callable[..., Algorithm]] = {"cp_fed_avg": algorithms.fed_avg, "qsgd": algorithms.fed_paq}
# Each method with less communication, and the one that it is compared with.
PAIRED = {"cp_ntk_fl": "ntk_fl", "cp_ntk_fl_cross_entropy": "ntk_fl_cross_entropy", "cp_fed_avg": "fed_avg"}
METHODS = ("centralised", "ntk_fl", "ntk_fl_cross_entropy", "data_sharing", "fed_nova", "fed_avg")
# The paper's grids (appendix A; section 6).
PAPER_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
PAPER_STEPS = (1, 3, 5, 7, 9, 10, 20, 30, 40, 50)
PAPER_TIMES = tuple(range(100, 2001, 100))


@dataclass(frozen=True)
class CohortSettings:
    """The settings that all methods share; the defaults are the paper's."""

    methods: tuple[str, ...] = within(METHODS, of=tuple(LABELS))
    partition: str = within("dirichlet", of=("dirichlet", "writers", "shifted"))
    alpha: float = within(0.5, above=0)
    num_clients: int = 300
    clients_per_round: int = 20
    num_rounds: int = 50
    reference_rounds: int = 100  # of FedAvg; the others are to reach its accuracy after them
    window: int = 5  # evaluations that are averaged for "the accuracy after" a round, as single ones fluctuate
    width: int = 100
    last_w_std: float = within(0.1, at_least=0)  # last layer's initial deviation times sqrt(width): outputs near zero
    batch_size: int = 200
    loss: str = within("cross_entropy", of=("cross_entropy", "squared_error"))  # of the baselines
    learning_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    tangent_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    local_steps: tuple[int, ...] = within(PAPER_STEPS, increasing=True)
    server_steps: tuple[int, ...] = within((20, 100, 300), increasing=True)  # of the centralised; ours
    times: tuple[int, ...] = within(PAPER_TIMES, increasing=True)
    momentum: float = within(0.9, at_least=0, below=1)  # of FedNova's clients
    shared: float = within(0.1, above=0, at_most=1)  # data sharing's global set, as a share of all clients' examples
    beta: float = within(1.0, above=0, at_most=1)  # share of its examples that a client of cp_ methods uses a round
    projected: int = within(0, least=0)  # d1', dimension of the cp_ methods' random projection; 0: none
    sparsity: float = within(0.0, at_least=0, below=1)  # share of each example's Jacobian that CP-NTK-FL leaves out
    value_bits: int = within(0, least=0, most=64)  # bits of a Jacobian's number as sent; 0: as of the parameters
    tuning_rounds: int = 20
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)
    num_validation: int = 2000
    num_test: int = within(0, least=0)


# Settings of the smaller scales, for two cores.
DIGITS: dict[str, Any] = {
    "num_clients": 50, "clients_per_round": 10, "num_rounds": 20, "reference_rounds": 40, "tuning_rounds": 10,
    "batch_size": 20, "learning_rates": (0.01, 0.03, 0.1, 0.3), "tangent_rates": (0.01, 0.03, 0.1),
    "local_steps": (1, 5, 10, 20), "server_steps": (10, 100), "times": (100, 200, 400, 800, 1400, 2000),
    "num_validation": 237,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "num_clients": 60, "clients_per_round": 10, "num_rounds": 12, "reference_rounds": 24, "tuning_rounds": 8,
    "batch_size": 50, "learning_rates": (0.01, 0.03, 0.1), "tangent_rates": (0.01, 0.03, 0.1),
    "local_steps": (1, 5, 20), "server_steps": (20, 100), "times": (100, 200, 400, 800, 1400, 2000),
    "num_train": 3000, "num_validation": 1000, "num_test": 2000,
}  # fmt: skip
# The settings that a run depends on, besides its data and its configuration.
DECISIVE = ("clients_per_round", "width", "last_w_std", "batch_size", "loss", "times", "momentum", "beta",
            "projected", "sparsity", "value_bits", "shared")  # fmt: skip


def divide(name: str, data_dir: Path | None, seed: int, s: CohortSettings) -> Trial:
    """Divides the data of one seed among clients.

    Training and validation examples come from the training set, test examples from the test set. All pixels are
    standardised by the mean and deviation of the training set. Clients are drawn by Dirichlet label skew
    (``"dirichlet"``, section 6 of the paper), are the data set's own users (``"writers"``), or hold i.i.d. examples
    that each of them distorts in its own way (``"shifted"``: ``trials.distorted``).

    Args:
        name: Name of the data set.
        data_dir: Folder with original files.
        seed: Seed of the division.
        s: Settings.

    Raises:
        ValueError: There are fewer examples or clients than the settings need.
    """
    loaded = data.load(name, data_dir=data_dir, seed=seed, flatten=True)
    drawn = draw(loaded, seed, s.num_train, s.num_validation, s.num_test)
    mean, deviation = float(loaded.x_train.mean()), float(loaded.x_train.std())
    if s.partition == "shifted":
        drawn, of_parts = distorted_by(drawn, s.num_clients, seed)
        clients = of_parts["train"]
    else:
        clients = _clients(loaded, drawn, seed, s)
    x = {part: ((v - np.float32(mean)) / np.float32(deviation)).reshape(len(v), -1) for part, v in drawn.x.items()}
    return trial_of(drawn._replace(x=x), clients, seed, loaded.num_classes)


def _clients(loaded: data.Dataset, drawn: Drawn, seed: int, s: CohortSettings) -> Partition:
    """Returns the clients' training examples, for a "dirichlet" or "writers" partition."""
    if s.partition == "dirichlet":
        return partition.dirichlet(drawn.y["train"], s.num_clients, s.alpha, seed)
    if loaded.user_train is None:
        raise ValueError(f"partition: got 'writers', but the data set {loaded.name} does not say who wrote what")
    users, owner = np.unique(loaded.user_train, return_inverse=True)
    if len(users) != s.num_clients:
        raise ValueError(f"num_clients: got {s.num_clients}, must be {len(users)}, the writers that {loaded.name} has")
    return of_owners(owner[drawn.rows["train"]], len(users))


def network(s: CohortSettings, trial: Trial) -> Model:
    """Builds the paper's multilayer perceptron of one hidden layer, in the standard parameterization, biases from zero.

    Hidden weights are Kaiming's N(0, 2 / fan_in). The last layer's deviation is ``last_w_std / sqrt(width)``, which is
    our choice: with a larger one the halved squared error starts far above its value at zero.
    """
    size = int(np.prod(trial.data.x.shape[1:]))
    return models.build("mlp", size, trial.num_classes, widths=(s.width,), parameterization="standard", b_std=0.0,
                        last_w_std=s.last_w_std)  # fmt: skip


def methods(s: CohortSettings, trial: Trial) -> dict[str, Method]:
    """Returns the methods of the settings on one seed's data, under one schedule; all start from the same network.

    The ``cp_`` methods take inputs projected to ``s.projected`` numbers, with a network of that input size.
    """
    plan = schedule.uniform_sampling(s.num_clients, s.clients_per_round)
    small = projected(trial, s.projected) if s.projected and any(n in PAIRED for n in s.methods) else trial
    seen = {name: small if name in PAIRED else trial for name in s.methods}
    return {name: (_evolving if name in EVOLVED else _training)(s, name, own, plan) for name, own in seen.items()}


def _momentum(momentum: float, rate: float | Array) -> optax.GradientTransformation:
    """Builds SGD with momentum for FedNova, which with plain SGD and equal numbers of local steps would be FedAvg."""
    return optax.chain(optax.trace(momentum), sgd(rate))


def _training(s: CohortSettings, name: str, trial: Trial, plan: Schedule) -> Method:
    """Builds a method of local training, or centralised training; the number of steps is a hyper-parameter."""
    model, central = network(s, trial), name == "centralised"
    held = trial.data if s.loss == "cross_entropy" else one_hot(trial)
    own: dict[str, Any] = {"averaging": Averaging(beta=s.beta)} if name == "cp_fed_avg" else {}
    if name == "qsgd":
        own["quantiser"] = Quantiser(4)
    if name == "data_sharing":
        held, own["shared"] = with_global_set(trial._replace(data=held), s.shared, trial.data.y)

    def build(steps: Any, rate: float | Array) -> Algorithm:
        if name == "fed_nova":
            rates: dict[str, Any] = {"client_optimizer": _momentum(s.momentum, _single(rate))}
        else:
            rates = {"learning_rate" if central else "client_learning_rate": _single(rate)}
        recipe, work = RECIPES.get(name) or getattr(algorithms, name), Work(steps=steps, batch_size=s.batch_size)
        return recipe(model, plan, work=work, loss=s.loss, **rates, **own)

    steps = s.server_steps if central else s.local_steps
    return Method(LABELS[name], s.learning_rates, steps, build, held, trial.splits)


def _evolving(s: CohortSettings, name: str, trial: Trial, plan: Schedule) -> Method:
    """Builds NTK-FL or, for a name that starts with ``cp_``, CP-NTK-FL with the compression of the settings.

    ``EVOLVED`` names the loss. The server's pool has room for the examples that the largest possible cohort uses,
    rounded up to a multiple of 8: seeds whose pools are of similar size share a compiled round.
    """
    model, compressed = network(s, trial), name.startswith("cp_")
    pool = -(-largest_sample(partition_of(trial.data), s.clients_per_round, s.beta if compressed else 1.0) // 8) * 8
    recipe: Callable[..., Algorithm] = algorithms.cp_ntk_fl if compressed else algorithms.ntk_fl
    own: dict[str, Any] = {
        "evolution": Evolution(s.times, unstable="clip", loss=EVOLVED[name]),
        "pooling": Pooling(pool_size=pool),
    }
    if compressed:
        own["compression"] = Compression(s.beta, s.sparsity, s.value_bits or None, shuffle=True)

    def build(steps: Any, rate: float | Array) -> Algorithm:
        return recipe(model, plan, learning_rate=_single(rate), **own)

    return Method(LABELS[name], s.tangent_rates, (0,), build, one_hot(trial), trial.splits, pool)


def _single(rate: float | Array) -> float | Array:
    """Returns a rate unchanged; a traced one in float32, the precision of these runs."""
    return rate if isinstance(rate, float) else rate.astype(jnp.float32)
