"""Trained networks that meet Theorem 9.1 (FE-2021), and its constants over widths: Lemma 9.1, C_i and C_1."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedtangent._src.comparison.statistics import Interval, width_slope
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.fed_ensemble import small_networks
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.fed_ensemble.convergence import theorem_1
from fedtangent._src.types import PyTree

TRAINED = small_networks.Task(
    (1, 2, 3, 3, 3, 3), (0, 0, 1, 2, 3, 4), 200, 0.95, labels=6.0, weakest=True, evaluations=10
)
WIDTH = 2048
BAND = 0.1  # of a slope
RADIUS = 1.0  # of the ball about the initial weights, in the NTK parameterisation
NUM_POINTS = 6
CLIENTS = (slice(0, 1), slice(1, 3), slice(3, 6))  # of 1, 2 and 3 examples


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the decay of trained networks, and the theorem's constants over widths."""
    return [_decay(scale, seed), *_constants(scale, seed, 200)]


def _decay(scale: str, seed: int) -> Verdict:
    """Checks the decay of networks trained with kappa_2 < 1, and names the assumptions that fail."""
    networks = small_networks.follow(small_networks.setting(TRAINED, WIDTH, seed), of_scale(scale, 2, 10))
    theorems = [networks.theorem(draw) for draw in range(len(networks.start))]

    def least_fall(form: str) -> float:
        """Returns the least fall of a residual's logarithm over the exponent of this form, over networks and ages."""
        falls = []
        for theorem, norms in zip(theorems, networks.residual, strict=True):
            exponent = theorem.exponent(form)[networks.ages[1:], None]
            falls.append(float(np.min(np.log(norms[:1] / norms[1:]) / exponent)))
        return min(falls)

    fall, wrong = least_fall("proof"), least_fall("equation_18")
    failing = {name for theorem in theorems for name in theorem.failing}
    largest = max(theorem.constants.kappa_2 for theorem in theorems)
    measured = f"{fall:.3f} (kappa_2 {largest:.2f}, C_1 {networks.c1.max():.2f}; fail: {', '.join(sorted(failing))})"
    return Claim(
        "FE-2021 Theorem 9.1 (FE-2024 Theorem 1), networks",
        "trained networks, kappa_2 < 1, where only kappa_3, of the proof's last line, is too large: decay of the log "
        "residual / exponent u t / 3, least over networks and ages",
        f"n = 15, 6 clients of 1 to 3, K = 5, nbar = 3, width {WIDTH}, {TRAINED.ages} ages, {networks.c1.size} "
        "networks",
    ).judged(
        (measured, ">= 1", fall >= 1 and failing <= {"kappa_3_small"}),
        ("eq. (18) as printed, K/3 instead of 1/3", f"{wrong:.3f}", wrong < 1),
        f"rate x {fall:.3f}",
    )


def _constants(scale: str, seed: int, draws: int) -> list[Verdict]:
    """Checks Lemma 9.1's Lipschitz constant and norms, and C_1, at initialisation and in a ball about it."""
    widths = of_scale(scale, (256, 1024, 4096), (256, 1024, 4096, 16384))
    x = small_networks.inputs(np.random.default_rng(seed), NUM_POINTS)
    smooth, kinked = ([_measured(a, width, draws, seed, x) for width in widths] for a in ("erf", "relu"))
    where = f"n = {NUM_POINTS}, 3 clients of 1 to 3, widths {widths[0]} .. {widths[-1]}, {draws} networks each"

    def slope(name: str, networks: list[dict[str, np.ndarray]] = smooth) -> Interval:
        return width_slope(widths, [measured[name] for measured in networks])

    hessians = [f"{np.mean(measured['c1']):.2f}" for measured in (smooth[0], smooth[-1])]
    lipschitz = Claim(
        "FE-2021 Lemma 9.1, first line",
        "||J_i(w) - J_i(w')|| / ||w - w'|| in a ball, largest over clients and pairs: slope in the width (-1/2 is a "
        "constant C in the papers' weights, which are l^-1/2 times these)",
        where,
    )
    norms = Claim(
        "FE-2021 Lemma 9.1, second line",
        "||J_i(w)|| / C_i - 1 in a ball, C_i = sqrt(trace Theta_ii) as Theorem 1 takes it, root mean square over "
        "clients: slope in the width",
        where,
    )
    c1 = Claim(
        "FE-2021 section 9.3, C_1",
        "C_1 / sqrt(l) of kappa_2: slope in the width. (The paper's C_1 -> 0 does not hold: l^-1/2 ||Hessian|| is "
        f"{' .. '.join(hessians)})",
        where,
    )
    return [
        half_slope(lipschitz, slope("lipschitz"), ("ReLU, which (ii) excludes", slope("lipschitz", kinked))),
        half_slope(norms, slope("norm"), ("C_i of the last layer only", slope("last_layer")), 0.2),
        half_slope(c1, slope("c1_term"), ("C_1 itself", slope("c1"))),
    ]


