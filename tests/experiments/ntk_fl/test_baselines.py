"""NTK-FL's comparisons: what the methods share, that a run is the engine's own, that finished runs are read again."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from fedtangent import simulate
from fedtangent._src.engine import Devices, Evaluation
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Bench, Config, Record, play
from fedtangent._src.experiments.lab.runner import Study, with_changes
from fedtangent._src.experiments.lab.trials import Trial, _distorted, one_hot, projected, with_global_set
from fedtangent._src.experiments.ntk_fl import baselines as report
from fedtangent._src.experiments.ntk_fl import figures
from fedtangent._src.experiments.ntk_fl.baselines import DIGITS, LABELS, BaselineSettings, _divide, _methods
from fedtangent._src.output import run_plots
from fedtangent._src.output.files import Figures
from fedtangent._src.types import Algorithm

from ...nightly import nightly

TINY = with_changes(
    BaselineSettings(methods=tuple(LABELS)),
    DIGITS,
    "num_clients=12 clients_per_round=3 num_rounds=3 reference_rounds=4 width=8 batch_size=8 learning_rates=0.1,0.3",
    "tangent_rates=0.03 local_steps=2,4 server_steps=5 times=10,40 tuning_rounds=2 num_train=240 num_validation=60",
    "num_test=80 beta=0.5 projected=9 sparsity=0.5 window=2",
)


def trial(seed: int = 0, s: BaselineSettings = TINY) -> Trial:
    return _divide("digits", None, seed, s)


def bench(folder: Path, s: BaselineSettings = TINY) -> Bench:
    return report.bench_of(Study(s, "digits", (0,), figures=Figures(folder / "figures")))


PROGRAMS: dict = {}  # of FedAvg on clients of like size: compiled once for the file


def fed_avg(folder: Path, **changes: object) -> Bench:
    where = bench(folder, replace(TINY, methods=("fed_avg",), **changes))
    where.compiled = PROGRAMS
    return where


OTHERS = [name for name in TINY.methods if name != "fed_avg"]


@pytest.mark.parametrize("name", nightly(["fed_avg", *OTHERS], ["fed_avg"]))
def test_a_run_is_that_of_simulate(name: str, tmp_path: Path) -> None:
    where = fed_avg(tmp_path) if name == "fed_avg" else bench(tmp_path, replace(TINY, methods=(name,)))
    method = where.methods(3)[name]
    config = Config(name, method.rates[-1], method.steps[-1])
    found = play(where, config, 3, 2)
    x, labels = method.splits["test"]
    algorithm = method.build(config.steps, config.rate)
    outputs = jax.jit(lambda state: algorithm.predict(state, x).mean)

    def look(_: Algorithm, state: object) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(outputs(state)).argmax(axis=-1) == np.asarray(labels)))}

    run = simulate(
        algorithm, method.data, num_rounds=2, seed=3, evaluation=Evaluation(1, look), devices=Devices("scan")
    )
    np.testing.assert_allclose(found.test, [e.metrics["accuracy"] for e in run.history.evaluations], atol=0.02)
    assert list(found.sent[:, 0]) == [e.uplink_bytes for e in run.history.evaluations]
    assert list(found.sent[:, 1]) == [e.downlink_bytes for e in run.history.evaluations]
    other = play(where, Config(name, method.rates[-1] / 300, method.steps[0]), 3, 2)
    assert not np.array_equal(other.test, found.test)  # the rate is an argument of the program, and used


def test_methods_share_start_and_cohorts(tmp_path: Path) -> None:
    alike = ("centralised", "ntk_fl", "data_sharing", "fed_nova", "fed_avg", "qsgd")
    found = bench(tmp_path, replace(TINY, methods=(*alike, "cp_ntk_fl"))).methods(1)
    starts, cohorts = [], []
    for name in alike:
        algorithm = found[name].build(2, 0.1)
        state = algorithm.init(1, TINY.num_clients)
        assert algorithm.params is not None
        starts.append(jax.tree.leaves(algorithm.params(state)))
        cohorts.append(np.asarray(algorithm.schedule.sample(state.schedule_key, state.schedule, state.round)[0].client))
    for start, cohort in zip(starts, cohorts, strict=True):
        np.testing.assert_array_equal(cohort, cohorts[0])
        for a, b in zip(start, starts[0], strict=True):
            np.testing.assert_array_equal(a, b)
    assert {name: len(m.steps) for name, m in found.items() if name in ("ntk_fl", "cp_ntk_fl")} == {
        "ntk_fl": 1, "cp_ntk_fl": 1}  # fmt: skip


@pytest.mark.slow
def test_without_momentum_fed_nova_of_equal_steps_is_fed_avg(tmp_path: Path) -> None:
    """Why FedNova's clients have momentum here: clients of equal local steps leave it nothing to normalise."""
    where = bench(tmp_path, replace(TINY, momentum=0.0, methods=("fed_nova", "fed_avg")))
    plain = [play(where, Config(name, 0.3, 4), 0, 3).test for name in ("fed_nova", "fed_avg")]
    np.testing.assert_allclose(plain[0], plain[1], atol=1e-12)
    other = bench(tmp_path, replace(TINY, methods=("fed_nova",)))
    assert not np.array_equal(play(other, Config("fed_nova", 0.3, 4), 0, 3).test, plain[1])


