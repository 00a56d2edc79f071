"""What sparsified Jacobians leak: SSIM of reconstructed images against sparsity (NTK-FL, appendix B and Fig. 8).

The paper sparsifies the Jacobian tensor and attacks it by deep leakage (Zhu et al., 2019); it names neither network,
nor image, nor which entries the attacker compares. Here: Zhu's LeNet with sigmoids, attacked through the gradient of
one example and through its Jacobian, with zeros compared as Zhu does and with the entries that were sent only; the
paper's own perceptron, whose input stands in its first layer's Jacobian; and the other switches of CP-NTK-FL.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import attacks
from fedtangent._src import data, models
from fedtangent._src.attacks.leakage import Attack
from fedtangent._src.attacks.networks import ACTIVATIONS
from fedtangent._src.attacks.observation import Observed
from fedtangent._src.data.projection import projection_matrix
from fedtangent._src.experiments.lab.results import NOT_SEEN, Claim, MeanInterval, Outcome, Sheet, interval
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
from fedtangent._src.output.files import Metric
from fedtangent._src.output.line_plots import points_with_errors
from fedtangent._src.output.surface_plots import Shown, reconstructions
from fedtangent._src.types import Array, Key, Model

# The attacks: three of deep leakage, and the closed form that reads a dense first layer.
GRADIENT, ALL, KEPT, READ = "gradient", "jacobian", "jacobian, kept entries", "first layer"
# The closed form under the other protections of CP-NTK-FL.
ROWS, PLACE = "rows shuffled", "rows shuffled, by place"
WEIGHTS, COLLUSION = "weights shuffled", "weights shuffled, collusion"
SECRET, LEAKED = "projected", "projected, leaked matrix"
DEEP = (GRADIENT, ALL, KEPT)
SHOWN = (*DEEP, READ)
SWITCHES = (ROWS, PLACE, WEIGHTS, COLLUSION, SECRET, LEAKED)
NAMES = {  # in tables and figures
    GRADIENT: "gradient", ALL: "Jacobian", KEPT: "Jacobian, kept entries", READ: "first layer read",
    ROWS: "rows shuffled", PLACE: "its place's image", WEIGHTS: "weights shuffled", COLLUSION: "with collusion",
    SECRET: "projected", LEAKED: "matrix leaked",
}  # fmt: skip
HIDDEN = (  # a claim, and the attacks with and without what it is about
    ("shuffled rows hide whose image it is", PLACE, ROWS),
    ("shuffled rows hide the image", ROWS, READ),
    ("shuffled weights hide the image", WEIGHTS, READ),
    ("shuffled weights hide it if a client colludes", COLLUSION, READ),
    ("projection hides the image", SECRET, READ),
    ("projection hides it from least squares if the matrix leaks", LEAKED, READ),
)
PUBLISHED = {0.9: 0.06, 0.8: 0.23, 0.7: 0.35, 0.6: 0.47, 0.5: 0.65}


@dataclass(frozen=True)
class LeakageSettings:
    """The images and networks of each seed, and the attacker's effort."""

    sparsities: tuple[float, ...] = within((0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.0), at_least=0, below=1)
    num_images: int = within(3, least=2)
    network: str = within("lenet", of=("lenet", "mlp"))
    activation: str = "sigmoid"
    width: int = 100
    num_steps: int = 200
    num_restarts: int = 1
    optimizer: str = "lbfgs"
    learning_rate: float = 0.1
    num_known: int = 20
    projected_share: float = within(0.255, above=0, at_most=1)

    @property
    def attack(self) -> Attack:
        """The options of deep leakage; raises ``ValueError``."""
        return Attack(self.optimizer, self.num_steps, self.learning_rate, self.num_restarts)


class AttackedImages(NamedTuple):
    """Images of one seed, in [0, 1]."""

    seed: int
    x: np.ndarray  # [m, H, W]
    labels: np.ndarray  # [m] int32
    known: np.ndarray  # [num_known, H, W], images of the colluding client
    num_classes: int


class Reconstruction(NamedTuple):
    """Results of one attack at one sparsity."""

    ssim: np.ndarray  # [m]
    x: np.ndarray  # [m, H, W] clipped to [0, 1]
    finite: bool


Read = dict[str, Reconstruction]  # by attack
Found = dict[str, dict[float, Reconstruction]]  # by attack and sparsity


