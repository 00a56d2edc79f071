"""FedBuff and FedAsync beside a server that waits for all answers (Nguyen et al., 2022; Xie et al., 2019).

All methods have the same number of busy clients, whose times are exponential with mean 1, the unit of time. A server
that waits asks all of them at once and takes few steps. With FedBuff and FedAsync a client that has answered begins
again at once; FedBuff takes a step when a few answers have arrived, FedAsync with every answer, but their answers are
late. Both also run without delays, to show what lateness costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

import fedtangent as ft
from fedtangent._src import checks
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, Method, Record, Steps
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.lab.trials import NetworkSettings, Trial
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array

WAITING, BUFFERED, SINGLE = "fed_avg", "fed_buff", "fed_async"
LABELS = {WAITING: "FedAvg, waits for all", BUFFERED: "FedBuff", SINGLE: "FedAsync"}
PROMPT = "-prompt"  # ending of a method's name: without delays
TOO_LATE = 0.01  # chance of a delay that counts as the largest
LITTLE = 0.02  # of accuracy: "as good as" in a claim
GRID = 61  # points of time in the figure
DECISIVE = "training_clients buffer mixing_rate width local_steps batch_size"
COLUMNS = (
    "method: {label} | learning rate: {rate:g} | steps of the server: {steps:d} | accuracy: {accuracy:.4f} | "
    "seeds at the target: {reached:d} | time to it: {time:.2f} | clients' answers until then: {answers:.0f}"
)
REMARKS = (
    "time: in units of a client's mean time; accuracy: on test examples, mean over the last tenth of the time",
    "the target is reached when the mean accuracy over the last unit of time reaches it",
    "times of the server's steps and delays of answers are drawn independently of each other",
)


@dataclass(frozen=True)
class WaitingSettings(NetworkSettings):
    """Settings of the clients and the server, beside the settings of the network and its training.

    Runs that try learning rates are as long as the others.

    Attributes:
        num_clients: Number of clients.
        training_clients: Number of busy clients, which FedAvg asks in each round.
        buffer: Answers that FedBuff adds in one step of the server.
        mixing_rate: FedAsync's mixing rate alpha: weight of a client's model in the server's.
        time: Time of a run, in units of a client's mean time.
        alpha: Parameter of the Dirichlet distribution that divides the classes among clients; smaller is more uneven.
        target: Test accuracy to reach.
    """

    num_clients: int = 100
    training_clients: int = within(20, least=2, most=200)
    buffer: int = within(5, least=2)
    mixing_rate: float = within(0.6, above=0, at_most=1)
    time: int = within(60, least=10)
    alpha: float = within(0.3, above=0)
    target: float = within(0.85, above=0, below=1)


def answers_of(settings: WaitingSettings) -> dict[str, int]:
    """Returns how many answers a step of the server has, by method."""
    return {WAITING: settings.training_clients, BUFFERED: settings.buffer, SINGLE: 1}


def rounds_of(settings: WaitingSettings) -> dict[str, int]:
    """Computes how many steps the server takes on average in the time of a run, by method, at least one."""
    busy = settings.training_clients
    longest = np.sum(1 / np.arange(1, busy + 1))  # expected largest of ``busy`` exponential times
    spans = {WAITING: longest, BUFFERED: settings.buffer / busy, SINGLE: 1 / busy}
    rounds = {name: max(1, round(settings.time / span)) for name, span in spans.items()}
    return rounds | {name + PROMPT: rounds[name] for name in (BUFFERED, SINGLE)}


def clock(settings: WaitingSettings, name: str, seed: int) -> np.ndarray:
    """Draws the times at which the server has taken 0, 1, 2, .. steps, [R + 1], in units of a client's mean time.

    As exponential times have no memory, a pool of M busy clients answers at rate M.

    Args:
        settings: The settings.
        name: Name of the method.
        seed: Seed of the run.
    """
    rng, busy, rounds = np.random.default_rng([seed, 2]), settings.training_clients, rounds_of(settings)[name]
    if name == WAITING:
        spans = rng.exponential(size=(rounds, busy)).max(axis=1)
    else:
        spans = rng.gamma(answers_of(settings)[name.removesuffix(PROMPT)], 1 / busy, rounds)
    return np.concatenate([[0.0], np.cumsum(spans)])


def delays(settings: WaitingSettings, name: str) -> np.ndarray:
    """Computes how likely an answer is 0, 1, .. D steps of the server late, [D + 1]; larger delays count as D.

    Of M busy clients each is equally likely to answer next, and a client begins with 0 to K - 1 answers in the buffer
    of K, all equally likely. So P(delay >= d) is the mean of (1 - 1/M)^(d K - r) over r = 0, .., K - 1. D is the
    smallest delay with P(delay >= D) at most 1 % (``TOO_LATE``).

    Args:
        settings: The settings.
        name: Name of a method with delays.
    """
    buffer, stays = answers_of(settings)[name], 1 - 1 / settings.training_clients
    most = int(np.ceil((np.log(TOO_LATE) / np.log(stays) + buffer) / buffer))
    others = buffer * np.arange(1, most + 1)[:, None] - np.arange(buffer)  # answers before this one
    at_least = np.concatenate([[1.0], np.mean(stays**others, axis=1)])
    last = int(np.argmax(at_least <= TOO_LATE))
    return -np.diff(np.concatenate([at_least[: last + 1], [0.0]]))


def methods_of(settings: WaitingSettings, trial: Trial) -> dict[str, Method]:
    """Builds FedAvg, FedBuff and FedAsync, the last two also without delays, on one seed's data; by name.

    Args:
        settings: The settings.
        trial: Data and clients of the seed.
    """
    model, work = settings.network(trial), settings.work

    def method(label: str, name: str, late: bool) -> Method:
        schedule = ft.schedules.uniform_sampling(settings.num_clients, answers_of(settings)[name])
        if late:
            staleness = ft.Staleness(probabilities=delays(settings, name), buffered=name == BUFFERED)
        else:
            staleness = ft.Staleness(0, buffered=name == BUFFERED)

        def build(steps: Steps, rate: float | Array) -> Algorithm:
            if name == WAITING:
                return ft.fed_avg(
                    model, schedule, rate, work, "cross_entropy", averaging=ft.Averaging(weighting="uniform")
                )
            averaging = ft.Averaging(server_learning_rate=settings.mixing_rate if name == SINGLE else 1.0)
            return ft.fed_async(model, schedule, rate, work, staleness, "cross_entropy", averaging=averaging)

        return Method(label, settings.learning_rates, (0,), build, trial.data, trial.splits)

    methods = {name: method(label, name, late=True) for name, label in LABELS.items()}
    prompt = {name + PROMPT: method(f"{LABELS[name]}, no delays", name, late=False) for name in (BUFFERED, SINGLE)}
    return methods | prompt


class WaitingResults(NamedTuple):
    """Results of one method, [seeds] each.

    Attributes:
        accuracy: Test accuracy, mean over the last tenth of the time.
        time: Time until the mean accuracy over the last unit of time reaches the target; NaN if it never does.
        answers: Clients' answers until that time, or NaN.
    """

    accuracy: np.ndarray
    time: np.ndarray
    answers: np.ndarray


def results_of(settings: WaitingSettings, name: str, records: list[Record], seeds: tuple[int, ...]) -> WaitingResults:
    """Computes final accuracy, and time and answers to the target, of one method.

    Args:
        settings: The settings.
        name: Name of the method.
        records: Runs of the method, one for each seed.
        seeds: Seeds of the runs.
    """
    rows, answers = [], answers_of(settings)[name.removesuffix(PROMPT)]
    for record, seed in zip(records, seeds, strict=True):
        times = clock(settings, name, seed)
        steady = record._replace(metrics={"test.accuracy": over_last_unit(record.test, times)})
        first, last = harness.first_at(steady, settings.target), record.test[times >= 0.9 * times[-1]].mean()
        rows.append((last, *((times[first], answers * first) if first < len(times) else (np.nan, np.nan))))
    return WaitingResults(*np.array(rows, np.float64).T)


def over_last_unit(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Computes for each time the mean of the values at this time and in the unit of time before it, [E].

    Args:
        values: One value for each time, [E].
        times: Increasing times, [E].
    """
    begin = np.searchsorted(times, times - 1, side="right")
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[1:] - sums[begin]) / (np.arange(1, len(values) + 1) - begin)


