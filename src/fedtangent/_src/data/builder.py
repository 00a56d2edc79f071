"""Preparation of published data sets by TensorFlow Datasets (TFDS), in the format array_record, without TensorFlow.

The standard builders of TFDS need TensorFlow to unpack files and encode images, and they shuffle the examples. The
builder in this module stores plain tensors, in the original order.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import DownloadManager, NonMatchingChecksumError
from tensorflow_datasets.core.download.resource import get_dl_fname, is_locally_cached, write_info_file
from tensorflow_datasets.core.download.util import DownloadError

from fedtangent._src.data import download
from fedtangent._src.data.published import Arrays, Published
from fedtangent._src.papers import PAPERS
from fedtangent._src.progress import progress_of
from fedtangent._src.storage import sha256

SPLITS = ("train", "test")
VERSION = "1.0.0"
NAME = "fedtangent_published"  # the builder's folder

Row: TypeAlias = dict[str, np.ndarray]  # an example: its parts by name


class FedtangentPublished(tfds.core.GeneratorBasedBuilder):
    """The builder by which TFDS prepares any of the published data sets; its config has the data set's name."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, published: Published, data_dir: str | Path | None = None) -> None:
        """Creates a builder of ``published`` under ``data_dir`` (the default folder of TFDS if None)."""
        self.published = published
        config = tfds.core.BuilderConfig(name=published.name, version=VERSION, description=published.description)
        super().__init__(config=config, data_dir=data_dir, file_format="array_record")

    @property
    def url_infos(self) -> dict[str, UrlInfo]:
        """Size, sha256 and name of each file by its address; TFDS verifies its downloads by them."""
        url, size = self.published.url, tfds.core.utils.Size
        return {url + f.filename: UrlInfo(size(f.size), f.sha256, f.filename) for f in self.published.files.values()}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.published.description,
            homepage=self.published.homepage,
            license=self.published.licence,
            citation=PAPERS[self.published.paper],
            disable_shuffling=True,
            features=tfds.features.FeaturesDict(_features(self.published)),
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: DownloadManager) -> dict[str, Iterator[tuple[int, Row]]]:
        place = self.published.stem or self.published.name
        # In the folder of the data set's name, where TFDS's own builder of that data set keeps its downloads, too.
        folder = Path(dl_manager.download_dir) / place
        resources = {}
        for role, file in self.published.files.items():
            url = self.published.url + file.filename
            path = folder / get_dl_fname(url, file.sha256)
            if not any(is_locally_cached(p) for p in (path, folder.parent / self.name / path.name)):
                download.fetch(self.published, role, path)
                write_info_file(url, path, place, file.filename, self.url_infos[url])
            resources[role] = tfds.download.Resource(url=url, relative_download_dir=place)
        paths = dl_manager.download(resources)
        arrays = self.published.read(self.published, {role: Path(path) for role, path in paths.items()})
        self.info.metadata["sha256"] = {name: sha256(array) for name, array in arrays.items()}
        return {split: _examples(self.published, arrays, split) for split in SPLITS}

    def _generate_examples(self) -> None:
        """Does nothing; TFDS requires this method, but ``_split_generators`` already returns the examples."""


def _features(published: Published) -> dict[str, tfds.features.Tensor]:
    """Returns the TFDS features of an example: shape and dtype of each part, such as x, stored as raw bytes."""
    return {
        name: tfds.features.Tensor(shape=shape, dtype=np.dtype(dtype), encoding="bytes")
        for name, (shape, dtype) in published.example
    }


def _examples(published: Published, arrays: Arrays, split: str) -> Iterator[tuple[int, Row]]:
    """Yields each example of a split, with its index in the original order as the key."""
    columns = {name: _rows(arrays, f"{name}_{split}", shape) for name, (shape, _) in published.example}
    total = min(len(column) for column in columns.values())
    with progress_of(total, f"{published.name}: writing {split}", "example") as bar:
        for i, row in enumerate(zip(*columns.values(), strict=True)):
            yield i, dict(zip(columns, row, strict=True))
            bar.update()


