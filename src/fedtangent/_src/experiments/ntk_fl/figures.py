"""Table 1 and figures 3 to 7 of NTK-FL: its accuracy and the rounds it needs, beside other methods.

In fig. 5 hyper-parameters are chosen at the smallest Dirichlet parameter alpha, the most unequal clients, so that a
method's loss of accuracy there is not due to poor tuning.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab import harness
from fedtangent._src.experiments.lab.harness import Runs, Tuned
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, with_changes, within
from fedtangent._src.experiments.ntk_fl import baselines
from fedtangent._src.experiments.ntk_fl.baselines import (
    DIGITS,
    EVOLVED,
    IMAGES,
    LABELS,
    PAIRED,
    BaselineSettings,
    Reached,
    Report,
    figure_4,
)
from fedtangent._src.output.line_plots import heat_map
from fedtangent._src.output.run_plots import curves

CLAIM_TABLE1 = "CP-NTK-FL needs the fewest rounds, by an order of magnitude, at a similar uplink"
# Rounds and MiB of uplink to 85 % on Fashion-MNIST, alpha = .1 (erratum `ntk_fl.table1`).
PUBLISHED_TABLE1 = {"cp_ntk_fl": (26, 386), "fed_com": (250, 379), "qsgd": (614, 465), "fed_avg": (284, 1720)}
# The paper does not say how its Jacobians are compressed: 386 MB in 26 rounds are about half a bit for each entry. Here
# only the largest entries are sent, with their places (``sparsity``), in ``value_bits`` bits.


@dataclass(frozen=True)
class TargetSettings(BaselineSettings):
    """Settings of NTK-FL's table 1: the fields of ``BaselineSettings``, and the accuracy to reach.

    CP-NTK-FL runs for ``num_rounds`` at most, the other methods for ``reference_rounds``.
    """

    target: float = within(0.85, above=0, below=1)


METHODS_TABLE1 = (
    "methods=cp_ntk_fl,cp_ntk_fl_cross_entropy,fed_com,qsgd,fed_avg alpha=0.1 beta=0.3 sparsity=0.98 value_bits=16"
)
REDUCED_TABLE1 = with_changes(TargetSettings(), METHODS_TABLE1, "projected=200")
SCALES_TABLE1 = {
    "digits": by_scale(
        with_changes(REDUCED_TABLE1, DIGITS, "num_rounds=30 reference_rounds=120 projected=32 target=0.88")
    ),
    "fashion_mnist": by_scale(
        with_changes(REDUCED_TABLE1, IMAGES, "num_rounds=20 reference_rounds=80 target=0.75"),
        paper=with_changes(REDUCED_TABLE1, "num_rounds=60 reference_rounds=700"),
    ),
}


def check_table1(study: Study) -> None:
    """Raises ``ValueError`` unless FedAvg is a method, NTK-FL or CP-NTK-FL is another, and all settings are valid.

    ``reference_rounds`` must be at least ``num_rounds``.
    """
    methods = set(study.settings.methods)
    if "fed_avg" not in methods or not methods & EVOLVED.keys():
        names = ", ".join(study.settings.methods)
        raise ValueError(f"methods: got {names}, must include fed_avg and one of {', '.join(EVOLVED)}")
    settings = study.settings
    if settings.reference_rounds < settings.num_rounds:
        least = f"at least num_rounds, {settings.num_rounds}"
        raise ValueError(f"reference_rounds: got {settings.reference_rounds}, must be {least}")
    baselines.check(study)


def run_table1(study: Study) -> lab.Outcome:
    """Runs NTK-FL's table 1: trains every method, and finds the rounds and bytes to the target accuracy."""
    settings, bench = study.settings, baselines.bench_of(study)
    rounds = {name: settings.reference_rounds for name in settings.methods if name not in EVOLVED}
    harness.plan(bench, rounds=rounds)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned, rounds)
    target, seeds = settings.target, len(study.seeds)
    title = f"rounds and uplink to an accuracy of {target:g} on {study.dataset}, mean over {seeds} seeds"
    sheet, reached = baselines.to_the_level(runs, [target] * seeds, title, PUBLISHED_TABLE1)
    rows = [
        {
            "method": m,
            "rounds": r.mean_rounds,
            "uplink_mib": r.mean_mib,
            "by_seed": r,
            "published": PUBLISHED_TABLE1.get(m),
        }
        for m, r in reached.items()
    ]
    baselines.draw(study, runs)
    report = Report((sheet, baselines.by_round(runs)), rows, _judge_table1(settings, reached))
    return baselines.outcome(study, CLAIM_TABLE1, tuned, report, {"": runs})


