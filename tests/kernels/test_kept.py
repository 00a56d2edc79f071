"""Kernels of images are read from disk by the second call, and only where they are the same kernel."""

import os
from pathlib import Path

import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.kernels import large
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.models.kernels import AnalyticKernel

from ..nightly import nightly

IMAGES = np.random.default_rng(0).normal(size=(14, 4, 4, 1))
TRAIN, TEST = IMAGES[:10], IMAGES[10:]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnalyticKernel, "side", lambda self, x: 4)


def kernel(depth: int = 1) -> AnalyticKernel:
    analytic = ft.models.ntk_cnn((4, 4, 1), 2, width=8, depth=depth).kernel
    assert isinstance(analytic, AnalyticKernel)
    return analytic


def blocks(folder: Path, analytic: AnalyticKernel, train: np.ndarray = TRAIN) -> tuple[KernelBlocks, bool]:
    """The blocks, and whether they were computed."""
    calls: list[int] = []

    def compute() -> KernelBlocks:
        calls.append(1)
        return kernel_blocks(analytic, train, TEST)

    return large.kept_blocks(analytic, train, TEST, folder, compute), bool(calls)


def same(a: KernelBlocks, b: KernelBlocks) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]


def test_second_call_reads_the_same_bits(tmp_path: Path) -> None:
    first, computed = blocks(tmp_path / "new", kernel())
    again, computed_again = blocks(tmp_path / "new", kernel())
    assert computed and not computed_again
    assert same(first, again) and same(first, kernel_blocks(kernel(), TRAIN, TEST))
    assert not np.asarray(again.ntk_train).flags.writeable


def test_another_network_and_other_images_have_files_of_their_own(tmp_path: Path) -> None:
    first, _ = blocks(tmp_path, kernel())
    deeper, computed = blocks(tmp_path, kernel(2))
    assert computed and not same(first, deeper)
    moved = TRAIN + np.eye(1, TRAIN.size).reshape(TRAIN.shape) * 1e-9  # one pixel of one image
    assert blocks(tmp_path, kernel(), moved)[1]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", nightly(["cut", "empty", "changed"], ["cut"]))
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage: str) -> None:
    first, _ = blocks(tmp_path, kernel())
    (path,) = tmp_path.iterdir()
    raw = path.read_bytes()
    path.write_bytes(
        {"cut": raw[:-30], "empty": b"", "changed": raw[:700] + bytes([raw[700] ^ 255]) + raw[701:]}[damage]
    )
    again, computed = blocks(tmp_path, kernel())
    assert computed and same(first, again)
    assert not blocks(tmp_path, kernel())[1]


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, computed = blocks(tmp_path / "file" / "below", kernel())
    assert computed and same(first, kernel_blocks(kernel(), TRAIN, TEST))


def test_least_recently_used_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(tmp_path, kernel())
    (oldest,) = tmp_path.iterdir()
    os.utime(oldest, (1, 1))
    monkeypatch.setattr(large, "MOST_BYTES", int(1.5 * oldest.stat().st_size))
    blocks(tmp_path, kernel(2))
    (left,) = tmp_path.iterdir()
    assert left != oldest


def test_kernels_without_tiles_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnalyticKernel, "side", lambda self, x: 100)
    assert blocks(tmp_path, kernel())[1] and not list(tmp_path.iterdir())
