"""The whole comparison of one setting: simulates networks, predicts them by the federated flow, and compares both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from fedtangent._src.checks import whole
from fedtangent._src.comparison import all_verdicts
from fedtangent._src.comparison.laziness import Laziness, at_points, split, watched_draws
from fedtangent._src.comparison.outcomes import Gap, PredictedCurve, gap_of
from fedtangent._src.comparison.predicted import Predicted, Starts, from_starts, predict, starts_of
from fedtangent._src.comparison.settings import Report, Setting
from fedtangent._src.comparison.simulated import (
    Simulated,
    Training,
    cohorts,
    history_beside,
    network_training,
    ntk_fl_training,
    train,
)
from fedtangent._src.comparison.table import MethodRow, simulated_row, theory_row
from fedtangent._src.comparison.verdicts import Verdict, summary, undecided
from fedtangent._src.engine.history import History, html_of
from fedtangent._src.engine.memory import DoesNotFit
from fedtangent._src.losses import targets_of
from fedtangent._src.progress import Steps
from fedtangent._src.theory.checks import require_float64

FEWEST_DRAWS = 5  # for the interval of a variance
FEWEST_WIDTHS = 3  # for the interval of a slope
WITHOUT_NTK_FL = "NTK-FL is left out, because its Jacobian does not fit into memory"
MOST_NUMBERS = 2**24  # of one draw's functions over all rounds


class Comparison(NamedTuple):
    """The result of ``compare`` for an algorithm with a closed form: simulations, predictions and verdicts.

    ``theory`` has the predictions, and ``curve`` the flow from the initial functions of the widest networks.
    ``simulated``, ``gaps`` and ``laziness`` have one entry for each width. ``simulated`` are networks trained by the
    run's algorithm, ``ntk_fl`` networks trained by NTK-FL. ``gaps`` are distances of networks from their prediction,
    which ``laziness`` splits into parts. ``rows`` are the rows of the table, and ``times`` seconds by step.
    """

    theory: Predicted
    simulated: tuple[Simulated, ...]  # by the setting's algorithm, one per width, ascending
    ntk_fl: tuple[Simulated, ...]  # by kernel, then width, ascending
    gaps: tuple[Gap, ...]  # one per width
    curve: PredictedCurve  # at every round, or at fewer if outputs at all rounds are over ``MOST_NUMBERS`` numbers
    rows: tuple[MethodRow, ...]
    verdicts: tuple[Verdict, ...]
    laziness: tuple[Laziness, ...]  # one per width; empty for linear models and for kernels that are too large
    times: dict[str, float]  # seconds of each step, by its name

    @property
    def seconds(self) -> float:
        """The time of the comparison in seconds: the sum of ``times``."""
        return sum(self.times.values())

    @property
    def setting(self) -> Setting:
        """The compared run: its problem, algorithm and sizes."""
        return self.theory.setting

    @property
    def undecided(self) -> tuple[str, ...]:
        """Names of the verdicts whose intervals are too wide to decide; they count neither as agreement nor failure."""
        return undecided(self.verdicts)

    def __repr__(self) -> str:
        """Returns the title of the setting and the outcome in one line."""
        remark = f"; {self.remark}" if self.remark else ""
        return f"Comparison({self.setting.title}: {summary(self.verdicts)}{remark})"

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def history(self) -> History:
        """The metrics of the widest networks, means over draws with bands. Its ``predicted`` has the flow's metrics.

        Test metrics use the test points of the comparison, in a user's run at most 500, sampled at random.
        """
        return history_beside(self.setting.problem, self.simulated[-1], self.gaps[-1].train, self.gaps[-1].test)

    @property
    def remark(self) -> str:
        """A warning if the widest networks learned little, so that agreement shows little; else empty."""
        first, *_, last = self.gaps[-1].simulated
        little = self.setting.problem.little_learned(float(first), float(last))
        return little and f"{little}; train longer or faster"

    @property
    def method(self) -> str:
        """The name of the theory that predicts the networks."""
        return "federated flow"

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks below the table, such as how far the flow is from its limit of many rounds."""
        theory, last = self.theory, self.setting.size.num_rounds
        notes = [f"no limit to compare with, so the flow is the prediction: {theory.why_no_limit.split(';')[0]}"]
        if theory.limit is not None:
            gap = theory.flow.limit_distance(last, 0, theory.limit)
            notes = [
                f"the flow's own distance to the limit at round {last}, relative: "
                f"mean {gap.mean:.3g}, covariance {gap.cov:.3g}"
            ]
            if not any("Theorem 2, round" in v.statement for v in self.verdicts):
                notes.append("the flow is not yet near the limit, so networks are not compared with the limit")
        if self.ntk_fl and self.setting.problem.y_train.shape[1] > 1:
            errors = {m.width: float(m.info["kernel_error"].mean()) for m in self.ntk_fl if "averaged" in m.method}
            by_width = ", ".join(f"{error:.3f} at width {width}" for width, error in errors.items())
            notes.append(f"NTK-FL's averaged kernel H for all outputs, relative error of the whole kernel: {by_width}")
        if not self.ntk_fl and self.setting.problem.loss == "squared_error":
            notes.append(WITHOUT_NTK_FL)
        return tuple(notes + [self.remark] * bool(self.remark))


