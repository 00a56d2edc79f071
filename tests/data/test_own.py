"""A user's own ``.npz`` file as a data set."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.data import federated_data, load, own, partition
from fedtangent._src.data.dataset import Dataset, SourceInfo
from fedtangent._src.data.examples import run_examples

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
    "lengths": ({"x": X, "y": Y[:-1]}, r"x and y: got shapes \(20, 3\) and \(19,\) .* must have as many rows"),
    "scalar": ({"x": np.float32(1), "y": Y}, r"x: got float32 \(\)"),
    "objects": ({"x": np.array([[{}]] * 20, object), "y": Y}, "x.npy holds Python objects"),
    "object targets": ({"x": X, "y": np.array([None] * 20, object)}, "y.npy holds Python objects"),
    "complex": ({"x": X.astype(complex), "y": Y}, r"x: got complex128 \(20, 3\)"),
    "one axis": ({"x": X[:, 0], "y": Y}, r"x: got float32 \(20,\)"),
    "not finite": ({"x": X * np.nan, "y": Y}, "x: got nan at entry .* must be finite"),
    "negative classes": ({"x": X, "y": Y - 1}, "y: got -1 at position 0"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "x: got 0 rows, must be 2 or more"),
    "no tokens": ({"x": X, "y": Y}, {"input_kind": "tokens"}, "input_kind: got tokens, must be vector for x float32"),
    "no images": ({"x": X, "y": Y}, {"input_kind": "image"}, "input_kind: got image, must be vector for x float32"),
    "no kind": ({"x": X, "y": Y}, {"input_kind": "text"}, "input_kind: got 'text', allowed are image, tokens, vector"),
    "negative tokens": ({"x": Y[:, None] - 1, "y": Y}, {"input_kind": "tokens"}, "x: got -1 to 2, must be tokens from"),
    "scaled tokens": (
        {"x": Y[:, None], "y": Y},
        {"input_kind": "tokens", "input_scale": 2.0},
        "input_scale: got 2.0, must be left out for tokens",
    ),
    "no scale": ({"x": X, "y": Y}, {"input_scale": 0.0}, "input_scale: got 0.0, must be above 0"),
    "no classes": ({"x": X, "y": X[:, 0]}, {"target_kind": "classes"}, "target_kind: got classes, must be numbers"),
    "a column": ({"x": X, "y": Y[:, None]}, r"becomes \[n\] by y.ravel\(\)"),
    "users of two kinds": (
        {"x": X, "y": Y, "users": Y, "x_test": X[:3], "y_test": Y[:3], "users_test": ["2", "1", "0"]},
        "users_test: got <U1, must be of the kind of users, int64",
    ),
    "half a test": ({"x": X, "y": Y, "x_test": X}, "must have x_test and y_test, or neither"),
    "users of a test only": ({"x": X, "y": Y, "x_test": X, "y_test": Y, "users_test": Y}, "must have users and x_test"),
    "users short": ({"x": X, "y": Y, "users": Y[:-1]}, r"users: got int64 \(19,\) .* one for each example"),
    "other shapes": (
        {"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y},
        r"x_test: got float32 \(20, 2\) .* of x, float32 \(20, 3\)",
    ),
    "other targets": (
        {"x": X, "y": X, "x_test": X, "y_test": X[:, :2]},
        "y_test: got 2 numbers in each row in .* must be 3, as y has",
    ),
    "another array": ({"x": X, "y": Y, "z": Y}, "has z, allowed are x, y, users, x_test, y_test, users_test"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_what_is_refused(tmp_path: Path, case: tuple) -> None:
    arrays, *options, says = case
    with pytest.raises(ValueError, match=says) as caught:
        load(saved(tmp_path, **arrays), **(options[0] if options else {}))
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
    with pytest.raises(ValueError, match=r"flatten: got an option that .* does not have, allowed are test_fraction"):
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


# ---- what a file is read as ---------------------------------------------------------------------------------------

ROWS = np.arange(400)
TABLE = np.stack([RNG.integers(1859, 3859, 400), RNG.integers(0, 361, 400), RNG.integers(0, 67, 400), ROWS % 2], axis=1)
TEXT = np.lib.stride_tricks.sliding_window_view(RNG.zipf(1.5, 4080).clip(1, 79), 80)[::10]
PADDED = np.where(np.arange(80) < RNG.integers(1, 80, (401, 1)), TEXT, 0)  # texts of any length
BEGUN = np.concatenate([np.full((401, 1), 80), TEXT], axis=1)  # each text begins with a mark
TABLES = {
    "elevation": TABLE,
    "short": TABLE[:40].astype(np.uint16),
    "below zero": TABLE - 1,
    "two numbers": ROWS[:, None] % 2 + np.zeros((1, 5), int),
}
TEXTS = {
    "text": TEXT,
    "padded": PADDED,
    "begun": BEGUN,
    "of numbered words": RNG.zipf(1.3, (30, 12)).clip(1, 10_000),
    "bytes of a few": RNG.integers(0, 4, (60, 9)).astype(np.int8),
}


@pytest.mark.parametrize("x", [*TABLES.values(), *TEXTS.values()], ids=[*TABLES, *TEXTS])
def test_whole_numbers_are_a_text_only_where_all_places_share_one_alphabet(
    tmp_path: Path, x: np.ndarray, request: pytest.FixtureRequest
) -> None:
    kind = "vector" if request.node.callspec.id in TABLES else "tokens"
    name = saved(tmp_path, x=x, y=np.arange(len(x)) % 7, x_test=x, y_test=np.arange(len(x)) % 7)
    found = load(name)
    assert found.kind == own.entry(name).kind == kind
    if kind == "vector":
        assert found.num_classes == 7 and found.x_train.dtype == np.float32
        np.testing.assert_array_equal(found.x_train, x)
    for asked in ("vector", "tokens") if x.min() >= 0 else ("vector",):
        assert load(name, input_kind=asked).kind == own.entry(name, asked).kind == asked


def test_targets_are_classes_or_numbers_as_the_user_says(tmp_path: Path) -> None:
    name = saved(tmp_path, x=X, y=Y.astype(np.float64), x_test=X, y_test=Y.astype(np.float64))
    assert load(name).num_classes == 0 and own.entry(name).is_regression
    found, entry = load(name, target_kind="classes"), own.entry(name, target_kind="classes")
    assert found.num_classes == 4 and found.y_test.tolist() == Y.tolist() and found.y_test.dtype == np.int32
    assert entry.partition == "dirichlet" and not entry.is_regression
    counts = saved(tmp_path, x=X, y=Y + 1900)
    assert load(counts).num_classes == 1904 and own.entry(counts).partition == "dirichlet"
    years = load(counts, target_kind="numbers", test_fraction=0.5)
    assert years.num_classes == 0 and sorted(np.concatenate([years.y_train, years.y_test])[:, 0]) == sorted(Y + 1900.0)
    assert own.entry(counts, target_kind="numbers").is_regression


def test_pixels_of_every_type_with_one_scale_are_the_same_bits(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (20, 4, 3), dtype=np.uint8)
    right = x[..., None] / np.float32(255)

    def read(dtype: type, scale: float | None = None) -> np.ndarray:
        arrays = {"x": x.astype(dtype), "y": Y, "x_test": x.astype(dtype), "y_test": Y}
        return load(saved(tmp_path, **arrays), input_scale=scale).x_test

    for found in (read(np.uint8), read(np.uint8, 255), read(np.int64, 255), read(np.float32, 255)):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(read(np.int64), read(np.uint8, 1))
    assert (read(np.int64) != right).any()  # control


def test_what_a_file_is_read_as_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = saved(tmp_path, x=TABLE, y=ROWS % 7, users=ROWS % 30)
    load(name)
    load(name, test_fraction=0.5)
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"fedtangent: {name} is read as vectors (int64 from {TABLE.min()} to {TABLE.max()}, as they are), 7 classes "
        "(int64), 30 users; to read it otherwise: input_kind, input_scale, target_kind, partition\n"
    )
    load(name, input_kind="tokens", target_kind="numbers")
    assert "is read as texts" in (again := capsys.readouterr().err) and "numbers to predict" in again
    pixels = saved(tmp_path, x=np.uint8(TABLE % 256), y=ROWS * 1.0)
    load(pixels)
    assert (
        "vectors (uint8 from 0 to 255, divided by 255), numbers to predict (float64), no users"
        in capsys.readouterr().err
    )


# ---- every example, and every user, has one place -----------------------------------------------------------------

SIZES = {
    "twos": [2] * 20,
    "ones": [1] * 40,
    "threes": [3] * 7,
    "skewed": [1, 1, 1, 2, 3, 5, 8, 13, 21, 34],
    "one large": [1] * 9 + [91],
    "one user": [30],
    "two examples": [1, 1],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.2, 0.25, 0.5, 0.77, 0.9, 0.99])
def test_any_fraction_is_met_to_one_example_and_nobodys_data_vanish(
    tmp_path: Path, sizes: list[int], fraction: float
) -> None:
    users = RNG.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = np.arange(len(users), dtype=np.float64)[:, None]
    for arrays in ({"users": users}, {}):
        found = load(saved(tmp_path, x=x, y=np.zeros(len(x), int), **arrays), test_fraction=fraction, seed=3)
        both = np.concatenate([found.x_train, found.x_test])[:, 0]
        assert sorted(both) == list(range(len(users)))
        assert abs(len(found.x_test) - fraction * len(users)) <= 1 and 0 < len(found.x_test) < len(users)
        if arrays:
            of_train, of_test = users[found.x_train[:, 0].astype(int)], users[found.x_test[:, 0].astype(int)]
            tested = np.bincount(of_test, minlength=len(sizes))
            can_all_train = len(found.x_train) >= len(sizes)
            assert (len(np.unique(of_train)) == len(sizes)) or not can_all_train
            if can_all_train and (np.multiply(sizes, fraction) <= np.subtract(sizes, 1)).all():
                assert (np.abs(tested - np.multiply(sizes, len(found.x_test) / len(users))) < 1).all()  # each its share
    rounded = sum(min(round(fraction * size), size - 1) for size in sizes)  # control: of each user's, rounded
    if sizes == SIZES["twos"] and fraction == 0.2:
        assert rounded == 0


def test_users_are_compared_exactly(tmp_path: Path) -> None:
    ids = [2**53, 2**53 + 1, 2**53 + 2]
    assert float(ids[0]) == float(ids[1])  # control: as floats, in which NumPy compares int64 with uint64
    for train, test in ((np.int64, np.uint64), (np.uint64, np.int64), (np.uint64, np.uint64), (np.int64, np.int64)):
        arrays = {"users": np.array(ids, train), "users_test": np.array([ids[i] for i in (1, 2, 0, 1)], test)}
        found = load(saved(tmp_path, x=X[:3], y=Y[:3], x_test=X[:4], y_test=Y[:4], **arrays))
        assert found.user_train.tolist() == [0, 1, 2] and found.user_test.tolist() == [1, 2, 0, 1]
    for users in ([2**63, 2**63 + 1, 1], [2**64, 2**64 + 1, -1], np.array([2**63, 2**63 + 1, 1], np.uint64)):
        clients = partition.by_user(users)
        assert [clients.client(i).tolist() for i in range(3)] == [[2], [0], [1]]
    assert partition.by_user(["1", "01", "1"]).sizes.tolist() == [1, 2]


def test_users_who_only_test_come_after_those_who_train(tmp_path: Path) -> None:
    """LEAF's split by user: the users of the test set hold no training examples."""
    arrays = {"users": ["m", "c", "m"], "users_test": ["z", "c", "a", "z"]}
    found = load(saved(tmp_path, x=X[:3], y=Y[:3], x_test=X[:4], y_test=Y[:4], **arrays))
    assert found.user_train.tolist() == [1, 0, 1] and found.user_test.tolist() == [3, 0, 2, 3]
    assert partition.by_user(found.user_train).num_clients == 2


