"""One measurement, in the process that ``engine.py`` starts for it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform as host
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine.cases import PRECISE, Case
from machine.flops import counted, step_flops
from machine.peaks import PRECISIONS, measured_peak

import fedtangent as ft
from fedtangent._src.engine.run import resolve_mapping
from fedtangent._src.federated.local import client_view, local_training
from fedtangent._src.federated.ntk_fl import Evolution, Examples
from fedtangent._src.federated.ntk_fl.tangent import linearise_network, pool_examples
from fedtangent._src.losses import get_loss
from fedtangent._src.types import Algorithm, FederatedData, Model, PyTree

LOSS, RATE = "cross_entropy", 0.05
SECONDS = 1.5  # a timed run lasts at least as long, and one round
RUNS = 2  # timed runs, of which the faster counts
LONG = 1_000_000  # rounds of a run for which ``auto`` measures every mapping
CHARACTERS, CLASSES, LENGTH = 80, 10, 80
Result = dict[str, Any]


# ---- compilation, memory ----


class Compiling:
    """The seconds in which JAX traced, lowered or compiled programs; of nested ones the outer counts."""

    def __init__(self) -> None:
        self.spans = list[tuple[float, float]]()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self.spans.append((now - duration_secs, now))

    def seconds(self, since: float) -> float:
        """Returns the seconds spent since a time of ``time.perf_counter``."""
        total, reached = 0.0, since
        for start, end in sorted(self.spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


class HasMemory(Protocol):
    """A device that may say how much of its memory was in use."""

    def memory_stats(self) -> dict[str, int] | None:
        """Returns figures by name, or None if the device has none."""


def memory(devices: Sequence[HasMemory]) -> Result:
    """Returns the peak of the memory in use, in MiB, and of what: of the fullest device, or else of this process."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [figures["peak_bytes_in_use"] for figures in stats if "peak_bytes_in_use" in figures]
    if peaks:
        return {"MiB": max(peaks) / 2**20, "MiB of": "device"}
    return {"MiB": resident_bytes() / 2**20, "MiB of": "process"}


