"""TCT beside FedAvg, small: who trains on what, what is exact, and how the gain is judged."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.tct import heterogeneity
from fedtangent._src.experiments.tct.heterogeneity import FED_AVG, IID, SCAFFOLD, TCT, UNTRAINED, Result

from ..performed import performed, study_of

SMALL = (
    *("width=8", "num_train=40", "num_test=30", "num_clients=5", "first_rounds=2", "convex_rounds=3"),
    *("local_steps=2", "batch_size=4", "rates=0.1,0.3", "num_features=60", "convex_steps=4"),
)
FEW = "2 classes a client"


@pytest.mark.slow
def test_a_small_run_counts(tmp_path: Path) -> None:
    outcome, metrics = performed("tct.heterogeneity", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.claims) == 5
    assert all(verdict.holds and verdict.control_fails for verdict in outcome.verdicts) and outcome.verdicts
    assert {(row["clients"], row["method"]) for row in outcome.rows} == {
        (clients, method) for clients in (FEW, IID) for method in (TCT, FED_AVG, SCAFFOLD, UNTRAINED)
    }
    curves: dict[tuple[str, int], list[float]] = {}
    for metric in metrics:
        curves.setdefault((metric.algorithm, metric.seed), []).append(metric.value)
    assert all(len(curve) == 6 for curve in curves.values()) and len(curves) == 16
    for clients in (FEW, IID):
        of_tct, of_fed_avg = (curves[f"{clients}, {method}", 0] for method in (TCT, FED_AVG))
        assert of_tct[:3] == of_fed_avg[:3]  # the first phase is FedAvg


def test_the_clients_and_the_rate_of_the_second_phase() -> None:
    study = study_of("tct.heterogeneity", SMALL)
    with heterogeneity.ENTRIES[0].arithmetic():
        tasks = dict(heterogeneity._tasks(study, 0))
        weights = tasks[FEW].network(study.settings.width).init(jax.random.key(0))
        second = heterogeneity.second_phase(tasks[FEW], study.settings, weights)
        phi = np.asarray(second.data[0])
    task = tasks[FEW]
    assert max(len(set(task.data[1][task.clients.client(i)])) for i in range(5)) == 2
    assert max(len(set(task.data[1][tasks[IID].clients.client(i)])) for i in range(5)) > 2
    largest = [
        np.linalg.eigvalsh(phi[rows] @ phi[rows].T)[-1] / len(rows) for rows in map(task.clients.client, range(5))
    ]
    assert second.rate * max(largest) == pytest.approx(1, rel=1e-5)  # features are float32
    assert phi.shape == (40, 60) and len(second.accuracy) == 4


def test_the_gain_under_heterogeneity_is_a_difference_of_differences() -> None:
    def claimed(few: tuple[float, ...], iid: tuple[float, ...]) -> list[lab.Claim]:
        """Claims where TCT leads FedAvg by so much with each seed, and no other method."""
        places = {
            (clients, method): [
                Result(clients, method, seed, 0.1, np.array([0.1, 0.5 + (gain if method == TCT else 0.0)]))
                for seed, gain in enumerate(gains)
            ]
            for clients, gains in ((FEW, few), (IID, iid))
            for method in (TCT, FED_AVG, SCAFFOLD, UNTRAINED)
        }
        return list(heterogeneity._claims(places))

    seen = [claim.verdict for claim in claimed((0.2, 0.21, 0.22), (0.1, 0.11, 0.11))]
    assert seen == [lab.SEEN] * 5
    same = [claim.verdict for claim in claimed((0.1, 0.11, 0.12), (0.2, 0.21, 0.21))]
    assert same == [lab.SEEN, lab.NOT_SEEN, *[lab.SEEN] * 3]
