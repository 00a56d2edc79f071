"""Averages corrected for clients that drift: FedProx, FedDyn, SCAFFOLD, and Modified Local-GD's anchor.

Messages are ``server - client``, so the mean message d is how far the server is from the clients' mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp

from fedtangent import pytrees
from fedtangent.checks import MAX_INDEX, instance, number, whole
from fedtangent.federated.algorithms.common import Options, train_and_average
from fedtangent.federated.algorithms.entry import TRAINED, Averaging, Laws, entry_of
from fedtangent.federated.algorithms.normalised import check_plain
from fedtangent.federated.local import LocalProblem, Posed, Work, proximal
from fedtangent.federated.rates import Rate, check_rate, rate_at
from fedtangent.types import Algorithm, Array, Client, Model, PyTree, RoundInfo, Schedule, Server


def _fraction(info: RoundInfo, num_clients: int) -> Array:
    """Share of all clients whose messages count, |S| / N; of an int32 JAX would divide in float32."""
    return jnp.asarray(info.num_clients, float) / num_clients


def _uniform(options: Options) -> Options:
    """``options``, with a uniform mean unless they say otherwise."""
    return cast(Options, {"weighting": "uniform", **options})


def fed_prox(
    model: Model,
    schedule: Schedule,
    *,
    mu: float | Array,
    client_learning_rate: Rate,
    work: Work,
    **options: Unpack[Options],
) -> Algorithm:
    """FedProx (Li et al., 2020, algorithm 2): FedAvg of ``F_i(w) + mu / 2 |w - w_server|^2``.

    mu = 0 is FedAvg, bit for bit. The paper draws clients in proportion to their examples and averages uniformly;
    here, as for FedAvg, the schedule draws and ``weighting`` weighs (by examples unless told otherwise).

    Raises ``ValueError`` for a negative mu.
    """
    number("mu", mu, at_least=0)
    local = Posed(pose=proximal(mu))
    return train_and_average("fed_prox", model, schedule, client_learning_rate, work, options, local=local)


class Dynamic(NamedTuple):
    """FedDyn's server: the model and the mean over all clients of their corrections."""

    params: PyTree
    correction: PyTree  # h


def dynamic_server(mu: float | Array, num_clients: int, rate: Rate) -> Server:
    """FedDyn (Acar et al., 2021, algorithm 1): ``h += mu |P| / N d``, then ``w -= rate (d + h / mu)``.

    With ``rate`` 1 the model is the clients' mean minus ``h / mu``, as published.
    """

    def update(state: Dynamic, d: PyTree, info: RoundInfo) -> tuple[Dynamic, dict[str, Array]]:
        h = pytrees.add(state.correction, pytrees.scale(mu * _fraction(info, num_clients), d))
        step = pytrees.add(d, pytrees.scale(1 / mu, h))
        return Dynamic(pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), step)), h), {}

    return Server(
        init=lambda params: Dynamic(params, pytrees.zeros_like(params)),
        broadcast=lambda state: state.params,
        params=lambda state: state.params,
        update=update,
    )


def fed_dyn(
    model: Model,
    schedule: Schedule,
    *,
    mu: float | Array,
    client_learning_rate: Rate,
    work: Work,
    **options: Unpack[Options],
) -> Algorithm:
    """FedDyn (Acar et al., 2021, algorithm 1): a dynamic regulariser aligns the clients' optima with the server's.

    A client minimises ``F_i(w) - <h_i, w> + mu / 2 |w - w_server|^2`` (mu is the paper's alpha) by ``work``.
    It then takes ``h_i -= mu (w_i - w_server)``. The server takes ``h -= mu / N sum_i (w_i - w_server)``, over the
    participants but divided by the number N of all clients, and the model is the participants' mean minus
    ``h / mu``. Each model of an ensemble has its own h and h_i.

    The mean is uniform, as in the paper; ``weighting="examples"`` weighs it (and the server's h with it). Behind a
    channel h_i moves by what the server received, so that the server's h stays the mean of all h_i.
    ``server_learning_rate``, not in the paper, is the part of the way that the server goes.

    Raises ``ValueError`` for a mu that is not positive.
    """
    instance("schedule", schedule, Schedule)
    check_rate("mu", mu)
    options = _uniform(options)

    def pose(broadcast: PyTree, h: PyTree) -> LocalProblem:
        return LocalProblem(broadcast, anchor=broadcast, tilt=pytrees.scale(-1, h), prox=mu)

    def settle(h: PyTree, same: PyTree, sent: PyTree) -> PyTree:
        return pytrees.add(h, pytrees.scale(mu, sent))

    local = Posed(pose=pose, init=pytrees.zeros_like, settle=settle)
    server = partial(dynamic_server, mu, schedule.num_clients)
    return train_and_average(
        "fed_dyn", model, schedule, client_learning_rate, work, options, server=server, local=local
    )


