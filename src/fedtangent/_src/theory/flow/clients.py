"""The clients of a partition, grouped by size, and the linear map from a client's residual to its local update.

A client starts at the server's model w and minimises ``F_i(v) + <tilt, v> + mu/2 |v - w|^2 + decay/2 |v|^2``. With
``b = tilt + decay w`` and ``nu = mu + decay`` its move is ``-Phi_i z - kappa b``, where Phi_i are the features of its
examples. With the eigenvalues lambda of ``Theta_ii = Phi_i' Phi_i``, one step of size eta gives, mode by mode,

    z <- (1 - eta nu) z + (eta / n_i) (g - lambda z - kappa b_i),     kappa <- (1 - eta nu) kappa + eta,

g being the client's residual ``f(X_i) - Y_i`` and ``b_i = Phi_i' b`` the values of b on its examples. So
``z = A g - C b_i`` with numbers A, C per mode, and one eigendecomposition per client serves every step size. Plain
gradient descent has ``A_i = (eta / n_i) sum_{s < T} (I - (eta / n_i) Theta_ii)^s`` (``response``). Gradient flow is the
limit of many small steps.

Under another loss the derivative of the loss by the outputs at the client's current model replaces
``(g - lambda z - kappa b_i) / n_i`` (``jax.grad`` of the loss over the batch, so that a sum over examples has no
1 / n_i). Then z is not linear in the residual, and the steps are taken one by one. Steps on minibatches, and steps of
an optimiser other than gradient descent, are taken one by one too. Such an optimiser runs on the coefficients, with the
same result as on the weights, because it is linear in the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Float64, Int, Int32, Shaped

from fedtangent._src.kernels.gram import known_modes, product
from fedtangent._src.kernels.large import LargeKernel
from fedtangent._src.losses import get_loss
from fedtangent._src.optimizers import at_round, unit_response
from fedtangent._src.theory.flow.rules import Kind, Numbers
from fedtangent._src.types import AnyArray, Array, Partition, PyTree

SMALLEST_BUCKET = 32
NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
SMALL = 0.1  # below, a divided difference loses digits and its integral is exact to rounding with eight nodes


class Bucket(NamedTuple):
    """Group of b clients of similar size, padded to s kernel rows each, as many as the largest of them has.

    A padding row has ``rows`` equal to the number of kernel rows q, which is out of range: it reads 0 and writes
    nothing. Its eigenvalue and eigenvector are 0, as for an eigenvalue lost in rounding.

    ``rows`` are each client's rows of the kernel Theta. The eigenvalues and eigenvectors belong to its kernel block
    Theta_ii; they are empty for a large kernel. If local steps are taken one by one, ``block`` is Theta_ii.
    """

    rows: Int[AnyArray, "b s"]  # the client's rows of Theta
    eigenvalues: Float[AnyArray, "b _"]  # of Theta_ii; of a large kernel [b, 0]
    eigenvectors: Float[AnyArray, "b _ _"]  # in columns; of a large kernel [b, 0, 0]
    num_examples: Float[AnyArray, "b"]  # n_i
    local_steps: Int[AnyArray, "b"]  # T_i
    block: Float[AnyArray, "b s s"] | None = None  # Theta_ii, if local steps are taken one by one


class ClientBlocks(NamedTuple):
    """All clients with at least one example, in buckets by size, with extreme eigenvalues of their kernel blocks.

    ``bucket_of`` and ``place_in_bucket`` say in which bucket each client is (-1: no examples), and at which index.
    ``smallest_eigenvalue`` is the least eigenvalue if it is negative, which an indefinite block has, else 0. Both
    extremes are 0 for a client without examples, and for a large kernel.
    """

    buckets: tuple[Bucket, ...]
    bucket_of: Int32[np.ndarray, "N"]  # -1 for a client with no examples
    place_in_bucket: Int32[np.ndarray, "N"]
    largest_eigenvalue: Float64[np.ndarray, "N"]  # lambda_max(Theta_ii); 0 without examples and for a large kernel
    smallest_eigenvalue: Float64[np.ndarray, "N"]  # lambda_min(Theta_ii) if it is negative, else 0


def build_clients(
    theta: Float64[np.ndarray, "q q"] | LargeKernel,
    partition: Partition,
    local_steps: Int[np.ndarray, "N"],
    rows_per_example: int,
    stepwise: bool = False,
) -> ClientBlocks:
    """Groups the clients by size into buckets, and computes the eigendecomposition of every client's kernel block.

    Args:
        theta: Kernel [q, q] with ``q = n * rows_per_example``, in example-major order; or a large kernel.
        partition: Training rows of each client.
        local_steps: Steps of each client [N].
        rows_per_example: Kernel rows of an example, the number of outputs that the kernel couples.
        stepwise: Whether to keep the kernel blocks too, for local steps that are taken one by one. A large kernel has
            blocks and no eigendecompositions.
    """
    sizes = np.asarray(partition.sizes)
    bucket_of = np.full(len(sizes), -1, np.int32)
    place = np.zeros(len(sizes), np.int32)
    largest, smallest = np.zeros(len(sizes)), np.zeros(len(sizes))
    buckets: list[Bucket] = []
    # Powers of two, small clients together: few programs to compile, and at most twice the rows in use.
    scale = np.ceil(np.log2(np.maximum(sizes, SMALLEST_BUCKET))).astype(int)
    for power in np.unique(scale[sizes > 0]):
        members = np.flatnonzero((scale == power) & (sizes > 0))
        bucket_of[members], place[members] = len(buckets), np.arange(len(members))
        bucket = _build_bucket(theta, partition, members, local_steps, rows_per_example, stepwise)
        if not isinstance(theta, LargeKernel):
            largest[members], smallest[members] = np.max(bucket.eigenvalues, axis=1), np.min(bucket.eigenvalues, axis=1)
        buckets.append(bucket)
    return ClientBlocks(jax.device_put(tuple(buckets)), bucket_of, place, largest, np.minimum(smallest, 0.0))


@jax.jit
def response(eigenvalues: Any, learning_rate: Any, num_examples: Any, local_steps: Any) -> Float[Array, "..."]:
    """Computes ``(1 - (1 - x)^T) / lambda`` with ``x = eta lambda / n_i``, the eigenvalues of a client's matrix A_i.

    A_i maps the client's residual to the coefficients of its update by T steps of gradient descent. At lambda = 0 the
    value is ``eta T / n_i``. The result is accurate to rounding for small x, and valid for x > 1 too. The arguments
    may be numbers or arrays, which broadcast.

    Args:
        eigenvalues: Eigenvalues lambda of Theta_ii.
        learning_rate: Step size eta.
        num_examples: Number n_i of the client's examples.
        local_steps: Number T of its steps.
    """
    step = learning_rate / num_examples
    x = step * eigenvalues
    small = jnp.abs(x) < 0.5
    nonzero = small & (jnp.abs(x) > 1e-150)  # below, the limit is exact in float64 and x^2 would underflow
    x_small = jnp.where(nonzero, x, 0.25)  # any harmless value: keeps derivatives of the branch not taken finite
    x_large = jnp.where(small, 1.0, x)
    few_steps = -jnp.expm1(local_steps * jnp.log1p(-x_small)) / x_small
    many_steps = (1 - jnp.power(1 - x_large, local_steps)) / x_large
    # the first terms at 0, where the value is T, for the derivatives there
    t = jnp.asarray(local_steps, x.dtype)
    near = t - t * (t - 1) / 2 * x + t * (t - 1) * (t - 2) / 6 * x**2
    return step * jnp.where(small, jnp.where(nonzero, few_steps, near), many_steps)


def client_rows(partition: Partition, client: int | np.integer, rows_per_example: int) -> Int[np.ndarray, "s"]:
    """Returns the indices of the kernel's rows for a client's examples, [n_i * rows_per_example] int64.

    Args:
        partition: Training examples of each client.
        client: Number of the client.
        rows_per_example: Number of kernel rows of an example; the rows of one example are adjacent.
    """
    examples = np.asarray(partition.client(client), np.int64)
    return (examples[:, None] * rows_per_example + np.arange(rows_per_example)[None, :]).reshape(-1)


def _build_bucket(
    theta: Float64[np.ndarray, "q q"] | LargeKernel,
    partition: Partition,
    members: Int[np.ndarray, "b"],
    local_steps: Int[np.ndarray, "N"],
    rows_per_example: int,
    stepwise: bool,
) -> Bucket:
    sizes, is_large = np.asarray(partition.sizes)[members], isinstance(theta, LargeKernel)
    width = int(sizes.max()) * rows_per_example
    rows = np.full((len(members), width), len(theta), np.int32)
    modes = 0 if is_large else width
    eigenvalues, eigenvectors = np.zeros((len(members), modes)), np.zeros((len(members), modes, modes))
    blocks = np.zeros((len(members), width, width), np.float32 if is_large else np.float64) if stepwise else None
    for position, client in enumerate(members):
        kernel_rows = client_rows(partition, client, rows_per_example)
        used = slice(0, len(kernel_rows))
        rows[position, used] = kernel_rows
        if isinstance(theta, LargeKernel):
            block = theta.block(kernel_rows)
        else:
            block = theta[np.ix_(kernel_rows, kernel_rows)]
            eigenvalues[position, used], eigenvectors[position, used, used] = known_modes(block)
        if blocks is not None:
            blocks[position, used, used] = block
    return Bucket(rows, eigenvalues, eigenvectors, sizes.astype(float), local_steps[members], blocks)


def lengths(bucket: Bucket, place: Int[Array, "S"], moves: Float[Array, "S s D"]) -> Float[Array, "S"]:
    """Computes the norms of clients' updates in the space of weights, [S] for S updates.

    Args:
        bucket: Group of clients of similar size.
        place: Index in the bucket of each update's client.
        moves: Coefficients of the updates on the s kernel rows of each client, [S, s, D], with D columns (outputs).
    """
    if bucket.block is not None:
        of_moves = jnp.einsum("kst,ktd->ksd", jnp.asarray(bucket.block)[place], moves)
        return jnp.sqrt(jnp.maximum(jnp.sum(moves * of_moves, axis=(1, 2)), 0.0))
    modes = jnp.einsum("kst,ksd->ktd", jnp.asarray(bucket.eigenvectors)[place], moves)
    return jnp.sqrt(jnp.sum(jnp.asarray(bucket.eigenvalues)[place][..., None] * modes**2, axis=(1, 2)))


class Gains(NamedTuple):
    """Factors A (``residual``) and C (``tilt``) of a client's update ``z = A g - C b_i``, one for each eigenvalue.

    The eigenvalues belong to the client's kernel block, and g is the client's residual. b_i are the values on its
    examples of the tilt b, a linear term of its local objective. ``kappa`` is how far a constant gradient of size 1
    moves the client.
    """

    residual: Float[Array, "s"]  # A, the factor of the residual
    tilt: Float[Array, "s"]  # C, the factor of the tilt; 0 for a rule without tilt
    kappa: Float[Array, ""]  # how far a constant force of size 1 moves the client


def gains(
    kind: Kind,
    numbers: Numbers,
    eigenvalues: Float[Array, "s"],
    rate: Float[Array, ""],
    num_examples: Float[Array, ""],
    steps: Int[Array, ""],
) -> Gains:
    """Computes the factors A and C of a client's update ``z = A g - C b_i`` (see ``Gains``) after full-batch steps.

    g is the client's residual and b_i the values of the tilt. Gradient flow runs for a time that is the sum of the step
    sizes.

    Args:
        kind, numbers: The rule, as ``read_rule`` splits it.
        eigenvalues: Eigenvalues of Theta_ii, [s].
        rate: Learning rate, [].
        num_examples: Number n_i of the client's examples, [].
        steps: Number of the client's local steps, [].
    """
    if kind.dynamics == "gradient_flow":
        return _of_gradient_flow(kind, numbers, eigenvalues / num_examples, rate, num_examples, steps)
    if kind.weighs_steps:
        return _by_recursion(kind, numbers, eigenvalues, rate, num_examples, steps)
    residual = response(eigenvalues + num_examples * numbers.nu, rate, num_examples, steps)
    kappa = response(numbers.nu, rate, jnp.ones(()), steps)
    if not kind.tilts:
        return Gains(residual, jnp.zeros_like(residual), kappa)
    return Gains(residual, _by_recursion(kind, numbers, eigenvalues, rate, num_examples, steps).tilt, kappa)


def sizes_of_steps(
    kind: Kind, numbers: Numbers, rate: Float[Array, ""], steps: Int[Array, ""]
) -> Float[Array, "most_steps"]:
    """Returns the sizes of a client's local steps, [most_steps]; 0 after its last step.

    ``most_steps`` is the largest number of local steps of any client.

    Args:
        kind, numbers: Static part and numbers of the rule.
        rate: Learning rate of the round, [].
        steps: Number of the client's local steps, [].
    """
    return jnp.where(jnp.arange(kind.most_steps) < steps, rate * numbers.step_weights, 0.0)


def unit_optimizer(kind: Kind, round_: Int[Array, ""]) -> optax.GradientTransformation:
    """Returns the clients' optimiser of a round, scaled so that its first step along a gradient of 1 has length 1.

    It is not scaled if that step is 0, as in a round of rate 0.

    Args:
        kind: Static part of the rule.
        round_: Index of the round, [].
    """
    if kind.client_optimizer is None:
        return optax.scale(-1.0)
    optimizer = at_round(kind.client_optimizer, round_)
    first = unit_response(optimizer, 0.0, jnp.int32(1), 1, jnp.float64)  # 0 in a round of rate 0, which moves nothing
    return optax.chain(optimizer, optax.scale(1 / jnp.where(first > 0, first, 1.0)))


def kappas(
    optimizer: optax.GradientTransformation, nu: Float[Array, ""], sizes: Float[Array, "most_steps"]
) -> tuple[Float[Array, "most_steps"], Float[Array, ""]]:
    """Computes kappa, how far a constant gradient of size 1 has moved a client, before each local step and at the end.

    Args:
        optimizer: The clients' optimiser (``unit_optimizer``).
        nu: Strength of the proximal term plus the weight decay, [].
        sizes: Sizes of the steps, [most_steps].

    Returns:
        kappa before each step, [most_steps], and after the last step, [].
    """

    def step(carry: tuple[Array, PyTree], eta: Array) -> tuple[tuple[Array, PyTree], Array]:
        kappa, state = carry
        update, state = optimizer.update(nu * kappa - 1, state)
        return (kappa + eta * update, state), kappa

    zero = jnp.zeros(())
    (last, _), before = jax.lax.scan(step, (zero, optimizer.init(zero)), sizes)
    return before, last


class Drive(NamedTuple):
    """Input of local training at s kernel rows, of all training points or of one client; D columns are outputs.

    ``values`` are residuals of the server's models, or under a loss other than the squared error their outputs, with
    ``targets``. The tilt b is a linear term that all local objectives share, such as weight decay; ``tilt`` has its
    values at the rows.
    """

    values: Float[Array, "s *K D"]  # the residual; f under a loss other than the squared error
    tilt: Float[Array, "s *K D"] | None  # values of b; None without a tilt common to all clients
    targets: Shaped[Array, "s D"] | None  # under a loss other than the squared error


class Batch(NamedTuple):
    """A minibatch: positions among a client's rows, and for each whether it counts (False for padding)."""

    rows: Int[Array, "b"]  # places among the client's rows; padding lies beyond the last row
    counts: Bool[Array, "b"]  # False for padding


