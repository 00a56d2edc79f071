"""Checkpoints of a run: complete, written atomically, verified when read, refused when they are another run's."""

from fedtangent.engine.checkpoints.options import CheckpointError, Checkpoints
from fedtangent.engine.checkpoints.store import has_checkpoint

__all__ = ["CheckpointError", "Checkpoints", "has_checkpoint"]
