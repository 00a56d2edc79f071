"""A run built of its description: every algorithm, what does not go, faults, inputs as they are."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.data import Dataset
from fedtangent._src.data.examples import inputs_on_device
from fedtangent._src.engine import building, description
from fedtangent._src.engine.building import Built, build
from fedtangent._src.engine.clients import engine_for
from fedtangent._src.engine.description import CommonOptions, describe
from fedtangent._src.entries import catalogue
from fedtangent._src.federated.algorithms.entry import WRITTEN, Supplied
from fedtangent._src.federated.schedule import all_clients, drawn_cohorts, uniform_sampling
from fedtangent._src.models.dense import mlp

from ..nightly import nightly

ALGORITHMS = catalogue("algorithms")
NONE = inspect.Parameter.empty
TINY = {"num_clients": 4, "num_train": 120, "widths": (6,), "num_rounds": 1, "client_learning_rate": 0.1}


def tiny(**given: Any) -> Built:
    own = {"server_examples": 20} if given.get("algorithm") == "fed_be" else {}
    return build(describe(**(TINY | own | given)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_built_by_name(name: str) -> None:
    """The laws of ``federated/test_laws.py`` take each of them through its rounds."""
    assert tiny(algorithm=name).algorithm.name == name
    assert set(ALGORITHMS[name].needs) <= {*Supplied._fields, "pool_size"}


@pytest.mark.parametrize("name", nightly(ALGORITHMS, ["fed_be", "ntk_fl"]))
def test_every_algorithm_that_is_built_by_name_takes_its_data(name: str) -> None:
    """By day two whose data are not all of the clients'."""
    built = tiny(algorithm=name)
    engine, algorithm = engine_for(built.data, "scan"), built.algorithm
    state = jax.eval_shape(lambda: algorithm.init(0, built.data.num_clients))
    _, info = jax.eval_shape(lambda s, d: algorithm.step(s, d, engine), state, built.data)
    assert info["model_weight"].shape == (algorithm.schedule.num_models,)


@pytest.mark.parametrize(
    "base", nightly([name for name, entry in ALGORITHMS.items() if entry.inside], ["fed_avg", "fed_dyn", "scaffold"])
)
@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if entry.has_base])
def test_every_base_inside_another_algorithm_is_built(name: str, base: str) -> None:
    built = tiny(algorithm=name, base=base).algorithm
    assert built.name == (name if base == "fed_avg" else f"{base}_{name.removeprefix('fed_')}")


