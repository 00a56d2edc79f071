"""The data of one seed: what all methods of a comparison share, and how methods are given it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.data import partition, sharing
from fedtangent.data.projection import projection_matrix
from fedtangent.types import Array, FederatedData, Partition

PARTS = ("train", "validation", "test")
IID = 0  # classes a client where examples are dealt at random


class EvaluationSet(NamedTuple):
    """Examples to evaluate on."""

    x: Array
    labels: Array  # [n] int32


class Trial(NamedTuple):
    """What all methods share under one seed: training data and clients, and two sets to evaluate on."""

    seed: int
    data: FederatedData
    splits: dict[str, EvaluationSet]  # validation, test
    num_classes: int


class Drawn(NamedTuple):
    """Examples of each of PARTS: those of training and validation are of the training set."""

    x: dict[str, np.ndarray]  # float32
    y: dict[str, np.ndarray]  # int32
    train: np.ndarray  # rows of the training set that are trained on
    rng: np.random.Generator


def draw(loaded: data.Dataset, seed: int, num_train: int, num_validation: int, num_test: int) -> Drawn:
    """Draw them; ``num_train`` and ``num_test`` are 0 for all that there are (after validation).

    Raises ``ValueError`` for more than there are.
    """
    rng = np.random.default_rng(seed)
    order, others = rng.permutation(len(loaded.x_train)), rng.permutation(len(loaded.x_test))
    num_train, num_test = num_train or len(order) - num_validation, num_test or len(others)
    for option, wanted, most in (
        ("num_validation", num_validation, len(order) - 1),
        ("num_train", num_train, len(order) - num_validation),
        ("num_test", num_test, len(others)),
    ):
        if not 1 <= wanted <= most:
            raise ValueError(f"{option}: got {wanted}, must be from 1 to {most}")
    train, held_out = order[num_validation : num_validation + num_train], order[:num_validation]
    sources = ((loaded.x_train, loaded.y_train),) * 2 + ((loaded.x_test, loaded.y_test),)
    rows = (train, held_out, others[:num_test])
    x = {p: np.asarray(of[0][at], np.float32) for p, of, at in zip(PARTS, sources, rows, strict=True)}
    y = {p: np.asarray(of[1][at], np.int32) for p, of, at in zip(PARTS, sources, rows, strict=True)}
    return Drawn(x, y, train, rng)


def dealt(labels: np.ndarray, num_clients: int, classes: int, seed: int) -> Partition:
    """Examples of ``labels`` [n] to N clients, each of so many classes, or dealt at random (``IID``).

    Raises ``ValueError`` for more clients than examples.
    """
    if classes == IID:
        return partition.iid(len(labels), num_clients, seed)
    return partition.classes(labels, num_clients, classes, seed)


def scheme_name(classes: int) -> str:
    """How examples are divided, in words."""
    return "i.i.d." if classes == IID else f"{classes} classes" if classes > 1 else "1 class"


def trial_of(drawn: Drawn, clients: Partition, seed: int, num_classes: int) -> Trial:
    """The examples on the device."""
    held = data.federated_data(drawn.x["train"], drawn.y["train"], clients, jnp.float32)
    splits = {part: EvaluationSet(jnp.asarray(drawn.x[part]), jnp.asarray(drawn.y[part])) for part in PARTS[1:]}
    return Trial(seed, held, splits, num_classes)


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
    splits = {part: s._replace(x=jnp.asarray(np.asarray(s.x) @ matrix)) for part, s in trial.splits.items()}
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
