"""Federated algorithms as plain NumPy loops, written from the papers; nothing of fedtangent is used here.

The random choices of an algorithm (which clients, which permutation, which minibatch) are arguments. Parameters are
dictionaries of arrays; a client's data is a pair ``(x, y)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Params = dict[str, np.ndarray]
Train = Callable[[int, int, Params], Params]  # (round, client, parameters) -> parameters after local training
Weight = Callable[[int], float]  # client -> weight in an average


def outputs(params: Params, x: np.ndarray) -> np.ndarray:
    """``tanh(x W + b) V``."""
    return np.tanh(x @ params["W"] + params["b"]) @ params["V"]


def loss_and_residual(f: np.ndarray, y: np.ndarray, loss: str) -> tuple[float, np.ndarray]:
    """The mean loss over the rows of ``f``, and its derivative by ``f`` times the number of rows."""
    if loss == "squared_error":
        return 0.5 * np.sum((f - y) ** 2) / len(f), f - y
    shifted = np.exp(f - f.max(axis=1, keepdims=True))
    probability = shifted / shifted.sum(axis=1, keepdims=True)
    one_hot = np.eye(f.shape[1])[y]
    return -np.sum(one_hot * np.log(probability)) / len(f), probability - one_hot


def gradient(params: Params, x: np.ndarray, y: np.ndarray, loss: str) -> Params:
    """Gradient of the mean loss over a batch, by hand."""
    hidden = np.tanh(x @ params["W"] + params["b"])
    delta = loss_and_residual(hidden @ params["V"], y, loss)[1] / len(x)
    back = (delta @ params["V"].T) * (1 - hidden**2)
    return {"W": x.T @ back, "b": back.sum(axis=0, keepdims=True), "V": hidden.T @ delta}


def sgd(params: Params, x: np.ndarray, y: np.ndarray, batches: Sequence[np.ndarray], rate: float, loss: str) -> Params:
    """One step of gradient descent for each batch of rows of ``x``."""
    for rows in batches:
        g = gradient(params, x[rows], y[rows], loss)
        params = {name: params[name] - rate * g[name] for name in params}
    return params


def mean(models: Sequence[Params], weights: Sequence[float]) -> Params:
    """Weighted mean of parameters."""
    total = sum(weights)
    return {name: sum(w * m[name] for w, m in zip(weights, models, strict=True)) / total for name in models[0]}


def fed_avg(params: Params, selections: Sequence[Sequence[int]], train: Train, weight: Weight, rate: float) -> Params:
    """McMahan et al. 2017, algorithm 1: round t trains the clients of ``selections[t]``.

    ``rate`` is how far the server moves to the mean; 1 in the paper.
    """
    for t, chosen in enumerate(selections):
        returned = [train(t, k, params) for k in chosen]
        average = mean(returned, [weight(k) for k in chosen])
        params = {name: params[name] + rate * (average[name] - params[name]) for name in params}
    return params


def server_update(
    models: list[Params], returned: Sequence[tuple[int, int, Params]], weight: Weight, rate: float
) -> list[Params]:
    """Remark 1 of FE-2024: model k becomes the mean over the clients that downloaded it (delta_ik = 1).

    ``returned`` holds (client, model, parameters). A model that nobody downloaded stays.
    """
    updated = []
    for k, model in enumerate(models):
        mine = [(i, u) for i, downloaded, u in returned if downloaded == k]
        if mine:
            average = mean([u for _, u in mine], [weight(i) for i, _ in mine])
            model = {name: model[name] + rate * (average[name] - model[name]) for name in model}
        updated.append(model)
    return updated


def fed_ensemble_2024(
    models: list[Params],
    num_rounds: int,
    permutations: Sequence[np.ndarray],
    train: Train,
    weight: Weight,
    rate: float = 1.0,
) -> list[Params]:
    """FE-2024, algorithm 1; ``permutations[age]`` is the matrix P [N, K] drawn when t = 0 mod K."""
    K = len(models)
    for t in range(num_rounds):
        if t % K == 0:
            P = permutations[t // K]
        returned = []
        for i in range(len(P)):
            k = int(P[i, t % K])
            returned.append((i, k, train(t, i, models[k])))
        models = server_update(models, returned, weight, rate)
    return models


def fed_ensemble_2021(
    models: list[Params],
    num_ages: int,
    permutations: Sequence[np.ndarray],
    selections: Sequence[Sequence[Sequence[int]]],
    train: Train,
    weight: Weight,
    rate: float = 1.0,
) -> list[Params]:
    """FE-2021, algorithm 1; ``permutations[age]`` is P [Q, K], ``selections[round][q]`` the clients C_q.

    The paper's server_update stands inside the loop over r and after the one over q, as here.
    """
    K = len(models)
    for age in range(num_ages):
        P = permutations[age]
        for r in range(K):
            t = age * K + r
            returned = []
            for q in range(len(P)):
                k = int(P[q, r])
                returned += [(i, k, train(t, i, models[k])) for i in selections[t][q]]
            models = server_update(models, returned, weight, rate)
    return models


def fed_ensemble_random(
    models: list[Params], assignments: Sequence[np.ndarray], train: Train, weight: Weight, rate: float = 1.0
) -> list[Params]:
    """The ablation of FE-2024, table VII: in round t client i receives model ``assignments[t][i]``."""
    for t, assigned in enumerate(assignments):
        returned = [(i, int(k), train(t, i, models[int(k)])) for i, k in enumerate(assigned)]
        models = server_update(models, returned, weight, rate)
    return models
