"""How lazy a run is at every evaluation: a measure of ``Evaluation``, for algorithms that predict with networks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import pytrees
from fedtangent.comparison.followed import check_analytic, check_kernels, in_float64, setting_of
from fedtangent.comparison.laziness.parts import Parts, parts
from fedtangent.comparison.predicted import run_flow
from fedtangent.comparison.settings import Setting, exact_arithmetic
from fedtangent.comparison.simulated import cohorts
from fedtangent.engine.building import Built
from fedtangent.engine.run import predict
from fedtangent.engine.sweeps import single_device_engine, stretches
from fedtangent.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent.measures.tangent_kernels import KernelDiagnostics, kernel_diagnostics
from fedtangent.models.linearised import first_order, linearised
from fedtangent.theory import Flow
from fedtangent.types import Algorithm, Array, FederatedData, Key, Model, PyTree

MOST_EXAMPLES = 4000  # training examples of which there is a kernel of infinite width, at most


class LinearisedPaths(Protocol):
    """Trains the linearisations of K networks."""

    def __call__(self, seed: Key | int, init: Key | PyTree | None = None) -> np.ndarray:
        """Returns outputs [r, K, m, C] along a run.

        Args:
            seed: Seed or key of the run.
            init: Where the networks start, as ``start`` of ``simulate``.
        """


def linearised_paths(
    algorithm_of: Callable[[Model], Algorithm], model: Model, data: FederatedData, x: Array, rounds: Sequence[int]
) -> LinearisedPaths:
    """``(seed, init=None) -> outputs`` [r, K, m, C] at ``x`` of the linearisations of K networks after ``rounds``.

    Each network is linearised at its own start, ``linearised(model, w_0)``, and trained by ``algorithm_of`` as the
    network itself is: any algorithm, also one of which theory has no rule. A weight is a weight to both, so that what
    an algorithm draws, clips, quantises or decays is the same. A model cannot tell which of the K it is: each has a run
    of its own, which takes two to three times that of the networks. All are one program; nothing is compiled anew for
    another seed.

    Args:
        rounds: ascending, from 0.
    """
    of_network = algorithm_of(model)
    params, num_clients = of_network.params, data.num_clients
    assert params is not None and rounds[0] == 0
    engine, lengths = single_device_engine(data, "auto"), np.diff(rounds, prepend=0).astype(np.int32)

    @jax.jit
    def path(k: Array, at: PyTree, key: Key, init: Key | PyTree | None, data: FederatedData, x: Array) -> Array:
        algorithm = algorithm_of(linearised(model, at))

        def stretch(state: PyTree, length: Array) -> tuple[PyTree, Array]:
            state = jax.lax.fori_loop(0, length, lambda _, s: algorithm.step(s, data, engine)[0], state)
            return state, algorithm.predict(state, x).members[k]

        return jax.lax.scan(stretch, algorithm.init(key, num_clients, init), jnp.asarray(lengths))[1]

    def paths(seed: Key | int, init: Key | PyTree | None = None) -> np.ndarray:
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        starts = params(of_network.init(key, num_clients, init))
        each = [
            path(jnp.int32(k), pytrees.take(starts, k), key, init, data, x)
            for k in range(of_network.schedule.num_models)
        ]
        return np.stack([np.asarray(found, np.float64) for found in each], axis=1)

    return paths


def check_linearisable(model: Model, x: Array) -> None:
    """Raise ``ValueError`` for a model that cannot be differentiated forwards."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    try:
        jax.jit(functools.partial(first_order, model)).lower(shapes, shapes, x)
    except TypeError as error:
        raise ValueError(
            f"model: got {model.name}, must have derivatives forwards (jax.jvp) for a linearisation"
        ) from error


