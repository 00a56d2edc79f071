"""Checks what the Local-GD paper's second version claims of separable classification, for any number of local steps.

Its abstract (arXiv 2412.07971, 2026) says that Local-GD converges in direction exactly to the centralised model for any
number L of local steps, at a rate in L, and that this extends to Local-SGD. Its theorems were not at hand. The rate
checked here is known for gradient descent (Soudry et al., 2018): after k rounds of L steps of size eta on the mean of M
nodes' exponential losses the late model is ``ln(eta L k / M) w`` plus a constant, where w is the hard-margin support
vector machine (eq. 15).

Every example is a support vector here, so the constant is in the span of the support vectors. Deviations of margins
fall as 1 / k, or as ``k^-s`` with s the least eigenvalue of ``D G D``, where G is the Gram matrix of signed examples
and ``D^2`` are their dual weights. Only problems with s > ``SLOWEST`` are drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtangent._src.comparison.statistics import log_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.local_gd import Descent, LinearProblem, Size, simulated
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.federated.algorithms import fed_avg
from fedtangent._src.federated.schedule import all_clients
from fedtangent._src.theory.local_gd.max_margin import FeasibleSets, feasible_sets, hard_margin, parallel_projections

SIZE = Size(4, 2, 16)
SLOWEST = 0.5  # a deviation falls at least as k^-SLOWEST
STEPS = (1, 4, 16)  # L
RECORDS = 16  # evaluations of a run
LATE = np.array([4, 8, 16])  # evaluations over which a slope is fitted
MARGIN = 0.05  # of a growth


class AnySteps(NamedTuple):
    """A classification problem whose examples are all support vectors, and simulated models for several local steps.

    ``sets`` are the models that classify each node's examples with margin 1 or more, ``rate`` is the step size, and
    ``svm`` the hard-margin SVM. ``paths`` has for each number L of local steps the models [17, d] at the start and
    after each sixteenth of the ``rounds``.
    """

    problem: LinearProblem
    sets: FeasibleSets
    rate: float  # eta
    rounds: int
    svm: np.ndarray  # [d]
    paths: dict[int, np.ndarray]  # by L, [RECORDS + 1, d]

    def run(self, steps: int, batch: int | None = None, seed: int = 0) -> np.ndarray:
        """Simulates Local-GD or Local-SGD, and returns the models at the start and after each sixteenth of the rounds.

        Args:
            steps: Number of local steps L.
            batch: Examples of a minibatch; None for full batches.
            seed: Seed of the minibatches.

        Returns:
            Models, [17, d].
        """
        nodes = self.problem.size.nodes
        descent = Descent(all_clients(nodes), steps, self.rate, self.rounds, seed=seed, batch=batch)
        return _simulated(self.problem.examples, descent)

    def centralised(self, steps: int, examples: int) -> np.ndarray:
        """Simulates gradient descent at a single node that has the examples of all nodes, or the first of them.

        Its loss is the sum over examples divided by the number of nodes. With all examples this is the mean of
        the nodes' losses.

        Args:
            steps: Number of steps in a round.
            examples: Number of examples, the first ones of the problem.

        Returns:
            Models [17, d] at the start and after each sixteenth of the rounds.
        """
        rate = self.rate / self.problem.size.nodes
        data = self.problem.x[:examples], self.problem.y[:examples], consecutive([examples])
        return _simulated(data, Descent(all_clients(1), steps, rate, self.rounds))

    @property
    def sizes(self) -> str:
        """The sizes of the problem and of the runs, as text for verdicts."""
        return f"{self.problem.size}, L = {', '.join(map(str, self.paths))}, {self.rounds} rounds"


def _simulated(examples: tuple, descent: Descent) -> np.ndarray:
    options = {"loss": "exponential_sum", "weighting": "uniform"}
    return simulated(fed_avg, examples, descent, every=descent.rounds // RECORDS, **options)


def _problem(seed: int) -> LinearProblem:
    """Draws Gaussian examples and labels until all are support vectors and the margins converge fast enough."""
    rng, examples = np.random.default_rng(seed), SIZE.examples
    while True:
        x = rng.standard_normal((examples, SIZE.dimension)) / np.sqrt(SIZE.dimension)
        y = np.where(rng.standard_normal(examples) >= 0, 1.0, -1.0)
        gram = (x * y[:, None]) @ (x * y[:, None]).T
        dual = np.linalg.solve(gram, np.ones(examples))
        if dual.min() > 0:
            root = np.sqrt(dual)
            if np.linalg.eigvalsh(root[:, None] * gram * root)[0] > SLOWEST:
                return LinearProblem(SIZE, x, y, seed)


def _any_steps(rounds: int, seed: int) -> AnySteps:
    problem = _problem(seed)
    sets = feasible_sets(*problem.examples)
    stable = 2 / float(np.linalg.norm(problem.x, ord=2) ** 2)  # at 0, where the loss is steepest
    case = AnySteps(problem, sets, stable / 4, rounds, hard_margin(sets), {})
    return case._replace(paths={steps: case.run(steps) for steps in STEPS})


def _growth(path: np.ndarray) -> np.ndarray:
    """Returns how much the model grew over the last doubling of rounds, divided by ln 2, [d].

    ``path`` has the models at equal intervals of rounds.
    """
    return np.asarray((path[-1] - path[RECORDS // 2]) / np.log(2))


def _off(growth: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(growth - expected) / np.linalg.norm(expected))


def _centralised(case: AnySteps) -> Verdict:
    """Checks that Local-GD's distance from centralised descent falls at least as k^-1/2 in round k, for L = 4 and 16.

    L is the number of local steps. In a round centralised descent takes L steps on the examples of all nodes.
    """

    def slope(examples: int) -> list[float]:
        pairs = [(case.paths[steps], case.centralised(steps, examples)) for steps in STEPS[1:]]
        return [log_slope(LATE, np.linalg.norm(path - central, axis=1)[LATE]) for path, central in pairs]

    every = case.problem.size.examples
    slowest, fastest = max(slope(every)), min(slope(every - case.problem.size.per_node))
    claim = Claim(
        "Local-GD, version 2",
        "distance from the centralised model of as many steps, against the round: slope, every L",
        case.sizes,
    )
    right = f"{slowest:.2f}", f"<= {-SLOWEST:g}", slowest <= -SLOWEST
    return claim.judged(right, ("a node left out", f"{fastest:.2f}", fastest > -SLOWEST), "any that does not vanish")


def _direction(case: AnySteps) -> Verdict:
    """Checks that the last doubling of rounds adds ln 2 times the SVM to the model, for 1, 4 and 16 local steps."""
    mean = parallel_projections(case.sets, 1)[-1]
    off = max(_off(_growth(path), case.svm) for path in case.paths.values())
    wrong = min(_off(_growth(path), mean) for path in case.paths.values())
    claim = Claim(
        "Local-GD, version 2", "growth over a doubling of the rounds = ln 2 x SVM: relative error", case.sizes
    )
    return claim.near(off, ("the mean of the nodes' SVMs", wrong), MARGIN, f"{MARGIN:.0%}", target=0.0)


def _rate(case: AnySteps) -> Verdict:
    """Checks that 16 local steps instead of one add ln 16 to every support vector's margin after the last round."""
    least, most = STEPS[0], STEPS[-1]
    added = case.sets.margins(case.paths[most][-1]) - case.sets.margins(case.paths[least][-1])
    ratio = added / np.log(most / least)
    worst = float(ratio[np.argmax(np.abs(ratio - 1))])
    claim = Claim("Local-GD, version 2", f"margins that L = {most} adds to L = {least}, by ln L: the worst", case.sizes)
    return claim.near(worst, ("by ln (L / 2)", worst * np.log(most) / np.log(most / 2)), MARGIN, f"{MARGIN:.0%}")


