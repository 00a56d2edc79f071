"""MNIST and Fashion-MNIST, and a reader of idx, the format of their files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from fedtangent._src.data.dataset import IMAGE, Dataset
from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Arrays, Published, contents, files_of
from fedtangent._src.data.stored import StoredImageOptions, dataset, entry_of, obtain

IMAGES = (("x", ((28, 28), "uint8")), ("y", ((), "uint8")))  # ``Published.example`` of 28 x 28 grey images


def read_idx(published: Published, role: str, path: Path) -> Shaped[np.ndarray, "..."]:
    """Reads one of MNIST's original files, in the format idx, as a uint8 array, after its checksum is verified.

    Args:
        published: The data set.
        role: Key of the file in ``published.files``.
        path: Path of the file.

    Raises:
        ValueError: The file cannot be read, or its checksum is not the published one.
    """
    content = contents(published, role, path)
    with reading(published.name, path):
        return parse_idx(content)


def parse_idx(content: bytes) -> Shaped[np.ndarray, "..."]:
    """Parses an unpacked idx file of unsigned bytes into a uint8 array of the shape that its header states.

    Format: two zero bytes, 0x08 (unsigned byte), the number of dimensions, each dimension as big-endian uint32, then
    the values in C order.

    Raises:
        ValueError: Another type, or a length that does not fit the header.
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an idx file of unsigned bytes: it starts with {content[:4].hex() or 'nothing'}")
    start = 4 + 4 * content[3]
    if content[3] == 0 or len(content) < start:
        raise ValueError(f"idx header of {content[3]} dimensions is cut short")
    shape = tuple(int(d) for d in np.frombuffer(content, ">u4", content[3], 4))
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise ValueError(f"idx header states shape {shape}, that is {expected} bytes in all; got {len(content)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load_images(
    published: Published, options: StoredImageOptions, data_dir: Path | None = None, seed: int = 0
) -> Dataset:
    """Loads images [n, 28, 28, 1] in [0, 1] and labels [n], in the original order; nothing is random.

    By the options, images become rows [n, 784], pixels are standardised, and only the first images are used.

    Args:
        published: Description of MNIST or Fashion-MNIST.
        options: Options of the data set.
        data_dir: Folder with the four original idx files, by default $FEDTANGENT_DATA; without either they are taken
            from the cache, or downloaded.
        seed: Has no effect; the loaders of all data sets take a seed.

    Raises:
        ValueError: Files are missing or altered, the cache is corrupted, there is no network, or an option is out of
            range.
    """
    return dataset(published, obtain(published, options, data_dir), options, (28, 28))


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads MNIST's files: images uint8 [n, 28, 28] and labels uint8 [n] of both splits, by names such as "x_train"."""
    return {role: read_idx(published, role, path) for role, path in paths.items()}


def _published(name: str, url: str, description: str, homepage: str, licence: str, paper: str) -> Published:
    return Published(name, url, files_of(name), _read, IMAGES, 10, description, homepage, licence, paper)


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
