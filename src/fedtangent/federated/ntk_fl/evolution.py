"""The server's evolution of NTK-FL: from pooled examples to new weights without a Jacobian in memory.

Conventions, consistent between function and weights: unless the cross entropy is asked for, the loss is
``1/(2 N C) sum |f - y|^2`` over the N real examples, ``Theta`` sums over parameters, so that gradient descent with
learning rate eta moves the function of the linearised network by ``s = eta / (N C)`` times ``Theta (y - f)`` a step.
(Yue et al., ICML 2022, print eta / N with the kernel H in (9a) and eta / (N C) in (10); only the latter in both makes
weights and function agree.) Targets are taken as they come, one-hot with or without their mean
(``data.classification_targets``): the paper does not say which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.federated.ntk_fl.dual import Dynamics, dynamics_of, method_of
from fedtangent.federated.ntk_fl.options import OUTPUT_LOSSES, Evolution, check_examples, held_out, probabilities
from fedtangent.federated.ntk_fl.tangent import (
    Examples,
    Pool,
    Tangent,
    linearise_network,
    num_together,
    pool_examples,
    signs,
)
from fedtangent.types import DIVERGED, NO_EXAMPLES, OK, REFUSED, Array, Model, PyTree

LARGEST_EXACT_ERROR = 1024  # n C up to which the averaged kernel's error is computed and not estimated
PROBES = 16
SAFETY = 0.9  # of the largest stable learning rate that "clip" takes


def ntk_evolve(
    model: Model,
    params: PyTree,
    examples: Examples,
    learning_rate: Array | float,
    evolution: Evolution,
    validation: tuple[Array, Array] | None = None,
) -> tuple[PyTree, dict[str, Array]]:
    """One round of NTK-FL at the server (Yue et al., ICML 2022, section 4.1, eq. 9-11).

    Evolves the network linearised at ``params`` by t steps of full-batch gradient descent on the pooled examples for
    every t in ``evolution.times``, and keeps the weights at which the real network has the smallest loss.

    Args:
        examples: pooled; rows of padding have no effect. With the cross entropy, targets are class labels [n], or
            probabilities [n, C].
        learning_rate: eta of the descent, positive; may be traced.
        validation: x [m, ...] and y [m, C], or labels as above, of examples that the server holds, of held-out clients
            say: the time is chosen by the loss on them, and by that on the pooled examples (11a) where there are none.

    Returns the new parameters in their own dtype, and ``info``: ``time`` [] int32 chosen (0 if none), ``losses`` [Psi]
    of the real network at every candidate (infinite where not finite, NaN where the search had ended), ``loss_before``
    [], ``status`` (0 fine, 1 every candidate diverged, 2 no examples, 3 refused; but for 0 the parameters are kept),
    ``refused`` [] bool, ``lambda_max`` [] of the kernel in use, ``stable_learning_rate`` [] = 2 N C / lambda_max (of
    the cross entropy 4 N / lambda_max) and ``learning_rate`` [] taken, ``products`` [] int32 with the kernel that the
    evolution took, ``kernel_error`` [] = |Theta - H (x) I| / |Theta| in Frobenius norm (estimated by 16 fixed random
    probes when n C > 1024), and ``function_gap`` [], the relative difference on the pooled examples between the
    linearised network at the chosen weights and the function that the kernel in use predicts. The last two are 0 in
    exact mode.

    Evolution is in float64. Raises ``ValueError`` without 64-bit mode and for a bad argument, named.
    """
    validation = held_out(validation, evolution.loss, model, examples.x)
    if evolution.loss == "cross_entropy":
        examples = examples._replace(y=probabilities("y", examples.y, model.output_size, examples.mask))
    check_examples(evolution, model, examples, learning_rate)
    new, info = _evolve(model, params, examples, learning_rate, validation, evolution)
    refused = evolution.unstable == "stop" and not isinstance(info["refused"], jax.core.Tracer)
    if refused and jnp.any(info["refused"]):
        raise ValueError(
            f"learning_rate: got {float(info['learning_rate']):.6g}, must be at most "
            f"{float(info['stable_learning_rate']):.6g}, {OUTPUT_LOSSES[evolution.loss].stable} / lambda_max of the "
            f"{evolution.kernel} kernel of these {int(jnp.sum(examples.mask))} examples"
        )
    return new, info


@functools.partial(jax.jit, static_argnames=("model", "evolution"))
def _evolve(
    model: Model,
    params: PyTree,
    given: Examples,
    learning_rate: Array | float,
    validation: tuple[Array, Array] | None,
    evolution: Evolution,
) -> tuple[PyTree, dict[str, Array]]:
    pool = pool_examples(*given)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    tangent = (evolution.linearise or linearise_network)(model, weights, pool)
    dynamics = dynamics_of(pool, tangent, evolution, method_of(evolution, params, given.y.shape))
    loss = OUTPUT_LOSSES[evolution.loss]
    number = loss.divisor(pool.num_examples, given.y.shape[1])  # eta over it is the step in function space
    stable = 2 / loss.curvature * number / dynamics.lambda_max
    rate = jnp.asarray(learning_rate, jnp.float64)
    rate = jnp.minimum(rate, SAFETY * stable) if evolution.unstable == "clip" else rate
    some = jnp.any(given.mask)
    refused = some & (rate > stable) if evolution.unstable == "stop" else jnp.bool_(False)
    dual, products = dynamics.dual(rate / number, ~refused)
    examples = pool if validation is None else pool_examples(*validation, jnp.ones(validation[0].shape[0], bool))
    together = 0 if evolution.kernel == "exact" else num_together(tangent, params, PROBES, 4)
    at_once = num_together(tangent, params, len(evolution.times)) == len(evolution.times) > 1
    found = choose_time(model, params, tangent.pull, dual, examples, evolution, at_once)
    status = jnp.where(found.best < 0, DIVERGED, OK)
    status = jnp.where(some, jnp.where(refused, REFUSED, status), NO_EXAMPLES)
    kept = jax.tree.map(lambda new, old: jnp.where(refused, old, new), found.params, params)
    info = {
        "time": jnp.where(status == OK, jnp.asarray(evolution.times, jnp.int32)[found.best], 0),
        "losses": jnp.where(refused, jnp.inf, found.losses),
        "loss_before": network_loss(model, params, examples, evolution),
        "status": status.astype(jnp.int32),
        "refused": refused,
        "lambda_max": dynamics.lambda_max,
        "stable_learning_rate": stable,
        "learning_rate": rate,
        "products": products,
        **_errors(pool, tangent, dynamics, dual[found.best], together),
    }
    return kept, info


# ---- the choice of the time ---------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The candidate that was kept."""

    params: PyTree  # of the best candidate, or those before where there is none
    best: Array  # [] int32, -1 where there is none
    losses: Array  # [Psi] of every candidate looked at, infinite where not finite, NaN where the search had ended


