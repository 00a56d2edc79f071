from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.data import classification_targets, federated_data, max_client_size, sign_targets
from fedtangent._src.types import FederatedData, Partition

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])
PARTITION = Partition(np.array([0, 1, 2, 5, 3, 4, 0]), np.array([0, 3, 3, 7]))  # one empty client, one shared example


@pytest.fixture(params=[True, False], ids=["x64", "x32"])
def x64(request):
    before = jax.config.read("jax_enable_x64")
    jax.config.update(
        "jax_enable_x64",
        request.param,
    )
    yield request.param
    jax.config.update(
        "jax_enable_x64",
        before,
    )


def test_what_is_on_the_device(x64):
    data = federated_data(X, Y, PARTITION)
    assert isinstance(data, FederatedData) and all(isinstance(a, jax.Array) for a in data)
    assert data.x.dtype == (jnp.float64 if x64 else jnp.float32)
    assert data.y.dtype == data.indices.dtype == data.offsets.dtype == jnp.int32
    for got, given in zip(data, (X, Y, *PARTITION), strict=True):
        np.testing.assert_array_equal(got, given)
    assert data.num_clients == 3
    assert max_client_size(data) == 4 and type(max_client_size(data)) is int


def test_dtypes(x64):
    single, regression = X.astype(np.float32), X * 0.1
    assert federated_data(single, Y, PARTITION).x.dtype == jnp.float32
    pixels = federated_data(X.astype(np.uint8), Y, PARTITION).x
    assert pixels.dtype == jnp.float32  # and divided by 255, as in a data set
    np.testing.assert_array_equal(np.asarray(pixels), X.astype(np.uint8) / np.float32(255))
    np.testing.assert_array_equal(
        np.asarray(federated_data(X.astype(np.uint8), Y, PARTITION, "int32").x), X.astype(np.uint8)
    )
    assert federated_data(jnp.asarray(single, jnp.bfloat16), Y, PARTITION).x.dtype == jnp.float32
    # targets follow the inputs, whatever their own precision
    assert federated_data(single, regression, PARTITION).y.dtype == jnp.float32
    assert federated_data(X, single, PARTITION).y.dtype == (jnp.float64 if x64 else jnp.float32)
    assert federated_data(X, regression, PARTITION, dtype=jnp.float32).y.dtype == jnp.float32
    symbols = federated_data(X.astype(np.int64), regression, PARTITION, dtype="int32")
    assert symbols.x.dtype == jnp.int32 and symbols.y.dtype == jnp.float32
    assert federated_data(X, Y.astype(np.uint8), PARTITION).y.dtype == jnp.int32
    if x64:
        assert federated_data(single, Y, PARTITION, dtype=np.float64).x.dtype == jnp.float64
    else:
        with pytest.raises(
            ValueError,
            match=r"dtype: got float64, must be float32, or call fedtangent\.enable_x64",
        ):
            federated_data(single, Y, PARTITION, dtype=np.float64)


