"""NTK-FL and its baselines on one seed's data: their settings at each scale, clients, and how each is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedtangent import data, models
from fedtangent.data import partition
from fedtangent.experiments.lab.runs import Method
from fedtangent.experiments.lab.settings import within
from fedtangent.experiments.lab.trials import Trial, draw, one_hot, projected, trial_of, with_global_set
from fedtangent.federated import algorithms, schedule
from fedtangent.federated.local import Work
from fedtangent.federated.rates import sgd
from fedtangent.federated.wire.subsample import largest_sample
from fedtangent.types import Algorithm, Array, FederatedData, Model, Partition, Schedule

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
# Each with what it makes smaller.
PAIRED = {"cp_ntk_fl": "ntk_fl", "cp_ntk_fl_cross_entropy": "ntk_fl_cross_entropy", "cp_fed_avg": "fed_avg"}
METHODS = ("centralised", "ntk_fl", "ntk_fl_cross_entropy", "data_sharing", "fed_nova", "fed_avg")
# The paper's grids (appendix A; section 6).
PAPER_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
PAPER_STEPS = (1, 3, 5, 7, 9, 10, 20, 30, 40, 50)
PAPER_TIMES = tuple(range(100, 2001, 100))


@dataclass(frozen=True)
class CohortSettings:
    """Everything that the methods of one comparison share; the defaults are the paper's."""

    methods: tuple[str, ...] = within(METHODS, of=tuple(LABELS))
    partition: str = within("dirichlet", of=("dirichlet", "writers", "shifted"))
    alpha: float = within(0.5, above=0)
    num_clients: int = 300
    clients_per_round: int = 20
    num_rounds: int = 50
    reference_rounds: int = 100  # of FedAvg, whose accuracy then is what the others are to reach
    window: int = 5  # evaluations whose mean is "the accuracy after" a round: single ones swing
    width: int = 100
    last_w_std: float = within(0.1, at_least=0)  # of the last layer's weights times sqrt(width): it starts near zero
    batch_size: int = 200
    loss: str = within("cross_entropy", of=("cross_entropy", "squared_error"))  # NTK-FL's is in its name
    learning_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    tangent_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    local_steps: tuple[int, ...] = within(PAPER_STEPS, increasing=True)
    server_steps: tuple[int, ...] = within((20, 100, 300), increasing=True)  # the centralised; left open by the paper
    times: tuple[int, ...] = within(PAPER_TIMES, increasing=True)
    momentum: float = within(0.9, at_least=0, below=1)  # of FedNova's clients
    shared: float = within(0.1, above=0, at_most=1)  # data sharing's global set, as a share of all clients' examples
    beta: float = within(1.0, above=0, at_most=1)  # share of its examples that a cp_ client uses in a round
    projected: int = within(0, least=0)  # d1', dimensions of the random projection of the cp_ methods; 0: none
    sparsity: float = within(0.0, at_least=0, below=1)  # share of each example's Jacobian that CP-NTK-FL leaves out
    value_bits: int = within(0, least=0)  # of a Jacobian's number on CP-NTK-FL's wire; 0: those of the parameters
    tuning_rounds: int = 20
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)
    num_validation: int = 2000
    num_test: int = within(0, least=0)


# Sizes for two cores.
DIGITS: dict[str, Any] = {
    "num_clients": 50,
    "clients_per_round": 10,
    "num_rounds": 20,
    "reference_rounds": 40,
    "batch_size": 20,
    "learning_rates": (0.01, 0.03, 0.1, 0.3),
    "tangent_rates": (0.01, 0.03, 0.1),
    "local_steps": (1, 5, 10, 20),
    "server_steps": (10, 100),
    "times": (100, 200, 400, 800, 1400, 2000),
    "tuning_rounds": 10,
    "num_validation": 237,
}
IMAGES: dict[str, Any] = {
    "num_clients": 60,
    "clients_per_round": 10,
    "num_rounds": 12,
    "reference_rounds": 24,
    "batch_size": 50,
    "learning_rates": (0.01, 0.03, 0.1),
    "tangent_rates": (0.01, 0.03, 0.1),
    "local_steps": (1, 5, 20),
    "server_steps": (20, 100),
    "times": (100, 200, 400, 800, 1400, 2000),
    "tuning_rounds": 8,
    "num_train": 3000,
    "num_validation": 1000,
    "num_test": 2000,
}
# The settings that a run depends on, besides its data and its configuration.
DECISIVE = ("clients_per_round", "width", "last_w_std", "batch_size", "loss", "times", "momentum", "beta",
            "projected", "sparsity", "value_bits", "shared")  # fmt: skip


