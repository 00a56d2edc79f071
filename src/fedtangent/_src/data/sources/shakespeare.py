"""Shakespeare's plays as next-character prediction: by speaking role (LEAF), and as one text (char-rnn).

``x`` [n, 80] int32 are windows of characters as indices into an alphabet, ``y`` [n] the index of the next one; windows
start every ``stride`` characters.

By role (Caldas et al., 2018), all that a role says is one text, whose end is the test set. Roles too short for a window
in both splits are left out. The alphabet is LEAF's 80 characters (any other character is read as a space). The data
folder has one of: TensorFlow Federated's ``shakespeare.sqlite.lzma``, which has a test set; LEAF's
``by_play_and_character/*.txt``, a file for each role; LEAF's JSON, whose windows and test set are used unchanged; or an
archive ``shakespeare*.npz`` of ``text`` uint8, role after role, and ``offsets`` [N + 1], where each role begins.

Of the one text, Karpathy's Tiny Shakespeare, the first 90 % train and the last 5 % test, as in TensorFlow Datasets; its
alphabet is the text's 65 characters.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Num, UInt8

from fedtangent._src import checks
from fedtangent._src.data import files, leaf
from fedtangent._src.data.dataset import TOKENS, Dataset, SourceInfo
from fedtangent._src.data.files import content, places
from fedtangent._src.data.published import Arrays, Published, contents, files_of
from fedtangent._src.data.stored import Found, StoredOptions, entry_of, obtain

WINDOW = 80  # characters
# LEAF's characters, in its order (Caldas et al., 2018); a character that is not among them is read as a space.
CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
NAME = "shakespeare"
NEITHER = "shakespeare*.npz, nor LEAF's by_play_and_character/*.txt, nor LEAF's train/*.json and test/*.json"


@dataclasses.dataclass(frozen=True)
class TextOptions(StoredOptions):
    """Options of the data set ``tiny_shakespeare``: the distance between the beginnings of two windows."""

    stride: int = WINDOW
    """Characters from the start of a window to that of the next one (LEAF: 1)."""


@dataclasses.dataclass(frozen=True)
class RolesOptions(TextOptions):
    """Options of the data set ``shakespeare``: the number of roles and the share of each role's text for testing."""

    num_users: int | None = None
    """Use only this many roles, the first ones."""
    test_fraction: float = 0.2
    """Fraction of each role's text, taken from its end, that is the test set if the files have none."""


