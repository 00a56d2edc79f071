"""What every experiment is held to: three scales, settings within their limits, one wording of refusals, claims."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedtangent._src import entries, experiments
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.experiments.lab import SEEN, Claim, MeanInterval, Outcome, disagreeing, interval, table
from fedtangent._src.experiments.lab.runner import (
    SCALES,
    Experiment,
    Request,
    Study,
    by_scale,
    changed,
    check_settings,
    perform,
    prepare_study,
    within,
)
from fedtangent._src.papers import PAPERS

FOUND = entries.catalogue("experiments")


def test_every_file_is_found_and_says_what_it_is() -> None:
    files = {m.name for m in pkgutil.walk_packages(experiments.__path__, "fedtangent._src.experiments.") if not m.ispkg}
    with_entries = {name for name in files if hasattr(importlib.import_module(name), "ENTRIES")}
    where = {entry.name: file for file in with_entries for entry in importlib.import_module(file).ENTRIES}
    assert set(where) == set(FOUND)
    for name, file in where.items():  # named after its folder, and its file or a figure that the file names
        folder, _, own = name.rpartition(".")
        assert file.startswith(f"{experiments.__name__}.{folder}.")
        assert file.endswith(f".{own}") or f'{own}"' in inspect.getsource(importlib.import_module(file))
    kinds = {}
    for entry in FOUND.values():
        assert next(iter(entry.scales)) in ("digits", "sine", "digits_and_sine", "gaussian", "halfspaces")
        assert len(entry.summary.split()) > 4 and entry.papers
        assert all(paper in PAPERS or paper.startswith("@") for paper in entry.papers)
        for scales in entry.scales.values():
            assert tuple(scales) == SCALES
            for settings in scales.values():
                check_settings(settings)
                kinds.setdefault(type(settings).__name__, set()).add(type(settings))
    assert all(len(of) == 1 for of in kinds.values())


@dataclass(frozen=True)
class Tried:
    """Settings of every kind."""

    count: int = 3
    none_too: int = within(0, least=0)
    share: float = within(0.5, above=0, at_most=1)
    free: float = 0.0
    name: str = within("a", of=("a", "b"))
    rates: tuple[float, ...] = within((0.1, 0.3), above=0)
    steps: tuple[int, ...] = within((1, 2), count=2, increasing=True)


def tried(study: Study) -> Outcome:
    study.keep([])
    return Outcome((), [{"share": study.settings.share}], (Claim("c", "m", SEEN),), {"more": 1}, ("said",))


ENTRY = Experiment(
    "tried", "an experiment", tried, scales={"digits": by_scale(Tried(), Tried(count=4), Tried(count=9))}
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("count=0", "count: got 0, must be a whole number of at least 1"),
        ("count=x", "count: got 'x', must be a whole number like 3"),
        ("count", "set: got 'count', must be name=value"),
        ("other=1", "set: got 'other', allowed are count, none_too"),
        ("none_too=-1", "none_too: got -1, must be a whole number of at least 0"),
        ("share=0", "share: got 0.0, must be above 0 and at most 1"),
        ("share=1.5", "share: got 1.5"),
        ("free=nan", "free: got nan, must be finite"),
        ("name=c", "name: got 'c', allowed are a, b"),
        ("rates=0.1,-1", "rates: got -1.0, must be above 0 and finite"),
        ("rates=0.1,x", "rates: got '0.1,x', must be numbers like 0.1,0.3"),
        ("rates=0.1,0.1", "rates: got 0.1,0.1, must be 1 or more different values"),
        ("steps=2,1", "steps: got 2,1, must be 2 or more increasing values"),
        ("steps=2", "steps: got 2, must be 2 or more increasing values"),
    ],
)
def test_a_setting_out_of_its_limits_is_refused(change: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        prepare_study(ENTRY, Request("smoke", (0,), changes=(change,)))
    assert message in str(error.value)


def test_settings_are_read_from_text() -> None:
    found = changed(Tried(), ("count=7", "share=0.25", "rates=0.5,1,2", "name=b", "steps=3,9"))
    assert found == Tried(7, 0, 0.25, 0.0, "b", (0.5, 1.0, 2.0), (3, 9))
    with pytest.raises(ValueError, match=r"^set: got count more than once, must be one value for each setting$"):
        changed(Tried(), ("count=7", "share=0.25", "count=8"))


def test_a_study_is_prepared_and_performed() -> None:
    study = prepare_study(ENTRY, Request("default", (3, 5), changes=("share=0.25",)))
    assert (study.settings.count, study.dataset, study.seeds) == (4, "digits", (3, 5))
    found = perform(ENTRY, study)
    assert found.rows == [{"share": 0.25}] and found.sheets[-1].rows == (("c", "m", "seen"),)
    assert found.details["settings"] == study.settings and found.details["more"] == 1
    assert found.remarks[0] == "said" and "count=4" in found.remarks[-1]


def test_a_control_that_passes_does_not_count() -> None:
    right, wrong = (
        Verdict("theorem", "a ratio", "1.0", "1", True, "a wrong one", "2.0", ok, "small") for ok in (True, False)
    )

    def of(*verdicts: Verdict) -> Outcome:
        made = Experiment("tried", "an experiment", lambda _: Outcome((), [], verdicts=verdicts))
        return perform(made, Study(Tried(), "digits", (0,)))

    assert of(right).failed == () and of(right).details["verdicts"][0]["passed"]
    assert of(right, wrong).failed == ("a ratio small: passes for a wrong one too",)
    assert of(right._replace(holds=False)).failed == ()  # a result: where it is none, the experiment says so
    assert disagreeing([right, right._replace(holds=False)]) == ("a ratio small: 1.0, must be 1",)


def test_a_table_shows_rows_and_a_dash_where_there_is_no_number() -> None:
    rows = [{"k": 1, "seen": MeanInterval(0.5, 0.25, 1.0), "at": None}, {"k": 2, "seen": None, "at": 3}]
    found = table("t", rows, "K: {k} | mean: {seen:+.2f} | at: {at:d} of {k}")
    assert found.rows == (("1", "+0.50 [+0.25, +1.00]", "-"), ("2", "-", "3 of 2")) and found.columns[0] == "K"
    with pytest.raises(KeyError):
        table("t", rows, "K: {other}")


def test_intervals_decide_claims() -> None:
    values = np.array([0.1, 0.4, 0.2])
    found = interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found, [values.mean(), expected.low, expected.high], rtol=1e-12)
    above = [MeanInterval(0.0, low, high).above(1) for low, high in ((1.1, 2), (0, 0.9), (0.5, 1.5), (np.nan, np.nan))]
    assert above == ["seen", "not seen", "undecided", "undecided"]
    assert [MeanInterval(0.0, low, high).below() for low, high in ((-2, -1), (1, 2), (-1, 1))] == [
        "seen", "not seen", "undecided"]  # fmt: skip


# What one experiment refuses besides the limits of its settings, of which one or two stand for all.
REFUSED = [
    ("fed_ensemble.fig1", "sine", "spacing=0.9", "must be smaller for 5"),
    ("fed_ensemble.fig2", "sine", "num_models=1", "num_models: got 1, must be a whole number of at least 2"),
    ("fed_ensemble.fig2", "sine", "model=x", "model: got 'x', allowed are linear, network"),
    ("fed_ensemble.fig3", "digits", "num_models=2", "num_models: got 2"),
    ("fed_ensemble.fig3", "digits", "num_rounds=6", "num_rounds: got 6, must be a multiple of 4"),
    ("fed_ensemble.fig3", "digits", "num_train=99999", "num_train: got 99999, must be from 0"),
    ("fed_ensemble.table1", "sine", "num_models=1,3", "num_models: got (1, 3), allowed are 1, 2, 10, 20, 40"),
    ("fed_ensemble.fig1", "sine", "num_clients=100000", "at which 21 inputs fit into [-1, 1], must be smaller for 100"),
    ("fed_ensemble.fig1", "sine", "points_per_client=2000000", "must be smaller for 5 clients of 2000000"),
    ("fed_ensemble.stragglers", "digits", "slowness=0.5", "slowness: got 0.5, must be 0: set the option slow"),
    ("fed_ensemble.table1", "sine", "schedules=2", "schedules: got 2, must be a whole number of at least 3"),
    ("fed_ensemble.corollary1", "sine", "num_models=1", "num_models: got 1, must be 2 or more"),
    ("fed_ensemble.theorem1", "sine", "num_rounds=4", "num_rounds: got 4, must be a whole number of at least 5"),
    ("fed_ensemble.theorem2", "sine", "num_models=1", "num_models: got 1"),
    ("fed_ensemble.versus_fed_avg", "digits", "classes_per_client=11", "from 1 to 10"),
    ("fed_ensemble.versus_fed_avg", "digits", "num_train=9999", "num_train: got 9999, must be from 1 to 1150"),
    ("fed_ensemble.versus_fed_avg", "digits", "decay=2", "2.0"),
    ("conformal.coverage", "digits", "num_train=900", "num_train: got 900, must be a whole number from 1 to "),
    ("conformal.coverage", "digits", "num_test=900", "num_calibration + num_test: got 9"),
    ("feature_learning.width", "digits", "clients_per_round=11", "clients_per_round: got 11, must be"),
    ("feature_learning.width", "digits", "num_train=50000", "num_train: got 50000, must be"),
    ("fine_tuning.regime", "digits", "num_clients=500", "num_clients: got 500"),
    ("fine_tuning.regime", "digits", "clients_per_round=11", "clients_per_round: got 11"),
    ("fine_tuning.regime", "digits", "num_pre_train=100000", "num_pre_train: got 100000, must be a whole number from"),
    ("privacy.utility", "digits", "num_clients=1000", "num_clients: got 1000"),
    ("privacy.utility", "digits", "num_test=5000", "num_test: got 5000, must be a whole number from 1 to 397"),
    ("tct.heterogeneity", "digits", "classes_per_client=11", "from 1 to 10"),
    ("tct.heterogeneity", "digits", "num_clients=500", "num_clients: got 500"),
    ("ntk_fl.fig3", "digits", "methods=fed_avg", "methods: got fed_avg, must be ntk_fl, cp_ntk_fl"),
    ("ntk_fl.fig4b", "digits", "methods=fed_avg", "methods: got fed_avg, must include one of ntk_fl"),
    ("ntk_fl.fig4b", "digits", "methods=fedavg", "methods: got 'fedavg', allowed are centralised"),
    (
        "ntk_fl.fig4b",
        "digits",
        "partition=writers",
        "partition: got 'writers', must be another: the data set digits names",
    ),
    ("ntk_fl.fig4b", "digits", "tuning_seed=1", "tuning_seed: got 1, must not be among the seeds"),
    ("ntk_fl.fig4b", "digits", "clients_per_round=51", "clients_per_round: got 51, must be at most 50"),
    ("ntk_fl.fig4b", "digits", "window=21", "window: got 21, must be at most 20"),
    ("ntk_fl.fig5", "digits", "partition=shifted", "partition: got 'shifted', must be dirichlet"),
    (
        "ntk_fl.table1",
        "digits",
        "reference_rounds=2",
        "reference_rounds: got 2, must be at least num_rounds",
    ),
    ("ntk_fl.fig5", "digits", "methods=fed_avg", "methods: got fed_avg, must include ntk_fl"),
    ("ntk_fl.fig6", "digits", "dimensions=8,65", "projected: got 65, must be at most 64"),
    ("ntk_fl.table1", "digits", "methods=fed_avg", "methods: got fed_avg, must include fed_avg and one of "),
    ("ntk_fl.fig8", "digits", "activation=erf", "activation: got 'erf', allowed for lenet are sigmoid, relu"),
    ("ntk_fl.fig8", "digits", "num_images=1000", "at most 359"),
    ("ntk_fl.fig8", "digits", "optimizer=sgd", "lbfgs, adam"),
    ("ntk_fl.fig9", "digits", "num_clients=80", "num_clients: got 80, must be at most total_clients, 60"),
    ("ntk_fl.theorem1", "sphere", "num_examples=9", "num_examples: got 9, must be a multiple of num_clients, 4"),
    ("ntk_fl.theorem2", "sphere", "step_factors=0.5,1.5", "step_factors: got 1.5, must be above 0 and below 1"),
]


@pytest.mark.parametrize(("name", "dataset", "change", "message"), REFUSED)
def test_an_experiment_refuses(name: str, dataset: str, change: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        prepare_study(FOUND[name], Request("smoke", (0, 1), dataset, changes=(change,)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("huge", (0, 1)), "scale: got 'huge', allowed are smoke, default, paper"),
        (Request("smoke", (0, 1), "sine"), "dataset: got 'sine', allowed are digits, fashion_mnist, mnist"),
        (Request("smoke", (0,)), "seeds: got 1 of them, must be at least 2"),
        (Request("smoke", (0, 0)), "seeds: got [0, 0]"),
        (Request("smoke", (0, 1), data_dir=Path("nowhere")), "data_dir: got nowhere, must be a folder"),
    ],
)
def test_a_request_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError) as error:
        prepare_study(FOUND["fed_ensemble.versus_fed_avg"], request_)
    assert message in str(error.value)
