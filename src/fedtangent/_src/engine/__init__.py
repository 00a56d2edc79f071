"""The simulator: compiled rounds, clients on devices and processes, checkpoints, sweeps, hypergradients."""

from fedtangent._src.engine import checkpoints, processes
from fedtangent._src.engine.checkpoints import Checkpoints
from fedtangent._src.engine.clients import Devices
from fedtangent._src.engine.history import History, Measurement, Run
from fedtangent._src.engine.hypergradients import hypergradient
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.run import params_by_round, simulate
from fedtangent._src.engine.sweeps import sweep

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