def test_what_a_loss_is_given_of_class_labels() -> None:
    """Labels, centred one-hot numbers, or -1 and 1 with one output against the rest; sums as means."""
    labels = np.asarray(tiny().examples.train.labels)
    one_hot = np.eye(10)[labels]
    for loss, expected in {
        "cross_entropy": labels,
        "squared_error": one_hot - 0.1,
        "logistic": 2 * one_hot - 1,
    }.items():
        for name in (loss, f"{loss}_sum"):
            built = tiny(loss=name)
            np.testing.assert_allclose(built.data.y, expected, atol=1e-7)
            assert built.loss == name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "mse"}, "loss: got 'mse', allowed are squared_error, cross_entropy"),
    ({"algorithm": "ntk_fl", "loss": "exponential"}, "loss: got 'exponential', allowed are squared_error, cross"),
    ({"algorithm": "fed_be", "loss": "logistic"}, "loss: got 'logistic', allowed are cross_entropy, squared_error"),
    ({"dataset": "sine", "loss": "logistic"}, "y_train: got .*, must be -1 or 1 for the loss 'logistic'"),
    (
        {"dataset": "sine", "loss": "cross_entropy_sum"},
        "loss: got 'cross_entropy_sum', which needs class labels .* allowed are squared_error",
    ),
    ({"weighting": "x"}, "weighting: got 'x', .*examples, uniform"),
    ({"activation": "x"}, "activation: got 'x'.*relu"),
    ({"parameterization": "x"}, "parameterization: got 'x', allowed are ntk, standard, maximal_update"),
    ({"client_optimizer": "lamb"}, "client_optimizer: got 'lamb', allowed are sgd, momentum, adam"),
    ({"algorithm": "ntk_fl", "ntk_kernel": "x"}, "ntk_kernel: got 'x', allowed are averaged, exact"),
    ({"algorithm": "ntk_fl", "ntk_times": (0,)}, "ntk_times: got"),
    ({"algorithm": "ntk_fl", "ntk_times": (20, 10)}, "ntk_times: got"),
    ({"algorithm": "ntk_fl", "ntk_choose": "x"}, "ntk_choose: got 'x', allowed are training, validation"),
    ({"algorithm": "ntk_fl", "server_examples": 7}, "server_examples: is used with ntk_choose"),
    ({"algorithm": "ntk_fl", "loss": "cross_entropy", "ntk_method": "eigh"}, "ntk_method: .*auto, iterate, multirate"),
    ({"algorithm": "ntk_fl", "client_learning_rate": 0.0}, "client_learning_rate: got 0"),
    ({"alpha": 0.0}, "alpha: got 0"),
    ({"alpha": float("nan")}, "alpha: got nan"),
    ({"partition": "quantity_skew", "alpha": -1.0}, "alpha: got -1"),
    ({"partition": "shards", "shards_per_client": 1000}, "shards_per_client: got 4000 shards"),
    ({"partition": "classes", "classes_per_client": 11}, "classes_per_client: got 11, must be .*1 to 10"),
    ({"partition": "by_user"}, "partition: got .by_user., must be another: the data set digits has no users"),
    ({"dataset": "sine", "partition": "dirichlet", "num_train": None}, "partition: .* sine has no class labels"),
    ({"num_clients": 0}, "num_clients: got 0"),
    ({"num_clients": 5000}, "num_clients: got 5000"),
    ({"min_client_size": 1000}, "min_client_size: got 1000"),
    ({"clients_per_round": 0}, "clients_per_round: got 0"),
    ({"clients_per_round": 5}, "clients_per_round: got 5"),
    ({"algorithm": "fed_ensemble", "num_models": 0}, "num_models: got"),
    ({"algorithm": "fed_ensemble", "schedule": "uniform"}, "schedule: got 'uniform', which trains one model"),
    ({"algorithm": "fed_ensemble", "schedule": "mixed", "num_models": 9}, "num_models: got"),
    ({"schedule": "strata", "num_strata": 0}, "num_strata: got 0"),
    (
        {"schedule": "strata", "num_strata": 2, "clients_per_stratum": 9},
        "clients_per_strat",
    ),
    ({"client_learning_rate": 0.0}, "client_learning_rate: got 0"),
    ({"client_learning_rate": float("inf")}, "client_learning_rate: got inf"),
    ({"server_learning_rate": float("nan")}, "server_learning_rate: got nan"),
    ({"decay": 0.0}, "decay: got 0.0"),
    ({"decay": 1.1}, "decay: got 1.1"),
    ({"decay_every": 7}, "decay_every: is used with decay only"),
    ({"max_update_norm": 0.0}, "max_update_norm: got 0"),
    (
        {"algorithm": "cp_ntk_fl", "max_update_norm": 5.0},
        "max_update_norm: got 5.0, must be inf: cp_ntk_fl",
    ),
    (
        {"algorithm": "centralised", "max_update_norm": 5.0},
        "max_update_norm: got 5.0, must be inf: centr",
    ),
    ({"local_steps": 2, "local_epochs": 2}, "local_steps"),
    ({"local_steps": 0}, "local_steps: got 0"),
    ({"local_epochs": 0}, "local_epochs: got 0"),
    ({"local_steps": 10**12}, "local_steps: got"),
    ({"batch_size": -1}, "batch_size: got -1"),
    ({"num_rounds": 0}, "num_rounds: got 0"),
    ({"num_rounds": 10**20}, "num_rounds: got"),
    ({"seed": -1}, "seed: got -1"),
    ({"seed": 2**70}, "seed: got"),
    ({"widths": (0,)}, "widths: got"),
    ({"num_train": 0}, "num_train: got 0, must be .*1 to 1438"),
    ({"num_train": 9999}, "num_train: got 9999"),
    ({"model": "rbf_linear", "widths": None}, "model: got .rbf_linear"),
    ({"model": "lstm", "widths": None}, "model: .*lstm"),
    ({"dropout": 1.0}, "dropout: got 1.0"),
    ({"keep_first": 0}, "keep_first: got 0"),
    ({"keep_first": 2, "completion_time": "x"}, "completion_time: got 'x', allowed are lognormal, exponential"),
    ({"keep_first": 2, "completion_spread": 0.0}, "completion_spread: got 0"),
    ({"client_test": 1.0}, "client_test: got 1.0"),
    ({"algorithm": "fed_prox", "mu": -0.1}, "mu: got -0.1"),
    ({"algorithm": "ditto", "mu": -0.1}, "mu: got -0.1"),
    ({"algorithm": "fed_nova", "client_optimizer": "adam"}, "client_optimizer"),
    ({"algorithm": "scaffold", "client_optimizer": "momentum"}, "client_optimizer"),
    ({"algorithm": "fed_be", "server_examples": 0}, "server_examples: got 0"),
    ({"algorithm": "fed_be", "num_train": 60, "server_examples": 59}, "server_examples: got 59 examples, among "),
    (
        {"algorithm": "ntk_fl", "num_train": 60, "ntk_choose": "validation", "server_examples": 59},
        "server_examples: got 59 examples, among ",
    ),
    ({"algorithm": "data_sharing", "num_train": 60, "shared_fraction": 0.99}, "shared_fraction: got 59 examples, must"),
    ({"algorithm": "lg_fed_avg", "private": "no such"}, "private: got 'no such'"),
    ({"algorithm": "gossip", "graph": "erdos_renyi:0.01"}, "graph: got 'erdos_renyi:0.01'.*connected"),
    ({"algorithm": "gossip", "graph": "star"}, "graph: got 'star', allowed are "),
    ({"algorithm": "gossip", "shuffle": True}, "shuffle: is not used with algorithm 'gossip', only with"),
    ({"algorithm": "dp_fed_avg", "delta": 1.0}, "delta: got 1.0"),
    ({"algorithm": "dp_fed_avg", "clip_norm": 0.0}, "clip_norm: got 0.0"),
    ({"algorithm": "data_sharing", "shared_fraction": 1.5}, "shared_fraction: got 1.5"),
    ({"error_feedback": True}, "error_feedback: got True with a lossless channel"),
    ({"channel": "top_k"}, "channel: got 'top_k'"),
    ({"channel": "zip:3"}, "channel: got 'zip:3', allowed are "),
    ({"channel": "qsgd:99"}, "channel: got 'qsgd:99': bits"),
    ({"beta": 0.0}, "beta: got 0"),
    ({"beta": 1.1}, "beta: got 1.1"),
    ({"sparsity": 1.0}, "sparsity: got 1.0"),
    ({"sparsity": 0.5, "channel": "qsgd:4"}, "sparsity: got 0.5 and channel 'qsgd:4'"),
    ({"secure_aggregation": True, "channel": "top_k:0.1"}, "channel: must be lossless with secure_aggregation"),
    ({"secure_aggregation": True, "sparsity": 0.5}, "channel: must be lossless with secure_aggregation"),
    ({"secure_aggregation": True, "max_update_norm": 5.0}, "max_update_norm: needs single messages"),
    ({"secure_aggregation": True, "shuffle": True}, "shuffle: adds nothing to secure_aggregation"),
    ({"projection": 0, "key_file": "key"}, "projection: got 0"),
    ({"projection": 65, "key_file": "key"}, "projection: got 65, must be a whole number from 1 to 64"),
    ({"projection": 9}, "key_file: got none, must be a file"),
    ({"projection": 4, "key_file": "key", "dataset": "shakespeare", "model": "mlp"}, "dataset: got 'shakespeare'"),
    (
        {"projection": 9, "key_file": "key", "model": "cnn", "widths": None},
        "model: got 'cnn', must be for vectors",
    ),
    ({"data_dir": Path("nowhere")}, "data_dir: got nowhere, must be a folder"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_does_not_go_is_one_line_with_the_name_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("FEDTANGENT_KEY_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    if "key_file" in given:
        given = given | {"key_file": tmp_path / "key"}
    whole = {name: value for name, value in (TINY | given).items() if value is not None}
    chosen = {name: whole[name] for name in description.CHOICES if name in whole}
    known = {field for group in description.groups(chosen).values() for field in vars(group)}
    whole = {name: value for name, value in whole.items() if name in given or name in known}
    with pytest.raises(ValueError, match=message) as error:
        build(describe(**whole))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())  # nothing is written, no key file either


def altered(monkeypatch: pytest.MonkeyPatch, **arrays: Any) -> None:
    """The data set digits with other arrays."""
    load = building._built

    def other(chosen: description.Chosen, *given: Any) -> Any:
        made = load(chosen, *given)
        return made._replace(**{k: change(np.array(getattr(made, k))) for k, change in arrays.items()}) if isinstance(
            made, Dataset
        ) else made  # fmt: skip

    monkeypatch.setattr(building, "_built", other)


def setting(value: Any) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array[(3,) + (0,) * (array.ndim - 1)] = value
        return array

    return change


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("x_train", np.nan, "x_train: .*finite"),
        ("x_test", np.inf, "x_test: .*finite"),
        ("y_train", 10, "got 10"),
        ("y_train", -1, "got -1"),
        ("y_test", 10, "got 10"),
    ],
)
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_data_that_are_not_finite_or_no_classes(
    monkeypatch: pytest.MonkeyPatch, part: str, value: float, says: str, loss: str
) -> None:
    altered(monkeypatch, **{part: setting(value)})
    with pytest.raises(ValueError, match=says):
        build(describe(partition="iid", num_clients=4, loss=loss))


