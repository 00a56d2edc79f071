"""The harness of the comparison with other simulators: its arithmetic, its checks and its errors; nothing installed."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from .scripts import BENCHMARKS, scripts_of

HERE = BENCHMARKS / "peers"
pytestmark = pytest.mark.versions
NAMES = ("workloads", "floor", "processes", "environments", "tables", "run", "worker_fedtangent")


@pytest.fixture(scope="module")
def peers() -> SimpleNamespace:
    """The scripts of benchmarks/peers."""
    return scripts_of(HERE, NAMES)


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "argument --repeats: got 0, must be at least 1"),
        (["--workloads", "resnet"], "argument --workloads: invalid choice: 'resnet'"),
        (["--tools", "fedtangent", "fedjax"], "argument --tools: invalid choice: 'fedjax'"),
        (["--seed", "-1"], "argument --seed: got -1, must be at least 0"),
    ],
)
def test_a_bad_argument_is_one_clear_line(peers, capsys, arguments: list[str], message: str):
    with pytest.raises(SystemExit) as stopped:
        peers.run.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_settings_differ_and_divide_the_cohort(peers):
    for name, workload in peers.workloads.WORKLOADS.items():
        for tool in peers.run.TOOLS:
            for cores in (1, 2, 12):
                found = peers.run.settings(tool, workload, cores)
                assert len(set(found)) == len(found) > 0
                assert len({setting.describe(tool) for setting in found}) == len(found)
                if tool == "pfl":
                    assert all(workload.clients_per_round % setting.workers == 0 for setting in found), name


# ---- data and initial parameters ----


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "lstm"])
def test_data_are_those_of_the_workload(peers, tmp_path: Path, name: str):
    workload = peers.workloads.WORKLOADS[name]
    peers.workloads.write(workload, 3, tmp_path / "a.npz")
    stored = peers.workloads.read(tmp_path / "a.npz")
    assert len(stored.x) == len(stored.y) == workload.num_clients * workload.batch_size * workload.local_steps
    assert stored.x.dtype == (np.int32 if name == "lstm" else np.float32) and stored.y.dtype == np.int32
    again, other = peers.workloads.examples(workload, 3), peers.workloads.examples(workload, 4)
    np.testing.assert_array_equal(stored.x, again[0])
    assert not np.array_equal(stored.x, other[0])
    expected = peers.workloads.initial_parameters(name, 3)
    assert list(stored.initial) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(stored.initial[key], value)


def test_parameters_count_as_the_papers_networks_do(peers):
    count = {name: peers.floor.num_parameters(workload) for name, workload in peers.workloads.WORKLOADS.items()}
    lstm = 80 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 256 * 80 + 80
    cnn = 25 * 32 + 32 + 25 * 32 * 64 + 64 + 3136 * 128 + 128 + 1290
    assert count == {"logistic": 610, "mlp": 785 * 100 + 1010, "cnn": cnn, "lstm": lstm}


# ---- the networks, in plain NumPy ----


def dense(p: dict[str, np.ndarray], name: str, h: np.ndarray) -> np.ndarray:
    return h @ p[f"{name}.kernel"] + p[f"{name}.bias"]


def convolved(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """5x5 convolution of the same size, relu, 2x2 maximum, [n, height, width, channels]."""
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    z = sum(
        padded[:, i : i + x.shape[1], j : j + x.shape[2]] @ p[f"{name}.kernel"][i, j]
        for i in range(5)
        for j in range(5)
    )
    z = np.maximum(z + p[f"{name}.bias"], 0)
    return z.reshape(len(z), z.shape[1] // 2, 2, z.shape[2] // 2, 2, -1).max((2, 4))


def recurrent(p: dict[str, np.ndarray], layer: int, x: np.ndarray) -> np.ndarray:
    """Hidden states [n, T, H]; gates in the order input, forget, cell, output."""
    h = c = np.zeros((len(x), 256))
    states = []
    for t in range(x.shape[1]):
        z = x[:, t] @ p[f"lstm{layer}.input"] + h @ p[f"lstm{layer}.recurrent"] + p[f"lstm{layer}.bias"]
        i, f, g, o = (z[:, k : k + 256] for k in range(0, 1024, 256))
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        states.append(h)
    return np.stack(states, 1)


def outputs(name: str, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    if name == "logistic":
        return dense(p, "dense0", x)
    if name == "mlp":
        return dense(p, "dense1", np.maximum(dense(p, "dense0", x), 0))
    if name == "cnn":
        h = convolved(p, "conv1", convolved(p, "conv0", x)).reshape(len(x), -1)
        return dense(p, "dense1", np.maximum(dense(p, "dense0", h), 0))
    return dense(p, "dense0", recurrent(p, 1, recurrent(p, 0, p["embedding"][x]))[:, -1])


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "lstm"])
def test_fedtangent_starts_as_the_workload_says(peers, name: str):
    worker = peers.worker_fedtangent
    rng = np.random.default_rng(0)
    start = peers.workloads.initial_parameters(name, 0)
    # biases too, of which the workload's are zero
    start = {key: value if value.any() else rng.standard_normal(value.shape) / 4 for key, value in start.items()}
    start = {key: value.astype(np.float32) for key, value in start.items()}
    x = peers.workloads.examples(peers.workloads.WORKLOADS[name], 0)[0][:3]
    model = worker.build_model(name)
    found = model.apply(worker.starting_at(name, model, start).init(jax.random.key(0)), jax.numpy.asarray(x))
    expected = outputs(name, {key: value.astype(np.float64) for key, value in start.items()}, x)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert np.abs(expected - outputs(name, start, x[::-1])).max() > 0.01  # another input would show


def test_a_model_of_other_sizes_is_refused(peers):
    start = peers.workloads.initial_parameters("mlp", 0)
    with pytest.raises(ValueError, match="not mlp's"):
        peers.worker_fedtangent.starting_at("mlp", peers.worker_fedtangent.build_model("logistic"), start)


# ---- the floor ----


def test_operations_are_those_of_the_formulas(peers):
    floor, workloads = peers.floor, peers.workloads.WORKLOADS
    assert floor.flops(workloads["logistic"]) == 2 * 2 * 10 * 60 * 10
    assert floor.flops(workloads["mlp"]) == 2 * 10 * (2 * 784 * 100 + 3 * 100 * 10)
    convolutions = 2 * 10 * (2 * 784 * 25 * 32 + 3 * 196 * 800 * 64)
    assert floor.flops(workloads["cnn"]) == convolutions + 2 * 10 * 3 * (3136 * 128 + 128 * 10)
    recurrent = sum(3 * 80 * inputs * 1024 + 3 * 80 * 256 * 1024 for inputs in (8, 256))
    assert floor.flops(workloads["lstm"]) == 2 * 10 * (recurrent + 3 * 256 * 80)


def test_the_floor_is_the_longer_of_operations_and_bytes(peers):
    floor, mlp = peers.floor, peers.workloads.WORKLOADS["mlp"]
    measured = {
        "flops_per_second": {gemm.shape: 1e9 for gemm in floor.products(mlp)},
        "bytes_per_second": {"mlp": 1e9},
        "peak_flops_per_second": 2e9,
    }
    found = floor.floor(mlp, measured)
    assert found.compute_seconds == pytest.approx(floor.flops(mlp) / 1e9)
    assert found.bytes_seconds == pytest.approx(floor.num_bytes(mlp) / 1e9)
    assert found.seconds == found.compute_seconds
    slow_memory = floor.floor(mlp, measured | {"bytes_per_second": {"mlp": 1e6}})
    assert slow_memory.seconds == slow_memory.bytes_seconds > found.seconds
    assert floor.lowest([slow_memory, found]).seconds == found.seconds
    assert floor.floor(mlp, measured, streams=2).seconds == pytest.approx(found.seconds / 2)


def test_a_product_is_timed_whole(peers, monkeypatch):
    # Where the compiler took the product out of the loop, or left most of it out, four times the work would be free.
    monkeypatch.setattr(peers.floor, "MEASURE_SECONDS", 0.02)
    for kind in peers.floor.KINDS:
        gemms = [peers.floor.Gemm(kind, 256, 256, n) for n in (128, 1024)]
        small, large = (min(peers.floor.gemm_seconds(gemm) for _ in range(2)) for gemm in gemms)
        assert large > 3 * small, (kind, small, large)


# ---- statistics ----


def test_a_summary_is_median_and_range(peers):
    assert peers.tables.summarise([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)
    with pytest.raises(ValueError, match="at least one"):
        peers.tables.summarise([])


def draws(tools: int, repeats: int, shift: float, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    found = {f"tool{i}": list(1.0 + 0.01 * rng.standard_normal(repeats)) for i in range(tools)}
    found["tool0"] = [value + shift for value in found["tool0"]]
    return found


def test_equal_work_agrees_and_other_work_does_not(peers):
    def flagged(shift: float) -> int:
        return sum(not peers.tables.agreement(draws(3, 3, shift, seed), "tool0").holds for seed in range(200))

    assert flagged(0.0) <= 2  # 0.2 expected; 3 or more has a chance of 1 in 900
    assert flagged(0.2) == 200


def test_chance_needs_repeats_or_a_spread(peers):
    once = {"a": [1.0], "b": [1.001]}
    assert peers.tables.agreement(once, "a") is None
    assert peers.tables.agreement({"a": [1.0, 1.1]}, "a") is None
    assert peers.tables.agreement(once, "a", spread=[1.0, 1.002, 0.999]).holds
    assert not peers.tables.agreement(once, "a", spread=[1.0, 1.0, 1.0]).holds
    assert peers.tables.agreement({"a": [1.0, 1.0], "b": [1.000001, 1.000001]}, "a").holds


def test_a_loss_that_is_nan_is_flagged(peers):
    assert not peers.tables.agreement({"a": [math.nan, math.nan], "b": [1.0, 1.1]}, "a").holds


def measurement(rate: float, final: float, start: float = 2.3, counted: int | None = None) -> dict[str, object]:
    rounds = 10
    return {
        "setting": "1 thread",
        "rounds": rounds,
        "seconds": rounds * 200 / rate,
        "client_steps_per_second": rate,
        "rounds_per_second": rate / 200,
        "client_steps_counted": rounds * 200 if counted is None else counted,
        "initial_loss": start,
        "final_loss": final,
        "peak_mib": 100.0,
        "versions": {"x": "1"},
    }


def rows(peers, tool: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    own = [measurement(rate, final) for rate, final in ((900.0, 1.0), (1000.0, 1.01), (5000.0, 0.99))]
    return {row["tool"]: row for row in peers.tables.summary_rows("mlp", {"fedtangent": own, "other": tool})}


def test_the_table_gives_ratios_of_medians(peers):
    found = rows(peers, [measurement(rate, final) for rate, final in ((90.0, 1.0), (100.0, 1.01), (110.0, 0.99))])
    assert found["other"]["fedtangent_over_tool"] == pytest.approx(10.0)
    assert found["fedtangent"]["fedtangent_over_tool"] == 1.0
    assert found["fedtangent"]["flags"] == found["other"]["flags"] == []
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(peers.tables.peers_table(list(found.values())))
    text = console.export_text()
    assert "10.0x" in text and "900 to 5,000" in text and "MLP 784-100-10" in text


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"final": 1.4}, "loss outside"),
        ({"final": 2.5}, "does not learn"),
        ({"start": 2.31}, "starts elsewhere"),
        ({"counted": 1999}, "counted other steps"),
        ({"final": math.nan}, "does not learn"),
    ],
)
def test_other_work_is_flagged(peers, changed: dict[str, float], flag: str):
    runs = [measurement(100.0, **({"final": final} | changed)) for final in (1.0, 1.01, 0.99)]
    assert flag in rows(peers, runs)["other"]["flags"]


def test_the_distance_to_the_floor(peers):
    floor = peers.floor.Floor(compute_seconds=1e-4, bytes_seconds=2e-5, peak_flops_per_second=1e11)
    row = peers.tables.floor_row("mlp", 5000.0, floor, floor._replace(compute_seconds=5e-5))
    assert row["distance"] == pytest.approx(2.0) and row["all_cores_distance"] == pytest.approx(4.0)
    assert row["fraction_of_rate_at_shapes"] == pytest.approx(0.5)
    assert row["fraction_of_peak"] == pytest.approx(peers.floor.flops(peers.workloads.WORKLOADS["mlp"]) * 5000 / 1e11)
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(peers.tables.floor_table([row]))
    assert "2.00x" in console.export_text()


# ---- processes ----


def measure(peers, code: str, timeout: float = 60.0) -> dict[str, object]:
    return peers.processes.measure([sys.executable, "-c", code], dict(os.environ), timeout)


def test_a_measurement_is_the_line_that_a_process_prints(peers):
    found = measure(peers, "import time; print('noise'); print('{\"a\": 1}'); x = bytearray(10**8); time.sleep(1)")
    assert found["a"] == 1
    assert found["process_seconds"] > 1
    assert not Path("/proc/self/statm").exists() or 95 < found["peak_mib"] < 400


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('mapping: got x')", "exit code 1: ValueError: mapping: got x"),
        ("print('no result')", "exit code 0: no result"),
        ("print('{\"a\": 1}'); raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_process_without_a_result_is_an_error(peers, code: str, reason: str):
    with pytest.raises(peers.processes.MeasurementError, match=re.escape(reason)):
        measure(peers, code)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find a process's children")
def test_a_process_that_hangs_is_stopped_with_its_children(peers, tmp_path: Path):
    note = tmp_path / "pid"
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    code = child + f"open({str(note)!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(peers.processes.MeasurementError, match="took longer than 2 s"):
        measure(peers, code, timeout=2.0)
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or ") Z " in stat.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"child {pid} still runs")


def test_nothing_of_the_caller_s_threads_reaches_a_measurement(peers, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("NPROC", "7")
    own = peers.environments.variables("fedtangent", 2, 1, tmp_path)
    assert "XLA_FLAGS" not in own and own["NPROC"] == "2"
    assert peers.environments.variables("fedtangent", 2, 2, tmp_path)["XLA_FLAGS"].endswith("=2")
    assert peers.environments.variables("pfl", 3, 1, tmp_path)["OMP_NUM_THREADS"] == "3"
