"""The registry of data sets."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from fedtangent import checks
from fedtangent.data.dataset import Dataset
from fedtangent.data.sources import archives, embedded, idx, images


class _Entry(NamedTuple):
    description: str
    loader: Callable[..., Dataset]


def _images(source: idx.IdxSource) -> _Entry:
    return _Entry(source.description, functools.partial(images.load_images, source))


_REGISTRY = {
    "digits": _Entry("handwritten digits, 1797 grey images of 8 x 8, bundled with scikit-learn", embedded.load_digits),
    "sine": _Entry("noisy sine functions, 50 clients of 2 points, generated", embedded.load_sine),
    "mnist": _images(idx.MNIST),
    "fashion_mnist": _images(idx.FASHION_MNIST),
    "femnist_digits": _Entry("handwritten digits of FEMNIST by writer, 28 x 28 grey", archives.load_femnist_digits),
    "cifar10": _Entry("photographs of ten things, 32 x 32 in colour", archives.load_cifar10),
}


def available() -> dict[str, str]:
    """Names of the data sets, each with a one-line description."""
    return {name: entry.description for name, entry in _REGISTRY.items()}


def load(name: str, data_dir: str | os.PathLike[str] | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of ``available()``.
        data_dir: folder with original files, for the data sets that are made of files; by default $FEDTANGENT_DATA.
            Data sets that are embedded or generated do not look at it.
        seed: for what is random: the generated data, the split of ``digits``. File data sets have their own split.
        options: those of the data set's loader: ``embedded.load_digits``, ``embedded.load_sine``,
            ``images.load_images``, ``archives.load_femnist_digits``, ``archives.load_cifar10``.

    Raises:
        ValueError: an unknown name or option, an option out of range, missing, altered or corrupted files.
    """
    checks.choice("dataset", name, _REGISTRY)
    loader = _REGISTRY[name].loader
    parameters = inspect.signature(loader).parameters
    given = {key: value for key, value in (("data_dir", data_dir), ("seed", seed)) if key in parameters}
    allowed = [key for key in parameters if key not in ("source", "data_dir", "seed")]
    unknown = [key for key in options if key not in allowed]
    if unknown:
        raise ValueError(f"{name}: got options {', '.join(unknown)}, allowed are {', '.join(allowed)}")
    return loader(**given, **options)
