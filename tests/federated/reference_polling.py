"""Clients chosen by their losses or gradients as plain NumPy loops, written from the papers; nothing of fedtangent.

Draws are arguments. Clients train by full-batch gradient descent on the network of ``reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .reference import Params, gradient, loss_and_residual, mean, outputs, sgd


class Clients(NamedTuple):
    """The examples of each client, and how they train."""

    data: Sequence[tuple[np.ndarray, np.ndarray]]
    steps: int
    rate: float
    loss: str

    def value(self, i: int, params: Params) -> float:
        """The mean loss at all examples of client i."""
        x, y = self.data[i]
        return loss_and_residual(outputs(params, x), y, self.loss)[0]

    def train(self, i: int, params: Params) -> Params:
        """Client i's model after its local steps."""
        x, y = self.data[i]
        return sgd(params, x, y, [np.arange(len(x))] * self.steps, self.rate, self.loss)


def power_of_choice(
    params: Params, clients: Clients, candidates: Sequence[Sequence[int]], m: int, wrong: str = ""
) -> tuple[list[Params], list[list[int]]]:
    """Cho et al. 2020, section 4: of the candidates A the m clients with the largest F_k; their plain mean.

    Returns the model, and the clients of each round.
    """
    history = []
    for among in candidates:
        losses = {i: clients.value(i, params) for i in among}
        chosen = sorted(among, key=lambda i: losses[i], reverse=wrong != "smallest")[:m]
        if wrong == "first":
            chosen = list(among)[:m]
        weights = [len(clients.data[i][0]) if wrong == "by examples" else 1.0 for i in chosen]
        params = mean([clients.train(i, params) for i in chosen], weights)
        history.append(list(chosen))
    return [params], history


def chances(norms: np.ndarray, m: int) -> np.ndarray:
    """Chen et al. 2022, eq. 7, literally: the largest l with 0 < m + l - n <= sum of the l smallest / the l-th."""
    n, order = len(norms), np.argsort(norms)
    fitting = [
        length
        for length in range(1, n + 1)
        if 0 < m + length - n <= norms[order[:length]].sum() / norms[order[length - 1]]
    ]
    length = max(fitting)
    p = np.ones(n)
    p[order[:length]] = (m + length - n) * norms[order[:length]] / norms[order[:length]].sum()
    return p


def optimal_sampling(
    params: Params, clients: Clients, uniforms: Sequence[np.ndarray], m: int, wrong: str = ""
) -> tuple[list[Params], list[list[int]]]:
    """Chen et al. 2022, algorithm 1 with the norms of gradients: ``x -= sum_i in S w_i / p_i U_i``."""
    history = []
    sizes = np.array([len(x) for x, _ in clients.data])
    shares = sizes / sizes.sum()
    for draws in uniforms:
        norms = []
        for i, (x, y) in enumerate(clients.data):
            g = gradient(params, x, y, clients.loss)
            norms.append(shares[i] * np.sqrt(sum(np.sum(leaf**2) for leaf in g.values())))
        if wrong == "unweighted":
            norms = list(np.array(norms) / shares)
        p = chances(np.array(norms), m)
        chosen = np.flatnonzero(draws < p)
        scale = shares / (1.0 if wrong == "not inverse" else p)
        if wrong == "of the cohort":
            scale = scale / scale[chosen].sum()
        updates = {i: clients.train(i, params) for i in chosen}
        params = {
            name: leaf - sum(scale[i] * (leaf - updates[i][name]) for i in chosen) for name, leaf in params.items()
        }
        history.append(chosen.tolist())
    return [params], history


def ifca(
    models: list[Params], clients: Clients, selections: Sequence[Sequence[int]], wrong: str = ""
) -> tuple[list[Params], list[list[int]]]:
    """Ghosh et al. 2020, algorithm 1, model averaging: every client takes the model of the lowest loss.

    Returns the models, and the model of each client in each round.
    """
    history = []
    for chosen in selections:
        choose = np.argmax if wrong == "worst" else np.argmin
        picks = [int(choose([clients.value(i, model) for model in models])) for i in chosen]
        if wrong == "fixed" and history:
            picks = history[0]
        after = []
        for k, model in enumerate(models):
            mine = [i for i, pick in zip(chosen, picks, strict=True) if pick == k]
            weights = [len(clients.data[i][0]) if wrong == "by examples" else 1.0 for i in mine]
            after.append(mean([clients.train(i, model) for i in mine], weights) if mine else model)
        models = after
        history.append(picks)
    return models, history


def assigned(
    models: list[Params], clients: Clients, selections: Sequence[Sequence[int]], fit: str, wrong: str = ""
) -> tuple[list[Params], list[list[tuple[int, int]]]]:
    """The models take turns, from model t mod K on: each takes the free client that it fits worst, or best.

    Returns the models, and the pairs (client, model) of each round in the order of the turns.
    """
    history = []
    for t, chosen in enumerate(selections):
        free, pairs, k = list(chosen), [], 0 if wrong == "always model 0" else t % len(models)
        while free:
            losses = [clients.value(i, models[k]) for i in free]
            taken = free.pop(int(np.argmax(losses) if (fit == "worst") != (wrong == "other") else np.argmin(losses)))
            pairs.append((taken, k))
            k = (k + 1) % len(models)
        after = []
        for k, model in enumerate(models):
            mine = [i for i, of in pairs if of == k]
            after.append(mean([clients.train(i, model) for i in mine], [1.0] * len(mine)) if mine else model)
        models = after
        history.append(pairs)
    return models, history
