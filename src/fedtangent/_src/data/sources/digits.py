"""Handwritten digits that come with scikit-learn, so that no files are needed."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images
from fedtangent._src.data.partition.drawn import generator


@dataclasses.dataclass(frozen=True)
class DigitsOptions(ImageOptions):
    """Options of the data set ``digits``: the share of test examples and the dtype of pixels."""

    test_fraction: float = 0.2
    """Share of each class in the test set, to within one example."""
    dtype: str = "float64"
    """Dtype of the pixels: float32 or float64."""


def _load(options: DigitsOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads grey images in [0, 1], [n, 8, 8, 1], or [n, 64] with ``options.flatten``.

    ``seed`` draws the test examples of each class, and the order of all examples. ``data_dir`` has no effect, because
    the images come with scikit-learn.
    """
    rng, dtype = generator(seed), checks.dtype(options.dtype, "float32", "float64")
    checks.number("test_fraction", options.test_fraction, above=0, below=1)
    pixels, labels = _bundled()
    x, kind = images((pixels / 16).astype(dtype).reshape(-1, 8, 8), options.flatten)
    train, test = _stratified(rng, labels, options.test_fraction)
    x_train, y_train = first("num_train", options.num_train, x[train], labels[train].astype(np.int32))
    x_test, y_test = first("num_test", options.num_test, x[test], labels[test].astype(np.int32))
    info = SourceInfo(
        "UCI optical recognition of handwritten digits, as bundled with scikit-learn", "CC BY 4.0", "embedded"
    )
    return Dataset("digits", x_train, y_train, x_test, y_test, 10, None, info, kind)


def _bundled() -> tuple[np.ndarray, np.ndarray]:
    """Reads the pixels [n, 64], 0 to 16, and the labels [n] of scikit-learn's digits.

    The file is read directly if it is found, because importing scikit-learn is slow.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in [] if package is None else package.submodule_search_locations or []:
        if (file := Path(folder) / "datasets" / "data" / "digits.csv.gz").is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _stratified(rng: np.random.Generator, labels: np.ndarray, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws a training and a test set, indices in random order; the test set has ``test_fraction`` of each class."""
    train, test = [], []
    for c in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == c))
        cut = min(max(round(test_fraction * len(examples)), 1), len(examples) - 1)
        test.append(examples[:cut])
        train.append(examples[cut:])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))


ENTRIES = (
    DatasetEntry(
        "digits",
        "handwritten digits, 1797 grey images of 8 x 8, bundled with scikit-learn",
        _load,
        DigitsOptions,
        kind=IMAGE,
    ),
)
