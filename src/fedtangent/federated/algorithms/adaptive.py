"""FedAvg with a better server: momentum (FedAvgM) and adaptive rates (FedAdam, FedYogi, FedAdagrad) as published.

The server optimisers are optax transformations of the pseudo-gradient ``server - client``. Those of Reddi et al.
(2021), algorithm 2, differ from ``optax.adam`` and its like: there is no bias correction, the second moment starts at
``tau^2`` and not at 0, and Yogi's second moment moves by the sign of its error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from fedtangent import pytrees
from fedtangent.checks import number
from fedtangent.federated.algorithms.common import Options, client_descent, train_and_average
from fedtangent.federated.algorithms.entry import Averaging, entry_of
from fedtangent.federated.local import Work
from fedtangent.federated.rates import Rate, check_rate
from fedtangent.federated.server import optax_server
from fedtangent.types import Algorithm, Array, Model, PyTree, Schedule, Server

Number = float | Array
SecondMoment = Callable[[Array, Array], Array]  # (v, squared pseudo-gradient) -> v


class Moments(NamedTuple):
    """First and second moment, shaped as the parameters."""

    first: PyTree  # m
    second: PyTree  # v


def _adaptive(
    rate: Number, beta_1: Number, tau: Number, initial: Number | None, second: SecondMoment
) -> optax.GradientTransformation:
    """``m = beta_1 m + (1 - beta_1) g``; ``v = second(v, g^2)``; the update is ``-rate m / (sqrt(v) + tau)``."""
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
    """FedAdam's server (Reddi et al., 2021, algorithm 2): ``v = beta_2 v + (1 - beta_2) g^2``."""

    def second(v: Array, squared: Array) -> Array:
        return jnp.asarray(beta_2, v.dtype) * v + jnp.asarray(1 - beta_2, v.dtype) * squared

    return _adaptive(rate, beta_1, tau, initial, second)


def yogi(
    rate: Number, beta_1: Number, beta_2: Number, tau: Number, initial: Number | None = None
) -> optax.GradientTransformation:
    """FedYogi's server (Reddi et al., 2021, algorithm 2): ``v -= (1 - beta_2) g^2 sign(v - g^2)``."""

    def second(v: Array, squared: Array) -> Array:
        return v - jnp.asarray(1 - beta_2, v.dtype) * squared * jnp.sign(v - squared)

    return _adaptive(rate, beta_1, tau, initial, second)


def adagrad(rate: Number, beta_1: Number, tau: Number, initial: Number | None = None) -> optax.GradientTransformation:
    """FedAdagrad's server (Reddi et al., 2021, algorithm 2): ``v += g^2``."""
    return _adaptive(rate, beta_1, tau, initial, jnp.add)