def check_cohort(s: CohortSettings) -> None:
    """Raise ``ValueError`` for settings that do not go together."""
    if s.clients_per_round > s.num_clients:
        raise ValueError(f"clients_per_round: got {s.clients_per_round}, must be at most {s.num_clients}, all clients")
    if s.window > min(s.num_rounds, s.reference_rounds):
        raise ValueError(f"window: got {s.window}, must be at most num_rounds and reference_rounds")


def divide(name: str, data_dir: Path | None, seed: int, s: CohortSettings) -> Trial:
    """The data of one seed: training and validation examples from the training set, test examples from the other.

    Pixels are standardised by one mean and one deviation, those of the training set. Clients are Dirichlet draws of
    labels (``"dirichlet"``, the paper's, section 6), the data set's own users (``"writers"``; validation and test
    examples of all of them), or i.i.d. draws whose images each client distorts in its own way (``"shifted"``:
    ``distorted``). Raises ``ValueError`` for more examples or clients than there are.
    """
    loaded = data.load(name, data_dir=data_dir, seed=seed, flatten=True)
    drawn = draw(loaded, seed, s.num_train, s.num_validation, s.num_test)
    mean, deviation = float(loaded.x_train.mean()), float(loaded.x_train.std())
    clients, x = _clients(loaded, drawn.y["train"], drawn.train, seed, s), dict(drawn.x)
    if s.partition == "shifted":
        x["train"] = distorted(x["train"], _owner(clients), s.num_clients, seed)
        x |= {p: distorted(x[p], drawn.rng.integers(s.num_clients, size=len(x[p])), s.num_clients, seed)
              for p in ("validation", "test")}  # fmt: skip
    x = {part: ((v - np.float32(mean)) / np.float32(deviation)).reshape(len(v), -1) for part, v in x.items()}
    return trial_of(drawn._replace(x=x), clients, seed, loaded.num_classes)


def _clients(loaded: Any, labels: np.ndarray, train: np.ndarray, seed: int, s: CohortSettings) -> Partition:
    if s.partition == "dirichlet":
        return partition.dirichlet(labels, s.num_clients, s.alpha, seed)
    if s.partition == "shifted":
        return partition.iid(len(labels), s.num_clients, seed)
    if loaded.user_train is None:
        raise ValueError(f"partition: got 'writers', but the data set {loaded.name} does not say who wrote what")
    users, owner = np.unique(loaded.user_train, return_inverse=True)
    if len(users) != s.num_clients:
        raise ValueError(f"num_clients: got {s.num_clients}, must be {len(users)}, the writers that {loaded.name} has")
    mine = owner[train]
    return partition.assemble([np.flatnonzero(mine == i) for i in range(len(users))])


def _owner(clients: Partition) -> np.ndarray:
    """Whose each example is, [n]; every example has exactly one owner."""
    owner = np.empty(len(clients.indices), np.int64)
    owner[clients.indices] = np.repeat(np.arange(clients.num_clients), clients.sizes)
    return owner


