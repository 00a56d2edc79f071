"""A test that a user's algorithm keeps the laws of the simulator: properties that every run relies on.

>>> import fedtangent as ft
>>> laws = ft.testing.check_laws(ft.fed_avg, client_learning_rate=0.2)
>>> [law.name for law in laws if law.holds is None]
[]
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src.checks import shown
from fedtangent._src.comparison.followed import setting_of
from fedtangent._src.comparison.linear_models import linearised_verdict
from fedtangent._src.comparison.settings import Scale, exact_arithmetic
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.verdicts import EXACT
from fedtangent._src.data.examples import Examples
from fedtangent._src.engine import Checkpoints, Devices, Evaluation, simulate
from fedtangent._src.engine.run import examples_of
from fedtangent._src.federated.schedule import uniform_sampling
from fedtangent._src.models.dense import mlp
from fedtangent._src.types import (
    Algorithm,
    AnyArray,
    Array,
    Cohort,
    FederatedData,
    Key,
    Model,
    PyTree,
    Recipe,
    Schedule,
)

SIZES = (3, 5, 1, 4, 6, 2, 3)  # examples of each client
ROUNDS, SLOTS, SEED = 4, 4, 5
ROUNDING = 1e-10  # largest difference by rounding in float64, relative to the largest number of a state
MOVES = 1e-6  # smallest movement, relative to the largest number of a state, at which a law shows anything


class Law(NamedTuple):
    """A law, which is a property that every algorithm must have, and whether one algorithm has it.

    Attributes:
        name: Name of the law.
        holds: Whether the algorithm keeps the law; None if this was not checked.
        measured: The largest relative difference, or another number that should be at most ``allowed``.
        allowed: The largest ``measured`` with which the law holds.
        why: Reason why the law was not checked.
    """

    name: str
    holds: bool | None
    measured: float = math.nan
    allowed: float = math.nan
    why: str = ""


def check_laws(recipe: Recipe, *arguments: Any, exempt: Mapping[str, str] | None = None, **options: Any) -> list[Law]:
    """Checks that an algorithm keeps the laws that runs rely on, on seven small clients, in float64.

    A law is a property that every algorithm must have. These are the laws and their names:

    - "mapping", "order", "evaluation": the mapping of clients onto devices, the order of a round's clients, and how
      often a run is evaluated do not change the result;
    - "resume": a run that is stopped and then resumed ends with the same bits;
    - "absence": a client of weight 0 does not change the result, even if its data are not finite;
    - "traces": a run of more rounds traces and compiles nothing more;
    - "model": ``algorithm.on(model)``, called on the algorithm of another network, builds the same algorithm;
    - "rate 0": a run at ``client_learning_rate`` 0 changes no model;
    - "theory": linearised networks that the algorithm trains equal the closed form that its rule gives, and differ from
      the closed form of a rule that is 5 % off.

    Args:
        recipe: The function ``(model, schedule, ..)`` that builds the algorithm.
        arguments: Further arguments of ``recipe``, in order.
        exempt: Laws that the algorithm need not keep, with the reason.
        options: Further arguments of ``recipe``, by name.

    Returns:
        Each law with the measured number. Laws in ``exempt``, and those that cannot be checked, have ``holds`` None.

    Raises:
        AssertionError: A law is broken, or training moves no model; the message names every broken law.
        ValueError: An argument is of the wrong kind, ``options`` names the model or the schedule, or a name in
            ``exempt`` is no law.
    """
    if not callable(recipe) or isinstance(recipe, Algorithm):
        raise ValueError(f"recipe: got {shown(recipe)}, must be a function (model, schedule, ..) such as fed_avg")
    for name in ("model", "schedule"):
        if name in options:
            raise ValueError(f"{name}: got {shown(options[name])}, must be left out: the laws bring their own")
    exempt = {} if exempt is None else exempt
    if not isinstance(exempt, Mapping):
        raise ValueError(f"exempt: got {shown(exempt)}, must be a mapping from the name of a law to the reason")
    checks = {
        "mapping": _mapping,
        "order": _order,
        "evaluation": _evaluation,
        "resume": _resume,
        "absence": _absence,
        "traces": _traces,
        "model": _model,
        "rate 0": _rate_zero,
        "theory": _theory,
    }
    for name in exempt:
        if name not in checks:
            raise ValueError(f"exempt: got {name!r}, allowed are {', '.join(checks)}")
    with exact_arithmetic():
        case = _case_of(recipe, arguments, options)
        moved = _apart(case.end, case.algorithm.init(SEED, len(SIZES)))
        if not moved > MOVES:
            raise AssertionError(
                f"{case.algorithm.name}: training moves no model (by {moved:.3g}), so no law can be tested"
            )
        laws = [Law(name, None, why=exempt[name]) if name in exempt else check(case) for name, check in checks.items()]
    broken = [f"{law.name}: {law.measured:.3g}, must be at most {law.allowed:g}" for law in laws if law.holds is False]
    if broken:
        raise AssertionError(f"{case.algorithm.name} breaks {len(broken)} laws: {'; '.join(broken)}")
    return laws


class _Case(NamedTuple):
    """A recipe with its arguments, and a simulated run of its algorithm with which the laws compare other runs.

    Attributes:
        recipe, arguments, options: The recipe, and its arguments after model and schedule, in order and by name.
        model, algorithm: The small network, and the algorithm that the recipe builds for it.
        examples, data: The examples of seven clients, and the same training examples in float64.
        end: State after the run.
    """

    recipe: Recipe
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    model: Model
    algorithm: Algorithm
    examples: Examples
    data: FederatedData
    end: PyTree = None

    def build(self, model: Model | None = None, schedule: Schedule | None = None, **changes: Any) -> Algorithm:
        """Builds the recipe's algorithm with ``changes`` of its options; None keeps the case's model or schedule."""
        schedule = self.algorithm.schedule if schedule is None else schedule
        model = self.model if model is None else model
        return self.recipe(model, schedule, *self.arguments, **{**self.options, **changes})

    def run(self, algorithm: Algorithm | None = None, rounds: int = ROUNDS, **settings: Any) -> PyTree:
        """Simulates ``algorithm``, by default the case's, and returns the state after ``rounds`` rounds.

        ``settings`` are further arguments of ``simulate``.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        settings = {"data": self.data, "devices": Devices("scan"), "seed": SEED, **settings}
        return simulate(algorithm, num_rounds=rounds, **settings).state


