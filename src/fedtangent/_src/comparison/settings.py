"""The setting of a comparison, which simulation and theory share: examples, clients, algorithm and sizes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from fedtangent._src import data as datasets
from fedtangent._src.checks import finite
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.kernels.large import kept_blocks
from fedtangent._src.losses import Loss, get_loss, is_right, mean_form, mean_prediction, targets_of, words
from fedtangent._src.models.kernels import AnalyticKernel
from fedtangent._src.progress import progress_of, ticks
from fedtangent._src.storage import cache_directory
from fedtangent._src.theory.flow import Rule
from fedtangent._src.types import Algorithm, FederatedData, Kernel, Key, Model, Partition, PyTree

Report = Callable[[str], None]  # receives a line of text for each step of the work
LITTLE = 0.9  # share of the first training error; networks whose last one is above it have learned little
NTK_TIMES = tuple(range(100, 2001, 100))  # gradient steps among which NTK-FL chooses


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """Training and test examples on the host (floats in float64), the clients' training examples, and the loss.

    Inputs and targets must be finite, else ``ValueError`` is raised.
    """

    x_train: Num[np.ndarray, "n ..."]
    y_train: Float[np.ndarray, "n C"]
    x_test: Num[np.ndarray, "m ..."]
    y_test: Float[np.ndarray, "m C"]
    partition: Partition  # training examples of each client
    labels_test: Int[np.ndarray, "m"] | None = None  # class labels of the test examples, [m]; None for regression
    points: str = "test"  # "test"; or "train" for data without test examples, whose training examples take their place
    loss: str | Loss = "squared_error"  # name of the training loss, or the user's function

    def __post_init__(self) -> None:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            finite(name, getattr(self, name))

    def __repr__(self) -> str:
        """Returns a line with the numbers of examples and clients, and the loss."""
        n, m, clients = len(self.x_train), len(self.x_test), self.partition.num_clients
        return f"Problem({n} training examples on {clients} clients, {m} {self.points} points, {words(self.loss)})"

    def left(
        self, outputs: Float[np.ndarray, "r K E n C"], rows: np.ndarray | slice = slice(None)
    ) -> Float[np.ndarray, "r"]:
        """Computes the training error of ``outputs`` at the training examples, or at some of them, for each round.

        For the squared error it is the root mean square of the residual, outputs minus targets. For other losses it is
        the mean loss over examples.

        Args:
            outputs: Outputs of K models of E draws at these examples, [r, K, E, n, C].
            rows: Row numbers of the examples; default: all training examples.

        Returns:
            One number for each round, [r].
        """
        targets = self.y_train[rows]
        if targets_of(self.loss) == "numbers":
            return np.sqrt(np.mean((outputs - targets) ** 2, axis=(1, 2, 3, 4)))
        loss, shape = get_loss(mean_form(self.loss)), (math.prod(outputs.shape[1:-1]), outputs.shape[-1])
        every, mask = jnp.asarray(np.broadcast_to(targets, outputs.shape[1:]).reshape(shape)), jnp.ones(shape[0], bool)
        return np.array([float(loss(jnp.asarray(of_round.reshape(shape)), every, mask)) for of_round in outputs])

    def little_learned(self, first: float, last: float) -> str:
        """Returns a remark if training left over 90 % of the training error, so that agreement shows little; else "".

        Args:
            first: Training error (``left``) before training.
            last: Training error after training.
        """
        if not last > LITTLE * first:
            return ""
        return f"the networks learned little: their {self.what_is_left} went from {first:.3g} to {last:.3g}"

    @property
    def what_is_left(self) -> str:
        """The name of the training error that ``left`` computes, for tables and remarks."""
        if targets_of(self.loss) == "numbers":
            return "training residual, root mean square"
        return f"training {words(mean_form(self.loss))}"

    def mse(self, outputs: Float[np.ndarray, "*networks m C"], split: str = "test") -> Float[np.ndarray, "*networks"]:
        """Computes the mean squared error of ``outputs`` [..., m, C]; for cross entropy, of softmax probabilities.

        Args:
            outputs: Outputs at the points of ``split``.
            split: "test" or "train".

        Returns:
            One number for each network, [...].
        """
        predictions = scipy.special.softmax(outputs, axis=-1) if targets_of(self.loss) == "classes" else outputs
        targets = self.y_test if split == "test" else self.y_train
        return np.asarray(np.mean((predictions - targets) ** 2, axis=(-2, -1)))

    def ensemble(self, outputs: Float[np.ndarray, "K *networks m C"]) -> Float[np.ndarray, "*networks m C"]:
        """Returns the prediction of ensembles of K networks: their mean output.

        For a loss of classes it is the logarithm of their mean softmax probabilities.
        """
        if targets_of(self.loss) != "classes":
            return np.asarray(outputs.mean(axis=0))
        return np.asarray(mean_prediction(self.loss, outputs))

    def accuracy(self, outputs: Float[np.ndarray, "*networks m C"]) -> Float[np.ndarray, "*networks"]:
        """Computes each network's test accuracy; NaN if the largest output of an example is not finite."""
        labels = np.broadcast_to(np.asarray(self.labels_test), outputs.shape[:-1])
        return np.asarray(np.mean(np.asarray(is_right(outputs, labels)), axis=-1))

    def score(self, outputs: Float[np.ndarray, "*networks m C"]) -> Float[np.ndarray, "*networks"]:
        """Computes the test accuracy of ``outputs`` if the test points have labels, else their mean squared error."""
        return self.mse(outputs) if self.labels_test is None else self.accuracy(outputs)

    def federated(self, dtype: DTypeLike = np.float64) -> FederatedData:
        """Returns the training data on the device.

        Args:
            dtype: Type of inputs and targets.
        """
        return datasets.federated_data(self.x_train, self.y_train, self.partition, dtype=dtype)


