"""Compiled rounds: clients mapped over devices and processes, checkpoints, many runs, derivatives through rounds."""

from fedtangent.engine import checkpoints, processes
from fedtangent.engine.history import Evaluation, History, Run
from fedtangent.engine.hypergradients import hypergradient
from fedtangent.engine.run import simulate
from fedtangent.engine.sweeps import simulate_seeds, sweep

__all__ = [
    "Evaluation",
    "History",
    "Run",
    "checkpoints",
    "hypergradient",
    "processes",
    "simulate",
    "simulate_seeds",
    "sweep",
]
