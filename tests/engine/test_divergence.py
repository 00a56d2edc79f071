"""A run whose global model diverges ends at the last good round, whatever it is looked at and saved in between."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtangent._src.engine.checkpoints import Checkpoints
from fedtangent._src.engine.history import Run
from fedtangent._src.engine.loop import all_finite, broken_round
from fedtangent._src.types import Cohort

from . import stateful


def run(num_rounds: int = 20, **options: Any) -> Run:
    """After seven rounds the models are finite, after eight they are not."""
    given: dict[str, Any] = {"data": stateful.data(breaking=True), "every": 5, "stop_on_divergence": True}
    return stateful.run(num_rounds, **given | options)


@functools.cache
def diverged() -> Run:
    return run()


def test_it_ends_at_the_last_good_round() -> None:
    ended = diverged()
    assert ended.status == "diverged at round 8"
    assert [e.round for e in ended.history.evaluations] == [0, 5, 7]
    assert len(ended.history.rounds["loss"]) == int(ended.state.round) == 7
    good = run(7, stop_on_divergence=False)
    assert stateful.bits(ended) == stateful.bits(good)
    let = run(stop_on_divergence=False)
    assert let.status == "diverged by round 9" and not all_finite(let.state)  # its clients' losses are from there on


@pytest.mark.parametrize("every", [1, 3, None])
def test_how_often_it_is_saved_does_not_matter(tmp_path: Path, every: int | None) -> None:
    for resume in (False, True):
        ended = run(checkpoints=Checkpoints(tmp_path, every=every, resume=resume, config=stateful.CONFIG))
        assert ended.status == "diverged at round 8"
        assert stateful.bits(ended) == stateful.bits(diverged())


@pytest.mark.parametrize("every", [1, 4, 7, 8, None])
def test_how_often_it_is_looked_at_does_not_matter(every: int | None) -> None:
    ended = run(every=every, measure=None)
    assert ended.status == "diverged at round 8"
    assert ended.history.evaluations[-1].round == 7
    assert stateful.plain(ended.state) == stateful.plain(diverged().state)


def test_a_sound_run_is_not_changed() -> None:
    ended = run(11, data=stateful.data(), every=3)
    assert ended.status == "finished"
    assert stateful.bits(ended) == stateful.bits(stateful.run())


def test_losses_tell_too() -> None:
    cohort = Cohort(np.zeros((4, 3), int), np.zeros((4, 3), int), np.array([[1, 1, 0]] * 3 + [[0, 0, 0]]))
    sound = np.array([[1.0, 2, np.nan], [np.nan, 1, 0], [1, 1, 1], [np.nan] * 3])
    assert broken_round({"cohort": cohort, "loss": sound}) is None  # one broken client, empty slots, an empty round
    sound[2, :2] = np.inf, np.nan
    assert broken_round({"cohort": cohort, "loss": sound}) == 2
    assert broken_round({"cohort": cohort}) is None


def test_steps_that_are_too_large() -> None:
    ended = run(2000, data=stateful.data(scale=1e60), every=None, measure=None)
    assert ended.status.startswith("diverged at round ")
    assert all_finite(ended.state)