def network_loss(model: Model, params: PyTree, examples: Pool, evolution: Evolution) -> Array:
    """The loss of the real network at the parameters as they will be sent (in their own dtype), a scalar.

    ``1/(2 N C) sum |f - y|^2``, or with the loss "cross_entropy" ``-1/N sum y log softmax(f)``; with the criterion
    "accuracy" the share of examples whose largest output is not where the largest target is.
    """
    dtype = jax.tree.leaves(params)[0].dtype
    x = examples.x.astype(dtype) if jnp.issubdtype(examples.x.dtype, jnp.floating) else examples.x
    outputs = model.apply(params, x)
    if evolution.criterion == "accuracy":
        wrong = jnp.argmax(outputs, axis=1) != jnp.argmax(examples.y, axis=1)
        finite = jnp.all(jnp.isfinite(outputs) | (examples.mask == 0))
        return jnp.where(finite, jnp.sum(examples.mask[:, 0] * wrong) / examples.num_examples, jnp.inf)
    of = OUTPUT_LOSSES[evolution.loss]
    each = jnp.where(examples.mask[:, 0] > 0, of.examples(outputs.astype(jnp.float64), examples.y), 0)
    return jnp.sum(each) / of.divisor(examples.num_examples, examples.y.shape[1])


def choose_time(
    model: Model,
    params: PyTree,
    pull: Callable[[Array], PyTree],
    dual: Array,
    examples: Pool,
    evolution: Evolution,
    at_once: bool = False,
) -> Choice:
    """The candidate weights ``params + J' R_t`` with the smallest finite loss on ``examples``; the first of equals.

    Args:
        dual: R_t [Psi, n, C] of every candidate, in order of time.
        evolution: its ``criterion``, ``loss``, and ``patience``, which finds what the whole search finds where the loss
            falls, and then rises.
        at_once: apply ``pull`` to all candidates together, where that costs little more than one.
    """
    number = dual.shape[0]
    changes = jax.vmap(pull)(dual) if at_once else None
    limit = number if evolution.patience is None else evolution.patience

    def more(carry: tuple[Any, ...]) -> Array:
        i, rises = carry[:2]
        return (i < number) & (rises < limit)

    def consider(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, rises, last, least, best, losses = carry
        change = pull(dual[i]) if changes is None else pytrees.take(changes, i)
        evolved = jax.tree.map(lambda leaf, c: (leaf + c).astype(leaf.dtype), params, change)
        value = network_loss(model, evolved, examples, evolution)
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


# ---- how far the averaged kernel is from the whole one ------------------------------------------------------------


def _errors(pool: Pool, tangent: Tangent, dynamics: Dynamics, chosen: Array, together: int) -> dict[str, Array]:
    """How far the averaged kernel is from the whole one, and the function it predicts from the network's.

    ``together`` of the probes are taken at once; 0: the kernel is the whole one.
    """
    if together == 0:
        return {"kernel_error": jnp.zeros(()), "function_gap": jnp.zeros(())}
    predicted = dynamics.product(chosen)
    scale = jnp.linalg.norm(predicted)
    gap = jnp.linalg.norm(tangent.push(tangent.pull(chosen)) - predicted) / jnp.where(scale == 0, 1, scale)
    return {"kernel_error": _kernel_error(pool, tangent, dynamics, together), "function_gap": gap}


def _kernel_error(pool: Pool, tangent: Tangent, dynamics: Dynamics, together: int) -> Array:
    """``|Theta - H (x) I| / |Theta|``; H is a projection of Theta, so ``|Theta|^2 = |Theta - H (x) I|^2 + C |H|^2``."""
    n, outputs = pool.y.shape
    matrix = dynamics.matrix
    if outputs == 1:
        return jnp.zeros(())
    if n * outputs <= LARGEST_EXACT_ERROR and matrix is not None:
        whole = tangent.whole().reshape((n, outputs, n, outputs))
        difference = whole - matrix[:, None, :, None] * jnp.eye(outputs)[None, :, None, :]
        squared, rest = jnp.sum(difference**2), outputs * jnp.sum(matrix**2)
    else:

        def probe(i: Array) -> tuple[Array, Array]:
            z = pool.mask * signs(pool.y.shape, i)
            averaged = dynamics.product(z)
            return jnp.sum((tangent.push(tangent.pull(z)) - averaged) ** 2), jnp.sum(averaged**2)

        squared, rest = jax.tree.map(jnp.mean, jax.lax.map(probe, jnp.arange(PROBES), batch_size=together))
        rest = rest if matrix is None else outputs * jnp.sum(matrix**2)
    return jnp.sqrt(squared / jnp.where(squared + rest == 0, 1, squared + rest))
