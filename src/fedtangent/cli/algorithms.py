"""Algorithms by name, as ``train`` builds them from its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

from fedtangent.cli.options import TrainOptions
from fedtangent.cli.parse import parse_channel, parse_graph
from fedtangent.federated import algorithms, faults
from fedtangent.federated.algorithms.distil import Distillation
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate, staircase_decay
from fedtangent.federated.wire.subsample import largest_sample
from fedtangent.types import Accept, Algorithm, Array, Model, Partition, Schedule


class Given(NamedTuple):
    """What an algorithm is built of, besides the options."""

    model: Model
    plan: Schedule
    server_data: Array | None = None  # x [m, ...], what FedBE distils on
    shared: np.ndarray | None = None  # indices of the examples that every client was given
    validation: tuple[Array, Array] | None = None  # NTK-FL's server's: x [m, ...], targets [m, C] or labels [m]
    clients: Partition | None = None


class AlgorithmEntry(NamedTuple):
    """A recipe: what it is, how to build it, its own schedule, the options that not every algorithm uses, its parts."""

    description: str
    build: Callable[[TrainOptions, Given], Algorithm]
    schedule: str = "uniform"
    uses: tuple[str, ...] = ()
    parts: str = ""  # client; aggregate; server, in a few words


TRAINING = ("local_steps", "local_epochs", "batch_size", "client_optimizer")
WIRE = ("beta", "shuffle")  # what every algorithm with a server's average can have
SUMMED = ("sparsity", "secure_aggregation", "channel", "error_feedback")  # those without a channel of their own, too
AVERAGING = (*TRAINING, "weighting", "server_learning_rate", *WIRE, *SUMMED)
EVOLUTION = (
    *("ntk_kernel", "ntk_times", "ntk_method", "ntk_choose", "ntk_criterion", "ntk_patience", "ntk_unstable"),
    "server_examples",
)
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation] | None] = {
    "sgd": None,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": optax.adam,
}


def decayed(rate: float, factor: float, every: int) -> Rate:
    """``rate`` times ``factor`` after each ``every`` rounds; a plain number where nothing decays."""
    return rate if factor == 1 else staircase_decay(rate, factor, every)


def acceptance(max_update_norm: float | None) -> Accept | None:
    """Which messages the server counts: all, or finite ones of at most that norm (infinity: of any)."""
    return None if max_update_norm is None else faults.finite(max_update_norm)


def _training(o: TrainOptions) -> dict[str, Any]:
    """Arguments of all recipes that train on their clients."""
    if o.client_optimizer not in OPTIMIZERS:
        raise ValueError(f"client_optimizer: got {o.client_optimizer!r}, allowed are {', '.join(OPTIMIZERS)}")
    given: dict[str, Any] = {
        "client_learning_rate": decayed(o.client_learning_rate, o.decay, o.decay_every),
        "work": Work(o.local_steps, o.local_epochs, o.batch_size if o.batch_size > 0 else None),
        "loss": o.loss,
        "accept": acceptance(o.max_update_norm),
    }
    if o.client_optimizer != "sgd":
        given["client_optimizer"] = OPTIMIZERS[o.client_optimizer]
    return given


def _averaging(o: TrainOptions, *left_out: str) -> dict[str, Any]:
    """Arguments of recipes that average what clients send; those that are not given stay the recipe's own."""
    given = _training(o)
    if o.server_learning_rate is not None:
        given["server_learning_rate"] = o.server_learning_rate
    if o.weighting is not None:
        given["weighting"] = o.weighting
    given |= {"beta": o.beta} if o.beta != 1 else {}
    given |= {"shuffle": True} if o.shuffle else {}
    given |= {"secure_aggregation": 32} if o.secure_aggregation else {}
    wire = parse_channel(o.channel if o.sparsity == 0 else f"top_k:{1 - o.sparsity:.15f}", o.error_feedback)
    if wire is not None:
        given["channel"] = wire
    return {name: value for name, value in given.items() if name not in left_out}


