"""Networks of growing width: the kernel's drift and the gap to linear training (FE-2021 Theorem 9.1, 9.3 and 9.4).

Each network and its own linearisation start from the same weights and are trained by the same algorithm, data and
schedule, so that the only difference is the curvature of the network.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent.compare.exact import first_order
from fedtangent.compare.settings import Setting
from fedtangent.compare.simulated import init_key, recipe
from fedtangent.compare.statistics import fitted_slope
from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.verdicts import Verdict, bounded_verdict
from fedtangent.engine.run import predict, simulate
from fedtangent.federated import schedule
from fedtangent.kernels.empirical import empirical_ntk
from fedtangent.models.dense import mlp
from fedtangent.theory.fed_ensemble.convergence import gap_from_drift
from fedtangent.types import Array, Key, Model, Partition, PyTree

STANDARD_ERRORS = 3
SIZES = (2, 3, 4, 5, 4, 6)


class NetworkGap(NamedTuple):
    """What was measured at one width, after the last round, at the training points: [K, E] each, E draws.

    Norms of kernels are operator norms, of the mean over outputs.
    """

    width: int
    gap: np.ndarray  # ||f - f_lin||
    change: np.ndarray  # ||f - f_0||
    drift: np.ndarray  # ||Theta_t - Theta_0||
    distance: np.ndarray  # ||Theta_t - Theta||, Theta the limit
    smallest_eigenvalue: np.ndarray  # of Theta_0
    largest_eigenvalue: np.ndarray
    initial_residual: np.ndarray  # ||f_0 - Y||


def own_linearisation(model: Model) -> Model:
    """``model`` as a first-order polynomial in its weights about the weights it starts from, whatever those are."""

    def init(key: Key) -> PyTree:
        params = model.init(key)
        return {"start": params, "weights": params}

    def apply(params: PyTree, x: Array) -> Array:
        return first_order(model, jax.lax.stop_gradient(params["start"]), params["weights"], x)

    return Model(f"{model.name}, linearised where it starts", init, apply, None, model.output_size)


def network_gap(setting: Setting, width: int) -> NetworkGap:
    """Trains K networks of ``width``, and their linearisations, in each of the setting's draws."""
    model, x = setting.model(width), jnp.asarray(setting.x_train)
    network, tangent = (recipe(setting, m) for m in (model, own_linearisation(model)))
    assert network.params is not None
    kernels = jax.jit(jax.vmap(lambda params: empirical_ntk(model, params, x)))
    limit = np.asarray(setting.kernel(x, None, get="ntk"))
    draws = []
    for draw in range(setting.draws):
        key, held = init_key(setting, draw), setting.federated()
        first = network.init(setting.seed, setting.partition.num_clients, key)
        last, straight = (
            simulate(a, held, setting.num_rounds, setting.seed, "scan", init_key=key).state for a in (network, tangent)
        )
        states = (network, first), (network, last), (tangent, straight)
        start, end, linear = (np.asarray(predict(a, state, x).members) for a, state in states)
        before, after = (np.asarray(kernels(network.params(state))) for state in (first, last))
        spectrum = np.linalg.eigvalsh(before)
        measured = (
            np.linalg.norm(end - linear, axis=(1, 2)),
            np.linalg.norm(end - start, axis=(1, 2)),
            np.linalg.norm(after - before, 2, axis=(1, 2)),
            np.linalg.norm(after - limit, 2, axis=(1, 2)),
            spectrum[:, 0],
            spectrum[:, -1],
            np.linalg.norm(start - setting.y_train, axis=(1, 2)),
        )
        draws.append(measured)
    return NetworkGap(width, *(np.stack(values, axis=1) for values in zip(*draws, strict=True)))


def circle(widths: tuple[int, ...], draws: int, seed: int) -> Setting:
    """A small regression problem on the unit circle, 24 points on 6 clients, K = 3, erf networks."""
    rng = np.random.default_rng(seed)
    angle = np.sort(rng.uniform(0, 2 * np.pi, sum(SIZES)))
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    y = (np.sin(2 * angle) + 0.5 * np.cos(3 * angle))[:, None]
    offsets = np.cumsum((0, *SIZES)).astype(np.int32)

    def model(width: int) -> Model:
        return mlp(2, 1, widths=(width,), activation="erf", w_std=1.5, b_std=0.3, dtype=jnp.float64)

    return Setting(
        name="circle",
        title="points on a circle",
        x_train=x,
        y_train=y,
        x_test=x[:1],
        y_test=y[:1],
        partition=Partition(np.arange(sum(SIZES), dtype=np.int32), offsets),
        schedule=schedule.per_client_permutations(len(SIZES), 3),
        model=model,
        widths=widths,
        draws=draws,
        local_steps=5,
        num_rounds=12,
        seed=seed,
    )


def checks(scale: str, seed: int) -> list[Verdict]:
    """Slopes in the width, and the first-order bound of the gap from the measured drift."""
    widths, draws = of_scale(scale, ((64, 256, 1024), 4), ((64, 128, 256, 512, 1024, 2048), 16))
    setting = circle(widths, draws, seed)
    gaps = [network_gap(setting, width) for width in widths]
    where = (
        f"n = {sum(SIZES)}, {len(SIZES)} clients, K = 3, widths {widths[0]} .. {widths[-1]}, {3 * draws} networks each"
    )
    falling = {
        "distance": ("Theorem 9.1", "operator norm of Theta_t - Theta"),
        "drift": ("section 9.3", "operator norm of Theta_t - Theta_0"),
        "gap": ("section 9.4", "||g - g_lin||, own linearisation"),
    }
    return [*(_falls(name, *said, where, gaps) for name, said in falling.items()), _from_drift(setting, where, gaps)]


def _falls(name: str, theorem: str, statement: str, where: str, gaps: list[NetworkGap]) -> Verdict:
    """O(l^-1/2): the fitted slope is -1/2 or steeper, within 3 standard errors; the outputs' own change is not."""
    widths = np.array([g.width for g in gaps])
    fit, other = (fitted_slope(widths, [getattr(g, of) for g in gaps]) for of in (name, "change"))
    return Verdict.of(
        f"FE-2021 {theorem}",
        f"{statement}: slope in the width",
        where,
        (
            f"{fit.slope:.3f} +- {fit.standard_error:.3f}",
            "-1/2 or steeper: O(l^-1/2)",
            fit.slope - STANDARD_ERRORS * fit.standard_error <= -0.5,
        ),
        (
            "initial function for the linearised one",
            f"{other.slope:.3f} +- {other.standard_error:.3f}",
            other.slope - STANDARD_ERRORS * other.standard_error > -0.5,
        ),
    )


def _from_drift(setting: Setting, where: str, gaps: list[NetworkGap]) -> Verdict:
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
    said = "||g - g_lin|| / R_0 drift t e^(-lambda t), t = eta_0 tau ages / nbar: largest over networks"
    found = bounded_verdict("FE-2021 section 9.4", said, where, max(ratios), "lambda_max for lambda", max(wrong))
    return found._replace(expected="<= 1 (first order)")


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.linearisation_gap",
        "networks of growing width: drift of the kernel, distance to linear training",
        checks,
        papers=("shi2021",),
        statement="Theorem 9.1, sections 9.3 and 9.4 of FE-2021",
    ),
)