def descent_by_steps(
    kind: Kind,
    numbers: Numbers,
    block: Float[Array, "s s"],
    optimizer: optax.GradientTransformation,
    of_step: Callable[[Int[Array, ""]], Batch],
    steps: Int[Array, ""],
    sizes: Float[Array, "most_steps"],
    drive: Drive,
) -> Float[Array, "s D"]:
    """Takes a client's local steps one by one and returns z, the coefficients of its update on its s kernel rows.

    The client's residual falls by ``Theta_ii z``, apart from the tilt's part. z is [s, D], with D columns (outputs). A
    step costs in proportion to the rows of its batch.

    Args:
        kind, numbers: Static part and numbers of the rule.
        block: Kernel block Theta_ii [s, s].
        optimizer: The clients' optimiser (``unit_optimizer``).
        of_step: Function from the index of a step to its batch.
        steps: Number of the client's local steps, [].
        sizes: Sizes of the steps (``sizes_of_steps``), [most_steps].
        drive: Residual, tilt and targets on the client's rows.
    """
    nu, before = numbers.nu, kappas(optimizer, numbers.nu, sizes)[0]

    def step(carry: tuple[Array, PyTree], now: tuple[Array, Array, Array]) -> tuple[Array, PyTree]:
        (z, state), (t, eta, kappa) = carry, now
        rows, counts = of_step(t)
        of_batch = jax.tree.map(lambda values: values.at[rows].get(mode="fill", fill_value=0.0), drive)
        f = of_batch.values - product(block.at[rows].get(mode="fill", fill_value=0.0), z)
        if of_batch.tilt is not None:
            f = f - kappa * of_batch.tilt
        push = _slope(kind, f, of_batch.targets, counts)
        if kind.client_optimizer is None:  # touches the rows of the batch only
            return (z * (1 - eta * nu)).at[rows].add(eta * push, mode="drop"), state
        update, state = optimizer.update((nu * z).at[rows].add(-push, mode="drop"), state)
        return z + eta * update, state

    def step_if_left(carry: tuple[Array, PyTree], now: tuple[Array, Array, Array]) -> tuple[tuple[Array, PyTree], None]:
        return jax.lax.cond(now[0] < steps, lambda c: step(c, now), lambda c: c, carry), None

    start = jnp.zeros_like(drive.values)
    return jax.lax.scan(step_if_left, (start, optimizer.init(start)), (jnp.arange(len(sizes)), sizes, before))[0][0]


