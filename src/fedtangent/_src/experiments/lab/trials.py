"""The data of one seed of an experiment, which all methods of a comparison share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent._src import data
from fedtangent._src.data import partition, sharing
from fedtangent._src.data.dataset import TOKENS
from fedtangent._src.data.partition.drawn import assemble
from fedtangent._src.experiments.lab.runner import Study, within
from fedtangent._src.storage import sha256
from fedtangent._src.types import Array, FederatedData, Partition

PARTS = ("train", "validation", "test")
# Values that replace a client's number of classes. IID: examples are dealt at random. USERS: each user of the data set
# is a client. DISTORTED: examples are dealt at random, and each client distorts its images in its own way. Clients of
# the last two kinds are tested on their own examples; users only if the data set names the users of test examples.
IID, USERS, DISTORTED = 0, -1, -2


class EvaluationSet(NamedTuple):
    """Inputs and labels (in a regression, targets) of the examples on which methods are evaluated."""

    x: Array
    labels: Array  # [n] int32; targets of a regression [n, C] float32


class Trial(NamedTuple):
    """Data that all methods share for one seed: the clients' training data, and validation and test examples.

    Attributes:
        seed: Seed of the draws.
        data: Training examples, divided among the clients.
        splits: Examples to evaluate on, by "validation" and "test".
        num_classes: Number of classes; 0 for a regression.
        by_client: The examples of ``splits`` divided among the clients, if clients are tested on their own; else None.
    """

    seed: int
    data: FederatedData
    splits: dict[str, EvaluationSet]
    num_classes: int
    by_client: dict[str, FederatedData] | None = None


class Examples(NamedTuple):
    """Training, validation and test examples of one seed, before they are divided among clients.

    Attributes:
        x, y: Inputs and labels, by "train", "validation" and "test".
        rows: Rows of these examples in the data set's training set; for "test" in its test set.
        rng: Generator for the further draws of the seed.
    """

    x: dict[str, np.ndarray]  # float32; tokens int32
    y: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    rng: np.random.Generator


def draw(loaded: data.Dataset, seed: int, num_train: int, num_validation: int, num_test: int) -> Examples:
    """Draws the training, validation and test examples of one seed from a data set.

    Args:
        loaded: The data set.
        seed: Seed of the draw.
        num_train: Number of training examples; 0 for all that remain.
        num_validation: Number of validation examples, which come from the training set.
        num_test: Number of test examples; 0 for all.

    Raises:
        ValueError: A number is negative, ``num_validation`` is 0, or the data set has too few examples.
    """
    rng = np.random.default_rng(seed)
    order, others = rng.permutation(len(loaded.x_train)), rng.permutation(len(loaded.x_test))
    num_train, num_test = num_train or len(order) - num_validation, num_test or len(others)
    for option, size, most in (
        ("num_validation", num_validation, len(order) - 1),
        ("num_train", num_train, len(order) - num_validation),
        ("num_test", num_test, len(others)),
    ):
        if not 1 <= size <= most:
            raise ValueError(f"{option}: got {size}, must be from 1 to {most}")
    train, held_out = order[num_validation : num_validation + num_train], order[:num_validation]
    sources = ((loaded.x_train, loaded.y_train),) * 2 + ((loaded.x_test, loaded.y_test),)
    rows = dict(zip(PARTS, (train, held_out, others[:num_test]), strict=True))
    dtype = np.int32 if loaded.kind == TOKENS else np.float32
    x = {p: np.asarray(source[0][rows[p]], dtype) for p, source in zip(PARTS, sources, strict=True)}
    y = {p: np.asarray(source[1][rows[p]], np.int32) for p, source in zip(PARTS, sources, strict=True)}
    return Examples(x, y, rows, rng)


def first_users(loaded: data.Dataset, number: int) -> data.Dataset:
    """Selects the examples of the data set's first ``number`` users, in ascending order of their ids.

    Users are then numbered from 0. Users who have only test examples are left out. If test examples have no users, all
    of them remain.

    Args:
        loaded: The data set.
        number: Number of users; 0 for all.

    Raises:
        ValueError: The data set has no users, or ``number`` is negative or above the number of its users.
    """
    if loaded.user_train is None:
        raise ValueError(
            f"classes_per_client: got {USERS} (a client for each user), but the data set {loaded.name} names no users, "
            f"must be {DISTORTED}, or at least {IID}"
        )
    users, owner = np.unique(loaded.user_train, return_inverse=True)
    if not 0 <= number <= len(users):
        raise ValueError(f"num_clients: got {number}, must be from 0 (all) to {len(users)}, the users of {loaded.name}")
    rows = np.flatnonzero(owner < (number or len(users)))
    selected = loaded._replace(x_train=loaded.x_train[rows], y_train=loaded.y_train[rows], user_train=owner[rows])
    if loaded.user_test is None:
        return selected
    rows = np.flatnonzero(np.isin(loaded.user_test, users[: number or None]))
    test_owner = np.searchsorted(users, loaded.user_test[rows])
    return selected._replace(x_test=loaded.x_test[rows], y_test=loaded.y_test[rows], user_test=test_owner)


def of_owners(owner: np.ndarray, num_clients: int) -> Partition:
    """Builds the partition that gives example i to client ``owner[i]``; a client may get no example.

    Args:
        owner: Number of the client of each example, from 0, [n].
        num_clients: Number of clients.
    """
    return assemble([np.flatnonzero(owner == i) for i in range(num_clients)])


def owners(clients: Partition) -> np.ndarray:
    """Computes the number of each example's client, [n]; every example must have exactly one client."""
    owner = np.empty(len(clients.indices), np.int64)
    owner[clients.indices] = np.repeat(np.arange(clients.num_clients), clients.sizes)
    return owner


