"""The laws that a user checks of an algorithm of her own: kept by built-in ones, broken by broken ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fedtangent as ft
from fedtangent._src.entries import catalogue
from fedtangent._src.federated.algorithms.common import AveragingParts, train_and_average, trained
from fedtangent._src.testing import check_laws
from fedtangent._src.types import Server

from .federated.laws import LAWS
from .nightly import nightly

TRAINED = {name: laws for name, laws in LAWS.items() if "client_learning_rate" in laws.arguments}
OTHER_NETWORKS = ("data_sharing", "lg_fed_avg")  # need rows that all clients share, or names of a network's parameters
KEPT = [name for name, laws in TRAINED.items() if laws.cohorts == "many" and name not in OTHER_NETWORKS]
EXEMPT = {
    "fed_dyn": {"rate 0": "the server moves by h / mu"},
    "dp_fed_avg": {"rate 0": "its noise moves the server", "order": "the noise is drawn for each slot"},
    "fed_be": {"rate 0": "its server trains by distillation"},
}


@pytest.mark.parametrize("name", nightly(KEPT, ["scaffold"]))
def test_built_in_algorithms_keep_the_laws(name: str) -> None:
    recipe = catalogue("algorithms")[name].recipe
    laws = check_laws(recipe, exempt=EXEMPT.get(name), **LAWS[name].arguments)
    assert len(laws) == 9 and all(law.holds is not False for law in laws)
    algorithm = recipe(*dummies(), **LAWS[name].arguments)
    skipped = set(EXEMPT.get(name, {})) | ({"theory"} if isinstance(algorithm.rule, str) else set())
    assert {law.name for law in laws if law.holds is None} == skipped | (
        {"rate 0"} if algorithm.params is None else set()
    )


def dummies() -> tuple[Any, Any]:
    return ft.models.mlp(3, 2, (4,)), ft.schedules.uniform_sampling(7, 4)


def averaging(update: Any, rule: Any = "it is broken") -> Any:
    """A recipe whose server is ``update(params, mean, info)``."""

    @ft.recipe
    def broken(model: Any, schedule: Any, client_learning_rate: Any) -> Any:
        training = trained(model, client_learning_rate, None, ft.Work(steps=3, batch_size=None), None)
        server = Server(lambda p: p, lambda p: p, lambda p: p, update)
        return train_and_average("broken", training, schedule, ft.Averaging(), AveragingParts(server=server), rule)

    return broken


def stepped(share: float) -> Any:
    return lambda params, mean, info: (jax.tree.map(lambda w, d: w - share * d, params, mean), {})


def test_a_recipe_of_ones_own_keeps_them() -> None:
    laws = check_laws(averaging(stepped(0.5), {"server_learning_rate": 0.5}), client_learning_rate=0.2)
    assert all(law.holds for law in laws)


def test_weight_decay_has_no_theory_for_a_network_that_is_not_homogeneous() -> None:
    recipe = averaging(stepped(1.0), {"weight_decay": 0.1})  # the law would look at the rule only
    others = ("mapping", "order", "evaluation", "resume", "absence", "traces", "model", "rate 0")
    laws = check_laws(recipe, client_learning_rate=0.2, exempt=dict.fromkeys(others, "tested above"))
    assert laws[-1].name == "theory" and laws[-1].holds is None and "weight decay" in laws[-1].why


@pytest.mark.parametrize(
    ("update", "rule", "broken"),
    [
        (stepped(0.5), {"server_learning_rate": 0.525}, ["theory"]),
        (
            lambda p, d, info: (jax.tree.map(lambda w, m: w - m - 1e-3 * jnp.sign(w), p, d), {}),
            "not linear",
            ["rate 0"],
        ),
    ],
    ids=["another rule", "moves at rate 0"],
)
def test_broken_algorithms_break_them(update: Any, rule: Any, broken: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_laws(averaging(update, rule), client_learning_rate=0.2)
    assert f"breaks {len(broken)} laws: " in str(caught.value)
    assert all(f"{name}: " in str(caught.value) for name in broken)


def test_an_algorithm_that_looks_at_the_order_of_its_clients_is_found() -> None:
    @ft.recipe
    def first_only(model: Any, schedule: Any, client_learning_rate: Any) -> Any:
        algorithm = ft.fed_avg(model, schedule, client_learning_rate, ft.Work(steps=2, batch_size=None))

        def step(state: Any, data: Any, engine: Any) -> Any:
            after, info = algorithm.step(state, data, engine)
            odd = info["cohort"].client[0].astype(float)
            return after._replace(server=jax.tree.map(lambda leaf: leaf * (1 + 1e-3 * odd), after.server)), info

        return algorithm._replace(step=step)

    with pytest.raises(AssertionError, match="order: "):
        check_laws(first_only, client_learning_rate=0.2, exempt={"theory": "none", "rate 0": "none"})


def test_an_algorithm_that_does_not_train_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="broken: training moves no model"):
        check_laws(averaging(stepped(0.0)), client_learning_rate=0.2)
    with pytest.raises(ValueError, match="exempt: got 'speed', allowed are mapping, order"):
        check_laws(ft.fed_avg, client_learning_rate=0.2, exempt={"speed": "slow"})
