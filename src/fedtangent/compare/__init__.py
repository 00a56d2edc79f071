"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.compare.cases import CASES, DEFAULT_CASES, build
from fedtangent.compare.settings import Setting, step_size
from fedtangent.compare.side_by_side import SideBySide, run

__all__ = ["CASES", "DEFAULT_CASES", "Setting", "SideBySide", "build", "run", "step_size"]
