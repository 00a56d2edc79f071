from __future__ import annotations

import functools
import gzip
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtangent._src.data
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.published import Published
from fedtangent._src.data.sources import mnist
from fedtangent._src.data.stored import StoredImageOptions


def load_images(source: Published, data_dir: Path | None = None, **options: Any) -> Dataset:
    return mnist.load_images(source, StoredImageOptions(**options), data_dir)


def same_as_fake(dataset, fake):
    for split in ("train", "test"):
        x, y = getattr(dataset, f"x_{split}"), getattr(dataset, f"y_{split}")
        assert dataset.kind == "image" and x.shape[1:] == dataset.input_shape == (28, 28, 1)
        x = x.reshape(len(x), -1)
        expected = fake.arrays[f"x_{split}"].reshape(len(x), -1)
        assert x.dtype == np.float32 and y.dtype == np.int32
        np.testing.assert_array_equal(np.rint(x * 255), expected)
        np.testing.assert_allclose(x, expected / 255, rtol=2**-23)
        np.testing.assert_array_equal(y, fake.arrays[f"y_{split}"])


def test_original_files_are_used_as_they_are(fake, monkeypatch, tmp_path):
    dataset = load_images(fake.source, data_dir=fake.folder, cache_dir=tmp_path / "cache")
    same_as_fake(dataset, fake)
    assert dataset.num_classes == 10 and dataset.user_train is None and dataset.info.read_from == str(fake.folder)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("FEDTANGENT_DATA", str(fake.folder))
    same_as_fake(load_images(fake.source), fake)
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        load_images(fake.source, data_dir=tmp_path / "nowhere")


