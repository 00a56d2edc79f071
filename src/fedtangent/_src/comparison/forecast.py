"""``predict``: forecasts a run without training a network: its learning curves, best rate, and rounds to a target.

Initial functions are drawn from the network's prior. The federated flow, with the run's kernel, cohorts, minibatches
and learning rates, changes them round by round, and they are measured as ``simulate`` measures networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from fedtangent._src import pytrees
from fedtangent._src.checks import flag, instance, number, real_array, shown, whole
from fedtangent._src.checks import seed as check_seed
from fedtangent._src.comparison import followed, from_start
from fedtangent._src.comparison.on_features import checked_rotations, feature_outputs, how_on_features
from fedtangent._src.comparison.predicted import (
    MOST_EXACT,
    KernelPlan,
    Outputs,
    Starts,
    at_once,
    from_starts,
    limit_of,
    plan_kernels,
    planned_kernels,
    prior_starts,
    run_flow,
)
from fedtangent._src.comparison.rotations import feature_paths
from fedtangent._src.comparison.settings import Report, Scale, Setting
from fedtangent._src.comparison.simulated import cohorts
from fedtangent._src.comparison.table import expected_accuracy
from fedtangent._src.data.dataset import Dataset
from fedtangent._src.data.examples import Examples, Split
from fedtangent._src.data.federated import federated_data
from fedtangent._src.engine.clients import default_mapping, engine_for
from fedtangent._src.engine.history import History, Measurement, at_start, charge, html_of
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.run import examples_of, simulate
from fedtangent._src.entries import option
from fedtangent._src.kernels.features import kernel_features
from fedtangent._src.kernels.gram import KernelBlocks
from fedtangent._src.kernels.large import LargeKernel, check_file
from fedtangent._src.measures import uncertainty
from fedtangent._src.models.linearised import linearised
from fedtangent._src.progress import progress_of
from fedtangent._src.theory.checks import require_float64
from fedtangent._src.theory.flow import Flow
from fedtangent._src.theory.flow.asymptotics import factors_to_search
from fedtangent._src.theory.flow.tuning import LOWEST, Rates, searched_rates
from fedtangent._src.types import Algorithm, ArrayLike, Cohort, Cost, Key, Prediction, PyTree

BAND = (5, 95)  # percent of the initial functions
TRIED_DRAWS = 4  # initial functions that rates are tried on, the same at every rate
TRIALS = 25  # about how many rates a search tries, for its progress bar
KERNELS = Path("results/kernels")


@dataclasses.dataclass(frozen=True)
class Forecasting:
    """Settings of a forecast: its target, its number of initial functions, and whether learning rates are searched."""

    target: float | None = None
    """Also say in how many rounds and bytes this test accuracy (without class labels: this test loss) is reached."""
    draws: int = 16
    """Initial functions of each model; their mean and band are shown. Two or more."""
    rates: bool = True
    """Off: predict only at the run's own rate, without a search for the largest stable and the best rate."""
    kernel_dir: Path | None = option(None, may_differ=True)
    """Folder for the kernel if it does not fit into memory (default: below the output)."""


