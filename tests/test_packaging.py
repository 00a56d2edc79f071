"""The wheel has every file of the package, the archive of sources all that is needed to build and test."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; build_meta.build_{}('built')"


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files that git keeps."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git here: this is an unpacked archive of sources")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


@pytest.fixture(scope="module")
def archive(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    """The archive of sources, built from a copy of what git keeps."""
    folder = tmp_path_factory.mktemp("sources")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return tarfile.open(fileobj=io.BytesIO(build(folder, "sdist").read_bytes()))


@pytest.fixture(scope="module")
def wheel(archive: tarfile.TarFile, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from nothing but the archive of sources."""
    folder = tmp_path_factory.mktemp("unpacked")
    archive.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    return zipfile.ZipFile(io.BytesIO(build(sources, "wheel").read_bytes()))


def build(folder: Path, kind: str) -> Path:
    """What the installed setuptools makes of a folder."""
    (folder / "built").mkdir()
    subprocess.run([sys.executable, "-c", BUILD.format(kind)], cwd=folder, capture_output=True, check=True)
    (built,) = (folder / "built").iterdir()
    return built


def missing(tracked: list[str], names: list[str], below: str = "") -> list[str]:
    """The tracked files below a folder that a list of files does not have."""
    return [name for name in tracked if name.startswith(below) and name.removeprefix(below) not in names]


def test_the_archive_of_sources_is_whole(tracked: list[str], archive: tarfile.TarFile) -> None:
    names = [name.partition("/")[2] for name in archive.getnames()]
    assert missing(tracked, names) == []
    assert "tests/mutants.toml" in tracked
    assert missing(tracked, [name for name in names if name != "tests/mutants.toml"]) == ["tests/mutants.toml"]


def test_the_wheel_has_every_file_of_the_package(tracked: list[str], wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert missing(tracked, names, "src/") == []
    assert {"fedtangent/py.typed", *(f"fedtangent/_src/output/report.{kind}" for kind in ("css", "html"))} <= set(names)
    others = [name for name in names if not name.startswith("fedtangent/") and ".dist-info/" not in name]
    assert others == []
    without_data = [name for name in names if name.endswith(".py")]
    assert "src/fedtangent/py.typed" in missing(tracked, without_data, "src/")


def test_the_wheel_says_what_it_asks_for(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    told = message_from_string(wheel.read(name).decode())
    extras = {"cuda", "dev", "docs", "explore", "notebooks", "tensorboard", "test", "tfds", "tpu"}
    assert told["Name"] == "fedtangent" and set(told.get_all("Provides-Extra", ())) == extras
    asked = told.get_all("Requires-Dist", ())
    assert 'jax[cuda12]; extra == "cuda"' in asked and 'jax[tpu]; extra == "tpu"' in asked
    assert not [line for line in asked if "extra ==" not in line and line.startswith(("tensorflow ", "tf2jax"))]
