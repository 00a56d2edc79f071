"""A run from given weights and its linearisation there: any model and any algorithm, random or pre-trained weights.

A network and its linearisation ``f(w_0) + J(w_0) (w - w_0)``, trained by the same algorithm, differ by the features
that the network learns. If theory follows the algorithm, the linearisation is not trained: the federated flow of the
tangent kernel at ``w_0`` is the same function to rounding, which a verdict checks.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from fedtangent._src import pytrees
from fedtangent._src.comparison.followed import NotFollowed, of_fixed_width
from fedtangent._src.comparison.laziness import check_linearisable, linearised_paths
from fedtangent._src.comparison.linear_models import MOST_ROWS, empirical_blocks, linearised_follows
from fedtangent._src.comparison.outcomes import BesidePrediction, gap_of
from fedtangent._src.comparison.predicted import Outputs, from_starts, run_flow, starts_of
from fedtangent._src.comparison.settings import Report, Setting
from fedtangent._src.comparison.simulated import cohorts, trained_networks
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.engine.run import check_start
from fedtangent._src.progress import Steps
from fedtangent._src.theory.flow import Flow
from fedtangent._src.types import Algorithm, AnyArray, Key, PyTree

STATEMENT = "network linearised at its start = flow of its tangent kernel, every round"


@dataclasses.dataclass(frozen=True, eq=False)
class FromStart(BesidePrediction):
    """A run from given weights, simulated, and predicted by its linearisation there.

    It has the fields ``setting``, ``simulated``, ``gaps`` and ``times``, and the properties ``curve``, ``rows``,
    ``history`` and ``seconds``, of ``BesidePrediction``.

    Attributes:
        how: Name of the prediction: the flow, or the trained linearised network, with the reason.
        verdicts: Check that the flow equals the linearised network, with wrong flows as controls; empty without a flow.
    """

    method = "linearised at the start"
    how: str

    def __repr__(self) -> str:
        """Returns one line: distance of network and linearisation, and whether the flow equals the linearisation."""
        lines = list(self.notes)
        for verdict in self.verdicts:
            outcome = {True: "holds", False: "FAILS", None: "is undecided"}[verdict.passed]
            lines.append(f"{outcome}: {verdict.statement} (difference {verdict.measured})")
        return f"FromStart({self.setting.title}; {'; '.join(lines)})"

    @property
    def feature_learning(self) -> Float[np.ndarray, "r K"]:
        """The distance of the K networks from their linearisation at the test examples, by evaluated round, [r, K].

        It is relative to how far the whole training moves the linearisation.
        """
        return self.gaps[0].error[..., 0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks below the table: the theory, the network's distance from it, a warning if theory learns nothing."""
        apart = float(self.feature_learning[-1].mean())
        notes = [
            f"prediction: {self.how}",
            f"the network ends {apart:.3g} away from it, relative to how far the prediction moved",
        ]
        first, *_, last = self.gaps[0].predicted
        if not last <= first:
            notes.append(
                f"the prediction does not learn: its {self.setting.problem.what_is_left} goes from {first:.3g} to "
                f"{last:.3g}, so the learning rate is too large for the kernel at the start"
            )
        return tuple(notes)


def compare_from(setting: Setting, progress: bool | None = False, say: Report = lambda line: None) -> FromStart:
    """Simulates a run from the start of its setting and compares it with its linearisation there.

    Args:
        setting: The run, with a start.
        progress: Whether to show progress; None: if the work takes some seconds.
        say: Called with a line of text for each step of the work.
    """
    weights, problem, why = setting.start, setting.problem, linearised_why(setting)
    steps = Steps(say, setting.name, "network from the start")
    with jax.default_matmul_precision("highest"):
        networks, verdicts = trained_networks(setting, 0, progress, start=weights), list[Verdict]()
        if why:
            steps("linearised network")
            train, test = linearised_outputs(setting)()
        else:
            steps("tangent kernel at the start, and its flow")
            train, test = from_starts(flows_at_start(setting, weights), starts_of(networks), networks.rounds)
            # all K models are linearised at the first one's start, and each begins with its own weights
            base, at = setting.model(1), pytrees.take(weights, 0)
            verdicts = [linearised_follows(setting, STATEMENT, base, at, cohorts(setting), weights)]
    gap = gap_of(problem, networks, train, test)
    return FromStart(setting, (networks,), (gap,), tuple(verdicts), steps.stop(), how_at_start(setting))


