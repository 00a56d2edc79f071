"""FedBE as plain NumPy loops, written from Chen and Chao 2021, algorithm 1; nothing of fedtangent is used here.

What is drawn (noise of the Gaussian, gammas of the Dirichlet, batches of the student) are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .reference import Params, mean, outputs

Noise = dict[str, np.ndarray]


class Student(NamedTuple):
    """The numbers of a distillation."""

    rate: float
    final_rate: float
    start: int
    cycle: int | None
    momentum: float


def gaussian(models: Sequence[Params], weights: Sequence[float], noise: Sequence[Noise]) -> list[Params]:
    """Draws from the diagonal Gaussian with the weighted mean and element-wise weighted variance of the models."""
    share = np.asarray(weights) / np.sum(weights)
    centre = mean(models, weights)
    draws = []
    for z in noise:
        draw = {}
        for name in centre:
            variance = sum(p * (m[name] - centre[name]) ** 2 for p, m in zip(share, models, strict=True))
            draw[name] = centre[name] + np.sqrt(variance) * z[name]
        draws.append(draw)
    return draws


def dirichlet(models: Sequence[Params], weights: Sequence[float], gammas: Sequence[np.ndarray]) -> list[Params]:
    """Convex combinations by Dirichlet draws (gammas over their sum) times the clients' weights, normalised."""
    draws = []
    for g in gammas:
        simplex = g / g.sum()
        draws.append(mean(models, simplex * np.asarray(weights)))
    return draws


def softmax(f: np.ndarray) -> np.ndarray:
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def ensemble(members: Sequence[Params], x: np.ndarray, loss: str) -> np.ndarray:
    """The mean of the members' probabilities, or of their outputs for squared error."""
    each = [outputs(m, x) for m in members]
    return np.mean([softmax(f) for f in each] if loss == "cross_entropy" else each, axis=0)


def soft_gradient(params: Params, x: np.ndarray, targets: np.ndarray, loss: str) -> Params:
    """Gradient of the mean cross entropy against soft labels, or of half the mean squared error."""
    hidden = np.tanh(x @ params["W"] + params["b"])
    f = hidden @ params["V"]
    delta = ((softmax(f) if loss == "cross_entropy" else f) - targets) / len(x)
    back = (delta @ params["V"].T) * (1 - hidden**2)
    return {"W": x.T @ back, "b": back.sum(axis=0, keepdims=True), "V": hidden.T @ delta}


def distil(
    student: Params, x: np.ndarray, targets: np.ndarray, batches: Sequence[np.ndarray], how: Student, loss: str
) -> Params:
    """SGD with momentum; Izmailov et al. 2018, algorithm 1: the average of the weights at the ends of the cycles."""
    velocity = {name: np.zeros_like(value) for name, value in student.items()}
    collected = []
    for i, rows in enumerate(batches):
        step = i + 1 - how.start  # within the cyclical part, from 1
        rate = how.rate
        if how.cycle is not None and step >= 1:
            t = ((step - 1) % how.cycle + 1) / how.cycle
            rate = (1 - t) * how.rate + t * how.final_rate
        g = soft_gradient(student, x[rows], targets[rows], loss)
        velocity = {name: how.momentum * velocity[name] + g[name] for name in g}
        student = {name: student[name] - rate * velocity[name] for name in g}
        if how.cycle is not None and step >= 1 and step % how.cycle == 0:
            collected.append(student)
    return student if how.cycle is None else mean(collected, [1.0] * len(collected))
