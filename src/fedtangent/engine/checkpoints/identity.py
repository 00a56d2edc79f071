"""What makes two runs the same run."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from fedtangent.types import Array, FederatedData, Key

_ROWS = 4096  # of each array; enough to tell data apart, cheap for data of any size


def fingerprint(data: FederatedData) -> dict[str, str]:
    """Dtype, shape and a digest of up to 4096 evenly spaced rows of each array of ``data``."""
    return {name: _digest(array) for name, array in data._asdict().items()}


def _digest(array: Array) -> str:
    step = max(1, -(-array.shape[0] // _ROWS))
    rows = np.ascontiguousarray(np.asarray(array[::step]))
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}] {hashlib.sha256(rows.tobytes()).hexdigest()[:16]}"


def key_text(key: int | Key | None) -> str | None:
    """A seed or a typed key as text; the key of a seed is not the seed's text, though it draws the same."""
    if isinstance(key, jax.Array):
        return f"{key.dtype} {np.asarray(jax.random.key_data(key)).tolist()}"
    return None if key is None else f"seed {int(key)}"


def identity(
    algorithm: str, data: FederatedData, seed: int | Key, init_key: Key | None, evaluate_every: int | None
) -> dict[str, Any]:
    """What a run shares with the one it continues, besides its caller's own config."""
    return {
        "algorithm": algorithm,
        "seed": key_text(seed),
        "init_key": key_text(init_key),
        "evaluate_every": evaluate_every,
        "data": fingerprint(data),
    }
