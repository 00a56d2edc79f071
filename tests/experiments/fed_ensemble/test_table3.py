"""Table III: whose examples a client is tested on, what each method predicts for itself, and the claims."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent import simulate
from fedtangent._src import data
from fedtangent._src.data.dataset import Dataset, SourceInfo
from fedtangent._src.engine import Devices
from fedtangent._src.experiments.fed_ensemble import classifiers, tables
from fedtangent._src.experiments.fed_ensemble.classifiers import Entrant, Scores
from fedtangent._src.experiments.lab.harness import Config, Tuned
from fedtangent._src.experiments.lab.trials import USERS, draw, first_users, of_users
from fedtangent._src.federated.predict import evaluate_clients

from ..performed import performed, study_of

TINY = ("num_clients=5", "num_models=2", "num_rounds=3", "local_epochs=1", "width=8", "tuning_rounds=3",
        "num_train=80", "num_validation=60", "num_test=50", "learning_rates=0.1,0.5")  # fmt: skip


def written(num_users: int = 4) -> Dataset:
    """Made images by users who are numbered 3, 5, 7, ..; every pixel of an image says whose it is and which."""
    rng = np.random.default_rng(0)
    owner, tested = (np.sort(rng.integers(num_users, size=n)) for n in (60, 20))
    x = [np.broadcast_to(of[:, None, None, None] + 0.0, (len(of), 2, 2, 1)) for of in (owner, tested)]
    y = [rng.integers(3, size=len(of)).astype(np.int32) for of in (owner, tested)]
    info = SourceInfo("made", "none", "generated")
    return Dataset("made", x[0], y[0], x[1], y[1], 3, 3 + 2 * owner, info, "image", 3 + 2 * tested)


def test_every_user_is_tested_on_its_own_examples() -> None:
    loaded = first_users(written(), 3)
    assert loaded.user_train is not None and set(loaded.user_train.tolist()) == {0, 1, 2} and loaded.x_train.max() == 2
    drawn = draw(loaded, 0, 0, 10, 0)
    for part, clients in of_users(loaded, drawn).items():
        assert sum(clients.sizes) == len(drawn.y[part])
        for client in range(3):
            assert (drawn.x[part][clients.client(client)] == client).all()
    assert len(drawn.y["train"]) + 10 == len(loaded.x_train)
    whole = written()
    stranger = whole.user_test.copy()
    stranger[-3:] = 4  # a user between two who train, and who only tests
    kept = first_users(whole._replace(user_test=stranger), 0)
    assert len(kept.x_test) == len(stranger) - 3 and set(kept.user_test.tolist()) <= {0, 1, 2, 3}
    assert (kept.x_test[:, 0, 0, 0] == kept.user_test).all()  # nobody has another's examples
    with pytest.raises(ValueError, match=r"num_clients: got 5, must be from 0 \(all\) to 4, the users of made"):
        first_users(written(), 5)
    with pytest.raises(
        ValueError, match=r"classes_per_client: got -1 .*digits names no users, must be -2, or at least 0"
    ):
        first_users(data.load("digits"), 0)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["fed_avg", "ditto", "lg_fed_avg", "fed_ensemble-2", "fed_dyn_ensemble-2"])
def test_what_is_measured_is_each_clients_own_prediction_on_its_own_examples(key: str) -> None:
    study = study_of("fed_ensemble.table3", (*TINY, f"methods={key.split('-')[0]}"))
    trial = classifiers.divide(study, tables.DISTORTED, 0)
    assert trial.by_client is not None
    method = classifiers._methods(study.settings, trial)[key]
    algorithm = method.build(0, 0.5)
    assert (algorithm.personal is None) == (key == "fed_avg")
    run = simulate(algorithm, method.data, num_rounds=3, seed=0, devices=Devices("scan"))
    found = classifiers._measure_clients(classifiers._largest([trial]), algorithm, run.state, method.splits)
    for part, held in trial.by_client.items():
        own = evaluate_clients(algorithm, run.state, trial.data, held)
        assert float(found[f"{part}.accuracy"]) == pytest.approx(float(own.mean), abs=1e-6)
    test = trial.by_client["test"]
    everybodys = evaluate_clients(algorithm._replace(personal=None), run.state, trial.data, test)
    assert float(found["test.shared"]) == pytest.approx(float(everybodys.mean), abs=1e-6)
    bounds = np.asarray(test.offsets)
    turned = [np.asarray(test.indices[bounds[i] : bounds[i + 1]]) for i in np.roll(np.arange(5), -1)]
    offsets = jnp.asarray(np.cumsum([0, *map(len, turned)]), jnp.int32)
    others = test._replace(indices=jnp.asarray(np.concatenate(turned), jnp.int32), offsets=offsets)
    another = evaluate_clients(algorithm, run.state, trial.data, others)
    assert float(found["test.others"]) == pytest.approx(float(another.mean), abs=1e-6)


def scores(method: str, own: list[float], shared: float, others: float) -> Scores:
    values = {"accuracy": np.array(own), "shared": np.array(own) + shared, "others": np.array(own) + others}
    entrant = Entrant(method, 5 if method in classifiers.ENSEMBLES else 1)
    return Scores(entrant, USERS, Tuned(Config(method, 0.1), 0.5, (), {}), values, 0.01)


def test_claims_are_those_of_the_paper() -> None:
    found = [scores("fed_avg", [0.70, 0.72, 0.71], 0, 0), scores("ditto", [0.80, 0.82, 0.815], -0.1, -0.2),
             scores("fed_ensemble", [0.82, 0.85, 0.83], 0.001, -0.001)]  # fmt: skip
    said = {claim.claim: claim.verdict for claim in tables._claims(found)}
    assert said["by user: Fed-ensemble, K = 5 is more accurate than FedAvg"] == "seen"
    assert said["by user: Ditto: a client predicts better for itself than everybody"] == "seen"
    assert said["by user: Fed-ensemble, K = 5: a client predicts better for itself than everybody"] == "not seen"
    assert said["by user: Fed-ensemble, K = 5: and better for itself than for another"] == "seen"
    swapped = [found[0]._replace(entrant=found[2].entrant), found[2]._replace(entrant=found[0].entrant)]
    assert next(tables._claims(swapped)).verdict == "not seen"


def test_the_title_says_that_clients_predict_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    own = scores("fed_avg", [0.7, 0.8], 0, 0)
    everybody = own._replace(values={"accuracy": own.values["accuracy"]})
    monkeypatch.setattr(classifiers, "_draw_rounds", lambda *_: None)
    titles = []
    for one in (own, everybody):
        monkeypatch.setattr(classifiers, "play_all", lambda studies, one=one: {"": ([one], {})})
        study = study_of("fed_ensemble.table3", TINY)
        titles.append(classifiers.outcome(study, "Table III", {}, lambda _: ()).sheets[0].title)
    assert "own examples" in titles[0] and "own examples" not in titles[1]


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    outcome, _ = performed("fed_ensemble.table3", TINY, tmp_path)
    assert [row["method"] for row in outcome.rows] == list(tables.BY_WRITER.methods)
    for row in outcome.rows:
        assert all(0 <= row[name] <= 1 for name in ("accuracy", "shared", "others"))
    shared = {row["method"]: row["shared"] for row in outcome.rows}
    assert shared["fed_avg"] == pytest.approx(next(r["accuracy"] for r in outcome.rows if r["method"] == "fed_avg"))


@pytest.mark.slow
def test_writers_of_femnist(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"train": (30, 20, 25, 15), "test": (4, 0, 5, 3)}
    arrays = {f"{part}_offsets": np.cumsum([0, *of]) for part, of in sizes.items()}
    for part, of in sizes.items():
        arrays[f"{part}_images"] = rng.integers(0, 256, (sum(of), 28, 28)).astype(np.uint8)
        arrays[f"{part}_labels"] = rng.integers(0, 62, sum(of)).astype(np.uint8)
    np.savez(tmp_path / "femnist_made.npz", **arrays)
    changes = (*TINY[1:], "num_clients=4", "num_train=0", "num_validation=10", "num_test=0")
    outcome, _ = performed("fed_ensemble.table3", changes, tmp_path, dataset="femnist")
    assert outcome.sheets[0].columns[-1] == "published" and {row[-1] for row in outcome.sheets[0].rows} >= {"77.90"}
    assert {row["classes_per_client"] for row in outcome.rows} == {USERS}
