"""The documentation's new algorithm, FedExP, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedtangent._src.engine import Devices, simulate
from fedtangent._src.federated.algorithms import fed_ensemble
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations, uniform_sampling
from fedtangent._src.types import Algorithm

from .. import documents
from .reference import Params, sgd
from .toys import cohorts, models_of, owned_rows, two_layer, uneven_data

SEED, RATE, STEPS, EPSILON, ROUNDS = 3, 0.2, 3, 1e-3, 2
MOST_LINES = 40


def fed_exp() -> Callable[..., Algorithm]:
    return documents.run("def fed_exp")["fed_exp"]


def loop(params: Params, selections: list[list[int]], half: bool = True) -> tuple[Params, list[float]]:
    """Jhunjhunwala et al. 2023, algorithm 1; without ``half`` the 2 of the denominator is forgotten."""
    data, used = uneven_data(), []
    rows, x, y = owned_rows(data), np.asarray(data.x), np.asarray(data.y)
    for chosen in selections:
        updates = []
        for i in chosen:
            own = x[rows[i]], y[rows[i]]
            after = sgd(params, *own, [np.arange(len(rows[i]))] * STEPS, RATE, "squared_error")
            updates.append({name: params[name] - after[name] for name in params})
        mean = {name: sum(u[name] for u in updates) / len(updates) for name in params}
        squares = [sum((u[name] ** 2).sum() for name in u) for u in [*updates, mean]]
        rate = max(1.0, np.mean(squares[:-1]) / ((2 if half else 1) * (squares[-1] + EPSILON)))
        used.append(rate)
        params = {name: params[name] - rate * mean[name] for name in params}
    return params, used


def test_it_is_short() -> None:
    assert len(documents.example("def fed_exp").strip().splitlines()) < MOST_LINES


def test_two_rounds_are_those_of_the_paper() -> None:
    plan, work = uniform_sampling(6, 4), Work(steps=STEPS, batch_size=None)
    algorithm = fed_exp()(two_layer(), plan, client_learning_rate=RATE, work=work, epsilon=EPSILON)
    run = simulate(algorithm, uneven_data(), num_rounds=ROUNDS, seed=SEED, devices=Devices("scan"))
    start = models_of(algorithm, algorithm.init(SEED, 6))[0]
    selections = [row.tolist() for row in cohorts(plan, SEED, ROUNDS).client]
    (right, rates), (wrong, _) = loop(start, selections), loop(start, selections, half=False)
    mine = models_of(algorithm, run.state)[0]
    assert max(np.abs(mine[name] - right[name]).max() for name in mine) < 1e-10
    np.testing.assert_allclose(run.history.rounds["server_rate"][:, 0], rates, rtol=1e-12)
    assert max(np.abs(mine[name] - wrong[name]).max() for name in mine) > 1e-4


def test_it_refuses_a_rate_that_its_own_server_would_not_look_at() -> None:
    options = {"client_learning_rate": RATE, "work": Work(steps=1, batch_size=None)}
    with pytest.raises(
        ValueError, match=r"server_learning_rate: got 0\.5, but fed_exp has its own update at the server: leave"
    ):
        fed_exp()(two_layer(), uniform_sampling(6, 4), averaging=Averaging(server_learning_rate=0.5), **options)


def test_it_goes_into_an_ensemble() -> None:
    plan = per_client_permutations(6, 3)
    options = {"client_learning_rate": RATE, "work": Work(epochs=1, batch_size=2)}
    algorithm = fed_ensemble(two_layer(), plan, base=fed_exp(), **options)
    assert algorithm.name == "fed_exp_ensemble"
    run = simulate(algorithm, uneven_data(), num_rounds=3, seed=SEED, devices=Devices("vmap"))
    assert (run.history.rounds["server_rate"] >= 1).all()
