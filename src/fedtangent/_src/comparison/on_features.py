"""A run without a closed form, compared with the same run on the features of its network's analytic kernel.

``compare`` uses it for an algorithm without a rule, such as a user's recipe, if ``rotations`` measures that the kernel
determines its runs. Networks of several widths are compared with the linear model of the kernel's features, trained by
the same algorithm from the same initial functions.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Float

from fedtangent._src.comparison.all_verdicts import verdicts_from_starts
from fedtangent._src.comparison.followed import NotFollowed
from fedtangent._src.comparison.outcomes import BesidePrediction, gap_of
from fedtangent._src.comparison.predicted import Outputs, Starts, prior_starts, starts_of
from fedtangent._src.comparison.rotations import FeaturePaths, RotationTest, feature_paths, rotation_test
from fedtangent._src.comparison.settings import Report, Setting
from fedtangent._src.comparison.simulated import Simulated, network_training, train
from fedtangent._src.comparison.statistics import relative_errors
from fedtangent._src.comparison.verdicts import EXACT, Verdict, exact_verdict, summary
from fedtangent._src.data import partition
from fedtangent._src.kernels.features import KernelFeatures, kernel_features
from fedtangent._src.progress import Steps
from fedtangent._src.types import Partition

WRONG_KERNELS = (0.75, 0.5, 0.25)  # factors of the kernel, as wrong as these factors of the rate


@dataclasses.dataclass(frozen=True, eq=False)
class OnFeatures(BesidePrediction):
    """Networks of several widths, and the same runs on the features of their analytic kernel.

    It has the fields ``setting``, ``simulated``, ``gaps`` and ``times``, and the properties ``curve``, ``rows``,
    ``history`` and ``seconds``, of ``BesidePrediction``.

    Attributes:
        rotations: The measurement that the kernel determines the algorithm's runs.
        verdicts: Comparisons with their negative controls; none if the algorithm draws random numbers besides
            minibatches and cohorts, which networks and features do not share.
    """

    method = "kernel's features"
    rotations: RotationTest

    def __repr__(self) -> str:
        """Returns the title, the prediction, the distance at each width, and the outcome, in one line."""
        widths = [networks.width for networks in self.simulated]
        ends = [float(gap.error[-1].mean()) for gap in self.gaps]
        distances = ", ".join(f"{end:.3g} at width {width}" for width, end in zip(widths, ends, strict=True))
        apart = f"networks end away from it, relative to how far it moved, by {distances}"
        outcome = [summary(self.verdicts)] if self.verdicts else []
        return f"OnFeatures({self.setting.title}; {'; '.join([self.notes[0], apart, *self.notes[1:], *outcome])})"

    @property
    def noise(self) -> str:
        """Why single networks are not compared with the features; empty if the same seed gives both the same run."""
        if self.rotations.is_exact:
            return ""
        return "the algorithm's random numbers differ between networks and features, which agree in law"

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks below the table: the reason why there is no closed form, and limits of the comparison."""
        first, last = (float(self.gaps[-1].simulated[at]) for at in (0, -1))
        little = self.setting.problem.little_learned(first, last)
        noise = self.noise and f"no verdict: {self.noise}"
        return tuple(filter(None, [f"prediction: {how_on_features(self.setting)}", noise, little]))


def compare_on_features(setting: Setting, progress: bool | None = False, say: Report = lambda line: None) -> OnFeatures:
    """Trains networks, and linear models on their kernel's features from the same initial functions; compares both.

    Args:
        setting: The run, with widths, draws and evaluated rounds.
        progress: Whether to show progress.
        say: Called with a line of text for each step of the work.

    Raises:
        NotFollowed: The kernel does not determine the algorithm's runs; the message says by how much they differ.
    """
    problem, rounds = setting.problem, setting.size.rounds
    steps = Steps(say, setting.name, "kernel and its features")
    with jax.default_matmul_precision("highest"):
        blocks = setting.blocks(progress)
        features = kernel_features(blocks, problem.y_train.shape[1])
        paths = feature_paths(setting.algorithm, problem.y_train, problem.partition, rounds)
        f0 = features.spanned(np.concatenate(prior_starts(setting, blocks, 1), axis=2)[0])
        steps("whether the kernel determines the run, on rotated features")
        rotations = checked_rotations(setting, paths, features, f0)
        networks = tuple(train([network_training(setting, width) for width in setting.size.widths], progress, steps))
        steps("the kernel's features, from the initial functions of the networks")
        predicted = [feature_outputs(paths, features, setting, starts_of(of_width)) for of_width in networks]
        steps("verdicts on networks")
        verdicts = feature_verdicts(setting, paths, features, networks, predicted) if rotations.is_exact else []
    pairs = zip(networks, predicted, strict=True)
    gaps = tuple(gap_of(problem, of_width, *outputs) for of_width, outputs in pairs)
    return OnFeatures(setting, networks, gaps, tuple(verdicts), steps.stop(), rotations)


