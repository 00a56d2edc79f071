"""The examples of a run: what is on the device and for theory, in every form that users give, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedtangent as ft
from fedtangent._src.data.dataset import Dataset, SourceInfo
from fedtangent._src.data.examples import Examples, clients_of, run_examples, sampled
from fedtangent._src.models import cnn, lstm, mlp
from fedtangent._src.types import Model, Partition

RNG = np.random.default_rng(0)
X, X_TEST = RNG.standard_normal((12, 5)), RNG.standard_normal((4, 5))
LABELS, LABELS_TEST = np.arange(12) % 3, np.arange(4) % 3
NUMBERS, NUMBERS_TEST = RNG.standard_normal((12, 2)), RNG.standard_normal((4, 2))
CLIENTS = [[0, 1, 2, 5], [3, 4, 0], []]


def same(got: Any, expected: Any, dtype: Any) -> None:
    """Of one dtype and equal bit for bit."""
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected, dtype))


def refusal(call: Callable[[], Any]) -> str:
    """The whole message of the ``ValueError`` that a call raises."""
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


# ---- what a run gets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize(
    ("loss", "targets", "takes_labels"),
    [
        ("squared_error", np.eye(3) - 1 / 3, False),
        ("squared_error_sum", np.eye(3) - 1 / 3, False),
        ("logistic", 2 * np.eye(3) - 1, False),
        ("cross_entropy", np.eye(3) - 1 / 3, True),
        (lambda outputs, targets, mask: jnp.sum(outputs), np.eye(3) - 1 / 3, True),
    ],
)
def test_class_labels_in_the_form_of_the_loss(loss: Any, targets: np.ndarray, takes_labels: bool, x64: bool) -> None:
    with jax.enable_x64(x64):
        found = run_examples((X, LABELS, X_TEST, LABELS_TEST), CLIENTS, loss)
    same(found.data.x, X, np.float32)
    same(found.data.y, LABELS if takes_labels else targets[LABELS], np.int32 if takes_labels else np.float32)
    same(found.data.indices, [0, 1, 2, 5, 3, 4, 0], np.int32)
    same(found.data.offsets, [0, 4, 7, 7], np.int32)
    for which, x, y in (("train", X, LABELS), ("test", X_TEST, LABELS_TEST)):
        split = getattr(found, which)
        same(split.x, x, np.float32)
        same(split.targets, targets[y], np.float32)
        same(split.labels, y, np.int32)
        assert split.num_examples == len(x)
    assert (found.num_outputs, found.input_shape, found.classes) == (3, (5,), None)


def test_numbers_to_predict() -> None:
    found = run_examples((X, NUMBERS, X_TEST, NUMBERS_TEST), CLIENTS)
    assert found.test is not None and found.test.labels is None and found.num_outputs == 2
    same(found.data.y, NUMBERS, np.float32)
    same(found.test.targets, NUMBERS_TEST, np.float32)
    one = run_examples((X, NUMBERS[:, 0]), CLIENTS, "squared_error", mlp(5, 1, (3,)))
    same(one.data.y, NUMBERS[:, :1], np.float32)
    assert one.test is None
    assert refusal(lambda: one.in_float64("test")) == (
        "split: got 'test', must be 'train': the data have no test examples"
    )


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy", "logistic"])
def test_theory_gets_the_numbers_that_networks_are_trained_on(loss: str) -> None:
    """Rounded to float32, and in float64; of the cross entropy the targets are probabilities."""
    found = run_examples((X, LABELS, X_TEST, LABELS_TEST), CLIENTS, loss)
    for which, inputs, labels in (("train", X, LABELS), ("test", X_TEST, LABELS_TEST)):
        x, y = found.in_float64(which)
        same(x, inputs.astype(np.float32), np.float64)
        same(y, np.eye(3)[labels] if loss == "cross_entropy" else getattr(found, which).targets, np.float64)
        few = found.in_float64(which, 2)
        rows = [int(np.flatnonzero((x == row).all(axis=1))[0]) for row in few[0]]
        assert len(set(rows)) == 2
        same(few[1], y[rows], np.float64)
    assert (found.in_float64()[0] != X).any()  # control: they are rounded
    alone = run_examples((X, LABELS * 0), CLIENTS, "cross_entropy")
    assert refusal(alone.in_float64) == "loss: got cross_entropy, must be squared_error if there is one class only"


def test_metrics_of_more_than_ten_thousand_training_examples_are_of_a_random_sample_that_is_named() -> None:
    """24,000 rows sorted by class, 14,000 of class 0 last: a model that always says 0 is right for 14 of 24."""
    labels = np.repeat([1, 0], [10_000, 14_000])
    x = np.arange(24_000, dtype=np.float64)[:, None]
    found = run_examples((x, labels), np.arange(24_000) % 7)
    rows = np.asarray(found.train.x)[:, 0].astype(int)
    assert found.train_name == "train 10000 of 24000" and found.data.x.shape == (24_000, 1)
    assert len(np.unique(rows)) == found.train.num_examples == 10_000
    np.testing.assert_array_equal(np.asarray(found.train.labels), labels[rows])
    np.testing.assert_array_equal(rows, np.arange(24_000)[found.train_rows])
    error = np.sqrt(14 / 24 * 10 / 24 / 10_000 * 14 / 24)  # of a share in a sample without replacement
    share = np.mean(np.asarray(found.train.labels) == 0)
    assert abs(share - 14 / 24) < 4 * error < abs(np.mean(labels[:10_000] == 0) - 14 / 24)  # control: the first ones
    assert found.in_float64()[0].shape == (24_000, 1)
    few = found.in_float64("train", 50)[0][:, 0].astype(int)
    assert len(np.unique(few)) == 50 and 0 < np.mean(labels[few]) < 1
    whole = run_examples((x[:10_000], labels[5_000:15_000]), np.arange(10_000) % 7)
    assert whole.train_name == "train" and whole.train.x is whole.data.x


def test_the_sample_of_many_training_examples_does_not_depend_on_the_order_of_the_rows() -> None:
    """Rows of whole numbers with many copies, in two orders: the same examples as often; each copy by itself."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 4, (30_000, 3)).astype(float), rng.integers(0, 2, 30_000)
    order = rng.permutation(30_000)

    def counts(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        rows = sampled(10_000, x, y)
        return np.bincount((x[rows] @ [1, 4, 16] + 64 * y[rows]).astype(int), minlength=128)

    drawn = counts(x, y)
    np.testing.assert_array_equal(counts(x[order], y[order]), drawn)
    assert drawn.sum() == 10_000 and (counts(x[:20_000], y[:20_000]) != drawn).any()
    expected = np.bincount((x @ [1, 4, 16] + 64 * y).astype(int), minlength=128) / 3
    deviations = (drawn - expected) / np.sqrt(expected * 2 / 3)  # of counts in a sample without replacement
    assert np.abs(deviations).max() < 4 and 0.8 < np.std(deviations) < 1.2
    whole_kinds = np.isin(np.arange(128), rng.choice(128, 43)) * 3 * expected  # control: equal rows drawn as one
    assert np.abs((whole_kinds - expected) / np.sqrt(expected * 2 / 3)).max() > 10


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float64])
def test_images_stay_images_and_a_dense_network_flattens_them(dtype: Any) -> None:
    images = RNG.integers(0, 200, (12, 6, 4, 3)).astype(dtype)
    for model in (mlp(72, 3, (4,)), cnn((6, 4, 3), 3, (2,), (), 3)):
        found = run_examples((images, LABELS), CLIENTS, "cross_entropy", model)
        same(found.data.x, images / np.float32(255) if dtype is np.uint8 else images, np.float32)
        assert found.input_shape == (6, 4, 3) and found.dataset.kind == "image"


