"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.compare.cases import CASES, DEFAULT_CASES, build
from fedtangent.compare.residual_ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent.compare.settings import Setting, step_size
from fedtangent.compare.side_by_side import SideBySide, run

__all__ = [
    "CASES",
    "DEFAULT_CASES",
    "LedgerRow",
    "ResidualLedger",
    "Setting",
    "SideBySide",
    "build",
    "residual_ledger",
    "run",
    "step_size",
]