def _judge_table1(settings: TargetSettings, reached: dict[str, Reached]) -> list[lab.Claim]:
    """Judges whether NTK-FL and CP-NTK-FL each need fewer rounds to the target accuracy than each other method.

    They are not compared with one another. Differences are paired by seed.
    """
    evolved = [name for name in EVOLVED if name in reached]
    return [_claim(settings, reached, method, other) for method in evolved for other in reached if other not in EVOLVED]


def _claim(settings: TargetSettings, reached: dict[str, Reached], method: str, other: str) -> lab.Claim:
    """Judges whether the method ``method`` needs fewer rounds to the target accuracy than the method ``other``.

    The claim is undecided if a run of ``method`` never reaches the target. A run of ``other`` that never reaches it
    counts with all its rounds.
    """
    first, second = reached[method], reached[other]
    claim = f"{LABELS[method]} needs fewer rounds than {LABELS[other]}"
    if None in first.rounds:
        return lab.Claim(
            claim, f"does not get to {settings.target:g} in {settings.num_rounds} rounds with every seed", lab.UNDECIDED
        )
    is_reached = None not in second.rounds
    rounds = np.array([settings.reference_rounds if r is None else r for r in second.rounds], float)
    ratio = f"{'' if is_reached else 'at most '}{first.mean_rounds / rounds.mean():.2f} times the rounds"
    uplink = f" and {first.mean_mib / second.mean_mib:.2f} times its uplink" if is_reached else ""
    paper = ""
    if other in PUBLISHED_TABLE1:
        published = [a / b for a, b in zip(PUBLISHED_TABLE1["cp_ntk_fl"], PUBLISHED_TABLE1[other], strict=True)]
        paper = f" (the paper: {published[0]:.2f} and {published[1]:.2f})"
    return lab.Claim(claim, f"{ratio}{uplink}{paper}", lab.interval(rounds - np.array(first.rounds, float)).above())


SUMMARY_TABLE1 = (
    "NTK-FL, table 1: rounds and uplink that CP-NTK-FL, FedCOM, QSGD and FedAvg need to reach an accuracy of 85 %."
)


CLAIM_FIG3 = "a slight loss of accuracy for NTK-FL, a clear one for FedAvg (curves of 18 rounds only)"
METHODS_FIG3 = ("ntk_fl", "cp_ntk_fl", "fed_avg", "cp_fed_avg")
REDUCED_FIG3 = with_changes(BaselineSettings(methods=METHODS_FIG3), "beta=0.4 alpha=0.1 projected=100")
LONG = "num_rounds=18 reference_rounds=18"
SCALES_FIG3 = {
    "digits": by_scale(with_changes(REDUCED_FIG3, DIGITS, LONG, "projected=16")),
    "fashion_mnist": by_scale(with_changes(REDUCED_FIG3, IMAGES), paper=with_changes(REDUCED_FIG3, LONG)),
}


def check_fig3(study: Study) -> None:
    """Raises ``ValueError`` unless the methods are the four of NTK-FL's fig. 3 and the other settings are valid."""
    if study.settings.methods != METHODS_FIG3:
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be {', '.join(METHODS_FIG3)}")
    baselines.check(study)


def run_fig3(study: Study) -> lab.Outcome:
    """Compares how much accuracy NTK-FL and FedAvg lose by subsampling and projection (NTK-FL, fig. 3)."""
    bench = baselines.bench_of(study)
    harness.plan(bench)
    tuned = harness.tune_all(bench)
    runs = harness.repeat_all(bench, tuned)
    baselines.draw(study, runs)
    sheet, rows, claim = _losses(study.settings, runs)
    report = Report((sheet, baselines.by_round(runs)), rows, (claim,))
    return baselines.outcome(study, CLAIM_FIG3, tuned, report, {"": runs})


