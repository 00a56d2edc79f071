"""What averaging algorithms share: their options, and local training followed by an average of the messages.

A new option for all averaging algorithms needs a field of ``Averaging`` and its use in ``train_and_average``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from fedtangent._src import types
from fedtangent._src.checks import choice, flag, instance
from fedtangent._src.federated.aggregate import optax_server, weighted_mean
from fedtangent._src.federated.compose import Parts, compose
from fedtangent._src.federated.local import Posed, Work, local_training
from fedtangent._src.federated.predict import Personal, own_models
from fedtangent._src.federated.schedule import WEIGHTINGS
from fedtangent._src.federated.wire.secure_aggregation import BITS, masked_numbers, secured
from fedtangent._src.federated.wire.shuffler import shuffled
from fedtangent._src.federated.wire.subsample import check_beta, subsampled
from fedtangent._src.losses import Loss, check_targets, get_loss
from fedtangent._src.optimizers import Optimizer, Rate, check_linear, check_optimizer, check_rate, heavy_ball, sgd
from fedtangent._src.types import Accept, Algorithm, Channel, Composition, Local, Model, Schedule, Server, Training

DEFAULT_WORK = Work(epochs=5)

ARGUMENTS = {  # that many recipes share: a recipe's docstring describes only the others
    "model": "Network that the clients train.",
    "schedule": "Which client trains which model in which round.",
    "client_learning_rate": "Step size of local gradient descent, a number or a schedule of the round.",
    "work": "Local steps, or epochs, and minibatches of a round.",
    "loss": 'Name of a loss, such as "cross_entropy", or a function; by default the squared error, where class labels '
    "are one-hot targets minus 1/C (``models.logistic`` has the cross entropy).",
    "client_optimizer": "An optax optimiser of the clients, in place of gradient descent at a rate; its state does not "
    "outlive a round.",
    "averaging": "Weights, server step and channel.",
    "base": "Recipe of the algorithm inside, such as ``fed_avg``.",
    "options": "Further arguments of ``base``.",
}
RETURNS = "The algorithm; its ``rule`` says how theory follows it, or why theory cannot."
RAISES = "ValueError: Not exactly one of rate and optimiser, or an argument of the wrong type or range."


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Options of every averaging algorithm: weights and channel of the messages, and the server's step."""

    server_learning_rate: Rate | None = None
    """Step size of the server (default: 1, or the algorithm's own)."""
    server_optimizer: Optimizer | None = None
    """An optax optimiser of the server, in place of gradient descent at ``server_learning_rate``."""
    weighting: str | None = None
    """examples or uniform weights (default: by algorithm, else examples)."""
    channel: Channel | None = None
    """How messages travel, such as ``channels.qsgd(4)`` (default: unchanged)."""
    accept: Accept | None = None
    """Which messages the server counts, such as ``faults.finite()`` (default: all)."""
    personal: Personal | None = None
    """How a client predicts for itself (default: with the global models)."""
    beta: float = 1.0
    """Share of its examples that a client uses in a round."""
    shuffle: bool = False
    """A shuffler hides from the server which client sent which message."""
    secure_aggregation: int | None = None
    """Bits of masked numbers, 32 or 64, so that the server sees only their sum (default: not masked)."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for options of the wrong type or range, or a server rate together with an optimiser."""
        for name, example in (
            ("accept", "of a message, such as faults.finite()"),
            ("personal", "such as parts.weighted_models(loss, gamma)"),
        ):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"{name}: got {value!r}, must be a function ({example})")
        if self.channel is not None and not isinstance(self.channel, Channel):
            raise ValueError(f"channel: got {self.channel!r}, must be a channel such as channels.qsgd(4)")
        if self.server_learning_rate is not None:
            check_rate("server_learning_rate", self.server_learning_rate)
            if self.server_optimizer is not None:
                raise ValueError("server_optimizer: got one and a server_learning_rate, must be only one of the two")
        if self.server_optimizer is not None:
            check_optimizer("server_optimizer", self.server_optimizer)
        if self.weighting is not None:
            choice("weighting", self.weighting, WEIGHTINGS)
        check_beta(self.beta)
        flag("shuffle", self.shuffle)
        if self.personal is own_models:
            raise ValueError(
                "personal: got own_models, must be left out (None): algorithms whose clients keep models of their own "
                "use it without being asked"
            )
        bits = self.secure_aggregation
        if bits is not None and (isinstance(bits, bool) or bits not in BITS):
            raise ValueError(f"secure_aggregation: got {bits!r}, must be the bits of a masked number, 32 or 64")

    def filled(self, **defaults: str | float) -> Averaging:
        """Returns the options; values of ``defaults``, by name of the option, replace None.

        With a ``server_optimizer`` the default of ``server_learning_rate`` is not used.
        """
        if self.server_optimizer is not None:
            defaults.pop("server_learning_rate", None)
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **unset)  # type: ignore[arg-type]