def by_time(settings: WaitingSettings, name: str, record: Record, seed: int) -> np.ndarray:
    """Returns a run's test accuracy after the server's last step by each of ``GRID`` equally spaced times, [GRID].

    Args:
        settings: The settings.
        name: Name of the method.
        record: The run.
        seed: Seed of the run.
    """
    done = np.searchsorted(clock(settings, name, seed), np.linspace(0, settings.time, GRID), side="right") - 1
    return np.asarray(record.test[done])


def _claims(results: Mapping[str, WaitingResults], settings: WaitingSettings) -> Iterator[lab.Claim]:
    """Judges FedBuff and FedAsync by the time to the target accuracy, against waiting and each other.

    It also judges whether lateness costs final accuracy, and whether FedBuff needs fewer answers than FedAvg. A ratio
    of times or answers is undecided if a run never reaches the target.
    """
    waiting, buffered, single = (results[name] for name in LABELS)

    def fewer(claim: str, numerators: np.ndarray, denominators: np.ndarray) -> lab.Claim:
        if not np.isfinite(numerators * denominators).all():
            return lab.Claim(claim, "not every run reaches the target", lab.UNDECIDED)
        return lab.ratio_interval(numerators, denominators).claim_above(claim, "{:.2f} times", 1.0)

    for label, one, other, paper in (
        ("FedBuff needs less time than FedAvg, which waits,", buffered, waiting, " (the paper: 3.3 times)"),
        ("FedBuff needs less time than FedAsync", buffered, single, " (the paper: up to 2.5 times)"),
        ("FedAsync needs less time than FedAvg, which waits,", single, waiting, ""),
    ):
        yield fewer(f"{label} to {settings.target:g}{paper}", other.time, one.time)
    for name in (SINGLE, BUFFERED):
        loss = lab.interval(results[name].accuracy - results[name + PROMPT].accuracy)
        whose = "" if name == SINGLE else "ours: "
        claim = f"{whose}{LABELS[name]} tolerates late answers: within {LITTLE:g} of itself without delays"
        yield loss.claim_above(claim, "{:+.4f} from it", -LITTLE)
    claim = f"ours: FedBuff needs fewer answers than FedAvg to {settings.target:g}"
    yield fewer(claim, waiting.answers, buffered.answers)