class Plan(NamedTuple):
    """A run with checked arguments, ready to be forecast; built by ``plan_of``.

    Attributes:
        setting: The run as theory follows it: algorithm, problem and rounds.
        examples: The training and test examples, on which metrics are measured.
        forecasting: Settings of the forecast.
    """

    setting: Setting
    examples: Examples
    forecasting: Forecasting

    @property
    def loss(self) -> str:
        """The name of the loss among the metrics, as in the history of ``simulate``."""
        return uncertainty.metric_of(self.examples.loss)

    @property
    def rate(self) -> float:
        """The clients' learning rate; of a schedule the largest; NaN for an optimiser in runs without closed form."""
        training = followed.training_of(self.setting.algorithm)
        if training.optimizer is not None and isinstance(self.setting.rule, str):
            return np.nan
        return float(np.max(followed.rates_of(training, self.setting.size.num_rounds)))

    @property
    def draws(self) -> int:
        """The number of initial functions; one for a run with a ``start``."""
        return self.forecasting.draws if self.setting.start is None else 1

    @property
    def at_once(self) -> int:
        """The number of initial functions that are computed together, a divisor of ``draws``."""
        setting, problem = self.setting, self.setting.problem
        points, outputs = len(problem.x_train) + len(problem.x_test), problem.y_train.shape[1]
        return at_once(self.draws, len(setting.size.rounds) * setting.num_models * points * outputs)

    @property
    def how(self) -> str:
        """The name of the theory that predicts the run, with the reason if it is not the flow."""
        if self.setting.start is not None:
            return from_start.how_at_start(self.setting)
        return "the federated flow" if self.is_flow else how_on_features(self.setting)

    @property
    def is_flow(self) -> bool:
        """Whether the federated flow of infinite width predicts the run."""
        return self.setting.start is None and not isinstance(self.setting.rule, str)

    @property
    def main(self) -> str:
        """The name of the test metric to which ``target`` refers: "accuracy", or the loss without class labels."""
        return self.loss if self.examples.train.labels is None else "accuracy"

    @property
    def cost(self) -> Cost:
        """The bytes of a client's message and of the server's broadcast."""
        data = self.examples.data
        return self.setting.algorithm.cost(data, engine_for(data, default_mapping()))

    @property
    def splits(self) -> dict[str, Split]:
        """The examples on which metrics are measured, "train" and "test"; without test examples both are the same."""
        train, test = self.examples.train, self.examples.test
        return {"train": train, "test": train if test is None else test}

    def named(self, split: str) -> str:
        """Returns the name of "train" or "test" in tables, with its size if it is a sample.

        Args:
            split: "train" or "test"; without test examples, "test" is the training examples.
        """
        is_train = split == "train" or self.examples.test is None
        return split + self.examples.train_name.removeprefix("train") if is_train else split


class Curve(NamedTuple):
    """Predicted metrics along a run from each of E initial functions.

    ``rate`` is the clients' learning rate. ``values`` holds metrics [E, r] at ``rounds`` by (split, metric), such as
    ("test", "accuracy"), named as in ``simulate``.
    """

    rate: float
    rounds: Int[np.ndarray, "r"]
    values: dict[tuple[str, str], Float[np.ndarray, "E r"]]  # (split, metric) -> [E, r]

    def mean(self, split: str, metric: str) -> Float[np.ndarray, "r"]:
        """Returns the mean of a metric over the initial functions at each round, [r].

        Args:
            split: "train" or "test".
            metric: Name of the metric, as in ``simulate``.
        """
        return self.values[split, metric].mean(axis=0)

    def band(self, split: str, metric: str) -> tuple[Float[np.ndarray, "r"], Float[np.ndarray, "r"]]:
        """Returns the 5th and the 95th percentile of a metric over the initial functions at each round, [r] each.

        Args:
            split: "train" or "test".
            metric: Name of the metric, as in ``simulate``.
        """
        with np.errstate(invalid="ignore"):
            low, high = np.percentile(self.values[split, metric], BAND, axis=0)
        return low, high


class Reached(NamedTuple):
    """The round in which a run reaches a target, on average over its initial functions, and the bytes until then.

    Attributes:
        round: First evaluated round at the target; None if no evaluated round reaches it.
        uplink_bytes: Bytes from clients to server until that round; None if ``round`` is None.
        nearest: Best value of the metric at any evaluated round after the start (at the start, if it is the only one).
    """

    round: int | None
    uplink_bytes: int | None
    nearest: float


