"""Every algorithm from the command line, and the table that documents them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtangent.cli import summary
from fedtangent.cli.algorithms import ALGORITHMS, INSIDE
from fedtangent.cli.job import prepare
from fedtangent.cli.options import TrainOptions
from fedtangent.cli.parse import parse_channel, parse_graph
from fedtangent.engine.run import simulate
from fedtangent.entries import catalogue

TINY = {"num_clients": 4, "num_train": 120, "widths": (6,), "num_rounds": 1, "client_learning_rate": 0.1}


def options(**given: Any) -> TrainOptions:
    own = {"server_examples": 20} if given.get("algorithm") == "fed_be" else {}
    return TrainOptions(**(TINY | own | given))


def test_every_recipe_can_be_trained_by_name() -> None:
    assert set(catalogue("algorithms")) == set(ALGORITHMS)
    assert all(entry.parts and entry.description for entry in ALGORITHMS.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built_and_runs(name: str) -> None:
    job = prepare(options(algorithm=name))
    run = simulate(job.algorithm, job.data, 1, mapping="scan")
    assert run.status == "finished"
    assert (run.history.rounds["model_weight"] > 0).any()


@pytest.mark.parametrize("base", INSIDE)
@pytest.mark.parametrize("name", ["fed_ensemble", "random_walk", "data_sharing"])
def test_every_base_inside_another_algorithm_is_built(name: str, base: str) -> None:
    built = prepare(options(algorithm=name, base=base)).algorithm
    assert built.name == (name if base == "fed_avg" else f"{base}_{name.removeprefix('fed_')}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "fed_prox", "mu": -0.1}, "mu: got -0.1"),
        ({"algorithm": "ditto", "mu": -0.1}, "mu: got -0.1"),
        ({"algorithm": "fed_nova", "client_optimizer": "adam"}, "client_optimizer"),
        ({"algorithm": "scaffold", "client_optimizer": "momentum"}, "client_optimizer"),
        ({"algorithm": "fed_be", "server_examples": 0}, "server_examples: got 0"),
        ({"algorithm": "lg_fed_avg", "private": "no such"}, "private: got 'no such' that matches no parameter"),
        ({"algorithm": "gossip", "graph": "erdos_renyi:0.01"}, "graph: got 'erdos_renyi:0.01'.*connected"),
        (
            {"algorithm": "gossip", "graph": "star"},
            "graph: got 'star', allowed are complete, erdos_renyi",
        ),
        ({"algorithm": "fed_ensemble", "schedule": "mixed", "num_models": 9}, "K"),
        ({"algorithm": "fed_ensemble", "base": "ntk_fl"}, "base: got 'ntk_fl', allowed are fed_avg"),
        ({"algorithm": "dp_fed_avg", "delta": 1.0}, "delta: got 1.0"),
        ({"algorithm": "dp_fed_avg", "clip_norm": 0.0}, "clip_norm: got 0.0"),
        ({"algorithm": "data_sharing", "shared_fraction": 1.5}, "shared_fraction: got 1.5"),
        ({"algorithm": "fed_avg", "mu": 0.3}, "mu: is not used with algorithm 'fed_avg', only with fed_prox"),
        ({"algorithm": "fed_avg", "graph": "torus"}, "graph: is not used with algorithm"),
        ({"client_test": 1.0}, "client_test: got 1.0"),
        ({"error_feedback": True}, "error_feedback: a lossless channel owes nothing"),
        ({"channel": "top_k"}, "channel: got 'top_k', allowed are .* top_k:<share>"),
        ({"channel": "zip:3"}, "channel: got 'zip:3', allowed are lossless, qsgd:<bits>"),
        ({"channel": "qsgd:99"}, "channel: got 'qsgd:99': bits"),
        ({"client_optimizer": "lamb"}, "client_optimizer: got 'lamb', allowed are sgd, momentum, adam"),
    ],
)
def test_what_does_not_go_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        prepare(options(**given))
    assert "\n" not in str(error.value)


def test_channels_and_graphs_by_name() -> None:
    assert parse_channel("lossless", False) is None
    for text in ("top_k:0.1", "random_k:0.5", "qsgd:4", "quantise:8"):
        assert parse_channel(text, text != "qsgd:4") is not None
    torus, ring = parse_graph("torus", 12, 0), parse_graph("ring", 12, 0)
    assert (torus.num_nodes, ring.num_nodes) == (12, 12)
    assert torus.adjacency.sum() == 48 and ring.adjacency.sum() == 24


def test_clients_are_tested_on_examples_of_their_own(run: Callable, folder: Path) -> None:
    given = ["--num-clients", "4", "--num-train", "200", "--widths", "8", "--num-rounds", "3", "--client-test", "0.25"]
    ended = run("train", "--algorithm", "ditto", *given, "--output", "out")
    assert ended.code == 0
    assert "accuracy over examples" in ended.out
    rows = [line.split(",") for line in (folder / "out" / "metrics.csv").read_text().splitlines()]
    values = [float(row[5]) for row in rows if row[3:5] == ["clients", "accuracy"]]
    assert len(values) == 2 and values[1] > values[0]
    job = prepare(options(algorithm="ditto", client_test=0.25))
    assert job.of_clients is not None
    assert set(job.of_clients.indices.tolist()).isdisjoint(job.data.indices.tolist())


def test_a_private_run_tells_its_epsilon(run: Callable) -> None:
    given = ["--num-clients", "6", "--num-train", "200", "--widths", "8", "--num-rounds", "2", "--output", "out"]
    private = run("train", "--algorithm", "dp_fed_avg", "--clients-per-round", "3", *given)
    assert private.code == 0
    assert "privacy: epsilon " in private.out and "at delta 1e-05, for the data of one client" in private.out
    assert "privacy:" not in run("train", *given).out


def test_the_readme_holds_the_table_of_algorithms() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert summary.markdown() in readme