def test_pixels_are_the_same_numbers_from_a_file_from_an_array_and_in_a_dataset(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (12, 6, 4, 3)).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=LABELS, x_test=images, y_test=LABELS)
    from_file = ft.data.load(str(tmp_path / "mine.npz"))
    ways = from_file, (images, LABELS, images, LABELS), from_file._replace(x_train=images, x_test=images)
    for data in ways:
        found = run_examples(data, CLIENTS, "cross_entropy", mlp(72, 3, (4,)))
        same(found.data.x, images / np.float32(255), np.float32)
        assert found.test is not None
        same(found.test.x, images / np.float32(255), np.float32)


def test_whole_numbers_are_tokens_for_a_model_that_reads_tokens() -> None:
    texts = RNG.integers(0, 3, (12, 7))
    found = run_examples((texts, LABELS), CLIENTS, "cross_entropy", lstm(3, 3, 2, 2, 1))
    same(found.data.x, texts, np.int32)
    same(found.in_float64()[0], texts, np.int32)
    same(run_examples((texts, LABELS), CLIENTS, "cross_entropy", mlp(7, 3, (2,))).data.x, texts, np.float32)


def test_tokens_beyond_the_vocabulary_are_refused_as_labels_are() -> None:
    texts, model = RNG.integers(0, 80, (12, 7)), lstm(80, 3, 4, 4, 1)
    texts[0, 0] = 79
    run_examples((texts, LABELS, texts, LABELS), CLIENTS, "cross_entropy", model)
    beyond, dataset = (
        texts.copy(),
        Dataset("mine", texts, LABELS, texts, LABELS, 3, None, SourceInfo("", "", ""), "tokens"),
    )
    beyond[3, 2] = 89
    for data, name in (
        ((beyond, LABELS), "x_train"),
        ((texts, LABELS, beyond, LABELS), "x_test"),
        (dataset._replace(x_test=beyond), "x_test"),
        (dataset._replace(x_train=beyond, x_test=texts[:0], y_test=LABELS[:0]), "x_train"),
    ):
        says = refusal(lambda data=data: run_examples(data, CLIENTS, "cross_entropy", model))
        assert says.startswith(f"{name}: got ") and says.endswith("must be tokens from 0 to 79")
    clients, fed_avg = (
        [[0, 1, 2], [3]],
        ft.fed_avg(model, ft.schedules.uniform_sampling(2, 2), client_learning_rate=0.1),
    )
    direct = ft.data.federated_data(beyond, LABELS, clients)
    assert refusal(lambda: ft.simulate(fed_avg, direct, num_rounds=1)).endswith("must be tokens from 0 to 79")