def test_finished_runs_are_read_and_the_others_share_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, where = Config("fed_avg", 0.3, 4), fed_avg(tmp_path)
    first = play(where, config, 0, 3)
    calls, programs = [], len(where.compiled)
    honest = harness._compute
    monkeypatch.setattr(harness, "_compute", lambda *given: calls.append(given) or honest(*given))
    again, shorter = play(fed_avg(tmp_path), config, 0, 3), play(fed_avg(tmp_path), config, 0, 2)
    assert calls == []
    np.testing.assert_array_equal(again.test, first.test)
    np.testing.assert_array_equal(shorter.test, first.test[:3])
    assert again.seconds == first.seconds and shorter.num_rounds == 2
    longer = play(where, config, 0, 4)  # more rounds, another seed, rate, number of steps: computed
    np.testing.assert_array_equal(longer.test[:4], first.test)
    for other, seed in ((config, 1), (config._replace(rate=0.1), 0), (config._replace(steps=2), 0)):
        play(where, other, seed, 3)
    assert len(calls) == 4 and not list((tmp_path / "runs").glob("*.part"))
    assert len(where.compiled) == programs
    for program in where.compiled.values():
        parts = program.begin, program.chunk, program.measure
        assert [part._cache_size() for part in parts] == [1, 1, 1]  # type: ignore[attr-defined]
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    for changes in ({"alpha": 0.3}, {"batch_size": 5}, {"width": 9}, {"times": (3,)}):  # named apart
        other = fed_avg(tmp_path, **changes)
        other.methods(0)
        assert not any(name.startswith(f"fed_avg-{harness._digest(other, config)}") for name in names)


def test_a_finished_run_that_is_not_as_it_was_written_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, where, said = Config("fed_avg", 0.3, 4), fed_avg(tmp_path), list[str]()
    first = play(where, config, 0, 3)
    monkeypatch.setattr(harness, "_compute", lambda *given: calls.append(1) or first)
    where.study = replace(where.study, say=said.append)
    (path,) = (tmp_path / "runs").iterdir()
    whole = path.read_bytes()
    with np.load(path) as held:
        arrays = dict(held)
    buffer, buffers = io.BytesIO(), list[bytes]()
    for changes in ({"test.accuracy": np.full(4, np.nan)}, {"rounds": arrays["rounds"] + 1}, {"sha256": np.array("")}):
        np.savez(buffer, **{**arrays, **changes})
        buffers.append(buffer.getvalue())
        buffer = io.BytesIO()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for harmed in (b"", whole[:-9], bytes(flipped), *buffers):
        calls = list[int]()
        path.write_bytes(harmed)
        found = play(where, config, 0, 3)
        np.testing.assert_array_equal(found.test, first.test)
        assert calls == [1] and path.read_bytes() == whole, harmed[:20]
        assert str(path) in said[-1] and said[-1].endswith("; it is computed again") and "\n" not in said[-1]
    assert len(said) == 6
    play(where, config, 1, 3)
    (other,) = (file for file in (tmp_path / "runs").iterdir() if file != path)
    path.write_bytes(other.read_bytes())  # another run's file under this name
    calls = list[int]()
    play(where, config, 0, 3)
    assert calls == [1] and path.read_bytes() == whole and "damaged or renamed" in said.pop()
    play(where, config, 0, 3)  # the control: what is as it was written is read
    assert calls == [1] and len(said) == 6


