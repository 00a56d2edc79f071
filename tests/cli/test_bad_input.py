"""Bad input: one line on standard error, exit code 2, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.cli import compare, train
from fedtangent._src.data import Dataset, cache
from fedtangent._src.engine import memory
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.theory import gp_limit

COMPARE = {
    "case": (["--case", "nope"], "allowed are digits, fashion_mnist, sine"),
    "one case of two": (["--case", "digits", "nope"], "allowed are digits, fashion_mnist, sine"),
    "no case": (["--case"], "allowed are digits, fashion_mnist, sine"),
    "scale": (["--scale", "huge"], "allowed are smoke, default, paper"),
    "seed": (["--seed", "-1"], "seed: got -1"),
    "seed too large": (["--seed", str(2**70)], "seed"),
    "no such folder": (["--case", "fashion_mnist", "--data-dir", "nowhere"], "data_dir: got nowhere, must be a folder"),
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails at once where the program starts to work on what it should have refused."""

    def started(*args: object, **options: object) -> None:
        pytest.fail("the work has started")

    monkeypatch.setattr(train, "simulate_rounds", started)
    monkeypatch.setattr(compare, "run", started)


def assert_refused(ended, folder: Path, says: str) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith("fedtangent: error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.endswith("\n")
    assert says in ended.err
    assert ended.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("arguments", "says"), COMPARE.values(), ids=COMPARE)
def test_an_option_out_of_range(run: Callable, folder: Path, arguments: list[str], says: str) -> None:
    assert_refused(run("compare", "--output", "out", *arguments), folder, says)


@pytest.mark.usefixtures("no_work")
def test_a_run_that_does_not_fit_into_memory(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 10_000)
    small = ["--num-train", "40", "--num-clients", "2", "--widths", "4", "--mapping", "scan"]
    assert_refused(run("train", *small, "--output", "out"), folder, "mapping: scan needs ")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", [["train", "--dataset", "mnist"], ["compare", "--case", "fashion_mnist"]])
def test_a_data_folder_without_the_files(
    run: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(run(*command, "--data-dir", empty, "--output", "out"), folder, "train-images-idx3-ubyte.gz")
    monkeypatch.setenv("FEDTANGENT_DATA", str(empty))
    assert_refused(run(*command, "--output", "out"), folder, "train-images-idx3-ubyte.gz")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("harm", ["bytes", "manifest", "missing"])
def test_a_corrupted_cache(run: Callable, folder: Path, tmp_path: Path, harm: str) -> None:
    place = tmp_path / "cache" / "mnist"
    images, labels = np.zeros((30, 28, 28), np.uint8), np.arange(30, dtype=np.uint8) % 10
    cache.write(place, {"x_train": images, "y_train": labels, "x_test": images[:5], "y_test": labels[:5]})
    broken = place / ("manifest.json" if harm == "manifest" else "x_train.npy")
    if harm == "missing":
        broken.unlink()
    else:
        content = bytearray(broken.read_bytes())
        content[-5 if harm == "bytes" else 0] ^= 1
        broken.write_bytes(content)
    ended = run("train", "--dataset", "mnist", "--num-clients", "2", "--output", "out")
    assert_refused(ended, folder, str(broken))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("below", [".", "sub"])
@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_output_that_is_a_file(run: Callable, folder: Path, command: str, below: str) -> None:
    (folder / "file").write_text("mine")
    case = ["--case", "digits", "--scale", "smoke"] if command == "compare" else ["--num-rounds", "1"]
    ended = run(command, *case, "--output", Path("file") / below)
    assert (folder / "file").read_text() == "mine"
    (folder / "file").unlink()
    assert_refused(ended, folder, "output")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("case", "part", "value"), [("digits", "x_train", np.nan), ("digits", "x_test", np.inf), ("sine", "y_test", np.nan)]
)
def test_data_that_are_not_finite(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str, part: str, value: float
) -> None:
    load = data.load

    def poisoned(*args: object, **options: object) -> Dataset:
        loaded = load(*args, **options)  # type: ignore[arg-type]
        array = np.array(getattr(loaded, part))
        array[4, 0] = value
        return loaded._replace(**{part: array})

    monkeypatch.setattr(data, "load", poisoned)
    assert_refused(run("compare", "--case", case, "--scale", "smoke", "--output", "out"), folder, "finite")


def test_a_singular_kernel_where_a_limit_is_asked() -> None:
    phi = np.random.default_rng(0).standard_normal((8, 3))
    k = phi @ phi.T
    with pytest.raises(SingularKernelError, match="kernel of the 6 training rows is singular"):
        gp_limit(
            KernelBlocks(k[:6, :6], k[6:, :6], k[:6, :6], k[6:, :6], k[6:, 6:]), np.ones((6, 1)), max_relative_jitter=0
        )
    assert issubclass(SingularKernelError, ValueError)
