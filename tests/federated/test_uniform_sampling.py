"""Few of many clients, drawn without looking at all of them: distinct, uniform, jointly so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.federated.schedule import _distinct, uniform_sampling

DRAWS, CLIENTS, NUMBER = 100_000, 40, 5


def drawn(num_clients: int, number: int, draws: int, seed: int = 0) -> np.ndarray:
    sample = jax.jit(jax.vmap(lambda key: _distinct(key, num_clients, number)))
    return np.asarray(sample(jax.random.split(jax.random.key(seed), draws)))


def excess(counts: np.ndarray) -> float:
    """Chi-squared of equal ``counts``, in its own standard deviations above its mean."""
    expected = counts.mean()
    dof = counts.size - 1
    return float((np.sum((counts - expected) ** 2 / expected) - dof) / np.sqrt(2 * dof))


@pytest.mark.parametrize(("num_clients", "number"), [(40, 5), (41, 5), (9, 1), (7, 7), (6, 4), (1, 1)])
def test_distinct_clients(num_clients: int, number: int) -> None:
    rows = drawn(num_clients, number, 500)
    assert rows.shape == (500, number)
    assert rows.min() >= 0 and rows.max() < num_clients
    assert all(len(set(row)) == number for row in rows.tolist())


def test_every_ordered_pair_is_as_likely() -> None:
    rows = drawn(CLIENTS, NUMBER, DRAWS)
    for one, other in ((0, 1), (3, 4), (4, 0)):
        pairs = np.zeros((CLIENTS, CLIENTS))
        np.add.at(pairs, (rows[:, one], rows[:, other]), 1)
        assert np.trace(pairs) == 0
        assert abs(excess(pairs[~np.eye(CLIENTS, dtype=bool)])) < 4
    # negative control: with replacement, sorted, repetitions moved to the next client
    biased = np.sort(np.random.default_rng(0).integers(0, CLIENTS, (DRAWS, 2)), axis=1)
    biased[:, 1] = np.where(biased[:, 0] == biased[:, 1], (biased[:, 1] + 1) % CLIENTS, biased[:, 1])
    assert excess(np.bincount(biased[:, 1], minlength=CLIENTS)) > 100


def test_both_ways_of_drawing_are_uniform_at_the_border() -> None:
    for num_clients in (8 * NUMBER - 1, 8 * NUMBER):
        rows = drawn(num_clients, NUMBER, 20_000)
        for column in rows.T:
            assert abs(excess(np.bincount(column, minlength=num_clients))) < 4


def test_a_round_does_not_look_at_every_client() -> None:
    """No array of the traced draw grows with the number of clients."""
    plan = uniform_sampling(10**6, 10)
    jaxpr = jax.make_jaxpr(lambda key: plan.sample(key, (), jnp.int32(3))[0])(jax.random.key(0))
    assert "1000000]" not in str(jaxpr)
    all_of_them = uniform_sampling(10**3, 900)
    assert "1000]" in str(jax.make_jaxpr(lambda key: all_of_them.sample(key, (), jnp.int32(3))[0])(jax.random.key(0)))
