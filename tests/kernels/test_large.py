"""Kernels of more examples than float64 has room for: tiles, files, products, and flows and limits of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from fedtangent._src import models
from fedtangent._src.kernels import large
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError, kernel_blocks
from fedtangent._src.kernels.large import large_kernel
from fedtangent._src.theory.fed_ensemble.limit import gp_limit
from fedtangent._src.theory.flow import recursion
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution, ntk_evolved

from ..nightly import nightly
from .large_points import CLIENTS, MODEL, ROUNDS, C, M, N, built, drawn, flow_of, starts


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "TILE", 64)


@pytest.fixture(scope="module")
def points() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return drawn()


@pytest.fixture(scope="module")
def blocks(points: Any) -> KernelBlocks:
    return kernel_blocks(MODEL.kernel, points[0], points[1])


def test_every_pair_is_computed_once_and_equals_float64(points: Any, blocks: KernelBlocks) -> None:
    seen: list[tuple[int, int]] = []
    found = built(points, tick=lambda done, total: seen.append((done, total)))
    theta = np.asarray(found.ntk_train)
    assert theta.dtype == np.float32 and np.array_equal(theta, theta.T)
    # float32 has half its digits where an angle is 0: without the diagonal in float64 this is 4e-5
    assert np.max(np.abs(theta - blocks.ntk_train)) < 1e-6 * np.max(blocks.ntk_train)
    tiles = -(-N // 64)
    assert seen[-1] == (tiles * (tiles + 1) // 2,) * 2


def test_tiles_of_vectors_are_as_large_in_the_mode_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "TILE", 2048)
    wide = models.mlp(784, 2, (8,)).kernel
    assert wide is not None
    x = np.zeros((1, 784), np.float32)
    with jax.enable_x64(True):  # converting an example to float64 is not the work of a pair
        assert large.side_of(wide, x) == 2048
        of_doubles = wide.side(x)
    with jax.enable_x64(False):
        assert wide.side(x) == of_doubles > 2048


def test_products_and_blocks(points: Any, blocks: KernelBlocks) -> None:
    found, a = built(points), np.random.default_rng(1).standard_normal((N, 2, 3))
    right = np.asarray(blocks.at_test(a))
    assert np.allclose(found.at_test(a), right, rtol=0, atol=1e-6 * np.abs(right).max())
    assert np.allclose(right, np.einsum("mn,nkd->mkd", blocks.ntk_test_train, a), atol=1e-12)
    rows = np.array([5, 77, 300, 2])
    assert np.allclose(found.block(rows), blocks.ntk_train[np.ix_(rows, rows)], rtol=1e-6)


def test_it_is_held_once(points: Any) -> None:
    """JAX reads the memory, or the file, as it is."""
    out = large._in_memory(MODEL.kernel, points[0], slice(0, N), lambda done, total: None)
    assert jax.device_put(out).unsafe_buffer_pointer() == out.ctypes.data


# ---- flows ----

RULES: dict[str, dict[str, Any]] = {
    "fed_avg": {},
    "fed_prox": {"mu": 0.5},
    "momentum": {"client_optimizer": optax.sgd(1.0, momentum=0.5), "server_momentum": 0.5},
    "decay": {"weight_decay": 0.1},
    "fed_dyn": {"algorithm": "fed_dyn", "mu": 0.5},
    "scaffold": {"algorithm": "scaffold"},
    "fed_nova": {"algorithm": "fed_nova", "local_steps": np.arange(CLIENTS) % 3 + 1},
}


CASES = [f"{name} {loss}" for name in RULES for loss in ("squared_error", "cross_entropy")]


@pytest.mark.parametrize("case", nightly(CASES, ["scaffold cross_entropy"]))
def test_a_flow_is_that_of_float64(points: Any, blocks: KernelBlocks, case: str) -> None:
    """By day of the longest rule and loss; FedAvg's squared error is that of the reading few rows at a time, below."""
    (name, loss), given, y, rounds = case.split(), starts(3), points[2], [0, 2, ROUNDS, 2]
    found = flow_of(built(points), y, loss=loss, **RULES[name]).runs(*given, rounds)
    right = flow_of(blocks, y, loss=loss, **RULES[name])
    wrong = flow_of(blocks, y, loss=loss, **{**RULES[name], "learning_rate": 0.201}).runs(*given, rounds)
    expected = right.runs(*given, rounds)
    assert len(found.test) == len(found.train) == len(rounds)
    for e in range(2):
        assert np.max(np.abs(found.test[:, :, e] - expected.test[:, :, e])) < 5e-6
        assert np.max(np.abs(found.train[:, :, e] - expected.train[:, :, e])) < 5e-6
        assert np.max(np.abs(wrong.test[:, :, e] - expected.test[:, :, e])) > 1e-4


