"""Exact comparisons: models linear in their weights, trained by the setting's algorithm and schedule.

A network is only near its kernel prediction, so an error of a few percent in either goes unnoticed. The prediction of
the models here is exact, so the smallest mistake shows. The models are the network linearised at fixed weights, and a
linear model whose tangent kernel is the setting's analytic one. Each equality has negative controls, flows that are
slightly wrong (``near_misses``), which must fail.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Int, Num

from fedtangent._src.comparison import predicted
from fedtangent._src.comparison.predicted import Predicted
from fedtangent._src.comparison.settings import Problem, Setting
from fedtangent._src.comparison.simulated import Simulated, init_key, trained_networks
from fedtangent._src.comparison.statistics import law_distance, relative_distance, relative_errors
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict
from fedtangent._src.federated.compose import initial_params
from fedtangent._src.kernels.empirical import empirical_ntk
from fedtangent._src.kernels.gram import KernelBlocks, joined
from fedtangent._src.models.linearised import linearised
from fedtangent._src.streams import model_keys
from fedtangent._src.theory.flow import Flow
from fedtangent._src.theory.prior import prior_blocks
from fedtangent._src.types import AnyArray, Array, Cohort, Key, Model, Partition, PyTree

LINEARISED_WIDTH = 64
MOST_ROWS = 4000  # rows n C of a whole tangent kernel of a linearised network, at most
MOST_STARTS = 400  # training examples, at most, for verdicts on laws
NUM_POINTS = 20  # test points of the exact checks
LAW_ROUNDS = 40  # about as many rounds of the law are checked: a basis of initial functions is trained
SLOWER = 0.95  # a rate that is wrong by 5 %

Law = tuple[np.ndarray, np.ndarray]  # means [K, m, C] and covariances [K, m, m], or those of the ensemble


def near_misses(
    setting: Setting, cohorts: Cohort, blocks: KernelBlocks, last: int, outputs: str = "shared"
) -> dict[str, Flow]:
    """Builds negative controls: flows over ``last`` rounds that are slightly wrong, keyed by the mistake in each.

    A mistake that changes nothing for this setting is left out, for instance equal weights if all clients are equal.

    Args:
        setting: The setting, whose rule is altered for most controls.
        cohorts: The right cohorts: S clients in each of R rounds, [R, S]; altered for the other controls.
        blocks: Kernels at the training and test points.
        last: Number of rounds after which the flows are evaluated.
        outputs: "shared" if all outputs have one kernel, or "full" if the kernel couples outputs.
    """
    rule, partition, weighting = setting.followed, setting.problem.partition, setting.algorithm.composition.weighting
    shifted = jax.tree.map(lambda leaf: np.roll(np.asarray(leaf), 1, axis=0), cohorts)
    wrong: dict[str, tuple[Cohort, dict[str, Any]]] = {
        f"client rate x {SLOWER}": (cohorts, {"learning_rate": np.multiply(SLOWER, rule.learning_rate)}),
        f"server rate x {SLOWER}": (cohorts, {"server_learning_rate": np.multiply(SLOWER, rule.server_learning_rate)}),
    }
    if np.any(np.asarray(rule.anchoring) != 1):
        wrong["not drawn back to the start"] = cohorts, {"anchoring": 1.0}
    steps, batches = np.broadcast_to(rule.local_steps, partition.num_clients), rule.batches
    present = np.asarray(cohorts.weight)[:last] > 0
    ages = np.minimum(0 if rule.delays is None else rule.delays, np.arange(len(cohorts.weight))[:, None])
    if np.any(present & (ages[:last] > 0)):
        wrong["delays one round less"] = cohorts, {"delays": np.maximum(ages - 1, 0)}
    most_steps = np.max(np.where(present, steps[np.asarray(cohorts.client)[:last]], 0), initial=0)
    if np.any(present):
        absent = _absent_once(cohorts, 1 + int(np.max(np.nonzero(present)[0])))
        wrong["one client missing in the last round"] = absent, {}
    if most_steps > 1:
        fewer = np.maximum(steps - 1, 1)
        first_batches = {} if batches is None else {"batches": batches[:, :, : fewer.max()]}
        wrong["one local step less"] = cohorts, {"local_steps": fewer, **first_batches}
    other = _weighed_otherwise(cohorts, partition, weighting)
    if other is not None:
        wrong[f"clients weighted {'equally' if weighting == 'examples' else 'by examples'}"] = other, {}
    late = {} if batches is None else {"batches": np.roll(batches, 1, axis=0)}
    if not _same_training(_sorted(cohorts)[:last], _sorted(shifted)[:last], batches, late.get("batches")):
        wrong["cohorts one round late"] = shifted, late
    if batches is not None and most_steps > 1:
        backwards = _backwards(batches, steps[np.asarray(cohorts.client)])
        wrong["minibatches in another order"] = cohorts, {"batches": backwards}
    return {
        name: predicted.run_flow(setting, blocks, among, outputs=outputs, **changes)
        for name, (among, changes) in wrong.items()
    }


def _same_training(
    cohorts: Float[np.ndarray, "r S 3"],
    others: Float[np.ndarray, "r S 3"],
    batches: Int[np.ndarray, "R S T B"] | None,
    other_batches: Int[np.ndarray, "R S T B"] | None,
) -> bool:
    """Returns whether two runs train the same clients on the same minibatches in order; empty rounds do not count.

    ``cohorts`` and ``others`` are model, client and weight of every slot (place of a cohort), sorted within each round.
    """
    filled, other_filled = (np.flatnonzero(np.any(slots[..., 2] > 0, axis=1)) for slots in (cohorts, others))
    if not np.array_equal(cohorts[filled], others[other_filled]):
        return False
    if batches is None or other_batches is None:
        return True
    return np.array_equal(np.sort(batches[filled], axis=-1), np.sort(other_batches[other_filled], axis=-1))


def _sorted(cohorts: Cohort) -> Float[np.ndarray, "R S 3"]:
    """Returns model, client and weight of the S slots (places of a cohort) of each round, sorted, [R, S, 3]."""
    slots = np.stack([np.asarray(part, float) for part in (cohorts.model, cohorts.client, cohorts.weight)], axis=-1)
    order = np.lexsort((slots[..., 2], slots[..., 1], slots[..., 0]), axis=-1)
    return np.take_along_axis(slots, order[..., None], axis=1)


def _weighed_otherwise(cohorts: Cohort, partition: Partition, weighting: str) -> Cohort | None:
    """Returns the cohorts weighted equally instead of by examples, or vice versa; None if no client's share changes."""
    sizes = np.asarray(partition.sizes, float)[np.asarray(cohorts.client)]
    weight = np.asarray(cohorts.weight)
    other = weight / np.maximum(sizes, 1) if weighting == "examples" else weight * sizes
    model, num_models = np.asarray(cohorts.model), int(np.max(cohorts.model, initial=0)) + 1

    def shares(weights: np.ndarray) -> np.ndarray:
        rounds = np.arange(len(weights))[:, None]
        total = np.zeros((len(weights), num_models))
        np.add.at(total, (np.broadcast_to(rounds, model.shape), model), weights)
        return np.asarray(weights / np.maximum(total[rounds, model], 1e-300))

    if np.allclose(shares(other), shares(weight)):
        return None
    return cohorts._replace(weight=other)


