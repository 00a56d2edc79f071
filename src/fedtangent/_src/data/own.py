"""A user's own data: arrays in memory, or an ``.npz`` file of arrays, whose path takes the place of a data set's name.

Both ways share the functions that read inputs and targets, so that the same arrays give the same numbers. The shapes,
dtypes and numbers of the arrays in a file, or the user's options, decide the kind of data:

- ``x``: images [n, height, width] or [n, height, width, channels]; vectors [n, d]; or tokens [n, T], whole numbers from
  0. Whole numbers [n, d] are vectors if they are uint8 or if their columns have different ranges, as in a table; else
  they are tokens. Images and vectors of uint8 are divided by 255.
- ``y``: classes [n], strings or whole numbers from 0 to the largest one (among tokens and targets, if inputs are
  tokens), or floating numbers [n] or [n, C];
- ``users`` [n], optional: the user of each example, whole numbers or strings. Users are numbered in ascending order;
  users with test examples only come last;
- ``x_test``, ``y_test`` and ``users_test``: the test set; without it a share of the examples is drawn at random.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Num, Shaped

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.dataset import IMAGE, TOKENS, VECTOR, Dataset, DatasetEntry, SourceInfo, first, pixels
from fedtangent._src.data.partition.drawn import assemble
from fedtangent._src.data.partition.given import by_user, numbered
from fedtangent._src.data.sharing import held_out
from fedtangent._src.storage import expanded

SUFFIX = ".npz"
NEEDED = ("x", "y")
KEYS = ("x", "y", "users")
SPLITS = {"train": "", "test": "_test"}  # suffix of the names of a split's arrays
KINDS = {IMAGE: "images", TOKENS: "texts", VECTOR: "vectors"}
TARGETS = ("classes", "numbers")


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """Options of a user's own file: numbers of examples, share for testing, and how inputs and targets are read."""

    test_fraction: float = 0.2
    """Fraction of the examples (of each user's, if there are users) to test on if the file has no x_test."""
    num_train: int | None = None
    """Use only this many training examples, the first ones."""
    num_test: int | None = None
    """Use only this many test examples, the first ones."""
    input_kind: str | None = None
    """Read x as image, tokens or vector (default: by its shape and numbers)."""
    input_scale: float | None = None
    """Divide x by this number (default: uint8 by 255, others by 1)."""
    target_kind: str | None = None
    """Read y as classes or numbers (default: whole ones are classes)."""


class Targets(NamedTuple):
    """Targets of the training and the test examples, with string labels replaced by numbers.

    Attributes:
        y: Class labels [n] int32, or floating numbers [n, C], by the names in ``targets``' argument.
        num_classes: Number of classes; 0 for regression.
        names: Names of the classes if labels are strings, else None.
    """

    y: dict[str, Num[np.ndarray, "n *C"]]
    num_classes: int
    names: tuple[str, ...] | None


def entry(name: str, input_kind: str | None = None, target_kind: str | None = None) -> DatasetEntry:
    """Builds the entry of a user's ``.npz`` file, which tells what kind of data it has and which options it takes.

    Only the shapes and dtypes of the arrays are read, except for whole numbers [n, d], which may be texts or a table.

    Args:
        name: Path of the file.
        input_kind: Kind of inputs, "image", "tokens" or "vector", that the user chose; None to find out.
        target_kind: Kind of targets, "classes" or "numbers", that the user chose; None to find out.

    Raises:
        ValueError: The file cannot be read, lacks ``x`` or ``y``, or its arrays cannot be of the chosen kind.
    """
    path = expanded("dataset", name)
    headers = files.headers("dataset", path)
    files.require("dataset", path, headers, NEEDED)
    shape, dtype = headers["x"]
    is_unclear = input_kind is None and len(shape) == 2 and dtype.kind in "iu" and dtype != np.uint8
    x = files.read("dataset", path, NEEDED)["x"] if is_unclear else np.broadcast_to(np.zeros((), dtype), shape)
    is_regression = not _has_classes(headers["y"], target_kind)
    return DatasetEntry(
        name,
        "data of your own",
        functools.partial(_load, name, path),
        OwnOptions,
        kind=_kind(name, x, input_kind),
        partition="by_user" if "users" in headers else "iid" if is_regression else "dirichlet",
        is_regression=is_regression,
    )


