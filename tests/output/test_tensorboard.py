"""What TensorBoard is given, read back record by record; and what a run asks for it."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from fedtangent.output.files import Metric
from fedtangent.output.tensorboard import check_tensorboard, tensorboard


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Value by name and round of a folder's one file: records of a length, its checksum, an event, its checksum."""
    (path,) = folder.iterdir()
    content, place, found = path.read_bytes(), 0, dict[tuple[str, int], float]()
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        event = Event.FromString(content[place + 12 : place + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        place += length + 16
    return found


def metrics(seed: int, round_: int) -> list[Metric]:
    told = {"train": 0.5 + round_, "test": 0.25 + seed}
    return [Metric(round_, "fed_avg", seed, s, "mse", value, 10 * round_, 20 * round_) for s, value in told.items()]


def test_every_evaluation_of_every_seed_is_there_once(tmp_path: Path) -> None:
    for _ in range(2):  # a run that is resumed tells all again
        write = tensorboard(tmp_path)
        for seed in (0, 3):
            for round_ in (0, 2):
                write(metrics(seed, round_))
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["seed-0", "seed-3"]
    for seed in (0, 3):
        found = scalars(tmp_path / "tensorboard" / f"seed-{seed}")
        expected = {(f"{m.split}/{m.metric}", r): m.value for r in (0, 2) for m in metrics(seed, r)}
        sent = {(f"bytes/{way}link", r): n * r for way, n in (("up", 10), ("down", 20)) for r in (0, 2)}
        assert found == expected | sent


def test_without_tensorboardx_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tensorboard()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^log: got tensorboard, but tensorboardX is not installed: pip install "):
        check_tensorboard()
