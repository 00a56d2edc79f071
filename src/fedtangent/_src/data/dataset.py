"""The record of a data set and its catalogue entry; functions that scale, project and encode inputs and targets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int, Num, UInt8

from fedtangent._src import checks
from fedtangent._src.entries import Entry
from fedtangent._src.types import ArrayLike, described

if TYPE_CHECKING:
    from fedtangent._src.data.published import Published
import math

from jaxtyping import Float

IMAGE, TOKENS, VECTOR = "image", "tokens", "vector"  # kinds of input


class SourceInfo(NamedTuple):
    """The origin of a data set: who made it, its licence, and where it was read."""

    source: str  # who made it, or its home page
    licence: str
    read_from: str  # the folder that was read, or "embedded", "generated" or "memory"


class Dataset(NamedTuple):
    """A data set: inputs and targets to train and to test on, as NumPy arrays on the host.

    ``x_train`` holds floating images [n, height, width, channels], vectors [n, d], or texts of T int32 tokens [n, T].
    ``y_train`` holds integer class labels [n]; for regression on C numbers, floating numbers [n, C], and then
    ``num_classes`` is 0. ``user_train`` has the id of the user (writer, speaker, device) of each training example; None
    without users. ``x_test``, ``y_test`` and ``user_test`` have the same forms; without a test set, ``x_test`` and
    ``y_test`` have no rows. ``kind`` says what an input is: "image", "tokens" or "vector". ``info`` is the origin of
    the data.
    """

    name: str
    x_train: Num[np.ndarray, "n ..."]  # floating images [n, height, width, channels] or vectors, or int32 tokens [n, T]
    y_train: Num[np.ndarray, "n *C"]  # class labels, or [n, C] floating for regression
    x_test: Num[np.ndarray, "m ..."]
    y_test: Num[np.ndarray, "m *C"]
    num_classes: int  # 0 for regression
    user_train: Int[np.ndarray, "n"] | None  # id of the user (writer, speaker, ..) of each example, if there are users
    info: SourceInfo
    kind: str = VECTOR  # of input: "image", "tokens" or "vector"
    user_test: Int[np.ndarray, "m"] | None = None  # the same for test examples; a user may have test examples only

    def __repr__(self) -> str:
        """Summarises the data set: kind, classes, shapes of the arrays and origin."""
        arrays = described({name: part for name, part in self._asdict().items() if isinstance(part, np.ndarray)})
        task = f"{self.num_classes} classes" if self.num_classes else "regression"
        return f"Dataset({self.name!r}, {self.kind}, {task}; {arrays}; read from {self.info.read_from})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example: (height, width, channels) of an image, (T,) of a text, (d,) of a vector."""
        return self.x_train.shape[1:]

    @property
    def num_outputs(self) -> int:
        """Number of outputs C of a model: classes, or components of a target; raises as ``check_dataset`` does."""
        check_dataset(self)
        return self.num_classes or self.y_train.shape[1]


def check_dataset(data: Dataset) -> None:
    """Raises ``ValueError`` unless inputs are arrays [n, ..], and targets [n] with classes or [n, C] without."""
    form = "class labels [n], as num_classes is above 0" if data.num_classes else "numbers [n, C], as num_classes is 0"
    for name in ("x_train", "y_train", "x_test", "y_test"):
        array = getattr(data, name)
        if not hasattr(array, "dtype") or array.ndim < 1:
            raise ValueError(
                f"data: got {checks.shown(array)} as {name}, must be an array with one example in each row"
            )
        if name.startswith("y") and array.ndim != (1 if data.num_classes else 2):
            raise ValueError(f"data: got {name} of shape {array.shape}, must be {form}")


