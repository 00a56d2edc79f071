"""FedCOM, FedPAQ and error feedback against NumPy loops written from the papers, and the ledger of every channel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.algorithms.compressed import Quantiser
from fedtangent._src.federated.faults import dropout, finite
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import poisson_sampling, uniform_sampling
from fedtangent._src.federated.wire.channel import (
    chain,
    clip,
    lossless,
    qsgd,
    random_k,
    top_k,
    uniform_quantiser,
    with_error_feedback,
)
from fedtangent._src.models import mlp
from fedtangent._src.streams import keys
from fedtangent._src.types import Algorithm, Channel, FederatedData, PyTree

from ..nightly import nightly
from . import reference
from . import reference_channel as loops
from .toys import (
    NUM_CLIENTS,
    SIZES,
    arguments_of,
    cohorts,
    distance,
    fixed,
    go,
    leaves,
    models_of,
    owned_rows,
    two_layer,
    uneven_data,
)

SEED, RATE, STEPS, ROUNDS = 3, 0.2, 4, 2
P = 3 * 4 + 4 + 4 * 2
SCHEDULE = uniform_sampling(6, 4)
TOLERANCE, VISIBLE = 1e-10, 1e-4

FEEDBACK = with_error_feedback(top_k(6))
ALGORITHMS = {
    "fed_com": functools.partial(algorithms.fed_com, bits=3, averaging=Averaging(server_learning_rate=0.8)),
    "fed_paq": functools.partial(algorithms.fed_paq, quantiser=Quantiser(3), averaging=Averaging(weighting="uniform")),
    "fed_paq_buckets": functools.partial(algorithms.fed_paq, quantiser=Quantiser(4, 5)),
    "top_k_feedback": functools.partial(
        algorithms.fed_avg, averaging=Averaging(channel=with_error_feedback(top_k(6)), server_learning_rate=0.8)
    ),
}


@functools.cache
def simulated(name: str, mapping: str = "scan") -> tuple[reference.Params, reference.Params, PyTree]:
    algorithm = ALGORITHMS[name](
        two_layer(), SCHEDULE, client_learning_rate=RATE, work=Work(steps=STEPS, batch_size=None)
    )
    begun = algorithm.init(SEED, NUM_CLIENTS)
    state, _ = go(algorithm, uneven_data(), mapping, ROUNDS, begun)
    return models_of(algorithm, begun)[0], models_of(algorithm, state)[0], state


def draws(t: int, i: int) -> np.ndarray:
    """The uniform numbers of client i's quantiser in round t."""
    key = jax.random.fold_in(jax.random.fold_in(keys(SEED).train, t), i)
    return np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.split(key)[1], 0), (P,), jnp.float64))


def train(t: int, i: int, params: reference.Params) -> reference.Params:
    data = uneven_data()
    rows = [owned_rows(data)[i]] * STEPS
    return reference.sgd(params, np.asarray(data.x), np.asarray(data.y), rows, RATE, "squared_error")


def selections() -> list[list[int]]:
    return [row.tolist() for row in cohorts(SCHEDULE, SEED, ROUNDS).client]


def replayed(name: str, fault: str = "none", memory: dict[int, np.ndarray] | None = None) -> reference.Params:
    """The NumPy loop, with one thing wrong if asked."""
    bits, bucket, rate = {"fed_com": (3, None, 0.8), "fed_paq": (3, None, 1.0), "fed_paq_buckets": (4, 5, 1.0)}.get(
        name, (0, None, 0.8)
    )
    weight = (lambda i: 1.0) if (name == "fed_paq") != (fault == "weights") else (lambda i: float(SIZES[i]))
    bits = bits + 1 if fault == "compressor" else bits
    u = (lambda t, i: draws(0, i)) if fault == "random" else draws

    def send(t: int, i: int, v: np.ndarray) -> np.ndarray:
        if name == "fed_com":
            return loops.uniform_numbers(*loops.uniform_levels(v, bits, u(t, i)), bits)
        return loops.qsgd_numbers(*loops.qsgd_levels(v, bits, bucket, u(t, i)), bits, bucket)

    if name == "top_k_feedback":
        kept = 7 if fault == "compressor" else 6

        def compress(v: np.ndarray) -> np.ndarray:
            return np.where(np.isin(np.arange(P), loops.largest(v, kept)), v, 0)

        send = loops.error_feedback({} if memory is None else memory, compress, fault)
    start = simulated(name)[0]
    return loops.compressed_averaging(start, selections(), train, send, weight, rate)


