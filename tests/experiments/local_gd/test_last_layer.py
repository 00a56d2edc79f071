"""Local-GD's fig. 1(h) and 1(i): the rounds are those of a NumPy loop, controls fail, bad requests are refused."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import data
from fedtangent._src.data import partition
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.experiments.local_gd import last_layer, pretrained
from fedtangent._src.experiments.local_gd.last_layer import LastLayerSettings

from ...drawn import parameters
from ..performed import performed, study_of

SMALL = ("num_features=64",)


@pytest.mark.slow
@pytest.mark.parametrize("panel", ["h", "i"])
def test_a_small_run_counts(panel: str, tmp_path: Path) -> None:
    found, metrics = performed(f"local_gd.fig1{panel}", SMALL, tmp_path)
    assert found.failed == () and all(v.control_fails is not False for v in found.verdicts)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {f"fig1{panel}.png"}
    rows = {row["run"]: row for row in found.rows}
    assert rows["chance"]["distance"] < rows["local_gd"]["distance"] < rows["one node"]["distance"]
    assert rows["one node"]["accuracy"] < min(rows["local_gd"]["accuracy"], rows["centralised"]["accuracy"])
    distances = [m for m in metrics if m.metric == "direction_distance" and m.algorithm == "centralised"]
    assert {m.value for m in distances if m.round == 12} == {0.0} and len(distances) == 2 * 12


def toy() -> Dataset:
    """Features of three classes."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3, dtype=np.int32), 20)
    x = (rng.standard_normal((60, 4)) + y[:, None]).astype(np.float32)
    info = data.SourceInfo("drawn here", "none", "generated")
    return Dataset("toy", x, y, x, y, 3, None, info)


def loop(loaded: Dataset, held: list[np.ndarray], s: LastLayerSettings) -> np.ndarray:
    """Algorithm 1 with full-batch steps on cross entropy, in float64: weights and bias after every round."""
    x = np.hstack([loaded.x_train.astype(float), np.ones((len(loaded.y_train), 1))])
    targets, w = np.eye(3)[loaded.y_train], np.zeros((5, 3))
    path = [w]
    for _ in range(s.num_rounds):
        ends = []
        for rows in held:
            own = path[-1].copy()
            for _ in range(s.local_steps):
                share = np.exp(x[rows] @ own)
                share /= share.sum(axis=1, keepdims=True)
                own -= s.learning_rate * x[rows].T @ (share - targets[rows]) / len(rows)
            ends.append(own)
        path.append(np.mean(ends, axis=0))
    return np.array([p.ravel() for p in path])


def test_the_rounds_are_those_of_a_loop() -> None:
    """With minibatches as large as all data: then nothing is drawn."""
    s = LastLayerSettings(num_clients=3, learning_rate=0.1, batch_size=60, local_steps=8, num_rounds=4)
    loaded, found = toy(), last_layer._train(toy(), s, 1)
    nodes = partition.majority(loaded.y_train, 3, 0.5, 1)
    right = {
        "local_gd": loop(loaded, [nodes.client(i) for i in range(3)], s),
        "centralised": loop(loaded, [nodes.indices], s),
        "one node": loop(loaded, [nodes.client(1)], s),
    }
    for name, path in right.items():
        assert found.weights[name] == pytest.approx(path, abs=2e-5)
        for other in right.keys() - {name}:
            assert np.abs(found.weights[name] - right[other]).max() > 1e-3
    assert found.weights["chance"] == pytest.approx(found.weights["centralised"], abs=1e-6)
    end = right["local_gd"][-1]
    guess = (loaded.x_test @ end.reshape(5, 3)[:4] + end[-3:]).argmax(axis=1)
    assert found.accuracy["local_gd"][-1] == pytest.approx(np.mean(guess == loaded.y_test))


def test_claims_and_verdicts_can_fail() -> None:
    noise = np.array([-0.01, 0.0, 0.01])
    ends = {"local_gd": 0.1 + noise, "chance": 0.02 + noise / 2, "one node": 0.8 + noise}
    claims, (verdict,) = last_layer._judge_h(0.5 + noise, 0.2 + noise * 0, ends)
    assert [c.verdict for c in claims] == ["seen"] * 3 and verdict.passed
    _, (wrong,) = last_layer._judge_h(0.5 + noise, 0.2 + noise * 0, {**ends, "local_gd": 0.45 + noise})
    assert wrong.holds is False
    _, (empty,) = last_layer._judge_h(0.5 + noise, 0.2 + noise * 0, {**ends, "one node": 0.1 + noise})
    assert empty.control_fails is False
    right = {"centralised": 0.9 + noise, "local_gd": 0.899 + noise, "one node": 0.7 + noise}
    assert last_layer._judge_i(right)[1][0].passed
    assert last_layer._judge_i({**right, "local_gd": 0.8 + noise})[0][0].verdict == "not seen"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("weights=/nowhere/model.safetensors",), "weights: got /nowhere/model.safetensors for digits, must be left"),
        (("num_features=30",), "num_features: got 30, must be a multiple"),
        (("filter_size=9",), "filter_size: got 9"),
        (("num_rounds=3",), "num_rounds: got 3"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_of("local_gd.fig1h", changes)


def test_features_are_the_inputs_of_the_trained_networks_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By day from drawn weights, biases too; that they are trained is held with the features of a run, by night."""
    loaded = data.load("digits", num_train=60, num_test=20)
    whole = pretrained._network(loaded.x_train.shape[1:], 10, 16)
    params = jax.tree.map(np.asarray, parameters(whole, scale=0.3, shift=0.1))
    model, cut = pretrained.beheaded(params, loaded.x_train.shape[1:], 16)
    values = pretrained._features(model, cut, "", loaded.x_test).values
    outputs = values @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    assert outputs == pytest.approx(np.asarray(jax.jit(whole.apply)(params, jnp.asarray(loaded.x_test))), abs=1e-4)
    assert np.abs(values).max() > 0.1

    def memorised(chosen: Dataset, *_: object) -> object:
        used.append(chosen)
        return params

    used = list[Dataset]()
    monkeypatch.setattr(pretrained, "_trained", memorised)
    found = pretrained.with_trained_features(loaded, 0.25, 1, 16, 3)
    assert found.x_train.shape == (45, 16) and found.x_test.shape == (20, 16) and len(used[0].y_train) == 15
    assert sorted([*found.y_train, *used[0].y_train]) == sorted(loaded.y_train)  # no image in both
    assert "ResNet trained here, 1 epochs on 15 other images, standardised" in found.info.source


@pytest.mark.slow
def test_a_run_on_trained_features_says_so(tmp_path: Path) -> None:
    changes = ("pretraining=0.5", "num_features=16", "epochs=2", "num_rounds=4", "local_steps=5")
    found, _ = performed("local_gd.fig1h", changes, tmp_path)
    assert all("features of a network trained here" in claim.claim for claim in found.claims)


def test_pretraining_refuses_other_networks() -> None:
    with pytest.raises(ValueError, match="num_features: got 30, must be a multiple of 8 with pretraining"):
        study_of("local_gd.fig1h", ("pretraining=0.5", "num_features=30"))
    with pytest.raises(ValueError, match=r"pretraining: got 0\.5 together with a file of weights, must be 0"):
        pretrained.check(0.5, 16, "model.safetensors")