def _averaged(recipe: Callable[..., Algorithm], **options: str) -> Callable[[TrainOptions, Given], Algorithm]:
    """How to build a recipe with FedAvg's arguments and its own: argument of the recipe = name of the option."""

    def build(o: TrainOptions, given: Given) -> Algorithm:
        own = {argument: getattr(o, option) for argument, option in options.items()}
        return recipe(given.model, given.plan, **_averaging(o), **own)

    return build


def _base(o: TrainOptions) -> dict[str, Any]:
    """The algorithm inside another one, and its own options."""
    if o.base not in INSIDE:
        raise ValueError(f"base: got {o.base!r}, allowed are {', '.join(INSIDE)}")
    own = {argument: getattr(o, option) for argument, option in INSIDE[o.base].items()}
    return {"base": getattr(algorithms, o.base), **own}


def _around(recipe: Callable[..., Algorithm], *more: str) -> Callable[[TrainOptions, Given], Algorithm]:
    """How to build a recipe around another one (``--base``), with ``more`` of what is given."""

    def build(o: TrainOptions, given: Given) -> Algorithm:
        own = {name: getattr(given, name) for name in more}
        return recipe(given.model, given.plan, **_averaging(o), **_base(o), **own)

    return build


def _fed_sgd(o: TrainOptions, given: Given) -> Algorithm:
    own = _averaging(o, "work", "client_learning_rate")
    rate = decayed(o.client_learning_rate, o.decay, o.decay_every)
    return algorithms.fed_sgd(given.model, given.plan, learning_rate=rate, **own)


def _local_only(o: TrainOptions, given: Given) -> Algorithm:
    return algorithms.local_only(given.model, given.plan, **_training(o))


def _centralised(o: TrainOptions, given: Given) -> Algorithm:
    own = _training(o)
    rate, optimizer = own.pop("client_learning_rate"), own.pop("client_optimizer", None)
    return algorithms.centralised(given.model, given.plan, learning_rate=rate, optimizer=optimizer, **own)


def _dp_fed_avg(o: TrainOptions, given: Given) -> Algorithm:
    expected = o.clients_per_round if o.schedule == "poisson" else None
    return algorithms.dp_fed_avg(
        given.model,
        given.plan,
        clip_norm=o.clip_norm,
        noise_multiplier=o.noise_multiplier,
        expected_clients=expected,
        **_averaging(o),
    )


