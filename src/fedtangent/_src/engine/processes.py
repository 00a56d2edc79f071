"""Devices and processes: joins the processes of a run, copies values to every device, and catches signals."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedtangent._src.checks import whole
from fedtangent._src.programs import usable_cores
from fedtangent._src.pytrees import is_key
from fedtangent._src.types import Array, PyTree

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def settings(
    coordinator: str | None, num_processes: int | None, process_id: int | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the arguments of ``jax.distributed.initialize``; missing arguments are read from the environment.

    If all three are missing there too, the result is empty, and JAX reads the cluster's variables (Slurm, Open MPI).

    Args:
        coordinator: Address ``host:port`` of the first process, or None.
        num_processes: Number of processes, or None.
        process_id: Number of this process, from 0, or None.
        environment: Environment variables.

    Raises:
        ValueError: An address without a port, a number that is not whole, an id that is not below the number of
            processes, or only one or two of the three arguments.
    """
    values = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    for name, variable in VARIABLES.items():
        if values[name] is None and environment.get(variable):
            values[name] = environment[variable]
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return {}
    if missing:
        names = ", ".join(values)
        raise ValueError(f"distributed: got no {' and no '.join(missing)}, must have all or none of {names}")
    host, _, port = str(values["coordinator"]).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator: got {values['coordinator']!r}, must be host:port")
    number, index = (int(str(v)) if str(v).isdecimal() else v for v in (values["num_processes"], values["process_id"]))
    count = whole("num_processes", number)
    place = whole("process_id", index, 0, count - 1)
    return {"coordinator_address": f"{host}:{port}", "num_processes": count, "process_id": place}


def start(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Connects this process with the other processes of a run; call it before anything else uses a device.

    Args:
        coordinator: Address ``host:port`` of the first process; None to read JAX_COORDINATOR_ADDRESS.
        num_processes: Number of processes; None to read JAX_NUM_PROCESSES.
        process_id: Number of this process, from 0; None to read JAX_PROCESS_ID.

    Raises:
        ValueError: A bad argument, neither the arguments nor the environment name the other processes, or JAX cannot
            start them, for instance because a device is already in use.
    """
    arguments = settings(coordinator, num_processes, process_id, os.environ)
    # Used only if the devices are CPUs; other platforms have collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**arguments)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"distributed: cannot start: {error}") from error


def use_cores(host_devices: int = 0) -> None:
    """Makes ``host_devices`` cores (0: all that this process may use) separate devices if there is no accelerator.

    XLA runs a small network on one core; as devices, several cores train different clients (``sharded``). The function
    does nothing if a device was already used, or if XLA_FLAGS sets a number of host devices.

    Raises:
        ValueError: ``host_devices`` is negative or more than there are cores; this is checked first.
    """
    cores = usable_cores()
    if not 0 <= host_devices <= cores:
        raise ValueError(f"host_devices: got {host_devices}, must be from 0 (all) to {cores}, the usable cores")
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", host_devices or cores)
    except RuntimeError:  # devices are in use already
        return


def is_main() -> bool:
    """Returns whether this is the first process, the only one that writes files and prints."""
    return jax.process_index() == 0


@functools.cache
def _placed_on(mesh: Mesh) -> Callable[[list[np.ndarray]], list[Array]]:
    """Returns a function that copies arrays to each device of ``mesh``.

    It is cached for each mesh, so it compiles only once for the same shapes and dtypes.
    """
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Returns ``tree`` copied to each device of ``mesh``, in all processes; without a mesh, ``tree`` unchanged.

    Args:
        tree: Arrays, which must have equal values in all processes.
        mesh: The devices, or None.
    """
    if mesh is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    words = [np.asarray(jax.random.key_data(leaf)) if is_key(leaf) else np.asarray(leaf) for leaf in leaves]
    typed = [
        jax.random.wrap_key_data(row, impl=jax.random.key_impl(leaf)) if is_key(leaf) else row
        for row, leaf in zip(_placed_on(mesh)(words), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, typed)


def local(tree: PyTree) -> PyTree:
    """Takes arrays that are copied to every device; returns the copy on a device of this process."""

    def one(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            return leaf
        if is_key(leaf):
            words = jax.random.key_data(leaf).addressable_data(0)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        return leaf.addressable_data(0)

    return jax.tree.map(one, tree)


@contextlib.contextmanager
def stop_signals(enabled: bool) -> Iterator[Callable[[], int | None]]:
    """Catches the first SIGTERM or SIGINT inside the block, so that a run can end in order.

    Yields a function that returns the number of the signal, or None before one arrives. After the first signal the
    previous handlers are restored, so that a second one acts as usual. No handler is installed outside the main thread,
    where Python allows none, or for a signal that is ignored (``nohup``).

    Args:
        enabled: Whether to catch signals at all.
    """
    noted: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            # None is a handler that was not installed from Python: it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        before.clear()

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        restore()

    if enabled and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield lambda: noted[0] if noted else None
    finally:
        restore()


def environment() -> dict[str, str]:
    """Returns the versions of the package and its dependencies, and the device, to record beside a result."""
    # The root imports this module: its version can be had when called, not by a statement.
    root = importlib.import_module("fedtangent")
    return {
        "fedtangent": root.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
