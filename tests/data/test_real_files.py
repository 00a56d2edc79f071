"""The real files, where FEDTANGENT_DATA names a folder that has them (the fixture ``data_dir`` deselects otherwise)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedtangent._src.data import load, partition
from fedtangent._src.data.images import StoredImageOptions
from fedtangent._src.data.sources import mnist, shakespeare
from fedtangent._src.data.stored import obtain
from fedtangent._src.experiments.ntk_fl.fig4 import WRITERS
from fedtangent._src.types import Partition

SOURCES = {"mnist": mnist.MNIST, "fashion_mnist": mnist.FASHION_MNIST}
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}
MOMENTS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}  # of the training pixels, as widely quoted


@pytest.mark.parametrize("name", SOURCES)
def test_original_files(name, data_dir):
    d = load(name, data_dir=data_dir)
    assert (
        d.x_train.shape == (60000, 28, 28, 1) and d.x_test.shape == (10000, 28, 28, 1) and d.x_train.dtype == np.float32
    )
    assert d.y_train[:10].tolist() == FIRST_LABELS[name]
    assert d.x_train.min() == 0 and d.x_train.max() == 1
    assert np.bincount(d.y_test).sum() == 10000 and len(np.bincount(d.y_train)) == 10
    # pixels in the files' order: back in bytes they are the published file after its header of 16 bytes
    raw = np.rint(d.x_train * 255).astype(np.uint8).tobytes()
    header = bytes.fromhex("00000803" + "0000ea60" + "0000001c" * 2)
    assert hashlib.sha256(header + raw).hexdigest() == SOURCES[name].files["x_train"].sha256_unpacked
    mean, deviation = MOMENTS[name]
    standard = load(name, data_dir=data_dir, standardise=True, dtype=np.float64, num_train=100)
    np.testing.assert_allclose(standard.x_train * deviation + mean, d.x_train[:100], atol=3e-4)


@pytest.mark.parametrize("name", SOURCES)
def test_one_name_does_not_take_the_others_files(name, data_dir):
    (other,) = set(SOURCES) - {name}
    with pytest.raises(ValueError, match=f"{other}: .* is not the published"):
        load(other, data_dir=data_dir / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_through_tfds(name, data_dir, seed_tfds, monkeypatch, tmp_path):
    source = SOURCES[name]
    direct, _ = obtain(source, StoredImageOptions(), data_dir)
    seed_tfds(source, data_dir / name, tmp_path / "tfds")
    monkeypatch.delenv("FEDTANGENT_DATA")
    prepared, _ = obtain(source, StoredImageOptions(cache_dir=tmp_path / "cache", tfds_dir=tmp_path / "tfds"), None)
    cached, read_from = obtain(
        source, StoredImageOptions(cache_dir=tmp_path / "cache", tfds_dir=tmp_path / "nowhere"), None
    )
    assert read_from == tmp_path / "cache" / name
    for role, array in direct.items():
        np.testing.assert_array_equal(prepared[role], array)
        np.testing.assert_array_equal(cached[role], array)


def test_client_maps_of_the_ntk_fl_authors(data_dir):
    """The maps' label statistics are those of one ``alpha`` per class, the meaning ``dirichlet`` gives it by default.

    Each client's shares are Dir(alpha, .., alpha) over ten classes and its labels a multinomial draw. Only the second
    moment has a closed form: E sum_c share_c^2 = E q^2 (1 - 1/n) + 1/n with E q^2 = (alpha + 1) / (10 alpha + 1).
    Had ``alpha`` been divided among the classes (``method="hsu"``), it would be far away.
    """
    labels = load("fashion_mnist", data_dir=data_dir).y_train
    with np.load(data_dir / "ntk_fed_partitions" / "fmnist300.npz") as maps:
        for alpha in (0.1, 0.2, 0.3, 0.4, 0.5):
            squares = []
            for i in range(5):
                name = f"a{alpha}_{i}"
                given = partition.of(Partition(maps[f"{name}/indices"], maps[f"{name}/offsets"]), 60000)
                with pytest.raises(ValueError, match="exactly one client"):
                    partition.validate(given, 60000, exact=True)  # clients overlap
                shares = partition.heterogeneity(given, labels).label_distribution
                squares.append((shares**2).sum(axis=1))
            sample, n = np.concatenate(squares), 196
            error = sample.std() / np.sqrt(sample.size)

            def expected(a: float, n: int = n) -> float:
                return (a + 1) / (10 * a + 1) * (1 - 1 / n) + 1 / n

            assert abs(sample.mean() - expected(alpha)) < 4 * error
            assert abs(sample.mean() - expected(alpha / 10)) > 20 * error
        exact = partition.of(Partition(maps["iid_0/indices"], maps["iid_0/offsets"]))
    partition.validate(exact, 60000, exact=True)
    assert set(exact.sizes) == {200}


def test_fig4a_has_as_many_clients_as_there_are_writers_of_digits(data_dir):
    if not list(data_dir.glob("femnist*/*.npz")):
        pytest.skip("no FEMNIST in the data folder")
    assert len(np.unique(load("femnist_digits", data_dir=data_dir).user_train)) == WRITERS.num_clients


def test_the_six_printers(data_dir):
    if not list(data_dir.glob("printer*/*.csv")):
        pytest.skip("no printers in the data folder")
    d, packed = load("printers", data_dir=data_dir), data_dir / "printer_vibration" / "printer_vibration.npz"
    assert d.x_train.shape == (990, 7) and d.x_test.shape == (90, 7)
    with np.load(packed) as archive:
        whole = archive["data"]
    np.testing.assert_array_equal(d.y_test.reshape(6, 15), np.hypot(whole[:, 2, :, 1], whole[:, 2, :, 2]))
    np.testing.assert_allclose(d.x_test[:, 0].reshape(6, 15) * 50, whole[:, 2, :, 0], rtol=1e-15)
    assert d.user_train.tolist() == np.repeat(range(6), 165).tolist() == d.x_train[:, 1:].argmax(axis=1).tolist()


def test_roles_and_the_tiny_text(data_dir):
    if not list(data_dir.glob("shakespeare*/*.npz")):
        pytest.skip("no Shakespeare in the data folder")
    d = load("shakespeare", data_dir=data_dir)
    with np.load(next(data_dir.glob("shakespeare*/*.npz"))) as archive:
        sizes = np.diff(archive["offsets"])
        first = bytes(archive["text"][:81]).decode()
    kept = sum(size - round(0.8 * size) > 80 for size in sizes)
    assert d.user_train.max() + 1 == d.user_test.max() + 1 == kept
    assert "".join(shakespeare.CHARACTERS[i] for i in d.x_train[0]) + shakespeare.CHARACTERS[d.y_train[0]] == first
    tiny = load("tiny_shakespeare", data_dir=data_dir, stride=1)
    assert len(tiny.y_train) == int(0.9 * 1115394) - 80 and tiny.num_classes == 65


def test_femnist_of_all_characters(data_dir):
    if not list(data_dir.glob("femnist*/*.npz")):
        pytest.skip("no FEMNIST in the data folder")
    d = load("femnist", data_dir=data_dir)
    assert d.num_classes == 62 and set(d.y_train) <= set(range(62)) and d.y_train.max() > 35
    assert (len(d.y_train), len(d.y_test)) == (14640, 1677)
    assert set(d.user_train) == set(d.user_test) == set(range(105))
