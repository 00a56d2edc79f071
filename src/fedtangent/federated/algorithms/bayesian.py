"""FedBE: the server samples models from a distribution fitted to the clients', and distils their ensemble."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from fedtangent.checks import choice, instance, whole
from fedtangent.federated.aggregate import Stacked, stack
from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.distil import FEDBE, SOFT_LOSSES, Distillation, check_distillation, distil
from fedtangent.federated.algorithms.entry import (
    TRAINED,
    Given,
    Laws,
    Mean,
    Sending,
    Training,
    entry_of,
    shared_arguments,
)
from fedtangent.federated.algorithms.posterior import (
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
from fedtangent.federated.compose import State, sequentially
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate
from fedtangent.losses import get_loss, targets_of
from fedtangent.types import Algorithm, Array, Key, Model, Prediction, PyTree, RoundInfo, Schedule, Server


class EnsembleOfClients(Options, total=False):
    """Options of an ensemble that is drawn from the clients' models."""

    num_samples: int  # models drawn from the posterior, 10 by default
    posterior: str  # "gaussian" (diagonal, the default) or "dirichlet" (random convex combinations)
    concentration: float  # of the symmetric Dirichlet distribution, 1 by default
    members: tuple[str, ...]
    # what the ensemble is made of, by default all: "samples", "clients" and "mean", each model counting once
    slots_per_model: int | None
    # the most clients that one model hears in a round (all slots by default); ``info["dropped"]`` counts, per model,
    # those beyond it


