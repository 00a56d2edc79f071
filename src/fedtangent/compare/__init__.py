"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.compare.beside import beside_theory
from fedtangent.compare.cases import build
from fedtangent.compare.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent.compare.settings import Setting, step_size
from fedtangent.compare.side_by_side import SideBySide, run
from fedtangent.compare.verdicts import Verdict

__all__ = [
    "LedgerRow",
    "ResidualLedger",
    "Setting",
    "SideBySide",
    "Verdict",
    "beside_theory",
    "build",
    "residual_ledger",
    "run",
    "step_size",
]
