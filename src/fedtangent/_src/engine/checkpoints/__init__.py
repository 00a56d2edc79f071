"""Checkpoints of a run: written atomically, and verified when they are read.

A run can only be resumed from a checkpoint of the same algorithm, data, seed and settings.
"""

from fedtangent._src.engine.checkpoints.options import CheckpointError, Checkpoints
from fedtangent._src.engine.checkpoints.store import has_checkpoint

__all__ = ["CheckpointError", "Checkpoints", "has_checkpoint"]
