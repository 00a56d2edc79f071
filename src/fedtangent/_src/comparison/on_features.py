"""A run without a closed form compared with the same run on the features of its network's analytic kernel (rung 2).

``compare`` comes here for an algorithm without a rule, or with a recipe of the user's own, if the measurement of
``rotations`` says that the kernel determines its runs. Networks of several widths are compared with the linear model of
the kernel's features, which is trained by the same algorithm from the same initial functions.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fedtangent._src.comparison.all_verdicts import verdicts_from_starts
from fedtangent._src.comparison.predicted import prior_starts
from fedtangent._src.comparison.rotations import FeaturePaths, RotationTest, feature_paths, rotation_test
from fedtangent._src.comparison.settings import Setting
from fedtangent._src.comparison.simulated import Simulated, history_beside, trained_networks
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.comparison.verdicts import Verdict, summary
from fedtangent._src.data import partition
from fedtangent._src.engine.history import History, html_of
from fedtangent._src.kernels.features import KernelFeatures, kernel_features
from fedtangent._src.types import Partition

WRONG_KERNELS = (0.75, 0.5, 0.25)  # factors of the kernel, as wrong as these factors of the rate


class OnFeatures(NamedTuple):
    """Networks of several widths, and the same runs on the features of their analytic kernel.

    Attributes:
        setting: Data, clients and algorithm.
        simulated: Outputs of the networks of each width.
        train: Predicted outputs at the training examples for each width, [r, K, E, n, C].
        test: Predicted outputs at the test examples for each width, [r, K, E, m, C].
        why: Why there is no closed form.
        rotations: The measurement that the kernel determines the algorithm's runs.
        verdicts: Comparisons with their negative controls; none if the algorithm draws random numbers besides
            minibatches and cohorts, which networks and features do not share.
        seconds: Time of the comparison.
    """

    setting: Setting
    simulated: tuple[Simulated, ...]
    train: tuple[Float[np.ndarray, "r K E n C"], ...]
    test: tuple[Float[np.ndarray, "r K E m C"], ...]
    why: str
    rotations: RotationTest
    verdicts: tuple[Verdict, ...]
    seconds: float

    def __repr__(self) -> str:
        """Returns the title, the prediction, the distance at each width, and the outcome, in one line."""
        widths = [networks.width for networks in self.simulated]
        gaps = ", ".join(f"{gap:.3g} at width {width}" for width, gap in zip(widths, self.gaps, strict=True))
        parts = [f"prediction: the kernel's features, trained by the same algorithm, since {self.why}"]
        parts.append(f"networks end away from it, relative to how far it moved, by {gaps}")
        first, *_, last = self.setting.problem.left(self.simulated[-1].train)
        parts += filter(None, [self.setting.problem.little_learned(float(first), float(last))])
        outcome = summary(self.verdicts) if self.verdicts else f"no verdict: {self.noise}"
        return f"OnFeatures({self.setting.title}; {'; '.join([*parts, outcome])})"

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def noise(self) -> str:
        """Why single networks are not compared; empty for an algorithm whose runs the kernel determines."""
        if self.rotations.is_exact:
            return ""
        return "the algorithm's random numbers differ between networks and features, which agree in law"

    @property
    def gaps(self) -> tuple[float, ...]:
        """The mean distance of networks from the prediction after the last round, for each width.

        It is measured at the test examples, relative to how far training moves the prediction.
        """
        pairs = zip(self.simulated, self.test, strict=True)
        return tuple(
            float(relative_errors(outputs[-1], networks.test[-1], outputs[-1] - networks.test[0]).mean())
            for networks, outputs in pairs
        )

    @property
    def history(self) -> History:
        """The metrics of the widest networks. Its ``predicted`` has the metrics of the features."""
        return history_beside(self.setting.problem, self.simulated[-1], self.train[-1], self.test[-1])


def compare_on_features(setting: Setting, why: str, progress: bool | None = False) -> OnFeatures:
    """Trains networks and the features of their kernel from the same initial functions, and compares them.

    Args:
        setting: The run, with widths, draws and evaluated rounds.
        why: Why there is no closed form.
        progress: Whether to show progress.

    Raises:
        ValueError: The kernel does not determine the algorithm's runs; the message says by how much they differ.
    """
    begun, problem, rounds = time.perf_counter(), setting.problem, setting.size.rounds
    with jax.default_matmul_precision("highest"):
        blocks = setting.blocks(progress)
        features = kernel_features(blocks, problem.y_train.shape[1])
        paths = feature_paths(setting.algorithm, problem.y_train, problem.partition, rounds)
        f0 = np.concatenate(prior_starts(setting, blocks, 1), axis=2)[0]
        rotations = rotation_test(paths, features, f0, setting.seed)
        if rotations.reason:
            raise ValueError(
                f"algorithm: got {setting.algorithm.name!r}, which theory does not follow: {why}; nor does the kernel "
                f"determine it: {rotations.reason}. Give start=.. to compare it with its linearisation there"
            )
        networks = tuple(trained_networks(setting, width, progress) for width in setting.size.widths)
        predicted = [_from_networks(paths, features, setting, of_width) for of_width in networks]
        verdicts = _verdicts(setting, paths, features, networks, predicted) if rotations.is_exact else []
    n = len(problem.x_train)
    train, test = (tuple(p[..., part, :] for p in predicted) for part in (slice(n), slice(n, None)))
    return OnFeatures(setting, networks, train, test, why, rotations, tuple(verdicts), time.perf_counter() - begun)


def _from_networks(
    paths: FeaturePaths, features: KernelFeatures, setting: Setting, networks: Simulated
) -> Float[np.ndarray, "r K E points C"]:
    """Returns the outputs of runs on features from the networks' initial functions, at all points."""
    starts = np.concatenate([networks.train[0], networks.test[0]], axis=-2)  # [K, E, points, C]
    return np.stack([paths(features, f0, setting.seed) for f0 in starts.swapaxes(0, 1)], axis=2)


def _verdicts(
    setting: Setting,
    paths: FeaturePaths,
    features: KernelFeatures,
    networks: tuple[Simulated, ...],
    predicted: list[Float[np.ndarray, "r K E points C"]],
) -> list[Verdict]:
    """Checks that networks approach the prediction with growing width; controls: wrong kernels and a missing client."""
    problem, n = setting.problem, len(setting.problem.x_train)
    fewer = feature_paths(setting.algorithm, problem.y_train, _without_largest(problem.partition), setting.size.rounds)
    wrong = {f"kernel x {factor:g}": (paths, _scaled(features, factor)) for factor in WRONG_KERNELS}
    wrong["the largest client missing"] = fewer, features
    others = {
        name: [_from_networks(*mistaken, setting, of_width)[1:, ..., n:, :] for of_width in networks]
        for name, mistaken in wrong.items()
    }
    right = [outputs[1:, ..., n:, :] for outputs in predicted]
    return verdicts_from_starts(setting, networks, right, others, "the kernel's features")


def _without_largest(clients: Partition) -> Partition:
    """Returns the partition in which the client with the most examples has none."""
    largest = int(np.argmax(clients.sizes))
    return partition.of([clients.client(i) if i != largest else [] for i in range(clients.num_clients)])


def _scaled(features: KernelFeatures, factor: float) -> KernelFeatures:
    """Returns the features of a multiple of the kernel."""
    root = np.sqrt(factor)
    return dataclasses.replace(
        features,
        train=features.train * root,
        test=features.test * root,
        left_inverse=features.left_inverse / root,
    )
