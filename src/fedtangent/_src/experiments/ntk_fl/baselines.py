"""NTK-FL and its baselines: settings, data of one seed, how each method is built, tables and claims, and figure 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

import fedtangent as ft
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness, trials
from fedtangent._src.experiments.lab.harness import Bench, Method, Record, Runs, Steps, Tuned
from fedtangent._src.experiments.lab.runner import PACKAGE, AnySettings, Experiment, Study, within
from fedtangent._src.experiments.lab.trials import Examples, Trial
from fedtangent._src.experiments.ntk_fl import maps
from fedtangent._src.federated.wire.subsample import largest_sample
from fedtangent._src.output.run_plots import curves
from fedtangent._src.types import Algorithm, Array, Model, Partition, Schedule

LABELS = {
    "centralised": "centralised",
    "ntk_fl": "NTK-FL",
    "ntk_fl_cross_entropy": "NTK-FL, cross entropy",
    "data_sharing": "data sharing",
    "fed_nova": "FedNova",
    "fed_avg": "FedAvg",
    "cp_ntk_fl": "CP-NTK-FL",
    "cp_ntk_fl_cross_entropy": "CP-NTK-FL, cross entropy",
    "cp_fed_avg": "FedAvg, subsampled and projected",
    "fed_com": "FedCOM, 8 bit",
    "qsgd": "QSGD, 4 bit",
}
# The methods that evolve a kernel, each with its loss.
EVOLVED = {
    "ntk_fl": "squared_error",
    "ntk_fl_cross_entropy": "cross_entropy",
    "cp_ntk_fl": "squared_error",
    "cp_ntk_fl_cross_entropy": "cross_entropy",
}
RECIPES = {"cp_fed_avg": "fed_avg", "qsgd": "fed_paq"}  # of methods that are not named after their recipe
# Each method with less communication, and the one that it is compared with.
PAIRED = {"cp_ntk_fl": "ntk_fl", "cp_ntk_fl_cross_entropy": "ntk_fl_cross_entropy", "cp_fed_avg": "fed_avg"}
METHODS = ("centralised", "ntk_fl", "ntk_fl_cross_entropy", "data_sharing", "fed_nova", "fed_avg")
# The paper's grids (appendix A; section 6).
PAPER_RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
PAPER_STEPS = (1, 3, 5, 7, 9, 10, 20, 30, 40, 50)
PAPER_TIMES = tuple(range(100, 2001, 100))
MIB = 2**20
# Rounds in the table by round.
TABULATED = (0, 1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 700)
WHOLE = ("ntk_fl", "ntk_fl_cross_entropy")
LOSSES = {
    "squared_error": "halved mean squared error to one-hot targets (the paper)",
    "cross_entropy": "cross entropy (its authors' code)",
}
STAND_IN = "scikit-learn's digits (64 inputs) stand in for the paper's data: name its data set and --data-dir"
CLIENTS = {  # a remark on each partition
    "dirichlet": "",
    "writers": "the writers of the data folder's sample: the paper has 300",
    "shifted": "no writers are known for these data: each client distorts its images in its own way (contrast, "
    "brightness, a shift by a pixel), in the test set clients are drawn at random",
    "given": "clients hold the images of the authors' own map {map}, without those that validate here",
}
NEAR = 0.02  # of accuracy: our reading of "similar to the centralised"
CURVES = "NTK-FL outperforms all baseline FL algorithms and is close to the ideal centralised training (curves only)"


@dataclass(frozen=True)
class BaselineSettings:
    """The settings of all methods in NTK-FL's experiments.

    Defaults are the paper's, or ours where it gives none. But the baselines minimise the cross entropy, as in the code
    of its authors; the paper has the squared error.
    """

    methods: tuple[str, ...] = within(METHODS, of=tuple(LABELS))
    partition: str = within("dirichlet", of=("dirichlet", "writers", "shifted", "given"))
    map: str = ""  # of partition "given": one of the authors' maps in the data folder, such as a0.5_0
    alpha: float = within(0.5, above=0)  # of partition "dirichlet"
    num_clients: int = 300
    clients_per_round: int = 20
    num_rounds: int = 50
    reference_rounds: int = 100  # of FedAvg; the others are to reach its accuracy after them
    window: int = 5  # evaluations that are averaged for "the accuracy after" a round, as single ones fluctuate
    width: int = 100
    last_w_std: float = within(0.1, at_least=0)  # last layer's initial deviation times sqrt(width): outputs near zero
    batch_size: int = 200
    loss: str = within("cross_entropy", of=("cross_entropy", "squared_error"))  # of the baselines
    learning_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    tangent_rates: tuple[float, ...] = within(PAPER_RATES, above=0)
    local_steps: tuple[int, ...] = within(PAPER_STEPS, increasing=True)
    server_steps: tuple[int, ...] = within((20, 100, 300), increasing=True)  # of the centralised; ours
    times: tuple[int, ...] = within(PAPER_TIMES, increasing=True)
    momentum: float = within(0.9, at_least=0, below=1)  # of FedNova's clients
    shared: float = within(0.1, above=0, at_most=1)  # data sharing's global set, as a share of all clients' examples
    beta: float = within(1.0, above=0, at_most=1)  # share of its examples that a client of cp_ methods uses a round
    projected: int = within(0, least=0)  # d1', dimension of the cp_ methods' random projection; 0: none
    sparsity: float = within(0.0, at_least=0, below=1)  # share of each example's Jacobian that CP-NTK-FL leaves out
    value_bits: int = within(0, least=0, most=64)  # bits of a Jacobian's number as sent; 0: as of the parameters
    tuning_rounds: int = 20
    tuning_seed: int = within(1000, least=0)
    num_train: int = within(0, least=0)
    num_validation: int = 2000
    num_test: int = within(0, least=0)


# Changes of the paper's settings for smaller scales, on two cores.
DIGITS = (
    "num_clients=50 clients_per_round=10 num_rounds=20 reference_rounds=40 tuning_rounds=10 batch_size=20 "
    "learning_rates=0.01,0.03,0.1,0.3 tangent_rates=0.01,0.03,0.1 local_steps=1,5,10,20 server_steps=10,100 "
    "times=100,200,400,800,1400,2000 num_validation=237"
)
IMAGES = (
    "num_clients=60 clients_per_round=10 num_rounds=12 reference_rounds=24 tuning_rounds=8 batch_size=50 "
    "learning_rates=0.01,0.03,0.1 tangent_rates=0.01,0.03,0.1 local_steps=1,5,20 server_steps=20,100 "
    "times=100,200,400,800,1400,2000 num_train=3000 num_validation=1000 num_test=2000"
)
# The settings that a run depends on, besides its data and its configuration.
DECISIVE = "clients_per_round width last_w_std batch_size loss times momentum beta projected sparsity value_bits shared"


# ---- one seed's data, and the methods on it ----------------------------------------------------------------------


def _divide(name: str, data_dir: Path | None, seed: int, settings: BaselineSettings) -> Trial:
    """Draws one seed's examples, standardises the pixels, and divides the examples as ``settings.partition`` says."""
    # Training and validation examples come from the training set, test examples from the test set. All pixels are
    # standardised by the mean and deviation of the training set. Clients are drawn by Dirichlet label skew
    # (``"dirichlet"``, section 6 of the paper), are the data set's own users (``"writers"``), or hold i.i.d. examples
    # that each of them distorts in its own way (``"shifted"``: ``trials.distorted_by``).
    loaded = ft.data.load(name, data_dir=data_dir, seed=seed, flatten=True)
    examples = trials.draw(loaded, seed, settings.num_train, settings.num_validation, settings.num_test)
    mean, deviation = float(loaded.x_train.mean()), float(loaded.x_train.std())
    if settings.partition == "shifted":
        examples, by_part = trials.distorted_by(examples, settings.num_clients, seed)
        clients = by_part["train"]
    else:
        clients = _clients(loaded, examples, seed, settings, data_dir)
    x = {part: ((v - np.float32(mean)) / np.float32(deviation)).reshape(len(v), -1) for part, v in examples.x.items()}
    return trials.trial_of(examples._replace(x=x), clients, seed, loaded.num_classes)


