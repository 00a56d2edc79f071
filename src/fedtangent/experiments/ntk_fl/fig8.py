"""What sparsified Jacobians leak: SSIM of reconstructed images against sparsity (NTK-FL, appendix B and Fig. 8).

The paper sparsifies the Jacobian tensor and attacks it by deep leakage (Zhu et al., 2019); it names neither network,
nor image, nor which entries the attacker compares. Here: Zhu's LeNet with sigmoids, attacked through the gradient of
one example and through its Jacobian, with zeros compared as Zhu does and with the entries that were sent only; the
paper's own perceptron, whose input stands in its first layer's Jacobian; and the other switches of CP-NTK-FL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtangent import models
from fedtangent.attacks import Attack
from fedtangent.engine.sweeps import check_seeds
from fedtangent.experiments.lab import leakage_runs as runs
from fedtangent.experiments.lab import trials
from fedtangent.experiments.lab.contract import Experiment, Outcome, Prepared, Request, Sheet, changed, choose
from fedtangent.experiments.lab.leakage_runs import Found, Images, Setup
from fedtangent.output.files import Metric

ALL, COLLUSION, DEEP, GRADIENT, KEPT = runs.ALL, runs.COLLUSION, runs.DEEP, runs.GRADIENT, runs.KEPT
LEAKED, PLACE, READ, ROWS = runs.LEAKED, runs.PLACE, runs.READ, runs.ROWS
SECRET, SWITCHES, WEIGHTS = runs.SECRET, runs.SWITCHES, runs.WEIGHTS
PUBLISHED = {0.9: 0.06, 0.8: 0.23, 0.7: 0.35, 0.6: 0.47, 0.5: 0.65}
NAMES = {
    GRADIENT: "gradient",
    ALL: "Jacobian",
    KEPT: "Jacobian, kept entries",
    READ: "first layer read",
    ROWS: "rows shuffled",
    PLACE: "its place's image",
    WEIGHTS: "weights shuffled",
    COLLUSION: "with collusion",
    SECRET: "projected",
    LEAKED: "matrix leaked",
}


@dataclass(frozen=True)
class Settings:
    """Several images of each seed, whose networks are drawn anew."""

    sparsities: tuple[float, ...] = (0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.0)
    num_images: int = 3
    network: str = "lenet"
    activation: str = "sigmoid"
    width: int = 100
    num_steps: int = 200
    num_restarts: int = 1
    optimizer: str = "lbfgs"
    learning_rate: float = 0.1
    num_known: int = 20
    projected_share: float = 0.255


SETTINGS = {"smoke": Settings(), "paper": Settings(num_images=8, num_steps=300, num_restarts=2)}


class Score(NamedTuple):
    """Over the images of all seeds."""

    mean: float
    error: float  # standard error of the mean
    values: np.ndarray  # [seeds * m]


def prepare(request: Request) -> Prepared:
    """Check the request and load the first seed's images; raises ``ValueError``."""
    name = choose(EXPERIMENT, request)
    seeds, s = check_seeds(request.seeds), changed(SETTINGS[request.scale], request.changes)
    trials.check_numbers(s, ("width", "num_known"))
    trials.check_numbers(s, ("num_images",), least=2)
    if len(set(s.sparsities)) < len(s.sparsities) or not all(0 <= v < 1 for v in s.sparsities):
        raise ValueError(f"sparsities: got {s.sparsities}, must be different numbers of at least 0 and below 1")
    allowed = {"lenet": runs.LENET_ACTIVATIONS, "mlp": tuple(models.ACTIVATIONS)}
    if s.network not in allowed:
        raise ValueError(f"network: got {s.network!r}, allowed are {', '.join(allowed)}")
    if s.activation not in allowed[s.network]:
        raise ValueError(f"activation: got {s.activation!r}, {s.network} has {', '.join(allowed[s.network])}")
    if not 0 < s.projected_share <= 1:
        raise ValueError(f"projected_share: got {s.projected_share}, must be above 0 and at most 1")
    attack = Attack(s.optimizer, s.num_steps, s.learning_rate, s.num_restarts)
    setup = Setup(s.num_images, s.network, s.activation, s.width, s.num_known, s.projected_share, attack)
    first = runs.load(setup, name, request.data_dir, seeds[0])

    def run(say: Callable[[str], None], keep: Callable[[Sequence[Metric]], None], figures: Path) -> Outcome:
        def images(seed: int) -> Images:
            return first if seed == seeds[0] else runs.load(setup, name, request.data_dir, seed)

        return _run(s, setup, name, seeds, images, say, keep, figures)

    return Prepared(s, name, run)


