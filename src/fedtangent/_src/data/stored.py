"""Published data sets: taken from the user's folder or the cache, or downloaded; functions for data sets of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num

from fedtangent._src import checks
from fedtangent._src.data import cache
from fedtangent._src.data.dataset import IMAGE, VECTOR, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images
from fedtangent._src.data.published import Arrays, Published, lacking, located
from fedtangent._src.entries import option
from fedtangent._src.storage import cache_directory, expanded


@dataclasses.dataclass(frozen=True)
class StoredOptions:
    """Options of data sets that are downloaded: the folders of the cache and of TensorFlow Datasets."""

    cache_dir: Path | None = option(None, may_differ=True)
    """Where prepared data are kept (default: $FEDTANGENT_CACHE, or the user's cache folder)."""
    tfds_dir: Path | None = option(None, may_differ=True)
    """Folder for downloads of TensorFlow Datasets (default: its own)."""


class Found(NamedTuple):
    """The arrays of a data set by name, such as ``x_train`` (see ``Published.read``), and the folder they are from."""

    arrays: Arrays
    read_from: Path


def obtain(
    published: Published,
    options: StoredOptions,
    data_dir: Path | None,
    otherwise: Callable[[Path], Found | None] = lambda directory: None,
    instead: str = "",
) -> Found:
    """Returns the arrays of a published data set: from the user's folder if there is one, else from the cache.

    If there is no such folder, arrays that the cache lacks are downloaded into it.

    Args:
        published: The data set.
        options: Folders of the cache and of TensorFlow Datasets.
        data_dir: The user's folder with original files; None for $FEDTANGENT_DATA.
        otherwise: Reads another form of the data from a data folder without the published files, or returns None.
        instead: Name of that form in error messages.

    Raises:
        ValueError: Files are missing, altered or unreadable, the cache is corrupted, or files cannot be downloaded.
    """
    directory = cache.given_directory(data_dir)
    if directory is not None:
        paths, missing = located(published, directory)
        if not missing:
            return Found(published.read(published, paths), directory)
        other = otherwise(directory)
        if other is None:
            raise lacking(published, directory, missing, instead)
        return other
    folder = stored_in(published, options)
    arrays = cache.read(folder)
    if arrays is None:
        arrays = prepare(published, options)
    return Found(arrays, folder)


def stored_in(published: Published, options: StoredOptions) -> Path:
    """Returns the folder in the cache for the arrays of a published data set.

    Args:
        published: The data set.
        options: Options of the data set, with its cache folder.
    """
    return cache_directory(options.cache_dir) / published.name


def prepare(published: Published, options: StoredOptions) -> Arrays:
    """Downloads and prepares the data through TensorFlow Datasets, and writes them to the cache folder.

    Args:
        published: The data set.
        options: Folders of the cache and of TensorFlow Datasets.

    Raises:
        ValueError: TensorFlow Datasets is not installed, or the data cannot be downloaded or written.
    """
    folder = stored_in(published, options)
    try:
        from fedtangent._src.data import builder  # heavy: TensorFlow Datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{published.name}: neither data_dir nor FEDTANGENT_DATA is set, {folder} does not exist, and to download "
            f"it tensorflow-datasets and array_record are needed, which cannot be imported ({error})"
        ) from error
    tfds_dir = None if options.tfds_dir is None else expanded("tfds_dir", options.tfds_dir)
    arrays = builder.prepare(published, tfds_dir)
    cache.write(folder, arrays)
    return arrays


def entry_of(
    published: Published, load: Callable[[Any, Path | None, int], Dataset], options: type, *papers: str, **fields: str
) -> DatasetEntry:
    """Builds the entry of a published data set.

    Args:
        published: The data set.
        load: Function ``(options, data_dir, seed) -> Dataset``.
        options: Dataclass of the options.
        papers: Keys of further papers, before the paper of the data set.
        fields: Fields of ``DatasetEntry``: the kind of input and the default partition.
    """
    name, summary, is_regression = published.name, published.description, published.num_classes == 0
    citations = (*papers, published.paper)
    return DatasetEntry(
        name, summary, load, options, citations, is_regression=is_regression, published=published, **fields
    )


@dataclasses.dataclass(frozen=True)
class StoredImageOptions(StoredOptions, ImageOptions):
    """Options of images that are downloaded once and then kept in the cache: whether to standardise the pixels."""

    standardise: bool = False
    """Subtract the mean of all training pixels and divide by their standard deviation (one number each)."""


def dataset(published: Published, stored: Found, options: StoredImageOptions, size: tuple[int, ...]) -> Dataset:
    """Builds the data set of images uint8 [n, *size] and labels [n], in the original order, with pixels in [0, 1].

    By the options, pixels are standardised, images are flattened, and only the first images of a split are used. Each
    example's user is in ``user_train`` and ``user_test`` [n], if the arrays have them.

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
        labels = checks.class_labels(f"{published.name}: labels", y, num_classes).astype(np.int32)
        return scaled, labels, None if users is None else users[: len(y)].astype(np.int32)

    x_train, y_train, user_train = of_split("train", options.num_train)
    x_test, y_test, user_test = of_split("test", options.num_test)
    info = SourceInfo(published.homepage, published.licence, str(stored.read_from))
    kind = VECTOR if options.flatten else IMAGE
    return Dataset(published.name, x_train, y_train, x_test, y_test, num_classes, user_train, info, kind, user_test)


def _moments(pixels: Num[np.ndarray, "n ..."]) -> tuple[float, float]:
    """Computes mean and standard deviation of all pixels, in units of [0, 1], from the uint8 pixels' histogram."""
    counts, values = np.bincount(pixels.ravel(), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _scaled(
    pixels: Num[np.ndarray, "*shape"], mean: float, deviation: float, dtype: np.dtype
) -> Float[np.ndarray, "*shape"]:
    """Computes ``(pixels / 255 - mean) / deviation`` by a table of 256 values, without a float64 copy of the pixels.

    Raises ``ValueError`` if ``deviation`` is 0.
    """
    if deviation == 0.0:
        raise ValueError("standardise: got True, must be False: all pixels of the training images have one shade")
    return ((np.arange(256) / 255 - mean) / deviation).astype(dtype)[pixels]
