"""Published data: read from a folder that the user names, from the cache, or downloaded once into the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedtangent._src.data import cache
from fedtangent._src.data.dataset import Dataset, DatasetEntry
from fedtangent._src.data.published import Arrays, Published, lacking, located
from fedtangent._src.entries import option
from fedtangent._src.storage import cache_directory, expanded


@dataclasses.dataclass(frozen=True)
class StoredOptions:
    """Options of downloaded data."""

    cache_dir: Path | None = option(None, may_differ=True)
    """Where prepared data are kept (default: $FEDTANGENT_CACHE, or the user's cache folder)."""
    tfds_dir: Path | None = option(None, may_differ=True)
    """Folder of TensorFlow Datasets, when the data must be downloaded (default: that of TFDS)."""


class Found(NamedTuple):
    """Arrays in the form of ``Published``, and the folder that they were read from."""

    arrays: Arrays
    read_from: Path


def obtain(
    published: Published,
    options: StoredOptions,
    data_dir: Path | None,
    otherwise: Callable[[Path], Found | None] = lambda directory: None,
    instead: str = "",
) -> Found:
    """Returns the arrays of ``published``: from ``data_dir`` (or $FEDTANGENT_DATA), from the cache, or downloaded.

    Args:
        published: The data set.
        options: Folders of the cache and of TensorFlow Datasets.
        data_dir: Folder with original files.
        otherwise: Reads another form of the data from a data folder without the published files, or returns None.
        instead: Name of that form in error messages.

    Raises:
        ValueError: Files are missing, altered or unreadable, the cache is corrupted, or files cannot be downloaded.
    """
    directory = cache.given_directory(data_dir)
    if directory is not None:
        paths, missing = located(published, directory)
        if not missing:
            return Found(published.read(published, paths), directory)
        other = otherwise(directory)
        if other is None:
            raise lacking(published, directory, missing, instead)
        return other
    folder = stored_in(published, options)
    arrays = cache.read(folder)
    if arrays is None:
        arrays = prepare(published, options)
    return Found(arrays, folder)


def stored_in(published: Published, options: StoredOptions) -> Path:
    """Returns the folder of ``published`` in the cache.

    Args:
        published: The published files.
        options: Options of the data set, with its cache folder.
    """
    return cache_directory(options.cache_dir) / published.name


def prepare(published: Published, options: StoredOptions) -> Arrays:
    """Downloads and prepares the data through TensorFlow Datasets, and writes them to the cache folder.

    Args:
        published: The data set.
        options: Folders of the cache and of TensorFlow Datasets.

    Raises:
        ValueError: TensorFlow Datasets is not installed, or the data cannot be downloaded or written.
    """
    folder = stored_in(published, options)
    try:
        from fedtangent._src.data import builder  # heavy: TensorFlow Datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{published.name}: neither data_dir nor FEDTANGENT_DATA is set, {folder} does not exist, and to download "
            f"it tensorflow-datasets and array_record are needed, which cannot be imported ({error})"
        ) from error
    tfds_dir = None if options.tfds_dir is None else expanded("tfds_dir", options.tfds_dir)
    arrays = builder.prepare(published, tfds_dir)
    cache.write(folder, arrays)
    return arrays


def entry_of(
    published: Published, load: Callable[[Any, Path | None, int], Dataset], options: type, *papers: str, **fields: str
) -> DatasetEntry:
    """Builds the entry of a published data set.

    Args:
        published: The data set.
        load: Function ``(options, data_dir, seed) -> Dataset``.
        options: Dataclass of the options.
        papers: Keys of further papers, before the paper of the data set.
        fields: Fields of ``DatasetEntry``: the kind of input and the default partition.
    """
    name, summary, is_regression = published.name, published.description, published.num_classes == 0
    citations = (*papers, published.paper)
    return DatasetEntry(
        name, summary, load, options, citations, is_regression=is_regression, published=published, **fields
    )
