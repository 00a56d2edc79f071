"""What sparsified Jacobians leak: SSIM of reconstructed images against sparsity (NTK-FL, appendix B and Fig. 8).

The paper sparsifies the Jacobian tensor and attacks it by deep leakage (Zhu et al., 2019). It does not say which
network or image it attacks, nor which entries the attacker compares. Here there are two networks. Zhu's LeNet with
sigmoids is attacked through the gradient of one example and through its Jacobian; the attacker compares all entries,
zeros too, as Zhu does, or only the entries that were sent. The paper's perceptron has a first layer whose Jacobian
contains the input, which is read in closed form, also under the other protections of CP-NTK-FL. SSIM (structural
similarity) is 1 for a perfect reconstruction.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedtangent as ft
from fedtangent import attacks
from fedtangent._src import models
from fedtangent._src.attacks.networks import ACTIVATIONS
from fedtangent._src.experiments import lab
from fedtangent._src.experiments.lab.runner import Study, by_scale, experiment, within
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
    """Settings of each seed's images, of the networks, and of the attacker's effort.

    A colluding client has ``num_known`` further images. Projected images have ``projected_share`` times as many numbers
    as pixels.
    """

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
    def attack(self) -> ft.attacks.Attack:
        """The options of deep leakage; ``ValueError`` if one is out of range."""
        return ft.attacks.Attack(self.optimizer, self.num_steps, self.learning_rate, self.num_restarts)


class AttackedImages(NamedTuple):
    """Images of one seed: the attacked ones ``x`` with their ``labels``, and ``known`` ones of a colluding client.

    Pixels are in [0, 1].
    """

    seed: int
    x: np.ndarray  # [m, H, W]
    labels: np.ndarray  # [m] int32
    known: np.ndarray  # [num_known, H, W], images of the colluding client
    num_classes: int


class Reconstruction(NamedTuple):
    """The images that one attack reconstructs at one sparsity, and their SSIM (similarity to the originals).

    ``finite`` says whether the search for every image ended at a finite mismatch; True for an attack in closed form.
    """

    ssim: np.ndarray  # [m]
    x: np.ndarray  # [m, H, W] clipped to [0, 1]
    finite: bool


Read = dict[str, Reconstruction]  # by attack
ByAttack = dict[str, dict[float, Reconstruction]]  # by attack and sparsity


def _load(study: Study, seed: int) -> AttackedImages:
    """Draws images of the test set, of as many different classes as possible; ``ValueError`` if it has too few."""
    loaded = ft.data.load(study.dataset, data_dir=study.data_dir, seed=seed, flatten=True, dtype="float32")
    settings, count = study.settings, study.settings.num_images + study.settings.num_known
    if count > len(loaded.x_test):
        raise ValueError(
            f"num_images and num_known: got {settings.num_images} and {settings.num_known}, must add up to at most "
            f"{len(loaded.x_test)}, the number of test images"
        )
    side = math.isqrt(loaded.x_test.shape[1])
    order = np.random.default_rng(seed).permutation(len(loaded.x_test))
    labels = np.asarray(loaded.y_test)[order]
    turn = np.array([np.sum(labels[:i] == labels[i]) for i in range(len(labels))])  # of its class before it
    first = np.argsort(turn, kind="stable")[: settings.num_images]
    rows = np.concatenate([order[first], np.delete(order, first)])[:count]
    x, y = np.asarray(loaded.x_test[rows], np.float32).reshape(-1, side, side), np.asarray(loaded.y_test)
    return AttackedImages(
        seed, x[: settings.num_images], y[rows[: settings.num_images]], x[settings.num_images :], loaded.num_classes
    )


def _networks(settings: LeakageSettings, images: AttackedImages) -> tuple[Model, Model, Model]:
    """Builds three networks: for deep leakage, NTK-FL's perceptron, and this perceptron for projected images."""
    side, classes = images.x.shape[1], images.num_classes

    def perceptron(size: int, activation: str = "relu") -> Model:
        return models.mlp(size, classes, (settings.width,), activation, "standard", b_std=0.0)

    if settings.network == "lenet":
        deep = attacks.lenet((side, side, 1), classes, settings.activation)
    else:
        deep = perceptron(side**2, settings.activation)
    return deep, perceptron(side**2), perceptron(_projected_size(settings, images))


def _projected_size(settings: LeakageSettings, images: AttackedImages) -> int:
    """Computes the dimension d1' to which images are projected, from its share in the settings."""
    return max(round(settings.projected_share * images.x[0].size), 1)


