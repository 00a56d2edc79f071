"""The benchmark of the engine, at its smallest sizes: forced host devices, stand-ins for the peak and for a device."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fedtangent import models

from .scripts import BENCHMARKS, scripts_of

HERE = BENCHMARKS
NAMES = ("engine", "machine", "machine.cases", "machine.child", "machine.flops", "machine.peaks")
KIND = "NVIDIA H100 80GB HBM3"
DESCRIPTION = {
    "device": {"platform": "gpu", "kind": KIND, "devices": 4, "cores": 4},
    "versions": {"jax": "0"},
    "peaks": {
        name: {"flops_per_second": rate, "size": 8, "by_size": {}}
        for name, rate in {"float32": 4e13, "default": 4e14, "bfloat16": 8e14, "float64": 5e13}.items()
    },
    "method": "a stand-in",
}


@pytest.fixture(scope="module")
def bench() -> SimpleNamespace:
    """The scripts of the benchmark."""
    return scripts_of(HERE, NAMES)


# ---- the peak and the data sheet ----


def test_the_data_sheet_is_found_by_the_device_s_name(bench):
    sheet = bench.peaks.data_sheet
    assert sheet("NVIDIA H200") == sheet(KIND)
    assert sheet(KIND) == pytest.approx({"float32": 66.9e12, "default": 494.7e12, "bfloat16": 989.4e12})
    assert sheet("NVIDIA H100 PCIe") == pytest.approx({"float32": 51e12, "bfloat16": 756.5e12})
    assert sheet("NVIDIA A100-SXM4-80GB")["default"] == 156e12
    assert "bfloat16" not in sheet("Tesla V100-SXM2-16GB") and "float32" not in sheet("TPU v6 lite")
    assert sheet("TPU v5 lite")["bfloat16"] == 197e12 and sheet("TPU v5p")["bfloat16"] == 459e12
    for other in ("cpu", "NVIDIA L40S", "NVIDIA H200 NVL", "NVIDIA B200", "TPU v7x"):
        assert sheet(other) == {}, other


def test_the_peak_is_the_median_batch_of_the_best_size(bench, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(bench.peaks, "chain", lambda precision, size: lambda products: None)
    # a batch in five is held up by something else, another is too good
    delay = {0: 5.0, 1: 0.5}
    monkeypatch.setattr(bench.peaks, "timed", lambda run, products: 1e-3 * products * delay.get(next(calls) % 5, 1.0))
    found = bench.peaks.measured_peak("float32", (64, 128))
    assert found.size == 128 and found.flops_per_second == pytest.approx(2 * 128**3 / 1e-3)
    assert found.by_size[128][1] == pytest.approx(2 * found.flops_per_second)


def test_products_of_the_peak_are_in_their_precision(bench):
    for precision, dtype in {"float32": "f32", "default": "f32", "bfloat16": "bf16"}.items():
        run = bench.peaks.chain(precision, 16)
        held = {name: cell.cell_contents for name, cell in zip(run.__code__.co_freevars, run.__closure__, strict=True)}
        text = str(jax.make_jaxpr(held["product"])(held["first"], held["factor"]))
        assert f":{dtype}[16,16]" in text and ("HIGHEST" in text) == (precision == "float32")
        run(2)


def test_the_devices_of_a_cpu_share_one_peak(bench):
    assert bench.peaks.peak_of(1e12, 4, "gpu") == 4e12 and bench.peaks.peak_of(1e12, 4, "cpu") == 1e12


# ---- operations ----


def test_operations_of_a_dense_layer_are_those_by_hand(bench):
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((x @ w) ** 2)

    count = bench.flops.counted(jax.grad(loss), jnp.ones((7, 3)), jnp.ones((5, 7)))
    assert count == 2 * (2 * 5 * 7 * 3)  # forward, and the gradient by the weights; none by the inputs
    assert bench.flops.counted(jax.grad(loss, (0, 1)), jnp.ones((7, 3)), jnp.ones((5, 7))) == 3 * (2 * 5 * 7 * 3)


@pytest.mark.parametrize("stride", [1, 2])
def test_operations_of_convolutions_are_the_compiler_s(bench, stride: int):
    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)
        return jnp.sum(jax.lax.conv_general_dilated(h, v, (1, 1), "SAME", dimension_numbers=numbers) ** 2)

    arguments = jnp.ones((3, 3, 2, 4)), jnp.ones((3, 3, 4, 8)), jnp.ones((2, 9, 9, 2))
    gradient = jax.grad(loss, (0, 1))
    compiled: Any = jax.jit(lambda *a: gradient(*a)).lower(*arguments).compile().cost_analysis()
    count = bench.flops.counted(gradient, *arguments)
    # the compiler also counts elementwise operations, fewer than one for each entry of each array
    assert 0 <= compiled["flops"] - count < 0.05 * count


def test_operations_of_a_loop_are_those_of_all_its_passes(bench):
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda h, _: (h @ w, None), x, length=6)[0])

    w, x = jnp.ones((3, 3)), jnp.ones((5, 3))
    assert bench.flops.counted(loss, w, x) == 6 * 2 * 5 * 3 * 3
    assert bench.flops.counted(jax.grad(loss), w, x) == 3 * 6 * 2 * 5 * 3 * 3
    with pytest.raises(ValueError, match="loop of unknown length"):
        bench.flops.counted(lambda w, n: jax.lax.fori_loop(0, n, lambda _, h: h @ w, w), w, 3)


def test_operations_do_not_depend_on_the_convolution_or_the_precision(bench):
    case = bench.cases.tiny(bench.cases.Case("models", "cnn"))
    data = bench.child.examples(case)
    one, half = (bench.child.network(c, "lax") for c in (case, case._replace(precision="bfloat16")))
    assert bench.flops.step_flops(one, data, 2) == bench.flops.step_flops(half, data, 2) > 0
    assert bench.flops.step_flops(one, data, 4) == 2 * bench.flops.step_flops(one, data, 2)


# ---- memory, compilation ----


def test_memory_is_the_device_s_own_or_says_that_it_is_the_process_s(bench):
    @dataclasses.dataclass
    class Device:
        stats: dict[str, int] | None

        def memory_stats(self) -> dict[str, int] | None:
            return self.stats

    full, empty = Device({"peak_bytes_in_use": 3 * 2**20}), Device({"peak_bytes_in_use": 2**20})
    assert bench.child.memory([empty, full]) == {"MiB": 3.0, "MiB of": "device"}
    found = bench.child.memory([Device(None), Device({})])
    assert found["MiB of"] == "process" and found["MiB"] > 100


def test_nested_compilation_counts_once(bench):
    compiling = bench.child.Compiling()
    compiling.spans = [(0.0, 1.0), (2.0, 5.0), (3.0, 4.0), (4.5, 6.0)]
    assert compiling.seconds(0.0) == 5.0 and compiling.seconds(2.5) == 3.5


# ---- rows ----


def test_utilisation_is_operations_times_rate_over_the_peak(bench):
    case = bench.cases.Case("devices", "cnn", "sharded:vmap", "bfloat16", devices=4)
    found = {"steps/s": 500.0, "flop/s": 500.0 * 2e11, "devices used": 4, "MiB": 5.0, "MiB of": "device"}
    row = bench.engine.finished(case, found | {"rounds/s": 1.0, "compile s": 2.0}, DESCRIPTION)
    assert row["GFLOP/s"] == 1e5
    assert row["share of peak"] == 1e14 / (4 * 8e14) and row["share of data sheet"] == pytest.approx(
        1e14 / (4 * 989.4e12)
    )
    other = bench.engine.finished(case._replace(precision="default"), found, DESCRIPTION)
    assert other["share of peak"] == 1e14 / (4 * 4e14)  # another precision has another peak
    host = DESCRIPTION | {"device": {"platform": "cpu", "kind": "cpu", "devices": 4, "cores": 4}}
    assert bench.engine.shares(found, case, host)["share of data sheet"] is None
    assert list(row)[:12] == [
        *("table", "model", "mapping", "precision", "batch", "devices", "steps/s", "GFLOP/s"),
        *("share of peak", "share of data sheet", "MiB", "compile s"),
    ]  # the columns that the documentation shows


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_cases_are_one_plan_on_every_platform(bench, platform: str):
    machine = bench.cases.Machine(platform, 4 if platform != "cpu" else 1, 4)
    found = list(bench.cases.cases(list(bench.cases.TABLES), list(bench.cases.MODELS), machine))
    assert len(set(found)) == len(found)
    assert {case.model for case in found if case.table == "models"} == set(bench.cases.MODELS)
    assert {"float32", "bfloat16", "float64"} <= {case.precision for case in found}
    assert ("default" in {case.precision for case in found}) == (platform != "cpu")
    on_devices = [case.devices for case in found if case.table == "devices" and case.processes == 1]
    assert on_devices == ([1, 4] if platform == "tpu" else [1, 2, 4])
    assert all(case.examples >= case.batch and case.clients >= case.cohort for case in found if case.rounds is None)


def test_a_process_sees_its_devices_takes_no_memory_in_advance_and_reads_no_program(bench, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    case = bench.cases.Case("devices", devices=2, processes=2)
    gpu = [bench.cases.environment(case, bench.cases.Machine("gpu", 4, 4), i, "/cache") for i in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in gpu] == ["4", "5"]
    cpu = bench.cases.environment(case._replace(processes=1), bench.cases.Machine("cpu", 1, 4), 0, "/cache")
    assert cpu["XLA_FLAGS"].split() == ["--xla_other", "--xla_force_host_platform_device_count=2"]
    for one in (*gpu, cpu):
        assert one["XLA_PYTHON_CLIENT_PREALLOCATE"] == one["JAX_ENABLE_COMPILATION_CACHE"] == "false"


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_the_screen(bench, width: int):
    machine, engine = bench.cases.Machine("gpu", 4, 4), bench.engine
    rows = []
    for case in bench.cases.cases(list(bench.cases.DEFAULT_TABLES), list(bench.cases.MODELS), machine):
        rate = None if case.model in bench.cases.PRECISE else 1.234e14
        found = {"steps/s": 123456.7, "rounds/s": 12345.6, "flop/s": rate, "MiB": 71234.5, "MiB of": "device"}
        found |= {"compile s": 123.4, "device kind": KIND}
        found |= {"chosen": "chunked:64"} if case.mapping == "auto" else {}
        found |= {"float32's error": 1.2e-7} if rate is None and case.precision == "float64" else {}
        rows.append(engine.finished(case, found, DESCRIPTION))
    rows[0] = engine.finished(case, {"error": "exit 1: " + "no memory " * 9}, DESCRIPTION)
    console = Console(width=width, record=True, file=io.StringIO())
    engine.show(console, DESCRIPTION, rows)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("of sheet", "of peak", "compile", "off 1e-07", "failed", "auto=", "no memory", "4 devices", KIND):
        assert part in text, part
    assert not [line for line in lines if "…" in line]
    assert "another device" not in text
    console = Console(width=width, record=True, file=io.StringIO())
    engine.show(console, DESCRIPTION, [*rows, rows[-1] | {"device kind": "cpu"}])
    assert "peaks are of another device" in " ".join(console.export_text().split())


# ---- measurements ----


@pytest.mark.parametrize(
    ("model", "mapping", "precision"),
    [
        pytest.param("logistic", "scan", "float32", marks=pytest.mark.slow),
        ("mlp", "python loop", "float32"),
        pytest.param("mlp", "auto", "float32", marks=pytest.mark.slow),  # as engine/test_auto.py
        ("logistic", "chunked:2", "bfloat16"),
        pytest.param("lstm", "vmap", "bfloat16", marks=pytest.mark.slow),
        pytest.param("cnn", "chunked:2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("transformer", "scan", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_row_is_measured(bench, monkeypatch, tmp_path: Path, model: str, mapping: str, precision: str):
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path))
    case = bench.cases.tiny(bench.cases.Case("models", model, mapping, precision))
    found = bench.child.measure(case)
    assert found["steps/s"] == pytest.approx(found["rounds"] * 4 / min(found["seconds"]))
    assert found["flop/s"] == pytest.approx(found["steps/s"] * found["flops a step"]) and found["flop/s"] > 0
    assert 0 < found["compile s"] <= found["first s"]
    assert ("chosen" in found) == (mapping == "auto")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(bench.child.network(case).init(jax.random.key(0)))}
    assert dtypes == {jnp.dtype(precision)}


@pytest.mark.slow
def test_a_transformer_reads_its_tokens_in_order(bench):
    model = bench.child.network(bench.cases.tiny(bench.cases.Case("models", "transformer")))
    params, apply = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.apply)
    x = np.random.default_rng(0).integers(0, 80, (2, bench.child.LENGTH), dtype=np.int32)
    assert not np.allclose(apply(params, x), apply(params, np.roll(x, 1, axis=1)), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precise", [(), ("float32", "float64")])
def test_the_command_writes_its_rows_and_holds_no_device(bench, precise: tuple[str, ...], tmp_path: Path):
    """Four host devices and a stand-in for the peak; a case that fails keeps its error and makes the status 1.

    Without the two processes of one precision each too. By day the tests around this one hold what a process measures,
    what is kept of it, and the distance of two precisions.
    """
    code = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
os.cpu_count = lambda: 4
import engine
from machine.cases import Case
cnn = Case("devices", "mlp", "sharded:scan", devices=4)
engine.cases = lambda *a: [cnn, Case("models", "mlp", "sideways"), *(
    Case("precision", "ntk round", "chebyshev", p) for p in {precise})]
status = engine.main(sys.argv[1:])
assert not {{"jax", "jaxlib", "fedtangent"}} & set(sys.modules), "the parent holds JAX"
sys.exit(status)
"""
    host = DESCRIPTION | {"device": {"platform": "cpu", "kind": KIND, "devices": 1, "cores": 4}, "load": 9.0}
    (tmp_path / "peaks.json").write_text(json.dumps(host))
    command = [sys.executable, "-c", code, "--tiny", "--peaks", tmp_path / "peaks.json", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out" / "engine.json").read_text())
    sharded, failed, *beside = found["rows"]
    assert sharded["devices used"] == 4 and sharded["device kind"] == "cpu"
    assert sharded["share of peak"] == pytest.approx(sharded["flop/s"] / 4e13)
    assert sharded["share of data sheet"] == pytest.approx(sharded["flop/s"] / 66.9e12)
    assert "mapping: got 'sideways'" in failed["error"] and "steps/s" not in failed
    assert len(beside) == len(precise)
    if precise:
        single, double = beside
        assert 0 < single["distance"] == double["float32's error"] < 0.01
    assert {row["precision"] for row in found["measured peaks"]} == set(bench.peaks.PRECISIONS)
    assert found["versions"] and found["method"] == "a stand-in" and not list((tmp_path / "out").glob(".*"))
    assert f"1 of {2 + len(precise)}" in done.stderr and "failed" in done.stdout and "another device" in done.stdout
    assert "Other work ran" in done.stdout and "Other work" not in bench.engine.legend(host | {"load": 0.1}, [])


def test_what_is_measured_is_kept_when_it_is_stopped(bench, monkeypatch, tmp_path: Path):
    calls = []

    def launched(case: Any, *_: object) -> dict[str, Any]:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"steps/s": 1.0, "rounds/s": 1.0, "flop/s": 1e9, "MiB": 1.0, "MiB of": "process", "compile s": 0.1}

    monkeypatch.setattr(bench.engine, "launched", launched)
    monkeypatch.setattr(bench.engine.signal, "signal", lambda *_: None)
    (tmp_path / "peaks.json").write_text(json.dumps(DESCRIPTION))
    status = bench.engine.main(["--peaks", str(tmp_path / "peaks.json"), "--output", str(tmp_path)])
    assert status == 130
    assert len(json.loads((tmp_path / "engine.json").read_text())["rows"]) == 2


def test_the_second_precision_is_compared_to_what_the_first_left(bench, monkeypatch, tmp_path: Path):
    """In the folder that the processes share; a stand-in for the round."""
    ends = {"float32": np.array([3.0, 4.5]), "float64": np.array([3.0, 4.0])}
    monkeypatch.setattr(bench.child, "ntk_round", lambda case: ({"steps/s": 1.0}, ends[case.precision]))
    single, double = (
        bench.child.beside_double(bench.cases.Case("precision", "ntk round", "chebyshev", p), tmp_path) for p in ends
    )
    assert single == {"steps/s": 1.0} and double == {"steps/s": 1.0, "float32's error": 0.1}


def test_float32_is_apart_from_float64_only_where_both_were_measured(bench):
    rows = [{"model": "kernel flow", "precision": "float32"}, {"model": "mlp", "precision": "float32"}]
    assert bench.engine.with_errors(rows) == rows
    found = bench.engine.with_errors([*rows, {"model": "kernel flow", "precision": "float64", "float32's error": 1e-6}])
    assert found[0]["distance"] == 1e-6 and "distance" not in found[1]


def test_models_of_the_benchmark_are_those_of_the_package(bench):
    assert set(bench.cases.MODELS) - {"transformer"} <= set(models.__all__)
