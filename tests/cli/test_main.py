"""The command line as a user meets it: help, refusals, folders; one run in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedtangent
from fedtangent._src import cli
from fedtangent._src.cli import commands, main, train
from fedtangent._src.engine import description
from fedtangent._src.engine.checkpoints.files import locked
from fedtangent._src.engine.description import CHOICES
from fedtangent._src.entries import catalogue, option_names
from fedtangent._src.federated.algorithms.entry import options_of
from fedtangent._src.output.files import write_config

from ..nightly import nightly
from .asking import asked

SOURCE = Path(__file__).parents[2] / "src"
SMALL = ["--num-train", "60", "--num-clients", "3", "--widths", "4", "--num-rounds", "1"]
SMALL += ["--batch-size", "0", "--local-steps", "2"]
SCREENS = 2 * 50
# Imported only where they are used: together they take longer than all others.
HEAVY = ("scipy.linalg", "scipy.optimize", "scipy.sparse", "scipy.special", "scipy.stats", "sklearn", "matplotlib")
HEAVY += ("chex", "flax", "neural_tangents", "tensorflow", "tensorflow_datasets", "pandas", "jinja2", "beartype")
COMPUTING = ("jax", "numpy", "optax", "tyro", "rich")


@pytest.mark.slow
def test_a_good_run_imports_no_tensorflow_and_leaves_standard_error_clean(tmp_path: Path) -> None:
    names = ("FEDTANGENT_DATA", "PYTHONPATH", "JAX_ENABLE_X64")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= {"PYTHONPATH": str(SOURCE), "FEDTANGENT_CACHE": str(tmp_path / "cache")}
    program = "import sys\nfrom fedtangent._src.cli.main import run\ncode = run(sys.argv[1:])\n"
    program += "print('TENSORFLOW', 'tensorflow' in sys.modules)\nsys.exit(code)"
    ended = subprocess.run(
        [sys.executable, "-c", program, "train", *SMALL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "TENSORFLOW False" in ended.stdout
    assert ended.stderr == ""
    assert (tmp_path / "results" / "train" / "result.json").is_file()


@pytest.mark.parametrize(
    "words",
    nightly(
        ["--help", "--version", "learn", "train --help", "list", "train --num-rounds -1"],
        ["learn", "train --num-rounds -1"],
    ),
)
def test_an_answer_without_a_run_imports_nothing_heavy(words: str) -> None:
    """By day one that needs no entries, and one that reads them."""
    program = "import sys\nfrom fedtangent.__main__ import main\ntry: main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", program, *words.split()]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    modules = set(ended.stdout.splitlines()[-1].split())
    assert "fedtangent._src.cli.main" in modules
    assert modules.isdisjoint(HEAVY), sorted(modules & set(HEAVY))
    assert modules.isdisjoint(COMPUTING) == (words in ("--help", "--version", "learn"))  # the others read entries


@pytest.mark.parametrize("name", list(cli.summaries()))
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = main.help_page(commands.find(name), [])
    assert max(map(len, page.splitlines())) <= 80, max(page.splitlines(), key=len)
    monkeypatch.setenv("COLUMNS", "100")  # control: the page is as wide as the terminal
    assert max(map(len, main.help_page(commands.find("train"), []).splitlines())) > 80


def test_what_there_is_and_the_version(run: Callable) -> None:
    ended = run("--help")
    assert (ended.code, ended.err) == (0, "")
    for word in ("compare", "predict", "train", "experiment", "check-theory", "list", "--version"):
        assert word in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert run("--version") == (0, f"fedtangent {fedtangent.__version__}\n", "")
    nothing = run()
    assert (nothing.code, nothing.out) == (2, "") and nothing.err == ended.out
    assert run("learn").err.startswith("fedtangent: error: command: got 'learn', allowed are ")


@pytest.mark.parametrize("command", ["train", "compare", "predict", "experiment", "check-theory", "list"])
def test_every_command_has_a_page_of_help(command: str, run: Callable) -> None:
    ended = run(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"usage: fedtangent {command}")
    assert max(map(len, ended.out.splitlines())) <= 100


def test_a_page_of_help_shows_what_is_chosen_in_place_of_defaults() -> None:
    page = main.help_page(
        commands.find("train"), ["--num-rounds", "7", "--widths", "3", "4", "--loss", "cross_entropy"]
    )
    for shown in ("--num-rounds 7 ", "--widths 3 4 ", "--loss cross_entropy "):
        assert f"\n  {shown}" in page, shown
    assert "\n  --num-rounds 50 " in main.help_page(commands.find("train"), [])
    assert "--key-file PATH               with --projection: file of its seed" in page


def test_what_must_be_given_is_named(run: Callable) -> None:
    assert run("data") == (2, "", "fedtangent: error: action, name: got none, must be given\n")


def options_in(page: str) -> set[str]:
    """The options that a page of help has, by name."""
    return {name.replace("-", "_") for name in re.findall(r"^  --(?:no-)?([a-z0-9-]+)", page, re.MULTILINE)}


@pytest.mark.parametrize(
    "name", nightly(catalogue("algorithms"), ["fed_avg", "fed_prox", "fed_ensemble", "ntk_fl", "gossip"])
)
def test_the_help_of_an_algorithm_has_its_options_and_no_others(name: str) -> None:
    page = main.help_page(commands.find("train"), ["--algorithm", name])
    assert len(page.splitlines()) <= SCREENS
    found, entries = options_in(page), description.resolve({"algorithm": name})
    mine = {option for entry in entries.values() for option in option_names(entry)}
    mine |= {field.name for field in dataclasses.fields(options_of(catalogue("algorithms")[name]))}
    assert mine <= found
    every = {
        option for kind in set(CHOICES.values()) for entry in catalogue(kind).values() for option in option_names(entry)
    }
    assert found & every == mine
    if name == "fed_prox":
        assert "mu" in found and not {"server_momentum", "ntk_times", "num_models", "base"} & found


def test_the_help_of_choices_has_their_options_and_their_names() -> None:
    chosen = ["--algorithm", "fed_ensemble", "--base", "fed_dyn", "--model", "logistic", "--partition", "shards"]
    found = options_in(page := main.help_page(commands.find("train"), chosen))
    assert {"mu", "base", "num_models", "shards_per_client"} <= found
    assert not {"widths", "alpha"} & found
    for kind in ("datasets", "partitions", "models", "schedules"):
        assert all(name in page for name in catalogue(kind))


def test_what_suits_the_model_and_the_data_is_the_default() -> None:
    plain, images = asked("train").values, asked("train --model cnn").values
    assert (plain["model"], plain["partition"], plain["loss"]) == ("mlp", "dirichlet", "squared_error")
    assert (images["loss"], images["client_learning_rate"]) == ("cross_entropy", 0.05)
    users = asked("train --dataset sine").values
    assert users["partition"] == "by_user" and "num_clients" not in users
    assert asked("train --dataset sine --partition iid").values["num_clients"] == 20


def test_a_description_is_made_again_of_its_values() -> None:
    line = "train --algorithm fed_ensemble --base fed_dyn --mu 0.3 --schedule strata --num-strata 3 --data-dir x"
    described = asked(line).arguments["described"]
    assert description.describe(**described.values()) == described
    assert described.algorithm.options.mu == 0.3 and described.schedule.options.num_strata == 3
    assert "data_dir" not in described.identity() and described.identity()["mu"] == 0.3


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("train", "results/train"),
        ("compare", "results/compare"),
        ("check-theory", "results/check-theory"),
        ("experiment fed_ensemble.table1 --scale smoke", "results/experiment/fed_ensemble.table1"),
        ("experiment fed_ensemble.table1 --output out", "out"),
    ],
)
def test_the_output_folder_has_a_default(line: str, output: str) -> None:
    assert asked(line).values["output"] == Path(output)


def test_the_configuration_of_a_run_repeats_it_and_options_beside_it_win(folder: Path) -> None:
    before = asked("train --algorithm fed_prox --mu 0.7 --widths 8 9 --num-rounds 3 --no-stop-on-divergence --output a")
    written = {name: str(value) if isinstance(value, Path) else value for name, value in before.values.items()}
    (folder / "config.json").write_text(json.dumps({"command": "train", "options": written}))
    again = asked("train --config config.json")
    assert again.arguments["described"] == before.arguments["described"]
    assert again.arguments["machine"] == before.arguments["machine"]
    assert again.values["output"] == Path("results/train")
    other = asked("train --config config.json --widths 5 --seed 4").values
    assert (other["widths"], other["seed"], other["mu"]) == ((5,), 4, 0.7)
    plain = asked("train --config config.json --algorithm fed_avg").values  # which has no mu
    assert "mu" not in plain and plain["num_rounds"] == 3
    other = json.dumps({"command": "compare", "options": {}})
    for text, says in (
        ("{", "config.json cannot be read: Expecting"),
        ("[]", "must be the config.json"),
        (json.dumps({"command": "train", "options": {"": 1}}), "^: is no option of train"),
        (other, "by fedtangent compare, must"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            asked("train --config config.json")


@pytest.mark.usefixtures("no_training")
def test_a_second_run_needs_another_folder_or_leave_to_overwrite(run: Callable, folder: Path) -> None:
    assert run("train", *SMALL).code == 0  # its default folder
    out = folder / "results/train"
    (out / "figures/of_the_first.png").write_text("old")
    (out / "mine.txt").write_text("no run wrote this")
    before = (out / "metrics.csv").read_bytes()
    ended = run("train", *SMALL, "--seed", "1")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "fedtangent: error: output: results/train holds a run: name another folder, --resume to continue it or "
        "--overwrite to replace it\n"
    )
    assert (out / "metrics.csv").read_bytes() == before
    other = run("train", *SMALL, "--seed", "1", "--resume")
    assert other.code == 2 and "holds a run with other options, seed (0 there, 1 here)" in other.err
    assert run("check-theory", "--output", out).err.startswith(
        f"fedtangent: error: output: {out} holds a run of fedtangent train"
    )
    assert run("train", *SMALL, "--seed", "1", "--overwrite").code == 0
    assert (out / "metrics.csv").read_bytes() != before
    assert not (out / "figures/of_the_first.png").exists() and (out / "mine.txt").exists()


@pytest.mark.usefixtures("no_training")
def test_nothing_of_a_run_is_lost_to_another_of_its_folder(run: Callable, folder: Path) -> None:
    out = folder / "results/train"
    with locked(out, "output"):  # as a run that is under way holds it
        for more in ((), ("--overwrite",), ("--resume",)):
            ended = run("train", *SMALL, *more)
            assert ended.code == 2 and "output: results/train is in use by another run" in ended.err
    assert not (out / "metrics.csv").exists()
    assert run("train", *SMALL, "--seeds", "5:7").code == 0
    before = (out / "metrics.csv").read_bytes()
    for seeds in ((), ("--seeds", "6:8")):
        ended = run("train", *SMALL, *seeds, "--resume")
        assert ended.code == 2 and "must include those of the run in results/train: 5:7" in ended.err
    both = run("train", *SMALL, "--seeds", "5:7", "--resume", "--overwrite")
    assert both.code == 2 and "overwrite: got both --overwrite and --resume" in both.err
    assert (out / "metrics.csv").read_bytes() == before
    assert run("train", *SMALL, "--seeds", "5:8", "--resume").code == 0
    for name in ("output", "data_dir"):
        ended = run("train", *SMALL, f"--{name.replace('_', '-')}", "")
        assert ended.code == 2 and ended.err == f"fedtangent: error: {name}: got '', must be a value\n"


def test_a_configuration_keeps_what_json_cannot_say(folder: Path) -> None:
    write_config(folder, "train", asked("train", "--max-update-norm", "inf").values)
    again = asked("train", "--config", folder / "config.json")
    assert again.values["max_update_norm"] == float("inf")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "options": {"no_flatten": True}}))
    with pytest.raises(ValueError, match="flatten"):
        asked("train", "--config", folder / "config.json")


def test_an_interrupted_run_says_so(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "simulate_rounds", interrupted)
    ended = run("train", *SMALL)
    assert ended.code == 130
    assert ended.err.startswith("fedtangent: interrupted")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("experiment fed_ensemble.table2 --set num_rounds=3 --set local_epochs=2", "set"),
        ("experiment fed_ensemble.table2 --set=num_rounds=3 --scale smoke --set=num_rounds=4", "set"),
        ("train --widths 8 --widths 9", "widths"),
        ("predict --algorithm fed_avg --algorithm scaffold", "algorithm"),
        ("predict --algorithm fed_avg fed_prox --widths 8 --mu 0.1 --widths 9", "widths"),
        ("compare --case sine --case digits", "case"),
    ],
)
def test_an_option_of_several_values_is_given_once(line: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got --{name} 2 times, must be one --{name} with every value$"):
        asked(line)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("train --num-rounds 3 --num-rounds 4", "num_rounds"),
        ("train --num-rounds=3 --num_rounds 3", "num_rounds"),
        ("train --overwrite --overwrite", "overwrite"),
        ("train --stop-on-divergence --no-stop-on-divergence", "stop_on_divergence"),
        ("predict --algorithm fed_avg fed_prox --mu 0.1 --mu 0.2", "mu"),
        ("experiment fed_ensemble.table2 --seed 1 --scale smoke --seed 1", "seed"),
        ("list algorithms --nonsense --nonsense", "nonsense"),
    ],
)
def test_an_option_of_one_value_is_given_once(line: str, name: str) -> None:
    shown = name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{name}: got --{shown} 2 times, must be one --{shown}$"):
        asked(line)


@pytest.mark.parametrize("word", nightly(["größe", "½π", "drei·fünf", "数", "naïve word"], ["½π", "naïve word"]))
def test_what_is_no_ascii_is_shown(run: Callable, word: str) -> None:
    for arguments in ((word,), ("--num-rounds", word), (f"--{word}", "3")):
        ended = run("train", *arguments)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1) and word in ended.err, ended


def test_an_option_of_several_values_wins_over_that_of_the_run_that_is_repeated(folder: Path) -> None:
    first = "experiment fed_ensemble.table2 --set num_rounds=3 local_epochs=2"
    write_config(folder, "experiment", asked(first).values)
    assert asked("experiment", "--config", folder / "config.json").values["set"] == ("num_rounds=3", "local_epochs=2")
    assert asked("experiment", "--config", folder / "config.json", "--set", "width=8").values["set"] == ("width=8",)
