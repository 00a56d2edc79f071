"""LEAF's own files (Caldas et al., 2018): JSON of each user's examples, in folders ``train`` and ``test``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent.data import files

CITATION = """@article{caldas2018,
  title = {{LEAF}: A Benchmark for Federated Settings},
  author = {Caldas, Sebastian and Duddu, Sai Meher Karthik and Wu, Peter and Li, Tian and
    Kone{\\v{c}}n{\\'y}, Jakub and McMahan, H. Brendan and Smith, Virginia and Talwalkar, Ameet},
  journal = {arXiv preprint arXiv:1812.01097},
  year = {2018},
}"""


class User(NamedTuple):
    """One user's examples, as JSON has them."""

    name: str
    x: list[Any]
    y: list[Any]
    path: Path


def find(directory: Path, stem: str) -> Path | None:
    """The folder with ``train/*.json`` and ``test/*.json``: ``stem*``, or ``data`` within it, as LEAF lays them."""
    for place in (directory, *sorted(p for p in directory.glob(f"{stem}*") if p.is_dir())):
        for folder in (place, place / "data"):
            if all(any((folder / split).glob("*.json")) for split in ("train", "test")):
                return folder
    return None


def users(name: str, folder: Path, split: str) -> Iterator[User]:
    """The users of ``folder/split/*.json``, in the order of the files' names, then theirs.

    A file is ``{"users": [..], "user_data": {user: {"x": [..], "y": [..]}}}``. Raises ``ValueError`` for another form,
    a user without examples and one that comes twice.
    """
    seen: set[str] = set()
    for path in sorted((folder / split).glob("*.json")):
        whole = files.json_of(name, path)
        try:
            held = {user: (whole["user_data"][user]["x"], whole["user_data"][user]["y"]) for user in whole["users"]}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name}: {path} has not the form of LEAF's files: users and user_data with x and y"
            ) from error
        for user, (x, y) in held.items():
            if not (isinstance(user, str) and isinstance(x, list) and isinstance(y, list)) or len(x) != len(y) or not y:
                raise ValueError(f"{name}: got user {user!r} in {path}, must have as many x as y, one or more")
            if user in seen:
                raise ValueError(f"{name}: got user {user!r} again in {path}, must be once in {split}")
            seen.add(user)
            yield User(user, x, y, path)
    if not seen:
        raise ValueError(f"{name}: got no user in {folder / split}, must be one or more")