def _read_everything(
    study: Study, built: tuple[Model, Model, Model], images: AttackedImages, sparsities: tuple[float, ...]
) -> ByAttack:
    """Attacks messages at the initial weights of the networks ``built``, by every attack at every sparsity."""
    settings = study.settings
    by_attack = ByAttack()
    keys = [jax.random.fold_in(jax.random.key(images.seed), i) for i in range(3)]
    for sparsity in sparsities:
        parts = {
            **_deep(settings, built[0], keys[0], images, sparsity),
            **_dense(built[1], keys[1], images, sparsity),
            **_projected(settings, built[2], keys[2], images, sparsity),
        }
        for name, read in parts.items():
            by_attack.setdefault(name, {})[sparsity] = read
        study.say(f"seed {images.seed}, sparsity {sparsity:.0%}")
    return by_attack


def _read(images: AttackedImages, x: Array, originals: np.ndarray | None = None, finite: bool = True) -> Reconstruction:
    """Computes the SSIM of reconstructed images ``x`` [m, ...]; pixels that are not finite count as 0.

    The true images are ``originals``; if it is None, they are ``images.x``. ``finite`` is stored in the result.
    """
    targets = images.x if originals is None else originals
    clipped = np.clip(np.nan_to_num(np.asarray(x, np.float64), nan=0.0), 0, 1).reshape(targets.shape)
    return Reconstruction(attacks.ssim(clipped, targets), clipped, finite)


def _inputs(model: Model, x: np.ndarray) -> Array:
    """Reshapes images to the form that the model takes: with a channel, or flat."""
    return jnp.asarray(x)[..., None] if model.structure is None else jnp.asarray(x).reshape(len(x), -1)