def _losses(settings: BaselineSettings, runs: Runs) -> tuple[lab.Sheet, list[lab.Row], lab.Claim]:
    """Computes the accuracy that NTK-FL and FedAvg each lose by subsampling and projection, paired by seed.

    An accuracy is the mean over the last ``settings.window`` rounds. Returns table, rows, and the claim that FedAvg
    loses more than NTK-FL.
    """
    ends = baselines.ends(runs, settings)
    losses = {plain: ends[plain] - ends[small] for small, plain in PAIRED.items() if small in ends}
    rows, entries = list[lab.Row](), []
    for small, plain in ((small, plain) for small, plain in PAIRED.items() if small in ends):
        loss = lab.interval(losses[plain])
        accuracy = {"accuracy": ends[plain].mean(), "accuracy_reduced": ends[small].mean()}
        rows.append({"method": plain, **accuracy, **loss.row("loss"), "loses": loss.above()})
        entries.append({**rows[-1], "label": LABELS[plain], "interval": loss})
    more = lab.interval(losses["fed_avg"] - losses["ntk_fl"])
    rows.append({"method": "fed_avg minus ntk_fl", **more.row("loss"), "loses": more.above()})
    title = f"test accuracy, mean of the last {settings.window} of {settings.num_rounds} rounds: all, and reduced to"
    columns = "method: {label} | all: {accuracy:.4f} | reduced: {accuracy_reduced:.4f} | "
    columns += "loss, 95 % interval: {interval:+.4f} | it loses: {loses}"
    sheet = lab.table(f"{title} beta {settings.beta:g}, d1' {settings.projected}", entries, columns)
    return sheet, rows, more.claim_above("FedAvg loses more than NTK-FL", "by {:+.4f}")


SUMMARY_FIG3 = (
    "NTK-FL, fig. 3: what subsampling (beta = .4) and projection (d1' = 100) cost NTK-FL, and what they cost FedAvg."
)


FIGURE_7 = "NTK-FL outperforms other FL algorithms and is close to the centralised training (curves only)"
PAPER_FIG4 = BaselineSettings()
# The writers of digits in LEAF's sample of FEMNIST, of which the paper has 300; of another sample: --set num_clients=
WRITERS = with_changes(PAPER_FIG4, "partition=writers num_clients=102 num_validation=1000")
LABEL_SKEW = by_scale(with_changes(PAPER_FIG4, IMAGES), paper=PAPER_FIG4)
DIGIT_LABELS = by_scale(with_changes(PAPER_FIG4, DIGITS))
WRITING = {
    "digits": by_scale(with_changes(PAPER_FIG4, DIGITS, "partition=shifted")),
    "femnist_digits": by_scale(
        with_changes(WRITERS, IMAGES, "num_clients=102 clients_per_round=20 num_train=0 num_test=0"), paper=WRITERS
    ),
}
SKEWED = BaselineSettings(alpha=0.1)
COLOURED = {
    "digits": by_scale(with_changes(SKEWED, DIGITS)),
    "cifar10": by_scale(with_changes(SKEWED, IMAGES, "num_train=2400 num_validation=400 num_test=0"), paper=SKEWED),
}
SUMMARIES = {
    "a": "fig. 4(a): test accuracy by round on FEMNIST's digits, clients are writers",
    "b": "fig. 4(b): test accuracy by round on MNIST of label skew, Dirichlet alpha = .5",
    "c": "fig. 4(c): test accuracy by round on Fashion-MNIST of label skew, Dirichlet alpha = .5 (fig. 6's: .1)",
    "7": "fig. 7: test accuracy by round on CIFAR-10 of label skew",
}


CLAIM_FIG5 = "NTK-FL is stable in alpha from .1 to .5; FedAvg and FedNova drop at small alpha (curves only)"


@dataclass(frozen=True)
class AlphaSettings(BaselineSettings):
    """Settings of NTK-FL's fig. 5: as ``BaselineSettings``, but with several Dirichlet alphas in place of one."""

    alphas: tuple[float, ...] = within((0.1, 0.2, 0.3, 0.4, 0.5), above=0, count=2, increasing=True)