def local_descent(training: Training) -> Optimizer:
    """Returns the optimiser by which clients train: ``training.optimizer`` or, if None, gradient descent."""
    return sgd(training.learning_rate) if training.optimizer is None else training.optimizer


def trained(
    model: Model,
    client_learning_rate: Rate | None,
    client_optimizer: Optimizer | None,
    work: Work,
    loss: str | Loss | None,
    name: str = "client",
) -> Training:
    """Checks the arguments of local training and returns them as one record.

    Args:
        model: Network that the clients train.
        client_learning_rate: Step size of local gradient descent, a number or a schedule of the round.
        client_optimizer: An optax optimiser, in place of gradient descent at a rate.
        work: Local steps, or epochs, and minibatches of a round.
        loss: Name of a loss or a function; None for the loss that the model is usually trained with.
        name: Prefix of the two arguments' names in error messages; empty for ``learning_rate`` and ``optimizer``.

    Raises:
        ValueError: Not exactly one of rate and optimiser, a rate that is not positive, an unknown loss, or a model,
            optimiser or ``work`` of another type.
    """
    instance("model", model, Model)
    rate, optimizer = (f"{name}_learning_rate", f"{name}_optimizer") if name else ("learning_rate", "optimizer")
    if client_optimizer is None:
        if client_learning_rate is None:
            raise ValueError(f"{rate}: got none, must be given (or {optimizer})")
        check_rate(rate, client_learning_rate)
    elif client_learning_rate is not None:
        raise ValueError(f"{optimizer}: got one and a {rate}, must be only one of the two")
    else:
        check_optimizer(optimizer, client_optimizer)
    if not isinstance(work, Work):
        raise ValueError(f"work: got {work!r}, must be a fedtangent.Work")
    loss = getattr(model, "loss", "squared_error") if loss is None else loss
    get_loss(loss)
    return Training(model, client_learning_rate, client_optimizer, work, loss)


class AveragingParts(NamedTuple):
    """The parts in which an averaging algorithm differs from FedAvg.

    Attributes:
        server: The algorithm's special server, or a function that builds it from the server's learning rate; None for a
            server that steps with an optimiser.
        local: The functions in which the clients' local problem, message or state differ; by default none.
        around: Wraps local training in further work of the client, such as training a second model.
        parts: Further parts of the composition, such as a channel.
    """

    server: Server | Callable[[Rate], Server] | None = None
    local: Posed = Posed()
    around: Callable[[Local], Local] = lambda train: train
    parts: Parts = Parts()


def train_and_average(
    name: str,
    training: Training,
    schedule: Schedule,
    averaging: Averaging,
    replaced: AveragingParts = AveragingParts(),
    rule: Mapping[str, object] | str = types.NO_RULE,
) -> Algorithm:
    """Builds an algorithm whose clients train and whose server steps along the weighted mean of their messages.

    Args:
        name: Name of the algorithm.
        training: The clients' model, loss, optimiser and local steps.
        schedule: Which client trains which model in which round.
        averaging: Weights, server step and channel.
        replaced: Parts in which the algorithm differs from FedAvg.
        rule: Fields of ``theory.Rule`` for the closed form, or a sentence that says why theory has none.

    Raises:
        ValueError: A server rate or optimiser that the algorithm's special server would ignore, a ``work`` without
            exactly one of steps and epochs, an unknown loss, options that exclude each other, or a schedule that this
            server cannot use.
    """
    instance("averaging", averaging, Averaging)
    instance("schedule", schedule, Schedule)
    if schedule.poll is not None and schedule.poll.inverse_weights and replaced.server is not None:
        raise ValueError(
            "schedule: got one that divides messages by their probabilities (gradient_norm_sampling), "
            f"which the server of {name} cannot use: choose another schedule"
        )
    server = _server(name, averaging, replaced.server)
    loss, descent = get_loss(training.loss), local_descent(training)
    train = local_training(training.model, loss, descent, training.work, **replaced.local)
    train = subsampled(replaced.around(train), averaging.beta)
    weighting = "examples" if averaging.weighting is None else averaging.weighting
    parts = replaced.parts._replace(weighting=weighting)

    def check(data: types.FederatedData) -> None:
        check_data(training.loss, data)
        if replaced.parts.check is not None:
            replaced.parts.check(data)

    parts = parts._replace(check=check)
    for field in ("accept", "channel", "personal"):
        if getattr(averaging, field) is not None:
            parts = parts._replace(**{field: getattr(averaging, field)})
    bits = averaging.secure_aggregation
    if bits is not None:
        _check_secure(name, averaging, parts)
        aggregate, server = secured(server, schedule.num_slots, bits=bits)
        parts = parts._replace(channel=masked_numbers(bits), aggregate=aggregate)
    if averaging.shuffle:
        aggregate, server = shuffled(parts.aggregate or weighted_mean(), server, schedule.num_slots)
        parts = parts._replace(aggregate=aggregate)
    composition = Composition(training, weighting, partial(_followed, training, averaging, rule))
    return compose(name, training.model, train, server, schedule, parts, composition)


