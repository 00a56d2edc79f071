"""The standard cases of ``fedtangent compare``: a function for each builds its settings, and an entry names it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks
from fedtangent._src import data as datasets
from fedtangent._src.comparison.followed import rule_of
from fedtangent._src.comparison.settings import NTKRuns, Problem, Scale, Setting, standardised, step_size
from fedtangent._src.data import partition
from fedtangent._src.entries import Entry, choose
from fedtangent._src.federated import algorithms, schedule
from fedtangent._src.federated.local import Work
from fedtangent._src.models.dense import mlp
from fedtangent._src.models.features import rbf_linear
from fedtangent._src.types import Algorithm, Model, Schedule

NUM_MODELS = 5  # the papers' default K
LOCAL_STEPS = 10
SCALES = ("smoke", "default", "paper")
IMAGES = {  # scale -> widths, draws and rounds
    "smoke": ((64, 256, 1024), 14, 24),
    "default": ((64, 256, 1024), 14, 100),
    "paper": ((64, 256, 1024, 4096), 20, 400),
}
DataDir = str | os.PathLike[str] | None
Build = Callable[[DataDir, str, int], Setting]


@dataclasses.dataclass(frozen=True)
class CaseEntry(Entry):
    """A standard case by name; ``build(data_dir, scale, seed)`` returns its settings."""

    by_default: bool = True
    """Whether ``fedtangent compare`` runs the case if the user names no cases."""


def _sine(name: str, title: str, model: Model, size: Scale, seed: int) -> Setting:
    toy = datasets.load("sine", seed=seed, gap=not model.is_linear, points_per_user=3)
    user = np.asarray(toy.user_train)
    # One, two or three points a client (two on average, as in the paper), so that weights by examples matter.
    rows = np.tile(np.arange(3), len(user) // 3) <= user % 3
    clients = partition.by_user(user[rows])
    problem = Problem(toy.x_train[rows], toy.y_train[rows], toy.x_test[::2], toy.y_test[::2], clients)
    algorithm = ensemble(problem, model, schedule.per_client_permutations(clients.num_clients, NUM_MODELS))
    # Modes of small eigenvalues evolve later; at these widths they are far from the modes of infinite width.
    return standard_case(name, title, problem, algorithm, size, seed, NTKRuns(times=tuple(range(5, 41, 5))))


def _size(widths: tuple[int, ...], draws: int, num_rounds: int) -> Scale:
    """Builds the scale of a case that is evaluated after every eighth of its rounds."""
    return Scale(widths, draws, num_rounds, evaluate_every=max(num_rounds // 8, 1))


def ensemble(problem: Problem, model: Model, plan: Schedule, local_steps: int = LOCAL_STEPS) -> Algorithm:
    """Builds Fed-ensemble with full batches, at half of the largest stable step.

    Args:
        problem: Examples and clients.
        model: Network with an analytic kernel.
        plan: Schedule of the clients.
        local_steps: Local steps of a round.
    """
    rate = step_size(problem, model)
    return algorithms.fed_ensemble(
        model, plan, client_learning_rate=rate, work=Work(steps=local_steps, batch_size=None)
    )


def standard_case(
    name: str,
    title: str,
    problem: Problem,
    algorithm: Algorithm,
    size: Scale,
    seed: int,
    ntk_fl: NTKRuns = NTKRuns(),
) -> Setting:
    """Builds the setting of a standard case, which ``fedtangent compare`` runs by its name.

    Args:
        name: Name in tables and of files.
        title: Title of tables and figures.
        problem: Examples and clients.
        algorithm: Fed-ensemble with full batches, to which Theorem 2 of FE-2024 applies.
        size: Widths, draws (initialisations) and rounds.
        seed: Seed of initialisations and schedule.
        ntk_fl: Runs of NTK-FL from the same initial functions.

    Raises:
        ValueError: Theory does not follow ``algorithm``.
    """
    rule = rule_of(algorithm, problem.partition, size.num_rounds, seed)
    return Setting(name, title, problem, algorithm, rule, size, seed, ntk_fl)


def sine_linear(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of the sine toy of FE-2024: 50 clients of 1 to 3 points, and 100 radial basis functions.

    Args:
        data_dir: Unused: the data are computed.
        scale: "smoke", "default" or "paper"; decides the numbers of draws (initialisations) and rounds.
        seed: Seed of data, radial basis functions, initialisations and schedule.
    """
    sizes = {"smoke": _size((100,), 16, 100), "default": _size((100,), 16, 200), "paper": _size((100,), 100, 2000)}
    model = rbf_linear(num_features=100, bandwidth=0.08, sigma=1.0, seed=seed, dtype=jnp.float64)
    title = "Sine toy (FE-2024, section V-A), 1 to 3 points a client: 100 radial basis functions, linear in the weights"
    return _sine("sine, linear", title, model, sizes[scale], seed)