class Controlled(NamedTuple):
    """A model and a control variate: SCAFFOLD's state, what it broadcasts, and (as differences) what clients send."""

    params: PyTree
    control: PyTree


def controlled_server(num_clients: int, rate: Rate) -> Server:
    """SCAFFOLD (Karimireddy et al., 2020, algorithm 1, lines 16 and 17): ``x -= rate d``, ``c += |S| / N mean(dc)``."""

    def update(state: Controlled, mean: Controlled, info: RoundInfo) -> tuple[Controlled, dict[str, Array]]:
        step = pytrees.scale(rate_at(rate, info.round), mean.params)
        change = pytrees.scale(_fraction(info, num_clients), mean.control)
        return Controlled(pytrees.subtract(state.params, step), pytrees.add(state.control, change)), {}

    return Server(
        init=lambda params: Controlled(params, pytrees.zeros_like(params)),
        broadcast=lambda state: state,
        params=lambda state: state.params,
        update=update,
    )


def scaffold(
    model: Model, schedule: Schedule, *, client_learning_rate: Rate, work: Work, **options: Unpack[Options]
) -> Algorithm:
    """SCAFFOLD with option II (Karimireddy et al., 2020, algorithm 1): control variates take the drift out of SGD.

    A client steps by ``-rate (g - c_i + c)`` and then has ``c_i+ = c_i - c + (x - y_i) / (steps rate)``, with its own
    number of steps and the round's rate. It sends ``x - y_i`` and ``c_i+ - c_i``, which is twice FedAvg's traffic both
    ways. The server takes ``x -= server_learning_rate mean(x - y_i)`` and ``c += |S| / N mean(c_i+ - c_i)``.

    The means are uniform, as in the paper, unless ``weighting="examples"``. Behind a channel c_i moves by what the
    server received, so that c stays the mean of all c_i.

    Raises ``ValueError`` for a ``client_optimizer`` other than plain SGD, which the formula of c_i+ assumes.
    """
    instance("schedule", schedule, Schedule)
    make = options.get("client_optimizer")
    if make is not None:
        check_plain("client_optimizer", make)
    options = _uniform(options)

    def pose(broadcast: Controlled, own: PyTree) -> LocalProblem:
        return LocalProblem(broadcast.params, tilt=pytrees.subtract(broadcast.control, own))

    def answer(
        broadcast: Controlled, own: PyTree, params: PyTree, steps: Array, client: Client
    ) -> tuple[Controlled, PyTree]:
        moved = pytrees.subtract(broadcast.params, params)
        each = 1 / (jnp.maximum(steps, 1).astype(float) * rate_at(client_learning_rate, client.round))
        change = pytrees.subtract(pytrees.scale(each, moved), broadcast.control)
        return Controlled(moved, change), own

    def settle(own: PyTree, same: PyTree, sent: Controlled) -> PyTree:
        return pytrees.add(own, sent.control)

    message = lambda params: Controlled(params, params)  # noqa: E731
    local = Posed(pose=pose, answer=answer, init=pytrees.zeros_like, message=message, settle=settle)
    server = partial(controlled_server, schedule.num_clients)
    return train_and_average(
        "scaffold", model, schedule, client_learning_rate, work, options, server=server, local=local
    )


def halpern(index: Array) -> Array:
    """``alpha^k = 1 - 1 / (k + 1)`` at ``index`` k (Local-GD paper, below eq. 16)."""
    return 1 - 1 / (jnp.asarray(index, float) + 1)


class Anchored(NamedTuple):
    """The model and where it started."""

    params: PyTree
    anchor: PyTree


def anchored_server(alpha: Callable[[Array], Array], first_index: int, rate: Rate) -> Server:
    """Modified Local-GD (Local-GD paper, algorithm 3): ``(1 - alpha) w_start + alpha (w - rate d)``.

    In round k (from 0) ``alpha`` is ``alpha(k + first_index)``.
    """

    def update(state: Anchored, d: PyTree, info: RoundInfo) -> tuple[Anchored, dict[str, Array]]:
        share = alpha(info.round + first_index)
        mean = pytrees.subtract(state.params, pytrees.scale(rate_at(rate, info.round), d))
        params = pytrees.add(pytrees.scale(1 - share, state.anchor), pytrees.scale(share, mean))
        return Anchored(params, state.anchor), {}

    return Server(
        init=lambda params: Anchored(
            params, jax.tree.map(jnp.copy, params)
        ),  # a run donates its state: no shared buffer
        broadcast=lambda state: state.params,
        params=lambda state: state.params,
        update=update,
    )


