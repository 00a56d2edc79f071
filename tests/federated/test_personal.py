"""Personal predictions, and every client's own metrics, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedtangent._src.data.federated import max_client_size
from fedtangent._src.federated import algorithms, predict
from fedtangent._src.federated.algorithms.common import Averaging
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.schedule import per_client_permutations
from fedtangent._src.measures import uncertainty
from fedtangent._src.types import Algorithm, FederatedData, Model, PyTree

from ..nightly import nightly
from . import reference
from . import reference_personalised as loops
from .personalised_runs import DATA, GLOBAL, MODEL, OWN, OWNED, PARTIAL, RATE, SEED, VISIBLE, X, Y, own_of, ran
from .toys import NUM_CLIENTS, counting, distance, federated, models_of, owned_rows


def uneven_test_data() -> FederatedData:
    """Test examples of six clients, of which one has none."""
    rng = np.random.default_rng(8)
    owned = np.split(rng.permutation(13), np.cumsum([2, 1, 0, 5, 4]))
    return federated(rng.normal(size=(13, 3)), rng.normal(size=(13, 2)), owned)


TEST = uneven_test_data()


@functools.cache
def ensemble(how: str, gamma: float = 0.3) -> tuple[Algorithm, PyTree]:
    """Three models, told apart by where they start, with a personal prediction."""
    own = {
        "weighted": lambda: predict.weighted_models("squared_error", gamma),
        "tuned": lambda: predict.fine_tuned("squared_error", 0.2, Work(steps=3, batch_size=None)),
        "minibatches": lambda: predict.fine_tuned("squared_error", 0.2, OWN),
        "none": lambda: None,
    }[how]()
    algorithm = algorithms.fed_ensemble(
        MODEL, per_client_permutations(6, 3), client_learning_rate=RATE, work=GLOBAL, averaging=Averaging(personal=own)
    )
    return algorithm, algorithm.init(SEED, NUM_CLIENTS)


def of_client(algorithm: Algorithm, state: PyTree, i: int) -> np.ndarray:
    return np.asarray(algorithm.personal(state, DATA, max_client_size(DATA), jnp.int32(i), TEST.x).mean)


@pytest.mark.parametrize("client", [0, 2])
def test_weighted_models_equal_the_formula(client: int) -> None:
    algorithm, state = ensemble("weighted")
    models, x = models_of(algorithm, state), np.asarray(TEST.x)
    found = of_client(algorithm, state, client)
    mine = (X[OWNED[client]], Y[OWNED[client]], x)
    np.testing.assert_allclose(found, loops.weighted(models, *mine, 0.3), rtol=0, atol=1e-12)
    assert np.abs(found - loops.weighted(models, *mine, -0.3)).max() > 0.01  # the paper's printed sign
    other = (X[OWNED[3]], Y[OWNED[3]], x)
    assert np.abs(found - loops.weighted(models, *other, 0.3)).max() > 0.01


def test_a_large_gamma_is_the_mean_and_a_small_one_the_best_model() -> None:
    models, x = models_of(*ensemble("weighted")), np.asarray(TEST.x)
    each = np.stack([reference.outputs(m, x) for m in models])
    losses = [
        reference.loss_and_residual(reference.outputs(m, X[OWNED[3]]), Y[OWNED[3]], "squared_error")[0] for m in models
    ]
    far = []
    for gamma in (1e4, 1e5):
        far.append(np.abs(of_client(*ensemble("weighted", gamma), 3) - each.mean(axis=0)).max())
    assert 5 < far[0] / far[1] < 20 and far[1] < 1e-3  # the distance falls as 1 / gamma
    assert np.abs(of_client(*ensemble("weighted", 1e-4), 3) - each[int(np.argmin(losses))]).max() < 1e-12
    for dtype in (jnp.float32, jnp.float64):  # a gamma below the smallest number, and losses of any size
        alpha = predict.model_weights(jnp.array([3e30, 2.0, 1.0], dtype), 1e-310)
        assert alpha.tolist() == [0, 0, 1] and alpha.dtype == dtype


def test_model_weights_minimise_the_penalised_loss() -> None:
    """FE-2024, eq. (4) with the entropy subtracted: no other point of the simplex is better."""
    rng, gamma = np.random.default_rng(0), 0.4
    losses = rng.uniform(size=5)
    alpha = np.asarray(predict.model_weights(jnp.asarray(losses), gamma))

    def value(a: np.ndarray) -> np.ndarray:
        return a @ losses + gamma * np.sum(a * np.log(a), axis=-1)

    others = rng.dirichlet(np.full(5, 2.0), size=2000)
    assert np.all(value(others) > value(alpha)) and np.min(value(others)) < value(alpha) + 0.05
    best = -gamma * np.log(np.sum(np.exp(-losses / gamma)))  # the minimum in closed form
    assert abs(value(alpha) - best) < 1e-14


def test_fine_tuning_equals_the_loop() -> None:
    algorithm, state = ensemble("tuned")
    models = models_of(algorithm, state)
    mine = (X[OWNED[3]], Y[OWNED[3]], np.asarray(TEST.x), 0.2)
    np.testing.assert_allclose(of_client(algorithm, state, 3), loops.fine_tuned(models, *mine, 3), rtol=0, atol=1e-12)
    assert np.abs(of_client(algorithm, state, 3) - loops.fine_tuned(models, *mine, 2)).max() > VISIBLE
    by_batches = ensemble("minibatches")
    assert distance(of_client(*by_batches, 3), of_client(*by_batches, 3)) == 0
    assert distance(of_client(*by_batches, 3), of_client(algorithm, state, 3)) > VISIBLE


@pytest.mark.parametrize("name", nightly(["ditto", "local_only"], ["ditto"]))
def test_personal_predictions_use_the_clients_own_models(name: str) -> None:
    algorithm, run = ran(name)
    found = algorithm.personal(run.state, DATA, max_client_size(DATA), jnp.int32(1), TEST.x)
    expected = reference.outputs(own_of(run.state.client, 0, 1), np.asarray(TEST.x))
    np.testing.assert_allclose(found.mean, expected, rtol=0, atol=1e-13)


def test_personal_predictions_use_the_clients_own_parts() -> None:
    x, largest = np.asarray(TEST.x), max_client_size(DATA)
    algorithm, run = ran("lg_fed_avg")
    shared = np.asarray(run.state.server.server.params["V"])
    found = algorithm.personal(run.state, DATA, largest, jnp.int32(1), TEST.x)
    expected = [reference.outputs({**own_of(run.state.client, k, 1), "V": shared[k]}, x) for k in range(2)]
    np.testing.assert_allclose(found.members, expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.mean, np.mean(expected, axis=0), rtol=0, atol=1e-13)


# --- every client's own metrics ---------------------------------------------------------------------------------


def squared(f: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((f - y) ** 2))


def test_clients_are_evaluated_on_their_own_test_examples() -> None:
    (algorithm, run), x, y = ran("ditto"), np.asarray(TEST.x), np.asarray(TEST.y)
    own = [own_of(run.state.client, 0, i) for i in range(NUM_CLIENTS)]
    values, plain, weighted = loops.each_client(
        lambda i, at: reference.outputs(own[i], at), x, y, owned_rows(TEST), squared
    )
    found = predict.evaluate_clients(algorithm, run.state, DATA, TEST, "mse")
    assert found.sizes.tolist() == [2, 1, 0, 5, 4, 1] and np.isnan(values[2])
    np.testing.assert_allclose(found.values, values, rtol=1e-12)
    np.testing.assert_allclose([found.mean, found.weighted_mean], [plain, weighted], rtol=1e-12)
    assert abs(plain - weighted) > 1e-3
    ours = predict.evaluate_clients(ran("fed_avg")[0], ran("fed_avg")[1].state, DATA, TEST, "mse")
    w = models_of(*(lambda a, r: (a, r.state))(*ran("fed_avg")))[0]
    same = loops.each_client(lambda i, at: reference.outputs(w, at), x, y, owned_rows(TEST), squared)
    np.testing.assert_allclose(ours.values, same[0], rtol=1e-12)
    assert abs(float(ours.mean) - float(found.mean)) > 1e-3


def test_accuracy_and_own_measures() -> None:
    labels = jnp.asarray(np.arange(13) % 2, jnp.int32)
    test = TEST._replace(y=labels)
    algorithm, run = ran("ditto")
    own = [own_of(run.state.client, 0, i) for i in range(NUM_CLIENTS)]

    def right(f: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean(f.argmax(axis=1) == y))

    values, plain, weighted = loops.each_client(
        lambda i, at: reference.outputs(own[i], at), np.asarray(TEST.x), np.asarray(labels), owned_rows(TEST), right
    )
    found = predict.evaluate_clients(algorithm, run.state, DATA, test)
    np.testing.assert_allclose(found.values, values, rtol=1e-15)
    np.testing.assert_allclose([found.mean, found.weighted_mean], [plain, weighted], rtol=1e-14)
    assert len(set(found.values[np.asarray(found.sizes) > 0].tolist())) > 1
    counted = predict.evaluate_clients(algorithm, run.state, DATA, test, _count)
    assert counted.values[3] == 5 and counted.weighted_mean == (4 + 1 + 25 + 16 + 1) / 13


def _count(outputs: Any, targets: Any, mask: Any) -> Any:
    return jnp.sum(mask).astype(outputs.dtype)


def test_a_second_evaluation_traces_nothing() -> None:
    model, calls = counting(MODEL)
    algorithm = algorithms.local_only(model, PARTIAL, client_learning_rate=RATE, work=GLOBAL)
    state = algorithm.init(SEED, NUM_CLIENTS)
    predict.evaluate_clients(algorithm, state, DATA, TEST, "mse")
    assert (seen := len(calls)) > 0
    predict.evaluate_clients(algorithm, state._replace(round=jnp.int32(7)), DATA, TEST, "mse")
    assert len(calls) == seen


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("inf"), float("nan"), True])
def test_bad_gamma(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma: got .*"):
        predict.weighted_models("squared_error", gamma)


def test_bad_personal_predictions_and_evaluations() -> None:
    with pytest.raises(ValueError, match=r"loss: got 'hinge'"):
        predict.weighted_models("hinge", 1.0)
    with pytest.raises(ValueError, match=r"learning_rate: got -1\.0"):
        predict.fine_tuned("squared_error", -1.0, Work(steps=1, batch_size=None))
    with pytest.raises(ValueError, match="exactly one of steps and epochs"):
        predict.fine_tuned("squared_error", 0.1, Work())
    algorithm, state = ensemble("none")
    labelled = TEST._replace(y=jnp.zeros(13, jnp.int32))
    empty = TEST._replace(offsets=jnp.zeros(7, jnp.int32), indices=TEST.indices[:0])
    for test, measure, named in (
        (TEST, "f1", "measure: got 'f1', allowed are accuracy, mse, squared_error, .* or a function"),
        (TEST, "exponential", "test: targets: got .*, must be -1 or 1 for the loss 'exponential'"),
        (TEST, "accuracy", "'accuracy' needs integer labels"),
        (labelled, "mse", "'mse' needs floating targets"),
        (TEST._replace(offsets=TEST.offsets[:-1]), "mse", "test: has 5 clients, but data has 6"),
        (empty, "mse", "test: no client has any test example"),
    ):
        with pytest.raises(ValueError, match=named):
            predict.evaluate_clients(algorithm, state, DATA, test, measure)


def classifiers(logits: np.ndarray, loss: str, personal: Any = None) -> tuple[Algorithm, PyTree]:
    """An ensemble of models whose outputs are ``logits`` [K, C] wherever x is 1, before any training."""

    def init(key: Any) -> Any:
        return jnp.zeros((1, logits.shape[1]))

    model = Model("constant", init, lambda params, x: x @ params, None, logits.shape[1])
    algorithm = algorithms.fed_ensemble(
        model,
        per_client_permutations(2, len(logits)),
        client_learning_rate=RATE,
        work=GLOBAL,
        loss=loss,
        averaging=Averaging(personal=personal),
    )
    return algorithm, algorithm.init(SEED, 2, jnp.asarray(logits)[:, None])


LOGITS = np.array([[9.0, 0.0], [-4.0, 0.0], [-4.0, 0.0]])  # mean logits say class 0, mean probabilities class 1
ONES = federated(np.ones((4, 1)), np.ones(4, np.int32), [np.arange(2), np.arange(2, 4)])


@pytest.mark.parametrize(("loss", "right"), [("cross_entropy", 1.0), ("squared_error", 0.0)])
def test_an_ensemble_means_the_same_for_clients_for_tables_and_for_measures(loss: str, right: float) -> None:
    algorithm, state = classifiers(LOGITS, loss)
    of_clients = predict.evaluate_clients(algorithm, state, ONES, ONES)
    assert of_clients.values.tolist() == [right, right]
    predicted = algorithm.predict(state, ONES.x)
    labels = np.ones(4, np.int32)
    assert uncertainty.accuracy(predicted.members, labels, loss) == right
    assert uncertainty.measure(predicted, np.eye(2)[labels], labels, loss)["accuracy"] == right
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    mean = np.log(p.mean(axis=0)) if loss == "cross_entropy" else LOGITS.mean(axis=0)
    np.testing.assert_allclose(predicted.mean, np.tile(mean, (4, 1)), rtol=1e-12)


def test_personal_weights_of_classifiers_weigh_probabilities() -> None:
    algorithm, state = classifiers(LOGITS, "cross_entropy", predict.weighted_models("cross_entropy", 5.0))
    found = algorithm.personal(state, ONES, 2, jnp.int32(0), ONES.x).mean
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    alpha = np.exp(np.log(p[:, 1]) / 5.0)
    np.testing.assert_allclose(found[0], np.log(alpha / alpha.sum() @ p), rtol=1e-10)
    with np.errstate(all="ignore"):
        assert np.abs(found[0] - alpha / alpha.sum() @ LOGITS).max() > 0.1  # the control: weighed outputs


def test_a_dead_model_has_no_accuracy() -> None:
    algorithm, state = classifiers(np.full((1, 2), np.nan), "cross_entropy")
    found = predict.evaluate_clients(algorithm, state, ONES, ONES._replace(y=jnp.zeros(4, jnp.int32)))
    assert np.isnan(found.values).all() and np.isnan(found.mean) and np.isnan(found.weighted_mean)


@pytest.mark.parametrize("measure", ["accuracy", "cross_entropy"])
def test_clients_measures_do_not_depend_on_the_order_of_examples_or_clients(measure: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 1)), rng.integers(0, 2, 60).astype(np.int32)
    owned = np.split(np.arange(60), [7, 30])
    algorithm, state = classifiers(LOGITS, "cross_entropy")
    three = per_client_permutations(3, 3)
    algorithm = algorithm._replace(schedule=three)
    found = predict.evaluate_clients(algorithm, state, federated(x, y, owned), federated(x, y, owned), measure)
    order = [2, 0, 1]
    others = federated(x, y, [rng.permutation(owned[i]) for i in order])
    again = predict.evaluate_clients(algorithm, state, others, others, measure)
    np.testing.assert_allclose(again.values, np.asarray(found.values)[order], rtol=1e-12)
    np.testing.assert_allclose([again.mean, again.weighted_mean], [found.mean, found.weighted_mean], rtol=1e-12)
    assert len(set(np.asarray(found.values).round(9))) == 3
