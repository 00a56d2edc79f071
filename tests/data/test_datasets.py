from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedtangent._src.data import load
from fedtangent._src.entries import catalogue

NAMES = tuple(catalogue("datasets"))


def test_registry():
    assert set(NAMES) >= {"cifar10", "digits", "fashion_mnist", "femnist_digits", "mnist", "sine"}
    for name in ("digits", "sine"):
        assert load(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, f"dataset: got 'digit', allowed are {', '.join(NAMES)}"),
        ("digits", {"gap": True}, "gap: got an option that digits does not have, allowed are num_train"),
        (
            "sine",
            {"num_train": 3},
            "num_train: got an option that sine does not have, allowed are num_users, points_per_user, gap",
        ),
        (
            "mnist",
            {"source": 3},
            "source: got an option that mnist does not have, allowed are num_train",
        ),
        ("digits", {"seed": -1}, "seed: got -1, must be a whole number from 0 to 4294967295"),
        ("sine", {"seed": 0.5}, r"seed: got 0\.5, must be a whole number from 0 to 4294967295"),
        ("digits", {"test_fraction": 1.0}, "test_fraction: got 1.0, must be above 0 and below 1"),
        ("digits", {"test_fraction": 0}, "test_fraction: got 0, must be above 0 and below 1"),
        ("digits", {"num_train": 1500}, "num_train: got 1500, must be a whole number from 1 to 1438"),
        ("digits", {"dtype": int}, "dtype: got 'int64', allowed are float32, float64"),
        ("sine", {"gap": "no"}, "gap: got 'no', must be True or False"),
        ("sine", {"gap": 1}, "gap: got 1, must be True or False"),
        ("digits", {"flatten": "no"}, "flatten: got 'no', must be True or False"),
        ("sine", {"num_users": 0}, "num_users: got 0, must be a whole number of at least 1"),
        ("sine", {"points_per_user": True}, "points_per_user: got True, must be a whole number of at least 1"),
        ("sine", {"test_points": 1}, "test_points: got 1, must be a whole number of at least 2"),
    ],
)
def test_bad_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def test_the_data_folder_reaches_the_loader(tmp_path):
    for name in ("mnist", "fashion_mnist"):
        with pytest.raises(ValueError, match=f"{name}: data directory .* has no train-images-idx3-ubyte.gz"):
            load(name, data_dir=tmp_path)
    assert load("sine", data_dir=tmp_path).info.read_from == "generated"  # needs no files, does not look


DIGITS_SHA256 = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"  # of the 1797 x 64 bytes


def test_digits_is_all_of_the_bundled_data_split_by_class():
    from sklearn.datasets import load_digits

    assert load("digits").input_shape == (8, 8, 1) and load("digits").kind == "image"
    d = load("digits", flatten=True)
    assert (d.kind, d.num_outputs) == ("vector", 10)
    assert d.x_train.shape == (len(d.y_train), 64) and d.x_test.shape == (len(d.y_test), 64)
    assert d.x_train.dtype == np.float64 and d.y_train.dtype == np.int32 and d.num_classes == 10
    both_x, both_y = np.concatenate([d.x_train, d.x_test]), np.concatenate([d.y_train, d.y_test])
    assert both_x.min() == 0 and both_x.max() == 1

    def multiset(x: np.ndarray, y: np.ndarray) -> list[tuple[int, ...]]:
        return sorted(map(tuple, np.concatenate([x, y[:, None]], axis=1).astype(int).tolist()))

    images, labels = load_digits(return_X_y=True)
    assert multiset(both_x * 16, both_y) == multiset(images, labels)
    assert hashlib.sha256(images.astype(np.uint8).tobytes()).hexdigest() == DIGITS_SHA256
    for c, total in enumerate(np.bincount(labels)):
        assert abs((d.y_test == c).sum() - 0.2 * total) <= 0.5
    # in random order, not class after class: neighbours differ about nine times in ten
    assert np.mean(d.y_train[1:] != d.y_train[:-1]) > 0.8


def test_digits_are_the_same_if_their_file_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load("digits")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    np.testing.assert_array_equal(load("digits").x_train, expected.x_train)