def test_prepared_records_are_compared_with_what_was_read(fake, seed_tfds, tmp_path):
    seed_tfds(fake.source, fake.folder, tmp_path)
    options = {"cache_dir": tmp_path / "cache", "tfds_dir": tmp_path}
    load_images(fake.source, **options)
    shutil.rmtree(tmp_path / "cache")
    load_images(fake.source, **options)  # control: from the records
    shutil.rmtree(tmp_path / "cache")
    (noted,) = tmp_path.glob("fedtangent_published/fake_images/1.0.0/metadata.json")
    told = json.loads(noted.read_text())
    noted.write_text(json.dumps({"sha256": told["sha256"] | {"x_test": "0" * 64}}))
    with pytest.raises(ValueError, match=r"array x_test in .*fake_images/1\.0\.0 differs .* remove that"):
        load_images(fake.source, **options)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_download_is_an_error(fake, seed_tfds, tmp_path):
    seed_tfds(fake.source, fake.folder, tmp_path)
    (damaged,) = tmp_path.glob("downloads/fake_images/*t10k-labels*.gz")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="is not the published t10k-labels"):
        load_images(fake.source, cache_dir=tmp_path / "cache", tfds_dir=tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def serve(monkeypatch):
    """Serves a folder over HTTP from this machine to itself; gives its address."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    servers = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    def start(folder: Path) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_download(fake, serve, tmp_path):
    source = fake.source._replace(url=serve(fake.folder))
    same_as_fake(load_images(source, cache_dir=tmp_path / "cache", tfds_dir=tmp_path / "tfds"), fake)


def test_a_download_of_something_else_is_an_error(fake, serve, tmp_path):
    source = fake.source._replace(url=serve(fake.folder))
    name = source.files["y_test"].filename
    (fake.folder / name).write_bytes(gzip.compress(b"something else"))
    options = {"cache_dir": tmp_path / "cache", "tfds_dir": tmp_path / "tfds"}
    with pytest.raises(ValueError, match=r"t10k-labels.* is not the published t10k-labels.*: its sha256 is"):
        load_images(source, **options)
    (fake.folder / name).unlink()
    with pytest.raises(ValueError, match=r"cannot be prepared from .*HTTPError: HTTP Error 404"):
        load_images(source, **options)
    assert not (tmp_path / "cache").exists()


def test_without_tfds(fake, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    monkeypatch.delitem(sys.modules, "fedtangent._src.data.builder", raising=False)
    monkeypatch.delattr("fedtangent._src.data.builder", raising=False)
    with pytest.raises(ValueError, match="tensorflow-datasets and array_record are needed"):
        load_images(fake.source, cache_dir=tmp_path / "cache")


def test_options(fake):
    load = lambda **options: load_images(fake.source, data_dir=fake.folder, **options)  # noqa: E731
    plain = load(dtype="float64")
    assert plain.x_train.dtype == np.float64 and plain.x_train.shape == (23, 28, 28, 1)
    assert plain.x_train.min() >= 0 and plain.x_train.max() <= 1
    images = load(flatten=True, num_train=5, num_test=3)
    assert images.x_train.shape == (5, 784) and images.x_test.shape == (3, 784) and images.kind == "vector"
    np.testing.assert_array_equal(images.x_train, load().x_train[:5].reshape(5, -1))
    assert len(images.y_train) == 5 and len(images.y_test) == 3
    whole = load(standardise=True, dtype=np.float64)
    assert abs(whole.x_train.mean()) < 1e-13 and abs(whole.x_train.std() - 1) < 1e-13
    # the moments are of the whole training set, whatever part is taken, and serve the test set too
    np.testing.assert_array_equal(load(standardise=True, num_train=2, dtype=np.float64).x_train, whole.x_train[:2])
    mean, deviation = plain.x_train.mean(), plain.x_train.std()
    np.testing.assert_allclose(whole.x_test, (plain.x_test - mean) / deviation, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 24}, "num_train: got 24, must be a whole number from 1 to 23"),
        ({"num_test": 0}, "num_test: got 0, must be a whole number from 1 to 7"),
        ({"num_test": 2.0}, r"num_test: got 2\.0, must be a whole number from 1 to 7"),
        ({"dtype": "int32"}, "dtype: got 'int32', allowed are float32, float64"),
        ({"dtype": "no such"}, "dtype: got 'no such', allowed are float32, float64"),
    ],
)
def test_bad_options(fake, options, message):
    with pytest.raises(ValueError, match=message):
        load_images(fake.source, data_dir=fake.folder, **options)


def test_one_shade_cannot_be_standardised(fake, tmp_path):
    from fedtangent._src.data import cache

    cache.write(tmp_path / "fake_images", {**fake.arrays, "x_train": np.full((23, 28, 28), 9, np.uint8)})
    assert load_images(fake.source, cache_dir=tmp_path).x_train.max() < 0.1
    with pytest.raises(ValueError, match="standardise"):
        load_images(fake.source, cache_dir=tmp_path, standardise=True)


def test_a_cache_of_something_else_is_an_error(fake, tmp_path):
    from fedtangent._src.data import cache

    cache.write(tmp_path / "fake_images", {**fake.arrays, "y_test": np.zeros(6, np.uint8)})
    with pytest.raises(ValueError, match=r"test images and labels must be uint8"):
        load_images(fake.source, cache_dir=tmp_path)


PROGRAM = """
import sys
from pathlib import Path
from fedtangent._src.data.stored import StoredImageOptions
from fedtangent._src.data.published import PublishedFile
from fedtangent._src.data.sources import mnist
files = {{role: PublishedFile(*file) for role, file in {files!r}.items()}}
source = mnist.MNIST._replace(name="fake_images", url={url!r}, files=files)
dataset = mnist.load_images(source, StoredImageOptions(cache_dir={cache!r}))
assert dataset.x_train.shape == (23, 28, 28, 1) and "tensorflow_datasets" in sys.modules
loaded = [name for name in sys.modules if name.split(".")[0] == "tensorflow"]
print("loaded", loaded)
"""


def test_tensorflow_is_not_imported_even_where_it_is_installed(fake, seed_tfds, tmp_path):
    """A stand-in for TensorFlow can be imported, and says so if it is; downloading, preparing and reading never do."""
    stand_in = tmp_path / "stand_in" / "tensorflow"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text("raise SystemExit('tensorflow was imported')\n")
    seed_tfds(fake.source, fake.folder, tmp_path / "tfds")
    files = {role: tuple(f) for role, f in fake.source.files.items()}
    program = PROGRAM.format(files=files, url=fake.source.url, cache=str(tmp_path / "cache"))
    root = Path(fedtangent.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{stand_in.parent}{os.pathsep}{root}",
        "TFDS_DATA_DIR": str(tmp_path / "tfds"),  # where TFDS looks by default
    }

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    result = run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded []"
    control = run("import tensorflow")
    assert control.returncode == 1 and "tensorflow was imported" in control.stderr
