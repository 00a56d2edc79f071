"""Tables II and IV to VII: what all methods share, how each is built, what the tables and claims make of the runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from fedtangent import simulate
from fedtangent._src import pytrees
from fedtangent._src.engine import Devices
from fedtangent._src.experiments.fed_ensemble import classifiers, tables
from fedtangent._src.experiments.fed_ensemble.classifiers import Entrant, Scores
from fedtangent._src.experiments.lab.harness import Config, Tuned
from fedtangent._src.experiments.lab.trials import IID, Trial, scheme_name
from fedtangent._src.federated import schedule
from fedtangent._src.models import convolutional

from ...nightly import nightly
from ..performed import performed, study_of

TINY = ("num_clients=5", "num_models=2", "num_rounds=3", "local_epochs=1", "width=8", "tuning_rounds=3",
        "num_train=80", "num_validation=60", "num_test=50", "learning_rates=0.1,0.5", "server_examples=20")  # fmt: skip


def divided(*changes: str, classes: int = IID) -> tuple[Trial, classifiers.ClassifierSettings]:
    study = study_of("fed_ensemble.table2", (*TINY, *changes))
    return classifiers.divide(study, classes, 0), study.settings


def scores(
    method: str, accuracy: list[float], classes: int = IID, models: int = 1, least: float = 0.5, entropy: float = 0.2
) -> Scores:
    values = {"accuracy": np.array(accuracy), "largest": np.array(accuracy), "least": least + np.array([0, 0.01, 0.02]),
              "entropy": entropy + np.array([0, 0.01, 0.02])}  # fmt: skip
    return Scores(Entrant(method, models), classes, Tuned(Config(method, 0.1), 0.5, (), {}), values, 0.01)


def test_the_server_of_fed_be_has_examples_that_no_client_has() -> None:
    trial, s = divided()
    found = classifiers._methods(s, trial)
    assert list(found) == ["fed_avg", "fed_prox", "fed_be", "fed_be_no_distillation", "fed_ensemble-2"]
    for key, method in found.items():
        held = set(np.asarray(method.data.indices).tolist())
        assert len(held) == (60 if key == "fed_be" else 80) and method.bound_to_seed == (key == "fed_be")
    rows = {np.asarray(trial.data.x[i]).tobytes() for i in np.asarray(found["fed_be"].data.indices)}
    server = found["fed_be"].build.args[-1]["server_data"]  # type: ignore[attr-defined]
    assert len(server) == 20 and not rows & {np.asarray(x).tobytes() for x in server}


def test_every_client_trains_one_model_a_round_and_permutations_give_each_its_turn() -> None:
    cohorts = {
        name: schedule.drawn_cohorts(
            classifiers._all_invited(classifiers.ClassifierSettings(), 6, Entrant(name, 3)), None, 30, weighting=None
        )
        for name in ("fed_ensemble", "random_sampling")
    }
    turns = {}
    for name, cohort in cohorts.items():
        assert np.array_equal(np.sort(np.asarray(cohort.client), axis=1), np.tile(np.arange(6), (30, 1)))
        order = np.argsort(np.asarray(cohort.client), axis=1)
        own = np.take_along_axis(np.asarray(cohort.model), order, axis=1).reshape(10, 3, 6)
        turns[name] = (np.sort(own, axis=1) == np.arange(3)[None, :, None]).all(axis=1)
    assert turns["fed_ensemble"].all() and turns["random_sampling"].mean() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("key", ["fed_prox", "fed_be", "fed_ensemble-2", "random_sampling-2", "fed_dyn_ensemble-2"])
def test_a_method_is_its_algorithm(key: str) -> None:
    trial, s = divided(f"methods={key.split('-')[0]}", classes=2)
    method = classifiers._methods(s, trial)[key]
    run = simulate(method.build(0, 0.5), method.data, num_rounds=3, seed=0, devices=Devices("scan"))
    found = classifiers._measure(method.build(0, 0.5), run.state, method.splits)
    members = np.asarray(method.build(0, 0.5).predict(run.state, trial.splits["test"].x).members)
    labels = np.asarray(trial.splits["test"].labels)
    each = (members.argmax(axis=-1) == labels).mean(axis=1)
    p = np.exp(members - members.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    assert float(found["test.accuracy"]) == pytest.approx((p.mean(axis=0).argmax(axis=-1) == labels).mean())
    assert float(found["test.largest"]) == pytest.approx(each.max())
    assert float(found["test.least"]) == pytest.approx(each.min())
    assert float(found["test.entropy"]) == pytest.approx(-(p * np.log(p)).sum(axis=-1).mean(), rel=1e-4)


def test_claims_are_those_of_the_paired_differences() -> None:
    base, lead = [0.60, 0.70, 0.65], [0.64, 0.73, 0.70]
    found = [scores("fed_avg", base), scores("fed_ensemble", lead, models=5)]
    (claim,) = classifiers.ahead(found, "fed_ensemble")
    assert claim.verdict == "seen" and claim.measured.startswith("+0.0400")
    turned = [scores("fed_avg", lead), scores("fed_ensemble", base, models=5)]
    assert classifiers.ahead(turned, "fed_ensemble")[0].verdict == "not seen"
    assert classifiers._last_rounds(np.array([0.0, 1.0, 2.0, 3.0])).mean() == 2.0


def test_the_lead_is_compared_between_the_fewest_and_the_most_classes() -> None:
    few = [scores("fed_avg", [0.5, 0.6, 0.55], 2), scores("fed_ensemble", [0.6, 0.71, 0.66], 2, 5)]
    many = [scores("fed_avg", [0.8, 0.8, 0.81], 10), scores("fed_ensemble", [0.81, 0.81, 0.83], 10, 5)]
    assert list(tables.claims_4([*few, *many]))[-1].verdict == "seen"
    swapped = [f._replace(classes=12 - f.classes) for f in (*few, *many)]
    assert list(tables.claims_4(swapped))[-1].verdict == "not seen"


def test_there_is_no_claim_about_a_method_that_does_not_train() -> None:
    fed_avg, walks = scores("fed_avg", [0.5, 0.6], 2), scores("random_walk", [0.6, 0.7], 2, 5)
    assert list(tables.claims_4([fed_avg])) == [] and list(tables.claims_fig6([walks])) == []
    assert len(list(tables.claims_fig6([walks, scores("random_walk", [0.5, 0.6], 2)]))) == 1


def test_falls_are_compared_between_methods_on_the_same_clients() -> None:
    falls = {("fed_avg", 2): 0.2, ("fed_ensemble", 2): 0.3, ("fed_avg", IID): 0.1, ("fed_ensemble", IID): 0.0}
    found = [scores(method, [0.6, 0.7, 0.65], classes) for method, classes in falls]
    for one, fall in zip(found, falls.values(), strict=True):
        one.values["fell"] = np.array([0.0, 0.01, 0.02]) + fall  # 1 % of noise
    claims = list(tables.claims_fig4(found))[2:]
    assert [claim.verdict for claim in claims] == ["not seen", "seen"]
    assert scheme_name(2) in claims[0].claim and scheme_name(IID) in claims[1].claim
    assert len({row[0] for row in tables._falls(found)[0].rows}) == 2


def test_models_of_a_large_ensemble_are_worse_and_less_certain() -> None:
    found = [scores("fed_ensemble", [0.90, 0.91, 0.92], models=3, least=0.8, entropy=0.1),
             scores("fed_ensemble", [0.94, 0.95, 0.97], models=20, least=0.7, entropy=0.3)]  # fmt: skip
    assert [c.verdict for c in tables.claims_5(found)] == ["seen"] * 4
    worse = [f._replace(entrant=Entrant("fed_ensemble", 23 - f.entrant.num_models)) for f in found]
    assert {c.verdict for c in tables.claims_5(worse)} == {"not seen"}


def test_the_tuning_seed_is_not_measured_on() -> None:
    with pytest.raises(ValueError, match="tuning_seed: got 1, must not be among the seeds that are measured"):
        study_of("fed_ensemble.table2", ("tuning_seed=1",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table2", "table4", "table5", "table6", "table7", "fig4"])
def test_a_table(name: str, tmp_path: Path) -> None:
    outcome, kept = performed(f"fed_ensemble.{name}", (*TINY, "num_train=200"), tmp_path)
    assert outcome.claims and kept
    for row in outcome.rows:
        key = row["method"] if row["num_models"] == 1 else f"{row['method']}-{row['num_models']}"
        assert 0 <= row["least"] <= row["accuracy"] + 0.2 and len(row["by_seed"]) == 2
        called = f"{key} learning_rate={row['learning_rate']:g}, {scheme_name(row['classes_per_client'])}"
        last = [m.value for m in kept if m.algorithm == called
                and (m.split, m.metric, m.seed) == ("test", "accuracy", 0) and m.round > 0]  # fmt: skip
        assert len(last) == 3 and np.isclose(np.mean(last), row["by_seed"][0])


@pytest.mark.slow
def test_a_text_is_read_by_the_recurrent_network(tmp_path: Path) -> None:
    roles = [np.frombuffer(f"to be or not to be, that is question {i}. ".encode() * 40, np.uint8) for i in range(4)]
    offsets = np.cumsum([0, *map(len, roles)])
    np.savez(tmp_path / "shakespeare_made.npz", text=np.concatenate(roles), offsets=offsets)
    changes = ("num_clients=2", "num_models=2", "num_rounds=3", "width=4", "num_train=30", "num_validation=10",
               "num_test=8", "tuning_rounds=3", "learning_rates=0.01,0.1", "batch_size=8")  # fmt: skip
    outcome, _ = performed("fed_ensemble.fig4", changes, tmp_path, dataset="shakespeare")
    assert [row["method"] for row in outcome.rows] == ["fed_avg", "fed_prox", "fed_be_no_distillation", "fed_ensemble"]
    assert "FedBE-noKD falls by more than Fed-ensemble" in outcome.claims[-1].claim
    assert all(row["fell"] >= 0 for row in outcome.rows)


@pytest.mark.parametrize(
    ("dataset", "model", "kept"),
    [("mnist", "cnn", 0), ("cifar10", "resnet18", 0), ("cifar100", "resnet34", 0), ("openimage", "mobilenet_v2", 100)],
)
def test_settings_are_the_papers(dataset: str, model: str, kept: int) -> None:
    s = tables.SCALES_2[dataset]["paper"]
    assert (s.model, s.keep_first, s.batch_size, s.local_epochs) == (model, kept, 16, 10)
    text = tables.SCALES_2["shakespeare"]["paper"]
    assert (text.model, text.optimizer, text.batch_size, text.num_clients) == ("lstm", "adam", 128, 10)


def test_a_model_reads_its_own_kind_of_input() -> None:
    for change, message in (("model=lstm", "model: got 'lstm'"), ("model=mobilenet_v2", "width: got 8, must be 0")):
        with pytest.raises(ValueError, match=message):
            study_of("fed_ensemble.table2", (*TINY, change))


@pytest.mark.parametrize(("model", "its_own"), nightly([("resnet18", 64), ("cnn", 32)], ["cnn"]))
def test_a_model_knows_its_width(model: str, its_own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two convolutions is the faster is not measured: both have the same weights."""
    monkeypatch.setattr(convolutional, "choose_convolution", lambda *_: "lax")
    trial, s = divided()
    made = [classifiers._network(dataclasses.replace(s, model=model, width=w), trial) for w in (4, its_own, 0)]
    counts = [pytrees.num_bytes(jax.eval_shape(one.init, jax.random.key(0))) // 4 for one in made]
    assert counts[0] < counts[1] / 50 and counts[1] == counts[2]


def test_a_run_falls_by_what_it_ends_below_its_best() -> None:
    assert classifiers.fell(np.array([0.1, 0.5, 0.6, 0.7, 0.4, 0.4, 0.4])) == pytest.approx(0.6 - 0.4)
    assert classifiers.fell(np.array([0.1, 0.2, 0.3, 0.4])) == pytest.approx(0)
