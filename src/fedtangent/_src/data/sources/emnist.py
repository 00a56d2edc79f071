"""EMNIST: handwritten characters, without the ids of their writers.

The data folder has the published ``gzip.zip``. Labels are the numbers in the files, except that the labels of
``letters``, 1 to 26 there, start from 0.
"""

from __future__ import annotations

import dataclasses
import gzip
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data.dataset import IMAGE, Dataset, DatasetEntry
from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Arrays, Published, files_of, verify
from fedtangent._src.data.sources import mnist
from fedtangent._src.data.stored import StoredImageOptions, dataset, obtain

NUM_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
FIRST_LABEL = {"letters": 1}  # the smallest label in the files; 0 in the other parts


@dataclasses.dataclass(frozen=True)
class EmnistOptions(StoredImageOptions):
    """Options of the data set ``emnist``: which part of EMNIST, such as "letters"."""

    part: str = "balanced"
    """Part of EMNIST: balanced, byclass, bymerge, digits, letters or mnist."""


def _load(options: EmnistOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads images [n, 28, 28, 1] in [0, 1], white ink on black, upright (the idx files hold them transposed).

    The options may flatten and standardise them. ``seed`` has no effect.
    """
    part = checks.choice("part", options.part, NUM_CLASSES)
    published = of_part(part)
    return dataset(published, obtain(published, options, data_dir), options, (28, 28))


def of_part(part: str) -> Published:
    """Returns the description of a part of EMNIST, cached as the data set "emnist_<part>", such as "emnist_letters"."""
    return EMNIST._replace(name=f"emnist_{part}", num_classes=NUM_CLASSES[part])


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    part, path = published.name.removeprefix("emnist_"), paths["archive"]
    verify(published, "archive", path)
    arrays: Arrays = {}
    with reading(published.name, path), zipfile.ZipFile(path) as packed:
        for split in ("train", "test"):
            for axis, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
                raw = packed.read(f"gzip/emnist-{part}-{split}-{kind}-ubyte.gz")
                arrays[f"{axis}_{split}"] = mnist.parse_idx(gzip.decompress(raw))
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.shape[1:] != (28, 28) or y.shape != x.shape[:1]:
            got = f"images {x.shape} and labels {y.shape} to {split}"
            raise ValueError(f"{published.name}: got {got} in {path}, must be [n, 28, 28] and [n]")
        arrays[f"x_{split}"] = np.ascontiguousarray(x.transpose(0, 2, 1))
        labels = y.astype(np.int64) - FIRST_LABEL.get(part, 0)
        checks.class_labels(f"{published.name}: labels", labels, published.num_classes)
        arrays[f"y_{split}"] = labels.astype(np.uint8)
    return arrays


EMNIST = Published(
    name="emnist_balanced",
    url="https://biometrics.nist.gov/cs_links/EMNIST/",
    files=files_of("emnist"),
    read=_read,
    example=mnist.IMAGES,
    num_classes=NUM_CLASSES["balanced"],
    description="handwritten digits and letters, 28 x 28 grey",
    homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    licence="none stated (NIST)",
    paper="cohen2017",
    stem="emnist",
)

ENTRIES = (
    DatasetEntry("emnist", EMNIST.description, _load, EmnistOptions, (EMNIST.paper,), kind=IMAGE, published=EMNIST),
)
