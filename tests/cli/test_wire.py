"""`fedtangent train` with projection, sparsity, shuffling, secure aggregation: no secret shows, the ledger is exact."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.cli import train
from fedtangent._src.cli.train import run_job
from fedtangent._src.data.dataset import projection_matrix
from fedtangent._src.engine.checkpoints.files import locked
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.memory import MemoryPlan
from fedtangent._src.engine.run import Resolved
from fedtangent._src.federated.algorithms import tangent
from fedtangent._src.federated.wire.key_server import SEALED_BYTES, open_key_file
from fedtangent._src.output.files import Ended

from .asking import prepared

TINY = "train --num-clients 4 --num-train 120 --widths 6 --num-rounds 1 --client-learning-rate 0.1"


def job(folder: Path, *more: object, num_rounds: int = 1) -> Any:
    given = TINY.replace("--num-rounds 1", f"--num-rounds {num_rounds}")
    return prepared(*given.split(), "--output", folder / "out", *more)


def test_projected_data_are_those_of_the_key_file_s_seed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    mine, plain = job(tmp_path, "--projection", 9, "--key-file", key).built, job(tmp_path).built
    matrix = projection_matrix(64, 9, open_key_file(key).seed.reveal())
    for found, before in ((mine.data.x, plain.data.x), (mine.examples.test.x, plain.examples.test.x)):
        np.testing.assert_allclose(found, np.asarray(before, float).reshape(-1, 64) @ matrix, atol=1e-5)
    other = job(tmp_path, "--projection", 9, "--key-file", tmp_path / "other").built
    assert np.abs(np.asarray(other.data.x - mine.data.x)).max() > 0.1
    costs = [b.algorithm.cost(b.data, engine_for(b.data, "scan")) for b in (mine, plain)]
    assert costs[0].downlink_once - costs[1].downlink_once == 4 * SEALED_BYTES
    assert costs[0].uplink_once - costs[1].uplink_once == 4 * 32


def test_no_file_holds_the_seed_and_a_run_resumes_with_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    given = ["--projection", 9, "--checkpoint-every", 1, "--mapping", "scan"]
    assert run_job(job(tmp_path, *given, "--key-file", key)) == Ended()
    seed = open_key_file(key).seed.reveal()
    forms = [seed, seed.hex().encode(), base64.b64encode(seed)[:40], str(int.from_bytes(seed, "big")).encode()]
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    told = "".join(capsys.readouterr()).encode()
    assert len(written) > 5 and any(open_key_file(key).digest.encode() in text for text in written)
    assert all(form not in text for form in forms for text in [*written, told])
    assert forms[1] in key.read_bytes()  # so that a seed that is there would be found

    again = [*given, "--resume", "--key-file"]
    moved = key.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"key_file: there is no .*; to resume, name the key file"):
        job(tmp_path, *again, key, num_rounds=2)
    assert not key.exists()
    open_key_file(tmp_path / "other")
    with pytest.raises(ValueError, match="projection_seed"):
        run_job(job(tmp_path, *again, tmp_path / "other", num_rounds=2))
    assert run_job(job(tmp_path, *again, moved, num_rounds=2)) == Ended()


def test_the_environment_may_name_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTANGENT_KEY_FILE", str(tmp_path / "key"))
    found = job(tmp_path, "--projection", 9)
    assert found.built.data.x.shape == (120, 9)
    assert found.config["projection_seed"] == open_key_file(tmp_path / "key").digest


def test_a_refused_run_leaves_no_new_key_file(
    tmp_path: Path, run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = Resolved("scan", MemoryPlan(*[1] * len(MemoryPlan._fields)), {})
    monkeypatch.setattr(train, "resolve_mapping", lambda *given, **options: resolved)
    key, line = tmp_path / "key", [*TINY.split(), "--projection", 9, "--key-file", tmp_path / "key"]
    with locked(tmp_path / "held", "output"):  # the last thing that a run is refused for
        ended = run(*line, "--output", tmp_path / "held")
    assert ended.code == 2 and "is in use" in ended.err and not key.exists()
    digests = []
    monkeypatch.setattr(train, "run_job", lambda job: digests.append(job.config["projection_seed"]) or Ended())
    assert run(*line, "--output", "out").code == 0
    assert digests == [open_key_file(key).digest]  # the control: that of a run that begins is there, and its own
    assert [path.name for path in tmp_path.iterdir() if "key" in path.name] == ["key"]


def test_switches_reach_the_algorithms(tmp_path: Path) -> None:
    def uplink(line: str = "") -> tuple[int, int]:
        built = job(tmp_path, *line.split()).built
        return built.algorithm.cost(built.data, engine_for(built.data, "scan"))[:2]

    numbers = 64 * 6 + 6 + 6 * 10 + 10
    assert uplink() == (4 * numbers, 0)
    assert uplink("--secure-aggregation --beta 0.5") == (
        4 * (numbers + 1) + 32 + 4 * 4,
        0,
    )  # with the scales of four arrays
    assert uplink("--sparsity 0.9 --shuffle") == (-(-(46 * 32 + 46 * 9) // 8), 0)
    assert uplink("--algorithm ntk_fl") == (0, 40 * numbers + 80)
    assert uplink("--algorithm cp_ntk_fl --sparsity 0.9 --beta 0.5 --shuffle") == (
        0,
        -(-(460 * 32 + min(460 * 13, 4600)) // 8) + 80,
    )


def test_the_pool_has_no_more_places_than_examples_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_of_pools: list[int] = []
    server = tangent.ntk_server

    def spy(*parts: Any, **more: Any) -> Any:
        sizes_of_pools.append(more["pool_size"])
        return server(*parts, **more)

    monkeypatch.setattr(tangent, "ntk_server", spy)
    sizes = np.diff(job(tmp_path, "--algorithm", "cp_ntk_fl", "--beta", 0.25).built.data.offsets)
    assert sizes_of_pools[0] == sum(max(1, int(0.25 * size + 0.5)) for size in sizes) < sizes.sum() / 2
