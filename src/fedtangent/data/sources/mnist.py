"""MNIST and Fashion-MNIST."""

from __future__ import annotations

import functools
from pathlib import Path

from fedtangent.data import idx
from fedtangent.data.dataset import IMAGE, Dataset, DatasetEntry
from fedtangent.data.images import StoredImageOptions, dataset
from fedtangent.data.published import Published
from fedtangent.data.stored import obtain


def load_images(
    published: Published, options: StoredImageOptions, data_dir: Path | None = None, seed: int = 0
) -> Dataset:
    """Images [n, 28, 28, 1] in [0, 1] and labels, in the original order; nothing is random.

    ``data_dir`` is the folder with the four original idx files, by default $FEDTANGENT_DATA. Where one is named, it is
    used. Raises ``ValueError`` for missing or altered files, a corrupted cache, no network, or an option out of range.
    """
    return dataset(published, obtain(published, options, data_dir), options, (28, 28))


ENTRIES = tuple(
    DatasetEntry(
        published.name,
        published.description,
        functools.partial(load_images, published),
        StoredImageOptions,
        (published.citation,),
        kind=IMAGE,
        published=published,
    )
    for published in (idx.MNIST, idx.FASHION_MNIST)
)
