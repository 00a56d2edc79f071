"""`fedtangent train` with projection, sparsity, shuffling, secure aggregation: no secret shows, mistakes are told."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent.cli.job import checkpoints_of, prepare
from fedtangent.cli.options import TrainOptions
from fedtangent.cli.train import run_job
from fedtangent.data.projection import projection_matrix
from fedtangent.federated import algorithms
from fedtangent.federated.wire.key_server import SEALED_BYTES, open_key_file

TINY: dict[str, Any] = {
    "num_clients": 4,
    "num_train": 120,
    "widths": (6,),
    "num_rounds": 1,
    "client_learning_rate": 0.1,
}


def options(folder: Path, **more: Any) -> TrainOptions:
    return dataclasses.replace(TrainOptions(), **TINY | {"output": folder / "out"} | more)


def test_projected_data_are_those_of_the_key_file_s_seed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    job, plain = prepare(options(tmp_path, projection=9, key_file=key)), prepare(options(tmp_path))
    matrix = projection_matrix(64, 9, open_key_file(key).seed.reveal())
    for found, before in ((job.data.x, plain.data.x), (job.splits["test"].x, plain.splits["test"].x)):
        np.testing.assert_allclose(found, np.asarray(before, float).reshape(-1, 64) @ matrix, atol=1e-5)
    other = prepare(options(tmp_path, projection=9, key_file=tmp_path / "other"))
    assert np.abs(np.asarray(other.data.x - job.data.x)).max() > 0.1
    from fedtangent.engine.clients import engine_for

    costs = [j.algorithm.cost(j.data, engine_for(j.data, "scan")) for j in (job, plain)]
    assert costs[0].downlink_once - costs[1].downlink_once == 4 * SEALED_BYTES
    assert costs[0].uplink_once - costs[1].uplink_once == 4 * 32


def test_no_file_holds_the_seed_and_a_run_resumes_with_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    given = options(tmp_path, projection=9, key_file=key, checkpoint_every=1, mapping="scan")
    assert run_job(prepare(given)) == 0
    seed = open_key_file(key).seed.reveal()
    forms = [seed, seed.hex().encode(), base64.b64encode(seed)[:40], str(int.from_bytes(seed, "big")).encode()]
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    told = "".join(capsys.readouterr()).encode()
    assert len(written) > 5 and any(open_key_file(key).digest.encode() in text for text in written)
    assert all(form not in text for form in forms for text in [*written, told])
    assert forms[1] in key.read_bytes()  # so that a seed that is there would be found

    again = dataclasses.replace(given, resume=True, num_rounds=2)
    moved = key.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"key_file: there is no .*, but a resumed run needs the seed"):
        prepare(again)
    assert not key.exists()
    other = dataclasses.replace(again, key_file=tmp_path / "other")
    open_key_file(tmp_path / "other")
    with pytest.raises(ValueError, match="projection_seed"):
        run_job(prepare(other))
    assert run_job(prepare(dataclasses.replace(again, key_file=moved))) == 0


def test_the_environment_may_name_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTANGENT_KEY_FILE", str(tmp_path / "key"))
    given = options(tmp_path, projection=9)
    assert prepare(given).data.x.shape == (120, 9)
    assert checkpoints_of(given, "uniform", 0).config["projection_seed"] == open_key_file(tmp_path / "key").digest


def test_switches_reach_the_algorithms(tmp_path: Path) -> None:
    from fedtangent.engine.clients import engine_for

    def uplink(**more: Any) -> tuple[int, int]:
        job = prepare(options(tmp_path, **more))
        return job.algorithm.cost(job.data, engine_for(job.data, "scan"))[:2]

    numbers = 64 * 6 + 6 + 6 * 10 + 10
    assert uplink() == (4 * numbers, 0)
    assert uplink(secure_aggregation=True, beta=0.5) == (4 * (numbers + 1) + 32, 0)
    assert uplink(sparsity=0.9, shuffle=True) == (-(-(46 * 32 + 46 * 9) // 8), 0)
    assert uplink(algorithm="ntk_fl") == (0, 40 * numbers + 80)
    assert uplink(algorithm="cp_ntk_fl", sparsity=0.9, beta=0.5, shuffle=True) == (
        0,
        -(-(460 * 32 + min(460 * 13, 4600)) // 8) + 80,
    )


def test_the_pool_has_no_more_places_than_examples_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    recipe = algorithms.cp_ntk_fl

    def spy(*parts: Any, **more: Any) -> Any:
        given.update(more)
        return recipe(*parts, **more)

    monkeypatch.setattr(algorithms, "cp_ntk_fl", spy)
    sizes = np.diff(prepare(options(tmp_path, algorithm="cp_ntk_fl", beta=0.25)).data.offsets)
    assert given["pool_size"] == sum(max(1, int(0.25 * size + 0.5)) for size in sizes) < sizes.sum() / 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beta": 0.0}, "beta: got 0.0, must be above 0 and at most 1"),
        ({"beta": 1.1}, "beta: got 1.1"),
        ({"beta": 0.5, "algorithm": "centralised"}, "beta: is not used with algorithm 'centralised'"),
        ({"sparsity": 1.0}, "sparsity: got 1.0, must be at least 0 and below 1"),
        ({"sparsity": 0.5, "channel": "qsgd:4"}, "sparsity: sends by top_k, but channel is 'qsgd:4'"),
        ({"sparsity": 0.5, "algorithm": "ntk_fl"}, "sparsity: is not used with algorithm 'ntk_fl'"),
        ({"projection": 65, "key_file": "key"}, "projection: got 65, larger than the 64 numbers of an example"),
        ({"projection": 0, "key_file": "key"}, "projection: got 0, must be at least 1"),
        ({"projection": 9}, "projection: needs key_file"),
        ({"projection": 9, "key_file": "key", "model": "cnn"}, "projection: gives vectors, but the model cnn"),
        ({"key_file": "key"}, "key_file: is used with projection only"),
        (
            {"secure_aggregation": True, "algorithm": "ntk_fl"},
            "secure_aggregation: ntk_fl needs every client's Jacobians",
        ),
        ({"secure_aggregation": True, "algorithm": "cp_ntk_fl"}, "secure_aggregation: cp_ntk_fl needs every client's"),
        ({"secure_aggregation": True, "algorithm": "centralised"}, "secure_aggregation: centralised needs every"),
        ({"secure_aggregation": True, "channel": "top_k:0.1"}, "channel: must be lossless with secure_aggregation"),
        ({"secure_aggregation": True, "sparsity": 0.5}, "channel: must be lossless with secure_aggregation"),
        ({"secure_aggregation": True, "max_update_norm": 5.0}, "max_update_norm: needs single messages"),
        ({"algorithm": "cp_ntk_fl", "max_update_norm": 5.0}, "max_update_norm: is a bound on updates, of which cp_ntk"),
        ({"algorithm": "centralised", "max_update_norm": 5.0}, "max_update_norm: is a bound on updates, of which cent"),
        ({"secure_aggregation": True, "shuffle": True}, "shuffle: adds nothing to secure_aggregation"),
        ({"shuffle": True, "algorithm": "gossip"}, "shuffle: hides clients from a server, but gossip has none"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str) -> None:
    monkeypatch.delenv("FEDTANGENT_KEY_FILE", raising=False)
    given = {k: Path(v) if k == "key_file" else v for k, v in more.items()}
    with pytest.raises(ValueError, match=message):
        prepare(options(tmp_path, **given))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing written, no key file either
