"""FedNova: clients with more local steps do not pull the mean towards them.

It needs local optimisers that are linear in the gradients. After T steps with gradients g_1 .. g_T such an optimiser
has moved by ``-rate sum_t a_t g_t`` with numbers a_t of its own (Wang et al., 2020, eq. 4 and 5: SGD, momentum,
proximal SGD). This file tells which are, and how far they go for a unit gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedtangent import pytrees
from fedtangent.checks import number
from fedtangent.federated.algorithms.common import Options, client_descent, train_and_average
from fedtangent.federated.algorithms.entry import TRAINED, Averaging, Laws, entry_of
from fedtangent.federated.local import Posed, Work, is_zero, proximal
from fedtangent.federated.rates import Rate, at_round, check_rate, rate_at
from fedtangent.types import Algorithm, Array, Client, Model, PyTree, RoundInfo, Schedule, Server


class Normalised(NamedTuple):
    """A FedNova message: the client's update divided by its normaliser, and the normaliser."""

    direction: PyTree
    normaliser: Array  # []


class Plain(NamedTuple):
    """A server that remembers its model only."""

    params: PyTree


def normalised_server(tau_eff: Rate | None, rate: Rate) -> Server:
    """FedNova (Wang et al., 2020, eq. 6): ``x -= rate tau_eff sum_i p_i d_i``; ``info["tau_eff"]`` says what it was.

    ``tau_eff=None`` is the mean normaliser ``sum_i p_i a_i`` (section 4 of the paper).
    """

    def update(state: Plain, mean: Normalised, info: RoundInfo) -> tuple[Plain, dict[str, Array]]:
        steps = mean.normaliser if tau_eff is None else jnp.asarray(rate_at(tau_eff, info.round), mean.normaliser.dtype)
        step = pytrees.scale(rate_at(rate, info.round) * steps, mean.direction)
        return Plain(pytrees.subtract(state.params, step)), {"tau_eff": steps}

    return Server(init=Plain, broadcast=lambda state: state.params, params=lambda state: state.params, update=update)


def fed_nova(
    model: Model,
    schedule: Schedule,
    *,
    client_learning_rate: Rate,
    work: Work,
    mu: float | Array = 0.0,
    tau_eff: Rate | None = None,
    **options: Unpack[Options],
) -> Algorithm:
    """FedNova (Wang et al., 2020, eq. 6 and 7): clients with more local steps do not pull the mean towards them.

    A client sends ``d_i = (x - x_i) / a_i`` and its normaliser a_i, which is how far, in units of the rate, its own
    optimiser moves on unit gradients in its own number of steps. That is the paper's ``|a_i|_1`` (the number of steps
    for SGD; its sections 3 and 4 for momentum and the proximal term), as long as no gradient counts negatively. The
    server takes ``x -= server_learning_rate tau_eff sum_i p_i d_i``.

    Args:
        mu: proximal term ``mu / 2 |w - w_server|^2`` of the local objective.
        tau_eff: effective number of local steps, possibly a schedule of the round; by default ``sum_i p_i a_i``.
            ``info["tau_eff"]`` [K] reports it.

    ``client_optimizer`` may be any that is linear in the gradients (SGD, momentum), tried out here. Raises
    ``ValueError`` for one that is not (``optax.adam``), a negative mu, and ``mu * client_learning_rate`` from 1 on.
    """
    number("mu", mu, at_least=0)
    check_rate("client_learning_rate", client_learning_rate)
    number("mu * client_learning_rate", mu * rate_at(client_learning_rate, jnp.int32(0)), at_least=0, below=1)
    if tau_eff is not None:
        check_rate("tau_eff", tau_eff)
    make = options.get("client_optimizer")
    if make is not None:
        check_linear("client_optimizer", make)
    descent = client_descent(client_learning_rate, make)

    def normaliser(steps: Array, client: Client, dtype: jnp.dtype) -> Array:
        if make is None and is_zero(mu):
            return jnp.maximum(steps, 1).astype(dtype)
        most = most_steps(work, client.rows.shape[0]) if work.differentiable else None
        moved = unit_response(at_round(descent, client.round), mu, jnp.maximum(steps, 1), most, dtype)
        return moved / jnp.asarray(rate_at(client_learning_rate, client.round), dtype)

    def answer(
        broadcast: PyTree, state: PyTree, params: PyTree, steps: Array, client: Client
    ) -> tuple[Normalised, PyTree]:
        own = normaliser(steps, client, _precision(params))
        return Normalised(pytrees.scale(1 / own, pytrees.subtract(broadcast, params)), own), state

    message = lambda params: Normalised(params, jnp.zeros((), _precision(params)))  # noqa: E731
    local = Posed(pose=proximal(mu), answer=answer, message=message)
    server = partial(normalised_server, tau_eff)
    return train_and_average(
        "fed_nova", model, schedule, client_learning_rate, work, options, server=server, local=local
    )


def _precision(params: PyTree) -> jnp.dtype:
    return jnp.result_type(*jax.tree.leaves(params), jnp.float32)


# ---- optimisers that are linear in the gradients ------------------------------------------------------------------

Make = Callable[[float | Array], optax.GradientTransformation]

_RATE, _STEPS, _TOLERANCE = 0.5, 4, 1e-3  # an optimiser that is not linear is off by the order of 1
_FACTORS = (1e6, 1e-6)  # large and small, so that a clipping threshold shows


