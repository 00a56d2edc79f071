"""A user's own ``.npz`` file as a data set."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.data import federated_data, load, own, partition

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 3)).astype(np.float32)
Y = np.arange(20) % 4


def saved(folder: Path, **arrays: Any) -> str:
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("x", "kind", "shape", "dtype"),
    [
        (X, "vector", (3,), np.float32),
        (X.astype(np.float64), "vector", (3,), np.float64),
        (RNG.integers(0, 256, (20, 5), dtype=np.uint8), "vector", (5,), np.float32),
        (RNG.integers(0, 256, (20, 8, 7), dtype=np.uint8), "image", (8, 7, 1), np.float32),
        (RNG.random((20, 8, 7, 3)), "image", (8, 7, 3), np.float64),
        (RNG.integers(0, 9, (20, 6)), "tokens", (6,), np.int32),
        (RNG.integers(0, 9, (20, 6), dtype=np.int8), "tokens", (6,), np.int32),
    ],
)
def test_the_kind_is_read_from_dtype_and_shape(
    tmp_path: Path, x: np.ndarray, kind: str, shape: tuple, dtype: Any
) -> None:
    name = saved(tmp_path, x=x, y=Y, x_test=x[:4], y_test=Y[:4])
    found, entry = load(name), own.entry(name)
    assert (found.kind, found.input_shape, found.x_train.dtype, found.name) == (kind, shape, dtype, name)
    assert entry.kind == kind and not entry.is_regression and entry.partition == "dirichlet"
    expected = x / 255 if x.dtype == np.uint8 else x
    np.testing.assert_allclose(found.x_train.reshape(20, -1), expected.reshape(20, -1), rtol=1e-6)
    np.testing.assert_array_equal(found.x_test, found.x_train[:4])
    assert found.y_test.tolist() == Y[:4].tolist() and found.num_classes == (9 if kind == "tokens" else 4)
    assert found.info.read_from == str(tmp_path)


def test_numbers_are_a_regression(tmp_path: Path) -> None:
    name = saved(tmp_path, x=X, y=X[:, 0])
    found, entry = load(name, test_fraction=0.25), own.entry(name)
    assert found.num_classes == 0 and found.y_train.shape == (15, 1) and found.y_test.shape == (5, 1)
    assert entry.is_regression and entry.partition == "iid"
    np.testing.assert_array_equal(found.y_train[:, 0], found.x_train[:, 0])  # rows stay together
    rows = {tuple(row) for row in np.concatenate([found.x_train, found.x_test])}
    assert rows == {tuple(row) for row in X}
    assert (load(name, seed=1).x_test != load(name).x_test).any()
    np.testing.assert_array_equal(load(name).x_test, load(name).x_test)
    assert load(saved(tmp_path, x=X, y=X[:, :2])).num_outputs == 2


@pytest.mark.parametrize("users", [np.repeat([7, 3, 5, 11], 5), np.repeat(["d", "a", "b", "é"], 5)])
def test_users_train_and_test(tmp_path: Path, users: np.ndarray) -> None:
    name = saved(tmp_path, x=X, y=Y, users=users)
    found = load(name)
    assert own.entry(name).partition == "by_user" and found.user_train is not None and found.user_test is not None
    assert np.bincount(found.user_train).tolist() == [4] * 4 and np.bincount(found.user_test).tolist() == [1] * 4
    names = np.unique(users)
    for x, user in ((found.x_train, found.user_train), (found.x_test, found.user_test)):
        for row, i in zip(x, user, strict=True):
            assert users[np.flatnonzero((row == X).all(axis=1))[0]] == names[i]
    clients = partition.by_user(found.user_train)
    assert clients.num_clients == 4
    given = load(saved(tmp_path, x=X, y=Y, users=users, x_test=X[:2], y_test=Y[:2], users_test=users[[0, 9]]))
    assert given.user_test.tolist() == np.searchsorted(names, users[[0, 9]]).tolist()
    one = load(saved(tmp_path, x=X, y=Y, users=[0] * 19 + [1]), test_fraction=0.9)
    assert one.user_train.tolist().count(1) == 1  # a user of one example trains on it


BAD = {
    "no x": ({"y": Y}, "has no x; it has y"),
    "lengths": ({"x": X, "y": Y[:-1]}, r"x and y: got float32 \(20, 3\) and \(19,\) .* must go together"),
    "scalar": ({"x": np.float32(1), "y": Y}, r"x: got float32 \(\)"),
    "objects": ({"x": np.array([[{}]] * 20, object), "y": Y}, "x.npy holds Python objects"),
    "object targets": ({"x": X, "y": np.array([None] * 20, object)}, "y.npy holds Python objects"),
    "complex": ({"x": X.astype(complex), "y": Y}, r"x: got complex128 \(20, 3\)"),
    "one axis": ({"x": X[:, 0], "y": Y}, r"x: got float32 \(20,\)"),
    "not finite": ({"x": X * np.nan, "y": Y}, "x: got nan at entry .* must be finite"),
    "negative classes": ({"x": X, "y": Y - 1}, "y: got -1 at position 0"),
    "text targets": ({"x": X, "y": Y.astype(str)}, r"y: got <U\d+ in .*mine\.npz, must be numbers"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "must leave some to test on"),
    "negative tokens": ({"x": Y[:, None] - 1, "y": Y}, "x: got -1 to 2, must be tokens from 0"),
    "half a test": ({"x": X, "y": Y, "x_test": X}, "must have x_test and y_test, or neither"),
    "users of a test only": ({"x": X, "y": Y, "x_test": X, "y_test": Y, "users_test": Y}, "must have x_test"),
    "users short": ({"x": X, "y": Y, "users": Y[:-1]}, r"users: got int64 \(19,\) .* one an example"),
    "a stranger": (
        {"x": X, "y": Y, "users": Y, "x_test": X[:1], "y_test": Y[:1], "users_test": [9]},
        "users_test: got 9 .* must be among those that train",
    ),
    "other shapes": (
        {"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y},
        "x_test and y_test: got float32",
    ),
    "other targets": ({"x": X, "y": X, "x_test": X, "y_test": X[:, :2]}, "y_test: got targets of shapes"),
    "another array": ({"x": X, "y": Y, "z": Y}, "has z, allowed are x, y, users, and with _test"),
}


@pytest.mark.parametrize(("arrays", "says"), BAD.values(), ids=BAD)
def test_what_is_refused(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load(saved(tmp_path, **arrays))
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    whole = Path(saved(tmp_path, x=X, y=Y)).read_bytes()
    for content in (b"", b"PK\x03\x04", whole[:-40], whole[:200]):
        (tmp_path / "mine.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"dataset: .*mine\.npz cannot be read"):
            load(str(tmp_path / "mine.npz"))
    np.savez_compressed(tmp_path / "mine.npz", x=X, y=Y)
    packed_well = (tmp_path / "mine.npz").read_bytes()
    for at in range(60, 90):  # of the first array, squeezed: no bit of it may end in a traceback
        harmed = packed_well[:at] + bytes([packed_well[at] ^ 16]) + packed_well[at + 1 :]
        (tmp_path / "mine.npz").write_bytes(harmed)
        with pytest.raises(ValueError, match=r"dataset: .*mine\.npz cannot be read|^[xy]: ") as caught:
            load(str(tmp_path / "mine.npz"))
        assert "\n" not in str(caught.value)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("x.npy", b"text")
    (tmp_path / "mine.npz").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"mine\.npz cannot be read"):
        load(str(tmp_path / "mine.npz"))
    with pytest.raises(ValueError, match=r"nowhere\.npz cannot be read: .*No such file"):
        load("nowhere.npz")
    with pytest.raises(ValueError, match=r"flatten: got an option that .* has not, allowed are test_fraction"):
        load(saved(tmp_path, x=X, y=Y), flatten=True)


def test_a_partition_as_a_dict_or_lists() -> None:
    for given in ({"b": [3, 1], "a": np.array([0])}, [[3, 1], [0]]):
        data = federated_data(X, Y, given)
        assert np.asarray(data.indices).tolist() == [3, 1, 0] and np.asarray(data.offsets).tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match=r"partition: got .* for client 'b', must be a list of whole numbers"):
        federated_data(X, Y, {"b": [0.5]})
    with pytest.raises(ValueError, match="partition: got 20 for client 0"):
        federated_data(X, Y, {"b": [20]})


def test_the_column_of_a_table_is_a_list_of_users() -> None:
    class Column:  # what pandas' Series tells numpy of itself
        def __init__(self, values: list) -> None:
            self.values = np.array(values, object)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.values

    found = partition.by_user(Column(["b", "a", "b"]))
    assert found.client(0).tolist() == [1] and found.client(1).tolist() == [0, 2]
    with pytest.raises(ValueError, match="user_ids: got None at position 1"):
        partition.by_user(Column(["b", None]))


def test_the_first_examples_of_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, x=X, y=Y, users=np.arange(20) % 5)
    whole, few = load(path, seed=1), load(path, seed=1, num_train=7, num_test=2)
    assert np.array_equal(few.x_train, whole.x_train[:7]) and np.array_equal(few.x_test, whole.x_test[:2])
    assert len(few.user_train) == len(few.y_train) == 7 and len(few.user_test) == 2
    with pytest.raises(ValueError, match="num_train: got 100, must be a whole number from 1 to"):
        load(path, num_train=100)
