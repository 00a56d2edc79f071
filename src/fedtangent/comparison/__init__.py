"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.comparison.cases import build
from fedtangent.comparison.comparing import compare
from fedtangent.comparison.forecast import Forecast, Forecasting, predict, ranked, rounds_to_target
from fedtangent.comparison.from_start import FromStart
from fedtangent.comparison.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent.comparison.settings import Setting, step_size
from fedtangent.comparison.side_by_side import Comparison, run
from fedtangent.comparison.verdicts import Verdict

__all__ = [
    "Comparison",
    "Forecast",
    "Forecasting",
    "FromStart",
    "LedgerRow",
    "ResidualLedger",
    "Setting",
    "Verdict",
    "build",
    "compare",
    "predict",
    "ranked",
    "residual_ledger",
    "rounds_to_target",
    "run",
    "step_size",
]