def _stochastic(case: AnySteps) -> Verdict:
    """Checks Local-SGD of 16 steps on single examples: the last doubling of rounds adds ln 2 times the SVM."""
    steps = STEPS[-1]
    growth = _growth(case.run(steps, batch=1, seed=case.problem.seed))
    mean = parallel_projections(case.sets, 1)[-1]
    sizes = f"{case.problem.size}, L = {steps}, {case.rounds} rounds, minibatches of 1"
    claim = Claim("Local-SGD, version 2", "growth over a doubling of the rounds = ln 2 x SVM: relative error", sizes)
    wrong = "the mean of the nodes' SVMs", _off(growth, mean)
    return claim.near(_off(growth, case.svm), wrong, MARGIN, f"{MARGIN:.0%}", target=0.0)


def _check(scale: str, seed: int) -> list[Verdict]:
    """Checks Local-GD's distance from the centralised model, its direction, rate in L, and Local-SGD's direction."""
    case = _any_steps(of_scale(scale, 2**14, 2**16), seed)
    return [_centralised(case), _direction(case), _rate(case), _stochastic(case)]


ENTRIES = (
    TheoremEntry(
        "local_gd.many_steps",
        "separable classification: Local-GD with any number of local steps goes to the centralised direction",
        _check,
        papers=("localgd",),
        statement="abstract of the second version of Local-GD",
        functions=(hard_margin, feasible_sets),
    ),
)
