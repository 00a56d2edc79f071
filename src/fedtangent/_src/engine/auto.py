"""The mapping of clients called ``auto``, chosen by platform and memory and, for long runs, by a timing measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import jax
import numpy as np

from fedtangent._src.engine import memory
from fedtangent._src.engine.clients import Mapping, default_mapping, engine_for, parse
from fedtangent._src.engine.loop import state_shapes
from fedtangent._src.storage import sha256
from fedtangent._src.timings import cached
from fedtangent._src.types import Algorithm, FederatedData, PyTree

# For a run that the default mapping finishes sooner, measuring others does not pay: each has to be compiled.
WORTH_SECONDS = 20.0
WORTH_ROUNDS = 20
Probe = Callable[[Mapping], float]


def candidates(num_slots: int) -> list[Mapping]:
    """Returns the mappings of clients onto devices that are worth trying on this platform, the default one first.

    Args:
        num_slots: Number S of slots, the clients that train in a round; larger chunks than this are left out.
    """
    inner = (
        ["scan", "chunked:4", "chunked:16", "chunked:64"]
        if jax.default_backend() == "cpu"
        else ["vmap", "chunked:64", "chunked:16"]
    )
    names = [f"sharded:{name}" for name in inner] if jax.device_count() > 1 else inner
    tried = [default_mapping(), *(parse(name) for name in names)]
    return [m for m in dict.fromkeys(tried) if (m.width or 1) <= num_slots]


def that_fit(algorithm: Algorithm, data: FederatedData, max_client_size: int, rounds: int) -> list[Mapping]:
    """Returns the mappings of clients onto devices that are worth trying and fit into memory, the default one first.

    If none of them fits, returns a single other mapping: ``chunked:<n>`` with the largest number n of clients at a time
    that is estimated to fit, or ``scan`` if n is below 2. It uses as many devices as the default mapping.

    Args:
        algorithm: The algorithm.
        data: Training examples of all clients.
        max_client_size: Number of examples of the largest client.
        rounds: Rounds that one compiled call computes.
    """
    tried = candidates(algorithm.schedule.num_slots)
    fitting = [m for m in tried if memory.plan(algorithm, data, m, max_client_size, rounds).fits]
    if fitting:
        return fitting
    largest = memory.plan(algorithm, data, tried[0], max_client_size, rounds).largest_chunk
    narrow = parse("scan") if largest < 2 else parse(f"chunked:{largest}")
    return [narrow._replace(devices=tried[0].devices)]


def fingerprint(algorithm: Algorithm, data: FederatedData, state: PyTree) -> str:
    """Returns a digest of an algorithm's traced round: its code, rates and constants, but not the data.

    Args:
        algorithm: The algorithm.
        data: Training examples; their shapes enter the digest, their values do not.
        state: A state of the run, or its shapes.
    """
    engine = engine_for(data, parse("scan"))
    traced = jax.make_jaxpr(lambda s, d: algorithm.step(s, d, engine))(state, data)
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))  # without this process's addresses
    return sha256(text, *map(np.asarray, traced.consts))


def seconds_a_round(run: Callable[[PyTree, int], PyTree], start: Callable[[], PyTree]) -> float:
    """Measures the seconds of one round after compilation, the faster of two rounds.

    Args:
        run: Function ``(state, rounds) -> results`` that runs rounds.
        start: Function that makes a fresh state.
    """
    jax.block_until_ready(run(start(), 1))
    times = []
    for _ in range(2):
        state = jax.block_until_ready(start())
        began = time.perf_counter()
        jax.block_until_ready(run(state, 1))
        times.append(time.perf_counter() - began)
    return min(times)


def choose(
    algorithm: Algorithm, data: FederatedData, max_client_size: int, num_rounds: int, rounds: int, probe: Probe
) -> tuple[Mapping, dict[str, float]]:
    """Chooses a run's mapping of clients onto devices; also returns the measured seconds of a round by mapping.

    Of the mappings from ``that_fit`` the fastest is chosen. The first of them is chosen without a measurement if it is
    the only one, if the run has fewer than ``WORTH_ROUNDS`` rounds, or if there are several processes, whose
    measurements could differ; {} is then returned with it. The others are measured only if the whole run would take
    ``WORTH_SECONDS`` seconds or more with the first one. Measurements are stored on this machine, and are not repeated
    for the same round, mapping and sizes of clients.

    Args:
        algorithm: The algorithm.
        data: Training examples of all clients.
        max_client_size: Number of examples of the largest client.
        num_rounds: Rounds of the run.
        rounds: Rounds that one compiled call computes.
        probe: Function that measures the seconds of a round under a mapping.
    """
    fitting = that_fit(algorithm, data, max_client_size, rounds)
    if len(fitting) == 1 or num_rounds < WORTH_ROUNDS or jax.process_count() > 1:
        return fitting[0], {}

    state = state_shapes(algorithm, data.num_clients)
    sizes = np.quantile(np.diff(np.asarray(data.offsets)), [0.0, 0.25, 0.5, 0.75, 1.0])  # how even the chunks are
    question = {"round": fingerprint(algorithm, data, state), "sizes": [int(size) for size in sizes]}

    def measured(mapping: Mapping) -> float:
        key = {"what": "seconds a round", "mapping": str(mapping), **question}
        return cached(key, lambda: {"seconds": probe(mapping)}, ["seconds"])["seconds"]

    times = {fitting[0]: measured(fitting[0])}
    if times[fitting[0]] * num_rounds >= WORTH_SECONDS:
        times |= {mapping: measured(mapping) for mapping in fitting[1:]}
    best = min(times, key=times.__getitem__)
    return best, {str(mapping): seconds for mapping, seconds in times.items()}
