"""NTK-FL's round at the server: from pooled examples to new weights, without a Jacobian in memory.

Conventions: with the squared error the loss is ``1/(2 N C) sum |f - y|^2`` over the N real examples with outputs f and
targets y, and the kernel ``Theta`` sums over parameters. So a step of gradient descent with learning rate eta moves the
function of the linearised network by ``s = eta / (N C)`` times ``Theta (y - f)``. (Yue et al., ICML 2022, eq. 9a and
10, with errata `ntk_fl.9a` and `ntk_fl.steps`.) Targets are used unchanged, one-hot with or without their mean
(``data.classification_targets``): the paper does not say which.

In the paper a client sends its Jacobians, outputs and targets. The simulator sends the examples instead and lets the
server compute the same kernel from them, so that no [N, C, P] array ever exists; the channel charges the wire ledger
for the Jacobians.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Num, Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import whole
from fedtangent._src.federated.aggregate import Stacked
from fedtangent._src.federated.ntk_fl.dual import Dynamics, dynamics_of, method_of
from fedtangent._src.federated.ntk_fl.options import OUTPUT_LOSSES, Evolution, check_examples, held_out, probabilities
from fedtangent._src.federated.ntk_fl.tangent import (
    Examples,
    Pool,
    Tangent,
    linearise_network,
    num_together,
    pool_examples,
    signs,
)
from fedtangent._src.federated.wire.shuffler import permuted
from fedtangent._src.optimizers import Rate, rate_at
from fedtangent._src.types import (
    DIVERGED,
    NO_EXAMPLES,
    OK,
    REFUSED,
    AnyArray,
    Array,
    Client,
    Key,
    Local,
    Model,
    PyTree,
    RoundInfo,
    Server,
)

LARGEST_EXACT_ERROR = 1024  # n C up to which the averaged kernel's error is computed and not estimated
PROBES = 16
SAFETY = 0.9  # of the largest stable learning rate that "clip" takes


def ntk_evolve(
    model: Model,
    params: PyTree,
    examples: Examples,
    learning_rate: Array | float,
    evolution: Evolution,
    validation: tuple[Shaped[AnyArray, "m ..."], Num[AnyArray, "m ..."]] | None = None,
) -> tuple[PyTree, dict[str, Array]]:
    """Computes one round of NTK-FL at the server (Yue et al., ICML 2022, section 4.1, eq. 9-11).

    The network linearised at ``params`` takes t steps of full-batch gradient descent on the pooled examples, in
    float64, for every t in ``evolution.times``. The weights at which the real network has the smallest loss are kept;
    with the criterion "accuracy" the loss is the share of wrong examples, here and in ``info``.

    Args:
        model: The network.
        params: Its parameters before the round.
        examples: Pooled examples; rows of padding have no effect. With the cross entropy, targets are class labels [n],
            or probabilities [n, C].
        learning_rate: eta of the descent, positive; may be traced.
        evolution: Candidate numbers of steps, kernel, method and loss of the evolution.
        validation: Examples x [m, ...] and y [m, C] (or labels as above) at the server, by whose loss t is chosen;
            None: by the loss on the pooled examples (eq. 11a).

    Returns:
        The new parameters in their dtype, and ``info`` with

        - ``time`` [] int32: the chosen number of steps (0 if none);
        - ``losses`` [Psi]: loss of the real network after each of the Psi ``times``; inf where it is NaN or inf, or if
          the rate was refused, and NaN for times that the search did not reach;
        - ``loss_before`` []: loss before the round; ``learning_rate`` []: the rate that was used; ``rate_cut`` [] bool:
          whether "clip" lowered the rate;
        - ``status``: 0 fine, 1 every candidate diverged, 2 no examples, 3 the learning rate
          was refused as unstable; with 1 to 3 the parameters are kept;
        - ``refused`` [] bool: whether the rate was refused; ``lambda_max`` []: largest eigenvalue of the kernel in use;
          ``stable_learning_rate`` [] = 2 N C / lambda_max (cross entropy: 4 N / lambda_max), for N examples and C
          outputs;
        - ``products`` [] int32: number of products with the kernel, without those that estimate ``lambda_max``;
        - ``kernel_error`` [] = |Theta - H (x) I| / |Theta| of the averaged kernel H, in Frobenius norm (estimated by
          random probes if n C > 1024 or H is not in memory), and ``function_gap`` []: the relative difference between
          the change of the linearised network's outputs at the chosen weights, on the pooled examples, and the change
          that H predicts. Both are 0 with the exact kernel.

    Raises:
        ValueError: JAX is not in 64-bit mode, an argument has a wrong shape or range, or ``unstable`` is "stop" and
            the learning rate is above the largest stable one.
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
            f"{float(info['stable_learning_rate']):.6g}, which is {OUTPUT_LOSSES[evolution.loss].stable} / lambda_max "
            f"of the {evolution.kernel} kernel of these {int(jnp.sum(examples.mask))} examples"
        )
    return new, info


