"""Archives of images in the user's folder: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent.data import load

RNG = np.random.default_rng(0)


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
    femnist(tmp_path, test_offsets=np.array([0, 2, 2, 3]))
    assert list(load("femnist_digits", data_dir=tmp_path).user_test) == [0, 2]
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


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTANGENT_DATA", raising=False)
    with pytest.raises(ValueError, match=r"cifar10: needs its archive cifar10\*.npz: name its folder"):
        load("cifar10")
    with pytest.raises(ValueError, match=r"femnist_digits: data directory .* has no femnist\*.npz"):
        load("femnist_digits", data_dir=tmp_path)
    femnist(tmp_path, train_offsets=np.array([0, 4, 6, 8]))
    with pytest.raises(ValueError, match=r"train_offsets of .* do not divide the training images"):
        load("femnist_digits", data_dir=tmp_path)
    femnist(tmp_path, test_labels=np.array([], int))
    with pytest.raises(ValueError, match="has no test_labels; it has train_images"):
        load("femnist_digits", data_dir=tmp_path)
    femnist(tmp_path, train_images=RNG.integers(0, 256, (9, 27, 28), np.uint8))
    with pytest.raises(ValueError, match=r"got uint8 \(9, 27, 28\) .* must be uint8 \[n, 28, 28\] and \[n\]"):
        load("femnist_digits", data_dir=tmp_path)
    (tmp_path / "cifar10_part.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ValueError, match=r"cifar10: .* cannot be read"):
        load("cifar10", data_dir=tmp_path)
