"""Records and protocols: the types of the arguments and results of this package's functions."""

from fedtangent._src.comparison.forecast import Forecast
from fedtangent._src.comparison.from_start import FromStart
from fedtangent._src.comparison.side_by_side import Comparison
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.engine.history import History, Measurement, Run
from fedtangent._src.engine.sweeps import Sweep
from fedtangent._src.federated.algorithms.entry import Supplied
from fedtangent._src.types import (
    Accept,
    Aggregate,
    Algorithm,
    Channel,
    Client,
    Cohort,
    Cost,
    FederatedData,
    Gaussian,
    Kernel,
    Local,
    Loss,
    Model,
    Partition,
    Poll,
    Polled,
    Prediction,
    Recipe,
    RoundInfo,
    Schedule,
    Server,
    Slots,
)

__all__ = [
    "Accept",
    "Aggregate",
    "Algorithm",
    "Channel",
    "Client",
    "Cohort",
    "Comparison",
    "Cost",
    "FederatedData",
    "Forecast",
    "FromStart",
    "Gaussian",
    "History",
    "Kernel",
    "Local",
    "Loss",
    "Measurement",
    "Model",
    "Partition",
    "Poll",
    "Polled",
    "Prediction",
    "Recipe",
    "RoundInfo",
    "Run",
    "Schedule",
    "Server",
    "Slots",
    "Supplied",
    "Sweep",
    "Verdict",
]