def test_digits_options_and_seeds():
    plain, again, other = load("digits"), load("digits", seed=0), load("digits", seed=1)
    np.testing.assert_array_equal(plain.x_train, again.x_train)
    np.testing.assert_array_equal(plain.y_test, again.y_test)
    assert not np.array_equal(plain.y_train, other.y_train)
    part = load("digits", num_train=100, num_test=10, dtype="float32")
    assert part.x_train.shape == (100, 8, 8, 1) and part.x_test.shape == (10, 8, 8, 1)
    assert part.x_train.dtype == np.float32
    np.testing.assert_array_equal(
        part.x_train.reshape(100, 64), plain.x_train[:100].reshape(100, 64)
    )  # sixteenths: exact in float32
    half = load("digits", test_fraction=0.5)
    assert abs(len(half.y_test) - 1797 / 2) <= 5
    tiny = load("digits", test_fraction=1e-9)  # never an empty side
    np.testing.assert_array_equal(np.bincount(tiny.y_test), np.ones(10))


def test_sine_is_the_papers_toy():
    d = load("sine")
    assert d.x_train.shape == d.y_train.shape == (100, 1) and d.x_train.dtype == np.float64
    np.testing.assert_array_equal(d.user_train, np.repeat(np.arange(50), 2))
    assert (d.num_classes, d.num_outputs, d.input_shape, d.kind) == (0, 1, (1,), "vector")
    np.testing.assert_array_equal(d.y_test, np.sin(2 * np.pi * d.x_test))
    assert d.x_test[0] == -1 and d.x_test[-1] == 1 and len(d.x_test) == 200
    np.testing.assert_array_equal(d.y_train, load("sine", seed=0).y_train)
    assert not np.array_equal(d.y_train, load("sine", seed=1).y_train)


def test_sine_against_plain_python():
    import math

    rng = np.random.Generator(np.random.PCG64(3))
    amplitude = [float(a) for a in rng.normal(1.0, 0.2, 4)]
    points = [float(x) for x in rng.uniform(-1, 1, 12)]
    noise = [float(e) for e in rng.normal(0.0, 0.2, 12)]
    expected = [
        amplitude[i // 3] * math.sin(2 * math.pi * x) + e for i, (x, e) in enumerate(zip(points, noise, strict=True))
    ]
    d = load("sine", seed=3, num_users=4, points_per_user=3)
    np.testing.assert_array_equal(d.x_train[:, 0], points)
    np.testing.assert_allclose(d.y_train[:, 0], expected, atol=1e-14)


def test_sine_has_the_papers_moments():
    """By client least squares: amplitudes N(1, .2^2), noise N(0, .2^2), points uniform; within 4 standard errors."""
    n, p = 2000, 20
    d = load("sine", num_users=n, points_per_user=p)
    x, y = d.x_train.reshape(n, p), d.y_train.reshape(n, p)
    s = np.sin(2 * np.pi * x)
    fitted = (s * y).sum(1) / (s * s).sum(1)
    residual = ((y - fitted[:, None] * s) ** 2).sum(1) / (p - 1)  # unbiased for .04
    spread = (fitted - 1) ** 2 - 0.04 / (s * s).sum(1)  # unbiased for .04
    for sample, truth in ((fitted, 1.0), (residual, 0.04), (spread, 0.04), (x.ravel() ** 2, 1 / 3), (x.ravel(), 0.0)):
        error = np.std(sample) / np.sqrt(sample.size)
        assert abs(np.mean(sample) - truth) < 4 * error
        assert abs(np.mean(sample) - truth - 0.25 * np.std(sample)) > 4 * error  # the test could have failed


def test_sine_with_a_gap():
    d = load("sine", gap=True, num_users=1000, points_per_user=4)
    x = np.abs(d.x_train[:, 0])
    assert x.min() >= 0.5 and x.max() <= 1
    assert (load("sine", num_users=1000, points_per_user=4).x_train ** 2 < 0.25).any()  # without the gap
    for sample, truth in ((x, 0.75), (x**2, 7 / 12), (np.sign(d.x_train), 0.0)):
        assert abs(np.mean(sample) - truth) < 4 * np.std(sample) / np.sqrt(sample.size)
    assert d.x_test.min() == -1 and (np.abs(d.x_test) < 0.5).any()  # tested on the entire domain
