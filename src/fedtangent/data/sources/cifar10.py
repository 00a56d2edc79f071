"""CIFAR-10, or a part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtangent import checks
from fedtangent.data import archive
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images


def _load(options: ImageOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Colour images [n, 32, 32, 3] in [0, 1].

    The archive has ``train_images`` [n, 32, 32, 3] uint8 and ``train_labels`` [n], and perhaps the same for ``test``;
    without, the last fifth of the training images is the test set.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    found = archive.read("cifar10", "cifar10", (32, 32, 3), ("train_images", "train_labels"), data_dir)
    train = found.pair("train")
    if "test_images" in found.held:
        test = found.pair("test")
    else:
        kept = len(train[1]) - len(train[1]) // 5
        train, test = (train[0][:kept], train[1][:kept]), (train[0][kept:], train[1][kept:])
    parts: dict[str, np.ndarray] = {}
    for split, (x, y), count in (("train", train, options.num_train), ("test", test, options.num_test)):
        x, y = first(f"num_{split}", count, x, checks.class_labels("labels", y, 10))
        x, kind = images(x, options.flatten)
        parts |= {f"x_{split}": (x / 255).astype(dtype), f"y_{split}": y.astype(np.int32)}
    info = SourceInfo("CIFAR-10 (Krizhevsky, 2009)", "none stated", str(found.path.parent))
    return Dataset(name="cifar10", num_classes=10, user_train=None, info=info, kind=kind, **parts)


ENTRIES = (DatasetEntry("cifar10", "photographs of ten things, 32 x 32 in colour", _load, ImageOptions, kind=IMAGE),)
