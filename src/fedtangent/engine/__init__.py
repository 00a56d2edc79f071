"""Compiled rounds: clients mapped over devices and processes, checkpoints, many runs, derivatives through rounds."""

from fedtangent.engine import checkpoints, processes
from fedtangent.engine.checkpoints import Checkpoints
from fedtangent.engine.clients import Devices
from fedtangent.engine.history import History, Measurement, Run
from fedtangent.engine.hypergradients import hypergradient
from fedtangent.engine.loop import Evaluation
from fedtangent.engine.run import params_by_round, simulate
from fedtangent.engine.sweeps import sweep

__all__ = [
    "Checkpoints",
    "Devices",
    "Evaluation",
    "History",
    "Measurement",
    "Run",
    "checkpoints",
    "hypergradient",
    "params_by_round",
    "processes",
    "simulate",
    "sweep",
]
