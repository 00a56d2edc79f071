"""The user's options of checkpoints, and the values that identify a run, so that only the same run is resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedtangent._src.checks import whole
from fedtangent._src.pytrees import is_key
from fedtangent._src.storage import sha256
from fedtangent._src.types import FederatedData, Key, PyTree

_ROWS = 4096  # of each array; enough to tell data apart, cheap for data of any size


class CheckpointError(ValueError):
    """An error for a checkpoint that is missing, damaged or of a different run, or that cannot be written.

    It is also raised for a folder of checkpoints that another run uses.
    """


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder of a run's checkpoints, how often one is written, and whether to resume from one.

    Checkpoints of an older run in ``folder`` stay until the first checkpoint of a new run is written.

    Args:
        folder: Folder of the checkpoints, created if it does not exist. Several processes of one run must see the same
            folder; the first process writes.
        every: Rounds between checkpoints. None: a checkpoint is due once ten seconds, and twenty times the duration of
            the last checkpoint, have passed since that checkpoint, so that checkpoints take at most about 5 % of a long
            run. In both cases one is written at the end and on SIGTERM or SIGINT.
        config: Values that identify the run (strings, numbers, booleans, None, paths, and lists, tuples and mappings of
            them); the checkpoint of a run with another config is refused, and the error names the fields. Leave out
            values that may differ, such as the number of rounds. Without a config, a digest of the traced round is
            compared. It detects another algorithm, rate or number of steps, but cannot name the difference, and it may
            change with the version of JAX.
        keep: Number of checkpoints that stay, the newest ones; older ones are used when the newest is damaged.
        resume: Whether to continue from the newest good checkpoint in ``folder``.
        notify: Called with a line of text for a damaged checkpoint that was skipped, for a file restored from its copy,
            for versions that differ, and for a file system without locks.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep: int = 3
    resume: bool = False
    notify: Callable[[str], None] = warnings.warn

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a number out of range or a config that JSON cannot hold."""
        if self.every is not None:
            whole("checkpoints.every", self.every)
        whole("checkpoints.keep", self.keep)
        plain(dict(self.config), "checkpoints.config")


def plain(value: object, where: str) -> Any:
    """Returns a value as JSON has it: lists, dictionaries and strings replace tuples, mappings and paths.

    Args:
        value: The value.
        where: Name of the value, for the error message.

    Raises:
        ValueError: ``value`` contains something that JSON cannot hold exactly.
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(
        f"{where}: got a {type(value).__name__}, allowed are strings, numbers, booleans, None, paths, and lists, "
        "tuples and mappings of them"
    )


def differences(before: object, now: object, name: str = "") -> list[str]:
    """Compares the settings in a checkpoint with this run's settings; returns a text for each field that differs.

    A missing field has the value "nothing".

    Args:
        before: The value in the checkpoint: a dictionary of fields, perhaps nested, or a single value.
        now: The value of this run.
        name: Name of the value, which precedes the names of its fields in the texts ("state.field"); empty for none.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        fields = []
        for key in before | now:
            inner = f"{name}.{key}" if name else key
            fields += differences(before.get(key, "nothing"), now.get(key, "nothing"), inner)
        return fields
    texts = [json.dumps(value) for value in (before, now)]
    return [] if texts[0] == texts[1] else [f"{name} ({texts[0]} in the checkpoint, {texts[1]} now)"]


def fingerprint(data: FederatedData) -> dict[str, str]:
    """Returns a text for each array of ``data``: dtype, shape and a digest of up to 4096 evenly spaced rows."""
    texts = {}
    for name, array in data._asdict().items():
        rows = np.asarray(array[:: max(1, -(-array.shape[0] // _ROWS))])
        shape = ",".join(map(str, array.shape))
        texts[name] = f"{array.dtype}[{shape}] {sha256(rows)[:16]}"
    return texts


def key_text(key: int | Key | None) -> str | None:
    """Returns a seed or a typed key as text, different for a seed and the key of that seed; None stays None."""
    if isinstance(key, jax.Array):
        return f"{key.dtype} {np.asarray(jax.random.key_data(key)).tolist()}"
    return None if key is None else f"seed {int(key)}"


def start_text(start: Key | PyTree | None) -> str | None:
    """Returns the argument ``start`` of a run as text: a key, or a digest of parameters; None stays None."""
    if start is None or (isinstance(start, jax.Array) and is_key(start)):
        return key_text(start)
    return f"parameters {sha256(*map(np.asarray, jax.tree.leaves(start)))[:16]}"


def identity(
    algorithm: str, data: FederatedData, seed: int | Key, start: Key | PyTree | None, evaluate_every: int | None
) -> dict[str, Any]:
    """Returns the values that a resumed run must share with the run that it continues, besides the user's config.

    Args:
        algorithm: Name of the algorithm.
        data: Training examples of all clients.
        seed: Seed or key of the run.
        start: Beginning of the models, as in ``simulate``.
        evaluate_every: Rounds between evaluations.
    """
    return {
        "algorithm": algorithm,
        "seed": key_text(seed),
        "start": start_text(start),
        "evaluate_every": evaluate_every,
        "data": fingerprint(data),
    }