def _backwards(batches: Int[np.ndarray, "R S T B"], steps: Int[np.ndarray, "R S"]) -> Int[np.ndarray, "R S T B"]:
    """Reverses the order of the first ``steps`` minibatches (of T) of each of the S clients of a round."""
    t = np.arange(batches.shape[2])
    at = np.where(t < steps[..., None], steps[..., None] - 1 - t, t)
    return np.take_along_axis(batches, at[..., None], axis=2)


def _absent_once(cohorts: Cohort, last: int) -> Cohort:
    """Returns the cohorts without the first client, of those with a weight, of round number ``last``, from 1."""
    weight = np.array(cohorts.weight)
    weight[last - 1, int(np.argmax(weight[last - 1] > 0))] = 0.0
    return cohorts._replace(weight=weight)  # type: ignore[arg-type]


def linear_verdict(theory: Predicted, networks: Simulated) -> Verdict:
    """Checks that trained linear models follow the flow at every evaluated round; slightly wrong flows must not.

    Args:
        theory: The flow of the setting.
        networks: The models, trained.
    """
    statement = "simulation = flow, linear model, every round"
    return follows(theory.setting, statement, networks, theory.cohorts, theory.blocks)


def of_kernel_verdict(theory: Predicted) -> Verdict:
    """Checks that a linear model with the setting's analytic kernels follows the flow, not slightly wrong flows."""
    points = some_points(theory.setting.problem)
    small, rows = _of_kernels(theory, points)
    small = dataclasses.replace(small, rule=dataclasses.replace(small.followed, homogeneity=1.0))  # of a linear model
    model = _two_feature_maps(rows, small.problem.y_train.shape[1], True)
    models = trained_networks(dataclasses.replace(small, algorithm=small.algorithm.on(model)), rows)
    statement = "linear model of the analytic kernel = flow, every round"
    return follows(small, statement, models, theory.cohorts, _cut(theory.blocks, points))