def resident_bytes() -> int:
    """Returns the peak of this process's resident memory, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss begins with that of the parent
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- networks and data ----


def transformer(size: int, layers: int, vocabulary: int, dtype: jnp.dtype[Any]) -> Model:
    """Builds a decoder that predicts the next character: causal self-attention and dense layers, normalised before."""
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            length, causal = tokens.shape[1], nn.make_causal_mask(tokens)
            x = nn.Embed(vocabulary, size)(tokens) + nn.Embed(LENGTH, size)(jnp.arange(length)[None])
            for _ in range(layers):
                x = x + nn.MultiHeadDotProductAttention(max(1, size // 64))(nn.LayerNorm()(x), mask=causal)
                x = x + nn.Dense(size)(nn.gelu(nn.Dense(4 * size)(nn.LayerNorm()(x))))
            return nn.Dense(vocabulary)(nn.LayerNorm()(x)[:, -1])

    example = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    model = ft.models.from_flax(Network(), example, vocabulary, "transformer")
    return cast_to(model._replace(vocabulary=vocabulary), dtype)


def cast_to(model: Model, dtype: jnp.dtype[Any]) -> Model:
    """Returns the model with parameters of another dtype, in which it then computes."""

    def init(key: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(key))

    return model._replace(init=init)


def network(case: Case, convolution: str = "auto") -> Model:
    """Builds the network of a case; ``convolution`` is that of cnn and resnet18."""
    dtype = jnp.dtype(jnp.bfloat16 if case.precision == "bfloat16" else jnp.float32)
    match case.model:
        case "logistic":
            return ft.models.logistic(case.features, CLASSES, dtype=dtype)
        case "mlp":
            return ft.models.mlp(case.features, CLASSES, (case.width,), parameterization="standard", dtype=dtype)
        case "cnn":
            filters, hidden = ((2, 2), (4,)) if case.tiny else ((32, 64), (512,))
            return cast_to(ft.models.cnn(image(case), CLASSES, filters, hidden, convolution=convolution), dtype)
        case "resnet18":
            width = 2 if case.tiny else 64
            return cast_to(ft.models.resnet18(image(case), CLASSES, width, convolution=convolution), dtype)
        case "lstm":
            return ft.models.lstm(vocabulary=CHARACTERS, units=4 if case.tiny else 256, dtype=dtype)
        case "transformer":
            return transformer(8 if case.tiny else 256, 1 if case.tiny else 4, CHARACTERS, dtype)
        case _:
            raise ValueError(f"model: got {case.model!r}, must be a network of the benchmark")


def image(case: Case) -> tuple[int, int, int]:
    """Returns the shape of an image."""
    side = 8 if case.tiny else 28 if case.model == "cnn" else 32
    return (side, side, 1 if case.model == "cnn" else 3)


def examples(case: Case) -> FederatedData:
    """Draws random examples: images, characters or vectors, as many for each client."""
    rng, number = np.random.default_rng(0), case.clients * case.examples
    ends = np.arange(0, number + 1, case.examples, dtype=np.int32)
    clients = ft.types.Partition(np.arange(number, dtype=np.int32), ends)
    if case.model in ("lstm", "transformer"):
        tokens = rng.integers(0, CHARACTERS, (number, LENGTH), dtype=np.int32)
        return ft.data.federated_data(tokens, rng.integers(0, CHARACTERS, number), clients, dtype=jnp.int32)
    shape = image(case) if case.model in ("cnn", "resnet18") else (case.features,)
    x = rng.normal(size=(number, *shape)).astype(np.float32)
    return ft.data.federated_data(x, rng.integers(0, CLASSES, number), clients, dtype=jnp.float32)


# ---- rounds ----

Rounds = Callable[[int], None]  # runs that many rounds


def python_loop(case: Case, model: Model, data: FederatedData) -> Rounds:
    """Returns rounds of FedAvg as most people first write it: a Python loop over a jitted client, a mean at the end."""
    work = ft.Work(steps=case.steps, batch_size=case.batch)
    local = local_training(model, get_loss(LOSS), optax.sgd(RATE), work)

    @jax.jit
    def train(key: jax.Array, params: PyTree, client: jax.Array) -> PyTree:
        return local.update(key, params, (), client_view(data, client, jnp.bool_(True), case.examples))[0]

    mean = jax.jit(lambda params, sent: jax.tree.map(lambda p, *m: p - sum(m) / len(m), params, *sent))
    rng = np.random.default_rng(0)

    def rounds(number: int) -> None:
        params = model.init(jax.random.key(0))
        for r in range(number):
            chosen = rng.permutation(case.clients)[: case.cohort]
            key = jax.random.key(r)
            sent = [train(jax.random.fold_in(key, int(c)), params, jnp.int32(c)) for c in chosen]
            params = mean(params, sent)
        jax.block_until_ready(params)

    return rounds


def fed_avg(case: Case, model: Model) -> Algorithm:
    """Builds the algorithm of a case."""
    schedule = ft.schedules.uniform_sampling(case.clients, min(case.cohort, case.clients))
    work = ft.Work(steps=case.steps, batch_size=case.batch)
    return ft.fed_avg(model, schedule, client_learning_rate=RATE, work=work, loss=LOSS)


def simulated(algorithm: Algorithm, data: FederatedData, mapping: str) -> Rounds:
    """Returns the same rounds through ``simulate``."""

    def rounds(number: int) -> None:
        run = ft.simulate(algorithm, data, num_rounds=number, devices=ft.Devices(mapping))
        jax.block_until_ready(run.state)

    return rounds


def timed(run: Callable[[], object]) -> float:
    """Measures the wall seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Timing(NamedTuple):
    """The figures of timed rounds: ``rounds`` in each of the runs that took ``seconds``."""

    rounds: int
    seconds: list[float]
    first_seconds: float
    compile_seconds: float
    compiled_later: float


def timing(run: Rounds, rounds: int | None) -> Timing:
    """Times rounds, after one that compiles and one that says how many fit into ``SECONDS``.

    Args:
        run: Function that runs rounds.
        rounds: Fixed number of rounds; None for as many as fit.
    """
    compiling, began = Compiling(), time.perf_counter()
    first = timed(lambda: run(rounds or 1))
    compile_seconds, after = compiling.seconds(began), time.perf_counter()
    number = rounds or 1
    taken = timed(lambda: run(number))
    while rounds is None and taken < SECONDS:  # a run's own start was most of its time
        number = math.ceil(min(100.0, 1.2 * SECONDS / max(taken, 1e-4)) * number)
        taken = timed(functools.partial(run, number))
    seconds = [taken] + [timed(functools.partial(run, number)) for _ in range(RUNS - 1)]
    return Timing(number, seconds, first, compile_seconds, compiling.seconds(after))


