"""Predictions of an ensemble and of single clients (personal predictions), and the metrics of these predictions."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Int32, Num, Shaped

from fedtangent._src import checks
from fedtangent._src.checks import number
from fedtangent._src.data.federated import max_client_size
from fedtangent._src.federated.local import LocalProblem, Work, client_view, minimise, validate_work
from fedtangent._src.losses import (
    LOSSES,
    Loss,
    check_targets,
    get_loss,
    is_right,
    masked_mean,
    mean_prediction,
    targets_of,
)
from fedtangent._src.optimizers import Rate, at_round, check_rate, sgd
from fedtangent._src.pytrees import wide
from fedtangent._src.types import Algorithm, AnyArray, Array, Client, FederatedData, Model, Prediction, PyTree

Measure = Loss  # a number of outputs [m, C], targets [m, ...] and mask [m]


@runtime_checkable
class Personal(Protocol):
    """A function that predicts for one client, with models that the client keeps or with the global models."""

    def __call__(
        self, model: Model, params: PyTree, client_states: PyTree, client: Client, x: Shaped[AnyArray, "m ..."], /
    ) -> Prediction:
        """Returns a client's prediction for inputs.

        Args:
            model: The network.
            params: Parameters of the K global models, [K, ...].
            client_states: The client's state for each model, [K, ...].
            client: The client, with its training examples.
            x: Inputs [m, ...].
        """


def mean_of_models(model: Model, params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Prediction:
    """Returns the uniform average of the K models' predictions (paper FE-2024, eq. 2), and each model's outputs.

    If ``model.loss`` is a loss of class labels and K > 1, the mean is the logarithm of the mean softmax probabilities,
    else it is the mean of the outputs (``losses.mean_prediction``).

    Args:
        model: The network, whose ``loss`` is the one by which it was trained.
        params: Parameters of the K models, [K, ...].
        x: Inputs [n, ...].
    """
    members = jax.lax.map(lambda p: wide(model.apply(p, x)), params)
    return Prediction(mean_prediction(model.loss, members), members)


def own_models(
    model: Model, params: PyTree, client_states: PyTree, client: Client, x: Shaped[AnyArray, "n ..."]
) -> Prediction:
    """Returns the mean prediction of the K models that a client keeps; a personal prediction (``Personal``).

    If ``model.loss`` is a loss of class labels, probabilities are averaged, else outputs, as in ``mean_of_models``.

    Args:
        model: The network, whose ``loss`` is the one by which it was trained.
        params: Not used.
        client_states: Parameters of the client's models, [K, ...].
        client: Not used.
        x: Inputs [n, ...].
    """
    return mean_of_models(model, client_states, x)


def model_weights(losses: Float[Array, "K"], gamma: float) -> Float[Array, "K"]:
    """Computes weights of K models from their losses, ``alpha_k = exp(-loss_k / gamma) / sum_j exp(-loss_j / gamma)``.

    They minimise ``sum_k alpha_k loss_k - gamma H(alpha)`` over weights of sum 1, with the entropy H. This is eq. (4)
    of the paper FE-2024, with the signs of its text (erratum `fe2024.4`).

    Args:
        losses: Losses of the models, [K].
        gamma: Temperature, above 0.
    """
    above_best = losses - jnp.min(losses)  # else a small gamma would overflow
    return jax.nn.softmax(-above_best / jnp.maximum(jnp.asarray(gamma, losses.dtype), jnp.finfo(losses.dtype).tiny))


def weighted_models(loss: str, gamma: float) -> Personal:
    """Builds Fed-ensemble's personal prediction: the global models, weighted by loss (paper FE-2024, eq. 3 and 4).

    A client computes the mean ``loss`` of each of the K global models on all of its examples, and from these losses the
    weights alpha_k (``model_weights``). It predicts ``sum_k alpha_k f_k(x)``, where ``f_k`` are outputs; for a model
    whose loss takes class labels, they are probabilities, and it predicts the logarithm of the sum, as in
    ``mean_of_models``. A client without examples weighs the models equally.

    Args:
        loss: Name of a loss.
        gamma: Temperature of the weights.

    Raises:
        ValueError: An unknown loss, or a ``gamma`` that is not positive and finite.
    """
    value, gamma = get_loss(loss), number("gamma", gamma, above=0)

    def predict(
        model: Model, params: PyTree, client_states: PyTree, client: Client, x: Shaped[AnyArray, "m ..."]
    ) -> Prediction:
        rows, mask = client.rows, jnp.arange(client.rows.shape[0]) < client.size
        own_x, own_y = client.data.x[rows], client.data.y[rows]
        losses = jax.lax.map(lambda p: value(model.apply(p, own_x), own_y, mask), params)
        members = mean_of_models(model, params, x).members
        return Prediction(mean_prediction(model.loss, members, model_weights(losses, gamma)), members)

    return predict


def fine_tuned(loss: str, learning_rate: Rate, work: Work, seed: int = 0) -> Personal:
    """Builds a personal prediction by fine-tuning: local SGD from each global model on the client's examples.

    The prediction averages the fine-tuned models, as ``mean_of_models`` does. Nothing is kept: every prediction trains
    again from the current global models. Source: Wang et al., 2019, "Federated evaluation of on-device
    personalization".

    Args:
        loss: Name of a loss.
        learning_rate: Step size, a number or a schedule of the round.
        work: Local steps and minibatches.
        seed: Seed of the minibatches, which also depend on the round and the client; they are the same for all models.

    Raises:
        ValueError: An unknown loss, a rate that is not positive, an invalid seed, or a ``work`` without exactly one of
            steps and epochs.
    """
    value, optimizer = get_loss(loss), sgd(learning_rate)
    check_rate("learning_rate", learning_rate)
    validate_work(work)
    checks.seed(seed)

    def predict(
        model: Model, params: PyTree, client_states: PyTree, client: Client, x: Shaped[AnyArray, "m ..."]
    ) -> Prediction:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), client.round), client.id)
        descent = at_round(optimizer, client.round)

        def tune(start: PyTree) -> PyTree:
            return minimise(key, model, value, descent, work, LocalProblem(start), client)[0]

        return mean_of_models(model, jax.lax.map(tune, params), x)

    return predict


def accuracy(outputs: Float[Array, "m C"], targets: Int[Array, "m"], mask: Bool[Array, "m"]) -> Float[Array, ""]:
    """Computes the share of real examples whose largest output is at their label, a scalar.

    It is NaN if the largest output of any real example is not finite.

    Args:
        outputs: Outputs of the network [m, C].
        targets: Labels [m], integer.
        mask: Whether a row is a real example, [m] bool.
    """
    return masked_mean(is_right(wide(outputs), targets), mask)


def mse(outputs: Float[Array, "m C"], targets: Num[Array, "m C"], mask: Bool[Array, "m"]) -> Float[Array, ""]:
    """Computes the squared error, averaged over the real examples and the outputs, a scalar.

    Args:
        outputs: Outputs of the network [m, C].
        targets: Numbers [m, C].
        mask: Whether a row is a real example, [m] bool.
    """
    return 2 * LOSSES["squared_error"](outputs, targets, mask) / outputs.shape[-1]


MEASURES: dict[str, Measure] = {"accuracy": accuracy, "mse": mse, **LOSSES}
_OF_LABELS = ("accuracy", *(name for name in LOSSES if targets_of(name) == "classes"))


class ClientMetrics(NamedTuple):
    """A metric of each client on its test examples, and the means over clients.

    Attributes:
        values: The metric of each client, [N]; NaN for a client without test examples.
        sizes: Number of test examples of each client, [N].
        mean: Mean over the clients that have test examples, each counting alike.
        weighted_mean: Mean weighted by the clients' numbers of test examples.
    """

    values: Float[Array, "N"]
    sizes: Int32[Array, "N"]
    mean: Float[Array, ""]
    weighted_mean: Float[Array, ""]


def evaluate_clients(
    algorithm: Algorithm, state: PyTree, data: FederatedData, test: FederatedData, measure: str | Loss = "accuracy"
) -> ClientMetrics:
    """Computes a metric of every client's prediction on the client's test examples.

    The prediction is the algorithm's personal one if it has one, else the global one. Clients are evaluated one at a
    time, by one compiled program for each algorithm, measure and shapes.

    Args:
        algorithm: The algorithm.
        state: State of a run of ``algorithm`` on ``data``.
        data: The clients' training examples, which a personal prediction may use.
        test: The clients' test examples, with the clients in the same order as in ``data``; sizes may be uneven or 0.
        measure: "accuracy", "mse" (mean over examples and outputs), the name of a loss, or a function ``(outputs [m,
            C], targets [m, ...], mask [m]) -> scalar``.

    Raises:
        ValueError: An unknown measure; a measure of labels for targets that are numbers, or the reverse; targets other
            than -1 and 1 for a loss that takes signs; different numbers of clients in ``data`` and ``test``; no test
            example at all.
    """
    name, value = (measure, MEASURES.get(measure)) if isinstance(measure, str) else ("", measure)
    if value is None:
        raise ValueError(f"measure: got {measure!r}, allowed are {', '.join(MEASURES)} or a function")
    if test.num_clients != data.num_clients:
        raise ValueError(f"test: has {test.num_clients} clients, but data has {data.num_clients}")
    labels = jnp.issubdtype(test.y.dtype, jnp.integer)
    if name and labels != (name in _OF_LABELS):
        kind = "integer labels" if name in _OF_LABELS else "floating targets"
        raise ValueError(
            f"measure: {name!r} needs {kind} [n{'' if name in _OF_LABELS else ', C'}]; test.y is {test.y.dtype}"
        )
    if name in LOSSES:
        check_targets(name, test.y, "test: targets")
    largest = max_client_size(test)
    if largest == 0:
        raise ValueError("test: no client has any test example")
    return _evaluate(algorithm, value, max_client_size(data), largest, state, data, test)


@partial(jax.jit, static_argnames=("algorithm", "measure", "largest_train", "largest"))
def _evaluate(
    algorithm: Algorithm,
    measure: Measure,
    largest_train: int,
    largest: int,
    state: PyTree,
    data: FederatedData,
    test: FederatedData,
) -> ClientMetrics:
    def one(client_id: Int[Array, ""]) -> tuple[Float[Array, ""], Int[Array, ""]]:
        mine = client_view(test, client_id, jnp.bool_(True), largest)
        x, mask = test.x[mine.rows], jnp.arange(largest) < mine.size
        if algorithm.personal is None:
            predicted = algorithm.predict(state, x)
        else:
            predicted = algorithm.personal(state, data, largest_train, client_id, x)
        value = measure(predicted.mean, test.y[mine.rows], mask)
        return jnp.where(mine.size > 0, value, jnp.nan), mine.size

    values, sizes = wide(jax.lax.map(one, jnp.arange(test.num_clients, dtype=jnp.int32)))
    present = jnp.where(sizes > 0, values, 0)
    weight = sizes.astype(values.dtype)
    mean = jnp.sum(present) / jnp.sum(sizes > 0).astype(values.dtype)
    return ClientMetrics(values, sizes, mean, jnp.sum(present * weight) / jnp.sum(weight))
