"""The memory plan against the compiler's own account of the same program, and runs that cannot fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src import liveness
from fedtangent._src.data import federated_data
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.engine import memory
from fedtangent._src.engine.building import build
from fedtangent._src.engine.clients import engine_for, parse
from fedtangent._src.engine.description import describe
from fedtangent._src.engine.loop import run_chunk, state_shapes
from fedtangent._src.engine.trials import TrialProgram, trial_program
from fedtangent._src.entries import catalogue
from fedtangent._src.federated import algorithms
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.models import mlp
from fedtangent._src.types import Algorithm, FederatedData, Partition

from ..nightly import nightly

CLIENTS, EXAMPLES, COHORT = 12, 40, 8


@pytest.fixture(autouse=True)
def _a_cache_that_holds_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings do what their names say, whatever the cache of this machine."""
    monkeypatch.setattr("fedtangent._src.engine.clients.cache_bytes", lambda: 2**60)


def data(inputs: int = 30) -> FederatedData:
    n = CLIENTS * EXAMPLES
    offsets = np.arange(0, n + 1, EXAMPLES, dtype=np.int32)
    rng = np.random.default_rng(0)
    clients = Partition(np.arange(n, dtype=np.int32), offsets)
    return federated_data(rng.normal(size=(n, inputs)), rng.integers(0, 10, n), clients, dtype=jnp.float32)


def algorithm(width: int = 64, batch_size: int | None = 8) -> Algorithm:
    work = Work(steps=4, batch_size=batch_size)
    schedule = uniform_sampling(CLIENTS, COHORT)
    return algorithms.fed_avg(
        mlp(30, 10, (width,)), schedule, client_learning_rate=0.1, work=work, loss="cross_entropy"
    )


def compiled_bytes(chosen: Algorithm, held: FederatedData, mapping: str, x: Any) -> int:
    """What the compiler says that the first state, the rounds or the predictions need, whichever is most."""
    state = state_shapes(chosen, held.num_clients)
    programs = (
        jax.jit(lambda: chosen.init(0, held.num_clients)).lower(),
        run_chunk.lower(chosen, engine_for(held, mapping), 1, state, held, jax.ShapeDtypeStruct((), jnp.int32)),
        jax.jit(chosen.predict).lower(state, x),
    )
    found = []
    for lowered in programs:
        m = lowered.compile().memory_analysis()
        there = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        found.append(there + m.temp_size_in_bytes)
    return max(found)


@pytest.mark.parametrize(
    ("width", "batch_size", "mapping"),
    nightly(
        [(64, 8, "scan"), (512, None, "scan"), (512, 8, "vmap"), (512, None, "vmap"), (64, 8, "chunked:4")],
        [(512, 8, "vmap"), (64, 8, "chunked:4")],
    ),
)
def test_the_plan_is_above_what_the_compiler_allots_and_not_far(width: int, batch_size: int, mapping: str) -> None:
    chosen = algorithm(width, batch_size)
    plan = memory.plan(chosen, data(), parse(mapping), EXAMPLES, 1, [data().x[:8]])
    allotted = compiled_bytes(chosen, data(), mapping, data().x[:8])
    assert allotted <= plan.total <= 4 * allotted
    assert plan.concurrent == {"scan": 1, "vmap": COHORT, "chunked:4": 4}[mapping]


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["scan", "vmap", "chunked:4"])
@pytest.mark.parametrize("name", catalogue("algorithms"))
def test_the_plan_of_every_algorithm(name: str, mapping: str) -> None:
    own = {"server_examples": 100} if name == "fed_be" else {}
    built = build(
        describe(algorithm=name, num_clients=8, num_train=800, widths=(512,), client_learning_rate=0.1, **own)
    )
    chosen, x = built.algorithm, built.examples.test.x
    plan = memory.plan(chosen, built.data, parse(mapping), max_client_size(built.data), 1, [x])
    allotted = compiled_bytes(chosen, built.data, mapping, x)
    assert allotted <= plan.total <= 4 * allotted


@pytest.mark.parametrize(
    "most",
    [
        {"algorithm": "fed_ensemble", "num_models": 1_000_000},
        {"algorithm": "fed_be_no_distillation", "num_samples": 1_000_000},
    ],
)
def test_what_is_not_the_clients_is_seen(most: dict[str, Any]) -> None:
    built = build(describe(num_clients=4, num_train=120, widths=(64,), client_learning_rate=0.1, **most))
    x = [built.examples.train.x, built.examples.test.x]
    with pytest.raises(ValueError, match=r"mapping: scan needs .* GiB, .* and no mapping fits: .* an evaluation"):
        memory.check(built.algorithm, built.data, parse("scan"), 120, 1, x)