def how_on_features(setting: Setting) -> str:
    """Returns the name of the prediction by the kernel's features, with the reason why it is not the flow."""
    return f"the kernel's features, trained by the same algorithm, since {setting.rule}"


def checked_rotations(
    setting: Setting, paths: FeaturePaths, features: KernelFeatures, f0: Float[np.ndarray, "K points C"]
) -> RotationTest:
    """Measures whether the kernel determines the algorithm's runs, by runs on rotated features.

    Args:
        setting: The run.
        paths: Function that trains on features.
        features: Features of the kernel.
        f0: Initial functions of the K models.

    Raises:
        NotFollowed: The kernel does not determine the runs; the message says by how much they differ.
    """
    try:
        rotations = rotation_test(paths, features, f0, setting.seed)
    except ValueError as error:
        raise NotFollowed(f"{setting.rule}; nor can it be run on the kernel's features: {error}") from error
    if rotations.reason:
        raise NotFollowed(f"{setting.rule}; nor does the kernel determine its runs: {rotations.reason}")
    return rotations


def feature_outputs(
    paths: FeaturePaths, features: KernelFeatures, setting: Setting, starts: Starts, rate_factor: float | None = None
) -> Outputs:
    """Computes the outputs of runs on features at the evaluated rounds, from each initial function.

    Args:
        paths: Function that trains on features.
        features: Features of the kernel.
        setting: The run.
        starts: E initial functions of each of the K models.
        rate_factor: Number by which the clients' learning rate is multiplied; None: the same rate.
    """
    draws, n = np.concatenate(starts, axis=2), starts.train.shape[2]
    runs = np.stack([paths(features, f0, setting.seed, rate_factor) for f0 in draws], axis=2)
    return Outputs(runs[..., :n, :], runs[..., n:, :])


def feature_verdicts(
    setting: Setting,
    paths: FeaturePaths,
    features: KernelFeatures,
    networks: tuple[Simulated, ...],
    predicted: list[Outputs],
) -> list[Verdict]:
    """Checks that networks approach the prediction with growing width; a linear model must equal the prediction.

    The controls are wrong kernels and a missing client.

    Args:
        setting: The run.
        paths: Function that trains on features.
        features: Features of the kernel.
        networks: Outputs of the networks of each width.
        predicted: Outputs of the features from the initial functions of the networks of each width.
    """
    problem = setting.problem
    fewer = feature_paths(setting.algorithm, problem.y_train, _without_largest(problem.partition), setting.size.rounds)
    wrong = {f"kernel x {factor:g}": (paths, scaled(features, factor)) for factor in WRONG_KERNELS}
    wrong["the largest client missing"] = fewer, features
    others = {
        name: [feature_outputs(*mistaken, setting, starts_of(of_width)).test[1:] for of_width in networks]
        for name, mistaken in wrong.items()
    }
    right = [outputs.test[1:] for outputs in predicted]
    if setting.is_linear:
        (linear,) = networks
        error, *wrongs = (
            float(np.max(relative_errors(outputs[0], linear.test[1:], outputs[0] - linear.test[0])))
            for outputs in (right, *others.values())
        )
        statement = "simulation = the kernel's features, linear model, every round"
        return [exact_verdict(setting.name, statement, error, dict(zip(others, wrongs, strict=True)), EXACT)]
    return verdicts_from_starts(setting, networks, right, others, "the kernel's features")


def _without_largest(clients: Partition) -> Partition:
    """Returns the partition in which the client with the most examples has none."""
    largest = int(np.argmax(clients.sizes))
    return partition.of([clients.client(i) if i != largest else [] for i in range(clients.num_clients)])


def scaled(features: KernelFeatures, factor: float) -> KernelFeatures:
    """Returns the features of a multiple of the kernel.

    Args:
        features: Features of the kernel.
        factor: Number by which the kernel is multiplied.
    """
    root = np.sqrt(factor)
    return dataclasses.replace(
        features,
        train=features.train * root,
        test=features.test * root,
        left_inverse=features.left_inverse / root,
    )