def fed_be(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    server_data: Array | None = None,
    distillation: Distillation = FEDBE,
    temperature: float = 1.0,
    **options: Unpack[EnsembleOfClients],
) -> Algorithm:
    """FedBE (Chen and Chao, ICLR 2021, algorithm 1): distil a Bayesian ensemble of the round's models at the server.

    The server fits a distribution to the clients' models, draws models from it, takes the mean
    prediction of the ensemble on its own data as soft labels, and trains a student on them that starts at the clients'
    weighted mean. The student is the next global model.

    Args:
        server_data: x [m, ...] without labels, held by the server. Charged as sent up once, before the first round.
        distillation: rates, steps and cycles of the student, see ``distil.Distillation``.
        temperature: soft labels are ``p^(1/T)`` normalised; 1 is the paper's, 0.5 that of the code published with it.
            With ``loss="squared_error"``, for which labels are mean outputs, only 1 is allowed.
        options: ``EnsembleOfClients``, and ``algorithms.common.Options``; the server has no rate but the student's.

    ``info["distillation_loss"]`` is the student's mean loss. Raises ``ValueError`` without server data, for a server
    rate, a loss that is not in ``SOFT_LOSSES``, and for options out of range.
    """
    if server_data is None:
        raise ValueError(
            "server_data: got None; FedBE distils on examples without labels at the server, x [m, ...] "
            "(fed_be_no_distillation needs none)"
        )
    unlabelled = jnp.asarray(server_data)
    if unlabelled.ndim < 1 or unlabelled.shape[0] < 1:
        raise ValueError(f"server_data: got shape {unlabelled.shape}, must be x [m, ...] of at least one example")
    check_distillation(distillation, unlabelled.shape[0])
    loss = choice("loss", options.get("loss", "squared_error"), SOFT_LOSSES)
    if not 0 < temperature < float("inf") or (loss != "cross_entropy" and temperature != 1):
        raise ValueError(f"temperature: got {temperature}, must be positive and finite, and 1 for the loss {loss!r}")
    teacher, places, shared = _ensemble(schedule, options)

    def update(params: PyTree, sent: Stacked, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        clients = clients_of(params, sent)
        mean, (sample_key, student_key) = weighted_mean_of(clients), jax.random.split(info.key)
        ensemble = members_of(teacher, sample_key, mean, clients)
        _, labels = ensemble_outputs(model, *ensemble, unlabelled, loss == "cross_entropy")
        if temperature != 1:
            sharper = labels ** (1 / temperature)
            labels = sharper / jnp.sum(sharper, axis=-1, keepdims=True)
        student, seen = distil(student_key, model, SOFT_LOSSES[loss], distillation, mean, unlabelled, labels)
        return student, {"distillation_loss": seen, "dropped": sent.beyond}

    return train_and_average(
        "fed_be",
        model,
        schedule,
        client_learning_rate,
        work,
        shared,
        server=Server(lambda params: params, lambda state: state, lambda state: state, update),
        aggregate=stack(places),
        map_models=sequentially,
        once=(unlabelled.size * unlabelled.dtype.itemsize, 0),
    )


class Posterior(NamedTuple):
    """A model, and what its ensemble is drawn from when it predicts."""

    params: PyTree  # the clients' weighted mean, the next round's model
    clients: Clients  # of the last round in which any client trained this model
    key: Key


def fed_be_no_distillation(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    **options: Unpack[EnsembleOfClients],
) -> Algorithm:
    """FedBE without distillation (FE-2021 and FE-2024's FedBE-noKD): FedAvg that predicts with FedBE's ensemble.

    The next global model is the clients' weighted mean, so no data are needed at the server; a prediction is the
    mean over the ensemble that FedBE would distil, drawn from the last round's models. The state therefore holds the
    clients' models of a round, ``slots_per_model`` for each of the K models. Options as in ``fed_be``.

    With ``loss="cross_entropy"`` the prediction's mean is the log of the members' mean probability, whose softmax is
    that probability. ``members`` of the prediction are those of all K ensembles, [K E, n, C]; where a place is empty
    stands the ensemble's mean, which changes no mean over members.
    """
    teacher, places, shared = _ensemble(schedule, options)
    probabilities = targets_of(options.get("loss", "squared_error")) == "classes"

    def init(params: PyTree) -> Posterior:
        return Posterior(params, no_clients(params, places), jax.random.key(0))

    def update(state: Posterior, sent: Stacked, info: RoundInfo) -> tuple[Posterior, dict[str, Array]]:
        clients = clients_of(state.params, sent)
        return Posterior(weighted_mean_of(clients), clients, info.key), {"dropped": sent.beyond}

    def predict(model: Model, state: State, x: Array) -> Prediction:
        def one(row: Posterior) -> tuple[Array, Array]:
            ensemble, present = members_of(teacher, row.key, row.params, row.clients)
            outputs, mean = ensemble_outputs(model, ensemble, present, x, probabilities)
            neutral = jnp.log(mean) if probabilities else mean
            return jnp.where(present[:, None, None], outputs, neutral[None]), mean

        outputs, means = jax.lax.map(one, state.server)  # with draws from the posterior
        mean = jnp.mean(means, axis=0)
        return Prediction(jnp.log(mean) if probabilities else mean, outputs.reshape((-1, *outputs.shape[2:])))

    return train_and_average(
        "fed_be_no_distillation",
        model,
        schedule,
        client_learning_rate,
        work,
        shared,
        server=Server(init, lambda state: state.params, lambda state: state.params, update),
        aggregate=stack(places),
        predict=predict,
    )


def _ensemble(schedule: Schedule, options: EnsembleOfClients) -> tuple[Teacher, int, Options]:
    """What the ensemble is made of, checked, how many clients' messages one model keeps, and the other options."""
    instance("schedule", schedule, Schedule)
    rest: dict[str, Any] = dict(options)
    get_loss(rest.get("loss", "squared_error"))
    posterior, number = rest.pop("posterior", "gaussian"), rest.pop("num_samples", 10)
    concentration, members = rest.pop("concentration", 1.0), rest.pop("members", MEMBERS)
    teacher = Teacher(posterior, whole("num_samples", number), concentration, tuple(members))
    check_teacher(teacher)
    places = rest.pop("slots_per_model", None)
    places = schedule.num_slots if places is None else whole("slots_per_model", places, 1, schedule.num_slots)
    return teacher, places, cast(Options, rest)


@dataclasses.dataclass(frozen=True)
class PosteriorOptions(Sending, Mean, Training):
    """Options of an ensemble that is drawn from the clients' models."""

    posterior: str = "gaussian"
    """gaussian or dirichlet."""
    num_samples: int = 10
    """Models drawn from the posterior."""


@dataclasses.dataclass(frozen=True)
class FedBeOptions(PosteriorOptions):
    """Options of FedBE."""

    server_examples: int = 100
    """Training examples, without labels, that only the server holds."""


def _build_fed_be(o: FedBeOptions, given: Given) -> Algorithm:
    # FedBE's numbers are for ten thousand images: start and cycle in proportion to the steps that these data make.
    steps = 20 * -(-o.server_examples // min(128, o.server_examples))
    how = Distillation(start=steps // 6, cycle=max(1, steps // 60))
    own: dict[str, Any] = {"server_data": given.server_data, "posterior": o.posterior, "num_samples": o.num_samples}
    return fed_be(given.model, given.schedule, distillation=how, **own, **shared_arguments(o))


_STUDENT = Distillation(epochs=3, batch_size=3, learning_rate=0.3, final_learning_rate=0.1, start=2, cycle=3)
_ENSEMBLE = "the state holds the clients' models, each of which is a member of the ensemble"

ENTRIES = (
    entry_of(
        fed_be,
        "a Bayesian ensemble of the round's models, distilled at the server (FedBE, 2021)",
        FedBeOptions,
        build=_build_fed_be,
        papers=("chen2021",),
        parts="local SGD; all messages; posterior, distillation",
        rule="its server learns what a sampled ensemble says; nearest is fed_avg, the mean that it samples about",
        needs=("server_data",),
        laws=Laws(
            {**TRAINED, "work": Work(epochs=2, batch_size=2), "num_samples": 3, "distillation": _STUDENT},
            # an ensemble of clients counts each client once
            exact={"work": Work(steps=3), "members": ("samples", "mean")},
        ),
    ),
    entry_of(
        fed_be_no_distillation,
        "FedBE's ensemble for prediction only (FedBE-noKD)",
        PosteriorOptions,
        papers=("chen2021",),
        parts="local SGD; all messages; mean, posterior to predict",
        rule="it predicts with samples about the mean of the models; nearest is fed_avg, that mean",
        laws=Laws(
            {**TRAINED, "posterior": "dirichlet", "slots_per_model": 4},
            exempt={"doubling": _ENSEMBLE},
        ),
    ),
)
