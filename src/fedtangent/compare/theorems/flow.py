"""The exact federated flow: linear models trained by the simulator equal it, networks come nearer with their width.

Every option of the algorithms is one entry of ``OPTIONS``: how the simulator trains with it, what ``federated_flow`` is
told, and what a theory that ignores it would be told instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import data
from fedtangent.compare import cases
from fedtangent.compare.statistics import relative_errors
from fedtangent.compare.theorems import TheoremCheck
from fedtangent.compare.theorems._options import NUM_CLIENTS, OPTIONS, Option, every_client
from fedtangent.compare.verdicts import EXACT, Verdict, exact_verdict, slope_verdict
from fedtangent.data import partition
from fedtangent.engine.run import predict, simulate
from fedtangent.federated.compose import drawn_cohorts
from fedtangent.federated.local import Work
from fedtangent.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent.models.dense import mlp
from fedtangent.models.linear import rbf_linear
from fedtangent.theory import Flow, Rule, federated_flow
from fedtangent.types import Model, Partition

THEOREM = "federated flow (FE-2021 section 9.2, exact)"
LOCAL_STEPS = 4
SLOWER = 0.95  # a rate that is wrong by 5 %


@dataclasses.dataclass(frozen=True)
class Case:
    """What every option is tried on: data on unequal clients, a model of each width, and rates."""

    x_train: np.ndarray  # [n, d]
    y_train: np.ndarray  # [n, C]
    x_test: np.ndarray  # [m, d]
    partition: Partition
    model: Callable[[int], Model]
    learning_rate: float
    num_rounds: int
    seed: int


class Sizes(NamedTuple):
    """How large the checks are run."""

    widths: tuple[int, ...]
    networks: int  # of every option at every width, at least
    num_rounds: int
    linear_rounds: int


SIZES = {
    "default": Sizes((128, 512, 2048), 16, 10, 30),
    "large": Sizes((128, 256, 512, 1024, 2048, 4096), 30, 20, 300),
}


def linear_case(seed: int, num_rounds: int) -> Case:
    """Two outputs on scalar inputs, 24 examples on 5 unequal clients; 40 radial basis functions with linear weights."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (24, 1))
    y = np.concatenate([np.sin(2 * np.pi * x), np.cos(3 * x)], axis=1) + 0.2 * rng.standard_normal((24, 2))
    model = rbf_linear(40, bandwidth=0.2, seed=seed, output_size=2, dtype=jnp.float64)
    return _with_rate(
        Case(x, y, np.linspace(-1, 1, 15)[:, None], _clients(24, seed), lambda _: model, 0.0, num_rounds, seed)
    )


