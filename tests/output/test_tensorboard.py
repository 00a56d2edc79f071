"""What TensorBoard is given, read back record by record; and what a run asks for it."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from fedtangent._src.output.files import Metric, check_tensorboard, tensorboard


def scalars(folder: Path) -> tuple[dict[tuple[str, int], float], dict[int, float]]:
    """Value by name and round, and each round's time, of a folder's one file.

    A record is a length, its checksum, an event, its checksum.
    """
    (path,) = folder.iterdir()
    content, place, found, times = path.read_bytes(), 0, dict[tuple[str, int], float](), dict[int, float]()
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        event = Event.FromString(content[place + 12 : place + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        times |= {event.step: event.wall_time} if event.summary.value else {}
        place += length + 16
    return found, times


def metrics(seed: int, round_: int) -> list[Metric]:
    told = {"train": 0.5 + round_, "test": 0.25 + seed}
    sent = 10 * round_, 20 * round_, 0.5 * round_
    return [Metric(round_, "fed_avg", seed, s, "mse", value, *sent) for s, value in told.items()]


def test_every_evaluation_of_every_seed_is_there_once(tmp_path: Path) -> None:
    for _ in range(2):  # a run that is resumed tells all again
        with tensorboard(tmp_path) as write:
            for seed in (0, 3):
                for round_ in (0, 2):
                    write(metrics(seed, round_))
                    assert len(scalars(tmp_path / "tensorboard" / f"seed-{seed}")[0]) == 2 * (2 + round_)  # at once
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["seed-0", "seed-3"]
    for seed in (0, 3):
        found, times = scalars(tmp_path / "tensorboard" / f"seed-{seed}")
        assert times[2] - times[0] == pytest.approx(1.0)
        expected = {(f"{m.split}/{m.metric}", r): m.value for r in (0, 2) for m in metrics(seed, r)}
        sent = {(f"bytes/{way}link", r): n * r for way, n in (("up", 10), ("down", 20)) for r in (0, 2)}
        assert found == expected | sent


def test_without_tensorboardx_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tensorboard()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^log: got tensorboard, but tensorboardX is not installed: pip install "):
        check_tensorboard()
