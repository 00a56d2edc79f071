"""Bad input: one line on standard error, exit code 2, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent import data
from fedtangent.cli import compare, train
from fedtangent.data import Dataset, cache
from fedtangent.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent.theory import gp_limit

TRAIN = {
    "algorithm": (["--algorithm", "fedavg"], "allowed are fed_avg, fed_sgd, fed_prox"),
    "dataset": (["--dataset", "cifar"], "digits, sine, mnist, fashion_mnist"),
    "partition": (["--partition", "x"], "allowed are iid, shards, classes, dirichlet, by_user, quantity_skew"),
    "model": (["--model", "resnet"], "allowed are mlp, logistic, cnn, lstm, rbf_linear"),
    "schedule": (["--schedule", "x"], "allowed are all, uniform, permutations, strata, mixed"),
    "loss": (["--loss", "mse"], "allowed are squared_error, cross_entropy"),
    "weighting": (["--weighting", "x"], "examples, uniform"),
    "mapping": (["--mapping", "pmap"], "allowed are auto, scan, vmap"),
    "activation": (["--activation", "x"], "relu"),
    "parameterization": (["--parameterization", "x"], "allowed are ntk, standard"),
    "ntk_kernel": (["--algorithm", "ntk_fl", "--ntk-kernel", "x"], "allowed are averaged, exact"),
    "alpha 0": (["--alpha", "0"], "alpha"),
    "alpha negative": (["--alpha", "-1"], "alpha"),
    "alpha nan": (["--alpha", "nan"], "alpha"),
    "alpha of quantity skew": (["--partition", "quantity_skew", "--alpha", "0"], "alpha"),
    "more shards than examples": (["--partition", "shards", "--shards-per-client", "1000"], "1438 examples"),
    "more classes than there are": (["--partition", "classes", "--classes-per-client", "11"], "from 1 to 10"),
    "K 0": (["--algorithm", "fed_ensemble", "--num-models", "0"], "num_models: got 0"),
    "K negative": (["--num-models", "-3"], "num_models: got -3"),
    "more clients than examples": (["--num-clients", "5000"], "1438 examples"),
    "no clients": (["--num-clients", "0"], "num_clients: got 0"),
    "cohort 0": (["--clients-per-round", "0"], "between 1 and num_clients = 20"),
    "cohort too large": (["--clients-per-round", "21"], "between 1 and num_clients = 20"),
    "min client size": (["--min-client-size", "1000"], "min_client_size"),
    "client rate 0": (["--client-learning-rate", "0"], "client_learning_rate: got 0"),
    "client rate negative": (["--client-learning-rate", "-0.1"], "client_learning_rate: got -0.1"),
    "client rate nan": (["--client-learning-rate", "nan"], "client_learning_rate: got nan"),
    "client rate inf": (["--client-learning-rate", "inf"], "client_learning_rate: got inf"),
    "server rate 0": (["--server-learning-rate", "0"], "server_learning_rate: got 0"),
    "server rate nan": (["--server-learning-rate", "nan"], "server_learning_rate: got nan"),
    "rate of ntk_fl": (["--algorithm", "ntk_fl", "--client-learning-rate", "0"], "learning_rate: got 0"),
    "no rounds": (["--num-rounds", "0"], "num_rounds: got 0"),
    "evaluate_every": (["--evaluate-every", "0"], "evaluate_every: got 0"),
    "batch size": (["--batch-size", "-1"], "batch_size: got -1"),
    "steps and epochs": (["--local-steps", "2", "--local-epochs", "2"], "exactly one of steps and epochs"),
    "no steps": (["--local-steps", "0"], "local steps: got 0"),
    "no epochs": (["--local-epochs", "0"], "local epochs: got 0"),
    "seed": (["--seed", "-1"], "seed: got -1"),
    "seed too large": (["--seed", str(2**70)], "seed"),
    "width": (["--widths", "0"], "widths: got 0"),
    "num_train 0": (["--num-train", "0"], "num_train must be from 1 to 1438"),
    "num_train too large": (["--num-train", "9999"], "num_train must be from 1 to 1438"),
    "no strata": (["--schedule", "strata", "--num-strata", "0"], "num_strata: got 0"),
    "strata too small": (["--schedule", "strata", "--clients-per-stratum", "9"], "clients_per_stratum: got 9"),
    "time 0": (["--algorithm", "ntk_fl", "--ntk-times", "0"], "times"),
    "times that fall": (["--algorithm", "ntk_fl", "--ntk-times", "20", "10"], "times"),
    "cross entropy by eigh": (
        ["--algorithm", "ntk_fl", "--loss", "cross_entropy", "--ntk-method", "eigh"],
        "not linear: use auto or iterate",
    ),
    "users of digits": (["--partition", "by_user"], "the data set digits has none"),
    "classes of sine": (["--dataset", "sine"], "the data set sine has none"),
    "cross entropy of sine": (["--dataset", "sine", "--partition", "by_user", "--loss", "cross_entropy"], "labels"),
    "vectors for rbf_linear": (["--model", "rbf_linear"], "scalar inputs"),
    "no such folder": (["--dataset", "mnist", "--data-dir", "nowhere"], "nowhere is not a directory"),
    "no such folder, embedded": (["--dataset", "digits", "--data-dir", "nowhere"], "nowhere is not a directory"),
    "one model of five": (["--algorithm", "fed_ensemble", "--schedule", "uniform"], "num_models is 5"),
}
COMPARE = {
    "case": (["--case", "nope"], "allowed are sine, digits, fashion_mnist"),
    "one case of two": (["--case", "digits", "nope"], "allowed are sine, digits, fashion_mnist"),
    "no case": (["--case"], "allowed are sine, digits, fashion_mnist"),
    "scale": (["--scale", "huge"], "allowed are smoke, default, paper"),
    "seed": (["--seed", "-1"], "seed: got -1"),
    "seed too large": (["--seed", str(2**70)], "seed"),
    "no such folder": (["--case", "fashion_mnist", "--data-dir", "nowhere"], "nowhere is not a directory"),
}
ALL = [("train", *case) for case in TRAIN.values()] + [("compare", *case) for case in COMPARE.values()]
NAMES = [f"train: {name}" for name in TRAIN] + [f"compare: {name}" for name in COMPARE]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails at once where the program starts to work on what it should have refused."""

    def started(*args: object, **options: object) -> None:
        pytest.fail("the work has started")

    monkeypatch.setattr(train, "simulate", started)
    monkeypatch.setattr(compare, "run", started)


