"""Metrics of a prediction against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from fedtangent.measures.prediction import METRICS, measure
from fedtangent.types import Prediction


@pytest.mark.parametrize(("loss", "metric"), [("cross_entropy", "nll"), ("squared_error", "mse")])
def test_measures_against_plain_formulas(loss: str, metric: str) -> None:
    rng = np.random.default_rng(0)
    members, labels = rng.standard_normal((3, 20, 4)), rng.integers(0, 4, 20)
    targets = np.eye(4)[labels] - 0.25
    given = Prediction(members.mean(axis=0), members)  # type: ignore[arg-type]
    found = measure(given, targets, labels, loss)  # type: ignore[arg-type]
    probability = np.exp(members) / np.exp(members).sum(axis=-1, keepdims=True)
    mean = probability.mean(axis=0) if loss == "cross_entropy" else members.mean(axis=0)
    nll = -np.mean(np.log(mean[np.arange(20), labels])) if loss == "cross_entropy" else np.mean((mean - targets) ** 2)
    assert found[metric] == pytest.approx(nll, rel=1e-12)
    assert found["accuracy"] == np.mean(mean.argmax(axis=-1) == labels)
    assert found["accuracy_of_members"] == pytest.approx(np.mean(members.argmax(axis=-1) == labels), rel=1e-12)
    assert found["knowledge_variance"] == pytest.approx(np.mean(members.var(axis=0)), rel=1e-12)
    assert list(found) == [m for m in METRICS if m in found]
    if loss == "cross_entropy":
        entropy = -np.sum(mean * np.log(mean), axis=-1)
        own = -np.sum(probability * np.log(probability), axis=-1).mean(axis=0)
        assert found["predictive_entropy"] == pytest.approx(entropy.mean(), rel=1e-12)
        assert found["mutual_information"] == pytest.approx((entropy - own).mean(), rel=1e-10)
        assert found["brier"] == pytest.approx(np.mean(np.sum((mean - np.eye(4)[labels]) ** 2, axis=-1)), rel=1e-12)
        assert 0 < found["ece"] < 1


def test_a_single_model_has_nothing_to_disagree_about() -> None:
    members, labels = np.random.default_rng(0).standard_normal((1, 20, 4)), np.zeros(20, int)
    given = Prediction(members[0], members)  # type: ignore[arg-type]
    found = measure(given, np.eye(4)[labels], labels, "cross_entropy")  # type: ignore[arg-type]
    assert set(found) == set(METRICS) - {"mse", "mutual_information", "knowledge_variance"}
