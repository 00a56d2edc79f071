"""A round of FedAvg on deep linear networks in DeepLin's notation: gradients, residual and the terms of eq. (17).

With rows for examples eq. (6) is ``dL_c/dW^i = s B_i' R_c' A_i`` of client c's residuals R_c (``gram`` defines A_i and
B_i; ``s = (m^(L-1) C)^(-1/2)``). A round is K such steps at each of N clients from the server's weights (7), and their
mean (8). In terms of the residual it is eq. (17), whose last term E contains all products of two or more layers'
changes (10).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from fedtangent._src.checks import instance, number, whole
from fedtangent._src.theory import checks
from fedtangent._src.theory.deep_linear.gram import Layers, Matrix, Products, applied, layers_of, products
from fedtangent._src.types import ArrayLike, Partition

Weights = Sequence[np.ndarray]  # W^1 .. W^L, [fan_out, fan_in] each


class FullBatchWork(NamedTuple):
    """Inputs x, targets y, step size and local steps of all clients in a round; built by ``full_batch_work``."""

    x: Float64[np.ndarray, "n d"]
    y: Float64[np.ndarray, "n C"]
    partition: Partition
    learning_rate: float  # eta, of 1/2 |f(X_c) - Y_c|^2
    local_steps: int  # K

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return self.partition.num_clients

    def of_client(self, c: int) -> tuple[Float64[np.ndarray, "n_c d"], Float64[np.ndarray, "n_c C"]]:
        """Returns inputs X_c and targets Y_c of client c."""
        rows = self.partition.client(c)
        return self.x[rows], self.y[rows]


def full_batch_work(
    x: ArrayLike, y: ArrayLike, partition: Partition, learning_rate: float, local_steps: int
) -> FullBatchWork:
    """Checks and collects the data, the step size and the number of local steps of all clients in a round.

    Args:
        x: Inputs [n, d], the paper's X'.
        y: Targets [n, C], the paper's Y'.
        partition: Examples of each client, at least one; every example belongs to exactly one client.
        learning_rate: Step size eta of ``1/2 |f(X_c) - Y_c|^2``.
        local_steps: Number K of steps of each client.
    """
    inputs, targets = checks.check_rows("x", x, "n, d"), checks.check_rows("y", y, "n, C")
    if len(inputs) != len(targets):
        raise ValueError(f"y: got {len(targets)} rows, must be {len(inputs)}, as x has")
    instance("partition", partition, Partition)
    clients = checks.check_partition(partition, len(inputs), exact=True, occupied=True)
    rate = number("learning_rate", learning_rate, above=0)
    return FullBatchWork(inputs, targets, clients, rate, whole("local_steps", local_steps))


def fitting(weights: Weights, work: FullBatchWork) -> Layers:
    """Returns weights as float64; raises ``ValueError`` unless their shapes fit the inputs and targets.

    Args:
        weights: Weights ``W^1 .. W^L``.
        work: Inputs x and targets y.
    """
    layers, outputs = layers_of(weights, work.x.shape[1]), work.y.shape[1]
    if len(layers[-1]) != outputs:
        raise ValueError(f"weights: got {len(layers[-1])} outputs, must be {outputs}, as y has")
    return layers


def gradients(of: Products, residuals: Float64[np.ndarray, "n C"]) -> list[Matrix]:
    """Computes the gradient of ``1/2 |f(X) - Y|^2`` by each layer's weights, shaped like them (DeepLin, eq. 6).

    Args:
        of: Products of the network at the n examples X.
        residuals: ``f(X) - Y``.
    """
    return [of.scale * (b.T @ residuals.T) @ a for a, b in zip(of.below, of.above, strict=True)]


class LocalPath(NamedTuple):
    """Local steps of one client in a round: its network and residuals before each step, and its final weights.

    ``before`` describes the network by its outputs and products of layers.
    """

    before: tuple[Products, ...]  # of the client's network at its examples, before each of the K steps
    residuals: tuple[Float64[np.ndarray, "n_c C"], ...]  # xi_{k,c}, [n_c, C] each
    weights: Layers  # after the last step


def _local_path(weights: Weights, work: FullBatchWork, c: int) -> LocalPath:
    (x, y), rate = work.of_client(c), work.learning_rate
    layers, before, residuals = [np.asarray(w, np.float64) for w in weights], [], []
    for _ in range(work.local_steps):
        with np.errstate(over="ignore", invalid="ignore"):
            now = products(layers, x)
            before.append(now)
            residuals.append(now.outputs - y)
            layers = [w - rate * g for w, g in zip(layers, gradients(now, residuals[-1]), strict=True)]
        if not all(np.isfinite(w).all() for w in layers):
            raise ValueError(f"learning_rate: got {rate:g}, at which local descent diverges, must be smaller")
    return LocalPath(tuple(before), tuple(residuals), tuple(layers))


def local_paths(weights: Weights, work: FullBatchWork) -> list[LocalPath]:
    """Computes the local steps of every client on ``1/2 |f(X_c) - Y_c|^2`` (eq. 7 of DeepLin).

    Args:
        weights: Weights at the start of the round.
        work: Data and local work of all clients.

    Raises:
        ValueError: A client's weights overflow at this learning rate.
    """
    return [_local_path(weights, work, c) for c in range(work.num_clients)]


def averaged(paths: Sequence[LocalPath]) -> list[Matrix]:
    """Computes the server's weights after the round, the plain mean of the clients' weights (eq. 8 of DeepLin)."""
    return [np.mean(layer, axis=0) for layer in zip(*(path.weights for path in paths), strict=True)]


class ResidualTerms(NamedTuple):
    """Four terms [n, C] whose sum is the server's residual after a round, eq. (17) of DeepLin.

    xi is the residual and U the outputs before the round, xi_k and U_k the clients' residuals and outputs before step
    k. N clients take K steps of size eta. P(t, k) is the tangent kernel after t rounds and k local steps, E the
    products of two or more layers' changes, and s the network's factor ``Products.scale``.

    Attributes:
        first: ``(I - eta K/N P(0)) xi``, the residual of the linear model.
        second: ``-eta/N sum_k (P(t, k) - P(0)) xi_k``, from the change of the kernel.
        third: ``-eta/N sum_k P(0) (U_k - U)``, from the changes of the clients' outputs within the round.
        fourth: ``s E(t) X``, from products of several layers' changes.
    """

    first: Float64[np.ndarray, "n C"]
    second: Float64[np.ndarray, "n C"]
    third: Float64[np.ndarray, "n C"]
    fourth: Float64[np.ndarray, "n C"]

    @property
    def total(self) -> Float64[np.ndarray, "n C"]:
        """Residual after the round."""
        return self.first + self.second + self.third + self.fourth


def residual_terms(initial: Weights, weights: Weights, work: FullBatchWork) -> ResidualTerms:
    """Computes the four terms of the residual after the round that starts at ``weights`` (eq. 17 of DeepLin).

    Args:
        initial: Weights at which the kernel P(0) is evaluated.
        weights: Weights at the start of the round.
        work: The clients' full-batch work.

    Raises:
        ValueError: A client's weights overflow at the learning rate.
    """
    instance("work", work, FullBatchWork)
    initial, weights = fitting(initial, work), fitting(weights, work)
    begin, now, paths = products(initial, work.x), products(weights, work.x), local_paths(weights, work)
    residual = now.outputs - work.y
    rate = work.learning_rate / work.num_clients
    moved, drifted = np.zeros_like(residual), np.zeros_like(residual)
    for c, path in enumerate(paths):
        rows = work.partition.client(c)
        local = products(initial, work.x[rows])
        for before, xi in zip(path.before, path.residuals, strict=True):
            moved += applied(now, xi, before) - applied(begin, xi, local)
        drifted += applied(begin, sum(path.residuals) - work.local_steps * residual[rows], local)
    return ResidualTerms(
        residual - rate * work.local_steps * applied(begin, residual),
        -rate * moved,
        -rate * drifted,
        _higher_orders(now, weights, averaged(paths), work.x),
    )


def _higher_orders(
    now: Products, weights: Weights, after: Weights, x: Float64[np.ndarray, "n d"]
) -> Float64[np.ndarray, "n C"]:
    """Computes ``s E X`` (eq. 10 of DeepLin): what products of two or more layers' changes add to the outputs.

    The layers change from ``weights`` to ``after`` in a round; ``now`` has the products of ``weights`` at inputs x.
    """
    orders = [x]
    for w, to in zip(weights, after, strict=True):
        same, changed = [product @ w.T for product in orders], [product @ (to - w).T for product in orders]
        orders = [same[0], *(a + b for a, b in zip(same[1:], changed[:-1], strict=True)), changed[-1]]
    return np.asarray(now.scale * sum(orders[2:], np.zeros_like(now.outputs)))


def balancedness(weights: Weights) -> list[Matrix]:
    """Computes ``W^{i+1}' W^{i+1} - W^i W^i'``, i = 1 .. L - 1, which gradient flow keeps (Arora, Cohen, Hazan, 2018).

    A step of gradient descent changes it by ``eta^2 (G^{i+1}' G^{i+1} - G^i G^i')`` with the gradients G. A round of
    FedAvg changes it by the sum of these terms over the local steps, averaged over clients, less the mean over clients
    of ``D^{i+1}' D^{i+1} - D^i D^i'``, where D is a client's weights after the round minus their mean over clients.
    """
    return [above.T @ above - below @ below.T for below, above in itertools.pairwise(layers_of(weights))]