def modified_local_gd(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    anchoring: Callable[[Array], Array] = halpern,
    first_index: int = 0,
    mu: float | Array = 0.0,
    **options: Unpack[Options],
) -> Algorithm:
    """Modified Local-GD (Local-GD paper, algorithm 3): the clients' mean, drawn back to where the run started.

    In round k (from 0) ``w^{k+1} = (1 - alpha) w^0 + alpha mean_i(w_i)``, with w_i the models just trained from w^k
    (line 9 prints ``w_i^k``; eq. 63 of its appendix has ``w_i^{k+1}``) and a uniform mean unless ``weighting`` says
    otherwise. ``server_learning_rate``, not in the paper, is how far from w^k to the mean the server goes first.

    Args:
        anchoring: the index to alpha.
        first_index: alpha of round k is ``anchoring(k + first_index)``. 0 is algorithm 3 and eq. (63): the first
            round has alpha 0 and changes nothing. 1 is eq. (16), ``alpha^{k+1}``: the first round has alpha 1/2.
        mu: lambda of eq. (12), whose clients minimise ``F_i(w) + mu / 2 |w - w^k|^2`` (loss "exponential_sum" there).

    Raises ``ValueError`` for a ``first_index`` that is not a whole number from 0 on, an ``anchoring`` that starts
    outside [0, 1], and a negative ``mu``.
    """
    whole("first_index", first_index, 0, MAX_INDEX // 2)
    begin = anchoring(jnp.int32(first_index))
    if not isinstance(begin, jax.core.Tracer) and not 0 <= float(begin) <= 1:
        raise ValueError(f"anchoring: got {float(begin):g} at index {first_index}, must be from 0 to 1")
    options = _uniform(options)
    number("mu", mu, at_least=0)
    server, local = partial(anchored_server, anchoring, int(first_index)), Posed(pose=proximal(mu))
    return train_and_average(
        "modified_local_gd", model, schedule, client_learning_rate, work, options, server=server, local=local
    )


@dataclasses.dataclass(frozen=True)
class FedProxOptions(Averaging):
    """Options of FedProx."""

    mu: float = 0.1
    """Strength of the proximal term, which holds clients near the model they got."""


@dataclasses.dataclass(frozen=True)
class FedDynOptions(Averaging):
    """Options of FedDyn."""

    mu: float = 0.1
    """Strength of the dynamic regulariser (the paper's alpha)."""


@dataclasses.dataclass(frozen=True)
class ModifiedLocalGDOptions(Averaging):
    """Options of Modified Local-GD."""

    first_index: int = 0
    """alpha of round k (from 0) is 1 - 1 / (k + this + 1): 0 as in algorithm 3, 1 as in eq. (16)."""
    mu: float = 0.0
    """Strength of the proximal term (lambda of eq. 12), which holds clients near the model they got."""


def _anchoring_rule(o: ModifiedLocalGDOptions) -> dict[str, Any]:
    """alpha as a function of the round, from 0."""
    return {
        "algorithm": "modified_local_gd",
        "mu": o.mu,
        "anchoring": lambda round_: halpern(round_ + o.first_index),
        "weighting": "uniform",
    }


_COUNTS = "the server weighs by |S| / N, a number of clients; test_corrected.py has the law for all clients at once"

ENTRIES = (
    entry_of(
        fed_prox,
        "clients are held near the model they got by --mu (Li et al., 2020)",
        FedProxOptions,
        papers=("li2020",),
        parts="local SGD, prox; mean; SGD",
        inside=True,
        rule=lambda o: {"mu": o.mu},
        laws=Laws({**TRAINED, "mu": 0.5}),
    ),
    entry_of(
        fed_dyn,
        "dynamic regularisation of strength --mu (Acar et al., 2021)",
        FedDynOptions,
        papers=("acar2021",),
        parts="local SGD, tilt and prox; mean; mean less h / mu",
        inside=True,
        rule=lambda o: {"algorithm": "fed_dyn", "mu": o.mu, "weighting": "uniform"},
        laws=Laws({**TRAINED, "work": Work(steps=4, batch_size=4), "mu": 0.5}, exempt={"doubling": _COUNTS}),
    ),
    entry_of(
        scaffold,
        "control variates, option II (Karimireddy et al., 2020)",
        papers=("karimireddy2020",),
        parts="local SGD, tilt; mean; SGD, control variate",
        inside=True,
        rule=lambda o: {"algorithm": "scaffold", "weighting": "uniform"},
        laws=Laws({**TRAINED, "server_learning_rate": 0.8}, exempt={"doubling": _COUNTS}),
    ),
    entry_of(
        modified_local_gd,
        "aggregation anchored at the start (Modified Local-GD, algorithm 3)",
        ModifiedLocalGDOptions,
        papers=("localgd",),
        parts="local SGD, prox; mean; anchored at the start",
        rule=_anchoring_rule,
        laws=Laws({**TRAINED, "work": Work(steps=3), "first_index": 1}),
    ),
)