def _moved(optimizer: optax.GradientTransformation, gradients: list[PyTree]) -> np.ndarray:
    """Minus the sum of the updates for these gradients, flattened; parameters start from a constant other than 0."""
    params = jax.tree.map(lambda g: jnp.full(g.shape, 0.75, g.dtype), gradients[0])
    state, moved = optimizer.init(params), pytrees.zeros_like(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params, moved = pytrees.add(params, updates), pytrees.subtract(moved, updates)
    return _flat(moved)


def _flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _coefficients(optimizer: optax.GradientTransformation, like: PyTree) -> list[float]:
    """The displacement, of one parameter, for a unit gradient in one step alone: rate times a_1 .. a_T."""
    zeros, ones = (jax.tree.map(fill, like) for fill in (jnp.zeros_like, jnp.ones_like))
    impulses = [[ones if t == s else zeros for t in range(_STEPS)] for s in range(_STEPS)]
    return [float(_moved(optimizer, impulse)[0]) for impulse in impulses]


def _random(seed: int) -> list[PyTree]:
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (2, 3), "vector": (4,)}
    return [{name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()} for _ in range(_STEPS)]


def _scaled(factor: float, gradients: list[PyTree]) -> list[PyTree]:
    return [pytrees.scale(factor, g) for g in gradients]


def _differ(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two displacements differ, relative to the larger; one that is not finite does."""
    size = max(np.abs(found).max(), np.abs(expected).max(), 1e-30)
    return not np.abs(found - expected).max() <= _TOLERANCE * size


def check_linear(name: str, make: Make) -> None:
    """Raise ``ValueError`` unless the optimiser ``make(rate)`` moves by ``-rate sum_t a_t g_t``.

    Tried on random gradients: scaled ones and a sum must move it accordingly (superposition), and every parameter must
    have the same a_t, none negative. ``optax.adam``, clipping and weight decay fail (it pulls to 0, not the start).
    """
    with jax.ensure_compile_time_eval():
        optimizer, one, two = make(_RATE), _random(0), _random(1)
        first, second = _moved(optimizer, one), _moved(optimizer, two)
        scaled = [_differ(_moved(optimizer, _scaled(c, one)), c * first) for c in _FACTORS]
        together = _moved(optimizer, [pytrees.add(a, b) for a, b in zip(one, two, strict=True)])
        if any(scaled) or _differ(together, first + second):
            raise ValueError(f"{name}: got an optimiser that is not linear in the gradients, as optax.sgd is")
        coefficients = _coefficients(optimizer, one[0])
        weighed = [a * _flat(g) for a, g in zip(coefficients, one, strict=True)]
        if _differ(first, np.sum(weighed, axis=0)):
            raise ValueError(f"{name}: got an optimiser that treats parameters differently, must treat all alike")
        if min(coefficients) < 0 or max(coefficients) == 0:
            raise ValueError(f"{name}: got an optimiser that does not move against the gradients, as optax.sgd does")


def check_plain(name: str, make: Make) -> None:
    """Raise ``ValueError`` unless every step of the optimiser ``make(rate)`` is ``-rate g``, of the first four."""
    with jax.ensure_compile_time_eval():
        for gradients in (_random(0), *(_scaled(c, _random(1)) for c in _FACTORS)):
            steps = [_moved(make(_RATE), gradients[: t + 1]) for t in range(_STEPS)]
            summed = _RATE * np.cumsum([_flat(g) for g in gradients], axis=0)
            if any(_differ(*pair) for pair in zip(steps, summed, strict=True)):
                raise ValueError(f"{name}: got an optimiser other than plain SGD, must be optax.sgd or None")


def unit_response(
    optimizer: optax.GradientTransformation, prox: float | Array, steps: Array, most: int | None, dtype: jnp.dtype
) -> Array:
    """How far ``optimizer`` moves, downhill, in ``steps`` steps with gradient 1 and a proximal pull to the start, [].

    ``most`` makes the loop static, of so many steps, as reverse-mode differentiation needs; None: of dynamic length.
    """
    start = jnp.zeros((), dtype)

    def step(t: Array, carry: PyTree) -> PyTree:
        moved, state = carry
        updates, state = optimizer.update(1 + jnp.asarray(prox, dtype) * moved, state, moved)
        return optax.apply_updates(moved, updates), state

    def maybe(carry: PyTree, t: Array) -> tuple[PyTree, None]:
        return pytrees.where(t < steps, step(t, carry), carry), None

    carry = (start, optimizer.init(start))
    if most is None:
        return -jax.lax.fori_loop(0, steps, step, carry)[0]
    return -jax.lax.scan(maybe, carry, jnp.arange(most))[0][0]


def most_steps(work: Work, max_size: int) -> int:
    """The most local steps that any client makes, ``max_size`` being the largest client's number of examples."""
    if work.steps is not None:
        return work.steps
    return (work.epochs or 0) * (1 if work.batch_size is None else -(-max_size // min(work.batch_size, max_size)))


@dataclasses.dataclass(frozen=True)
class FedNovaOptions(Averaging):
    """Options of FedNova."""

    mu: float = 0.0
    """Strength of the proximal term."""


ENTRIES = (
    entry_of(
        fed_nova,
        "normalised averaging of unequal work (Wang et al., 2020)",
        FedNovaOptions,
        papers=("wang2020",),
        parts="local SGD, normalised; mean; effective steps",
        inside=True,
        rule=lambda o: {"algorithm": "fed_nova", "mu": o.mu},
        laws=Laws({**TRAINED, "mu": 0.3, "client_optimizer": partial(optax.sgd, momentum=0.5)}),
    ),
)
