"""The idx format of MNIST and its relatives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Published, contents

IMAGES = (("x", ((28, 28), "uint8")), ("y", ((), "uint8")))  # ``Published.example`` of 28 x 28 grey images


def read(published: Published, role: str, path: Path) -> Shaped[np.ndarray, "..."]:
    """Reads an original file as a uint8 array.

    Args:
        published: The data set.
        role: Key of the file in ``published.files``.
        path: Path of the file.

    Raises:
        ValueError: The file cannot be read, or its checksum is not the published one.
    """
    content = contents(published, role, path)
    with reading(published.name, path):
        return parse(content)


def parse(content: bytes) -> Shaped[np.ndarray, "..."]:
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