def linearised_verdict(setting: Setting, cohorts: Cohort) -> Verdict:
    """Checks that K networks of width 64, all linearised at the same weights, follow the flow of their kernel.

    They are compared at every evaluated round. Slightly wrong flows (``near_misses``) are the controls. Each
    network starts from different initial weights. The kernel is the whole empirical one, [n C, n C], which couples the
    outputs.

    Args:
        setting: Algorithm, data and rounds.
        cohorts: Cohorts of the run: S clients in each of R rounds, [R, S].
    """
    base = setting.model(LINEARISED_WIDTH)
    keys = model_keys(init_key(setting, setting.size.draws, LINEARISED_WIDTH), setting.num_models)
    init = setting.model(LINEARISED_WIDTH, setting.dtype).init  # of the networks that are trained, so their program
    at = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[0], initial_params(init, keys))
    statement = f"linearised network of width {LINEARISED_WIDTH} = flow of its kernel, every round"
    return linearised_follows(setting, statement, base, at, cohorts)


def linearised_follows(
    setting: Setting, statement: str, network: Model, at: PyTree, cohorts: Cohort, start: PyTree | None = None
) -> Verdict:
    """Checks that K networks, all linearised at the weights ``at``, follow the flow of their kernel.

    One draw of the K networks is trained, and compared at 20 test points or fewer (``some_points``).

    Args:
        setting: Algorithm, data and rounds.
        statement: Text of the verdict.
        network: The network.
        at: Its parameters at which it is linearised.
        cohorts: Cohorts of the run: S clients in each of R rounds, [R, S].
        start: Parameters [K, ...] that the networks begin with; None: parameters drawn from the setting's seed. With
            weight decay all begin at ``at``, where the rule's ``homogeneity`` is the network's.
    """
    problem, points = setting.problem, some_points(setting.problem)
    if np.any(setting.followed.weight_decay):
        start = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], setting.num_models, axis=0), at)
    small = dataclasses.replace(
        setting,
        problem=dataclasses.replace(problem, x_test=problem.x_test[points], y_test=problem.y_test[points]),
        algorithm=setting.algorithm.on(linearised(network, at)),
        size=setting.size._replace(draws=1),
    )
    blocks = empirical_blocks(network, at, small.problem.x_train, small.problem.x_test)
    models = trained_networks(small, LINEARISED_WIDTH, start=start)
    return follows(small, statement, models, cohorts, blocks, "full")


def follows(
    setting: Setting, statement: str, models: Simulated, cohorts: Cohort, blocks: KernelBlocks, outputs: str = "shared"
) -> Verdict:
    """Checks that linear models follow the flow from their initial functions at every evaluated round.

    Slightly wrong flows (``near_misses``) are the controls; for a user's run, a flow with another loss is one more.

    Args:
        setting: The run.
        statement: Text of the verdict.
        models: Simulated outputs of the models.
        cohorts: Cohorts of the run: S clients in each of R rounds, [R, S].
        blocks: Kernels of the models.
        outputs: "shared" if all outputs have one kernel, or "full" if the kernel couples outputs.
    """
    flow = predicted.run_flow(setting, blocks, cohorts, outputs=outputs)
    wrong = near_misses(setting, cohorts, blocks, setting.size.num_rounds, outputs)
    if not setting.is_standard:
        other = "cross_entropy" if setting.problem.loss == "squared_error" else "squared_error"
        wrong["the other loss"] = predicted.run_flow(setting, blocks, cohorts, outputs=outputs, loss=other)
    misses = {name: _largest_error(miss, models) for name, miss in wrong.items()}
    return exact_verdict(setting.name, statement, _largest_error(flow, models), misses, EXACT)


