"""Files that are bad in every way, for every reader: one line, exit code 2, nothing half-written."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedtangent._src.cli import train
from fedtangent._src.data import cache, download, load

from ..data.originals import (
    OPENIMAGE_HEAD,
    PUBLISHED,
    SPEECH,
    database,
    example,
    idx_bytes,
    publish,
    records,
    tarred,
    write,
    write_openimage,
)
from .test_bad_input import assert_refused

WHOLE = "whole"
CUT, CHECKSUM, SHAPE, OBJECTS, LABELS, NO_EXAMPLES, DISK = HARMS = (
    "truncated",
    "wrong checksum",
    "wrong shape",
    "objects",  # or whatever is no number
    "labels out of range",
    "a user without examples",
    "no space left",
)
UNPUBLISHED = {CHECKSUM: "its checksum is published nowhere"}
UNWRITTEN = {DISK: "nothing is written"}
TESTED = {NO_EXAMPLES: "a user may have test examples only"}
NOBODYS = {NO_EXAMPLES: "nothing is told of users"}
BYTES = {OBJECTS: "every byte is a number"}


class Reader(NamedTuple):
    """How files are written with a harm, and with what options they are read; what is said of each harm that can be."""

    make: Callable[[str, Path, pytest.MonkeyPatch], list[object]]
    says: dict[str, str]
    spared: dict[str, str]


def full(*given: object, **options: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cut(path: Path, harm: str) -> None:
    if harm == CUT:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# ---- files of which no checksum is published ----

IMAGES, SHADES = np.zeros((4, 28, 28), np.uint8), [[1.0] * 784] * 2
OBJECT = np.array([None] * 4, object)


def own(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    held = {"x": np.ones((4, 2)), "y": np.arange(4), "users": np.arange(4)}
    held |= {f"{name}_test": array for name, array in held.items()}
    changed = {
        SHAPE: {"x": np.ones(4)},
        OBJECTS: {"y": OBJECT},
        LABELS: {"y": np.arange(4) - 1},
    }
    np.savez(folder / "mine.npz", **held | changed.get(harm, {}))  # type: ignore[arg-type]
    cut(folder / "mine.npz", harm)
    return ["--dataset", folder / "mine.npz"]


def archive(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    held = {"images": IMAGES, "labels": np.arange(4), "offsets": np.array([0, 2, 4])}
    held = {f"{split}_{name}": array for split in ("train", "test") for name, array in held.items()}
    changed = {
        SHAPE: {"train_images": IMAGES[:, 1:]},
        OBJECTS: {"train_labels": OBJECT},
        LABELS: {"test_labels": np.arange(59, 63)},
    }
    np.savez(folder / "femnist.npz", **held | changed.get(harm, {}))
    cut(folder / "femnist.npz", harm)
    return ["--dataset", "femnist", "--data-dir", folder]


def leaf(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    x: Any = {SHAPE: [[1.0] * 783] * 2, OBJECTS: [{}, {}], NO_EXAMPLES: []}.get(harm, SHADES)
    y = {LABELS: [0, 62], NO_EXAMPLES: []}.get(harm, [0, 1])
    for split in ("train", "test"):
        (folder / split).mkdir()
        path = folder / split / "all.json"
        path.write_text(json.dumps({"users": ["a"], "user_data": {"a": {"x": x, "y": y}}}))
    cut(path, harm)
    return ["--dataset", "femnist", "--data-dir", folder]


def uploaded(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    write_openimage(folder)
    cut(folder / "train/train3.png", harm)
    if harm == OBJECTS:
        (folder / "train/train3.png").write_text("no image")
    lines = {SHAPE: "a,b\n1,2\n", LABELS: f"{OPENIMAGE_HEAD}2,test0.png,thing0,-1\n", NO_EXAMPLES: OPENIMAGE_HEAD}
    if harm in lines:
        (folder / "client_data_mapping/test.csv").write_text(lines[harm])
    return ["--dataset", "openimage", "--data-dir", folder, "--image-size", "4"]


# ---- published files ----


def published(name: str, role: str, changed: dict[str, Callable[[Path], bytes]]) -> Callable[..., list[object]]:
    """The file of ``role`` with a harm; but for a wrong checksum it is as it were published."""

    def make(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
        paths = write(name, folder / "files", patch)
        whole = paths[role].read_bytes()
        usual = {CUT: whole[: len(whole) // 2], CHECKSUM: whole + b"\n"}
        content = changed[harm](folder) if harm in changed else usual.get(harm, whole)
        paths[role].write_bytes(content)
        if harm != CHECKSUM:
            publish(name, role, content, patch)
        if harm != DISK:
            return ["--dataset", name, "--data-dir", folder / "files"]

        def fetched(published: object, role: str, path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(paths[role], path)

        patch.setattr(download, "fetch", fetched)
        patch.setattr(cache.np, "save", full)
        return ["--dataset", name, "--cache-dir", folder / "cache", "--tfds-dir", folder / "tfds"]

    return make


def idx(*shape: int, label: int = 0) -> Callable[[Path], bytes]:
    array = np.zeros(shape, np.uint8) if len(shape) > 1 else np.full(shape, label, np.uint8)
    return lambda folder: gzip.compress(idx_bytes(array))


def writers(**changes: Any) -> Callable[[Path], bytes]:
    """A table of TensorFlow Federated's of one writer, the last of whose examples to test is changed."""
    right = {"pixels": SHADES[0], "label": 3}
    rows = [(split, "a", example(**right)) for split in ("all_train", "all_test")]
    rows.append(("all_test", changes.pop("client", "a"), example(**right | changes)))
    return lambda folder: database(folder, rows)


