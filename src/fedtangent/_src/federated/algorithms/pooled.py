"""Baselines that move examples: training at the server on the cohort's examples, and examples shared by all clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import types
from fedtangent._src.checks import instance, whole
from fedtangent._src.data.sharing import number_given
from fedtangent._src.federated.aggregate import Stacked, stack
from fedtangent._src.federated.algorithms.averaging import check_base, fed_avg
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, check_data, local_descent, trained
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts, compose, sequentially
from fedtangent._src.federated.local import LocalProblem, Work, minimise, validate_work
from fedtangent._src.federated.ntk_fl import send_examples
from fedtangent._src.federated.wire import ledger
from fedtangent._src.federated.wire.channel import as_is
from fedtangent._src.losses import Loss, get_loss
from fedtangent._src.optimizers import Optimizer, Rate, at_round
from fedtangent._src.types import (
    Accept,
    Algorithm,
    Array,
    Client,
    FederatedData,
    Model,
    PyTree,
    Recipe,
    Schedule,
    Server,
)


@recipe(papers=("yue2022",), parts="examples; pool; SGD on the pool", sends="examples")
def centralised(
    model: Model,
    schedule: Schedule,
    learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    loss: str | Loss | None = None,
    optimizer: Optimizer | None = None,
    slots_per_model: int | None = None,
    accept: Accept | None = None,
) -> Algorithm:
    """Builds centralised training: SGD at the server on the cohort's data (NTK-FL paper, section 6 (iii)).

    The clients of a round send their examples, and the server trains each model on the pooled examples of its clients.
    Every example counts alike. In the paper this is the upper bound for federated algorithms. The wire ledger charges
    each example's x and y every time that its client is in a cohort, and nothing downwards.

    Args:
        model: Network that the server trains.
        schedule: Which client sends its examples for which model in which round.
        learning_rate: Step size of the server, a number or a schedule of the round.
        work: Steps, or epochs over the pool, and minibatches (of all pooled rows) of a round.
        optimizer: An optax optimiser, in place of gradient descent; its state does not outlive a round.
        slots_per_model: The most clients that one model pools in a round (default: all); ``info["dropped"]`` counts the
            others, per model.
        accept: Test of a message, such as ``faults.finite()``; messages that fail are ignored (default: all count).

    Raises:
        ValueError: Not exactly one of rate and optimiser, a ``work`` without exactly one of steps and epochs, an
            unknown loss, or ``slots_per_model`` below 1 or above the schedule's number of slots.
    """
    training = trained(model, learning_rate, optimizer, work, loss, "")
    instance("schedule", schedule, Schedule)
    slots = schedule.num_slots if slots_per_model is None else slots_per_model
    whole("slots_per_model", slots, 1, schedule.num_slots)
    parts = Parts(
        aggregate=stack(slots),
        channel=as_is(lambda message, broadcast: (0, ledger.example_bytes(message.x, message.y))),
        accept=accept,
        check=partial(check_data, training.loss),
    )
    server = pool_server(model, get_loss(training.loss), local_descent(training), work)
    rule = "its server trains on the pooled examples; nearest is fed_avg with one client, who holds them all"
    return compose(
        "centralised", model, send_examples(), server, schedule, parts, types.Composition(training, "examples", rule)
    )


def _pooled_client(received: Stacked, round_: Array) -> Client:
    """Merges the examples of M clients into one ``Client``, sorted by client id (whatever the cohort's order)."""
    has_examples = jnp.any(received.messages.mask, axis=1)
    order = jnp.argsort(jnp.where(has_examples, received.client, jnp.iinfo(jnp.int32).max), stable=True)
    flat = jax.tree.map(lambda leaf: leaf[order].reshape((-1, *leaf.shape[2:])), received.messages)
    rows = jnp.argsort(~flat.mask, stable=True).astype(jnp.int32)
    size = jnp.sum(flat.mask, dtype=jnp.int32)
    data = FederatedData(flat.x, flat.y, rows, jnp.stack([jnp.zeros_like(size), size]))
    return Client(jnp.int32(0), size, rows, data, round_)


def pool_server(model: Model, loss: Loss, optimizer: Optimizer, work: Work) -> Server:
    """Builds the server of centralised training, which trains the current model on the pooled examples of its clients.

    The server broadcasts nothing, because clients need no model to send their data.

    Args:
        model: The network.
        loss: The loss.
        optimizer: An optax optimiser, or a function from the round to one.
        work: Steps, or epochs over the pool, and minibatches of a round.

    Raises:
        ValueError: A ``work`` without exactly one of steps and epochs, or with a number below 1.
    """
    validate_work(work)

    def update(params: PyTree, aggregated: Stacked, info: types.RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        pool = _pooled_client(aggregated, info.round)
        trained, report = minimise(
            info.key, model, loss, at_round(optimizer, info.round), work, LocalProblem(params), pool
        )
        return trained, {
            "server_loss": report["loss"],
            "server_steps": report["steps"],
            "pooled": pool.size,
            "dropped": aggregated.beyond,  # clients beyond the slots of the pool are dropped and counted
        }

    return Server(
        init=lambda params: params,
        broadcast=lambda params: (),
        params=lambda params: params,
        update=update,
        map_models=sequentially,
    )


@recipe(papers=("zhao2018",), parts="as --base, also on shared examples", python_only=("fraction",))
def data_sharing(
    model: Model,
    schedule: Schedule,
    *,
    shared: Sequence[int] | np.ndarray,
    fraction: float = 1.0,
    base: Recipe = fed_avg,
    **options: Any,
) -> Algorithm:
    """Builds data sharing: clients also train on a global set (Zhao et al., 2018; NTK-FL paper, section 6 (i)).

    The source is section 4 of Zhao et al. The algorithm is ``base`` on a partition that you make with
    ``partition.with_shared(clients, shared, fraction)``. The wire ledger charges the shared examples once, before the
    first round. A client's weight counts the shared examples too.

    Args:
        shared: Indices of the global set G (``partition.class_balanced`` draws one uniformly by class). In the NTK-FL
            paper G has 10 % as many examples as all clients together.
        fraction: Share of the global set that each client gets; by default all of it, as in NTK-FL. Zhao et al. call it
            alpha.

    Raises:
        ValueError: A ``shared`` that is empty, repeats an index or is no list of whole numbers from 0, a fraction
            outside (0, 1], as ``base`` raises, and, before a run, an index beyond the data, or a client with examples
            but without its shared ones.

    Example:
        >>> import fedtangent as ft
        >>> data = ft.data.load("digits", num_train=60, num_test=30)
        >>> shared = ft.partition.class_balanced(data.y_train, 10, seed=0)
        >>> private = ft.partition.shards(data.y_train, num_clients=4, shards_per_client=2, seed=0)
        >>> clients = ft.partition.with_shared(private, shared)
        >>> model, schedule = ft.models.mlp(data, widths=(8,)), ft.schedules.uniform_sampling(4, clients_per_round=2)
        >>> algorithm = ft.data_sharing(model, schedule, shared=shared, client_learning_rate=0.1)
        >>> ft.simulate(algorithm, data, clients, num_rounds=1).history.rounds["examples"]  # 15 of its own, 7 shared
        array([[22, 22]], dtype=int32)
    """
    per_client = number_given(shared, fraction)
    chosen = np.asarray(shared, np.int64)
    check_base(base)
    algorithm = base(model, schedule, **options)

    def charged(cost: types.Cost, data: FederatedData) -> types.Cost:
        shared_bytes = _sharing_clients(data, chosen, per_client) * per_client * ledger.example_bytes(data.x, data.y)
        return cost._replace(downlink_once=cost.downlink_once + shared_bytes)

    name = "data_sharing" if base is fed_avg else f"{algorithm.name}_data_sharing"
    return types.wrapped(algorithm, name, charged)


def _sharing_clients(data: FederatedData, shared: np.ndarray, per_client: int) -> int:
    """Returns how many clients have examples; raises ``ValueError`` if one has under ``per_client`` shared examples.

    It also raises if ``shared``, the indices of the shared examples, has one beyond the data.
    """
    num_examples, offsets = data.x.shape[0], np.asarray(data.offsets)
    if shared.max() >= num_examples:
        raise ValueError(f"shared: has the index {shared.max()}, but data has {num_examples} examples")
    is_shared = np.zeros(num_examples, bool)
    is_shared[shared] = True
    before = np.concatenate([[0], np.cumsum(is_shared[np.asarray(data.indices)])])
    holds, sizes = before[offsets[1:]] - before[offsets[:-1]], np.diff(offsets)
    short = np.flatnonzero((sizes > 0) & (holds < per_client))
    if short.size:
        raise ValueError(
            f"data: client {short[0]} holds {holds[short[0]]} of the shared examples, must hold {per_client} "
            f"({short.size} clients hold fewer): make the partition by partition.with_shared"
        )
    return int(np.sum(sizes > 0))
