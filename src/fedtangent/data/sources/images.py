"""MNIST and Fashion-MNIST: from original idx files, from the cache, or through TensorFlow Datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent import checks
from fedtangent.data import cache
from fedtangent.data.dataset import Dataset, SourceInfo, as_float, first
from fedtangent.data.sources import idx

Directory = str | os.PathLike[str]


def load_images(
    source: idx.IdxSource,
    data_dir: Directory | None = None,
    cache_dir: Directory | None = None,
    tfds_dir: Directory | None = None,
    flatten: bool = True,
    standardise: bool = False,
    num_train: int | None = None,
    num_test: int | None = None,
    dtype: Any = "float32",
) -> Dataset:
    """Images in [0, 1] and labels, in the original order.

    Args:
        source: which data set.
        data_dir: folder with the four original idx files; by default $FEDTANGENT_DATA. Where one is named, it is used.
        cache_dir: see ``cache.cache_directory``.
        tfds_dir: TensorFlow Datasets' folder, when the data must be downloaded; by default TFDS's own.
        flatten: x is [n, 784] rather than [n, 28, 28, 1].
        standardise: subtract the mean of all training pixels and divide by their standard deviation (one number each).
        num_train, num_test: take the first so many examples only.
        dtype: of x, float32 or float64. Labels are int32.

    Raises:
        ValueError: missing or altered files, a corrupted cache, no network, or an option out of range.
    """
    dtype = as_float(dtype)
    flatten, standardise = checks.flag("flatten", flatten), checks.flag("standardise", standardise)
    arrays, read_from = fetch(source, data_dir, cache_dir, tfds_dir)
    mean, deviation = _moments(arrays["x_train"]) if standardise else (0.0, 1.0)
    parts = {}
    for split, count in (("train", num_train), ("test", num_test)):
        x, y = first(f"num_{split}", count, arrays[f"x_{split}"], arrays[f"y_{split}"])
        x = x.reshape(len(x), -1) if flatten else x[..., None]
        parts[f"x_{split}"] = _scaled(x, mean, deviation, dtype)
        parts[f"y_{split}"] = checks.class_labels("labels", y, source.num_classes).astype(np.int32)
    info = SourceInfo(source.homepage, source.licence, read_from)
    return Dataset(name=source.name, num_classes=source.num_classes, user_train=None, info=info, **parts)


def fetch(
    source: idx.IdxSource, data_dir: Directory | None, cache_dir: Directory | None, tfds_dir: Directory | None
) -> tuple[dict[str, np.ndarray], str]:
    """The four uint8 arrays, [n, 28, 28] and [n], and where they were read from; arguments as in ``load_images``."""
    directory = cache.given_directory(data_dir)
    if directory is not None:
        paths = idx.find(source, directory)
        arrays, read_from = {role: idx.read(source, role, path) for role, path in paths.items()}, directory
    else:
        read_from = cache.cache_directory(cache_dir) / source.name
        cached = cache.read(read_from)
        arrays = _download(source, read_from, tfds_dir) if cached is None else cached
    for split in ("train", "test"):
        x, y = (arrays.get(f"{axis}_{split}", np.empty(0)) for axis in "xy")
        if x.dtype != np.uint8 or x.ndim != 3 or y.dtype != np.uint8 or y.shape != x.shape[:1]:
            raise ValueError(
                f"{source.name}: {split} images and labels in {read_from} must be uint8 [n, 28, 28] and [n]; "
                f"got {x.dtype} {x.shape} and {y.dtype} {y.shape}"
            )
    return arrays, str(read_from)


def _download(source: idx.IdxSource, folder: Path, tfds_dir: Directory | None) -> dict[str, np.ndarray]:
    """Prepare through TensorFlow Datasets and keep the result in the cache folder."""
    try:
        from fedtangent.data.sources import tfds_idx  # heavy: TensorFlow Datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{source.name}: neither data_dir nor FEDTANGENT_DATA is set, {folder} does not exist, and to download it "
            f"tensorflow-datasets and array_record are needed, which cannot be imported ({error})"
        ) from error
    arrays = tfds_idx.prepare(source, None if tfds_dir is None else Path(tfds_dir).expanduser())
    cache.write(folder, arrays)
    return arrays


def _moments(images: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, scaled to [0, 1], from their histogram (exact)."""
    counts, values = np.bincount(images.ravel(), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _scaled(images: np.ndarray, mean: float, deviation: float, dtype: Any) -> np.ndarray:
    """``(images / 255 - mean) / deviation``, from a table of the 256 values, so that no float64 copy is made."""
    if deviation == 0.0:
        raise ValueError("standardise=True needs training images that are not all one shade")
    return ((np.arange(256) / 255 - mean) / deviation).astype(dtype)[images]
