"""Checkpoints of a run: complete, written atomically, verified when read, refused when they are another run's."""

from fedtangent.checkpointing.identity import identity
from fedtangent.checkpointing.options import CheckpointError, Checkpoints
from fedtangent.checkpointing.signals import stop_signals
from fedtangent.checkpointing.store import (
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
