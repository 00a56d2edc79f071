"""Lemma 2 of NTK-FL: the distance between its weights and gradient descent's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.ntk_fl.two_layer import gap_bounds, sphere
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.models.two_layer import two_layer_relu
from fedtangent._src.theory.ntk_fl.lemmas import weight_gap_bound
from fedtangent._src.types import Model, PyTree

DIMENSION = 4  # of the single example
STEPS = 300


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the lemma, and inequality (25) of its proof, which leaves out a term."""
    sphere_width, width = of_scale(scale, (256, 400), (1024, 1600))
    return [_lemma_2(seed, sphere_width), _part_left_out(seed, width)]


class Ratios(NamedTuple):
    """The measured gap after 3 .. T steps over bounds of it."""

    printed: Float64[np.ndarray, "t"]  # the lemma
    switched: Float64[np.ndarray, "t"]  # (25d), with the neurons that did switch
    complete: Float64[np.ndarray, "t"]  # (25d) and the term that (25a) leaves out
    radius: float  # R, measured


def _ratios(model: Model, params: PyTree, x: np.ndarray, y: np.ndarray, step: float) -> Ratios:
    paths, radius, printed, switched, rest = gap_bounds(model, params, x, y, step, STEPS)
    over = [np.asarray(paths.gap[3:] / bound[3:]) for bound in (printed, switched, switched + rest)]
    return Ratios(over[0], over[1], over[2], radius)


def _lemma_2(seed: int, width: int) -> Verdict:
    """Checks the lemma as stated, and (25d), which has the neurons that did switch in place of Lemma 1's bound."""
    x, y, model, params, step = sphere(seed, width, 20)
    ratios = _ratios(model, params, x, y[:, None], step)
    ratio, sharp = float(ratios.printed.max()), float(ratios.switched.max())
    wrong = float(np.max(ratios.switched * np.sqrt(width)))
    return Claim(
        "NTK-FL Lemma 2",
        "l1 distance of NTK and descent weights / Lemma 2's bound; / (25d)'s, with the neurons that did switch",
        f"sphere, N = 20, n = {width}, half of the largest stable step, {STEPS} steps, R = {ratios.radius:.2g} "
        "measured",
    ).judged(
        (f"{ratio:.2g}; {sharp:.2g}", "<= 1", max(ratio, sharp) <= 1),
        ("(25d) for a factor 1/n in eq. (12)", f"{wrong:.3g}", wrong > 1),
        f"bound x {ratio:.1g}; (25d) x {sharp:.2g}",
    )


def _part_left_out(seed: int, width: int) -> Verdict:
    """Checks (25) for one input of equal entries, where (25b) to (25d) are equalities and the gap is larger."""
    model = two_layer_relu(DIMENSION, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.key(seed))
    x = np.full((1, DIMENSION), DIMENSION**-0.5)
    y = np.asarray(model.apply(params, jnp.asarray(x))) + 0.5 * np.sqrt(width)
    ratios = _ratios(model, params, x, y, 1.0)
    statement = "l1 distance of NTK and descent weights / (25d) and the part that (25a) leaves out"
    claim = Claim("NTK-FL Lemma 2, (25)", statement, f"N = 1, entries of one size, n = {width}, eta = 1, {STEPS} steps")
    ratio, wrong = float(ratios.complete.max()), float(ratios.switched.max())
    right, control = (f"{ratio:.3f}", "<= 1", ratio <= 1), ("(25d) without it, as printed", f"{wrong:.3f}", wrong > 1)
    return claim.judged(right, control, f"bound x {ratio:.2g}")


ENTRIES = (
    TheoremEntry(
        "ntk_fl.weight_gap",
        "the distance of NTK-FL's weights to gradient descent's",
        _checks,
        papers=("yue2022",),
        statement="Lemma 2 of NTK-FL",
        functions=(weight_gap_bound,),
        figures=("ntk_fl.fig9",),
    ),
)
