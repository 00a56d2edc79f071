"""The mapping ``auto``: what it tries, what it measures, what it remembers."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from fedtangent._src import liveness, timings
from fedtangent._src.engine import auto, memory
from fedtangent._src.engine.clients import Mapping, parse

from .test_memory import CLIENTS, EXAMPLES, algorithm, data


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTANGENT_CACHE", str(tmp_path))
    monkeypatch.setattr(timings, "_memory", {})


class Probe:
    """Seconds a round by name; remembers what it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = {name.replace("_", ":"): s for name, s in seconds.items()}, []

    def __call__(self, mapping: Mapping) -> float:
        self.asked.append(str(mapping))
        return self.seconds[str(mapping)]


def choose(probe: Probe, num_rounds: int = 100, width: int = 64) -> str:
    return str(auto.choose(algorithm(width), data(), EXAMPLES, num_rounds, 1, probe)[0])


def test_the_fastest_of_a_long_run_is_taken_and_remembered() -> None:
    probe = Probe(scan=1.0, chunked_4=0.5)
    assert choose(probe) == "chunked:4"
    assert probe.asked == ["scan", "chunked:4"]
    assert choose(probe) == "chunked:4"
    assert len(probe.asked) == 2
    assert choose(Probe(scan=0.4, chunked_4=0.5), width=65) == "scan"  # another model is another question


def test_a_run_that_is_soon_over_measures_the_default_only() -> None:
    probe = Probe(scan=1e-3)
    assert choose(probe) == "scan"
    assert probe.asked == ["scan"]
    assert choose(Probe(), num_rounds=5) == "scan"
    longer = Probe(chunked_4=1e-4)  # the default's time is known
    assert choose(longer, num_rounds=10**6) == "chunked:4"
    assert longer.asked == ["chunked:4"]


def test_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(m) for m in auto.candidates(100)] == ["scan", "chunked:4", "chunked:16", "chunked:64"]
    assert [str(m) for m in auto.candidates(3)] == ["scan"]
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert [m.kind for m in auto.candidates(20)] == ["scan", "chunked", "chunked"]
    assert {m.devices for m in auto.candidates(20)} == {4}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [str(m) for m in auto.candidates(100)] == ["sharded:vmap", "sharded:chunked:64", "sharded:chunked:16"]


def test_only_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = memory.plan(algorithm(), data(), parse("vmap"), EXAMPLES, 1)
    for slots, wanted in ((9.0, ["vmap"]), (5.5, ["chunked:5"]), (1.5, ["scan"]), (0.5, ["scan"])):
        limit = int((plan.fixed + slots * plan.slot) / liveness.USABLE)
        monkeypatch.setattr(liveness, "memory_limit", lambda limit=limit: limit)
        assert [str(m) for m in auto.that_fit(algorithm(), data(), EXAMPLES, 1)] == wanted


def test_the_fingerprint_is_of_the_program_and_not_of_addresses() -> None:
    state = jax.eval_shape(lambda: algorithm().init(0, CLIENTS))
    one, same = (auto.fingerprint(algorithm(), data(), state) for _ in range(2))
    assert one == same
    assert one != auto.fingerprint(algorithm(batch_size=4), data(), state)


def test_seconds_a_round() -> None:
    calls: list[int] = []

    def run(state: int, rounds: int) -> int:
        calls.append(rounds)
        return state

    assert auto.seconds_a_round(run, lambda: 0) < 1
    assert calls == [1, 1, 1]