@pytest.mark.parametrize("size", nightly([2, CLIENTS], [2]))
def test_rows_are_read_few_at_a_time_or_all(
    points: Any, blocks: KernelBlocks, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(recursion, "GATHERED", 7 * N)
    monkeypatch.setattr(recursion, "GATHERED_ON_CPU", 7 * N)
    traced, chunks = [], recursion.in_chunks.__wrapped__

    def anew(theta: Any, rows: Any, a: Any) -> Any:
        traced.append(len(rows))
        return chunks(theta, rows, a)

    monkeypatch.setattr(recursion, "in_chunks", jax.jit(anew))  # no other test has flows of these shapes
    y, zeros = points[2], (np.zeros((1, 2, N, C)), np.zeros((1, 2, M, C)))
    found = flow_of(built(points), y, size, 2)
    assert (found.program(None, C).rounds.needed is None) == (size == CLIENTS)
    right = flow_of(blocks, y, size, 2).runs(*zeros, [ROUNDS])
    assert np.max(np.abs(found.runs(*zeros, [ROUNDS]).test - right.test)) < 5e-6
    assert all(count > 7 for count in traced) and bool(traced) == (size < CLIENTS)


def test_runs_are_those_of_predict(points: Any, blocks: KernelBlocks) -> None:
    rng, flow = np.random.default_rng(4), flow_of(blocks, points[2], num_models=2, loss="cross_entropy")
    starts = rng.standard_normal((3, 2, N, C)), rng.standard_normal((3, 2, M, C))
    found = flow.runs(*starts, [0, 4])
    assert found.train.shape == (2, 2, 3, N, C) and found.test.shape == (2, 2, 3, M, C)
    for e in range(3):
        assert np.allclose(found.test[:, :, e], flow.predict(starts[0][e], starts[1][e], [0, 4]), atol=1e-13)
        assert np.allclose(found.train[:, :, e], flow.predict_train(starts[0][e], [0, 4]), atol=1e-13)
    rows = np.array([1, 2, 5, 6, 9])
    assert np.allclose(flow.runs(*starts, [0, 4], rows).train, found.train[:, :, :, rows], atol=1e-13)


def test_of_a_large_kernel_there_is_no_law(points: Any) -> None:
    flow = flow_of(built(points), points[2])
    assert np.asarray(flow.mean(2)).shape == (1, M, C)
    for asked in (lambda: flow.cov(2), flow.fixed_point, flow.bias, flow.stability, lambda: flow.operator(2)):
        with pytest.raises(ValueError, match=r"^kernels: got a LargeKernel, must be KernelBlocks for "):
            asked()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, CLIENTS])
def test_columns_are_shared_out_to_devices(size: int) -> None:
    """On four forced devices the same functions, and no device ever gathers the kernel."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax, numpy as np
import fedtangent; fedtangent.enable_x64()
import large_points as t
points, starts = t.drawn(), t.starts(0)
alone, shared = t.built(points), t.built(points, devices=jax.devices())
assert shared.ntk_train.shape == (t.N, 304) and len(shared.ntk_train.sharding.device_set) == 4
assert {{s.data.shape for s in shared.ntk_train.addressable_shards}} == {{(t.N, 76)}}
flows = [t.flow_of(k, points[2], {size}) for k in (alone, shared)]
one, other = (f.runs(*starts, [0, 6]) for f in flows)
assert max(np.abs(a - b).max() for a, b in zip(one, other)) < 5e-6
from fedtangent._src.theory.flow import functions
from fedtangent._src.theory.flow.recursion import path
flow = flows[1]
start = functions.started(flow, "train", starts[0][0], None, None)
start = start._replace(residual=start.residual - flow.targets[:, None, :])
text = path.lower(flow.program(None, t.C), start, flow.shares(None), np.array([6])).compile().as_text()
gathered = [line for line in text.splitlines() if " all-gather(" in line]
assert "all-reduce" in text and not any("f32[" in line.split("all-gather(")[0] for line in gathered), gathered
print("same")
"""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    variables = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr[-2000:]