class Scale(NamedTuple):
    """Size of a comparison of theory with simulation.

    Attributes:
        widths: Widths of the simulated networks.
        draws: Number E of independent networks, initial functions or seeds.
        num_rounds: Number R of rounds.
        evaluate_every: Rounds between evaluations; 0 to evaluate only at the start and at the end.
    """

    widths: tuple[int, ...]
    draws: int
    num_rounds: int
    evaluate_every: int = 0

    @property
    def rounds(self) -> tuple[int, ...]:
        """The evaluated rounds, from 0 to the last."""
        return tuple(sorted({*range(0, self.num_rounds, self.evaluate_every or self.num_rounds), self.num_rounds}))

    @property
    def largest(self) -> int:
        """The largest width."""
        return max(self.widths)


class NTKRuns(NamedTuple):
    """Settings of the runs of NTK-FL that a standard case of ``fedtangent compare`` adds to its networks."""

    times: tuple[int, ...] = NTK_TIMES  # numbers of gradient steps among which NTK-FL chooses
    exact_draws: int = 0  # draws of NTK-FL with the exact kernel, which costs (n C)^3; only for several outputs


@dataclass(frozen=True, eq=False)
class Setting:
    """An algorithm on a problem, for networks of one architecture at several widths: all that a comparison needs."""

    name: str  # name in tables and of files
    title: str  # title of tables and figures
    problem: Problem  # examples, clients and loss
    algorithm: Algorithm  # trains the networks
    rule: Rule | str  # how the closed form follows the algorithm, or the sentence that says why there is none
    size: Scale
    seed: int = 0  # seed of initialisations, schedule and minibatches
    ntk_fl: NTKRuns | None = None  # runs of NTK-FL that verdicts compare with theory; None for a user's run
    start: PyTree | None = None  # parameters [K, ...] at which theory linearises; None: independent starts

    @property
    def is_standard(self) -> bool:
        """Whether this is a standard case of ``fedtangent compare``, not a user's run.

        Theorem 2 of FE-2024, a Gaussian process after many rounds, applies to the standard cases.
        """
        return self.ntk_fl is not None

    @property
    def is_linear(self) -> bool:
        """Whether the model is exactly linear, so that simulation and flow must agree to rounding."""
        return self.algorithm.model.is_linear

    @property
    def method(self) -> str:
        """The name of the algorithm that trains the networks."""
        return "Fed-ensemble" if self.is_standard else self.algorithm.name

    @property
    def num_models(self) -> int:
        """The number K of models."""
        return self.algorithm.schedule.num_models

    @property
    def followed(self) -> Rule:
        """The ``Rule`` by which the closed form follows the run; raises ``ValueError`` if theory does not follow it."""
        if isinstance(self.rule, str):
            raise ValueError(f"algorithm: got {self.algorithm.name!r}, which theory does not follow: {self.rule}")
        return self.rule

    @property
    def dtype(self) -> np.dtype:
        """The floating type of training: float32 for the networks of a standard case, otherwise float64.

        Networks differ from theory by their width anyway. Linear models, which must agree with theory to rounding, and
        a user's run need float64.
        """
        return np.dtype(np.float32 if self.is_standard and not self.is_linear else np.float64)

    def model(self, width: int, dtype: DTypeLike = np.float64) -> Model:
        """Returns the network at a width, or the algorithm's model if its width is fixed.

        Args:
            width: Width of the hidden layers.
            dtype: Type of the initial weights.
        """
        model = self.algorithm.model
        return in_dtype(model, dtype) if model.at_width is None else _at_width(model.at_width, width, np.dtype(dtype))

    @property
    def kernel(self) -> Kernel:
        """The analytic kernel of the network of the largest width; raises ``ValueError`` for a model without one."""
        kernel = self.model(self.size.largest).kernel
        if kernel is None:
            raise ValueError(f"model: got one without an analytic kernel for {self.name}, must have one")
        return kernel

    def blocks(self, progress: bool | None = False) -> KernelBlocks:
        """Computes the kernels at the training and test points.

        Kernels that are computed in tiles, as for convolutional networks, are kept in a cache on disk.
        ``progress`` is whether to show progress; None: if the work takes some seconds.
        """
        kernel, x_train, x_test = self.kernel, self.problem.x_train, self.problem.x_test

        def compute() -> KernelBlocks:
            with progress_of(1, f"{self.name}: kernel", "tile", shown=progress) as bar:
                return kernel_blocks(kernel, x_train, x_test, tick=ticks(bar))

        if not isinstance(kernel, AnalyticKernel):
            return compute()
        return kept_blocks(kernel, x_train, x_test, cache_directory() / "kernels", compute)