def _deep(settings: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Attacks by deep leakage: matches the messages of dummy images to the messages that a client sent.

    Messages are gradients or Jacobians; of sparsified Jacobians all entries are compared, or only those that were kept.
    Returns the reconstructed images by attack.
    """
    params, x = model.init(jax.random.fold_in(key, 0)), _inputs(model, images.x)
    shape, search = x.shape[1:], jax.random.fold_in(key, 1)
    labels = jnp.asarray(images.labels)
    gradients = [attacks.gradient(model, params, x[i : i + 1], labels[i : i + 1]) for i in range(len(x))]
    observed = attacks.sparsify(
        ft.attacks.Observed(*(jnp.concatenate(parts) for parts in zip(*gradients, strict=True))), sparsity
    )
    leak = attacks.from_gradients(model, params, observed, shape, search, settings.attack)
    by_attack = {GRADIENT: _read(images, leak.x, finite=bool(leak.finite.all()))}
    observed = attacks.sparsify(attacks.jacobians(model, params, x), sparsity)
    for name, compare in ((ALL, "all"), (KEPT, "kept")):
        attack = ft.attacks.Attack(**{**vars(settings.attack), "compare": compare})
        leak = attacks.from_jacobians(model, params, observed, shape, search, attack)
        by_attack[name] = _read(images, leak.x, finite=bool(leak.finite.all()))
    return by_attack


def _dense(model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Attacks the perceptron in closed form, from its unpermuted Jacobians and under CP-NTK-FL's two permutations.

    One permutation shuffles the examples. The other shuffles the weights, also with a colluding client who reveals it.
    Returns the reconstructed images by attack.
    """
    params = model.init(key)
    everyone = np.concatenate([images.x, images.known])
    observed = attacks.sparsify(attacks.jacobians(model, params, _inputs(model, everyone)), sparsity)
    rng, count = np.random.default_rng(images.seed), len(images.x)
    of_client = jax.tree.map(lambda leaf: leaf[:count], observed)
    rows = _derangement(rng, count)
    mixed = attacks.read_first_layer(model, params, attacks.shuffle_rows(of_client, jnp.asarray(rows)))
    hidden = attacks.shuffle_weights(observed, jnp.asarray(rng.permutation(observed.values.shape[-1])))
    theirs = jax.tree.map(lambda leaf: leaf[:count], hidden)
    of_colluder, shuffled = (np.asarray(part.values[count:]) for part in (observed, hidden))
    order = np.argsort(attacks.order_from_known(of_colluder, shuffled))  # which the colluding client's examples reveal
    betrayed = attacks.shuffle_weights(theirs, jnp.asarray(order))
    return {
        READ: _read(images, attacks.read_first_layer(model, params, of_client)),
        ROWS: _read(images, mixed, images.x[rows]),
        PLACE: _read(images, mixed),
        WEIGHTS: _read(images, attacks.read_first_layer(model, params, theirs)),
        COLLUSION: _read(images, attacks.read_first_layer(model, params, betrayed)),
    }


def _projected(settings: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float) -> Read:
    """Attacks projected images in closed form; projects back with a wrong matrix, and with the clients' own matrix."""
    params, x = model.init(key), jnp.asarray(images.x)
    pixels, size = x[0].size, _projected_size(settings, images)
    secret, other = (
        jnp.asarray(ft.data.projection_matrix(pixels, size, 2 * images.seed + i, "coordinates", np.float32))
        for i in (0, 1)
    )
    z = x.reshape(len(x), -1) @ secret
    observed = attacks.sparsify(attacks.jacobians(model, params, z), sparsity)
    z = attacks.read_first_layer(model, params, observed)
    return {
        SECRET: _read(images, attacks.back_project(z, other)),
        LEAKED: _read(images, attacks.back_project(z, secret)),
    }


def _derangement(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws a random permutation of ``count`` elements, at least 2, in which no element keeps its position."""
    order = rng.permutation(count)
    result = np.empty(count, int)
    result[order] = np.roll(order, 1)
    return result


class Score(NamedTuple):
    """Mean SSIM over the m images of all seeds, with its standard error."""

    mean: float
    error: float  # standard error of the mean
    values: np.ndarray  # [seeds * m]

    def __str__(self) -> str:
        return f"{self.mean:.2f} +- {self.error:.2f}"


Scores = dict[str, dict[float, Score]]  # by attack and sparsity


def check(study: Study) -> None:
    """Raises ``ValueError`` if the first seed's images cannot be loaded, or an option of attack or network is wrong."""
    network, activation = study.settings.network, study.settings.activation
    allowed = {"lenet": tuple(ACTIVATIONS), "mlp": tuple(models.ACTIVATIONS)}[network]
    if activation not in allowed:
        raise ValueError(f"activation: got {activation!r}, allowed for {network} are {', '.join(allowed)}")
    assert study.settings.attack
    _load(study, study.seeds[0])


def run(study: Study) -> lab.Outcome:
    """Runs fig. 8 of NTK-FL: makes every attack at every sparsity on every seed's images, and compares the SSIM."""
    settings, of_seeds = study.settings, list[ByAttack]()
    sparsities = tuple(sorted(settings.sparsities, reverse=True))
    first = _load(study, study.seeds[0])
    networks = _networks(settings, first)
    for seed in study.each_seed():
        of_seeds.append(_read_everything(study, networks, _load(study, seed), sparsities))
        for name, by_sparsity in of_seeds[-1].items():
            values = {f"ssim at sparsity {v:g}": read.ssim.mean() for v, read in by_sparsity.items()}
            study.keep(lab.metric_rows(name, seed, 0, values, "test"))
    scores = summaries(of_seeds)
    _draw(study, first, of_seeds[0], scores, sparsities)
    rows = list[lab.Row]()
    for name, by_score in scores.items():
        for sparsity, score in by_score.items():
            row = {"attack": name, "sparsity": sparsity, "ssim": score.mean, "standard_error": score.error}
            published = PUBLISHED.get(sparsity) if name in DEEP else None
            rows.append({**row, "images": len(score.values), "published": published})
    lost = sorted({name for one in of_seeds for name, of in one.items() if not all(r.finite for r in of.values())})
    failed = tuple(f"{NAMES[name]}: an attack met only values that are not finite" for name in lost)
    title = "SSIM of reconstructed images, mean +- standard error over images"
    sheets = (_sheet(scores, SHOWN, title), _sheet(scores, SWITCHES, "SSIM under the other switches, first layer read"))
    remarks = (
        f"images of {first.x.shape[1:]} numbers in [0, 1], projected to {_projected_size(settings, first)}; "
        "SSIM of reconstructions clipped to [0, 1]",
        "the paper names neither the attacked network nor the entries compared; the first two attacks compare zeros "
        "too, as Zhu et al. do",
        "first layer read: of the paper's perceptron, in closed form, as are the other switches; the colluding client "
        f"has {settings.num_known} examples",
    )
    return lab.Outcome(sheets, rows, _judge(scores), remarks=remarks, failed=failed)


def summaries(of_seeds: list[ByAttack]) -> Scores:
    """Computes the mean SSIM over the images of all seeds, with its standard error, by attack and sparsity."""

    def score(values: np.ndarray) -> Score:
        return Score(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5), values)

    return {
        name: {sparsity: score(np.concatenate([one[name][sparsity].ssim for one in of_seeds])) for sparsity in of}
        for name, of in of_seeds[0].items()
    }


def _judge(scores: Scores) -> tuple[lab.Claim, ...]:
    """Judges by intervals over images what sparsity and the other protections of NTK-FL and CP-NTK-FL achieve.

    Images should get closer with less sparsity, and no closer than published (appendix B). A protection hides the
    images if at the least sparsity the SSIM is less than half of the SSIM without it (section 4.2).
    """
    # An image is hidden if less than half of the SSIM remains at the lowest sparsity.
    claims = []
    for name in DEEP:
        values = [scores[name][sparsity].values for sparsity in sorted(scores[name], reverse=True)]
        steps = [lab.interval(b - a) for a, b in itertools.pairwise(values)] or [lab.MeanInterval(0.0, 0.0, 0.0)]
        whole, worst = lab.interval(values[-1] - values[0]), min(steps, key=lambda step: step.high)
        text = f"{whole:+.2f} in all, smallest step {worst:+.3f}"
        verdict = lab.NOT_SEEN if worst.high < 0 else whole.above()
        claims.append(lab.Claim(f"less sparsity, closer images: {NAMES[name]}", text, verdict))
    for name in SHOWN:
        beyond = {
            sparsity: lab.interval(v.values - PUBLISHED[sparsity])
            for sparsity, v in scores[name].items()
            if sparsity in PUBLISHED
        }
        if beyond:
            at = max(beyond, key=lambda sparsity: beyond[sparsity].low)
            text = f"SSIM {scores[name][at]} at {at:.0%}, published {PUBLISHED[at]}"
            verdict = lab.NOT_SEEN if beyond[at].low > 0 else beyond[at].below()
            claims.append(lab.Claim(f"sparsity protects as published: {NAMES[name]}", text, verdict))
    for claim, hidden, plain in HIDDEN:
        least = min(scores[hidden])
        with_it, without = scores[hidden][least], scores[plain][least]
        text = f"SSIM {with_it.mean:.2f}, without it {without.mean:.2f}, {least:.0%} sparse"
        claims.append(lab.Claim(claim, text, lab.interval(0.5 * without.values - with_it.values).above()))
    return tuple(claims)


def _sheet(scores: Scores, names: tuple[str, ...], title: str) -> lab.Sheet:
    rows = []
    for sparsity in scores[names[0]]:
        published = f"{PUBLISHED[sparsity]:.2f}" if sparsity in PUBLISHED else "-"
        rows.append((f"{sparsity:.0%}", published, *(str(scores[name][sparsity]) for name in names)))
    return lab.Sheet(title, ("sparsity", "published", *(NAMES[name] for name in names)), tuple(rows))


def _draw(study: Study, images: AttackedImages, first: ByAttack, scores: Scores, sparsities: tuple[float, ...]) -> None:
    figures, labels = study.figures, [f"{v:.0%}" for v in sparsities]
    rows = {
        NAMES[name]: [Shown(first[name][v].x[0], float(first[name][v].ssim[0])) for v in sparsities]
        for name in (*DEEP, READ, WEIGHTS, COLLUSION, SECRET, LEAKED)
    }
    title = f"What the server reads of one image ({study.dataset}); SSIM below each"
    reconstructions(images.x[0], rows, labels, title, figures.path("fig8_images"))
    places = {v: i for i, v in enumerate(sparsities)}  # evenly spaced on the axis
    series = {NAMES[n]: {places[v]: scores[n][v][:2] for v in sparsities} for n in SHOWN}
    series["published (Fig. 8)"] = {places[v]: (ssim, 0.0) for v, ssim in PUBLISHED.items() if v in places}
    title, names = f"Leakage against sparsity ({study.dataset}, {study.settings.network})", "SSIM to the original"
    points_with_errors(series, dict(enumerate(labels)), ("sparsity", names), title, figures.path("fig8_ssim"))


PAPER = LeakageSettings(num_images=8, num_steps=300, num_restarts=2)
SCALES = dict.fromkeys(
    ("digits", "fashion_mnist", "mnist"), by_scale(LeakageSettings(), LeakageSettings(num_images=5), PAPER)
)
ENTRIES = (experiment(__name__, run, SCALES, ("yue2022",), check=check),)