@functools.partial(jax.jit, static_argnames=("model", "evolution"))
def _evolve(
    model: Model,
    params: PyTree,
    received: Examples,
    learning_rate: Array | float,
    validation: tuple[Array, Array] | None,
    evolution: Evolution,
) -> tuple[PyTree, dict[str, Array]]:
    pool = pool_examples(*received)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    tangent = (evolution.linearise or linearise_network)(model, weights, pool)
    dynamics = dynamics_of(pool, tangent, evolution, method_of(evolution, params, received.y.shape))
    loss = OUTPUT_LOSSES[evolution.loss]
    number = loss.divisor(pool.num_examples, received.y.shape[1])  # eta over it is the step in function space
    stable = 2 / loss.curvature * number / dynamics.lambda_max
    rate = requested = jnp.asarray(learning_rate, jnp.float64)
    if evolution.unstable == "clip":
        rate = jnp.minimum(requested, SAFETY * stable)
    some = jnp.any(received.mask)
    refused = some & (rate > stable) if evolution.unstable == "stop" else jnp.bool_(False)
    dual, products = dynamics.dual(rate / number, ~refused)
    examples = pool if validation is None else pool_examples(*validation, jnp.ones(validation[0].shape[0], bool))
    together = 0 if evolution.kernel == "exact" else num_together(tangent, params, PROBES, 4)
    at_once = num_together(tangent, params, len(evolution.times)) == len(evolution.times) > 1
    choice = choose_time(model, params, tangent.pull, dual, examples, evolution, at_once)
    status = jnp.where(choice.best < 0, DIVERGED, OK)
    status = jnp.where(some, jnp.where(refused, REFUSED, status), NO_EXAMPLES)
    weights_after = jax.tree.map(lambda new, old: jnp.where(refused, old, new), choice.params, params)
    info = {
        "time": jnp.where(status == OK, jnp.asarray(evolution.times, jnp.int32)[choice.best], 0),
        "losses": jnp.where(refused, jnp.inf, choice.losses),
        "loss_before": network_loss(model, params, examples, evolution),
        "status": status.astype(jnp.int32),
        "refused": refused,
        "lambda_max": dynamics.lambda_max,
        "stable_learning_rate": stable,
        "learning_rate": rate,
        "rate_cut": some & (rate < requested),
        "products": products,
        **_errors(pool, tangent, dynamics, dual[choice.best], together),
    }
    return weights_after, info


