"""A run whose global model diverges ends at the last good round, whatever it is looked at and saved in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent.engine.checkpoints import Checkpoints
from fedtangent.engine.history import Run
from fedtangent.engine.loop import broken_round, is_finite
from fedtangent.engine.run import simulate
from fedtangent.types import Algorithm, Cohort

from . import stateful

BREAKS = 7  # the round, from 0, that breaks the models: after seven rounds they are finite, after eight not


def breaking() -> Algorithm:
    """The stateful algorithm, whose models become NaN in one round."""
    sound = stateful.algorithm()

    def step(state: Any, data: Any, engine: Any) -> Any:
        after, info = sound.step(state, data, engine)
        harm = jnp.where(state.round >= BREAKS, jnp.nan, 0.0)
        server = after.server._replace(params=after.server.params + harm)
        return after._replace(server=server), info

    return sound._replace(step=step)


ALGORITHM = breaking()


def run(num_rounds: int = 20, algorithm: Algorithm = ALGORITHM, **options: Any) -> Run:
    given = {"seed": 3, "mapping": "scan", "evaluate_every": 5, "evaluate": stateful.evaluate}
    given["stop_on_divergence"] = True
    return simulate(algorithm, stateful.data(), num_rounds, **{**given, **options})


def test_it_ends_at_the_last_good_round() -> None:
    ended = run()
    assert ended.status == "diverged at round 8"
    assert [e.round for e in ended.history.evaluations] == [0, 5, 7]
    assert len(ended.history.rounds["loss"]) == int(ended.state.round) == 7
    good = stateful.run(7, evaluate_every=5)
    assert stateful.bits(ended) == stateful.bits(good)
    assert not is_finite(run(stop_on_divergence=False).state)
    assert run(stop_on_divergence=False).status == "finished"


@pytest.mark.parametrize("every", [1, 2, 3, None])
def test_how_often_it_is_saved_does_not_matter(tmp_path: Path, every: int | None) -> None:
    for resume in (False, True):
        ended = run(checkpoint=Checkpoints(tmp_path, every=every, resume=resume))
        assert ended.status == "diverged at round 8"
        assert stateful.bits(ended) == stateful.bits(run())


@pytest.mark.parametrize("every", [1, 4, 7, 8, None])
def test_how_often_it_is_looked_at_does_not_matter(every: int | None) -> None:
    ended = run(evaluate_every=every, evaluate=None)
    assert ended.status == "diverged at round 8"
    assert ended.history.evaluations[-1].round == 7
    assert stateful.plain(ended.state) == stateful.plain(run().state)


def test_a_sound_run_is_not_changed() -> None:
    ended = run(11, stateful.algorithm(), evaluate_every=3)
    assert ended.status == "finished"
    assert stateful.bits(ended) == stateful.bits(stateful.run())


def test_losses_tell_too() -> None:
    cohort = Cohort(np.zeros((4, 3), int), np.zeros((4, 3), int), np.array([[1, 1, 0]] * 3 + [[0, 0, 0]]))
    sound = np.array([[1.0, 2, np.nan], [np.nan, 1, 0], [1, 1, 1], [np.nan] * 3])
    assert broken_round({"cohort": cohort, "loss": sound}) is None  # one broken client, empty slots, an empty round
    sound[2, :2] = np.inf, np.nan
    assert broken_round({"cohort": cohort, "loss": sound}) == 2
    assert broken_round({"cohort": cohort}) is None


def test_a_learning_rate_that_is_too_large() -> None:
    ended = run(2000, stateful.algorithm(1e200, "wild"), evaluate_every=None, evaluate=None)
    assert ended.status.startswith("diverged at round ")
    assert is_finite(ended.state)