def _kind(name: str, x: np.ndarray, input_kind: str | None) -> str:
    """Returns the kind of the inputs ``x`` of the file ``name``: "image", "tokens" or "vector".

    Raises ``ValueError`` if no kind fits, or if ``x`` cannot be of the kind ``input_kind`` that the user chose.
    """
    if input_kind is not None:
        checks.choice("input_kind", input_kind, KINDS)
    if x.dtype.kind not in "iuf" or x.ndim not in (2, 3, 4):
        raise ValueError(
            f"x: got {x.dtype} {x.shape} in {name}, must be numbers [n, height, width(, channels)] (images), [n, d] "
            "(vectors) or whole numbers [n, T] (tokens)"
        )
    is_whole = x.dtype.kind in "iu"
    allowed = (IMAGE,) if x.ndim > 2 else (VECTOR, TOKENS) if is_whole else (VECTOR,)
    if input_kind is not None and input_kind not in allowed:
        raise ValueError(
            f"input_kind: got {input_kind}, must be {' or '.join(allowed)} for x {x.dtype} {x.shape} in {name}"
        )
    if input_kind is not None or len(allowed) == 1:
        return input_kind or allowed[0]
    return TOKENS if x.dtype != np.uint8 and _is_text(x) else VECTOR


def _is_text(x: Num[np.ndarray, "n d"]) -> bool:
    """Tells whether whole numbers can be a text, in which all columns have the same alphabet, or must be a table.

    A table has a negative number, at most two different numbers (0 included), or a column with half of its numbers
    outside the range of another column. In a text of m examples and d columns the last happens with probability below
    ``d^2 2^-m``. This comparison of columns leaves out zeros, which fill up short texts, columns of one symbol, such as
    a mark of the beginning, and columns so short that the bound reaches 0.001. Numbers without a sign of a table, such
    as an empty array, are a text. Of many examples, at most 2^14 evenly spaced ones are examined (all for the sign).
    """
    if x.size == 0 or x.min() < 0:
        return x.size == 0
    x = x[:: 1 + len(x) // 2**14]
    if len(np.unique(x)) <= 2:
        return False
    columns = [column[column != 0] for column in x.T]
    columns = [c for c in columns if 2.0 ** -len(c) * x.shape[1] ** 2 < 1e-3 and c.min() < c.max()]
    if not columns:
        return True
    medians, low, high = (np.array([of(c) for c in columns]) for of in (np.median, np.min, np.max))
    return bool(low.max() <= medians.min() and medians.max() <= high.min())


def _has_classes(y: files.Header | np.ndarray, target_kind: str | None) -> bool:
    if target_kind is None:
        return y.dtype.kind != "f" and len(y.shape) == 1
    return checks.choice("target_kind", target_kind, TARGETS) == "classes"


def _load(name: str, path: Path, options: OwnOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads a user's ``.npz`` file; a line on standard error, once a process, says how its arrays are understood.

    Without test examples in the file, ``seed`` draws some to hold out. ``data_dir`` is not used. Raises ``ValueError``
    for arrays that do not fit together.
    """
    arrays = files.read("dataset", path, NEEDED)
    unknown = arrays.keys() - {key + end for key in KEYS for end in SPLITS.values()}
    if unknown:
        allowed = ", ".join(key + end for end in SPLITS.values() for key in KEYS)
        raise ValueError(f"dataset: {name} has {', '.join(sorted(unknown))}, allowed are {allowed}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise ValueError(f"dataset: {name} has {', '.join(arrays)}, must have x_test and y_test, or neither")
    if "users_test" in arrays and not {"users", "x_test"} <= arrays.keys():
        raise ValueError(f"dataset: {name} has {', '.join(arrays)}, must have users and x_test beside users_test")
    first_x, num_users = arrays["x"], len(np.unique(arrays.get("users", ())))
    kind = _kind(name, first_x, options.input_kind)
    for end in SPLITS.values():
        x, y = arrays.get(f"x{end}", first_x), arrays.get(f"y{end}", arrays["y"])
        if x.shape[1:] != first_x.shape[1:] or x.dtype != first_x.dtype:
            raise ValueError(
                f"x{end}: got {x.dtype} {x.shape} in {name}, must have the type and shape of examples of x, "
                f"{first_x.dtype} {first_x.shape}"
            )
        if len(x) != (len(y) if y.ndim else -1):
            raise ValueError(f"x{end} and y{end}: got shapes {x.shape} and {y.shape} in {name}, must have as many rows")
        _check_users(name, arrays, end)
    if "x_test" not in arrays:
        rows = _held_out(len(first_x), arrays.get("users"), options, seed)
        arrays |= {f"{key}_test": arrays[key][rows] for key in KEYS if key in arrays}
        arrays |= {key: arrays[key][~rows] for key in KEYS if key in arrays}
    for split, end in SPLITS.items():
        axes = [key + end for key in KEYS if key + end in arrays]
        count = getattr(options, f"num_{split}")
        arrays |= dict(zip(axes, first(f"num_{split}", count, *(arrays[axis] for axis in axes)), strict=True))
    user, user_test = _users(arrays)
    x_train, x_test = (_inputs(f"{name}: x{end}", arrays[f"x{end}"], kind, options) for end in SPLITS.values())
    ys = {f"{name}: y{end}": _as_asked(f"{name}: y{end}", arrays[f"y{end}"], options) for end in SPLITS.values()}
    of_splits, num_classes, _ = targets(ys)
    y_train, y_test = of_splits.values()
    if y_train.shape[1:] != y_test.shape[1:]:
        sizes = y_test.shape[1], y_train.shape[1]
        raise ValueError(f"y_test: got {sizes[0]} numbers in each row in {name}, must be {sizes[1]}, as y has")
    if kind == TOKENS and num_classes:
        num_classes = max(num_classes, 1 + int(max(x_train.max(), x_test.max())))
    info = SourceInfo(str(path), "yours", str(path.parent))
    dataset = Dataset(name, x_train, y_train, x_test, y_test, num_classes, user, info, kind, user_test)
    _say(_reading(dataset, first_x, arrays["y"].dtype, num_users, options.input_scale))
    return dataset


@functools.cache  # once
def _say(line: str) -> None:
    print(f"fedtangent: {line}", file=sys.stderr)


def _reading(dataset: Dataset, x: np.ndarray, target: np.dtype, num_users: int, scale: float | None) -> str:
    """Returns the line of text that tells the user how the file was read, and which options change that.

    Args:
        dataset: The data set that was read.
        x: Inputs in the file.
        target: Dtype of the targets in the file.
        num_users: Number of users, 0 without users.
        scale: Option ``input_scale``: number by which inputs are divided, or None.
    """
    scale = scale or (255 if x.dtype == np.uint8 and dataset.kind != TOKENS else 1)
    scaled = "as they are" if scale == 1 else f"divided by {scale:g}"
    task = f"{dataset.num_classes} classes" if dataset.num_classes else "numbers to predict"
    kind, values = KINDS[dataset.kind], f"{x.dtype} from {x.min():g} to {x.max():g}, {scaled}"
    return (
        f"{dataset.name} is read as {kind} ({values}), {task} ({target}), {num_users or 'no'} users; to read it "
        "otherwise: input_kind, input_scale, target_kind, partition"
    )


def _check_users(name: str, arrays: dict[str, np.ndarray], end: str) -> None:
    users = arrays.get(f"users{end}")
    if users is not None and (users.ndim != 1 or len(users) != len(arrays[f"x{end}"]) or users.dtype.kind not in "iuU"):
        raise ValueError(
            f"users{end}: got {users.dtype} {users.shape} in {name}, must be whole numbers or strings [n], one "
            "for each example"
        )


def _users(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the user of each training and each test example, [n] int32 each; None for a split without users."""
    if "users" not in arrays:
        return None, None
    user, user_test = numbered(arrays["users"], arrays.get("users_test", arrays["users"][:0]))
    return user, user_test if "users_test" in arrays else None


def _held_out(
    count: int, users: Shaped[np.ndarray, "count"] | None, options: OwnOptions, seed: int
) -> Bool[np.ndarray, "count"]:
    """Draws which of ``count`` examples are for testing, [count] bool: the share ``test_fraction`` in ``options``.

    If ``users`` has the user of each example, that share of each user's examples is drawn. Raises ``ValueError`` if the
    share is out of range or there are fewer than two examples.
    """
    share = checks.number("test_fraction", options.test_fraction, above=0, below=1)
    if count < 2:
        raise ValueError(f"x: got {count} rows, must be 2 or more, some to train and some to test on")
    examples = assemble([np.arange(count)]) if users is None else by_user(users)
    test = np.zeros(count, bool)
    test[held_out(examples, share, seed)[1].indices] = True
    return test


def _inputs(name: str, x: np.ndarray, kind: str, options: OwnOptions) -> np.ndarray:
    """Checks, converts and scales inputs ``x`` of a user's file by ``inputs``; images [n, H, W] become [n, H, W, 1].

    ``name`` is their name in messages. Raises ``ValueError`` for NaN or infinity, and for inputs that ``inputs``
    refuses.
    """
    checks.finite(name, x)
    scaled = inputs(name, x, kind, options.input_scale)
    return scaled[..., None] if x.ndim == 3 else scaled


def _as_asked(name: str, y: np.ndarray, options: OwnOptions) -> np.ndarray:
    """Converts a file's targets ``y`` to classes or to floating numbers if the option ``target_kind`` asks for it.

    One column [n, 1] of classes becomes [n]. Raises ``ValueError`` for NaN or infinity, and for numbers that are not
    whole if they are to be classes.
    """
    if y.dtype.kind == "f":
        checks.finite(name, y)
    if options.target_kind is None or y.dtype.kind not in "iuf":
        return y
    if not _has_classes(y, options.target_kind):
        return y.astype(np.float64) if y.dtype.kind in "iu" else y
    labels = y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    if (labels != np.rint(labels)).any():
        raise ValueError(
            f"target_kind: got classes, must be numbers: {name} has {labels[labels != np.rint(labels)][0]}, which is "
            "no whole number"
        )
    return labels.astype(np.int64) if y.dtype.kind == "f" else labels


def inputs(name: str, x: object, kind: str, scale: float | None = None) -> Num[np.ndarray, "n ..."]:
    """Checks inputs and converts them: tokens to int32, other whole numbers to float32, and uint8 to [0, 1].

    Floating numbers keep their dtype.

    Args:
        name: Name of the inputs in error messages.
        x: Numbers [n, ...].
        kind: "tokens", or another kind of input.
        scale: Number to divide inputs by; None for 255 with uint8 and 1 with other numbers. Tokens have none.

    Raises:
        ValueError: The inputs have another type or shape, or no example, or the scale is not above 0 or is for tokens.
    """
    array = _array(name, x)
    is_whole, is_floating = array.dtype.kind in "iu", jnp.issubdtype(array.dtype, jnp.floating)
    if kind == TOKENS and not is_whole:
        raise ValueError(f"{name}: got {array.dtype}, must be whole numbers, the tokens that the model reads")
    if not (is_whole or is_floating):
        raise ValueError(f"{name}: got {array.dtype}, must be real numbers")
    if array.ndim < 2 or 0 in array.shape:
        raise ValueError(f"{name}: got shape {array.shape}, must be [n, ...], a row of numbers for each example")
    if kind == TOKENS:
        if scale is not None:
            raise ValueError(f"input_scale: got {scale}, must be left out for tokens")
        checks.tokens(name, array, None)
        return array.astype(np.int32, copy=False)
    if scale is not None:
        dtype = array.dtype if is_floating else np.dtype(np.float32)
        return array.astype(dtype) / dtype.type(checks.number("input_scale", scale, above=0))
    if is_floating:
        return array
    return pixels(array) if array.dtype == np.uint8 else array.astype(np.float32)


def targets(ys: Mapping[str, object]) -> Targets:
    """Checks the targets to train and to test on, and replaces class names by their numbers in sorted order.

    Args:
        ys: Targets by their names in error messages, the training targets first: class labels [n], whole numbers from 0
            or strings; or floating numbers [n] or [n, C]. Whole numbers [n, C] with C > 1 become floating numbers.

    Returns:
        The targets by the same names, labels as int32 [n] and floating numbers as [n, C]; the number of classes, 0 for
        floating numbers; and the names of the classes if labels are strings.

    Raises:
        ValueError: Targets have another type or shape, or differ in type between the splits.
    """
    read = {name: _target(name, y) for name, y in ys.items()}
    (train_name, train), num_classes, names = next(iter(read.items())), 0, None
    for name, y in read.items():
        if _called(y) != _called(train):
            raise ValueError(f"{name}: got {_called(y)}, must be {_called(train)} as {train_name} has")
    if train.dtype.kind == "U":
        ordered = np.unique(np.concatenate(list(read.values())))
        names = tuple(ordered.tolist())
        read = {name: np.searchsorted(ordered, y) for name, y in read.items()}
    if train.dtype.kind in "iU":
        for name, y in read.items():
            checks.class_labels(name, y)
        num_classes = 1 + max(int(y.max()) for y in read.values())
        read = {name: y.astype(np.int32) for name, y in read.items()}
    return Targets(read, num_classes, names)


def _array(name: str, value: object) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: got {checks.shown(value)}, must have rows of one length") from error


def _target(name: str, y: object) -> np.ndarray:
    """Checks the targets ``y`` of a split, and returns them as an array: class labels [n], or floating numbers [n, C].

    Labels are whole numbers or strings; whole numbers [n, C] with C > 1 become float32. ``name`` is the name of ``y``
    in the ``ValueError`` for anything else.
    """
    array = _array(name, y)
    if array.dtype.kind == "O" and array.size and all(isinstance(label, str) for label in array.ravel()):
        array = array.astype(str)
    if jnp.issubdtype(array.dtype, jnp.floating) and array.ndim in (1, 2) and array.size:
        return array.reshape(len(array), -1)
    if array.ndim == 1 and array.size and array.dtype.kind in "iuU":
        return array.astype(np.int64) if array.dtype.kind == "u" else array
    if array.ndim == 2 and array.dtype.kind in "iu" and array.shape[1] > 1:
        return array.astype(np.float32)
    column = " (one column of labels becomes [n] by y.ravel())" if array.ndim == 2 and array.shape[1] == 1 else ""
    raise ValueError(
        f"{name}: got {array.dtype} of shape {array.shape}, must be whole numbers or strings [n], the class labels, or "
        f"floating numbers [n] or [n, C]{column}"
    )


def _called(y: np.ndarray) -> str:
    """Returns the kind of targets in words: "strings", "whole numbers" or "floating numbers"."""
    return {"U": "strings", "i": "whole numbers"}.get(y.dtype.kind, "floating numbers")
