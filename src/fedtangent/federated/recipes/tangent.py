"""NTK-FL: the server evolves the tangent kernel of the cohort's examples."""

from __future__ import annotations

from fedtangent.federated.aggregate import stack
from fedtangent.federated.channel import jacobians
from fedtangent.federated.compose import compose, sequentially
from fedtangent.federated.ntk_fl import ntk_server, send_examples
from fedtangent.federated.rates import Rate, check_rate
from fedtangent.types import Accept, Algorithm, Model, Schedule


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