def half_slope(claim: Claim, slope: Interval, control: tuple[str, Interval], band: float = BAND) -> Verdict:
    """Checks that a slope in the width is -1/2 to ``band``, and that the control's slope is not.

    Args:
        claim: Texts of the row.
        slope: Measured slope.
        control: Name and slope of the control.
        band: Allowed deviation from -1/2.
    """
    limits = -0.5 - band, -0.5 + band
    return claim.between(slope, control, limits, f"-1/2 (+- {band:g})", f"slope off by {band + slope.length:.2f}")


class Point(NamedTuple):
    """Weights, as a step from the initial ones, and the Jacobian there."""

    step: Float64[np.ndarray, "P"]
    jacobian: Float64[np.ndarray, "n P"]


def _measured(activation: str, width: int, draws: int, seed: int, x: np.ndarray) -> dict[str, np.ndarray]:
    """Measures the quantities of Lemma 9.1 and C_1 on ``draws`` networks of one width, [draws] each, by name."""
    model = small_networks.one_hidden_layer(x.shape[1], width, activation)
    assert model.kernel is not None
    nngp, ntk = (np.asarray(k) for k in model.kernel(jnp.asarray(x), None))
    rng, rows = np.random.default_rng(seed), []
    for draw in range(draws):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draw), width)
        params = jax.tree.map(np.asarray, model.init(key))
        start = small_networks.jacobian(activation, params, x)
        points = [Point(np.zeros(start.shape[1]), start)]
        # A random direction, and one in the span of the gradients, as training moves the weights.
        for direction in (rng.standard_normal(start.shape[1]), rng.standard_normal(len(x)) @ start):
            step = np.asarray(RADIUS * direction / np.linalg.norm(direction))
            points.append(Point(step, small_networks.jacobian(activation, _moved(params, step), x)))
        c1 = small_networks.curvature(activation, params, x)
        rows.append((_lipschitz(points), _error(points, ntk), _error(points, nngp), c1, c1 / np.sqrt(width)))
    names = ("lipschitz", "norm", "last_layer", "c1", "c1_term")
    return dict(zip(names, np.array(rows).T, strict=True))


def _lipschitz(points: list[Point]) -> float:
    """Returns the largest ``||J_i(w) - J_i(w')|| / ||w - w'||`` over clients and pairs of points."""
    return max(
        float(np.linalg.norm((one.jacobian - two.jacobian)[rows]) / np.linalg.norm(one.step - two.step))
        for one, two in itertools.combinations(points, 2)
        for rows in CLIENTS
    )


def _error(points: list[Point], kernel: np.ndarray) -> float:
    """Returns the relative root mean square error of the clients' Jacobian norms, compared with ``kernel``."""
    expected = np.sqrt([np.trace(kernel[rows, rows]) for rows in CLIENTS])
    norms = np.array([[np.linalg.norm(point.jacobian[rows]) for rows in CLIENTS] for point in points])
    return float(np.sqrt(np.mean((norms / expected - 1) ** 2)))


def _moved(params: PyTree, by: np.ndarray) -> PyTree:
    """Returns the weights after a step ``by`` [P], in the order of ``jacobian``."""
    w, a = params[0][0], params[2][0]
    return [(w + by[: w.size].reshape(w.shape), None), (), (a + by[w.size :].reshape(a.shape), None)]


ENTRIES = (
    TheoremEntry(
        "fed_ensemble.networks",
        "trained networks inside the theorem's assumptions; its constants measured over widths",
        _checks,
        papers=("shi2021", "shi2024"),
        statement="Theorem 9.1, Lemma 9.1 and C_1 of FE-2021",
        functions=(theorem_1,),
    ),
)
