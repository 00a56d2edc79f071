"""Regression on six 3-D printers: how strongly a print head vibrates at its speed (Table VIII of Fed-ensemble, 2024).

``x`` [n, 7] is the average nominal speed divided by 50, as in the authors' code, and the printer as a one-hot vector.
``y`` [n, 1] is ``sqrt(a_x^2 + a_y^2)`` of the root mean squares of the acceleration along two axes; the authors state
no units. The test set is the prints at the commanded speed 30, 15 rows of each printer; the other eleven speeds train,
165 rows of each printer. The user is the printer.

The data folder has the 72 original files ``FL_Dataset_Printer<1..6>_Speed<10..120>.csv``, which have no header, or an
archive ``printer*.npz`` of ``data`` [6, 12, 15, 3]: printer, speed, row, and the three numbers of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtangent._src import checks
from fedtangent._src.data import files
from fedtangent._src.data.dataset import Dataset, SourceInfo
from fedtangent._src.data.files import reading
from fedtangent._src.data.published import Arrays, Published, files_of, verify
from fedtangent._src.data.stored import Found, StoredOptions, entry_of, obtain

PRINTERS, SPEEDS, ROWS = 6, tuple(range(10, 121, 10)), 15
TEST_SPEED = 30
UNIT = 50.0  # the speed is divided by it, as in the authors' code
COLUMNS = "average speed and the acceleration along two axes"


@dataclasses.dataclass(frozen=True)
class PrintersOptions(StoredOptions):
    """Options of the data set ``printers``: the dtype of the numbers."""

    dtype: str = "float64"
    """Dtype of inputs and targets: float32 or float64."""


def _load(options: PrintersOptions, data_dir: Path | None, seed: int) -> Dataset:
    """Loads the inputs (speed, printer) and targets (acceleration) of all prints, with the printer as user.

    ``seed`` has no effect.
    """
    dtype = checks.dtype(options.dtype, "float32", "float64")
    stored = obtain(PUBLISHED, options, data_dir, _archived, "printer*.npz")
    for split, count in (("train", PRINTERS * (len(SPEEDS) - 1) * ROWS), ("test", PRINTERS * ROWS)):
        shapes = [stored.arrays.get(f"{name}_{split}", np.empty(0)).shape for name in ("x", "y", "user")]
        if shapes != [(count, 1 + PRINTERS), (count, 1), (count,)]:
            must = f"must be x [{count}, {1 + PRINTERS}], y [{count}, 1] and user [{count}] to {split}"
            raise ValueError(f"printers: got shapes {shapes} in {stored.read_from}, {must}")
    info = SourceInfo(PUBLISHED.homepage, PUBLISHED.licence, str(stored.read_from))
    x_train, y_train, x_test, y_test = (
        stored.arrays[name].astype(dtype) for name in ("x_train", "y_train", "x_test", "y_test")
    )
    user_train, user_test = (stored.arrays[f"user_{split}"].astype(np.int32) for split in ("train", "test"))
    return Dataset("printers", x_train, y_train, x_test, y_test, 0, user_train, info, user_test=user_test)


def _read(published: Published, paths: Mapping[str, Path]) -> Arrays:
    """Reads the 72 original files of the printers, at ``paths`` by role, and returns the arrays of both splits."""
    data = np.empty((PRINTERS, len(SPEEDS), ROWS, 3))
    for role, path in paths.items():
        verify(published, role, path)
        printer, speed = (int(number) for number in role.split())
        with reading("printers", path):
            lines = [line.split(",") for line in path.read_text(encoding="ascii").splitlines()]
            rows = np.array(lines, np.float64)
        if rows.shape != (ROWS, 3):
            raise ValueError(f"printers: got {rows.shape} in {path}, must be {ROWS} rows of {COLUMNS}")
        data[printer - 1, SPEEDS.index(speed)] = rows
    return _examples(data, "the published files")


def _archived(directory: Path) -> Found | None:
    path = files.find(directory, "printer")
    if path is None:
        return None
    data = files.read("printers", path, ["data"])["data"]
    if data.shape != (PRINTERS, len(SPEEDS), ROWS, 3) or data.dtype.kind != "f":
        raise ValueError(
            f"printers: got {data.dtype} {data.shape} in {path}, data must be floating [6, 12, 15, 3]: printers, "
            f"speeds, rows of {COLUMNS}"
        )
    return Found(_examples(data.astype(np.float64), str(path)), path.parent)


def _examples(data: np.ndarray, where: str) -> Arrays:
    """Builds the arrays of both splits from ``data`` [printer, speed, row, 3].

    Raises ``ValueError`` for NaN or infinity; ``where`` names the origin of ``data`` in the message.
    """
    checks.finite(f"printers: {where}", data)
    user = np.broadcast_to(np.arange(PRINTERS)[:, None, None], data.shape[:3])
    x = np.concatenate([data[..., :1] / UNIT, np.eye(PRINTERS)[user]], axis=-1)
    y = np.hypot(data[..., 1], data[..., 2])
    arrays: Arrays = {}
    for split, speeds in (("train", np.not_equal(SPEEDS, TEST_SPEED)), ("test", np.equal(SPEEDS, TEST_SPEED))):
        arrays[f"x_{split}"] = x[:, speeds].reshape(-1, 1 + PRINTERS)
        arrays[f"y_{split}"] = y[:, speeds].reshape(-1, 1)
        arrays[f"user_{split}"] = user[:, speeds].reshape(-1).astype(np.int32)
    return arrays


PUBLISHED = Published(
    name="printers",
    url="https://raw.githubusercontent.com/UMDataScienceLab/Personalized_FL_with_DA/"
    "cf061fdc6fa94a6766e22db1a1154eefb7187ec8/printer_dataset/Data/",
    files=files_of("printers"),  # a role is the printer and the commanded speed, such as "1 10"
    read=_read,
    example=(("x", ((1 + PRINTERS,), "float64")), ("y", ((1,), "float64")), ("user", ((), "int32"))),
    num_classes=0,
    description="acceleration of six 3-D printers' heads by speed, speed 30 to test",
    homepage="https://github.com/UMDataScienceLab/Personalized_FL_with_DA",
    licence="none stated (University of Michigan)",
    paper="shi2023",
    stem="printer",
)

ENTRIES = (entry_of(PUBLISHED, _load, PrintersOptions, "shi2024", partition="by_user"),)