@dataclass(frozen=True)
class LazinessDiagnostics:
    """Measure of a run: ``(algorithm, state) -> {metric: value}``; made by ``laziness_diagnostics``.

    Values are means over the K models; with several models those of each come too, as ``drift_model_0``. A metric is
    not-a-number at a round that is none of ``rounds``, as the last good one of a run that diverged. Predictions are
    computed when the first evaluation asks for them, from the seed alone: a resumed run has the same.
    """

    algorithm: Algorithm
    data: FederatedData
    x: Array  # [m, ...] where distances are measured
    rounds: tuple[int, ...]
    kernels: KernelDiagnostics
    paths: LinearisedPaths
    limit: Callable[[int], Flow] | None
    why_no_limit: str = ""
    seed: int = 0

    def __call__(self, algorithm: Algorithm, state: PyTree) -> dict[str, float]:
        """The metrics of ``METRICS`` by name; without a limit, ``feature_learning`` and ``drift`` only."""
        found = self.parts(state)._asdict() | {"drift": self.kernels.drifts(state)}
        each = {name: values for name, values in found.items() if values is not None}
        means = {name: float(np.mean(values)) for name, values in each.items()}
        if len(each["drift"]) > 1:
            means |= {f"{name}_model_{k}": float(v) for name, values in each.items() for k, v in enumerate(values)}
        return means

    def parts(self, state: PyTree) -> Parts:
        """The parts of every model's distance, [K]."""
        network, round_ = np.asarray(predict(self.algorithm, state, self.x).members, np.float64), int(state.round)
        if round_ not in self.rounds:
            unknown = np.full(len(network), np.nan)
            return Parts(unknown) if self.limit is None else Parts(unknown, unknown, unknown)
        start, linear, infinite = self.predictions
        at = self.rounds.index(round_)
        return parts(network - start, linear[at], None if infinite is None else infinite[at])

    @functools.cached_property
    def predictions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Initial functions at ``x`` [K, m, C], and how far they are moved after ``rounds``, [r, K, m, C].

        By training linearised networks, and by the flow of infinite width. Each from the start as it computes it: that
        programs round differently is no distance.
        """
        linear, start = self.paths(self.seed), self.algorithm.init(self.seed, self.data.num_clients)
        at_x = np.asarray(predict(self.algorithm, start, self.x).members, np.float64)
        if self.limit is None:
            return at_x, linear - linear[0], None
        initial = np.asarray(predict(self.algorithm, start, self.data.x).members, np.float64)
        with exact_arithmetic():
            infinite = np.asarray(self.limit(self.seed).predict(initial, at_x, self.rounds))
        return at_x, linear - linear[0], infinite - at_x

    def of_seed(self, algorithm: Algorithm, num_clients: int, seed: int) -> LazinessDiagnostics:
        """The same for a run of another seed, from its own start; nothing is compiled anew."""
        return dataclasses.replace(self, seed=seed, kernels=self.kernels.of_seed(algorithm, num_clients, seed))


def laziness_diagnostics(built: Built, evaluate_every: int, num_examples: int = 256) -> LazinessDiagnostics:
    """Watches how lazy a run of ``built.algorithm`` with ``evaluation=Evaluation(evaluate_every, watch)`` is.

    At every evaluation, for each of the K models, as ``laziness.parts`` explains: ``feature_learning``, the distance of
    the network to its own linearisation, trained alike (``linearised_paths``); ``initial_kernel``, that of the
    linearisation to the federated flow of infinite width from the same initial function, with the same cohorts,
    minibatches and rates; ``total``, of the network to that flow; and the ``drift`` of its tangent kernel
    (``kernel_diagnostics``), the relative change in the Frobenius norm. Distances are measured at the training examples
    that the kernel is measured on and as many test examples, the first ones, together.

    Where theory has no rule for the run, the network no limit, or there are more than 4000 training examples (the
    limit's kernel is a matrix of them), ``initial_kernel`` and ``total`` are left out; ``why_no_limit`` says why.

    Raises ``ValueError`` as ``kernel_diagnostics`` does, and for a model that ``jax.jvp`` cannot differentiate.
    """
    algorithm, run = built.algorithm, built.description.run
    check_linearisable(built.model, built.data.x[:2])
    kernels = kernel_diagnostics(algorithm, built.model, built.data, run.seed, num_examples, run.seed)
    test = built.examples.train if built.examples.test is None else built.examples.test
    x = jnp.concatenate([kernels.watched.x, test.x[:num_examples]])
    rounds = tuple(np.cumsum(stretches(run.num_rounds, min(evaluate_every, run.num_rounds))).tolist())
    paths = linearised_paths(algorithm.on, built.model, built.data, x, rounds)
    limit, why = None, ""
    try:
        limit = _limit(built, x)
    except ValueError as error:
        why = str(error)
    return LazinessDiagnostics(algorithm, built.data, x, rounds, kernels, paths, limit, why, run.seed)


def _limit(built: Built, x: Array) -> Callable[[int], Flow]:
    """The federated flow of infinite width of a run with a seed; raises ``ValueError`` where there is none."""
    run, examples, model = built.description.run, len(built.data.x), in_float64(built.model)
    if examples > MOST_EXAMPLES:
        raise ValueError(f"data: got {examples} training examples, must be at most {MOST_EXAMPLES} for their kernel")

    def told(seed: int) -> Setting:
        return setting_of(built.algorithm, built.examples, run.num_rounds, seed)

    with exact_arithmetic():
        check_analytic(model)
        x_train = told(run.seed).x_train  # raises here where theory does not follow the run
        check_kernels(model, x_train[:2])

    @functools.cache
    def blocks() -> KernelBlocks:
        return kernel_blocks(model.kernel, x_train, np.asarray(x, x_train.dtype))  # type: ignore[arg-type]

    def flow(seed: int) -> Flow:
        setting = told(seed)
        return run_flow(setting, blocks(), cohorts(setting))

    return flow