def bench_of(study: Study) -> Bench:
    """Builds the ``Bench`` that tunes and trains all methods."""
    settings = study.settings
    depends_on = harness.decisive(settings, DECISIVE)
    return Bench(study, partial(trials.label_skewed, study), partial(methods_of, settings), depends_on)


def run(study: Study) -> lab.Outcome:
    """Tunes every method, trains with every seed, and compares the times to the target accuracy."""
    settings, bench, rounds, seeds = study.settings, bench_of(study), rounds_of(study.settings), study.seeds
    study.time_left.planned += (len(settings.learning_rates) + len(seeds)) * sum(rounds.values())
    tuned = {name: harness.tune(bench, name, settings.tuning_seed, rounds[name]) for name in rounds}
    labels = {name: method.label for name, method in bench.methods(settings.tuning_seed).items()}
    runs = harness.repeat_all(bench, tuned, rounds)
    results = {name: results_of(settings, name, records, seeds) for name, records in runs.items()}
    rows = [_row(labels[name], tuned[name].config.rate, rounds[name], of) for name, of in results.items()]
    title = f"test accuracy on {study.dataset} by time, mean of {len(seeds)} seeds"
    accuracy = {
        labels[name]: np.stack([by_time(settings, name, *one) for one in zip(records, seeds, strict=True)])
        for name, records in runs.items()
    }
    times = [float(point) for point in np.linspace(0, settings.time, GRID)]
    curves({"test accuracy": accuracy}, times, title, study.figures.path("by_time"), "time, in a client's mean times")
    remarks = (*REMARKS, *harness.edges({labels[name]: choice for name, choice in tuned.items()}))
    claims = tuple(_claims(results, settings))
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, claims, remarks=remarks)


def _row(label: str, rate: float, steps: int, of: WaitingResults) -> lab.Row:
    """Builds the row of one method: means of its results ``of`` over seeds.

    ``rate`` is its learning rate, ``steps`` the number of the server's steps. If a seed never
    reaches the target, the time and the number of answers are None.
    """
    reached = int(np.isfinite(of.time).sum())
    row: lab.Row = {"label": label, "rate": rate, "steps": steps, "accuracy": float(of.accuracy.mean())}
    to_target = {"time": float(of.time.mean()), "answers": float(of.answers.mean())}
    never = dict.fromkeys(to_target)
    return {**row, "reached": reached, **(to_target if reached == len(of.time) else never)}


def check(study: Study) -> None:
    """Raises ``ValueError`` for a tuning seed among the seeds, or settings that do not fit together.

    The busy clients may not outnumber all clients, nor the answers of FedBuff's buffer the busy clients.
    """
    settings: WaitingSettings = study.settings
    harness.check_tuning_seed(study)
    checks.whole("training_clients", settings.training_clients, 2, settings.num_clients)
    checks.whole("buffer", settings.buffer, 2, settings.training_clients)
    harness.build_all(methods_of(settings, trials.label_skewed(study, study.seeds[0])))


DEFAULT = WaitingSettings()
SMALL = with_changes(DEFAULT, "num_clients=40 training_clients=10 buffer=3 time=40 num_train=600")
IMAGES = with_changes(DEFAULT, "num_train=5000 num_test=2000 target=0.75")
SCALES = {"digits": by_scale(SMALL, DEFAULT), "fashion_mnist": by_scale(SMALL, IMAGES)}
ENTRIES = (experiment(__name__, run, SCALES, ("nguyen2022", "xie2019"), check=check, least_seeds=2),)