def at_seed(setting: Setting, why: str) -> Setting:
    """Returns the setting with weights drawn from its seed, as the start at which theory linearises.

    It has K networks of the model's own width, from a single draw.

    Args:
        setting: The run, with independent initialisations.
        why: Why no theory of infinite width follows it.

    Raises:
        NotFollowed: The algorithm has no global models, ``jax.jvp`` cannot differentiate the model, or clients compare
            several models.
    """
    problem, algorithm = setting.problem, of_fixed_width(setting.algorithm)
    try:
        weights = weights_of(algorithm, problem.partition.num_clients, problem.x_train[:2], setting.seed, None)
    except ValueError as error:
        raise NotFollowed(
            f"algorithm: got {algorithm.name!r}, which theory does not follow: {why}; nor can it be linearised: {error}"
        ) from error
    size = setting.size._replace(widths=(1,), draws=1)
    return dataclasses.replace(setting, algorithm=algorithm, rule=why, size=size, start=weights)


def weights_of(
    algorithm: Algorithm, num_clients: int, x: Shaped[AnyArray, "m ..."], seed: int, start: Key | PyTree | None
) -> PyTree:
    """Returns the float64 parameters [K, ...] with which the models begin.

    Args:
        algorithm: An algorithm with global models.
        num_clients: Number of clients.
        x: Some inputs.
        seed: Seed of the run.
        start: A typed key or parameters, as in ``simulate``; None: the weights that ``simulate`` draws from ``seed``.

    Raises:
        ValueError: The start is not valid, the algorithm has no global models, ``jax.jvp`` cannot differentiate its
            model, or its clients compare several models.
    """
    check_start(algorithm, num_clients, start)
    check_linearisable(algorithm.model, x, algorithm.schedule)
    if algorithm.params is None:
        raise ValueError(f"algorithm: got {algorithm.name!r}, must be one with global models")
    weights = algorithm.params(algorithm.init(seed, num_clients, start))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), weights)


def how_at_start(setting: Setting) -> str:
    """Returns the name of the theory that predicts a run by its linearisation at the parameters ``setting.start``.

    The theory is the flow of the tangent kernel at these parameters. If no closed form follows the run, or if the
    kernel has too many rows, it is the linearised network, trained by the same algorithm, and the text also gives the
    reason.
    """
    if why := linearised_why(setting):
        return f"the linearised network, trained by the same algorithm, since there is no closed form: {why}"
    return "the flow of the tangent kernel at the start"


def linearised_why(setting: Setting) -> str:
    """Returns why the linearised network has to be trained; empty if its tangent kernel's flow predicts the run."""
    if isinstance(setting.rule, str):
        return setting.rule
    rows = setting.problem.y_train.size
    return "" if rows <= MOST_ROWS else f"a tangent kernel of {rows} rows (n C) is more than the {MOST_ROWS} allowed"


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


@runtime_checkable
class LinearisedOutputs(Protocol):
    """A function that trains the linearised networks of a run and returns their outputs."""

    def __call__(self, rate_factor: float | None = None, /) -> Outputs:
        """Returns the outputs of the K networks at the evaluated rounds, with E = 1 start each.

        Args:
            rate_factor: Number by which the clients' learning rate is multiplied; None: the same rate.
        """


def linearised_outputs(setting: Setting) -> LinearisedOutputs:
    """Builds a function that trains the networks of a run, linearised at their start, by the run's algorithm."""
    problem, n = setting.problem, len(setting.problem.x_train)
    x = jnp.asarray(np.concatenate([problem.x_train, problem.x_test]))
    paths = linearised_paths(setting.algorithm, setting.model(1), problem.federated(), x, setting.size.rounds)

    def outputs(rate_factor: float | None = None) -> Outputs:
        runs = paths(setting.seed, setting.start, rate_factor)[:, :, None]
        return Outputs(runs[..., :n, :], runs[..., n:, :])

    return outputs
