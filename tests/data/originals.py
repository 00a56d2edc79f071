"""Tiny data sets as their makers publish them: original files, written here byte by byte by their formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedtangent._src.data.sources import cifar, emnist, femnist, mnist, printers, shakespeare

EACH = 3  # records of a file of CIFAR
SPEECH = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings. "


def idx_bytes(array: np.ndarray) -> bytes:
    """An idx file by the format's description, without the code under test."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + bytes(int(v) for v in array.ravel())


def tarred(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Records of CIFAR's binary version; ``labels`` [n, L]."""
    content = bytearray()
    for image, own in zip(images, labels, strict=True):
        content += bytes(int(label) for label in own)
        for colour in range(3):
            for row in range(32):
                content += bytes(int(value) for value in image[row, :, colour])
    return bytes(content)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def example(**features: Any) -> bytes:
    """A ``tf.train.Example``: bytes, whole numbers or floating ones."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = _field(1, _field(1, value))
        elif isinstance(value, int):
            feature = _field(3, _field(1, _varint(value)))
        else:
            feature = _field(2, _field(1, struct.pack(f"<{len(value)}f", *value)))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def database(folder: Path, rows: list[tuple[str, str, bytes]]) -> bytes:
    """TensorFlow Federated's packed SQLite file of (split, client, example)."""
    path = folder / "made.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    content = lzma.compress(path.read_bytes(), format=lzma.FORMAT_ALONE)
    path.unlink()
    return content


def _cifar(name: str, labels: int, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    patch.setitem(cifar.RECORDS, "cifar10", EACH)
    patch.setitem(cifar.RECORDS, "cifar100", 5 * EACH)
    files = {}
    for split, names in cifar.FILES[name].items():
        for file in names:
            count = 5 * EACH if name == "cifar100" and split == "train" else EACH
            images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            own = np.stack([np.arange(count) % 7] * (labels - 1) + [np.arange(count) * 3 % 10], axis=1)
            files[f"{cifar.FOLDERS[name]}/{file}"] = records(images, own)
    return {"archive": tarred(files)}


def _mnist(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng, files = np.random.default_rng(2), {}
    for split, count in (("train", 20), ("test", 5)):
        files[f"x_{split}"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        files[f"y_{split}"] = (np.arange(count) * 3 % 10).astype(np.uint8)
    return {role: gzip.compress(idx_bytes(array), mtime=0) for role, array in files.items()}


def _emnist(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng, buffer = np.random.default_rng(4), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for part in ("balanced", "letters"):
            for split, count in (("train", 30), ("test", 9)):
                images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
                labels = (np.arange(count) % 26 + (part == "letters")).astype(np.uint8)
                for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                    name = f"gzip/emnist-{part}-{split}-{kind}-ubyte.gz"
                    packed.writestr(name, gzip.compress(idx_bytes(array), mtime=0))
    return {"archive": buffer.getvalue()}


def _femnist(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng, rows = np.random.default_rng(5), []
    for split, count in (("all_train", 8), ("all_test", 3), ("digits_only_train", 1)):
        for i in range(3 * count):
            shades = rng.integers(0, 256, 784) / 255
            rows.append((split, f"f{i % 3:04}_00", example(pixels=[float(s) for s in shades], label=i * 5 % 62)))
    return {"database": database(folder, rows)}


def _shakespeare(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rows = []
    for role, more in (("HAMLET", 4), ("CLOWN", 2), ("GHOST", 0)):  # the ghost has too little to say
        for split, count in (("train", 3 * more), ("test", more)):
            for i in range(count or 1):
                said = (f"{role} {i}: {SPEECH}" if more else "Swear.").encode()
                rows.append((split, role, example(snippets=said)))
    return {"database": database(folder, rows)}


def _tiny(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    return {"text": "".join(f"First Citizen:\n{SPEECH}\n" for i in range(60)).encode()}


def _printers(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng, files = np.random.default_rng(6), {}
    for role in printers.PUBLISHED.files:
        speed = float(role.split()[1])
        lines = [f"{speed / 3 + i / 8!r},{0.5 + rng.random()!r},{0.4 + rng.random()!r}" for i in range(15)]
        files[role] = ("\r\n".join(lines) + "\r\n").encode()
    return files


MAKERS: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, bytes]]] = {
    "cifar10": lambda folder, patch: _cifar("cifar10", 1, folder, patch),
    "cifar100": lambda folder, patch: _cifar("cifar100", 2, folder, patch),
    "emnist": _emnist,
    "fashion_mnist": _mnist,
    "femnist": _femnist,
    "femnist_digits": _femnist,
    "mnist": _mnist,
    "printers": _printers,
    "shakespeare": _shakespeare,
    "tiny_shakespeare": _tiny,
}
PUBLISHED = {
    "cifar10": cifar.CIFAR10,
    "cifar100": cifar.CIFAR100,
    "emnist": emnist.EMNIST,
    "fashion_mnist": mnist.FASHION_MNIST,
    "femnist": femnist.FEMNIST,
    "femnist_digits": femnist.FEMNIST,
    "mnist": mnist.MNIST,
    "printers": printers.PUBLISHED,
    "shakespeare": shakespeare.ROLES,
    "tiny_shakespeare": shakespeare.TINY,
}


def write(name: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Write the original files of a tiny ``name`` into ``folder``, and have their checksums be the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    files, paths = PUBLISHED[name].files, {}
    for role, content in MAKERS[name](folder, patch).items():
        paths[role] = folder / files[role].filename
        paths[role].write_bytes(content)
        publish(name, role, content, patch)
    assert paths.keys() == files.keys()
    return paths


def publish(name: str, role: str, content: bytes, patch: pytest.MonkeyPatch) -> None:
    """Have ``content`` be the published one of that role, whatever it is."""
    files = PUBLISHED[name].files
    told = files[role]._replace(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    patch.setitem(files, role, told)  # type: ignore[arg-type]


OPENIMAGE_HEAD = "client_id,sample_path,label_name,label_id\n"


def write_openimage(folder: Path) -> None:
    """Twelve images of one shade to train of three uploaders, numbered 2, 10 and 11, and four to test."""
    rng = np.random.default_rng(0)
    (folder / "client_data_mapping").mkdir(parents=True)
    for split, count in (("train", 12), ("test", 4)):
        (folder / split).mkdir()
        lines = []
        for i in range(count):
            shade = rng.integers(0, 256, 3, dtype=np.uint8)
            pixels = np.broadcast_to(shade, (9 + i, 12, 3))
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / split / f"{split}{i}.png")
            lines.append(f"{(2, 10, 11)[i % 3]},{split}{i}.png,thing{i % 5},{i % 5}\n")
        (folder / "client_data_mapping" / f"{split}.csv").write_text(OPENIMAGE_HEAD + "".join(lines))
