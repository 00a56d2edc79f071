"""The ``Dataset`` of images that a source has read as uint8 arrays: its options, scaling and checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from fedtangent._src import checks
from fedtangent._src.data.dataset import Dataset, ImageOptions, SourceInfo, first, images
from fedtangent._src.data.published import Published
from fedtangent._src.data.stored import Found, StoredOptions


@dataclasses.dataclass(frozen=True)
class StoredImageOptions(StoredOptions, ImageOptions):
    """Options of images that are downloaded once and then kept in the cache."""

    standardise: bool = False
    """Subtract the mean of all training pixels and divide by their standard deviation (one number each)."""


def dataset(published: Published, found: Found, options: StoredImageOptions, size: tuple[int, ...]) -> Dataset:
    """Builds the data set of images uint8 [n, *size] and labels [n], in the original order, with pixels in [0, 1].

    Users come from ``user_train`` and ``user_test`` [n], if the arrays have them.

    Args:
        published: The data set's description.
        found: Its arrays.
        options: Options of the data set.
        size: Shape of an image.

    Raises:
        ValueError: Arrays have other shapes or types, labels exceed the classes, or an option is out of range.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    standardise = checks.flag("standardise", options.standardise)
    arrays, shape = found.arrays, ", ".join(("n", *map(str, size)))
    for split in ("train", "test"):
        x, y = (arrays.get(f"{axis}_{split}", np.empty(0)) for axis in "xy")
        if x.dtype != np.uint8 or x.shape[1:] != size or y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise ValueError(
                f"{published.name}: got {x.dtype} {x.shape} and {y.dtype} {y.shape} in {found.read_from}, {split} "
                f"images and labels must be uint8 [{shape}] and [n]"
            )
    mean, deviation = _moments(arrays["x_train"]) if standardise else (0.0, 1.0)
    parts: dict[str, Any] = {}
    for split, count in (("train", options.num_train), ("test", options.num_test)):
        x, y = first(f"num_{split}", count, arrays[f"x_{split}"], arrays[f"y_{split}"])
        users = arrays.get(f"user_{split}")
        x, kind = images(x, options.flatten)
        parts[f"x_{split}"] = _scaled(x, mean, deviation, dtype)
        parts[f"y_{split}"] = checks.class_labels("labels", y, published.num_classes).astype(np.int32)
        parts[f"user_{split}"] = None if users is None else users[: len(y)].astype(np.int32)
    info = SourceInfo(published.homepage, published.licence, str(found.read_from))
    return Dataset(name=published.name, num_classes=published.num_classes, info=info, kind=kind, **parts)


def _moments(pixels: Num[np.ndarray, "n ..."]) -> tuple[float, float]:
    """Computes mean and standard deviation of all pixels, scaled to [0, 1], from their histogram (exact)."""
    counts, values = np.bincount(pixels.ravel(), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _scaled(
    pixels: Num[np.ndarray, "*shape"], mean: float, deviation: float, dtype: np.dtype[Any]
) -> Float[np.ndarray, "*shape"]:
    """Computes ``(pixels / 255 - mean) / deviation`` by a table of 256 values, without a float64 copy of the pixels."""
    if deviation == 0.0:
        raise ValueError("standardise: got True, but the training images are all one shade")
    return ((np.arange(256) / 255 - mean) / deviation).astype(dtype)[pixels]