@pytest.mark.parametrize("kind", [np.array, list, lambda names: np.array(names, object)])
def test_string_labels_are_numbered_in_sorted_order(kind: Callable[[list[str]], Any]) -> None:
    names = ["dog", "ant", "cat"]
    train, test = [names[i] for i in LABELS], [names[i] for i in LABELS_TEST]
    found = run_examples((X, kind(train), X_TEST, kind(test)), CLIENTS)
    assert found.classes == ("ant", "cat", "dog") and found.test is not None
    assert [found.classes[i] for i in np.asarray(found.train.labels)] == train
    assert [found.classes[i] for i in np.asarray(found.test.labels)] == test
    assert repr(found) == (
        "Examples('given data': 12 to train, 6 of them on 3 clients, 4 to test; inputs (5,), 3 classes (ant, cat, dog))"
    )


def test_a_data_set_or_its_name() -> None:
    digits = ft.data.load("digits", seed=3)
    n = len(digits.x_train)
    clients = ft.partition.iid(n, 4, 0)
    for data in (digits, "digits"):
        found: Examples = run_examples(data, clients, seed=3)
        same(found.data.x, digits.x_train, np.float32)
        assert found.test is not None
        same(found.test.labels, digits.y_test, np.int32)
        assert repr(found) == (
            f"Examples('digits': {n} to train, all of them on 4 clients, {len(digits.x_test)} to test; inputs "
            "(8, 8, 1), 10 classes)"
        )
    again = ft.partition.iid(n, 2, 0)
    same(found.held_by(again).offsets, again.offsets, np.int32)
    assert refusal(lambda: found.held_by(Partition(np.array([n]), np.array([0, 1])))) == (
        f"partition: got {n} for client 0, must be from 0 to {n - 1}"
    )


