"""Distillation on unlabelled data at the server: a student network learns the predictions of an ensemble (FedBE).

As in FedBE, the student's weights are averaged along its training (SWA; Izmailov et al., UAI 2018), so that it does not
follow a teacher that is often wrong (Chen and Chao, ICLR 2021, section 3.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedtangent._src import pytrees
from fedtangent._src.checks import number, whole
from fedtangent._src.federated.local import LocalProblem, Work, minimise
from fedtangent._src.losses import Loss, cross_entropy, squared_error
from fedtangent._src.types import Array, Client, FederatedData, Key, Model, PyTree


class Distillation(NamedTuple):
    """Options of the student's training: SGD with momentum on soft labels, with weights averaged once a cycle (SWA).

    ``start`` steps at ``learning_rate`` come first, then cycles of ``cycle`` steps. Step t = 1 .. cycle of a cycle has
    the rate ``(1 - t / cycle) learning_rate + t / cycle final_learning_rate`` (Izmailov et al., 2018, section 3.2). The
    student is the average of the weights after the last step of each cycle; steps beyond the last whole cycle are not
    taken. ``cycle=None`` trains at ``learning_rate`` throughout and keeps the last weights (FedBE without SWA).

    The defaults are FedBE's for 10 000 images, 1580 steps; fewer examples need an earlier ``start``. The loss is the
    mean over a batch; the code published with FedBE divides it by the number of classes as well.
    """

    epochs: int = 20
    batch_size: int | None = 128  # None: all of the data
    learning_rate: float = 1e-3
    final_learning_rate: float = 4e-4
    start: int = 250
    cycle: int | None = 25
    momentum: float = 0.9


FEDBE = Distillation()


def num_steps(how: Distillation, rows: int) -> int:
    """Returns how many steps the student takes: the steps of all epochs up to the end of the last whole cycle.

    Args:
        how: Options of the student's training.
        rows: Number of examples.
    """
    batch = rows if how.batch_size is None else min(how.batch_size, rows)
    total = how.epochs * math.ceil(rows / batch)
    return total if how.cycle is None else total - (total - how.start) % how.cycle


def check_distillation(how: Distillation, rows: int) -> None:
    """Raises ``ValueError`` if a number in ``how`` is out of range, or the epochs do not complete a single cycle.

    Args:
        how: Options of the student's training.
        rows: Number of examples.
    """
    whole("distillation epochs", how.epochs)
    if how.batch_size is not None:
        whole("distillation batch_size", how.batch_size)
    for name in ("learning_rate", "final_learning_rate"):
        number(f"distillation {name}", getattr(how, name), above=0)
    number("distillation momentum", how.momentum, at_least=0, below=1)
    for name, least in (("start", 0), ("cycle", 1)):
        value = getattr(how, name)
        if name == "start" or value is not None:
            whole(f"distillation {name}", value, least)
    if how.cycle is not None:
        total = num_steps(how._replace(cycle=None), rows)
        if total < how.start + how.cycle:
            raise ValueError(
                f"distillation: {how.epochs} epochs over {rows} examples are {total} steps, but the first average is "
                f"due after start + cycle = {how.start} + {how.cycle} steps: take more epochs"
            )


def cyclical_rate(how: Distillation, step: Array) -> Array:
    """Returns the student's learning rate in a step.

    Args:
        how: Options of the student's training.
        step: Number of the step, from 0.
    """
    if how.cycle is None:
        return jnp.asarray(how.learning_rate, float)
    part = ((step - how.start) % how.cycle + 1) / jnp.asarray(how.cycle, float)
    decayed = (1 - part) * how.learning_rate + part * how.final_learning_rate
    return jnp.where(step < how.start, how.learning_rate, decayed)


class Averaged(NamedTuple):
    """The state of an optimiser that averages weights: the inner optimiser's state, the steps taken and the mean."""

    inner: PyTree
    step: Array  # [] int32, steps taken
    mean: PyTree  # mean of the weights at the ends of the cycles so far


def averaged(inner: optax.GradientTransformation, start: int, cycle: int, total: int) -> optax.GradientTransformation:
    """Returns an optimiser that steps as ``inner`` and whose last step sets the weights to their mean (SWA).

    The mean is over the weights at the ends of the cycles, after ``start + cycle``, ``start + 2 cycle``, ... steps.

    Args:
        inner: An optax optimiser.
        start: Steps before the first cycle.
        cycle: Steps of a cycle.
        total: Number of the last step.
    """

    def init(params: PyTree) -> Averaged:
        return Averaged(inner.init(params), jnp.int32(0), pytrees.zeros_like(params))

    def update(gradient: PyTree, state: Averaged, params: PyTree | None = None) -> tuple[PyTree, Averaged]:
        updates, inner_state = inner.update(gradient, state.inner, params)
        after, step = optax.apply_updates(params, updates), state.step + 1
        ends = (step > start) & ((step - start) % cycle == 0)
        number = jnp.maximum((step - start) // cycle, 1)
        # of a whole number jnp.divide makes float32: each leaf divides in its own dtype
        moved = jax.tree.map(lambda m, p: m + (p - m) / number.astype(m.dtype), state.mean, after)
        mean = pytrees.where(ends, moved, state.mean)
        updates = pytrees.where(step == total, pytrees.subtract(mean, params), updates)
        return updates, Averaged(inner_state, step, mean)

    return optax.GradientTransformation(init, update)


SOFT_LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "squared_error": squared_error}
"""Losses of the student. The cross entropy's gradient is that of the teacher's Kullback-Leibler divergence."""


def distil(
    key: Key, model: Model, loss: Loss, how: Distillation, student: PyTree, x: Array, targets: Array
) -> tuple[PyTree, Array]:
    """Trains ``student`` to predict ``targets``; returns its weights, and the mean loss over all steps.

    The weights are the mean over the ends of the learning rate's cycles or, without cycles, the last weights.

    Args:
        key: Key from which the order of the examples is drawn in every epoch.
        model: The network.
        loss: Loss of outputs and soft labels, such as those in ``SOFT_LOSSES``.
        how: Options of the student's training.
        student: Parameters before the first step.
        x: Inputs [m, ...].
        targets: Soft labels [m, C].
    """
    rows, total = x.shape[0], num_steps(how, x.shape[0])
    every = jnp.arange(rows, dtype=jnp.int32)
    data = FederatedData(x, targets, every, jnp.asarray([0, rows], jnp.int32))
    client = Client(jnp.int32(0), jnp.int32(rows), every, data, jnp.int32(0))
    descent = optax.chain(optax.trace(how.momentum), optax.scale_by_schedule(lambda step: -cyclical_rate(how, step)))
    if how.cycle is not None:
        descent = averaged(descent, how.start, how.cycle, total)
    work = Work(steps=total, batch_size=how.batch_size)
    params, info = minimise(key, model, loss, descent, work, LocalProblem(student), client)
    return params, info["loss"]
