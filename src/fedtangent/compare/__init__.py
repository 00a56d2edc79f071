"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.compare.alone import ranked, rounds_to_target, theory_alone
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
    "ranked",
    "residual_ledger",
    "rounds_to_target",
    "run",
    "step_size",
    "theory_alone",
]