def test_inputs_keep_their_shape_and_numbers_that_are_no_tokens_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny().data.x.dtype == jnp.float32 and tiny().data.x.shape == (120, 8, 8, 1)
    assert inputs_on_device(np.zeros((3, 5), np.int16)).dtype == np.int32
    whole = lambda x: (16 * x).astype(np.int32)  # noqa: E731
    altered(monkeypatch, x_train=whole, x_test=whole)
    built = tiny()
    assert built.data.x.dtype == jnp.float32 and built.examples.test.x.dtype == jnp.float32
    assert np.array_equal(built.data.x, np.round(built.data.x)) and built.data.x.max() == 16


def test_clients_are_tested_on_examples_of_their_own() -> None:
    built = tiny(algorithm="ditto", client_test=0.25)
    assert built.of_clients is not None and built.of_clients.num_clients == 4
    assert set(built.of_clients.indices.tolist()).isdisjoint(built.data.indices.tolist())
    assert len(built.of_clients.indices) + len(built.data.indices) == 120


def test_faults_of_a_schedule() -> None:
    plan, sizes = all_clients(4), np.array([1, 1, 100, 0])
    assert building._faulty(CommonOptions(), plan, sizes) is plan
    both = building._faulty(CommonOptions(dropout=0.3, keep_first=2, completion_spread=0.1), plan, sizes)
    rounds = 2000
    seen = drawn_cohorts(both, None, rounds, weighting=None)
    filled = np.asarray(seen.weight) > 0

    def share(clients: Any) -> float:
        """Of the rounds, those in which these clients are among the two."""
        return float((np.isin(np.asarray(seen.client), clients) & filled).any(axis=1).mean())

    # Those who drop out do not answer: two make the round as long as two are left.
    full = 1 - 0.3**4 - 4 * 0.7 * 0.3**3
    assert float(filled.all(axis=1).mean()) == pytest.approx(full, abs=5 * np.sqrt(full * (1 - full) / rounds))
    # The large one is among the first two only if it answers and at most one of the three others does.
    large = 0.7 * (0.3**3 + 3 * 0.7 * 0.3**2)
    assert share([2]) == pytest.approx(large, abs=5 * np.sqrt(large * (1 - large) / rounds))
    assert share([0]) > 2 * large


