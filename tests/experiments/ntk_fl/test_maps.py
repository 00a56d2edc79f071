"""The authors' maps of clients: read from an archive, cut to the training examples, and trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import Dataset, SourceInfo
from fedtangent._src.experiments.lab import trials
from fedtangent._src.experiments.ntk_fl import baselines, maps
from fedtangent._src.experiments.ntk_fl.baselines import BaselineSettings

from ..performed import study_of

CLIENTS = ([5, 1, 3], [1, 9], [0, 3, 7, 11])  # they share images


def toy() -> Dataset:
    x = np.arange(12 * 4, dtype=np.float32).reshape(12, 2, 2, 1) / 48
    y = (np.arange(12) % 3).astype(np.int32)
    return Dataset("mnist", x, y, x[:4], y[:4], 3, None, SourceInfo("drawn here", "none", "generated"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "ntk_fed_partitions"
    place.mkdir()
    offsets = np.cumsum([0, *map(len, CLIENTS)])
    arrays = {"a0.1_0/indices": np.concatenate(CLIENTS).astype(np.int32), "a0.1_0/offsets": offsets}
    np.savez(place / "mnist300.npz", **arrays)
    return tmp_path


def test_clients_hold_the_images_of_the_map_that_train(folder: Path) -> None:
    clients = maps.authors_map(toy(), "a0.1_0", folder)
    assert [clients.client(i).tolist() for i in range(3)] == [list(rows) for rows in CLIENTS]
    rows = np.array([11, 3, 1, 0])  # the other images validate
    cut = maps.among(clients, rows, 12)
    assert [rows[cut.client(i)].tolist() for i in range(3)] == [[1, 3], [1], [0, 3, 11]]


def test_a_trial_has_these_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.ft.data, "load", lambda *_, **__: toy())
    settings = BaselineSettings(partition="given", map="a0.1_0", num_clients=3, num_validation=4)
    trial = baselines._divide("mnist", folder, 0, settings)
    held, labels = trials.partition_of(trial.data), np.asarray(trial.data.y)
    rows = trials.draw(toy(), 0, 0, 4, 0).rows["train"]
    for i, images in enumerate(CLIENTS):
        assert rows[held.client(i)].tolist() == [image for image in images if image in rows]
        assert labels[held.client(i)].tolist() == [image % 3 for image in images if image in rows]
    assert sum(held.sizes) < sum(map(len, CLIENTS))
    with pytest.raises(ValueError, match="num_clients: got 300, must be 3, the clients of"):
        baselines._divide("mnist", folder, 0, BaselineSettings(partition="given", map="a0.1_0", num_validation=4))


def test_bad_maps_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"map: got 'a0\.2_0', allowed are a0\.1_0"):
        maps.authors_map(toy(), "a0.2_0", folder)
    (tmp_path / "empty").mkdir()
    for place in (None, tmp_path / "empty"):
        with pytest.raises(ValueError, match=r"data_dir: got .*, must be a folder with mnist300\.npz"):
            maps.authors_map(toy(), "a0.1_0", place)
    few = toy()._replace(x_train=toy().x_train[:9])
    with pytest.raises(ValueError, match="map: got 9 for client 1, must be from 0 to 8"):
        maps.authors_map(few, "a0.1_0", folder)
    with pytest.raises(
        ValueError, match="partition: got 'given' for digits, must be another: there are maps of fashion_mnist"
    ):
        study_of("ntk_fl.fig4c", ("partition=given", "map=a0.5_0"))
    with pytest.raises(ValueError, match=r"map: got .*, must be left out without partition=given"):
        study_of("ntk_fl.fig4c", ("map=a0.5_0",))


def test_the_compressor_is_said() -> None:
    said = baselines._choices(study_of("ntk_fl.table1"))
    assert any("2% of an example's Jacobian with their places, in 16 bits" in line for line in said)
    assert not any("CP-NTK-FL:" in line for line in baselines._choices(study_of("ntk_fl.fig4c")))
