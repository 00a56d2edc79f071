"""A user's own data: an ``.npz`` file of plain arrays, whose path takes the place of a data set's name.

The shapes and dtypes of the arrays decide the kind of data:

- ``x``: images [n, height, width] or [n, height, width, channels] or vectors [n, d], floating or uint8, which is
  divided by 255; or tokens [n, T], signed whole numbers;
- ``y``: classes [n], whole numbers from 0 to the largest one (among tokens and targets, if inputs are tokens), or
  floating numbers [n] or [n, C];
- ``users`` [n], optional: the user of each example, whole numbers or strings;
- ``x_test``, ``y_test`` and ``users_test``: the test set; without it a share of the examples is drawn at random.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from fedtangent._src import checks
from fedtangent._src.data import archive, files
from fedtangent._src.data.dataset import IMAGE, TOKENS, VECTOR, Dataset, DatasetEntry, SourceInfo, first, pixels
from fedtangent._src.data.partition.drawn import generator
from fedtangent._src.storage import expanded

SUFFIX = ".npz"
NEEDED = ("x", "y")
SPLITS = {"train": "", "test": "_test"}  # suffix of the names of a split's arrays


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """Options of a user's own file."""

    test_fraction: float = 0.2
    """Fraction of the examples (of each user's, if there are users) to test on if the file has no x_test."""
    num_train: int | None = None
    """Use only this many training examples, the first ones."""
    num_test: int | None = None
    """Use only this many test examples, the first ones."""


def entry(name: str) -> DatasetEntry:
    """Builds the entry of the data set in the file ``name``; reads only shapes and dtypes of its arrays.

    Raises:
        ValueError: The file cannot be read.
    """
    path = expanded("dataset", name)
    headers = files.headers("dataset", path)
    archive.require("dataset", path, headers, NEEDED)
    (shape, dtype), (_, target) = headers["x"], headers["y"]
    if target.kind in "SU":
        raise ValueError(f"y: got {target} in {name}, must be numbers: np.unique(y, return_inverse=True)[1]")
    return DatasetEntry(
        name,
        "data of your own",
        functools.partial(_load, name, path),
        OwnOptions,
        kind=_kind(name, shape, dtype),
        partition="by_user" if "users" in headers else "iid" if target.kind == "f" else "dirichlet",
        is_regression=target.kind == "f",
    )