def put(array, at, value):
    array = np.array(array)
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": put(X, (4, 1), np.nan)}, r"x: got nan in row 4 \(1 of 6 rows not finite\), must be finite"),
        ({"x": put(X, (0, 0), -np.inf)}, r"x: got -inf in row 0 \(1 of 6 rows not finite\), must be finite"),
        ({"y": put(X, (5, 0), np.nan)}, r"y: got nan in row 5 \(1 of 6 rows not finite\), must be finite"),
        ({"y": put(X, (3, 0), np.inf)}, r"y: got inf in row 3 \(1 of 6 rows not finite\), must be finite"),
        (
            {"x": put(X, (0, 0), 1e300), "dtype": "float32"},
            "x: got values beyond the range of float32, must be rescaled, or dtype float64",
        ),
        (
            {"y": put(X, (0, 0), 1e300), "dtype": "float32"},
            "y: got values beyond the range of float32, must be rescaled, or dtype float64",
        ),
        ({"x": X.astype(complex)}, "x: got dtype .*, must be real numbers"),
        ({"x": X.astype(str)}, "x: got dtype .*, must be real numbers"),
        ({"x": X[:0], "y": Y[:0]}, "at least one example"),
        ({"x": np.float64(3)}, "at least one example"),
        ({"x": X[:5]}, r"x and y: got x \(5, 2\), y \(6,\), must be the same number of examples"),
        ({"y": np.int32(3)}, r"x and y: got x \(6, 2\), y \(\), must be the same number of examples"),
        ({"y": X[:, 0]}, r"use y\[:, None\] for one output"),
        ({"y": Y[:, None]}, r"y: got .*, must be \[n, C\] floating"),
        ({"y": X[:, :0]}, r"y: got .*, must be \[n, C\] floating"),
        ({"y": X[:, :, None]}, r"y: got .*, must be \[n, C\] floating"),
        ({"y": Y > 0}, r"y: got .*, must be \[n, C\] floating"),
        ({"y": put(Y, 2, -1)}, r"y: got -1 at position 2 \(1 such\), must be at least 0"),
        ({"num_classes": 2}, r"y: got 2 at position 2 \(2 such\), must be from 0 to 1"),
        ({"num_classes": 0}, "num_classes: got 0, must be a whole number of at least 1"),
        ({"dtype": "float16"}, "dtype: got 'float16', allowed are float32, float64, int32"),
        ({"dtype": "nonsense"}, "dtype: got 'nonsense', allowed are float32, float64, int32"),
        ({"dtype": "int32"}, "x: got float64, must be whole numbers for dtype int32"),
        ({"x": np.full((6, 2), 2**40), "dtype": "int32"}, "x: got values beyond the range of int32, must be within it"),
        ({"indices": put(PARTITION.indices, 3, 6)}, "partition: got 6 for client 2, must be from 0 to 5"),
        ({"indices": put(PARTITION.indices, 3, -1)}, "partition: got -1 for client 2, must be from 0 to 5"),
        ({"indices": PARTITION.indices + 0.0}, "partition.indices: got shape .*, must be a 1-D array of whole numbers"),
        (
            {"indices": PARTITION.indices[:, None]},
            "partition.indices: got shape .*, must be a 1-D array of whole numbers",
        ),
        ({"offsets": np.array([0, 4, 3, 7])}, r"partition.offsets: got \[4, 3\] at 1, must never fall"),
        ({"offsets": np.array([1, 3, 3, 7])}, "partition.offsets: got 1 to 7, must be from 0 to len.indices. = 7"),
        ({"offsets": np.array([0, 3, 3, 6])}, "got 0 to 6"),
        ({"offsets": np.array([0])}, r"partition\.offsets: got 1 entries, must be num_clients \+ 1, at least 2"),
        ({"offsets": np.array([0.0, 7.0])}, "partition.offsets: got shape .*, must be a 1-D array of whole numbers"),
    ],
)
def test_bad_input(changes, message):
    fields = {key: changes.pop(key) for key in ("indices", "offsets") if key in changes}
    arguments = {"x": X, "y": Y, "partition": PARTITION._replace(**fields), **changes}
    with pytest.raises(ValueError, match=message):
        federated_data(**arguments)


def test_classification_targets():
    labels = np.array([2, 0, 1, 2], np.uint8)
    hot = classification_targets(labels, 4)
    assert hot.dtype == np.float64
    np.testing.assert_array_equal(hot, [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    centred = classification_targets(jnp.asarray(labels), 4, centred=True)
    np.testing.assert_array_equal(centred, hot - 0.25)
    np.testing.assert_array_equal(centred.sum(axis=1), np.zeros(4))
    np.testing.assert_array_equal(sign_targets(labels[:2], 4), [[-1, -1, 1, -1], [1, -1, -1, -1]])


@pytest.mark.parametrize(
    ("labels", "num_classes", "message"),
    [
        ([0, 3], 3, "labels: got 3 at position 1"),
        ([-1, 0], 3, "got -1 at position 0"),
        ([0.0, 1.0], 3, r"labels: got shape \(.*, must be whole numbers \[n\], n >= 1"),
        ([[0, 1]], 3, r"labels: got shape \(.*, must be whole numbers \[n\], n >= 1"),
        ([True, False], 3, r"labels: got shape \(.*, must be whole numbers \[n\], n >= 1"),
        (np.zeros(0, int), 3, r"labels: got shape \(0,\), dtype int64, must be whole numbers \[n\], n >= 1"),
        ([0], 0, "num_classes: got 0, must be a whole number of at least 1"),
    ],
)
def test_bad_labels(labels, num_classes, message):
    with pytest.raises(ValueError, match=message):
        classification_targets(labels, num_classes)


def test_features_whose_differences_float32_rounds_away(x64):
    """Seconds since 1970 within an hour are 29 numbers in float32; without their mean they are as good as any."""
    seconds = 1.7e9 + np.linspace(0, 3600, 6)
    late = np.stack([X[:, 0], seconds], axis=1)
    assert len(np.unique((1.7e9 + np.linspace(0, 3600, 10_000)).astype(np.float32))) < 100
    if x64:
        np.testing.assert_array_equal(federated_data(late, Y, PARTITION).x, late)
    else:
        with pytest.raises(
            ValueError, match=r"x: got numbers from 1700000000 to 1700003600 at index \[1\] of the examples"
        ):
            federated_data(late, Y, PARTITION)
        with pytest.raises(ValueError, match="y: got numbers from"):
            federated_data(X, seconds[:, None], PARTITION)
    late[:, 1] -= seconds.mean()
    federated_data(late, Y, PARTITION)
    constant = np.full((6, 2), 0.1) * np.array([1, 1 + 1e-16, 1, 1, 1, 1])[:, None]
    federated_data(constant + 1e-17 * X, Y, PARTITION)  # what only float64's rounding makes different