def of_users(loaded: data.Dataset, examples: Examples) -> Partition | dict[str, Partition]:
    """Builds the partition with one client for each user of the data set, numbered by ``first_users``.

    If test examples have users too, returns a partition for each of "train", "validation" and "test", else only the
    partition of the training examples.

    Args:
        loaded: The data set.
        examples: Training, validation and test examples.
    """
    users = {"train": loaded.user_train, "validation": loaded.user_train, "test": loaded.user_test}
    assert loaded.user_train is not None
    number = int(loaded.user_train.max()) + 1
    if loaded.user_test is None:
        return of_owners(loaded.user_train[examples.rows["train"]], number)
    return {part: of_owners(np.asarray(users[part])[rows], number) for part, rows in examples.rows.items()}


def distorted_by(examples: Examples, num_clients: int, seed: int) -> tuple[Examples, dict[str, Partition]]:
    """Deals examples to clients at random, and distorts the images of each client in its own way.

    Returns the distorted examples, and their partitions among clients by "train", "validation" and "test".

    Args:
        examples: Training, validation and test examples: square images with pixels in [0, 1].
        num_clients: Number of clients.
        seed: Seed of the distortions and of the training examples' division; ``examples.rng`` divides the others.
    """
    owner = {"train": owners(partition.iid(len(examples.y["train"]), num_clients, seed))}
    owner |= {part: examples.rng.integers(num_clients, size=len(examples.y[part])) for part in PARTS[1:]}
    x = {part: _distorted(examples.x[part], of_part, num_clients, seed) for part, of_part in owner.items()}
    return examples._replace(x=x), {part: of_owners(of_part, num_clients) for part, of_part in owner.items()}


