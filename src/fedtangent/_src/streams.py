"""The random streams of a run: all keys, and the numbers that are folded into them, in one place.

::

    seed -> init      -> one key for each of the K models
         -> schedule  -> first state of the schedule; key of its cohorts, into which the round is folded
         -> train     -> round -> client id -> update, send     the client's random numbers, its message's transport
                               -> SERVER    -> one key a model  the server's random numbers

So a client's random numbers depend only on the seed, the round and its id, and not on the order of the cohort. Client
ids, rounds and epochs, which are folded into keys, are below 2^31. The constants below name streams of other kinds.
They are at least 2^31, and so never equal an id, a round or an epoch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedtangent._src import checks
from fedtangent._src.pytrees import is_key
from fedtangent._src.types import Array, Key

_APART = 2**31

# Folded into a round's key, apart from client ids.
SERVER = _APART  # random numbers of servers
EMPTY = _APART + 1  # random numbers of servers for models that no client's message reached
# Folded into a server's key of a round, apart from the server's other random numbers.
SHUFFLER = _APART + 2
MASKS = _APART + 3
# Folded into a schedule's key, apart from rounds.
DROPOUT = _APART
STRAGGLERS = _APART + 1
CANDIDATES = _APART + 2  # of a poll
# Folded into a client's key for its update, apart from epochs.
PERSONAL = _APART  # its personal model's minibatches
SUBSAMPLE = _APART + 7
DELAYS = _APART + 8
# Folded into the key of the initial models.
MIXTURE = _APART  # draws from a mixture around the models


class Keys(NamedTuple):
    """The three independent random keys of a run, all derived from its seed.

    Attributes:
        init: Key of the models' initialisation.
        schedule: Key by which cohorts are drawn.
        train: Key of clients, messages and server in all rounds.
    """

    init: Key
    schedule: Key
    train: Key


def keys(seed: int | Key) -> Keys:
    """Returns the keys of a run's initialisation, schedule and training, derived from one seed.

    ``seed`` is a whole number from 0 to 2^32 - 1 or a typed key (``jax.random.key``), else ``ValueError`` is raised.
    """
    if isinstance(seed, jax.Array) and not (is_key(seed) and seed.shape == ()):
        raise ValueError(
            f"seed: got {checks.shown(seed)}, must be a whole number or one typed key (jax.random.key(..))"
        )
    return Keys(*_split(seed if isinstance(seed, jax.Array) else np.uint32(checks.seed(seed)), 3))


@functools.partial(jax.jit, static_argnames="count")
def _split(seed: Key, count: int) -> tuple[Key, ...]:
    return tuple(jax.random.split(seed if is_key(seed) else jax.random.key(seed), count))


def apart(key: Key, stream: int) -> Key:
    """Derives the key of a separate stream of random numbers, independent of all other streams, from ``key``.

    Args:
        key: A typed key.
        stream: One of this module's constants, such as ``SERVER``.
    """
    return jax.random.fold_in(key, jnp.uint32(stream))


def model_keys(init: Key, num_models: int) -> Key:
    """Returns a key for the initialisation of each model, [K].

    Args:
        init: A typed key.
        num_models: Number K of models.
    """
    return jax.random.split(init, num_models)


def schedule_keys(schedule: Key) -> tuple[Key, Key]:
    """Splits the key of a run's schedule into two keys: for the schedule's first state, and for drawing cohorts."""
    first, sample = _split(schedule, 2)
    return first, sample


def slot_keys(train: Key, round_: Array, client: Array) -> tuple[Key, Key]:
    """Returns two keys of a client in a round: for its update, and for sending its message.

    The keys do not depend on the model that the client trains.

    Args:
        train: Key of the run's training.
        round_: Number of the round, [] int32.
        client: Id of the client, [] int32.
    """
    update, send = jax.random.split(jax.random.fold_in(jax.random.fold_in(train, round_), client))
    return update, send


def server_keys(train: Key, round_: Array, num_models: int, stream: int = SERVER) -> Key:
    """Returns a key for each model, [K], for the server's random numbers in a round.

    Args:
        train: Key of the run's training.
        round_: Number of the round, [] int32.
        num_models: Models K.
        stream: ``SERVER``, or ``EMPTY`` for models that no client's message reached.
    """
    return jax.random.split(apart(jax.random.fold_in(train, round_), stream), num_models)