def _run(
    s: Settings,
    setup: Setup,
    dataset: str,
    seeds: tuple[int, ...],
    load: Callable[[int], Images],
    say: Callable[[str], None],
    keep: Callable[[Sequence[Metric]], None],
    figures: Path,
) -> Outcome:
    sparsities = tuple(sorted(s.sparsities, reverse=True))
    first = load(seeds[0])
    built = runs.networks(setup, first)
    found = []
    for seed in seeds:
        images = load(seed)
        found.append(runs.read_everything(setup, built, images, sparsities, say))
        keep(_metrics(found[-1], seed))
    scores = summaries(found)
    claims = judge(scores)
    _draw(s, dataset, first, found[0], scores, sparsities, figures)
    rows = [
        {"attack": name, "sparsity": sparsity, "ssim": v.mean, "standard_error": v.error, "images": len(v.values),
         "published": PUBLISHED.get(sparsity) if name in DEEP else None}
        for name, of in scores.items() for sparsity, v in of.items()
    ]  # fmt: skip
    details = {"settings": s, "dataset": dataset, "claims": [{"claim": c, "holds": ok} for c, _, ok in claims]}
    lost = sorted({name for one in found for name, of in one.items() if not all(r.finite for r in of.values())})
    failed = tuple(f"{NAMES[name]}: an attack met only values that are not finite" for name in lost)
    sheets = (_fig8(scores, sparsities), _switches(scores, sparsities), _claims(claims))
    return Outcome(sheets, rows, details, _remarks(s, setup, first), failed)


def summaries(found: Sequence[Found]) -> dict[str, dict[float, Score]]:
    """Means over the images of all seeds, with standard errors."""

    def score(values: np.ndarray) -> Score:
        return Score(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5), values)

    return {
        name: {sparsity: score(np.concatenate([one[name][sparsity].ssim for one in found])) for sparsity in of}
        for name, of in found[0].items()
    }


def judge(scores: dict[str, dict[float, Score]]) -> list[tuple[str, str, bool]]:
    """The paper's claims: what is claimed, the numbers, whether they hold within two standard errors."""
    claims = []
    for name in DEEP:
        steps, whole = _changes(scores[name])
        worst = min(steps, key=lambda step: step[0] + 2 * step[1])
        claims.append((
            f"less sparsity, closer images: {NAMES[name]}",
            f"{whole[0]:+.2f} +- {whole[1]:.2f} in all, smallest step {worst[0]:+.3f} +- {worst[1]:.3f}",
            whole[0] > 2 * whole[1] and worst[0] + 2 * worst[1] >= 0,
        ))  # fmt: skip
    for name in (*DEEP, READ):
        beyond = {s: v.mean - PUBLISHED[s] for s, v in scores[name].items() if s in PUBLISHED}
        if beyond:
            at = max(beyond, key=lambda s: beyond[s] - 2 * scores[name][s].error)
            v = scores[name][at]
            claims.append((f"sparsity protects as published: {NAMES[name]}",
                           f"SSIM {v.mean:.2f} +- {v.error:.2f} at {at:.0%}, published {PUBLISHED[at]}",
                           v.mean - 2 * v.error <= PUBLISHED[at]))  # fmt: skip
    for claim, hidden, seen in (
        ("shuffled rows hide whose image it is", PLACE, ROWS),
        ("shuffled rows hide the image", ROWS, READ),
        ("shuffled weights hide the image", WEIGHTS, READ),
        ("shuffled weights hide it if a client colludes", COLLUSION, READ),
        ("projection hides the image", SECRET, READ),
        ("projection hides it from least squares if the matrix leaks", LEAKED, READ),
    ):
        least = min(scores[hidden])
        apart = scores[seen][least].mean - scores[hidden][least].mean
        text = f"SSIM {scores[hidden][least].mean:.2f}, without it {scores[seen][least].mean:.2f}, {least:.0%} sparse"
        claims.append((claim, text, bool(apart > 0.5 * scores[seen][least].mean)))
    return claims


