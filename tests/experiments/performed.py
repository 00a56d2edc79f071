"""Runs an experiment as the command does, small, in this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedtangent._src import entries
from fedtangent._src.experiments.lab import Outcome
from fedtangent._src.experiments.lab.runner import Request, Study, perform, prepare_study
from fedtangent._src.output.files import Figures, Metric


def study_of(
    name: str,
    changes: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1),
    dataset: str | None = None,
    data_dir: Path | None = None,
) -> Study:
    """The checked study; of two ``changes`` of one setting the later counts."""
    last = tuple({change.partition("=")[0]: change for change in changes}.values())
    return prepare_study(entries.choose("experiments", name), Request("smoke", seeds, dataset, data_dir, last))


def performed(
    name: str, changes: tuple[str, ...], folder: Path, seeds: tuple[int, ...] = (0, 1), dataset: str | None = None
) -> tuple[Outcome, list[Metric]]:
    """What came out, and the metrics that were kept; figures are in ``folder / "figures"``.

    The files of a ``dataset`` are in ``folder``.
    """
    kept: list[Metric] = []
    figures, data_dir = Figures(folder / "figures"), None if dataset is None else folder
    study = dataclasses.replace(study_of(name, changes, seeds, dataset, data_dir), keep=kept.extend, figures=figures)
    found = perform(entries.choose("experiments", name), study)
    assert all(len(row) == len(sheet.columns) for sheet in found.sheets for row in sheet.rows)
    assert all(path.stat().st_size > 10_000 for path in figures.folder.glob("*"))
    return found, kept
