"""Learning rates and optimisers of clients and servers, and tests whether an optimiser is linear in the gradients.

A learning-rate schedule is a function of the round. An optimiser is an optax transformation, or a function from the
round to one. It is linear if T steps with gradients g_1 .. g_T move the parameters by ``-rate sum_t a_t g_t``, with
numbers a_t that do not depend on the gradients. SGD and momentum are (Wang et al., 2020, eq. 4 and 5).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from fedtangent._src import pytrees
from fedtangent._src.checks import has_hash, number, whole
from fedtangent._src.types import Array, PyTree

Value = TypeVar("Value")  # of a schedule: a rate or an optimiser
Rate: TypeAlias = float | Array | Callable[[Array], Array]
Optimizer: TypeAlias = optax.GradientTransformation | Callable[[Array], optax.GradientTransformation]

_STEPS, _TOLERANCE = 4, 1e-3  # an optimiser that is not linear is off by the order of 1
_LOCAL_STEPS, _SERVER_ROUNDS = 256, 20_000  # steps of a client, and of a server, in which a schedule inside would show
_FACTORS = (1e6, 1e-6)  # large and small, so that a clipping threshold shows


def staircase_decay(initial: Rate, factor: float = 0.99, every: int = 10) -> Callable[[Array], Array]:
    """Returns the learning-rate schedule ``initial * factor ** floor(round / every)``.

    It is the decay of the Fed-ensemble papers (erratum `fe2024.decay`).

    Args:
        initial: Rate of the first rounds, a number above 0.
        factor: Number in (0, 1] that the rate is multiplied by.
        every: Rounds between two decays.

    Raises:
        ValueError: A rate that is not a positive number, a factor outside (0, 1] or ``every`` below 1.
    """
    check_rate("initial", initial)
    if callable(initial):
        raise ValueError("initial: got a schedule, must be a number")
    number("factor", factor, above=0, at_most=1)
    whole("every", every)
    if factor == 1:
        return optax.constant_schedule(initial)
    decay = optax.exponential_decay(initial, int(every), factor, staircase=True)
    # Of a whole number optax computes in float32, also where everything else is float64.
    return lambda round_: decay(jnp.asarray(round_, float))


def check_rate(name: str, rate: Rate | np.number, num_rounds: int = 1) -> None:
    """Raises ``ValueError`` unless a rate is a number above 0, or a schedule that is at least 0 in every round.

    A schedule may begin at 0, as a warm-up does, or fall to it. A traced rate (of a sweep or a hypergradient) has no
    value to check, and passes.

    Args:
        name: Name of the argument, for the error message.
        rate: A number, or a function of the round.
        num_rounds: Rounds from 0 on in which a schedule is evaluated; of more than 500 rounds, 500 evenly spread ones.
    """
    if isinstance(rate, optax.GradientTransformation):
        raise ValueError(f"{name}: got an optax optimiser, must be a number or a schedule of the round")
    if not callable(rate):
        number(name, rate, above=0)
        return
    for round_ in np.unique(np.linspace(0, num_rounds - 1, min(num_rounds, 500)).astype(np.int32)):
        number(f"{name} in round {round_}", in_round(rate, round_), at_least=0)


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raises ``ValueError`` unless ``optimizer`` is an optax optimiser, or a function from the round to one.

    A function whose first parameter has "rate" in its name, such as ``optax.adam``, is refused.

    Args:
        name: Name of the argument, for the error message.
        optimizer: The value that the user passed.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        has_hash(name, optimizer)
        return
    parameters = list(inspect.signature(optimizer).parameters) if callable(optimizer) else []
    if not parameters or "rate" in parameters[0]:
        got = getattr(optimizer, "__name__", None) or repr(optimizer)
        raise ValueError(f"{name}: got {got:.60}, must be an optax optimiser such as optax.adam(1e-3)")


def rate_at(rate: Rate, round_: Array | np.integer | int) -> float | Array:
    """Returns the learning rate in a round, a scalar.

    Args:
        rate: A number or a schedule of the round.
        round_: Number of the round, from 0.
    """
    return in_round(rate, round_) if callable(rate) else rate


def in_round(schedule: Callable[[Array], Value], round_: ArrayLike) -> Value:
    """Returns the value of a schedule in a round, such as the learning rate.

    With 64-bit types the round is int64, so that optax computes in float64. In float32 the last digit of a rate would
    depend on how the schedule is compiled, and training and theory would use different rates.

    Args:
        schedule: A function of the round.
        round_: The round, a whole number [].
    """
    return schedule(jnp.asarray(round_, int))


class Sgd(optax.GradientTransformation):
    """Plain gradient descent as an optax optimiser with a ``rate``, with which ``Model.descend`` can take the steps."""

    rate: float | Array


def sgd(rate: Rate) -> Optimizer:
    """Builds gradient descent: an optax transformation or, for a schedule, a function from the round to one.

    The rate is rounded to each parameter's dtype first. So a constant schedule gives the same bits as the number, and
    float32 parameters stay in float32.

    Args:
        rate: A number, or a schedule of the round.
    """
    return (lambda round_: _descend(in_round(rate, round_))) if callable(rate) else _descend(rate)


def at_rate(make: Callable[[float | Array], optax.GradientTransformation], rate: Rate) -> Optimizer:
    """Returns the optimiser that ``make``, such as ``optax.adam``, builds for a rate.

    Args:
        make: A function from a rate to an optax optimiser.
        rate: A number, or a schedule of the round; with a schedule, a function from the round to an optimiser is
            returned.
    """
    return (lambda round_: make(in_round(rate, round_))) if callable(rate) else make(rate)


def at_round(optimizer: Optimizer, round_: Array | np.integer | int) -> optax.GradientTransformation:
    """Returns the optimiser to use in a round.

    Args:
        optimizer: An optax optimiser, or a function from the round to one whose state has the same shapes in every
            round.
        round_: Number of the round.
    """
    return optimizer if isinstance(optimizer, optax.GradientTransformation) else in_round(optimizer, round_)


def _descend(rate: float | Array) -> Sgd:
    def update(gradient: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda g: jnp.asarray(-rate, g.dtype) * g, gradient), state

    plain = Sgd(lambda params: optax.EmptyState(), update)
    plain.rate = rate
    return plain


def _moved(optimizer: optax.GradientTransformation, gradients: list[PyTree]) -> np.ndarray:
    """Runs an optimiser on parameters that are all 0.75 at the start, with one step for each of ``gradients``.

    Returns the sum of the steps with opposite sign (downhill), flattened to one array.
    """
    params = jax.tree.map(lambda g: jnp.full(g.shape, 0.75, g.dtype), gradients[0])
    state, moved = optimizer.init(params), pytrees.zeros_like(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params, moved = pytrees.add(params, updates), pytrees.subtract(moved, updates)
    return _flat(moved)


def _flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _answers(optimizer: optax.GradientTransformation, gradients: Array) -> Array:
    """Returns how far an optimiser moves a single number downhill in each of T steps, [T], with the T ``gradients``."""
    start = jnp.asarray(0.75, gradients.dtype)

    def step(carry: PyTree, gradient: Array) -> tuple[PyTree, Array]:
        number_, state = carry
        update, state = optimizer.update(gradient, state, number_)
        return (number_ + update, state), -update

    return jax.lax.scan(step, (start, optimizer.init(start)), gradients)[1]


def _coefficients(optimizer: optax.GradientTransformation) -> np.ndarray:
    """Returns how far an optimiser moves a number in four steps if one gradient is 1 and the other three are 0.

    In entry t of the result [4], the gradient of step t is the 1. For a linear optimiser the entry is ``rate a_t`` (see
    the module's docstring).
    """
    return np.asarray(jax.vmap(lambda impulse: _answers(optimizer, impulse))(jnp.eye(_STEPS))).sum(axis=1)


def _random(seed: int) -> list[PyTree]:
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (2, 3), "vector": (4,)}
    return [{name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()} for _ in range(_STEPS)]


def _scaled(factor: float, gradients: list[PyTree]) -> list[PyTree]:
    return [pytrees.scale(factor, g) for g in gradients]


def _differ(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Returns whether two displacements differ by more than 0.1 % of the largest entry of both.

    Numbers that are not finite count as different.
    """
    size = max(np.abs(actual).max(), np.abs(expected).max(), 1e-30)
    return not np.abs(actual - expected).max() <= _TOLERANCE * size


def check_linear(name: str, optimizer: Optimizer) -> None:
    """Raises ``ValueError`` unless an optimiser moves parameters by ``-sum_t a_t g_t`` for gradients g_1 .. g_T.

    The optimiser runs on random gradients, on multiples of them and on the sum of two sequences of gradients. Its
    movement must scale and add up likewise, and all parameters must share the same a_t, none negative and not all 0.
    ``optax.adam`` and clipping fail; so does weight decay, which pulls parameters to 0 and not to the start. A function
    from the round to an optimiser is tried in the first of the rounds 0, 1, 2, 4, .., 2^20 in which it moves, because a
    warm-up may start at rate 0. An optimiser with a traced rate passes untested.

    Args:
        name: Name of the argument, for the error message.
        optimizer: An optax optimiser, or a function from the round to one.
    """
    try:
        _try_linear(name, optimizer)
    except jax.errors.TracerArrayConversionError:
        return


@functools.lru_cache(maxsize=64)  # a recipe and every flow of its rule ask
def _try_linear(name: str, optimizer: Optimizer) -> None:
    with jax.ensure_compile_time_eval():
        one, two, rounds = _random(0), _random(1), [0, *(2**i for i in range(21))]
        in_rounds = (at_round(optimizer, jnp.int32(round_)) for round_ in rounds)
        if isinstance(optimizer, optax.GradientTransformation):
            tried = optimizer
        else:
            tried = next(
                (moving for moving in in_rounds if np.any(_coefficients(moving))), at_round(optimizer, jnp.int32(0))
            )
        first, second = _moved(tried, one), _moved(tried, two)
        scaled = [_differ(_moved(tried, _scaled(c, one)), c * first) for c in _FACTORS]
        together = _moved(tried, [pytrees.add(a, b) for a, b in zip(one, two, strict=True)])
        if any(scaled) or _differ(together, first + second):
            raise ValueError(
                f"{name}: got an optimiser that is not linear in the gradients, must be one that is: optax.sgd"
            )
        coefficients = _coefficients(tried)
        weighed = [a * _flat(g) for a, g in zip(coefficients, one, strict=True)]
        if _differ(first, np.sum(weighed, axis=0)):
            raise ValueError(f"{name}: got an optimiser that treats parameters differently, must treat all alike")
        if coefficients.min() < 0 or coefficients.max() == 0:
            raise ValueError(
                f"{name}: got an optimiser that does not move against the gradients, must be one that does: optax.sgd"
            )


def first_steps(optimizer: Optimizer, num_rounds: int) -> float | np.ndarray:
    """Returns how far an optimiser's first step goes for a gradient of 1: for ``optax.sgd(0.1, momentum=0.9)``, 0.1.

    Theory uses this length as the learning rate of a linear optimiser.

    Args:
        optimizer: An optax optimiser (returns one number), or a function from the round to one (returns [R]).
        num_rounds: Rounds R.

    Raises:
        ValueError: In some round the first local step is 0 and a later one is not.
    """

    rounds = 1 if isinstance(optimizer, optax.GradientTransformation) else num_rounds

    def lengths(round_: Array) -> Array:
        return _answers(at_round(optimizer, round_), jnp.ones(_LOCAL_STEPS))

    steps = np.asarray(jax.jit(jax.vmap(lengths))(jnp.arange(rounds, dtype=jnp.int32)))
    if np.any((steps[:, 0] == 0) & (steps.max(axis=1) > 0)):
        raise ValueError(
            "client_optimizer: got an optimiser whose first local step is 0 and whose later ones are not, must begin "
            "above 0: theory measures its steps by the first one"
        )
    return float(steps[0, 0]) if isinstance(optimizer, optax.GradientTransformation) else steps[:, 0]


def heavy_ball(name: str, optimizer: Optimizer) -> dict[str, float | bool]:
    """Finds the rate, momentum and Nesterov flag for which gradient descent with momentum equals ``optimizer``.

    They are computed from the optimiser's steps on a gradient of 1, and checked on 20,000 rounds of such gradients.

    Args:
        name: Name of the argument, for the error message.
        optimizer: An optax optimiser; a function from the round to an optimiser is refused.

    Returns:
        The fields ``server_learning_rate`` and ``server_momentum`` of ``theory.Rule``, and ``nesterov`` if it is True.

    Raises:
        ValueError: The optimiser is not linear in the gradients, changes from round to round, or is not gradient
            descent with momentum.
    """
    check_linear(name, optimizer)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"{name}: got a function of the round, must be an optax optimiser")
    with jax.ensure_compile_time_eval():
        ones, impulse = jnp.ones(_SERVER_ROUNDS), jnp.eye(1, _STEPS)[0]
        always, once = (np.asarray(_answers(optimizer, gradients)) for gradients in (ones, impulse))
    momentum = float(once[2] / once[1]) if once[1] else 0.0
    if 0 <= momentum < 1:
        for looks_ahead in (False, True):
            rate = float(once[0] / (1 + momentum) if looks_ahead else once[0])
            speed = np.cumsum(momentum ** np.arange(_SERVER_ROUNDS))  # of momentum's buffer under gradients of 1
            expected = rate * (1 + momentum * speed if looks_ahead else speed)
            if np.allclose(always, expected, rtol=_TOLERANCE, atol=0):
                ahead = {"nesterov": True} if looks_ahead and momentum else {}
                return {"server_learning_rate": rate, "server_momentum": momentum, **ahead}
    raise ValueError(
        f"{name}: got an optimiser that is not gradient descent at a constant rate, with or without momentum "
        "(optax.sgd(rate, momentum))"
    )


def unit_response(
    optimizer: optax.GradientTransformation, prox: float | Array, steps: Array, most: int | None, dtype: DTypeLike
) -> Array:
    """Returns how far an optimiser moves one number downhill, a scalar, when every gradient of the loss is 1.

    Args:
        optimizer: An optax optimiser that is linear in the gradients.
        prox: Strength mu of a proximal term, which pulls the number back to its start; 0 for none.
        steps: Number of steps, a traced whole number [].
        most: Upper bound of ``steps``, needed to differentiate the result in reverse mode; None if that is not needed.
        dtype: Floating type of the number.
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