DAILY = ("fed_com", "fed_paq_buckets", "top_k_feedback")


@pytest.mark.parametrize("name", nightly(ALGORITHMS, DAILY))
def test_equals_the_loop(name: str) -> None:
    start, end, _ = simulated(name)
    assert distance(start, end) > 1e-2
    assert distance(end, replayed(name)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "fault"),
    nightly(
        [(name, fault) for name in ALGORITHMS for fault in ("weights", "compressor")]
        + [(name, "random") for name in ALGORITHMS if name != "top_k_feedback"]
        + [("top_k_feedback", "forgets")],
        DAILY,
    ),
)
def test_a_loop_with_one_thing_wrong_differs(name: str, fault: str) -> None:
    assert distance(simulated(name)[1], replayed(name, fault)) > VISIBLE


def test_the_memory_is_the_loops_and_absent_clients_have_none() -> None:
    memory: dict[int, np.ndarray] = {}
    replayed("top_k_feedback", memory=memory)
    owed = simulated("top_k_feedback")[2].channel[0]
    found = np.concatenate([np.asarray(owed[name])[0].reshape(NUM_CLIENTS, -1) for name in loops.NAMES], axis=1)
    expected = np.stack([memory.get(i, np.zeros(P)) for i in range(NUM_CLIENTS)])
    assert np.abs(found - expected).max() < TOLERANCE
    assert sorted(memory) == np.flatnonzero(np.abs(found).max(axis=1) > 0).tolist()


@pytest.mark.parametrize(
    ("name", "mapping"), nightly([("fed_com", "sharded"), ("top_k_feedback", "sharded:chunked:2")], ["top_k_feedback"])
)
def test_a_mapping_to_devices_is_the_same_run(name: str, mapping: str) -> None:
    """The others are those of the laws."""
    assert distance(simulated(name)[2], simulated(name, mapping)[2]) < TOLERANCE


def test_a_rejected_client_keeps_its_memory() -> None:
    """Client 1 sends what is not finite in every round: accepted, it would spoil its memory."""
    data = uneven_data()
    data = data._replace(x=data.x.at[owned_rows(data)[1]].set(jnp.nan))
    schedule = fixed(6, 1, [(0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0)])
    ends = []
    for accept in (finite(), None):
        algorithm = algorithms.fed_avg(
            two_layer(),
            schedule,
            client_learning_rate=RATE,
            work=Work(steps=2, batch_size=None),
            averaging=Averaging(channel=with_error_feedback(top_k(6)), accept=accept),
        )
        owed = go(algorithm, data, "scan", 2, algorithm.init(SEED, NUM_CLIENTS))[0].channel[0]
        ends.append(np.concatenate([leaf[0].reshape(6, -1) for leaf in leaves(owed)], axis=1))
    assert not ends[0][[1, 3, 4, 5]].any()
    assert np.abs(ends[0][[0, 2]]).max(axis=1).min() > 1e-3
    assert not np.isfinite(ends[1][1]).all()


# ---- the ledger ---------------------------------------------------------------------------------------------------

CHANNELS: dict[str, Channel] = {
    "lossless": lossless(),
    "clip": clip(0.5),
    "top_k": top_k(5),
    "random_k": random_k(fraction=0.5),
    "random_k_shared": random_k(5, shared_seed=True),
    "qsgd": qsgd(4),
    "uniform": uniform_quantiser(8),
    "chain": chain(clip(0.5), top_k(7), qsgd(3)),
    "feedback": with_error_feedback(top_k(5)),
}
BYTES = {  # by hand, of 24 numbers in float32
    "lossless": 24 * 4,
    "clip": 24 * 4,
    "top_k": 5 * 4 + 3,  # 5 places of 5 bits are more than 24 bits: a bitmap
    "random_k": 12 * 4 + 3,
    "random_k_shared": 5 * 4,
    "qsgd": 24 // 2 + 4,
    "uniform": 24 + 8,
    "chain": 10,  # 7 numbers of 3 bits, a norm, a bitmap: 77 bits
    "feedback": 5 * 4 + 3,
}


