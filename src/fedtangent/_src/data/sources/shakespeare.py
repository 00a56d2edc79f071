"""Shakespeare's plays as next-character prediction: by speaking role (LEAF), and as one text (char-rnn)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import archive, leaf, tff
from fedtangent._src.data.dataset import TOKENS, Dataset, DatasetEntry, SourceInfo
from fedtangent._src.data.files import content, places
from fedtangent._src.data.published import Arrays, Published, PublishedFile, contents
from fedtangent._src.data.stored import Found, StoredOptions, obtain
from fedtangent._src.data.text import CHARACTERS, WINDOW, encoded, windows

NAME = "shakespeare"
NEITHER = "shakespeare*.npz, nor LEAF's by_play_and_character/*.txt, nor LEAF's train/*.json and test/*.json"


@dataclasses.dataclass(frozen=True)
class TextOptions(StoredOptions):
    """Options of tiny_shakespeare."""

    stride: int = WINDOW
    """Characters from the start of a window to that of the next one (LEAF: 1)."""


@dataclasses.dataclass(frozen=True)
class RolesOptions(TextOptions):
    """Options of shakespeare."""

    num_users: int | None = None
    """Use only this many roles, the first ones."""
    test_fraction: float = 0.2
    """Fraction of each role's text, taken from its end, to test on, where the files have no test set."""