def _rows(arrays: Arrays, name: str, shape: tuple[int | None, ...]) -> np.ndarray | list[np.ndarray]:
    """Returns the examples in ``arrays[name]``, such as "x_train", one row each.

    If ``shape`` has None, the examples are texts of any length, which are cut from one array of bytes at their offsets.
    """
    if None not in shape:
        return arrays[name]
    offsets = arrays[f"offsets_{name.rpartition('_')[2]}"]
    return [arrays[name][start:end] for start, end in itertools.pairwise(offsets)]


def _read(builder: FedtangentPublished, split: str) -> Arrays:
    """Reads the arrays of a split, such as ``x_train``, from the records that TFDS has prepared."""
    source, arrays = builder.as_data_source(split=split), {}
    rows: dict[str, list[np.ndarray]] = {name: [] for name, _ in builder.published.example}
    with progress_of(len(source), f"{builder.published.name}: reading {split}", "example") as bar:
        for example in source:
            for name, column in rows.items():
                column.append(example[name])
            bar.update()
    for name, (shape, dtype) in builder.published.example:
        if None in shape:
            arrays[f"{name}_{split}"] = np.concatenate(rows[name])
            arrays[f"offsets_{split}"] = np.cumsum([0, *map(len, rows[name])])
        else:
            arrays[f"{name}_{split}"] = np.stack(rows[name]).astype(dtype, copy=False)
        rows[name].clear()
    return arrays


def prepare(published: Published, data_dir: str | Path | None = None) -> Arrays:
    """Returns the arrays of a published data set in the original order, prepared by TFDS as array_record.

    If they are not prepared yet, downloads the files (or takes them from TFDS's download cache) and prepares them.

    Args:
        published: The data set.
        data_dir: Folder of TFDS; None for its default.

    Raises:
        ValueError: The files cannot be downloaded or written, or the stored arrays differ from those in the files.
    """
    try:
        with _quiet(), _no_empty_folders(published, Path(data_dir or tfds.core.constants.DATA_DIR).expanduser()):
            builder = FedtangentPublished(published, data_dir)
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except RuntimeError as error:  # of the writer of records, on a full disk for one
        raise ValueError(_unwritable(published, data_dir, error)) from error
    except (OSError, DownloadError, NonMatchingChecksumError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(_unwritable(published, data_dir, error)) from error
        raise ValueError(download.unavailable(published, error)) from error
    arrays = {name: array for split in SPLITS for name, array in _read(builder, split).items()}
    digests = builder.info.metadata["sha256"]
    for name, array in arrays.items():
        if sha256(array) != digests.get(name):
            raise ValueError(
                f"{published.name}: array {name} in {builder.data_dir} differs from the published files; remove that "
                f"folder, and the next call prepares it again"
            )
    return arrays


def _unwritable(published: Published, data_dir: str | Path | None, error: Exception) -> str:
    place = "the folder of TensorFlow Datasets" if data_dir is None else data_dir
    return f"{published.name}: cannot be prepared in {place}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _no_empty_folders(published: Published, place: Path) -> Iterator[None]:
    """If preparing ``published`` fails inside the context, removes the empty folders that TFDS has created.

    ``place`` is the data folder of TFDS; it is removed too if it is new and empty.
    """
    downloads = f"downloads/{published.stem or published.name}"
    names = downloads, "downloads/extracted", "downloads", f"{NAME}/{published.name}", NAME
    absent = [folder for folder in (*(place / name for name in names), place) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in absent:
            with contextlib.suppress(OSError):  # not empty: it holds a partial download, which is resumed
                folder.rmdir()
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences TFDS's log and printed lines inside the context, and its progress bars from then on."""
    logger = logging.getLogger("absl")
    level = logger.level
    tfds.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
