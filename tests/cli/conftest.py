"""Runs the command line in this process, in an empty folder, cut off from the user's data and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fedtangent._src import entries
from fedtangent._src.cli import main, train
from fedtangent._src.comparison import linear_models, side_by_side, simulated
from fedtangent._src.comparison.cases import CaseEntry
from fedtangent._src.comparison.laziness import METRICS as LAZINESS
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.simulated import Simulated, Training
from fedtangent._src.engine.building import Built, build
from fedtangent._src.engine.description import Description
from fedtangent._src.engine.history import History, Measurement, Run
from fedtangent._src.engine.memory import MemoryPlan
from fedtangent._src.engine.run import Resolved
from fedtangent._src.types import Cost

from ..comparison.tiny import linear


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty working folder."""
    work = tmp_path / "work"
    work.mkdir()
    jax.devices()  # in use from here on, so that no test makes the machine's cores devices of their own
    monkeypatch.chdir(work)
    monkeypatch.delenv("FEDTANGENT_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")  # not those of whoever runs the tests
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path / "cache"))
    yield work
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``run("train", "--num-rounds", "1")`` -> exit code and what was printed."""

    def ended_with(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main([str(a) for a in arguments])
        return Ended(ended.value.code, *capsys.readouterr())

    return ended_with


BUILT: dict[str, Built] = {}


@pytest.fixture
def kept_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one identity share one algorithm, and so its compiled programs."""

    def kept(described: Description) -> Built:
        name = repr(described.identity())
        if name not in BUILT:
            BUILT[name] = build(described)
        return BUILT[name]._replace(description=described)

    monkeypatch.setattr(train, "build", kept)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` is prepared whole and writes what it writes, but its runs end as soon as they begin."""

    def simulate(
        algorithm: Any, data: Any, *, num_rounds: int, seed: int, evaluation: Any, mapping: str, **_: Any
    ) -> Run:
        assert callable(evaluation.measure) and mapping == "scan"
        evaluations = []
        for round_, loss in ((0, 2.0 + seed), (num_rounds, 1.0)):
            found = {"nll": loss, "mse": loss, "accuracy": 0.5}
            watched = {} if evaluation.measure.args[-1] is None else {"laziness": dict.fromkeys(LAZINESS, loss)}
            evaluations.append(Measurement(round_, {"train": found, "test": found} | watched, round_, round_, 0.25))
            evaluation.report(evaluations[-1])
        rounds = {"model_weight": np.ones((1, algorithm.schedule.num_models))}
        return Run(None, History(evaluations, rounds, Cost(0, 0, 0)))

    def predict(algorithm: Any, state: Any, x: Any) -> Any:
        return SimpleNamespace(members=np.zeros((1, len(x), 10)))

    resolved = Resolved("scan", MemoryPlan(*[1] * len(MemoryPlan._fields)), {})
    monkeypatch.setattr(train, "simulate_rounds", simulate)
    monkeypatch.setattr("fedtangent._src.cli.trained.predict", predict)
    monkeypatch.setattr(train, "resolve_mapping", lambda *given, **more: resolved)


def tiny(data_dir: object, scale: str, seed: int) -> Setting:
    """The linear model on 30 points, whose programs are those of the comparisons in Python."""
    assert seed == 0
    return linear()


TRAINED: dict[tuple[str, int], Simulated] = {}


def trained(trainings: list[Training], *given: Any) -> list[Simulated]:
    """The networks of ``tiny``, trained once."""
    keys = [(training.method, training.width) for training in trainings]
    if not TRAINED.keys() >= set(keys):
        TRAINED.update(zip(keys, simulated.train(trainings), strict=True))
    return [TRAINED[key] for key in keys]


PROPAGATED = linear_models._propagated
LAW: list[Any] = []


def propagated(*given: Any) -> Any:
    """The models of the law of ``tiny``, trained once."""
    if not LAW:
        LAW.append(PROPAGATED(*given))
    return LAW[0]


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks of ``tiny``, and the models of its law, are trained once for all that compare them."""
    monkeypatch.setattr(linear_models, "_propagated", propagated)
    monkeypatch.setattr(side_by_side, "train", trained)


@pytest.fixture
def tiny_case(monkeypatch: pytest.MonkeyPatch, trained_once: None) -> None:
    """The case ``sine`` is ``tiny``."""
    entry = CaseEntry("sine", "tiny", lambda *given: [tiny(*given)])
    monkeypatch.setitem(entries.catalogue("cases"), "sine", entry)  # type: ignore[arg-type]
