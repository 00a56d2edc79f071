"""A run from given weights and its linearisation there: any model and any algorithm, random or pre-trained weights.

A network and its linearisation ``f(w_0) + J(w_0) (w - w_0)``, trained by the same algorithm, differ by the features
that the network learns. If theory follows the algorithm, the linearisation is not trained: the federated flow of the
tangent kernel at ``w_0`` is the same function to rounding, which a verdict checks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedtangent._src import pytrees
from fedtangent._src.checks import whole
from fedtangent._src.comparison.followed import check_evaluation, evaluated_every, rule_of, setting_of
from fedtangent._src.comparison.laziness.along import check_linearisable, linearised_paths
from fedtangent._src.comparison.linear_models import MOST_ROWS, empirical_blocks, linearised_follows
from fedtangent._src.comparison.predicted import from_starts, run_flow, starts_of
from fedtangent._src.comparison.settings import Scale, Setting
from fedtangent._src.comparison.simulated import Simulated, cohorts, history_beside, trained_networks
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.examples import Examples
from fedtangent._src.engine.history import History, html_of
from fedtangent._src.engine.loop import Evaluation
from fedtangent._src.engine.run import check_start
from fedtangent._src.theory.flow import Flow
from fedtangent._src.types import Algorithm, Key, PyTree

STATEMENT = "network linearised at its start = flow of its tangent kernel, every round"


class FromStart(NamedTuple):
    """A run from given weights, simulated, and predicted by its linearisation there.

    Attributes:
        setting: Data, clients and algorithm.
        simulated: Outputs of the K networks at the evaluated rounds.
        train: Predicted outputs at the training examples, [r, K, 1, n, C].
        test: Predicted outputs at the test examples, [r, K, 1, m, C].
        how: Name of the prediction: the flow, or the linearised network that was trained, with the reason.
        verdicts: Check that the flow equals the linearised network, with wrong flows as controls; empty without a flow.
        seconds: Time of the comparison.
    """

    setting: Setting
    simulated: Simulated
    train: Float[np.ndarray, "r K 1 n C"]
    test: Float[np.ndarray, "r K 1 m C"]
    how: str
    verdicts: tuple[Verdict, ...]
    seconds: float

    def __repr__(self) -> str:
        """Returns one line: the distance between network and linearisation, and whether the flow is the latter."""
        apart = float(self.feature_learning[-1].mean())
        lines = [
            f"prediction: {self.how}",
            f"the network ends {apart:.3g} away from it, relative to how far the prediction moved",
        ]
        first, *_, last = self.setting.problem.left(self.train)
        if not last <= first:
            lines.append(
                f"the prediction does not learn: its {self.setting.problem.what_is_left} goes from {first:.3g} to "
                f"{last:.3g}, so the learning rate is too large for the kernel at the start"
            )
        for verdict in self.verdicts:
            outcome = {True: "holds", False: "FAILS", None: "is undecided"}[verdict.passed]
            lines.append(f"{outcome}: {verdict.statement} (difference {verdict.measured})")
        return f"FromStart({self.setting.title}; {'; '.join(lines)})"

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def feature_learning(self) -> Float[np.ndarray, "r K"]:
        """The distance of networks from their linearisation at the test examples, [r, K].

        It is relative to how far training moves the linearisation.
        """
        moved = np.broadcast_to(self.test[-1] - self.test[0], self.test.shape)
        return relative_errors(self.test, self.simulated.test, moved)[..., 0]

    @property
    def history(self) -> History:
        """The metrics of the networks along the run; ``predicted`` has the metrics of their linearisation."""
        return history_beside(self.setting.problem, self.simulated, self.train, self.test)


def compare_from(
    algorithm: Algorithm, examples: Examples, num_rounds: int, seed: int, start: Key | PyTree, evaluation: Evaluation
) -> FromStart:
    """Simulates a run from given weights and compares it with its linearisation there.

    Args:
        algorithm: The algorithm.
        examples: Training and test examples, and their clients.
        num_rounds: Rounds R.
        seed: Seed of schedule and minibatches.
        start: A typed key or parameters.
        evaluation: Rounds between evaluations, and progress.

    Raises:
        ValueError: As ``compare`` raises.
    """
    check_evaluation(evaluation)
    whole("num_rounds", num_rounds)
    weights, begun = weights_of(algorithm, examples, seed, start), time.perf_counter()
    try:
        rule_of(algorithm, examples.clients, num_rounds, seed)
        why = _too_large(algorithm, examples)
    except ValueError as error:
        why = str(error)
    size = Scale((1,), 1, num_rounds, evaluated_every(evaluation, num_rounds))
    setting = setting_of(algorithm, examples, size, seed, own_width=True, is_followed=not why)
    with jax.default_matmul_precision("highest"):
        networks, verdicts = trained_networks(setting, 1, evaluation.progress, start=weights), list[Verdict]()
        if why:
            train, test = _trained_linearised(setting, weights, networks.rounds)
            how = f"the linearised network, trained by the same algorithm, since there is no closed form: {why}"
        else:
            train, test = from_starts(flows_at_start(setting, weights), starts_of(networks), networks.rounds)
            how = "the flow of the tangent kernel at the start"
            # all K models are linearised at the first one's start, and each begins with its own weights
            base, at = setting.model(1), pytrees.take(weights, 0)
            verdicts = [linearised_follows(setting, STATEMENT, base, at, cohorts(setting), weights)]
    return FromStart(setting, networks, train, test, how, tuple(verdicts), time.perf_counter() - begun)


def weights_of(algorithm: Algorithm, examples: Examples, seed: int, start: Key | PyTree) -> PyTree:
    """Returns the float64 parameters [K, ...] that the models begin with.

    Args:
        algorithm: The algorithm.
        examples: Its examples.
        seed: Seed of the run.
        start: A typed key or parameters, as in ``simulate``.

    Raises:
        ValueError: Parameters of other shapes, an algorithm without global models, or a model that cannot be
            differentiated forwards.
    """
    num_clients = examples.clients.num_clients
    check_start(algorithm, num_clients, start)
    check_linearisable(algorithm.model, examples.data.x[:2])
    if algorithm.params is None:
        raise ValueError(f"algorithm: got {algorithm.name}, must be one of global models")
    weights = algorithm.params(algorithm.init(seed, num_clients, start))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights)


def _too_large(algorithm: Algorithm, examples: Examples) -> str:
    """Returns the reason why the tangent kernel at the start is too large; empty if it is not."""
    rows = len(examples.dataset.x_train) * algorithm.model.output_size
    return "" if rows <= MOST_ROWS else f"a tangent kernel of {rows} rows (n C) is more than the {MOST_ROWS} allowed"


def check_rows(algorithm: Algorithm, examples: Examples) -> None:
    """Raises ``ValueError`` for too many training examples.

    Args:
        algorithm: The algorithm, whose model has C outputs.
        examples: Examples of the run; a whole tangent kernel has a row for each training example and output.
    """
    if why := _too_large(algorithm, examples):
        raise ValueError(f"data: got {len(examples.dataset.x_train)} training examples: {why}")


def flows_at_start(setting: Setting, weights: PyTree) -> list[Flow]:
    """Builds the flow of each of the K models, with the whole tangent kernel at that model's weights.

    Args:
        setting: The run.
        weights: Parameters of the models, [K, ...].
    """
    model, plan, problem = setting.model(1), cohorts(setting), setting.problem
    at = (pytrees.take(weights, k) for k in range(setting.num_models))
    blocks = (empirical_blocks(model, params, problem.x_train, problem.x_test) for params in at)
    return [run_flow(setting, of_model, plan, outputs="full") for of_model in blocks]


def _trained_linearised(
    setting: Setting, weights: PyTree, rounds: Sequence[int]
) -> tuple[Float[np.ndarray, "r K 1 n C"], Float[np.ndarray, "r K 1 m C"]]:
    """Trains the linearised networks; returns outputs at training and test examples, [r, K, 1, ., C] each."""
    problem, algorithm = setting.problem, setting.algorithm
    x, n = jnp.asarray(np.concatenate([problem.x_train, problem.x_test])), len(problem.x_train)
    train_paths = linearised_paths(algorithm.on, setting.model(1), problem.federated(), x, rounds)
    outputs = train_paths(setting.seed, weights)[:, :, None]
    return outputs[..., :n, :], outputs[..., n:, :]
