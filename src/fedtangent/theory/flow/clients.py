"""What a client's local training does to a residual, and the clients of a partition grouped by size.

Full-batch gradient descent of T steps on ``1/(2 n_i) |f(X_i) - Y_i|^2`` moves client i's function by
``-Theta(x, X_i) A_i g_i`` for the residual ``g_i = f(X_i) - Y_i``, with

    A_i = (eta / n_i) sum_{s < T} (I - (eta / n_i) Theta_ii)^s ,

a function of Theta_ii alone. One eigendecomposition per client gives it for every step size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.types import Array, Partition

SMALLEST_BUCKET = 32


Batches = tuple[tuple[np.ndarray, ...], ...]


class Bucket(NamedTuple):
    """Clients of similar size, padded to the largest of them, so that a skewed partition costs what it holds.

    A padding row has ``rows`` equal to the number of kernel rows q (out of range: reads 0, writes nothing),
    eigenvalue 0 and zero eigenvectors.
    """

    rows: Array | np.ndarray  # [b, s] int32, the client's rows of Theta
    eigenvalues: Array | np.ndarray  # [b, s] of Theta_ii
    eigenvectors: Array | np.ndarray  # [b, s, s], columns
    num_examples: Array | np.ndarray  # [b] float64, n_i
    local_steps: Array | np.ndarray  # [b] int64, T_i
    block: Array | np.ndarray | None = None  # [b, s, s] Theta_ii, for minibatches only
    shares: Array | np.ndarray | None = None  # [b, most steps, s], 1 / |B_t| on the rows of step t's batch


class Clients(NamedTuple):
    """All clients with at least one example."""

    buckets: tuple[Bucket, ...]
    bucket_of: np.ndarray  # [N] int32, -1 for a client with no examples
    place_in_bucket: np.ndarray  # [N] int32
    largest_eigenvalue: np.ndarray  # [N] float64, lambda_max(Theta_ii); 0 for a client with no examples
    smallest_eigenvalue: np.ndarray  # [N] float64, the least, or 0 if none is below


def build_clients(
    theta: np.ndarray,
    partition: Partition,
    local_steps: np.ndarray,
    rows_per_example: int,
    batches: Batches | None = None,
) -> Clients:
    """Eigendecompositions of every client's own kernel block.

    ``theta`` is [q, q] with ``q = n * rows_per_example`` in example-major order. ``batches`` gives, per client and
    local step, the batch as places in the client's own examples.
    """
    sizes = np.asarray(partition.sizes)
    bucket_of = np.full(len(sizes), -1, np.int32)
    place = np.zeros(len(sizes), np.int32)
    largest, smallest = np.zeros(len(sizes)), np.zeros(len(sizes))
    buckets: list[Bucket] = []
    # Powers of two, small clients together: few programs to compile, and at most twice the rows that are held.
    scale = np.ceil(np.log2(np.maximum(sizes, SMALLEST_BUCKET))).astype(int)
    for power in np.unique(scale[sizes > 0]):
        members = np.flatnonzero((scale == power) & (sizes > 0))
        bucket_of[members], place[members] = len(buckets), np.arange(len(members))
        bucket = _build_bucket(theta, partition, members, local_steps, rows_per_example)
        largest[members], smallest[members] = np.max(bucket.eigenvalues, axis=1), np.min(bucket.eigenvalues, axis=1)
        if batches is not None:
            bucket = _with_batches(bucket, theta, [batches[i] for i in members], rows_per_example)
        buckets.append(bucket)
    return Clients(jax.tree.map(jnp.asarray, tuple(buckets)), bucket_of, place, largest, np.minimum(smallest, 0.0))


def response(eigenvalues: Array, learning_rate: Array, num_examples: Array, local_steps: Array) -> Array:
    """Eigenvalues of A_i: ``(1 - (1 - x)^T) / lambda``, ``x = eta lambda / n_i``; and ``eta T / n_i`` at lambda = 0.

    Accurate to rounding for small x (through log1p and expm1) and valid for x > 1 too, where 1 - x is negative.
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


def client_rows(partition: Partition, client: int, rows_per_example: int) -> np.ndarray:
    """Rows of the kernel that belong to a client, [n_i * rows_per_example]."""
    examples = np.asarray(partition.client(client), np.int64)
    return (examples[:, None] * rows_per_example + np.arange(rows_per_example)[None, :]).reshape(-1)


def _build_bucket(
    theta: np.ndarray, partition: Partition, members: np.ndarray, local_steps: np.ndarray, rows_per_example: int
) -> Bucket:
    sizes = np.asarray(partition.sizes)[members]
    width = int(sizes.max()) * rows_per_example
    rows = np.full((len(members), width), len(theta), np.int32)
    eigenvalues = np.zeros((len(members), width))
    eigenvectors = np.zeros((len(members), width, width))
    for position, client in enumerate(members):
        own = client_rows(partition, client, rows_per_example)
        used = slice(0, len(own))
        rows[position, used] = own
        eigenvalues[position, used], eigenvectors[position, used, used] = np.linalg.eigh(theta[np.ix_(own, own)])
    return Bucket(rows, eigenvalues, eigenvectors, sizes.astype(float), local_steps[members])


def _with_batches(bucket: Bucket, theta: np.ndarray, batches: list[tuple[np.ndarray, ...]], width: int) -> Bucket:
    """The bucket with what minibatches need: each client's kernel block, and its batches as shares of its rows."""
    rows = np.asarray(bucket.rows)
    count, size = rows.shape
    shares = np.zeros((count, max(len(steps) for steps in batches), size))
    block = np.zeros((count, size, size))
    for i, steps in enumerate(batches):
        own = rows[i][rows[i] < len(theta)]
        block[i, : len(own), : len(own)] = theta[np.ix_(own, own)]
        for t, places in enumerate(steps):
            for c in range(width):
                np.add.at(shares[i, t], places * width + c, 1 / len(places))
    return bucket._replace(block=block, shares=shares)