def empirical_blocks(
    model: Model, at: PyTree, x_train: Num[np.ndarray, "n ..."], x_test: Num[np.ndarray, "m ..."]
) -> KernelBlocks:
    """Computes the whole tangent kernel of ``model`` at the weights ``at``, for the training and test points.

    Args:
        model: Network with C outputs.
        at: Its parameters.
        x_train: Training inputs, [n, ...].
        x_test: Test inputs, [m, ...].

    Returns:
        Blocks [n C, n C] and [m C, n C]; the C outputs of one example are adjacent rows.
    """
    both = np.concatenate([x_train, x_test])
    whole = np.asarray(_whole_kernel(model, at, both, x_train))
    rows = len(x_train) * model.output_size
    whole = whole.reshape(-1, rows)
    return KernelBlocks(0.5 * (whole[:rows] + whole[:rows].T), whole[rows:])


@functools.partial(jax.jit, static_argnames=("model",))
def _whole_kernel(model: Model, at: PyTree, x1: AnyArray, x2: AnyArray) -> Array:
    return empirical_ntk(model, at, x1, x2, trace=False)


def _largest_error(flow: Flow, models: Simulated) -> float:
    """Returns the largest error of the flow's outputs, compared with trained ``models``, at any evaluated round.

    Errors are relative to how far the flow has moved by then; infinite if the flow overflows.
    """
    test = predicted.from_starts(flow, predicted.starts_of(models), models.rounds[1:]).test
    if not np.isfinite(test).all():
        return np.inf
    return float(np.max(relative_errors(test, models.test[1:], test - models.test[0])))


def law_verdicts(theory: Predicted) -> list[Verdict]:
    """Checks the flow's mean and covariance at one round against a linear model that the algorithm trains.

    The round is the last evaluated one up to round 40, or the first evaluated one if that is later.

    The linear model has the setting's analytic kernels and is trained once. Outputs that start at 0 and learn the
    targets give the mean. Outputs that start at a basis of the initial functions and learn 0 give a factor G of the
    covariance ``G G'``. Nothing is sampled.

    Args:
        theory: Flow, kernels and cohorts of the setting.

    Returns:
        A verdict on the K models and, if K > 1, a verdict on their ensemble; none with weight decay and a homogeneity
        that a linear model cannot have.
    """
    if theory.flow.kind.decays and theory.setting.followed.homogeneity != 1:
        return []
    problem, rounds = theory.setting.problem, theory.setting.size.rounds
    at, round_ = max((i, r) for i, r in enumerate(rounds) if r <= max(LAW_ROUNDS, rounds[1]))
    points, outputs = some_points(problem), problem.y_train.shape[1]
    models = _propagated(theory, points, round_)
    test = models.test[-1][:, 0]  # [K, m, C + q]
    mean, spread = test[..., :outputs], test[..., outputs:]
    simulated = mean, spread @ spread.swapaxes(1, 2)
    verdicts = [_of_each_model(theory, simulated, at)]
    if len(mean) > 1:
        verdicts.append(_of_the_ensemble(theory, simulated, models.ensemble[-1][0, :, :outputs], round_))
    return verdicts


def _of_each_model(theory: Predicted, simulated: Law, at: int) -> Verdict:
    setting, points = theory.setting, some_points(theory.setting.problem)
    round_ = setting.size.rounds[at]
    law = theory.moments[at].mean[:, points], theory.moments[at].cov[:, points][:, :, points]
    whose = f"each of {len(law[0])} models" if len(law[0]) > 1 else "the model"
    statement = f"law of {whose} = flow's, round {round_}"
    misses = near_misses(setting, theory.cohorts, theory.blocks, round_)
    wrong = {
        name: relative_distance(np.asarray(flow.mean(round_))[:, points], simulated[0]) for name, flow in misses.items()
    }
    if len(law[0]) > 1:
        wrong["models exchanged"] = law_distance(simulated, (np.roll(law[0], 1, 0), np.roll(law[1], 1, 0)))
    return exact_verdict(setting.name, statement, law_distance(simulated, law), wrong, EXACT)


def _of_the_ensemble(theory: Predicted, simulated: Law, averaged: Float[np.ndarray, "m C"], round_: int) -> Verdict:
    """Checks the flow's mean and covariance of the ensemble against trained linear models.

    ``simulated`` has the mean and covariance of each model; ``averaged`` is the algorithm's mean of its K models.
    """
    points, flow, (mean, cov) = some_points(theory.setting.problem), theory.flow, simulated
    num_models = len(mean)
    law = (
        np.asarray(flow.ensemble_mean(round_))[points],
        np.asarray(flow.ensemble_cov(round_))[np.ix_(points, points)],
    )
    fewer = mean[:-1].mean(axis=0), cov[:-1].mean(axis=0) / (num_models - 1)
    return exact_verdict(
        theory.setting.name,
        f"law of the ensemble of {num_models} = flow's, round {round_}",
        law_distance((averaged, cov.mean(axis=0) / num_models), law),
        {f"ensemble of {num_models - 1}": law_distance(fewer, law)},
        EXACT,
    )


