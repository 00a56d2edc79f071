"""Algorithms of the papers as compositions of the shared parts, a few lines each."""

from __future__ import annotations

from fedtangent.federated.aggregate import stack
from fedtangent.federated.channel import jacobians
from fedtangent.federated.compose import compose, sequentially
from fedtangent.federated.local import Work, local_sgd
from fedtangent.federated.ntk_fl import ntk_server, send_examples
from fedtangent.federated.rates import Rate, check_rate, sgd
from fedtangent.federated.server import optax_server
from fedtangent.losses import get_loss
from fedtangent.types import Accept, Algorithm, Model, Schedule


def fed_avg(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    loss: str = "squared_error",
    server_learning_rate: Rate = 1.0,
    weighting: str = "examples",
    accept: Accept | None = None,
) -> Algorithm:
    """FedAvg (McMahan et al., 2017): local SGD from the broadcast model, weighted mean of the clients' models.

    With ``server_learning_rate`` other than 1 the server moves that fraction of the way to the mean. Rates may be
    schedules of the round (``federated.rates``); ``accept`` says which messages count (``federated.faults.finite``).
    """
    rates = client_learning_rate, server_learning_rate
    return _averaged("fed_avg", model, schedule, rates, work, loss, weighting, accept)


def fed_ensemble(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    loss: str = "squared_error",
    server_learning_rate: Rate = 1.0,
    weighting: str = "examples",
    accept: Accept | None = None,
) -> Algorithm:
    """Fed-ensemble: FedAvg on K models under a schedule that gives each client one model a round.

    FE-2024, algorithm 1 with ``schedule.per_client_permutations``; FE-2021, algorithm 1 with ``schedule.strata``.
    Prediction is the mean of the models (eq. 2). It is FedAvg with another schedule: K = 1 is FedAvg exactly.
    """
    rates = client_learning_rate, server_learning_rate
    return _averaged("fed_ensemble", model, schedule, rates, work, loss, weighting, accept)


def _averaged(
    name: str,
    model: Model,
    schedule: Schedule,
    rates: tuple[Rate, Rate],
    work: Work,
    loss: str,
    weighting: str,
    accept: Accept | None,
) -> Algorithm:
    client_rate, server_rate = rates
    check_rate("client_learning_rate", client_rate)
    check_rate("server_learning_rate", server_rate)
    local = local_sgd(model, get_loss(loss), sgd(client_rate), work)
    return compose(name, model, local, optax_server(sgd(server_rate)), schedule, weighting=weighting, accept=accept)


def ntk_fl(
    model: Model,
    schedule: Schedule,
    *,
    learning_rate: Rate,
    times: tuple[int, ...] = tuple(range(100, 2001, 100)),
    kernel: str = "averaged",
    method: str = "auto",
    slots_per_model: int | None = None,
    accept: Accept | None = None,
) -> Algorithm:
    """NTK-FL (Yue et al., ICML 2022, section 4.1): clients send Jacobians, the server evolves the tangent kernel.

    Args:
        learning_rate: eta of the halved squared error averaged over examples and outputs.
        times: candidate numbers of gradient steps; the one with the smallest training loss is kept (eq. 11a).
        kernel: ``"averaged"`` is the paper's H for all outputs, ``"exact"`` the full linearised evolution.
        slots_per_model: the most clients that one model pools in a round (all slots by default); ``info["dropped"]``
            counts, per model, those beyond it.
    """
    check_rate("learning_rate", learning_rate)
    server = ntk_server(model, learning_rate=learning_rate, times=times, kernel=kernel, method=method)
    slots = schedule.num_slots if slots_per_model is None else slots_per_model
    if not 1 <= slots <= schedule.num_slots:
        raise ValueError(
            f"slots_per_model: got {slots}, must be between 1 and {schedule.num_slots}, the schedule's slots"
        )
    return compose(
        "ntk_fl",
        model,
        send_examples(),
        server,
        schedule,
        aggregate=stack(slots),
        channel=jacobians(model.output_size),
        map_models=sequentially,
        accept=accept,
    )
