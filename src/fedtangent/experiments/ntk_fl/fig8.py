"""What sparsified Jacobians leak: SSIM of reconstructed images against sparsity (NTK-FL, appendix B and Fig. 8).

The paper sparsifies the Jacobian tensor and attacks it by deep leakage (Zhu et al., 2019); it names neither network,
nor image, nor which entries the attacker compares. Here: Zhu's LeNet with sigmoids, attacked through the gradient of
one example and through its Jacobian, with zeros compared as Zhu does and with the entries that were sent only; the
paper's own perceptron, whose input stands in its first layer's Jacobian; and the other switches of CP-NTK-FL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedtangent import models
from fedtangent.experiments.lab.results import NOT_SEEN, Claim, MeanInterval, Outcome, Sheet, interval
from fedtangent.experiments.lab.runner import Study, experiment
from fedtangent.experiments.lab.settings import by_scale
from fedtangent.experiments.ntk_fl import leakage
from fedtangent.experiments.ntk_fl.leakage import DEEP, NAMES, AttackedImages, Found, LeakageSettings
from fedtangent.output.files import Metric

PUBLISHED = {0.9: 0.06, 0.8: 0.23, 0.7: 0.35, 0.6: 0.47, 0.5: 0.65}


class Score(NamedTuple):
    """Over the images of all seeds."""

    mean: float
    error: float  # standard error of the mean
    values: np.ndarray  # [seeds * m]


def check(study: Study) -> None:
    """Load the first seed's images; the network must have the activation."""
    s = study.settings
    allowed = {"lenet": leakage.LENET_ACTIVATIONS, "mlp": tuple(models.ACTIVATIONS)}[s.network]
    if s.activation not in allowed:
        raise ValueError(f"activation: got {s.activation!r}, allowed for {s.network} are {', '.join(allowed)}")
    assert s.attack
    leakage.load(s, study.dataset, study.data_dir, study.seeds[0])


def run(study: Study) -> Outcome:
    """Every attack at every sparsity on every seed's images."""
    s, found = study.settings, list[Found]()
    sparsities = tuple(sorted(s.sparsities, reverse=True))
    first = leakage.load(s, study.dataset, study.data_dir, study.seeds[0])
    built = leakage.networks(s, first)
    for seed in study.each_seed():
        images = leakage.load(s, study.dataset, study.data_dir, seed)
        found.append(leakage.read_everything(s, built, images, sparsities, study.say))
        study.keep(_metrics(found[-1], seed))
    scores = summaries(found)
    _draw(study, first, found[0], scores, sparsities)
    rows = [
        {"attack": name, "sparsity": sparsity, "ssim": v.mean, "standard_error": v.error, "images": len(v.values),
         "published": PUBLISHED.get(sparsity) if name in DEEP else None}
        for name, of in scores.items() for sparsity, v in of.items()
    ]  # fmt: skip
    lost = sorted({name for one in found for name, of in one.items() if not all(r.finite for r in of.values())})
    failed = tuple(f"{NAMES[name]}: an attack met only values that are not finite" for name in lost)
    sheets = (
        _sheet(
            scores,
            sparsities,
            leakage.SHOWN,
            "SSIM of reconstructed images, mean +- standard error over images",
        ),
        _sheet(scores, sparsities, leakage.SWITCHES, "the other switches, first layer of the perceptron read: SSIM"),
    )
    return Outcome(sheets, rows, judge(scores), remarks=_remarks(s, first), failed=failed)


def summaries(found: Sequence[Found]) -> dict[str, dict[float, Score]]:
    """Means over the images of all seeds, with standard errors."""

    def score(values: np.ndarray) -> Score:
        return Score(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5), values)

    return {
        name: {sparsity: score(np.concatenate([one[name][sparsity].ssim for one in found])) for sparsity in of}
        for name, of in found[0].items()
    }


HIDDEN = (  # what is claimed, the score with the switch, the one without
    ("shuffled rows hide whose image it is", leakage.PLACE, leakage.ROWS),
    ("shuffled rows hide the image", leakage.ROWS, leakage.READ),
    ("shuffled weights hide the image", leakage.WEIGHTS, leakage.READ),
    ("shuffled weights hide it if a client colludes", leakage.COLLUSION, leakage.READ),
    ("projection hides the image", leakage.SECRET, leakage.READ),
    ("projection hides it from least squares if the matrix leaks", leakage.LEAKED, leakage.READ),
)


