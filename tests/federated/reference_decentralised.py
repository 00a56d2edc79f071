"""Walking and gossiping models as plain NumPy loops, written from the papers; nothing of fedtangent is used here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .reference import Params, Train


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
