"""What the laws need to know of each algorithm: how it is built for them, and which law it need not keep, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from fedtangent._src.federated.algorithms.bayesian import DistilledEnsemble, EnsembleOfClients
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.compressed import Quantiser
from fedtangent._src.federated.algorithms.corrected import Anchoring
from fedtangent._src.federated.algorithms.decentralised import Mixing
from fedtangent._src.federated.algorithms.distil import Distillation
from fedtangent._src.federated.algorithms.normalised import Normalisation
from fedtangent._src.federated.algorithms.personalised import PersonalTraining
from fedtangent._src.federated.algorithms.private import ClientPrivacy
from fedtangent._src.federated.algorithms.stale import Staleness
from fedtangent._src.federated.algorithms.tangent import Compression
from fedtangent._src.federated.graph import ring
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution

LAW_CLIENTS = 8  # clients of the runs that the laws are tested on
TRAINED: Mapping[str, Any] = {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=3)}
FOUR = {"work": Work(steps=4, batch_size=4)}


@dataclasses.dataclass(frozen=True)
class Laws:
    """What the tests of the laws need to build an algorithm, and which laws it need not keep."""

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TRAINED)
    """Of the recipe, besides model and schedule."""
    exact: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to them under which clients with the same three examples send the same; by default they do anyway."""
    cohorts: str = "many"
    """Clients of a model in a round: "many"; "one"; "own", always the same one; "neighbours" on a ring."""
    doubled: str = "weight"
    """What makes one client two: twice the "weight", or the "examples" twice (of servers that pool, unweighted)."""
    compared: str = "server"
    """Field of the state that an absent client must not touch."""
    nothing_on: tuple[str, ...] = ()
    """Ledgers that stay empty, because nothing travels that way."""
    diverging: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments with which the first round overflows; by default a rate of 1e200, of which mu times must be below 1."""
    linear: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to the arguments for a linear model with the parameters W and b."""
    in_units: Callable[[float], Mapping[str, Any]] = lambda unit: {}
    """Arguments whose numbers have the unit of an update, where updates are that many times as large."""
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Laws that do not apply, and why."""


_COUNTS = "the server weighs by |S| / N, a number of clients; test_corrected.py has the law for all clients at once"
_DRAWS = "the quantiser draws anew for every client, so that two identical clients do not send the same"
_ADAPTS = "its steps are as long as the server's rate, whatever the updates; test_adaptive.py has the optimisers' law"
_ENSEMBLE = "the state holds the clients' models, each of which is a member of the ensemble"
_STUDENT = Distillation(epochs=3, batch_size=3, learning_rate=0.3, final_learning_rate=0.1, start=2, cycle=3)
_UNLABELLED = np.random.default_rng(7).normal(size=(7, 3))
_TAUGHT = DistilledEnsemble(num_samples=3, distillation=_STUDENT, server_data=_UNLABELLED)
_WILD = {"client_learning_rate": 1e200, "mu": 1e-250}
_STEP = Averaging(server_learning_rate=0.8)
_EVOLUTION = Evolution(times=(1, 4, 9))

LAWS: dict[str, Laws] = {
    "centralised": Laws(
        {"learning_rate": 0.2, "work": Work(epochs=2, batch_size=3)},
        exact={"work": Work(steps=3, batch_size=None)},
        doubled="examples",
        nothing_on=("downlink_bytes",),
    ),
    "cp_ntk_fl": Laws(
        {
            "learning_rate": 0.3,
            "evolution": _EVOLUTION,
            "compression": Compression(beta=0.6, sparsity=0.5, shuffle=True),
        },
        exact={"compression": Compression(sparsity=0.5, shuffle=True)},
        doubled="examples",
    ),
    "data_sharing": Laws(),
    "ditto": Laws(
        {**TRAINED, "personal_training": PersonalTraining(0.5, None, Work(steps=3, batch_size=4))},
        diverging={"client_learning_rate": 1e200, "personal_training": PersonalTraining(1e-250)},
    ),
    "dp_fed_avg": Laws(
        {**TRAINED, "privacy": ClientPrivacy(0.5, 0.3, 3)},
        in_units=lambda unit: {"privacy": ClientPrivacy(0.5 * unit, 0.3, 3)},
    ),
    "fed_adagrad": Laws(exempt={"units": _ADAPTS}),
    "fed_adam": Laws(exempt={"units": _ADAPTS}),
    "fed_async": Laws(
        {**TRAINED, "staleness": Staleness(probabilities=(0.3, 0.4, 0.3), mu=0.3), "averaging": _STEP},
        exact={"staleness": Staleness(2, mu=0.3)},  # two identical clients draw different delays
        diverging={"client_learning_rate": 1e200, "staleness": Staleness(mu=1e-250)},
    ),
    "fed_avg": Laws(),
    "fed_avg_m": Laws(),
    "fed_be": Laws(
        {
            **TRAINED,
            "work": Work(epochs=2, batch_size=2),
            "ensemble": _TAUGHT,
        },
        # an ensemble of clients counts each client once
        exact={
            "work": Work(steps=3, batch_size=None),
            "ensemble": dataclasses.replace(_TAUGHT, members=("samples", "mean")),
        },
    ),
    "fed_be_no_distillation": Laws(
        {**TRAINED, "ensemble": EnsembleOfClients("dirichlet", slots_per_model=4)}, exempt={"doubling": _ENSEMBLE}
    ),
    "fed_com": Laws({**TRAINED, "averaging": _STEP}, exempt={"doubling": _DRAWS}),
    "fed_dyn": Laws({**TRAINED, **FOUR, "mu": 0.5}, diverging=_WILD, exempt={"doubling": _COUNTS}),
    "fed_ensemble": Laws(
        {**TRAINED, **FOUR, "averaging": Averaging(server_learning_rate=0.8, weighting="uniform")},
    ),
    "fed_nova": Laws(
        {
            "work": TRAINED["work"],
            "normalisation": Normalisation(0.3),
            "client_optimizer": optax.sgd(0.2, momentum=0.5),
        },
        diverging={"normalisation": Normalisation(1e-250), "client_optimizer": optax.sgd(1e200, momentum=0.5)},
    ),
    "fed_paq": Laws(
        {**TRAINED, **FOUR, "quantiser": Quantiser(4, 5), "averaging": Averaging(weighting="uniform")},
        exempt={"doubling": _DRAWS},
    ),
    "fed_prox": Laws({**TRAINED, "mu": 0.5}, diverging=_WILD),
    "fed_sgd": Laws({"learning_rate": 0.2}),
    "fed_yogi": Laws(exempt={"units": _ADAPTS}),
    "gossip": Laws(
        {**TRAINED, "mixing": Mixing(ring(LAW_CLIENTS), "mix_then_train")},
        cohorts="own",
        nothing_on=("downlink_bytes",),
    ),
    "lg_fed_avg": Laws({**TRAINED, "private": "[Wb]"}, linear={"private": "b"}),
    "local_only": Laws(
        compared="client",
        nothing_on=("uplink_bytes",),
        exempt={
            "rejection": "no message carries anything that could be rejected",
            "doubling": "no client has any influence on another, nor on the server",
        },
    ),
    "modified_local_gd": Laws(
        {**TRAINED, "work": Work(steps=3, batch_size=None), "anchoring": Anchoring(first_index=1)}
    ),
    "ntk_dfl": Laws(
        {"learning_rate": 0.3, "evolution": _EVOLUTION},
        cohorts="neighbours",
        nothing_on=("downlink_bytes",),
        exempt={"doubling": "a second client also brings a second model into its neighbours' means"},
    ),
    "ntk_fl": Laws({"learning_rate": 0.3, "evolution": _EVOLUTION}, doubled="examples"),
    "random_walk": Laws(cohorts="one", nothing_on=("downlink_bytes",)),
    "scaffold": Laws({**TRAINED, "averaging": _STEP}, exempt={"doubling": _COUNTS}),
}
