"""Checks of DP-FedAvg in the kernel regime: the distribution of its noise, its clipping, and the error for networks.

"private.law" trains a linear model many times with different noise. Standardised by the predicted mean and covariance,
its outputs must have mean square 1. "private.clipping" clips without noise, where theory is exact, and compares the
expected error of clipped and noisy runs. "private.networks" trains networks with noise and with twice that noise, from
the same draws. The two changes of the outputs give the part that is linear in the noise and the part that is quadratic,
which no linear model has. Quadratic over linear part must be proportional to the noise, and the same at every width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Float64

import fedtangent as ft
from fedtangent._src.comparison.statistics import LEVEL, log_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.data.partition.given import consecutive
from fedtangent._src.intervals import Interval, half_width
from fedtangent._src.kernels.gram import KernelBlocks, known_modes
from fedtangent._src.theory.flow.build import federated_flow
from fedtangent._src.theory.flow.private import PrivateFlow, private_flow
from fedtangent._src.types import Algorithm, Array, Model, PyTree

SUBJECT = "private rounds (DP-FedAvg)"
SIZES, INPUTS, OUTPUTS, TEST = (4, 9, 3, 6, 5), 4, 2, 5  # examples of each client, numbers of an example, test points
STEPS, RATE, ROUNDS = 3, 0.15, 12
LOOSE, TIGHT = 10.0, 0.25  # clipping bounds: above every update, and below most
QUIET, LOUD = 0.02, 5.0  # noise multipliers at these bounds: of comparable noise
BAND = (0.7, 1.4)  # of a ratio
EXPECTED, NOTICES = f"1, {BAND[0]:g} to {BAND[1]:g}", f"a ratio off by more than {BAND[1] - 1:.0%}"
NOISES, WIDTHS = (
    (0.0025, 0.005, 0.01, 0.02),
    (64, 256, 1024),
)  # standard deviations in every weight, each twice the last
SLOPE_BAND, FLAT_BAND = (0.85, 1.15), (-0.15, 0.15)


class PrivateProblem(NamedTuple):
    """Inputs x and targets y of a regression: the training points of all clients, client by client, then test points.

    All clients take part in every round.
    """

    x: Float64[np.ndarray, "n d"]  # training points, then test points
    y: Float64[np.ndarray, "n C"]

    @classmethod
    def drawn(cls, seed: int) -> PrivateProblem:
        """Draws inputs and targets from ``seed``."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(sum(SIZES) + TEST, INPUTS))
        return cls(x, np.sin(x @ rng.normal(size=(INPUTS, OUTPUTS))))

    @property
    def targets(self) -> Float64[np.ndarray, "m C"]:
        """Targets at the test points."""
        return self.y[sum(SIZES) :]

    def theory(self, clip_norm: float, noise: float) -> PrivateFlow:
        """Returns the prediction of DP-FedAvg for a linear model that starts at zero.

        Args:
            clip_norm: Clipping bound.
            noise: Noise multiplier.
        """
        kernel, n, clients = self.x @ self.x.T, sum(SIZES), consecutive(SIZES)
        blocks = KernelBlocks(kernel[:n, :n], kernel[n:, :n], ntk_test=kernel[n:, n:])
        cohorts = ft.schedules.drawn_cohorts(_everyone(), clients, ROUNDS)
        flow = federated_flow(blocks, self.y[:n], clients, cohorts, ft.theory.Rule(STEPS, RATE))
        return private_flow(flow, clip_norm, noise)

    def simulated(
        self, model: Model, clip_norm: float, noises: Sequence[float], seeds: Sequence[int]
    ) -> Float64[np.ndarray, "noises seeds m C"]:
        """Trains a model by DP-FedAvg at several noise multipliers; returns its outputs at the test points at the end.

        Args:
            model: The model.
            clip_norm: Clipping bound.
            noises: Noise multipliers.
            seeds: Seeds of the runs.
        """
        n, work = sum(SIZES), ft.Work(steps=STEPS, batch_size=None)
        data = ft.data.federated_data(self.x[:n], self.y[:n], consecutive(SIZES), dtype=jnp.float64)
        x_test = jnp.asarray(self.x[n:])

        def build(noise: Any) -> Algorithm:
            return ft.dp_fed_avg(model, _everyone(), RATE, work, ft.ClientPrivacy(clip_norm, noise))

        def outputs(algorithm: Algorithm, state: PyTree) -> dict[str, Array]:
            return {"outputs": algorithm.predict(state, x_test).mean}

        run = ft.sweep(
            build,
            data,
            num_rounds=ROUNDS,
            seeds=seeds,
            grid={"noise": list(noises)},
            evaluation=ft.Evaluation(ROUNDS, outputs),
            devices=ft.Devices("vmap", "vmap"),
        )
        return np.asarray(np.moveaxis(run.metrics["outputs"][:, :, -1], 0, 1))


