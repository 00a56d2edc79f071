"""What a curious server reads of several images, under each switch of CP-NTK-FL and at each sparsity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent import attacks, data, models
from fedtangent.attacks import Attack, Observed
from fedtangent.data.projection import projection_matrix
from fedtangent.experiments.lab.settings import within
from fedtangent.types import Array, Key, Model, PyTree

# deep leakage, and what is read off a dense first layer in closed form
GRADIENT, ALL, KEPT, READ = "gradient", "jacobian", "jacobian, kept entries", "first layer"
# what the closed form reads under the other switches
ROWS, PLACE = "rows shuffled", "rows shuffled, by place"
WEIGHTS, COLLUSION = "weights shuffled", "weights shuffled, collusion"
SECRET, LEAKED = "projected", "projected, leaked matrix"
DEEP = (GRADIENT, ALL, KEPT)
SHOWN = (*DEEP, READ)
SWITCHES = (ROWS, PLACE, WEIGHTS, COLLUSION, SECRET, LEAKED)
NAMES = {
    **{GRADIENT: "gradient", ALL: "Jacobian", KEPT: "Jacobian, kept entries", READ: "first layer read"},
    **{ROWS: "rows shuffled", PLACE: "its place's image", WEIGHTS: "weights shuffled", COLLUSION: "with collusion"},
    **{SECRET: "projected", LEAKED: "matrix leaked"},
}  # in tables and figures
LENET_ACTIVATIONS = tuple(attacks.networks.ACTIVATIONS)


@dataclass(frozen=True)
class LeakageSettings:
    """Several images of each seed, whose networks are drawn anew, and the attacker's effort."""

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
        """Deep leakage as the settings have it; raises ``ValueError``."""
        return Attack(self.optimizer, self.num_steps, self.learning_rate, self.num_restarts)


class AttackedImages(NamedTuple):
    """Images of one seed, in [0, 1]."""

    seed: int
    x: np.ndarray  # [m, H, W]
    labels: np.ndarray  # [m] int32
    known: np.ndarray  # [num_known, H, W] of the colluding client
    num_classes: int


class Reconstruction(NamedTuple):
    """One attack at one sparsity."""

    ssim: np.ndarray  # [m]
    x: np.ndarray  # [m, H, W] clipped to [0, 1]
    finite: bool


Found = dict[str, dict[float, Reconstruction]]  # by attack and sparsity


def load(s: LeakageSettings, name: str, data_dir: Path | None, seed: int) -> AttackedImages:
    """Images drawn from the test set, of as many classes as there can be: those of one class resemble each other.

    Raises ``ValueError`` for more images than there are.
    """
    held = data.load(name, data_dir=data_dir, seed=seed, flatten=True, dtype="float32")
    wanted = s.num_images + s.num_known
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
    """The network of deep leakage, the paper's perceptron, and the same for projected images."""
    side, classes = images.x.shape[1], images.num_classes

    def perceptron(size: int, activation: str = "relu") -> Model:
        return models.mlp(size, classes, (s.width,), activation, "standard", b_std=0.0)

    if s.network == "lenet":
        deep = attacks.lenet((side, side, 1), classes, s.activation)
    else:
        deep = perceptron(side**2, s.activation)
    return deep, perceptron(side**2), perceptron(projected_size(s, images))


def projected_size(s: LeakageSettings, images: AttackedImages) -> int:
    """The paper's d1', as a share of the pixels."""
    return max(round(s.projected_share * images.x[0].size), 1)


def read_everything(
    s: LeakageSettings, built: tuple[Model, Model, Model], images: AttackedImages, sparsities: tuple[float, ...],
    say: Callable[[str], None],
) -> Found:  # fmt: skip
    """Every attack at every sparsity, on networks as they are broadcast in the first round."""
    key = jax.random.key(images.seed)
    deep, dense, projected = built
    found: Found = {}
    for sparsity in sparsities:
        parts = {
            **_deep(s, deep, jax.random.fold_in(key, 0), images, sparsity),
            **_dense(dense, jax.random.fold_in(key, 1), images, sparsity),
            **_projected(s, projected, jax.random.fold_in(key, 2), images, sparsity),
        }
        for name, read in parts.items():
            found.setdefault(name, {})[sparsity] = read
        say(f"seed {images.seed}, sparsity {sparsity:.0%}")
    return found


def _read(images: AttackedImages, x: Array, originals: np.ndarray | None = None, finite: bool = True) -> Reconstruction:
    """Scores of reconstructions [m, ...]; what is not finite counts as a black image."""
    own = images.x if originals is None else originals
    shown = np.clip(np.nan_to_num(np.asarray(x, np.float64), nan=0.0), 0, 1).reshape(own.shape)
    return Reconstruction(attacks.ssim(shown, own), shown, finite)


def _inputs(model: Model, x: np.ndarray) -> Array:
    return jnp.asarray(x)[..., None] if model.structure is None else jnp.asarray(x).reshape(len(x), -1)


def _deep(
    s: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float
) -> dict[str, Reconstruction]:
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


def _dense(model: Model, key: Key, images: AttackedImages, sparsity: float) -> dict[str, Reconstruction]:
    """Closed form: plain, rows in another order, and weights in another order without and with a colluding client."""
    params = model.init(key)
    everyone = np.concatenate([images.x, images.known])
    seen = attacks.sparsify(attacks.jacobians(model, params, _inputs(model, everyone)), sparsity)
    rng, count = np.random.default_rng(images.seed), len(images.x)
    own = jax.tree.map(lambda leaf: leaf[:count], seen)
    rows = _derangement(rng, count)
    mixed = attacks.read_first_layer(model, params, attacks.shuffle_rows(own, jnp.asarray(rows)))
    hidden = attacks.shuffle_weights(seen, jnp.asarray(rng.permutation(seen.values.shape[-1])))
    theirs = jax.tree.map(lambda leaf: leaf[:count], hidden)
    return {
        READ: _read(images, attacks.read_first_layer(model, params, own)),
        ROWS: _read(images, mixed, images.x[rows]),
        PLACE: _read(images, mixed),
        WEIGHTS: _read(images, attacks.read_first_layer(model, params, theirs)),
        COLLUSION: _read(images, _with_collusion(model, params, seen, hidden, theirs, count)),
    }


def _with_collusion(
    model: Model, params: PyTree, seen: Observed, hidden: Observed, theirs: Observed, count: int
) -> Array:
    """The images after the examples from ``count`` on have betrayed the order of the weights."""
    known, got = (np.asarray(part.values[count:]) for part in (seen, hidden))
    order = attacks.order_from_known(known, got)
    return attacks.read_first_layer(model, params, attacks.shuffle_weights(theirs, jnp.asarray(np.argsort(order))))


def _projected(
    s: LeakageSettings, model: Model, key: Key, images: AttackedImages, sparsity: float
) -> dict[str, Reconstruction]:
    """Closed form of the projected inputs, taken back with another matrix and with the clients' own."""
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
    """An order in which nothing stays in its place."""
    order = rng.permutation(count)
    result = np.empty(count, int)
    result[order] = np.roll(order, 1)
    return result