@dataclasses.dataclass(frozen=True)
class DatasetEntry(Entry):
    """The catalogue entry of a data set: its name, options and loader ``build(options, data_dir, seed)``."""

    kind: str = VECTOR
    """Kind of input: "image", "tokens" or "vector" (an image loaded flat is a vector)."""
    partition: str = "dirichlet"
    """Name of the default partition; "by_user" for data with users."""
    is_regression: bool = False
    published: Published | None = None
    """The original files, for a data set that is downloaded."""

    @property
    def told(self) -> str:
        """Summary of the data set, with a note if `fedtangent data prepare` downloads its files."""
        return self.summary if self.published is None else f"{self.summary}; downloaded"


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Options of data sets of images: numbers of examples, whether images become vectors, and the dtype of pixels."""

    num_train: int | None = None
    """Use only this many training examples, the first ones."""
    num_test: int | None = None
    """Use only this many test examples, the first ones."""
    flatten: bool = False
    """Give each image as one vector, without height, width and channels."""
    dtype: str = "float32"
    """Dtype of the pixels: float32 or float64."""


def first(name: str, count: int | None, *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the first ``count`` rows of each array; raises ``ValueError`` if that is below 1 or above their length.

    Args:
        name: Name of ``count`` in error messages, such as "num_train".
        count: Number of rows; None for all.
        arrays: Arrays of one length.
    """
    if count is not None:
        count = checks.whole(name, count, 1, len(arrays[0]))
    return [array[:count] for array in arrays]


def finite_rows(name: str, array: Num[np.ndarray, "n ..."]) -> None:
    """Raises ``ValueError`` for NaN or infinity in ``array`` [n, ...], naming the first such row.

    Args:
        name: Name of the argument, for the error message.
        array: Numbers, one row for each example.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(array)):  # one pass; a sum that overflows is looked at row by row too
            return
    flat = array.reshape(len(array), -1)
    rows = ~np.isfinite(flat).all(axis=1)
    if rows.any():
        row = int(np.argmax(rows))
        value = flat[row][~np.isfinite(flat[row])][0]
        raise ValueError(
            f"{name}: got {value} in row {row} ({rows.sum()} of {len(rows)} rows not finite), must be finite"
        )


def check_float32(name: str, array: np.ndarray, allowed: str = "must be rescaled") -> None:
    """Raises ``ValueError`` for finite numbers that are too large for float32.

    Args:
        name: Name of the array, for the error message.
        array: The numbers.
        allowed: Advice at the end of the error message.
    """
    most = float(np.finfo(np.float32).max)
    if array.size and array.dtype.itemsize > 4 and max(float(array.max()), -float(array.min())) > most:
        raise ValueError(f"{name}: got values beyond the range of float32, {allowed}")


LEVELS = 100  # values that float32 must have within the range of a feature


def check_resolution(name: str, array: np.ndarray) -> None:
    """Raises ``ValueError`` for a feature whose differences float32 would round away, such as a time since 1970.

    Such a feature has fewer than 100 float32 values between its least and its largest number. A feature whose values
    differ only by the rounding of float64 counts as constant, and passes.

    Args:
        name: Name of the array, for the error message.
        array: The numbers, one row for each example; only float64 numbers are checked.
    """
    if array.dtype != np.float64 or len(array) == 0:
        return
    low, high = array.min(axis=0), array.max(axis=0)
    size, width = np.maximum(np.abs(low), np.abs(high)), high - low
    lost = (width > 1e-12 * size) & (width < LEVELS * float(np.finfo(np.float32).eps) * size)
    if lost.any():
        place = tuple(int(i) for i in np.argwhere(lost)[0])
        raise ValueError(
            f"{name}: got numbers from {low[place]:.15g} to {high[place]:.15g} at index {list(place)} of the examples, "
            "which float32 hardly tells apart: subtract their mean, or use dtype float64"
        )


def pixels(x: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns uint8 pixels divided by 255, as float32."""
    return (x / np.float32(255)).astype(np.float32)


def images(x: Num[np.ndarray, "n ..."], flatten: bool) -> tuple[Num[np.ndarray, "n ..."], str]:
    """Reshapes images to [n, height, width, channels] or to rows [n, d]; also returns their kind, "image" or "vector".

    Args:
        x: Images, [n, height, width] or [n, height, width, channels].
        flatten: Whether each image becomes one row of numbers.
    """
    if checks.flag("flatten", flatten):
        return x.reshape(len(x), -1), VECTOR
    return (x[..., None] if x.ndim == 3 else x), IMAGE


def classification_targets(labels: ArrayLike, num_classes: int, centred: bool = False) -> Float64[np.ndarray, "n C"]:
    """Computes one-hot targets [n, C] float64 for training a classifier under squared loss.

    Args:
        labels: Class labels [n].
        num_classes: Number of classes C.
        centred: Whether to subtract ``1 / C``, so that each row sums to zero, as a network of mean zero expects.

    Raises:
        ValueError: The labels are not a 1-D integer array, are empty, or are not from 0 to C - 1.
    """
    num_classes = checks.whole("num_classes", num_classes)
    array = checks.class_labels("labels", labels, num_classes)
    targets = np.zeros((len(array), num_classes))
    targets[np.arange(len(array)), array] = 1.0
    return targets - 1.0 / num_classes if centred else targets


