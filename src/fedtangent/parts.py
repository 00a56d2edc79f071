"""Parts from which users compose algorithms: local training, aggregate, server, predictions."""

from fedtangent._src.federated.aggregate import optax_server, stack, weighted_mean
from fedtangent._src.federated.algorithms.common import AveragingParts, train_and_average, trained
from fedtangent._src.federated.compose import Parts, compose, sequentially
from fedtangent._src.federated.local import LocalProblem, difference, from_broadcast, local_training, minimise, proximal
from fedtangent._src.federated.predict import fine_tuned, mean_of_models, own_models, weighted_models

__all__ = [
    "AveragingParts",
    "LocalProblem",
    "Parts",
    "compose",
    "difference",
    "fine_tuned",
    "from_broadcast",
    "local_training",
    "mean_of_models",
    "minimise",
    "optax_server",
    "own_models",
    "proximal",
    "sequentially",
    "stack",
    "train_and_average",
    "trained",
    "weighted_mean",
    "weighted_models",
]
