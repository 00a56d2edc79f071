"""Lemma 2 of NTK-FL: the distance between its weights and those of gradient descent on the network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src.comparison.theorems import TheoremEntry, of_scale
from fedtangent._src.comparison.theorems.ntk_fl.descents import Descents, descents
from fedtangent._src.comparison.theorems.ntk_fl.problem import half_stable_step, sphere
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.models.two_layer import two_layer_relu
from fedtangent._src.theory.ntk_fl.lemmas import residual_part, switched_bound, weight_gap_bound
from fedtangent._src.types import Array, Model, PyTree

DIMENSION = 4  # of the single example
STEPS = 300


def checks(scale: str, seed: int) -> list[Verdict]:
    """Checks the lemma, and inequality (25) of its proof, which leaves out a term."""
    sphere_width, width = of_scale(scale, (256, 400), (1024, 1600))
    return [lemma_2(seed, sphere_width), part_left_out(seed, width)]


def lemma_2(seed: int, width: int) -> Verdict:
    """Checks the lemma as stated, and (25d), which has the neurons that did switch in place of Lemma 1's bound."""
    x, y, model, params = sphere(seed, width, 20)
    eta = half_stable_step(x, params)
    paths = _watched(model, params, x, y[:, None], eta)
    counted, _, radius = _bounds(paths, x, width, eta)
    sizes: dict[str, Any] = {"learning_rate": eta, "width": width, "input_size": x.shape[1]}
    printed = weight_gap_bound(paths.largest[:-1], radius=radius, **sizes)
    found, sharp = (float(np.max(paths.gap[3:] / bound[3:])) for bound in (printed, counted))
    wrong = float(np.max(paths.gap[3:] / counted[3:] * np.sqrt(width)))
    return Verdict.of(
        "NTK-FL Lemma 2",
        "l1 distance of NTK and descent weights / Lemma 2's bound; / (25d)'s, with the neurons that did switch",
        f"sphere, N = 20, n = {width}, half of the largest stable step, {STEPS} steps, R = {radius:.2g} measured",
        (f"{found:.2g}; {sharp:.2g}", "<= 1", max(found, sharp) <= 1),
        ("(25d) for a factor 1/n in eq. (12)", f"{wrong:.3g}", wrong > 1),
        f"bound x {found:.1g}; (25d) x {sharp:.2g}",
    )


def part_left_out(seed: int, width: int) -> Verdict:
    """Checks (25) for one input with equal entries: (25b) to (25d) are equalities, and the gap is larger than they say.

    The proof uses the network's residuals for both weights; NTK-FL's weights follow the residuals of the linearised
    network.
    """
    model = two_layer_relu(DIMENSION, width, seed=seed, dtype=jnp.float64)
    params = model.init(jax.random.key(seed))
    x = np.full((1, DIMENSION), DIMENSION**-0.5)
    y = np.asarray(model.apply(params, jnp.asarray(x))) + 0.5 * np.sqrt(width)
    paths = _watched(model, params, x, y, 1.0)
    counted, rest, _ = _bounds(paths, x, width, 1.0)
    found, wrong = (float(np.max(paths.gap[3:] / bound[3:])) for bound in (counted + rest, counted))
    return Verdict.of(
        "NTK-FL Lemma 2, (25)",
        "l1 distance of NTK and descent weights / (25d) and the part that (25a) leaves out",
        f"N = 1, entries of one size, n = {width}, eta = 1, {STEPS} steps",
        (f"{found:.3f}", "<= 1", found <= 1),
        ("(25d) alone, as printed", f"{wrong:.3f}", wrong > 1),
        f"bound x {found:.2g}",
    )


def _watched(model: Model, params: PyTree, x: np.ndarray, y: np.ndarray, eta: float) -> Descents:
    def watch(start: PyTree, weights: PyTree) -> dict[str, Array]:
        active = [jnp.asarray(x) @ w["v"].T >= 0 for w in (start, weights)]
        moved = jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))
        return {"switched": jnp.sum(active[0] != active[1]), "moved": moved}

    return descents(model, params, x, y, eta, STEPS, watch=watch)


def _bounds(paths: Descents, x: np.ndarray, width: int, eta: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns (25d) with the neurons that did switch, the term that it leaves out, and the measured R."""
    sizes: dict[str, Any] = {"learning_rate": eta, "width": width, "input_size": x.shape[1], "num_examples": len(x)}
    counted = switched_bound(paths.largest[:-1], paths.watched["switched"][:-1], **sizes)
    return counted, residual_part(paths.apart, **sizes), float(paths.watched["moved"].max())


ENTRIES = (
    TheoremEntry(
        "ntk_fl.weight_gap",
        "the distance of NTK-FL's weights to gradient descent's",
        checks,
        papers=("yue2022",),
        statement="Lemma 2 of NTK-FL",
        functions=(weight_gap_bound,),
        figures=("ntk_fl.fig9",),
    ),
)