def _kind(name: str, shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Returns the kind of input for a shape and dtype; raises ``ValueError`` if it is no input."""
    if len(shape) == 2 and dtype.kind == "i":
        return TOKENS
    if dtype.kind == "f" or dtype == np.uint8:
        if len(shape) in (3, 4):
            return IMAGE
        if len(shape) == 2:
            return VECTOR
    raise ValueError(
        f"x: got {dtype} {shape} in {name}, must be floating or uint8 [n, height, width(, channels)] (images), "
        "floating or uint8 [n, d] (vectors) or int [n, T] (tokens)"
    )


def _load(name: str, path: Path, options: OwnOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads the file; raises ``ValueError`` for bad arrays or numbers, test users that do not train, and pickles."""
    arrays = archive.read("dataset", path, NEEDED)
    unknown = arrays.keys() - {key + end for key in ("x", "y", "users") for end in SPLITS.values()}
    if unknown:
        raise ValueError(f"dataset: {name} has {', '.join(sorted(unknown))}, allowed are x, y, users, and with _test")
    if ("x_test" in arrays) != ("y_test" in arrays) or (
        "users_test" in arrays and not {"users", "x_test"} <= arrays.keys()
    ):
        raise ValueError(f"dataset: {name} has {', '.join(arrays)}, must have x_test and y_test, or neither")
    first_x = arrays["x"]
    kind = _kind(name, first_x.shape, first_x.dtype)
    for end in SPLITS.values():
        x, y = arrays.get(f"x{end}", first_x), arrays.get(f"y{end}", arrays["y"])
        if x.shape[1:] != first_x.shape[1:] or x.dtype != first_x.dtype or len(x) != (len(y) if y.ndim else -1):
            raise ValueError(f"x{end} and y{end}: got {x.dtype} {x.shape} and {y.shape} in {name}, must go together")
    _, user = _users(name, arrays, "", None)
    if "x_test" not in arrays:
        rows = _held_out(len(first_x), user, options, seed)
        arrays |= {f"{key}_test": arrays[key][rows] for key in ("x", "y", "users") if key in arrays}
        arrays |= {key: arrays[key][~rows] for key in ("x", "y", "users") if key in arrays}
    for split, end in SPLITS.items():
        axes = [key + end for key in ("x", "y", "users") if key + end in arrays]
        count = getattr(options, f"num_{split}")
        arrays |= dict(zip(axes, first(f"num_{split}", count, *(arrays[axis] for axis in axes)), strict=True))
    names, user = _users(name, arrays, "", None)
    _, tested = _users(name, arrays, "_test", names)
    classes = arrays["y"].dtype.kind in "iu"
    x_train, x_test = (_inputs(f"{name}: x{end}", arrays[f"x{end}"], kind) for end in SPLITS.values())
    y_train, y_test = (_targets(f"{name}: y{end}", arrays[f"y{end}"], classes) for end in SPLITS.values())
    sizes = {y_train.shape[1:], y_test.shape[1:]}
    if len(sizes) > 1:
        raise ValueError(f"y_test: got targets of shapes {sizes} in {name}, must be alike to train and to test")
    numbered = (x_train, x_test, y_train, y_test) if kind == TOKENS else (y_train, y_test)
    num_classes = 1 + max(int(array.max()) for array in numbered) if classes else 0
    info = SourceInfo(str(path), "yours", str(path.parent))
    return Dataset(name, x_train, y_train, x_test, y_test, num_classes, user, info, kind, tested)


def _users(
    name: str, arrays: dict[str, np.ndarray], end: str, names: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the users' names, ascending, and the index of each example's user, [n] int32; both None without users."""
    users = arrays.get(f"users{end}")
    if users is None:
        return None, None
    if users.ndim != 1 or len(users) != len(arrays[f"x{end}"]) or users.dtype.kind not in "iuU":
        raise ValueError(
            f"users{end}: got {users.dtype} {users.shape} in {name}, must be whole numbers or strings [n], one "
            "an example"
        )
    names = np.unique(users) if names is None else names
    strange = ~np.isin(users, names)
    if strange.any():
        raise ValueError(f"users{end}: got {users[strange][0]!s:.40} in {name}, must be among those that train")
    return names, np.searchsorted(names, users).astype(np.int32)


def _held_out(
    count: int, user: Int[np.ndarray, "count"] | None, options: OwnOptions, seed: int
) -> Bool[np.ndarray, "count"]:
    """Draws the test examples, [count] bool: a share of each user's, who keeps at least one; raises ``ValueError``."""
    share, rng = checks.number("test_fraction", options.test_fraction, above=0, below=1), generator(seed)
    test = np.zeros(count, bool)
    for rows in [np.arange(count)] if user is None else [np.flatnonzero(user == i) for i in range(user.max() + 1)]:
        test[rng.permutation(rows)[: min(round(share * len(rows)), len(rows) - 1)]] = True
    if not test.any() or test.all():
        raise ValueError(f"test_fraction: got {options.test_fraction} of {count} examples, must leave some to test on")
    return test


def _inputs(name: str, x: np.ndarray, kind: str) -> np.ndarray:
    """Converts inputs to the form of networks: floating with channels, or int32 tokens; raises ``ValueError``."""
    if x.size == 0:
        raise ValueError(f"{name}: got shape {x.shape}, must hold at least one example")
    checks.finite(name, x)
    if kind == TOKENS:
        if x.min() < 0 or x.max() > checks.MAX_INDEX:
            raise ValueError(f"{name}: got {x.min()} to {x.max()}, must be tokens from 0")
        return x.astype(np.int32)
    scaled = pixels(x) if x.dtype == np.uint8 else x
    return scaled[..., None] if x.ndim == 3 else scaled


def _targets(name: str, y: np.ndarray, classes: bool) -> np.ndarray:
    """Converts targets to class labels int32 [n], or to floating targets [n, C]; raises ``ValueError`` for others."""
    if classes:
        return checks.class_labels(name, y).astype(np.int32)
    if y.dtype.kind != "f" or y.ndim not in (1, 2) or y.size == 0:
        raise ValueError(f"{name}: got {y.dtype} {y.shape}, must be whole numbers [n], or floating [n] or [n, C]")
    checks.finite(name, y)
    return y.reshape(len(y), -1)