# ---- every way in ---------------------------------------------------------------------------------------------------


def of_lists(array: np.ndarray) -> Any:
    return array.tolist()


def of_table(array: np.ndarray) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(array) if array.ndim == 2 else pandas.Series(array)


WAYS = {"file": None, "arrays": np.asarray, "lists": of_lists, "data frames": of_table, "dataset": None}
DATA = {
    "floats": (X, Y),
    "doubles": (X.astype(np.float64) / 3, Y),
    "halves": (X.astype(np.float16), Y),
    "pixels": (RNG.integers(0, 256, (20, 5), dtype=np.uint8), Y),
    "a table": (TABLE[:20] - 1, Y),
    "large numbers": (TABLE[:20] * 2**40, Y),
    "numbers": (X, X[:, :2].astype(np.float64)),
    "one number": (X, X[:, 0]),
    "counts": (X, np.stack([Y, Y], axis=1)),
    "named classes": (X, np.array(["cat", "ant", "dog", "bee"])[Y]),
    "short labels": (X, Y.astype(np.uint8)),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_data_by_every_way_in_are_the_same_bits(tmp_path: Path, data: tuple, way: str) -> None:
    x, y = data
    if way == "lists" and x.dtype == np.uint8:
        pytest.skip("a list does not say that its numbers are pixels: they are taken as they are")
    clients = [np.arange(0, 9), np.arange(9, 20)]
    right = run_examples((x, y, x[::-1], y[::-1]), clients)
    if WAYS[way] is None:
        read = load(saved(tmp_path, x=x, y=y, x_test=x[::-1], y_test=y[::-1]))
        found = run_examples(read if way == "dataset" else read.name, clients)
    else:
        found = run_examples(tuple(WAYS[way](part) for part in (x, y, x[::-1], y[::-1])), clients)
    if y.dtype.kind in "iu" and y.ndim == 1 and way == "dataset":  # of the user's own making
        info = SourceInfo("", "", "")
        made = run_examples(Dataset("mine", x, y, x[::-1], y[::-1], 4, None, info, "vector"), clients)
        np.testing.assert_array_equal(np.asarray(made.data.x), np.asarray(right.data.x))
        assert made.data.x.dtype == right.data.x.dtype
    parts = [
        (e.data.x, e.data.y, e.train.targets, e.test.x, e.test.targets, *e.in_float64(), *e.in_float64("test"))
        for e in (right, found)
    ]
    for one, other in zip(*parts, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    if y.ndim == 1 and y.dtype.kind in "iu" and x.dtype.kind == "f":
        direct = federated_data(WAYS[way](x) if WAYS[way] else x, y, clients, dtype="float32")
        np.testing.assert_array_equal(np.asarray(direct.x), np.asarray(right.data.x))
