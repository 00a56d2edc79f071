"""FedAvg whose clients send compressed updates."""

from __future__ import annotations

import dataclasses

from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.wire.channel import qsgd, uniform_quantiser
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate
from fedtangent._src.types import Algorithm, Model, Schedule

ROUNDS = "its channel rounds updates at random; nearest is fed_avg, whose updates they are on average"


@dataclasses.dataclass(frozen=True)
class Quantiser:
    """Options of FedPAQ's quantiser, ``channels.qsgd``."""

    bits: int = 8
    """Bits of a number, 2 to 16."""
    bucket_size: int | None = None
    """Numbers that share one norm (default: all of a message)."""


@recipe(
    papers=("haddadpour2021",),
    parts="local SGD, uniform quantiser; mean; SGD",
    unused=("channel", "secure_aggregation"),
)
def fed_com(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    bits: int = 8,
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedCOM: local SGD, updates sent through an unbiased quantiser (Haddadpour et al., 2021, algorithm 1).

    The quantiser is ``channels.uniform_quantiser(bits)``. It scales with its input, so the paper's division by the
    client's learning rate eta before quantising and multiplication by it afterwards change nothing and are left out.
    ``server_learning_rate`` is the paper's gamma. The paper weighs clients equally: ``weighting="uniform"``. For other
    channels use ``fed_avg``.

    Args:
        bits: Bits in which each number of an update is sent.

    Raises:
        ValueError: Bits outside 2 .. 16, and as ``fed_avg`` raises.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = common.AveragingParts(parts=Parts(channel=uniform_quantiser(bits)))
    return common.train_and_average("fed_com", training, schedule, averaging, replaced, ROUNDS)


@recipe(
    papers=("reisizadeh2020", "alistarh2017"),
    parts="local SGD, QSGD; mean; SGD",
    unused=("channel", "secure_aggregation"),
)
def fed_paq(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    quantiser: Quantiser = Quantiser(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedPAQ: local SGD, updates quantised as in QSGD, and their mean (Reisizadeh et al., 2020, algorithm 1).

    The quantiser is ``channels.qsgd(bits, bucket_size=...)``; with 4 bits it is the baseline "QSGD" of the paper NTK-FL
    (table 1). The paper weighs clients equally: ``weighting="uniform"``. For other channels use ``fed_avg``.

    Args:
        quantiser: Bits in which each number of an update is sent, and how many numbers share one norm
            (``bucket_size``).

    Raises:
        ValueError: Bits outside 2 .. 16, a ``bucket_size`` below 1, and as ``fed_avg`` raises.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = common.AveragingParts(parts=Parts(channel=qsgd(quantiser.bits, bucket_size=quantiser.bucket_size)))
    return common.train_and_average("fed_paq", training, schedule, averaging, replaced, ROUNDS)