def _propagated(theory: Predicted, points: np.ndarray, num_rounds: int) -> Simulated:
    """Trains a linear model with the analytic kernels; returns its outputs at the test points ``points``.

    C outputs start at 0 and learn the targets. The others start at a basis of the initial functions and learn 0.
    """
    # C outputs start at 0 and become the flow's mean. The q others start as the columns of a factor of the initial
    # covariance and learn 0, as a residual does: their products are the flow's covariance.
    targets = theory.setting.problem.y_train
    n, outputs = targets.shape
    small, rows = _of_kernels(theory, points)
    problem = dataclasses.replace(
        small.problem,
        y_train=np.concatenate([targets, np.zeros((n, rows))], axis=1),
        y_test=np.zeros((len(points), outputs + rows)),
    )
    model, size = _two_feature_maps(rows, outputs, False), small.size._replace(num_rounds=num_rounds, evaluate_every=0)
    small = dataclasses.replace(small, problem=problem, algorithm=small.algorithm.on(model), size=size)
    return trained_networks(small, rows)


def _of_kernels(theory: Predicted, points: np.ndarray) -> tuple[Setting, int]:
    """Returns the setting with other inputs, whose inner products are the analytic kernels, and the size of phi.

    An input is [phi, psi]: features of the tangent kernel, and features of the prior's kernel.
    """
    setting, problem, blocks = theory.setting, theory.setting.problem, theory.blocks
    n = len(problem.x_train)
    assert blocks.ntk_test is not None
    tangent = _factor(blocks.ntk_train, blocks.ntk_test_train, blocks.ntk_test, points)
    prior = _factor(*prior_blocks(blocks), points)
    inputs = np.concatenate([tangent, prior], axis=1)
    problem = dataclasses.replace(problem, x_train=inputs[:n], x_test=inputs[n:], y_test=problem.y_test[points])
    return dataclasses.replace(setting, problem=problem, size=setting.size._replace(draws=1)), len(tangent)


def _two_feature_maps(rows: int, outputs: int, from_prior: bool) -> Model:
    """Builds the model ``phi(x) W + psi(x) W0`` for inputs x = [phi, psi], each of size ``rows``.

    W is trained from 0. W0 stays fixed: normal if ``from_prior``, else [0, I], which adds ``rows`` outputs.
    """
    columns = outputs if from_prior else outputs + rows

    def init(key: Key) -> PyTree:
        start = np.concatenate([np.zeros((rows, outputs)), np.eye(rows)], axis=1)
        fixed = jax.random.normal(key, (rows, outputs)) if from_prior else jnp.asarray(start)
        return {"trained": jnp.zeros((rows, columns)), "fixed": fixed}

    def apply(params: PyTree, x: Float[AnyArray, "n pq"]) -> Float[Array, "n C"]:
        fixed = jax.lax.stop_gradient(params["fixed"])
        return x[:, :rows] @ params["trained"] + x[:, rows:] @ fixed

    return Model("linear model of given kernels", init, apply, None, columns, is_linear=True)


def _cut(blocks: KernelBlocks, points: np.ndarray) -> KernelBlocks:
    """Returns the kernels that the flow needs, with all training points and the test points ``points``."""
    return KernelBlocks(blocks.ntk_train, np.ascontiguousarray(blocks.ntk_test_train[points]))


def _factor(
    train: AnyArray, test_train: AnyArray, test: AnyArray, points: Int[np.ndarray, "p"]
) -> Float64[np.ndarray, "q q"]:
    """Returns a matrix ``G`` for which ``G G'`` is the kernel of the training points and the test points ``points``.

    ``train``, ``test_train`` and ``test`` are the blocks of the kernel at all training and test points.
    """
    cross = np.asarray(test_train)[points]
    eigenvalues, vectors = np.linalg.eigh(joined(train, cross, np.asarray(test)[np.ix_(points, points)]))
    return vectors * np.sqrt(np.maximum(eigenvalues, 0))


def some_points(problem: Problem) -> Int[np.ndarray, "p"]:
    """Returns the indices of at most 20 test points, evenly spread over all test points."""
    count = len(problem.x_test)
    return np.unique(np.linspace(0, count - 1, min(count, NUM_POINTS)).astype(int))
