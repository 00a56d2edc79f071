"""Files of weights in the format safetensors: a header in JSON, and plain numbers after it. Nothing in them is run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from fedtangent._src.data import files
from fedtangent._src.storage import expanded
from fedtangent._src.storage import sha256 as sha256_of

CODES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8"}  # NumPy's dtypes, little-endian
DTYPES = {name: np.dtype(code) for name, code in CODES.items()}


def read(path: Path | str, sha256: str) -> dict[str, np.ndarray]:
    """Reads the tensors of a safetensors file by name, in their shapes, row-major, each in its own dtype.

    The format (github.com/huggingface/safetensors): 8 bytes with the length of the header, little-endian; the header,
    JSON of ``{name: {"dtype", "shape", "data_offsets": [first, beyond]}}`` and perhaps ``"__metadata__"``; then the
    numbers, little-endian, without a gap.

    Args:
        path: The file.
        sha256: Checksum that the file must have.

    Raises:
        ValueError: The file cannot be read, has another checksum, is cut short or too long, or has another format. The
            message names the file.
    """
    path = expanded("weights", path)
    raw = files.content("weights", path)
    actual = sha256_of(raw)
    if actual != sha256:
        raise ValueError(f"weights: got {path} of {len(raw)} bytes with sha256 {actual}, must be the file of {sha256}")
    start = 8 + int.from_bytes(raw[:8], "little")
    with files.reading("weights", path):
        if not 8 < start <= len(raw):
            raise ValueError(f"a header of {start - 8} bytes in a file of {len(raw)}")
        header = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        tensors = {name: _tensor(raw, start, **fields) for name, fields in header.items()}
        if start + sum(a.nbytes for a in tensors.values()) != len(raw):
            raise ValueError(f"a header that does not describe all of its {len(raw)} bytes")
    return tensors


def _tensor(raw: bytes, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    """Returns one tensor, a view of the file's bytes."""
    if dtype not in DTYPES:
        raise ValueError(f"a tensor of dtype {dtype}, allowed are {', '.join(DTYPES)}")
    first, beyond = data_offsets
    count = math.prod(shape)
    if min([first, *shape]) < 0 or beyond - first != count * DTYPES[dtype].itemsize or start + beyond > len(raw):
        raise ValueError(f"a tensor of shape {shape} at bytes {data_offsets} of {len(raw) - start}")
    return np.frombuffer(raw, DTYPES[dtype], count, start + first).reshape(shape)
