"""FedAvg with a server that has momentum (FedAvgM) or adaptive step sizes (FedAdam, FedYogi, FedAdagrad) as published.

The server optimisers are optax transformations of the pseudo-gradient ``server - client``. The adaptive ones (Reddi et
al., 2021, algorithm 2) differ from ``optax.adam`` and its like: there is no bias correction, the second moment starts
at ``tau^2`` and not at 0, and Yogi changes its second moment v by the sign of ``v - g^2``, with g the pseudo-gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent._src import pytrees
from fedtangent._src.checks import number
from fedtangent._src.federated.aggregate import optax_server
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.local import Work
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, at_rate, check_rate
from fedtangent._src.types import Algorithm, Array, Model, PyTree, Schedule, Server

Number = float | Array
SecondMoment = Callable[[Array, Array], Array]  # (v, squared pseudo-gradient) -> v


class Moments(NamedTuple):
    """The first and second moment of a server, shaped like the parameters."""

    first: PyTree  # m
    second: PyTree  # v


def _adaptive(
    rate: Number, beta_1: Number, tau: Number, initial: Number | None, second: SecondMoment
) -> optax.GradientTransformation:
    """Builds an optimiser with update ``-rate m / (sqrt(v) + tau)``, as Adam without bias correction.

    For the pseudo-gradient g, ``m = beta_1 m + (1 - beta_1) g`` and ``v = second(v, g^2)``. v starts at ``initial``, or
    tau^2 if None.
    """
    start = tau**2 if initial is None else initial

    def init(params: PyTree) -> Moments:
        filled = jax.tree.map(lambda p: jnp.full(p.shape, start, p.dtype), params)
        return Moments(pytrees.zeros_like(params), filled)

    def update(gradient: PyTree, state: Moments, params: PyTree | None = None) -> tuple[PyTree, Moments]:
        m = pytrees.add(pytrees.scale(beta_1, state.first), pytrees.scale(1 - beta_1, gradient))
        v = jax.tree.map(lambda old, g: second(old, jnp.square(g)), state.second, gradient)

        def step(m: Array, v: Array) -> Array:
            return -jnp.asarray(rate, m.dtype) * m / (jnp.sqrt(v) + jnp.asarray(tau, v.dtype))

        return jax.tree.map(step, m, v), Moments(m, v)

    return optax.GradientTransformation(init, update)


def adam(
    rate: Number, beta_1: Number, beta_2: Number, tau: Number, initial: Number | None = None
) -> optax.GradientTransformation:
    """Builds FedAdam's server optimiser (Reddi et al., 2021, algorithm 2): ``v = beta_2 v + (1 - beta_2) g^2``.

    The update is ``-rate m / (sqrt(v) + tau)`` with ``m = beta_1 m + (1 - beta_1) g`` for the pseudo-gradient g.

    Args:
        rate: Step size.
        beta_1: Decay of the first moment m.
        beta_2: Decay of the second moment v.
        tau: Number added to ``sqrt(v)``; a small one makes the steps more adaptive.
        initial: Second moment before the first round; None for tau^2.
    """

    def second(v: Array, squared: Array) -> Array:
        return jnp.asarray(beta_2, v.dtype) * v + jnp.asarray(1 - beta_2, v.dtype) * squared

    return _adaptive(rate, beta_1, tau, initial, second)


def yogi(
    rate: Number, beta_1: Number, beta_2: Number, tau: Number, initial: Number | None = None
) -> optax.GradientTransformation:
    """Builds FedYogi's server optimiser (Reddi et al., 2021, algorithm 2): ``v -= (1 - beta_2) g^2 sign(v - g^2)``.

    The update is ``-rate m / (sqrt(v) + tau)`` with ``m = beta_1 m + (1 - beta_1) g`` for the pseudo-gradient g.

    Args:
        rate: Step size.
        beta_1, beta_2: Decays of the first moment m and the second moment v.
        tau: Number added to ``sqrt(v)``.
        initial: Second moment before the first round; None for tau^2.
    """

    def second(v: Array, squared: Array) -> Array:
        return v - jnp.asarray(1 - beta_2, v.dtype) * squared * jnp.sign(v - squared)

    return _adaptive(rate, beta_1, tau, initial, second)


def adagrad(rate: Number, beta_1: Number, tau: Number, initial: Number | None = None) -> optax.GradientTransformation:
    """Builds FedAdagrad's server optimiser (Reddi et al., 2021, algorithm 2): ``v += g^2``.

    The update is ``-rate m / (sqrt(v) + tau)`` with ``m = beta_1 m + (1 - beta_1) g`` for the pseudo-gradient g.

    Args:
        rate: Step size.
        beta_1: Decay of the first moment m.
        tau: Number added to ``sqrt(v)``.
        initial: v before the first round; None for tau^2.
    """
    return _adaptive(rate, beta_1, tau, initial, jnp.add)


def heavy_ball(rate: Number, decay: Number, nesterov: bool = False) -> optax.GradientTransformation:
    """Builds FedAvgM's server optimiser (Hsu et al., 2019, section 4.3): ``v = decay v + g``, with update ``-rate v``.

    Args:
        rate: Step size.
        decay: Momentum, by which v is multiplied before the pseudo-gradient g is added.
        nesterov: Whether the update is ``-rate (g + decay v)`` instead, with the new v.
    """

    def update(gradient: PyTree, v: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        v = pytrees.add(gradient, pytrees.scale(decay, v))
        ahead = pytrees.add(gradient, pytrees.scale(decay, v)) if nesterov else v
        return jax.tree.map(lambda leaf: jnp.asarray(-rate, leaf.dtype) * leaf, ahead), v

    return optax.GradientTransformation(pytrees.zeros_like, update)


# ---- the algorithms -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Adaptivity:
    """Options of a server with adaptive step sizes (Reddi et al., 2021, algorithm 2)."""

    beta_1: Number = 0.9
    """Decay of the server's first moment."""
    beta_2: Number = 0.99
    """Decay of the server's second moment."""
    tau: Number = 1e-3
    """Degree of adaptivity: the server divides by ``sqrt(v) + tau``, with v the second moment."""
    initial_second_moment: Number | None = None
    """Second moment before the first round (default: tau^2; the paper: at least that)."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a beta outside [0, 1), a tau that is not positive, or a negative initial moment."""
        for name in ("beta_1", "beta_2"):
            number(name, getattr(self, name), at_least=0, below=1)
        check_rate("tau", self.tau)
        if self.initial_second_moment is not None:
            number("initial_second_moment", self.initial_second_moment, at_least=0)


