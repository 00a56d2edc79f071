"""``fedtangent data prepare`` and ``verify``, and runs on every data set that is made of files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import download, load
from fedtangent._src.entries import catalogue

from ..data.originals import PUBLISHED, write, write_openimage
from ..nightly import nightly
from .asking import prepared


def test_prepare_downloads_once_and_verify_checks_the_cache(
    run: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write("tiny_shakespeare", tmp_path / "files", monkeypatch)
    fetched = []

    def fetch(published: object, role: str, path: Path) -> None:
        fetched.append(role)
        path.parent.mkdir(parents=True)
        path.write_bytes(paths[role].read_bytes())

    monkeypatch.setattr(download, "fetch", fetch)
    asked = ("tiny_shakespeare", "--cache-dir", tmp_path / "kept", "--tfds-dir", tmp_path / "tfds")
    missing = run("data", "verify", *asked)
    assert missing.code == 2 and "must be prepared first" in missing.err and missing.err.count("\n") == 1
    for _ in range(2):
        done = run("data", "prepare", *asked)
        assert done.code == 0 and "text_train" in done.out and str(tmp_path / "kept") in done.out
    assert fetched == ["text"]
    right = run("data", "verify", *asked)
    assert right.code == 0 and "4 right" in right.out
    harmed = tmp_path / "kept" / "tiny_shakespeare" / "text_test.npy"
    harmed.write_bytes(harmed.read_bytes()[:-1] + b"?")
    (tmp_path / "kept" / "tiny_shakespeare" / "offsets_test.npy").unlink()
    wrong = run("data", "verify", *asked)
    assert wrong.code == 1 and "2 right, 1 missing, 1 WRONG" in wrong.out
    assert list(folder.iterdir()) == []


def test_verify_looks_at_the_files_of_a_data_folder(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write("printers", tmp_path, monkeypatch)
    asked = ("data", "verify", "printers", "--data-dir", tmp_path)
    assert "72 right" in run(*asked).out
    paths["3 70"].write_bytes(b"1,2,3\n")
    paths["3 80"].unlink()
    ended = run(*asked)
    assert ended.code == 1 and "70 right, 1 missing, 1 WRONG" in ended.out and "WRONG" in ended.out
    ended = run("data", "prepare", "printers", "--data-dir", tmp_path)
    assert ended.code == 2 and ended.err.count("\n") == 1 and "has no FL_Dataset_Printer3_Speed80.csv" in ended.err


def test_another_form_is_read_and_named(run: Callable, tmp_path: Path) -> None:
    np.savez(tmp_path / "printers.npz", data=np.ones((6, 12, 15, 3)))
    ended = run("data", "verify", "printers", "--data-dir", tmp_path)
    assert ended.code == 0 and "printers.npz" in ended.out and "1 not published" in ended.out
    ended = run("data", "prepare", "printers", "--data-dir", tmp_path)
    assert ended.code == 0 and "990 x 7" in ended.out


def test_what_cannot_be_had_is_one_line(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(published: object, role: str, path: Path) -> None:
        raise ValueError(download.unavailable(PUBLISHED["printers"], OSError("no route to host")))

    monkeypatch.setattr(download, "fetch", fetch)
    ended = run("data", "prepare", "printers", "--cache-dir", tmp_path / "kept", "--tfds-dir", tmp_path / "tfds")
    assert ended.code == 2 and "no route to host" in ended.err.splitlines()[-1] and ended.out == ""
    assert not (tmp_path / "kept").exists()


EMBEDDED = ("digits", "sine")
# Texts of users, from files. By night: images of users, images in a folder, images without users, a table; by day
# tests/data reads the files of each, and other tests of the command train on images without users.
DAILY = ("shakespeare",)
SMALL = {
    "digits": ["--widths", "8", "--num-clients", "2", "--num-train", "20"],
    "sine": ["--widths", "8"],
    "shakespeare": ["--units", "4", "--layers", "1", "--stride", "60"],
    "tiny_shakespeare": ["--units", "4", "--layers", "1", "--num-clients", "2"],
    "printers": ["--widths", "8"],
}


@pytest.mark.parametrize("name", nightly(catalogue("datasets"), DAILY))
def test_two_rounds_on_every_data_set(
    run: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = []
    if name not in EMBEDDED:
        files = ["--data-dir", tmp_path / "files"]
        make = write_openimage if name == "openimage" else functools.partial(write, name, patch=monkeypatch)
        make(tmp_path / "files")
    users = load(name, tmp_path / "files" if files else None).user_train
    more = SMALL.get(name, ["--widths", "8", *([] if users is not None else ["--num-clients", "2"])])
    cohort = ["--clients-per-round", "2", "--num-rounds", "2", "--evaluate-every", "2", "--mapping", "scan"]
    given = ["--dataset", name, *files, *more, *cohort, "--batch-size", "0", "--local-steps", "1"]
    ended = run("train", *given, "--output", "out")
    assert ended.code == 0, ended.err
    assert (folder / "out" / "metrics.csv").exists() and f"fed_avg on {name}, round 2" in ended.out


def test_a_file_of_ones_own(run: Callable, folder: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((24, 3)), np.arange(24) % 3
    np.savez(folder / "mine.npz", x=x, y=y, users=np.repeat(["a", "b", "c"], 8))
    given = "--dataset mine.npz --widths 8 --num-rounds 2 --clients-per-round 2 --mapping scan"
    given += " --batch-size 0 --local-steps 2"
    ended = run("train", *given.split(), "--output", "out")
    assert ended.code == 0, ended.err
    assert "fed_avg on mine.npz" in ended.out
    again = run("train", "--config", "out/config.json", "--output", "again")
    assert again.code == 0, again.err
    tables = [(folder / of / "metrics.csv").read_text().splitlines() for of in ("out", "again")]
    first, second = ([line.rpartition(",")[0] for line in lines] for lines in tables)  # the last are seconds
    assert first == second
    prepared("predict --dataset mine.npz --num-rounds 2")
    assert len(prepared("train --dataset mine.npz --num-train 15").built.data.x) == 15
    assert prepared("train --dataset mine.npz --num-train 3").built.data.num_clients == 1  # the others only test
    with pytest.raises(ValueError, match=r"flatten: is not used with dataset 'mine.npz', only with cifar10"):
        prepared("train --dataset mine.npz --flatten")


@pytest.mark.parametrize("command", ["train", "predict", "compare"])
def test_a_file_of_ones_own_that_cannot_be_read(run: Callable, folder: Path, command: str) -> None:
    ended = run(command, "--dataset", "nowhere.npz", "--output", "out")
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "dataset: nowhere.npz cannot be read" in ended.err and list(folder.iterdir()) == []