def _clients(
    loaded: ft.data.Dataset, examples: Examples, seed: int, settings: BaselineSettings, data_dir: Path | None
) -> Partition:
    """Divides the training examples among clients, for the partitions "dirichlet", "writers" and "given".

    Raises ``ValueError`` if the data set has no writers, or if the writers or the map are not ``num_clients`` clients.
    """
    if settings.partition == "dirichlet":
        return ft.partition.dirichlet(examples.y["train"], settings.num_clients, settings.alpha, seed)
    if settings.partition == "given":
        clients = maps.authors_map(loaded, settings.map, data_dir)
        if clients.num_clients != settings.num_clients:
            raise ValueError(
                f"num_clients: got {settings.num_clients}, must be {clients.num_clients}, the clients of map "
                f"{settings.map}"
            )
        return maps.among(clients, examples.rows["train"], len(loaded.x_train))
    if loaded.user_train is None:
        raise ValueError(f"partition: got 'writers', must be another: the data set {loaded.name} names no writers")
    users, owner = np.unique(loaded.user_train, return_inverse=True)
    if len(users) != settings.num_clients:
        raise ValueError(
            f"num_clients: got {settings.num_clients}, must be {len(users)}, the number of writers of {loaded.name}"
        )
    return trials.of_owners(owner[examples.rows["train"]], len(users))


