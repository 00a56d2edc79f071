"""NTK-DFL on four graphs, small: who is compared with whom, and how rounds, bytes and claims are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import trials
from fedtangent._src.experiments.lab.harness import Record
from fedtangent._src.experiments.ntk_dfl import topologies
from fedtangent._src.experiments.ntk_dfl.topologies import GOSSIP, NTK, SERVER, Ends, TopologySettings

from ..performed import performed, study_of

SMALL = (
    *("graphs=ring,complete", "num_clients=4", "num_rounds=2", "tuning_rounds=1", "width=8", "local_steps=2"),
    *("learning_rates=0.3", "tangent_rates=0.3", "times=10,40", "num_train=40", "num_validation=20", "num_test=40"),
)


@pytest.mark.slow
def test_a_small_run_counts(tmp_path: Path) -> None:
    outcome, metrics = performed("ntk_dfl.topologies", SMALL, tmp_path)
    assert outcome.failed == () and len(outcome.claims) == 10
    assert [(row["graph"], row["method"]) for row in outcome.rows] == [
        (graph, topologies.LABELS[method]) for graph in ("ring", "complete") for method in (SERVER, NTK, GOSSIP)
    ]
    # on a complete graph all clients have the same model, which is NTK-FL's
    server, ring, complete = (outcome.rows[i] for i in (0, 1, 4))
    assert complete["accuracy"] == complete["of_clients"] == server["accuracy"]
    assert ring["accuracy"] != ring["of_clients"]
    last = {m.algorithm: m.uplink_bytes for m in metrics if m.round == 2}
    assert last["ntk_dfl-complete learning_rate=0.3"] > last["ntk_dfl-ring learning_rate=0.3"]


def record(accuracy: list[float], bytes_a_round: int) -> Record:
    rounds = np.arange(len(accuracy))
    metrics = {"test.accuracy": np.array(accuracy), "test.accuracy_of_clients": np.array(accuracy) - 0.25}
    return Record(rounds, metrics, np.outer(rounds, [bytes_a_round, 0]), np.zeros(len(accuracy) - 1, int), 0.0)


def test_rounds_and_bytes_to_the_target_and_accuracy_within_others_bytes() -> None:
    own = [record([0.1, 0.5, 0.875], 2**20), record([0.1, 0.75, 0.75], 2**20)]
    others = [record([0.1, 0.2, 0.3], 2**19), record([0.1, 0.8, 0.8], 2**18)]
    found = topologies.ends(own, others, 0.8)
    assert found.accuracy.tolist() == [0.875, 0.75] and found.of_clients.tolist() == [0.625, 0.5]
    assert found.rounds.tolist() == [2, 3] and found.mib.tolist() == [2, np.inf]  # the second never reaches it
    assert found.within_bytes.tolist() == [0.5, 0.1]


def test_claims_are_of_differences_by_seed() -> None:
    def claimed(lead: float, rounds: float) -> list[str]:
        noise = np.array([0.0, 0.002, 0.004])
        ends = {
            method: Ends(
                accuracy + noise, accuracy - 0.15 + noise, first + 0 * noise, 0 * noise, accuracy - 0.3 + noise
            )
            for method, accuracy, first in ((SERVER, 0.9, 2.0), (NTK, 0.7 + lead, 4.0), (GOSSIP, 0.7, rounds))
        }
        return [claim.verdict for claim in topologies._claims(ends, "ring", TopologySettings())]

    assert claimed(0.19, 8.0) == [lab.SEEN, lab.SEEN, lab.SEEN, lab.SEEN, lab.NOT_SEEN]
    assert claimed(-0.1, 3.0) == [lab.NOT_SEEN, lab.NOT_SEEN, lab.SEEN, lab.NOT_SEEN, lab.NOT_SEEN]


def test_a_pool_has_room_for_the_largest_neighbourhood() -> None:
    study = study_of("ntk_dfl.topologies", SMALL)
    methods = topologies.methods_of(study.settings, trials.label_skewed(study, 0))
    sizes = {"ntk_fl": 40, "ntk_dfl-ring": 32, "gossip-ring": 0, "ntk_dfl-complete": 40, "gossip-complete": 0}
    assert {name: method.pool_size for name, method in methods.items()} == sizes


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="tuning_seed: got 1, must not be among the seeds"):
        study_of("ntk_dfl.topologies", (*SMALL, "tuning_seed=1"))
    with pytest.raises(ValueError, match="graph: got 'star', allowed are"):
        study_of("ntk_dfl.topologies", (*SMALL, "graphs=star"))
