"""Bad input: one line on standard error, exit code 2, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtangent._src import data, liveness
from fedtangent._src.cli import compare, predict, train
from fedtangent._src.data import Dataset, cache
from fedtangent._src.entries import catalogue, option_names
from fedtangent._src.experiments.lab import harness
from fedtangent._src.kernels.gram import KernelBlocks, SingularKernelError
from fedtangent._src.theory.fed_ensemble.limit import gp_limit


def having(kind: str, option: str, inside: bool = False) -> str:
    """Who has an option, of what may stand inside another algorithm or of all."""
    found = [e for e in catalogue(kind).values() if option in option_names(e) and (not inside or e.inside)]
    assert found
    return ", ".join(entry.name for entry in found)


NAME = "experiment fed_ensemble.versus_fed_avg"
TRAIN = [  # options of train
    ("--mu 0.3", f"mu: is not used with algorithm 'fed_avg', only with {having('algorithms', 'mu')}"),
    ("--partition iid --alpha 3", f"with partition 'iid', only with {having('partitions', 'alpha')}"),
    ("--algorithm fed_ensemble --clients-per-round 1", "clients_per_round: is not used with schedule 'permutations'"),
    ("--algorithm ntk_fl --weighting uniform", "weighting: is not used with algorithm 'ntk_fl', only with "),
    ("--algorithm ntk_fl --sparsity 0.5", f"'ntk_fl', only with {having('algorithms', 'sparsity')}"),
    ("--algorithm ntk_fl --secure-aggregation", "secure_aggregation: is not used with algorithm 'ntk_fl'"),
    ("--algorithm centralised --beta 0.5", "beta: is not used with algorithm 'centralised', only with "),
    ("--algorithm fed_ensemble --mu 1", f"nor with base 'fed_avg', only with {having('algorithms', 'mu', True)}"),
    ("--graph torus", f"only with {having('algorithms', 'graph')}; nor with schedule 'uniform'"),
    ("--num-models -3", f"with schedule 'uniform', only with {having('schedules', 'num_models')}"),
    ("--model logistic --widths 3", f"with model 'logistic', only with {having('models', 'widths')}"),
    ("--partition by_user --dataset sine --num-clients 7", "num_clients: is not used with partition 'by_user'"),
    ("--completion-spread 2", "completion_spread: is used with keep_first only"),
    ("--coordinator localhost:1234", "coordinator: is used with distributed only"),
    ("--key-file key", "key_file: is used with projection only"),
    ("--diagnostics-examples 9", "diagnostics_examples: is used with diagnostics only"),
    ("--nonsense 1", "nonsense: is no option of train"),
    ("--num-round 1", "num_round: is no option of train; did you mean num_rounds?"),
    ("--num-rounds x", "num_rounds: got 'x', must be a whole number"),
    ("--num-rounds 1.5", "num_rounds: "),
    ("--alpha many", "alpha: got 'many', must be a number"),
    ("--algorithm fedavg", f"algorithm: got 'fedavg', allowed are {', '.join(catalogue('algorithms'))}"),
    ("--algorithm fed_ensemble --base ntk_fl", "base: got 'ntk_fl', allowed are "),
    ("--dataset cifar", "dataset: got 'cifar', allowed are "),
    ("--partition x", "partition: got 'x', allowed are "),
    ("--model resnet", "model: got 'resnet', allowed are "),
    ("--schedule x", "schedule: got 'x', allowed are "),
    ("--config nowhere", "config: nowhere cannot be read: [Errno 2] No such file"),
]
REFUSED = [
    ("predict --algorithm fed_prox --mu 0.1 0.1", "mu: got 0.1 0.1, must be different ones"),
    ("predict --num-train 50 60", "arguments: got 60, which belongs to no option"),
    ("predict --algorithm fed_avg scaffold --mu 1", "mu: is not used with algorithm 'fed_avg', only with"),
    ("predict --algorithm fed_avg scaffold --rate 1", "rate: is no option of predict"),
    ("predict --algorithm fed_avg fed_nope", "algorithm: got 'fed_nope', allowed are"),
    ("predict --algorithm", "Missing value for argument '--algorithm'"),
    ("predict --dataset digits sine", "arguments: got sine, which belongs to no option"),
    ("predict --target 2", "target: got 2.0, must be above 0 and at most 1"),
    ("predict --target 0", "target: got 0.0, must be above 0"),
    ("predict --draws 1", "draws: got 1, must be a whole number of at least 2"),
    ("predict --figures jpg", "figures: got 'jpg', allowed are png, pdf, svg"),
    ("train --figures PDF", "figures: got 'PDF', allowed are png, pdf, svg"),
    ("compare --figures ps", "figures: got 'ps', allowed are png, pdf, svg"),
    ("compare --algorithm fed_avg --figures ps", "figures: got 'ps', allowed are png, pdf, svg"),
    ("experiment local_gd.fig1a --figures ps", "figures: got 'ps', allowed are png, pdf, svg"),
    ("check-theory --figures pdf", "figures: is no option of check-theory"),
    ("report --figures pdf", "figures: is no option of report"),
    ("predict --mapping scan", "mapping: is no option of predict"),
    ("train --algorithm fed_avg scaffold", "arguments: got scaffold, which belongs to no option"),
    ("compare --algorithm fed_avg scaffold", "arguments: got scaffold, which belongs to no option"),
    ("data", "action"),
    ("data mend printers", "action: got 'mend', allowed are prepare, verify"),
    ("data prepare prints", "dataset: got 'prints', allowed are cifar10"),
    ("data prepare digits", "name: got 'digits', which this command does not download, allowed are cifar10, "),
    ("data verify printers --data-dir nowhere", "data_dir: got nowhere, must be a folder"),
    ("compare --case nope", "allowed are digits, fashion_mnist, sine"),
    ("compare --case digits nope", "allowed are digits, fashion_mnist, sine"),
    ("compare --case", "allowed are digits, fashion_mnist, sine"),
    ("compare --scale huge", "allowed are smoke, default, paper"),
    ("compare --seed -1", "seed: got -1"),
    (f"compare --seed {2**70}", "seed"),
    ("compare --case fashion_mnist --data-dir nowhere", "data_dir: got nowhere, must be a folder"),
    ("experiment x", f"experiment: got 'x', allowed are {next(iter(catalogue('experiments')))}, "),
    (f"{NAME} --scale huge", "scale: got 'huge', allowed are smoke, default, paper"),
    (f"{NAME} --seeds a", "seeds: got 'a'"),
    (f"{NAME} --seeds 0:3 --seed 2", "seed: got 2 and seeds 0:3, must be only one of the two"),
    (f"{NAME} --seed -1", "seed: got -1, must be a whole number from 0 to 4294967291"),
    (f"{NAME} --set rounds=3", "set: got 'rounds', allowed are num_clients"),
    (f"{NAME} --set num_rounds=0", "num_rounds: got 0, must be a whole number of at least 1"),
    (f"{NAME} --dataset mnist --data-dir nowhere", "data_dir: got nowhere, must be a folder"),
    ("check-theory --scale huge", "scale: got 'huge', allowed are smoke, default, paper"),
    ("check-theory --seed -1", "seed: got -1, must be a whole number from 0 to 4294967295"),
    (
        "check-theory --only gp",
        f"only: got 'gp', allowed are {', '.join(catalogue('theorems'))}, or a group: "
        "conformal, deep_linear, fed_ensemble, flow, local_gd, ntk_dfl, ntk_fl, private, stale",
    ),
]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails at once where the program starts to work on what it should have refused."""

    def started(*args: object, **options: object) -> None:
        pytest.fail("the work has started")

    for module, name in (
        (train, "simulate_rounds"),
        (compare, "compared"),
        (predict, "forecasts"),
        (harness, "trial_program"),
    ):
        monkeypatch.setattr(module, name, started)


