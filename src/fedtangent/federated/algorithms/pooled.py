"""Baselines that move data: training at the server on the cohort's examples, and examples that everybody shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax

from fedtangent.data.sharing import number_given
from fedtangent.federated.aggregate import stack
from fedtangent.federated.algorithms.averaging import check_base, fed_avg
from fedtangent.federated.algorithms.common import client_descent
from fedtangent.federated.algorithms.entry import Around, Given, Laws, Training, around, entry_of, shared_arguments
from fedtangent.federated.algorithms.pooling import pool_server, raw_examples
from fedtangent.federated.compose import compose, sequentially
from fedtangent.federated.local import Work
from fedtangent.federated.ntk_fl import send_examples
from fedtangent.federated.rates import Rate, check_rate
from fedtangent.losses import get_loss
from fedtangent.pytrees import item_bytes
from fedtangent.types import Accept, Algorithm, Array, Cost, FederatedData, Model, Schedule, wrapped


def centralised(
    model: Model,
    schedule: Schedule,
    *,
    learning_rate: Rate,
    work: Work,
    loss: str = "squared_error",
    optimizer: Callable[[float | Array], optax.GradientTransformation] | None = None,
    slots_per_model: int | None = None,
    accept: Accept | None = None,
) -> Algorithm:
    """Centralised training, the upper bound of NTK-FL, section 6, (iii): SGD at the server on the cohort's data.

    The clients of a round hand over their examples; the server trains each model on the pooled examples of its
    clients: ``work`` counts its steps, or its epochs over the pool, and its minibatches are drawn from all pooled rows.
    Every example counts alike. The ledger charges each example's x and y, every time that its client is in a cohort,
    and nothing downwards.

    Args:
        learning_rate: may be a schedule of the round.
        optimizer: from the rate, SGD by default; its state does not outlive a round.
        slots_per_model: the most clients that one model pools in a round (all slots by default); ``info["dropped"]``
            counts, per model, those beyond it.

    Raises ``ValueError`` for a rate that is not positive, an impossible ``work``, an unknown loss, or
    ``slots_per_model`` outside 1 .. S.
    """
    check_rate("learning_rate", learning_rate)
    slots = schedule.num_slots if slots_per_model is None else slots_per_model
    if not 1 <= slots <= schedule.num_slots:
        raise ValueError(
            f"slots_per_model: got {slots}, must be between 1 and {schedule.num_slots}, the schedule's slots"
        )
    server = pool_server(model, get_loss(loss), client_descent(learning_rate, optimizer), work)
    return compose(
        "centralised",
        model,
        send_examples(),
        server,
        schedule,
        aggregate=stack(slots),
        channel=raw_examples(),
        map_models=sequentially,
        accept=accept,
    )


def data_sharing(
    model: Model,
    schedule: Schedule,
    *,
    shared: Sequence[int] | np.ndarray,
    fraction: float = 1.0,
    base: Callable[..., Algorithm] = fed_avg,
    **options: Any,
) -> Algorithm:
    """Data sharing (Zhao et al., 2018, section 4; NTK-FL, section 6, (i)): clients also train on a global set.

    It is ``base`` on data that ``sharing.with_shared(partition, shared, fraction)`` made, charged once, before the
    first round, for the x and y of the shared examples that every client is sent. A client's weight counts all that it
    holds.

    Args:
        shared: indices of the global set G (``sharing.class_balanced`` draws one uniformly by class). NTK-FL's has
            10 % as many examples as all clients together.
        fraction: how much of it each client got, the paper's alpha; NTK-FL's clients get all of it.
        options: those of ``base``.

    Raises ``ValueError`` for a ``shared`` that is empty, repeats an index or is no list of whole numbers, a fraction
    outside (0, 1], and, before a run, for data of which some client that has examples was not given its shared ones.
    """
    each = number_given(shared, fraction)
    chosen = np.asarray(shared, np.int64)
    check_base(base)
    algorithm = base(model, schedule, **options)

    def ledger(found: Cost, data: FederatedData) -> Cost:
        clients = _sharing_clients(data, chosen, each)
        example = sum(math.prod(leaf.shape[1:]) * item_bytes(leaf.dtype) for leaf in (data.x, data.y))
        return found._replace(downlink_once=found.downlink_once + clients * each * example)

    name = "data_sharing" if base is fed_avg else f"{algorithm.name}_data_sharing"
    return wrapped(algorithm, name, ledger)


def _sharing_clients(data: FederatedData, shared: np.ndarray, each: int) -> int:
    """How many clients were given ``each`` of the shared examples; raises unless all that have examples were."""
    num_examples, offsets = data.x.shape[0], np.asarray(data.offsets)
    if shared.max() >= num_examples:
        raise ValueError(f"shared: has the index {shared.max()}, but data has {num_examples} examples")
    is_shared = np.zeros(num_examples, bool)
    is_shared[shared] = True
    before = np.concatenate([[0], np.cumsum(is_shared[np.asarray(data.indices)])])
    holds, sizes = before[offsets[1:]] - before[offsets[:-1]], np.diff(offsets)
    short = np.flatnonzero((sizes > 0) & (holds < each))
    if short.size:
        raise ValueError(
            f"data: client {short[0]} holds {holds[short[0]]} of the shared examples, must hold {each} "
            f"({short.size} such): make the partition with sharing.with_shared"
        )
    return int(np.sum(sizes > 0))


@dataclasses.dataclass(frozen=True)
class DataSharingOptions(Around):
    """Options of data sharing."""

    shared_fraction: float = 0.1
    """Share of all examples that every client holds."""


def _build_centralised(o: Training, given: Given) -> Algorithm:
    renamed = {"client_learning_rate": "learning_rate", "client_optimizer": "optimizer"}
    own = {renamed.get(name, name): value for name, value in shared_arguments(o).items()}
    return centralised(given.model, given.schedule, **own)


ENTRIES = (
    entry_of(
        centralised,
        "SGD at the server on the cohort's pooled data",
        Training,
        build=_build_centralised,
        papers=("yue2022",),
        parts="its examples; pool; SGD on the pool",
        sends="examples",
        laws=Laws(
            {"learning_rate": 0.2, "work": Work(epochs=2, batch_size=3)},
            exact={"learning_rate": 0.2, "work": Work(steps=3)},
            doubled="examples",
            nothing_on=("downlink_bytes",),
        ),
    ),
    entry_of(
        data_sharing,
        "every client holds --shared-fraction of all examples too, around --base (Zhao et al., 2018)",
        DataSharingOptions,
        build=around(data_sharing, "shared"),
        papers=("zhao2018",),
        parts="those of --base, on shared examples too",
        needs=("shared",),
        laws=Laws(
            {"client_learning_rate": 0.2, "work": Work(epochs=2, batch_size=2)},
            exact={"client_learning_rate": 0.2, "work": Work(steps=3)},
        ),
    ),
)
