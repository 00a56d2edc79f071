"""LEAF's FEMNIST, handwritten characters by writer: all 62 characters, or only the digits.

Labels below 10 are digits, then come upper case and lower case. The data folder has one of: TensorFlow Federated's
``emnist_all.sqlite.lzma``; LEAF's JSON; or an archive ``femnist*.npz`` of ``train_images`` [n, 28, 28] uint8 (255 is
paper), ``train_labels`` [n], ``train_offsets`` [W + 1] (the index of each of W writers' first example, and n), and the
same for ``test``, whose offsets may be left out. Writers without training examples, such as those of LEAF's split
``-t user``, have test examples only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files, leaf
from fedtangent._src.data.dataset import IMAGE, Dataset, DatasetEntry
from fedtangent._src.data.published import Arrays, Published, files_of
from fedtangent._src.data.stored import Found, StoredImageOptions, dataset, obtain

NAME, SIZE = "femnist", (28, 28)
CHARACTERS, DIGITS = 62, 10  # classes; the first ones are the digits, then upper case, then lower case
NEEDED = ("train_images", "train_labels", "train_offsets", "test_images", "test_labels")
NEITHER = "femnist*.npz, nor LEAF's train/*.json and test/*.json"


@dataclasses.dataclass(frozen=True)
class WritersOptions(StoredImageOptions):
    """Options of FEMNIST: the number of writers."""

    num_users: int | None = None
    """Use only this many writers, the first ones."""


def _load(name: str, num_classes: int, options: WritersOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads images [n, 28, 28, 1], ink 1 on paper 0, of the first ``num_classes`` characters, with their writers.

    ``name`` is the name of the data set. The options may flatten and standardise images. ``seed`` has no effect.
    """
    stored = obtain(FEMNIST, options, data_dir, _otherwise, NEITHER)
    arrays = stored.arrays
    if num_classes < CHARACTERS:
        arrays = leaf.selected(arrays, {split: arrays[f"y_{split}"] < num_classes for split in leaf.SPLITS})
    arrays = leaf.first_users(arrays, options.num_users)
    for split in leaf.SPLITS:
        if len(arrays[f"y_{split}"]) == 0:
            raise ValueError(
                f"{name}: got no example of its {num_classes} classes to {split} in {stored.read_from}, must have some"
            )
    described = FEMNIST._replace(name=name, num_classes=num_classes)
    return dataset(described, stored._replace(arrays=arrays), options, SIZE)


def _otherwise(directory: Path) -> Found | None:
    path = files.find(directory, NAME)
    if path is not None:
        return Found(_of_archive(path), path.parent)
    folder = leaf.find(directory, NAME)
    if folder is None:
        return None
    return Found(leaf.joined(functools.partial(leaf.users, NAME, folder), _examples), folder)


def _of_archive(path: Path) -> Arrays:
    packed = files.read(NAME, path, NEEDED)
    arrays: Arrays = {}
    writers: list[int] = []  # of each split
    for split in leaf.SPLITS:
        x, y = files.images(NAME, path, packed, split, SIZE)
        arrays |= {f"x_{split}": 255 - x, f"y_{split}": checks.class_labels(f"{NAME}: labels", y, CHARACTERS)}
        if f"{split}_offsets" in packed:
            offsets = packed[f"{split}_offsets"]  # a writer may have examples of one split only
            arrays[f"user_{split}"] = files.owners(f"{NAME}: {split}_offsets of {path}", offsets, len(y), 0)
            writers.append(len(offsets) - 1)
    if len(set(writers)) > 1:
        got = "{} writers to train and {} to test".format(*writers)
        raise ValueError(f"{NAME}: got {got} in {path}, must be the same writers")
    return arrays


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads images, labels and writers from TensorFlow Federated's file, writer after writer by name."""
    path = paths["database"]

    def writers(split: str) -> Iterator[leaf.User]:
        rows = leaf.rows(published, path, f"all_{split}", {"pixels": "float_list", "label": "int64_list"})
        for name, examples in itertools.groupby(rows, key=lambda row: row.client):
            pairs = [(row.features["pixels"], int(row.features["label"][0])) for row in examples]
            yield leaf.User(name, [pixels for pixels, _ in pairs], [label for _, label in pairs], path)

    return leaf.joined(writers, _examples)


def _examples(writer: leaf.User) -> tuple[np.ndarray, np.ndarray]:
    """Converts a writer's shades [n, 784], 0 (ink) to 1 (paper), to uint8 [n, 28, 28], 255 for ink; checks labels."""
    pixels = checks.real_array(f"{NAME}: images of {writer.path}", writer.x)
    shades = np.rint(pixels * 255)
    if pixels.shape != (len(writer.y), 784) or not np.allclose(shades / 255, pixels, rtol=0, atol=1e-4):
        raise ValueError(f"{NAME}: got {pixels.shape} in {writer.path}, must be [n, 784], multiples of 1 / 255")
    if shades.min() < 0 or shades.max() > 255:
        raise ValueError(f"{NAME}: got {pixels.min()} to {pixels.max()} in {writer.path}, must be shades from 0 to 1")
    labels = checks.class_labels(f"{NAME}: labels of {writer.path}", writer.y, CHARACTERS)
    return (255 - shades).astype(np.uint8).reshape(-1, *SIZE), labels.astype(np.uint8)


FEMNIST = Published(
    name=NAME,
    url=leaf.URL,
    files=files_of(NAME),
    read=_read,
    example=(("x", (SIZE, "uint8")), ("y", ((), "uint8")), ("user", ((), "int32"))),
    num_classes=CHARACTERS,
    description="handwritten characters of 62 kinds by writer, 28 x 28 grey",
    homepage="https://leaf.cmu.edu",
    licence="BSD-2-Clause (LEAF); the images are from NIST Special Database 19",
    paper=leaf.PAPER,
)

ENTRIES = tuple(
    DatasetEntry(
        name,
        summary,
        functools.partial(_load, name, num_classes),
        WritersOptions,
        (leaf.PAPER,),
        kind=IMAGE,
        partition="by_user",
        published=FEMNIST,
    )
    for name, num_classes, summary in (
        (NAME, CHARACTERS, FEMNIST.description),
        ("femnist_digits", DIGITS, "handwritten digits of FEMNIST by writer, 28 x 28 grey"),
    )
)
