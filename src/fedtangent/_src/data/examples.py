"""The examples of a run: checks the user's data and clients, and moves them to the device.

Targets take the form that the loss needs, such as one-hot vectors for the squared error.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Float64, Int, Num, Shaped, UInt64

from fedtangent._src import checks, losses
from fedtangent._src.data import dataset as datasets
from fedtangent._src.data import own
from fedtangent._src.data.dataset import IMAGE, TOKENS, VECTOR, Dataset, SourceInfo, check_dataset
from fedtangent._src.data.named import load
from fedtangent._src.data.partition.drawn import generator
from fedtangent._src.data.partition.given import Clients, by_user, of
from fedtangent._src.losses import Loss
from fedtangent._src.types import AnyArray, Array, ArrayLike, FederatedData, Model, Partition

MOST_MEASURED = 10_000  # training examples that metrics are measured on; more are sampled
SPLITS = ("train", "test")


class Split(NamedTuple):
    """The training or the test examples on which metrics are measured.

    Attributes:
        x: Inputs [n, ...].
        targets: Targets [n, C] of the squared error, or -1 and 1 for a loss of signs such as the logistic.
        labels: Class labels [n] int32; None for regression.
    """

    x: Shaped[Array, "n ..."]
    targets: Float[Array, "n C"]
    labels: Int[Array, "n"] | None

    @property
    def num_examples(self) -> int:
        """Number of examples n of this split."""
        return self.x.shape[0]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Examples:
    """Training and test examples of a run, and the clients that hold them; built by ``run_examples``.

    Attributes:
        dataset: The data on the host as the user passed them, with string labels replaced by numbers.
        classes: Names of the classes if labels are strings, else None.
        loss: Name of the loss that is trained, or the user's own function.
        clients: Training examples of each client.
        data: The training examples on the device: inputs float32 or int32 (tokens), targets in the form of the loss.
        train: Training examples to measure metrics on: all, or 10,000 of them (``train_rows``).
        test: All test examples; None for data without a test split.
    """

    dataset: Dataset
    classes: tuple[str, ...] | None
    loss: str | Loss
    clients: Partition
    data: FederatedData
    train: Split
    test: Split | None

    def __repr__(self) -> str:
        """Summarises the data: training examples, how many of them clients hold, test examples, input shape, task."""
        dataset, num_shared = self.dataset, len(np.unique(self.clients.indices))
        num_train, num_test = len(dataset.x_train), len(dataset.x_test)
        task = f"{dataset.num_classes} classes" if dataset.num_classes else f"{dataset.num_outputs} numbers to predict"
        names = "" if self.classes is None else f" ({_listed(self.classes)})"
        shared = "all" if num_shared == num_train else f"{num_shared}"
        return (
            f"Examples({dataset.name!r}: {num_train} to train, {shared} of them on {self.clients.num_clients} clients, "
            f"{num_test or 'none'} to test; inputs {dataset.input_shape}, {task}{names})"
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return self.dataset.input_shape

    @property
    def num_outputs(self) -> int:
        """Number of outputs C of a model for the data."""
        return self.dataset.num_outputs

    @functools.cached_property
    def train_rows(self) -> slice | Int[np.ndarray, "m"]:
        """Indices of the training examples that metrics are measured on: all, or 10,000 at random if there are more."""
        return self.sample("train", MOST_MEASURED)

    def sample(self, split: str, most: int | None) -> slice | Int[np.ndarray, "m"]:
        """Returns the indices of the examples of a split that are measured: all, or a random sample of ``most``.

        Args:
            split: "train" or "test".
            most: Largest number of measured examples; None for all.
        """
        return sampled(most, *_columns(self.dataset, split))

    @property
    def train_name(self) -> str:
        """Name of the training examples in tables: "train", or such as "train 10000 of 24000" for a sample."""
        measured, whole = self.train.num_examples, len(self.dataset.x_train)
        return "train" if measured == whole else f"train {measured} of {whole}"

    def held_by(self, clients: Partition) -> FederatedData:
        """Returns the same training examples on the device, divided among clients by another partition.

        Args:
            clients: Training examples of each client.

        Raises:
            ValueError: ``clients`` is no partition of these examples.
        """
        return FederatedData(self.data.x, self.data.y, *map(jnp.asarray, of(clients, len(self.dataset.x_train))))

    def in_float64(
        self, split: str = "train", most: int | None = None
    ) -> tuple[Num[np.ndarray, "n ..."], Float64[np.ndarray, "n C"]]:
        """Returns inputs and targets on the host in float64, as theory takes them.

        The numbers are rounded to float32, as networks are trained on them. Under the cross entropy targets are
        probabilities of the classes.

        Args:
            split: "train", which are all training examples, or "test".
            most: Largest number of examples; more are sampled at random. None for all.

        Returns:
            Inputs [n, ...] (tokens stay whole numbers) and targets [n, C].

        Raises:
            ValueError: ``split`` is "test" and there are no test examples. Or targets are class labels, and the loss
                is a function (labels then have no known form as numbers) or the cross entropy of a single class.
        """
        checks.choice("split", split, SPLITS)
        if split == "test" and self.test is None:
            raise ValueError("split: got 'test', must be 'train': the data have no test examples")
        dataset = self.dataset
        rows = self.sample(split, most)
        x, y = (column[rows] for column in _columns(dataset, split))
        inputs, (targets, labels) = inputs_on_device(x), _targets_of(self.loss, y, dataset.num_classes)
        if labels is not None and callable(self.loss):
            raise ValueError(
                f"loss: got the function {losses.words(self.loss)!r} for class labels, must be the name of a loss; or "
                "give floating numbers [n, C] as targets, such as one-hot rows"
            )
        if labels is not None and losses.targets_of(self.loss) == "classes":
            if self.num_outputs < 2:
                raise ValueError(f"loss: got {self.loss}, must be squared_error if there is one class only")
            targets = datasets.classification_targets(labels, self.num_outputs)
        is_floating = np.issubdtype(inputs.dtype, np.floating)
        return inputs.astype(np.float64) if is_floating else inputs, np.asarray(targets, np.float64)


def run_examples(
    data: Dataset | str | Sequence[ArrayLike],
    clients: Clients,
    loss: str | Loss = "squared_error",
    model: Model | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Examples:
    """Checks the data and the clients of a run, and moves them to the device in the form that the loss takes.

    Args:
        data: A ``Dataset``, the name of one, or arrays: (x_train, y_train) or (x_train, y_train, x_test, y_test).
            Inputs are [n, ...]. Whole numbers are tokens if the model reads tokens. Otherwise uint8 are pixels, which
            are divided by 255, and other whole numbers are converted to float32. Targets are class labels, whole
            numbers from 0 or strings [n] (numbered in sorted order); or floating numbers to predict, [n] for one output
            or [n, C].
        clients: A ``Partition``; a list of arrays, the rows of ``x_train`` that each client holds (or a mapping from
            the clients' names to them); or the user of each training example, whole numbers or strings [n]. Clients may
            overlap and need not hold every example.
        loss: Name of a loss, which decides the form of class labels: centred one-hot vectors for the squared error, -1
            and 1 for losses of signs such as the logistic, labels for the cross entropy and for a loss that is a
            function.
        model: The network, to be checked against the data; it may have more outputs than arrays have classes.
        data_dir: Folder with original files, for a data set's name.
        seed: Seed of the random part of loading a data set by its name.

    Raises:
        ValueError: A data set cannot be loaded, arrays do not fit together, values are NaN, infinite or too large for
            float32, the loss does not take these labels or numbers, a client repeats an example, no client holds one,
            or the model does not fit the data; before anything goes to the device.

    Warns:
        UserWarning: ``data`` are arrays with class numbers that no training example has.
    """
    dataset, classes = _read(data, data_dir, seed, model is not None and bool(model.vocabulary))
    for split in SPLITS[: 2 if len(dataset.x_test) else 1]:
        _check_split(dataset, split, loss)
    partition = clients_of(clients, len(dataset.x_train))
    is_arrays = not isinstance(data, str | Dataset)
    if model is not None:
        if is_arrays and dataset.num_classes:  # arrays do not say how many classes there are
            dataset = dataset._replace(num_classes=max(dataset.num_classes, model.output_size))
        _check_model(model, dataset, classes)
    if is_arrays and dataset.num_classes:
        _warn_of_absent_classes(dataset.y_train, dataset.y_test, dataset.num_classes, classes)
    return _on_device(dataset, classes, loss, partition)


def clients_of(clients: Clients, num_examples: int) -> Partition:
    """Converts the argument ``clients`` of a run to a ``Partition``.

    Args:
        clients: One of the forms that ``run_examples`` takes.
        num_examples: Number of training examples n.

    Raises:
        ValueError: A list of users whose length is not n; clients that repeat an example, or hold an index that is not
            from 0 to n - 1; or no client with an example.
    """
    if not isinstance(clients, Partition | Mapping) and (num_users := _num_users(clients)):
        if num_users != num_examples:
            raise ValueError(
                f"clients: got {num_users} users, must be one for each of {num_examples} training examples, or a "
                "list of arrays, the examples of each client"
            )
        return by_user(clients, "clients")
    partition = of(clients, num_examples, "clients")
    if len(partition.indices) == 0:
        raise ValueError(f"clients: got {partition.num_clients} empty clients, must have at least one example")
    owner = np.repeat(np.arange(partition.num_clients, dtype=np.int64), partition.sizes)
    pairs, counts = np.unique(owner * num_examples + partition.indices, return_counts=True)
    if len(pairs) < len(owner):
        at = int(np.argmax(counts > 1))
        client, example = divmod(int(pairs[at]), num_examples)
        raise ValueError(
            f"clients: got example {example} {counts[at]} times for client {client}, must list each example of a "
            "client once"
        )
    return partition


def _num_users(clients: object) -> int:
    """Returns the length of ``clients`` if it is a flat list of each example's user, else 0, as for index arrays."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Sized) or len(clients) == 0:
        return 0
    if hasattr(clients, "ndim"):
        is_flat = int(clients.ndim) == 1 and not _is_list(np.asarray(clients)[0])
    else:
        is_flat = isinstance(clients, Iterable) and not any(map(_is_list, clients))
    return len(clients) if is_flat else 0


def _is_list(value: object) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


# ---- reading --------------------------------------------------------------------------------------------------------


def _read(
    data: Dataset | str | Sequence[ArrayLike], data_dir: str | os.PathLike[str] | None, seed: int, as_tokens: bool
) -> tuple[Dataset, tuple[str, ...] | None]:
    """Loads or builds the data set that the user's argument ``data`` describes; also returns its class names or None.

    ``data_dir`` and ``seed`` are for a data set that is loaded by name. ``as_tokens`` tells whether whole numbers in
    arrays are tokens. Raises ``ValueError`` for data of any other form.
    """
    if isinstance(data, Dataset):
        check_dataset(data)
        parts = {f"x_{split}": getattr(data, f"x_{split}") for split in SPLITS}
        read: dict[str, Any] = {name: own.inputs(name, x, data.kind) for name, x in parts.items() if len(x)}
        return data._replace(**read), None
    if isinstance(data, str):
        return load(data, data_dir, seed), None
    if not isinstance(data, tuple | list) or len(data) not in (2, 4):
        got = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list | dict) else checks.shown(data)
        raise ValueError(
            f"data: got {got}, must be a Dataset, a data set's name, (x_train, y_train) or "
            "(x_train, y_train, x_test, y_test)"
        )
    return _of_arrays(*data, as_tokens=as_tokens)