def assert_refused(ended, folder: Path, says: str) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith("fedtangent: error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.endswith("\n")
    assert says in ended.err
    assert ended.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("command", "arguments", "says"), ALL, ids=NAMES)
def test_an_option_out_of_range(run: Callable, folder: Path, command: str, arguments: list[str], says: str) -> None:
    assert_refused(run(command, "--output", "out", *arguments), folder, says)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", [["train", "--dataset", "mnist"], ["compare", "--case", "fashion_mnist"]])
def test_a_data_folder_without_the_files(
    run: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(run(*command, "--data-dir", empty, "--output", "out"), folder, "train-images-idx3-ubyte.gz")
    monkeypatch.setenv("FEDTANGENT_DATA", str(empty))
    assert_refused(run(*command, "--output", "out"), folder, "train-images-idx3-ubyte.gz")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("harm", ["bytes", "manifest", "missing"])
def test_a_corrupted_cache(run: Callable, folder: Path, tmp_path: Path, harm: str) -> None:
    place = tmp_path / "cache" / "mnist"
    images, labels = np.zeros((30, 28, 28), np.uint8), np.arange(30, dtype=np.uint8) % 10
    cache.write(place, {"x_train": images, "y_train": labels, "x_test": images[:5], "y_test": labels[:5]})
    broken = place / ("manifest.json" if harm == "manifest" else "x_train.npy")
    if harm == "missing":
        broken.unlink()
    else:
        content = bytearray(broken.read_bytes())
        content[-5 if harm == "bytes" else 0] ^= 1
        broken.write_bytes(content)
    ended = run("train", "--dataset", "mnist", "--num-clients", "2", "--output", "out")
    assert_refused(ended, folder, str(broken))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("below", [".", "sub"])
@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_output_that_is_a_file(run: Callable, folder: Path, command: str, below: str) -> None:
    (folder / "file").write_text("mine")
    case = ["--case", "digits", "--scale", "smoke"] if command == "compare" else ["--num-rounds", "1"]
    ended = run(command, *case, "--output", Path("file") / below)
    assert (folder / "file").read_text() == "mine"
    (folder / "file").unlink()
    assert_refused(ended, folder, "output")


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Dataset], Dataset]) -> None:
    load = data.load
    monkeypatch.setattr(data, "load", lambda *args, **options: change(load(*args, **options)))


