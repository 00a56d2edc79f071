"""Simulation and theory side by side: the only package that imports both."""

from fedtangent._src.comparison.cases import build
from fedtangent._src.comparison.comparing import compare
from fedtangent._src.comparison.forecast import Forecast, Forecasting, predict, ranked, rounds_to_target
from fedtangent._src.comparison.from_start import FromStart
from fedtangent._src.comparison.ledger import LedgerRow, ResidualLedger, residual_ledger
from fedtangent._src.comparison.settings import NTKRuns, Problem, Scale, Setting, step_size
from fedtangent._src.comparison.side_by_side import Comparison, run
from fedtangent._src.comparison.verdicts import Verdict

__all__ = [
    "Comparison",
    "Forecast",
    "Forecasting",
    "FromStart",
    "LedgerRow",
    "NTKRuns",
    "Problem",
    "ResidualLedger",
    "Scale",
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