def load(study: Study, seed: int) -> AttackedImages:
    """Draws images from the test set, of as many different classes as possible.

    Raises ``ValueError`` if the test set has fewer images.
    """
    held = data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True, dtype="float32")
    s, wanted = study.settings, study.settings.num_images + study.settings.num_known
    if wanted > len(held.x_test):
        raise ValueError(f"num_images: got {wanted} with num_known, the test set has {len(held.x_test)}")
    side = math.isqrt(held.x_test.shape[1])
    drawn = np.random.default_rng(seed).permutation(len(held.x_test))
    labels = np.asarray(held.y_test)[drawn]
    turn = np.array([np.sum(labels[:i] == labels[i]) for i in range(len(labels))])  # of its class before it
    first = np.argsort(turn, kind="stable")[: s.num_images]
    rows = np.concatenate([drawn[first], np.delete(drawn, first)])[:wanted]
    x = np.asarray(held.x_test[rows], np.float32).reshape(-1, side, side)
    own = rows[: s.num_images]
    return AttackedImages(seed, x[: len(own)], np.asarray(held.y_test[own]), x[len(own) :], held.num_classes)


def networks(s: LeakageSettings, images: AttackedImages) -> tuple[Model, Model, Model]:
    """Builds the network of deep leakage, the paper's perceptron, and the same for projected images."""
    side, classes = images.x.shape[1], images.num_classes

    def perceptron(size: int, activation: str = "relu") -> Model:
        return models.mlp(size, classes, (s.width,), activation, "standard", b_std=0.0)

    if s.network == "lenet":
        deep = attacks.lenet((side, side, 1), classes, s.activation)
    else:
        deep = perceptron(side**2, s.activation)
    return deep, perceptron(side**2), perceptron(projected_size(s, images))


def projected_size(s: LeakageSettings, images: AttackedImages) -> int:
    """Returns the dimension d1' of projected images."""
    return max(round(s.projected_share * images.x[0].size), 1)


def read_everything(
    study: Study, built: tuple[Model, Model, Model], images: AttackedImages, sparsities: tuple[float, ...]
) -> Found:
    """Makes every attack at every sparsity, on the networks that are broadcast in the first round."""
    s, found, keys = study.settings, Found(), [jax.random.fold_in(jax.random.key(images.seed), i) for i in range(3)]
    for sparsity in sparsities:
        parts = {
            **_deep(s, built[0], keys[0], images, sparsity),
            **_dense(built[1], keys[1], images, sparsity),
            **_projected(s, built[2], keys[2], images, sparsity),
        }
        for name, read in parts.items():
            found.setdefault(name, {})[sparsity] = read
        study.say(f"seed {images.seed}, sparsity {sparsity:.0%}")
    return found


def _read(images: AttackedImages, x: Array, originals: np.ndarray | None = None, finite: bool = True) -> Reconstruction:
    """Computes the SSIM of reconstructions [m, ...]; entries that are not finite count as 0."""
    own = images.x if originals is None else originals
    shown = np.clip(np.nan_to_num(np.asarray(x, np.float64), nan=0.0), 0, 1).reshape(own.shape)
    return Reconstruction(attacks.ssim(shown, own), shown, finite)


def _inputs(model: Model, x: np.ndarray) -> Array:
    """Reshapes images to the form that the model takes: with a channel, or flat."""
    return jnp.asarray(x)[..., None] if model.structure is None else jnp.asarray(x).reshape(len(x), -1)


