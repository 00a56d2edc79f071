"""MNIST and Fashion-MNIST."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from fedtangent._src.data import idx
from fedtangent._src.data.dataset import IMAGE, Dataset
from fedtangent._src.data.images import StoredImageOptions, dataset
from fedtangent._src.data.published import Arrays, Published, files_of
from fedtangent._src.data.stored import entry_of, obtain


def load_images(
    published: Published, options: StoredImageOptions, data_dir: Path | None = None, seed: int = 0
) -> Dataset:
    """Loads images [n, 28, 28, 1] in [0, 1] and labels [n], in the original order; nothing is random.

    Args:
        published: Description of MNIST or Fashion-MNIST.
        options: Options of the data set.
        data_dir: Folder with the four original idx files, by default $FEDTANGENT_DATA; without either they are taken
            from the cache, or downloaded.
        seed: Not used.

    Raises:
        ValueError: Files are missing or altered, the cache is corrupted, there is no network, or an option is out of
            range.
    """
    return dataset(published, obtain(published, options, data_dir), options, (28, 28))


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads images uint8 [n, 28, 28] and labels uint8 [n]; each file's role is the name of its array."""
    return {role: idx.read(published, role, path) for role, path in paths.items()}


def _published(name: str, url: str, description: str, homepage: str, licence: str, paper: str) -> Published:
    return Published(name, url, files_of(name), _read, idx.IMAGES, 10, description, homepage, licence, paper)


MNIST = _published(
    name="mnist",
    url="https://storage.googleapis.com/cvdf-datasets/mnist/",
    description="handwritten digits, 60,000 + 10,000 grey images of 28 x 28",
    homepage="http://yann.lecun.com/exdb/mnist/",
    licence="none stated (LeCun, Cortes, Burges)",
    paper="lecun1998",
)
FASHION_MNIST = _published(
    name="fashion_mnist",
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    description="Zalando's article images, 60,000 + 10,000 grey images of 28 x 28",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    licence="MIT, Copyright (c) 2017 Zalando SE, https://tech.zalando.com",
    paper="xiao2017",
)

ENTRIES = tuple(
    entry_of(published, functools.partial(load_images, published), StoredImageOptions, kind=IMAGE)
    for published in (MNIST, FASHION_MNIST)
)
