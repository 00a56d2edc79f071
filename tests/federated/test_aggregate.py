"""Reductions of messages: against NumPy, slot by slot and all at once, and deaf to empty slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.federated.aggregate import slots_of, stack, weighted_mean
from fedtangent._src.types import Aggregate, Cohort, PyTree

from ..nightly import nightly

MODEL, WEIGHT = np.array([2, 0, 2, 0, 2]), np.array([3.0, 0.5, 1.0, 0.0, 0.0])


def messages(empty: float = 0.0) -> dict[str, np.ndarray]:
    """Five messages; those of the two empty slots are ``empty``."""
    rng = np.random.default_rng(0)
    rows = {"a": rng.normal(size=(5, 3, 2)), "b": rng.normal(size=(5,)).astype(np.float32)}
    return {name: np.where((WEIGHT > 0).reshape((5,) + (1,) * (m.ndim - 1)), m, empty) for name, m in rows.items()}


def reduced(aggregate: Aggregate, sent: dict[str, np.ndarray], batches: list[slice], num_models: int = 3) -> PyTree:
    """Feed the slots in ``batches``."""
    cohort = Cohort(jnp.arange(5), jnp.asarray(MODEL), jnp.asarray(WEIGHT, jnp.float32))
    shapes = {name: jax.ShapeDtypeStruct(m.shape[1:], m.dtype) for name, m in sent.items()}
    acc = aggregate.init(shapes, num_models)
    slots = slots_of(cohort, 3, jnp.arange(6))
    for batch in batches:
        rows, part = jax.tree.map(lambda leaf, batch=batch: jnp.asarray(leaf)[batch], (slots, sent))
        acc = aggregate.add(acc, rows, part)
    return aggregate.finish(acc)


FEEDS = {
    "one_by_one": [slice(i, i + 1) for i in range(5)],
    "at_once": [slice(0, 5)],
    "in_parts": [slice(0, 2), slice(2, 3), slice(3, 5)],
}


@pytest.mark.parametrize("empty", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("feed", FEEDS)
def test_weighted_mean(feed: str, empty: float) -> None:
    mean = reduced(weighted_mean(), messages(empty), FEEDS[feed])
    for name, sent in messages().items():
        precision = 1e-6 if sent.dtype == np.float32 else 1e-14
        assert mean[name].dtype == sent.dtype
        np.testing.assert_allclose(mean[name][2], (3 * sent[0] + sent[2]) / 4, rtol=precision)
        np.testing.assert_allclose(mean[name][0], sent[1], rtol=precision)
        assert np.all(np.asarray(mean[name][1]) == 0)
        assert not np.allclose(mean[name][2], (sent[0] + sent[2]) / 2, rtol=precision)  # negative control: no weights


def test_a_message_that_counts_and_is_not_finite_shows() -> None:
    sent = messages()
    sent["a"][0, 0, 0] = np.nan
    assert np.isnan(reduced(weighted_mean(), sent, FEEDS["at_once"])["a"][2, 0, 0])


@pytest.mark.parametrize("empty", [0.0, np.nan])
@pytest.mark.parametrize("feed", FEEDS)
def test_stack_keeps_every_message_of_a_filled_slot_in_order(feed: str, empty: float) -> None:
    kept = reduced(stack(2), messages(empty), FEEDS[feed])
    assert kept.filled.tolist() == [1, 0, 2]
    assert kept.weight.tolist() == [[0.5, 0], [0, 0], [3, 1]]
    assert kept.client.tolist() == [[1, 0], [0, 0], [0, 2]]
    for name, sent in messages().items():
        rows: Any = kept.messages[name]
        assert rows.shape == (3, 2, *sent.shape[1:])
        np.testing.assert_array_equal(rows[2], sent[[0, 2]])
        np.testing.assert_array_equal(rows[0], np.stack([sent[1], np.zeros_like(sent[1])]))
        assert np.all(np.asarray(rows[1]) == 0)


@pytest.mark.parametrize("feed", FEEDS)
def test_stack_counts_the_messages_it_has_no_room_for(feed: str) -> None:
    kept = reduced(stack(1), messages(), FEEDS[feed])
    assert kept.filled.tolist() == [1, 0, 2]
    np.testing.assert_array_equal(
        kept.messages["a"][:, 0], np.stack([messages()["a"][1], np.zeros((3, 2)), messages()["a"][0]])
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count", nightly([1, 7, 600], [7]))
@pytest.mark.parametrize("weight", nightly([1.0, 3000.0], [3000.0]))
def test_the_mean_of_many_messages_in_half_precision_is_exact(dtype: Any, count: int, weight: float) -> None:
    """600 messages, one by one, in parts of seven and at once: bfloat16 alone would stop at 256 times a message."""
    sent = jnp.asarray(np.random.default_rng(0).normal(0.5, 0.1, (600, 5)), dtype)
    aggregate, places = weighted_mean(), np.arange(600)
    cohort = Cohort(jnp.asarray(places), jnp.zeros(600, jnp.int32), jnp.full(600, weight, jnp.float32))
    slots = slots_of(cohort, 1, jnp.arange(601))
    acc = aggregate.init(jax.ShapeDtypeStruct((5,), dtype), 1)
    for at in range(0, 600, count):
        rows, part = jax.tree.map(lambda leaf, at=at: leaf[at : at + count], (slots, sent))
        acc = aggregate.add(acc, rows, part)
    mean = aggregate.finish(acc)
    exact = np.asarray(sent, np.float64).mean(axis=0)
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean[0], exact, rtol=1e-5)
    alone = jax.lax.scan(lambda total, row: (total + row * weight, None), jnp.zeros(5, dtype), sent)[0]
    # the control: added up in half precision
    assert not np.allclose(np.asarray(alone, np.float64), 600 * weight * exact, rtol=1e-3)
