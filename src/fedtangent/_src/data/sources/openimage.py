"""OpenImage: FedScale's selection of Open Images, one client for each uploader (Lai et al., 2022).

The data folder, or a subfolder ``open*``, is the unpacked ``openImage.tar.gz`` of FedScale, 66 GB; nothing is
downloaded. It has ``client_data_mapping/train.csv`` and ``test.csv`` with a line
``client_id, sample_path, label_name, label_id`` for each image, and the images in folders ``train`` and ``test``.
Classes run from 0 to the largest label of both tables. Users are numbered in the order of the uploaders' numbers;
users with test images only come last.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedtangent._src import checks
from fedtangent._src.data import cache
from fedtangent._src.data.dataset import IMAGE, Dataset, DatasetEntry, ImageOptions, SourceInfo, images
from fedtangent._src.data.files import content, places, reading
from fedtangent._src.data.published import Arrays
from fedtangent._src.progress import progress_of

NAME = "openimage"
URL = "https://fedscale.eecs.umich.edu/dataset/openImage.tar.gz"  # about 66 GB; its checksum is published nowhere
MAPPING = "client_data_mapping"
COLUMNS = ["client_id", "sample_path", "label_name", "label_id"]


@dataclasses.dataclass(frozen=True)
class OpenImageOptions(ImageOptions):
    """Options of the data set ``openimage``: the number of users and the size of the images."""

    num_users: int | None = None
    """Use only the training images of this many uploaders, the first ones."""
    image_size: int = 64
    """Height and width that images are scaled to (FedScale: 256)."""


class Row(NamedTuple):
    """An image of OpenImage: its client, path and label, as in a line of ``client_data_mapping/*.csv``."""

    client: str
    path: Path
    label: int


def _load(options: OpenImageOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads photographs [n, s, s, 3] in [0, 1], s = ``image_size`` (rows [n, 3 s^2] if ``flatten``), and uploaders.

    ``seed`` is unused.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    size = checks.whole("image_size", options.image_size, 1, 1024)
    folder = _folder(data_dir)
    rows = {split: _rows(folder, split) for split in ("train", "test")}
    num_classes = 1 + max(row.label for part in rows.values() for row in part)
    trained, tested = ({row.client for row in part} for part in rows.values())
    uploaders = sorted(trained, key=_place) + sorted(tested - trained, key=_place)
    clients = {name: i for i, name in enumerate(uploaders)}
    if options.num_users is not None:
        num_users = checks.whole("num_users", options.num_users, 1, len(trained))
        rows["train"] = [row for row in rows["train"] if clients[row.client] < num_users]
    limits = {"train": options.num_train, "test": options.num_test}
    arrays: Arrays = {}
    for split, part in rows.items():
        if limits[split] is not None:
            part = part[: checks.whole(f"num_{split}", limits[split], 1, len(part))]
        x, kind = images(_pixels(part, split, size), options.flatten)
        arrays[f"x_{split}"] = x.astype(dtype) / dtype.type(255)
        arrays[f"y_{split}"] = np.array([row.label for row in part], np.int32)
        arrays[f"user_{split}"] = np.array([clients[row.client] for row in part], np.int32)
    info = SourceInfo("Open Images V5, by FedScale", "CC BY 2.0 (the photographs)", str(folder))
    return Dataset(NAME, num_classes=num_classes, info=info, kind=kind, **arrays)


def _place(client: str) -> tuple[float, str]:
    """Returns a key by which clients' names are sorted: numbers in ascending order, then names that are no numbers."""
    return (int(client) if client.isdecimal() else math.inf, client)


def _folder(data_dir: Path | None) -> Path:
    directory = cache.given_directory(data_dir)
    if directory is None:
        raise ValueError(
            f"{NAME}: needs the files of {URL} (66 GB), unpacked: name their folder by data_dir or FEDTANGENT_DATA"
        )
    for place in places(directory, "[oO]pen"):
        if all((place / MAPPING / f"{split}.csv").is_file() for split in ("train", "test")):
            return place
    raise ValueError(
        f"{NAME}: data directory {directory} has no {MAPPING}/train.csv and test.csv (looked in it and in its "
        f"subfolders open*), which {URL} unpacks to"
    )


def _rows(folder: Path, split: str) -> list[Row]:
    """Reads the list of a split's images from its table; raises ``ValueError`` for a malformed line."""
    path = folder / MAPPING / f"{split}.csv"
    with reading(NAME, path), path.open(encoding="utf-8-sig", newline="") as file:
        header, *lines = csv.reader(file)
    if header != COLUMNS or not lines:
        must = f"must begin with {', '.join(COLUMNS)}, and have a line for each image"
        raise ValueError(f"{NAME}: got the columns {header} and {len(lines)} lines below them in {path}, {must}")
    rows = []
    for number, line in enumerate(lines, start=2):
        if len(line) != len(COLUMNS) or not line[3].isdecimal():
            raise ValueError(f"{NAME}: got {line!r:.80} in line {number} of {path}, must be {', '.join(COLUMNS)}")
        rows.append(Row(line[0], folder / split / line[1], int(line[3])))
    return rows


def _pixels(rows: list[Row], split: str, size: int) -> np.ndarray:
    """Reads images uint8 [n, size, size, 3], scaled bilinearly as by FedScale; a progress bar names their ``split``."""
    pixels = np.empty((len(rows), size, size, 3), np.uint8)
    with progress_of(len(rows), f"{NAME}: {split}", "image") as bar:
        for i, row in enumerate(rows):
            raw = content(NAME, row.path)
            with reading(NAME, row.path), Image.open(io.BytesIO(raw)) as image:
                pixels[i] = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
            bar.update()
    return pixels


ENTRIES = (
    DatasetEntry(
        NAME,
        "photographs of 600 things by uploader, FedScale's clients of Open Images; files of your own",
        _load,
        OpenImageOptions,
        ("lai2022",),
        kind=IMAGE,
        partition="by_user",
    ),
)
