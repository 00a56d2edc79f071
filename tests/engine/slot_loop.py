"""A small work for slots, mapped and by hand; ``test_mapping.py`` and, over several processes, ``one_process.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.engine.clients import MapClients
from fedtangent._src.federated.aggregate import slots_of, stack, weighted_mean
from fedtangent._src.types import Array, Cohort, PyTree, Slots

ROUNDING = 1e-11
# Seven slots of three models, one of them empty, of clients of different sizes in no order.
CLIENTS, MODELS = np.array([4, 0, 5, 2, 1, 3, 6]), np.array([0, 1, 2, 0, 1, 2, 0])
WEIGHTS = np.array([1.0, 2.0, 0.0, 1.5, 0.5, 1.0, 3.0])
SIZES = np.array([3, 5, 1, 4, 6, 2, 5])  # by client
HELD = np.array([0.3, -0.2, 0.9])  # of each model
FOLDS = {"mean": weighted_mean(), "stack": stack(3)}


def train(held: Array, row: Slots) -> tuple[Slots, PyTree, PyTree]:
    """A slot's work, as long as its client is large; what it sends and what it tells are its own alone."""
    walk = lambda i, x: jnp.sin(x + held[row.model] + i)  # noqa: E731
    end = jax.lax.fori_loop(0, row.size, walk, row.client + 1.0)
    return row, {"w": end * jnp.arange(1.0, 3.0)}, {"client": row.client, "end": end}


def mapped(how: MapClients, fold: str = "mean") -> tuple[PyTree, PyTree]:
    """The finished aggregate, and what the slots told."""
    aggregate = FOLDS[fold]

    def run(held: Array, cohort: Cohort) -> tuple[PyTree, PyTree]:
        slots = slots_of(cohort, 3, jnp.asarray(np.cumsum([0, *SIZES]), jnp.int32))
        acc, outs = how(train, held, aggregate, aggregate.init({"w": jnp.zeros(2)}, 3), slots)
        return aggregate.finish(acc), outs

    cohort = Cohort(CLIENTS.astype(np.int32), MODELS.astype(np.int32), WEIGHTS)  # the same in every process
    return jax.tree.map(np.asarray, jax.jit(run)(HELD, cohort))


def told_by_hand() -> np.ndarray:
    """Where each slot's walk ends, one after another in NumPy; of the empty slot, where it would begin."""
    ends = CLIENTS + 1.0
    for slot, client in enumerate(CLIENTS):
        for i in range(SIZES[client] if WEIGHTS[slot] > 0 else 0):
            ends[slot] = np.sin(ends[slot] + HELD[MODELS[slot]] + i)
    return ends


def assert_by_hand(found: tuple[PyTree, PyTree], fold: str) -> None:
    aggregated, outs = found
    ends = told_by_hand()
    assert outs["client"].tolist() == CLIENTS.tolist()  # in the cohort's own order
    np.testing.assert_allclose(outs["end"], ends, rtol=0, atol=ROUNDING)
    for model in range(3):
        mine = (model == MODELS) & (WEIGHTS > 0)
        if fold == "mean":
            expected = np.average(ends[mine], weights=WEIGHTS[mine]) * np.array([1.0, 2.0])
            np.testing.assert_allclose(aggregated["w"][model], expected, rtol=0, atol=ROUNDING)
        else:
            assert aggregated.client[model, : mine.sum()].tolist() == CLIENTS[mine].tolist()
            assert aggregated.filled[model] == mine.sum() and not aggregated.beyond.any()
            sent = aggregated.messages["w"][model]
            np.testing.assert_allclose(sent[: mine.sum(), 1], 2 * ends[mine], rtol=0, atol=ROUNDING)
            assert not sent[mine.sum() :].any()