def judge(scores: dict[str, dict[float, Score]]) -> tuple[Claim, ...]:
    """Section 4.2 and appendix B, by intervals over images: what sparsity and the switches protect.

    An image is hidden where less than half of the SSIM is left, at the lowest sparsity.
    """
    claims = []
    for name in DEEP:
        steps, whole = _changes(scores[name])
        worst = min(steps, key=lambda step: step.high)
        text = f"{whole.text('+.2f')} in all, smallest step {worst.text('+.3f')}"
        verdict = NOT_SEEN if worst.high < 0 else whole.above()
        claims.append(Claim(f"less sparsity, closer images: {NAMES[name]}", text, verdict))
    for name in leakage.SHOWN:
        beyond = {s: interval(v.values - PUBLISHED[s]) for s, v in scores[name].items() if s in PUBLISHED}
        if beyond:
            at = max(beyond, key=lambda s: beyond[s].low)
            text = f"SSIM {_cell(scores[name][at])} at {at:.0%}, published {PUBLISHED[at]}"
            verdict = NOT_SEEN if beyond[at].low > 0 else beyond[at].below()
            claims.append(Claim(f"sparsity protects as published: {NAMES[name]}", text, verdict))
    for claim, hidden, seen in HIDDEN:
        least = min(scores[hidden])
        with_it, without = scores[hidden][least], scores[seen][least]
        text = f"SSIM {with_it.mean:.2f}, without it {without.mean:.2f}, {least:.0%} sparse"
        claims.append(Claim(claim, text, interval(0.5 * without.values - with_it.values).above()))
    return tuple(claims)


def _changes(of: dict[float, Score]) -> tuple[list[MeanInterval], MeanInterval]:
    """Paired changes of SSIM to the next lower sparsity, and from the highest to the lowest."""
    values = [of[s].values for s in sorted(of, reverse=True)]
    steps = [interval(b - a) for a, b in itertools.pairwise(values)]
    return steps or [MeanInterval(0.0, 0.0, 0.0)], interval(values[-1] - values[0])


def _metrics(found: Found, seed: int) -> list[Metric]:
    return [
        Metric(0, name, seed, "test", f"ssim at sparsity {sparsity:g}", float(read.ssim.mean()), 0, 0)
        for name, of in found.items() for sparsity, read in of.items()
    ]  # fmt: skip


def _cell(v: Score) -> str:
    return f"{v.mean:.2f} +- {v.error:.2f}"


def _sheet(
    scores: dict[str, dict[float, Score]], sparsities: Sequence[float], names: Sequence[str], title: str
) -> Sheet:
    rows = tuple(
        (f"{s:.0%}", f"{PUBLISHED[s]:.2f}" if s in PUBLISHED else "-", *(_cell(scores[n][s]) for n in names))
        for s in sparsities
    )
    return Sheet(title, ("sparsity", "published", *(NAMES[name] for name in names)), rows)


def _remarks(s: LeakageSettings, images: AttackedImages) -> tuple[str, ...]:
    return (
        f"images of {images.x.shape[1]} x {images.x.shape[2]} in [0, 1], projected to "
        f"{leakage.projected_size(s, images)} numbers; SSIM of reconstructions clipped to [0, 1]",
        "the paper names neither the attacked network nor the entries compared; the first two attacks compare zeros "
        "too, as Zhu et al. do",
        "first layer read: of the paper's perceptron, in closed form, as are the other switches; the colluding client "
        f"has {s.num_known} examples",
    )


def _draw(
    study: Study,
    images: AttackedImages,
    found: Found,
    scores: dict[str, dict[float, Score]],
    sparsities: Sequence[float],
) -> None:
    from fedtangent.output.line_plots import points_with_errors
    from fedtangent.output.surface_plots import Shown, reconstructions

    figures, dataset = study.figures, study.dataset
    shown = {
        NAMES[name]: [Shown(found[name][v].x[0], float(found[name][v].ssim[0])) for v in sparsities]
        for name in (*DEEP, leakage.READ, leakage.WEIGHTS, leakage.COLLUSION, leakage.SECRET, leakage.LEAKED)
    }
    title = f"What the server reads of one image ({dataset}); SSIM below each"
    reconstructions(images.x[0], shown, [f"{v:.0%}" for v in sparsities], title, figures / "fig8_images.png")
    places = {v: i for i, v in enumerate(sparsities)}  # at equal distances
    series = {NAMES[n]: {places[v]: scores[n][v][:2] for v in sparsities} for n in leakage.SHOWN}
    series["published (Fig. 8)"] = {places[v]: (known, 0.0) for v, known in PUBLISHED.items() if v in places}
    ticks = {i: f"{v:.0%}" for v, i in places.items()}
    title = f"Leakage against sparsity ({dataset}, {study.settings.network})"
    points_with_errors(series, ticks, ("sparsity", "SSIM to the original"), title, figures / "fig8_ssim.png")


SCALES = dict.fromkeys(
    ("digits", "fashion_mnist", "mnist"),
    by_scale(
        LeakageSettings(),
        LeakageSettings(num_images=5),
        LeakageSettings(num_images=8, num_steps=300, num_restarts=2),
    ),
)
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check),)
