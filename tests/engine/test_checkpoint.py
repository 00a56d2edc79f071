"""Checkpoints: a resumed run is the uninterrupted one bit for bit; another's is refused; damage is got around."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import Devices, Evaluation, simulate
from fedtangent._src.engine.checkpoints import CheckpointError, Checkpoints, files, store
from fedtangent._src.engine.checkpoints.segment import Link, Segment, decode, encode
from fedtangent._src.engine.history import Measurement, Run
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.federated.wire.channel import top_k, with_error_feedback

from ..federated.toys import federated, owned_rows, two_layer, uneven_data
from . import stateful

KEPT = tempfile.TemporaryDirectory(prefix="fedtangent-tests-")  # removed when the process ends


@functools.cache
def whole() -> Any:
    """The uninterrupted run of 11 rounds, without checkpoints."""
    return stateful.bits(stateful.run())


class Killed(BaseException):
    """Ends a run as a kill would: nothing of it is caught."""


def killed_at(round_: int) -> Callable[[Measurement], None]:
    def on_evaluation(evaluation: Measurement) -> None:
        if evaluation.round == round_:
            raise Killed

    return on_evaluation


def at(folder: Path, every: int | None = 2, resume: bool = True, **options: Any) -> Checkpoints:
    return Checkpoints(folder, every=every, resume=resume, **{"config": stateful.CONFIG, **options})


def begun(folder: Path, every: int | None = 2, dies_at: int = 9, **options: Any) -> None:
    """A run that dies at the evaluation of round 9: checkpoints of rounds 4, 6 and 8 are there, later ones are not."""
    if not options and not any(folder.iterdir()):
        shutil.copytree(died(every, dies_at), folder, dirs_exist_ok=True)
    else:
        die(folder, every, dies_at, **options)


@functools.cache
def died(every: int | None, dies_at: int) -> Path:
    """What such a run left, made once."""
    folder = Path(KEPT.name) / f"{every}-{dies_at}"
    die(folder, every, dies_at)
    return folder


def die(folder: Path, every: int | None, dies_at: int, **options: Any) -> None:
    with pytest.raises(Killed):
        stateful.run(checkpoints=at(folder, every, resume=False, **options), report=killed_at(dies_at))


def rounds_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("run-*/round-*"))


def test_checkpoints_do_not_change_a_bit(tmp_path: Path) -> None:
    for every in (1, 4, None):
        run = stateful.run(checkpoints=at(tmp_path / str(every), every, resume=False))
        assert stateful.bits(run) == whole(), every
        assert run.status == "finished"


@pytest.mark.parametrize(("every", "again"), [(1, 1), (2, 2), (2, 5), (4, None)])
def test_a_run_that_died_and_is_resumed_is_the_same_bit_for_bit(tmp_path: Path, every: int, again: int | None) -> None:
    begun(tmp_path, every)
    told: list[Measurement] = []
    run = stateful.run(checkpoints=at(tmp_path, again), report=told.append)
    assert stateful.bits(run) == whole()
    assert [e.round for e in told] == [0, 3, 6, 9, 11]
    assert stateful.plain(told) == stateful.plain(run.history.evaluations)


def test_what_is_kept(tmp_path: Path) -> None:
    begun(tmp_path)
    assert rounds_in(tmp_path) == ["round-00000004", "round-00000006", "round-00000008"]
    stateful.run(checkpoints=at(tmp_path, 5, keep=1))
    assert rounds_in(tmp_path) == ["round-00000011"]
    assert sorted(p.name for p in tmp_path.glob("run-*/history/*")) == [
        f"{a:08d}-{b:08d}.npz" for a, b in ((0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11))
    ]


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    """Round 7 is evaluated as the last of seven, and is none of the longer run's evaluations."""
    assert [e.round for e in stateful.run(7, checkpoints=at(tmp_path, 3, False)).history.evaluations] == [0, 3, 6, 7]
    again = stateful.run(7, checkpoints=at(tmp_path, 3))
    assert stateful.bits(again) == stateful.bits(stateful.run(7))
    assert stateful.bits(stateful.run(11, checkpoints=at(tmp_path, 3))) == whole()