def _fed_be(o: TrainOptions, given: Given) -> Algorithm:
    # FedBE's numbers are for ten thousand images: start and cycle in proportion to the steps that these data make.
    steps = 20 * -(-o.server_examples // min(128, o.server_examples))
    how = Distillation(start=steps // 6, cycle=max(1, steps // 60))
    return algorithms.fed_be(
        given.model,
        given.plan,
        server_data=given.server_data,
        posterior=o.posterior,
        num_samples=o.num_samples,
        distillation=how,
        **_averaging(o, "server_learning_rate"),
    )


def _gossip(o: TrainOptions, given: Given) -> Algorithm:
    mixing = parse_graph(o.graph, given.plan.num_clients, o.seed)
    return algorithms.gossip(given.model, given.plan, mixing=mixing, **_averaging(o))


def _ntk_fl(o: TrainOptions, given: Given) -> Algorithm:
    return algorithms.ntk_fl(given.model, given.plan, **_evolving(o, given))


def _cp_ntk_fl(o: TrainOptions, given: Given) -> Algorithm:
    own: dict[str, Any] = {"beta": o.beta, "sparsity": o.sparsity, "shuffle": o.shuffle}
    return algorithms.cp_ntk_fl(given.model, given.plan, **_evolving(o, given), **own)


def _evolving(o: TrainOptions, given: Given) -> dict[str, Any]:
    """Arguments of the recipes that evolve a kernel."""
    slots = min(given.plan.num_slots, given.plan.num_clients)
    return {
        "learning_rate": decayed(o.client_learning_rate, o.decay, o.decay_every),
        "times": o.ntk_times,
        "kernel": o.ntk_kernel,
        "method": o.ntk_method,
        "validation": given.validation,
        "criterion": o.ntk_criterion,
        "patience": o.ntk_patience,
        "unstable": o.ntk_unstable,
        "loss": o.loss,
        "pool_size": None if given.clients is None else largest_sample(given.clients, slots, o.beta),
        "accept": acceptance(o.max_update_norm),
        "slots_per_model": slots,
    }


_ADAPTIVE = {"tau": "tau"}
_MOMENTS = {"beta_1": "beta_1", "beta_2": "beta_2", **_ADAPTIVE}
# What may stand inside another algorithm, with its own arguments as the options are called.
INSIDE: dict[str, dict[str, str]] = {
    "fed_avg": {},
    "fed_prox": {"mu": "mu"},
    "fed_dyn": {"mu": "dyn_alpha"},
    "scaffold": {},
    "fed_nova": {"mu": "nova_mu"},
    "fed_adam": _MOMENTS,
    "fed_yogi": _MOMENTS,
    "fed_adagrad": _ADAPTIVE,
    "fed_avg_m": {"momentum": "server_momentum"},
}


def _entry(name: str, description: str, **more: Any) -> AlgorithmEntry:
    """The entry of a recipe in ``INSIDE``."""
    own = INSIDE[name]
    return AlgorithmEntry(
        description, _averaged(getattr(algorithms, name), **own), uses=(*AVERAGING, *own.values()), **more
    )


_ENTRIES: dict[str, AlgorithmEntry] = {
    "fed_avg": _entry("fed_avg", "local SGD, weighted mean of the clients' models (McMahan et al., 2017)"),
    "fed_sgd": AlgorithmEntry(
        "one full-batch gradient of each client (McMahan et al., 2017)",
        _fed_sgd,
        uses=("weighting", "server_learning_rate", *WIRE, *SUMMED, "client_optimizer"),
    ),
    "fed_prox": _entry("fed_prox", "clients are held near the model they got by --mu (Li et al., 2020)"),
    "fed_dyn": _entry("fed_dyn", "dynamic regularisation of strength --dyn-alpha (Acar et al., 2021)"),
    "scaffold": _entry("scaffold", "control variates, option II (Karimireddy et al., 2020)"),
    "fed_nova": _entry("fed_nova", "normalised averaging of unequal work (Wang et al., 2020)"),
    "fed_adam": _entry("fed_adam", "Adam at the server, as published (Reddi et al., 2021)"),
    "fed_yogi": _entry("fed_yogi", "Yogi at the server (Reddi et al., 2021)"),
    "fed_adagrad": _entry("fed_adagrad", "Adagrad at the server (Reddi et al., 2021)"),
    "fed_avg_m": _entry("fed_avg_m", "momentum at the server (Hsu et al., 2019)"),
    "fed_ensemble": AlgorithmEntry(
        "K models, each client trains one a round, around --base (Fed-ensemble, 2021 and 2024)",
        _around(algorithms.fed_ensemble),
        "permutations",
        (*AVERAGING, "base"),
    ),
    "fed_be": AlgorithmEntry(
        "a Bayesian ensemble of the round's models, distilled at the server (FedBE, 2021)",
        _fed_be,
        uses=(*(name for name in AVERAGING if name != "server_learning_rate"), "server_examples")
        + ("posterior", "num_samples"),
    ),
    "fed_be_no_distillation": AlgorithmEntry(
        "FedBE's ensemble for prediction only (FedBE-noKD)",
        _averaged(algorithms.fed_be_no_distillation, posterior="posterior", num_samples="num_samples"),
        uses=(*AVERAGING, "posterior", "num_samples"),
    ),
    "ditto": AlgorithmEntry(
        "FedAvg, and a personal model of each client held near it by --mu (Li et al., 2021)",
        _averaged(algorithms.ditto, mu="mu"),
        uses=(*AVERAGING, "mu"),
    ),
    "lg_fed_avg": AlgorithmEntry(
        "parameters that match --private stay with their client (LG-FedAvg, Liang et al., 2020)",
        _averaged(algorithms.lg_fed_avg, private="private"),
        uses=(*AVERAGING, "private"),
    ),
    "local_only": AlgorithmEntry("every client trains alone", _local_only, uses=TRAINING),
    "centralised": AlgorithmEntry("SGD at the server on the cohort's pooled data", _centralised, uses=TRAINING),
    "data_sharing": AlgorithmEntry(
        "every client holds --shared-fraction of all examples too, around --base (Zhao et al., 2018)",
        _around(algorithms.data_sharing, "shared"),
        uses=(*AVERAGING, "base", "shared_fraction"),
    ),
    "random_walk": AlgorithmEntry(
        "models walk over --graph and train where they stand, around --base (Fed-ensemble, 2024, V-H)",
        _around(algorithms.random_walk),
        "random_walk",
        (*AVERAGING, "base"),
    ),
    "gossip": AlgorithmEntry(
        "every client mixes its model with its neighbours' on --graph (D-PSGD, Lian et al., 2017)",
        _gossip,
        "own",
        (*AVERAGING, "graph"),
    ),
    "modified_local_gd": AlgorithmEntry(
        "aggregation anchored at the start (Modified Local-GD, algorithm 3)",
        _averaged(algorithms.modified_local_gd),
        uses=AVERAGING,
    ),
    "fed_com": AlgorithmEntry(
        "FedAvg through an unbiased quantiser of --bits (FedCOM, Haddadpour et al., 2021)",
        _averaged(algorithms.fed_com, bits="bits"),
        uses=(*TRAINING, *WIRE, "weighting", "server_learning_rate", "bits"),
    ),
    "fed_paq": AlgorithmEntry(
        "FedAvg through QSGD's quantiser of --bits (FedPAQ, Reisizadeh et al., 2020)",
        _averaged(algorithms.fed_paq, bits="bits"),
        uses=(*TRAINING, *WIRE, "weighting", "server_learning_rate", "bits"),
    ),
    "dp_fed_avg": AlgorithmEntry(
        "clipped updates, Gaussian noise, central differential privacy (McMahan et al., 2018)",
        _dp_fed_avg,
        uses=(*AVERAGING, "clip_norm", "noise_multiplier", "delta"),
    ),
    "ntk_fl": AlgorithmEntry(
        "clients send Jacobians, the server evolves the kernel (NTK-FL, 2022)",
        _ntk_fl,
        uses=EVOLUTION,
    ),
    "cp_ntk_fl": AlgorithmEntry(
        "NTK-FL on --beta of the examples, Jacobians of --sparsity, --shuffle (CP-NTK-FL, 2022)",
        _cp_ntk_fl,
        uses=(*EVOLUTION, "sparsity", *WIRE),
    ),
}

# Client; aggregate; server.
_PARTS = {
    "fed_avg": "local SGD; mean; SGD",
    "fed_sgd": "one gradient; mean; SGD",
    "fed_prox": "local SGD, prox; mean; SGD",
    "fed_dyn": "local SGD, tilt and prox; mean; mean less h / mu",
    "scaffold": "local SGD, tilt; mean; SGD, control variate",
    "fed_nova": "local SGD, normalised; mean; effective steps",
    "fed_adam": "local SGD; mean; Adam as published",
    "fed_yogi": "local SGD; mean; Yogi",
    "fed_adagrad": "local SGD; mean; Adagrad",
    "fed_avg_m": "local SGD; mean; momentum",
    "fed_ensemble": "those of --base, K models, permutations",
    "fed_be": "local SGD; all messages; posterior, distillation",
    "fed_be_no_distillation": "local SGD; all messages; mean, posterior to predict",
    "ditto": "local SGD, and a personal model with prox; mean; SGD",
    "lg_fed_avg": "local SGD; mean of the shared parameters; SGD",
    "local_only": "local SGD; nothing; nothing",
    "centralised": "its examples; pool; SGD on the pool",
    "data_sharing": "those of --base, on shared examples too",
    "random_walk": "those of --base, K walks on a graph",
    "gossip": "local SGD; own model; mixing with neighbours",
    "modified_local_gd": "local SGD; mean; anchored at the start",
    "fed_com": "local SGD, uniform quantiser; mean; SGD",
    "fed_paq": "local SGD, QSGD; mean; SGD",
    "dp_fed_avg": "local SGD, clipping; sum over m; SGD, noise",
    "ntk_fl": "its Jacobians; pool; kernel evolution",
    "cp_ntk_fl": "its Jacobians, fewer and sparse; pool, shuffled; kernel evolution",
}
ALGORITHMS = {name: entry._replace(parts=_PARTS[name]) for name, entry in _ENTRIES.items()}