@dataclasses.dataclass(frozen=True)
class ServerMomentum:
    """Options of a server with momentum (Hsu et al., 2019, section 4.3)."""

    momentum: Number = 0.9
    """Momentum of the server, in [0, 1)."""
    nesterov: bool = False
    """Nesterov momentum: the server moves by ``-rate (g + momentum v)`` and not by ``-rate v``."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a momentum outside [0, 1)."""
        number("momentum", self.momentum, at_least=0, below=1)


ADAPTS = "its server scales each parameter by its past updates, which no kernel knows; nearest is fed_avg_m"
WITH_MOMENTS: dict[str, Any] = {  # marks of the recipes whose server keeps moments
    "papers": ("reddi2021",),
    "inside": True,
    "unused": ("server_optimizer",),
    "python_only": ("initial_second_moment",),
}


def _stepping(make: Callable[[Number], optax.GradientTransformation]) -> common.AveragingParts:
    """Returns the parts by which an algorithm differs from FedAvg: a server that steps with an optimiser.

    ``make`` builds the optimiser from the server's learning rate.
    """

    def server(rate: Rate) -> Server:
        return optax_server(at_rate(make, rate))

    return common.AveragingParts(server)


_Make = Callable[[Number, Number, Number, Number, Number | None], optax.GradientTransformation]