def test_a_model_may_have_more_outputs_than_arrays_have_classes() -> None:
    """The arrays do not say how many classes there are; a data set does."""
    with pytest.warns(UserWarning, match=r"y_train: has no example of 1 of 4 classes.*: 3; number"):
        found = run_examples((X, LABELS), CLIENTS, "squared_error", mlp(5, 4, (3,)))
    same(found.data.y, np.eye(4)[LABELS] - 1 / 4, np.float32)


# ---- clients --------------------------------------------------------------------------------------------------------


def test_the_forms_of_clients() -> None:
    whole = Partition(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    forms: list[Any] = [whole, [[0, 1], [2, 3]], (np.array([0, 1]), np.array([2, 3])), np.array([[0, 1], [2, 3]])]
    forms += [{"a": [0, 1], "b": [2, 3]}, ["a", "a", "b", "b"], np.array([7, 7, 9, 9]), [7, 7, 9, 9]]
    forms += [np.array(["a", "a", "b", "b"], object)]
    for clients in forms:
        found = clients_of(clients, 4)
        assert found.indices.tolist() == [0, 1, 2, 3] and found.offsets.tolist() == [0, 2, 4]
    # of four examples, four numbers are users and one list of four is a client
    assert clients_of([0, 1, 2, 3], 4).num_clients == 4 and clients_of([[0, 1, 2, 3]], 4).num_clients == 1


def test_clients_may_share_examples_and_leave_some_to_nobody() -> None:
    assert "12 to train, 2 of them on 2 clients" in repr(run_examples((X, LABELS), [[0, 1], [1]]))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([[0, 1, 1], [2]], "clients: got example 1 2 times for client 0, must list each example of a client once"),
        (
            Partition(np.array([0, 3, 2, 3]), np.array([0, 1, 4])),
            "clients: got example 3 2 times for client 1, must list each example of a client once",
        ),
        ([[0], [], [4, 12]], "clients: got 12 for client 2, must be from 0 to 11"),
        ([[0], [-1]], "clients: got -1 for client 1, must be from 0 to 11"),
        ([[], []], "clients: got 2 empty clients, must have at least one example"),
        ([], "clients: got [], must be a Partition or lists of indices, one or more"),
        (None, "clients: got None, must be a Partition or lists of indices, one or more"),
        ([["a"], [1]], "clients: got ['a'] for client 0, must be a list of whole numbers"),
        (
            ["a"] * 11,
            "clients: got 11 users, must be one for each of 12 training examples, or a list of arrays, the examples of "
            "each client",
        ),
        (
            ["a"] * 11 + [None],
            "clients: got None at position 11 (1 such), must be a whole number or a string for every example",
        ),
        (
            Partition(np.array([0, 3]), np.array([0, 1])),
            "clients.offsets: got 0 to 1, must be from 0 to len(indices) = 2",
        ),
    ],
)
def test_clients_that_are_refused(clients: Any, message: str) -> None:
    assert refusal(lambda: run_examples((X, LABELS), clients)) == message


# ---- what is refused ------------------------------------------------------------------------------------------------


