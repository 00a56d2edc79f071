"""A round of NTK-DFL (Thompson et al., ICML 2025) as one matrix: clients on a graph mix models and train."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64

from fedtangent._src.checks import instance, number, symmetric
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.theory.checks import check_shape, in_float64
from fedtangent._src.theory.ntk_fl.convergence import ntk_evolution
from fedtangent._src.types import Partition


@in_float64
def neighbourhood_round(
    kernel: Float[np.ndarray, "n n"],
    clients: Partition,
    mixing: Float[np.ndarray, "N N"],
    learning_rate: float,
    time: int,
) -> Float64[np.ndarray, "Nn Nn"]:
    """Computes the matrix by which a round of NTK-DFL multiplies the residuals of all N models at all points.

    Let r_i = f_i - y be the residual of model i at n points. Client i mixes, ``r = sum_j W_ij r_j``, and then takes t
    steps on the examples S_i of the clients j with W_ij > 0: ``r - B_t r(S_i)``, with ``B_t`` of ``ntk_evolution``. So
    R rounds are ``numpy.linalg.matrix_power(T, R)`` for a model that is linear in its weights, with the squared error
    and a fixed number of steps.

    If every point is an example, the kernel is positive definite, all steps are stable, the graph is connected and W_ii
    > 0, then the spectral radius rho of T is below 1: all models come to agree with the targets, and with each other.
    The reason: in the norm of the kernel's function space neither mixing nor a step makes the longest of the N
    residuals longer. A residual keeps its length only if all models share it and no step changes it; for a positive
    definite kernel this residual is 0. If W is symmetric and no step overshoots, R rounds multiply this norm of all
    residuals by rho^(R - 1) at most.

    Args:
        kernel: Tangent kernel at the n points, of one output.
        clients: The points that are examples of each client; points of no client are test points.
        mixing: W [N, N], rows sum to 1, with positive entries for the neighbourhood of each client.
        learning_rate: eta, divided by the number of outputs.
        time: Number t of steps.

    Returns:
        T [N n, N n], for residuals in the order model, point.

    Raises:
        ValueError: ``learning_rate`` divided by the number of a neighbourhood's examples is above 2 / lambda_max of
            their kernel.
    """
    theta = symmetric("kernel", kernel)
    instance("clients", clients, Partition)
    check_shape("mixing", mixing, (clients.num_clients,) * 2)
    number("learning_rate", learning_rate, above=0)
    blocks = []
    for shares in np.asarray(mixing, np.float64):
        rows = np.concatenate([clients.client(j) for j in np.flatnonzero(shares > 0)])
        pooled = KernelBlocks(theta[np.ix_(rows, rows)], theta[:, rows])
        evolved = np.eye(len(theta))
        evolved[:, rows] -= ntk_evolution(pooled, learning_rate / len(rows), time)
        blocks.append(np.kron(shares, evolved))
    return np.concatenate(blocks)
