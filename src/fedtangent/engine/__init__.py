"""Compiled rounds: clients mapped over devices and processes, checkpoints, many runs, derivatives through rounds."""

from fedtangent.engine import checkpoints, processes
from fedtangent.engine.history import Evaluation, History, Run
from fedtangent.engine.hypergradients import hypergradient
from fedtangent.engine.run import RunOptions, params_by_round, simulate
from fedtangent.engine.sweeps import SweepOptions, sweep

__all__ = [
    "Evaluation",
    "History",
    "Run",
    "RunOptions",
    "SweepOptions",
    "checkpoints",
    "hypergradient",
    "params_by_round",
    "processes",
    "simulate",
    "sweep",
]
