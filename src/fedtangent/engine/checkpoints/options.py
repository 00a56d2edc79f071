"""Options of checkpoints, and what identifies a run, so that only the same run can be resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedtangent.checks import whole
from fedtangent.pytrees import is_key
from fedtangent.types import FederatedData, Key, PyTree

_ROWS = 4096  # of each array; enough to tell data apart, cheap for data of any size


class CheckpointError(ValueError):
    """A checkpoint that cannot be continued from: absent, another run's, or damaged."""


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where, how often and of what run checkpoints are written.

    A run that starts without ``resume`` leaves what ``folder`` holds untouched until its own first checkpoint is
    written; only then are older runs' checkpoints removed.

    Args:
        folder: made if need be. Several processes of one run must see the same folder; the first writes.
        every: rounds between checkpoints. None: as soon as ten seconds, and twenty times what the last checkpoint
            took, have passed since it, so that they cost at most about 5 % of a long run. Either way one is written
            at the end and on SIGTERM or SIGINT.
        config: identifies the run; a checkpoint of another config is refused, naming the fields. Strings, numbers,
            booleans, None, paths, and lists, tuples and mappings of them. Leave out what may differ (where results go,
            how long to run). Without a config, a digest of the traced round is compared: it detects another algorithm,
            rate or number of steps, but cannot name it (and may change with the version of JAX).
        keep: how many checkpoints stay, the newest ones; the older serve when the newest is damaged.
        resume: continue from the newest good checkpoint in ``folder``.
        notify: called with a line of text for a damaged checkpoint that was skipped, and for versions that differ.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep: int = 3
    resume: bool = False
    notify: Callable[[str], None] = warnings.warn

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a number out of range or a config that cannot be written down."""
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is not None:
                whole(f"checkpoint {name}", value)
        plain(dict(self.config), "checkpoint config")


def plain(value: Any, where: str) -> Any:
    """``value`` as JSON holds it; raises ``ValueError`` naming ``where`` for what JSON cannot hold exactly."""
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{where}: got a {type(value).__name__}, allowed are strings, numbers, booleans, None and paths")


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """The fields in which two plain values differ, as ``name (before in the checkpoint, now now)``."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in (*before, *(k for k in now if k not in before)):
            inner = f"{name}.{key}" if name else key
            found += differences(before.get(key, "nothing"), now.get(key, "nothing"), inner)
        return found
    texts = [json.dumps(value) for value in (before, now)]
    return [] if texts[0] == texts[1] else [f"{name} ({texts[0]} in the checkpoint, {texts[1]} now)"]


def fingerprint(data: FederatedData) -> dict[str, str]:
    """Dtype, shape and a digest of up to 4096 evenly spaced rows of each array of ``data``."""
    found = {}
    for name, array in data._asdict().items():
        rows = np.ascontiguousarray(np.asarray(array[:: max(1, -(-array.shape[0] // _ROWS))]))
        shape = ",".join(map(str, array.shape))
        found[name] = f"{array.dtype}[{shape}] {hashlib.sha256(rows.tobytes()).hexdigest()[:16]}"
    return found


def key_text(key: int | Key | None) -> str | None:
    """A seed or a typed key as text; the key of a seed is not the seed's text, though it draws the same."""
    if isinstance(key, jax.Array):
        return f"{key.dtype} {np.asarray(jax.random.key_data(key)).tolist()}"
    return None if key is None else f"seed {int(key)}"


def start_text(start: Key | PyTree | None) -> str | None:
    """Returns the beginning of the models as text: a key, or the SHA-256 of parameters."""
    if start is None or (isinstance(start, jax.Array) and is_key(start)):
        return key_text(start)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(start):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return f"parameters {digest.hexdigest()[:16]}"


def identity(
    algorithm: str, data: FederatedData, seed: int | Key, start: Key | PyTree | None, evaluate_every: int | None
) -> dict[str, Any]:
    """What a resumed run must share with the one that it continues, besides the caller's own config."""
    return {
        "algorithm": algorithm,
        "seed": key_text(seed),
        "start": start_text(start),
        "evaluate_every": evaluate_every,
        "data": fingerprint(data),
    }
