"""Walking and gossiping models as plain NumPy loops, written from the papers; nothing of fedtangent is used here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .reference import Params, Train, mean, outputs


def published_permutations(
    matrices: Sequence[np.ndarray], draws: Sequence[np.ndarray], num_clients: int, num_models: int
) -> list[list[int]]:
    """The models of clients 0 .. N - 1 in each round, in the order of events of the code published with FE-2024.

    The matrix of orders in use is exchanged for the next one at the end of each round t with t = 0 mod K.
    ``draws[t]`` are the models drawn for the clients beyond the first K in round t.
    """
    rounds, used, age = [], matrices[0], 0
    for t in range(len(draws)):
        models = []
        for i in range(num_clients):
            models.append(int(used[i][t % num_models]) if i < num_models else int(draws[t][i - num_models]))
        rounds.append(models)
        if t % num_models == 0 and age + 1 < len(matrices):
            age += 1
            used = matrices[age]
    return rounds


def random_walk(models: list[Params], paths: np.ndarray, train: Train) -> list[Params]:
    """FE-2024, section V-H: in round t model k is trained by the client ``paths[t, k]``, each on its own."""
    ends = []
    for k, model in enumerate(models):
        for t in range(len(paths)):
            model = train(t, int(paths[t, k]), model)
        ends.append(model)
    return ends


def gossip(
    models: list[Params], mixing: np.ndarray, present: np.ndarray, train: Train, order: str = "train_then_mix"
) -> list[Params]:
    """Decentralised SGD, client by client: ``present[t, k]`` says whether client k is there in round t.

    Client k sums what those of its neighbours that are there send, and keeps the rest of the weight for itself.
    ``order`` is that of Koloskova et al. 2020, algorithm 1, or Lian et al. 2017, algorithm 1 (``mix_then_train``).
    """
    for t in range(len(present)):
        trained = [train(t, k, model) if present[t, k] else model for k, model in enumerate(models)]
        sent = trained if order == "train_then_mix" else models
        after = []
        for k, own in enumerate(models):
            if not present[t, k]:
                after.append(own)
                continue
            heard = [j for j in range(len(models)) if j != k and mixing[k, j] > 0 and present[t, j]]
            keep = 1 - sum(mixing[k, j] for j in heard)
            mixed = {name: keep * sent[k][name] + sum(mixing[k, j] * sent[j][name] for j in heard) for name in own}
            if order == "mix_then_train":
                mixed = {name: mixed[name] + trained[k][name] - own[name] for name in own}
            after.append(mixed)
        models = after
    return models


def consensus_distance(models: list[Params]) -> float:
    """Root mean square distance of the models from their mean."""
    total = 0.0
    for name in models[0]:
        stacked = np.stack([model[name] for model in models])
        total += float(np.sum((stacked - stacked.mean(axis=0)) ** 2))
    return float(np.sqrt(total / len(models)))


def jacobian(params: Params, x: np.ndarray) -> Params:
    """Derivatives of all outputs by each parameter, [n, C, ...], by hand."""
    hidden = np.tanh(x @ params["W"] + params["b"])
    back = params["V"].T[None] * (1 - hidden**2)[:, None]  # [n, C, H]
    eye = np.eye(params["V"].shape[1])
    return {
        "W": x[:, None, :, None] * back[:, :, None, :],
        "b": back[:, :, None, :],
        "V": hidden[:, None, :, None] * eye[None, :, None, :],
    }


def ntk_dfl(
    models: list[Params],
    neighbourhoods: Sequence[np.ndarray],
    clients: Sequence[tuple[np.ndarray, np.ndarray]],
    rate: float,
    times: Sequence[int],
    fault: str = "none",
) -> list[Params]:
    """NTK-DFL, client by client; ``neighbourhoods[t][i, j]`` says whether client i hears client j in round t.

    A client that does not hear itself is away. ``fault`` is a mistake that a test must notice.
    """
    for near in neighbourhoods:
        after = list(models)
        for i in np.flatnonzero(near.diagonal()):
            heard = [int(j) for j in np.flatnonzero(near[i])]
            start = models[i] if fault == "not mixed" else mean([models[j] for j in heard], [1.0] * len(heard))
            pooled = [i] if fault == "alone" else heard
            x, y = (np.concatenate([clients[j][part] for j in pooled]) for part in (0, 1))
            slopes = jacobian(models[i] if fault == "slopes of the model before" else start, x)
            residual, change = outputs(start, x) - y, {name: np.zeros_like(leaf) for name, leaf in start.items()}
            least = np.inf
            for step in range(1, max(times) + 1):
                for name, slope in slopes.items():
                    change[name] -= rate / y.size * np.tensordot(residual, slope, axes=2)
                moved = sum(np.tensordot(slope, change[name], axes=2) for name, slope in slopes.items())
                residual = outputs(start, x) - y + moved
                if step not in times:
                    continue
                candidate = {name: leaf + change[name] for name, leaf in start.items()}
                loss = float(np.sum((outputs(candidate, x) - y) ** 2))
                if loss < least or fault == "last time":
                    least, after[i] = loss, candidate
        models = after
    return models