def sign_targets(labels: ArrayLike, num_classes: int) -> Float64[np.ndarray, "n C"]:
    """Computes targets [n, C] float64 for losses of signs such as the logistic: 1 for an example's class, else -1.

    Args:
        labels: Class labels [n].
        num_classes: Number of classes C.

    Raises:
        ValueError: The labels are not a 1-D integer array, are empty, or are not from 0 to C - 1.
    """
    return 2 * classification_targets(labels, num_classes) - 1


SCALES = ("coordinates", "lengths", "none")


def projection_matrix(
    input_size: int, dimension: int, seed: int | bytes, scale: str = "coordinates", dtype: type = np.float64
) -> Float[np.ndarray, "input_size dimension"]:
    """Draws a random projection P [input_size, dimension], i.i.d. Gaussian (Yue et al., ICML 2022, section 4.2).

    Args:
        input_size: Numbers of an example.
        dimension: Numbers of a projected example, at most ``input_size``.
        seed: A whole number of any size, not negative, or its bytes, big-endian (from a key server). The entries are
            NumPy's Philox stream of this seed, drawn in float64.
        scale: ``"none"``: entries N(0, 1), as in the paper, which makes inputs about ``sqrt(dimension)`` times as long.
            ``"coordinates"``: divided by ``sqrt(input_size)``, so that a projected coordinate has on average the mean
            square of an original one, and the same step sizes fit. ``"lengths"``: divided by ``sqrt(dimension)``, which
            keeps lengths and inner products on average (Johnson and Lindenstrauss).
        dtype: Type of the result.

    Raises:
        ValueError: The dimension is below 1 or above ``input_size``, the seed is negative, or the scale is unknown.
    """
    checks.whole("dimension", dimension, 1, input_size)
    checks.choice("scale", scale, SCALES)
    entropy = int.from_bytes(seed, "big") if isinstance(seed, bytes) else seed
    if not isinstance(entropy, int | np.integer) or entropy < 0:  # the seed is a secret: it is not shown
        raise ValueError("seed: must be a whole number of at least 0, or bytes (it is secret and not shown)")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(int(entropy))))
    factor = {"coordinates": input_size, "lengths": dimension, "none": 1}[scale] ** -0.5
    return (factor * generator.standard_normal((input_size, dimension))).astype(dtype)


def projected(dataset: Dataset, dimension: int, seed: int | bytes, scale: str = "coordinates") -> Dataset:
    """Returns ``dataset`` with every example flattened and projected to ``dimension`` numbers, training and test alike.

    In CP-NTK-FL (Yue et al., ICML 2022, section 4.2) clients compute on the projected inputs ``Z = X P`` only. They
    share the seed of P, which the server does not know. The products are computed in float64. Inputs keep their dtype.
    The result has the kind "vector".

    Args:
        dataset: Data with floating inputs of any shape.
        dimension: Numbers of a projected example.
        seed: Seed of the matrix P, as in ``projection_matrix``.
        scale: Scale of the matrix, as in ``projection_matrix``.

    Raises:
        ValueError: Inputs are whole numbers, such as tokens, or ``projection_matrix`` refuses the dimension, the seed
            or the scale.
    """
    if dataset.x_train.dtype.kind != "f":
        raise ValueError(f"dataset: got {dataset.name} with inputs {dataset.x_train.dtype}, must be floating")
    shape = dataset.x_train.shape[1:]
    matrix = projection_matrix(math.prod(shape), dimension, seed, scale)
    train, test = (_project(x, matrix) for x in (dataset.x_train, dataset.x_test))
    return dataset._replace(x_train=train, x_test=test, kind=VECTOR)


def _project(
    x: Num[np.ndarray, "n ..."], matrix: Float[np.ndarray, "input_size dimension"]
) -> Float[np.ndarray, "n dimension"]:
    flat = x.reshape(len(x), -1)
    rows = max(1, 2**24 // max(1, matrix.shape[0]))  # so that no float64 copy of a large data set is made
    parts = [flat[i : i + rows].astype(np.float64) @ matrix for i in range(0, len(flat), rows)]
    whole = np.concatenate(parts) if parts else np.zeros((0, matrix.shape[1]))
    return whole.astype(x.dtype)
