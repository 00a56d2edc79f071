"""LEAF (Caldas et al., 2018): its JSON files of each user's examples, and arrays of the examples of its users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.published import Arrays

SPLITS = ("train", "test")
PAPER = "caldas2018"


class User(NamedTuple):
    """Examples of one user, as in the JSON file."""

    name: str
    x: list[Any]
    y: list[Any]
    path: Path


def find(directory: Path, stem: str) -> Path | None:
    """Finds the folder with ``train/*.json`` and ``test/*.json``, or returns None.

    Args:
        directory: The user's data folder. Its subfolders ``stem*`` are searched too, and ``data`` in each of these
            folders, where LEAF's scripts write.
        stem: Beginning of a subfolder's name.
    """
    for place in files.places(directory, stem):
        for folder in (place, place / "data"):
            if all(any((folder / split).glob("*.json")) for split in SPLITS):
                return folder
    return None


def users(name: str, folder: Path, split: str) -> Iterator[User]:
    """Yields the users of ``folder/split/*.json``, file after file by name, in the order of each file's list.

    A file is ``{"users": [..], "user_data": {user: {"x": [..], "y": [..]}}}``.

    Args:
        name: Name of the data set in error messages.
        folder: Folder with a subfolder for each split.
        split: "train" or "test".

    Raises:
        ValueError: A file has another form, a user has no examples or is listed twice, or there are no users.
    """
    names: set[str] = set()
    for path in sorted((folder / split).glob("*.json")):
        whole = files.json_of(name, path)
        try:
            rows = [(user, whole["user_data"][user]["x"], whole["user_data"][user]["y"]) for user in whole["users"]]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name}: {path} has not the form of LEAF's files: users and user_data with x and y"
            ) from error
        for user, x, y in rows:
            if not (isinstance(user, str) and isinstance(x, list) and isinstance(y, list)) or len(x) != len(y) or not y:
                raise ValueError(f"{name}: got user {user!r} in {path}, must have as many x as y, one or more")
            if user in names:
                raise ValueError(f"{name}: got user {user!r} again in {path}, must be once in {split}")
            names.add(user)
            yield User(user, x, y, path)
    if not names:
        raise ValueError(f"{name}: got no user in {folder / split}, must be one or more")


def joined(
    of_split: Callable[[str], Iterable[User]], examples: Callable[[User], tuple[np.ndarray, np.ndarray]]
) -> Arrays:
    """Joins the users' examples to arrays ``x``, ``y`` and ``user`` [n] int32 of both splits, user after user.

    Args:
        of_split: Reads the users of a split; they are numbered in this order, those without training examples (LEAF's
            split ``-t user``) after all others.
        examples: Converts a user's examples to arrays ``x`` and ``y``.
    """
    number: dict[str, int] = {}
    arrays: Arrays = {}
    for split in SPLITS:
        parts = []
        for user in of_split(split):
            parts.append((*examples(user), np.full(len(user.y), number.setdefault(user.name, len(number)), np.int32)))
        for axis, columns in zip(("x", "y", "user"), zip(*parts, strict=True), strict=True):
            arrays[f"{axis}_{split}"] = np.concatenate(columns)
    return arrays


def selected(arrays: Arrays, rows: Mapping[str, np.ndarray]) -> Arrays:
    """Selects the examples of each split for which ``rows`` [n] bool is True; splits not in ``rows`` stay whole.

    Args:
        arrays: Arrays of the archive.
        rows: Examples to keep, for each split.
    """
    splits = {name: name.rpartition("_")[2] for name in arrays}
    return {name: array[rows[splits[name]]] if splits[name] in rows else array for name, array in arrays.items()}


def first_users(arrays: Arrays, num_users: int | None) -> Arrays:
    """Selects the examples of the first ``num_users`` training users and of users who only test.

    A split without users stays whole.

    Args:
        arrays: Arrays of the archive.
        num_users: Number of users; None for all.

    Raises:
        ValueError: There are fewer users.
    """
    if num_users is None:
        return arrays
    users = np.unique(arrays["user_train"])
    others = users[checks.whole("num_users", num_users, 1, len(users)) :]
    splits = [split for split in SPLITS if f"user_{split}" in arrays]
    return selected(arrays, {split: ~np.isin(arrays[f"user_{split}"], others) for split in splits})
