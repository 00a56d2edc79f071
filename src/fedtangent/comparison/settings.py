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

from fedtangent import data as datasets
from fedtangent.checks import finite
from fedtangent.kernels.gram import KernelBlocks, kernel_blocks
from fedtangent.losses import Loss, get_loss, mean_form, targets_of, words
from fedtangent.types import Algorithm, FederatedData, Model, Partition, PyTree, Schedule


class Scale(NamedTuple):
    """How large a comparison is run."""

    widths: tuple[int, ...]
    draws: int  # independent networks, initial functions or seeds
    num_rounds: int


@dataclass(frozen=True)
class Setting:
    """One data set under one schedule and one rule of training, for several widths of one architecture.

    Arrays are float64 on the host. ``learning_rate`` is the client's; 0 chooses it from the analytic kernel
    (``step_size``).
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
    labels_test: np.ndarray | None = None  # [m] for classification
    is_linear: bool = False  # the model is exactly linear: simulation and flow must agree to rounding
    ntk_times: tuple[int, ...] = tuple(range(100, 2001, 100))
    algorithm: Callable[[Model], Algorithm] | None = None  # what trains the networks; None: Fed-ensemble
    rule: Mapping[str, Any] = field(default_factory=dict)  # how theory follows it: further fields of ``theory.Rule``
    weighting: str = "examples"  # of the clients' means
    start: PyTree | None = None  # parameters [K, ...] that all draws begin with; None: each draw has a key

    def __post_init__(self) -> None:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            finite(name, getattr(self, name))
        if np.all(np.asarray(self.learning_rate) == 0):
            object.__setattr__(self, "learning_rate", step_size(self))

    @property
    def rounds(self) -> tuple[int, ...]:
        """Evaluated rounds, from 0 to the last."""
        return tuple(sorted({*range(0, self.num_rounds, self.evaluate_every or self.num_rounds), self.num_rounds}))

    @property
    def is_standard(self) -> bool:
        """Whether it is a case of Fed-ensemble with full batches, of which Theorem 2 holds, and not a user's run."""
        return self.algorithm is None

    @property
    def method(self) -> str:
        """What trains the networks, by name."""
        return "Fed-ensemble" if self.algorithm is None else self.algorithm(self.model(self.largest)).name

    @property
    def loss(self) -> str | Loss:
        """Name of the loss that is trained, or the user's own function."""
        loss: str | Loss = self.rule.get("loss", "squared_error")
        return loss

    def left(self, outputs: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The training error of ``outputs`` [r, K, E, n, C] at some rows of the training examples, [r].

        For the squared error the root mean square of the residual; for another loss its mean over examples.
        """
        targets = self.y_train[rows]
        if targets_of(self.loss) == "numbers":
            return np.sqrt(np.mean((outputs - targets) ** 2, axis=(1, 2, 3, 4)))
        loss, shape = get_loss(mean_form(self.loss)), outputs.shape[1:]
        each, mask = np.broadcast_to(targets, shape).reshape(-1, shape[-1]), jnp.ones(math.prod(shape[:-1]), bool)
        return np.array([float(loss(jnp.asarray(f.reshape(each.shape)), jnp.asarray(each), mask)) for f in outputs])

    def mse(self, outputs: np.ndarray, split: str = "test") -> np.ndarray:
        """Mean squared error of outputs [..., m, C], [...]; under the cross entropy, of their softmax probabilities."""
        seen = softmax(outputs, axis=-1) if targets_of(self.loss) == "classes" else outputs
        return np.asarray(np.mean((seen - (self.y_test if split == "test" else self.y_train)) ** 2, axis=(-2, -1)))

    def accuracy(self, outputs: np.ndarray) -> np.ndarray:
        """Accuracy of outputs [..., m, C] on the test labels, [...]."""
        return np.asarray(np.mean(np.argmax(outputs, axis=-1) == self.labels_test, axis=-1))

    def score(self, outputs: np.ndarray) -> np.ndarray:
        """``accuracy`` where the test points have labels, else ``mse``."""
        return self.mse(outputs) if self.labels_test is None else self.accuracy(outputs)

    @property
    def what_is_left(self) -> str:
        """What ``left`` measures."""
        if targets_of(self.loss) == "numbers":
            return "training residual, root mean square"
        return f"training {words(mean_form(self.loss))}"

    @property
    def largest(self) -> int:
        """The largest width."""
        return max(self.widths)

    def blocks(self) -> KernelBlocks:
        """``kernel`` at the training and test points."""
        return kernel_blocks(self.kernel, self.x_train, self.x_test)

    @property
    def kernel(self) -> Callable[..., Any]:
        """The analytic kernel of the largest width; raises ``ValueError`` for a model without one."""
        kernel = self.model(self.largest).kernel
        if kernel is None:
            raise ValueError(f"model: got one without an analytic kernel for {self.name}, must have one")
        return kernel

    def federated(self) -> FederatedData:
        """The training data on the device, in float64."""
        return datasets.federated_data(self.x_train, self.y_train, self.partition, dtype=jnp.float64)


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Float64 and full matrix products, whatever the program runs in: what comparisons need."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def step_size(setting: Setting, fraction: float = 0.5) -> float:
    """A fraction of the largest stable full-batch step, ``2 / max_i lambda_max(Theta_ii / n_i)``, from the kernel."""
    # At once: a kernel of each client's own size would be a program each.
    theta = np.asarray(setting.kernel(jnp.asarray(setting.x_train), None, get="ntk"), np.float64)
    clients = (setting.partition.client(i) for i in range(setting.partition.num_clients))
    largest = max(float(np.linalg.eigvalsh(theta[np.ix_(own, own)])[-1]) / len(own) for own in clients if len(own))
    return fraction * 2 / largest


def standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre by the training mean and scale every example to norm sqrt(d), which conditions the kernel well.

    This is also assumption 2 of NTK-FL's theorems (inputs of one norm).
    """
    finite("x_train", train)
    finite("x_test", test)
    mean = train.mean(axis=0)
    scaled = []
    for x in (train - mean, test - mean):
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        scaled.append(x / np.where(norm > 0, norm, 1) * np.sqrt(x.shape[1]))
    return scaled[0], scaled[1]