@functools.lru_cache(maxsize=8)  # one object, so that its algorithms share compiled programs
def _at_width(at_width: Callable[[int], Model], width: int, dtype: np.dtype) -> Model:
    return in_dtype(at_width(width), dtype)


def in_dtype(plain: Model, dtype: DTypeLike = np.float64) -> Model:
    """Returns the model with initial weights converted to ``dtype``.

    Args:
        plain: The model.
        dtype: Floating type of the weights.
    """

    def init(key: Key) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), plain.init(key))

    return plain._replace(init=init)


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Switches to float64 and full-precision matrix products inside a ``with`` block, as comparisons need."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def step_size(problem: Problem, model: Model, fraction: float = 0.5) -> float:
    """Computes a fraction of the largest stable full-batch step, ``2 / max_i lambda_max(Theta_ii / n_i)``.

    Theta_ii is the analytic tangent kernel of client i's n_i examples.

    Args:
        problem: Examples and clients.
        model: Network with an analytic kernel.
        fraction: Share of the largest stable step.
    """
    assert model.kernel is not None
    # At once: a kernel of each client's own size would be a program each.
    theta = np.asarray(model.kernel(problem.x_train, None, get="ntk"), np.float64)
    clients = [rows for i in range(problem.partition.num_clients) if len(rows := problem.partition.client(i))]
    return fraction * 2 / max(float(np.linalg.eigvalsh(theta[np.ix_(rows, rows)])[-1]) / len(rows) for rows in clients)


def standardised(
    train: Num[np.ndarray, "n d"], test: Num[np.ndarray, "m d"]
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "m d"]]:
    """Subtracts the training mean from inputs and scales each input to norm sqrt(d), for a well-conditioned kernel.

    An input that equals the mean becomes 0. Inputs of equal norm are also assumption 2 of the theorems of the paper
    NTK-FL.

    Args:
        train: Training inputs, [n, d].
        test: Test inputs, [m, d].

    Returns:
        Training inputs [n, d] and test inputs [m, d].

    Raises:
        ValueError: An input is not finite.
    """
    finite("x_train", train)
    finite("x_test", test)
    mean = train.mean(axis=0)
    scaled = []
    for x in (train - mean, test - mean):
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        scaled.append(x / np.where(norm > 0, norm, 1) * np.sqrt(x.shape[1]))
    return scaled[0], scaled[1]
