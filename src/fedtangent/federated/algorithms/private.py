"""Federated averaging under differential privacy of whole clients; ``fedtangent.measures.privacy`` accounts for it."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.checks import instance, number
from fedtangent.federated.aggregate import weighted_mean
from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.entry import TRAINED, Averaging, Given, Laws, Ran, entry_of, shared_arguments
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate, check_rate, sgd
from fedtangent.federated.server import optax_server
from fedtangent.federated.wire.channel import clip, lossless
from fedtangent.types import (
    Aggregate,
    Algorithm,
    Array,
    Channel,
    Key,
    Model,
    PyTree,
    RoundInfo,
    Schedule,
    Server,
)


def dp_fed_avg(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    clip_norm: float,
    noise_multiplier: float,
    expected_clients: float | None = None,
    **options: Unpack[Options],
) -> Algorithm:
    """Central DP-FedAvg (McMahan et al., 2018, algorithm 1, with flat clipping and the fixed-denominator estimator).

    Each client's whole update is clipped to length ``clip_norm``; the server moves by ``(sum of the updates) / m`` plus
    Gaussian noise of standard deviation ``noise_multiplier * clip_norm / m`` in every coordinate, all clients weighing
    the same. The noise is drawn at the server, for every model in every round, also where no client took part.

    ``m`` is fixed: clients that drop out, are late or are rejected make the sum smaller and change neither ``m`` nor
    the noise, so that the guarantee of ``privacy.epsilon`` for the planned cohort holds, and the model moves less.
    Which clients took part is not hidden from the server, which is trusted.

    Args:
        clip_norm: the bound on a client's update.
        noise_multiplier: noise in units of ``clip_norm``, on the sum of the updates.
        expected_clients: m; by default the schedule's slots a model. Under ``schedule.poisson_sampling`` give
            ``rate * num_clients``.
        options: those of ``algorithms.common.Options`` but ``weighting``. A ``channel`` compresses; the server
            then clips what it receives, so that compression cannot lengthen an update.

    Raises ``ValueError`` for a ``clip_norm`` that is not positive, a ``noise_multiplier`` below 0, ``expected_clients``
    that are not positive, and a ``weighting`` other than ``"uniform"``.
    """
    number("clip_norm", clip_norm, above=0)
    number("noise_multiplier", noise_multiplier, at_least=0)
    if options.get("weighting", "uniform") != "uniform":
        raise ValueError(f"weighting: got {options['weighting']!r}, but dp_fed_avg bounds each client alike: uniform")
    instance("schedule", schedule, Schedule)
    m = schedule.num_slots / schedule.num_models if expected_clients is None else expected_clients
    number("expected_clients", m, above=0)
    rate = options.pop("server_learning_rate", 1.0)
    check_rate("server_learning_rate", rate)
    server = noisy(optax_server(sgd(rate)), noise_multiplier * clip_norm / m)

    def unheard(state: PyTree, info: RoundInfo) -> PyTree:
        # That such a model did not move would tell for certain that nobody took part: it gets its noise all the same.
        return server.update(state, pytrees.zeros_like(state.params), info)[0]

    return train_and_average(
        "dp_fed_avg",
        model,
        schedule,
        client_learning_rate,
        work,
        options,
        server=server,
        aggregate=fixed_mean(m),
        weighting="uniform",
        channel=_received_clipped(options.get("channel") or lossless(), clip_norm),
        unheard=unheard,
    )


def _received_clipped(channel: Channel, norm: float) -> Channel:
    """``channel``, and what comes out of it clipped by the receiver: it costs the same."""
    shorten = clip(norm).send

    def send(key: Key, message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        received, memory = channel.send(key, message, memory)
        return shorten(key, received, ())[0], memory

    return channel._replace(send=send)


def noisy(server: Server, deviation: float | Array) -> Server:
    """``server`` whose aggregate gets Gaussian noise of that standard deviation in every coordinate.

    Leaf j (in the order of ``jax.tree.leaves``) draws from ``fold_in(info.key, j)``, in its own dtype.
    """

    def update(state: PyTree, aggregated: PyTree, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        leaves, structure = jax.tree.flatten(aggregated)
        drawn = [jax.random.normal(jax.random.fold_in(info.key, j), v.shape, v.dtype) for j, v in enumerate(leaves)]
        with_noise = [v + jnp.asarray(deviation, v.dtype) * z for v, z in zip(leaves, drawn, strict=True)]
        return server.update(state, jax.tree.unflatten(structure, with_noise), info)

    return server._replace(update=update)


def fixed_mean(count: float | Array) -> Aggregate:
    """The weighted sum of each model's messages over a fixed ``count``, however many there are.

    McMahan et al., 2018, the estimator f_f. Of no messages it is 0.
    """

    def finish(acc: Any) -> PyTree:
        return pytrees.scale(1 / count, acc.total)

    return weighted_mean()._replace(finish=finish)


@dataclasses.dataclass(frozen=True)
class DpFedAvgOptions(Averaging):
    """Options of DP-FedAvg."""

    clip_norm: float = 1.0
    """Bound on the norm of an update."""
    noise_multiplier: float = 1.0
    """Noise on the sum of the updates, in units of the bound."""
    delta: float = 1e-5
    """Delta that the final epsilon is told for."""


def _build_dp_fed_avg(o: DpFedAvgOptions, given: Given) -> Algorithm:
    number("delta", o.delta, above=0, below=1)
    own: dict[str, Any] = {"clip_norm": o.clip_norm, "noise_multiplier": o.noise_multiplier}
    return dp_fed_avg(
        given.model, given.schedule, expected_clients=given.expected_clients, **own, **shared_arguments(o)
    )


def _remark(o: DpFedAvgOptions, ran: Ran) -> str:
    """The guarantee of a run, or why there is none."""
    from fedtangent.measures.privacy import epsilon

    if ran.schedule_name == "poisson" and ran.only_first:
        return "epsilon is not known: with keep_first a client more pushes another one out of the round"
    if ran.schedule_name not in ("uniform", "poisson", "all") or ran.schedule.num_models != 1:
        return f"epsilon is not known for the schedule {ran.schedule_name} of {ran.schedule.num_models} models"
    sampling = "poisson" if ran.schedule_name == "poisson" else "without_replacement"
    found = epsilon(
        num_clients=ran.schedule.num_clients,
        clients_per_round=ran.clients_per_round,
        num_rounds=ran.num_rounds,
        noise_multiplier=o.noise_multiplier,
        delta=o.delta,
        sampling=sampling,
    )
    neighbours = "a client more or less" if sampling == "poisson" else "the data of one client"
    return f"privacy: epsilon {found:.4g} at delta {o.delta:g}, for {neighbours}"


ENTRIES = (
    entry_of(
        dp_fed_avg,
        "clipped updates, Gaussian noise, central differential privacy (McMahan et al., 2018)",
        DpFedAvgOptions,
        build=_build_dp_fed_avg,
        remark=_remark,
        papers=("mcmahan2018",),
        parts="local SGD, clipping; sum over m; SGD, noise",
        rule="it clips updates and adds noise to them; nearest is fed_avg --weighting uniform, which does neither",
        laws=Laws({**TRAINED, "clip_norm": 0.5, "noise_multiplier": 0.3, "expected_clients": 3}),
    ),
)