PAPER_FIG5 = AlphaSettings(methods=("ntk_fl", "data_sharing", "fed_nova", "fed_avg"))
SCALES_FIG5 = {
    "digits": by_scale(with_changes(PAPER_FIG5, DIGITS, "alphas=0.1,0.5"), with_changes(PAPER_FIG5, DIGITS)),
    "fashion_mnist": by_scale(with_changes(PAPER_FIG5, IMAGES, "alphas=0.1,0.5"), paper=PAPER_FIG5),
}


def check_fig5(study: Study) -> None:
    """Raises ``ValueError`` unless ``partition`` is "dirichlet", NTK-FL is a method, and all settings are valid."""
    settings = study.settings
    if settings.partition != "dirichlet":
        raise ValueError(f"partition: got {settings.partition!r}, must be dirichlet: this experiment varies its alpha")
    if "ntk_fl" not in settings.methods:
        raise ValueError(f"methods: got {', '.join(settings.methods)}, must include ntk_fl")
    for alpha in (settings.alphas[0], settings.alphas[-1]):
        baselines.check(study, alpha=alpha)


def run_fig5(study: Study) -> lab.Outcome:
    """Runs NTK-FL's fig. 5: tunes every method at the smallest alpha, and trains it at every alpha."""
    settings, tuned, runs = study.settings, dict[str, Tuned](), dict[float, Runs]()
    benches = {alpha: baselines.bench_of(study, alpha=alpha) for alpha in settings.alphas}
    harness.plan(benches[settings.alphas[0]], repetitions=len(benches))
    for alpha, bench in benches.items():
        bench.compiled = benches[settings.alphas[0]].compiled  # clients are of the same sizes at every alpha
        tuned = tuned or harness.tune_all(bench)
        study.say(f"alpha {alpha:g}")
        runs[alpha] = harness.repeat_all(bench, tuned)
    ends = {alpha: baselines.ends(of, settings) for alpha, of in runs.items()}
    rows = [
        {"method": m, "alpha": alpha, "accuracy": float(of[m].mean()), "seeds": of[m]}
        for m in settings.methods
        for alpha, of in ends.items()
    ]
    gains = {m: ends[settings.alphas[-1]][m] - ends[settings.alphas[0]][m] for m in settings.methods}
    title = f"test accuracy, mean of the last {settings.window} of {settings.num_rounds} rounds, +- its standard error"
    cells = tuple(
        (LABELS[m], *(baselines.mean_and_error(of[m]) for of in ends.values()), f"{lab.interval(gains[m]):+.4f}")
        for m in settings.methods
    )
    columns = ("method", *(f"{alpha:g}" for alpha in settings.alphas), "last - first, 95 % interval")
    sheet = lab.Sheet(f"{title}, against alpha", columns, cells)
    lines = {LABELS[m]: np.stack([of[m] for of in ends.values()], axis=1) for m in settings.methods}
    clients = f"{settings.num_clients} clients, {settings.clients_per_round} a round"
    title = f"{study.dataset}, round {settings.num_rounds}, {clients}"
    path = study.figures.path("accuracy_by_alpha")
    curves({"test accuracy": lines}, settings.alphas, title, path, across="Dirichlet alpha")
    by_alpha = {f"alpha {alpha:g}: ": of for alpha, of in runs.items()}
    return baselines.outcome(study, CLAIM_FIG5, tuned, Report((sheet,), rows, _judge_fig5(settings, gains)), by_alpha)


def _judge_fig5(settings: AlphaSettings, gains: dict[str, np.ndarray]) -> list[lab.Claim]:
    """Judges whether each other method gains more accuracy than NTK-FL from the smallest to the largest alpha."""
    more = {name: lab.interval(gains[name] - gains["ntk_fl"]) for name in settings.methods if name != "ntk_fl"}
    claim = f"gains more from alpha {settings.alphas[0]:g} to {settings.alphas[-1]:g} than NTK-FL"
    return [gain.claim_above(f"{LABELS[name]} {claim}", "by {:+.4f}") for name, gain in more.items()]


SUMMARY_FIG5 = "NTK-FL, fig. 5: test accuracy after 50 rounds against the Dirichlet parameter alpha, on Fashion-MNIST."