def measure(case: Case) -> Result:
    """Measures the rate, memory and compile time of a network under a mapping."""
    model, data = network(case), examples(case)
    result: Result = {}
    if case.mapping == "python loop":
        run = python_loop(case, model, data)
    else:
        algorithm, mapping = fed_avg(case, model), case.mapping
        if mapping == "auto":
            mapping = result["chosen"] = resolve_mapping(algorithm, data, LONG).mapping
            jax.clear_caches()  # so that the row has a time of compilation too
        run = simulated(algorithm, data, mapping)
    with precisely(case.precision):
        times = timing(run, case.rounds)
    steps = times.rounds * min(case.cohort, case.clients) * case.steps
    flops = step_flops(network(case, "lax"), data, case.batch)
    return result | rated(times, steps, flops)


def rated(times: Timing, steps: int, flops: float | None) -> Result:
    """Returns the figures of a row.

    Args:
        times: Timed rounds.
        steps: Local steps of a timed run.
        flops: Operations of a step; None where they were not counted.
    """
    best = min(times.seconds)
    return {
        "rounds": times.rounds,
        "seconds": times.seconds,
        "steps/s": steps / best,
        "rounds/s": times.rounds / best,
        "flops a step": flops,
        "flop/s": None if flops is None else steps * flops / best,
        "first s": times.first_seconds,
        "compile s": times.compile_seconds,
        "compiled while timed s": times.compiled_later,
    }


@contextlib.contextmanager
def precisely(precision: str) -> Iterator[None]:
    """Computes products of float32 numbers with all their digits, unless the precision is "default"."""
    exactly = None if precision in ("default", "bfloat16") else "highest"
    with jax.default_matmul_precision(exactly) if exactly else contextlib.nullcontext():
        yield


# ---- NTK-FL's round and the kernel flow, float32 beside float64 ----


def ntk_round(case: Case) -> tuple[Result, np.ndarray]:
    """Measures a round of NTK-FL at the server in one precision, and returns the change of the weights.

    The program is that of ``ntk_evolve``, which refuses to run without 64-bit mode; here it runs without, in float32.
    """
    from ntk_round import INPUTS, LEARNING_RATE, OUTPUTS, WIDTH, problem

    from fedtangent._src.federated.ntk_fl.evolution import _evolve

    jax.config.update("jax_enable_x64", True)
    model, params, x, y = problem(case.examples)
    times = (100, 500, 1000, 2000)
    if case.precision == "float32":
        model = ft.models.mlp(INPUTS, OUTPUTS, (WIDTH,))
        params, x, y = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, x, y))
        jax.config.update("jax_enable_x64", False)
    warnings.filterwarnings("ignore", "Explicitly requested dtype float64")
    pooled = Examples(x, y, jnp.ones(case.examples, bool))
    evolution = Evolution(times, method="chebyshev", unstable="clip")
    last: list[tuple[PyTree, dict[str, jax.Array]]] = []

    def rounds(number: int) -> None:
        for _ in range(number):
            last[:] = [jax.block_until_ready(_evolve(model, params, pooled, LEARNING_RATE, None, evolution))]

    with precisely(case.precision):
        timed_rounds = timing(rounds, case.rounds)
    new, info = last[0]
    change = jax.tree.map(lambda after, before: np.asarray(after, np.float64) - np.asarray(before), new, params)
    flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(change)])
    products = int(info["products"])
    flops = round_flops(model, params, pooled, products, len(times))
    result = rated(timed_rounds, timed_rounds.rounds, flops)
    return result | {"products": products, "time": int(info["time"])}, flat


def round_flops(model: Model, params: PyTree, received: Examples, products: int, candidates: int) -> float:
    """Counts the operations of a round of NTK-FL: the kernel, products with it, and the candidates and their losses.

    Args:
        model: The network.
        params: Its parameters.
        received: The pooled examples.
        products: Number of products of the kernel [n, n] with an array [n, C].
        candidates: Number of times at which the network is tried.
    """
    pool = pool_examples(*received)

    def candidate(weights: PyTree, dual: jax.Array) -> tuple[PyTree, jax.Array]:
        return linearise_network(model, weights, pool).pull(dual), model.apply(weights, pool.x)

    kernel = counted(lambda weights: linearise_network(model, weights, pool).gram(), params)
    return kernel + products * 2.0 * len(pool.y) * pool.y.size + candidates * counted(candidate, params, pool.y)