def _followed(training: Training, averaging: Averaging, rule: Mapping[str, object] | str) -> Mapping[str, object] | str:
    """Adds the loss, the optimisers and the server rate to ``rule``, by which theory follows the algorithm.

    If theory cannot follow the algorithm with these options, returns a sentence that says why, in place of the rule.
    """
    if isinstance(rule, str) or not isinstance(rule, Mapping):
        return rule
    if averaging.channel is not None:
        return "its channel changes the updates; nearest is a lossless channel"
    if averaging.secure_aggregation is not None:
        return "secure_aggregation rounds its messages; nearest is the same algorithm without it"
    if averaging.beta != 1:
        return f"its clients use a share beta = {averaging.beta} of their examples; nearest is beta = 1"
    if getattr(averaging.accept, "max_norm", math.inf if averaging.accept is None else 0) < math.inf:
        return "its server may reject finite messages; nearest is accept=faults.finite()"
    fields: dict[str, object] = {"loss": training.loss, **rule}
    try:
        if training.optimizer is not None:
            check_linear("its client_optimizer", training.optimizer)
            fields["client_optimizer"] = training.optimizer
        if averaging.server_optimizer is not None:
            fields |= heavy_ball("its server_optimizer", averaging.server_optimizer)
    except ValueError as error:
        return str(error)
    if averaging.server_learning_rate is not None:
        fields["server_learning_rate"] = averaging.server_learning_rate
    return fields


def check_data(loss: str | Loss, data: types.FederatedData) -> None:
    """Raises ``ValueError`` if the targets are not of the kind that the loss takes (such as signs -1 and 1).

    Args:
        loss: Name of a loss, or a function.
        data: Training examples of all clients.
    """
    check_targets(loss, data.y, "data: targets")


def _server(name: str, averaging: Averaging, server: Server | Callable[[Rate], Server] | None) -> Server:
    """Builds the server: the algorithm's special ``server`` or, if None, one with the user's optimiser or rate.

    Raises ``ValueError`` for a rate or an optimiser in ``averaging`` that a special server would ignore.
    """
    rate, optimizer = averaging.server_learning_rate, averaging.server_optimizer
    if server is None:
        return optax_server(sgd(1.0 if rate is None else rate) if optimizer is None else optimizer)
    refused = {"server_optimizer": optimizer} | ({"server_learning_rate": rate} if isinstance(server, Server) else {})
    for option, value in refused.items():
        if value is not None:
            raise ValueError(f"{option}: got {value!r:.60}, but {name} has its own update at the server: leave it out")
    return server if isinstance(server, Server) else server(1.0 if rate is None else rate)


def _check_secure(name: str, averaging: Averaging, parts: Parts) -> None:
    """Raises ``ValueError`` if an option or a part needs single messages, which secure aggregation hides."""
    if parts.aggregate is not None:
        raise ValueError(f"secure_aggregation: {name} needs single messages, but the server sees only their sum")
    if parts.accept is not None:
        raise ValueError("accept: needs single messages, but with secure_aggregation the server sees only their sum")
    if parts.channel is not None:
        raise ValueError("channel: must be lossless with secure_aggregation, which masks every number of a message")
    if averaging.shuffle:
        raise ValueError("shuffle: adds nothing to secure_aggregation, whose server sees the sum only: leave it out")
