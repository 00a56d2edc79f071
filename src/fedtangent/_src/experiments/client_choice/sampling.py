"""Power-of-choice and gradient-norm sampling beside uniform sampling of clients (Cho et al., 2020; Chen et al., 2022).

FedAvg trains the same network with each way to choose the clients of a round, and with all clients in every round. The
bytes with which clients report their losses or gradient norms are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from fedtangent._src.types import Algorithm, Array, Schedule

UNIFORM, BY_SIZE, NORM, EVERYONE = "uniform", "by_size", "gradient_norm", "all"
LABELS = {UNIFORM: "uniform", BY_SIZE: "by size", NORM: "gradient norm", EVERYONE: "all clients"}
MIB = 2**20
LAST = 5  # evaluations whose mean is the final accuracy
LITTLE = 0.02  # of accuracy: "close to" in a claim
DECISIVE = "clients_per_round width local_steps batch_size"
COLUMNS = (
    "choice of clients: {label} | learning rate: {rate:g} | accuracy: {accuracy:.4f} | "
    "minus uniform, 95 % interval: {lead:+.4f} | seeds at the target: {reached:d} | rounds to it: {rounds:.1f} | "
    "MiB: {mib:.2f} | accuracy after uniform's bytes: {within_bytes:.4f}"
)
REMARKS = (
    f"accuracy: test accuracy, mean of the last {LAST} rounds",
    f"accuracy after uniform's bytes: mean over the last {LAST} rounds' share of the bytes that uniform sampling sends",
    "a target that is never reached counts as reached one round after the last",
    "uniform sampling has exactly as many clients in every round, and a mean weighted by their examples; the baseline "
    "of Chen et al. draws each client independently and divides by its chance. That of Cho et al. is `by size`",
    "gradient norms are those before a client trains; the FedAvg of Chen et al. takes norms of whole updates",
)


@dataclass(frozen=True)
class SamplingSettings(NetworkSettings):
    """Settings of the clients and the rounds, beside the settings of the network and its training.

    Attributes:
        num_clients: Number of clients.
        clients_per_round: Clients that train in a round; with gradient-norm sampling their expected number.
        candidates: Numbers of clients that power-of-choice asks for their losses.
        alpha: Parameter of the Dirichlet distribution that divides the classes among clients; smaller is more uneven.
        num_rounds: Number of rounds.
        target: Test accuracy to reach.
        tuning_rounds: Rounds of a run that tries a learning rate.
    """

    num_clients: int = 100
    clients_per_round: int = 3
    candidates: tuple[int, ...] = within((6, 15, 50), increasing=True)
    alpha: float = within(0.3, above=0)
    num_rounds: int = 100
    target: float = within(0.85, above=0, below=1)
    tuning_rounds: int = 40


def methods_of(settings: SamplingSettings, trial: Trial) -> dict[str, Method]:
    """Builds FedAvg with every way to choose clients, on one seed's data; returns the methods by name.

    Args:
        settings: The settings.
        trial: Data and clients of the seed.
    """
    count, some = settings.num_clients, settings.clients_per_round
    model, work = settings.network(trial), settings.work

    def choosing(label: str, schedule: Schedule, weighting: str = "examples") -> Method:
        def build(steps: Steps, rate: float | Array) -> Algorithm:
            return ft.fed_avg(model, schedule, rate, work, "cross_entropy", averaging=ft.Averaging(weighting=weighting))

        return Method(label, settings.learning_rates, (0,), build, trial.data, trial.splits)

    by_size = ft.schedules.power_of_choice(count, some, some)  # all candidates train: the baseline of Cho et al.
    methods = {
        UNIFORM: choosing(LABELS[UNIFORM], ft.schedules.uniform_sampling(count, some)),
        BY_SIZE: choosing(LABELS[BY_SIZE], by_size, "uniform"),
        NORM: choosing(LABELS[NORM], ft.schedules.gradient_norm_sampling(count, some)),
        EVERYONE: choosing(LABELS[EVERYONE], ft.schedules.all_clients(count)),
    }
    for num_candidates in settings.candidates:
        schedule = ft.schedules.power_of_choice(count, num_candidates, some)
        methods[f"power_of_choice-{num_candidates}"] = choosing(
            f"power-of-choice of {num_candidates}", schedule, "uniform"
        )
    return methods


class SamplingResults(NamedTuple):
    """Results of one way to choose clients, [seeds] each.

    Attributes:
        accuracy: Test accuracy, mean of the last five rounds.
        rounds: Rounds to the target accuracy; one more than all rounds if never.
        mib: MiB sent in all rounds, polls included.
        within_bytes: Accuracy after as many bytes as uniform sampling sends in all its rounds.
    """

    accuracy: np.ndarray
    rounds: np.ndarray
    mib: np.ndarray
    within_bytes: np.ndarray


def results_of(records: Sequence[Record], uniform: Sequence[Record], target: float) -> SamplingResults:
    """Computes final accuracy, rounds to the target and accuracy at equal bytes of one way to choose clients.

    Accuracy at equal bytes is the mean over the evaluations at which this way has sent more bytes than uniform sampling
    had sent before its last five rounds, but no more than it sent in all. If there is no such evaluation, it is the
    accuracy of the last evaluation with no more bytes than that.

    Args:
        records: Its runs, one for each seed.
        uniform: Runs of uniform sampling for the same seeds.
        target: Test accuracy to reach.
    """
    rows = []
    for record, other in zip(records, uniform, strict=True):
        sent, of_uniform = record.sent.sum(axis=1), other.sent.sum(axis=1)
        affordable = sent <= of_uniform[-1]
        late = affordable & (sent > of_uniform[-1 - LAST])
        within = record.test[late].mean() if late.any() else record.test[affordable][-1]
        rows.append((record.test[-LAST:].mean(), harness.first_at(record, target), sent[-1] / MIB, within))
    return SamplingResults(*np.array(rows, np.float64).T)


def _claims(results: Mapping[str, SamplingResults], settings: SamplingSettings) -> Iterator[lab.Claim]:
    """Judges power-of-choice against clients drawn by size, and gradient-norm sampling against uniform and all clients.

    As a control, uniform sampling is compared with all clients too.
    """
    uniform, by_size, everyone = results[UNIFORM], results[BY_SIZE], results[EVERYONE]
    for num_candidates in settings.candidates:
        chosen, label = results[f"power_of_choice-{num_candidates}"], f"power-of-choice of {num_candidates}"
        sooner = lab.ratio_interval(by_size.rounds, chosen.rounds)
        claim = f"{label} needs fewer rounds than clients by size to {settings.target:g} (the paper: up to 3 times)"
        yield sooner.claim_above(claim, "{:.2f} times", 1.0)
        lead = lab.interval(chosen.accuracy - by_size.accuracy)
        yield lead.claim_above(f"{label} is above clients by size (the paper: by up to 0.10)", "by {:+.4f}")
        fair = lab.interval(chosen.within_bytes - uniform.within_bytes)
        yield fair.claim_above(f"ours: {label} is above uniform sampling after as many bytes", "by {:+.4f}")
    norm = results[NORM]
    lead = lab.interval(norm.accuracy - uniform.accuracy)
    yield lead.claim_above("gradient-norm sampling is above uniform sampling", "by {:+.4f}")
    for label, some in (("gradient-norm sampling", norm), ("ours: control, uniform sampling", uniform)):
        behind = lab.interval(some.accuracy - everyone.accuracy)
        yield behind.claim_above(f"{label} is within {LITTLE:g} of all clients", "{:+.4f} from it", -LITTLE)


def _row(label: str, rate: float, of: SamplingResults, uniform: SamplingResults, num_rounds: int) -> lab.Row:
    """Builds the row of one way to choose clients: means of its results ``of`` over seeds, and lead over ``uniform``.

    ``rate`` is its learning rate. If a seed never reaches the target, the number of rounds is None.
    """
    row: lab.Row = {name: float(values.mean()) for name, values in of._asdict().items()}
    reached = int(np.sum(of.rounds <= num_rounds))
    row["rounds"] = row["rounds"] if reached == len(of.rounds) else None
    lead = None if of is uniform else lab.interval(of.accuracy - uniform.accuracy)
    return {"label": label, "rate": rate, **row, "reached": reached, "lead": lead}


def bench_of(study: Study) -> Bench:
    """Builds the ``Bench`` that tunes and trains with every way to choose clients."""
    settings = study.settings
    depends_on = harness.decisive(settings, DECISIVE)
    return Bench(study, partial(trials.label_skewed, study), partial(methods_of, settings), depends_on)


def run(study: Study) -> lab.Outcome:
    """Tunes and trains with every way to choose clients and every seed; compares accuracies, rounds and bytes."""
    settings, bench = study.settings, bench_of(study)
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    labels = {name: method.label for name, method in bench.methods(settings.tuning_seed).items()}
    runs = harness.repeat_all(bench, tuned)
    results = {name: results_of(records, runs[UNIFORM], settings.target) for name, records in runs.items()}
    rows = [
        _row(labels[name], tuned[name].config.rate, of, results[UNIFORM], settings.num_rounds)
        for name, of in results.items()
    ]
    of_seeds = f"mean of {len(study.seeds)} seeds"
    title = f"test accuracy on {study.dataset} after {settings.num_rounds} rounds, {of_seeds}"
    accuracy = harness.by_round({labels[name]: records for name, records in runs.items()})
    rounds, path = range(settings.num_rounds + 1), study.figures.path("by_round")
    curves({"test accuracy": accuracy}, rounds, f"{study.dataset}, {of_seeds}", path)
    remarks = (*REMARKS, *harness.edges({labels[name]: choice for name, choice in tuned.items()}))
    claims = tuple(_claims(results, settings))
    return lab.Outcome((lab.table(title, rows, COLUMNS),), rows, claims, remarks=remarks)


def check(study: Study) -> None:
    """Raises ``ValueError`` for wrong settings.

    Wrong are a tuning seed among the seeds, fewer than five rounds, ``candidates`` that are fewer than the clients of a
    round or more than all, and settings that a method rejects.
    """
    settings: SamplingSettings = study.settings
    harness.check_tuning_seed(study)
    checks.whole("num_rounds", settings.num_rounds, LAST)
    for num_candidates in settings.candidates:
        checks.whole("candidates", num_candidates, settings.clients_per_round, settings.num_clients)
    harness.build_all(methods_of(settings, trials.label_skewed(study, study.seeds[0])))


DEFAULT = SamplingSettings(local_steps=20)
SMALL = with_changes(DEFAULT, "num_clients=30 candidates=6,15 num_rounds=60 tuning_rounds=30 num_train=600")
IMAGES = with_changes(DEFAULT, "num_train=5000 num_test=2000 target=0.75")
SCALES = {"digits": by_scale(SMALL, DEFAULT), "fashion_mnist": by_scale(SMALL, IMAGES)}
ENTRIES = (experiment(__name__, run, SCALES, ("cho2020", "chen2022"), check=check, least_seeds=2),)
