from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import cache
from fedtangent._src.storage import cache_directory

ARRAYS = {"x": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([1, 2], np.uint8)}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "deep" / "name"
    cache.write(path, ARRAYS)
    return path


def test_round_trip(folder):
    read = cache.read(folder)
    assert set(read) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy", allow_pickle=False), array)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_no_folder_is_no_cache(tmp_path):
    assert cache.read(tmp_path / "name") is None


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (_flip, "x.npy", "is corrupted: its sha256"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "y.npy", "is corrupted: its sha256"),
        (lambda p: p.write_bytes(b""), "y.npy", "is corrupted: its sha256"),
        (lambda p: p.unlink(), "x.npy", "cannot be read"),
        (lambda p: p.unlink(), "manifest.json", "cannot be read"),
        (lambda p: p.write_text("{"), "manifest.json", "cannot be read"),
        (lambda p: p.write_bytes(b"\xff\xfe\xfd"), "manifest.json", "cannot be read"),
        (lambda p: p.write_text("[]"), "manifest.json", "does not list"),
        (lambda p: p.write_text('{"format": 1, "sha256": {}}'), "manifest.json", "does not list"),
        (lambda p: p.write_text(p.read_text().replace('"format": 1', '"format": 2')), "manifest.json", "in format 1"),
    ],
)
def test_damage_is_reported_with_the_way_out(folder, damage, file, message):
    damage(folder / file)
    with pytest.raises(ValueError, match=message) as caught:
        cache.read(folder)
    assert str(folder / file) in str(caught.value)
    assert f"remove the folder {folder}; the next load writes it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_manifest_is_noticed(folder):
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    manifest["sha256"]["x"] = manifest["sha256"]["y"]
    (folder / cache.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"x\.npy is corrupted"):
        cache.read(folder)


def test_the_first_of_two_writers_wins(folder):
    cache.write(folder, {"x": np.zeros(3, np.uint8)})
    np.testing.assert_array_equal(cache.read(folder)["x"], ARRAYS["x"])
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_an_unwritable_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        cache.write(tmp_path / "file" / "name", ARRAYS)


def test_a_failure_on_the_way_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle"):
        cache.write(tmp_path / "name", {**ARRAYS, "z": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path / "env"))
    assert cache_directory(tmp_path / "argument") == tmp_path / "argument"
    assert cache_directory() == tmp_path / "env"
    monkeypatch.delenv("FEDTANGENT_CACHE")
    for platform, variable in (("linux", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA")):
        monkeypatch.setattr("sys.platform", platform)
        monkeypatch.setenv(variable, str(tmp_path / platform))
        assert cache_directory() == tmp_path / platform / "fedtangent"
        monkeypatch.delenv(variable)
        assert cache_directory() == Path.home() / ".cache" / "fedtangent"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_directory() == Path.home() / "Library" / "Caches" / "fedtangent"


def archive() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(2))
    return buffer.getvalue()


def pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], object))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"abc", b"", archive(), pickled()])
def test_a_listed_file_that_is_no_array_is_an_error(folder, content):
    """The sha256 is right, so only its content can tell."""
    (folder / "x.npy").write_bytes(content)
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    manifest["sha256"]["x"] = hashlib.sha256(content).hexdigest()
    (folder / cache.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"x\.npy cannot be read: the file (is no array|holds Python objects)"
    ) as caught:
        cache.read(folder)
    assert f"remove the folder {folder}; the next load writes it again" in str(caught.value)
    assert "\n" not in str(caught.value)
