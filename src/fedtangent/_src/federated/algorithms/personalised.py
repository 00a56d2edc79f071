"""Algorithms whose clients keep models, or parts of models, for themselves: Ditto, LG-FedAvg and local training."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from fedtangent._src import pytrees, streams, types
from fedtangent._src.checks import instance, number
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts, State
from fedtangent._src.federated.local import LocalProblem, Posed, Work, minimise, no_state, validate_work
from fedtangent._src.federated.predict import mean_of_models, own_models
from fedtangent._src.losses import Loss, get_loss, mean_prediction, targets_of
from fedtangent._src.models.trainable import Select, joined, part_of, rest_of, selection
from fedtangent._src.optimizers import Optimizer, Rate, at_round, check_rate, sgd
from fedtangent._src.types import Algorithm, AnyArray, Array, Client, Local, Model, Prediction, PyTree, Schedule, Server

ALONE = "every client trains a separate model; nearest is fed_ensemble, or fed_avg with one client"


@dataclasses.dataclass(frozen=True)
class PersonalTraining:
    """Options of the training of Ditto's personal models; raises ``ValueError`` for a negative mu."""

    mu: float | Array = 0.1
    """How strongly a personal model is held near the global one (the paper's lambda); 0: not at all."""
    personal_learning_rate: Rate | None = None
    """Step size, a number or a schedule of the round (default: that of the global model)."""
    personal_work: Work | None = None
    """Local steps and minibatches, drawn independently (default: as for the global model)."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a negative mu."""
        number("mu", self.mu, at_least=0)