def assert_refused(ended, folder: Path, says: str) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith("fedtangent: error: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.endswith("\n")
    assert says in ended.err
    assert ended.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("options", "says"), TRAIN)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, says: str
) -> None:
    monkeypatch.setattr(train, "build", lambda described: pytest.fail("the work has started"))
    assert_refused(run("train", "--host-devices", "1", *options.split()), folder, says)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_what_a_command_does_not_take(run: Callable, folder: Path, line: str, says: str) -> None:
    assert_refused(run(*line.split()), folder, says)


@pytest.mark.usefixtures("no_work")
def test_a_run_that_does_not_fit_into_memory(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "memory_limit", lambda: 10_000)
    small = ["--num-train", "40", "--num-clients", "2", "--widths", "4", "--mapping", "scan"]
    assert_refused(run("train", *small, "--output", "out"), folder, "mapping: scan needs ")


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


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("case", "part", "value"), [("digits", "x_train", np.nan), ("digits", "x_test", np.inf), ("sine", "y_test", np.nan)]
)
def test_data_that_are_not_finite(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str, part: str, value: float
) -> None:
    load = data.load

    def poisoned(*args: object, **options: object) -> Dataset:
        loaded = load(*args, **options)  # type: ignore[arg-type]
        array = np.array(getattr(loaded, part))
        array[4, 0] = value
        return loaded._replace(**{part: array})

    monkeypatch.setattr(data, "load", poisoned)
    assert_refused(run("compare", "--case", case, "--scale", "smoke", "--output", "out"), folder, "finite")


def test_a_singular_kernel_where_a_limit_is_asked() -> None:
    phi = np.random.default_rng(0).standard_normal((8, 3))
    k = phi @ phi.T
    with pytest.raises(SingularKernelError, match="kernel of the 6 training rows is singular"):
        gp_limit(
            KernelBlocks(k[:6, :6], k[6:, :6], k[:6, :6], k[6:, :6], k[6:, 6:]), np.ones((6, 1)), max_relative_jitter=0
        )
    assert issubclass(SingularKernelError, ValueError)
