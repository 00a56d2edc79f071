"""The algorithms that every law is tested on: one row for each recipe, on six clients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedtangent.federated import algorithms
from fedtangent.federated.algorithms import decentralised
from fedtangent.federated.algorithms.distil import Distillation
from fedtangent.federated.graph import complete, metropolis_weights, ring
from fedtangent.federated.local import Work
from fedtangent.federated.schedule import own_models, per_client_permutations, strata, uniform_sampling
from fedtangent.federated.schedule import random_walk as walks_over
from fedtangent.types import Algorithm, Engine, FederatedData, Model, PyTree, Schedule


class Row(NamedTuple):
    build: Callable[..., Algorithm]  # (model, schedule, accept=None) -> algorithm
    schedule: Schedule  # for six clients
    full_batch: Callable[[Model, Schedule], Algorithm]
    doubled: str  # what makes one client two: twice the "weight", or the "examples" twice (NTK-FL pools, unweighted)
    compared: Callable[[PyTree], PyTree] = lambda state: state.server  # what of a state an absent client must not touch
    nothing_on: tuple[str, ...] = ()  # ledgers that stay empty, because nothing travels that way
    exempt: Mapping[str, str] = MappingProxyType({})  # laws that do not apply, by name, and why


def _fed_avg(work: Work, **options: Any) -> Callable[..., Algorithm]:
    return functools.partial(algorithms.fed_avg, client_learning_rate=0.2, work=work, **options)


def _fed_ensemble(work: Work, **options: Any) -> Callable[..., Algorithm]:
    return functools.partial(algorithms.fed_ensemble, client_learning_rate=0.2, work=work, **options)


def _ntk_fl(kernel: str) -> Callable[..., Algorithm]:
    return functools.partial(algorithms.ntk_fl, learning_rate=0.3, times=(1, 4, 9), kernel=kernel)


def _with(recipe: Callable[..., Algorithm], work: Work, **options: Any) -> Callable[..., Algorithm]:
    return functools.partial(recipe, client_learning_rate=0.2, work=work, **options)


_GLOBAL = jnp.arange(2, dtype=jnp.int32)  # rows of the laws' data that are finite in all of them


def _shared(data: FederatedData) -> FederatedData:
    """``data`` whose clients, those that hold anything, hold ``_GLOBAL`` too; it may be traced."""
    extra, sizes = len(_GLOBAL), data.offsets[1:] - data.offsets[:-1]
    before = jnp.cumsum(extra * (sizes > 0)).astype(jnp.int32)
    offsets = data.offsets.at[1:].add(before)
    total = data.indices.shape[0] + extra * sizes.shape[0]
    owner = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=data.indices.shape[0])
    at = jnp.arange(data.indices.shape[0]) + jnp.concatenate([jnp.zeros(1, jnp.int32), before])[owner]
    given = jnp.where((sizes > 0)[:, None], (offsets[1:] - extra)[:, None] + jnp.arange(extra)[None], total)
    indices = jnp.zeros(total, jnp.int32).at[at].set(data.indices)
    rows = jnp.broadcast_to(_GLOBAL, given.shape)
    return data._replace(indices=indices.at[given].set(rows, mode="drop"), offsets=offsets)


def _data_sharing(model: Model, schedule: Schedule, **options: Any) -> Algorithm:
    """Data sharing on whatever data a law has, once its clients have been given the shared rows."""
    algorithm = algorithms.data_sharing(
        model, schedule, shared=np.asarray(_GLOBAL), client_learning_rate=0.2, **options
    )

    def larger(engine: Engine) -> Engine:
        return engine._replace(max_client_size=engine.max_client_size + len(_GLOBAL))

    return algorithm._replace(
        step=lambda state, data, engine: algorithm.step(state, _shared(data), larger(engine)),
        cost=lambda data, engine: algorithm.cost(_shared(data), larger(engine)),
    )


_UNLABELLED = np.random.default_rng(7).normal(size=(7, 3))


def _fed_be(work: Work, **options: Any) -> Callable[..., Algorithm]:
    student = Distillation(epochs=3, batch_size=3, learning_rate=0.3, final_learning_rate=0.1, start=2, cycle=3)
    return _with(algorithms.fed_be, work, server_data=_UNLABELLED, num_samples=3, distillation=student, **options)


def _gossip(work: Work, order: str = "train_then_mix") -> Callable[..., Algorithm]:
    """Over a ring where there are models enough for one; the laws' schedules are not gossip's own, hence ``mixed``."""

    def build(model: Model, schedule: Schedule, **given: Any) -> Algorithm:
        models = schedule.num_models
        matrix = metropolis_weights(ring(models) if models > 3 else complete(models))
        return decentralised.mixed(model, schedule, 0.2, work, matrix, order, True, given)  # type: ignore[arg-type]

    return build


_COUNTS = "the server weighs by |S| / N, a number of clients; test_corrected.py has the law for all clients at once"
_PRIVATE: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 0.3, "expected_clients": 3}
_DRAWS = "the quantiser draws anew for every client, so that two identical clients do not send the same"

ALGORITHMS = {
    "fed_avg": Row(
        _fed_avg(Work(epochs=2, batch_size=2)), uniform_sampling(6, 4), _fed_avg(Work(steps=3)), doubled="weight"
    ),
    "fed_ensemble": Row(
        _fed_ensemble(Work(steps=4, batch_size=3), server_learning_rate=0.8, weighting="uniform"),
        strata(6, 3, 4),
        _fed_ensemble(Work(epochs=2), weighting="uniform"),
        doubled="weight",
    ),
    "fed_sgd": Row(
        functools.partial(algorithms.fed_sgd, learning_rate=0.2),
        uniform_sampling(6, 4),
        functools.partial(algorithms.fed_sgd, learning_rate=0.3),
        doubled="weight",
    ),
    "ntk_fl": Row(_ntk_fl("averaged"), per_client_permutations(6, 2), _ntk_fl("exact"), doubled="examples"),
    "cp_ntk_fl": Row(
        functools.partial(algorithms.cp_ntk_fl, learning_rate=0.3, times=(1, 4, 9), beta=0.6, sparsity=0.5),
        uniform_sampling(6, 4),
        functools.partial(algorithms.cp_ntk_fl, learning_rate=0.3, times=(1, 4, 9), sparsity=0.5),
        doubled="examples",
    ),
    "centralised": Row(
        functools.partial(algorithms.centralised, learning_rate=0.2, work=Work(epochs=2, batch_size=3)),
        uniform_sampling(6, 4),
        functools.partial(algorithms.centralised, learning_rate=0.2, work=Work(steps=3)),
        doubled="examples",
        nothing_on=("downlink_bytes",),
    ),
    "data_sharing": Row(
        functools.partial(_data_sharing, work=Work(epochs=2, batch_size=2)),
        uniform_sampling(6, 4),
        functools.partial(_data_sharing, work=Work(steps=3)),
        doubled="weight",
    ),
    "ditto": Row(
        _with(algorithms.ditto, Work(steps=3, batch_size=2), mu=0.5, personal_work=Work(epochs=2, batch_size=3)),
        uniform_sampling(6, 4),
        _with(algorithms.ditto, Work(steps=3), mu=0.5),
        doubled="weight",
    ),
    "lg_fed_avg": Row(
        _with(algorithms.lg_fed_avg, Work(epochs=2, batch_size=2), private=["W", "b"]),
        strata(6, 3, 4),
        _with(algorithms.lg_fed_avg, Work(steps=3), private=["W", "b"]),
        doubled="weight",
    ),
    "local_only": Row(
        _with(algorithms.local_only, Work(epochs=2, batch_size=2)),
        uniform_sampling(6, 4),
        _with(algorithms.local_only, Work(steps=3)),
        doubled="weight",
        compared=lambda state: state.client,
        nothing_on=("uplink_bytes",),
        exempt={
            "rejection": "no message carries anything that could be rejected",
            "doubling": "no client has any influence on another, nor on the server",
        },
    ),
    "fed_be": Row(
        _fed_be(Work(epochs=2, batch_size=2)),
        uniform_sampling(6, 4),
        _fed_be(Work(steps=3), members=("samples", "mean")),  # an ensemble of clients counts each client once
        doubled="weight",
    ),
    "fed_be_no_distillation": Row(
        _with(
            algorithms.fed_be_no_distillation, Work(epochs=2, batch_size=2), posterior="dirichlet", slots_per_model=4
        ),
        uniform_sampling(6, 4),
        _with(algorithms.fed_be_no_distillation, Work(steps=3)),
        doubled="weight",
        exempt={"doubling": "the state holds the clients' models, each of which is a member of the ensemble"},
    ),
    "gossip": Row(
        _gossip(Work(epochs=2, batch_size=2), order="mix_then_train"),
        own_models(6),
        _gossip(Work(steps=3)),
        doubled="weight",
        nothing_on=("downlink_bytes",),
    ),
    "random_walk": Row(
        _with(decentralised.walking, Work(epochs=2, batch_size=2), base=algorithms.fed_avg),
        walks_over(ring(6), 3),
        _with(decentralised.walking, Work(steps=3), base=algorithms.fed_avg),
        doubled="weight",
        nothing_on=("downlink_bytes",),
    ),
    "fed_prox": Row(
        _with(algorithms.fed_prox, Work(epochs=2, batch_size=2), mu=0.5),
        uniform_sampling(6, 4),
        _with(algorithms.fed_prox, Work(steps=3), mu=0.5),
        doubled="weight",
    ),
    "fed_dyn": Row(
        _with(algorithms.fed_dyn, Work(steps=4, batch_size=2), mu=0.5),
        per_client_permutations(6, 2),
        _with(algorithms.fed_dyn, Work(steps=3), mu=0.5),
        doubled="weight",
        exempt={"doubling": _COUNTS},
    ),
    "scaffold": Row(
        _with(algorithms.scaffold, Work(epochs=2, batch_size=2), server_learning_rate=0.8),
        per_client_permutations(6, 2),
        _with(algorithms.scaffold, Work(steps=3)),
        doubled="weight",
        exempt={"doubling": _COUNTS},
    ),
    "fed_nova": Row(
        _with(
            algorithms.fed_nova,
            Work(epochs=2, batch_size=2),
            mu=0.3,
            client_optimizer=functools.partial(optax.sgd, momentum=0.5),
        ),
        uniform_sampling(6, 4),
        _with(algorithms.fed_nova, Work(epochs=2)),
        doubled="weight",
    ),
    "modified_local_gd": Row(
        _with(algorithms.modified_local_gd, Work(steps=3)),
        uniform_sampling(6, 4),
        _with(algorithms.modified_local_gd, Work(steps=3), first_index=1),
        doubled="weight",
    ),
    **{
        recipe.__name__: Row(
            _with(recipe, Work(epochs=2, batch_size=2)),
            uniform_sampling(6, 4),
            _with(recipe, Work(steps=3)),
            doubled="weight",
        )
        for recipe in (algorithms.fed_adam, algorithms.fed_yogi, algorithms.fed_adagrad, algorithms.fed_avg_m)
    },
    "fed_com": Row(
        _with(algorithms.fed_com, Work(epochs=2, batch_size=2), server_learning_rate=0.8),
        uniform_sampling(6, 4),
        _with(algorithms.fed_com, Work(steps=3)),
        doubled="weight",
        exempt={"doubling": _DRAWS},
    ),
    "fed_paq": Row(
        _with(algorithms.fed_paq, Work(steps=4, batch_size=2), bucket_size=5, weighting="uniform"),
        per_client_permutations(6, 2),
        _with(algorithms.fed_paq, Work(steps=3)),
        doubled="weight",
        exempt={"doubling": _DRAWS},
    ),
    "dp_fed_avg": Row(
        _with(algorithms.dp_fed_avg, Work(epochs=2, batch_size=2), **_PRIVATE),
        uniform_sampling(6, 4),
        _with(algorithms.dp_fed_avg, Work(steps=3), **_PRIVATE),
        doubled="weight",
    ),
}

# Made of the same parts as another row, from which they differ in a formula that has tests of its own (or slow to
# compile): their laws are among the slow tests (make check-theory).
NIGHTLY = ("fed_adagrad", "fed_avg_m", "fed_be_no_distillation", "fed_paq", "fed_sgd", "fed_yogi", "modified_local_gd")
NIGHTLY += ("centralised", "data_sharing", "dp_fed_avg", "fed_be", "fed_com", "fed_nova", "fed_prox", "lg_fed_avg")
NIGHTLY += ("random_walk", "cp_ntk_fl")