def test_none_for_a_choice_or_the_loss_is_the_default() -> None:
    assert describe(algorithm=None, loss=None) == describe()
    assert describe(algorithm="random_walk", base=None) == describe(algorithm="random_walk")


def test_only_flat_options_of_what_was_chosen_describe_a_run() -> None:
    with pytest.raises(ValueError, match="mu: is not used with algorithm 'fed_avg', only with ditto"):
        describe(mu=0.3)
    with pytest.raises(ValueError, match="nonsense: is no option of a run"):
        describe(nonsense=1)
    assert describe(algorithm="fed_prox", mu=0.3).values()["mu"] == 0.3


def defaults_of(function: Any) -> dict[str, Any]:
    """The defaults of a function's parameters, and of the fields of those that are records, by name."""
    found: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if dataclasses.is_dataclass(parameter.default):
            found |= dataclasses.asdict(parameter.default)
        found[parameter.name] = parameter.default
    return found


@pytest.mark.parametrize("kind", ["models", "algorithms"])
def test_python_and_the_command_line_have_the_same_defaults(kind: str) -> None:
    """But for options that write a parameter of another kind, such as a Work by its numbers."""
    compared = 0
    for name, entry in catalogue(kind).items():
        function = entry.function if kind == "models" else entry.recipe
        python = defaults_of(function)
        for field in dataclasses.fields(entry.options):
            if field.name in WRITTEN or field.name == "base" or python.get(field.name, NONE) is NONE:
                continue
            assert python[field.name] == field.default, (name, field.name)
            compared += 1
    assert compared > 20


