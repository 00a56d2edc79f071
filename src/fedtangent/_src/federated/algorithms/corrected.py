"""Algorithms that correct for clients whose models drift apart: FedProx, FedDyn, SCAFFOLD and Modified Local-GD.

A client's message is ``server - client``, so the mean message d is the server's model minus the clients' mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src import pytrees
from fedtangent._src.checks import MAX_INDEX, instance, number, whole
from fedtangent._src.federated.aggregate import with_params
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.local import LocalProblem, Posed, Work, proximal
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, check_rate, rate_at
from fedtangent._src.types import Algorithm, Array, Client, Model, PyTree, RoundInfo, Schedule, Server

OWN_SERVER = ("server_optimizer",)  # a server with a state takes a rate, but no optimiser


def _fraction(info: RoundInfo, num_clients: int) -> Array:
    """Returns the share of all N clients whose messages were accepted in the round."""
    return jnp.asarray(info.num_clients, float) / num_clients


@recipe(papers=("li2020",), parts="local SGD, prox; mean; SGD", inside=True)
def fed_prox(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    mu: float | Array = 0.1,
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedProx: FedAvg whose clients minimise ``F_i(w) + mu / 2 |w - w_server|^2``.

    Source: Li et al., 2020, algorithm 2. F_i is client i's mean loss and w_server the broadcast model.

    mu = 0 is FedAvg, bit for bit. The paper draws clients in proportion to their examples and averages uniformly; here,
    as for FedAvg, the schedule draws them and the mean is weighted by examples.

    Args:
        mu: Strength of the proximal term, which holds clients near the broadcast model.

    Raises:
        ValueError: A negative mu, and as ``fed_avg`` raises.
    """
    number("mu", mu, at_least=0)
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = common.AveragingParts(local=Posed(pose=proximal(mu)))
    return common.train_and_average("fed_prox", training, schedule, averaging, replaced, rule={"mu": mu})


class Dynamic(NamedTuple):
    """The state of FedDyn's server: the model, and the mean h of the corrections of all clients."""

    params: PyTree
    correction: PyTree  # h


def _dynamic_server(mu: float | Array, num_clients: int, rate: Rate) -> Server:
    """Builds FedDyn's server for a model w with correction h: ``h += mu |P| / N d``, then ``w -= rate (d + h / mu)``.

    d is the mean update of the participants P, of N clients.
    """

    def update(state: Dynamic, d: PyTree, info: RoundInfo) -> tuple[Dynamic, dict[str, Array]]:
        h = pytrees.add(state.correction, pytrees.scale(mu * _fraction(info, num_clients), d))
        step = pytrees.add(d, pytrees.scale(1 / mu, h))
        return Dynamic(pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), step)), h), {}

    return with_params(lambda params: Dynamic(params, pytrees.zeros_like(params)), update)


