"""Models and algorithms of the user's own, named as ``package.module:function``: on the command line and in Python."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fedtangent._src import models
from fedtangent._src.engine.description import describe

from ..nightly import nightly
from .asking import asked
from .test_bad_input import assert_refused

SOURCE = '''
"""Functions of one's own."""
from __future__ import annotations

import functools

import flax.linen as nn

from fedtangent._src import models
from fedtangent._src.federated import algorithms


def network(input_shape, output_size, units: int = 8, twice: bool = False, name: str | None = None):
    """A dense layer of relus, which may be followed by another one."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x.reshape((x.shape[0], -1))
            for _ in range(2 if twice else 1):
                x = nn.relu(nn.Dense(units)(x))
            return nn.Dense(output_size)(x)

    return Network()


def wide(input_shape, output_size, widths: tuple[int, ...] = (4,)):
    return models.mlp(input_shape[0], output_size, widths)


def shrunk(model, schedule, *, client_learning_rate, work, shrink: float = 1.0, **options):
    """FedAvg of a smaller step size."""
    return algorithms.fed_avg(model, schedule, client_learning_rate=shrink * client_learning_rate, work=work, **options)


def plain(model, schedule, *, client_learning_rate, loss, work):
    return algorithms.fed_avg(model, schedule, client_learning_rate=client_learning_rate, loss=loss, work=work)


def stubborn(model, schedule, *, client_learning_rate, loss, work):
    made = plain(model, schedule, client_learning_rate=client_learning_rate, loss=loss, work=work)
    return made._replace(composition=made.composition._replace(rule="it is stubborn; nearest is fed_avg"))


def other_outputs(input_shape, output_size):
    return models.mlp(3, 2)


def nothing(input_shape, output_size):
    return None


def needy(input_shape, output_size, units): ...
def bare(input_shape, output_size, units=3): ...
def odd(input_shape, output_size, activation: dict = {}): ...
def unknown(input_shape, output_size, units: Nowhere = 3): ...
def short(input_shape): ...
def careless(model, schedule, work): ...
def no_algorithm(model, schedule, **options): ...
class Network(nn.Module): ...
'''


@pytest.fixture
def mine(folder: Path) -> Iterator[Path]:
    """A module in the working folder."""
    path = folder.parent / "modules"
    path.mkdir()
    (path / "mine.py").write_text(SOURCE)
    (path / "broken.py").write_text("import no_such_package")
    (path / "wrong.py").write_text("1 / 0")
    sys.path.insert(0, str(path))
    for name in ("mine", "broken", "wrong"):  # of other tests' folders
        sys.modules.pop(name, None)
    yield path
    sys.path.remove(str(path))
    for name in ("mine", "broken", "wrong"):
        sys.modules.pop(name, None)


RUN = ["--num-train", "60", "--num-clients", "3", "--num-rounds", "2", "--evaluate-every", "2", "--local-steps", "2"]
RUN += ["--mapping", "scan", "--num-test", "30", "--batch-size", "0"]
NETWORK = ["--model", "mine:network", "--units", "5"]


def values(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(r["round"], r["split"], r["metric"], r["value"]) for r in csv.DictReader(file)]


@pytest.mark.usefixtures("mine")
def test_a_run_of_ones_own_network_and_algorithm(run: Callable, folder: Path) -> None:
    """It is FedAvg of that step size, and its configuration repeats it."""
    own = ["--algorithm", "mine:shrunk", "--shrink", "0.5", "--client-learning-rate", "0.2"]
    for line in (
        [*own, *NETWORK, *RUN, "--output", "own"],
        ["--client-learning-rate", "0.1", *NETWORK, *RUN, "--output", "ours"],
    ):
        assert run("train", *line).code == 0
    options = json.loads((folder / "own" / "config.json").read_text())["options"]
    assert {name: options[name] for name in ("model", "units", "twice", "algorithm", "shrink", "loss")} == {
        "model": "mine:network",
        "units": 5,
        "twice": False,
        "algorithm": "mine:shrunk",
        "shrink": 0.5,
        "loss": "cross_entropy",
    }
    assert values(folder / "own") == values(folder / "ours")
    repeated = asked("train", "--config", "own/config.json").values
    assert {name: repeated[name] for name in ("model", "units", "algorithm", "shrink", "client_learning_rate")} == {
        name: options[name] for name in ("model", "units", "algorithm", "shrink", "client_learning_rate")
    }


@pytest.mark.usefixtures("mine")
def test_help_has_the_options_of_its_signature(run: Callable) -> None:
    assert run("list", "models").code == 0 and run("train", "--help").code == 0
    assert "mine" not in sys.modules  # nobody has named it
    page = run("train", "--model", "mine:network", "--algorithm", "mine:plain", "--help").out
    assert "model mine:network:\n  --units 8\n  --twice\n" in page
    assert "--local-steps" in page and "--server-learning-rate" not in page
    assert "--server-learning-rate" in run("train", "--algorithm", "mine:shrunk", "--help").out


REFUSED = {
    "no module": (["--model", "nowhere:f"], "model: got 'nowhere:f', but there is no module nowhere"),
    "no package": (["--model", "a.b.c:f"], "model: got 'a.b.c:f', but there is no module a"),
    "no function": (["--model", "mine:f"], "model: got 'mine:f', but mine has no function 'f'"),
    "no name": (["--model", "mine:"], "but mine has no function ''"),
    "a class": (["--model", "mine:Network"], "but mine has no function 'Network'"),
    "a module of two colons": (["--model", "mine:a:b"], "but mine has no function 'a:b'"),
    "a relative module": (["--model", ".mine:network"], "whose module cannot be imported: TypeError"),
    "an import of it fails": (
        ["--model", "broken:f"],
        "cannot be imported: ModuleNotFoundError: No module named 'no_suc",
    ),
    "it fails itself": (["--algorithm", "wrong:f"], "cannot be imported: ZeroDivisionError: division by zero"),
    "no default": (["--model", "mine:needy"], "whose option units has no default, must have one"),
    "no annotation": (["--model", "mine:bare"], "whose option units must be annotated: as bool, int, float, str"),
    "a type that is not written": (["--model", "mine:odd"], "whose option activation must be annotated: as bool"),
    "an unknown type": (["--model", "mine:unknown"], "whose signature cannot be read: name 'Nowhere' is not defined"),
    "too short": (
        ["--model", "mine:short"],
        "with parameters (input_shape), must begin with two positional parameters",
    ),
    "returns nothing": (["--model", "mine:nothing"], "which returned a NoneType, must return a Model or a flax.linen"),
    "other outputs": (["--model", "mine:other_outputs"], "which returned a model of 2 outputs, must be 10"),
    "no step size": (["--algorithm", "mine:careless"], "must take client_learning_rate and loss, or **options"),
    "no algorithm": (
        ["--algorithm", "mine:no_algorithm"],
        "no_algorithm: returned a NoneType, must return",
    ),
    "an option of another": (
        ["--model", "mine:network", "--widths", "3"],
        "widths: is not used with model 'mine:network'",
    ),
    "an option's value": (["--model", "mine:network", "--units", "x"], "units"),
    "not taken": (
        ["--algorithm", "mine:plain", "--max-update-norm", "3"],
        "max_update_norm: is not used with algorithm 'mine:plain'",
    ),
    "another kind": (["--dataset", "mine:data"], "dataset: got 'mine:data', allowed are cifar10"),
}


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(run: Callable, folder: Path, case: str) -> None:
    arguments, says = REFUSED[case]
    assert_refused(run("train", *arguments, "--num-clients", "3", "--output", "out"), folder, says)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("command", "draws"), nightly([("compare", "5"), ("predict", "2")], ["predict"]))
def test_theory_follows_a_users_algorithm_and_network(run: Callable, folder: Path, command: str, draws: str) -> None:
    """An algorithm without a rule by the features of the kernel, a network without a kernel by its linearisation."""
    options = [command, *RUN[:6], "--batch-size", "0", "--local-steps", "2", "--client-learning-rate", "0.1"]
    options += ["--output", "out", *(["--no-rates"] if command == "predict" else [])]
    widths = ["--widths", "8", "16", "32"] if command == "compare" else []
    ended = run(*options, "--algorithm", "mine:stubborn", "--draws", draws, *widths)
    assert ended.code == 0 and "the kernel's features" in ended.out and "it is stubborn; nearest is" in ended.out
    ended = run(*options, *NETWORK, "--overwrite")
    assert ended.code == 0 and "the flow of the tangent kernel at the start" in ended.out
    assert json.loads((folder / "out" / "result.json").read_text())["status"] == "finished"


@pytest.mark.usefixtures("mine")
def test_in_python() -> None:
    x = jnp.ones((2, 6))
    for name, options, size in (("mine:wide", {"widths": (3,)}, 6 * 3 + 3 * 4 + 7), ("mine:network", {"units": 2}, 26)):
        model = models.build(name, 6, 4, **options)
        params = jax.jit(model.init)(jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
        assert jax.eval_shape(model.apply, params, x).shape == (2, 4)
    assert describe(model="mine:wide", widths=(7,)) == describe(model="mine:wide", widths=(7,))
    with pytest.raises(ValueError, match="depth: got an option that mine:wide does not have, allowed are widths"):
        models.build("mine:wide", 6, 4, depth=3)
    with pytest.raises(ValueError, match=r"model: got 'mine', allowed are .* or package\.module:function of your own"):
        models.build("mine", 6, 4)
