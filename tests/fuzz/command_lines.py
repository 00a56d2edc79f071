"""Command lines, drawn from the commands' own options, and files of every kind for them."""

from __future__ import annotations

import os
import shlex
import shutil
import typing
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from case import Case, drawn
from hypothesis import strategies as st

from fedtangent._src import cli, entries
from fedtangent._src.cli import commands, main
from fedtangent._src.cli.arguments import Option
from fedtangent._src.engine import description

WHOLE = ("0", "1", "2", "3", "-1", "7", "100", "2147483647", "2147483648", "1" + 30 * "0", "1.5", "nan")
REAL = ("0", "-0.0", "0.1", "0.5", "1", "2", "1e-320", "1e308", "-1", "inf", "-inf", "nan", "1e400")
WORDS = (
    "",
    " ",
    "x",
    "None",
    "1_0",
    "0x10",
    "१२",
    "naïve",
    "🦆",
    "a b",
    "--",
    "-",
    "../x",
    "%s",
    "{}",
    "qsgd:8",
    "qsgd:inf",
)
SMALL = {"num_rounds": "2", "num_train": "80", "num_test": "20", "num_clients": "4", "clients_per_round": "2"}
SMALL |= {"widths": "6", "width": "4", "depth": "1", "channels": "2", "scale": "smoke"}  # of a run that is to end soon


def write_inputs(folder: Path) -> None:
    """Files that someone may name: one that is right, and what goes wrong with files."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    np.savez_compressed(folder / "right.npz", x=x, y=y, users=np.arange(60) % 4, x_test=x[:9], y_test=y[:9])
    np.savez(folder / "short.npz", x=x, y=y[:-1])
    np.savez(folder / "nan.npz", x=np.where(x > 2, np.nan, x), y=y)
    np.savez(folder / "objects.npz", x=np.array([{}, []], object), y=y[:2])
    np.save(folder / "array.npy", x)
    shutil.copy(folder / "array.npy", folder / "array.npz")
    right = bytearray((folder / "right.npz").read_bytes())
    (folder / "half.npz").write_bytes(right[: len(right) // 2])
    right[len(right) // 3] ^= 0x40
    (folder / "flipped.npz").write_bytes(right)
    (folder / "empty.npz").touch()
    (folder / "text.npz").write_text("x,y\n1,2\n")
    with zipfile.ZipFile(folder / "members.npz", "w") as packed:
        packed.writestr("x.npy", "no array")
    os.mkfifo(folder / "pipe.npz")
    (folder / "folder.npz").mkdir()
    (folder / "config.json").write_text('{"command": "train", "options": {"algorithm": "fed_avg", "num_rounds": "?"}}')
    (folder / "list.json").write_text("[]")


def texts(one: Option, files: list[str]) -> st.SearchStrategy[str]:
    """A value of an option as it is written, more often than not of its kind."""
    kinds = {*typing.get_args(one.type), one.type}
    own: tuple[str, ...] = WORDS
    if one.name in description.CHOICES:
        own = tuple(entries.catalogue(description.CHOICES[one.name]))
        own += tuple(files) if one.name == "dataset" else ()
    elif int in kinds:
        own = WHOLE
    elif float in kinds:
        own = REAL
    elif Path in kinds:
        own = (*files, "new", "new/folder", "/dev/null", "/proc/none", "~nobody/x")
    elif isinstance(one.default, str) and one.default:
        own = (one.default,) * 3 + WORDS
    return st.one_of(*3 * [st.sampled_from(own)], st.sampled_from(WORDS + WHOLE + REAL), st.text(max_size=6))


@st.composite
def command_lines(draw: Any, files: list[str]) -> list[str]:
    """A command and some of its options, small where nothing else is drawn."""
    rarely = st.integers(0, 19).map(lambda n: n == 0)
    name = draw(st.sampled_from(["train"] * 8 + ["predict"] * 4 + ["compare"] * 3 + list(cli.summaries())))
    if draw(rarely):
        return draw(st.lists(st.sampled_from([name, *WORDS, "--help", "--version", "--seed"]), max_size=4))
    chosen = {}
    for what, kind in description.CHOICES.items():
        if what != "base" and draw(st.integers(0, 3)) == 0:
            chosen[what] = draw(st.sampled_from(tuple(entries.catalogue(kind))))
    if name == "compare" and draw(st.integers(0, 9)):
        chosen.setdefault("algorithm", "fed_avg")
    command = commands.find(name, *(f"--{what}" for what in chosen))
    if not command.describes:
        chosen = {}
    try:
        options = commands.options_by_name(commands.groups_of(command, chosen))
    except ValueError:
        options = commands.options_by_name(commands.groups_of(command, {}))
    found = dict.fromkeys(option for option in SMALL if option in options)
    given_ = {f"--{option}": [SMALL[option]] for option in found} | {f"--{what}": [v] for what, v in chosen.items()}
    positional: list[str] = []
    for one in draw(st.lists(st.sampled_from(list(options.values())), max_size=4, unique_by=lambda one: one.name)):
        values = draw(st.lists(texts(one, files), min_size=1, max_size=3 if one.several else 1))
        if one.positional:
            positional += values
        elif one.type is bool:
            given_[draw(st.sampled_from([f"--{one.name}", f"--no-{one.name}"]))] = []
        else:
            given_[f"--{one.name}"] = values
    if any(one.positional for one in options.values()) and not positional and not draw(rarely):
        kind = next(one.name for one in options.values() if one.positional)
        positional = [draw(st.sampled_from(_positional(kind, files)))]
    words = [word for option, values in given_.items() for word in (option.replace("_", "-"), *values)]
    return [name, *positional, *words]


def _positional(kind: str, files: list[str]) -> tuple[str, ...]:
    known = {"experiment": "experiments", "id": "experiments", "name": "datasets"}
    return tuple(entries.catalogue(known[kind])) if kind in known else (*entries.KINDS, *files)


def lines(number: int, start: int, inputs: Path) -> list[Case]:
    """Cases of so many command lines."""
    files = sorted(str(path) for path in inputs.iterdir())
    words = drawn(command_lines(files), number, start)
    return [Case(shlex.join(line), lambda line=line: _line(line)) for line in words if not _has_null(line)]


def _line(words: list[str]) -> int:
    main.main(words)
    return 0


def _has_null(line: list[str]) -> bool:  # which no command line can have
    return any("\0" in word or any(0xD800 <= ord(c) <= 0xDFFF for c in word) for word in line)