def _of_arrays(
    x_train: ArrayLike,
    y_train: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    as_tokens: bool,
) -> tuple[Dataset, tuple[str, ...] | None]:
    """Builds a data set from arrays, as the user passed them; also returns the class names if labels are strings.

    ``as_tokens`` tells whether whole numbers in the inputs are tokens, because the model reads tokens.
    """
    xs = {"x_train": own.inputs("x_train", x_train, TOKENS if as_tokens else VECTOR)}
    ys: dict[str, Any] = {"y_train": y_train}
    kind = TOKENS if as_tokens else VECTOR if xs["x_train"].ndim == 2 else IMAGE
    if x_test is not None or y_test is not None:
        xs["x_test"], ys["y_test"] = own.inputs("x_test", x_test, kind), y_test
    y, num_classes, classes = own.targets(ys)
    tests = {"x_test": xs["x_train"][:0], "y_test": y["y_train"][:0]}
    info = SourceInfo("given", "given", "memory")
    arrays = tests | xs | y
    return Dataset("given data", num_classes=num_classes, user_train=None, info=info, kind=kind, **arrays), classes


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_split(dataset: Dataset, split: str, loss: str | Loss) -> None:
    """Raises ``ValueError`` unless a split's inputs and targets fit together, are finite in float32, and suit the loss.

    ``split`` is "train" or "test"; test examples must have the shapes of training examples.
    """
    (x_name, x), (y_name, y) = ((f"{axis}_{split}", getattr(dataset, f"{axis}_{split}")) for axis in "xy")
    for name, array, train in ((x_name, x, dataset.x_train), (y_name, y, dataset.y_train)):
        got, allowed = array.shape[1:], train.shape[1:]
        if got != allowed:
            columns = _counted(got[0], "column") if len(got) == 1 else f"examples of shape {got}"
            needed = f"{allowed[0]}" if len(got) == len(allowed) == 1 else f"{allowed}"
            raise ValueError(f"{name}: got {columns}, must be {needed} as {name[0]}_train has")
    if len(x) != len(y):
        raise ValueError(f"{y_name}: got {len(y)} targets, must be {len(x)}, one for each row of {x_name}")
    for name, array in ((x_name, x), (y_name, y)):
        datasets.finite_rows(name, array)
        datasets.check_float32(name, array)
    if dataset.num_classes:
        checks.class_labels(y_name, y, dataset.num_classes)
        losses.get_loss(loss)
        return
    if not callable(loss) and losses.targets_of(loss) == "classes":
        kinds = {kind: [n for n in losses.LOSSES if losses.targets_of(n) == kind] for kind in ("numbers", "signs")}
        raise ValueError(
            f"loss: got {loss!r}, which needs class labels (whole numbers or strings [n]), but {y_name} has "
            f"{y.dtype} numbers of shape {y.shape}, allowed are {', '.join(kinds['numbers'])}, and for numbers -1 and "
            f"1 {', '.join(kinds['signs'])}"
        )
    losses.check_targets(loss, y, y_name)


