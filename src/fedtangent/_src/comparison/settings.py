"""The setting of a comparison: data, partition, schedule, model, widths, step size; simulation and theory share it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from fedtangent._src import data as datasets
from fedtangent._src.checks import finite
from fedtangent._src.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent._src.losses import Loss, get_loss, mean_form, targets_of, words
from fedtangent._src.types import Algorithm, FederatedData, Model, Partition, PyTree, Schedule


class Scale(NamedTuple):
    """Size of a comparison: widths, draws and rounds."""

    widths: tuple[int, ...]
    draws: int  # independent networks, initial functions or seeds
    num_rounds: int


@dataclass(frozen=True)
class Setting:
    """One data set, schedule and training rule, for networks of one architecture at several widths.

    Arrays are float64 on the host. ``learning_rate`` is the clients'; if it is 0, ``step_size`` chooses it from the
    analytic kernel.
    """

    name: str
    title: str
    x_train: np.ndarray  # [n, d]
    y_train: np.ndarray  # [n, C]
    x_test: np.ndarray  # [m, d]
    y_test: np.ndarray  # [m, C]
    partition: Partition
    schedule: Schedule
    model: Callable[[int], Model]  # width -> model
    widths: tuple[int, ...]
    local_steps: Any  # a number, or one per client [N]
    num_rounds: int
    evaluate_every: int = 0  # rounds between evaluations; 0: once at the end
    draws: int = 1  # E, independent initialisations of the K models at every width
    exact_draws: int = 0  # draws of NTK-FL with the exact kernel, which costs (n C)^3
    learning_rate: Any = 0.0  # a number, or one per round [R]
    seed: int = 0
    points: str = "test"  # examples that x_test holds; "train" for data without test examples
    labels_test: np.ndarray | None = None  # [m] for classification
    is_linear: bool = False  # the model is exactly linear: simulation and flow must agree to rounding
    ntk_times: tuple[int, ...] = tuple(range(100, 2001, 100))
    algorithm: Callable[[Model], Algorithm] | None = None  # builds the algorithm that trains them; None: Fed-ensemble
    rule: Mapping[str, Any] = field(default_factory=dict)  # further fields of ``theory.Rule``
    weighting: str = "examples"  # weights of the clients' means: "examples" or "uniform"
    start: PyTree | None = None  # parameters [K, ...] that all draws begin with; None: each draw has a key

    def __post_init__(self) -> None:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            finite(name, getattr(self, name))
        if self.is_standard and np.all(np.asarray(self.learning_rate) == 0):
            object.__setattr__(self, "learning_rate", step_size(self))

    @property
    def rounds(self) -> tuple[int, ...]:
        """The evaluated rounds, from 0 to the last."""
        return tuple(sorted({*range(0, self.num_rounds, self.evaluate_every or self.num_rounds), self.num_rounds}))

    @property
    def is_standard(self) -> bool:
        """Whether this is a standard case (Fed-ensemble, full batches, so Theorem 2 applies), not a user's run."""
        return self.algorithm is None

    @property
    def method(self) -> str:
        """The name of the algorithm that trains the networks."""
        return "Fed-ensemble" if self.algorithm is None else self.algorithm(self.model(self.largest)).name

    @property
    def loss(self) -> str | Loss:
        """The name of the training loss, or the user's function."""
        loss: str | Loss = self.rule.get("loss", "squared_error")
        return loss

    def left(self, outputs: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Computes the training error of ``outputs`` at a subset of the training examples, for each round.

        The training error is the root mean square of the residual for the squared error, and the mean over examples for
        other losses.

        Args:
            outputs: Outputs of K models of E draws at these examples, [r, K, E, n, C].
            rows: Row numbers of the examples; default: all training examples.

        Returns:
            One number for each round, [r].
        """
        targets = self.y_train[rows]
        if targets_of(self.loss) == "numbers":
            return np.sqrt(np.mean((outputs - targets) ** 2, axis=(1, 2, 3, 4)))
        loss, shape = get_loss(mean_form(self.loss)), outputs.shape[1:]
        each, mask = np.broadcast_to(targets, shape).reshape(-1, shape[-1]), jnp.ones(math.prod(shape[:-1]), bool)
        return np.array([float(loss(jnp.asarray(f.reshape(each.shape)), jnp.asarray(each), mask)) for f in outputs])

    def mse(self, outputs: np.ndarray, split: str = "test") -> np.ndarray:
        """Computes the mean squared error of ``outputs`` [..., m, C]; for cross entropy, of softmax probabilities.

        Args:
            outputs: Outputs at the points of ``split``.
            split: "test" or "train".

        Returns:
            One number for each network, [...].
        """
        seen = softmax(outputs, axis=-1) if targets_of(self.loss) == "classes" else outputs
        return np.asarray(np.mean((seen - (self.y_test if split == "test" else self.y_train)) ** 2, axis=(-2, -1)))

    def accuracy(self, outputs: np.ndarray) -> np.ndarray:
        """Computes the accuracy of ``outputs`` [..., m, C] on the test labels, [...]."""
        return np.asarray(np.mean(np.argmax(outputs, axis=-1) == self.labels_test, axis=-1))

    def score(self, outputs: np.ndarray) -> np.ndarray:
        """Computes ``accuracy`` if the test points have labels, else ``mse``."""
        return self.mse(outputs) if self.labels_test is None else self.accuracy(outputs)

    @property
    def what_is_left(self) -> str:
        """The name of the quantity that ``left`` computes."""
        if targets_of(self.loss) == "numbers":
            return "training residual, root mean square"
        return f"training {words(mean_form(self.loss))}"

    @property
    def largest(self) -> int:
        """The largest width."""
        return max(self.widths)

    def blocks(self) -> KernelBlocks:
        """Computes the blocks of ``kernel`` at the training and test points."""
        return kernel_blocks(self.kernel, self.x_train, self.x_test)

    @property
    def kernel(self) -> Callable[..., Any]:
        """The analytic kernel of the largest width; raises ``ValueError`` for a model without one."""
        kernel = self.model(self.largest).kernel
        if kernel is None:
            raise ValueError(f"model: got one without an analytic kernel for {self.name}, must have one")
        return kernel

    def federated(self) -> FederatedData:
        """Returns the training data on the device, in float64."""
        return datasets.federated_data(self.x_train, self.y_train, self.partition, dtype=jnp.float64)


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Switches to float64 and full-precision matrix products inside a ``with`` block, as comparisons need."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def step_size(setting: Setting, fraction: float = 0.5) -> float:
    """Computes a fraction of the largest stable full-batch step, ``2 / max_i lambda_max(Theta_ii / n_i)``.

    Theta_ii is the analytic tangent kernel of client i's n_i examples.
    """
    # At once: a kernel of each client's own size would be a program each.
    theta = np.asarray(setting.kernel(jnp.asarray(setting.x_train), None, get="ntk"), np.float64)
    clients = (setting.partition.client(i) for i in range(setting.partition.num_clients))
    largest = max(float(np.linalg.eigvalsh(theta[np.ix_(own, own)])[-1]) / len(own) for own in clients if len(own))
    return fraction * 2 / largest


def standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres inputs by the training mean and scales every example to norm sqrt(d), which conditions the kernel well.

    Inputs of one norm are also assumption 2 of NTK-FL's theorems.

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
