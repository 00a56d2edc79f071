"""FedBE: the server samples models from a distribution fitted to the clients' models, and distils their ensemble."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Shaped

from fedtangent._src import types
from fedtangent._src.checks import choice, instance, whole
from fedtangent._src.federated.aggregate import Stacked, stack, with_params
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.distil import SOFT_LOSSES, Distillation, check_distillation, distil
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.algorithms.posterior import (
    MEMBERS,
    Clients,
    Teacher,
    check_teacher,
    clients_of,
    ensemble_outputs,
    members_of,
    no_clients,
    weighted_mean_of,
)
from fedtangent._src.federated.compose import Parts, State, sequentially
from fedtangent._src.federated.local import Work
from fedtangent._src.losses import Loss, mean_prediction
from fedtangent._src.optimizers import Optimizer, Rate
from fedtangent._src.types import Algorithm, AnyArray, Array, Model, Prediction, PyTree, RoundInfo, Schedule, Server

DISTILS = "its server distils a sampled ensemble; nearest is fed_avg, whose model is the mean of the samples"
SAMPLES = "it predicts with sampled models; nearest is fed_avg, whose model is the mean of the samples"


@dataclasses.dataclass(frozen=True)
class EnsembleOfClients:
    """Options of the ensemble that FedBE draws from the clients' models."""

    posterior: str = "gaussian"
    """gaussian (diagonal) or dirichlet (random convex combinations)."""
    num_samples: int = 10
    """Models drawn from the posterior."""
    concentration: float = 1.0
    """Concentration of the symmetric Dirichlet distribution."""
    members: tuple[str, ...] = MEMBERS
    """Members of the ensemble, each model counting once: samples, clients, mean."""
    slots_per_model: int | None = None
    """The most clients whose messages a model keeps in a round (default: all); ``info["dropped"]`` counts the rest."""

    def teacher(self) -> Teacher:
        """Returns the options as a ``Teacher``: the distribution over models, and the kinds of members of the ensemble.

        Raises ``ValueError`` for options out of range.
        """
        number = whole("num_samples", self.num_samples)
        teacher = Teacher(self.posterior, number, self.concentration, tuple(self.members))
        check_teacher(teacher)
        return teacher

    def places(self, schedule: Schedule) -> int:
        """Returns how many clients' messages the server keeps for a model in a round: by default all.

        Raises ``ValueError`` if ``slots_per_model`` is below 1 or above ``schedule.num_slots``, the default.
        """
        instance("schedule", schedule, Schedule)
        most = schedule.num_slots
        return most if self.slots_per_model is None else whole("slots_per_model", self.slots_per_model, 1, most)


@dataclasses.dataclass(frozen=True)
class DistilledEnsemble(EnsembleOfClients):
    """Options of FedBE: how models are drawn around the clients' models, and how the server distils them into one."""

    server_data: Shaped[AnyArray, "m ..."] | None = None
    """x [m, ...] without labels, held by the server. Charged as sent up once, before the first round."""
    distillation: Distillation | None = None
    """Rates, steps and cycles of the student (default: FedBE's, in proportion to ``server_data``)."""
    temperature: float = 1.0
    """Soft labels are ``p^(1/T)`` normalised; 1 is the paper's, 0.5 the published code's. With the
    squared error, whose labels are mean outputs, only 1 is allowed."""