def _distorted(x: np.ndarray, owner: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """Gives all images of a client one contrast, brightness and shift; ``owner`` [n] is the client of each image."""
    # Each client has its own contrast (a factor from 0.5 to 1.5), brightness (-0.2 to 0.2) and cyclic shift (up to one
    # pixel each way).
    rng = np.random.default_rng([seed, 1])
    contrast, brightness = rng.uniform(0.5, 1.5, num_clients), rng.uniform(-0.2, 0.2, num_clients)
    down, right = rng.integers(-1, 2, (2, num_clients))
    side = int(np.sqrt(x[0].size))
    result = np.empty_like(x)
    for i in np.unique(owner):
        images = x[owner == i].reshape(-1, side, side)
        moved = np.roll(images, (down[i], right[i]), axis=(1, 2))
        result[owner == i] = (contrast[i] * moved + brightness[i]).reshape(len(images), *x.shape[1:])
    return result.astype(x.dtype)


def dealt(labels: np.ndarray, num_clients: int, classes: int, seed: int) -> Partition:
    """Divides examples among clients, each with ``classes`` classes, or at random if ``classes`` is 0.

    Args:
        labels: Label of each example, [n].
        num_clients: Number N of clients.
        classes: Number of classes of a client; 0 (the constant IID) for a random division.
        seed: Seed of the division.

    Raises:
        ValueError: There are more clients than examples, or the classes cannot be divided in this way.
    """
    if classes == IID:
        return partition.iid(len(labels), num_clients, seed)
    return partition.classes(labels, num_clients, classes, seed)


def scheme_name(classes: int) -> str:
    """Returns the name that tables give a division of examples among clients, such as "2 classes" or "i.i.d.".

    Args:
        classes: Number of classes of a client; 0 for i.i.d., -1 for one client per user, -2 for distorted images.
    """
    names = {IID: "i.i.d.", USERS: "by user", DISTORTED: "distorted", 1: "1 class"}
    return names.get(classes, f"{classes} classes")


def trial_of(examples: Examples, clients: Partition | Mapping[str, Partition], seed: int, num_classes: int) -> Trial:
    """Builds a ``Trial`` of examples and their clients, with arrays on the device.

    Its ``by_client`` is set if validation and test examples are divided among clients, too.

    Args:
        examples: Training, validation and test examples.
        clients: Partition of the training examples, or one for each of "train", "validation" and "test".
        seed: Seed of the trial.
        num_classes: Number of classes.
    """
    if isinstance(clients, Mapping):
        x, y = examples.x, examples.y
        by_part = {part: data.federated_data(x[part], y[part], clients[part], x[part].dtype) for part in PARTS}
        train = by_part.pop("train")
        splits = {part: EvaluationSet(of_part.x, of_part.y) for part, of_part in by_part.items()}
        return Trial(seed, train, splits, num_classes, by_part)
    federated = data.federated_data(examples.x["train"], examples.y["train"], clients, examples.x["train"].dtype)
    splits = {part: EvaluationSet(jnp.asarray(examples.x[part]), jnp.asarray(examples.y[part])) for part in PARTS[1:]}
    return Trial(seed, federated, splits, num_classes)


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of FedAvg on a dense network with one hidden layer, and of its data, to which experiments add their own.

    Attributes:
        width: Width of the network's hidden layer.
        local_steps: Local steps of a client.
        batch_size: Minibatch of a client.
        learning_rates: Learning rates that are tried.
        tuning_seed: Seed of the runs that try learning rates.
        num_train: Number of training examples.
        num_validation: Number of examples on which learning rates are chosen.
        num_test: Number of test examples; 0 for all.
    """

    width: int = 64
    local_steps: int = 10
    batch_size: int = 10
    learning_rates: tuple[float, ...] = within((1.0, 3.0, 10.0, 30.0), above=0)
    tuning_seed: int = within(1000, least=0)
    num_train: int = 1000
    num_validation: int = 200
    num_test: int = within(0, least=0)

    @property
    def work(self) -> ft.Work:
        """Local steps and minibatches of a client in a round."""
        return ft.Work(steps=self.local_steps, batch_size=self.batch_size)

    def network(self, trial: Trial) -> ft.types.Model:
        """Builds the network for the inputs and classes of a trial."""
        return ft.models.mlp(trial.data.x.shape[1], trial.num_classes, (self.width,), b_std=0.1)


def label_skewed(study: Study, seed: int) -> Trial:
    """Draws the examples of one seed, standardises the pixels and divides the examples among clients by label skew.

    Args:
        study: The study, whose settings have ``num_train``, ``num_validation``, ``num_test``, ``num_clients``, and
            ``alpha`` of the Dirichlet distribution.
        seed: Seed of the draw and the division.

    Raises:
        ValueError: The data set cannot be loaded, has too few examples, or cannot be divided among so many clients.
    """
    settings = study.settings
    loaded = ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True)
    examples = draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    mean, deviation = np.float32(loaded.x_train.mean()), np.float32(loaded.x_train.std())
    x = {part: (values - mean) / deviation for part, values in examples.x.items()}
    clients = partition.dirichlet(examples.y["train"], settings.num_clients, settings.alpha, seed)
    return trial_of(examples._replace(x=x), clients, seed, loaded.num_classes)


def one_hot(trial: Trial) -> FederatedData:
    """Returns the trial's training data with labels replaced by one-hot targets [n, C] float32, which NTK-FL fits."""
    targets = data.classification_targets(np.asarray(trial.data.y), trial.num_classes)
    return trial.data._replace(y=jnp.asarray(targets, jnp.float32))


def projected(trial: Trial, dimension: int) -> Trial:
    """Projects the trial's inputs by a random Gaussian matrix that its seed determines (NTK-FL, section 4.2).

    Args:
        trial: The trial, with flat inputs [n, d] and no ``by_client``, whose inputs are not projected.
        dimension: Dimension of a projected input, at most d.

    Raises:
        ValueError: ``dimension`` is larger than d.
    """
    size = trial.data.x.shape[1]
    if dimension > size:
        raise ValueError(f"projected: got {dimension}, must be at most {size}, the numbers of an input")
    matrix = ft.data.projection_matrix(size, dimension, trial.seed, dtype=np.float32)
    splits = {part: split._replace(x=jnp.asarray(np.asarray(split.x) @ matrix)) for part, split in trial.splits.items()}
    projected_data = trial.data._replace(x=jnp.asarray(np.asarray(trial.data.x) @ matrix))
    return trial._replace(data=projected_data, splits=splits)


def partition_of(federated: FederatedData) -> Partition:
    """Returns the partition of examples among clients that ``federated`` has, as numpy arrays."""
    return Partition(np.asarray(federated.indices), np.asarray(federated.offsets))


def with_partition(federated: FederatedData, clients: Partition) -> FederatedData:
    """Returns the same examples, divided among clients by another partition.

    Args:
        federated: The examples.
        clients: The new partition: rows of each client.
    """
    return federated._replace(
        indices=jnp.asarray(clients.indices, jnp.int32), offsets=jnp.asarray(clients.offsets, jnp.int32)
    )


def with_global_set(trial: Trial, share: float, labels: Array) -> tuple[FederatedData, np.ndarray]:
    """Adds the same global set of examples to every client's examples (NTK-FL, section 6, (i)).

    The set has equally many examples of each label, to within one. Returns the enlarged data, and the rows of the set.

    Args:
        trial: Data of one seed.
        share: Size of the set, as a share of the number of all clients' examples.
        labels: Label of each example, [n].

    Raises:
        ValueError: A label has too few examples.
    """
    chosen = sharing.class_balanced(np.asarray(labels), max(1, round(share * len(labels))), trial.seed, "shared")
    return with_partition(trial.data, sharing.with_shared(partition_of(trial.data), chosen)), chosen


def fingerprint(trial: Trial) -> str:
    """Computes the SHA-256 checksum of all arrays of a trial, which tells whether two trials have equal data."""
    arrays = map(np.asarray, jax.tree.leaves((trial.data, trial.splits, trial.by_client)))
    return sha256(*(part for array in arrays for part in (f"{array.dtype}{array.shape}", array)))