def _slope(
    kind: Kind, f: Float[Array, "b D"], targets: Shaped[Array, "b D"] | None, counts: Bool[Array, "b"]
) -> Float[Array, "b D"]:
    """Computes the derivative of a batch's loss by outputs f [b, D]; without ``targets`` f is the residual f - y.

    ``counts`` is False for the rows that pad the batch.
    """
    width = kind.rows_per_example
    if targets is None:
        number = jnp.maximum(jnp.sum(counts) / width, 1)
        return jnp.where(counts[:, None], f, 0.0) * (1 / number)
    # the outputs of an example, which a loss takes together, may be rows of their own
    outputs, targets = (v.reshape(-1, v.shape[1] * width) for v in (f, targets))
    return jax.grad(get_loss(kind.loss))(outputs, targets, counts[::width]).reshape(f.shape)


def _by_recursion(
    kind: Kind,
    numbers: Numbers,
    eigenvalues: Float[Array, "s"],
    rate: Float[Array, ""],
    num_examples: Float[Array, ""],
    steps: Int[Array, ""],
) -> Gains:
    """Computes the factors A, C and kappa of a client's update (``Gains``), one local step after the other.

    The arguments are as for ``gains``.
    """
    nu = numbers.nu
    sizes = sizes_of_steps(kind, numbers, rate, steps)

    def step(carry: Gains, eta: Array) -> tuple[Gains, None]:
        share, shrink = eta / num_examples, 1 - eta * nu
        factor = shrink - share * eigenvalues
        tilt = carry.tilt * factor + share * carry.kappa
        return Gains(carry.residual * factor + share, tilt, carry.kappa * shrink + eta), None

    zeros = jnp.zeros_like(eigenvalues)
    return jax.lax.scan(step, Gains(zeros, zeros, jnp.zeros(())), sizes)[0]