def _flow_curve(theory: Predicted, networks: Simulated) -> PredictedCurve:
    """Predicts training error and test score at many rounds, by the flow from the networks' initial functions."""
    problem, last, starts = theory.setting.problem, theory.setting.size.num_rounds, starts_of(networks)
    errors, scores = list[np.ndarray](), list[np.ndarray]()
    many = max(MOST_NUMBERS // sum(part[0].size for part in starts), 1)
    rounds = np.union1d(np.linspace(0, last, min(last, many) + 1).astype(int), networks.rounds)
    for start in zip(*starts, strict=True):  # one after the other, so that the memory is that of one
        train, test = from_starts(theory.flow, Starts(*(part[None] for part in start)), rounds.tolist())
        errors.append(problem.left(train))
        scores.append(problem.score(test.mean(axis=1)))
    power = 2 if targets_of(problem.loss) == "numbers" else 1
    return PredictedCurve(
        rounds, np.mean(np.power(errors, power), axis=0) ** (1 / power), np.concatenate(scores, axis=1)
    )


def run(setting: Setting, progress: bool | None = False, say: Report = lambda line: None) -> Comparison:
    """Simulates the networks of ``setting``, predicts them by the federated flow, and compares both.

    Args:
        setting: The run, with widths and number of draws.
        progress: Whether to show progress; None: if the work takes some seconds.
        say: Called with a line of text for each step of the work.

    Returns:
        Table rows, verdicts, and the data of the figures.

    Raises:
        ValueError: 64-bit mode is off (``fedtangent.enable_x64()``); or there are fewer than five draws or, unless the
            model is linear, fewer than three widths, which are too few for a verdict; or no closed form follows the
            algorithm; or no client moves a model in any round.
        FloatingPointError: The closed form leaves the range of float64, because the run is not stable.
        DoesNotFit: A run needs more memory than the device has.
    """
    require_float64()
    size, exact_draws = setting.size, 0 if setting.ntk_fl is None else setting.ntk_fl.exact_draws
    for name, draws in (("draws", size.draws), ("exact_draws", exact_draws or FEWEST_DRAWS)):
        whole(name, draws, FEWEST_DRAWS)
    if not setting.is_linear and len(set(size.widths)) < FEWEST_WIDTHS:
        raise ValueError(f"widths: got {size.widths}, must be {FEWEST_WIDTHS} or more different ones")
    plan, rule = cohorts(setting), setting.followed
    if not np.any(np.max(plan.weight, axis=1) * rule.learning_rate * rule.server_learning_rate):
        raise ValueError(f"num_rounds: got {size.num_rounds}, in which no client moves a model, must be more")
    steps = Steps(say, setting.name, "federated flow and limit")
    with jax.default_matmul_precision("highest"):
        theory = predict(setting, plan, progress)
        flow_seconds = sum(steps.stop().values())
        steps("programs of the networks")
        watched = watched_draws(setting)
        trainings = [network_training(setting, width, watched) for width in size.widths]
        trainings += _evolutions(setting, say)
        simulated = train(trainings, progress, steps)
        steps("predictions from the networks' initial functions")
        networks, evolved = tuple(simulated[: len(size.widths)]), tuple(simulated[len(size.widths) :])
        predictions = [from_starts(theory.flow, starts_of(of_width), of_width.rounds) for of_width in networks]
        pairs = zip(networks, predictions, strict=True)
        gaps = tuple(gap_of(setting.problem, of_width, *outputs) for of_width, outputs in pairs)
        curve, laziness = _flow_curve(theory, networks[-1]), tuple[Laziness, ...]()
        if watched:
            steps("linearised networks")
            flows = [at_points(setting.problem, gap.train, gap.test) for gap in gaps]
            laziness = tuple(split(theory, *pair) for pair in zip(networks, flows, strict=True))
        verdicts = all_verdicts.all_verdicts(theory, networks, evolved, steps)
    rows = _rows(theory, networks, evolved, gaps, flow_seconds)
    return Comparison(theory, networks, evolved, gaps, curve, rows, verdicts, laziness, steps.stop())


def _evolutions(setting: Setting, say: Report) -> list[Training]:
    """Prepares runs of NTK-FL from the networks' initialisations, with the kernel averaged over outputs.

    A user's run has NTK-FL at the largest width. Standard cases have it at every width and, with several outputs, with
    the exact kernel at the first two. The list is empty for a loss other than the squared error. If memory is too
    small, it is empty for a user's run, and a standard case raises ``DoesNotFit``.
    """
    if setting.problem.loss != "squared_error":
        return []
    widths, standard = setting.size.widths, setting.ntk_fl
    kernels = [("averaged", widths[-1:] if standard is None else widths, setting.size.draws)]
    if standard is not None and setting.problem.y_train.shape[1] > 1:
        kernels.append(("exact", widths[:2], standard.exact_draws))  # the others would cost most of the run
    try:
        return [ntk_fl_training(setting, width, kernel, draws) for kernel, of, draws in kernels for width in of]
    except DoesNotFit as error:
        if standard is not None:  # NTK-FL is what the case compares
            raise
        say(f"{setting.name}: {WITHOUT_NTK_FL}: {error}")
        return []


def _rows(
    theory: Predicted,
    networks: tuple[Simulated, ...],
    evolved: tuple[Simulated, ...],
    gaps: tuple[Gap, ...],
    flow_seconds: float,
) -> tuple[MethodRow, ...]:
    last, num_rounds = theory.moments[-1], theory.setting.size.num_rounds
    widest = {of_width.method: of_width for of_width in evolved}.values()
    flow = theory_row(
        theory,
        f"federated flow, expected, round {num_rounds}",
        last.mean.mean(axis=0),
        last.cov.mean(axis=0),
        num_rounds,
    )
    rows = [
        *(simulated_row(theory, n, float(np.mean(gap.error[-1]))) for n, gap in zip(networks, gaps, strict=True)),
        *(simulated_row(theory, n, None) for n in widest),
        flow._replace(seconds_a_run=flow_seconds),
    ]
    if theory.limit is not None:
        mean, cov, *_ = map(np.asarray, theory.limit)
        rows.append(theory_row(theory, "GP limit (Theorem 2)", mean, cov, None))
    return tuple(rows)
