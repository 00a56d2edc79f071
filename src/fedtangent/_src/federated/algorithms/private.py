"""Federated averaging under client-level differential privacy; ``measures.privacy`` computes its epsilon."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedtangent._src import pytrees
from fedtangent._src.checks import instance, number
from fedtangent._src.federated.aggregate import optax_server, weighted_mean
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import FinishedRun, recipe
from fedtangent._src.federated.compose import Parts
from fedtangent._src.federated.local import Work
from fedtangent._src.federated.wire.channel import clip, lossless
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, sgd
from fedtangent._src.types import Aggregate, Algorithm, Array, Channel, Key, Model, PyTree, RoundInfo, Schedule, Server

NOISY = (
    "it clips updates and adds noise to them (theory.private_flow does so in Python); nearest is fed_avg --weighting "
    "uniform, which does neither"
)


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """The option ``delta``, for the line that reports (epsilon, delta) after a run of ``dp_fed_avg``."""

    delta: float = 1e-5
    """Delta of the reported epsilon."""

    def check(self) -> None:
        """Raises ``ValueError`` if ``delta`` is outside (0, 1)."""
        number("delta", self.delta, above=0, below=1)


@dataclasses.dataclass(frozen=True)
class ClientPrivacy:
    """Options of client-level differential privacy; raises ``ValueError`` for numbers out of range."""

    clip_norm: float = 1.0
    """Bound on the norm of an update."""
    noise_multiplier: float = 1.0
    """Noise on the sum of the updates, in units of their bound; 0 for none."""
    expected_clients: float | None = None
    """The fixed number m that the sum is divided by (default: the schedule's slots per model)."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for ``clip_norm`` or ``expected_clients`` not above 0, or a negative noise."""
        number("clip_norm", self.clip_norm, above=0)
        number("noise_multiplier", self.noise_multiplier, at_least=0)
        if self.expected_clients is not None:
            number("expected_clients", self.expected_clients, above=0)


def _remark(options: Any, ran: FinishedRun) -> str:
    """Returns the epsilon and delta of a finished run as a line of text, or the reason why epsilon is not known."""
    from fedtangent._src.measures.privacy import epsilon

    if ran.schedule_name == "poisson" and ran.only_first:
        return "epsilon is not known: with keep_first a client more pushes another one out of the round"
    if ran.schedule_name not in ("uniform", "poisson", "all") or ran.schedule.num_models != 1:
        return f"epsilon is not known for the schedule {ran.schedule_name} of {ran.schedule.num_models} models"
    sampling = "poisson" if ran.schedule_name == "poisson" else "without_replacement"
    spent = epsilon(
        num_clients=ran.schedule.num_clients,
        clients_per_round=ran.clients_per_round,
        num_rounds=ran.num_rounds,
        noise_multiplier=options.noise_multiplier,
        delta=options.delta,
        sampling=sampling,
    )
    neighbours = "a client more or less" if sampling == "poisson" else "the data of one client"
    return f"privacy: epsilon {spent:.4g} at delta {options.delta:g}, for {neighbours}"


@recipe(
    papers=("mcmahan2018",),
    parts="local SGD, clipping; sum over m; SGD, noise",
    options=PrivacyReport,
    remark=_remark,
    unused=("server_optimizer",),
)
def dp_fed_avg(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    privacy: ClientPrivacy = ClientPrivacy(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds central DP-FedAvg: clipped updates, and Gaussian noise at the server (McMahan et al., 2018, algorithm 1).

    Each client's whole update is clipped to length ``clip_norm``; the server moves by ``(sum of the updates) / m`` plus
    Gaussian noise of standard deviation ``noise_multiplier * clip_norm / m`` in every coordinate (flat clipping, the
    fixed-denominator estimator), times ``server_learning_rate``. All clients have the same weight. The server draws
    noise for every model in every round, also if no client took part.

    ``m`` is a fixed number of clients. Clients that drop out, are late or are rejected make the sum smaller and change
    neither ``m`` nor the noise, so the guarantee that ``measures.epsilon`` computes for the scheduled cohort holds. The
    server is trusted and knows which clients took part. With a channel, the server clips the received updates, because
    compression can lengthen them.

    Args:
        privacy: Clipping bound, noise and m. By default m is ``schedule.num_slots`` over the number of models: the
            clients of a round for ``schedules.uniform_sampling``. Under ``schedules.poisson_sampling`` that is all N
            clients, so pass the expected number, ``expected_clients=rate * num_clients``. (The command line does this
            for you.)

    Raises:
        ValueError: A ``clip_norm`` that is not positive, a ``noise_multiplier`` below 0, ``expected_clients`` that are
            not positive, a ``weighting`` other than "uniform", and as ``fed_avg`` raises.
    """
    instance("schedule", schedule, Schedule)
    instance("privacy", privacy, ClientPrivacy)
    instance("averaging", averaging, Averaging)
    clip_norm, expected_clients = privacy.clip_norm, privacy.expected_clients
    if averaging.weighting not in (None, "uniform"):
        raise ValueError(f"weighting: got {averaging.weighting!r}, must be 'uniform' for dp_fed_avg to be private")
    m = schedule.num_slots / schedule.num_models if expected_clients is None else expected_clients
    number("expected_clients", m, above=0)
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    channel = _received_clipped(averaging.channel or lossless(), clip_norm)
    averaging = dataclasses.replace(averaging, weighting="uniform", channel=channel)

    def server(rate: Rate) -> Server:
        stepping = noisy(optax_server(sgd(rate)), privacy.noise_multiplier * clip_norm / m)

        def unheard(state: PyTree, info: RoundInfo) -> PyTree:
            # Such a model gets noise too: without it, the model would reveal that no client took part.
            return stepping.update(state, pytrees.zeros_like(state.params), info)[0]

        return stepping._replace(unheard=unheard)

    replaced = common.AveragingParts(server, parts=Parts(aggregate=_fixed_mean(m)))
    return common.train_and_average("dp_fed_avg", training, schedule, averaging, replaced, NOISY)


def _received_clipped(channel: Channel, norm: float | Array) -> Channel:
    """Returns ``channel`` with received messages clipped to Euclidean length ``norm``, which costs no bytes."""
    shorten = clip(norm).send

    def send(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        received, memory = channel.send(key, message, memory)
        return shorten(key, received, ())[0], memory

    def report(key: Key, message: PyTree, memory: PyTree) -> dict[str, Array]:
        return clip(norm).report(key, channel.send(key, message, memory)[0], ())

    return channel._replace(send=send, report=report)


def noisy(server: Server, deviation: float | Array) -> Server:
    """Returns ``server`` with Gaussian noise added to every coordinate of the aggregated messages.

    The noise of leaf j (in the order of ``jax.tree.leaves``) is drawn from ``fold_in(info.key, j)``, in its dtype.

    Args:
        server: The server's part of an algorithm.
        deviation: Standard deviation of the noise.
    """

    def update(state: PyTree, aggregated: PyTree, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        leaves, structure = jax.tree.flatten(aggregated)
        noise = [jax.random.normal(jax.random.fold_in(info.key, j), v.shape, v.dtype) for j, v in enumerate(leaves)]
        with_noise = [v + jnp.asarray(deviation, v.dtype) * z for v, z in zip(leaves, noise, strict=True)]
        return server.update(state, jax.tree.unflatten(structure, with_noise), info)

    return server._replace(update=update)


def _fixed_mean(count: float | Array) -> Aggregate:
    """Builds the aggregate that divides a weighted sum of messages by a fixed ``count`` (McMahan et al., 2018)."""

    def finish(acc: PyTree) -> PyTree:
        return pytrees.scale(1 / count, acc.total)

    return weighted_mean()._replace(finish=finish)