class Forecast(NamedTuple):
    """The forecast of a run: learning curves, learning rates, bytes on the wire, and metrics after many rounds.

    Attributes:
        plan: The run.
        given: Curve at the run's learning rate.
        best: Curve at the best rate; at the run's rate if none was searched.
        rates: Result of the search for rates; None without a search.
        uplink_bytes, downlink_bytes: Bytes from the start to each evaluated round.
        limit: Test metrics of the mean of the models after infinitely many rounds, if there is a target that ``best``
            does not reach; else None, as for a limit that theory does not know.
        fastest: Curve at the tried rate that reaches the target in the fewest rounds; None without one.
    """

    plan: Plan
    given: Curve
    best: Curve
    rates: Rates | None
    uplink_bytes: Int[np.ndarray, "r"]
    downlink_bytes: Int[np.ndarray, "r"]
    limit: dict[str, float] | None
    fastest: Curve | None = None

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.plan.setting.algorithm.name

    @property
    def history(self) -> History:
        """The learning curve at the run's rate as a ``History``: means over the initial functions, with bands.

        ``History.rounds`` is empty, because nothing was trained.
        """
        curve, splits = self.given, [key for key in self.given.values if self.plan.examples.test or key[0] == "train"]
        evaluations = [
            Measurement(
                int(round_),
                {
                    self.plan.named(split): {m: float(curve.mean(split, m)[i]) for of, m in splits if of == split}
                    for split in dict(splits)
                },
                int(self.uplink_bytes[i]),
                int(self.downlink_bytes[i]),
                0.0,
            )
            for i, round_ in enumerate(curve.rounds)
        ]
        several = splits if self.plan.draws > 1 else []
        bands = {f"{self.plan.named(split)}.{metric}": curve.band(split, metric) for split, metric in several}
        return History(evaluations, {}, self.plan.cost, bands, is_predicted=True)

    @property
    def loss(self) -> float:
        """The test loss after the last round at the best rate, as a mean over the initial functions.

        Without test examples it is the training loss; without a search for rates it is that at the run's rate.
        """
        return float(self.best.mean("test", self.plan.loss)[-1])

    def __repr__(self) -> str:
        """Returns one line: the final test loss at the run's and at the best rate, the stable rates, and the theory."""
        rates, loss = self.rates, float(self.given.mean("test", self.plan.loss)[-1])
        at_rate = ""
        if rates is not None:
            stable = "stable" if self.given.rate <= rates.stable else "not stable"
            at_rate = f" at the rate {self.given.rate:.4g} ({stable}; the largest stable rate is {rates.stable:.4g}), "
            at_rate += f"{self.loss:.4g} at the best rate {rates.best:.4g}"
        points = "test" if self.plan.setting.problem.points == "test" else "training"
        by = (
            f"; by {self.plan.how}"
            if self.plan.setting.start is not None or isinstance(self.plan.setting.rule, str)
            else ""
        )
        return f"Forecast({self.name}, {points} loss after round {self.best.rounds[-1]}: {loss:.4g}{at_rate}{by})"

    def _repr_html_(self) -> str:
        return html_of(self)

    def reached(self, target: float, curve: Curve) -> Reached:
        """Finds when ``curve`` reaches ``target`` on the test metric ``Plan.main``, and the uplink bytes until then.

        Args:
            target: Value of the metric.
            curve: One of the curves of this forecast: ``given``, ``best`` or ``fastest``.
        """
        values, rising = curve.mean("test", self.plan.main), self.plan.main == "accuracy"
        round_ = rounds_to_target(curve.rounds, values, target, rising=rising)
        after = values[1:] if len(values) > 1 else values
        sent = None if round_ is None else int(self.uplink_bytes[curve.rounds == round_][0])
        return Reached(round_, sent, float((np.fmax if rising else np.fmin).reduce(after)))


def rounds_to_target(rounds: ArrayLike, values: ArrayLike, target: float, *, rising: bool) -> int | None:
    """Returns the first of ``rounds`` at which ``values`` reach ``target``; None if none does (NaN does not).

    For instance ``rounds_to_target([0, 5, 10], [0.1, 0.7, 0.9], 0.6, rising=True)`` is 5.

    Args:
        rounds: Round numbers, [r].
        values: The metric after each of these rounds, [r].
        target: The value to reach.
        rising: Whether the metric reaches the target from below, as an accuracy does, or from above, as a loss does.

    Raises:
        ValueError: ``rounds`` and ``values`` are not two lists of equally many numbers, or ``target`` is no number.
    """
    at, metric = real_array("rounds", rounds), real_array("values", values)
    if at.ndim != 1:
        raise ValueError(f"rounds: got shape {at.shape}, must be a list of round numbers, [r]")
    if at.shape != metric.shape:
        raise ValueError(f"values: got shape {metric.shape}, must have the shape of rounds, {at.shape}")
    number("target", target)
    reached = np.flatnonzero(metric >= target if rising else metric <= target)
    return int(at[reached[0]]) if len(reached) else None


