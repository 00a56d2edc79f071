"""Networks of growing width: the kernel's drift (FE-2021 Theorem 9.1) and the gap to linear training (section 9.4)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from fedtangent.compare.network_gap import NetworkGap, network_gap
from fedtangent.compare.settings import Setting, step_size
from fedtangent.compare.statistics import fitted_slope
from fedtangent.compare.theorems import TheoremCheck
from fedtangent.federated import schedule
from fedtangent.models.dense import mlp
from fedtangent.theory.fed_ensemble.convergence import gap_from_drift
from fedtangent.types import Model, Partition

STANDARD_ERRORS = 3
SIZES = (2, 3, 4, 5, 4, 6)


def circle(widths: tuple[int, ...], draws: int, seed: int) -> Setting:
    """A small regression problem on the unit circle, 24 points on 6 clients, K = 3, erf networks."""
    rng = np.random.default_rng(seed)
    angle = np.sort(rng.uniform(0, 2 * np.pi, sum(SIZES)))
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    y = (np.sin(2 * angle) + 0.5 * np.cos(3 * angle))[:, None]
    offsets = np.cumsum((0, *SIZES)).astype(np.int32)

    def model(width: int) -> Model:
        return mlp(2, 1, widths=(width,), activation="erf", w_std=1.5, b_std=0.3, dtype=jnp.float64)

    setting = Setting(
        name="circle",
        title="points on a circle",
        x_train=x,
        y_train=y,
        x_test=x[:1],
        y_test=y[:1],
        labels_test=None,
        partition=Partition(np.arange(sum(SIZES), dtype=np.int32), offsets),
        schedule=schedule.per_client_permutations(len(SIZES), 3),
        model=model,
        widths=widths,
        draws=draws,
        exact_draws=0,
        local_steps=5,
        num_rounds=12,
        evaluate_every=12,
        seed=seed,
    )
    return dataclasses.replace(setting, learning_rate=step_size(setting))


def width_checks(scale: str, seed: int) -> list[TheoremCheck]:
    """Slopes in the width, and the first-order bound of the gap from the measured drift."""
    widths, draws = ((64, 256, 1024), 4) if scale == "default" else ((64, 128, 256, 512, 1024, 2048), 16)
    setting = circle(widths, draws, seed)
    gaps = [network_gap(setting, width) for width in widths]
    where = (
        f"n = {sum(SIZES)}, {len(SIZES)} clients, K = 3, widths {widths[0]} .. {widths[-1]}, {3 * draws} networks each"
    )
    return [
        _falls(
            "FE-2021 Theorem 9.1",
            "operator norm of Theta_t - Theta: slope in the width",
            where,
            widths,
            gaps,
            "distance",
        ),
        _falls(
            "FE-2021 section 9.3",
            "operator norm of Theta_t - Theta_0: slope in the width",
            where,
            widths,
            gaps,
            "drift",
        ),
        _falls(
            "FE-2021 section 9.4", "||g - g_lin||, own linearisation: slope in the width", where, widths, gaps, "gap"
        ),
        _from_drift(setting, where, gaps),
    ]


def _falls(
    theorem: str, statement: str, where: str, widths: tuple[int, ...], gaps: list[NetworkGap], name: str
) -> TheoremCheck:
    """O(l^-1/2): the fitted slope is -1/2 or steeper, within 3 standard errors; the outputs' own change is not."""
    fit = fitted_slope(np.array(widths), [getattr(g, name) for g in gaps])
    other = fitted_slope(np.array(widths), [g.change for g in gaps])
    return TheoremCheck(
        theorem,
        statement,
        where,
        f"{fit.slope:.3f} +- {fit.standard_error:.3f}",
        "-1/2 or steeper: O(l^-1/2)",
        fit.slope - STANDARD_ERRORS * fit.standard_error <= -0.5,
        f"initial function for the linearised one: {other.slope:.3f} +- {other.standard_error:.3f}",
        other.slope - STANDARD_ERRORS * other.standard_error > -0.5,
    )


def _from_drift(setting: Setting, where: str, gaps: list[NetworkGap]) -> TheoremCheck:
    """The gap of every network against the first-order bound from its own kernel's drift."""
    ages = setting.num_rounds // setting.schedule.num_models
    progress = ages * setting.local_steps * setting.learning_rate
    nbar = len(setting.x_train) / setting.schedule.num_models
    ratios, wrong = [], []
    for g in gaps:
        fields = (g.gap, g.drift, g.initial_residual, g.smallest_eigenvalue, g.largest_eigenvalue)
        for gap, drift, r0, low, high in zip(*(a.ravel().tolist() for a in fields), strict=True):
            ratios.append(gap / float(gap_from_drift(progress, drift, r0, max(low, 0.0), nbar)))
            wrong.append(gap / float(gap_from_drift(progress, drift, r0, high, nbar)))
    return TheoremCheck(
        "FE-2021 section 9.4",
        "||g - g_lin|| / R_0 drift t e^(-lambda t), t = eta_0 tau ages / nbar: largest over networks",
        where,
        f"{max(ratios):.3g}",
        "<= 1 (first order)",
        max(ratios) <= 1,
        f"lambda_max for lambda: {max(wrong):.3g}",
        max(wrong) > 1,
    )
