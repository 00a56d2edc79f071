"""Fed-ensemble around any algorithm: one model is that algorithm, several are as many of it."""

from __future__ import annotations

from typing import Any

import pytest

import fedtangent as ft
from fedtangent._src.engine import Devices, simulate
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients, per_client_permutations

from ..nightly import nightly
from .toys import distance, two_layer, uneven_data

BASES: dict[str, dict[str, Any]] = {
    "fed_avg": {},
    "fed_prox": {"mu": 0.3},
    "fed_dyn": {"mu": 0.2},
    "scaffold": {},
    "fed_nova": {"normalisation": ft.Normalisation(mu=0.1)},
    "fed_adam": {},
    "fed_avg_m": {},
    "ditto": {"personal_training": ft.PersonalTraining(mu=0.3)},
    "fed_com": {},
    "dp_fed_avg": {"privacy": ft.ClientPrivacy(clip_norm=0.5, noise_multiplier=0.3)},
}
SEED, ROUNDS = 3, 3


def built(schedule: Any, name: str, ensemble: bool) -> Any:
    base, own = getattr(algorithms, name), BASES[name]
    given = {"client_learning_rate": 0.2, "work": Work(epochs=1, batch_size=2), **own}
    model = two_layer()
    return algorithms.fed_ensemble(model, schedule, base=base, **given) if ensemble else base(model, schedule, **given)


@pytest.mark.parametrize("name", nightly(BASES, ["scaffold"]))
def test_one_model_is_the_algorithm_itself_bit_for_bit(name: str) -> None:
    """Permutations of one model are all clients every round."""
    ensemble, alone = (
        simulate(
            built(schedule, name, several), uneven_data(), num_rounds=ROUNDS, seed=SEED, devices=Devices("scan")
        ).state
        for schedule, several in ((per_client_permutations(6, 1), True), (all_clients(6), False))
    )
    assert distance((ensemble.server, ensemble.client), (alone.server, alone.client)) == 0
    assert distance(alone.server, built(all_clients(6), name, False).init(SEED, 6).server) > 1e-4


def test_its_name_says_what_is_inside() -> None:
    assert built(all_clients(6, 2), "fed_avg", True).name == "fed_ensemble"
    assert built(all_clients(6, 2), "fed_dyn", True).name == "fed_dyn_ensemble"
