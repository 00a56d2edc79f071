"""NTK-FL's choice of the number of steps: the candidate whose real network does best (eq. 11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent.federated.ntk_fl.losses import OUTPUT_LOSSES
from fedtangent.federated.ntk_fl.tangent import Pool
from fedtangent.types import Array, Model, PyTree

CRITERIA = ("loss", "accuracy")


class Choice(NamedTuple):
    """The candidate that was kept."""

    params: PyTree  # of the best candidate, or those before where there is none
    best: Array  # [] int32, -1 where there is none
    losses: Array  # [Psi] of every candidate looked at, infinite where not finite, NaN where the search had ended


def network_loss(
    model: Model, params: PyTree, examples: Pool, criterion: str = "loss", loss: str = "squared_error"
) -> Array:
    """The loss of the real network at the parameters as they will be sent (in their own dtype), a scalar.

    ``1/(2 N C) sum |f - y|^2``, or with the loss "cross_entropy" ``-1/N sum y log softmax(f)``; with the criterion
    "accuracy" the share of examples whose largest output is not where the largest target is.
    """
    dtype = jax.tree.leaves(params)[0].dtype
    x = examples.x.astype(dtype) if jnp.issubdtype(examples.x.dtype, jnp.floating) else examples.x
    outputs = model.apply(params, x)
    if criterion == "accuracy":
        wrong = jnp.argmax(outputs, axis=1) != jnp.argmax(examples.y, axis=1)
        finite = jnp.all(jnp.isfinite(outputs) | (examples.mask == 0))
        return jnp.where(finite, jnp.sum(examples.mask[:, 0] * wrong) / examples.num_examples, jnp.inf)
    of = OUTPUT_LOSSES[loss]
    each = jnp.where(examples.mask[:, 0] > 0, of.examples(outputs.astype(jnp.float64), examples.y), 0)
    return jnp.sum(each) / of.divisor(examples.num_examples, examples.y.shape[1])


def choose_time(
    model: Model,
    params: PyTree,
    pull: Callable[[Array], PyTree],
    dual: Array,
    examples: Pool,
    criterion: str = "loss",
    patience: int | None = None,
    loss: str = "squared_error",
    at_once: bool = False,
) -> Choice:
    """The candidate weights ``params + J' R_t`` with the smallest finite loss on ``examples``; the first of equals.

    Args:
        dual: R_t [Psi, n, C] of every candidate, in order of time.
        patience: end the search once the loss has risen so many times in a row (never by default). That finds what the
            whole search finds where the loss falls, and then rises.
        at_once: apply ``pull`` to all candidates together, where that costs little more than one.
    """
    number = dual.shape[0]
    changes = jax.vmap(pull)(dual) if at_once else None
    limit = number if patience is None else patience

    def more(carry: tuple[Any, ...]) -> Array:
        i, rises = carry[:2]
        return (i < number) & (rises < limit)

    def consider(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, rises, last, least, best, losses = carry
        change = pull(dual[i]) if changes is None else jax.tree.map(lambda leaf: leaf[i], changes)
        evolved = jax.tree.map(lambda leaf, c: (leaf + c).astype(leaf.dtype), params, change)
        value = network_loss(model, evolved, examples, criterion, loss)
        value = jnp.where(jnp.isfinite(value), value, jnp.inf)
        better = value < least
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), evolved, best[0])
        rises = jnp.where((value > last) | jnp.isinf(value), rises + 1, 0)
        best = (kept, jnp.where(better, i, best[1]))
        return i + 1, rises, value, jnp.minimum(value, least), best, losses.at[i].set(value)

    infinite = jnp.asarray(jnp.inf, jnp.float64)
    start = (jnp.int32(0), jnp.int32(0), infinite, infinite, (params, jnp.int32(-1)), jnp.full(number, jnp.nan))
    *_, (chosen, index), losses = jax.lax.while_loop(more, consider, start)
    return Choice(chosen, index, losses)
