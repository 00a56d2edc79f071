"""The ``Dataset`` of images that a source has read as uint8 arrays: its options, scaling and checks."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Num

from fedtangent._src import checks
from fedtangent._src.data.dataset import IMAGE, VECTOR, Dataset, ImageOptions, SourceInfo, first, images
from fedtangent._src.data.published import Published
from fedtangent._src.data.stored import Found, StoredOptions


@dataclasses.dataclass(frozen=True)
class StoredImageOptions(StoredOptions, ImageOptions):
    """Options of images that are downloaded once and then kept in the cache."""

    standardise: bool = False
    """Subtract the mean of all training pixels and divide by their standard deviation (one number each)."""


def dataset(published: Published, stored: Found, options: StoredImageOptions, size: tuple[int, ...]) -> Dataset:
    """Builds the data set of images uint8 [n, *size] and labels [n], in the original order, with pixels in [0, 1].

    Users come from ``user_train`` and ``user_test`` [n], if the arrays have them.

    Args:
        published: The data set's description.
        stored: Its arrays, and the folder that they were read from.
        options: Options of the data set.
        size: Shape of an image.

    Raises:
        ValueError: Arrays have other shapes or types, labels exceed the classes, or an option is out of range.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    standardise = checks.flag("standardise", options.standardise)
    arrays, shape = stored.arrays, ", ".join(("n", *map(str, size)))
    for split in ("train", "test"):
        x, y = (arrays.get(f"{axis}_{split}", np.empty(0)) for axis in "xy")
        if x.dtype != np.uint8 or x.shape[1:] != size or y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise ValueError(
                f"{published.name}: got {x.dtype} {x.shape} and {y.dtype} {y.shape} in {stored.read_from}, {split} "
                f"images and labels must be uint8 [{shape}] and [n]"
            )
    mean, deviation = _moments(arrays["x_train"]) if standardise else (0.0, 1.0)
    num_classes = published.num_classes

    def of_split(split: str, count: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        x, y = first(f"num_{split}", count, arrays[f"x_{split}"], arrays[f"y_{split}"])
        users = arrays.get(f"user_{split}")
        scaled = _scaled(images(x, options.flatten)[0], mean, deviation, dtype)
        labels = checks.class_labels("labels", y, num_classes).astype(np.int32)
        return scaled, labels, None if users is None else users[: len(y)].astype(np.int32)

    x_train, y_train, user_train = of_split("train", options.num_train)
    x_test, y_test, user_test = of_split("test", options.num_test)
    info = SourceInfo(published.homepage, published.licence, str(stored.read_from))
    kind = VECTOR if options.flatten else IMAGE
    return Dataset(published.name, x_train, y_train, x_test, y_test, num_classes, user_train, info, kind, user_test)


def _moments(pixels: Num[np.ndarray, "n ..."]) -> tuple[float, float]:
    """Computes mean and standard deviation of all pixels, scaled to [0, 1], from their histogram (exact)."""
    counts, values = np.bincount(pixels.ravel(), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _scaled(
    pixels: Num[np.ndarray, "*shape"], mean: float, deviation: float, dtype: np.dtype
) -> Float[np.ndarray, "*shape"]:
    """Computes ``(pixels / 255 - mean) / deviation`` by a table of 256 values, without a float64 copy of the pixels."""
    if deviation == 0.0:
        raise ValueError("standardise: got True, but the training images are all one shade")
    return ((np.arange(256) / 255 - mean) / deviation).astype(dtype)[pixels]
