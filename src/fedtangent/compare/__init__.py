"""Simulation and theory side by side: the only package that imports both."""

from fedtangent.compare.cases import build
from fedtangent.compare.comparison import compare
from fedtangent.compare.forecast import Forecast, Forecasting, predict, ranked, rounds_to_target
from fedtangent.compare.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent.compare.settings import Setting, step_size
from fedtangent.compare.side_by_side import Comparison, run
from fedtangent.compare.verdicts import Verdict

__all__ = [
    "Comparison",
    "Forecast",
    "Forecasting",
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
