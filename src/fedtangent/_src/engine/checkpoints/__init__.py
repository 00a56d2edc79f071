"""Checkpoints of a run: complete, written atomically, verified when read; another run's checkpoint is refused."""

from fedtangent._src.engine.checkpoints.options import CheckpointError, Checkpoints
from fedtangent._src.engine.checkpoints.store import has_checkpoint

__all__ = ["CheckpointError", "Checkpoints", "has_checkpoint"]
