"""Personalised and pooled algorithms as plain NumPy loops, written from the papers; nothing of fedtangent is used.

The random choices (which clients, which minibatch) are arguments, as in ``reference``. ``fault`` makes a loop wrong in
one place, to show that the comparison would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .reference import Params, Train, Weight, gradient, loss_and_residual, mean, outputs

Batches = Mapping[tuple[int, int], Sequence[np.ndarray]]  # (round, client) -> rows of each step


def ditto(
    w: Params,
    selections: Sequence[Sequence[int]],
    train: Train,
    weight: Weight,
    x: np.ndarray,
    y: np.ndarray,
    batches: Batches,
    rate: float,
    lam: float,
    num_clients: int,
    fault: str = "none",
) -> tuple[Params, list[Params]]:
    """Li et al. 2021, algorithm 1: ``v_k <- v_k - rate (grad F_k(v_k) + lam (v_k - w^t))``, w^t as broadcast."""
    start, v = w, [w] * num_clients
    for t, chosen in enumerate(selections):
        after = mean([train(t, k, w) for k in chosen], [weight(k) for k in chosen])
        anchor = {"new anchor": after, "initial anchor": start}.get(fault, w)
        for k in chosen:
            own = w if fault == "restart" else v[k]
            for rows in batches[t, k]:
                g = gradient(own, x[rows], y[rows], "squared_error")
                pull = 0.0 if fault == "no prox" else -lam if fault == "sign" else lam
                own = {name: own[name] - rate * (g[name] + pull * (own[name] - anchor[name])) for name in own}
            v[k] = own
        w = after
    return w, v


def lg_fed_avg(
    params: Params,
    private: Sequence[str],
    selections: Sequence[Sequence[int]],
    train: Train,
    weight: Weight,
    rate: float,
    num_clients: int,
    fault: str = "none",
) -> tuple[Params, list[Params]]:
    """Liang et al. 2020, algorithm 1: joint local training, only the global part is averaged."""
    shared = {name: value for name, value in params.items() if name not in private}
    own = [{name: params[name] for name in private} for _ in range(num_clients)]
    for t, chosen in enumerate(selections):
        trained = [train(t, k, {**shared, **own[k]}) for k in chosen]
        for k, after in zip(chosen, trained, strict=True):
            own[k] = {name: after[name] for name in private} if fault != "frozen private" else own[k]
        average = mean(trained, [weight(k) for k in chosen])
        shared = {name: shared[name] + rate * (average[name] - shared[name]) for name in shared}
        if fault == "private averaged":
            own = [{name: average[name] for name in private} for _ in own]
    return shared, own


def local_only(
    params: Params, selections: Sequence[Sequence[int]], train: Train, num_clients: int, fault: str = "none"
) -> list[Params]:
    """Every client trains its own model on, whenever it is chosen."""
    own = [params] * num_clients
    for t, chosen in enumerate(selections):
        for k in chosen:
            own[k] = train(t, k, params if fault == "restart" else own[k])
        if fault == "averaged":
            own = [mean(own, [1.0] * num_clients)] * num_clients
    return own


def model_weights(losses: Sequence[float], gamma: float) -> np.ndarray:
    """``exp(-loss / gamma)``, normalised."""
    e = np.exp(-(np.asarray(losses) - min(losses)) / gamma)
    return e / e.sum()


def weighted(models: Sequence[Params], x: np.ndarray, y: np.ndarray, at: np.ndarray, gamma: float) -> np.ndarray:
    """FE-2024, eq. (3): the client's weighted prediction at ``at``; ``x`` and ``y`` are its own examples."""
    losses = [loss_and_residual(outputs(m, x), y, "squared_error")[0] for m in models]
    return sum(a * outputs(m, at) for a, m in zip(model_weights(losses, gamma), models, strict=True))


def fine_tuned(
    models: Sequence[Params], x: np.ndarray, y: np.ndarray, at: np.ndarray, rate: float, steps: int
) -> np.ndarray:
    """Full-batch gradient descent from every model, then the mean of their predictions."""
    found = []
    for m in models:
        for _ in range(steps):
            g = gradient(m, x, y, "squared_error")
            m = {name: m[name] - rate * g[name] for name in m}
        found.append(outputs(m, at))
    return np.mean(found, axis=0)


def each_client(
    predict: Callable[[int, np.ndarray], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    owned: Sequence[np.ndarray],
    measure: Callable[[np.ndarray, np.ndarray], float],
) -> tuple[list[float], float, float]:
    """Each client's metric on its rows, the plain mean over those that have rows, and the one weighted by rows."""
    values = [measure(predict(i, x[rows]), y[rows]) if len(rows) else np.nan for i, rows in enumerate(owned)]
    held = [i for i, rows in enumerate(owned) if len(rows)]
    sizes = [len(owned[i]) for i in held]
    known = [values[i] for i in held]
    return values, float(np.mean(known)), float(np.average(known, weights=sizes))