def unpacked(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    """TensorFlow Federated's files are unpacked before they are read."""
    changed = {
        SHAPE: writers(pixels=[1.0] * 783),
        OBJECTS: writers(pixels=b"text"),
        LABELS: writers(label=62),
    }
    if harm == DISK:
        patch.setattr(shutil, "copyfileobj", full)
    return published("femnist", "database", changed)(WHOLE if harm == DISK else harm, folder, patch)


def said(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    """What roles say, in such a table."""
    told = example(snippets=SPEECH.encode() * 2)
    changed = {SHAPE: example(snippets=b"Swear."), OBJECTS: example(snippets=[0.5]), NO_EXAMPLES: None}

    def table(folder: Path) -> bytes:
        rows = [("train", "A", told), ("test", "A", changed.get(harm, told))]
        return database(folder, [(split, role, row) for split, role, row in rows if row is not None])

    if harm == DISK:
        patch.setattr(shutil, "copyfileobj", full)
    make = published("shakespeare", "database", dict.fromkeys((WHOLE, *changed), table))
    return make(WHOLE if harm == DISK else harm, folder, patch)


def letters(harm: str, folder: Path, patch: pytest.MonkeyPatch) -> list[object]:
    """Files of idx in an archive."""
    images, labels = np.zeros((9, 28, 28 - (harm == SHAPE))), np.arange(9) + 40 * (harm == LABELS)

    def packed(folder: Path) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for split in ("train", "test"):
                for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                    content = b"text" if harm == OBJECTS else idx_bytes(array)
                    file.writestr(f"gzip/emnist-balanced-{split}-{kind}-ubyte.gz", gzip.compress(content))
        return buffer.getvalue()

    return published("emnist", "archive", dict.fromkeys((SHAPE, OBJECTS, LABELS), packed))(harm, folder, patch)


def photographs(count: int = 3, label: int = 0) -> Callable[[Path], bytes]:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    content = records(np.zeros((count, 32, 32, 3)), np.full((count, 1), label))
    return lambda folder: tarred({f"cifar-10-batches-bin/{name}": content for name in names})


def line(text: bytes) -> Callable[[Path], bytes]:
    return lambda folder: text * 15


NOT_IT, NO_SPACE = "is not the published", "No space left on device"
USUAL = {CHECKSUM: NOT_IT, DISK: NO_SPACE}
READERS = {
    "a file of one's own": Reader(
        own,
        {
            CUT: "mine.npz cannot be read: File is not a zip file",
            SHAPE: "x: got float64 (4,) in ",
            OBJECTS: "mine.npz cannot be read: y.npy holds Python objects",
            LABELS: "y: got -1 at position 0",
        },
        UNPUBLISHED | UNWRITTEN | TESTED,
    ),
    "an archive": Reader(
        archive,
        {
            CUT: "femnist.npz cannot be read: File is not a zip file",
            SHAPE: "got uint8 (4, 27, 28) and (4,) in ",
            OBJECTS: "femnist.npz cannot be read: train_labels.npy holds Python objects",
            LABELS: "labels: got 62 at position 3",
        },
        UNPUBLISHED | UNWRITTEN | TESTED,
    ),
    "LEAF": Reader(
        leaf,
        {
            CUT: "all.json cannot be read: ",
            SHAPE: "got (2, 783) in ",
            OBJECTS: "got [{}, {}], must be a real number",
            LABELS: "got 62 at position 1",
            NO_EXAMPLES: "got user 'a' in ",
        },
        UNPUBLISHED | UNWRITTEN,
    ),
    "a folder of images": Reader(
        uploaded,
        {
            CUT: "train3.png cannot be read: ",
            SHAPE: "got the columns ['a', 'b'] and ",
            OBJECTS: "train3.png cannot be read: ",
            LABELS: "'-1'] in line 2 of ",
            NO_EXAMPLES: "test.csv, must begin with client_id",
        },
        UNPUBLISHED | UNWRITTEN,
    ),
    "TensorFlow Federated": Reader(
        unpacked,
        {
            CUT: "emnist_all.sqlite.lzma cannot be read: ",
            SHAPE: "must be real numbers in one array",
            OBJECTS: "emnist_all.sqlite.lzma cannot be read: an example has no pixels of kind float_list",
            LABELS: "got 62 at position 1",
            **USUAL,
        },
        TESTED,
    ),
    "TensorFlow Federated, text": Reader(
        said,
        {
            CUT: "shakespeare.sqlite.lzma cannot be read: ",
            SHAPE: "got no role in ",
            OBJECTS: "shakespeare.sqlite.lzma cannot be read: ",
            NO_EXAMPLES: "has no examples of 'test'",
            **USUAL,
        },
        {LABELS: "every byte is a character"},
    ),
    "idx in an archive": Reader(
        letters,
        {
            CUT: "gzip.zip cannot be read: ",
            SHAPE: "got images (9, 28, 27) and labels (9,) to train in ",
            OBJECTS: "not an idx file of unsigned bytes",
            LABELS: "labels: got 47 at position 7",
            **USUAL,
        },
        NOBODYS,
    ),
    "idx, images": Reader(
        published(
            "mnist",
            "x_train",
            {SHAPE: idx(20, 27, 28), OBJECTS: lambda folder: gzip.compress(b"\0\0\x0d\3" + bytes(90))},
        ),
        {
            CUT: "train-images-idx3-ubyte.gz cannot be read: ",
            SHAPE: "got uint8 (20, 27, 28) and uint8 (20,) in ",
            OBJECTS: "not an idx file of unsigned bytes",
            **USUAL,
        },
        {LABELS: "they are in another file"} | NOBODYS,
    ),
    "idx, labels": Reader(
        published("mnist", "y_train", {SHAPE: idx(20, 1), LABELS: idx(20, label=10)}),
        {
            CUT: "train-labels-idx1-ubyte.gz cannot be read: ",
            SHAPE: "and uint8 (20, 1) in ",
            LABELS: "labels: got 10 at position 0",
            CHECKSUM: NOT_IT,
        },
        BYTES | NOBODYS | {DISK: "as for the images"},
    ),
    "records": Reader(
        published("cifar10", "archive", {SHAPE: photographs(2), LABELS: photographs(label=10)}),
        {
            CUT: "cifar-10-binary.tar.gz cannot be read: ",
            SHAPE: "got 6146 bytes in ",
            LABELS: "labels: got 10 at position 0",
            **USUAL,
        },
        BYTES | NOBODYS,
    ),
    "a table": Reader(
        published(
            "printers",
            "1 10",
            {CUT: lambda folder: b"1.5,2.5,3\n" * 14 + b"1.5", SHAPE: line(b"1.5,2.5\n"), OBJECTS: line(b"a,b,c\n")},
        ),
        {
            CUT: "Printer1_Speed10.csv cannot be read: ",
            SHAPE: "got (15, 2) in ",
            OBJECTS: "Printer1_Speed10.csv cannot be read: ",
            **USUAL,
        },
        {LABELS: "targets are numbers", NO_EXAMPLES: "each file is a printer's at a speed"},
    ),
    "a text": Reader(
        published("tiny_shakespeare", "text", {CUT: lambda folder: b"To be", SHAPE: lambda folder: b""}),
        {
            CUT: "tiny_shakespeare: got uint8 (4,) to train in ",
            SHAPE: "tiny_shakespeare: got uint8 (0,) to train in ",
            **USUAL,
        },
        {OBJECTS: "every byte is a character", LABELS: "every byte is a character"} | NOBODYS,
    ),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; no work is done on what should be refused."""
    monkeypatch.setattr(train, "simulate_rounds", lambda *given, **options: pytest.fail("the work has started"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_every_reader_answers_for_every_harm() -> None:
    for name, reader in READERS.items():
        assert sorted([*reader.says, *reader.spared]) == sorted(HARMS), name


def test_every_published_data_set_has_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()
    for i, reader in enumerate(READERS.values()):
        (tmp_path / str(i)).mkdir()
        asked.add(reader.make(WHOLE, tmp_path / str(i), monkeypatch)[1])
    read = {found.read for name, found in PUBLISHED.items() if name in asked}
    assert read == {found.read for found in PUBLISHED.values()}


@pytest.mark.parametrize("name", READERS)
def test_what_is_whole_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The control: without the harm nothing is refused."""
    (tmp_path / "given").mkdir()
    asked = READERS[name].make(WHOLE, tmp_path / "given", monkeypatch)
    options = dict(zip(asked[::2], asked[1::2], strict=True))
    found = load(str(options["--dataset"]), options.get("--data-dir"))
    assert len(found.y_train) > 0 < len(found.y_test)


@pytest.mark.parametrize(("name", "harm"), [(name, harm) for name, reader in READERS.items() for harm in reader.says])
def test_bad_files_end_before_any_work(
    run: Callable, folder: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, name: str, harm: str
) -> None:
    (tmp_path / "given").mkdir()
    asked = READERS[name].make(harm, tmp_path / "given", monkeypatch)
    ended = run("train", *asked, "--num-clients", "2", "--partition", "iid", "--output", "out")
    assert_refused(ended, folder, READERS[name].says[harm])
    left = [path for place in ("cache", "given/cache", "temporary") for path in (tmp_path / place).rglob("*")]
    assert not any(path.is_file() for path in left)
