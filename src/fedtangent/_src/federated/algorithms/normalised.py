"""FedNova: the server averages updates divided by the clients' local steps, so that more steps give no more weight.

The clients' optimisers must be linear in the gradients, as SGD and momentum are (``optimizers``).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from fedtangent._src import pytrees
from fedtangent._src.checks import number
from fedtangent._src.federated.aggregate import with_params
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.local import Posed, Work, is_zero, proximal
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, at_round, check_linear, check_rate, rate_at, unit_response
from fedtangent._src.types import Algorithm, Array, Client, Model, PyTree, RoundInfo, Schedule, Server


class Normalised(NamedTuple):
    """A FedNova message: a client's normalised update, and the number by which it was divided (for SGD, its steps)."""

    direction: PyTree
    normaliser: Array  # []


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """Options of FedNova: the strength of the proximal term and the effective number of local steps."""

    mu: float | Array = 0.0
    """Strength of the proximal term."""
    tau_eff: Rate | None = None
    """Effective number of local steps (default: the clients' weighted mean, ``sum_i p_i a_i``). In Python it may be a
    schedule of the round."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a negative mu or a tau_eff that is not above 0 (a schedule: below 0 in round 0)."""
        number("mu", self.mu, at_least=0)
        if self.tau_eff is not None:
            check_rate("tau_eff", self.tau_eff)


class Plain(NamedTuple):
    """The state of a server that keeps nothing but its model."""

    params: PyTree


def _normalised_server(tau_eff: Rate | None, rate: Rate) -> Server:
    """Builds FedNova's server, ``x -= rate tau_eff sum_i p_i d_i`` (Wang et al., 2020, eq. 6).

    x is the model, d_i and a_i are client i's normalised update and normaliser, and p_i is its weight. If ``tau_eff``
    is not set, it is the mean normaliser ``sum_i p_i a_i``.
    """

    def update(state: Plain, mean: Normalised, info: RoundInfo) -> tuple[Plain, dict[str, Array]]:
        steps = mean.normaliser if tau_eff is None else jnp.asarray(rate_at(tau_eff, info.round), mean.normaliser.dtype)
        step = pytrees.scale(rate_at(rate, info.round) * steps, mean.direction)
        return Plain(pytrees.subtract(state.params, step)), {"tau_eff": steps}

    return with_params(Plain, update)


@recipe(
    papers=("wang2020",),
    parts="local SGD, normalised; mean; effective steps",
    inside=True,
    unused=("server_optimizer",),
)
def fed_nova(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    normalisation: Normalisation = Normalisation(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedNova: clients with more local steps do not pull the mean towards them (Wang et al., 2020, eq. 6 and 7).

    A client that trained the broadcast model x to x_i sends ``d_i = (x - x_i) / a_i`` and its normaliser a_i. a_i is
    how far the client's optimiser moves in its number of steps if all gradients are 1, in units of the first step. For
    SGD it is the number of steps; for momentum and the proximal term see sections 3 and 4 of the paper, where it is
    ``|a_i|_1`` (the two agree as long as no gradient counts negatively). The server takes ``x -= server_learning_rate
    tau_eff sum_i p_i d_i`` with the clients' weights p_i; ``tau_eff`` is ``sum_i p_i a_i`` by default, and
    ``info["tau_eff"]`` [K] reports it.

    Args:
        normalisation: Strength of the proximal term, and effective number of local steps.

    Raises:
        ValueError: A ``client_optimizer`` that is not linear in the gradients (``optax.adam``), a negative mu, a ``mu *
            client_learning_rate`` of 1 or more in the first round or, before a run, in a later one; and as ``fed_avg``
            raises.
    """
    mu, tau_eff = normalisation.mu, normalisation.tau_eff
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)

    def bounded(round_: Array) -> float | Array:
        """Returns the clients' rate in a round; raises ``ValueError`` if mu times this rate is 1 or more."""
        assert client_learning_rate is not None
        rate = rate_at(client_learning_rate, round_)
        number("mu * client_learning_rate", mu * rate, at_least=0, below=1)
        return rate

    if client_optimizer is None:
        bounded(jnp.int32(0))
        if callable(client_learning_rate):  # before a run ``simulate`` evaluates a schedule in all rounds
            training = training._replace(learning_rate=bounded)
    else:
        check_linear("client_optimizer", client_optimizer)
    descent = common.local_descent(training)

    def normaliser(steps: Array, client: Client, dtype: jnp.dtype) -> Array:
        if client_optimizer is None and is_zero(mu):
            return jnp.maximum(steps, 1).astype(dtype)
        most = most_steps(work, client.rows.shape[0]) if work.differentiable else None
        optimizer = at_round(descent, client.round)
        count = jnp.maximum(steps, 1)
        moved = unit_response(optimizer, mu, count, most, dtype)
        first = unit_response(optimizer, 0.0, jnp.int32(1), 1, dtype)
        # an optimiser whose first step is 0 is measured in units of 1; in a round of rate 0 all steps count alike
        return jnp.where(moved > 0, moved / jnp.where(first > 0, first, 1), count.astype(dtype))

    def answer(
        broadcast: PyTree, state: PyTree, params: PyTree, steps: Array, client: Client
    ) -> tuple[Normalised, PyTree]:
        scale = normaliser(steps, client, pytrees.precision(params))
        return Normalised(pytrees.scale(1 / scale, pytrees.subtract(broadcast, params)), scale), state

    message = lambda params: Normalised(params, jnp.zeros((), pytrees.precision(params)))  # noqa: E731
    local = Posed(pose=proximal(mu), answer=answer, message=message)
    replaced = common.AveragingParts(partial(_normalised_server, tau_eff), local)
    return common.train_and_average(
        "fed_nova", training, schedule, averaging, replaced, {"algorithm": "fed_nova", "mu": mu}
    )


def most_steps(work: Work, max_size: int) -> int:
    """Returns the number of local steps that the client with the most examples takes in a round.

    Args:
        work: Local steps and minibatches.
        max_size: Number of examples of the largest client.
    """
    if work.steps is not None:
        return work.steps
    return (work.epochs or 0) * (1 if work.batch_size is None else -(-max_size // min(work.batch_size, max_size)))
