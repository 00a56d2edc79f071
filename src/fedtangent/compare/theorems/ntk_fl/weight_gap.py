"""Lemmas 1 and 2 of NTK-FL: neurons that may switch, and the gap between its weights and gradient descent's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedtangent.compare.theorems import TheoremEntry, of_scale
from fedtangent.compare.theorems.ntk_fl.convergence import sphere
from fedtangent.compare.theorems.ntk_fl.descents import Descents, descents
from fedtangent.compare.verdicts import Verdict
from fedtangent.theory.ntk_fl.lemmas import (
    empirical_kernel,
    residual_part,
    switched_bound,
    undecided_bound,
    weight_gap_bound,
)
from fedtangent.types import Array, PyTree


def checks(scale: str, seed: int) -> list[Verdict]:
    """Both lemmas."""
    draws, width = of_scale(scale, (10_000, 256), (100_000, 1024))
    return [lemma_1(seed, draws), lemma_2(seed, width)]


def lemma_1(seed: int, draws: int) -> Verdict:
    """All examples at once, orthonormal inputs and few neurons: independent events, so that a union counts."""
    width, num, radius, delta = 4, 20, 0.012, 0.1
    z = np.abs(np.random.default_rng(seed).standard_normal((draws, width, num)))
    largest = np.sum(z <= radius, axis=1).max(axis=1)
    fails = {form: float(np.mean(largest > undecided_bound(radius, 1.0, delta, width, num, form)))
             for form in ("printed", "concentration", "union")}  # fmt: skip
    allowed = delta + 3 * np.sqrt(delta * (1 - delta) / draws)
    return Verdict.of(
        "NTK-FL Lemma 1",
        "how often some |S_i| is above the bound: Markov's inequality for the union, and Hoeffding's",
        f"N = {num} orthonormal inputs, n = {width}, R = {radius} alpha, delta = {delta}, {draws} draws",
        (
            f"{fails['union']:.3f}, {fails['concentration']:.3f}",
            f"<= delta + 3 standard errors = {allowed:.3f}",
            bool(max(fails["union"], fails["concentration"]) <= allowed),
        ),
        ("the lemma as printed, for all examples at once", f"{fails['printed']:.3f}", bool(fails["printed"] > allowed)),
    )


def lemma_2(seed: int, width: int) -> Verdict:
    """The gap of the weights, under Lemma 2 and, with what did switch, under (25d) and the part that it leaves out."""
    x, y, model, params = sphere(seed, width, 20)
    steps, size, dim = 300, len(x), x.shape[1]
    eta = size / float(np.linalg.eigvalsh(empirical_kernel(x, params["v"]))[-1])

    def watch(start: PyTree, weights: PyTree) -> dict[str, Array]:
        active = [jnp.asarray(x) @ w["v"].T >= 0 for w in (start, weights)]
        moved = jnp.max(jnp.linalg.norm(weights["v"] - start["v"], axis=1))
        return {"switched": jnp.sum(active[0] != active[1]), "moved": moved}

    paths: Descents = descents(model, params, x, y[:, None], eta, steps, watch=watch)
    sizes: dict[str, Any] = {"learning_rate": eta, "width": width, "input_size": dim}
    counted = switched_bound(paths.largest[:-1], paths.watched["switched"][:-1], num_examples=size, **sizes)
    sharp = counted + residual_part(paths.apart, num_examples=size, **sizes)
    radius = float(paths.watched["moved"].max())
    printed = weight_gap_bound(paths.largest[:-1], radius=radius, **sizes)
    over = [float(np.max(paths.gap[3:] / bound[3:])) for bound in (printed, sharp, counted / np.sqrt(width))]
    return Verdict.of(
        "NTK-FL Lemma 2",
        "l1 distance of NTK and descent weights / Lemma 2's bound; / (25d) with what did switch and the part left out",
        f"sphere, N = {size}, n = {width}, half of the largest stable step, {steps} steps, R = {radius:.2g} measured",
        (f"{over[0]:.2g}; {over[1]:.2g}", "<= 1", max(over[:2]) <= 1),
        ("(25d) for a factor 1/n in eq. (12)", f"{over[2]:.3g}", over[2] > 1),
    )


ENTRIES = (
    TheoremEntry(
        "ntk_fl.weight_gap",
        "neurons that switch, and the distance of NTK-FL's weights to gradient descent's",
        checks,
        papers=("yue2022",),
        statement="Lemmas 1 and 2 of NTK-FL",
    ),
)
