"""Lemmas 1, 3 and 4 of NTK-FL: how many neurons may switch on or off, and the kernel's change and sampling error.

Each lemma is a bound that holds with probability 1 - delta. Violations are counted over independent draws: a bound
passes if the exact confidence interval of their frequency is all below delta, and fails if it is all above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float64

from fedtangent._src.comparison.statistics import LEVEL, Interval
from fedtangent._src.comparison.theorems import Claim, TheoremEntry, of_scale
from fedtangent._src.comparison.verdicts import Verdict
from fedtangent._src.theory.ntk_fl.lemmas import drift_bound, expected_kernel, sampling_bound, undecided_bound

DELTA = 0.1
ON_ARC, ARC_WIDTH = 64, 8  # inputs and neurons of Lemma 3
ARC_RADIUS = 0.15 / (ON_ARC * ARC_WIDTH * np.sqrt(2 / np.pi))  # R: on average 0.15 pairs of input and neuron may switch
FACTORS = np.round(np.arange(1.0, 0.0, -0.01), 2)  # of a bound, tried in turn until one fails


def exceeded(within: Bool[np.ndarray, "draws"]) -> Interval:
    """Computes the frequency of False in ``within`` [draws], with Clopper and Pearson's interval."""
    count, draws = int(np.sum(~within)), len(within)
    low = scipy.stats.beta.ppf(LEVEL / 2, count, draws - count + 1) if count else 0.0
    high = scipy.stats.beta.ppf(1 - LEVEL / 2, count + 1, draws - count) if count < draws else 1.0
    return Interval(count / draws, float(low), float(high))


def _checks(scale: str, seed: int) -> list[Verdict]:
    """Checks Lemmas 1, 3 and 4 of NTK-FL, bounds on switching neurons and on the kernel, where they are tight."""
    draws = of_scale(scale, 1, 4)
    return [
        _lemma_1(seed, 300_000 * draws),
        _lemma_1_concentration(seed, 30_000 * draws),
        _lemma_3(seed, 20_000 * draws),
        _switched(seed, 3000 * draws),
        _lemma_4(seed, 20_000 * draws),
    ]


def _rarely(claim: Claim, fails: Callable[[float], Interval], control: str, wrong: Interval) -> Verdict:
    """Checks that draws exceed a lemma's bound with a frequency of at most delta, and a wrong bound more often.

    delta (``DELTA``) is the probability with which the lemma may fail.

    ``fails(factor)`` is the frequency with which they exceed ``factor`` times the bound. The verdict is on factor 1; it
    also reports the largest of ``FACTORS`` at which the check would fail, so how much tighter a bound it would notice
    (0 for none). ``wrong`` is the frequency for the wrong bound, which ``control`` names.
    """
    limits = 0.0, DELTA
    noticed = next((f for f in FACTORS if fails(f).within(*limits) is False), 0.0)
    return claim.between(fails(1.0), (control, wrong), limits, f"<= delta = {DELTA:g}", f"bound x {noticed:g}")


def _lemma_1(seed: int, draws: int) -> Verdict:
    """Checks the corrected Lemma 1 of NTK-FL, a bound on how many neurons may switch on or off at any example.

    The printed bound is the control, and must fail too often (erratum `ntk_fl.lemma1`).
    """
    width, num = 4, 2
    nearest = np.abs(np.random.default_rng(seed).standard_normal((draws, width * num))).min(axis=1)
    critical = 0.99 / undecided_bound(1.0, 1.0, DELTA, width, num, "union")

    def fails(factor: float) -> Interval:
        return exceeded(nearest > critical / factor)

    statement = "how often any |S_i| exceeds Markov's bound for all examples at once, here 0.99 neurons"
    sizes = f"N = {num} orthonormal inputs, n = {width}, R = {critical:.3g} alpha, {draws} draws"
    claim = Claim("NTK-FL Lemma 1", statement, sizes)
    return _rarely(claim, fails, "the lemma as printed, for all examples at once", fails(1 / num))


def _lemma_1_concentration(seed: int, draws: int) -> Verdict:
    """Checks NTK-FL's Lemma 1 on the number of switching neurons, with Hoeffding's instead of Markov's inequality."""
    width, num, radius = 100, 2, 0.6745
    z = np.abs(np.random.default_rng(seed).standard_normal((draws, width, num)))
    largest = np.sum(z <= radius, axis=1).max(axis=1)
    bound = undecided_bound(radius, 1.0, DELTA, width, num, "concentration")
    mean = width * float(np.mean(z <= radius))

    def fails(factor: float) -> Interval:
        return exceeded(largest - mean <= factor * (bound - mean))

    statement = "how often any |S_i| exceeds its mean by more than Hoeffding's bound for all examples at once"
    sizes = f"N = {num} orthonormal inputs, n = {width}, R = {radius} alpha, {draws} draws"
    claim = Claim("NTK-FL Lemma 1, by Hoeffding's inequality", statement, sizes)
    return _rarely(claim, fails, "half of the deviation", fails(0.5))


def _lemma_3(seed: int, draws: int) -> Verdict:
    """Checks the corrected Lemma 3 of NTK-FL, a bound on the change of the kernel H by moving neurons.

    The printed bound is the control, and must fail too often (erratum `ntk_fl.lemma3`).
    """
    norms = _drift_on_arc(seed, draws).operator
    union, printed = (drift_bound(ARC_RADIUS, 1.0, DELTA, ARC_WIDTH, ON_ARC, form) for form in ("union", "printed"))
    statement = "how often neurons that move by R change H by more than Markov's bound for the sum over entries"
    sizes = f"N = {ON_ARC} inputs on half a radian, n = {ARC_WIDTH}, R = {ARC_RADIUS:.2g} alpha, {draws} draws"
    control = "the lemma as printed, by the inequality for one entry", exceeded(norms <= printed)
    return _rarely(
        Claim("NTK-FL Lemma 3", statement, sizes), lambda factor: exceeded(norms <= factor * union), *control
    )


