"""Files as their publishers made them: tiny ones that the tests write, and the real ones below FEDTANGENT_DATA."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import load, partition
from fedtangent._src.types import Partition

from .originals import PUBLISHED, write

NAMES = ("mnist", "fashion_mnist")
MOMENTS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}  # of the training pixels, as widely quoted
ALPHAS, DRAWS, NUM_CLIENTS, CLIENT_SIZE = (0.1, 0.2, 0.3, 0.4, 0.5), 5, 300, 196
REAL = Path(os.environ["FEDTANGENT_DATA"]).resolve(strict=True) if os.environ.get("FEDTANGENT_DATA") else None


@pytest.fixture(params=["tiny", *([pytest.param("real", marks=pytest.mark.slow)] if REAL else [])])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real ones, which are large, are read by night; by day the tiny ones are held to the same."""
    if request.param == "real" and REAL is not None:
        return REAL
    for name in NAMES:
        write(name, tmp_path / name, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_those_of_the_file_in_its_order(name: str, folder: Path) -> None:
    data = load(name, data_dir=folder)
    (path,) = (folder / name).glob(PUBLISHED[name].files["x_train"].filename + "*")
    raw = gzip.decompress(path.read_bytes())
    assert raw[16:] == np.rint(data.x_train * 255).astype(np.uint8).tobytes()
    assert data.x_train.shape[1:] == (28, 28, 1) and data.x_train.dtype == np.float32
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    mean, deviation = MOMENTS[name] if folder == REAL else (data.x_train.mean(), data.x_train.std())
    standard = load(name, data_dir=folder, standardise=True, dtype=np.float64, num_train=10)
    np.testing.assert_allclose(standard.x_train * deviation + mean, data.x_train[:10], atol=3e-4)


@pytest.mark.parametrize("name", NAMES)
def test_one_name_does_not_take_the_others_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, tmp_path / name, monkeypatch)  # the other's checksums stay those of its publisher
    (other,) = set(NAMES) - {name}
    with pytest.raises(ValueError, match=f"{other}: .* is not the published"):
        load(other, data_dir=tmp_path / name)


def tiny_maps() -> tuple[np.ndarray, dict[str, Partition]]:
    """Labels, and clients that overlap: each draws its classes' shares, its labels and its examples by itself."""
    rng, labels, maps = np.random.default_rng(0), np.arange(2000) % 10, {}
    for alpha in ALPHAS:
        for i in range(DRAWS):
            counts = rng.multinomial(CLIENT_SIZE, rng.dirichlet([alpha] * 10, NUM_CLIENTS))
            examples = [10 * rng.permutation(200)[:k] + c for row in counts for c, k in enumerate(row)]
            offsets = CLIENT_SIZE * np.arange(NUM_CLIENTS + 1)
            maps[f"a{alpha}_{i}"] = Partition(np.concatenate(examples), offsets)
    maps["iid_0"] = Partition(rng.permutation(2000), np.arange(0, 2001, 200))
    return labels, maps


def real_maps(folder: Path) -> tuple[np.ndarray, dict[str, Partition]]:
    """The labels of Fashion-MNIST, and the clients of NTK-FL's authors."""
    names = [*(f"a{alpha}_{i}" for alpha in ALPHAS for i in range(DRAWS)), "iid_0"]
    with np.load(folder / "ntk_fed_partitions" / "fmnist300.npz") as arrays:
        maps = {name: Partition(arrays[f"{name}/indices"], arrays[f"{name}/offsets"]) for name in names}
    return load("fashion_mnist", data_dir=folder).y_train, maps


@pytest.mark.parametrize("maps_of", [tiny_maps, *([lambda: real_maps(REAL)] if REAL else [])])
def test_label_statistics_are_those_of_one_alpha_per_class(maps_of) -> None:
    """It is the meaning of ``alpha`` in the maps of NTK-FL's authors, and that of ``dirichlet`` by default.

    Each client's shares are Dir(alpha, .., alpha) over ten classes and its labels a multinomial draw. Only the second
    moment has a closed form: E sum_c share_c^2 = E q^2 (1 - 1/n) + 1/n with E q^2 = (alpha + 1) / (10 alpha + 1).
    Had ``alpha`` been divided among the classes (``method="hsu"``), it would be far away.
    """
    labels, maps = maps_of()

    def expected(alpha: float) -> float:
        return (alpha + 1) / (10 * alpha + 1) * (1 - 1 / CLIENT_SIZE) + 1 / CLIENT_SIZE

    for alpha in ALPHAS:
        squares = []
        for i in range(DRAWS):
            clients = partition.of(maps[f"a{alpha}_{i}"], len(labels))
            with pytest.raises(ValueError, match="exactly one client"):
                partition.validate(clients, len(labels), exact=True)  # clients overlap
            shares = partition.heterogeneity(clients, labels).label_distribution
            squares.append((shares**2).sum(axis=1))
        sample = np.concatenate(squares)
        error = sample.std() / np.sqrt(sample.size)
        assert abs(sample.mean() - expected(alpha)) < 4 * error
        assert abs(sample.mean() - expected(alpha / 10)) > 20 * error
    iid = partition.of(maps["iid_0"])
    partition.validate(iid, len(labels), exact=True)
    assert set(iid.sizes) == {200}