def _with_moments(make: _Make, adaptivity: Adaptivity) -> common.AveragingParts:
    """Returns the parts by which an algorithm differs from FedAvg: a server that steps with ``adam`` or ``yogi``.

    ``make`` is the function ``adam`` or ``yogi``; ``adaptivity`` has the values of all its arguments except the rate.
    """
    numbers = (adaptivity.beta_1, adaptivity.beta_2, adaptivity.tau, adaptivity.initial_second_moment)
    return _stepping(lambda rate: make(rate, *numbers))


@recipe(parts="local SGD; mean; Adam as published", **WITH_MOMENTS)
def fed_adam(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    adaptivity: Adaptivity = Adaptivity(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedAdam: the server steps by ``-eta m / (sqrt(v) + tau)`` (Reddi et al., 2021, algorithm 2).

    ``m = beta_1 m + (1 - beta_1) d`` and ``v = beta_2 v + (1 - beta_2) d^2`` for the clients' mean pseudo-gradient d,
    without the bias correction of ``optax.adam``. Every parameter moves by about eta, whatever the size of d; eta is
    ``averaging.server_learning_rate``, 0.01 by default (the paper tunes it). Clients are weighted by examples;
    ``weighting="uniform"`` is the paper's choice.

    Args:
        adaptivity: Decay of the moments, and the degree of adaptivity.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    averaging = averaging.filled(server_learning_rate=0.01)
    return common.train_and_average("fed_adam", training, schedule, averaging, _with_moments(adam, adaptivity), ADAPTS)


@recipe(parts="local SGD; mean; Yogi", **WITH_MOMENTS)
def fed_yogi(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    adaptivity: Adaptivity = Adaptivity(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedYogi: FedAdam with ``v -= (1 - beta_2) d^2 sign(v - d^2)`` (Reddi et al., 2021, algorithm 2).

    d is the clients' mean pseudo-gradient and v the server's second moment. Defaults are as for ``fed_adam``.

    Args:
        adaptivity: Decay of the moments, and the degree of adaptivity.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    averaging = averaging.filled(server_learning_rate=0.01)
    return common.train_and_average("fed_yogi", training, schedule, averaging, _with_moments(yogi, adaptivity), ADAPTS)


@recipe(parts="local SGD; mean; Adagrad", **WITH_MOMENTS)
def fed_adagrad(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    adaptivity: Adaptivity = Adaptivity(beta_1=0.0),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedAdagrad: FedAdam with ``v += d^2`` and no momentum (Reddi et al., 2021, algorithm 2).

    d is the clients' mean pseudo-gradient and v the sum of its squares. ``averaging.server_learning_rate`` is 0.1 by
    default, and ``adaptivity.beta_2`` is not used.

    Args:
        adaptivity: Decay of the moments, and the degree of adaptivity.
    """
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    make = partial(adagrad, beta_1=adaptivity.beta_1, tau=adaptivity.tau, initial=adaptivity.initial_second_moment)
    averaging = averaging.filled(server_learning_rate=0.1)
    return common.train_and_average("fed_adagrad", training, schedule, averaging, _stepping(make), ADAPTS)


@recipe(papers=("hsu2019",), parts="local SGD; mean; momentum", inside=True, unused=("server_optimizer",))
def fed_avg_m(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    server_momentum: ServerMomentum = ServerMomentum(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedAvgM: the server moves by ``-eta v`` with ``v = momentum v + d`` (Hsu et al., 2019, section 4.3).

    d is the clients' mean pseudo-gradient and eta ``averaging.server_learning_rate``, 1 by default as in the paper;
    momentum 0 is FedAvg. With ``nesterov`` the server moves by ``-eta (d + momentum v)``.

    Args:
        server_momentum: Momentum of the server.
    """
    momentum, nesterov = server_momentum.momentum, server_momentum.nesterov
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    replaced = _stepping(partial(heavy_ball, decay=momentum, nesterov=nesterov))
    rule = {"server_momentum": momentum, "nesterov": nesterov}
    return common.train_and_average("fed_avg_m", training, schedule, averaging, replaced, rule)