def sine_network(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of a network on the sine data with a gap in the middle (FE-2024, section V-B).

    Args:
        data_dir, scale, seed: As for ``sine_linear``; ``scale`` also decides the widths.
    """
    sizes = {
        "smoke": _size((64, 256, 1024), 48, 6),
        "default": _size((64, 256, 1024), 48, 20),
        "paper": _size((64, 256, 1024, 4096, 8192), 100, 60),
    }
    model = mlp(1, 1, widths=(64,), activation="erf", w_std=8.0, b_std=4.0, last_w_std=1.0, dtype=jnp.float64)
    title = "Sine with a gap (FE-2024, section V-B), 1 to 3 points a client: erf network of one hidden layer"
    return _sine("sine, network", title, model, sizes[scale], seed)


def _images(name: str, title: str, data_dir: DataDir, scale: str, seed: int) -> Setting:
    size, num_train = _size(*IMAGES[scale]), 100 if scale == "paper" else 40
    images = datasets.load(name, data_dir=data_dir, seed=seed, flatten=True, num_train=num_train, num_test=100)
    x_train, x_test = standardised(np.asarray(images.x_train, np.float64), np.asarray(images.x_test, np.float64))
    # Drawn per class, so that sizes differ and weights by examples matter.
    clients = partition.dirichlet(images.y_train, 10, 1.0, seed, min_client_size=2, dirichlet_method="per_class")
    d, c = x_train.shape[1], images.num_classes
    y_train, y_test = (datasets.classification_targets(y, c, centred=True) for y in (images.y_train, images.y_test))
    problem = Problem(x_train, y_train, x_test, y_test, clients, np.asarray(images.y_test))
    model = mlp(d, c, widths=(64,), activation="relu", w_std=2**0.5, b_std=0.1, dtype=jnp.float64)
    algorithm = ensemble(problem, model, schedule.per_client_permutations(clients.num_clients, NUM_MODELS))
    described = (
        f"{title}: {num_train} examples on 10 clients of {min(clients.sizes)} to {max(clients.sizes)} "
        "(Dirichlet 1.0), ReLU network of one hidden layer"
    )
    return standard_case(name, described, problem, algorithm, size, seed, NTKRuns(exact_draws=24))


def digits(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of scikit-learn's handwritten digits, with ten outputs and clients of different classes.

    Args:
        data_dir: Unused: the images come with scikit-learn.
        scale: "smoke", "default" or "paper"; decides the numbers of examples, draws (initialisations) and rounds, and
            the widths.
        seed: Seed of the test split, clients, initialisations and schedule.
    """
    return _images("digits", "Digits", data_dir, scale, seed)


def fashion_mnist(data_dir: DataDir, scale: str, seed: int) -> Setting:
    """Builds the setting of Fashion-MNIST, with ten outputs and clients of different classes.

    Args:
        data_dir: Folder of the data set's files; None for $FEDTANGENT_DATA.
        scale: As for ``digits``.
        seed: Seed of clients, initialisations and schedule; the split of the images is the published one.

    Raises:
        ValueError: The files are missing or damaged.
    """
    return _images("fashion_mnist", "Fashion-MNIST", data_dir, scale, seed)


def build(name: str, data_dir: DataDir = None, scale: str = "default", seed: int = 0) -> list[Setting]:
    """Builds the settings of the case called ``name``.

    Args:
        name: Name of the case; ``fedtangent list cases`` shows all.
        data_dir: Folder of the data sets' files; None for $FEDTANGENT_DATA.
        scale: One of ``SCALES``: "smoke", "default" or "paper".
        seed: Seed of data, schedule and initialisations.

    Raises:
        ValueError: The name or the scale is unknown (raised before any data is loaded), or files of data are missing.
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
