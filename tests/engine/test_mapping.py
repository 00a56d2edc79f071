"""Mappings: every one gives the same rounds, in the cohort's own order, whatever the sizes and the padding."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.engine import clients as engine_module
from fedtangent._src.engine.clients import (
    Mapping,
    _arrange,
    _by_size,
    _deal,
    _restore,
    chunked,
    default_mapping,
    device_mesh,
    engine_for,
    parse,
    sharded,
    vmap_clients,
)
from fedtangent._src.federated import algorithms, compose
from fedtangent._src.federated.compose import _fetched
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.ntk_fl import Evolution
from fedtangent._src.federated.schedule import drawn_cohorts, uniform_sampling
from fedtangent._src.types import Algorithm, Array, Cohort, FederatedData, PyTree, Slots

from ..federated.toys import distance, two_layer, uneven_data
from ..nightly import nightly
from .slot_loop import FOLDS, ROUNDING, assert_by_hand, mapped

VISIBLE = 1e-4


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(
    "mapping", nightly(["scan", "vmap", "chunked:1", "chunked:4", "chunked:100"], ["scan", "chunked:4"])
)
def test_every_mapping_is_a_loop_over_the_slots(mapping: str, fold: str) -> None:
    """By day without ``vmap``, which the test of batches below has, and without chunks of one slot or of all."""
    assert_by_hand(mapped(engine_for(uneven_data(), mapping).map_clients, fold), fold)


@pytest.mark.parametrize("fold", nightly(FOLDS, ["stack"]))
def test_sharded_over_one_device_is_the_same_loop_and_merges(fold: str) -> None:
    """Over several devices, of several processes: ``test_distributed.py``."""
    assert_by_hand(mapped(sharded(chunked(2, vmap_clients), device_mesh(1)), fold), fold)


@pytest.mark.parametrize(("held", "cut"), [(1, 1), (4, 4), (100, 7)])
def test_a_cpu_trains_as_many_at_once_as_its_cache_holds(monkeypatch: pytest.MonkeyPatch, held: int, cut: int) -> None:
    """The same loop, in batches of ``cut`` of the slots, each padded to its own largest client only."""
    message, widths = 2 * 8 + 8, []  # a model's numbers and its weight
    monkeypatch.setattr(engine_module, "WORTH", 2)
    monkeypatch.setattr(engine_module, "cache_bytes", lambda: int(3 * message * (held + 0.5)))
    inside = engine_module._lockstep

    def spy(train: Any, held: Any, aggregate: Any, acc: Any, slots: Slots) -> Any:
        widths.append(slots.client.shape[0])
        return inside(train, held, aggregate, acc, slots)

    monkeypatch.setattr(engine_module, "_lockstep", spy)
    assert_by_hand(mapped(vmap_clients), "mean")
    assert set(widths) == ({cut} if cut > 1 else set())


def test_a_cpu_whose_cache_holds_few_trains_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for held, expected in ((engine_module.WORTH - 1, 1), (engine_module.WORTH, engine_module.WORTH)):
        monkeypatch.setattr(engine_module, "cache_bytes", lambda held=held: 3000 * held)
        assert engine_module.side_by_side(1000) == expected


def test_padding_that_counts_is_another_run() -> None:
    """Negative control: the empty slots, and those that fill the last chunk, given a weight."""

    def counted(*args: Any) -> Any:
        train, held, aggregate, acc, slots = args
        return vmap_clients(train, held, aggregate, acc, slots._replace(weight=jnp.maximum(slots.weight, 1.0)))

    found, right = mapped(chunked(4, counted)), mapped(chunked(4, vmap_clients))
    assert np.abs(found[0]["w"] - right[0]["w"]).max() > VISIBLE


@hypothesis.given(st.integers(1, 40), st.integers(1, 9))
def test_every_slot_is_dealt_once_and_evenly(num_slots: int, devices: int) -> None:
    hands = _deal(num_slots, devices)
    assert hands.shape == (devices, -(-num_slots // devices))
    assert sorted(hands.ravel().tolist()) == list(range(hands.size))
    sizes = np.sort(np.random.default_rng(num_slots).integers(1, 100, hands.size))[::-1]
    shares = sizes[hands].sum(axis=1)
    assert shares.max() - shares.min() <= sizes[0]  # no device waits for more than one client of another
    falling = np.arange(hands.size)[::-1][hands].sum(axis=1)
    assert hands.shape[1] % 2 or len(set(falling.tolist())) == 1  # dealt back and forth, even steps even out


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(size: Array, width: int) -> tuple[Slots, Slots]:
    num, chunks = len(size), -(-len(size) // width)
    zeros = jnp.zeros(num, jnp.int32)
    slots = Slots(jnp.arange(num, dtype=jnp.int32) + 7, zeros, jnp.ones(num), size, size)
    order = jnp.full((chunks * width,), num, jnp.int32).at[:num].set(_by_size(slots))
    rows = _arrange(slots, order)
    return rows, _restore(rows, order, num)


@pytest.mark.parametrize(("num", "width"), [(1, 1), (5, 1), (5, 2), (5, 4)])
def test_arranged_and_restored(num: int, width: int) -> None:
    rng = np.random.default_rng(num)
    for sizes in (np.zeros(num, np.int32), *rng.integers(0, 6, (20, num), np.int32)):
        rows, back = there_and_back(sizes, width)
        assert np.all(np.diff(np.asarray(rows.size[:num])) <= 0)
        assert np.all(np.asarray(rows.weight) == (np.arange(len(rows.weight)) < num))
        np.testing.assert_array_equal(back.client, np.arange(num) + 7)


def test_names() -> None:
    assert parse("scan") == Mapping("scan", 1, 1)
    assert parse("vmap") == Mapping("vmap", None, 1)
    assert parse("chunked:8") == Mapping("chunked", 8, 1)
    assert parse("sharded", devices=4) == Mapping("scan", 1, 4)
    assert parse("sharded:chunked:3", devices=2) == Mapping("chunked", 3, 2)
    for name in ("scan", "vmap", "chunked:8", "sharded:scan", "sharded:vmap", "sharded:chunked:3"):
        assert str(parse(name, devices=2)) == name
    assert str(parse("sharded:vmap", devices=1)) == "vmap"
    assert default_mapping() == parse("scan")


@pytest.mark.parametrize(
    "name", ["", "pmap", "chunked", "chunked:", "chunked:0", "chunked:-1", "chunked:x", "sharded:"]
)
def test_other_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"mapping: got {name!r}, allowed are auto, scan, vmap, chunked:<n>"):
        engine_for(uneven_data(), name)


def test_engines_are_equal_so_that_a_second_run_compiles_nothing() -> None:
    for name in ("scan", "vmap", "chunked:2"):
        assert engine_for(uneven_data(), name) == engine_for(uneven_data(), name)
        assert hash(engine_for(uneven_data(), name)) == hash(engine_for(uneven_data(), name))
    assert engine_for(uneven_data(), "chunked:2") != engine_for(uneven_data(), "chunked:3")
    assert engine_for(uneven_data()).mesh is None


def test_a_cohort_is_fetched_together_only_where_that_is_cheap() -> None:
    x = jnp.arange(400.0).reshape(200, 2)
    even = FederatedData(x, x[:, 0], jnp.arange(200, dtype=jnp.int32)[::-1], jnp.arange(0, 201, 5, dtype=jnp.int32))
    cohort = Cohort(*(jnp.asarray(leaf[0]) for leaf in drawn_cohorts(uniform_sampling(40, 8), None, 1, weighting=None)))
    found = jax.jit(lambda cohort: _fetched(even, cohort, 5))(cohort)
    assert found is not None
    for slot, client in enumerate(np.asarray(cohort.client)):  # a client's own rows, through the partition's indices
        np.testing.assert_array_equal(found[0][slot], x[::-1][5 * client : 5 * client + 5])
    everyone = Cohort(jnp.arange(40, dtype=jnp.int32), jnp.zeros(40, jnp.int32), jnp.ones(40))
    assert _fetched(even, everyone, 5) is None  # most of the data
    skewed = even._replace(offsets=jnp.concatenate([jnp.arange(40, dtype=jnp.int32), jnp.array([200], jnp.int32)]))
    everybody = jnp.tile(jnp.arange(5, dtype=jnp.int32), 200)  # 200 clients that share five of ten examples
    shared = FederatedData(x[:10], x[:10, 0], everybody, jnp.arange(0, 1001, 5, dtype=jnp.int32))
    assert _fetched(shared, cohort, 5) is None  # forty examples, four times the data
    assert _fetched(skewed, Cohort(*(leaf[:1] for leaf in cohort)), 161) is None  # most of it would be padding


@pytest.mark.parametrize("method", nightly(["fed_avg", "ntk_fl"], ["fed_avg"]))
def test_neither_fetching_a_cohort_together_nor_chunks_change_a_run(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whole rounds; the laws of ``federated/test_laws.py`` hold every algorithm under scan and vmap."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(2, 6, 40))]).astype(np.int32)
    x = jnp.asarray(rng.normal(size=(offsets[-1], 3)))
    order = jnp.asarray(rng.permutation(offsets[-1]), jnp.int32)
    data = FederatedData(x, jnp.sin(x[:, :2]), order, jnp.asarray(offsets))
    model, plan = two_layer(), uniform_sampling(40, 5)

    def build() -> Algorithm:
        if method == "ntk_fl":
            return algorithms.ntk_fl(model, plan, learning_rate=0.3, evolution=Evolution(times=(1, 4)))
        return algorithms.fed_avg(model, plan, client_learning_rate=0.2, work=Work(epochs=2, batch_size=2))

    def run(mapping: str) -> PyTree:
        algorithm, engine = build(), engine_for(data, mapping)
        once = jax.jit(lambda state: algorithm.step(state, data, engine)[0])
        return once(once(algorithm.init(0, 40))).server

    together = run("chunked:2")
    asked: list[bool] = []

    def apart(*given: Any) -> None:
        asked.append(_fetched(*given) is not None)

    monkeypatch.setattr(compose, "_fetched", apart)
    assert distance(run("scan"), together) < ROUNDING
    assert asked and all(asked)
    if method == "fed_avg":  # a cohort whose slots are given each other's examples is another run
        monkeypatch.setattr(compose, "_fetched", lambda *given: jax.tree.map(lambda leaf: leaf[::-1], _fetched(*given)))
        assert distance(run("scan"), together) > VISIBLE
