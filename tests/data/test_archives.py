"""Archives of images in the user's folder: what is read, and what is refused."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import load
from fedtangent._src.data.sources import cifar as sources_cifar

RNG = np.random.default_rng(0)
FILES = sources_cifar.CIFAR10.files


def femnist(folder: Path, **changes: np.ndarray) -> dict[str, np.ndarray]:
    held = {
        "train_images": RNG.integers(0, 256, (9, 28, 28), np.uint8),
        "train_labels": np.array([3, 40, 9, 10, 0, 61, 7, 1, 2]),
        "train_offsets": np.array([0, 4, 6, 9]),
        "test_images": RNG.integers(0, 256, (3, 28, 28), np.uint8),
        "test_labels": np.array([12, 5, 6]),
    } | changes
    np.savez(folder / "femnist_sample.npz", **{k: v for k, v in held.items() if v.size})  # type: ignore[arg-type]
    return held


def cifar(folder: Path, with_test: bool) -> dict[str, np.ndarray]:
    held = {"train_images": RNG.integers(0, 256, (10, 32, 32, 3), np.uint8), "train_labels": np.arange(10)}
    if with_test:
        held |= {"test_images": RNG.integers(0, 256, (4, 32, 32, 3), np.uint8), "test_labels": np.arange(4)}
    np.savez(folder / "cifar10_part.npz", **held)  # type: ignore[arg-type]
    return held


def test_femnist_keeps_digits_and_their_writers(tmp_path: Path) -> None:
    held = femnist(tmp_path)
    found = load("femnist_digits", data_dir=tmp_path)
    kept = [0, 2, 4, 6, 7, 8]
    assert list(found.y_train) == [3, 9, 0, 7, 1, 2] and list(found.y_test) == [5, 6]
    assert found.user_train is not None and list(found.user_train) == [0, 0, 1, 2, 2, 2] and found.user_test is None
    femnist(tmp_path, test_offsets=np.array([0, 1, 2, 3]))
    assert list(load("femnist_digits", data_dir=tmp_path).user_test) == [1, 2]
    femnist(tmp_path, test_offsets=np.array([0, 0, 3, 3]))  # the first and the last writer have none to test
    assert list(load("femnist_digits", data_dir=tmp_path).user_test) == [1, 1]
    with pytest.raises(ValueError, match="got 3 writers to train and 2 to test"):
        femnist(tmp_path, test_offsets=np.array([0, 2, 3]))
        load("femnist_digits", data_dir=tmp_path)
    held = femnist(tmp_path)
    found = load("femnist_digits", data_dir=tmp_path)
    ink = 1 - held["train_images"][kept][..., None] / 255
    np.testing.assert_allclose(found.x_train, ink, atol=1e-7)
    assert found.x_train.dtype == np.float32 and found.num_classes == 10
    assert load("femnist_digits", data_dir=tmp_path, flatten=True, num_train=2).x_train.shape == (2, 784)


def test_femnist_is_found_in_a_folder_named_after_its_source(tmp_path: Path) -> None:
    (tmp_path / "femnist_leaf").mkdir()
    femnist(tmp_path / "femnist_leaf")
    assert len(load("femnist_digits", data_dir=tmp_path).y_train) == 6


@pytest.mark.parametrize("with_test", [True, False])
def test_cifar10_takes_the_last_fifth_to_test_on_where_there_is_no_test_set(tmp_path: Path, with_test: bool) -> None:
    (tmp_path / "cifar10").mkdir()
    held = cifar(tmp_path / "cifar10", with_test)
    found = load("cifar10", data_dir=tmp_path, dtype="float64")
    x = held["train_images"] / 255
    np.testing.assert_allclose(found.x_train, x if with_test else x[:8])
    np.testing.assert_allclose(found.x_test, held["test_images"] / 255 if with_test else x[8:])
    assert list(found.y_test) == ([0, 1, 2, 3] if with_test else [8, 9])


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cifar10: .* has no cifar-10-binary.tar.gz, nor folder .*, nor cifar10\*.npz"
    ):
        load("cifar10", data_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"femnist: data directory .* has no emnist_all.sqlite.lzma, nor femnist\*.npz"
    ):
        load("femnist_digits", data_dir=tmp_path)
    femnist(tmp_path, test_labels=np.array([], int))
    with pytest.raises(ValueError, match="has no test_labels; it has train_images"):
        load("femnist_digits", data_dir=tmp_path)


BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def binary(folder: Path, monkeypatch: pytest.MonkeyPatch, each: int = 3) -> tuple[np.ndarray, list[int]]:
    """The six files of the binary version with ``each`` records, written byte by byte, and what they hold."""
    monkeypatch.setitem(sources_cifar.RECORDS, "cifar10", each)
    folder.mkdir(parents=True)
    x, y = RNG.integers(0, 256, (6 * each, 32, 32, 3), np.uint8), [(7 * i) % 10 for i in range(6 * each)]
    for b, name in enumerate(BATCHES):
        content = bytearray()
        for i in range(b * each, (b + 1) * each):
            content.append(y[i])
            for colour in range(3):
                for row in range(32):
                    content += bytes(int(value) for value in x[i, row, :, colour])
        (folder / name).write_bytes(content)
    return x, y


def packed(folder: Path, to: Path) -> None:
    with tarfile.open(to, "w:gz") as file:
        file.add(folder, arcname="cifar-10-batches-bin")


def test_cifar10_is_read_from_its_original_binary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar(tmp_path, False)  # a part of it, which the originals stand before
    x, y = binary(tmp_path / "cifar10" / "cifar-10-batches-bin", monkeypatch)
    found = load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(np.rint(np.concatenate([found.x_train, found.x_test]) * 255), x)
    assert list(found.y_train) == y[:15] and list(found.y_test) == y[15:] and found.x_test.shape == (3, 32, 32, 3)
    assert found.info.read_from == str(tmp_path / "cifar10")
    assert len(load("cifar10", data_dir=tmp_path, num_train=7).x_train) == 7


def test_cifar10_is_read_from_its_original_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = binary(tmp_path / "elsewhere" / "cifar-10-batches-bin", monkeypatch)
    path = tmp_path / "cifar-10-binary.tar.gz"
    packed(tmp_path / "elsewhere" / "cifar-10-batches-bin", path)
    with pytest.raises(
        ValueError,
        match=r"tar\.gz is not the published cifar-10-binary\.tar\.gz: its sha256 is .*, expected c4a38c50",
    ):
        load("cifar10", data_dir=tmp_path)
    told = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(FILES, "archive", FILES["archive"]._replace(sha256=told))
    found = load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(np.rint(found.x_train * 255), x[:15])
    np.testing.assert_array_equal(np.rint(found.x_test * 255), x[15:])
    assert list(found.y_train) == y[:15] and list(found.y_test) == y[15:]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="is not the published cifar"):
        load("cifar10", data_dir=tmp_path)


def test_original_files_of_cifar10_that_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    binary(folder, monkeypatch)
    (folder / BATCHES[2]).unlink()
    with pytest.raises(ValueError, match=r"cifar10: .*data_batch_3\.bin cannot be read: .*No such file"):
        load("cifar10", data_dir=tmp_path)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.add(folder / BATCHES[0], arcname=BATCHES[0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cifar-10-binary.tar.gz").write_bytes(buffer.getvalue())
    told = hashlib.sha256(buffer.getvalue()).hexdigest()
    monkeypatch.setitem(FILES, "archive", FILES["archive"]._replace(sha256=told))
    with pytest.raises(ValueError, match=r"tar\.gz cannot be read: .*data_batch_1\.bin"):
        load("cifar10", data_dir=tmp_path / "other")