@pytest.mark.parametrize("lost", ["key", "schedule_key", "schedule", "client", "server", "round"])
def test_a_resume_that_loses_a_part_of_the_state_differs(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above would show it: each part of the state, set back to its start, changes the end."""
    begun(tmp_path)

    def forgetful(folder: Path, like: Any) -> Any:
        return read(folder, like)._replace(**{lost: getattr(other if "key" in lost else like, lost)})

    read, other = store.files.read_state, stateful.algorithm().init(4, stateful.NUM_CLIENTS)
    other = other._replace(schedule=stateful.algorithm().init(9, stateful.NUM_CLIENTS).schedule)
    if lost == "schedule":  # the strata of a seed are the start's own: another seed's stand for lost ones
        monkeypatch.setattr(store.files, "read_state", lambda f, like: read(f, like)._replace(schedule=other.schedule))
    else:
        monkeypatch.setattr(store.files, "read_state", forgetful)
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path))) != whole()


# ---- which runs may continue ----


def test_another_configuration_is_refused_with_its_fields(tmp_path: Path) -> None:
    config = {"rate": 0.1, "widths": (8, 4), "nested": {"a": 1, "b": None}, "path": Path("x")}
    begun(tmp_path, config=config)
    other = {"rate": 0.2, "widths": [8, 4], "nested": {"a": 2, "c": 3}, "path": "x"}
    with pytest.raises(CheckpointError) as refused:
        stateful.run(checkpoints=at(tmp_path, config=other), seed=4)
    said = str(refused.value)
    assert "rate (0.1 in the checkpoint, 0.2 now)" in said
    assert "nested.a (1 in the checkpoint, 2 now)" in said
    assert "nested.b" in said and "nested.c" in said
    assert "widths" not in said and "path" not in said and "seed" not in said
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path, config={**config, "path": "x"}))) == whole()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"seed": 4}, 'seed ("seed 3" in the checkpoint, "seed 4" now)'),
        ({"start": jax.random.key(1)}, "start"),
        ({"start": np.zeros((2, 3, 2))}, 'start (null in the checkpoint, "parameters'),
        ({"every": 4}, "evaluate_every (3 in the checkpoint, 4 now)"),
        ({"num_rounds": 7}, "num_rounds: got 7, must be at least 8, the round"),
    ],
)
def test_another_run_is_refused_even_if_the_configuration_does_not_tell(
    tmp_path: Path, changed: dict[str, Any], field: str
) -> None:
    begun(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(CheckpointError) as refused:
        stateful.run(**{"checkpoints": at(tmp_path), **changed})
    assert field in str(refused.value)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_other_data_or_another_shape_of_state_are_refused(tmp_path: Path) -> None:
    """The latter without a configuration too: then a digest of the traced round tells."""
    begun(tmp_path)
    other = stateful.data()._replace(y=stateful.data().y.at[3, 0].add(1e-9))
    with pytest.raises(CheckpointError, match=r"other settings: data\.y"):
        stateful.run(data=other, checkpoints=at(tmp_path))
    wider = stateful.algorithm()._replace(init=lambda *a: _wider(stateful.algorithm().init(*a)))
    given = {"seed": 3, "evaluation": Evaluation(3, stateful.measure), "devices": Devices("scan")}
    stateful.run(3, checkpoints=at(tmp_path / "plain", config={}, resume=False))
    for folder, config, said in ((tmp_path, stateful.CONFIG, ""), (tmp_path / "plain", {}, "traced round .*, ")):
        with pytest.raises(CheckpointError, match=rf"other settings: {said}state\.\.schedule_key"):
            simulate(wider, stateful.data(), num_rounds=11, checkpoints=at(folder, config=config), **given)


def _wider(state: Any) -> Any:
    return state._replace(schedule_key=jax.random.key(0, impl="rbg"))


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"resume: there is no checkpoint in .*nowhere"):
        stateful.run(checkpoints=at(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_other_versions_are_told_and_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(np, "__version__", "1.0.0")
    run = stateful.run(checkpoints=at(tmp_path, notify=said.append), mapping="vmap")
    assert run.status == "finished"
    assert len(said) == 2
    assert 'numpy ("' in said[0] and '"1.0.0" now' in said[0]
    assert 'mapping ("scan" in the checkpoint, "vmap" now)' in said[1]


def test_the_mapping_auto_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    from fedtangent import simulate as module

    monkeypatch.setattr(sys.modules[module.__module__], "default_mapping", lambda: "vmap")
    said: list[str] = []
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path, notify=said.append), mapping="auto")) == whole()
    assert said == []


def test_a_new_run_keeps_the_old_checkpoints_until_its_own_first(tmp_path: Path) -> None:
    begun(tmp_path)
    begun(tmp_path, every=4, dies_at=3)
    assert rounds_in(tmp_path) == ["round-00000004", "round-00000006", "round-00000008"]
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path))) == whole()
    begun(tmp_path, every=4, dies_at=6)
    assert rounds_in(tmp_path) == ["round-00000004"]
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path))) == whole()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"checkpoint folder: .*file is not a directory"):
        stateful.run(checkpoints=at(tmp_path / "file", resume=False))
    with pytest.raises(CheckpointError, match=r"checkpoint folder: cannot write in .*file/sub"):
        stateful.run(checkpoints=at(tmp_path / "file" / "sub", resume=False))


# ---- damage ----


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("what", "harm"),
    [
        *(("state", harm) for harm in (flip, truncate, Path.unlink)),
        *(("record.json", harm) for harm in (flip, truncate)),
    ],
)
def test_damage_falls_back_to_the_last_good_checkpoint(tmp_path: Path, what: str, harm: Callable[[Path], Any]) -> None:
    begun(tmp_path)
    newest = tmp_path / "run-0001" / "round-00000008"
    paths = {"state": largest(newest / "state"), "record.json": newest / "record.json"}
    harm(paths[what])
    said: list[str] = []
    run = stateful.run(checkpoints=at(tmp_path, notify=said.append))
    assert stateful.bits(run) == whole()
    assert len(said) == 1
    assert said[0].startswith("the checkpoint of round 8 is damaged (")
    assert said[0].endswith("going back to round 6")
    again = stateful.run(checkpoints=at(tmp_path, notify=said.append))
    assert stateful.bits(again) == whole()
    assert len(said) == 1


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("history", store.HISTORIES)
def test_damage_to_a_segment_that_all_checkpoints_rely_on_loses_nothing(
    tmp_path: Path, history: str, harm: Callable[[Path], Any]
) -> None:
    begun(tmp_path)
    first = tmp_path / "run-0001" / history / "00000000-00000002.npz"
    before, said = first.read_bytes(), list[str]()
    harm(first)
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path, notify=said.append))) == whole()
    assert len(said) == 1 and said[0].startswith("00000000-00000002.npz")
    assert said[0].endswith("restored from its second file")
    assert first.read_bytes() == before


def test_a_record_that_lacks_something_is_damaged_and_one_of_another_format_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    rounds = sorted((tmp_path / "run-0001").glob("round-*"))
    right, said = files.read_record(rounds[-1] / store.RECORD), list[str]()
    for name in store.FIELDS:
        for other in ({}, {name: None}):
            harmed = {key: value for key, value in right.items() if key != name} | other
            files.write_record(rounds[-1] / store.RECORD, harmed)
            with pytest.raises(files.DamagedError, match=rf"^record\.json has no {name}$"):
                store._record(rounds[-1])
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path, keep=9, notify=said.append))) == whole()
    assert said == ["the checkpoint of round 8 is damaged (record.json has no files); going back to round 6"]
    for path in (tmp_path / "run-0001").glob("round-*"):
        files.write_record(path / store.RECORD, {"format": 1, "round": 8})
    with pytest.raises(CheckpointError, match=r"^resume: the checkpoint has format 1, this version reads only 3$"):
        stateful.run(checkpoints=at(tmp_path))


def test_a_segment_that_lacks_something_is_damaged() -> None:
    infos = {"a": np.zeros((1, 2))}
    shapes = {"a": jax.ShapeDtypeStruct((2,), infos["a"].dtype)}
    raw = encode(Segment(0, 1, None, infos, [], 0.5), shapes)
    with np.load(io.BytesIO(raw)) as held:
        arrays = dict(held)
    told = json.loads(arrays["header"].tobytes())
    for name in told:
        rest = json.dumps({key: value for key, value in told.items() if key != name}).encode()
        buffer = io.BytesIO()
        np.savez(buffer, **{**arrays, "header": np.frombuffer(rest, np.uint8)})
        with pytest.raises(files.DamagedError, match=f"^a segment of the history has no {name}$"):
            decode(buffer.getvalue(), shapes)
    with pytest.raises(files.DamagedError, match=r"^a segment of the history cannot be read: "):
        decode(raw[:-9], shapes)


def test_none_good_is_said_and_nothing_is_started(tmp_path: Path) -> None:
    begun(tmp_path)
    for history in store.HISTORIES:
        flip(tmp_path / "run-0001" / history / "00000000-00000002.npz")
    with pytest.raises(CheckpointError, match=r"no good checkpoint in .*round 8 is damaged.*round 4 is damaged"):
        stateful.run(checkpoints=at(tmp_path))
    assert len(rounds_in(tmp_path)) == 3


@pytest.mark.parametrize("dies_in", ["write_arrays", "write_record", "rename", "history", "remove"])
def test_a_kill_while_a_checkpoint_is_written(tmp_path: Path, dies_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"rename": (os, "rename"), "history": (store, "write_atomically"), "remove": (store.shutil, "rmtree")}
    place, name = names.get(dies_in, (store.files, dies_in))
    original, calls = getattr(place, name), []

    def deadly(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return original(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, deadly)
        with pytest.raises(Killed):
            stateful.run(checkpoints=at(tmp_path, 1, resume=False))
    assert rounds_in(tmp_path) != []
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path, 1))) == whole()
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.gone"))


# ---- signals ----


def stopped_by(number: int, folder: Path, every: int | None = None, round_: int = 6) -> Run:
    def interrupt(evaluation: Measurement) -> None:
        if evaluation.round == round_:
            os.kill(os.getpid(), number)

    return stateful.run(checkpoints=at(folder, every, resume=False), report=interrupt)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as it is in the foreground: a suite that a shell starts in the background is made to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run = stopped_by(number, tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert run.status.startswith(f"stopped by {number.name} at round ")
    done = int(run.status.split()[-1])
    assert 6 <= done < 11
    assert int(run.state.round) == done == len(run.history.rounds["loss"])
    assert rounds_in(tmp_path) == [f"round-{done:08d}"]
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path))) == whole()


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_does_what_it_always_did(tmp_path: Path) -> None:
    def twice(evaluation: Measurement) -> None:
        if evaluation.round == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        stateful.run(checkpoints=at(tmp_path, resume=False), report=twice)
    assert stateful.bits(stateful.run(checkpoints=at(tmp_path))) == whole()


def test_other_threads_and_runs_without_checkpoints_leave_signals_alone(tmp_path: Path) -> None:
    ends: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def look(evaluation: Measurement) -> None:
        seen.append(signal.getsignal(signal.SIGTERM) is before)

    def other_thread() -> None:
        ends.append(stateful.run(checkpoints=at(tmp_path, resume=False), report=look))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert stateful.bits(ends[0]) == whole()
    stateful.run(report=look)
    assert all(seen)
    seen.clear()
    stateful.run(checkpoints=at(tmp_path, resume=False), report=look)
    assert not any(seen)


# ---- arguments, and the parts by themselves ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "checkpoints.every: got 0, must be a whole number of at least 1"),
        ({"every": 1.5}, "checkpoints.every: got 1.5"),
        ({"keep": 0}, "checkpoints.keep: got 0"),
        ({"keep": None}, "checkpoints.keep: got None"),
        ({"config": {"a": [1, {"b": object()}]}}, r"checkpoints.config\['a'\]\[1\]\['b'\]: got a object"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, **options)


def test_a_metric_that_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    for metric, kind in ((object(), "object"), (np.array([object()]), "array of dtype object"), ({1: 2}, "dict")):
        with pytest.raises(ValueError, match=rf"metrics of round 0\['a'\]: a checkpoint cannot hold an? {kind}"):
            stateful.run(1, measure=lambda _, state, m=metric: {"a": m}, checkpoints=at(tmp_path, resume=False))


def test_the_seconds_of_a_resumed_run_go_on_where_it_was_saved(tmp_path: Path) -> None:
    begin, told = time.monotonic(), list[Measurement]()
    with pytest.raises(Killed):
        stateful.run(checkpoints=at(tmp_path, resume=False), report=lambda e: (told.append(e), killed_at(9)(e)))
    before = time.monotonic() - begin
    time.sleep(1)
    begin = time.monotonic()
    seen = [e.seconds for e in stateful.run(checkpoints=at(tmp_path)).history.evaluations]
    assert seen[:3] == [e.seconds for e in told[:3]]  # rounds 0, 3 and 6; what came after round 8 was lost
    assert 0 <= seen[0] < seen[2] < seen[3] < seen[4] <= before + time.monotonic() - begin


def test_a_segment_comes_back_as_it_was() -> None:
    infos = {"a": np.arange(6.0).reshape(3, 2), "b": np.asarray(jnp.ones((3,), jnp.bfloat16)), "c": np.zeros((3, 0))}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), infos)
    metrics = {"text": "é", "s": np.array(["ab", "c"]), "n": [float("inf"), -0.0, 1e-320], "d": {"array": {"x": 1}}}
    metrics |= {"big": 10**30, "t": np.datetime64("2020-01-01")}
    segment = Segment(4, 7, Link("x", "y"), infos, [Measurement(5, metrics, 1, 2, 0.5)], 1.25)
    assert stateful.plain(decode(encode(segment, shapes), shapes)) == stateful.plain(segment)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Its keys too, which are those of the state that was written and not of the fresh one that tells the structure."""
    state = {"key": jax.random.key(5), "x": jnp.arange(3, dtype=jnp.bfloat16), "none": jnp.zeros((0, 2))}
    fresh = {"key": jax.random.key(0), "x": jnp.zeros(3, jnp.bfloat16), "none": jnp.zeros((0, 2))}
    files.write_arrays(tmp_path / "state", files.on_host(state))
    assert stateful.plain(files.read_state(tmp_path / "state", fresh)) == stateful.plain(state)


def test_the_cost_of_the_history_does_not_grow(tmp_path: Path) -> None:
    """The last segment of a long run is as large as its first: the whole history is not written over again."""
    stateful.run(40, checkpoints=at(tmp_path, 4, resume=False), every=None)
    sizes = [p.stat().st_size for p in sorted(tmp_path.glob("run-*/history/*"))]
    assert len(sizes) == 10
    assert max(sizes[1:-1]) <= min(sizes[1:-1]) + 16
    records = [json.loads(p.read_text()) for p in tmp_path.glob("run-*/round-*/record.json")]
    assert all(set(r["record"]["history"]) and len(r["record"]["history"]) == 2 for r in records)


def test_what_a_channel_remembers_and_what_was_sent_at_the_start_are_resumed(tmp_path: Path) -> None:
    plain = uneven_data()
    data = federated(*map(np.asarray, plain[:2]), [np.union1d([0, 1], rows) for rows in owned_rows(plain)])
    algorithm = algorithms.data_sharing(
        two_layer(),
        uniform_sampling(6, 3),
        shared=[0, 1],
        client_learning_rate=0.2,
        work=Work(steps=2, batch_size=None),
        averaging=Averaging(channel=with_error_feedback(top_k(3))),
    )

    def go(rounds: int, folder: Path | None = None) -> Run:
        kept = None if folder is None else Checkpoints(folder, every=2, resume=rounds == 8, config={"run": "whole"})
        return simulate(
            algorithm,
            data,
            num_rounds=rounds,
            seed=0,
            evaluation=Evaluation(2),
            devices=Devices("scan"),
            checkpoints=kept,
        )

    go(4, tmp_path)
    resumed, once = go(8, tmp_path), go(8)
    assert stateful.bits(resumed) == stateful.bits(once)
    assert resumed.history.evaluations[0].uplink_bytes + resumed.history.evaluations[0].downlink_bytes > 0
    assert any(np.any(leaf) for leaf in jax.tree.leaves(once.state.channel))