def changed(array: np.ndarray, at: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


ALL = {"x_train": X, "y_train": LABELS, "x_test": X_TEST, "y_test": LABELS_TEST}
KINDS = "must be whole numbers or strings [n], the class labels, or floating numbers [n] or [n, C]"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x_train": changed(X, (7, 1), np.nan)}, "x_train: got nan in row 7 (1 of 12 rows not finite), must be finite"),
    ({"x_test": changed(X_TEST, 2, -np.inf)}, "x_test: got -inf in row 2 (1 of 4 rows not finite), must be finite"),
    (
        {"y_train": changed(NUMBERS, (11, 1), np.nan), "y_test": NUMBERS_TEST},
        "y_train: got nan in row 11 (1 of 12 rows not finite), must be finite",
    ),
    ({"x_test": X_TEST * 1e300}, "x_test: got values beyond the range of float32, must be rescaled"),
    ({"x_test": X_TEST[:, :4]}, "x_test: got 4 columns, must be 5 as x_train has"),
    ({"x_test": X_TEST.reshape(4, 5, 1)}, "x_test: got examples of shape (5, 1), must be (5,) as x_train has"),
    ({"y_train": NUMBERS, "y_test": NUMBERS_TEST[:, :1]}, "y_test: got 1 column, must be 2 as y_train has"),
    ({"y_test": NUMBERS_TEST}, "y_test: got floating numbers, must be whole numbers as y_train has"),
    ({"y_test": ["a"] * 4}, "y_test: got strings, must be whole numbers as y_train has"),
    ({"y_train": LABELS[:10]}, "y_train: got 10 targets, must be 12, one for each row of x_train"),
    (
        {"y_train": NUMBERS[:10, 0], "y_test": NUMBERS_TEST[:, 0]},
        "y_train: got 10 targets, must be 12, one for each row of x_train",
    ),
    ({"y_train": LABELS - 1}, "y_train: got -1 at position 0 (4 such), must be at least 0"),
    (
        {"y_train": LABELS[:, None]},
        f"y_train: got int64 of shape (12, 1), {KINDS} (one column of labels becomes [n] by y.ravel())",
    ),
    ({"y_train": LABELS > 1}, f"y_train: got bool of shape (12,), {KINDS}"),
    ({"x_train": X.astype(str)}, "x_train: got <U32, must be real numbers"),
    ({"x_train": X.astype(complex)}, "x_train: got complex128, must be real numbers"),
    ({"x_train": X[:, 0]}, "x_train: got shape (12,), must be [n, ...], a row of numbers for each example"),
    ({"x_train": X[:, :0]}, "x_train: got shape (12, 0), must be [n, ...], a row of numbers for each example"),
    ({"x_train": [[1, 2], [3]]}, "x_train: got [[1, 2], [3]], must have rows of one length"),
    ({"x_test": None}, "x_test: got object, must be real numbers"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_arrays_that_are_refused(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one line, before anything goes to the device."""
    monkeypatch.setattr(jnp, "asarray", lambda *_, **__: pytest.fail("an array went to the device"))
    assert refusal(lambda: run_examples(tuple({**ALL, **changes}.values()), CLIENTS)) == message


DIGITS = ft.data.load("digits", num_train=20, num_test=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "data: got None as x_test, must be an array with one example in each row"),
        ({"y_train": [1, 2]}, "data: got [1, 2] as y_train, must be an array with one example in each row"),
        ({"num_classes": 0}, "data: got y_train of shape (20,), must be numbers [n, C], as num_classes is 0"),
    ],
)
def test_a_dataset_with_a_wrong_part_is_refused(changes: dict[str, Any], message: str) -> None:
    wrong = DIGITS._replace(**changes)
    assert refusal(lambda: run_examples(wrong, ft.partition.iid(20, 2, seed=0))) == message
    assert refusal(lambda: wrong.num_outputs) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, "data: got array("),
        ((X, LABELS, X_TEST), "data: got tuple of 3, must be a Dataset, a data set's name, (x_train, y_train) or "),
        ({"x": X}, "data: got dict of 1, must be a Dataset, "),
        ("digit", "dataset: got 'digit', "),
    ],
)
def test_other_things_are_no_data(data: Any, message: str) -> None:
    said = refusal(lambda: run_examples(data, CLIENTS))
    assert said.startswith(message) and "\n" not in said


@pytest.mark.parametrize(
    ("y", "loss", "message"),
    [
        (
            NUMBERS[:, 0],
            "cross_entropy",
            "loss: got 'cross_entropy', which needs class labels (whole numbers or strings [n]), but y_train has "
            "float64 numbers of shape (12, 1), allowed are squared_error, squared_error_sum, and for numbers -1 and 1 "
            "exponential, logistic, exponential_sum, logistic_sum",
        ),
        (np.full((12, 1), 2.0), "logistic", "y_train: got 2, must be -1 or 1 for the loss 'logistic'"),
    ],
)
def test_targets_that_the_loss_does_not_take(y: np.ndarray, loss: str, message: str) -> None:
    assert refusal(lambda: run_examples((X, y), CLIENTS, loss)) == message
    assert refusal(lambda: run_examples((X, LABELS), CLIENTS, "hinge")).startswith("loss: got 'hinge', ")


def _digits() -> Dataset:
    return ft.data.load("digits", num_train=40, num_test=40)


WORDS = np.zeros((12, 4), np.int32)
TEXTS = Dataset("texts", WORDS, LABELS, WORDS[:0], LABELS[:0], 3, None, SourceInfo("", "", ""), "tokens")
MODELS: list[tuple[Any, Callable[[], Model], str]] = [
    (
        (X, LABELS),
        lambda: mlp(5, 2, ()),
        "model: got mlp(5-2, relu, ntk) of 2 outputs, must have 3, one for each class of y_train (0 to 2)",
    ),
    (
        (X, [("ant", "cat", "dog")[i] for i in LABELS]),
        lambda: mlp(5, 1, ()),
        "model: got mlp(5-1, relu, ntk) of 1 output, must have 3, one for each class of y_train (ant, cat, dog); a "
        "single output is fitted to floating numbers, such as -1 and 1",
    ),
    (
        (X, NUMBERS[:, 0]),
        lambda: mlp(5, 3, ()),
        "model: got mlp(5-3, relu, ntk) of 3 outputs, must have 1, one for each column of y_train; class labels are "
        "whole numbers or strings [n]",
    ),
    (
        _digits(),
        lambda: mlp(64, 12, ()),
        "model: got mlp(64-12, relu, ntk) of 12 outputs, must have 10, one for each class of y_train (0 to 9)",
    ),
    (
        (X, LABELS),
        lambda: mlp(4, 3, ()),
        "model: got mlp(4-3, relu, ntk), which cannot read examples of shape (5,) of given data: x: got (1, 5), 5 "
        "numbers an example, must be 4 for this model",
    ),
    (
        _digits(),
        lambda: lstm(10, units=2),
        "model: got lstm(10, 8, 2x2), which reads tokens, must read real numbers, as digits has",
    ),
    (
        (X, LABELS),
        lambda: lstm(3, units=2),
        "x_train: got float64, must be whole numbers, the tokens that the model reads",
    ),
    (
        TEXTS,
        lambda: mlp(4, 3, ()),
        "model: got mlp(4-3, relu, ntk), which reads real numbers, must read tokens, as texts has",
    ),
]


@pytest.mark.parametrize(("data", "build", "message"), MODELS)
def test_models_that_do_not_fit_the_data(data: Any, build: Callable[[], Model], message: str) -> None:
    assert refusal(lambda: run_examples(data, CLIENTS, "squared_error", build())) == message


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_classes_that_nothing_trains_are_named() -> None:
    with pytest.warns(UserWarning) as said:
        run_examples((X, LABELS % 2 * 7, X_TEST, np.array([0, 7, 3, 0])), CLIENTS)
    assert [str(warning.message) for warning in said] == [
        "y_test: has labels that y_train has not, so that no client learns them: 3; leave these test examples out, or "
        "add such training examples",
        "y_train: has no example of 5 of 8 classes, so that nothing trains their outputs: 1, 2, 4, 5, 6; number the "
        "classes without gaps by np.unique(y, return_inverse=True)[1], or give the model fewer outputs",
    ]
    with pytest.warns(UserWarning, match=r"y_test: .* learns them: zebra; leave"):
        found = run_examples((X, ["ant"] * 12, X_TEST, ["ant"] * 3 + ["zebra"]), CLIENTS)
    assert found.classes == ("ant", "zebra")
    with warnings.catch_warnings():  # control: every class is there, and a data set says itself how many there are
        warnings.simplefilter("error")
        run_examples((X, LABELS, X_TEST, LABELS_TEST), CLIENTS)
        run_examples(_digits()._replace(y_train=_digits().y_train % 3), CLIENTS)
