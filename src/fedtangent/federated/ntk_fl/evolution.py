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
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp

from fedtangent.federated.ntk_fl.dynamics import Dynamics, dynamics_of, method_of, signs
from fedtangent.federated.ntk_fl.losses import LOSSES, OUTPUT_LOSSES
from fedtangent.federated.ntk_fl.options import (
    KERNELS,
    METHODS,
    UNSTABLE,
    Settings,
    check_evolution,
    check_validation,
    evolution_plan,
    probabilities,
    validation_of,
)
from fedtangent.federated.ntk_fl.tangent import (
    Linearise,
    Pool,
    Tangent,
    linearise_network,
    num_together,
    pool_examples,
    whole_kernel,
)
from fedtangent.federated.ntk_fl.time import CRITERIA, choose_time, network_loss
from fedtangent.types import Array, Model, PyTree

__all__ = [
    "CRITERIA",
    "DIVERGED",
    "KERNELS",
    "LOSSES",
    "METHODS",
    "NO_EXAMPLES",
    "OK",
    "REFUSED",
    "UNSTABLE",
    "Evolution",
    "Linearise",
    "Pool",
    "Tangent",
    "evolution_plan",
    "linearise_network",
    "linearised_descent",
    "ntk_evolve",
]

OK, DIVERGED, NO_EXAMPLES, REFUSED = 0, 1, 2, 3  # info["status"]

LARGEST_EXACT_ERROR = 1024  # n C up to which the averaged kernel's error is computed and not estimated
PROBES = 16
SAFETY = 0.9  # of the largest stable learning rate that "clip" takes


class Choices(TypedDict, total=False):
    """Options of ``ntk_evolve``, for recipes that hand them on."""

    linearise: Linearise | None
    validation: tuple[Array, Array] | None
    criterion: str
    patience: int | None
    unstable: str
    loss: str
    kernel_bytes: int


class Evolution(Choices, total=False):
    """All options of ``ntk_evolve``."""

    kernel: str
    method: str


