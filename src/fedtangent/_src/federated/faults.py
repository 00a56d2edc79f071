"""Faults of a round: clients that drop out, that are late, or that send invalid messages.

``dropout`` and ``stragglers`` turn a schedule into another one, whose cohorts theory can follow too. They draw the
faults separately, so that the schedule inside draws the same cohorts as without faults (common random numbers).
``finite`` decides which messages the server accepts. A client at fault counts as absent: its message is ignored, and
its state stays unchanged.

The wire ledger charges a model down for every client that the server contacted, even if the client then drops out or is
late, and a message up for every client that answered in time, even if the message is then rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Num

from fedtangent._src import pytrees, streams
from fedtangent._src.checks import choice, number, real_array, shown, whole
from fedtangent._src.types import Accept, Array, ArrayLike, Cohort, Key, Polled, PyTree, Schedule

DISTRIBUTIONS = ("lognormal", "exponential")
MOST_DELAY = 1000  # rounds: a server keeps so many models, and one more


class Contacted(NamedTuple):
    """The state of a schedule with faults.

    Attributes:
        inner: State of the schedule to which the fault was added.
        contacted: Number of models that the server sent to clients in the last round, before any fault: one for each
            client and each model that it was to train.
        asked: Client of each slot of ``inner``'s cohort, before this fault; the number of clients for an empty slot.
        waited: How long the server waited for answers in the last round, in the unit of ``mean_time``; 0 if no
            completion times are drawn.
    """

    inner: PyTree
    contacted: Int32[Array, ""]
    asked: Int32[Array, "S"]
    waited: Float32[Array, ""]


def dropout(schedule: Schedule, probability: float | Num[np.ndarray, "N"]) -> Schedule:
    """Returns ``schedule`` with dropout: in each round each client drops out at random, independently of the others.

    A client that drops out trains none of its models in that round.

    Args:
        schedule: The schedule.
        probability: Probability of dropping out, one for all clients or [N].

    Raises:
        ValueError: A probability outside [0, 1) (1 would leave no client), or probabilities of another shape.
    """
    chance = np.asarray(probability, np.float32)
    if chance.shape not in ((), (schedule.num_clients,)):
        of_each = f"one per client, [{schedule.num_clients}]"
        raise ValueError(f"probability: got shape {chance.shape}, must be one number or {of_each}")
    if not np.all((chance >= 0) & (chance < 1)):
        raise ValueError(f"probability: got {probability}, must be at least 0 and below 1")
    of_client = jnp.asarray(np.broadcast_to(chance, (schedule.num_clients,)))

    def pick(key: Key, cohort: Cohort, waited: Float[Array, ""]) -> tuple[Cohort, Float[Array, ""]]:
        draw = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (), jnp.float32))(cohort.client)
        return cohort._replace(weight=jnp.where(draw < of_client[cohort.client], 0, cohort.weight)), waited

    return _wrapped(schedule, schedule.num_slots, streams.DROPOUT, pick)


def stragglers(
    schedule: Schedule,
    keep: int,
    mean_time: ArrayLike = 1.0,
    distribution: str = "lognormal",
    spread: float = 1.0,
) -> Schedule:
    """Returns ``schedule`` with a server that closes a round after the first ``keep`` answers of the contacted clients.

    With ``uniform_sampling(N, 130)`` and ``keep=100`` the server contacts 130 clients and averages the first 100. The
    work of the other 30 is lost and not sent. The cohort has ``keep`` slots (places for one client and one model each),
    in order of completion. If fewer clients are contacted, the server waits for all of them, and slots stay empty.

    Args:
        schedule: The schedule that says which clients are contacted.
        keep: Number of answers after which the server closes the round; a client answers once for each of its models.
        mean_time: Expected completion time, one for all clients or [N] (for instance in proportion to their examples).
        distribution: "lognormal", ``mean_time * exp(spread z - spread^2 / 2)`` with z standard normal, or "exponential"
            with mean ``mean_time``. A client draws one time in a round, the same for all models.
        spread: Standard deviation of the log of a lognormal time.

    Raises:
        ValueError: ``keep`` is no whole number from 1 to the schedule's number of slots; times or a spread that are not
            positive and finite; times of another shape, or an unknown distribution.
    """
    keep = whole("keep", keep, 1, schedule.num_slots)
    choice("distribution", distribution, DISTRIBUTIONS)
    if not 0 < spread < math.inf:
        raise ValueError(f"spread: got {spread}, must be positive and finite")
    mean = np.asarray(mean_time, np.float32)
    if mean.shape not in ((), (schedule.num_clients,)) or not np.all((mean > 0) & np.isfinite(mean)):
        raise ValueError(
            f"mean_time: got {shown(mean_time)}, must be positive and finite, "
            f"one number or one per client, [{schedule.num_clients}]"
        )
    of_client = jnp.asarray(np.log(np.broadcast_to(mean, (schedule.num_clients,))))

    def log_time(
        key: Key, client: Int[Array, "*slots"]
    ) -> Float[Array, "*slots"]:  # times of a large spread are 0 in float32, and nobody first
        mine = jax.random.fold_in(key, client)
        if distribution == "exponential":
            return of_client[client] + jnp.log(jax.random.exponential(mine, (), jnp.float32))
        return of_client[client] + spread * jax.random.normal(mine, (), jnp.float32) - spread**2 / 2

    def pick(key: Key, cohort: Cohort, waited: Float[Array, ""]) -> tuple[Cohort, Float[Array, ""]]:
        log_times = jax.vmap(lambda i: log_time(key, i))(cohort.client)
        first = jnp.argsort(jnp.where(cohort.weight > 0, log_times, jnp.inf))[:keep]
        first_cohort: Cohort = pytrees.take(cohort, first)
        return first_cohort, jnp.max(jnp.where(first_cohort.weight > 0, jnp.exp(log_times[first]), 0), initial=waited)

    return _wrapped(schedule, keep, streams.STRAGGLERS, pick)


def delay_probabilities(
    mean_time: ArrayLike, most: int, distribution: str = "lognormal", spread: float = 1.0
) -> Float64[np.ndarray, "*N ages"]:
    """Computes from clients' speeds how likely their answers are to arrive 0, 1, 2, ... rounds late.

    An answer that takes a time t, in rounds, arrives d rounds late if d <= t < d + 1.

    Args:
        mean_time: Expected time of an answer in rounds of the server, one for all clients or [N].
        most: Largest delay D; answers that take longer count as D rounds late.
        distribution, spread: Distribution of the times, as in ``stragglers``.

    Returns:
        Probabilities of the delays 0 to D, [D + 1] or [N, D + 1], for ``Staleness``.

    Raises:
        ValueError: An unknown distribution, times or a spread that are not positive and finite, times of another shape,
            or D outside 0 .. 1000.
    """
    choice("distribution", distribution, DISTRIBUTIONS)
    number("spread", spread, above=0)
    mean = real_array("mean_time", mean_time)
    if mean.ndim > 1 or not np.all((mean > 0) & np.isfinite(mean)):
        raise ValueError(f"mean_time: got {shown(mean_time)}, must be positive, finite, one number or one per client")
    ends = np.arange(1, whole("most", most, 0, MOST_DELAY) + 1) / mean[..., None]
    lognormal = distribution == "lognormal"
    import scipy.special  # here: it is heavy, and few runs need it

    below = scipy.special.ndtr((np.log(ends) + spread**2 / 2) / spread) if lognormal else -np.expm1(-ends)
    return np.diff(below, axis=-1, prepend=0.0, append=1.0)


def round_times(schedule: Schedule, key: Key, num_rounds: int) -> Float[Array, "num_rounds"]:
    """Simulates how long the server waits in each of the first R rounds, [R] float32, in the unit of ``mean_time``.

    Under a schedule with ``dropout`` only, all times are 0.

    Args:
        schedule: A schedule made by ``stragglers``, perhaps with ``dropout`` around it.
        key: Key of the schedule, ``streams.keys(seed).schedule``.
        num_rounds: Rounds R.

    Raises:
        ValueError: A schedule without ``stragglers`` or ``dropout``, or one that polls clients.
    """
    init_key, sample_key = streams.schedule_keys(key)
    start = schedule.init(init_key)
    if not isinstance(start, Contacted):
        raise ValueError("schedule: got one without completion times, must be made by faults.stragglers")

    def one(state: Contacted, round_: Int[Array, ""]) -> tuple[Contacted, Float[Array, ""]]:
        state = schedule.sample(sample_key, state, round_)[1]
        return state, state.waited

    return jax.lax.scan(one, start, jnp.arange(num_rounds))[1]


def _wrapped(
    schedule: Schedule, num_slots: int, stream: int, pick: Callable[[Key, Cohort, Array], tuple[Cohort, Array]]
) -> Schedule:
    """Returns ``schedule`` with a fault applied to every cohort that it draws, which then has the length ``num_slots``.

    ``pick(key, cohort, waited) -> (cohort, waited)`` applies the fault, with a new key in every round; ``waited`` is
    how long the server waits in this round, 0 before the first fault. ``stream`` separates the random
    numbers of this kind of fault from others.
    """

    def init(key: Key) -> Contacted:
        return Contacted(schedule.init(key), jnp.int32(0), jnp.zeros(schedule.num_slots, jnp.int32), jnp.float32(0))

    def at_fault(key: Key, round_: Int[Array, ""], cohort: Cohort, inner: PyTree) -> tuple[Cohort, Contacted]:
        fault_key = jax.random.fold_in(streams.apart(key, stream), round_)
        asked = jnp.where(cohort.weight > 0, cohort.client, schedule.num_clients)
        before = inner.waited if isinstance(inner, Contacted) else jnp.float32(0)
        picked, waited = pick(jax.random.fold_in(fault_key, _depth(inner)), cohort, before)
        return picked, Contacted(inner, num_contacted(schedule, cohort, inner), asked, waited)

    def sample(key: Key, state: Contacted, round_: Int[Array, ""]) -> tuple[Cohort, Contacted]:
        return at_fault(key, round_, *schedule.sample(key, state.inner, round_))

    def choose(key: Key, state: Contacted, round_: Int[Array, ""], polled: Polled) -> tuple[Cohort, Contacted]:
        assert schedule.poll is not None
        return at_fault(key, round_, *schedule.poll.choose(key, state.inner, round_, polled))

    poll = None if schedule.poll is None else schedule.poll._replace(choose=choose)
    numbers = schedule.num_models, schedule.num_clients, num_slots
    return Schedule(*numbers, init, sample, lambda state: state.contacted, poll, schedule.slots_per_model)


def _depth(state: PyTree) -> int:
    """Returns how many faults a schedule's state wraps; the number makes the random draws of each fault different."""
    return 1 + _depth(state.inner) if isinstance(state, Contacted) else 0


