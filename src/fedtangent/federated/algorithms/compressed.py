"""FedAvg whose clients send compressed updates."""

from __future__ import annotations

import dataclasses
from typing import Unpack

from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.entry import TRAINED, Laws, Mean, ServerStep, Training, entry_of
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate
from fedtangent.federated.wire.channel import qsgd, uniform_quantiser
from fedtangent.types import Algorithm, Channel, Model, Schedule


def fed_com(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    bits: int = 8,
    **options: Unpack[Options],
) -> Algorithm:
    """FedCOM (Haddadpour et al., 2021, algorithm 1): local SGD, updates sent through an unbiased quantiser.

    The quantiser is ``channel.uniform_quantiser(bits)``. The paper quantises ``(server - client) / eta`` and multiplies
    by eta at the server; the quantiser scales with what it is given, so that this is the same. ``server_learning_rate``
    is the paper's gamma. The paper weighs clients equally: ``weighting="uniform"``. For other channels use ``fed_avg``.
    Raises ``ValueError`` for bits outside 2 .. 16.
    """
    wire = _own("fed_com", uniform_quantiser(bits), options)
    return train_and_average("fed_com", model, schedule, client_learning_rate, work, options, channel=wire)


def fed_paq(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    bits: int = 4,
    bucket_size: int | None = None,
    **options: Unpack[Options],
) -> Algorithm:
    """FedPAQ (Reisizadeh et al., 2020, algorithm 1): local SGD, updates quantised as in QSGD, and their mean.

    The quantiser is ``channel.qsgd(bits, bucket_size=...)``; with 4 bits it is NTK-FL's baseline "QSGD" (table 1). The
    paper weighs clients equally: ``weighting="uniform"``. For other channels use ``fed_avg``. Raises ``ValueError`` for
    bits outside 2 .. 16 and a ``bucket_size`` below 1.
    """
    wire = _own("fed_paq", qsgd(bits, bucket_size=bucket_size), options)
    return train_and_average("fed_paq", model, schedule, client_learning_rate, work, options, channel=wire)


def _own(name: str, channel: Channel, options: Options) -> Channel:
    if options.get("channel") is not None:
        raise ValueError(f"channel: {name} has a channel of its own; give another one to fed_avg")
    return channel


@dataclasses.dataclass(frozen=True)
class QuantisedOptions(ServerStep, Mean, Training):
    """Options of quantised updates."""

    bits: int = 8
    """Bits of a number."""


_DRAWS = {"doubling": "the quantiser draws anew for every client, so that two identical clients do not send the same"}

_ROUNDS = "its channel rounds what clients send at random; nearest is fed_avg, whose updates its own are on average"

ENTRIES = (
    entry_of(
        fed_com,
        "FedAvg through an unbiased quantiser of --bits (FedCOM, Haddadpour et al., 2021)",
        QuantisedOptions,
        papers=("haddadpour2021",),
        parts="local SGD, uniform quantiser; mean; SGD",
        rule=_ROUNDS,
        laws=Laws({**TRAINED, "server_learning_rate": 0.8}, exempt=_DRAWS),
    ),
    entry_of(
        fed_paq,
        "FedAvg through QSGD's quantiser of --bits (FedPAQ, Reisizadeh et al., 2020)",
        QuantisedOptions,
        papers=("reisizadeh2020", "alistarh2017"),
        parts="local SGD, QSGD; mean; SGD",
        rule=_ROUNDS,
        laws=Laws(
            {**TRAINED, "work": Work(steps=4, batch_size=4), "bucket_size": 5, "weighting": "uniform"}, exempt=_DRAWS
        ),
    ),
)