def _case_of(recipe: Recipe, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> _Case:
    """Builds a recipe's algorithm for a small network, draws examples on seven clients, and simulates it once."""
    model = mlp(3, 2, (8,), "erf", dtype=jnp.float64)
    algorithm = recipe(model, uniform_sampling(len(SIZES), SLOTS), *arguments, **options)
    rng, ends = np.random.default_rng(0), np.cumsum(SIZES)
    x, y = rng.normal(size=(ends[-1] + 3, 3)), rng.normal(size=(ends[-1] + 3, 2))
    clients = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    examples = examples_of(algorithm, (x[: ends[-1]], y[: ends[-1]], x[ends[-1] :], y[ends[-1] :]), clients)
    data = examples.data._replace(x=examples.data.x.astype(jnp.float64), y=examples.data.y.astype(jnp.float64))
    case = _Case(recipe, arguments, options, model, algorithm, examples, data)
    return case._replace(end=case.run())


def _numbers(state: PyTree) -> list[np.ndarray]:
    """Returns the numeric arrays of a run's state, without random keys and without the state of the schedule."""
    parts = (state.server, state.client, state.channel)
    leaves = [leaf for leaf in jax.tree.leaves(parts) if jnp.issubdtype(leaf.dtype, jnp.number)]
    return [np.asarray(leaf, np.float64) for leaf in leaves]


def _apart(one: PyTree, other: PyTree) -> float:
    """Returns the largest difference of two states' ``_numbers``, relative to the largest in ``other``; inf for NaN."""
    pairs = list(zip(_numbers(one), _numbers(other), strict=True))
    size = max((float(np.max(np.abs(b), initial=0.0)) for _, b in pairs), default=0.0)
    with np.errstate(invalid="ignore"):
        apart = max((float(np.max(np.abs(a - b), initial=0.0)) for a, b in pairs), default=0.0) / max(size, 1e-300)
    return apart if math.isfinite(apart) else math.inf


def _law(name: str, measured: float, allowed: float) -> Law:
    return Law(name, measured <= allowed, measured, allowed)


def _mapping(case: _Case) -> Law:
    return _law("mapping", _apart(case.end, case.run(devices=Devices("vmap"))), ROUNDING)


def _order(case: _Case) -> Law:
    schedule = case.algorithm.schedule
    order = jnp.asarray([2, 0, 3, 1])

    def sample(key: Key, state: PyTree, round_: Array) -> tuple[Cohort, PyTree]:
        cohort, state = schedule.sample(key, state, round_)
        return jax.tree.map(lambda leaf: leaf[order], cohort), state

    other = case.build(schedule=schedule._replace(sample=sample))
    return _law("order", _apart(case.end, case.run(other)), ROUNDING)


def _evaluation(case: _Case) -> Law:
    often = case.run(evaluation=Evaluation(1, lambda algorithm, state: {}))
    return _law("evaluation", _apart(case.end, often), 0.0)


def _resume(case: _Case) -> Law:
    with tempfile.TemporaryDirectory() as folder:
        case.run(rounds=ROUNDS // 2, checkpoints=Checkpoints(folder))
        resumed = case.run(checkpoints=Checkpoints(folder, resume=True))
    return _law("resume", _apart(case.end, resumed), 0.0)


def _absence(case: _Case) -> Law:
    """Compares two runs in which client 4 always has weight 0: one with its data, one with NaN in their place."""
    schedule = case.algorithm.schedule

    def sample(key: Key, state: PyTree, round_: Array) -> tuple[Cohort, PyTree]:
        cohort, state = schedule.sample(key, state, round_)
        return cohort._replace(weight=jnp.where(cohort.client == 4, 0.0, cohort.weight)), state

    algorithm = case.build(schedule=schedule._replace(sample=sample))
    data, rows = case.data, case.examples.clients.client(4)
    broken = data._replace(x=data.x.at[rows].set(jnp.nan), y=data.y.at[rows].set(jnp.nan))
    ends = [case.run(algorithm, data=either, devices=Devices("vmap")) for either in (data, broken)]
    return _law("absence", _apart(*ends), ROUNDING)


def _traces(case: _Case) -> Law:
    calls: list[int] = []

    def apply(params: PyTree, x: Shaped[AnyArray, "n ..."]) -> Float[Array, "n C"]:
        calls.append(1)
        return case.model.apply(params, x)

    algorithm = case.build(case.model._replace(apply=apply))
    case.run(algorithm)
    case.run(algorithm, 2)  # traces the shapes of a message, for the bytes
    before = len(calls)
    case.run(algorithm, 3)
    few = len(calls) - before
    case.run(algorithm, 11)
    return _law("traces", float(len(calls) - before - 2 * few), 0.0)


def _model(case: _Case) -> Law:
    if case.algorithm.composition.rebuild is None:
        return Law("model", None, why="its recipe is not marked with fedtangent.recipe")
    again = case.build(mlp(3, 2, (4,), dtype=jnp.float64)).on(case.model)
    return _law("model", _apart(case.end, case.run(again)), 0.0)


def _rate_zero(case: _Case) -> Law:
    if "client_learning_rate" not in case.options:
        return Law("rate 0", None, why="it was given no client_learning_rate by name")
    still = case.build(client_learning_rate=lambda round_: 0.0 * jnp.asarray(round_, float))
    if still.params is None:
        return Law("rate 0", None, why="it has no global models")
    ends = [still.params(state) for state in (case.run(still), still.init(SEED, len(SIZES)))]
    apart = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, ends), strict=True)]
    return _law("rate 0", max(apart), ROUNDING)


def _theory(case: _Case) -> Law:
    rule = case.algorithm.rule
    if isinstance(rule, str):
        return Law("theory", None, why=rule)
    if case.algorithm.composition.rebuild is None:
        return Law("theory", None, why="its recipe is not marked with fedtangent.recipe")
    setting = setting_of(case.algorithm, case.examples, Scale((1,), 1, ROUNDS), SEED)
    if np.any(setting.followed.weight_decay):
        return Law("theory", None, why="weight decay needs a homogeneous network, which that of the laws is not")
    verdict = linearised_verdict(setting, cohorts(setting))
    return Law("theory", bool(verdict.passed), float(verdict.measured), EXACT)