def predict(
    algorithm: Algorithm,
    data: Dataset | str | tuple[Any, ...] | Examples,
    clients: Any = None,
    *,
    num_rounds: int,
    seed: int = 0,
    start: Key | PyTree | None = None,
    evaluation: Evaluation = Evaluation(),
    forecasting: Forecasting = Forecasting(),
) -> Forecast:
    """Predicts a run without training a network: learning curves, stable and best rate, rounds to a target.

    The prediction is of the algorithm's network at infinite width. Its initial functions are drawn from the prior, for
    more than 8,000 points by initialising networks of the algorithm's width. With a ``start`` the network begins there
    and is linearised at these weights: any model, of any width. An algorithm without a closed form is run on the
    features of the kernel if a measurement shows that the kernel determines its runs, otherwise on the network
    linearised at a start. Predictions are made in float64 (``fedtangent.enable_x64()``), except that the kernel of
    more than 8,000 points is in float32.

    Args:
        algorithm: The algorithm.
        data: A ``Dataset``, the name of one, or arrays (x_train, y_train) or (x_train, y_train, x_test, y_test).
            Without test examples the training examples take their place.
        clients: Who holds which training example: a ``Partition``, a list of index arrays, or the user of each example
            [n].
        num_rounds: Communication rounds R.
        seed: Seed of initial functions, schedule and minibatches.
        start: Beginning of the models, as in ``simulate``: parameters, for example pre-trained weights, of one model or
            of each, or a typed key to initialise from; None: initial functions are drawn from the prior, or weights are
            initialised from ``seed`` where theory has to linearise at a start.
        evaluation: Rounds between evaluations (default: 1), and progress.
        forecasting: Target, number of initial functions, and whether rates are searched.

    Returns:
        Learning curves with bands at the run's rate and at the best rate, and bytes on the wire.

    Raises:
        ValueError: 64-bit types are off, theory does not follow the algorithm (the message says why), an argument is
            out of range, or the kernel fits neither memory nor disk. It is raised before a run is computed, except if
            runs on the features of the kernel show that the kernel does not determine them.
    """
    require_float64()
    examples = examples_of(algorithm, data, clients)
    plan = plan_of(algorithm, examples, num_rounds, seed, evaluation, forecasting, start)
    return next(forecasts([plan], evaluation.progress))


def forecasts(
    plans: Sequence[Plan], progress: bool | None = False, say: Report = lambda line: None
) -> Iterator[Forecast]:
    """Computes the forecast of each run in turn; the kernels are computed once.

    Args:
        plans: Runs with the same data, network and start; built by ``plan_of``.
        progress: Whether to show progress.
        say: Called with a line of text for each step of the work.

    Yields:
        One forecast for each plan.

    Raises:
        ValueError: Memory and disk have no room for the kernels.
        NotFollowed: No theory follows a run.
    """
    kernels = None
    if plans[0].setting.start is None:
        memory = memory_of(plans[0])
        say(str(memory))
        kernels = planned_kernels(plans[0].setting, memory, progress)
    for plan in plans:
        yield forecast(plan, kernels, progress, say)


def memory_of(plan: Plan) -> KernelPlan:
    """Computes the memory that the kernels of a run need.

    Raises ``ValueError`` if memory and disk have no room, or if the kernel's file was changed since it was written.
    """
    memory = plan_kernels(plan.setting, plan.at_once, Path(plan.forecasting.kernel_dir or KERNELS))
    if memory.folder is not None:
        check_file(plan.setting.kernel, plan.setting.problem.x_train, memory.folder)
    return memory


def check_forecasting(forecasting: Forecasting) -> None:
    """Raises ``ValueError`` for a setting of a forecast that has the wrong type or is out of range."""
    instance("forecasting", forecasting, Forecasting)
    whole("draws", forecasting.draws, 2)
    flag("rates", forecasting.rates)
    if forecasting.target is not None:
        number("target", forecasting.target, above=0)
    if not isinstance(forecasting.kernel_dir, str | Path | None):
        raise ValueError(f"kernel_dir: got {shown(forecasting.kernel_dir)}, must be a path or None")