# ---- the choice of the time ---------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The candidate number of gradient steps with the smallest loss, and the losses of all candidates.

    Attributes:
        params: Parameters after this number of steps; if all candidates diverged, the parameters before the round.
        best: Index of this candidate, [] int32; -1 if all diverged.
        losses: Loss of each of the Psi candidates, [Psi]; inf where it is NaN or inf, and NaN for the candidates that
            the search did not reach.
    """

    params: PyTree
    best: Array
    losses: Array


# candidate, rises of the loss in a row, last and least loss, best parameters and their candidate, all losses
_Search = tuple[Array, Array, Array, Array, tuple[PyTree, Array], Array]


def network_loss(model: Model, params: PyTree, examples: Pool, evolution: Evolution) -> Array:
    """Computes the loss by which a number of gradient steps is chosen: of the real network at ``params``, a scalar.

    For outputs f and targets y of N examples it is ``1/(2 N C) sum |f - y|^2``, or with the loss "cross_entropy"
    ``-1/N sum y log softmax(f)``. With the criterion "accuracy" it is the share of examples whose largest output is not
    at their largest target, or infinite if an output is not finite.

    Args:
        model: The network.
        params: Its parameters, in the dtype in which they are sent.
        examples: The pooled examples.
        evolution: Options with the loss and the criterion.
    """
    dtype = jax.tree.leaves(params)[0].dtype
    x = examples.x.astype(dtype) if jnp.issubdtype(examples.x.dtype, jnp.floating) else examples.x
    outputs = model.apply(params, x)
    if evolution.criterion == "accuracy":
        wrong = jnp.argmax(outputs, axis=1) != jnp.argmax(examples.y, axis=1)
        finite = jnp.all(jnp.isfinite(outputs) | (examples.mask == 0))
        return jnp.where(finite, jnp.sum(examples.mask[:, 0] * wrong) / examples.num_examples, jnp.inf)
    of = OUTPUT_LOSSES[evolution.loss]
    losses = jnp.where(examples.mask[:, 0] > 0, of.examples(outputs.astype(jnp.float64), examples.y), 0)
    return jnp.sum(losses) / of.divisor(examples.num_examples, examples.y.shape[1])


def choose_time(
    model: Model,
    params: PyTree,
    pull: Callable[[Array], PyTree],
    dual: Array,
    examples: Pool,
    evolution: Evolution,
    at_once: bool = False,
) -> Choice:
    """Returns the candidate weights ``params + J' R_t`` with the smallest finite loss; of equal losses the first.

    J is the Jacobian [n, C, P], J' its transpose, and R_t the dual after t steps (``ntk_fl.dual``).

    Args:
        model: The network.
        params: Its parameters before the round.
        pull: J', from [n, C] to a change of weights.
        dual: R_t [Psi, n, C] for each of Psi candidate numbers of steps t, in increasing order.
        examples: The examples on which the loss is computed.
        evolution: Options with ``criterion``, ``loss`` and ``patience`` (rises of the loss that end the search).
        at_once: Whether to apply ``pull`` to all candidates together, if that takes little longer than for one.
    """
    number = dual.shape[0]
    changes = jax.vmap(pull)(dual) if at_once else None
    limit = number if evolution.patience is None else evolution.patience

    def more(carry: _Search) -> Array:
        i, rises = carry[:2]
        return (i < number) & (rises < limit)

    def consider(carry: _Search) -> _Search:
        i, rises, last, least, best, losses = carry
        change = pull(dual[i]) if changes is None else pytrees.take(changes, i)
        evolved = jax.tree.map(lambda leaf, c: (leaf + c).astype(leaf.dtype), params, change)
        value = network_loss(model, evolved, examples, evolution)
        value = jnp.where(jnp.isfinite(value), value, jnp.inf)
        better = value < least
        best_params = jax.tree.map(lambda new, old: jnp.where(better, new, old), evolved, best[0])
        rises = jnp.where((value > last) | jnp.isinf(value), rises + 1, 0)
        best = (best_params, jnp.where(better, i, best[1]))
        return i + 1, rises, value, jnp.minimum(value, least), best, losses.at[i].set(value)

    infinite = jnp.asarray(jnp.inf, jnp.float64)
    start = (jnp.int32(0), jnp.int32(0), infinite, infinite, (params, jnp.int32(-1)), jnp.full(number, jnp.nan))
    *_, (chosen, index), losses = jax.lax.while_loop(more, consider, start)
    return Choice(chosen, index, losses)


# ---- how far the averaged kernel is from the whole one ------------------------------------------------------------


def _errors(pool: Pool, tangent: Tangent, dynamics: Dynamics, chosen: Array, together: int) -> dict[str, Array]:
    """Computes ``kernel_error`` and ``function_gap`` of ``ntk_evolve``, scalars by name, both 0 for the exact kernel.

    ``chosen`` is the dual R_t [n, C] at the chosen number of steps t; ``together`` is the number of random probes
    computed at once, 0 for the exact kernel.
    """
    if together == 0:
        return {"kernel_error": jnp.zeros(()), "function_gap": jnp.zeros(())}
    predicted = dynamics.product(chosen)
    scale = jnp.linalg.norm(predicted)
    gap = jnp.linalg.norm(tangent.push(tangent.pull(chosen)) - predicted) / jnp.where(scale == 0, 1, scale)
    return {"kernel_error": _kernel_error(pool, tangent, dynamics, together), "function_gap": gap}


def _kernel_error(pool: Pool, tangent: Tangent, dynamics: Dynamics, together: int) -> Array:
    """Computes the relative error of the averaged kernel H, repeated for C outputs, against the whole kernel Theta.

    It is ``|Theta - H (x) I| / |Theta|`` in Frobenius norm. For a large kernel, or an H that is not in memory, it is
    estimated by random probes, ``together`` of them at once.
    """
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


def send_examples() -> Local:
    """Builds the client's part of NTK-FL: it sends its examples, from which the server computes their Jacobians."""

    def update(
        key: Key, broadcast: PyTree, client_state: PyTree, client: Client
    ) -> tuple[Examples, PyTree, dict[str, Array]]:
        mask = jnp.arange(client.rows.shape[0]) < client.size
        message = Examples(client.data.x[client.rows], client.data.y[client.rows], mask)
        return message, client_state, {"steps": jnp.int32(0)}

    return Local(init=lambda params: (), update=update)


