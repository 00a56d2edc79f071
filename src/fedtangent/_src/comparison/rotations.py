"""Runs on a kernel's features: theory for algorithms without a closed form, if they ignore the basis of weight space.

A linear model in the features phi of a kernel Theta, ``f_0(x) + phi(x) w`` with ``phi phi' = Theta``, is trained by the
run's algorithm. If the algorithm treats all directions of weight space alike, the functions depend on Theta only, and
are the prediction of the network of this kernel. Whether it does is measured here: the same run on rotated features has
to give the same functions, or functions of the same distribution if the algorithm draws random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fedtangent._src.data.federated import federated_data
from fedtangent._src.engine.loop import evaluated_rounds
from fedtangent._src.engine.sweeps import single_device_engine
from fedtangent._src.kernels.features import KernelFeatures, feature_model
from fedtangent._src.types import Algorithm, Array, Engine, FederatedData, Key, Partition, PyTree

SAME = 1e-9  # largest disagreement that rounding explains, relative to how far training moves the functions
ROTATIONS = (1, 2)  # seeds of the rotations
COUNTS = (16, 48, 128)  # runs after which the law of a random algorithm is estimated
Z = 3.0  # standard errors
SHARPEST = 0.1  # standard error of the noise ratio above which the law is not known well enough


@runtime_checkable
class FeaturePaths(Protocol):
    """A function that trains a linear model on the features of a kernel, one for each of K initial functions."""

    def __call__(
        self,
        features: KernelFeatures,
        f0: Float[np.ndarray, "K points C"],
        seed: int,
        rate_factor: float | None = None,
    ) -> Float[np.ndarray, "r K points C"]:
        """Returns the outputs of K models at all points after the evaluated rounds.

        Args:
            features: Features of the kernel, or rotated ones.
            f0: Initial functions of the K models, training points first.
            seed: Seed of schedule, minibatches and the algorithm's random numbers.
            rate_factor: Number by which the clients' learning rate is multiplied; None: the same rate.
        """


def feature_paths(
    algorithm: Algorithm, y_train: Float[np.ndarray, "n C"], clients: Partition, rounds: Sequence[int]
) -> FeaturePaths:
    """Builds a function that trains the linear model of a kernel's features by ``algorithm``, in float64.

    All calls with features of one shape run one program: other initial functions, rotations and seeds compile nothing.

    Args:
        algorithm: The algorithm, for any model.
        y_train: Targets of the training points, or labels [n] for a loss of classes.
        clients: Training points of each client.
        rounds: Rounds after which outputs are computed, ascending from 0.
    """
    lengths = np.diff(rounds, prepend=0).astype(np.int32)

    @partial(jax.jit, static_argnames=("engine",))
    def path(
        engine: Engine, mix: Array, weights: PyTree, key: Key, data: FederatedData, x: Array, factor: Array | None
    ) -> Array:
        on_features = algorithm.on(feature_model(x.shape[-1], mix, x.ndim == 3), factor)
        start = on_features.init(key, clients.num_clients, weights)
        outputs: Array = evaluated_rounds(
            on_features, engine, lambda trained, state: trained.predict(state, x).members, lengths, start, data
        )
        return outputs

    def paths(
        features: KernelFeatures,
        f0: Float[np.ndarray, "K points C"],
        seed: int,
        rate_factor: float | None = None,
    ) -> Float[np.ndarray, "r K points C"]:
        data = federated_data(features.train, y_train, clients, dtype=jnp.float64)
        x = jnp.asarray(np.concatenate([features.train, features.test]))
        engine, mix, key = single_device_engine(data, "auto"), jnp.asarray(features.mix), jax.random.key(seed)
        factor = None if rate_factor is None else jnp.asarray(rate_factor)
        return np.asarray(path(engine, mix, features.start(f0), key, data, x, factor))

    return paths


class RotationTest(NamedTuple):
    """Whether an algorithm treats all directions of weight space alike, as measured on rotated features.

    Attributes:
        disagreement: Largest difference between functions on features and on rotated features with the same seed,
            relative to how far training moves the functions.
        noise_ratio: Mean square of the differences between functions on features and on a rotation of them, divided by
            the mean square of the differences between functions on two rotations. 1 if random numbers act alike in all
            directions; NaN if not measured: functions that do not differ, differ alike at every seed, or diverge.
        noise_error: Standard error of ``noise_ratio``.
        bias: Mean over seeds of the difference between two of the three runs (on features and on two rotations), in
            standard errors; the largest of the three pairs. Infinite if the difference is the same at every seed.
    """

    disagreement: float
    noise_ratio: float = np.nan
    noise_error: float = np.nan
    bias: float = np.nan

    @property
    def is_exact(self) -> bool:
        """Whether runs on features and on rotated features give the same functions up to rounding."""
        return self.disagreement <= SAME

    @property
    def is_refuted(self) -> bool:
        """Whether the functions on features and on rotated features have different distributions over seeds."""
        if self.is_exact:
            return False
        return not (self.bias <= Z and abs(self.noise_ratio - 1) <= Z * self.noise_error)

    @property
    def reason(self) -> str:
        """Why the kernel does not determine the run; empty if it does."""
        if self.is_exact:
            return ""
        if not np.isfinite(self.disagreement):
            return "the run diverges on the features of the kernel"
        unlike = f"runs on rotated features differ by {self.disagreement:.2g} times the distance that training moves"
        if not self.bias <= Z:
            mean = f"on average over seeds by {self.bias:.1f} standard errors"
            by = mean if np.isfinite(self.bias) else "at every seed"
            return f"{unlike}, {by}"
        if self.is_refuted or not self.noise_error <= SHARPEST:
            scatter = (
                f"{self.noise_ratio:.2g} (standard error {self.noise_error:.1g}) times the variance of two rotations"
            )
            return f"{unlike}, and over seeds they have {scatter}"
        return ""


def rotation_test(
    paths: FeaturePaths,
    features: KernelFeatures,
    f0: Float[np.ndarray, "K points C"],
    seed: int,
) -> RotationTest:
    """Measures whether an algorithm's runs on a kernel's features depend on the basis of the features.

    The run is repeated on two random rotations of the features. If the functions differ by more than rounding, their
    distributions are compared over up to 128 further seeds: the differences between features and a rotation must have
    mean zero, and the same variance as the differences between the two rotations.

    Args:
        paths: Function that trains on features.
        features: Features of the kernel.
        f0: Initial functions of the K models.
        seed: Seed of the run.
    """
    bases = [features, *(features.rotated(rotation) for rotation in ROTATIONS)]
    plain, *turned = (paths(basis, f0, seed) for basis in bases)
    moved = float(np.max(np.abs(plain - plain[0])))
    with np.errstate(invalid="ignore"):  # of a run that diverges
        disagreement = max(float(np.max(np.abs(functions - plain))) for functions in turned) / max(moved, 1e-300)
    if disagreement <= SAME or not np.isfinite(disagreement):
        return RotationTest(disagreement)
    last: list[list[np.ndarray]] = []
    measured = RotationTest(disagreement)
    for count in COUNTS:
        last += [[paths(basis, f0, seed + 1 + i)[-1] for basis in bases] for i in range(len(last), count)]
        measured = _compared(disagreement, np.asarray(last))
        if measured.is_refuted:
            break
    return measured


def _compared(disagreement: float, last: Float[np.ndarray, "seeds 3 K points C"]) -> RotationTest:
    """Compares functions at the end of runs on features and on two rotations of them, over seeds.

    ``last`` has the functions of the three runs at each seed. ``disagreement`` is copied into the result.
    """
    seeds, (plain, first, second) = len(last), last.swapaxes(0, 1)
    between = [first - plain, second - plain, second - first]
    errors = [d.std(axis=0, ddof=1) / np.sqrt(seeds) for d in between]
    size = np.max(np.abs(between))
    if np.max(errors) <= SAME * size:  # the algorithm draws no random numbers
        return RotationTest(disagreement, bias=np.inf)
    # the root mean square over points and outputs, which is near 1 for differences of mean zero
    shifts = [d.mean(axis=0) / np.maximum(e, SAME * size) for d, e in zip(between, errors, strict=True)]
    bias = max(float(np.sqrt(np.mean(np.square(shift)))) for shift in shifts)
    squares = np.array([np.mean(np.square(d), axis=(1, 2, 3)) for d in between])  # [3, seeds]
    without = (squares.sum(axis=1, keepdims=True) - squares) / (seeds - 1)
    ratios = (without[0] + without[1]) / (2 * without[2])
    error = np.sqrt((seeds - 1) * np.var(ratios))
    ratio = (squares[0].mean() + squares[1].mean()) / (2 * squares[2].mean())
    return RotationTest(disagreement, float(ratio), float(error), bias)
