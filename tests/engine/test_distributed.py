"""Several devices and several processes: the same history as one device, over loopback."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import processes as distributed
from fedtangent._src.engine.clients import device_mesh

from ..federated import toys
from ..nightly import nightly
from .one_process import runs

SCRIPT = Path(__file__).parent / "one_process.py"
ROUNDING = 1e-11  # float64
SECONDS = 240
BOTH = "fed_ensemble,ntk_fl"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(devices: int, names: str, mappings: tuple[str, ...], *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    command = [sys.executable, str(SCRIPT), str(devices), names, *mappings, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """What the first of ``processes`` printed."""
    said = [process.communicate(timeout=SECONDS) for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error
    return json.loads(said[0][0].splitlines()[-1])


@functools.cache
def one_device(name: str) -> dict[str, Any]:
    """The run of this process."""
    return runs("scan", name, toys)[f"scan {name}"]


def assert_same(found: dict[str, Any], names: str, mapping: str) -> None:
    for name in names.split(","):
        run, other = one_device(name), found["runs"][f"{mapping} {name}"]
        np.testing.assert_allclose(other["weights"], run["weights"], rtol=0, atol=ROUNDING)
        assert other["examples"] == run["examples"]
        assert other["uplink"] == run["uplink"]
        assert not np.allclose(run["weights"], np.roll(run["weights"], 1), atol=1e-3)


@pytest.mark.slow
def test_eight_devices_have_the_history_of_one() -> None:
    polling = f"{BOTH},fed_avg"
    found = finished([launch(8, polling, ("sharded", "sharded:chunked:2"))])
    assert (found["devices"], found["processes"]) == (8, 1)
    assert_same(found, polling, "sharded")
    assert_same(found, polling, "sharded:chunked:2")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_fewer_devices_too(devices: int) -> None:
    assert_same(finished([launch(devices, BOTH, ("sharded:vmap",))]), BOTH, "sharded:vmap")


@pytest.mark.parametrize("name", nightly(["ntk_fl", "fed_ensemble", "fed_avg"], ["fed_avg"]))
def test_two_processes_have_the_history_of_one(name: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = ("--coordinator", address, "--num-processes", "2", "--process-id")
    found = finished([launch(2, name, ("sharded",), *options, str(i)) for i in range(2)])
    assert (found["devices"], found["processes"]) == (4, 2)
    assert_same(found, name, "sharded")


def test_settings_from_arguments_and_environment() -> None:
    variables = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    wanted = {"coordinator_address": "host:1234", "num_processes": 4, "process_id": 3}
    assert distributed.settings(None, None, None, variables) == wanted
    assert distributed.settings(None, None, 0, variables) == {**wanted, "process_id": 0}
    assert distributed.settings(None, None, None, {}) == {}  # left to JAX, which asks the cluster


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host", 2, 0), "coordinator: got 'host', must be host:port"),
        (("host:x", 2, 0), "coordinator: got 'host:x', must be host:port"),
        (("host:70000", 2, 0), "coordinator: got 'host:70000', must be host:port"),
        (("host:1", 0, 0), "num_processes: got 0, must be a whole number of at least 1"),
        (("host:1", 2, 2), "process_id: got 2, must be a whole number from 0 to 1"),
        (("host:1", "two", 1), "num_processes: got 'two', must be a whole number"),
        (("host:1", None, None), "distributed: got no num_processes and no process_id, must have all or none of"),
    ],
)
def test_bad_settings(given: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        distributed.settings(*given, environment={})


def test_replicated_and_local() -> None:
    tree = {"key": jax.random.key(3), "x": jnp.arange(4.0), "n": np.int32(2)}
    assert distributed.replicate(tree, None) is tree
    back = distributed.local(distributed.replicate(tree, device_mesh(1)))
    assert np.array_equal(jax.random.key_data(back["key"]), jax.random.key_data(tree["key"]))
    assert np.array_equal(back["x"], tree["x"])
    assert int(back["n"]) == 2
    assert distributed._placed_on(device_mesh(1)) is distributed._placed_on(device_mesh(1))  # compiled once
    assert distributed.is_main()