def _load(options: RolesOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads windows of 80 characters with the next one; each role of the plays is a user. ``seed`` has no effect."""
    stride = checks.whole("stride", options.stride)
    share = checks.number("test_fraction", options.test_fraction, above=0, below=1)
    stored = obtain(ROLES, options, data_dir, lambda directory: _otherwise(directory, share), NEITHER)
    parts = stored.arrays if "x_train" in stored.arrays else _by_role(stored, stride)
    return _dataset(ROLES, leaf.first_users(parts, options.num_users), CHARACTERS, stored.read_from)


def _dataset(published: Published, parts: Arrays, characters: str, read_from: Path) -> Dataset:
    """Builds the ``Dataset`` of the windows, next characters and roles (if any) in ``parts``, which become int32.

    ``characters`` is the alphabet; its length is the number of classes. ``read_from`` is the folder of the data.
    """
    info = SourceInfo(published.homepage, published.licence, str(read_from))
    arrays = {name: np.asarray(array, np.int32) for name, array in parts.items()}
    user_train = arrays.pop("user_train", None)
    return Dataset(
        name=published.name, num_classes=len(characters), user_train=user_train, info=info, kind=TOKENS, **arrays
    )


def _otherwise(directory: Path, share: float) -> Found | None:
    """Reads the plays if ``directory`` has them in a form other than TensorFlow Federated's file; else returns None.

    ``share`` is the share of each role's text that becomes the test set.
    """
    for read in (_archived, _texts):
        stored = read(directory, share)
        if stored is not None:
            return stored
    folder = leaf.find(directory, NAME)
    if folder is None:
        return None
    return Found(leaf.joined(functools.partial(leaf.users, NAME, folder), _of_role), folder)


def _archived(directory: Path, share: float) -> Found | None:
    path = files.find(directory, NAME)
    if path is None:
        return None
    packed = files.read(NAME, path, ("text", "offsets"))
    text, offsets = packed["text"], packed["offsets"]
    if text.dtype != np.uint8 or text.ndim != 1:
        raise ValueError(f"{NAME}: got {text.dtype} {text.shape} in {path}, text must be uint8 [L]")
    files.owners(f"{NAME}: offsets of {path}", offsets, len(text))
    return Found(_divided([text[a:b] for a, b in itertools.pairwise(offsets)], share), path.parent)


def _texts(directory: Path, share: float) -> Found | None:
    """Reads LEAF's ``by_play_and_character/*.txt``, a text for each role, ordered by file name; None without files.

    ``share`` is the share of each text that becomes the test set.
    """
    for place in places(directory, NAME):
        for folder in (place, place / "data" / "raw_data", place / "raw_data"):
            paths = sorted((folder / "by_play_and_character").glob("*.txt"))
            if paths:
                texts = [np.frombuffer(content(NAME, path), np.uint8) for path in paths]
                return Found(_divided(texts, share), folder)
    return None


def _divided(texts: list[np.ndarray], share: float) -> Arrays:
    """Divides each role's text into training and test text, and joins these to arrays with offsets.

    Lines are normalised by ``_with_plain_lines`` first. The last ``share`` of each text is the test set.
    """
    texts = [_with_plain_lines(text) for text in texts]
    cuts = [round((1 - share) * len(text)) for text in texts]
    both = {
        "train": [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
        "test": [text[cut:] for text, cut in zip(texts, cuts, strict=True)],
    }
    return {name: array for split, parts in both.items() for name, array in _joined(parts, split).items()}


def _with_plain_lines(text: UInt8[np.ndarray, "L"]) -> UInt8[np.ndarray, "M"]:
    """Removes a text's byte-order mark, and ends every line, also the last, with a line feed, as in LEAF's files.

    Raises ``ValueError`` for a text with a byte 0.
    """
    plain = text.tobytes().removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\0" in plain:
        raise ValueError(f"{NAME}: got a text with byte 0, must be a text in ASCII, Latin-1 or UTF-8")
    return np.frombuffer(plain + b"\n" if plain and not plain.endswith(b"\n") else plain, np.uint8)


def _joined(texts: list[np.ndarray], split: str) -> Arrays:
    return {f"text_{split}": np.concatenate(texts), f"offsets_{split}": np.cumsum([0, *map(len, texts)])}


def _by_role(stored: Found, stride: int) -> Arrays:
    """Cuts the roles' texts into windows, one every ``stride`` characters; returns arrays such as ``user_train``.

    Roles with at most 80 characters in either split are left out. Raises ``ValueError`` if these are all roles, or if
    the stored arrays are malformed.
    """
    texts = {}
    for split in ("train", "test"):
        text, offsets = (stored.arrays.get(f"{name}_{split}", np.empty(0)) for name in ("text", "offsets"))
        if text.dtype != np.uint8 or offsets.dtype.kind != "i" or offsets[-1:].tolist() != [len(text)]:
            got = f"a text {text.dtype} {text.shape}, and offsets {offsets.dtype} that end with {offsets[-1:]}"
            raise ValueError(f"{NAME}: got {got} in {stored.read_from}, must be uint8 [L] and whole numbers up to L")
        texts[split] = [_encoded(text[a:b]) for a, b in itertools.pairwise(offsets)]
    long = [min(len(a), len(b)) > WINDOW for a, b in zip(texts["train"], texts["test"], strict=True)]
    if not any(long):
        raise ValueError(
            f"{NAME}: got no role in {stored.read_from} with more than {WINDOW} characters both to train and to test on"
        )
    parts = {}
    for split, roles in texts.items():
        pairs = [_windows(role, stride) for role in itertools.compress(roles, long)]
        parts[f"x_{split}"], parts[f"y_{split}"] = map(np.concatenate, zip(*pairs, strict=True))
        parts[f"user_{split}"] = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    return parts


def _of_role(role: leaf.User) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a role's windows and next characters in LEAF's JSON as indices into the alphabet, uint8 [n, 80] and [n].

    Raises ``ValueError`` if a window has not 80 characters, or a target not one.
    """
    for window, following in zip(role.x, role.y, strict=True):
        is_text = isinstance(window, str) and isinstance(following, str)
        if not is_text or (len(window), len(following)) != (WINDOW, 1):
            raise ValueError(
                f"{NAME}: got {window!r:.40} and {following!r:.10} in {role.path}, must be {WINDOW} characters "
                "and the next one"
            )
    return _encoded(_bytes("".join(role.x))).reshape(-1, WINDOW), _encoded(_bytes("".join(role.y)))


def _bytes(text: str) -> np.ndarray:
    """Returns the Latin-1 byte of each character; 0 for a character without one (LEAF's texts have none)."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")  # JSON may have half a pair
    return np.where(codes < 256, codes, 0).astype(np.uint8)


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads each role's training and test text from TensorFlow Federated's file, and joins snippets by line breaks."""
    roles: dict[str, dict[str, list[bytes]]] = {"train": {}, "test": {}}
    for split, snippets in roles.items():
        for row in leaf.rows(published, paths["database"], split, {"snippets": "bytes_list"}):
            snippets.setdefault(row.client, []).append(bytes(row.features["snippets"]))
    names = sorted(roles["train"].keys() | roles["test"].keys())
    arrays: Arrays = {}
    for split, snippets in roles.items():
        texts = [np.frombuffer(b"\n".join(snippets.get(role, [])), np.uint8) for role in names]
        arrays |= _joined(texts, split)
    return arrays


def _load_tiny(options: TextOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads windows of 80 characters and the next one from Tiny Shakespeare, without users; ``seed`` has no effect."""
    stride = checks.whole("stride", options.stride)
    stored = obtain(TINY, options, data_dir)
    text = {split: stored.arrays.get(f"text_{split}", np.empty(0)) for split in ("train", "test")}
    parts = {}
    for split, part in text.items():
        if part.dtype != np.uint8 or part.ndim != 1 or len(part) <= WINDOW:
            got = f"{part.dtype} {part.shape} to {split} in {stored.read_from}"
            raise ValueError(f"tiny_shakespeare: got {got}, must be a text, uint8 [L] with L > {WINDOW}")
        parts[f"x_{split}"], parts[f"y_{split}"] = _windows(_encoded(part, TINY_CHARACTERS), stride)
    return _dataset(TINY, parts, TINY_CHARACTERS, stored.read_from)


def _read_tiny(published: Published, paths: Mapping[str, Path]) -> Arrays:
    text = np.frombuffer(contents(published, "text", paths["text"]), np.uint8)
    cut = int(0.9 * len(text))
    last = cut + int(0.5 * (len(text) - cut))
    return {**_joined([text[:cut]], "train"), **_joined([text[last:]], "test")}


def _encoded(text: UInt8[np.ndarray, "L"], characters: str = CHARACTERS) -> UInt8[np.ndarray, "L"]:
    """Computes the index in ``characters`` of each byte, uint8 [L]; an unknown byte gets the index of the space."""
    table = np.full(256, characters.index(" "), np.uint8)
    table[np.frombuffer(characters.encode("latin-1"), np.uint8)] = np.arange(len(characters), dtype=np.uint8)
    return table[text]


def _windows(codes: Num[np.ndarray, "L"], stride: int) -> tuple[Num[np.ndarray, "n 80"], Num[np.ndarray, "n"]]:
    """Returns windows [n, 80] of a text [L], one every ``stride`` characters, and the characters [n] that follow.

    A text of at most 80 characters has no window (n is 0).
    """
    if len(codes) <= WINDOW:
        return np.zeros((0, WINDOW), codes.dtype), np.zeros(0, codes.dtype)
    both = np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)[::stride]
    return both[:, :WINDOW], both[:, WINDOW]


TEXT = (("text", ((None,), "uint8")),)  # ``Published.example``: one text of any length

ROLES = Published(
    name=NAME,
    url=leaf.URL,
    files=files_of(NAME),
    read=_read,
    example=TEXT,
    num_classes=len(CHARACTERS),
    description="the next character of Shakespeare's plays by speaking role, after 80",
    homepage="https://leaf.cmu.edu",
    licence="the plays are in the public domain; LEAF is BSD-2-Clause",
    paper=leaf.PAPER,
)

TINY_CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

TINY = Published(
    name="tiny_shakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
    files=files_of("tiny_shakespeare"),
    read=_read_tiny,
    example=TEXT,
    num_classes=len(TINY_CHARACTERS),
    description="the next character of a million from Shakespeare's plays, after 80",
    homepage="https://github.com/karpathy/char-rnn",
    licence="MIT (char-rnn); the plays are in the public domain",
    paper="karpathy2015",
)

ENTRIES = (
    entry_of(ROLES, _load, RolesOptions, "mcmahan2017", kind=TOKENS, partition="by_user"),
    entry_of(TINY, _load_tiny, TextOptions, kind=TOKENS, partition="iid"),
)