def plan_of(
    algorithm: Algorithm,
    examples: Examples,
    num_rounds: int,
    seed: int,
    evaluation: Evaluation = Evaluation(),
    forecasting: Forecasting = Forecasting(),
    start: Key | PyTree | None = None,
) -> Plan:
    """Checks the arguments of ``predict`` and returns the run as a ``Plan``; raises ``ValueError`` like ``predict``."""
    followed.check_evaluation(evaluation)
    check_forecasting(forecasting)
    whole("num_rounds", num_rounds)
    seed = check_seed(seed)
    weights = None
    if start is not None or algorithm.model.kernel is None:
        weights = from_start.weights_of(algorithm, examples.clients.num_clients, examples.data.x[:2], seed, start)
    size = Scale((1,), 1, num_rounds, 1 if evaluation.every is None else evaluation.every)
    setting = followed.setting_of(algorithm, examples, size, seed, most_points=None, own_width=True, start=weights)
    if isinstance(setting.rule, str) or (weights is not None and from_start.linearised_why(setting)):
        _check_run(setting, forecasting)
    if weights is None:
        followed.check_kernels(algorithm.model, setting.problem.x_train[:2])
    plan = Plan(setting, examples, forecasting)
    if plan.main == "accuracy" and forecasting.target is not None:
        number("target", forecasting.target, above=0, at_most=1)
    return plan


def _check_run(setting: Setting, forecasting: Forecasting) -> None:
    """Raises ``ValueError`` if a run, for which linear models have to be trained, cannot be forecast.

    Reasons are too many points, an algorithm that cannot train another model than its own, or a search for a learning
    rate that is fixed.
    """
    problem, algorithm = setting.problem, setting.algorithm
    points = len(problem.x_train) + len(problem.x_test)
    if setting.start is None and points > MOST_EXACT:
        raise ValueError(
            f"data: got {points} training and test points, must be at most {MOST_EXACT} for {algorithm.name!r}, which "
            f"has no closed form: {setting.rule}"
        )
    algorithm.on(algorithm.model)  # raises an error that says what can be done
    if forecasting.rates and (why := rate_is_fixed(algorithm)):
        raise ValueError(f"rates: must be off (Forecasting(rates=False), --no-rates) for {algorithm.name!r}: {why}")


def rate_is_fixed(algorithm: Algorithm) -> str:
    """Returns the reason why an algorithm cannot be built at another learning rate; empty if it can."""
    try:
        algorithm.on(algorithm.model, 0.5)
    except ValueError as error:
        return str(error)
    return ""


def forecast(
    plan: Plan,
    kernels: KernelBlocks | LargeKernel | None,
    progress: bool | None = False,
    say: Report = lambda line: None,
) -> Forecast:
    """Computes the forecast of one run.

    Args:
        plan: The run.
        kernels: The kernels of its setting; None for a plan with a start, whose models are linearised there.
        progress: Whether to show progress.
        say: Called with a line of text for each step of the work.

    Raises:
        NotFollowed: No theory follows the run.
    """
    with jax.default_matmul_precision("highest"):
        runs, name = _runs_of(plan, kernels, say), plan.setting.name
        plan = runs.plan
        say(f"{name}: learning curve, {runs.draws} starts")
        curve = runs.curve(plan.rate, progress)
        is_drawn = plan.setting.algorithm.schedule.poll is None
        traffic = _traffic(plan, cohorts(plan.setting)) if is_drawn else _polled_traffic(plan, kernels, runs.starts)
        forecast = Forecast(plan, curve, curve, None, *traffic, None)
        if plan.forecasting.rates:
            say(f"{name}: stable and best rate, {runs.tried} starts")
            rates = _rates(runs, float(curve.values["train", plan.loss][: runs.tried, 0].mean()), progress)
            say(f"{name}: learning curve at the best rate")
            forecast = forecast._replace(best=runs.curve(rates.best, progress), rates=rates)
            fastest = _fastest_rate(runs, rates)
            if fastest is not None:
                say(f"{name}: learning curve at the rate of the fewest rounds to the target")
                forecast = forecast._replace(fastest=runs.curve(fastest, progress))
        target = plan.forecasting.target
        never = target is not None and forecast.reached(target, forecast.best).round is None
        if never and kernels is not None and runs.flows:
            forecast = forecast._replace(limit=_at_limit(plan.setting, kernels, runs.flows[0]))
    return forecast