def _network(settings: BaselineSettings, trial: Trial) -> Model:
    """Builds NTK-FL's perceptron of one hidden layer, in the standard parameterization; biases start at 0."""
    # Hidden weights are Kaiming's N(0, 2 / fan_in). The last layer's deviation is ``last_w_std / sqrt(width)``, which
    # is our choice: with a larger one the halved squared error starts far above its value at zero.
    size = int(np.prod(trial.data.x.shape[1:]))
    build = partial(ft.models.build, "mlp", size, trial.num_classes, widths=(settings.width,))
    return build(parameterization="standard", b_std=0.0, last_w_std=settings.last_w_std)


def _methods(settings: BaselineSettings, trial: Trial) -> dict[str, Method]:
    """Builds the methods that the settings name, on one seed's data, with equal schedule and initial network."""
    # The ``cp_`` methods take inputs projected to ``settings.projected`` numbers, with a network of that input size.
    schedule = ft.schedules.uniform_sampling(settings.num_clients, settings.clients_per_round)
    is_projected = settings.projected and any(name in PAIRED for name in settings.methods)
    small = trials.projected(trial, settings.projected) if is_projected else trial
    of_name = {name: small if name in PAIRED else trial for name in settings.methods}
    return {
        name: (_evolving if name in EVOLVED else _training)(settings, name, data, schedule)
        for name, data in of_name.items()
    }


def _training(settings: BaselineSettings, name: str, trial: Trial, schedule: Schedule) -> Method:
    """Builds a method whose clients train locally, or centralised training.

    Its hyper-parameters are the learning rate and the number of steps in a round. ``name`` is the method's name in the
    settings, such as "fed_avg".
    """
    model, is_central = _network(settings, trial), name == "centralised"
    data = trial.data if settings.loss == "cross_entropy" else trials.one_hot(trial)
    options: dict[str, Any] = {"averaging": ft.Averaging(beta=settings.beta)} if name == "cp_fed_avg" else {}
    if name == "qsgd":
        options["quantiser"] = ft.Quantiser(4)
    if name == "data_sharing":
        data, options["shared"] = trials.with_global_set(trial._replace(data=data), settings.shared, trial.data.y)

    def build(steps: Steps, rate: float | Array) -> Algorithm:
        if name == "fed_nova":  # with plain SGD and equal numbers of local steps it would be FedAvg
            momentum = optax.chain(optax.trace(settings.momentum), ft.optimizers.sgd(_single(rate)))
            rates: dict[str, Any] = {"client_optimizer": momentum}
        else:
            rates = {"learning_rate" if is_central else "client_learning_rate": _single(rate)}
        recipe, work = getattr(ft, RECIPES.get(name, name)), ft.Work(steps=steps, batch_size=settings.batch_size)
        algorithm: Algorithm = recipe(model, schedule, work=work, loss=settings.loss, **rates, **options)
        return algorithm

    steps = settings.server_steps if is_central else settings.local_steps
    return Method(LABELS[name], settings.learning_rates, steps, build, data, trial.splits)


