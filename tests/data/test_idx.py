from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedtangent._src.data.published import lacking, located
from fedtangent._src.data.sources import mnist


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)))
def test_parse_reads_a_file_written_by_the_format(array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.tobytes()
    parsed = mnist.parse_idx(content)
    assert parsed.dtype == np.uint8 and parsed.shape == array.shape
    np.testing.assert_array_equal(parsed, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00", "unsigned bytes"),
        (b"\x1f\x8b\x08\x00", "unsigned bytes"),
        (b"\x00\x00\x08\x00", "cut short"),
        (b"\x00\x00\x08\x03\x00\x00\x00\x01", "cut short"),
        (struct.pack(">BBBBI", 0, 0, 8, 1, 4) + b"abc", r"shape \(4,\), that is 12 bytes in all; got 11"),
        (struct.pack(">BBBBI", 0, 0, 8, 1, 4) + b"abcde", "got 13"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "states shape"),
    ],
)
def test_parse_rejects(content, message):
    with pytest.raises(ValueError, match=message):
        mnist.parse_idx(content)


@given(st.integers(0, 9))
def test_parse_rejects_every_cut(cut):
    content = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + b"ab"
    with pytest.raises(ValueError, match="idx"):
        mnist.parse_idx(content[:cut])


@pytest.mark.parametrize("subfolder", ["", "fake_images"])
@pytest.mark.parametrize("packed", [True, False])
def test_find_and_read(fake, tmp_path, subfolder, packed):
    place = tmp_path / "given" / subfolder
    place.mkdir(parents=True)
    for file in fake.source.files.values():
        content = (fake.folder / file.filename).read_bytes()
        name = file.filename if packed else file.filename.removesuffix(".gz")
        (place / name).write_bytes(content if packed else gzip.decompress(content))
    paths, missing = located(fake.source, tmp_path / "given")
    assert missing == []
    assert {p.parent for p in paths.values()} == {place}
    for role, path in paths.items():
        np.testing.assert_array_equal(mnist.read_idx(fake.source, role, path), fake.arrays[role])


def test_find_prefers_the_folder_of_the_name(fake, tmp_path):
    own = fake.folder / fake.source.name
    own.mkdir()
    name = fake.source.files["y_test"].filename
    (own / name).write_bytes((fake.folder / name).read_bytes())
    paths, _ = located(fake.source, fake.folder)
    assert paths["y_test"] == own / name and paths["x_test"].parent == fake.folder


def test_find_names_what_is_missing(fake, tmp_path):
    (fake.folder / "train-images-idx3-ubyte.gz").unlink()
    (fake.folder / "t10k-labels-idx1-ubyte.gz").unlink()
    _, missing = located(fake.source, fake.folder)
    said = str(lacking(fake.source, fake.folder, missing, ""))
    assert "train-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz" in said
    assert str(fake.folder) in said and "train-labels" not in said
    with pytest.raises(ValueError, match="is not a directory"):
        located(fake.source, tmp_path / "nowhere")


@pytest.mark.parametrize("packed", [True, False])
def test_read_rejects_an_altered_file(fake, tmp_path, packed):
    raw = (fake.folder / fake.source.files["y_test"].filename).read_bytes()
    raw = bytearray(raw if packed else gzip.decompress(raw))
    raw[-1] ^= 1
    path = tmp_path / "altered"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"altered is not the published t10k-labels-idx1-ubyte\.gz: its sha256 is"):
        mnist.read_idx(fake.source, "y_test", path)


def test_read_reports_a_file_it_cannot_open(fake, tmp_path):
    with pytest.raises(ValueError, match=r"fake_images: .*nowhere cannot be read"):
        mnist.read_idx(fake.source, "y_test", tmp_path / "nowhere")
