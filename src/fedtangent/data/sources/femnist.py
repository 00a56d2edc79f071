"""LEAF's FEMNIST, by writer: all 62 characters, or the digits alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from fedtangent import checks
from fedtangent.data import archive, leaf, tff
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry
from fedtangent.data.images import StoredImageOptions, dataset
from fedtangent.data.published import Arrays, Published, PublishedFile
from fedtangent.data.stored import Found, obtain

NAME, SIZE = "femnist", (28, 28)
SPLITS = ("train", "test")
CHARACTERS, DIGITS = 62, 10  # classes; the first ones are the digits, then upper case, then lower case
NEEDED = ("train_images", "train_labels", "train_offsets", "test_images", "test_labels")
NEITHER = "femnist*.npz, nor LEAF's train/*.json and test/*.json"


@dataclasses.dataclass(frozen=True)
class WritersOptions(StoredImageOptions):
    """Options of images by writer."""

    num_users: int | None = None
    """Use only the first so many writers."""


def _load(name: str, num_classes: int, options: WritersOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Images [n, 28, 28, 1], ink 1 on paper 0, with the writer of each; nothing is random.

    Labels below 10 are digits, then come upper case and lower case. The data folder has one of: TensorFlow Federated's
    ``emnist_all.sqlite.lzma``; LEAF's JSON; or an archive ``femnist*.npz`` of ``train_images`` [n, 28, 28] uint8 (255
    is paper), ``train_labels`` [n], ``train_offsets`` [W + 1] (writer after writer), and the same for ``test``, whose
    offsets may be left out. Every writer of the test set is among those that train.
    """
    found = obtain(FEMNIST, options, data_dir, _otherwise, NEITHER)
    arrays = found.arrays
    if num_classes < CHARACTERS:
        arrays = _kept(arrays, {split: arrays[f"y_{split}"] < num_classes for split in SPLITS})
    if options.num_users is not None:
        last = checks.whole("num_users", options.num_users, 1, len(np.unique(arrays["user_train"])))
        chosen = np.unique(arrays["user_train"])[:last]
        arrays = _kept(arrays, {split: np.isin(arrays[f"user_{split}"], chosen) for split in _known(arrays)})
    if "user_test" in arrays:  # a writer may have no digit to train on
        arrays = _kept(arrays, {"test": np.isin(arrays["user_test"], arrays["user_train"])})
    described = FEMNIST._replace(name=name, num_classes=num_classes)
    return dataset(described, found._replace(arrays=arrays), options, SIZE)


def _known(arrays: Arrays) -> list[str]:
    return [split for split in SPLITS if f"user_{split}" in arrays]


def _kept(arrays: Arrays, rows: Mapping[str, np.ndarray]) -> Arrays:
    """The examples of each split that ``rows`` says, [n] bool; all of a split that it does not name."""
    splits = {name: name.rpartition("_")[2] for name in arrays}
    return {name: array[rows[splits[name]]] if splits[name] in rows else array for name, array in arrays.items()}


def _otherwise(directory: Path) -> Found | None:
    path = archive.find(directory, NAME)
    if path is not None:
        return Found(_of_archive(path), path.parent)
    folder = leaf.find(directory, NAME)
    return None if folder is None else Found(_of_leaf(folder), folder)


def _of_archive(path: Path) -> Arrays:
    held = archive.read(NAME, path, NEEDED)
    arrays: Arrays = {}
    for split in SPLITS:
        x, y = archive.images(NAME, path, held, split, SIZE)
        arrays |= {f"x_{split}": 255 - x, f"y_{split}": checks.class_labels(f"{NAME}: labels", y, CHARACTERS)}
        if f"{split}_offsets" in held:
            where = f"{NAME}: {split}_offsets of {path}"
            least = int(split == "train")  # some have none to test
            arrays[f"user_{split}"] = archive.owners(where, held[f"{split}_offsets"], len(y), least)
    writers = [len(held[f"{split}_offsets"]) - 1 for split in _known(arrays)]
    if len(set(writers)) > 1:
        raise ValueError(f"{NAME}: got {writers} writers to train and to test in {path}, must be the same ones")
    return arrays


