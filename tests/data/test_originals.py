"""Every published data set on tiny originals: read as they are, through TensorFlow Datasets, from the cache."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.data import Dataset, download, load
from fedtangent._src.data.sources import printers
from fedtangent._src.data.sources.shakespeare import CHARACTERS
from fedtangent._src.entries import catalogue

from . import originals
from .originals import MAKERS, PUBLISHED, SPEECH, publish, write


def same(a: Dataset, b: Dataset) -> None:
    for name, one, other in zip(a._fields, a, b, strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(one, other, err_msg=name)
        elif name != "info":
            assert one == other, name


def test_every_published_data_set_is_here() -> None:
    published = {name for name, entry in catalogue("datasets").items() if entry.published is not None}
    assert published == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_originals_and_their_records_and_the_cache_are_one_data_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed_tfds: Callable
) -> None:
    write(name, tmp_path / "files", monkeypatch)
    direct = load(name, tmp_path / "files")
    seed_tfds(PUBLISHED[name], tmp_path / "files", tmp_path / "tfds")
    shutil.rmtree(tmp_path / "files")
    kept = {"cache_dir": tmp_path / "cache", "tfds_dir": tmp_path / "tfds"}
    same(load(name, **kept), direct)
    assert list((tmp_path / "tfds").glob("fedtangent_published/*/1.0.0/*train.array_record*"))
    shutil.rmtree(tmp_path / "tfds")
    cached = load(name, **kept)
    same(cached, direct)
    assert cached.info.read_from.startswith(str(tmp_path / "cache")) and direct.info.read_from == str(
        tmp_path / "files"
    )
    users = [direct.user_train, direct.user_test]
    if catalogue("datasets")[name].partition == "by_user":
        assert set(users[1]) <= set(users[0]) and len(set(users[0])) > 1
    else:
        assert users == [None, None]


@pytest.mark.parametrize("name", MAKERS)
def test_files_that_are_cut_or_altered_are_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(name, tmp_path / "files", monkeypatch)
    role, path = next(iter(paths.items()))
    whole = path.read_bytes()
    for harmed in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(harmed)
        with pytest.raises(ValueError, match="is not the published") as caught:
            load(name, tmp_path / "files")
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        # were it the published one: what it holds is looked at too
        with monkeypatch.context() as patch:
            publish(name, role, harmed, patch)
            if name != "tiny_shakespeare" or not harmed:  # any text will do
                try:
                    load(name, tmp_path / "files")
                except ValueError as error:
                    assert "\n" not in str(error) and name.partition("_")[0] in str(error)
                else:
                    assert len(harmed) == len(whole)  # a bit of one pixel or number more or less
    path.unlink()
    with pytest.raises(ValueError, match=rf"has no {PUBLISHED[name].files[role].filename}"):
        load(name, tmp_path / "files")


@pytest.mark.parametrize("name", MAKERS)
def test_no_network_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "urlopen", unreachable)
    with pytest.raises(ValueError, match=r"cannot be prepared from https?://.*URLError.*FEDTANGENT_DATA") as caught:
        load(name, cache_dir=tmp_path / "cache", tfds_dir=tmp_path / "tfds")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "tfds").exists()


def unreachable(*args: object, **options: object) -> None:
    raise download.urllib.error.URLError("Temporary failure in name resolution")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("No space left")])
def test_a_full_disk_while_records_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed_tfds: Callable, error: Exception
) -> None:
    from fedtangent._src.data import builder

    write("printers", tmp_path / "files", monkeypatch)
    seed_tfds(printers.PUBLISHED, tmp_path / "files", tmp_path / "tfds")

    def full(*args: object) -> None:
        raise error

    monkeypatch.setattr(builder, "_examples", full)
    with pytest.raises(ValueError, match=r"printers: cannot be prepared in .*tfds: .*No space left") as caught:
        load("printers", cache_dir=tmp_path / "cache", tfds_dir=tmp_path / "tfds")
    assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()
    assert not list((tmp_path / "tfds").rglob("*array_record*"))


def test_emnist_is_turned_upright_and_its_letters_count_from_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write("emnist", tmp_path, monkeypatch).values()
    found = load("emnist", tmp_path, part="letters")
    with originals.zipfile.ZipFile(path) as packed:
        raw = gzip.decompress(packed.read("gzip/emnist-letters-test-images-idx3-ubyte.gz"))
    stored = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 28, 28)
    assert [round(float(found.x_test[2, row, 5, 0]) * 255) for row in range(28)] == stored[2, 5, :].tolist()
    assert found.num_classes == 26 and found.y_train.tolist() == [i % 26 for i in range(30)]
    assert load("emnist", tmp_path).num_classes == 47
    with pytest.raises(ValueError, match="part: got 'upper', allowed are balanced, byclass, bymerge, digits"):
        load("emnist", tmp_path, part="upper")
    with pytest.raises(ValueError, match=r"gzip\.zip cannot be read: .*emnist-digits-train-images"):
        load("emnist", tmp_path, part="digits")


def test_femnist_of_tff_keeps_writers_and_turns_ink_to_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("femnist", tmp_path, monkeypatch)
    found, rng = load("femnist", tmp_path), np.random.default_rng(5)
    first = rng.integers(0, 256, 784)  # of the first writer, who comes first by name too
    np.testing.assert_allclose(found.x_train[0].ravel(), 1 - first / 255, atol=1e-6)
    assert found.num_classes == 62 and found.y_train[:3].tolist() == [0, 15, 30]  # his examples are every third
    assert found.user_train is not None and found.user_train.tolist() == sorted([0, 1, 2] * 8)
    digits = load("femnist_digits", tmp_path)
    assert digits.num_classes == 10 and len(digits.y_train) == (found.y_train < 10).sum() > 0
    one = load("femnist", tmp_path, num_users=1)
    assert set(one.user_train) == set(one.user_test) == {0} and len(one.y_train) == 8


def test_roles_without_enough_to_say_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shakespeare", tmp_path, monkeypatch)
    found = load("shakespeare", tmp_path, stride=1)
    clown = "\n".join(f"CLOWN {i}: {SPEECH}" for i in range(6))
    shown = "".join(CHARACTERS[i] for i in found.x_train[0])
    assert shown == clown[:80] and CHARACTERS[found.y_train[0]] == clown[80]  # clients come in the order of names
    assert set(found.user_train) == set(found.user_test) == {0, 1}  # the ghost is not there
    assert int((found.user_train == 0).sum()) == len(clown) - 80
    every = load("shakespeare", tmp_path, stride=7)
    np.testing.assert_array_equal(every.x_train[1], found.x_train[7])
    assert load("shakespeare", tmp_path, num_users=1).user_train.max() == 0
    assert (found.kind, found.x_train.dtype, found.num_classes) == ("tokens", np.int32, 80)


def test_tiny_shakespeare_is_divided_as_tfds_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write("tiny_shakespeare", tmp_path, monkeypatch).values()
    text, found = path.read_text(), load("tiny_shakespeare", tmp_path, stride=1)
    names = sorted("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    cut = int(0.9 * len(text))
    last = text[cut:][int(0.5 * (len(text) - cut)) :]
    assert len(found.y_train) == cut - 80 and len(found.y_test) == len(last) - 80
    assert "".join(names[i] for i in found.x_test[-1]) + names[found.y_test[-1]] == last[-81:]
    assert found.num_classes == 65 == len(names)


def test_a_printer_is_tested_at_speed_30(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write("printers", tmp_path, monkeypatch)
    found = load("printers", tmp_path)
    rows = [[float(v) for v in line.split(",")] for line in paths["4 30"].read_text().splitlines()]
    mine = found.user_test == 3
    np.testing.assert_allclose(found.x_test[mine, 0] * 50, [row[0] for row in rows])
    np.testing.assert_allclose(found.y_test[mine, 0], [(row[1] ** 2 + row[2] ** 2) ** 0.5 for row in rows])
    np.testing.assert_array_equal(found.x_test[mine, 1:], np.eye(6)[[3] * 15])
    assert found.x_train.shape == (990, 7) and found.num_classes == 0 and found.num_outputs == 1
    assert not np.isin(np.round(found.x_train[:, 0], 9), np.round(found.x_test[:, 0], 9)).all()
    data = np.zeros((6, 12, 15, 3))
    for role, path in paths.items():
        printer, speed = map(int, role.split())
        data[printer - 1, speed // 10 - 1] = np.loadtxt(path, delimiter=",")
    (tmp_path / "packed").mkdir()
    np.savez(tmp_path / "packed" / "printer_vibration.npz", data=data)
    same(load("printers", tmp_path / "packed"), found)
    for wrong, says in ((data[:5], r"must be floating \[6, 12, 15, 3\]"), (data * np.nan, "must be finite")):
        np.savez(tmp_path / "packed" / "printer_vibration.npz", data=wrong)
        with pytest.raises(ValueError, match=says):
            load("printers", tmp_path / "packed")


def leaf(folder: Path, **splits: dict[str, tuple[list, list]]) -> None:
    for split, users in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        held = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
        told = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": held}
        (folder / split / f"all_data_0_{split}.json").write_text(json.dumps(told))


def test_femnist_in_leafs_own_format(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shades = rng.integers(0, 256, (5, 784))
    image = [[int(v) / 255 for v in row] for row in shades]
    folder = tmp_path / "femnist" / "data"
    leaf(folder, train={"b": (image[:2], [3, 61]), "a": (image[2:3], [9])}, test={"a": (image[3:], [10, 0])})
    found = load("femnist", tmp_path)
    np.testing.assert_allclose(found.x_train.reshape(3, -1), 1 - shades[:3] / 255, atol=1e-6)
    assert found.y_train.tolist() == [3, 61, 9] and found.user_train.tolist() == [0, 0, 1]
    assert found.user_test.tolist() == [1, 1] and found.info.read_from == str(folder)
    digits = load("femnist_digits", tmp_path)
    assert digits.y_train.tolist() == [3, 9] and digits.y_test.tolist() == [0]
    for harm, says in {
        "shade": "multiples of 1 / 255",
        "dark": "must be shades from 0 to 1",
    }.items():
        own = {
            "shade": {"a": ([[0.501] * 784], [1])},
            "dark": {"a": ([[-1 / 255] * 784], [1])},
        }[harm]
        leaf(folder, test=own)
        with pytest.raises(ValueError, match=says) as caught:
            load("femnist", tmp_path)
        assert "\n" not in str(caught.value)
    leaf(folder, test={"a": (image[3:], [61, 10])})
    with pytest.raises(
        ValueError, match=f"femnist_digits: got no example of its 10 classes to test in {folder}, must have some"
    ):
        load("femnist_digits", tmp_path)
    for text, says in (
        ("{", "cannot be read"),
        ('{"users": [], "user_data": {}}', "got no user in "),
        (json.dumps({"users": ["a"] * 2, "user_data": {"a": {"x": image[3:], "y": [1, 2]}}}), "got user 'a' again in "),
        ("[]", "is no file of LEAF"),
        ('{"users": ["a"]}', "is no file of LEAF"),
    ):
        (folder / "test" / "all_data_0_test.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            load("femnist", tmp_path)


@pytest.mark.parametrize("split", [{}, {"num_users": 1}])
def test_leafs_split_by_user_has_users_who_only_test(tmp_path: Path, split: dict) -> None:
    """Of ``-t user`` no user of the test set trains; with ``num_users`` the test set is the same one."""
    shades = np.random.default_rng(0).integers(0, 256, (6, 784))
    image = [[int(v) / 255 for v in row] for row in shades]
    folder = tmp_path / "femnist" / "data"
    leaf(
        folder,
        train={"b": (image[:2], [3, 6]), "a": (image[2:3], [9])},
        test={"d": (image[3:5], [1, 0]), "c": (image[5:], [2])},
    )
    for name in ("femnist", "femnist_digits"):
        found = load(name, tmp_path, **split)
        assert found.user_train.tolist() == ([0, 0, 1] if not split else [0, 0])
        assert found.user_test.tolist() == [2, 2, 3] and found.y_test.tolist() == [1, 0, 2]
        np.testing.assert_allclose(found.x_test.reshape(3, -1), 1 - shades[3:] / 255, atol=1e-6)


LINES = "".join(f"{SPEECH[i % 7 :]}\n" for i in range(12))
WRITTEN = {  # the same lines as other editors write them
    "carriage returns": LINES.replace("\n", "\r\n").encode(),
    "returns alone": LINES.replace("\n", "\r").encode(),
    "a byte-order mark": b"\xef\xbb\xbf" + LINES.encode(),
    "no final end": LINES[:-1].encode(),
    "all of it": b"\xef\xbb\xbf" + LINES[:-1].replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("as_archive", [False, True])
def test_the_same_text_has_the_same_windows_however_its_lines_end(
    tmp_path: Path, written: bytes, as_archive: bool
) -> None:
    def read(content: bytes, place: str) -> tuple[list[str], list[str]]:
        folder = tmp_path / place
        if as_archive:
            folder.mkdir()
            text = np.frombuffer(content, np.uint8)
            np.savez(folder / "shakespeare_roles.npz", text=text, offsets=np.array([0, len(text)]))
        else:
            (folder / "by_play_and_character").mkdir(parents=True)
            (folder / "by_play_and_character" / "HAMLET_GHOST.txt").write_bytes(content)
        found = load("shakespeare", folder, stride=7)
        return tuple(["".join(CHARACTERS[i] for i in row) for row in x] for x in (found.x_train, found.x_test))

    cut = round(0.8 * len(LINES))
    right = tuple([part[i : i + 80] for i in range(0, len(part) - 80, 7)] for part in (LINES[:cut], LINES[cut:]))
    assert read(written, "written") == right
    assert read(LINES.replace("\n", " \n").encode(), "longer") != right  # control: other lines


def test_a_text_of_two_bytes_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "by_play_and_character").mkdir()
    (tmp_path / "by_play_and_character" / "HAMLET_GHOST.txt").write_bytes(LINES.encode("utf-16"))
    with pytest.raises(ValueError, match="shakespeare: got a text with byte 0, must be a text in ASCII"):
        load("shakespeare", tmp_path)


def test_shakespeare_in_leafs_own_formats(tmp_path: Path) -> None:
    text = (SPEECH * 8).replace("q", "\t") + "\n"
    folder = tmp_path / "shakespeare" / "data" / "raw_data" / "by_play_and_character"
    folder.mkdir(parents=True)
    (folder / "HAMLET_GHOST.txt").write_text(text)
    (folder / "HAMLET_EXTRA.txt").write_text("Swear.")
    found = load("shakespeare", tmp_path, stride=1)
    cut = round(0.8 * len(text))
    assert len(found.y_train) == cut - 80 and len(found.y_test) == len(text) - cut - 80  # nothing tested was trained on
    shown = text.replace("\t", " ")
    assert "".join(CHARACTERS[i] for i in found.x_test[0]) == shown[cut : cut + 80]
    assert CHARACTERS[found.y_test[0]] == shown[cut + 80]
    with pytest.raises(ValueError, match="with more than 80 characters both to train and to test"):
        load("shakespeare", tmp_path, test_fraction=0.01)
    other = tmp_path / "other"
    windows = [text[i : i + 80] for i in range(5)], [text[i + 80] for i in range(5)]
    leaf(other, train={"A": windows, "B": windows}, test={"B": windows})
    given = load("shakespeare", other)
    assert given.x_train.shape == (10, 80) and given.user_test.tolist() == [1] * 5
    assert "".join(CHARACTERS[i] for i in given.x_train[6]) == shown[1:81]
    leaf(other, test={"B": ([text[:79], text[:81]], [text[79:81], ""])})  # were windows that begin one too early
    with pytest.raises(ValueError, match="must be 80 characters and the next one"):
        load("shakespeare", other)
    leaf(other, test={"B": ([text[:79]], ["a"])})
    with pytest.raises(ValueError, match="must be 80 characters and the next one"):
        load("shakespeare", other)
    leaf(other, test={"B": ([text[:79] + "\ud800"], ["a"])})  # half a character, which JSON may have: read as a space
    assert CHARACTERS[load("shakespeare", other).x_test[0, -1]] == " "


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([0, 300, 699], "got 0 to 699, must be from 0 to 700"),
        ([1, 300, 700], "got 1 to 700, must be from 0 to 700"),
        ([0, 300, 300, 700], r"got \[300, 300\] for user 1, must rise"),
        ([0, 500, 300, 700], r"got \[500, 300\] for user 1, must rise"),
        (np.array([0, 500, 300, 700], np.uint16), r"got \[500, 300\] for user 1, must rise"),
        ([0.0, 700.0], r"got float64 \(2,\), must be whole numbers"),
        ([700], r"got int64 \(1,\), must be whole numbers"),
    ],
)
def test_offsets_that_would_give_the_wrong_user(tmp_path: Path, offsets: list, says: str) -> None:
    text = np.frombuffer(((SPEECH * 8)[:699] + "\n").encode(), np.uint8)
    np.savez(tmp_path / "shakespeare_roles.npz", text=text, offsets=np.array([0, 700]))
    assert len(load("shakespeare", tmp_path, stride=1).y_train) == 560 - 80
    np.savez(tmp_path / "shakespeare_roles.npz", text=text, offsets=np.array(offsets))
    with pytest.raises(ValueError, match=says):
        load("shakespeare", tmp_path)


def test_a_database_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write("shakespeare", tmp_path, monkeypatch).values()
    for content, says in (
        (lzma.compress(b"no database" * 100), "file is not a database"),
        (originals.database(tmp_path, [("train", "A", b"\xff\xff")]), "cannot be read"),
        (originals.database(tmp_path, [("train", "A", originals.example(other=b"a"))]), "has no snippets"),
        (
            originals.database(tmp_path, [("train", "A", originals.example(snippets=3))]),
            "has no snippets of kind bytes",
        ),
        (
            originals.database(tmp_path, [("train", "A", originals.example(snippets=[]))]),
            "has no snippets of kind bytes",
        ),
        (originals.database(tmp_path, [("train", "A", originals.example(snippets=b"a"))]), "no examples of 'test'"),
    ):
        path.write_bytes(content)
        publish("shakespeare", "database", content, monkeypatch)
        with pytest.raises(ValueError, match=says):
            load("shakespeare", tmp_path)
