"""Checkpoints of a run: complete, written atomically, verified when read, refused when they are another run's."""

from fedtangent.engine.checkpoints.identity import identity
from fedtangent.engine.checkpoints.options import CheckpointError, Checkpoints
from fedtangent.engine.checkpoints.signals import stop_signals
from fedtangent.engine.checkpoints.store import (
    Restored,
    Saved,
    Store,
    claimed,
    due,
    for_run,
    has_checkpoint,
    mapping_of,
    open_store,
    restore,
    save,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Restored",
    "Saved",
    "Store",
    "claimed",
    "due",
    "for_run",
    "has_checkpoint",
    "identity",
    "mapping_of",
    "open_store",
    "restore",
    "save",
    "stop_signals",
]