def _of_leaf(folder: Path) -> Arrays:
    """LEAF's images: ``x`` lists of 784 shades from 0, black, to 1, white, which are whole numbers over 255."""
    return _by_writer({split: leaf.users(NAME, folder, split) for split in SPLITS})


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """TensorFlow Federated's images, by the names of the writers."""
    path = paths["database"]

    def writers(split: str) -> Iterator[leaf.User]:
        rows = tff.rows(published, path, f"all_{split}", {"pixels": "float_list", "label": "int64_list"})
        for name, own in itertools.groupby(rows, key=lambda row: row.client):
            pairs = [(row.features["pixels"], int(row.features["label"][0])) for row in own]
            yield leaf.User(name, [pixels for pixels, _ in pairs], [label for _, label in pairs], path)

    return _by_writer({split: writers(split) for split in SPLITS})


def _by_writer(found: Mapping[str, Iterable[leaf.User]]) -> Arrays:
    """The images of each split, writer after writer; those to test are of writers that train."""
    place: dict[str, int] = {}
    arrays: Arrays = {}
    for split, writers in found.items():
        x, y, users = [], [], []
        for writer in writers:
            if split == "train":
                place[writer.name] = len(place)
            if writer.name not in place:
                raise ValueError(f"{NAME}: got writer {writer.name!r} in {writer.path}, must be among those to train")
            x.append(_ink(writer))
            y.append(checks.class_labels(f"{NAME}: labels of {writer.path}", writer.y, CHARACTERS))
            users += [place[writer.name]] * len(writer.y)
        arrays[f"x_{split}"], arrays[f"y_{split}"] = np.concatenate(x), np.concatenate(y).astype(np.uint8)
        arrays[f"user_{split}"] = np.asarray(users, np.int32)
    return arrays


def _ink(writer: leaf.User) -> np.ndarray:
    """A writer's images uint8 [n, 28, 28], 255 is ink, of shades [n, 784] in which 1 is paper."""
    given = checks.real_array(f"{NAME}: images of {writer.path}", writer.x)
    shades = np.rint(given * 255)
    if given.shape != (len(writer.y), 784) or not np.allclose(shades / 255, given, rtol=0, atol=1e-4):
        raise ValueError(f"{NAME}: got {given.shape} in {writer.path}, must be images of 784 shades, in 255ths")
    if shades.min() < 0 or shades.max() > 255:
        raise ValueError(f"{NAME}: got {given.min()} to {given.max()} in {writer.path}, must be shades from 0 to 1")
    return (255 - shades).astype(np.uint8).reshape(-1, *SIZE)


FEMNIST = Published(
    name=NAME,
    url=tff.URL,
    files={
        "database": PublishedFile(
            "emnist_all.sqlite.lzma", 170507172, "c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48"
        )
    },
    read=_read,
    example=(("x", (SIZE, "uint8")), ("y", ((), "uint8")), ("user", ((), "int32"))),
    num_classes=CHARACTERS,
    description="handwritten characters of 62 kinds by writer, 28 x 28 grey",
    homepage="https://leaf.cmu.edu",
    licence="BSD-2-Clause (LEAF); the images are from NIST Special Database 19",
    citation=leaf.CITATION,
)

ENTRIES = tuple(
    DatasetEntry(
        name,
        summary,
        functools.partial(_load, name, num_classes),
        WritersOptions,
        (leaf.CITATION,),
        kind=IMAGE,
        partition="by_user",
        published=FEMNIST,
    )
    for name, num_classes, summary in (
        (NAME, CHARACTERS, FEMNIST.description),
        ("femnist_digits", DIGITS, "handwritten digits of FEMNIST by writer, 28 x 28 grey"),
    )
)
