"""The digits of LEAF's FEMNIST, by writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtangent import checks
from fedtangent.data import archive
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, first, images

NEEDED = ("train_images", "train_labels", "train_offsets", "test_images", "test_labels")


def _load(options: ImageOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Images [n, 28, 28, 1], ink 1 on paper 0, with the writer of each example.

    The archive has ``train_images`` [n, 28, 28] uint8 (255 is paper), ``train_labels`` [n] (those below 10 are digits),
    ``train_offsets`` [W + 1] (writer after writer), and the same for ``test``, whose offsets may be left out.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    found = archive.read("femnist_digits", "femnist", (28, 28), NEEDED, data_dir)
    parts: dict[str, np.ndarray | None] = {"user_test": None}
    for split, count in (("train", options.num_train), ("test", options.num_test)):
        x, y = found.pair(split)
        digits = y < 10
        x, kept = first(f"num_{split}", count, x[digits], y[digits])
        x, kind = images(x, options.flatten)
        parts |= {f"x_{split}": (1 - x / 255).astype(dtype), f"y_{split}": kept.astype(np.int32)}
        if f"{split}_offsets" in found.held:
            parts[f"user_{split}"] = found.owners(split)[digits][: len(kept)]
    where = str(found.path.parent)
    info = SourceInfo("LEAF FEMNIST (Caldas et al., 2018), from NIST SD 19", "BSD-2-Clause (LEAF)", where)
    return Dataset(name="femnist_digits", num_classes=10, info=info, kind=kind, **parts)  # type: ignore[arg-type]


ENTRIES = (
    DatasetEntry(
        "femnist_digits",
        "handwritten digits of FEMNIST by writer, 28 x 28 grey",
        _load,
        ImageOptions,
        kind=IMAGE,
        partition="by_user",
    ),
)