def num_contacted(
    schedule: Schedule, cohort: Cohort, state: PyTree, sizes: Int[Array, "N"] | None = None
) -> Int[Array, ""]:
    """Returns how many models the server sent to clients in a round, [] int32.

    A client that trains several models counts once for each. Models for clients that then drop out or are late count
    too.

    Args:
        schedule: The schedule that drew the round.
        cohort: The cohort of the round.
        state: State of the schedule after it drew this cohort.
        sizes: Numbers of examples of the N clients, to leave out clients without examples; None to count these, too.
            Without faults these clients already have weight 0 in ``cohort``.
    """
    if schedule.contacted is None:
        return jnp.sum(cohort.weight > 0, dtype=jnp.int32)
    count = schedule.contacted(state)
    if sizes is None or not isinstance(state, Contacted):
        return count
    first = state
    while isinstance(first.inner, Contacted):
        first = first.inner
    return count - jnp.sum(sizes.at[first.asked].get(mode="fill", fill_value=1) == 0, dtype=jnp.int32)


def finite(max_norm: float = math.inf) -> Accept:
    """Builds a test of messages, which accepts those whose numbers are finite and whose norm is at most ``max_norm``.

    Args:
        max_norm: Largest Euclidean norm of a message, over all its floating numbers; by default any finite message is
            accepted.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm}, must be positive")

    def accept(message: PyTree) -> Bool[Array, ""]:
        numbers = [leaf for leaf in jax.tree.leaves(message) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        good = jnp.bool_(True)
        for leaf in numbers:
            good &= jnp.all(jnp.isfinite(leaf))
        if max_norm < math.inf:
            good &= pytrees.norm(numbers) <= max_norm
        return good

    accept.max_norm = max_norm  # type: ignore[attr-defined]  # theory follows a server that rejects nothing finite
    return accept