def distorted(x: np.ndarray, owner: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """Images in [0, 1], each as its owner would write it: feature skew for data without writers.

    A client has its own contrast (a factor from 0.5 to 1.5), brightness (-0.2 to 0.2) and place on the page (a shift by
    up to one pixel each way, cyclic). ``x`` [n, p] with p a square, ``owner`` [n] from 0 to ``num_clients - 1``.
    """
    rng = np.random.default_rng([seed, 1])
    contrast, brightness = rng.uniform(0.5, 1.5, num_clients), rng.uniform(-0.2, 0.2, num_clients)
    down, right = rng.integers(-1, 2, (2, num_clients))
    side = int(np.sqrt(x.shape[1]))
    found = np.empty_like(x)
    for i in np.unique(owner):
        own = x[owner == i].reshape(-1, side, side)
        moved = np.roll(own, (down[i], right[i]), axis=(1, 2))
        found[owner == i] = (contrast[i] * moved + brightness[i]).reshape(len(own), -1)
    return found.astype(x.dtype)


def network(s: CohortSettings, trial: Trial) -> Model:
    """The paper's multilayer perceptron of one hidden layer, in the standard parameterization, biases from zero.

    Hidden weights are Kaiming's N(0, 2 / fan_in). The last layer's are ``last_w_std / sqrt(width)``: the paper does not
    say; from larger ones the halved squared error starts far above its value at zero.
    """
    return models.build(
        "mlp",
        int(np.prod(trial.data.x.shape[1:])),
        trial.num_classes,
        widths=(s.width,),
        parameterization="standard",
        b_std=0.0,
        last_w_std=s.last_w_std,
    )


def methods(s: CohortSettings, trial: Trial) -> dict[str, Method]:
    """The methods of the settings on one seed's data, under one schedule; all start from the same network.

    Those with a projection (``cp_``) see projected inputs of ``s.projected`` numbers and have a network for these.
    """
    makers = {
        "centralised": _centralised,
        **{name: _evolving(name) for name in EVOLVED},
        "data_sharing": _data_sharing,
        "fed_nova": _averaging(algorithms.fed_nova, "fed_nova", client_optimizer=_momentum(s.momentum)),
        "fed_avg": _averaging(algorithms.fed_avg, "fed_avg"),
        "cp_fed_avg": _averaging(algorithms.fed_avg, "cp_fed_avg", beta=s.beta),
        "fed_com": _averaging(algorithms.fed_com, "fed_com"),
        "qsgd": _averaging(algorithms.fed_paq, "qsgd"),
    }
    plan = schedule.uniform_sampling(s.num_clients, s.clients_per_round)
    small = projected(trial, s.projected) if s.projected and any(n in PAIRED for n in s.methods) else trial
    seen = {name: small if name in PAIRED else trial for name in s.methods}
    return {name: makers[name](s, own, network(s, own), plan) for name, own in seen.items()}


def _targets(s: CohortSettings, trial: Trial) -> FederatedData:
    """What the gradient methods are given: class labels, or one-hot targets under the squared error."""
    return trial.data if s.loss == "cross_entropy" else one_hot(trial)


def _momentum(momentum: float) -> Callable[[float | Array], optax.GradientTransformation]:
    """FedNova's clients have momentum: with plain SGD and equally many local steps it would be FedAvg itself."""

    def make(rate: float | Array) -> optax.GradientTransformation:
        descend = sgd(rate)
        assert isinstance(descend, optax.GradientTransformation)
        return optax.chain(optax.trace(momentum), descend)

    return make


def _averaging(recipe: Callable[..., Algorithm], name: str, **options: Any) -> Callable[..., Method]:
    """Local training and an average: the recipe's, of which the number of local steps is searched over."""

    def make(s: CohortSettings, trial: Trial, model: Model, plan: Schedule) -> Method:
        def build(steps: Any, rate: float | Array) -> Algorithm:
            work = Work(steps=steps, batch_size=s.batch_size)
            return recipe(model, plan, client_learning_rate=_single(rate), work=work, loss=s.loss, **options)

        held = _targets(s, trial)
        return Method(LABELS[name], s.learning_rates, s.local_steps, build, held, trial.splits)

    return make


def _data_sharing(s: CohortSettings, trial: Trial, model: Model, plan: Schedule) -> Method:
    held, shared = with_global_set(trial._replace(data=_targets(s, trial)), s.shared, trial.data.y)
    own = _averaging(algorithms.data_sharing, "data_sharing", shared=shared)(s, trial, model, plan)
    return own._replace(data=held)


def _centralised(s: CohortSettings, trial: Trial, model: Model, plan: Schedule) -> Method:
    def build(steps: Any, rate: float | Array) -> Algorithm:
        work = Work(steps=steps, batch_size=s.batch_size)
        return algorithms.centralised(model, plan, learning_rate=_single(rate), work=work, loss=s.loss)

    held = _targets(s, trial)
    return Method(LABELS["centralised"], s.learning_rates, s.server_steps, build, held, trial.splits)


def _evolving(name: str) -> Callable[..., Method]:
    """NTK-FL or, with the settings' switches, CP-NTK-FL, under the loss that ``EVOLVED`` gives for the name."""
    compressed = name.startswith("cp_")

    def make(s: CohortSettings, trial: Trial, model: Model, plan: Schedule) -> Method:
        pool = _rounded(largest_sample(_partition(trial), s.clients_per_round, s.beta if compressed else 1.0))
        recipe: Callable[..., Algorithm] = algorithms.cp_ntk_fl if compressed else algorithms.ntk_fl
        bits = s.value_bits or None
        own: dict[str, Any] = (
            {} if not compressed else {"beta": s.beta, "sparsity": s.sparsity, "value_bits": bits, "shuffle": True}
        )

        def build(steps: Any, rate: float | Array) -> Algorithm:
            return recipe(
                model,
                plan,
                learning_rate=_single(rate),
                times=s.times,
                pool_size=pool,
                unstable="clip",
                loss=EVOLVED[name],
                **own,
            )

        return Method(LABELS[name], s.tangent_rates, (0,), build, one_hot(trial), trial.splits, pool)

    return make


def _partition(trial: Trial) -> Partition:
    return Partition(np.asarray(trial.data.indices), np.asarray(trial.data.offsets))


def _rounded(pool: int) -> int:
    """The next multiple of 8: pools of like size share a compiled round, and no example is dropped."""
    return -(-pool // 8) * 8


def _single(rate: float | Array) -> float | Array:
    """A rate; a traced one in single precision, in which these runs are."""
    return rate if isinstance(rate, float) else rate.astype(jnp.float32)
