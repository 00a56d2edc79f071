"""The one reader of files from outside: an answer in one line that names the file, whatever it holds."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.data import files, load
from fedtangent._src.data.cache import given_directory
from fedtangent._src.storage import cache_directory

X, Y = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32), np.arange(20) % 4


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npz(save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def packed(kind: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    """An archive of these bytes, ``a_npy`` as the member ``a.npy``; x and y are there and right where not given."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as file:
        for name, raw in {"x_npy": npy(X), "y_npy": npy(Y), **members}.items():
            file.writestr(name.replace("_", "."), raw)
    return buffer.getvalue()


def stated(shape: object = X.shape, dtype: str = "'<f4'", more: int = 0, whole: str = "") -> bytes:
    """X under a header that states something else; ``more``: so many spaces in it."""
    text = whole or f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
    header = text.encode() + b" " * more + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + X.tobytes()


def marked(raw: bytes, local: int, central: int, value: int) -> bytes:
    """An archive with a number of 16 bits in the heads of all of its members set to ``value``."""
    changed = bytearray(raw)
    for sign, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = -1
        while (at := raw.find(sign, at + 1)) >= 0:
            changed[at + offset : at + offset + 2] = struct.pack("<H", value)
    return bytes(changed)


BAD = {
    "empty": (b"", "File is not a zip file"),
    "text": (b"x,y\n1,2\n", "File is not a zip file"),
    "an npy": (npy(X), "File is not a zip file"),
    "a pickle": (pickle.dumps({"x": X}), "File is not a zip file"),
    "encrypted": (marked(npz(x=X, y=Y), 6, 8, 1), "File 'x.npy' is encrypted"),
    "unknown compression": (marked(npz(x=X, y=Y), 8, 10, 99), "compression method is not supported"),
    "no array": (packed(x_npy=b"text"), "x.npy is no array"),
    "another file": (packed(readme_txt=b"hello"), "readme.txt is no array"),
    "no header": (packed(x_npy=npy(X)[:20]), "x.npy is no array"),
    "code": (packed(x_npy=stated(whole="__import__('os').abort()")), "x.npy is no array"),
    "brackets": (packed(x_npy=stated(whole="(" * 5000)), "x.npy is no array"),
    "a long header": (packed(x_npy=stated(more=20_000)), "x.npy is no array"),
    "a huge header": (packed(x_npy=stated(more=10**8)), "x.npy is no array"),
    "objects": (npz(x=X, y=np.array([None] * 20)), "y.npy holds Python objects"),
    "said to be objects": (packed(x_npy=stated(dtype="'O'")), "x.npy holds Python objects"),
    "too large": (
        packed(x_npy=stated((10**12, 3))),
        "x.npy is damaged: it has 240 bytes after a header for float32 (1000000000000, 3)",
    ),
    "far too large": (packed(x_npy=stated((10**30, 3))), "after a header for float32 (1"),
    "negative": (packed(x_npy=stated((-20, 3))), "after a header for float32 (-20, 3)"),
    "of nothing": (packed(x_npy=stated((10**12,), "'<U0'")), "after a header for <U0"),
    "short": (packed(x_npy=stated((21, 3))), "after a header for float32 (21, 3)"),
    "long": (packed(x_npy=stated((19, 3))), "after a header for float32 (19, 3)"),
    "twice": (packed(x=npy(X)), "x is there twice"),
}


@pytest.mark.parametrize(("raw", "says"), BAD.values(), ids=BAD)
def test_what_is_no_archive_of_arrays_is_said_in_one_line(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(raw)
    for read in (lambda: files.arrays("dataset", path), lambda: load(str(path))):
        with pytest.raises(ValueError, match=r"^dataset: .*mine\.npz cannot be read: ") as caught:
            read()
        said = str(caught.value)
        assert says in said and "\n" not in said and "pickle" not in said


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_flipped_bit_is_a_traceback_or_another_number(tmp_path: Path, save: Callable[..., None]) -> None:
    whole, draw, noticed = npz(save, x=X, y=Y), random.Random(0), 0
    for _ in range(300):
        at = draw.randrange(len(whole))
        raw = bytearray(whole)
        raw[at] ^= 1 << draw.randrange(8)
        (tmp_path / "mine.npz").write_bytes(raw)
        try:
            found = files.arrays("dataset", tmp_path / "mine.npz")
        except ValueError as error:
            assert str(error).startswith(f"dataset: {tmp_path / 'mine.npz'} cannot be read: ")
            assert "\n" not in str(error)
            noticed += 1
        else:  # a date, or a member's name
            for array, name in zip(found.values(), "xy", strict=True):
                np.testing.assert_array_equal(array, {"x": X, "y": Y}[name])
    assert noticed > 150


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The control: every dtype that is no object, either order of bytes and of axes, nothing and a scalar."""
    held = {
        kind: np.asfortranarray(np.arange(6).reshape(2, 3).astype(kind))
        for kind in ("<f4", ">f8", "<f2", "<i8", ">i4", "u1", "?", "<c16", "<U3", "S2", "<M8[s]", "g")
    }
    held |= {"nothing": np.zeros((0, 4)), "scalar": np.array(3), "pairs": np.zeros(2, "i4,f8")}
    path = tmp_path / "mine.npz"
    for save in (np.savez, np.savez_compressed):
        path.write_bytes(npz(save, **held))
        found, told = files.arrays("dataset", path), files.headers("dataset", path)
        assert list(found) == list(told) == list(held)
        for name, array in held.items():
            np.testing.assert_array_equal(found[name], array)
            assert (told[name].shape, told[name].dtype) == (array.shape, array.dtype)
            assert found[name].dtype.isnative and found[name].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(files.array_of(npy(array)), array)
    with pytest.raises(ValueError, match="the file is damaged: it has 239 bytes"):
        files.array_of(npy(X)[:-1])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make: dict[str, Callable[[Path], Any]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "nothing": lambda path: None,
    }
    says = "No such file" if kind == "nothing" else "it is a folder, a pipe or a device, must be a file"
    for name, dataset in (("mine.npz", str(tmp_path / "mine.npz")), ("shakespeare.npz", "shakespeare")):
        make[kind](tmp_path / name)
        if kind != "nothing" or name == "mine.npz":
            with pytest.raises(ValueError, match=f"{name} cannot be read: .*{says}"):
                load(dataset, data_dir=tmp_path)
    with pytest.raises(ValueError, match=rf"mine\.npz cannot be read: .*{says}"):
        files.json_of("config", tmp_path / "mine.npz")


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_json_that_is_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(ValueError, match=r"^config: .*file cannot be read: ") as caught:
        files.json_of("config", tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, read in (("FEDTANGENT_CACHE", cache_directory), ("FEDTANGENT_DATA", given_directory)):
        monkeypatch.setenv(name, "~nobody-of-this-name/x")
        with pytest.raises(ValueError, match=f"^{name}: ~nobody-of-this-name/x cannot be read: .*home directory"):
            read()
    with pytest.raises(ValueError, match=r"^dataset: ~nobody-of-this-name/x\.npz cannot be read"):
        load("~nobody-of-this-name/x.npz")