def ranked(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Sorts forecasts by test loss after the last round at the best rate, lowest first, infinite and NaN ones last."""
    return sorted(forecasts, key=lambda forecast: forecast.loss if np.isfinite(forecast.loss) else np.inf)


def _runs_of(plan: Plan, kernels: KernelBlocks | LargeKernel | None, say: Report) -> _Runs:
    """Draws the initial functions of a run, and builds the function that predicts the run from them.

    Without ``kernels``, or if they do not determine the run, the networks are linearised at a start.
    """
    setting, problem = plan.setting, plan.setting.problem
    if kernels is not None:
        starts = prior_starts(setting, kernels, plan.draws)
    else:
        say(f"{setting.name}: linearised at the start")
        x = jnp.asarray(np.concatenate([problem.x_train, problem.x_test]))
        functions = jax.jit(jax.vmap(setting.algorithm.model.apply, (0, None)))(setting.start, x)
        starts = Starts(*np.split(np.asarray(functions, np.float64)[None], [len(problem.x_train)], axis=2))
    if kernels is None and from_start.linearised_why(setting):
        trained = from_start.linearised_outputs(setting)
        return _Runs(plan, (), starts, lambda _, rounds, factor: _after(rounds, setting, trained(factor)))
    if isinstance(setting.rule, str):
        assert isinstance(kernels, KernelBlocks)  # checked with the plan
        say(f"{setting.name}: whether the kernel determines the run, on rotated features")
        try:
            return _Runs(plan, (), *_feature_outputs(setting, kernels, starts))
        except followed.NotFollowed as error:
            return _runs_of(plan._replace(setting=from_start.at_seed(setting, str(error))), None, say)
    if kernels is None:
        flows = tuple(from_start.flows_at_start(setting, setting.start))
    else:
        flows = (run_flow(setting, kernels, cohorts(setting)),)
    return _Runs(plan, flows, starts, _flow_outputs(plan, flows))


@runtime_checkable
class _OutputsAtRate(Protocol):
    """A function that predicts runs from initial functions at a multiple of the clients' learning rate."""

    def __call__(self, starts: Starts, rounds: Sequence[int], factor: float | None, /) -> Outputs:
        """Returns the outputs after ``rounds`` of the run from each initial function.

        Args:
            starts: E initial functions of each of the K models.
            rounds: Numbers of finished rounds.
            factor: Number by which the rate is multiplied; None: the same rate.
        """


def _flow_outputs(plan: Plan, flows: Sequence[Flow]) -> _OutputsAtRate:
    """Builds a function that predicts runs by ``flows``: one flow for all K models, or one for each model."""
    sample = plan.examples.train_rows
    rows = None if isinstance(sample, slice) else sample

    def outputs(starts: Starts, rounds: Sequence[int], factor: float | None) -> Outputs:
        numbers = flows[0].rounds
        at_rate = numbers._replace(learning_rate=numbers.learning_rate * (1.0 if factor is None else factor))
        faster = [dataclasses.replace(flow, rounds=at_rate) for flow in flows]
        return from_starts(faster[0] if len(flows) == 1 else faster, starts, rounds, rows)

    return outputs


def _feature_outputs(setting: Setting, kernels: KernelBlocks, starts: Starts) -> tuple[Starts, _OutputsAtRate]:
    """Builds a function that predicts a run by training linear models on the kernel's features.

    The result is a pair: ``starts`` projected onto the functions that the features can represent, and the function
    that predicts from them. Raises ``NotFollowed`` if the kernel does not determine the runs.
    """
    problem, n = setting.problem, len(setting.problem.x_train)
    paths = feature_paths(setting.algorithm, problem.y_train, problem.partition, setting.size.rounds)
    features = kernel_features(kernels, problem.y_train.shape[1])
    functions = features.spanned(np.concatenate(starts, axis=2))  # [E, K, points, C]
    checked_rotations(setting, paths, features, functions[0])

    def outputs(starts: Starts, rounds: Sequence[int], factor: float | None) -> Outputs:
        return _after(rounds, setting, feature_outputs(paths, features, setting, starts, factor))

    return Starts(functions[:, :, :n], functions[:, :, n:]), outputs


def _after(rounds: Sequence[int], setting: Setting, outputs: Outputs) -> Outputs:
    """Returns ``outputs`` at ``rounds`` only; ``outputs`` has all evaluated rounds of the setting."""
    places = [setting.size.rounds.index(round_) for round_ in rounds]
    return Outputs(outputs.train[places], outputs.test[places])


class _Runs(NamedTuple):
    """The initial functions of a plan, and a function that predicts runs from them at any learning rate.

    ``flows`` is one flow for all models, or one for each; it is empty if linear models are trained instead.
    """

    plan: Plan
    flows: tuple[Flow, ...]  # one for all models, or one for each; none for a run on the features of the kernel
    starts: Starts
    outputs: _OutputsAtRate

    @property
    def draws(self) -> int:
        """The number of initial functions."""
        return len(self.starts.train)

    @property
    def tried(self) -> int:
        """The number of initial functions on which learning rates are tried."""
        return min(TRIED_DRAWS, self.draws)

    def measured(
        self, rate: float, rounds: Sequence[int], draws: slice
    ) -> dict[tuple[str, str], Float[np.ndarray, "E r"]]:
        """Returns metrics of runs at the clients' learning rate ``rate`` after ``rounds``, by (split, metric), [E, r].

        ``draws`` selects E of the initial functions. Without a search for rates, ``rate`` is not used.
        """
        splits, loss, rows = self.plan.splits, self.plan.examples.loss, self.plan.examples.train_rows
        factor = rate / self.plan.rate if self.plan.forecasting.rates else None  # one program for all rates
        runs = self.outputs(Starts(*(part[draws] for part in self.starts)), rounds, factor)
        values: dict[tuple[str, str], np.ndarray] = {}
        for split, functions in runs._asdict().items():
            if functions.shape[3] > splits[split].num_examples:  # at all training examples
                functions = functions[..., rows, :]
            metrics = [
                [uncertainty.measure(Prediction(f.mean(axis=0), f), *splits[split][1:], loss) for f in run]
                for run in functions.transpose(2, 0, 1, 3, 4)  # [E, r, K, ., C]
            ]
            for name in metrics[0][0]:
                values[split, name] = np.array([[of_round[name] for of_round in run] for run in metrics])
        return values

    def losses(self, rate: float) -> tuple[float, float]:
        """Returns training and test loss after the last round at ``rate``, means over ``tried`` initial functions."""
        values = self.measured(rate, (self.plan.setting.size.num_rounds,), slice(self.tried))
        train, test = (float(values[split, self.plan.loss].mean()) for split in ("train", "test"))
        return train, test

    def curve(self, rate: float, progress: bool | None) -> Curve:
        """Computes all metrics at all evaluated rounds of runs at the clients' learning rate ``rate``."""
        setting, step = self.plan.setting, self.plan.at_once
        values: dict[tuple[str, str], list[np.ndarray]] = {}
        with progress_of(self.draws, f"{setting.name}: learning curve", "run", shown=progress) as bar:
            for first in range(0, self.draws, step):
                for key, value in self.measured(rate, setting.size.rounds, slice(first, first + step)).items():
                    values.setdefault(key, []).append(value)
                bar.update(step)
        return Curve(rate, np.array(setting.size.rounds), {key: np.concatenate(parts) for key, parts in values.items()})


def _rates(runs: _Runs, first_loss: float, progress: bool | None) -> Rates:
    """Searches the largest stable and the best learning rate; ``first_loss`` is the training loss before training."""
    rate, bound, gentle, most = runs.plan.rate, None, LOWEST * runs.plan.rate, np.inf
    for flow in runs.flows[:1]:
        if isinstance(flow.kernels, LargeKernel):  # whose eigenvalues are unknown
            continue
        if flow.kind.algorithm == "fed_avg" and not flow.kind.has_server_momentum and not flow.kind.stepwise:
            scale = rate / float(np.max(flow.rounds.learning_rate))
            bound = flow.stability().max_stable_learning_rate * scale
        factor, end = factors_to_search(flow)
        gentle, most = rate * factor if factor < np.inf else rate, rate * end
    with progress_of(TRIALS, f"{runs.plan.setting.name}: rates", "trial", shown=progress) as bar:

        def losses(rate: float) -> tuple[float, float]:
            bar.update(1)
            return runs.losses(rate) if rate < most else (np.inf, np.inf)

        return searched_rates(losses, rate, first_loss, gentle)._replace(guaranteed=bound)


def _fastest_rate(runs: _Runs, rates: Rates) -> float | None:
    """Returns the tried stable rate that reaches the target in the fewest rounds; None without such a rate."""
    plan, target = runs.plan, runs.plan.forecasting.target
    if target is None:
        return None
    reached: list[tuple[int, float, float]] = []
    for rate, loss in zip(rates.tried, rates.losses, strict=True):
        if rate > rates.stable or not np.isfinite(loss):
            continue
        values = runs.measured(float(rate), plan.setting.size.rounds, slice(runs.tried))["test", plan.main].mean(axis=0)
        round_ = rounds_to_target(plan.setting.size.rounds, values, target, rising=plan.main == "accuracy")
        if round_ is not None:
            reached.append((round_, float(loss), float(rate)))
    return min(reached)[2] if reached else None


def _traffic(plan: Plan, cohorts: Cohort) -> tuple[Num[np.ndarray, "r"], Num[np.ndarray, "r"]]:
    """Computes uplink and downlink bytes until each evaluated round, [r] each, as ``simulate`` counts them."""
    setting = plan.setting
    sizes = np.asarray(setting.problem.partition.sizes)
    contacted = followed.contacted_clients(setting.algorithm.schedule, cohorts, sizes, setting.seed)
    examples = sizes[np.asarray(cohorts.client)] * (np.asarray(cohorts.weight) > 0)
    return _sent(plan, {"cohort": cohorts, "contacted": contacted, "examples": examples})


def _polled_traffic(
    plan: Plan, kernels: KernelBlocks | LargeKernel | None, starts: Starts
) -> tuple[Num[np.ndarray, "r"], Num[np.ndarray, "r"]]:
    """Computes uplink and downlink bytes, [r] each, of a run whose schedule asks clients about the models.

    The cohorts depend on the models, so linear models are trained from the first initial functions to record them.
    """
    setting, problem, start = plan.setting, plan.setting.problem, plan.setting.start
    if start is not None:
        data, model = problem.federated(), linearised(setting.model(1), pytrees.take(start, 0))
    else:
        assert isinstance(kernels, KernelBlocks)  # checked with the plan
        features = kernel_features(kernels, problem.y_train.shape[1])
        model, start = features.model, features.start(np.concatenate([part[0] for part in starts], axis=1))
        data = federated_data(features.train, problem.y_train, problem.partition, dtype=jnp.float64)
    silent, rounds = Evaluation(progress=False), setting.size.num_rounds
    run = simulate(
        setting.algorithm.on(model), data, num_rounds=rounds, seed=setting.seed, start=start, evaluation=silent
    )
    return _sent(plan, run.history.rounds)


def _sent(plan: Plan, infos: dict[str, Any]) -> tuple[Num[np.ndarray, "r"], Num[np.ndarray, "r"]]:
    """Computes uplink and downlink bytes until each evaluated round, [r] each.

    ``infos`` holds the algorithm's reports of all rounds, such as its cohorts, [R, ...].
    """
    of_round = [pytrees.take(infos, r) for r in range(plan.setting.size.num_rounds)]
    sent = [at_start(plan.cost), *(charge(plan.cost, info) for info in of_round)]
    up, down = np.cumsum(np.array(sent, np.int64), axis=0)[list(plan.setting.size.rounds)].T
    return up, down


def _at_limit(setting: Setting, kernels: KernelBlocks | LargeKernel, flow: Flow) -> dict[str, float] | None:
    """Computes test metrics of the mean of K models after infinitely many rounds; None if they are unknown."""
    is_constant = np.ptp(np.ravel(setting.followed.learning_rate)) == 0  # a schedule may end before the limit
    if not flow.kind.is_linear or flow.kind.decays or not is_constant:
        return None
    problem = setting.problem
    limit = limit_of(problem, kernels)[0]
    if limit is None:
        return None
    mean, m = np.asarray(limit.mean), len(problem.x_test)
    cov = np.zeros((m, m)) if limit.cov is None else np.asarray(limit.cov) / setting.num_models
    mse = {"mse": float(np.mean((mean - problem.y_test) ** 2) + np.mean(np.diag(cov)))}
    accuracy = expected_accuracy(problem, mean, cov)
    return mse if accuracy is None else mse | {"accuracy": accuracy}