def test_the_choice_is_the_best_on_validation_examples(tmp_path: Path) -> None:
    where = fed_avg(tmp_path, tuning_rounds=4)
    tuned = harness.tune(where, "fed_avg", TINY.tuning_seed, 4)
    assert len(tuned.grid) == 4
    own = {c: play(where, c, TINY.tuning_seed, 4).metrics["validation.accuracy"][-1] for c in tuned.grid}  # read
    assert own == tuned.grid and own[tuned.config] == max(own.values())
    assert set(tuned.at_edge) == {"rate", "steps"}  # each grid has two values


def test_a_trial_is_standardised_and_its_parts_do_not_meet() -> None:
    held = trial()
    sets = [{row.tobytes() for row in np.asarray(x)} for x in (held.data.x, *(s.x for s in held.splits.values()))]
    assert [len(s) for s in sets] == [240, 60, 80]
    assert not (sets[0] & sets[1]) and not (sets[0] & sets[2]) and not (sets[1] & sets[2])
    everything = trial(s=replace(TINY, num_train=0))
    x = np.concatenate([np.asarray(everything.data.x), np.asarray(everything.splits["validation"].x)])
    assert abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-5
    np.testing.assert_array_equal(np.asarray(one_hot(held).y).argmax(axis=1), np.asarray(held.data.y))
    assert np.asarray(one_hot(held).y).sum() == 240


def test_the_global_set_is_balanced_and_everybodys() -> None:
    held = trial()
    given, shared = with_global_set(held, 0.1, held.data.y)
    assert len(shared) == 24 and np.ptp(np.bincount(np.asarray(held.data.y)[shared])) <= 1
    offsets, indices = np.asarray(given.offsets), np.asarray(given.indices)
    for i in range(TINY.num_clients):
        assert set(shared) <= set(indices[offsets[i] : offsets[i + 1]])


def test_projection_is_one_matrix_for_all() -> None:
    held, small = trial(), projected(trial(), 9)
    assert small.data.x.shape == (240, 9)
    matrix = np.linalg.lstsq(np.asarray(held.data.x), np.asarray(small.data.x), rcond=None)[0]
    test = held.splits["test"].x
    np.testing.assert_allclose(np.asarray(test) @ matrix, small.splits["test"].x, atol=1e-3)
    with pytest.raises(ValueError, match="projected: got 65, must be at most 64"):
        projected(held, 65)


def test_each_client_distorts_in_its_own_way() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(6, 64))
    owner = np.array([0, 0, 1, 1, 2, 2])
    found = _distorted(x, owner, 3, 7)
    for i in range(3):
        a, b = (np.sort(v[owner == i].reshape(2, -1)) for v in (x, found))
        slope, intercept = np.polyfit(a.ravel(), b.ravel(), 1)  # pixels are moved, and one line for both images
        np.testing.assert_allclose(b, slope * a + intercept, atol=1e-12)
        assert 0.5 <= slope <= 1.5 and -0.2 <= intercept <= 0.2
    np.testing.assert_array_equal(found, _distorted(x, owner, 3, 7))
    assert not np.allclose(_distorted(x, owner, 3, 8), found)