def _check_model(model: Model, dataset: Dataset, classes: tuple[str, ...] | None) -> None:
    """Raises ``ValueError`` unless the model reads the data's examples and has an output for each class or number.

    ``classes`` are the names of the classes, for the message; None if their names are their numbers.
    """
    holds_tokens, kinds = dataset.kind == TOKENS, {True: "tokens", False: "real numbers"}
    if model.vocabulary is not None and (model.vocabulary > 0) != holds_tokens:
        raise ValueError(
            f"model: got {model.name}, which reads {kinds[not holds_tokens]}, must read {kinds[holds_tokens]}, as "
            f"{dataset.name} has"
        )
    for split in SPLITS if holds_tokens else ():
        checks.tokens(f"x_{split}", getattr(dataset, f"x_{split}"), model.vocabulary)
    if model.output_size != dataset.num_outputs:
        if dataset.num_classes:
            names = f"0 to {dataset.num_classes - 1}" if classes is None else _listed(classes)
            is_larger = len(dataset.y_test) and dataset.y_test.max() > dataset.y_train.max()
            counted = f"class of {'y_test' if is_larger else 'y_train'} ({names})"
            hint = "; a single output is fitted to floating numbers, such as -1 and 1" if model.output_size == 1 else ""
        else:
            counted, hint = "column of y_train", "; class labels are whole numbers or strings [n]"
        raise ValueError(
            f"model: got {model.name} of {_counted(model.output_size, 'output')}, must have {dataset.num_outputs}, one "
            f"for each {counted}{hint}"
        )
    params = model.shapes
    dtype = jnp.int32 if dataset.x_train.dtype.kind in "iu" else jnp.float32
    try:
        jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct((1, *dataset.input_shape), dtype))
    except Exception as error:  # of whatever kind the network's library raises
        message = " ".join((str(error) or type(error).__name__).split())
        raise ValueError(
            f"model: got {model.name}, which cannot read examples of shape {dataset.input_shape} of {dataset.name}: "
            f"{message:.300}"
        ) from error