def _evolving(settings: BaselineSettings, name: str, trial: Trial, schedule: Schedule) -> Method:
    """Builds NTK-FL or, for a name that starts with ``cp_``, CP-NTK-FL with the settings' compression.

    ``EVOLVED`` gives the loss by the name.
    """
    # ``EVOLVED`` names the loss. The server's pool has room for the examples that the largest possible cohort uses,
    # rounded up to a multiple of 8: seeds whose pools are of similar size share a compiled round.
    model, is_compressed, clients = _network(settings, trial), name.startswith("cp_"), trials.partition_of(trial.data)
    pool = -(-largest_sample(clients, settings.clients_per_round, settings.beta if is_compressed else 1.0) // 8) * 8
    evolution, pooling = ft.Evolution(settings.times, unstable="clip", loss=EVOLVED[name]), ft.Pooling(pool_size=pool)

    def build(steps: Steps, rate: float | Array) -> Algorithm:
        options: dict[str, Any] = {"learning_rate": _single(rate), "evolution": evolution, "pooling": pooling}
        if not is_compressed:
            return ft.ntk_fl(model, schedule, **options)
        compression = ft.Compression(settings.beta, settings.sparsity, settings.value_bits or None, shuffle=True)
        return ft.cp_ntk_fl(model, schedule, compression=compression, **options)

    return Method(LABELS[name], settings.tangent_rates, (0,), build, trials.one_hot(trial), trial.splits, pool)


def _single(rate: float | Array) -> float | Array:
    """Converts a rate that is a JAX array to float32, the precision of these runs; a float stays unchanged."""
    return rate if isinstance(rate, float) else rate.astype(jnp.float32)


# ---- runs --------------------------------------------------------------------------------------------------------


def check(study: Study, **changes: object) -> None:
    """Raises ``ValueError`` for wrong settings: builds all methods for the first seed, with ``changes`` of settings."""
    settings = dataclasses.replace(study.settings, **changes)
    cohort, clients = settings.clients_per_round, settings.num_clients
    if cohort > clients:
        raise ValueError(f"clients_per_round: got {cohort}, must be at most {clients} (num_clients)")
    if settings.window > (rounds := min(settings.num_rounds, settings.reference_rounds)):
        raise ValueError(
            f"window: got {settings.window}, must be at most {rounds}, the smaller of num_rounds and reference_rounds"
        )
    if settings.map and settings.partition != "given":
        raise ValueError(f"map: got {settings.map!r}, must be left out without partition=given")
    harness.check_tuning_seed(study)
    harness.build_all(_methods(settings, _divide(study.dataset, study.data_dir, study.seeds[0], settings)))


def bench_of(study: Study, **changes: object) -> Bench:
    """Builds the ``Bench``, which runs all methods of the study; ``changes`` replace settings by name."""
    settings = dataclasses.replace(study.settings, **changes)
    of_seed = partial(_divide, study.dataset, study.data_dir, settings=settings)
    return Bench(study, of_seed, partial(_methods, settings), harness.decisive(settings, DECISIVE))


def _after(record: Record, num_rounds: int, window: int) -> float:
    """Computes the mean test accuracy of a run over the ``window`` rounds that end with round ``num_rounds``."""
    return float(record.test[num_rounds - window + 1 : num_rounds + 1].mean())


def ends(runs: Runs, settings: BaselineSettings) -> dict[str, np.ndarray]:
    """Computes each method's mean test accuracy over the last ``settings.window`` rounds, [seeds]."""
    return {
        name: np.array([_after(r, settings.num_rounds, settings.window) for r in records])
        for name, records in runs.items()
    }


# ---- what is reported --------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """Tables, rows and claims of a comparison, and further entries of result.json, which ``outcome`` completes."""

    sheets: Sequence[lab.Sheet]
    rows: list[lab.Row]
    claims: Iterable[lab.Claim]
    details: Mapping[str, object] = {}


def outcome(
    study: Study, paper: str, tuned: Mapping[str, Tuned], report: Report, runs: Mapping[str, Runs]
) -> lab.Outcome:
    """Builds the outcome of a comparison.

    It adds the tuned hyper-parameters, remarks on choices that the paper leaves open, and the runs that failed.

    Args:
        study: The checked request.
        paper: The paper's claim, as a sentence.
        tuned: Tuned hyper-parameters by method.
        report: Tables, rows and claims.
        runs: All runs, by a text that names their settings.
    """
    grids = {
        name: {**t._asdict(), "grid": [{"rate": c.rate, "steps": c.steps, "score": v} for c, v in t.grid.items()]}
        for name, t in tuned.items()
    }
    failed = []
    for at, by_method in runs.items():
        for name, records in by_method.items():
            for i, record in enumerate(records):
                if count := int(np.sum(record.status != 0)):
                    of_rounds = f"the evolution failed in {count} of {record.num_rounds} rounds"
                    failed.append(f"{at}{LABELS[name]}, seed {i}: {of_rounds}")
    details = {"tuned": grids, "claim": paper, **report.details}
    remarks = (f"the paper: {paper}", *_choices(study))
    sheets = (*report.sheets, _tuning_sheet(tuned))
    return lab.Outcome(sheets, report.rows, tuple(report.claims), details, remarks, tuple(failed))


def mean_and_error(values: np.ndarray) -> str:
    """Formats the mean of ``values`` [seeds] and its standard error, as ``mean +- error``."""
    return f"{values.mean():.4f} +- {values.std(ddof=1) / np.sqrt(len(values)):.4f}"


def _against(runs: Runs, method: str, settings: BaselineSettings) -> tuple[lab.Sheet, list[lab.Row], list[lab.Claim]]:
    """Compares the test accuracy of all methods, and judges whether ``method`` is more accurate than each other one.

    An accuracy is the mean over the last ``settings.window`` rounds. Centralised training may be 0.02 (``NEAR``) more
    accurate. Differences are paired by seed; returns table, rows and claims.
    """
    accuracy, rows, entries, claims, label = ends(runs, settings), [], [], [], LABELS[method]
    for name, values in accuracy.items():
        row: lab.Row = {"method": name, "round": settings.num_rounds, "accuracy": values.mean(), "seeds": values}
        lead = None if name == method else lab.interval(accuracy[method] - values)
        if lead is not None:
            row |= {**lead.row(), f"{method}_is_above": lead.above()}
            if name == "centralised":
                near = f"{label} is within {NEAR:g} of the centralised training"
                claims.append(lead.claim_above(near, "{:+.4f} from it", -NEAR))
            else:
                above = f"{label} is above {LABELS[name]} after {settings.num_rounds} rounds"
                claims.append(lead.claim_above(above, "by {:+.4f}"))
        rows.append(row)
        entries.append({"label": LABELS[name], "accuracy": mean_and_error(values), "lead": lead})
    first, last = settings.num_rounds - settings.window + 1, settings.num_rounds
    title = f"test accuracy, mean of rounds {first} to {last}, +- its standard error over"
    columns = f"method: {{label}} | accuracy: {{accuracy}} | {label} minus it, 95 % interval: {{lead:+.4f}}"
    return lab.table(f"{title} {len(accuracy[method])} seeds", entries, columns), rows, claims


class Reached(NamedTuple):
    """Rounds, and bytes sent by clients, until each run of a method first reaches a level of accuracy.

    Both have an entry for each seed; None for a run that never reaches the level.
    """

    rounds: list[int | None]
    uplink: list[int | None]  # bytes until then

    @property
    def mean_rounds(self) -> float:
        """Mean number of rounds over seeds; infinite if a seed never reaches the level."""
        return float(np.mean([np.inf if r is None else r for r in self.rounds]))

    @property
    def mean_mib(self) -> float:
        """Mean uplink in MiB over seeds; infinite if a seed never reaches the level."""
        return float(np.mean([np.inf if u is None else u for u in self.uplink])) / MIB


def _reached(records: Sequence[Record], levels: Sequence[float]) -> Reached:
    """Finds the first round after which each run's test accuracy is at least its level, and the bytes until then."""
    above = [np.flatnonzero(r.test[1:] >= level) for r, level in zip(records, levels, strict=True)]
    rounds = [int(at[0]) + 1 if at.size else None for at in above]
    return Reached(rounds, [None if at is None else int(r.sent[at, 0]) for r, at in zip(records, rounds, strict=True)])


def to_the_level(
    runs: Runs, levels: Sequence[float], title: str, published: Mapping[str, tuple[int, int]] | None = None
) -> tuple[lab.Sheet, dict[str, Reached]]:
    """Computes the rounds and the uplink bytes that each method needs to reach a test accuracy.

    Args:
        runs: Runs of each method, one for each seed.
        levels: Test accuracy to reach, for each seed.
        title: Title of the table.
        published: The paper's rounds and MB by method; None leaves them out of the table.

    Returns:
        The table of means over seeds, "-" where a seed never reaches its level; and the rounds and bytes by method.
    """
    by_method, rows = {name: _reached(records, levels) for name, records in runs.items()}, []
    for name, r in by_method.items():
        row: lab.Row = {"label": LABELS[name], "paper": (published or {}).get(name, (None, None))}
        row["by_seed"] = ", ".join("never" if round_ is None else str(round_) for round_ in r.rounds)
        row["first"] = np.mean([record.sent[1, 0] - record.sent[0, 0] for record in runs[name]]) / MIB
        means = (None, None) if None in r.rounds else (r.mean_rounds, r.mean_mib)
        rows.append({**row, "rounds": means[0], "mib": means[1]})
    columns = "method: {label} | rounds: {rounds:.1f} | seed by seed: {by_seed} | "
    columns += "uplink MiB in round 1: {first:.3f} | uplink MiB until then: {mib:.1f}"
    columns += " | the paper: rounds: {paper[0]:d} | MB: {paper[1]:d}" if published else ""
    return lab.table(title, rows, columns), by_method


def _tuning_sheet(tuned: Mapping[str, Tuned]) -> lab.Sheet:
    """Builds the table of tuned hyper-parameters of each method."""
    rows = []
    for name, t in tuned.items():
        row = {
            "label": LABELS[name],
            "steps": t.config.steps or "",
            "tried": len(t.grid),
            "edge": " and ".join(t.at_edge),
        }
        rows.append({**t._asdict(), **row})
    columns = "method: {label} | learning rate: {config.rate:g} | steps a round: {steps} | "
    columns += "validation accuracy: {score:.4f} | tried: {tried} | at the edge of the grid: {edge}"
    return lab.table("hyper-parameters by validation accuracy, on a seed of their own", rows, columns)


def by_round(runs: Runs) -> lab.Sheet:
    """Builds the table of mean test accuracy over seeds after selected rounds."""
    longest = max(record.num_rounds for records in runs.values() for record in records)
    rounds, rows = sorted({r for r in TABULATED if r <= longest} | {longest}), []
    for name, records in runs.items():
        accuracy, last = np.mean([record.test for record in records], axis=0), records[0].num_rounds
        rows.append((LABELS[name], *(f"{accuracy[r]:.3f}" if r <= last else "" for r in rounds)))
    return lab.Sheet("mean test accuracy by round", ("method", *map(str, rounds)), tuple(rows))


def draw(study: Study, runs: Runs) -> None:
    """Plots the test accuracy of each method by round, its mean over seeds and 95 % interval."""
    settings, path = study.settings, study.figures.path("accuracy_by_round")
    lines = {
        LABELS[name]: np.array([r.test[1 : settings.num_rounds + 1] for r in records]) for name, records in runs.items()
    }
    title = (
        f"{study.dataset}, {settings.num_clients} clients ({settings.partition}), {settings.clients_per_round} a round"
    )
    curves({"test accuracy": lines}, range(1, settings.num_rounds + 1), title, path)


def figure_4(
    name: str, summary: str, scales: Mapping[str, Mapping[str, AnySettings]], claim: str = CURVES
) -> Experiment:
    """Builds the entry of an experiment like fig. 4 of NTK-FL: test accuracy of all methods by round.

    Args:
        name: Name of the experiment, such as "ntk_fl.fig4a".
        summary: Summary of the experiment, to which "NTK-FL" is added in front.
        scales: Settings by data set and scale.
        claim: The paper's claim.
    """
    run, name = partial(_figure_4, claim), name.removeprefix(PACKAGE)
    more: dict[str, Any] = {"check": _check_figure_4, "least_seeds": 2, "papers": ("yue2022",)}
    return Experiment(name, f"NTK-FL, {summary}", run, scales=scales, **more)


def _check_figure_4(study: Study) -> None:
    if not any(method in study.settings.methods for method in WHOLE):
        names = ", ".join(study.settings.methods)
        raise ValueError(f"methods: got {names}, must include one of {', '.join(WHOLE)}")
    check(study)


def _figure_4(claim: str, study: Study) -> lab.Outcome:
    settings, bench = study.settings, bench_of(study)
    rounds = {"fed_avg": max(settings.num_rounds, settings.reference_rounds)}
    harness.plan(bench, rounds=rounds)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned, rounds)
    sheets, rows, claims, details = list[lab.Sheet](), list[lab.Row](), list[lab.Claim](), dict[str, object]()
    compared = [name for name in WHOLE if name in runs]
    for name in compared:
        sheet, against_others, verdicts = _against(runs, name, settings)
        sheets, claims = [*sheets, sheet], claims + verdicts
        rows += [{"compared": name, **row} for row in against_others]
    if "fed_avg" in runs:
        levels = [_after(record, settings.reference_rounds, settings.window) for record in runs["fed_avg"]]
        title = f"rounds to FedAvg's accuracy after {settings.reference_rounds} rounds, {sum(levels) / len(levels):.4f}"
        sheet, by_method = to_the_level(runs, levels, title)
        sheets.append(sheet)
        claims += [_ten_times_sooner(by_method[name], settings, name) for name in compared]
        details = {"levels": levels, "rounds_to_level": by_method}
    draw(study, runs)
    return outcome(study, claim, tuned, Report((*sheets, by_round(runs)), rows, claims, details), {"": runs})