CLAIM_FIG6 = "a larger beta or d1' gives a higher accuracy, and all are near each other: 81.9 to 85.0 %"
# The paper's fig. 6, per cent on Fashion-MNIST, alpha = .1, after 10 rounds: rows beta, columns d1'.
PUBLISHED_FIG6 = {
    0.7: (82.9, 84.1, 84.3, 84.7, 84.8, 84.6),
    0.6: (83.1, 83.8, 84.8, 84.4, 84.5, 85.0),
    0.5: (82.8, 83.9, 84.4, 84.6, 84.4, 84.9),
    0.4: (82.4, 83.8, 84.3, 84.4, 84.4, 84.5),
    0.3: (82.4, 83.5, 84.2, 84.4, 84.1, 84.2),
    0.2: (81.9, 83.2, 83.7, 84.2, 84.5, 84.6),
}
PUBLISHED_DIMENSIONS = (100, 200, 300, 400, 500, 600)


@dataclass(frozen=True)
class BetaSettings(BaselineSettings):
    """Settings of NTK-FL's fig. 6: values of the share beta of a client's examples and of the projected dimension d1'.

    The rate is tuned at one pair, ``beta`` and ``projected``.
    """

    betas: tuple[float, ...] = within((0.7, 0.6, 0.5, 0.4, 0.3, 0.2), above=0, at_most=1, count=2)
    dimensions: tuple[int, ...] = within(PUBLISHED_DIMENSIONS, count=2)


TEN = "methods=cp_ntk_fl alpha=0.1 beta=0.4 num_rounds=10 reference_rounds=10 window=1 tuning_rounds=10"
ON_DIGITS = with_changes(BetaSettings(), DIGITS, TEN, "projected=16")
PAPER_FIG6 = with_changes(BetaSettings(), TEN, "projected=300")
SCALES_FIG6 = {
    "digits": by_scale(
        with_changes(ON_DIGITS, "betas=0.7,0.4,0.2 dimensions=8,16,48"),
        with_changes(ON_DIGITS, "dimensions=8,16,24,32,48,64"),
    ),
    "fashion_mnist": by_scale(
        with_changes(PAPER_FIG6, IMAGES, TEN, "betas=0.7,0.2 dimensions=100,300"), paper=PAPER_FIG6
    ),
}


def check_fig6(study: Study) -> None:
    """Raises ``ValueError`` unless the method is CP-NTK-FL and it can be built at the largest projected dimension."""
    if study.settings.methods != ("cp_ntk_fl",):
        raise ValueError(f"methods: got {', '.join(study.settings.methods)}, must be cp_ntk_fl")
    baselines.check(study, projected=max(study.settings.dimensions))


def run_fig6(study: Study) -> lab.Outcome:
    """Runs NTK-FL's fig. 6: tunes CP-NTK-FL once, and trains it for every beta and projected dimension."""
    settings, runs = study.settings, dict[tuple[float, int], Runs]()
    bench = baselines.bench_of(study)
    harness.plan(bench, repetitions=len(settings.betas) * len(settings.dimensions))
    tuned = harness.tune_all(bench)
    for beta, dimension in itertools.product(settings.betas, settings.dimensions):
        study.say(f"beta {beta:g}, d1' {dimension}")
        cell = baselines.bench_of(study, beta=beta, projected=dimension)
        runs[beta, dimension] = harness.repeat_all(cell, tuned)
    ends = {at: baselines.ends(of, settings)["cp_ntk_fl"] for at, of in runs.items()}
    rows = [
        {"beta": b, "d1": d, "accuracy": float(v.mean()), "seeds": v, "published": published(b, d)}
        for (b, d), v in ends.items()
    ]
    values = np.array([[100 * ends[b, d].mean() for d in settings.dimensions] for b in settings.betas])
    axes = {"beta": [f"{b:g}" for b in settings.betas], "d1'": [str(d) for d in settings.dimensions]}
    path, title = study.figures.path("accuracy_by_beta_and_dimension"), f"CP-NTK-FL, round {settings.num_rounds}"
    heat_map(values, axes, "test accuracy, %", f"{study.dataset}, {title}", path)
    by_cell = {f"beta {b:g}, d1' {d}: ": of for (b, d), of in runs.items()}
    return baselines.outcome(
        study, CLAIM_FIG6, tuned, Report((_sheet(settings, ends),), rows, _judge_fig6(settings, ends)), by_cell
    )


