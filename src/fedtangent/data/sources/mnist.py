"""MNIST and Fashion-MNIST: from original idx files, from the cache, or through TensorFlow Datasets."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent import checks
from fedtangent.data import cache, idx
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images


@dataclasses.dataclass(frozen=True)
class IdxOptions(ImageOptions):
    """Options of images that are published as idx files."""

    standardise: bool = False
    """Subtract the mean of all training pixels and divide by their standard deviation (one number each)."""
    cache_dir: Path | None = None
    """Where prepared data are kept (default: $FEDTANGENT_CACHE, or the user's cache folder)."""
    tfds_dir: Path | None = None
    """Folder of TensorFlow Datasets, when the data must be downloaded (default: its own)."""


def load_images(source: idx.IdxSource, options: IdxOptions, data_dir: Path | None = None, seed: int = 0) -> Dataset:
    """Images [n, 28, 28, 1] in [0, 1] and labels, in the original order; nothing is random.

    ``data_dir`` is the folder with the four original idx files, by default $FEDTANGENT_DATA. Where one is named, it is
    used. Raises ``ValueError`` for missing or altered files, a corrupted cache, no network, or an option out of range.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    standardise, _ = (checks.flag(name, getattr(options, name)) for name in ("standardise", "flatten"))
    arrays, read_from = fetch(source, options, data_dir)
    mean, deviation = _moments(arrays["x_train"]) if standardise else (0.0, 1.0)
    parts = {}
    for split, count in (("train", options.num_train), ("test", options.num_test)):
        x, y = first(f"num_{split}", count, arrays[f"x_{split}"], arrays[f"y_{split}"])
        x, kind = images(x, options.flatten)
        parts[f"x_{split}"] = _scaled(x, mean, deviation, dtype)
        parts[f"y_{split}"] = checks.class_labels("labels", y, source.num_classes).astype(np.int32)
    info = SourceInfo(source.homepage, source.licence, read_from)
    return Dataset(name=source.name, num_classes=source.num_classes, user_train=None, info=info, kind=kind, **parts)


def fetch(source: idx.IdxSource, options: IdxOptions, data_dir: Path | None) -> tuple[dict[str, np.ndarray], str]:
    """The four uint8 arrays, [n, 28, 28] and [n], and where they were read from; arguments as in ``load_images``."""
    directory = cache.given_directory(data_dir)
    if directory is not None:
        paths = idx.find(source, directory)
        arrays, read_from = {role: idx.read(source, role, path) for role, path in paths.items()}, directory
    else:
        read_from = cache.cache_directory(options.cache_dir) / source.name
        cached = cache.read(read_from)
        arrays = _download(source, read_from, options.tfds_dir) if cached is None else cached
    for split in ("train", "test"):
        x, y = (arrays.get(f"{axis}_{split}", np.empty(0)) for axis in "xy")
        if x.dtype != np.uint8 or x.ndim != 3 or y.dtype != np.uint8 or y.shape != x.shape[:1]:
            raise ValueError(
                f"{source.name}: got {x.dtype} {x.shape} and {y.dtype} {y.shape} in {read_from}, {split} images and "
                "labels must be uint8 [n, 28, 28] and [n]"
            )
    return arrays, str(read_from)


def _download(source: idx.IdxSource, folder: Path, tfds_dir: Path | None) -> dict[str, np.ndarray]:
    """Prepare through TensorFlow Datasets and keep the result in the cache folder."""
    try:
        from fedtangent.data import tfds_idx  # heavy: TensorFlow Datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{source.name}: neither data_dir nor FEDTANGENT_DATA is set, {folder} does not exist, and to download it "
            f"tensorflow-datasets and array_record are needed, which cannot be imported ({error})"
        ) from error
    arrays = tfds_idx.prepare(source, None if tfds_dir is None else Path(tfds_dir).expanduser())
    cache.write(folder, arrays)
    return arrays


def _moments(pixels: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, scaled to [0, 1], from their histogram (exact)."""
    counts, values = np.bincount(pixels.ravel(), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))


def _scaled(pixels: np.ndarray, mean: float, deviation: float, dtype: np.dtype[Any]) -> np.ndarray:
    """``(pixels / 255 - mean) / deviation``, from a table of the 256 values, so that no float64 copy is made."""
    if deviation == 0.0:
        raise ValueError("standardise: got True, but the training images are all one shade")
    return ((np.arange(256) / 255 - mean) / deviation).astype(dtype)[pixels]


ENTRIES = tuple(
    DatasetEntry(source.name, source.description, functools.partial(load_images, source), IdxOptions, kind=IMAGE)
    for source in (idx.MNIST, idx.FASHION_MNIST)
)