def _deep(s: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Makes deep leakage through gradients and through Jacobians, with all and with the kept entries compared."""
    params, x = model.init(jax.random.fold_in(key, 0)), _inputs(model, images.x)
    shape, search = x.shape[1:], jax.random.fold_in(key, 1)
    labels = jnp.asarray(images.labels)
    each = [attacks.gradient(model, params, x[i : i + 1], labels[i : i + 1]) for i in range(len(x))]
    seen = attacks.sparsify(Observed(*(jnp.concatenate(parts) for parts in zip(*each, strict=True))), sparsity)
    leak = attacks.from_gradients(model, params, seen, shape, search, s.attack)
    found = {GRADIENT: _read(images, leak.x, finite=bool(leak.finite.all()))}
    seen = attacks.sparsify(attacks.jacobians(model, params, x), sparsity)
    for name, compare in ((ALL, "all"), (KEPT, "kept")):
        attack = Attack(**{**vars(s.attack), "compare": compare})
        leak = attacks.from_jacobians(model, params, seen, shape, search, attack)
        found[name] = _read(images, leak.x, finite=bool(leak.finite.all()))
    return found


def _dense(model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Makes the closed-form attack: plain, with shuffled rows, and with shuffled weights without and with collusion."""
    params = model.init(key)
    everyone = np.concatenate([images.x, images.known])
    seen = attacks.sparsify(attacks.jacobians(model, params, _inputs(model, everyone)), sparsity)
    rng, count = np.random.default_rng(images.seed), len(images.x)
    own = jax.tree.map(lambda leaf: leaf[:count], seen)
    rows = _derangement(rng, count)
    mixed = attacks.read_first_layer(model, params, attacks.shuffle_rows(own, jnp.asarray(rows)))
    hidden = attacks.shuffle_weights(seen, jnp.asarray(rng.permutation(seen.values.shape[-1])))
    theirs = jax.tree.map(lambda leaf: leaf[:count], hidden)
    known, got = (np.asarray(part.values[count:]) for part in (seen, hidden))
    order = np.argsort(attacks.order_from_known(known, got))  # which the colluding client's examples reveal
    betrayed = attacks.shuffle_weights(theirs, jnp.asarray(order))
    return {
        READ: _read(images, attacks.read_first_layer(model, params, own)),
        ROWS: _read(images, mixed, images.x[rows]),
        PLACE: _read(images, mixed),
        WEIGHTS: _read(images, attacks.read_first_layer(model, params, theirs)),
        COLLUSION: _read(images, attacks.read_first_layer(model, params, betrayed)),
    }


def _projected(s: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Makes the closed-form attack on projected inputs, projected back with another matrix and with the clients'."""
    params, x = model.init(key), jnp.asarray(images.x)
    pixels, size = x[0].size, projected_size(s, images)
    secret, other = (
        jnp.asarray(projection_matrix(pixels, size, 2 * images.seed + i, "coordinates", np.float32)) for i in (0, 1)
    )
    z = x.reshape(len(x), -1) @ secret
    seen = attacks.sparsify(attacks.jacobians(model, params, z), sparsity)
    z = attacks.read_first_layer(model, params, seen)
    return {
        SECRET: _read(images, attacks.back_project(z, other)),
        LEAKED: _read(images, attacks.back_project(z, secret)),
    }


def _derangement(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws a random order in which no element keeps its place."""
    order = rng.permutation(count)
    result = np.empty(count, int)
    result[order] = np.roll(order, 1)
    return result


class Score(NamedTuple):
    """SSIM over the images of all seeds."""

    mean: float
    error: float  # standard error of the mean
    values: np.ndarray  # [seeds * m]

    def __str__(self) -> str:
        return f"{self.mean:.2f} +- {self.error:.2f}"


Scores = dict[str, dict[float, Score]]  # by attack and sparsity


def check(study: Study) -> None:
    """Loads the first seed's images, and checks the attack's options and the network's activation."""
    s = study.settings
    allowed = {"lenet": tuple(ACTIVATIONS), "mlp": tuple(models.ACTIVATIONS)}[s.network]
    if s.activation not in allowed:
        raise ValueError(f"activation: got {s.activation!r}, allowed for {s.network} are {', '.join(allowed)}")
    assert s.attack
    load(study, study.seeds[0])


def run(study: Study) -> Outcome:
    """Makes every attack at every sparsity on every seed's images."""
    s, found = study.settings, list[Found]()
    sparsities = tuple(sorted(s.sparsities, reverse=True))
    first = load(study, study.seeds[0])
    built = networks(s, first)
    for seed in study.each_seed():
        found.append(read_everything(study, built, load(study, seed), sparsities))
        study.keep([
            Metric(0, name, seed, "test", f"ssim at sparsity {sparsity:g}", float(read.ssim.mean()), 0, 0)
            for name, of in found[-1].items() for sparsity, read in of.items()
        ])  # fmt: skip
    scores = summaries(found)
    _draw(study, first, found[0], scores, sparsities)
    rows = [
        {"attack": name, "sparsity": sparsity, "ssim": v.mean, "standard_error": v.error, "images": len(v.values),
         "published": PUBLISHED.get(sparsity) if name in DEEP else None}
        for name, of in scores.items() for sparsity, v in of.items()
    ]  # fmt: skip
    lost = sorted({name for one in found for name, of in one.items() if not all(r.finite for r in of.values())})
    failed = tuple(f"{NAMES[name]}: an attack met only values that are not finite" for name in lost)
    title = "SSIM of reconstructed images, mean +- standard error over images"
    sheets = (_sheet(scores, SHOWN, title), _sheet(scores, SWITCHES, "SSIM under the other switches, first layer read"))
    remarks = (
        f"images of {first.x.shape[1:]} numbers in [0, 1], projected to {projected_size(s, first)}; "
        "SSIM of reconstructions clipped to [0, 1]",
        "the paper names neither the attacked network nor the entries compared; the first two attacks compare zeros "
        "too, as Zhu et al. do",
        "first layer read: of the paper's perceptron, in closed form, as are the other switches; the colluding client "
        f"has {s.num_known} examples",
    )
    return Outcome(sheets, rows, judge(scores), remarks=remarks, failed=failed)


def summaries(found: list[Found]) -> Scores:
    """Computes means over the images of all seeds, with standard errors."""

    def score(values: np.ndarray) -> Score:
        return Score(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5), values)

    return {
        name: {sparsity: score(np.concatenate([one[name][sparsity].ssim for one in found])) for sparsity in of}
        for name, of in found[0].items()
    }


def judge(scores: Scores) -> tuple[Claim, ...]:
    """Judges what sparsity and the other protections hide (section 4.2, appendix B), by intervals over images.

    An image is hidden if less than half of the SSIM remains at the lowest sparsity.
    """
    claims = []
    for name in DEEP:
        values = [scores[name][s].values for s in sorted(scores[name], reverse=True)]
        steps = [interval(b - a) for a, b in itertools.pairwise(values)] or [MeanInterval(0.0, 0.0, 0.0)]
        whole, worst = interval(values[-1] - values[0]), min(steps, key=lambda step: step.high)
        text = f"{whole:+.2f} in all, smallest step {worst:+.3f}"
        verdict = NOT_SEEN if worst.high < 0 else whole.above()
        claims.append(Claim(f"less sparsity, closer images: {NAMES[name]}", text, verdict))
    for name in SHOWN:
        beyond = {s: interval(v.values - PUBLISHED[s]) for s, v in scores[name].items() if s in PUBLISHED}
        if beyond:
            at = max(beyond, key=lambda s: beyond[s].low)
            text = f"SSIM {scores[name][at]} at {at:.0%}, published {PUBLISHED[at]}"
            verdict = NOT_SEEN if beyond[at].low > 0 else beyond[at].below()
            claims.append(Claim(f"sparsity protects as published: {NAMES[name]}", text, verdict))
    for claim, hidden, seen in HIDDEN:
        least = min(scores[hidden])
        with_it, without = scores[hidden][least], scores[seen][least]
        text = f"SSIM {with_it.mean:.2f}, without it {without.mean:.2f}, {least:.0%} sparse"
        claims.append(Claim(claim, text, interval(0.5 * without.values - with_it.values).above()))
    return tuple(claims)


def _sheet(scores: Scores, names: tuple[str, ...], title: str) -> Sheet:
    rows = tuple(
        (f"{s:.0%}", f"{PUBLISHED[s]:.2f}" if s in PUBLISHED else "-", *(str(scores[n][s]) for n in names))
        for s in scores[names[0]]
    )
    return Sheet(title, ("sparsity", "published", *(NAMES[name] for name in names)), rows)


def _draw(study: Study, images: AttackedImages, found: Found, scores: Scores, sparsities: tuple[float, ...]) -> None:
    figures, labels = study.figures, [f"{v:.0%}" for v in sparsities]
    shown = {
        NAMES[name]: [Shown(found[name][v].x[0], float(found[name][v].ssim[0])) for v in sparsities]
        for name in (*DEEP, READ, WEIGHTS, COLLUSION, SECRET, LEAKED)
    }
    title = f"What the server reads of one image ({study.dataset}); SSIM below each"
    reconstructions(images.x[0], shown, labels, title, figures.path("fig8_images"))
    places = {v: i for i, v in enumerate(sparsities)}  # evenly spaced on the axis
    series = {NAMES[n]: {places[v]: scores[n][v][:2] for v in sparsities} for n in SHOWN}
    series["published (Fig. 8)"] = {places[v]: (known, 0.0) for v, known in PUBLISHED.items() if v in places}
    title = f"Leakage against sparsity ({study.dataset}, {study.settings.network})"
    ticks = dict(enumerate(labels))
    points_with_errors(series, ticks, ("sparsity", "SSIM to the original"), title, figures.path("fig8_ssim"))


PAPER = LeakageSettings(num_images=8, num_steps=300, num_restarts=2)
SCALES = dict.fromkeys(
    ("digits", "fashion_mnist", "mnist"), by_scale(LeakageSettings(), LeakageSettings(num_images=5), PAPER)
)
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check),)