def _everyone() -> ft.types.Schedule:
    return ft.schedules.all_clients(len(SIZES))


def _from_zero() -> Model:
    """Returns a linear model whose weights start at zero."""
    model = ft.models.linear(INPUTS, OUTPUTS, sigma=1.0, dtype=jnp.float64)
    return _starting_at(model, jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0))))


def _starting_at(model: Model, start: PyTree) -> Model:
    return model._replace(init=lambda key: start)


def _seeds(scale: str, seed: int, runs: int = 100) -> list[int]:
    runs = of_scale(scale, runs, 10 * runs)
    return [(seed * runs + i) % 2**32 for i in range(runs)]


def _standardised(
    outputs: Float64[np.ndarray, "E m C"], mean: Float64[np.ndarray, "m C"], cov: Float64[np.ndarray, "m m"]
) -> Interval:
    """Estimates the mean square of the outputs of E runs at m points, standardised by a predicted mean and covariance.

    The mean square is 1 if the prediction is right. Directions in which the predicted variance is 0 are left out.
    """
    values, vectors = known_modes(cov)
    is_possible = values > 0
    z = np.einsum("emc,mk->ekc", outputs - mean, vectors[:, is_possible] / np.sqrt(values[is_possible]))
    low, high = scipy.stats.chi2.ppf((LEVEL / 2, 1 - LEVEL / 2), z.size)
    square = float(np.sum(z**2))
    return Interval(square / z.size, square / high, square / low)


def _check_law(scale: str, seed: int) -> list[Verdict]:
    """Checks the predicted mean and covariance of outputs after the last round of DP-FedAvg, if no update is clipped.

    Runs differ in the server's noise only. The control is a covariance that adds up the noise of all rounds, as if no
    round trained on the noise of earlier ones.
    """
    of, seeds = PrivateProblem.drawn(seed), _seeds(scale, seed)
    theory = of.theory(LOOSE, QUIET)
    law, (outputs,) = theory.law(), of.simulated(_from_zero(), LOOSE, [QUIET], seeds)
    x_test = of.x[sum(SIZES) :]
    without_training = (
        ROUNDS * theory.deviation**2 * (x_test @ x_test.T)
    )  # as if no round trained on the noise of earlier ones
    right, wrong = (
        _standardised(outputs, np.asarray(law.mean), np.asarray(cov)) for cov in (law.cov, without_training)
    )
    claim = Claim(SUBJECT, "mean square of runs in units of the predicted law", f"{len(seeds)} runs, {ROUNDS} rounds")
    return [claim.between(right, ("no noise is trained away", wrong), BAND, EXPECTED, NOTICES)]


def _check_clipping(scale: str, seed: int) -> list[Verdict]:
    """Checks predictions of DP-FedAvg whose updates are clipped, in two verdicts.

    Without noise, the outputs must equal the predicted ones up to rounding. With noise, the expected squared error must
    be near the predicted one.
    """
    of, seeds = PrivateProblem.drawn(seed), _seeds(scale, seed, 300)  # errors scatter more than outputs
    theory, sizes = of.theory(TIGHT, LOUD), f"{len(seeds)} runs, {ROUNDS} rounds"
    quiet, loose = (np.asarray(of.theory(clip, 0.0).runs(1).test) for clip in (TIGHT, LOOSE))
    trained, noisy = of.simulated(_from_zero(), TIGHT, [0.0, LOUD], seeds)

    def away(predicted: np.ndarray) -> float:
        return float(np.linalg.norm(trained[:1] - predicted) / np.linalg.norm(trained[:1]))

    of_theory = theory.runs(10 * len(seeds), seed=seed + 1).test
    errors, predicted, wrong = (np.mean((f - of.targets) ** 2, axis=(1, 2)) for f in (noisy, of_theory, quiet))
    radius = np.hypot(half_width(errors, 1 - LEVEL), half_width(predicted, 1 - LEVEL))
    over = [Interval.about(float(errors.mean() / p.mean()), float(radius / p.mean())) for p in (predicted, wrong)]
    statement = "expected squared error of clipped and noisy runs, over the predicted one"
    return [
        Claim(SUBJECT, "clipped runs without noise, outputs", sizes).exact(away(quiet), {"not clipped": away(loose)}),
        Claim(SUBJECT, statement, sizes).between(over[0], ("without noise", over[1]), BAND, EXPECTED, NOTICES),
    ]