def _load(options: RolesOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads windows of 80 characters and the character that follows; each speaking role is a user (LEAF, 2018).

    ``x`` [n, 80] int32 are indices into LEAF's 80 characters (any other character is read as a space), ``y`` [n] the
    index of the next one (Caldas et al., 2018). A role's speeches are joined, and windows start every ``stride``
    characters of that text. Its end is the test set, so that no test character was seen in training; roles too short
    for a window in both are left out. Nothing is random.

    The data folder has one of: TensorFlow Federated's ``shakespeare.sqlite.lzma``, with its own test set; LEAF's
    ``by_play_and_character/*.txt``, a file for each role; LEAF's JSON, whose windows and test set are used unchanged;
    or an archive ``shakespeare*.npz`` of ``text`` uint8, role after role, and ``offsets`` [N + 1].
    """
    stride = checks.whole("stride", options.stride)
    share = checks.number("test_fraction", options.test_fraction, above=0, below=1)
    found = obtain(ROLES, options, data_dir, lambda directory: _otherwise(directory, share), NEITHER)
    parts = found.arrays if "x_train" in found.arrays else _by_role(found, stride)
    return _dataset(ROLES, leaf.first_users(parts, options.num_users), CHARACTERS, found.read_from)


def _dataset(published: Published, parts: Arrays, characters: str, read_from: Path) -> Dataset:
    """Builds the data set of the uint8 windows in ``parts``, as int32."""
    info = SourceInfo(published.homepage, published.licence, str(read_from))
    arrays: dict[str, Any] = {"user_train": None} | {name: np.asarray(a, np.int32) for name, a in parts.items()}
    return Dataset(name=published.name, num_classes=len(characters), info=info, kind=TOKENS, **arrays)


def _otherwise(directory: Path, share: float) -> Found | None:
    """Reads the texts or windows in ``directory`` in one of the other forms that ``_load`` names; else returns None."""
    for kind in (_archived, _texts):
        found = kind(directory, share)
        if found is not None:
            return found
    folder = leaf.find(directory, NAME)
    if folder is None:
        return None
    return Found(leaf.joined(NAME, "role", functools.partial(leaf.users, NAME, folder), _of_role), folder)


def _archived(directory: Path, share: float) -> Found | None:
    path = archive.find(directory, NAME)
    if path is None:
        return None
    held = archive.read(NAME, path, ("text", "offsets"))
    text, offsets = held["text"], held["offsets"]
    if text.dtype != np.uint8 or text.ndim != 1:
        raise ValueError(f"{NAME}: got {text.dtype} {text.shape} in {path}, text must be uint8 [L]")
    archive.owners(f"{NAME}: offsets of {path}", offsets, len(text))
    return Found(_divided([text[a:b] for a, b in itertools.pairwise(offsets)], share), path.parent)


def _texts(directory: Path, share: float) -> Found | None:
    """Reads LEAF's ``by_play_and_character/*.txt``, one text per role, in the order of the files' names; or None."""
    for place in places(directory, NAME):
        for folder in (place, place / "data" / "raw_data", place / "raw_data"):
            paths = sorted((folder / "by_play_and_character").glob("*.txt"))
            if paths:
                texts = [np.frombuffer(content(NAME, path), np.uint8) for path in paths]
                return Found(_divided(texts, share), folder)
    return None


def _divided(texts: list[np.ndarray], share: float) -> Arrays:
    """Divides each role's text in two: the last ``share`` of it is for the test set."""
    cuts = [round((1 - share) * len(text)) for text in texts]
    both = {
        "train": [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
        "test": [text[cut:] for text, cut in zip(texts, cuts, strict=True)],
    }
    return {name: array for split, parts in both.items() for name, array in _joined(parts, split).items()}


def _joined(texts: list[np.ndarray], split: str) -> Arrays:
    return {f"text_{split}": np.concatenate(texts), f"offsets_{split}": np.cumsum([0, *map(len, texts)])}


def _by_role(found: Found, stride: int) -> Arrays:
    """Cuts windows of each role that has one in both splits; raises ``ValueError`` if there is no such role."""
    texts = {}
    for split in ("train", "test"):
        text, offsets = (found.arrays.get(f"{name}_{split}", np.empty(0)) for name in ("text", "offsets"))
        if text.dtype != np.uint8 or offsets.dtype.kind != "i" or offsets[-1:].tolist() != [len(text)]:
            raise ValueError(f"{NAME}: got {text.dtype} {text.shape} in {found.read_from}, must be texts by role")
        texts[split] = [encoded(text[a:b]) for a, b in itertools.pairwise(offsets)]
    long = [min(len(a), len(b)) > WINDOW for a, b in zip(texts["train"], texts["test"], strict=True)]
    if not any(long):
        raise ValueError(f"{NAME}: got no role in {found.read_from} with more than {WINDOW} characters to test on")
    parts = {}
    for split, roles in texts.items():
        made = [windows(role, stride) for role, kept in zip(roles, long, strict=True) if kept]
        parts[f"x_{split}"] = np.concatenate([x for x, _ in made])
        parts[f"y_{split}"] = np.concatenate([y for _, y in made])
        parts[f"user_{split}"] = np.repeat(np.arange(len(made)), [len(y) for _, y in made])
    return parts


def _of_role(role: leaf.User) -> tuple[np.ndarray, np.ndarray]:
    """Encodes LEAF's windows, uint8 [n, 80], and the next characters, [n]; raises ``ValueError`` for malformed ones."""
    for window, following in zip(role.x, role.y, strict=True):
        is_text = isinstance(window, str) and isinstance(following, str)
        if not is_text or (len(window), len(following)) != (WINDOW, 1):
            raise ValueError(
                f"{NAME}: got {window!r:.40} and {following!r:.10} in {role.path}, must be {WINDOW} characters "
                "and the next one"
            )
    return encoded(_bytes("".join(role.x))).reshape(-1, WINDOW), encoded(_bytes("".join(role.y)))


def _bytes(text: str) -> np.ndarray:
    """Returns the Latin-1 byte of each character; 0 for a character without one (LEAF's texts have none)."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")  # JSON may have half a pair
    return np.where(codes < 256, codes, 0).astype(np.uint8)


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads each role's text of both splits: its snippets, joined by line breaks."""
    roles: dict[str, dict[str, list[bytes]]] = {"train": {}, "test": {}}
    for split, held in roles.items():
        for row in tff.rows(published, paths["database"], split, {"snippets": "bytes_list"}):
            held.setdefault(row.client, []).append(row.features["snippets"])
    names = sorted(roles["train"].keys() | roles["test"].keys())
    return {
        name: array
        for split, held in roles.items()
        for name, array in _joined(
            [np.frombuffer(b"\n".join(held.get(role, [])), np.uint8) for role in names], split
        ).items()
    }


def _load_tiny(options: TextOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads windows of 80 characters and the next one from Karpathy's Tiny Shakespeare, a million characters.

    As in TFDS the first 90 % train and the last 5 % test; its validation set, between them, is not used. ``x`` [n, 80]
    int32 are indices into the text's 65 characters, sorted; windows start every ``stride`` characters. No users.
    """
    stride = checks.whole("stride", options.stride)
    found = obtain(TINY, options, data_dir)
    text = {split: found.arrays.get(f"text_{split}", np.empty(0)) for split in ("train", "test")}
    parts = {}
    for split, part in text.items():
        if part.dtype != np.uint8 or part.ndim != 1 or len(part) <= WINDOW:
            raise ValueError(f"tiny_shakespeare: got {part.dtype} {part.shape} in {found.read_from}, must be a text")
        parts[f"x_{split}"], parts[f"y_{split}"] = windows(encoded(part, TINY_CHARACTERS), stride)
    return _dataset(TINY, parts, TINY_CHARACTERS, found.read_from)


def _read_tiny(published: Published, paths: Mapping[str, Path]) -> Arrays:
    text = np.frombuffer(contents(published, "text", paths["text"]), np.uint8)
    cut = int(0.9 * len(text))
    last = cut + int(0.5 * (len(text) - cut))
    return {**_joined([text[:cut]], "train"), **_joined([text[last:]], "test")}


TEXT = (("text", ((None,), "uint8")),)  # ``Published.example``: one text of any length

ROLES = Published(
    name=NAME,
    url=tff.URL,
    files={
        "database": PublishedFile(
            "shakespeare.sqlite.lzma", 1329828, "d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4"
        )
    },
    read=_read,
    example=TEXT,
    num_classes=len(CHARACTERS),
    description="the next character of Shakespeare's plays by speaking role, after 80",
    homepage="https://leaf.cmu.edu",
    licence="the plays are in the public domain; LEAF is BSD-2-Clause",
    citation=leaf.CITATION,
)

TINY_CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

TINY = Published(
    name="tiny_shakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
    files={
        "text": PublishedFile("input.txt", 1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
    },
    read=_read_tiny,
    example=TEXT,
    num_classes=len(TINY_CHARACTERS),
    description="the next character of a million from Shakespeare's plays, after 80",
    homepage="https://github.com/karpathy/char-rnn",
    licence="MIT (char-rnn); the plays are in the public domain",
    citation="""@misc{karpathy2015,
  title = {char-rnn},
  author = {Karpathy, Andrej},
  howpublished = {https://github.com/karpathy/char-rnn},
  year = {2015},
}""",
)

ENTRIES = (
    DatasetEntry(
        ROLES.name,
        ROLES.description,
        _load,
        RolesOptions,
        ("mcmahan2017", leaf.CITATION),
        kind=TOKENS,
        partition="by_user",
        published=ROLES,
    ),
    DatasetEntry(
        TINY.name,
        TINY.description,
        _load_tiny,
        TextOptions,
        (TINY.citation,),
        kind=TOKENS,
        partition="iid",
        published=TINY,
    ),
)