def ntk_server(
    model: Model,
    learning_rate: Rate,
    evolution: Evolution,
    *,
    validation: tuple[Shaped[AnyArray, "m ..."], Num[AnyArray, "m ..."]] | None = None,
    pool_size: int | None = None,
    shuffle: bool = False,
) -> Server:
    """Builds NTK-FL's server, which trains the model on the cohort's pooled examples by ``ntk_evolve``.

    Args:
        model: The network.
        learning_rate: Step size eta of gradient descent, a number or a schedule of the round.
        evolution: Candidate numbers of steps, kernel, method and loss of the evolution.
        validation: Examples x, y by whose loss the number of steps is chosen; None: by the loss on the pooled examples.
        pool_size: Largest number of examples that are pooled, which bounds the kernel's size;
            ``info["examples_dropped"]`` counts the others. None: all, padding included. ``subsample.largest_sample`` is
            a size that drops none.
        shuffle: Whether the pooled examples are permuted by the round's key. This stands for a server between clients
            and aggregation (section 4.2), and changes the update only by rounding.

    Raises:
        ValueError: ``validation`` that does not fit the network, or a ``pool_size`` below 1.
    """
    held_out(validation, evolution.loss, model)
    if pool_size is not None:
        whole("pool_size", pool_size)

    def update(params: PyTree, aggregated: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        pooled = jax.tree.map(lambda leaf: leaf.reshape((-1, *leaf.shape[2:])), aggregated.messages)
        sent = jnp.sum(pooled.mask, dtype=jnp.int32)
        if pool_size is not None and pool_size < pooled.mask.shape[0]:
            rows = jnp.argsort(~pooled.mask, stable=True)[:pool_size]  # real rows first, in their order
            pooled = pytrees.take(pooled, rows)
        if shuffle:
            pooled = permuted(info.key, pooled)
        rate = rate_at(learning_rate, info.round)
        weights, report = ntk_evolve(model, params, pooled, rate, evolution, validation)
        # Clients and examples beyond the size of the pool are counted and reported.
        dropped = sent - jnp.sum(pooled.mask, dtype=jnp.int32)
        return weights, {**report, "dropped": aggregated.beyond, "examples_dropped": dropped}

    return Server(init=lambda params: params, broadcast=lambda state: state, params=lambda state: state, update=update)
