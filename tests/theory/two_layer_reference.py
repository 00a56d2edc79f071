"""The two-layer ReLU network of eq. (12) in plain NumPy loops: what theory and models are compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Network(NamedTuple):
    """Weights v [n, d], signs c [n]; ``f(x) = n^-1/2 sum_r c_r max(v_r' x, 0)``."""

    v: np.ndarray
    c: np.ndarray

    def outputs(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ self.v.T, 0) @ self.c / np.sqrt(len(self.c))

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        """[N, n d], written out."""
        active = (x @ self.v.T > 0) * self.c / np.sqrt(len(self.c))
        return (active[:, :, None] * x[:, None, :]).reshape(len(x), -1)

    def moved(self, by: np.ndarray) -> Network:
        return self._replace(v=self.v + by.reshape(self.v.shape))


def draw(seed: int, width: int, dim: int, alpha: float = 1.0) -> Network:
    rng = np.random.default_rng(seed)
    return Network(alpha * rng.standard_normal((width, dim)), rng.choice([-1.0, 1.0], width))


def sphere(seed: int, num: int, dim: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((num, dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def descend(net: Network, x: np.ndarray, y: np.ndarray, eta: float, steps: int) -> list[Network]:
    """Gradient descent on ``1/(2 N) |f - y|^2``: the networks after 0, 1, .. steps."""
    path = [net]
    for _ in range(steps):
        now = path[-1]
        path.append(now.moved(-eta / len(x) * now.jacobian(x).T @ (now.outputs(x) - y)))
    return path


def descend_linear(net: Network, x: np.ndarray, y: np.ndarray, eta: float, steps: int) -> list[Network]:
    """The same for the network linearised at its weights: the weights that NTK-FL takes (9b)."""
    j, f0 = net.jacobian(x), net.outputs(x)
    path, change = [net], np.zeros(net.v.size)
    for _ in range(steps):
        change = change - eta / len(x) * j.T @ (f0 + j @ change - y)
        path.append(net.moved(change))
    return path


class Round(NamedTuple):
    """A round of FedAvg as (58): every client's networks before each local step [M][tau], and the server's after."""

    local: list[list[Network]]
    server: Network


def fed_avg_round(net: Network, x: np.ndarray, y: np.ndarray, clients: list, eta: float, steps: int) -> Round:
    """Local steps of ``eta / N`` times the sum over the client's examples, then the plain mean over clients."""
    local, ends = [], []
    for rows in clients:
        path = [net]
        for _ in range(steps):
            now = path[-1]
            path.append(now.moved(-eta / len(x) * now.jacobian(x[rows]).T @ (now.outputs(x[rows]) - y[rows])))
        local.append(path[:-1])
        ends.append(path[-1].v)
    return Round(local, net._replace(v=np.mean(ends, axis=0)))