def test_a_program_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((100, 100))
    memory.check_program("over: got vmap", lambda x: x @ x, x)
    monkeypatch.setattr(liveness, "memory_limit", lambda: 3 * x.nbytes // 2)
    with pytest.raises(ValueError, match=r"^over: got vmap, which needs 156.2 KiB of memory, .* 117.2 KiB$"):
        memory.check_program("over: got vmap", lambda x: x @ x, x)


def test_trials_need_the_memory_of_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory of three clients more than one a trial fits by scan, but not with all eight at once."""
    held, plan = data(), memory.plan(algorithm(), data(), parse("scan"), EXAMPLES, 1)
    monkeypatch.setattr(liveness, "memory_limit", lambda: int((plan.total + 3 * plan.slot) / liveness.USABLE))

    def program(mapping: str) -> TrialProgram:
        return trial_program(algorithm, {}, held, engine_for(held, mapping), lambda *_: {})

    assert program("scan").length == 1
    with pytest.raises(memory.DoesNotFit, match="engine: got"):
        program("vmap")


def test_the_plan_grows_with_what_it_is_made_of() -> None:
    small, wide, more = (
        memory.plan(algorithm(w), data(), parse("vmap"), EXAMPLES, r) for w, r in ((64, 1), (128, 1), (64, 9))
    )
    assert small.data == more.data == 4 * (12 * 40 * 30 + 12 * 40 + 12 * 40 + 13)
    assert wide.slot > 1.8 * small.slot
    assert more.total > small.total
    devices = memory.plan(algorithm(), data(), parse("sharded:vmap", devices=4), EXAMPLES, 1)
    assert devices.concurrent == 2


def test_liveness_by_hand() -> None:
    def chain(x: Any) -> Any:
        y = jnp.dot(x, x)  # 800 bytes, alive until z is there
        z = jnp.dot(y, y)
        return jnp.dot(z, z)[0, 0]

    jaxpr = jax.make_jaxpr(chain)(jnp.zeros((10, 10))).jaxpr
    assert 1600 <= liveness.peak_bytes(jaxpr) <= 1616

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.dot(c, c), x)

    assert 800 <= liveness.peak_bytes(jax.make_jaxpr(loop)(jnp.zeros((10, 10))).jaxpr) <= 832


def test_a_run_that_cannot_fit_names_the_largest_chunk_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = memory.plan(algorithm(), data(), parse("vmap"), EXAMPLES, 1)
    for chunk in (1, 3):
        limit = int((plan.fixed + plan.server + (chunk + 0.5) * plan.slot) / liveness.USABLE)
        monkeypatch.setattr(liveness, "memory_limit", lambda limit=limit: limit)
        with pytest.raises(ValueError, match=rf"mapping: vmap needs .*largest chunk that fits is chunked:{chunk}$"):
            memory.check(algorithm(), data(), parse("vmap"), EXAMPLES, 1)
        assert memory.check(algorithm(), data(), parse(f"chunked:{chunk}"), EXAMPLES, 1).fits
        with pytest.raises(ValueError, match="largest chunk"):
            memory.check(algorithm(), data(), parse(f"chunked:{chunk + 1}"), EXAMPLES, 1)
    monkeypatch.setattr(liveness, "memory_limit", lambda: plan.data)
    with pytest.raises(ValueError, match="no mapping fits: data and state take"):
        memory.check(algorithm(), data(), parse("scan"), EXAMPLES, 1)


def test_in_words() -> None:
    sizes = (1, 1023, 1024, 1536, 2**20, 5 * 2**30, 2**50)
    assert [liveness.size(n) for n in sizes] == [
        *("1 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "1048576.0 GiB")
    ]
    plan = memory.MemoryPlan(2**20, 2**10, 0, 0, 2**21, 4, 0, 2**10, 2**30)
    assert memory.describe(plan) == (
        "memory: 9.0 MiB of 1.0 GiB predicted at the peak (data 1.0 MiB, state 1.0 KiB, server 0 B, "
        "4 x 2.0 MiB clients, outputs 0 B, evaluation 1.0 KiB)"
    )
    assert plan._replace(limit=2**20).largest_chunk == 0


def test_the_limit_is_within_the_machine() -> None:
    assert 2**28 < liveness.memory_limit() < 2**45