def heavy_ball(rate: Number, decay: Number, nesterov: bool = False) -> optax.GradientTransformation:
    """FedAvgM's server (Hsu et al., 2019, section 4.3): ``v = decay v + g``, the update is ``-rate v``.

    With ``nesterov`` the update is ``-rate (g + decay v)``.
    """

    def update(gradient: PyTree, v: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        v = pytrees.add(gradient, pytrees.scale(decay, v))
        ahead = pytrees.add(gradient, pytrees.scale(decay, v)) if nesterov else v
        return jax.tree.map(lambda leaf: jnp.asarray(-rate, leaf.dtype) * leaf, ahead), v

    return optax.GradientTransformation(pytrees.zeros_like, update)


# ---- the algorithms -----------------------------------------------------------------------------------------------


def _with_server(
    given: tuple[Model, Schedule, Rate, Work],
    options: Options,
    make: Callable[[Number], optax.GradientTransformation],
    name: str,
    default_rate: float,
) -> Algorithm:
    """FedAvg's clients with the server optimiser ``make(server_learning_rate)``."""
    options = cast(Options, {"server_learning_rate": default_rate, **options})

    def server(rate: Rate) -> Server:
        return optax_server(client_descent(rate, make))

    return train_and_average(name, *given, options, server=server)


class AdaptiveOptions(Options, total=False):
    """Options of servers with a second moment."""

    initial_second_moment: Number | None  # before the first round; tau^2 by default (the paper: at least that)


def _checked(
    make: Callable[..., optax.GradientTransformation], options: AdaptiveOptions, tau: Number, **betas: Number
) -> Callable[[Number], optax.GradientTransformation]:
    """``make`` with its numbers but for the rate; raises ``ValueError`` for those out of range."""
    initial = options.pop("initial_second_moment", None)
    for name, beta in betas.items():
        number(name, beta, at_least=0, below=1)
    check_rate("tau", tau)
    if initial is not None:
        number("initial_second_moment", initial, at_least=0)
    return partial(make, **betas, tau=tau, initial=initial)


def fed_adam(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    beta_1: Number = 0.9,
    beta_2: Number = 0.99,
    tau: Number = 1e-3,
    **options: Unpack[AdaptiveOptions],
) -> Algorithm:
    """FedAdam (Reddi et al., 2021, algorithm 2): the server steps by ``-eta m / (sqrt(v) + tau)``.

    ``m = beta_1 m + (1 - beta_1) d`` and ``v = beta_2 v + (1 - beta_2) d^2`` for the clients' mean pseudo-gradient d,
    without bias correction: it is not ``optax.adam``. The paper's beta, and its tau where it is not tuned.

    ``initial_second_moment`` is v before the first round, ``tau^2`` by default (the paper: at least that).
    ``server_learning_rate`` (eta) is 0.01 by default, since steps are of its order and not of the pseudo-gradient's;
    the paper tunes it. Clients are weighted by examples unless ``weighting="uniform"`` (the algorithm as printed).

    Raises ``ValueError`` for a beta outside [0, 1), a tau that is not positive and a negative initial moment.
    """
    make = _checked(adam, options, tau, beta_1=beta_1, beta_2=beta_2)
    return _with_server((model, schedule, client_learning_rate, work), options, make, "fed_adam", 0.01)


def fed_yogi(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    beta_1: Number = 0.9,
    beta_2: Number = 0.99,
    tau: Number = 1e-3,
    **options: Unpack[AdaptiveOptions],
) -> Algorithm:
    """FedYogi (Reddi et al., 2021, algorithm 2): FedAdam with ``v -= (1 - beta_2) d^2 sign(v - d^2)``.

    Arguments, defaults and errors are those of ``fed_adam``.
    """
    make = _checked(yogi, options, tau, beta_1=beta_1, beta_2=beta_2)
    return _with_server((model, schedule, client_learning_rate, work), options, make, "fed_yogi", 0.01)


def fed_adagrad(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    beta_1: Number = 0.0,
    tau: Number = 1e-3,
    **options: Unpack[AdaptiveOptions],
) -> Algorithm:
    """FedAdagrad (Reddi et al., 2021, algorithm 2): FedAdam with ``v += d^2``; no momentum by default.

    ``server_learning_rate`` is 0.1 by default; the other arguments and the errors are those of ``fed_adam``.
    """
    make = _checked(adagrad, options, tau, beta_1=beta_1)
    return _with_server((model, schedule, client_learning_rate, work), options, make, "fed_adagrad", 0.1)


def fed_avg_m(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    momentum: Number = 0.9,
    nesterov: bool = False,
    **options: Unpack[Options],
) -> Algorithm:
    """FedAvgM (Hsu et al., 2019, section 4.3): ``v = momentum v + d``, the server moves by ``-eta v``.

    d is the clients' mean pseudo-gradient and eta ``server_learning_rate``, 1 by default as in the paper; momentum 0
    is FedAvg. With ``nesterov`` the server moves by ``-eta (d + momentum v)``.

    Raises ``ValueError`` for a momentum outside [0, 1).
    """
    number("momentum", momentum, at_least=0, below=1)
    make = partial(heavy_ball, decay=momentum, nesterov=nesterov)
    return _with_server((model, schedule, client_learning_rate, work), options, make, "fed_avg_m", 1.0)


@dataclasses.dataclass(frozen=True)
class FedAdagradOptions(Averaging):
    """Options of an adaptive server."""

    tau: float = 1e-3
    """Degree of adaptivity: the server divides by the root of the second moment plus this."""


@dataclasses.dataclass(frozen=True)
class MomentsOptions(FedAdagradOptions):
    """Options of a server with two moments."""

    beta_1: float = 0.9
    """Decay of the server's first moment."""
    beta_2: float = 0.99
    """Decay of the server's second moment."""


@dataclasses.dataclass(frozen=True)
class FedAvgMOptions(Averaging):
    """Options of FedAvgM."""

    momentum: float = 0.9
    """Momentum of the server."""


_ADAPTS = "its server divides by what every parameter moved before, which no kernel knows; nearest is fed_avg_m"


def _entry(
    recipe: Callable[..., Algorithm], summary: str, options: type[Any], paper: str, server: str, rule: Any
) -> Any:
    parts = f"local SGD; mean; {server}"
    return entry_of(recipe, summary, options, papers=(paper,), parts=parts, inside=True, rule=rule)


ENTRIES = (
    _entry(
        fed_adam,
        "Adam at the server, as published (Reddi et al., 2021)",
        MomentsOptions,
        "reddi2021",
        "Adam as published",
        _ADAPTS,
    ),
    _entry(fed_yogi, "Yogi at the server (Reddi et al., 2021)", MomentsOptions, "reddi2021", "Yogi", _ADAPTS),
    _entry(
        fed_adagrad,
        "Adagrad at the server (Reddi et al., 2021)",
        FedAdagradOptions,
        "reddi2021",
        "Adagrad",
        _ADAPTS,
    ),
    _entry(
        fed_avg_m,
        "momentum at the server (Hsu et al., 2019)",
        FedAvgMOptions,
        "hsu2019",
        "momentum",
        lambda o: {"server_momentum": o.momentum},
    ),
)