def _of_gradient_flow(
    kind: Kind,
    numbers: Numbers,
    x: Float[Array, "s"],
    rate: Float[Array, ""],
    num_examples: Float[Array, ""],
    steps: Int[Array, ""],
) -> Gains:
    """Computes the factors A, C and kappa of a client's update (``Gains``) under gradient flow.

    The flow runs for a time that is the sum of the step sizes; ``x`` is lambda / n_i for each eigenvalue lambda of the
    kernel block. The other arguments are as for ``gains``.
    """
    nu = numbers.nu
    time = jnp.sum(sizes_of_steps(kind, numbers, rate, steps)) if kind.weighs_steps else rate * steps

    def phi(h: Array) -> Array:  # (1 - e^{-time h}) / h
        y = time * h
        near = jnp.abs(y) < 1e-150
        return time * jnp.where(near, 1.0 - y / 2 + y**2 / 6, -jnp.expm1(-y) / jnp.where(near, 1.0, y))

    def slope(y: Array) -> Array:  # -d/dy of (1 - e^{-y}) / y
        near = jnp.abs(y) < 0.5
        far = jnp.where(near, 1.0, y)
        series = sum((-1) ** j * (j + 1) * y**j / float(np.prod(np.arange(1, j + 3, dtype=float))) for j in range(16))
        return jnp.where(near, series, (1 - (1 + far) * jnp.exp(-far)) / far**2)

    residual, kappa = phi(nu + x) / num_examples, phi(nu)
    if not kind.tilts:
        return Gains(residual, jnp.zeros_like(residual), kappa)
    near = time * x < SMALL
    theta, weight = jnp.asarray((NODES + 1) / 2), jnp.asarray(NODE_WEIGHTS / 2)
    safe = jnp.where(near, x, 0.0)
    close = time**2 * jnp.einsum(
        "j,j...->...", weight, slope(time * (nu + theta.reshape(-1, *([1] * x.ndim)) * safe[None]))
    )
    apart = (phi(nu) - phi(nu + x)) / jnp.where(near, 1.0, x)
    return Gains(residual, jnp.where(near, close, apart) / num_examples, kappa)
