"""Tiny idx files, written here byte by byte, and a TFDS download cache seeded with them."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedtangent._src.data.published import Published, PublishedFile
from fedtangent._src.data.sources import mnist

from .originals import idx_bytes


class Fake(NamedTuple):
    source: Published
    arrays: dict[str, np.ndarray]
    folder: Path  # holds the four .gz files


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDTANGENT_DATA", raising=False)
    monkeypatch.delenv("FEDTANGENT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default_cache"))


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    rng = np.random.default_rng(5)
    arrays = {
        "x_train": rng.integers(0, 256, (23, 28, 28), dtype=np.uint8),
        "y_train": (np.arange(23) * 7 % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (7, 28, 28), dtype=np.uint8),
        "y_test": np.arange(7, dtype=np.uint8),
    }
    folder, files = tmp_path / "files", {}
    folder.mkdir()
    for role, array in arrays.items():
        name = mnist.MNIST.files[role].filename
        content = idx_bytes(array)
        packed = gzip.compress(content, mtime=0)
        (folder / name).write_bytes(packed)
        digests = [hashlib.sha256(b).hexdigest() for b in (packed, content)]
        files[role] = PublishedFile(name, len(packed), *digests)
    # nothing listens on the discard port of this machine
    source = mnist.MNIST._replace(name="fake_images", url="http://127.0.0.1:9/fake/", files=files)
    return Fake(source, arrays, folder)


@pytest.fixture
def seed_tfds() -> Callable[[Published, Path, Path], Path]:
    """Puts the files of a source into a TFDS download cache, as TFDS's own download of them would."""

    def seed(source: Published, folder: Path, tfds_dir: Path) -> Path:
        from tensorflow_datasets.core.download.resource import get_dl_fname

        for file in source.files.values():
            url = source.url + file.filename
            path = tfds_dir / "downloads" / (source.stem or source.name) / get_dl_fname(url, file.sha256)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file.filename, path)
            info = {"urls": [url], "original_fname": file.filename, "dataset_names": [source.name]}
            path.with_suffix(path.suffix + ".INFO").write_text(json.dumps(info))
        return tfds_dir

    return seed