def _ten_times_sooner(reached: Reached, settings: BaselineSettings, method: str = "ntk_fl") -> lab.Claim:
    """Judges whether ``method`` reaches FedAvg's last accuracy in at most a tenth of FedAvg's rounds, on average.

    ``reached`` has its rounds to this accuracy. If a seed never reaches it, the claim is not seen.
    """
    mean, tenth = reached.mean_rounds, settings.reference_rounds / 10
    measured = f"not with every seed in {settings.num_rounds}" if None in reached.rounds else f"in {mean:.1f}"
    claim = f"{LABELS[method]} gets to that level in at most a tenth of the rounds ({tenth:g})"
    return lab.Claim(claim, measured, lab.SEEN if mean <= tenth else lab.NOT_SEEN)


def _choices(study: Study) -> list[str]:
    """Returns remarks on choices that NTK-FL's paper leaves open."""
    settings = study.settings
    losses = list(dict.fromkeys(LOSSES[loss] for name, loss in EVOLVED.items() if name in settings.methods))
    evolved = f", NTK-FL under the {' or the '.join(losses)}, its step clipped at the largest stable one"
    lines = (
        f"one network of {settings.width} hidden units in the standard parameterization for all, inputs "
        "standardised, last "
        f"layer drawn with {settings.last_w_std:g} / sqrt(width); gradient methods under the "
        f"{settings.loss.replace('_', ' ')}"
        f"{evolved if losses else ''}",
        STAND_IN if study.dataset == "digits" else "",
        CLIENTS[settings.partition].format(map=settings.map),
        _compressor(settings) if any(name in EVOLVED and name in PAIRED for name in settings.methods) else "",
    )
    return [line for line in lines if line]


def _compressor(settings: BaselineSettings) -> str:
    """Returns a remark on how CP-NTK-FL compresses Jacobians here, as its paper does not say."""
    bits = f"{settings.value_bits} bits" if settings.value_bits else "the bits of a parameter"
    inputs = f"inputs projected to {settings.projected} numbers" if settings.projected else "inputs not projected"
    return (
        f"CP-NTK-FL: a share {settings.beta:g} of a client's examples, {inputs}, the largest "
        f"{1 - settings.sparsity:.0%} of an example's Jacobian with their places, in {bits} each, rows shuffled; the "
        "paper does not give its compressor"
    )