def kernel_flow(case: Case) -> tuple[Result, np.ndarray]:
    """Measures runs of the kernel flow in one precision, kernel included, and returns the functions at test points."""
    from federated_flow import BATCH, CLIENTS, COHORT, OUTPUTS, RATE, inputs

    from fedtangent._src import models
    from fedtangent._src.comparison.followed import drawn_rows, steps_of
    from fedtangent._src.federated.schedule import drawn_cohorts
    from fedtangent._src.kernels.gram import kernel_blocks
    from fedtangent._src.kernels.large import large_kernel
    from fedtangent._src.theory.flow import Rule, federated_flow

    jax.config.update("jax_enable_x64", True)
    number = case.rounds or 1
    x, labels, x_test = inputs(case.examples, 200, None)
    kernel: Any = models.mlp(x.shape[1], OUTPUTS, (1024,)).kernel
    clients = ft.partition.dirichlet(labels, CLIENTS, 0.1, seed=0)
    cohorts = drawn_cohorts(ft.schedules.uniform_sampling(CLIENTS, COHORT), clients, number)
    work = ft.Work(batch_size=BATCH, epochs=1)
    batches = drawn_rows(work, clients, cohorts)
    rule = Rule(steps_of(work, clients), RATE, loss="cross_entropy", batches=batches)
    y = np.eye(OUTPUTS)[labels]
    starts = np.zeros((1, 1, len(x), OUTPUTS)), np.zeros((1, 1, len(x_test), OUTPUTS))
    last: list[np.ndarray] = []

    def rounds(_: int) -> None:
        if case.precision == "float32":
            flow = federated_flow(large_kernel(kernel, x, x_test), y, clients, cohorts, rule)
        else:
            flow = federated_flow(kernel_blocks(kernel, x, x_test), y, clients, cohorts, rule)
        last[:] = [np.asarray(flow.runs(*starts, [0, number]).test)[-1]]

    with precisely(case.precision):
        times = timing(rounds, number)
    return rated(times, number, None), last[0]


def beside_double(case: Case, folder: Path) -> Result:
    """Measures a case of ``PRECISE``, and how far float32 ends from float64 in another process.

    Args:
        case: The case.
        folder: Folder in which the two processes leave their results.
    """
    result, end = (ntk_round if case.model == "ntk round" else kernel_flow)(case)
    np.save(folder / f"{case.model} {case.precision}.npy", end)
    other = folder / f"{case.model} float32.npy"
    if case.precision == "float64" and other.exists():
        result["float32's error"] = float(np.linalg.norm(np.load(other) - end) / np.linalg.norm(end))
    return result


# ---- the process ----


def versions() -> dict[str, str]:
    """Returns the versions of Python, JAX and NumPy."""
    packages = {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "numpy": np.__version__}
    return {"python": host.python_version(), **packages}


def describe(precisions: Iterable[str] = PRECISIONS, **sizes: Any) -> Result:
    """Returns the device, the versions, and the peak at every precision."""
    devices = jax.devices()
    peaks = {name: measured_peak(name, **sizes)._asdict() for name in precisions}
    device: Result = {"platform": jax.default_backend(), "kind": devices[0].device_kind, "devices": len(devices)}
    device["cores"] = os.cpu_count() or 1
    return {"device": device, "versions": versions(), "peaks": peaks}


def main(text: str) -> None:
    """Measures the case that is given as JSON, and prints its figures as the last line."""
    options = json.loads(text)
    if "sizes" in options:
        print(json.dumps(describe(sizes=tuple(options["sizes"]), batch_seconds=options["batch_seconds"])))
        return
    place, folder = options.pop("place", None), Path(options.pop("folder"))
    case = Case(**options)
    if place is not None:
        ft.processes.start(place["coordinator"], case.processes, place["id"])
    result = beside_double(case, folder) if case.model in PRECISE else measure(case)
    devices = jax.local_devices()
    if case.mapping != "auto":  # which ran other mappings too
        result |= memory(devices)
    result |= {"device kind": devices[0].device_kind, "devices used": jax.device_count()}
    if place is None or place["id"] == 0:
        print(json.dumps(result))