def published(beta: float, dimension: int) -> float | None:
    """Returns the accuracy that fig. 6 of NTK-FL shows, from 0 to 1; None if it shows none.

    Args:
        beta: Share of its examples that a client uses in a round.
        dimension: Dimension of the projected inputs.
    """
    if beta not in PUBLISHED_FIG6 or dimension not in PUBLISHED_DIMENSIONS:
        return None
    return PUBLISHED_FIG6[beta][PUBLISHED_DIMENSIONS.index(dimension)] / 100


def _judge_fig6(settings: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> tuple[lab.Claim, ...]:
    """Judges whether accuracy is higher at the largest than at the smallest beta, and likewise for d1'.

    beta is the share of examples that a client uses, d1' the projected dimension. The accuracy for one of them is the
    mean over the values of the other. ``ends`` has the accuracies [seeds] by (beta, d1').
    """
    top, low = max(settings.betas), min(settings.betas)
    most, least = max(settings.dimensions), min(settings.dimensions)
    by_beta = lab.interval(np.mean([ends[top, d] - ends[low, d] for d in settings.dimensions], axis=0))
    by_size = lab.interval(np.mean([ends[b, most] - ends[b, least] for b in settings.betas], axis=0))
    means = [float(v.mean()) for v in ends.values()]
    cells = f"all cells are between {min(means):.4f} and {max(means):.4f}"
    return (
        by_beta.claim_above(f"beta {top:g} is above {low:g}", f"by {{:+.4f}}; {cells}"),
        by_size.claim_above(f"d1' {most} is above {least}", "by {:+.4f}"),
    )


def _sheet(settings: BetaSettings, ends: dict[tuple[float, int], np.ndarray]) -> lab.Sheet:
    """Builds the table of accuracies in % by beta and projected dimension, with NTK-FL's published ones in brackets."""

    def cell(beta: float, dimension: int) -> str:
        percent, paper = f"{100 * ends[beta, dimension].mean():.1f}", published(beta, dimension)
        return percent if paper is None else f"{percent} ({100 * paper:.1f})"

    title = (
        f"accuracy in % after {settings.num_rounds} rounds, over beta (down) and d1' (across), the rate chosen at beta "
        f"{settings.beta:g} and d1' {settings.projected}; in brackets the paper's, on Fashion-MNIST"
    )
    rows = tuple(
        (f"{beta:g}", *(cell(beta, dimension) for dimension in settings.dimensions)) for beta in settings.betas
    )
    return lab.Sheet(title, ("beta", *map(str, settings.dimensions)), rows)


SUMMARY_FIG6 = (
    "NTK-FL, fig. 6: accuracy of CP-NTK-FL after 10 rounds over the sampling rate beta and the projection's d1'."
)
_entry = partial(experiment, __name__, papers=("yue2022",), least_seeds=2)
ENTRIES = (
    _entry(run_table1, SCALES_TABLE1, check=check_table1, part=("table1", SUMMARY_TABLE1)),
    _entry(run_fig3, SCALES_FIG3, check=check_fig3, part=("fig3", SUMMARY_FIG3)),
    figure_4("ntk_fl.fig4a", SUMMARIES["a"], WRITING),
    figure_4("ntk_fl.fig4b", SUMMARIES["b"], {"digits": DIGIT_LABELS, "mnist": LABEL_SKEW}),
    figure_4("ntk_fl.fig4c", SUMMARIES["c"], {"digits": DIGIT_LABELS, "fashion_mnist": LABEL_SKEW}),
    figure_4("ntk_fl.fig7", SUMMARIES["7"], COLOURED, FIGURE_7),
    _entry(run_fig5, SCALES_FIG5, check=check_fig5, part=("fig5", SUMMARY_FIG5)),
    _entry(run_fig6, SCALES_FIG6, check=check_fig6, part=("fig6", SUMMARY_FIG6)),
)
