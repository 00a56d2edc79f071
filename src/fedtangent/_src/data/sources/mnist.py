"""MNIST and Fashion-MNIST."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from fedtangent._src.data import idx
from fedtangent._src.data.dataset import IMAGE, Dataset, DatasetEntry
from fedtangent._src.data.images import StoredImageOptions, dataset
from fedtangent._src.data.published import Arrays, Published, PublishedFile
from fedtangent._src.data.stored import obtain


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


FILENAMES = {
    "x_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "x_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}


def _files(**described: tuple[int, str, str]) -> dict[str, PublishedFile]:
    """Describes the four files by role, given size, sha256 and sha256 of the unpacked content of each."""
    return {role: PublishedFile(FILENAMES[role], *file) for role, file in described.items()}


MNIST = Published(
    name="mnist",
    url="https://storage.googleapis.com/cvdf-datasets/mnist/",
    files=_files(
        x_train=(
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        y_train=(
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        x_test=(
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        y_test=(
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    read=_read,
    example=idx.IMAGES,
    num_classes=10,
    description="handwritten digits, 60,000 + 10,000 grey images of 28 x 28",
    homepage="http://yann.lecun.com/exdb/mnist/",
    licence="none stated (LeCun, Cortes, Burges)",
    citation="""@article{lecun1998,
  title = {Gradient-Based Learning Applied to Document Recognition},
  author = {LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick},
  journal = {Proceedings of the IEEE},
  year = {1998},
}""",
)

FASHION_MNIST = Published(
    name="fashion_mnist",
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    files=_files(
        x_train=(
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        y_train=(
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        x_test=(
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        y_test=(
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    read=_read,
    example=idx.IMAGES,
    num_classes=10,
    description="Zalando's article images, 60,000 + 10,000 grey images of 28 x 28",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    licence="MIT, Copyright (c) 2017 Zalando SE, https://tech.zalando.com",
    citation="""@article{xiao2017,
  title = {Fashion-{MNIST}: a Novel Image Dataset for Benchmarking Machine Learning Algorithms},
  author = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  journal = {arXiv preprint arXiv:1708.07747},
  year = {2017},
}""",
)

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
    for published in (MNIST, FASHION_MNIST)
)
