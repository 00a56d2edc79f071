"""How lazy training is: the distance of networks from their prediction, in two parts, over widths and along a run.

A network leaves the prediction of infinite width for two reasons. First, it learns features: it leaves its
linearisation ``g(w) = f(w_0) + J(w_0) (w - w_0)``, trained from the same start by the same algorithm, cohorts,
minibatches and keys. Second, the kernel of the linearisation is the empirical one at initialisation, not that of
infinite width. As functions the two add up, ``f - f_inf = (f - g) + (g - f_inf)``. Their norms obey only the triangle
inequality: they may add up to more than the total, and each may be larger than it.

Every distance is a root mean square over examples and outputs, relative to how far training has moved the linearised
network by then, ``|g_r - f_0|``: one scale for all parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num, Shaped

from fedtangent._src import pytrees
from fedtangent._src.checks import real_array
from fedtangent._src.comparison import linear_models
from fedtangent._src.comparison.followed import check_analytic, check_kernels, setting_of
from fedtangent._src.comparison.predicted import Predicted, run_flow
from fedtangent._src.comparison.settings import Problem, Scale, Setting, exact_arithmetic, in_dtype
from fedtangent._src.comparison.simulated import Simulated, cohorts
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.data.examples import sampled
from fedtangent._src.engine.building import Built
from fedtangent._src.engine.loop import evaluated_rounds
from fedtangent._src.engine.run import predict
from fedtangent._src.engine.sweeps import single_device_engine, stretches
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.measures.tangent_kernels import KernelDiagnostics, kernel_diagnostics
from fedtangent._src.models.linearised import first_order, linearised
from fedtangent._src.theory.flow import Flow
from fedtangent._src.types import Algorithm, AnyArray, Array, ArrayLike, FederatedData, Key, Model, PyTree, Schedule

METRICS = ("feature_learning", "initial_kernel", "total", "drift")  # the parts, and the kernel's drift beside them


class Parts(NamedTuple):
    """A network's distance from its prediction at infinite width, and the two parts of this distance.

    Distances are relative to how far training has moved the linearisation at the network's start.

    Attributes:
        feature_learning: Distance of the network from its linearisation.
        initial_kernel: Distance of the linearisation from infinite width; None without a prediction there.
        total: Distance of the network from infinite width.
    """

    feature_learning: Float[np.ndarray, "..."]
    initial_kernel: Float[np.ndarray, "..."] | None = None
    total: Float[np.ndarray, "..."] | None = None


def parts(network: ArrayLike, linear: ArrayLike, infinite: ArrayLike | None = None) -> Parts:
    """Splits the distance of ``network`` from ``infinite`` into its parts.

    Each argument is a movement ``f_r - f_0`` from the common start. If nothing has moved, all parts are 0; if only the
    linearisation has not moved, they are infinite; parts of values that are not finite are not finite.

    Args:
        network: Movement of the network, [..., n, C].
        linear: Movement of its linearisation, [..., n, C].
        infinite: Movement at infinite width, [..., n, C]; None: only ``feature_learning`` is computed.

    Returns:
        Distances as root mean squares over the last two axes, divided by the root mean square of ``linear``, [...].

    Raises:
        ValueError: An argument is no array of real numbers.
    """
    network, linear = real_array("network", network), real_array("linear", linear)
    with np.errstate(invalid="ignore", over="ignore"):
        features = relative_errors(linear, network, linear)
        if infinite is None:
            return Parts(features)
        infinite = real_array("infinite", infinite)
        return Parts(features, relative_errors(infinite, linear, linear), relative_errors(infinite, network, linear))


MOST_NUMBERS = 2**22  # of a Jacobian, for networks of unknown structure


class Laziness(NamedTuple):
    """Networks of one width at every evaluated round: distance from theory in parts, and tangent kernel's change.

    Attributes:
        width: Width of the networks.
        parts: Distances from linearisation and infinite width, each [r, K, e] for r rounds, K models and e draws.
        drift: Relative change of each network's tangent kernel since the start, in the Frobenius norm.
    """

    width: int
    parts: Parts
    drift: Float[np.ndarray, "r K e"]

    def curves(self) -> dict[str, Float[np.ndarray, "r K e"]]:
        """Returns the arrays "feature_learning", "initial_kernel", "total" and "drift" by name.

        Each array is [r, K, e]: evaluated rounds, models of the ensemble, measured draws. The first three are a
        network's distance from its linearisation, the linearisation's distance from infinite width, and the network's
        distance from infinite width. The last is the relative change of the network's tangent kernel.
        """
        return self.parts._asdict() | {"drift": self.drift}


def watched_draws(setting: Setting) -> int:
    """Returns for how many draws of each width laziness is measured: 1, or 2 if the ensemble has a single model.

    It is 0 for a linear model, which is always lazy, and for networks whose kernel [n C, n C], or the Jacobian that it
    needs [n C, parameters], is too large.
    """
    rows = setting.problem.y_train.size
    if setting.is_linear or rows > linear_models.MOST_ROWS:
        return 0
    widest = setting.model(setting.size.largest)
    num_params = pytrees.size(widest.shapes)
    if widest.structure is None and rows * num_params > MOST_NUMBERS:
        return 0
    return 1 if setting.num_models > 1 else 2


def split(theory: Predicted, networks: Simulated, infinite: Float[np.ndarray, "r K E p C"]) -> Laziness:
    """Splits the distance of networks from infinite width into its parts, at training and some test examples together.

    Only networks whose initial weights were recorded (``WatchedNetworks``) are split. A linearised network follows the
    flow of its whole empirical kernel at its start, which is exact and cheaper than training.

    Args:
        theory: Setting and cohorts.
        networks: Networks of one width, some of them with recorded weights.
        infinite: Outputs of the flow of infinite width at the points of ``at_points``, [r, K, E, n + some m, C], for
            all E draws of K networks at the r evaluated rounds.
    """
    assert networks.watched is not None
    setting, model, draws = theory.setting, theory.setting.model(networks.width), len(networks.watched.starts)
    network = at_points(setting.problem, networks.train, networks.test)[:, :, :draws]
    linear = np.empty_like(network)
    for draw, starts in enumerate(networks.watched.starts):
        for k in range(network.shape[1]):
            linear[:, k, draw] = linearised_flow(theory, model, pytrees.take(starts, k), network[0, k, draw], k)
    moved = (path - network[0] for path in (network, linear, infinite[:, :, :draws]))
    return Laziness(networks.width, parts(*moved), networks.watched.drift)


def at_points(
    problem: Problem, train: Num[np.ndarray, "*axes n C"], test: Num[np.ndarray, "*axes m C"]
) -> Num[np.ndarray, "*axes p C"]:
    """Joins outputs at all training examples and at some test examples (``linear_models.some_points``).

    Args:
        problem: The problem.
        train: Outputs at the training examples, [..., n, C].
        test: Outputs at the test examples, [..., m, C].
    """
    return np.concatenate([train, test[..., linear_models.some_points(problem), :]], axis=-2)


def linearised_flow(
    theory: Predicted, model: Model, params: PyTree, start: Float[np.ndarray, "p C"], k: int
) -> Float[np.ndarray, "r p C"]:
    """Computes the outputs of one network, linearised at its initial weights, during training.

    Args:
        theory: Setting and cohorts.
        model: The network.
        params: Its initial weights.
        start: Its initial function, [p, C] at the points of ``at_points``.
        k: Index of the network among the K models.

    Returns:
        Outputs at the evaluated rounds and these points, [r, p, C].
    """
    setting, problem = theory.setting, theory.setting.problem
    x = np.concatenate([problem.x_train, problem.x_test[linear_models.some_points(problem)]])
    blocks = linear_models.empirical_blocks(model, params, problem.x_train, x)
    flow = run_flow(setting, blocks, theory.cohorts, outputs="full")
    runs = flow.runs(start[None, : len(problem.x_train)], start[None], setting.size.rounds, model=k)
    return np.asarray(runs.test)[:, 0, 0]


MOST_EXAMPLES = 4000  # training examples, at most, for a kernel of infinite width


@runtime_checkable
class LinearisedPaths(Protocol):
    """Function that trains the linearisations of K networks and returns their outputs along the run.

    ``linearised_paths`` builds it.
    """

    def __call__(
        self, seed: Key | int, init: Key | PyTree | None = None, rate_factor: float | None = None
    ) -> Float[np.ndarray, "r K m C"]:
        """Trains the linearised networks, and returns their outputs [r, K, m, C] after each of the r chosen rounds.

        Args:
            seed: Seed or key of the run.
            init: Where the networks start, as ``start`` of ``simulate``.
            rate_factor: Number by which the clients' learning rate is multiplied; None: the same rate.
        """


def linearised_paths(
    algorithm: Algorithm,
    model: Model,
    data: FederatedData,
    x: Shaped[AnyArray, "m ..."],
    rounds: Sequence[int],
) -> LinearisedPaths:
    """Builds a function that trains the linearisations of K networks and returns their outputs along the run.

    Each network is linearised at its start, ``linearised(model, w_0)``, and trained by ``algorithm`` as the network
    itself is: any algorithm, also one that theory does not follow. Network and linearisation have weights of the same
    shapes, so an algorithm draws, clips, quantises or decays them alike. Each of the K linearisations has a separate
    run, which takes two to three times as long as the networks' run. All runs share one program, for every seed.

    Args:
        algorithm: The algorithm, for any model.
        model: The network.
        data: Training data.
        x: Inputs at which outputs are computed, [m, ...].
        rounds: Rounds after which outputs are computed, ascending from 0.
    """
    of_network = algorithm.on(model)
    params, num_clients, num_models = of_network.params, data.num_clients, of_network.schedule.num_models
    assert params is not None and rounds[0] == 0
    engine, lengths = single_device_engine(data, "auto"), np.diff(rounds, prepend=0).astype(np.int32)

    @jax.jit
    def path(
        k: Array, at: PyTree, key: Key, init: Key | PyTree | None, data: FederatedData, x: Array, factor: Array | None
    ) -> Array:
        of_linearised = algorithm.on(linearised(model, at), factor)

        def outputs(trained: Algorithm, state: PyTree) -> Array:
            return trained.predict(state, x).members[k]

        start = of_linearised.init(key, num_clients, init)
        outputs_at: Array = evaluated_rounds(of_linearised, engine, outputs, lengths, start, data)
        return outputs_at

    def paths(
        seed: Key | int, init: Key | PyTree | None = None, rate_factor: float | None = None
    ) -> Float[np.ndarray, "r K m C"]:
        key = seed if isinstance(seed, jax.Array) else jax.random.key(seed)
        starts = params(of_network.init(key, num_clients, init))
        factor = None if rate_factor is None else jnp.asarray(rate_factor)
        of_models = [path(jnp.int32(k), pytrees.take(starts, k), key, init, data, x, factor) for k in range(num_models)]
        return np.stack([np.asarray(outputs, np.float64) for outputs in of_models], axis=1)

    return paths


def check_linearisable(model: Model, x: Shaped[AnyArray, "m ..."], schedule: Schedule | None = None) -> None:
    """Raises ``ValueError`` if a model cannot be linearised: ``jax.jvp`` fails, or clients compare several models.

    Args:
        model: The model.
        x: Some inputs.
        schedule: Schedule of the run. Models are linearised in separate runs, so its clients must not compare them.
    """
    if schedule is not None and schedule.poll is not None and schedule.num_models > 1:
        raise ValueError(
            f"schedule: got one whose clients compare K = {schedule.num_models} models, must not compare models: each "
            "model is linearised by itself"
        )
    shapes = model.shapes
    try:
        jax.jit(functools.partial(first_order, model)).lower(shapes, shapes, x)
    except TypeError as error:
        hint = "; build models.lstm with differentiation='any'" if model.name.startswith("lstm(") else ""
        raise ValueError(
            f"model: got {model.name}, which JAX cannot differentiate in forward mode (jax.jvp), to linearise it{hint}"
        ) from error


@dataclass(frozen=True)
class LazinessDiagnostics:
    """A measure of a run, ``(algorithm, state) -> {metric: value}``; built by ``laziness_diagnostics``.

    Values are means over the K models. With several models there is also one metric for each, such as
    ``drift_model_0``. A metric is NaN at a round that is not in ``rounds``, for instance at the last good round of a
    run that diverged. Predictions are computed at the first evaluation, from the seed, so a resumed run
    has the same predictions.

    Attributes:
        algorithm, data, seed: Algorithm, training data and seed of the run.
        x: Inputs at which distances are measured.
        rounds: The evaluated rounds.
        kernels: Measures the change of the tangent kernels.
        paths: Trains the linearised networks.
        limit: Builds the flow of infinite width for a seed; None without such a flow, and ``why_no_limit`` gives the
            reason.
    """

    algorithm: Algorithm
    data: FederatedData
    x: Shaped[Array, "m ..."]
    rounds: tuple[int, ...]
    kernels: KernelDiagnostics
    paths: LinearisedPaths
    limit: Callable[[int], Flow] | None
    why_no_limit: str = ""
    seed: int = 0

    def __call__(self, algorithm: Algorithm, state: PyTree) -> dict[str, float]:
        """Returns the metrics "feature_learning", "initial_kernel", "total" and "drift" of the run's present state.

        If infinite width has no prediction, "initial_kernel" and "total" are left out. The argument ``algorithm`` is
        not used.
        """
        of_models = self.parts(state)._asdict() | {"drift": self.kernels.drifts(state)}
        of_models = {name: values for name, values in of_models.items() if values is not None}
        means = {name: float(np.mean(values)) for name, values in of_models.items()}
        if len(of_models["drift"]) > 1:
            means |= {f"{name}_model_{k}": float(v) for name, values in of_models.items() for k, v in enumerate(values)}
        return means

    def parts(self, state: PyTree) -> Parts:
        """Computes the parts of each model's distance from infinite width, [K]; NaN at a round not in ``rounds``."""
        network, round_ = np.asarray(predict(self.algorithm, state, self.x).members, np.float64), int(state.round)
        if round_ not in self.rounds:
            unknown = np.full(len(network), np.nan)
            return Parts(unknown) if self.limit is None else Parts(unknown, unknown, unknown)
        start, linear, infinite = self.predictions
        at = self.rounds.index(round_)
        return parts(network - start, linear[at], None if infinite is None else infinite[at])

    @functools.cached_property
    def predictions(
        self,
    ) -> tuple[Float[np.ndarray, "K m C"], Float[np.ndarray, "r K m C"], Float[np.ndarray, "r K m C"] | None]:
        """The initial functions at ``x`` [K, m, C], and two predictions of how far they move, [r, K, m, C].

        The first prediction trains linearised networks; the second is the flow of infinite width (None without a
        limit). Each is the predicted outputs minus the initial outputs of the same program, so that rounding cancels.
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
        """Returns the diagnostics for a run of another seed; nothing is compiled anew.

        Args:
            algorithm: The algorithm for which these diagnostics were built.
            num_clients: Number of clients.
            seed: Seed of the other run.
        """
        return dataclasses.replace(self, seed=seed, kernels=self.kernels.of_seed(algorithm, num_clients, seed))


def laziness_diagnostics(built: Built, evaluate_every: int, num_examples: int = 256) -> LazinessDiagnostics:
    """Builds a measure of how lazy a run of ``built.algorithm`` is, for ``Evaluation(evaluate_every, measure)``.

    At every evaluation it measures each of the K models. ``feature_learning`` is the distance of the network from its
    linearisation, trained alike (``linearised_paths``). ``initial_kernel`` is the distance of the linearisation from
    the federated flow of infinite width with the same initial function, cohorts, minibatches and rates. ``total`` is
    the distance of the network from that flow. ``drift`` is the relative change of its tangent kernel in the Frobenius
    norm (``kernel_diagnostics``). Distances are root mean squares, relative to how far the linearisation has moved by
    then. They are measured together at the training examples of that kernel and ``num_examples`` test examples, drawn
    at random (without a test split from the training examples).

    If theory does not follow the run, the network has no infinite-width kernel, or there are more than 4000 training
    examples (the kernel is a matrix of them), ``initial_kernel`` and ``total`` are left out; ``why_no_limit`` says why.

    Args:
        built: The run.
        evaluate_every: Rounds between evaluations.
        num_examples: Largest number of training and of test examples.

    Raises:
        ValueError: ``kernel_diagnostics`` rejects the run, ``jax.jvp`` cannot differentiate the model, or clients
            compare several models.
    """
    algorithm, run = built.algorithm, built.description.run
    check_linearisable(built.model, built.data.x[:2], algorithm.schedule)
    kernels = kernel_diagnostics(algorithm, built.model, built.data, run.seed, num_examples, run.seed)
    test = built.examples.train if built.examples.test is None else built.examples.test
    x = jnp.concatenate([kernels.watched.x, test.x[sampled(num_examples, test.x, test.targets)]])
    rounds = tuple(np.cumsum(stretches(run.num_rounds, min(evaluate_every, run.num_rounds))).tolist())
    paths = linearised_paths(algorithm, built.model, built.data, x, rounds)
    limit, why = None, ""
    try:
        limit = _limit(built, x)
    except ValueError as error:
        why = str(error)
    return LazinessDiagnostics(algorithm, built.data, x, rounds, kernels, paths, limit, why, run.seed)


def _limit(built: Built, x: Shaped[Array, "m ..."]) -> Callable[[int], Flow]:
    """Returns a function that builds the flow of infinite width for a seed; raises ``ValueError`` without a limit."""
    run, examples, model = built.description.run, len(built.data.x), in_dtype(built.model)
    if examples > MOST_EXAMPLES:
        raise ValueError(f"data: got {examples} training examples, must be at most {MOST_EXAMPLES} for their kernel")

    def setting(seed: int) -> Setting:
        return setting_of(built.algorithm, built.examples, Scale((1,), 1, run.num_rounds), seed)

    with exact_arithmetic():
        check_analytic(model)
        followed = setting(run.seed)
        x_train = followed.problem.x_train
        _ = followed.followed  # raises where theory does not follow the run
        check_kernels(model, x_train[:2])

    @functools.cache
    def blocks() -> KernelBlocks:
        return kernel_blocks(model.kernel, x_train, np.asarray(x, x_train.dtype))  # type: ignore[arg-type]

    def flow(seed: int) -> Flow:
        of_seed = setting(seed)
        return run_flow(of_seed, blocks(), cohorts(of_seed))

    return flow
