"""Minibatches, numbers of local steps and contacted clients of a run, as inputs of the theory.

Which client trains which model on which batch is drawn at random, and theory takes these draws as inputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from fedtangent._src import streams
from fedtangent._src.federated.local import Work, drawn_batches
from fedtangent._src.types import Array, Cohort, Key, Partition, PyTree, Schedule


def drawn_rows(
    work: Work, partition: Partition, cohorts: Cohort, seed: int | Key = 0
) -> Int[np.ndarray, "R S T B"] | None:
    """Computes which training rows are in every minibatch that a run of ``seed`` draws for its cohorts.

    Args:
        work: Local steps and batch size.
        partition: Training rows of every client.
        cohorts: Cohorts of the run, [R, S].
        seed: Seed or key of the run.

    Returns:
        Row numbers [R, S, T, B], where -1 fills unused places; None if every step takes all examples of a client.
    """
    sizes, train = np.asarray(partition.sizes), streams.keys(seed).train
    largest = int(sizes.max())
    if work.batch_size is None or work.batch_size >= largest:
        return None
    most, client = int(np.max(steps_of(work, partition))), jnp.asarray(cohorts.client)

    def places(round_: Array, i: Array, size: Array) -> Array:
        return drawn_batches(work, streams.slot_keys(train, round_, i)[0], size, largest, most)

    of_round = jax.jit(jax.vmap(jax.vmap(places, in_axes=(None, 0, 0))))  # one program, not one for each operation
    place = np.asarray(of_round(jnp.arange(len(client), dtype=jnp.int32), client, jnp.asarray(sizes[client])))
    first = np.asarray(partition.offsets)[np.asarray(client)][..., None, None]
    last = len(partition.indices) - 1  # a client without examples may begin after it
    rows = np.asarray(partition.indices)[np.minimum(first + np.maximum(place, 0), last)]
    return np.where((place >= 0) & (np.asarray(cohorts.weight) > 0)[..., None, None], rows, -1)


def steps_of(work: Work, partition: Partition) -> Int[np.ndarray, "N"]:
    """Computes the number of local steps of every client, [N]; each takes at least 1.

    One epoch of minibatches of size B has ``ceil(n_i / B)`` steps.

    Args:
        work: Local steps, or epochs and batch size.
        partition: Training rows of every client.
    """
    if work.steps is not None:
        return np.full(partition.num_clients, work.steps)
    per_epoch = 1 if work.batch_size is None else -(-np.asarray(partition.sizes) // work.batch_size)
    return np.maximum(per_epoch, 1) * np.full(partition.num_clients, work.epochs)


def contacted_clients(schedule: Schedule, cohorts: Cohort, seed: int | Key = 0) -> Int[np.ndarray, "R"]:
    """Counts the clients that get a model in each round of ``cohorts``, [R].

    Clients that drop out or are late after they got the model count too.

    Args:
        schedule: Schedule of the run.
        cohorts: Its cohorts, [R, S].
        seed: Seed or key of the run.
    """
    if schedule.contacted is None:
        return np.sum(np.asarray(cohorts.weight) > 0, axis=1)
    count, (init_key, sample_key) = schedule.contacted, streams.schedule_keys(streams.keys(seed).schedule)

    def one(state: PyTree, round_: Array) -> tuple[PyTree, Array]:
        state = schedule.sample(sample_key, state, round_)[1]
        return state, count(state)

    return np.asarray(jax.lax.scan(one, schedule.init(init_key), jnp.arange(len(cohorts.client)))[1])