def curve(test: list[float], up: int = 100) -> Record:
    n = len(test)
    sent = up * np.stack([np.arange(n)] * 2, axis=1)
    return Record(np.arange(n), {"test.accuracy": np.array(test)}, sent, np.zeros(n - 1, np.int32), 1.0)


def test_rounds_to_a_level_and_differences() -> None:
    a, b = curve([0.9, 0.2, 0.5, 0.8]), curve([0.1, 0.6, 0.7, 0.1])
    assert report._reached([a, b], [0.5, 0.5]).rounds == [2, 1]  # round 0 is not counted
    found = report._reached([a, b], [0.5, 0.7])
    assert found.rounds == [2, 2] and found.mean_rounds == 2 and found.mean_mib == 200 / 2**20
    never = report._reached([a, b], [0.5, 0.9])
    assert never.mean_rounds == np.inf and never.mean_mib == np.inf
    held = {"ntk_fl": [curve([0, x, x + 0.1]) for x in (0.5, 0.6, 0.9)],
            "fed_avg": [curve([0, x, x]) for x in (0.4, 0.55, 0.5)]}  # fmt: skip
    _, rows, (claim,) = report._against(held, "ntk_fl", replace(TINY, num_rounds=2))
    row = rows[1]
    interval = stats.ttest_rel([0.55, 0.65, 0.95], [0.4, 0.55, 0.5]).confidence_interval(0.95)
    np.testing.assert_allclose([row["low_95"], row["high_95"]], [interval.low, interval.high], rtol=1e-9)
    assert row["ntk_fl_is_above"] == claim.verdict == "undecided"
    assert claim.claim == "NTK-FL is above FedAvg after 2 rounds"


def test_writers_need_data_that_name_them() -> None:
    with pytest.raises(ValueError, match="partition: got 'writers', must be another: the data set digits names"):
        trial(s=replace(TINY, partition="writers"))
    assert len(_methods(TINY, trial())) == len(TINY.methods)


def test_table_1_counts_rounds_and_uplink_against_the_papers() -> None:
    reached = report.Reached([4, 6], [50, 70])
    found = {"cp_ntk_fl": reached, "fed_com": report.Reached([20, 30], [100, 140])}
    found["fed_avg"] = report.Reached([30, None], [900, None])
    settings = figures.SCALES_TABLE1["digits"]["smoke"]
    first, second = figures._judge_table1(settings, found)
    assert first.measured == "0.20 times the rounds and 0.50 times its uplink (the paper: 0.10 and 1.02)"
    assert second.measured == "at most 0.07 times the rounds (the paper: 0.09 and 0.22)"
    assert "FedCOM" in first.claim and (first.verdict, second.verdict) == ("undecided", "undecided")  # two seeds
    surely = found | {"fed_avg": report.Reached([104, 106], [900, 900])}
    assert figures._judge_table1(settings, surely)[1].verdict == "seen"


def test_the_figures_of_few_values_and_of_all_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(run_plots, "save", lambda figure, path, *_: kept.append(figure) or path)
    for points in (2, 20):
        lines = {name: np.zeros((2, points)) for name in tuple(LABELS)}
        run_plots.curves({"y": lines}, range(points), "title", tmp_path / "a.png", across="x")
    for figure in kept:
        assert figure.axes[0].get_legend_handles_labels()[1] == list(LABELS)
    assert list(kept[0].axes[0].get_xticks()) == [0, 1] and len(kept[0].axes[0].containers) == len(LABELS)


def test_a_level_that_is_not_reached_is_said_in_words() -> None:
    s = replace(TINY, num_rounds=12, reference_rounds=24)
    reached, late = (
        report._ten_times_sooner(report.Reached([1, 2], [9, 9]), s),
        report._ten_times_sooner(report.Reached([None, 2], [None, 9]), s),
    )
    assert reached == ("NTK-FL gets to that level in at most a tenth of the rounds (2.4)", "in 1.5", "seen")
    assert late[1:] == ("not with every seed in 12", "not seen")
