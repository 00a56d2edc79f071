"""What the benchmark of the engine measures: cases, each a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

TABLES = ("models", "devices", "precision", "growth", "million")
DEFAULT_TABLES = TABLES[:3]
MODELS = ("logistic", "mlp", "cnn", "lstm", "resnet18", "transformer")
PRECISE = {"ntk round": "NTK-FL", "kernel flow": "flow"}  # of the table ``precision``, as the table names them


class Case(NamedTuple):
    """One measurement.

    Attributes:
        table: The table that it belongs to, one of ``TABLES``.
        model: Name of a network, or one of ``PRECISE``.
        mapping: Mapping of the clients, or "python loop".
        precision: Precision of training, one of ``peaks.PRECISIONS``.
        clients: Clients of the federation.
        cohort: Clients of a round.
        batch: Examples of a minibatch.
        steps: Local steps of a client.
        examples: Examples of a client; for ``PRECISE`` all examples.
        width: Width of the mlp.
        features: Inputs of logistic and mlp.
        rounds: Fixed number of rounds; None for as many as take the seconds of a measurement.
        devices: Devices of all processes; 0 for all that there are.
        processes: Processes.
        tiny: Whether networks have their smallest sizes, for tests.
    """

    table: str
    model: str = "mlp"
    mapping: str = "scan"
    precision: str = "float32"
    clients: int = 100
    cohort: int = 20
    batch: int = 10
    steps: int = 10
    examples: int = 50
    width: int = 100
    features: int = 784
    rounds: int | None = None
    devices: int = 1
    processes: int = 1
    tiny: bool = False


class Machine(NamedTuple):
    """What the cases depend on: the backend of JAX, its devices, and the cores of the host."""

    platform: str
    devices: int
    cores: int


# A round of the large networks: few clients and steps, so that a round takes seconds on two cores
LARGE = {
    "cnn": {"cohort": 8, "steps": 5},
    "lstm": {"cohort": 4, "steps": 2, "clients": 20},
    "resnet18": {"cohort": 2, "steps": 1, "batch": 20, "clients": 10},
    "transformer": {"cohort": 4, "steps": 1, "clients": 20},
}
# Batches that fill an accelerator; they would take minutes on a processor
FILLING = {
    "cnn": {"cohort": 32, "batch": 128, "examples": 128},
    "resnet18": {"cohort": 8, "batch": 128, "examples": 128, "steps": 4},
    "transformer": {"cohort": 8, "batch": 64, "examples": 64, "steps": 4},
}


def cases(tables: list[str], models: list[str], machine: Machine, most_clients: int = 10_000) -> Iterator[Case]:
    """Yields the cases of the tables.

    Args:
        tables: Names of tables.
        models: Networks of the table ``models``.
        machine: The machine.
        most_clients: The most clients of the table ``growth``.
    """
    if "models" in tables:
        for model in models:
            yield from of_model(model, machine)
    if "devices" in tables:
        yield from on_devices(machine)
    if "precision" in tables:
        for precision in ("float32", "float64"):
            yield Case("precision", "ntk round", "chebyshev", precision, examples=1000)
            yield Case("precision", "kernel flow", "runs", precision, examples=2000, rounds=50)
    if "growth" in tables:
        yield from in_growth(most_clients)
    if "million" in tables:
        # one epoch, where fetching a client's examples from memory shows, and the five of FedAvg's paper
        for steps in (1, 5):
            for clients in (10_000, 100_000, 1_000_000):
                yield Case("million", "logistic", clients=clients, cohort=1000, examples=10, steps=steps, features=20)


def of_model(model: str, machine: Machine) -> Iterator[Case]:
    """Yields a network under its mappings and precisions."""
    is_cpu = machine.platform == "cpu"
    case = Case("models", model)._replace(**LARGE.get(model, {}))  # type: ignore[arg-type]
    one_by_one, together = "scan", "vmap"
    if model in ("mlp", "cnn"):
        for mapping in ("python loop", one_by_one, together, "chunked:4", "auto"):
            yield case._replace(mapping=mapping)
    else:
        for mapping in (one_by_one, together):
            yield case._replace(mapping=mapping)
    if model == "mlp":
        yield case._replace(batch=128, width=1024, examples=128, steps=2, cohort=8)
    fastest = case._replace(mapping=one_by_one if is_cpu else together)
    others = ("bfloat16",) if is_cpu else ("default", "bfloat16")
    for precision in others:
        yield fastest._replace(precision=precision)
    if not is_cpu and model in FILLING:
        for precision in ("float32", *others):
            yield fastest._replace(precision=precision, **FILLING[model])  # type: ignore[arg-type]


def on_devices(machine: Machine) -> Iterator[Case]:
    """Yields one network on 1, 2, 4, .. and all devices, and on two processes."""
    is_cpu = machine.platform == "cpu"
    inner = "scan" if is_cpu else "vmap"
    number = machine.devices
    if is_cpu:  # a core each, unless more were forced
        number = max(number, machine.cores)
    counts = [2**k for k in range(1, number.bit_length()) if 2**k < number] + [number] * (number > 1)
    if machine.platform == "tpu":
        counts = counts[-1:]  # a process takes all or one
    case = Case("devices", "cnn", inner)._replace(**LARGE["cnn"] if is_cpu else FILLING["cnn"])  # type: ignore[arg-type]
    yield case
    for devices in counts:
        yield case._replace(mapping=f"sharded:{inner}", devices=devices)
    if machine.platform != "tpu" and number > 1:
        # processes must agree on the number of rounds: it cannot come from their own clocks
        yield case._replace(mapping=f"sharded:{inner}", devices=2, processes=2, rounds=5 if is_cpu else 200)


def in_growth(most_clients: int) -> Iterator[Case]:
    """Yields costs against clients, cohort, rounds and width."""
    for clients in (n for n in (10, 100, 1000, 10_000) if n <= most_clients):
        yield Case("growth", "logistic", clients=clients, cohort=10)
    for cohort in (1, 100, 1000):
        yield Case("growth", "logistic", clients=1000, cohort=cohort)
    for rounds in (10, 100, 1000):
        yield Case("growth", "logistic", clients=100, cohort=10, rounds=rounds)
    for width in (16, 64, 256, 1024):
        yield Case("growth", "mlp", cohort=10, width=width)


def tiny(case: Case) -> Case:
    """Returns a case at its smallest size, for tests."""
    smaller = {"clients": 4, "cohort": 4, "batch": 2, "steps": 1, "examples": 4, "width": 8, "features": 8, "rounds": 2}
    if case.model in PRECISE:
        smaller = {"examples": 200, "rounds": 2}
    return case._replace(tiny=True, **smaller)  # type: ignore[arg-type]


def environment(case: Case, machine: Machine, index: int, cache: str) -> dict[str, str]:
    """Returns the environment of a process that measures a case.

    No memory is taken in advance, no compiled program is read from disk, and the measurements of mappings are those of
    this benchmark. A CPU has as many devices as the case asks for; the GPUs that a process sees are the case's.

    Args:
        case: The case.
        machine: The machine.
        index: Number of the process, from 0.
        cache: Folder of the caches of this benchmark.
    """
    variables = dict(os.environ)
    variables |= {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # so that the last line of an error is the error
        "FEDTANGENT_CACHE": cache,
    }
    of_each = case.devices // case.processes
    if machine.platform == "cpu":
        flag = "--xla_force_host_platform_device_count"
        flags = [f for f in variables.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
        variables["XLA_FLAGS"] = " ".join([*flags, f"{flag}={of_each}"] if of_each else variables["XLA_FLAGS"].split())
    elif machine.platform == "gpu" and of_each:
        name = "CUDA_VISIBLE_DEVICES"
        seen = variables.get(name) or ",".join(map(str, range(machine.devices)))
        variables[name] = ",".join(seen.split(",")[index * of_each : (index + 1) * of_each])
    return variables