def _changes(of: dict[float, Score]) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Paired changes of SSIM to the next lower sparsity, and from the highest to the lowest, with standard errors."""
    values = [of[s].values for s in sorted(of, reverse=True)]

    def change(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
        return float(np.mean(b - a)), float(np.std(b - a, ddof=1) / len(a) ** 0.5)

    steps = [change(a, b) for a, b in itertools.pairwise(values)]
    return steps or [(0.0, 0.0)], change(values[0], values[-1])


def _metrics(found: Found, seed: int) -> list[Metric]:
    return [
        Metric(0, name, seed, "test", f"ssim at sparsity {sparsity:g}", float(read.ssim.mean()), 0, 0)
        for name, of in found.items() for sparsity, read in of.items()
    ]  # fmt: skip


def _cell(v: Score) -> str:
    return f"{v.mean:.2f} +- {v.error:.2f}"


def _fig8(scores: dict[str, dict[float, Score]], sparsities: Sequence[float]) -> Sheet:
    rows = tuple(
        (f"{s:.0%}", f"{PUBLISHED[s]:.2f}" if s in PUBLISHED else "-", *(_cell(scores[n][s]) for n in (*DEEP, READ)))
        for s in sparsities
    )
    columns = ("sparsity", "published", *(NAMES[name] for name in (*DEEP, READ)))
    return Sheet("SSIM of reconstructed images, mean +- standard error over images", columns, rows)


def _switches(scores: dict[str, dict[float, Score]], sparsities: Sequence[float]) -> Sheet:
    rows = tuple((f"{s:.0%}", *(_cell(scores[n][s]) for n in SWITCHES)) for s in sparsities)
    columns = ("sparsity", *(NAMES[n] for n in SWITCHES))
    return Sheet("the other switches, first layer of the perceptron read: SSIM", columns, rows)


def _claims(claims: Sequence[tuple[str, str, bool]]) -> Sheet:
    rows = tuple((claim, number, "holds" if ok else "DOES NOT HOLD") for claim, number, ok in claims)
    title = "NTK-FL, section 4.2 and appendix B: what the switches protect (hidden: less than half of the SSIM is left)"
    return Sheet(title, ("claim", "measured", ""), rows)


def _remarks(s: Settings, setup: Setup, images: Images) -> tuple[str, ...]:
    return (
        f"settings: {', '.join(f'{name} {value}' for name, value in vars(s).items())}",
        f"images of {images.x.shape[1]} x {images.x.shape[2]} in [0, 1], projected to "
        f"{runs.projected_size(setup, images)} numbers; SSIM of reconstructions clipped to [0, 1]",
        "the paper names neither the attacked network nor the entries compared; the first two attacks compare zeros "
        "too, as Zhu et al. do",
        "first layer read: of the paper's perceptron, in closed form, as are the other switches; the colluding client "
        f"has {s.num_known} examples",
    )


def _draw(
    s: Settings,
    dataset: str,
    images: Images,
    found: Found,
    scores: dict[str, dict[float, Score]],
    sparsities: Sequence[float],
    figures: Path,
) -> None:
    from fedtangent.output.leakage_plots import Shown, reconstructions, similarity_against_sparsity

    shown = {
        NAMES[name]: [Shown(found[name][v].x[0], float(found[name][v].ssim[0])) for v in sparsities]
        for name in (*DEEP, READ, WEIGHTS, COLLUSION, SECRET, LEAKED)
    }
    title = f"What the server reads of one image ({dataset}); SSIM below each"
    reconstructions(images.x[0], shown, [f"{v:.0%}" for v in sparsities], title, figures / "fig8_images.png")
    series = {NAMES[n]: {v: scores[n][v][:2] for v in sparsities} for n in (*DEEP, READ)}
    similarity_against_sparsity(series, PUBLISHED, f"Leakage against sparsity ({dataset}, {s.network})",
                                figures / "fig8_ssim.png")  # fmt: skip


EXPERIMENT = Experiment(
    "what sparsified Jacobians leak: SSIM of reconstructed images against sparsity (NTK-FL, Fig. 8), other switches",
    ("digits", "fashion_mnist", "mnist"),
    prepare,
)