def _switched(seed: int, draws: int) -> Verdict:
    """Checks NTK-FL's (27) and (28): entry ij of the kernel H changes by at most ``(|S_i| + |S_j|) x_i'x_j / n``.

    S_i are the neurons that switch on or off at input i, and n is the width. The check compares Frobenius norms.
    """
    drift = _drift_on_arc(seed, draws)
    some = drift.counted > 0
    ratio, wrong = (float(np.max(drift.frobenius[some] / norms[some])) for norms in (drift.counted, drift.half_counted))
    return Claim(
        "NTK-FL Lemma 3, (27) and (28)",
        "Frobenius norm of H's change / that of (|S_i| + |S_j|) x_i'x_j / n, largest",
        f"N = {ON_ARC} inputs on half a radian, n = {ARC_WIDTH}, {int(some.sum())} draws in which a neuron switches",
    ).judged(
        (f"{ratio:.3f}", "<= 1", ratio <= 1),
        ("only one of the two inputs counted, |S_i|", f"{wrong:.3f}", wrong > 1),
        f"bound x {ratio:.2f}",
    )


class WeightDrift(NamedTuple):
    """Norms of the kernel's change H(v') - H(v) in each draw, and norms of NTK-FL's bound (28) of this change.

    ``operator`` and ``frobenius`` are norms of the change. ``counted`` is the Frobenius norm of the bound with entries
    ``(|S_i| + |S_j|) x_i'x_j / n``, where S_i are the neurons that switch at input x_i. ``half_counted`` is the
    Frobenius norm of a wrong bound, with entries ``|S_i| x_i'x_j / n``.
    """

    operator: Float64[np.ndarray, "draws"]
    frobenius: Float64[np.ndarray, "draws"]
    counted: Float64[np.ndarray, "draws"]  # of (|S_i| + |S_j|) x_i'x_j / n
    half_counted: Float64[np.ndarray, "draws"]  # of |S_i| x_i'x_j / n


def _drift(x: Float64[np.ndarray, "n d"], v: Float64[np.ndarray, "draws width d"], radius: float) -> WeightDrift:
    """Computes norms of the change of the kernel H if neurons move towards the hyperplane where they would switch.

    Every neuron moves by ``radius`` towards the nearest of the planes ``v'x_i = 0``. ``x`` are the inputs x_i, and
    ``v`` the neurons' weights in each draw.
    """
    # H is computed here from activation patterns, by its definition below (12).
    gram, width = x @ x.T, v.shape[1]
    across = v @ x.T
    nearest = np.argmin(np.abs(across), axis=2)
    step = -np.sign(np.take_along_axis(across, nearest[..., None], axis=2)) * radius
    after = (across + step * gram[nearest]) >= 0
    before = across >= 0
    some = np.any(before != after, axis=(1, 2))
    a, b = before[some].astype(float), after[some].astype(float)
    change = gram * (np.einsum("kri,krj->kij", b, b) - np.einsum("kri,krj->kij", a, a)) / width
    flips = np.sum(a != b, axis=1)
    both = gram * (flips[:, :, None] + flips[:, None, :]) / width
    one = gram * np.broadcast_to(flips[:, :, None], both.shape) / width
    norms = [np.linalg.norm(change, 2, axis=(1, 2)), *(np.linalg.norm(m, axis=(1, 2)) for m in (change, both, one))]
    every = np.zeros((4, len(v)))
    every[:, some] = norms
    return WeightDrift(*every)


def _drift_on_arc(seed: int, draws: int) -> WeightDrift:
    """Computes the kernel's change as ``_drift`` does, for random neurons that move by ``ARC_RADIUS``.

    The inputs lie at equal angles on an arc of half a radian.
    """
    angles = np.linspace(0, 0.5, ON_ARC)
    v = np.random.default_rng(seed).standard_normal((draws, ARC_WIDTH, 2))
    return _drift(np.stack([np.cos(angles), np.sin(angles)], axis=1), v, ARC_RADIUS)


def _lemma_4(seed: int, draws: int) -> Verdict:
    """Checks NTK-FL's Lemma 4, a bound on how far the kernel of random neurons is from its mean, on two inputs."""
    width, num = 200, 2
    x = np.array([[1.0, 0.0], [np.cos(0.05), np.sin(0.05)]])
    v = np.random.default_rng(seed).standard_normal((draws, width, 2))
    active = (v @ x.T >= 0).astype(float)
    kernels = (x @ x.T) * np.einsum("kri,krj->kij", active, active) / width
    norms = np.abs(np.linalg.eigvalsh(kernels - expected_kernel(x))).max(axis=1)
    bound = sampling_bound(width, num, DELTA)

    def fails(factor: float) -> Interval:
        return exceeded(norms <= factor * bound)

    statement = "how often the operator norm of H - H_inf is above the bound"
    claim = Claim("NTK-FL Lemma 4", statement, f"N = {num} inputs 0.05 radian apart, n = {width}, {draws} draws")
    return _rarely(claim, fails, "half of the bound", fails(0.5))


ENTRIES = (
    TheoremEntry(
        "ntk_fl.lemmas",
        "neurons that may switch, drift and sampling error of the kernel: how often a bound fails",
        _checks,
        papers=("yue2022",),
        statement="Lemmas 1, 3 and 4 of NTK-FL",
        functions=(undecided_bound, drift_bound, sampling_bound, expected_kernel),
        is_quick=True,
    ),
)