def _check_networks(scale: str, seed: int) -> list[Verdict]:
    """Checks how DP-FedAvg's noise changes a network's outputs: the quadratic part of the change over the linear part.

    This ratio must be proportional to the noise, and the same at every width. So there are two verdicts: on the slope
    of its logarithm in the noise, which is 1, and on the slope in the width, which is 0.
    """
    of, seeds = PrivateProblem.drawn(seed), _seeds(scale, seed)[: of_scale(scale, 16, 64)]
    multipliers = [noise * len(SIZES) / LOOSE for noise in (*NOISES, 2 * NOISES[-1])]
    beyond, linear = np.zeros((2, len(WIDTHS), len(NOISES), len(seeds)))
    trained = []  # how far training alone takes each network from its linearisation
    for i, width in enumerate(WIDTHS):
        network = ft.models.mlp(INPUTS, OUTPUTS, (width,), "erf", dtype=jnp.float64)
        start = network.init(jax.random.key(seed))
        fixed = _starting_at(network, start)
        quiet, *noisy = of.simulated(fixed, LOOSE, [0.0, *multipliers], seeds)
        moved = np.stack(noisy) - quiet
        quadratic = moved[1:] / 2 - moved[:-1]  # of a s + b s^2 at s and 2 s: b s^2
        linear[i] = np.linalg.norm(moved[:-1] - quadratic, axis=(2, 3))
        size = np.sqrt(np.mean(linear[i] ** 2, axis=1, keepdims=True))
        beyond[i] = np.linalg.norm(quadratic, axis=(2, 3)) / size
        (flat,) = of.simulated(ft.models.linearised(fixed, start), LOOSE, [0.0], seeds[:1])
        trained.append(float(np.linalg.norm(quiet[0] - flat[0])))

    def by_noise(share: np.ndarray) -> Interval:
        return _mean_of(np.mean([[log_slope(NOISES, run) for run in of_width.T] for of_width in share], axis=0))

    by_width = _mean_of(np.array([log_slope(WIDTHS, run) for of_noise in beyond.swapaxes(0, 1) for run in of_noise.T]))
    slope_by_training, means = log_slope(WIDTHS, trained), beyond.mean(axis=2)
    sizes = f"widths {WIDTHS[0]} to {WIDTHS[-1]}, {len(seeds)} runs"
    statement, notices = (
        "quadratic part of what noise does to a network, over the linear part: slope",
        "another power; ",
    )
    notices += f"the part is {means.min():.2g} to {means.max():.2g}"
    part = "linear part over the noise", by_noise(linear / np.array(NOISES)[:, None])
    gap = (
        "distance by training from the linearisation",
        Interval(slope_by_training, slope_by_training, slope_by_training),
    )
    expected = [f"{target}, {low:g} to {high:g}" for target, (low, high) in ((1, SLOPE_BAND), (0, FLAT_BAND))]
    return [
        Claim(SUBJECT, f"{statement} in the noise", sizes).between(
            by_noise(beyond), part, SLOPE_BAND, expected[0], notices
        ),
        Claim(SUBJECT, f"{statement} in the width", sizes).between(by_width, gap, FLAT_BAND, expected[1], notices),
    ]


def _mean_of(values: np.ndarray) -> Interval:
    return Interval.about(float(values.mean()), float(half_width(values)))


ENTRIES = (
    TheoremEntry(
        "private.law",
        "DP-FedAvg on a linear model: mean and covariance of runs that are not clipped",
        _check_law,
        papers=("mcmahan2018",),
        statement="algorithm 1",
        functions=(private_flow,),
        is_quick=True,
    ),
    TheoremEntry(
        "private.clipping",
        "DP-FedAvg on a linear model: clipped runs, and the expected error of clipped and noisy ones",
        _check_clipping,
        papers=("mcmahan2018",),
        statement="algorithm 1",
        functions=(private_flow,),
        figures=("privacy.utility",),
    ),
    TheoremEntry(
        "private.networks",
        "DP-FedAvg on networks: the part that no linear model follows grows as the noise, at every width",
        _check_networks,
        papers=("mcmahan2018",),
        statement="algorithm 1",
        functions=(private_flow,),
    ),
)
