"""How a round's cohort is mapped onto the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedtangent.types import Aggregate, Engine, FederatedData, PyTree, Slots

MAPPINGS = ("auto", "scan", "vmap")


def scan_clients(train: Callable[..., Any], aggregate: Aggregate, acc: PyTree, cohort: Slots) -> tuple[PyTree, PyTree]:
    """Train the slots one after another; each client costs what it holds, and one message is held at a time."""

    def one(acc: PyTree, row: Slots) -> tuple[PyTree, PyTree]:
        message, out = train(row)
        single = jax.tree.map(lambda leaf: leaf[None], (row, message))
        return aggregate.add(acc, *single), out

    return jax.lax.scan(one, acc, cohort)


def vmap_clients(train: Callable[..., Any], aggregate: Aggregate, acc: PyTree, cohort: Slots) -> tuple[PyTree, PyTree]:
    """Train all slots at once as one batched program; every slot costs what the largest client costs."""
    messages, outs = jax.vmap(train)(cohort)
    return aggregate.add(acc, cohort, messages), outs


_MAPS = {"scan": scan_clients, "vmap": vmap_clients}


def engine_for(data: FederatedData, mapping: str = "auto") -> Engine:
    """The engine for ``data``: ``"scan"``, ``"vmap"``, or ``"auto"`` (scan on a CPU, vmap on an accelerator).

    Raises ``ValueError`` for an unknown mapping.
    """
    if mapping not in MAPPINGS:
        raise ValueError(f"mapping: got {mapping!r}, allowed are {', '.join(MAPPINGS)}")
    if mapping == "auto":
        mapping = "scan" if jax.default_backend() == "cpu" else "vmap"
    return Engine(_MAPS[mapping], int(np.max(np.diff(np.asarray(data.offsets)))))