def ntk_evolve(
    model: Model, params: PyTree, x: Array, y: Array, mask: Array, learning_rate: Array | float,
    times: tuple[int, ...], kernel: str = "averaged", method: str = "auto", **options: Unpack[Choices],
) -> tuple[PyTree, dict[str, Array]]:  # fmt: skip
    """One round of NTK-FL at the server (Yue et al., ICML 2022, section 4.1, eq. 9-11).

    Evolves the network linearised at ``params`` by t steps of full-batch gradient descent on the pooled examples for
    every t in ``times``, and keeps the weights at which the real network has the smallest loss.

    Args:
        x, y, mask: pooled examples [n, ...], targets [n, C] and which rows are real, [n]; the others have no effect.
            With the cross entropy, targets are class labels [n], or probabilities [n, C].
        learning_rate: eta of the descent, positive; may be traced.
        times: candidate numbers of steps, increasing (static).
        kernel: ``"averaged"`` evolves every output with the paper's ``H = 1/C sum_k Theta_kk`` [n, n];
            ``"exact"`` with the whole kernel, that is exactly the linearised network's gradient descent.
        method: ``"eigh"``, one eigendecomposition for all times (of H, or of the [n C, n C] kernel); ``"chebyshev"``,
            a series of about ``sqrt(60 t)`` products with the kernel (with H, or with one forward and one backward
            derivative each); ``"iterate"``, the steps themselves, t products; ``"auto"``, the cheapest by measured
            cost (``evolution_plan`` tells which). All give the same up to rounding. The cross entropy is iterated.
        linearise: what stands for the network's Jacobian (static: a function, made once); the whole network's by
            default.
        validation: x [m, ...] and y [m, C], or labels as above, of examples that the server holds, of held-out clients
            say: the time is chosen by the loss on them, and by that on the pooled examples (11a) where there are none.
        criterion: ``"loss"``, or ``"accuracy"`` (by the share of wrong examples, ties to the earlier time).
        patience: end the search once the loss has risen so many candidates in a row; None looks at all.
        unstable: what to do with a learning rate above ``2 N C / lambda_max`` of the kernel in use (of the cross
            entropy ``4 N / lambda_max``): ``"stop"`` (raise, or where the values are traced keep the parameters, with
            status 3), ``"clip"`` it to 0.9 of that, or ``"allow"`` it, which diverges at large times. The averaged
            kernel's lambda_max is below the whole one's.
        loss: ``"squared_error"``, the paper's; or ``"cross_entropy"``, ``-1/N sum y log softmax(f)``, that of its
            authors' code: f moves by ``eta / N Theta (y - softmax(f))`` a step, which has no closed form and is
            iterated. It diverges for no step of up to ``4 N / lambda_max``.
        kernel_bytes: the most that the averaged kernel [n, n] may take; beyond it products are taken by C^2 passes
            through the network each. 4 GiB by default.

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
    given = dict(options)
    validation = validation_of(given.pop("validation", None), options.get("loss", ""), model.output_size)
    settings = Settings(times=times, kernel=kernel, method=method, **given)  # type: ignore[arg-type]
    if settings.loss == "cross_entropy":
        y = probabilities("y", y, model.output_size, mask)
    settings = check_evolution(settings, model, x, y, mask, learning_rate)
    check_validation(validation, model, x)
    new, info = _evolve(model, params, x, y, mask, learning_rate, validation, settings)
    if settings.unstable == "stop" and not isinstance(info["refused"], jax.core.Tracer) and jnp.any(info["refused"]):
        raise ValueError(
            f"learning_rate: got {float(info['learning_rate']):.6g}, above {float(info['stable_learning_rate']):.6g}, "
            f"the largest stable one, {OUTPUT_LOSSES[settings.loss].stable} / lambda_max of the {kernel} kernel of "
            f"these {int(jnp.sum(mask))} examples"
        )
    return new, info


def linearised_descent(
    model: Model, params: PyTree, x: Array, y: Array, steps: int, learning_rate: float, loss: str = "squared_error"
) -> PyTree:
    """``params`` after ``steps`` of gradient descent on the linearised network, taken one by one in weight space.

    Loss ``1/(2 n C) sum |f - y|^2``, or for "cross_entropy" ``-1/n sum y log softmax(f)``, over ``x`` [n, ...] and
    ``y`` [n, C] (or its class labels [n]); computed in the parameters' dtype. Raises ``ValueError`` for another loss,
    and for targets that do not fit.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss: got {loss!r}, allowed are {', '.join(LOSSES)}")
    of = OUTPUT_LOSSES[loss]
    y = probabilities("y", y, model.output_size) if loss == "cross_entropy" else y
    if y.shape != (x.shape[0], model.output_size):
        raise ValueError(f"y: got shape {y.shape}, must be {(x.shape[0], model.output_size)} ({of.labels})")
    outputs, push = jax.linearize(lambda p: model.apply(p, x), params)
    pull = jax.linear_transpose(push, params)
    step = learning_rate / of.divisor(*y.shape)

    def one(_: Array, change: PyTree) -> PyTree:
        (gradient,) = pull(of.predict(outputs + push(change)) - y.astype(outputs.dtype))
        return jax.tree.map(lambda c, g: c - step * g, change, gradient)

    change = jax.lax.fori_loop(0, steps, one, jax.tree.map(jnp.zeros_like, params))
    return jax.tree.map(jnp.add, params, change)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def _evolve(
    model: Model, params: PyTree, x: Array, y: Array, mask: Array, learning_rate: Array | float,
    validation: tuple[Array, Array] | None, settings: Settings,
) -> tuple[PyTree, dict[str, Array]]:  # fmt: skip
    pool = pool_examples(x, y, mask)
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    tangent = (settings.linearise or linearise_network)(model, weights, pool)
    dynamics = dynamics_of(pool, tangent, settings, method_of(params, y.shape, settings))
    loss = OUTPUT_LOSSES[settings.loss]
    number = loss.divisor(pool.num_examples, y.shape[1])  # eta over it is the step in function space
    stable = 2 / loss.curvature * number / dynamics.lambda_max
    rate = jnp.asarray(learning_rate, jnp.float64)
    rate = jnp.minimum(rate, SAFETY * stable) if settings.unstable == "clip" else rate
    some = jnp.any(mask)
    refused = some & (rate > stable) if settings.unstable == "stop" else jnp.bool_(False)
    dual, products = dynamics.dual(rate / number, ~refused)
    examples = pool if validation is None else pool_examples(*validation, jnp.ones(validation[0].shape[0], bool))
    found = choose_time(
        model,
        params,
        tangent.pull,
        dual,
        examples,
        settings.criterion,
        settings.patience,
        settings.loss,
        at_once=num_together(tangent, params, len(settings.times)) == len(settings.times) > 1,
    )
    status = jnp.where(found.best < 0, DIVERGED, OK)
    status = jnp.where(some, jnp.where(refused, REFUSED, status), NO_EXAMPLES)
    kept = jax.tree.map(lambda new, old: jnp.where(refused, old, new), found.params, params)
    info = {
        "time": jnp.where(status == OK, jnp.asarray(settings.times, jnp.int32)[found.best], 0),
        "losses": jnp.where(refused, jnp.inf, found.losses),
        "loss_before": network_loss(model, params, examples, settings.criterion, settings.loss),
        "status": status.astype(jnp.int32),
        "refused": refused,
        "lambda_max": dynamics.lambda_max,
        "stable_learning_rate": stable,
        "learning_rate": rate,
        "products": products,
        **_errors(pool, tangent, dynamics, dual[found.best], settings.kernel, num_together(tangent, params, PROBES, 4)),
    }
    return kept, info


def _errors(
    pool: Pool, tangent: Tangent, dynamics: Dynamics, chosen: Array, kernel: str, together: int
) -> dict[str, Array]:
    """How far the averaged kernel is from the whole one, and the function it predicts from the network's."""
    if kernel == "exact":
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
        whole = whole_kernel(tangent, (n, outputs)).reshape((n, outputs, n, outputs))
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
