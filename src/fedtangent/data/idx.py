"""The idx format, and the original files of MNIST and Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtangent.data.files import reading
from fedtangent.data.published import Arrays, Published, PublishedFile, contents

IMAGES = (("x", ((28, 28), "uint8")), ("y", ((), "uint8")))  # an example


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Images [n, 28, 28] and labels [n] uint8 of the four files, whose roles are what they hold."""
    return {role: read(published, role, path) for role, path in paths.items()}


MNIST = Published(
    name="mnist",
    url="https://storage.googleapis.com/cvdf-datasets/mnist/",
    files={
        "x_train": PublishedFile(
            "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        "y_train": PublishedFile(
            "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        "x_test": PublishedFile(
            "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        "y_test": PublishedFile(
            "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
    read=_read,
    example=IMAGES,
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
    files={
        "x_train": PublishedFile(
            "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        "y_train": PublishedFile(
            "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        "x_test": PublishedFile(
            "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        "y_test": PublishedFile(
            "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    },
    read=_read,
    example=IMAGES,
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


def read(published: Published, role: str, path: Path) -> np.ndarray:
    """One original file as a uint8 array. Raises ``ValueError`` unless its checksum is the published one."""
    content = contents(published, role, path)
    with reading(published.name, path):
        return parse(content)


def parse(content: bytes) -> np.ndarray:
    """An unpacked idx file of unsigned bytes as a uint8 array of the shape that its header states.

    Format: two zero bytes, 0x08 (unsigned byte), the number of dimensions, each dimension as big-endian uint32, then
    the values in C order. Raises ``ValueError`` for another type, or a length that does not fit the header.
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