def poisoned(part: str, value: float) -> Callable[[Dataset], Dataset]:
    def change(loaded: Dataset) -> Dataset:
        array = np.array(getattr(loaded, part))
        array[3, 0] = value
        return loaded._replace(**{part: array})

    return change


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["x_train", "x_test"])
@pytest.mark.parametrize("command", [["train"], ["compare", "--case", "digits", "--scale", "smoke"]])
def test_data_that_are_not_finite(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], part: str, value: float
) -> None:
    altered(monkeypatch, poisoned(part, value))
    assert_refused(run(*command, "--output", "out"), folder, "finite")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("part", ["y_train", "y_test"])
@pytest.mark.parametrize("command", [["train", "--partition", "by_user"], ["compare", "--case", "sine"]])
def test_regression_targets_that_are_not_finite(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], part: str
) -> None:
    altered(monkeypatch, poisoned(part, np.nan))
    sine = ["--dataset", "sine"] if command[0] == "train" else ["--scale", "smoke"]
    assert_refused(run(*command, *sine, "--output", "out"), folder, "finite")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
@pytest.mark.parametrize(("part", "label"), [("y_train", 10), ("y_train", -1), ("y_test", 10)])
def test_labels_out_of_range(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, label: int, loss: str
) -> None:
    def change(loaded: Dataset) -> Dataset:
        labels = np.array(getattr(loaded, part))
        labels[2] = label
        return loaded._replace(**{part: labels})

    altered(monkeypatch, change)
    assert_refused(run("train", "--partition", "iid", "--loss", loss, "--output", "out"), folder, f"got {label}")
    assert_refused(run("compare", "--case", "digits", "--scale", "smoke", "--output", "out"), folder, f"got {label}")


def test_a_singular_kernel_where_a_limit_is_asked() -> None:
    phi = np.random.default_rng(0).standard_normal((8, 3))
    k = phi @ phi.T
    with pytest.raises(SingularKernelError, match="kernel of the 6 training rows is singular"):
        gp_limit(
            KernelBlocks(k[:6, :6], k[6:, :6], k[:6, :6], k[6:, :6], k[6:, 6:]), np.ones((6, 1)), max_relative_jitter=0
        )
    assert issubclass(SingularKernelError, ValueError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--num-rounds", "x"],
        ["train", "--num-rounds", "1.5"],
        ["train", "--alpha", "many"],
        ["train", "--nonsense", "1"],
        ["compare", "--seed", "one"],
        ["list"],
        ["learn"],
        [],
    ],
    ids=" ".join,
)
def test_what_the_parser_cannot_read(run: Callable, folder: Path, arguments: list[str]) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.err.strip()
    assert list(folder.iterdir()) == []


def test_good_input_is_not_refused(run: Callable, folder: Path) -> None:
    """The checks above would pass on a program that refuses everything."""
    small = ["--num-train", "40", "--num-clients", "3", "--widths", "4", "--num-rounds", "1", "--batch-size", "0"]
    ended = run("train", *small, "--output", "out")
    assert ended.code == 0, ended
    assert json.loads((folder / "out" / "result.json").read_text())["rounds"] == 1