def network_case(seed: int, num_rounds: int) -> Case:
    """24 digits, three of the outputs, on 5 unequal clients; ReLU networks of one hidden layer."""
    whole = cases.digits(None, "smoke", seed)
    inputs = whole.x_train.shape[1]

    def model(width: int) -> Model:
        return mlp(inputs, 3, widths=(width,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)

    found = Case(
        whole.x_train[:24], whole.y_train[:24, :3], whole.x_test[:20], _clients(24, seed), model, 0.0, num_rounds, seed
    )
    return _with_rate(found)


def _clients(examples: int, seed: int) -> Partition:
    return partition.quantity_skew(examples, NUM_CLIENTS, alpha=2.0, seed=seed, min_size=2)


def _with_rate(case: Case) -> Case:
    """Half the largest stable step of any client."""
    theta = _blocks(case).ntk_train
    own = [case.partition.client(i) for i in range(NUM_CLIENTS)]
    return dataclasses.replace(
        case, learning_rate=1 / max(float(np.linalg.eigvalsh(theta[np.ix_(i, i)])[-1]) / len(i) for i in own)
    )


def _blocks(case: Case) -> KernelBlocks:
    kernel = case.model(1).kernel
    assert kernel is not None
    return kernel_blocks(kernel, case.x_train, case.x_test)


def run(option: Option, case: Case, width: int, draws: int, rounds_apart: int) -> tuple[tuple[int, ...], np.ndarray]:
    """The option simulated: evaluated rounds r, and outputs at training and test points, [r, K, E, n + m, C]."""
    algorithm = option.recipe(
        case.model(width),
        option.schedule(),
        client_learning_rate=case.learning_rate,
        work=Work(steps=LOCAL_STEPS),
        **option.simulated,
    )
    held = data.federated_data(case.x_train, case.y_train, case.partition, dtype=jnp.float64)
    x = jnp.asarray(np.concatenate([case.x_train, case.x_test]))
    seen = []
    rounds: tuple[int, ...] = ()
    for draw in range(draws):
        history = simulate(
            algorithm,
            held,
            case.num_rounds,
            seed=case.seed,
            mapping="scan",
            evaluate_every=rounds_apart,
            evaluate=lambda state: {"outputs": np.asarray(predict(algorithm, state, x).members)},
            init_key=jax.random.fold_in(jax.random.key(case.seed + 1), draw),
        ).history
        rounds = tuple(e.round for e in history.evaluations)
        seen.append(np.stack([e.metrics["outputs"] for e in history.evaluations]))
    return rounds, np.stack(seen, axis=2)


def flow_of(option: Option, case: Case, blocks: KernelBlocks, **changes: Any) -> Flow:
    """What theory says of the option; ``changes`` make it wrong."""
    plan = option.schedule()
    weighting = "uniform" if changes.pop("uniform", option.uniform) else "examples"
    cohorts = drawn_cohorts(changes.pop("plan", plan), case.partition, case.num_rounds, case.seed, weighting)
    given = {"local_steps": LOCAL_STEPS, "learning_rate": case.learning_rate, **option.predicted, **changes}
    return federated_flow(blocks, case.y_train, case.partition, cohorts, Rule(**given), num_models=plan.num_models)


def wrong_flows(option: Option, case: Case, blocks: KernelBlocks) -> dict[str, Flow]:
    """Wrong theories of the option, the one that ignores it first."""
    wrong: dict[str, dict[str, Any]] = {}
    if option.ignored is None:
        wrong["schedule ignored"] = {"plan": every_client(option.schedule().num_models)}
    else:
        wrong["local steps ignored" if "local_steps" in option.ignored else "option ignored"] = option.ignored
    wrong["one local step less"] = {"local_steps": LOCAL_STEPS - 1}
    wrong[f"client rate x {SLOWER}"] = {"learning_rate": SLOWER * case.learning_rate}
    return {name: flow_of(option, case, blocks, **changes) for name, changes in wrong.items()}


def errors(flow: Flow, rounds: tuple[int, ...], seen: np.ndarray, num_train: int) -> np.ndarray:
    """Relative errors of every network at every round to the flow from its own initial function, [r, K, E].

    Relative to how far the flow has moved the function at the test points.
    """
    train, test = seen[..., :num_train, :], seen[..., num_train:, :]
    own = [np.asarray(flow.predict(train[0, :, e], test[0, :, e], rounds)) for e in range(seen.shape[2])]
    predicted = np.stack(own, axis=2)
    return relative_errors(predicted, test, predicted[-1:] - predicted[:1])


def exact(option: Option, case: Case) -> Verdict:
    """The linear model under ``option`` against the flow, at every round, to ``EXACT``."""
    blocks = _blocks(case)
    rounds, seen = run(option, case, 1, 2, 1)
    wrong = wrong_flows(option, case, blocks)
    worst = {name: float(np.max(errors(f, rounds, seen, len(case.x_train)))) for name, f in wrong.items()}
    right = float(np.max(errors(flow_of(option, case, blocks), rounds, seen, len(case.x_train))))
    return exact_verdict("linear", option.name, right, worst, EXACT)


def slope(option: Option, case: Case, widths: tuple[int, ...], num_networks: int) -> Verdict:
    """Networks under ``option``: the error to the flow at the last round against the width."""
    blocks = _blocks(case)
    right = flow_of(option, case, blocks)
    name, wrong = next(iter(wrong_flows(option, case, blocks).items()))
    draws = -(-num_networks // option.schedule().num_models)
    runs = [run(option, case, width, draws, case.num_rounds) for width in widths]
    found, missed = (
        [errors(flow, rounds, seen, len(case.x_train))[-1] for rounds, seen in runs] for flow in (right, wrong)
    )
    return slope_verdict(option.name, widths, found, name, missed)


def checks(scale: str, seed: int) -> list[TheoremCheck]:
    """Every option: equality for a linear model, and the slope -1/2 of networks' errors in their width."""
    size = SIZES[scale]
    linear, network = linear_case(seed, size.linear_rounds), network_case(seed, size.num_rounds)
    found = []
    for option in OPTIONS:
        verdict = exact(option, linear)
        sizes = f"n = 24, N = 5, {linear.num_rounds} rounds of {LOCAL_STEPS} steps"
        found.append(_row(verdict, f"linear model = flow, every round: {option.name}", sizes))
    for option in (o for o in OPTIONS if o.lazy):
        verdict = slope(option, network, size.widths, size.networks)
        sizes = (
            f"widths {size.widths[0]} to {size.widths[-1]}, {size.networks} networks each, {network.num_rounds} rounds"
        )
        found.append(_row(verdict, f"networks' error falls as width^-1/2: {option.name}", sizes))
    return found


def _row(verdict: Verdict, statement: str, sizes: str) -> TheoremCheck:
    return TheoremCheck(
        THEOREM,
        statement,
        sizes,
        verdict.measured,
        verdict.allowed,
        verdict.agrees,
        f"{verdict.control}, {verdict.control_measured}",
        verdict.control_fails,
    )
