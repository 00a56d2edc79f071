"""Hypergradients: derivatives of a run's final loss, or another objective, by hyper-parameters such as learning rates.

The whole run is differentiated in reverse mode, through every round and local step. The backward pass computes each
round again when it reaches it (rematerialisation), so that memory does not grow with the local steps of all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedtangent._src.checks import choice, whole
from fedtangent._src.engine.clients import Devices
from fedtangent._src.engine.sweeps import Build, single_device_engine
from fedtangent._src.types import Algorithm, Array, Engine, FederatedData, Key, PyTree

REMAT = ("none", "round", "sqrt")

Objective = Callable[[Algorithm, PyTree], Array]  # (algorithm, final state) -> scalar
FinalObjective = Callable[[dict[str, Array]], Array]  # values -> the objective after the last round


class Hypergradient(NamedTuple):
    """The value of an objective after a run, and its derivative by each hyper-parameter, by name; all are scalars."""

    value: Array
    gradient: dict[str, Array]


def final_objective(
    build: Build,
    data: FederatedData,
    num_rounds: int,
    seed: int | Key,
    objective: Objective,
    *,
    devices: Devices = Devices(),
    remat: str = "round",
    last: int | None = None,
) -> FinalObjective:
    """Builds the function from a dictionary of hyper-parameters to a run's final objective.

    ``jax.grad`` and ``jax.jit`` take this function.

    Args:
        build: Function that builds the algorithm from the hyper-parameters, passed as keyword arguments: traced scalars
            such as rates and mu. Its local work must be ``Work(..., differentiable=True)``.
        data: Training examples of all clients.
        num_rounds: Rounds R.
        seed: Seed or key of the run.
        objective: ``(algorithm, final state) -> scalar``, for instance the validation loss.
        devices: Mapping of clients onto one device (not ``sharded``).
        remat: Values that are stored for the backward pass, besides the local steps of one round. "none": all local
            steps of all rounds. "round": the state before each round; every round is computed twice. "sqrt": the states
            before about sqrt(R) stretches of as many rounds; every round is computed three times.
        last: Number of last rounds through which to differentiate; the state before them counts as constant. None for
            all rounds.

    Raises:
        ValueError: A number of rounds out of range, an unknown name of ``remat`` or of a mapping, or ``sharded``.
    """
    whole("num_rounds", num_rounds)
    choice("remat", remat, REMAT)
    engine = single_device_engine(data, devices.mapping)
    through = num_rounds if last is None else whole("last", last, 1, num_rounds)

    def run(values: dict[str, Array]) -> Array:
        algorithm = build(**values)
        state = algorithm.init(seed, data.num_clients)
        if through < num_rounds:
            constant = build(**jax.lax.stop_gradient(values))
            state = jax.lax.fori_loop(
                0, num_rounds - through, lambda _, before: constant.step(before, data, engine)[0], state
            )
            state = jax.lax.stop_gradient(state)
        return objective(algorithm, _rounds(algorithm, engine, data, through, remat, state))

    return run


def hypergradient(
    build: Build,
    data: FederatedData,
    num_rounds: int,
    seed: int | Key,
    values: Mapping[str, float],
    objective: Objective,
    **options: Any,
) -> Hypergradient:
    """Computes an objective after a simulated run, and its derivative by each hyper-parameter in ``values``.

    If the objective is only piecewise smooth in a value (a ReLU changes sides), this is the derivative of the piece.

    Args:
        build, data, num_rounds, seed, objective: As in ``final_objective``.
        values: Hyper-parameters at which to differentiate; ``build`` first checks them as plain numbers.
        options: Further arguments of ``final_objective``.

    Raises:
        ValueError: A bad argument, or local work that is not differentiable.
    """
    final = final_objective(build, data, num_rounds, seed, objective, **options)
    engine = single_device_engine(data, options.get("devices", Devices()).mapping)
    build(**values).cost(data, engine)  # refuses data that do not fit the model
    scalars = {name: jnp.asarray(float(value)) for name, value in values.items()}
    try:
        return Hypergradient(*jax.jit(jax.value_and_grad(final))(scalars))
    except ValueError as error:
        if "Reverse-mode" not in str(error):
            raise
        raise ValueError(
            "build: returned an algorithm that JAX cannot differentiate, must train by Work(..., differentiable=True)"
        ) from error


def _rounds(
    algorithm: Algorithm, engine: Engine, data: FederatedData, num_rounds: int, remat: str, state: PyTree
) -> PyTree:
    """Computes ``num_rounds`` rounds from ``state`` in a form that JAX can differentiate; returns the state after them.

    ``remat``, "none", "round" or "sqrt", chooses the states that are stored for the backward pass (see
    ``final_objective``).
    """

    def one(state: PyTree, _: None) -> tuple[PyTree, None]:
        return algorithm.step(state, data, engine)[0], None

    step = one if remat == "none" else jax.checkpoint(one, prevent_cse=False)

    def stretch(state: PyTree, length: int) -> PyTree:
        return jax.lax.scan(step, state, None, length=length)[0]

    if remat != "sqrt":
        return stretch(state, num_rounds)
    inner = math.isqrt(num_rounds)
    outer, rest = divmod(num_rounds, inner)
    segment = jax.checkpoint(lambda state, _: (stretch(state, inner), None), prevent_cse=False)
    return stretch(jax.lax.scan(segment, state, None, length=outer)[0], rest)