def in_float32() -> FederatedData:
    data = uneven_data()
    return data._replace(x=data.x.astype(jnp.float32), y=data.y.astype(jnp.float32))


def sending(name: str) -> Algorithm:
    schedule = dropout(poisson_sampling(6, 0.6), 0.3)
    return algorithms.fed_avg(
        two_layer(jnp.float32),
        schedule,
        client_learning_rate=RATE,
        work=Work(steps=1, batch_size=None),
        averaging=Averaging(channel=CHANNELS[name]),
    )


@pytest.mark.parametrize("name", CHANNELS)
def test_bytes_of_a_message(name: str) -> None:
    data = in_float32()
    assert sending(name).cost(data, engine_for(data, "scan")) == (BYTES[name], 0, 4 * P, 0, 0, 0, 0)


@pytest.mark.parametrize("name", nightly(["chain", "feedback"], ["feedback"]))
def test_the_history_charges_messages_times_bytes(name: str) -> None:
    """Clients that are not sampled cost nothing; one that drops out has received the model and sends nothing."""
    run = simulate(
        sending(name), in_float32(), num_rounds=6, seed=SEED, evaluation=Evaluation(1), devices=Devices("scan")
    )
    messages = (run.history.rounds["cohort"].weight > 0).sum(axis=1)
    contacted = run.history.rounds["contacted"]
    assert 0 < messages.sum() < contacted.sum() < 6 * 6
    for t, evaluation in enumerate(run.history.evaluations):
        assert evaluation.round == t
        assert evaluation.uplink_bytes == BYTES[name] * messages[:t].sum()
        assert evaluation.downlink_bytes == 4 * P * contacted[:t].sum()


@pytest.mark.parametrize(
    ("build", "rounds", "published"),
    [
        (algorithms.fed_avg, 284, 1720),
        (functools.partial(algorithms.fed_com, bits=8), 250, 379),
        (functools.partial(algorithms.fed_paq, quantiser=Quantiser(4)), 614, 465),
    ],
)
def test_megabytes_of_ntk_fls_table_1(build: Callable[..., Any], rounds: int, published: int) -> None:
    """20 of 300 clients, MLP 784-100-10, 79,510 float32 numbers; the paper's MB are MiB with three digits."""
    network = mlp(784, 10, (100,))
    algorithm = build(network, uniform_sampling(300, 20), client_learning_rate=0.1, work=Work(steps=1, batch_size=None))
    data = uneven_data(sizes=(1,) * 300)
    data = data._replace(x=jnp.zeros((300, 784), jnp.float32), y=jnp.zeros((300, 10), jnp.float32))
    cost = algorithm.cost(data, engine_for(data, "scan"))
    mebibytes = 20 * cost.uplink / 2**20
    assert mebibytes * rounds == pytest.approx(published, rel=2e-3)
    assert cost.uplink == {1720: 4 * 79_510, 379: 79_510 + 8, 465: 79_510 // 2 + 4}[published]


@pytest.mark.parametrize(
    ("build", "changed", "named"),
    [
        (algorithms.fed_com, {"bits": 1}, "bits: got 1, must be a whole number from 2 to 16"),
        (algorithms.fed_paq, {"bits": 17}, "bits: got 17"),
        (algorithms.fed_paq, {"bucket_size": 0}, "bucket_size: got 0"),
        (algorithms.fed_com, {"channel": lossless()}, "channel: got .*, but fed_com does not use it"),
        (algorithms.fed_paq, {"channel": qsgd(3)}, "channel: got .*, but fed_paq does not use it"),
        (algorithms.fed_com, {"client_learning_rate": 0.0}, "client_learning_rate"),
    ],
)
def test_bad_arguments(build: Callable[..., Any], changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(
            two_layer(),
            SCHEDULE,
            **arguments_of(build, {"client_learning_rate": 0.1, "work": Work(steps=1, batch_size=None)} | changed),
        )


def test_more_numbers_than_a_message_has_are_refused_before_any_work() -> None:
    algorithm = algorithms.fed_avg(
        two_layer(),
        SCHEDULE,
        client_learning_rate=0.1,
        work=Work(steps=1, batch_size=None),
        averaging=Averaging(channel=top_k(P + 1)),
    )
    with pytest.raises(ValueError, match=f"k: got {P + 1}, must be from 1 to {P}"):
        simulate(algorithm, uneven_data(), num_rounds=1)