@recipe(
    papers=("li2021",),
    parts="local SGD, and a personal model with prox; mean; SGD",
    python_only=("personal_learning_rate",),
    personal=True,
)
def ditto(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    personal_training: PersonalTraining = PersonalTraining(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds Ditto: FedAvg, and a personal model v_i beside it for every client (Li et al., 2021, algorithm 1).

    A client that takes part trains the broadcast model w as in FedAvg. It then takes steps ``v_i <- v_i - rate * (grad
    F_i(v_i) + mu (v_i - w))``, where F_i is its mean loss. v_i starts from the initial model and is never sent;
    ``algorithm.personal`` predicts with it (with K models, by the mean over their v_i). The global model is FedAvg's,
    weighted by examples; the paper's ``1/|S_t|`` is ``weighting="uniform"``.

    Args:
        personal_training: Rate and steps of the personal model, and the strength of its pull to w.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    steps = work if personal_training.personal_work is None else personal_training.personal_work
    validate_work(steps)
    rate = personal_training.personal_learning_rate
    if rate is not None:
        check_rate("personal_learning_rate", rate)
    descent = common.local_descent(training) if rate is None else sgd(rate)

    def around(train: Local) -> Local:
        return _with_personal_model(train, model, get_loss(training.loss), descent, steps, personal_training.mu)

    replaced = common.AveragingParts(around=around, parts=Parts(personal=own_models))
    rule = "every client predicts with a personal model; nearest is fed_avg, the shared model"
    return common.train_and_average("ditto", training, schedule, averaging, replaced, rule)


def _with_personal_model(
    train: Local, model: Model, loss: Loss, optimizer: Optimizer, work: Work, mu: float | Array
) -> Local:
    """Returns ``train`` for clients that afterwards train a personal model too, which is their state.

    The personal model takes the steps ``work`` with ``optimizer``, with a pull of strength ``mu`` to the broadcast.
    """

    def update(
        key: types.Key, broadcast: PyTree, personal_model: PyTree, client: Client
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        message, _, info = train.update(key, broadcast, (), client)
        problem = LocalProblem(start=personal_model, anchor=broadcast, prox=mu)
        personal_key, descent = streams.apart(key, streams.PERSONAL), at_round(optimizer, client.round)
        personal_model, personal_info = minimise(personal_key, model, loss, descent, work, problem, client)
        return (
            message,
            personal_model,
            {**info, "personal_loss": personal_info["loss"], "personal_steps": personal_info["steps"]},
        )

    return Local(lambda params: params, update, train.message)


# ---- private parameters. A part of the parameters has None for the leaves of the other part, so that only the leaves
# of the shared part are broadcast, averaged, sent and counted in bytes


def private_mask(model: Model, private: Select) -> PyTree:
    """Builds a tree of bools, shaped like a model's parameters: True for parameters that never leave the client.

    Args:
        model: Model whose parameters are masked.
        private: Selection of the private parameters, as for ``models.trainable``.

    Raises:
        ValueError: The selection matches no parameter or all of them, or ``models.trainable`` does not take it.
    """
    mask = selection("private", model, private)
    if all(jax.tree.leaves(mask)):
        raise ValueError(f"private: got {private!r}, which matches all parameters, so that none is shared")
    return mask


class _Shared(NamedTuple):
    server: PyTree  # state of the inner server, for the shared parameters
    private: PyTree  # the initial private parameters


@recipe(
    papers=("liang2020",),
    parts="local SGD; mean of the shared parameters; SGD",
    personal=True,
    unused=("server_optimizer",),
)
def lg_fed_avg(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    private: Select = "^0/",
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds LG-FedAvg: some parameters stay with the client, the others are averaged.

    Source: Liang et al., 2020, algorithm 1.

    A client trains both parts together. Only the shared part is broadcast, sent and charged. The private part starts
    from the initial model; a client keeps one for each of the K models. ``algorithm.personal`` predicts with the shared
    part and the client's private part, ``algorithm.predict`` with the shared part and the *initial* private part.

    Args:
        private: Regular expression searched for in a parameter's path: parameters that match stay with their client. Or
            another selection, as for ``models.trainable``. The paper's private part is the lower layers.

    Raises:
        ValueError: A ``private`` that matches no parameter, or all of them, and as ``fed_avg`` raises.
    """
    mask = private_mask(model, private)

    def pose(broadcast: PyTree, private_params: PyTree) -> LocalProblem:
        return LocalProblem(start=joined(broadcast, private_params))

    def answer(
        broadcast: PyTree, private_params: PyTree, params: PyTree, steps: Array, client: Client
    ) -> tuple[PyTree, PyTree]:
        return pytrees.subtract(broadcast, rest_of(mask, params)), part_of(mask, params)

    def personal(
        model: Model, params: PyTree, states: PyTree, client: Client, x: Shaped[AnyArray, "m ..."]
    ) -> Prediction:
        return mean_of_models(model, joined(rest_of(mask, params), states), x)

    def server(rate: Rate) -> Server:
        return _of_shared_part(optax_server(sgd(rate)), mask)

    def predict(model: Model, state: State, x: Shaped[AnyArray, "n ..."]) -> Prediction:
        nobodys = joined(state.server.server.params, state.server.private)
        return mean_of_models(model, nobodys, x)

    posed = Posed(
        pose=pose,
        answer=answer,
        init=lambda params: part_of(mask, params),
        message=lambda params: rest_of(mask, params),
    )
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = common.AveragingParts(server, posed, parts=Parts(personal=personal, predict=predict))
    rule = "some parameters stay with their client; nearest is fed_avg, where all are shared"
    return common.train_and_average("lg_fed_avg", training, schedule, averaging, replaced, rule)


def _of_shared_part(server: Server, mask: PyTree) -> Server:
    """Returns ``server`` restricted to the parameters that ``mask`` (``private_mask``) does not mark as private."""

    def update(state: _Shared, aggregated: PyTree, info: types.RoundInfo) -> tuple[_Shared, dict[str, Array]]:
        updated, report = server.update(state.server, aggregated, info)
        return state._replace(server=updated), report

    return Server(
        init=lambda params: _Shared(server.init(rest_of(mask, params)), part_of(mask, params)),
        broadcast=lambda state: server.broadcast(state.server),
        params=lambda state: joined(server.params(state.server), state.private),
        update=update,
    )


@recipe(
    papers=("mcmahan2017",),
    parts="local SGD; nothing; nothing",
    personal=True,
    sends="nothing",
    unused=("server_learning_rate", "server_optimizer", "channel", "accept", "shuffle", "secure_aggregation"),
)
def local_only(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds purely local training: every client trains separate models from the initial ones, without any average.

    The wire ledger charges the K initial models, sent to every client before the first round. ``algorithm.personal``
    predicts with the client's models. ``algorithm.predict`` is the mean over the models of all N clients, including
    clients that have not trained yet; it computes N networks for each of the K models.

    Args:
        averaging: Only ``beta``, the share of its examples that a client uses, and ``personal`` matter. ``weighting``
            has no effect, and options of a server or a channel raise ``ValueError``.

    Raises:
        ValueError: Options of a server or a channel, since nothing travels, and as ``fed_avg`` raises.
    """
    instance("model", model, Model)
    initial = pytrees.num_bytes(model.shapes)
    posed = Posed(
        pose=lambda broadcast, own_model: LocalProblem(start=own_model),
        answer=lambda broadcast, own_model, params, steps, client: ((), params),
        init=lambda params: params,
        message=no_state,
    )

    def predict(model: Model, state: State, x: Shaped[AnyArray, "n ..."]) -> Prediction:
        members = jax.lax.map(lambda models: _mean_of_clients(model, models, x), state.client)
        return Prediction(mean_prediction(model.loss, members), members)

    server = Server(
        init=lambda params: params,
        broadcast=no_state,
        params=lambda state: state,
        update=lambda state, aggregated, info: (state, {}),
    )
    once = schedule.num_models * schedule.num_clients * initial
    replaced = common.AveragingParts(
        server,
        posed,
        parts=Parts(
            personal=own_models,
            predict=predict,  # the server's models never move
            ledger=lambda cost, data: cost._replace(downlink_once=once),
        ),
    )
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    return common.train_and_average("local_only", training, schedule, averaging, replaced, ALONE)


def _mean_of_clients(model: Model, models: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
    """Returns the mean prediction [n, C] of the N clients' models [N, ...], computed one client at a time.

    It is the mean of the outputs or, for a loss of class labels, the log of the mean softmax probabilities.
    """
    num_clients = jax.tree.leaves(models)[0].shape[0]
    nothing = pytrees.accumulator(jax.eval_shape(model.apply, pytrees.take(models, 0), x))
    if targets_of(model.loss) != "classes":
        return jax.lax.scan(lambda total, p: (total + model.apply(p, x), None), nothing, models)[0] / num_clients

    def add(log_total: Array, params: PyTree) -> tuple[Array, None]:
        return jnp.logaddexp(log_total, jax.nn.log_softmax(pytrees.wide(model.apply(params, x)), axis=-1)), None

    return jax.lax.scan(add, nothing - jnp.inf, models)[0] - math.log(num_clients)