@recipe(papers=("acar2021",), parts="local SGD, tilt and prox; mean; mean less h / mu", inside=True, unused=OWN_SERVER)
def fed_dyn(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    mu: float | Array = 0.1,
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedDyn: a dynamic regulariser aligns the clients' optima with the server's.

    Source: Acar et al., 2021, algorithm 1.

    A client minimises ``F_i(w) - <h_i, w> + mu / 2 |w - w_server|^2`` by ``work``, with F_i its mean loss and h_i a
    correction that it keeps. It then takes ``h_i -= mu (w_i - w_server)`` for its trained model w_i. The server takes
    ``h -= mu / N sum_i (w_i - w_server)``, over the participants but divided by the number N of all clients. The new
    model is the participants' mean minus ``h / mu``. Each model of an ensemble has a separate h and separate h_i.

    The mean is uniform by default, as in the paper; ``weighting="examples"`` weighs the mean and the server's h. With a
    channel, h_i changes by the message that the server received, so that the server's h stays the mean of all h_i.
    ``server_learning_rate``, not in the paper, is the share of the way to the new model that the server moves.

    Args:
        mu: Strength of the dynamic regulariser (the paper's alpha).

    Raises:
        ValueError: A mu that is not positive, and as ``fed_avg`` raises.
    """
    instance("schedule", schedule, Schedule)
    check_rate("mu", mu)

    def pose(broadcast: PyTree, h: PyTree) -> LocalProblem:
        return LocalProblem(broadcast, anchor=broadcast, tilt=pytrees.scale(-1, h), prox=mu)

    def settle(h: PyTree, same: PyTree, sent: PyTree) -> PyTree:
        return pytrees.add(h, pytrees.scale(mu, sent))

    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    local = Posed(pose=pose, init=pytrees.accumulator, settle=settle)
    replaced = common.AveragingParts(partial(_dynamic_server, mu, schedule.num_clients), local)
    averaging = averaging.filled(weighting="uniform")
    return common.train_and_average(
        "fed_dyn", training, schedule, averaging, replaced, {"algorithm": "fed_dyn", "mu": mu}
    )


class Controlled(NamedTuple):
    """A model and a control variate: SCAFFOLD's server state and broadcast; in messages, the differences of both."""

    params: PyTree
    control: PyTree


def _controlled_server(num_clients: int, rate: Rate) -> Server:
    """Builds SCAFFOLD's server, ``x -= rate d`` and ``c += |S| / N mean(dc)`` (Karimireddy et al., 2020, algorithm 1).

    x is the model, c the control variate, d the mean update of the participants S, and dc their changes of c_i.
    """

    def update(state: Controlled, mean: Controlled, info: RoundInfo) -> tuple[Controlled, dict[str, Array]]:
        step = pytrees.scale(rate_at(rate, info.round), mean.params)
        change = pytrees.scale(_fraction(info, num_clients), mean.control)
        return Controlled(pytrees.subtract(state.params, step), pytrees.add(state.control, change)), {}

    server = with_params(lambda params: Controlled(params, pytrees.zeros_like(params)), update)
    return server._replace(broadcast=lambda state: state)


@recipe(
    papers=("karimireddy2020",), parts="local SGD, tilt; mean; SGD, control variate", inside=True, unused=OWN_SERVER
)
def scaffold(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    loss: str | Loss | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds SCAFFOLD with option II: control variates take the drift out of SGD.

    Source: Karimireddy et al., 2020, algorithm 1.

    A client trains the broadcast model x to y_i by steps ``-rate (g - c_i + c)``, where g is its gradient, c_i its
    control variate and c the server's. Then ``c_i+ = c_i - c + (x - y_i) / (steps rate)`` is its new control variate,
    with the number of its steps and the round's rate. It sends ``x - y_i`` and ``c_i+ - c_i``, which is twice FedAvg's
    traffic both ways. The server takes ``x -= server_learning_rate mean(x - y_i)`` and ``c += |S| / N mean(c_i+ -
    c_i)``, for the participants S of N clients.

    The means are uniform, as in the paper, unless ``weighting="examples"``. With a channel, c_i changes by the message
    that the server received, so that c stays the mean of all c_i. The formula of c_i+ holds for gradient descent only,
    so the clients can have no other optimiser.

    Args:
        client_learning_rate: Step size of local gradient descent, a number or a schedule of the round. In a round of
            rate 0 no control variate changes.
    """
    instance("schedule", schedule, Schedule)

    def pose(broadcast: Controlled, client_control: PyTree) -> LocalProblem:
        return LocalProblem(broadcast.params, tilt=pytrees.subtract(broadcast.control, client_control))

    def answer(
        broadcast: Controlled, client_control: PyTree, params: PyTree, steps: Array, client: Client
    ) -> tuple[Controlled, PyTree]:
        moved = pytrees.subtract(broadcast.params, params)
        assert client_learning_rate is not None
        rate = jnp.asarray(rate_at(client_learning_rate, client.round))
        per_step = 1 / (jnp.maximum(steps, 1).astype(float) * jnp.where(rate > 0, rate, 1))
        change = pytrees.subtract(pytrees.scale(per_step, moved), broadcast.control)
        change = pytrees.where(rate > 0, change, pytrees.zeros_like(change))
        return Controlled(moved, change), client_control

    def settle(client_control: PyTree, same: PyTree, sent: Controlled) -> PyTree:
        return pytrees.add(client_control, sent.control)

    message = lambda params: Controlled(params, params)  # noqa: E731
    training = common.trained(model, client_learning_rate, None, work, loss)
    local = Posed(pose=pose, answer=answer, init=pytrees.accumulator, message=message, settle=settle)
    replaced = common.AveragingParts(partial(_controlled_server, schedule.num_clients), local)
    averaging = averaging.filled(weighting="uniform")
    return common.train_and_average("scaffold", training, schedule, averaging, replaced, {"algorithm": "scaffold"})


def halpern(index: Array) -> Array:
    """Returns ``1 - 1 / (k + 1)``, the weight of the clients' mean in the server's next model, with k = ``index``.

    k is the round plus ``Anchoring.first_index``. The rest of the weight is on the model at the start of the run.
    Source: the Local-GD paper, below eq. (16).
    """
    return 1 - 1 / (jnp.asarray(index, float) + 1)


@dataclasses.dataclass(frozen=True)
class Anchoring:
    """Options of Modified Local-GD: how strongly the server's model is pulled back to the start of the run.

    In round k, from 0, the share of the clients' mean in the next model is ``alpha(k + first_index)``.
    """

    alpha: Callable[[Array], Array] = halpern
    """Function from an index to alpha, the share of the clients' mean in the next model."""
    first_index: int = 0
    """Index of the first round: 0 as in algorithm 3, or 1 as in eq. (16)."""
    mu: float | Array = 0.0
    """Strength of the proximal term (lambda of eq. 12), which holds clients near the broadcast model."""

    def check(self) -> None:
        """Raises ``ValueError`` for a negative mu or ``first_index``, or a first alpha outside [0, 1]."""
        number("mu", self.mu, at_least=0)
        whole("first_index", self.first_index, 0, MAX_INDEX // 2)
        begin = self.alpha(jnp.int32(self.first_index))
        if not isinstance(begin, jax.core.Tracer) and not 0 <= float(begin) <= 1:
            raise ValueError(f"anchoring: got alpha({self.first_index}) = {float(begin):g}, must be from 0 to 1")


class Anchored(NamedTuple):
    """The state of Modified Local-GD's server: a model, and its parameters at the start of the run."""

    params: PyTree
    anchor: PyTree


def _anchored_server(anchoring: Anchoring, rate: Rate) -> Server:
    """Builds the server of Modified Local-GD, which pulls the model w back to w_start, its value at the run's start.

    It takes ``w <- (1 - alpha) w_start + alpha (w - rate d)``, with d the clients' mean update; alpha is
    ``anchoring.alpha`` of the round plus ``first_index``.
    """

    def update(state: Anchored, d: PyTree, info: RoundInfo) -> tuple[Anchored, dict[str, Array]]:
        share = anchoring.alpha(info.round + anchoring.first_index)
        mean = pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), d))
        params = pytrees.add(pytrees.scale(1 - share, state.anchor), pytrees.scale(share, mean))
        return Anchored(params, state.anchor), {}

    # a copy: a run donates its state, whose arrays must not share a buffer
    return with_params(lambda params: Anchored(params, jax.tree.map(jnp.copy, params)), update)


@recipe(papers=("localgd",), parts="local SGD, prox; mean; anchored at the start", unused=OWN_SERVER)
def modified_local_gd(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    anchoring: Anchoring = Anchoring(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds Modified Local-GD: the clients' mean, drawn back to the start of the run (Local-GD paper, algorithm 3).

    In round k (from 0) ``w^{k+1} = (1 - alpha) w^0 + alpha mean_i(w_i)``, where w_i are the models just trained from
    w^k (erratum `local_gd.line9`) and the mean is uniform by default. With a ``server_learning_rate``, not in the
    paper, the server first moves that share of the way from w^k to the mean. By default alpha is
    ``k / (k + 1)``, so that the first round changes nothing, as in algorithm 3 and eq. (63) of Local-GD;
    ``Anchoring(first_index=1)`` is eq. (16), whose first round has alpha 1/2.

    Args:
        anchoring: alpha of every round, and the strength of the proximal term (lambda in eq. 12 of Local-GD).

    Raises:
        ValueError: A negative mu, a ``first_index`` that is not a whole number from 0 on, an alpha that starts outside
            [0, 1], and as ``fed_avg`` raises.
    """
    anchoring.check()
    mu = anchoring.mu
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = common.AveragingParts(partial(_anchored_server, anchoring), Posed(pose=proximal(mu)))
    rule = {
        "algorithm": "modified_local_gd",
        "mu": mu,
        "anchoring": lambda round_: anchoring.alpha(round_ + anchoring.first_index),
    }
    averaging = averaging.filled(weighting="uniform")
    return common.train_and_average("modified_local_gd", training, schedule, averaging, replaced, rule)
