"""Random convolutions against loops over patches, what they are worth, and how features are kept."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedtangent._src.data import load
from fedtangent._src.data.features import Features, convolution, random_convolution, with_features

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 7, 9, 2), np.uint8)


def reference(images: np.ndarray, filters: int, seed: int, size: int, grid: int, **wrong: Any) -> np.ndarray:
    """One patch after another in float64, from the docstring; the draws are those of ``jax.random`` in float32."""
    with jax.enable_x64(False):
        keys = jax.random.split(jax.random.key(seed))
        w = np.asarray(jax.random.normal(keys[0], (size, size, images.shape[-1], filters)), np.float64)
        b = np.asarray(jax.random.normal(keys[1], (filters,)), np.float64)
    w = w.reshape(-1, filters)
    if not wrong.get("filters_keep_their_mean"):
        w = w - w.mean(axis=0)
    found = []
    for image in images / 255:
        down, across = image.shape[0] - size + 1, image.shape[1] - size + 1
        responses = np.zeros((down, across, filters))
        for i, j in itertools.product(range(down), range(across)):
            patch = image[i : i + size, j : j + size].ravel()
            spread = patch.var() + wrong.get("smoothing", 1e-3)
            z = patch / np.sqrt(spread) if wrong.get("mean_stays") else (patch - patch.mean()) / np.sqrt(spread)
            responses[i, j] = np.maximum(z @ w / np.sqrt(len(z)) - b, 0)
        cells = [np.array_split(np.arange(n), grid) for n in (down, across)]
        found.append([responses[np.ix_(r, c)].mean(axis=(0, 1)) for r, c in itertools.product(*cells)])
    return np.array(found).reshape(len(images), -1)


def test_against_loops() -> None:
    found = random_convolution(IMAGES, 45, seed=4, filter_size=3, grid=3)
    expected = reference(IMAGES, 5, 4, 3, 3)
    assert found.values.shape == (3, 45) and found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    assert expected.std() > 0.1
    for wrong in ({"smoothing": 0.0}, {"smoothing": 2e-3}, {"mean_stays": True, "filters_keep_their_mean": True}):
        assert np.abs(found.values - reference(IMAGES, 5, 4, 3, 3, **wrong)).max() > 1e-3, wrong
    assert np.abs(found.values - reference(IMAGES, 5, 5, 3, 3)).max() > 0.1
    again = random_convolution((IMAGES / 255).astype(np.float32), 45, seed=4, filter_size=3, grid=3)
    np.testing.assert_array_equal(again.values, found.values)
    np.testing.assert_allclose(
        random_convolution(IMAGES / 255, 6, 1, 7, 1).values, reference(IMAGES, 6, 1, 7, 1), atol=1e-5
    )


def test_they_are_worth_more_than_pixels() -> None:
    from sklearn.linear_model import RidgeClassifier

    digits = load("digits")
    better = with_features(digits, functools.partial(random_convolution, num_features=512, filter_size=3))
    assert better.kind == "vector" and better.input_shape == (512,) and better.x_train.dtype == np.float32
    assert digits.info.source in better.info.source and "512 features" in better.info.source
    np.testing.assert_allclose(better.x_train.mean(axis=0), 0, atol=1e-6)
    spread = better.x_train.std(axis=0)
    np.testing.assert_allclose(spread[spread > 0], 1, rtol=1e-5)
    assert (spread > 0).mean() > 0.9 and np.abs(better.x_test.mean(axis=0)).max() > 1e-3  # by the training images alone

    def accuracy(x: np.ndarray, x_test: np.ndarray) -> float:
        fitted = RidgeClassifier(alpha=30.0).fit(x.reshape(len(x), -1), digits.y_train)
        return float(fitted.score(x_test.reshape(len(x_test), -1), digits.y_test))

    pixels = with_features(digits, lambda x: Features(x.reshape(len(x), -1).astype(np.float32), "pixels"))
    assert accuracy(better.x_train, better.x_test) > 0.97 > 0.95 > accuracy(pixels.x_train, pixels.x_test)
    plain = with_features(digits, functools.partial(random_convolution, num_features=512, filter_size=3), False)
    assert plain.x_train.min() == 0 and "standardised" not in plain.info.source


def test_data_without_test_images_have_features() -> None:
    digits = load("digits", num_train=20, num_test=2)
    features = functools.partial(random_convolution, num_features=16, filter_size=3)
    with_test, without = (with_features(data, features) for data in (digits, digits._replace(x_test=digits.x_test[:0])))
    np.testing.assert_array_equal(without.x_train, with_test.x_train)
    assert without.x_test.shape == (0, 16) and without.x_test.dtype == np.float32


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Images of five blocks, of two batches each, the last one of one image."""
    monkeypatch.setattr(convolution, "BLOCK", 4)
    monkeypatch.setattr(convolution, "BATCH", 3)
    return RNG.integers(0, 256, (17, 4, 4, 1), np.uint8)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each block that is computed has."""
    seen: list[int] = []
    computed = convolution._computed

    def count(x: np.ndarray, *rest: Any) -> np.ndarray:
        seen.append(len(x))
        return computed(x, *rest)

    monkeypatch.setattr(convolution, "_computed", count)
    return seen


def test_blocks_and_batches_change_nothing(few: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    found = random_convolution(few, 8, filter_size=2, tick=lambda done, total: told.append((done, total)))
    assert told == [(done, 17) for done in (3, 4, 7, 8, 11, 12, 15, 16, 17)]
    monkeypatch.setattr(convolution, "BLOCK", 1000)
    np.testing.assert_allclose(random_convolution(few, 8, filter_size=2).values, found.values, atol=1e-6)


def test_what_was_computed_is_found_again_and_nothing_is_mixed(
    few: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = counted(monkeypatch)

    def features(x: np.ndarray = few, **options: Any) -> np.ndarray:
        given: dict[str, Any] = {"num_features": 8, "filter_size": 2, "folder": tmp_path / "kept"}
        return random_convolution(x, **(given | options)).values

    first = features()
    assert seen == [4, 4, 4, 4, 1]
    np.testing.assert_array_equal(features(), first)
    np.testing.assert_array_equal(features((few / 255).astype(np.float32)), first)  # the same images
    np.testing.assert_array_equal(features(few[:8]), first[:8])  # whole blocks of them
    assert len(seen) == 5
    changed = few.copy()
    changed[9, 1, 2, 0] ^= 1
    others = [features(changed), features(seed=1), features(grid=1), features(filter_size=3), features(num_features=16)]
    assert len(seen) == 5 + 1 + 4 * 5
    for other in others[:4]:
        assert other.shape != first.shape or not np.array_equal(other, first)
    np.testing.assert_array_equal(others[0], random_convolution(changed, 8, filter_size=2).values)
    np.testing.assert_array_equal(features(), first)
    features(folder=None)
    assert len(seen) == 5 + 1 + 4 * 5 + 2 * 5  # and twice without a folder


def test_kept_features_that_were_altered_are_refused(few: np.ndarray, tmp_path: Path) -> None:
    random_convolution(few, 8, filter_size=2, folder=tmp_path)
    file = sorted(tmp_path.glob("features-*/features.npy"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"features\.npy is corrupted: .* remove the folder"):
        random_convolution(few, 8, filter_size=2, folder=tmp_path)


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"num_features": 10, "grid": 3}, r"num_features: got 10, must be a multiple of grid\*\*2 = 9"),
        ({"filter_size": 8}, "filter_size: got 8, must be a whole number from 1 to 7"),
        ({"filter_size": 6, "grid": 3}, "grid: got 3, must be a whole number from 1 to 2"),
        ({"seed": -1}, "seed: got -1, must be a whole number from 0"),
        ({"folder": tmp_path / "file"}, "folder: got .*file for features, must be a folder that can be written"),
    ):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=message):
            random_convolution(IMAGES, **options)  # type: ignore[arg-type]
    for images, message in (
        (IMAGES[..., 0], r"images: got shape \(3, 7, 9\), dtype uint8, must be \[n, height, width, channels\]"),
        (IMAGES[:0], r"images: got shape \(0, 7, 9, 2\)"),
        (IMAGES / 255 - 0.5, "images: got values from -0.5 to 0.5, must be within 0 and 1"),
        (np.full((1, 8, 8, 1), np.nan), "images: got values from nan to nan"),
    ):
        with pytest.raises(ValueError, match=message):
            random_convolution(images)
    with pytest.raises(ValueError, match="dataset: got digits of kind vector, must be of kind image"):
        with_features(load("digits", flatten=True, num_train=2, num_test=2), random_convolution)
    names = iter("ab")
    with pytest.raises(ValueError, match="features: got 'a' of training and 'b' of test images, must be of one kind"):
        with_features(load("digits", num_train=2, num_test=2), lambda x: Features(np.zeros((len(x), 1)), next(names)))
    if os.getuid() != 0:
        (tmp_path / "read_only").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="must be a folder that can be written to"):
            random_convolution(IMAGES, folder=tmp_path / "read_only")