@pytest.mark.slow
def test_columns_are_shared_out_to_processes() -> None:
    """Two processes of one device each hold half of the columns, and both have the functions of one alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax, numpy as np
import fedtangent; fedtangent.enable_x64()
from fedtangent._src.engine import processes
processes.start("localhost:{port}", 2, int(sys.argv[1]))
import large_points as t
points, starts = t.drawn(), t.starts(0)
alone, shared = t.built(points), t.built(points, devices=jax.devices())
assert len(jax.devices()) == 2 and [s.data.shape for s in shared.ntk_train.addressable_shards] == [(t.N, 151)]
one, other = (t.flow_of(k, points[2]).runs(*starts, [0, 6]) for k in (alone, shared))
assert max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(one, other)) < 5e-6
print("same")
"""
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([sys.executable, "-c", script, str(i)], env=variables, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for process in both:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and said.splitlines()[-1] == "same"


# ---- files ----


def test_a_file_is_used_again(points: Any, tmp_path: Path) -> None:
    first = built(points, folder=tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".npy"]
    ticks: list[int] = []
    again = built(points, folder=tmp_path, tick=lambda done, total: ticks.append(done))
    assert ticks == [] and np.array_equal(first.ntk_train, again.ntk_train)
    assert np.array_equal(first.ntk_train, built(points).ntk_train)
    built((points[0] + 1, points[1]), folder=tmp_path)  # other points are another file
    large_kernel(models.mlp(20, C, (64,)).kernel, points[0], points[1], folder=tmp_path)  # and so is another network
    assert len(list(tmp_path.glob("*.npy"))) == 3


def test_a_file_that_was_changed_is_refused(points: Any, tmp_path: Path) -> None:
    built(points, folder=tmp_path)
    (path,) = tmp_path.glob("*.npy")
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\x01")
    with pytest.raises(ValueError, match=r"^folder: .*\.npy was changed since it was written; remove that file$"):
        built(points, folder=tmp_path)


def test_a_file_that_was_not_finished_is_written_anew(points: Any, tmp_path: Path) -> None:
    right = built(points, folder=tmp_path)
    (path,) = tmp_path.glob("*.npy")
    path.rename(path.with_name(path.name.rsplit("-", 1)[0] + ".part"))
    assert np.array_equal(built(points, folder=tmp_path).ntk_train, right.ntk_train)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".npy"]


def test_of_two_processes_one_writes(points: Any, tmp_path: Path) -> None:
    """The other waits, and both have the same kernel; while the first writes there is no file to be taken for whole."""
    right, found = built(points), []

    def slowly(done: int, total: int) -> None:
        if done == 5:
            thread.start()
        assert not list(tmp_path.glob("*.npy"))

    thread = threading.Thread(target=lambda: found.append(built(points, folder=str(tmp_path), tick=never)))
    found.append(built(points, folder=tmp_path, tick=slowly))
    thread.join()
    assert len(found) == 2 and all(np.array_equal(one.ntk_train, right.ntk_train) for one in found)


