"""Polling: clients report the loss or gradient norm of each model, by which a schedule chooses the cohort."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from fedtangent._src import pytrees
from fedtangent._src.federated.aggregate import slots_of
from fedtangent._src.federated.local import client_view
from fedtangent._src.models.gemm import with_fast_convolutions
from fedtangent._src.types import Aggregate, Array, Client, Cohort, Engine, FederatedData, Loss, Model, PyTree, Slots

NUMBER_BYTES = 4  # of each number that a client answers
_KEPT = Aggregate(  # for clients that send no message
    init=lambda message, num_models: message,
    add=lambda kept, slots, messages: kept,
    finish=lambda kept: kept,
    merge=lambda kept, axis: kept,
)


def answers(
    measure: str,
    model: Model,
    loss: Loss,
    params: PyTree,
    candidates: Int32[Array, "D"],
    data: FederatedData,
    engine: Engine,
) -> Float[Array, "K D"]:
    """Computes the loss, or the gradient norm, of each of the K models on the examples of each of D clients.

    A value that is not finite is replaced by infinity. Without examples a built-in loss is 0. Clients and models are
    mapped onto the devices as in training.

    Args:
        measure: "loss", or "gradient_norm" for the Euclidean norm of the gradient of the loss.
        model: The network.
        loss: The loss by which the clients train.
        params: Parameters of the models, [K, ...].
        candidates: Ids of the clients that are asked, [D].
        data: Training examples of all clients.
        engine: Mapping of clients onto devices.
    """
    num_models, num_candidates = jax.tree.leaves(params)[0].shape[0], candidates.shape[0]
    value = _measured(measure, model, loss)

    def answer(shared: tuple[FederatedData, PyTree], row: Slots) -> tuple[Slots, tuple[()], Array]:
        data, params = shared
        client = client_view(data, row.client, row.weight > 0, engine.max_client_size)
        return row, (), value(pytrees.take(params, row.model), client)

    model_ids = jnp.repeat(jnp.arange(num_models, dtype=jnp.int32), num_candidates)
    everything = Cohort(jnp.tile(candidates, num_models), model_ids, jnp.ones(model_ids.shape, jnp.float32))
    slots = slots_of(everything, num_models, data.offsets)
    # an accumulator of the models' size, by which the engine decides how many clients it maps at once
    _, values = engine.map_clients(answer, (data, params), _KEPT, pytrees.zeros_like(params), slots)
    values = jax.lax.stop_gradient(values)
    return jnp.where(jnp.isfinite(values), values, jnp.inf).reshape(num_models, num_candidates)


def _measured(measure: str, model: Model, loss: Loss) -> Callable[[PyTree, Client], Array]:
    """Returns the function ``(params, client) -> scalar``: a model's loss, or gradient norm, on a client's examples."""
    apply = with_fast_convolutions(model.apply)

    def objective(params: PyTree, client: Client) -> Float[Array, ""]:
        mask = jnp.arange(client.rows.shape[0]) < client.size
        return loss(pytrees.wide(apply(params, client.data.x[client.rows])), client.data.y[client.rows], mask)

    if measure == "loss":
        return objective
    return lambda params, client: pytrees.norm(jax.grad(objective)(params, client))