def _warn_of_absent_classes(
    y_train: Int[np.ndarray, "n"], y_test: Int[np.ndarray, "m"], num_classes: int, classes: tuple[str, ...] | None
) -> None:
    """Warns of classes without training examples: one warning for classes with test examples, one for the rest.

    ``classes`` are the names of the classes; None if their names are their numbers.
    """
    trained, tested = (np.bincount(y, minlength=num_classes) > 0 for y in (y_train, y_test))
    names = np.asarray(range(num_classes) if classes is None else classes)
    if strange := names[~trained & tested].tolist():
        warnings.warn(
            f"y_test: has labels that y_train has not, so that no client learns them: {_listed(strange)}; leave these "
            "test examples out, or add such training examples",
            stacklevel=3,
        )
    if absent := names[~trained & ~tested].tolist():
        warnings.warn(
            f"y_train: has no example of {len(absent)} of {num_classes} classes, so that nothing trains their outputs: "
            f"{_listed(absent)}; number the classes without gaps by np.unique(y, return_inverse=True)[1], or give the "
            "model fewer outputs",
            stacklevel=3,
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(names: Sequence[object]) -> str:
    """Returns the first five ``names`` joined by commas, and ".." if there are more."""
    return ", ".join(map(str, names[:5])) + (", .." if len(names) > 5 else "")


# ---- on the device --------------------------------------------------------------------------------------------------


def _on_device(dataset: Dataset, classes: tuple[str, ...] | None, loss: str | Loss, clients: Partition) -> Examples:
    """Moves checked data to the device, with targets in the form that the loss takes, and builds ``Examples``."""
    takes_labels, num_classes = callable(loss) or losses.targets_of(loss) == "classes", dataset.num_classes
    targets, labels = _targets_of(loss, dataset.y_train, num_classes)
    x, y = jnp.asarray(inputs_on_device(dataset.x_train)), labels if takes_labels and labels is not None else targets
    data = FederatedData(x, jnp.asarray(y), *map(jnp.asarray, clients))
    train = _split_of(dataset, "train", loss, MOST_MEASURED)
    if train.num_examples == len(x):
        train = train._replace(x=x)  # one copy on the device
    test = _split_of(dataset, "test", loss) if len(dataset.x_test) else None
    return Examples(dataset, classes, loss, clients, data, train, test)


def _split_of(dataset: Dataset, split: str, loss: str | Loss, most: int | None = None) -> Split:
    """Moves a split's examples, or a sample of ``most`` of them, to the device as a ``Split``.

    Targets have the form that ``loss`` takes. The sample is random, but always the same (``sampled``).
    """
    columns = _columns(dataset, split)
    rows = sampled(most, *columns)
    x, y = (column[rows] for column in columns)
    targets, labels = _targets_of(loss, y, dataset.num_classes)
    on_device = None if labels is None else jnp.asarray(labels)
    return Split(jnp.asarray(inputs_on_device(x)), jnp.asarray(targets), on_device)


def _columns(dataset: Dataset, split: str) -> tuple[np.ndarray, np.ndarray]:
    return getattr(dataset, f"x_{split}"), getattr(dataset, f"y_{split}")


def sampled(most: int | None, *columns: Shaped[AnyArray, "n ..."]) -> slice | Int[np.ndarray, "most"]:
    """Draws the indices of ``most`` of the examples at random, always the same examples, in ascending order.

    Each example has a random number, computed from its inputs and targets, and the examples with the smallest numbers
    are selected. So the sample does not depend on the order of the rows. Copies of an example have different numbers.

    Args:
        most: Size of the sample; None for all examples. If there are at most ``most`` examples, all are selected, by
            ``slice(None)``.
        columns: Arrays of the examples' numbers: inputs, targets.
    """
    num_examples = len(columns[0])
    if most is None or num_examples <= most:
        return slice(None)
    digests, rng = np.zeros(num_examples, np.uint64), generator(0)
    for column in columns:
        words = np.ascontiguousarray(inputs_on_device(np.asarray(column))).reshape(num_examples, -1).view(np.uint16)
        weights = rng.integers(2**64, size=words.shape[1], dtype=np.uint64)
        for part in np.array_split(np.arange(num_examples), -(-words.size // 2**24)):
            digests[part] += words[part].astype(np.uint64) @ weights
    order = np.argsort(digests, kind="stable")
    _, first, count = np.unique(digests[order], return_index=True, return_counts=True)
    copy = np.arange(num_examples, dtype=np.uint64) - np.repeat(first, count).astype(np.uint64)
    chances = _mixed(digests[order] + copy * np.uint64(0x9E3779B97F4A7C15))
    return np.sort(order[np.argsort(chances, kind="stable")[:most]])


def _mixed(words: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """Turns nearby whole numbers into unrelated ones, by the last steps of SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def inputs_on_device(x: np.ndarray) -> np.ndarray:
    """Returns inputs in the dtype that they have on the device: whole numbers (tokens) int32, others float32."""
    return np.asarray(x, np.int32 if np.issubdtype(x.dtype, np.integer) else np.float32)


def _targets_of(
    loss: str | Loss, y: Num[np.ndarray, "n *C"], num_classes: int
) -> tuple[Float32[np.ndarray, "n C"], Int[np.ndarray, "n"] | None]:
    """Returns the targets [n, C] float32 of a loss for labels or numbers ``y``, and the labels [n] int32 or None.

    Labels become vectors of -1 and 1 if the loss takes signs, else centred one-hot vectors. If ``num_classes`` is 0,
    ``y`` are numbers and there are no labels (None).
    """
    if num_classes == 0:
        return np.asarray(y, np.float32), None
    if not callable(loss) and losses.targets_of(loss) == "signs":
        targets = datasets.sign_targets(y, num_classes)
    else:
        targets = datasets.classification_targets(y, num_classes, centred=True)
    return np.asarray(targets, np.float32), np.asarray(y, np.int32)