def never(done: int, total: int) -> None:
    raise AssertionError("computed again")


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_is_none_is_refused(points: Any, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^folder: got .*, must be a folder that can be written to$"):
        built(points, folder=tmp_path / where)


def test_no_room_says_how_much_is_needed(points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"^folder: got .*, where 1e-09 GB are free, must have room for 0.000362 GB"):
        built(points, folder=tmp_path)
    assert not list(tmp_path.glob("*.npy"))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (np.zeros((0, 20)), np.ones((2, 20)), "x_train and x_test: got"),
        (np.ones((3, 20)), np.ones((2, 19)), "x_train and x_test: got"),
        (np.full((3, 20), np.nan), np.ones((2, 20)), "x_train: got"),
        (np.full((3, 20), 1e30), np.ones((2, 20)), "kernel_fn: got a kernel with entries beyond float32"),
    ],
)
def test_bad_points_are_refused(train: np.ndarray, test: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        large_kernel(MODEL.kernel, train, test)


def test_bad_flows_are_refused(points: Any) -> None:
    kernels = built(points)
    with pytest.raises(ValueError, match=r"^kernels: got a LargeKernel of 301 training points, must be of 300"):
        flow_of(kernels, points[2][:300])
    with pytest.raises(ValueError, match=r"^dynamics: got 'gradient_flow', allowed are gradient_descent"):
        flow_of(kernels, points[2], dynamics="gradient_flow")


# ---- limits ----


def test_the_limit_by_conjugate_gradients(points: Any, blocks: KernelBlocks) -> None:
    right, found = gp_limit(blocks, points[2], max_relative_jitter=0.0), gp_limit(built(points), points[2])
    assert found.cov is None
    assert np.linalg.norm(found.mean - right.mean) < 2e-3 * np.linalg.norm(right.mean)
    jittered = gp_limit(blocks._replace(ntk_train=blocks.ntk_train + 0.1 * np.eye(N)), points[2])
    assert np.linalg.norm(jittered.mean - right.mean) > 1e-2 * np.linalg.norm(right.mean)


@pytest.mark.parametrize("factor", [1e-30, 0.0, 1e30])
def test_targets_of_any_size_have_a_limit(points: Any, blocks: KernelBlocks, factor: float) -> None:
    y = points[2] * np.array([factor, 1.0, factor])
    right = gp_limit(blocks, y, max_relative_jitter=0.0).mean
    off = np.linalg.norm(gp_limit(built(points), y).mean - right, axis=0)
    assert np.all(off <= 2e-3 * np.linalg.norm(right, axis=0))


def test_a_single_point_has_a_limit(points: Any) -> None:
    one = large_kernel(MODEL.kernel, points[0][:1], points[1])
    ratio = one.at_test(np.ones((1, 1)))[:, 0] / float(one.ntk_train[0, 0])
    assert np.allclose(gp_limit(one, [[2.0]]).mean[:, 0], 2 * ratio, rtol=1e-4)


def test_a_singular_kernel_is_said_to_be(points: Any) -> None:
    twice = np.concatenate([points[0][:100]] * 2), points[1]
    with pytest.raises(SingularKernelError, match="too nearly singular for 200 steps"):
        gp_limit(built(twice), np.concatenate([points[2][:100], 1 - points[2][:100]]))


def test_ntk_fl_evolves_a_pool_of_any_size(points: Any, blocks: KernelBlocks) -> None:
    residual, step = -points[2], 1 / float(np.linalg.eigvalsh(blocks.ntk_train)[-1])
    right = ntk_evolution(blocks, step, 40) @ residual
    evolved = ntk_evolved(blocks, residual, step, [0, 10, 40])
    assert not np.any(evolved[0])
    assert np.allclose(blocks.at_test(evolved[2]), right, atol=1e-12)
    large_ = built(points)
    assert np.max(np.abs(large_.at_test(ntk_evolved(large_, residual, step, [40])[0]) - right)) < 5e-6
    assert np.max(np.abs(blocks.at_test(evolved[1]) - right)) > 1e-2
    with pytest.raises(ValueError, match=r"^times: got"):
        ntk_evolved(blocks, residual, step, [3, 2])
    for time in (20, 2000):
        with pytest.raises(ValueError, match=r"^step: got .* diverges"):
            ntk_evolved(blocks, residual, 3 * step, [time])
    with pytest.raises(ValueError, match=r"^residual: got shape"):
        ntk_evolved(blocks, residual[:-1], step, [2])


def test_functions_that_do_not_fit_are_refused(points: Any) -> None:
    flow = flow_of(built(points), points[2])
    for train, test in ((np.zeros((2, 1, N, C)), np.zeros((1, 1, M, C))), (np.zeros((1, N, C)), np.zeros((1, M, C)))):
        with pytest.raises(ValueError, match=r"^f0_train and f0_test: got shapes"):
            flow.runs(train, test, [1])
