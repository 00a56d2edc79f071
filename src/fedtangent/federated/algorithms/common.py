"""What the recipes share: the options that all of them take, and local training followed by an average."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict, Unpack, cast

import optax

from fedtangent.checks import flag
from fedtangent.federated.aggregate import weighted_mean
from fedtangent.federated.compose import Parts, compose
from fedtangent.federated.local import Posed, Work, local_training
from fedtangent.federated.predict import Personal, own_models
from fedtangent.federated.rates import Optimizer, Rate, check_rate, sgd
from fedtangent.federated.server import optax_server
from fedtangent.federated.wire.secure_aggregation import BITS, masked_numbers, secured
from fedtangent.federated.wire.shuffler import shuffled
from fedtangent.federated.wire.subsample import check_beta, subsampled
from fedtangent.losses import Loss, check_targets, get_loss
from fedtangent.types import Accept, Algorithm, Array, Channel, FederatedData, Local, Model, Schedule, Server


class Options(TypedDict, total=False):
    """Options of every recipe that trains on its clients."""

    loss: str | Loss  # a name of losses.LOSSES, by default "squared_error", or a function as those there
    server_learning_rate: Rate  # share of the way to the clients' mean, 1 by default; may be a schedule of the round
    client_optimizer: Callable[[float | Array], optax.GradientTransformation] | None  # from the rate; SGD by default
    weighting: str  # "examples" (the default) or "uniform"
    accept: Accept | None  # which messages count, for instance ``faults.finite()``
    channel: Channel | None  # how messages travel, lossless by default
    personal: Personal | None  # how a client predicts for itself (``federated.predict``)
    beta: float  # share of its examples that a client uses in a round (``subsample``), 1 by default
    shuffle: bool  # a server between clients and aggregation permutes the messages (``shuffler``)
    secure_aggregation: int | None  # bits of the masked numbers of which the server sees the sum (32 or 64)


def check_options(name: str, work: Work, options: Options) -> None:
    """Raise ``ValueError`` for an option that does not exist, or is not of its kind."""
    for option in options:
        if option not in Options.__annotations__:
            raise ValueError(f"{option}: is no option of {name}, allowed are {', '.join(Options.__annotations__)}")
    if not isinstance(work, Work):
        raise ValueError(f"work: got {work!r}, must be a federated.local.Work")
    for option, what in FUNCTIONS.items():
        value = options.get(option)
        if value is not None and not callable(value):
            raise ValueError(f"{option}: got {value!r}, must be a function ({what})")
    if options.get("channel") is not None and not isinstance(options["channel"], Channel):
        raise ValueError(f"channel: got {options['channel']!r}, must be a channel such as channel.qsgd(4)")
    check_beta(options.get("beta", 1.0))
    flag("shuffle", options.get("shuffle", False))
    if options.get("personal") is own_models:
        raise ValueError("personal: own_models is for algorithms whose clients keep models, which use it anyway")


FUNCTIONS = {
    "client_optimizer": "from the rate, such as optax.adam",
    "accept": "of a message, such as faults.finite()",
    "personal": "such as predict.weighted_models(loss, gamma)",
}


def client_descent(rate: Rate, make: Callable[[float | Array], optax.GradientTransformation] | None) -> Optimizer:
    """The clients' optimiser at ``rate``: SGD, or what ``make`` makes of the rate."""
    if make is None:
        return sgd(rate)
    return (lambda round_: make(rate(round_))) if callable(rate) else make(rate)


class AveragingParts(Parts, total=False):
    """Parts that a recipe may replace by its own."""

    server: Server | Callable[[Rate], Server]
    # of ``options["server_learning_rate"]``, 1 unless given; by default SGD at that rate (1: the mean of the models)
    local: Posed  # its local problem and message, where they are not FedAvg's
    around: Callable[[Local], Local]  # wraps local training by what else a client does


def train_and_average(
    name: str,
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate,
    work: Work,
    options: Options,
    **own: Unpack[AveragingParts],
) -> Algorithm:
    """Each client trains; the server steps along the weighted mean of the messages, as along a gradient.

    ``own`` are the recipe's own parts; ``options["personal"]`` replaces a ``personal`` among them. Raises
    ``ValueError`` for rates that are not positive, a server rate where the server takes none, and an impossible
    ``work``.
    """
    check_options(name, work, options)
    check_rate("client_learning_rate", client_learning_rate)
    server = _server(name, options, own.pop("server", _plain_server))
    descent = client_descent(client_learning_rate, options.get("client_optimizer"))
    loss, posed = options.get("loss", "squared_error"), own.pop("local", Posed())
    train = local_training(model, get_loss(loss), descent, work, **posed)
    around = own.pop("around", None)
    shared: dict[str, Any] = {
        "weighting": options.get("weighting", "examples"),
        "accept": options.get("accept"),
        "channel": options.get("channel"),
    }
    data_checks = partial(check_data, loss), own.get("check")

    def check(data: FederatedData) -> None:
        for one in data_checks:
            if one is not None:
                one(data)

    parts = cast(Parts, {**shared, **own, "check": check})
    bits = options.get("secure_aggregation")
    if bits is not None:
        _secure(name, bits, options, parts)
    if options.get("personal") is not None:
        parts["personal"] = options["personal"]
    train = subsampled(train if around is None else around(train), options.get("beta", 1.0))
    if bits is not None:
        parts["channel"] = masked_numbers(bits)
        parts["aggregate"], server = secured(server, schedule.num_slots, bits=bits)
    if options.get("shuffle"):
        parts["aggregate"], server = shuffled(parts.get("aggregate") or weighted_mean(), server, schedule.num_slots)
    return compose(name, model, train, server, schedule, **parts)


def check_data(loss: str | Loss, data: FederatedData) -> None:
    """Raise ``ValueError`` for targets that the loss does not take."""
    check_targets(loss, data.y, "data: targets")


def _plain_server(rate: Rate) -> Server:
    return optax_server(sgd(rate))


def _server(name: str, options: Options, server: Server | Callable[[Rate], Server]) -> Server:
    """The server at the rate of ``options``; raises ``ValueError`` for a rate that it would ignore."""
    rate = options.get("server_learning_rate", 1.0)
    check_rate("server_learning_rate", rate)
    if callable(server):
        return server(rate)
    if "server_learning_rate" in options:
        raise ValueError(f"server_learning_rate: got {rate}, but {name} has a server of its own: leave it out")
    return server


def _secure(name: str, bits: Any, options: Options, parts: Parts) -> None:
    """Raise ``ValueError`` where the server needs to see single messages, which secure aggregation hides."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"secure_aggregation: got {bits!r}, must be the bits of a masked number, 32 or 64")
    if parts.get("aggregate") is not None:
        raise ValueError(f"secure_aggregation: {name} needs single messages at the server, which sees their sum only")
    if parts.get("accept") is not None:
        raise ValueError("accept: needs single messages, of which a server with secure_aggregation sees the sum only")
    if parts.get("channel") is not None:
        raise ValueError("channel: must be lossless with secure_aggregation, whose masks fill all of a message")
    if options.get("shuffle"):
        raise ValueError("shuffle: adds nothing to secure_aggregation, whose server sees the sum only")