def test_local_work_has_the_same_defaults() -> None:
    """Five epochs of minibatches of 16."""
    for name in ("fed_avg", "scaffold", "fed_dyn"):
        described = describe(algorithm=name).algorithm
        built = described.entry.build(described.options, Supplied(mlp(2, 2, (2,)), uniform_sampling(4, 2)))
        model, schedule = mlp(2, 2, (2,)), uniform_sampling(4, 2)
        python = described.entry.recipe(model, schedule, client_learning_rate=described.options.client_learning_rate)
        assert built.composition.training[1:] == python.composition.training[1:], name


def test_what_a_file_is_read_as_decides_the_other_choices(tmp_path: Path) -> None:
    rng, name = np.random.default_rng(0), str(tmp_path / "mine.npz")
    table = np.stack([rng.integers(1859, 3859, 60), rng.integers(0, 67, 60)], axis=1)
    np.savez(name, x=table, y=np.arange(60) % 7)
    made = {
        asked: describe(dataset=name, **dict([asked] if asked else []))
        for asked in (None, ("input_kind", "tokens"), ("target_kind", "numbers"))
    }
    chosen = [(d.names()["model"], d.names()["partition"], d.algorithm.options.loss) for d in made.values()]
    assert chosen == [
        ("mlp", "dirichlet", "squared_error"),
        ("lstm", "dirichlet", "cross_entropy"),
        ("mlp", "iid", "squared_error"),
    ]
    values = made["target_kind", "numbers"].values()
    assert describe(**values).values() == values
    with pytest.raises(ValueError, match="input_kind: is not used with dataset 'digits', only with a file of your own"):
        describe(dataset="digits", input_kind="tokens")
