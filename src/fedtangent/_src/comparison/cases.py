"""The cases of ``fedtangent compare``: each is one or more settings. A new one is a function and its entry here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks
from fedtangent._src import data as datasets
from fedtangent._src.comparison.settings import Scale, Setting, standardised
from fedtangent._src.data import partition
from fedtangent._src.entries import Entry, choose
from fedtangent._src.federated import schedule
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.features import rbf_linear
from fedtangent._src.types import Model

NUM_MODELS = 5  # the papers' default K
SCALES = ("smoke", "default", "paper")
IMAGES = {
    "smoke": Scale((64, 256, 1024), 14, 24),
    "default": Scale((64, 256, 1024), 14, 100),
    "paper": Scale((64, 256, 1024, 4096), 20, 400),
}
DataDir = str | os.PathLike[str] | None
Build = Callable[[DataDir, str, int], Setting]


@dataclasses.dataclass(frozen=True)
class CaseEntry(Entry):
    """A named comparison; ``build(data_dir, scale, seed)`` returns its settings."""

    by_default: bool = True
    """Whether ``fedtangent compare`` runs the case if the user names no cases."""


def _sine(name: str, title: str, model: Callable[[int], Model], size: Scale, seed: int, is_linear: bool) -> Setting:
    toy = datasets.load("sine", seed=seed, gap=not is_linear, points_per_user=3)
    user = np.asarray(toy.user_train)
    # One, two or three points a client, about two on average as in the paper: weights by examples must matter.
    kept = np.tile(np.arange(3), len(user) // 3) <= user % 3
    clients = partition.by_user(user[kept])
    return Setting(
        name=name,
        title=title,
        x_train=toy.x_train[kept],
        y_train=toy.y_train[kept],
        x_test=toy.x_test[::2],
        y_test=toy.y_test[::2],
        partition=clients,
        model=model,
        is_linear=is_linear,
        # Later, modes of small eigenvalues evolve, which at these widths are far from those of infinite width.
        ntk_times=tuple(range(5, 41, 5)),
        **_run(clients.num_clients, size, seed),
    )


def _run(num_clients: int, size: Scale, seed: int) -> dict[str, Any]:
    """Returns the fields of ``Setting`` that all cases share: schedule, widths, draws, steps and rounds."""
    return {
        "schedule": schedule.per_client_permutations(num_clients, NUM_MODELS),
        "widths": size.widths,
        "draws": size.draws,
        "local_steps": 10,
        "num_rounds": size.num_rounds,
        "evaluate_every": max(size.num_rounds // 8, 1),
        "seed": seed,
    }


def sine_linear(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the papers' toy: 50 clients of 1 to 3 points, 100 radial basis functions, linear in the parameters."""
    sizes = {"smoke": Scale((100,), 16, 100), "default": Scale((100,), 16, 200), "paper": Scale((100,), 100, 2000)}

    def model(width: int) -> Model:
        return rbf_linear(num_features=width, bandwidth=0.08, sigma=1.0, seed=seed, dtype=jnp.float64)

    title = "Sine toy (FE-2024, section V-A), 1 to 3 points a client: 100 radial basis functions, linear in the weights"
    return _sine("sine, linear", title, model, sizes[scale], seed, is_linear=True)


def sine_network(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of a network on the sine data with a gap in the middle (FE-2024, section V-B)."""
    sizes = {
        "smoke": Scale((64, 256, 1024), 48, 6),
        "default": Scale((64, 256, 1024), 48, 20),
        "paper": Scale((64, 256, 1024, 4096, 8192), 100, 60),
    }

    def model(width: int) -> Model:
        return mlp(1, 1, widths=(width,), activation="erf", w_std=8.0, b_std=4.0, last_w_std=1.0, dtype=jnp.float64)

    title = "Sine with a gap (FE-2024, section V-B), 1 to 3 points a client: erf network of one hidden layer"
    return _sine("sine, network", title, model, sizes[scale], seed, is_linear=False)


def _images(name: str, title: str, data_dir: DataDir, scale: str, seed: int) -> Setting:
    size, num_train = IMAGES[scale], 100 if scale == "paper" else 40
    images = datasets.load(name, data_dir=data_dir, seed=seed, flatten=True, num_train=num_train, num_test=100)
    x_train, x_test = standardised(np.asarray(images.x_train, np.float64), np.asarray(images.x_test, np.float64))
    # Per class, so that sizes differ too: weights by examples must matter.
    clients = partition.dirichlet(images.y_train, 10, 1.0, seed, min_client_size=2, dirichlet_method="per_class")
    d, c = x_train.shape[1], images.num_classes

    def model(width: int) -> Model:
        return mlp(d, c, widths=(width,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)

    return Setting(
        name=name,
        title=f"{title}: {num_train} examples on 10 clients of {min(clients.sizes)} to {max(clients.sizes)} "
        "(Dirichlet 1.0), ReLU network of one hidden layer",
        x_train=x_train,
        y_train=datasets.classification_targets(images.y_train, c, centred=True),
        x_test=x_test,
        y_test=datasets.classification_targets(images.y_test, c, centred=True),
        labels_test=np.asarray(images.y_test),
        partition=clients,
        model=model,
        exact_draws=24,
        **_run(clients.num_clients, size, seed),
    )


def digits(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of scikit-learn's handwritten digits: ten outputs, heterogeneous clients."""
    return _images("digits", "Digits", data_dir, scale, seed)


def fashion_mnist(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of Fashion-MNIST, whose files are read from ``data_dir``."""
    return _images("fashion_mnist", "Fashion-MNIST", data_dir, scale, seed)


def build(name: str, data_dir: DataDir = None, scale: str = "default", seed: int = 0) -> list[Setting]:
    """Builds the settings of the case called ``name``.

    Args:
        name: Name of the case; ``fedtangent list cases`` shows all.
        data_dir: Folder of the data sets' files.
        scale: One of ``SCALES``: "smoke", "default" or "paper".
        seed: Seed of data, schedule and initialisations.

    Raises:
        ValueError: The name or the scale is unknown; raised before any data is loaded.
    """
    entry = choose("cases", name)
    settings: list[Setting] = entry.build(data_dir, checks.choice("scale", scale, SCALES), seed)
    return settings


def _case(name: str, summary: str, settings: tuple[Build, ...], papers: tuple[str, ...] = (), **more: Any) -> CaseEntry:
    def build_all(data_dir: DataDir, scale: str, seed: int) -> list[Setting]:
        return [make(data_dir, scale, seed) for make in settings]

    return CaseEntry(name, summary, build_all, papers=papers, **more)


ENTRIES = (
    _case("sine", "the papers' sine toy: the linear model, and a network", (sine_linear, sine_network), ("shi2024",)),
    _case("digits", "handwritten digits, ten outputs, heterogeneous clients", (digits,)),
    _case("fashion_mnist", "Fashion-MNIST, where its files are given", (fashion_mnist,), by_default=False),
)
DEFAULT_CASES = tuple(entry.name for entry in ENTRIES if entry.by_default)