def _fitting(examples: int) -> Distillation:
    """Returns the default options of the student's training for a number of examples at the server.

    FedBE's defaults are for 10 000 images. Here the steps before weights are averaged (``start``) and the steps of a
    cycle of the learning rate (``cycle``) are shortened in proportion to the number of all steps.
    """
    steps = 20 * -(-examples // min(128, examples))
    return Distillation(start=steps // 6, cycle=max(1, steps // 60))


SERVER = ("server_learning_rate", "server_optimizer")  # options of a server that steps


@recipe(
    papers=("chen2021",),
    parts="local SGD; all messages; posterior, distillation",
    unused=SERVER,
    python_only=("concentration", "members", "slots_per_model", "temperature"),
)
def fed_be(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    ensemble: DistilledEnsemble = DistilledEnsemble(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedBE: distils a Bayesian ensemble of the round's models at the server.

    Source: Chen and Chao, ICLR 2021, algorithm 1.

    The server fits a distribution to the clients' models and draws models from it. The mean prediction of this ensemble
    on the server's data gives soft labels. A student that starts at the clients' weighted mean is trained on them and
    is the next global model. ``info["distillation_loss"]`` is the student's mean loss over its steps.

    Args:
        ensemble: Members of the ensemble, the server's data, and how the student learns.

    Raises:
        ValueError: No server data, a loss other than cross_entropy and squared_error, options out of range; and as
            ``fed_avg`` raises.
    """
    server_data, distillation, temperature = ensemble.server_data, ensemble.distillation, ensemble.temperature
    if server_data is None:
        raise ValueError(
            "server_data: got None, must be examples without labels, x [m, ...], on which the server distils "
            "(fed_be_no_distillation needs none)"
        )
    unlabelled = jnp.asarray(server_data)
    if unlabelled.ndim < 1 or unlabelled.shape[0] < 1:
        raise ValueError(f"server_data: got shape {unlabelled.shape}, must be x [m, ...] of at least one example")
    distillation = _fitting(unlabelled.shape[0]) if distillation is None else distillation
    check_distillation(distillation, unlabelled.shape[0])
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    soft = choice("loss", training.loss, SOFT_LOSSES)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, must be positive and finite")
    if soft != "cross_entropy" and temperature != 1:
        raise ValueError(f"temperature: got {temperature}, must be 1 for the loss {soft!r}")
    teacher, places = ensemble.teacher(), ensemble.places(schedule)

    def update(params: PyTree, sent: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        clients = clients_of(params, sent)
        mean, (sample_key, student_key) = weighted_mean_of(clients), jax.random.split(info.key)
        members = members_of(teacher, sample_key, mean, clients)
        labels = ensemble_outputs(model, *members, unlabelled, soft)[1]
        if soft == "cross_entropy":
            labels = jax.nn.softmax(labels / temperature, axis=-1)
        student, student_loss = distil(student_key, model, SOFT_LOSSES[soft], distillation, mean, unlabelled, labels)
        return student, {"distillation_loss": student_loss, "dropped": sent.beyond}

    replaced = common.AveragingParts(
        Server(lambda params: params, lambda state: state, lambda state: state, update, map_models=sequentially),
        parts=Parts(
            aggregate=stack(places),
            ledger=lambda cost, data: cost._replace(uplink_once=unlabelled.size * unlabelled.dtype.itemsize),
        ),
    )
    return common.train_and_average("fed_be", training, schedule, averaging, replaced, DISTILS)


class Posterior(NamedTuple):
    """The server's state of FedBE without distillation: a model, and the models and key that determine its ensemble.

    Attributes:
        params: The clients' weighted mean, which is the next round's model.
        clients: The clients' models of the last round in which any client trained this model.
        key: Key of the draws.
    """

    params: PyTree
    clients: Clients
    key: types.Key


@recipe(
    papers=("chen2021",),
    parts="local SGD; all messages; mean, posterior to predict",
    unused=SERVER,
    python_only=("concentration", "members", "slots_per_model", "temperature"),
)
def fed_be_no_distillation(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    ensemble: EnsembleOfClients = EnsembleOfClients(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedBE without distillation (FedBE-noKD of the papers FE-2021 and FE-2024): FedAvg with FedBE's ensemble.

    The next global model is the clients' weighted mean, so the server needs no data. A prediction is the mean over the
    ensemble that FedBE would distil, drawn from the last round's models. For this the state keeps up to
    ``slots_per_model`` clients' models for each of the K models.

    With ``loss="cross_entropy"`` the prediction's mean is the log of the members' mean probability. ``members`` of the
    prediction are the outputs of the E members of each of the K ensembles, [K E, n, C] for n inputs and C outputs; an
    absent member is replaced by the mean of its ensemble.

    Args:
        ensemble: Members of the ensemble.

    Raises:
        ValueError: Options out of range, and as ``fed_avg`` raises.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    teacher, places = ensemble.teacher(), ensemble.places(schedule)

    def init(params: PyTree) -> Posterior:
        return Posterior(params, no_clients(params, places), jax.random.key(0))

    def update(state: Posterior, sent: Stacked, info: RoundInfo) -> tuple[Posterior, dict[str, Array]]:
        clients = clients_of(state.params, sent)
        return Posterior(weighted_mean_of(clients), clients, info.key), {"dropped": sent.beyond}

    def predict(model: Model, state: State, x: Shaped[AnyArray, "n ..."]) -> Prediction:
        def one(row: Posterior) -> tuple[Array, Array]:
            members, present = members_of(teacher, row.key, row.params, row.clients)
            outputs, mean = ensemble_outputs(model, members, present, x, training.loss)
            return jnp.where(present[:, None, None], outputs, mean[None]), mean

        outputs, means = jax.lax.map(one, state.server)  # with draws from the posterior
        return Prediction(mean_prediction(training.loss, means), outputs.reshape((-1, *outputs.shape[2:])))

    replaced = common.AveragingParts(
        with_params(init, update),
        parts=Parts(aggregate=stack(places), predict=predict),
    )
    return common.train_and_average("fed_be_no_distillation", training, schedule, averaging, replaced, SAMPLES)
