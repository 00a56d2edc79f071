"""Checkpoints of a run, verified when read; a run resumes only from the same algorithm, data, seed and settings."""

from fedtangent._src.engine.checkpoints.options import CheckpointError, Checkpoints
from fedtangent._src.engine.checkpoints.store import has_checkpoint

__all__ = ["CheckpointError", "Checkpoints", "has_checkpoint"]
