"""The data of one seed for the comparisons of NTK-FL with its baselines: standardised images, and their clients."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.data import partition, sharing
from fedtangent.data.projection import projection_matrix
from fedtangent.experiments.lab.cohort_settings import Settings
from fedtangent.experiments.lab.trials import Split, Trial, draw_rows
from fedtangent.types import Array, FederatedData, Partition


def divide(name: str, data_dir: str | os.PathLike[str] | None, seed: int, s: Settings) -> Trial:
    """The data of one seed: training and validation examples from the training set, test examples from the other.

    Pixels are standardised by one mean and one deviation, those of the training set. Clients are Dirichlet draws of
    labels (``"dirichlet"``, the paper's, section 6), the data set's own users (``"writers"``; validation and test
    examples of all of them), or i.i.d. draws whose images each client distorts in its own way (``"shifted"``:
    ``distorted``). Raises ``ValueError`` for more examples or clients than there are.
    """
    loaded = data.load(name, data_dir=data_dir, seed=seed)
    rng = np.random.default_rng(seed)
    train, held_out, test = draw_rows(rng, loaded, s.num_train, s.num_validation, s.num_test)
    rows = {"train": train, "validation": held_out, "test": test}
    mean, deviation = float(loaded.x_train.mean()), float(loaded.x_train.std())
    x = {part: np.asarray(_source(loaded, part)[0][at], np.float32) for part, at in rows.items()}
    y = {part: np.asarray(_source(loaded, part)[1][at], np.int32) for part, at in rows.items()}
    clients = _clients(loaded, y["train"], train, seed, s)
    if s.partition == "shifted":
        x["train"] = distorted(x["train"], _owner(clients), s.num_clients, seed)
        x |= {p: distorted(x[p], rng.integers(s.num_clients, size=len(x[p])), s.num_clients, seed)
              for p in ("validation", "test")}  # fmt: skip
    x = {part: (v - np.float32(mean)) / np.float32(deviation) for part, v in x.items()}
    held = data.federated_data(x["train"].reshape(len(train), -1), y["train"], clients, jnp.float32)
    splits = {
        part: Split(jnp.asarray(x[part].reshape(len(x[part]), -1)), jnp.asarray(y[part]))
        for part in ("validation", "test")
    }
    return Trial(seed, held, splits, loaded.num_classes)


def _source(loaded: Any, part: str) -> tuple[np.ndarray, np.ndarray]:
    return (loaded.x_test, loaded.y_test) if part == "test" else (loaded.x_train, loaded.y_train)


def _clients(loaded: Any, labels: np.ndarray, train: np.ndarray, seed: int, s: Settings) -> Partition:
    if s.partition == "dirichlet":
        return partition.dirichlet(labels, s.num_clients, s.alpha, seed)
    if s.partition == "shifted":
        return partition.iid(len(labels), s.num_clients, seed)
    if loaded.user_train is None:
        raise ValueError(f"partition: got 'writers', but the data set {loaded.name} does not say who wrote what")
    users, owner = np.unique(loaded.user_train, return_inverse=True)
    if len(users) != s.num_clients:
        raise ValueError(f"num_clients: got {s.num_clients}, must be {len(users)}, the writers that {loaded.name} has")
    mine = owner[train]
    return partition.assemble([np.flatnonzero(mine == i) for i in range(len(users))])


def _owner(clients: Partition) -> np.ndarray:
    """Whose each example is, [n]; every example has exactly one owner."""
    owner = np.empty(len(clients.indices), np.int64)
    owner[clients.indices] = np.repeat(np.arange(clients.num_clients), clients.sizes)
    return owner


def distorted(x: np.ndarray, owner: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """Images in [0, 1], each as its owner would write it: feature skew for data without writers.

    A client has its own contrast (a factor from 0.5 to 1.5), brightness (-0.2 to 0.2) and place on the page (a shift by
    up to one pixel each way, cyclic). ``x`` [n, p] with p a square, ``owner`` [n] from 0 to ``num_clients - 1``.
    """
    rng = np.random.default_rng([seed, 1])
    contrast, brightness = rng.uniform(0.5, 1.5, num_clients), rng.uniform(-0.2, 0.2, num_clients)
    down, right = rng.integers(-1, 2, (2, num_clients))
    side = int(np.sqrt(x.shape[1]))
    found = np.empty_like(x)
    for i in np.unique(owner):
        own = x[owner == i].reshape(-1, side, side)
        moved = np.roll(own, (down[i], right[i]), axis=(1, 2))
        found[owner == i] = (contrast[i] * moved + brightness[i]).reshape(len(own), -1)
    return found.astype(x.dtype)


def one_hot(trial: Trial) -> FederatedData:
    """The trial's data with one-hot targets [n, C] float32, uncentred: what NTK-FL fits."""
    targets = data.classification_targets(np.asarray(trial.data.y), trial.num_classes)
    return trial.data._replace(y=jnp.asarray(targets, jnp.float32))


def projected(trial: Trial, dimension: int) -> Trial:
    """The trial with inputs projected to ``dimension`` numbers, all by the Gaussian matrix of its seed (section 4.2).

    Raises ``ValueError`` for more dimensions than there are.
    """
    size = trial.data.x.shape[1]
    if dimension > size:
        raise ValueError(f"projected: got {dimension}, larger than the {size} inputs, must be at most that")
    matrix = projection_matrix(size, dimension, trial.seed, dtype=np.float32)
    splits = {part: Split(jnp.asarray(np.asarray(x) @ matrix), labels) for part, (x, labels) in trial.splits.items()}
    held = trial.data._replace(x=jnp.asarray(np.asarray(trial.data.x) @ matrix))
    return trial._replace(data=held, splits=splits)


def with_global_set(trial: Trial, share: float, labels: Array) -> tuple[FederatedData, np.ndarray]:
    """Data in which every client also holds the global set, and that set: equally many of each class.

    It has ``share`` times as many examples as all clients together (NTK-FL, section 6, (i)), drawn from theirs by
    their ``labels`` [n].
    """
    held = trial.data
    chosen = sharing.class_balanced(np.asarray(labels), max(1, round(share * len(labels))), trial.seed)
    given = sharing.with_shared(Partition(np.asarray(held.indices), np.asarray(held.offsets)), chosen)
    moved = held._replace(indices=jnp.asarray(given.indices, jnp.int32), offsets=jnp.asarray(given.offsets, jnp.int32))
    return moved, chosen


def fingerprint(trial: Trial) -> str:
    """A digest of everything that a trial holds."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((trial.data, trial.splits)):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
