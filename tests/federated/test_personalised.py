"""Ditto, LG-FedAvg and purely local training against NumPy loops written from the papers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from fedtangent._src.federated import algorithms
from fedtangent._src.federated.algorithms.personalised import private_mask
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.federated.wire.channel import lossless
from fedtangent._src.models import mlp
from fedtangent._src.models.trainable import joined, part_of, rest_of

from . import reference
from . import reference_personalised as loops
from .personalised_runs import (
    DATA,
    MODEL,
    PARTIAL,
    PERMUTED,
    TOLERANCE,
    VISIBLE,
    X,
    Y,
    by_examples,
    own_of,
    personal_batches,
    ran,
    selections,
    start,
    train,
)
from .toys import NUM_CLIENTS, arguments_of, distance, models_of


def ditto_loop(fault: str) -> tuple[reference.Params, list[reference.Params]]:
    return loops.ditto(
        start("ditto")[0],
        selections(PARTIAL, 0),
        train,
        by_examples,
        X,
        Y,
        personal_batches(),
        rate=0.1,
        lam=0.7,
        num_clients=NUM_CLIENTS,
        fault=fault,
    )


def ditto_distance(fault: str) -> tuple[float, float]:
    algorithm, run = ran("ditto")
    w, v = ditto_loop(fault)
    apart = [distance(own_of(run.state.client, 0, i), v[i]) for i in range(NUM_CLIENTS)]
    return distance(models_of(algorithm, run.state)[0], w), max(apart)


def test_ditto_equals_the_loop() -> None:
    chosen = [set(row) for row in selections(PARTIAL, 0)]
    assert chosen[0] & chosen[1] and chosen[0] != chosen[1]  # partial, and somebody trains a personal model on
    assert {len(batch) for batch in personal_batches().values()} == {2, 4}
    assert max(ditto_distance("none")) < TOLERANCE


@pytest.mark.parametrize("fault", ["no prox", "sign", "new anchor", "initial anchor", "restart"])
def test_a_wrong_ditto_differs(fault: str) -> None:
    same, differs = ditto_distance(fault)
    assert same < TOLERANCE and differs > 1e-3


def test_ditto_has_the_global_model_of_fed_avg_and_its_costs() -> None:
    (_, run), (_, plain) = ran("ditto"), ran("fed_avg")
    assert distance(run.state.server, plain.state.server) < 1e-13
    assert run.history.cost == plain.history.cost
    assert run.history.rounds["personal_steps"].max() == 4 and np.isfinite(run.history.rounds["personal_loss"]).all()
    never = sorted(set(range(NUM_CLIENTS)) - {i for row in selections(PARTIAL, 0) for i in row})
    for i in never:
        assert distance(own_of(run.state.client, 0, i), start("ditto")[0]) == 0


def lg_distance(fault: str) -> float:
    _, run = ran("lg_fed_avg")
    far = []
    for k, params in enumerate(start("lg_fed_avg")):
        chosen = selections(PERMUTED, k, 4)
        shared, own = loops.lg_fed_avg(params, ["W", "b"], chosen, train, lambda i: 1.0, 0.7, NUM_CLIENTS, fault)
        far.append(distance({"V": np.asarray(run.state.server.server.params["V"][k])}, shared))
        far += [distance(own_of(run.state.client, k, i), own[i]) for i in range(NUM_CLIENTS)]
    return max(far)


def test_lg_fed_avg_equals_the_loop() -> None:
    assert lg_distance("none") < TOLERANCE


@pytest.mark.parametrize("fault", ["frozen private", "private averaged"])
def test_a_wrong_lg_fed_avg_differs(fault: str) -> None:
    assert lg_distance(fault) > VISIBLE


def test_lg_fed_avg_sends_and_charges_the_shared_part_only() -> None:
    algorithm, run = ran("lg_fed_avg")
    assert run.history.cost[:3] == (8 * 4 * 2, 0, 8 * 4 * 2)  # V [4, 2] in float64, both ways
    assert jax.tree.map(lambda leaf: leaf.shape, run.state.client) == {"W": (2, 6, 3, 4), "b": (2, 6, 1, 4), "V": None}
    shared = np.asarray(run.state.server.server.params["V"])
    found = algorithm.predict(run.state, DATA.x)
    outside = [reference.outputs({**m, "V": shared[k]}, X) for k, m in enumerate(start("lg_fed_avg"))]
    np.testing.assert_allclose(found.members, outside, rtol=0, atol=1e-13)


def local_distance(fault: str) -> float:
    own = loops.local_only(start("local_only")[0], selections(PARTIAL, 0), train, NUM_CLIENTS, fault)
    return max(distance(own_of(ran("local_only")[1].state.client, 0, i), own[i]) for i in range(NUM_CLIENTS))


def test_local_only_equals_the_loop() -> None:
    assert local_distance("none") < TOLERANCE


@pytest.mark.parametrize("fault", ["restart", "averaged"])
def test_a_wrong_local_only_differs(fault: str) -> None:
    assert local_distance(fault) > VISIBLE


def test_local_only_sends_the_initial_model_once_and_predicts_the_mean_of_the_clients() -> None:
    algorithm, run = ran("local_only")
    one_model = 8 * (3 * 4 + 4 + 4 * 2)
    ends = run.history.evaluations[-1]
    assert (ends.uplink_bytes, ends.downlink_bytes) == (0, NUM_CLIENTS * one_model)
    each = [reference.outputs(own_of(run.state.client, 0, i), X) for i in range(NUM_CLIENTS)]
    found = algorithm.predict(run.state, DATA.x)
    np.testing.assert_allclose(found.mean, np.mean(each, axis=0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.members, [np.mean(each, axis=0)], rtol=0, atol=1e-13)


# --- masks, precision, mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "private",
    ["^[Wb]$", {"W": True, "b": np.True_, "V": False}],
    ids=["expression", "tree"],
)
def test_ways_to_say_what_is_private(private: Any) -> None:
    assert private_mask(MODEL, private) == {"W": True, "b": True, "V": False}


def test_parts_of_a_nested_model_join_again() -> None:
    network = mlp(3, 2, (4,), b_std=0.1)
    mask, params = private_mask(network, "^0/"), network.init(jax.random.key(0))
    assert jax.tree.leaves(mask) == [True, True, False, False]
    shared, own = rest_of(mask, params), part_of(mask, params)
    assert [len(jax.tree.leaves(part)) for part in (shared, own)] == [2, 2]
    assert distance(joined(own, shared), params) == 0


COMMON = {"client_learning_rate": 0.1, "work": Work(steps=1, batch_size=None)}


@pytest.mark.parametrize(
    ("recipe", "changed", "named"),
    [
        ("ditto", {"mu": -0.1}, "mu: got -0.1, must be at least 0"),
        ("ditto", {"mu": float("nan")}, "mu: got nan"),
        ("ditto", {"mu": 1, "personal_learning_rate": 0.0}, "personal_learning_rate: got 0.0"),
        ("ditto", {"mu": 1, "client_learning_rate": 0.0}, "client_learning_rate: got 0.0"),
        ("ditto", {"mu": 1, "personal_work": Work()}, "exactly one of steps and epochs"),
        ("ditto", {"mu": 1, "loss": "hinge"}, "loss.*'hinge'"),
        ("lg_fed_avg", {"private": "bias"}, "private: got 'bias', which matches no parameter; .* V, W, b"),
        ("lg_fed_avg", {"private": "."}, "private: got '.', which matches all parameters"),
        ("lg_fed_avg", {"private": "("}, "private.*no regular expression"),
        ("lg_fed_avg", {"private": ["W", "b"]}, "private: got a mask of structure"),
        ("lg_fed_avg", {"private": {"W": True}}, "private: got a mask of structure"),
        ("lg_fed_avg", {"private": {"W": 1, "b": 0, "V": 0}}, "private: got .*, must be True or False"),
        ("lg_fed_avg", {"private": "V", "server_learning_rate": -1.0}, "server_learning_rate: got -1"),
        ("local_only", {"server_learning_rate": 0.5}, "server_learning_rate: got 0.5, but local_only does not use it"),
        ("local_only", {"channel": lossless()}, "channel: got .*, but local_only does not use it"),
        ("local_only", {"work": Work(steps=0, batch_size=None)}, "work.steps: got 0"),
    ],
)
def test_bad_arguments(recipe: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build = getattr(algorithms, recipe)
        build(MODEL, all_clients(6), **arguments_of(build, COMMON | changed))
