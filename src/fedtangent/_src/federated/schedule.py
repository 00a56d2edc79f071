"""Schedules: which client trains which model in which round.

A schedule draws a ``Cohort`` of S slots for each round, with weight 1 in a filled slot and 0 in an empty one
(``gradient_norm_sampling`` has other weights); ``compose`` multiplies the weights by the clients' sizes, unless the
weighting is uniform. Draws depend only on the schedule's key, so the cohorts of a run can be drawn without training
(``drawn_cohorts``).

A schedule with a ``Poll`` first asks clients for the loss or gradient norm of the current models
(``polling.answers``) and chooses the cohort by their answers. Its cohorts are therefore known only in a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32

from fedtangent._src import streams
from fedtangent._src.checks import choice, flag, instance, number, whole
from fedtangent._src.entries import Entry
from fedtangent._src.federated.graph import Graph, check_stochastic, metropolis_hastings, named_graph
from fedtangent._src.types import Array, Cohort, Key, Partition, Poll, Polled, PyTree, Schedule

WEIGHTINGS = ("examples", "uniform")
MEASURES = ("loss", "gradient_norm")  # what a poll asks for
FITS = ("worst", "best")


def _memoryless(num_models: int, num_clients: int, num_slots: int, draw: Callable[[Key, Array], Cohort]) -> Schedule:
    """Builds a schedule without a state, whose cohort ``draw(key, round)`` depends only on the key and the round.

    ``num_slots`` is the length S of a cohort. Raises ``ValueError`` for numbers of clients or models below 1.
    """
    whole("num_clients", num_clients)
    whole("num_models", num_models)

    def sample(key: Key, state: tuple[()], round_: Int[Array, ""]) -> tuple[Cohort, tuple[()]]:
        return draw(key, round_), state

    return Schedule(num_models, num_clients, num_slots, lambda key: (), sample)


def _cohort(client: Int[Array, "S"], model: Int[Array, "S"], filled: Bool[Array, "S"] | None = None) -> Cohort:
    weight = jnp.ones(client.shape, jnp.float32) if filled is None else filled.astype(jnp.float32)
    return Cohort(client.astype(jnp.int32), model.astype(jnp.int32), weight)


def _distinct(key: Key, num_clients: int, number: int) -> Int32[Array, "number"]:
    """Draws ``number`` distinct clients, uniformly and in random order, [number] int32."""
    if 8 * number > num_clients:
        return jax.random.permutation(key, num_clients)[:number].astype(jnp.int32)

    def draw(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:  # with repetitions, which are dropped
        attempt = carry[0]
        candidates = jax.random.randint(jax.random.fold_in(key, attempt), (2 * number,), 0, num_clients, jnp.int32)
        order = jnp.argsort(candidates, stable=True)
        ranked = candidates[order]
        repeated = jnp.concatenate([jnp.zeros((1,), bool), ranked[1:] == ranked[:-1]])
        fresh = jnp.zeros((2 * number,), bool).at[order].set(~repeated)
        place = jnp.where(fresh, jnp.cumsum(fresh) - 1, number)  # out of range: dropped
        chosen = jnp.zeros((number,), jnp.int32).at[place].set(candidates, mode="drop")
        return attempt + 1, chosen, jnp.sum(fresh)

    first = (jnp.int32(0), jnp.zeros((number,), jnp.int32), jnp.sum(jnp.zeros((1,), bool)))
    return jax.lax.while_loop(lambda carry: carry[2] < number, draw, first)[1]


def all_clients(num_clients: int, num_models: int = 1) -> Schedule:
    """Builds the schedule under which every client trains every model in every round.

    A cohort has S = K N slots (places for one client and one model each), ordered by model. A client draws the same
    minibatches for all models, so models differ only by their start.

    Args:
        num_clients: Clients N.
        num_models: Models K.

    Raises:
        ValueError: A number below 1.
    """

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        return _cohort(jnp.tile(jnp.arange(num_clients), num_models), jnp.repeat(jnp.arange(num_models), num_clients))

    return _memoryless(num_models, num_clients, num_models * num_clients, draw)


def uniform_sampling(num_clients: int, clients_per_round: int) -> Schedule:
    """Builds the schedule of FedAvg: in each round distinct clients, drawn uniformly, train the single model.

    Args:
        num_clients: Clients N.
        clients_per_round: Clients of a round, which is the length S of a cohort.

    Raises:
        ValueError: ``num_clients`` below 1, or ``clients_per_round`` outside 1 .. N.
    """
    whole("clients_per_round", clients_per_round, 1, whole("num_clients", num_clients))

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        client = _distinct(jax.random.fold_in(key, round_), num_clients, clients_per_round)
        return _cohort(client, jnp.zeros_like(client))

    return _memoryless(1, num_clients, clients_per_round, draw)


def poisson_sampling(num_clients: int, rate: float) -> Schedule:
    """Builds the schedule under which each client trains the single model with probability ``rate`` in each round.

    Clients are drawn independently. A cohort has S = N slots (places), one for each client; any number of them may be
    filled, even none. ``measures.epsilon`` bounds the privacy loss with ``sampling="poisson"``.

    Args:
        num_clients: Clients N.
        rate: Probability that a client takes part in a round.

    Raises:
        ValueError: A rate outside (0, 1], or ``num_clients`` below 1.
    """
    number("rate", rate, above=0, at_most=1)

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        draws = jax.random.uniform(jax.random.fold_in(key, round_), (num_clients,), jnp.float32)
        return _cohort(jnp.arange(num_clients), jnp.zeros(num_clients, jnp.int32), draws < rate)

    return _memoryless(1, num_clients, num_clients, draw)


def per_client_permutations(num_clients: int, num_models: int) -> Schedule:
    """Builds the schedule of the paper FE-2024: each client trains the K models in a random order, one a round.

    This is algorithm 1 of the paper. Orders are independent, and drawn again every K rounds. All clients take part in
    every round, so a cohort has the length S = N.

    Args:
        num_clients: Clients N.
        num_models: Models K.

    Raises:
        ValueError: A number below 1.
    """

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        age, step = round_ // num_models, round_ % num_models
        draws = jax.random.uniform(jax.random.fold_in(key, age), (num_clients, num_models), jnp.float32)
        return _cohort(jnp.arange(num_clients), jnp.argsort(draws, axis=1)[:, step])

    return _memoryless(num_models, num_clients, num_clients, draw)


def random_models(num_clients: int, num_models: int) -> Schedule:
    """Builds the schedule under which each client trains a uniformly drawn model each round (paper FE-2024, table VII).

    All clients take part in every round, so a cohort has the length S = N.

    Args:
        num_clients: Clients N.
        num_models: Models K.

    Raises:
        ValueError: A number below 1.
    """

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        model = jax.random.randint(jax.random.fold_in(key, round_), (num_clients,), 0, num_models)
        return _cohort(jnp.arange(num_clients), model)

    return _memoryless(num_models, num_clients, num_clients, draw)


def mixed_permutations(num_clients: int, num_models: int) -> Schedule:
    """Builds the schedule of the paper FE-2024's published code: permutations, but only for the first K clients.

    Clients 0 .. K - 1 train the K models in random orders; every other client trains a model drawn uniformly, as in
    ``random_models``. Orders are drawn again after the rounds 0, K, 2K, ..., so the first order serves only round 0.
    All clients take part in every round, so a cohort has the length S = N. The schedule that the paper describes is
    ``per_client_permutations`` (erratum `fe2024.code`).

    Args:
        num_clients: Clients N.
        num_models: Models K.

    Raises:
        ValueError: More models than clients, which the published code does not allow, or a number below 1.
    """
    if num_models > num_clients:
        raise ValueError(f"num_models: got K = {num_models}, must be at most num_clients = {num_clients}")

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        age, step = (round_ + num_models - 1) // num_models, round_ % num_models
        order_key, draw_key = jax.random.split(key)
        draws = jax.random.uniform(jax.random.fold_in(order_key, age), (num_models, num_models), jnp.float32)
        ordered = jnp.argsort(draws, axis=1)[:, step].astype(jnp.int32)
        free = (num_clients - num_models,)
        random = jax.random.randint(jax.random.fold_in(draw_key, round_), free, 0, num_models, jnp.int32)
        return _cohort(jnp.arange(num_clients), jnp.concatenate([ordered, random]))

    return _memoryless(num_models, num_clients, num_clients, draw)


def strata(num_clients: int, num_models: int, num_strata: int, clients_per_stratum: int | None = None) -> Schedule:
    """Builds the schedule of the paper FE-2021: in each round every group of clients (stratum) trains one model.

    Clients are divided at random into Q strata of equal size (to within one). Every K rounds a Q x K matrix P is drawn
    whose rows are permutations of the models. In the r-th of these rounds stratum q trains model ``P[q, r]`` on
    ``clients_per_stratum`` of its clients, drawn without replacement (the paper's algorithm 1, with erratum
    `fe2021.algorithm1`).

    Args:
        num_clients: Clients N.
        num_models: Models K.
        num_strata: Strata Q.
        clients_per_stratum: Clients drawn from each stratum in a round, at most N // Q; None for all of them.

    Raises:
        ValueError: A number below 1, more strata than clients, or ``clients_per_stratum`` above N // Q.
    """
    whole("num_models", num_models)
    whole("num_strata", num_strata, 1, whole("num_clients", num_clients))
    largest = -(-num_clients // num_strata)
    per_stratum = largest if clients_per_stratum is None else clients_per_stratum
    if clients_per_stratum is not None:  # the smallest stratum holds so many
        whole("clients_per_stratum", clients_per_stratum, 1, num_clients // num_strata)

    def init(key: Key) -> Int32[Array, "Q largest"]:
        """Draws the members of each stratum, [Q, largest] int32; -1 fills up a stratum that is one client short."""
        order = jax.random.permutation(key, num_clients)
        padded = jnp.full((largest * num_strata,), -1).at[:num_clients].set(order)
        return padded.reshape(largest, num_strata).T.astype(jnp.int32)

    def sample(
        key: Key, members: Int32[Array, "Q largest"], round_: Int[Array, ""]
    ) -> tuple[Cohort, Int32[Array, "Q largest"]]:
        age, step = round_ // num_models, round_ % num_models
        order_key, pick_key = jax.random.split(key)
        draws = jax.random.uniform(jax.random.fold_in(order_key, age), (num_strata, num_models), jnp.float32)
        model = jnp.argsort(draws, axis=1)[:, step]
        ticket = jax.random.uniform(jax.random.fold_in(pick_key, round_), members.shape, jnp.float32)
        order = jnp.argsort(jnp.where(members >= 0, ticket, jnp.inf), axis=1)[:, :per_stratum]
        picked = jnp.take_along_axis(members, order, axis=1).reshape(-1)
        return _cohort(jnp.maximum(picked, 0), jnp.repeat(model, per_stratum), picked >= 0), members

    return Schedule(num_models, num_clients, num_strata * per_stratum, init, sample)


def drawn_cohorts(
    schedule: Schedule,
    partition: Partition | None,
    num_rounds: int,
    seed: int | Key = 0,
    weighting: str | None = "examples",
) -> Cohort:
    """Returns the cohorts that a run of this seed draws, as NumPy arrays [R, S]; no network is trained.

    An entry [r, s] is a slot: one client that trains one model in round r, or an empty place of weight 0. Theory
    follows these cohorts. Weights are computed independently of the simulator, so that a simulator that weighs clients
    wrongly disagrees with theory. The weight of a filled slot is its client's number of examples (as in FedAvg; eq. 1
    of the paper FE-2021). With ``weighting="uniform"`` it is 1, or 0 for a client without examples. Either is
    multiplied by the weight that the schedule gave to the slot. Weights do not sum to 1: a model's messages are
    averaged in proportion to them.

    Args:
        schedule: The schedule.
        partition: The clients' examples; may be None if ``weighting`` is None.
        num_rounds: Rounds R.
        seed: Seed or key of the run.
        weighting: The algorithm's weighting, "examples" or "uniform"; None for the schedule's weights.

    Raises:
        ValueError: ``num_rounds`` is not a whole number of at least 1, the seed is invalid, the weighting is unknown,
            it needs a partition and got none, the schedule polls clients, or the partition and the schedule have
            different numbers of clients.
    """
    whole("num_rounds", num_rounds)
    counts = None if weighting is None else _client_weights(schedule.num_clients, partition, weighting)
    client, model, filled = jax.tree.map(np.asarray, _unroll(schedule, streams.keys(seed).schedule, num_rounds))
    weight = filled if counts is None else np.where(filled > 0, filled * counts[client], 0.0)
    return Cohort(client, model, weight)  # type: ignore[arg-type]


def _client_weights(num_clients: int, partition: Partition | None, weighting: str) -> Float[np.ndarray, "num_clients"]:
    """Returns the weight of every client, [N]: its number of examples or, if uniform, 1 (0 without examples)."""
    choice("weighting", weighting, WEIGHTINGS)
    instance("partition", partition, Partition)
    assert partition is not None
    if partition.num_clients != num_clients:
        raise ValueError(f"partition: got {partition.num_clients} clients, but the schedule has {num_clients}")
    sizes = np.array([sum(1 for _ in partition.client(i)) for i in range(num_clients)], float)
    return sizes if weighting == "examples" else np.where(sizes > 0, 1.0, 0.0)


@partial(jax.jit, static_argnames=("schedule", "num_rounds"))
def _unroll(schedule: Schedule, key: Key, num_rounds: int) -> Cohort:
    """Draws the schedule's cohorts of the first ``num_rounds`` rounds, [R, S]; ``key`` is the run's schedule key."""
    init_key, sample_key = streams.schedule_keys(key)

    def one(state: object, round_: Int[Array, ""]) -> tuple[object, Cohort]:
        cohort, state = schedule.sample(sample_key, state, round_)
        return state, cohort

    return jax.lax.scan(one, schedule.init(init_key), jnp.arange(num_rounds))[1]


def random_walk(graph: Graph, num_models: int = 1, transition: Float[np.ndarray, "N N"] | None = None) -> Schedule:
    """Builds the schedule of Fed-ensemble Random Walk (paper FE-2024, section V-H): K models walk over a client graph.

    In every round each model is trained by the client at which it is. It then walks along an edge to another client, or
    stays if ``transition`` allows it. So a cohort has the length S = K. Each model starts at a client drawn uniformly
    and walks independently of the others (the paper only says "independently"). Models may meet at one client, which
    then trains each of them, and K may exceed N. With the default transition a model is at each client with probability
    1/N in every round. The schedule's state is the client at which each model is, [K] int32.

    Args:
        graph: Graph of the clients.
        num_models: Models K.
        transition: Probabilities [N, N] of walking from client i (row) to client j (column); rows sum to 1, and entries
            are 0 except along edges and on the diagonal. By default ``graphs.metropolis_hastings``, whose stationary
            distribution is uniform.

    Raises:
        ValueError: ``num_models`` is below 1, ``graph`` is no ``Graph``, or ``transition`` has another shape, is not
            stochastic, or is positive for a pair that is no edge.
    """
    instance("graph", graph, Graph)
    nodes = graph.num_nodes
    whole("num_models", num_models)
    matrix = np.asarray(metropolis_hastings(graph) if transition is None else transition, np.float64)
    if matrix.shape != (nodes, nodes):
        raise ValueError(f"transition: got shape {matrix.shape}, must be [{nodes}, {nodes}], a row for each node")
    check_stochastic("transition", matrix)
    strange = np.argwhere((matrix > 0) & ~graph.adjacency & ~np.eye(nodes, dtype=bool))
    if len(strange):
        i, j = strange[0]
        raise ValueError(f"transition: moves from node {i} to node {j}, between which {graph.name} has no edge")
    limits = jnp.asarray(cumulative(matrix))
    model = jnp.arange(num_models, dtype=jnp.int32)

    def init(key: Key) -> Int32[Array, "K"]:
        return jax.random.randint(key, (num_models,), 0, nodes, jnp.int32)

    def sample(key: Key, at: Int32[Array, "K"], round_: Int[Array, ""]) -> tuple[Cohort, Int32[Array, "K"]]:
        draw = jax.random.uniform(jax.random.fold_in(key, round_), (num_models,), jnp.float32)
        moved = jnp.sum(limits[at] <= draw[:, None], axis=1, dtype=jnp.int32)
        return _cohort(at, model), moved

    return Schedule(num_models, nodes, num_models, init, sample)


def own_models(num_clients: int) -> Schedule:
    """Builds the schedule of gossip: in every round client k trains model k and no other, so K = S = N."""

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        return _cohort(jnp.arange(num_clients), jnp.arange(num_clients))

    return _memoryless(num_clients, num_clients, num_clients, draw)


def by_poll(
    num_models: int,
    num_clients: int,
    num_slots: int,
    poll: Poll,
    init: Callable[[Key], PyTree] = lambda key: (),
) -> Schedule:
    """Builds a schedule that asks clients about the current models and chooses each cohort by their answers.

    Args:
        num_models: Models K.
        num_clients: Clients N.
        num_slots: Slots S of a round's cohort, each for one client that trains one model.
        poll: Which clients are asked, for the loss or the gradient norm, and the function that chooses the cohort.
        init: Draws the schedule's first state from a key; by default the schedule has no state.

    Raises:
        ValueError: A number below 1, more candidates than clients, or a measure other than "loss" and "gradient_norm".
            When cohorts are drawn without a run (``drawn_cohorts``): always.
    """
    whole("num_clients", num_clients)
    whole("num_models", num_models)
    whole("num_slots", num_slots)
    instance("poll", poll, Poll)
    whole("num_candidates", poll.num_candidates, 1, num_clients)
    choice("measure", poll.measure, MEASURES)
    whole("num_answers", poll.num_answers)

    def sample(key: Key, state: PyTree, round_: Int[Array, ""]) -> tuple[Cohort, PyTree]:
        raise ValueError(
            "schedule: got one that chooses clients by what they answer about the models, must be one that draws its "
            "cohorts before training, such as uniform_sampling; a run records its cohorts in history.rounds"
        )

    return Schedule(num_models, num_clients, num_slots, init, sample, poll=poll)


def power_of_choice(num_clients: int, candidates: int, clients_per_round: int) -> Schedule:
    """Builds power-of-choice (Cho et al., 2020, section 4): of D sampled clients, those with the largest losses train.

    The D candidates are drawn one after another without replacement, in proportion to their numbers of examples. Of
    equal losses the candidate that was drawn first counts as larger. Clients without examples never train, even if
    fewer than ``clients_per_round`` others exist. The paper averages the chosen clients uniformly:
    ``Averaging(weighting="uniform")``.

    Args:
        num_clients: Clients N.
        candidates: Clients D that are asked for their losses in a round.
        clients_per_round: Clients that train in a round, which is the length S of a cohort; at most ``candidates``.

    Raises:
        ValueError: A number below 1, more candidates than clients, or ``clients_per_round`` above ``candidates``.
    """
    whole("candidates", candidates, 1, whole("num_clients", num_clients))
    whole("clients_per_round", clients_per_round, 1, candidates)

    def drawn(key: Key, round_: Int[Array, ""], sizes: Int[Array, "N"]) -> Int32[Array, "D"]:
        times = jax.random.exponential(jax.random.fold_in(key, round_), (num_clients,), jnp.float32)
        first = jnp.argsort(jnp.where(sizes > 0, times / jnp.maximum(sizes, 1), jnp.inf))  # arrivals at rates ``sizes``
        return first[:candidates].astype(jnp.int32)

    def choose(key: Key, state: PyTree, round_: Int[Array, ""], polled: Polled) -> tuple[Cohort, PyTree]:
        loss = jnp.where(polled.weight > 0, polled.value[0], -jnp.inf)
        largest = jnp.argsort(-loss, stable=True)[:clients_per_round]
        client = polled.client[largest]
        return _cohort(client, jnp.zeros_like(client), polled.weight[largest] > 0), state

    return by_poll(1, num_clients, clients_per_round, Poll(candidates, drawn, choose))


def gradient_norm_sampling(num_clients: int, clients_per_round: int) -> Schedule:
    """Builds optimal client sampling (Chen et al., 2022, eq. 7): clients with large gradients train more often.

    Each client reports the norm ``|g_i|`` of the gradient g_i of its loss at the current model. It then trains with
    probability ``min(1, c w_i |g_i|)``, independently, where w_i is its weight and c makes the expected number of
    clients ``clients_per_round`` (fewer, if fewer gradients are nonzero). Messages are divided by these probabilities
    and by the weight of all clients, so that their sum estimates the mean over all clients without bias, and with the
    least variance where updates are gradients (``fed_sgd``). The paper's FedAvg uses norms of whole updates, which
    clients know only after training. If all gradients are 0, no client trains.

    Args:
        num_clients: Clients N, which is also the length S of a cohort; clients that do not train have weight 0 in it.
        clients_per_round: Expected number of clients that train in a round.

    Raises:
        ValueError: ``num_clients`` below 1, or ``clients_per_round`` outside 1 .. N.
    """
    expected = whole("clients_per_round", clients_per_round, 1, whole("num_clients", num_clients))

    def choose(key: Key, state: PyTree, round_: Int[Array, ""], polled: Polled) -> tuple[Cohort, PyTree]:
        most = jnp.finfo(polled.value.dtype).max / num_clients**2  # so that sums of infinite norms are finite
        chance = _chances(jnp.minimum(polled.weight * polled.value[0], most), expected)
        draws = jax.random.uniform(jax.random.fold_in(key, round_), (num_clients,), jnp.float32)
        weight = jnp.where(draws < chance, 1 / jnp.where(chance > 0, chance, 1), 0)
        return Cohort(polled.client, jnp.zeros_like(polled.client), weight), state

    poll = Poll(num_clients, _everyone, choose, "gradient_norm", inverse_weights=True)
    return by_poll(1, num_clients, num_clients, poll)


def _everyone(key: Key, round_: Int[Array, ""], sizes: Int[Array, "N"]) -> Int32[Array, "N"]:
    return jnp.arange(sizes.shape[0], dtype=jnp.int32)


def _some_of(num_clients: int, number: int) -> Callable[[Key, Array, Array], Array]:
    """Returns the function ``(key, round, sizes) -> clients`` that draws ``number`` distinct clients uniformly."""
    if number == num_clients:
        return _everyone
    return lambda key, round_, sizes: _distinct(jax.random.fold_in(key, round_), num_clients, number)


def _chances(norms: Float[Array, "N"], expected: int) -> Float[Array, "N"]:
    """Computes probabilities proportional to ``norms`` and at most 1, whose sum is ``expected`` (Chen et al., 2022).

    If fewer than ``expected`` norms are above 0, the sum is their number.
    """
    rising = jnp.sort(norms)
    total = jnp.cumsum(rising)
    share = jnp.arange(1, len(norms) + 1) + expected - len(norms)  # of the l smallest norms, l = 1, .., N
    fits = (share > 0) & (share.astype(total.dtype) * rising <= total)
    last = len(norms) - 1 - jnp.argmax(fits[::-1])  # l of eq. 7; larger norms have probability 1
    in_proportion = share[last].astype(total.dtype) * norms / jnp.where(total[last] > 0, total[last], 1)
    return jnp.where(norms > rising[last], 1, jnp.minimum(in_proportion, 1))


def _slots_of(num_clients: int, clients_per_round: int | None) -> int:
    """Returns ``clients_per_round``, by default ``num_clients``; raises ``ValueError`` if it is outside 1 .. N."""
    slots = whole("num_clients", num_clients) if clients_per_round is None else clients_per_round
    return whole("clients_per_round", slots, 1, num_clients)


def best_fitting(num_clients: int, num_models: int, clients_per_round: int | None = None) -> Schedule:
    """Builds the schedule of IFCA (Ghosh et al., 2020, algorithm 1): each client trains the model that fits it best.

    In each round clients are drawn uniformly and receive all K models. Each trains the model with the lowest loss on
    its examples (the first one, if several have the same loss), and tells the server which one it chose. With
    ``fed_avg`` and ``Averaging(weighting="uniform")`` this is the paper's model averaging. The models must start at
    different parameters, as they do by default.

    Args:
        num_clients: Clients N.
        num_models: Models K, the clusters of the paper.
        clients_per_round: Clients of a round, which is the length S of a cohort; None for all of them.

    Raises:
        ValueError: A number below 1, or ``clients_per_round`` above N.
    """
    slots = _slots_of(num_clients, clients_per_round)

    def choose(key: Key, state: PyTree, round_: Int[Array, ""], polled: Polled) -> tuple[Cohort, PyTree]:
        return _cohort(polled.client, jnp.argmin(polled.value, axis=0)), state

    return by_poll(num_models, num_clients, slots, Poll(slots, _some_of(num_clients, slots), choose))


def assigned_by_loss(
    num_clients: int, num_models: int, clients_per_round: int | None = None, fit: str = "worst"
) -> Schedule:
    """Builds a schedule by which models take turns to pick clients by loss, so that all models get as many clients.

    In each round clients are drawn uniformly and report their losses under all K models. The models then pick in turn,
    starting with model ``round mod K``. Each picks, among the clients not yet picked, the one on which its loss is
    largest ("worst") or smallest ("best"). So each client trains one model, and the models' numbers of clients differ
    by at most one, as under the schedules of Fed-ensemble. The authors of Fed-ensemble leave an assignment by loss to
    future work.

    Args:
        num_clients: Clients N.
        num_models: Models K.
        clients_per_round: Clients of a round, which is the length S of a cohort; None for all of them.
        fit: "worst" or "best": which client a model picks.

    Raises:
        ValueError: A number out of range, or another ``fit``.
    """
    slots = _slots_of(num_clients, clients_per_round)
    choice("fit", fit, FITS)

    def choose(key: Key, state: PyTree, round_: Int[Array, ""], polled: Polled) -> tuple[Cohort, PyTree]:
        wish = polled.value if fit == "worst" else -polled.value
        # ranks, so that a client without examples comes last, after infinite losses
        rank = jnp.argsort(jnp.argsort(jnp.where(polled.weight[None] > 0, wish, -jnp.inf), axis=1), axis=1)

        def turn(is_free: Bool[Array, "S"], model: Int[Array, ""]) -> tuple[Bool[Array, "S"], Int[Array, ""]]:
            candidate = jnp.argmax(jnp.where(is_free, rank[model], -1))
            return is_free.at[candidate].set(False), candidate

        model = (jnp.arange(slots, dtype=jnp.int32) + round_) % num_models
        chosen = jax.lax.scan(turn, jnp.ones(slots, bool), model)[1]
        return _cohort(polled.client[chosen], model), state

    poll = Poll(slots, _some_of(num_clients, slots), choose, num_answers=num_models)
    return by_poll(num_models, num_clients, slots, poll)


def neighbourhoods(graph: Graph, dynamic: bool = False) -> Schedule:
    """Builds the schedule of NTK-DFL: in every round client i and its neighbours train model i, so K = N.

    A cohort has an entry for each client with its own model, and two for each edge of the graph.

    Args:
        graph: Graph of the clients.
        dynamic: Whether the clients are assigned anew to the nodes of the graph in every round, uniformly at random;
            otherwise client i is always node i.

    Raises:
        ValueError: ``graph`` is no ``Graph``, or ``dynamic`` is no bool.
    """
    instance("graph", graph, Graph)
    flag("dynamic", dynamic)
    nodes = graph.num_nodes
    model, client = np.nonzero(graph.adjacency | np.eye(nodes, dtype=bool))

    def draw(key: Key, round_: Int[Array, ""]) -> Cohort:
        places = jnp.arange(nodes)
        if dynamic:
            places = jax.random.permutation(jax.random.fold_in(key, round_), places)
        return _cohort(places[client], places[model])

    schedule = _memoryless(nodes, nodes, len(model), draw)
    return schedule._replace(slots_per_model=1 + int(graph.degrees.max()))


def cumulative(matrix: Float[np.ndarray, "rows columns"]) -> Float32[np.ndarray, "rows columns"]:
    """Returns the cumulative sum of each row of probabilities, by which a uniform number is turned into a draw.

    From the last nonzero entry on it is exactly 1, despite rounding, so that an entry of probability 0 is never drawn.

    Args:
        matrix: Probabilities [rows, columns] that sum to 1 in each row.
    """
    sums = np.cumsum(matrix, axis=1)
    last = matrix.shape[1] - 1 - np.argmax(matrix[:, ::-1] > 0, axis=1)
    return np.where(np.arange(matrix.shape[1])[None] >= last[:, None], 1.0, np.minimum(sums, 1.0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SampledOptions:
    """The number of clients in a round: the option of schedules in which only some of the clients take part.

    If clients are drawn independently (``poisson``, ``gradient_norm``), it is the expected number.
    """

    clients_per_round: int | None = None
    """Clients of a round (default: everyone)."""


@dataclasses.dataclass(frozen=True)
class EnsembleOptions:
    """The number of models: the option of schedules that train an ensemble."""

    num_models: int = 5
    """Models K of the ensemble."""


@dataclasses.dataclass(frozen=True)
class StrataOptions(EnsembleOptions):
    """Options of the schedule ``strata``: numbers of models, of strata, and of clients that train in each stratum."""

    num_strata: int = 5
    """Number Q of strata: groups of clients."""
    clients_per_stratum: int | None = None
    """Clients drawn from each stratum in a round (default: all of them)."""


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """The text that describes the graph of the clients: the option of schedules on a graph."""

    graph: str = "ring"
    """ring, torus, complete or erdos_renyi:<probability>."""


@dataclasses.dataclass(frozen=True)
class CandidatesOptions(SampledOptions):
    """Options of the schedule ``power_of_choice``: how many clients report their losses, and how many train."""

    candidates: int | None = None
    """Clients that are asked for their losses in a round (default: everyone)."""


@dataclasses.dataclass(frozen=True)
class SampledEnsembleOptions(EnsembleOptions, SampledOptions):
    """Options of the schedule ``best_fitting``: the number of models, and of clients in a round."""


@dataclasses.dataclass(frozen=True)
class AssignedOptions(SampledEnsembleOptions):
    """Options of the schedule ``assigned_by_loss``: numbers of models and clients, and which clients a model picks."""

    fit: str = "worst"
    """worst or best: the client that a model takes in its turn."""


@dataclasses.dataclass(frozen=True)
class WalkOptions(GraphOptions, EnsembleOptions):
    """Options of the schedule ``random_walk``: the graph of the clients and the number of models."""


@dataclasses.dataclass(frozen=True)
class NeighbourhoodOptions(GraphOptions):
    """Options of the schedule ``neighbourhoods``: the clients' graph, and whether they change nodes in each round."""

    dynamic: bool = False
    """Clients take other places in the graph in every round."""


def _cohort_size(options: SampledOptions, num_clients: int) -> int:
    return num_clients if options.clients_per_round is None else options.clients_per_round


ENTRIES = (
    Entry(
        "all",
        "every client trains every model every round",
        lambda o, num_clients, seed: all_clients(num_clients, o.num_models),
        EnsembleOptions,
    ),
    Entry(
        "uniform",
        "--clients-per-round clients drawn at random train the one model",
        lambda o, num_clients, seed: uniform_sampling(num_clients, _cohort_size(o, num_clients)),
        SampledOptions,
    ),
    Entry(
        "permutations",
        "every client trains the K models in its own random order (Fed-ensemble 2024, algorithm 1)",
        lambda o, num_clients, seed: per_client_permutations(num_clients, o.num_models),
        EnsembleOptions,
        ("shi2024",),
    ),
    Entry(
        "strata",
        "--num-strata strata, --clients-per-stratum of each (Fed-ensemble 2021, algorithm 1)",
        lambda o, num_clients, seed: strata(num_clients, o.num_models, o.num_strata, o.clients_per_stratum),
        StrataOptions,
        ("shi2021",),
    ),
    Entry(
        "mixed",
        "permutations for the first K clients, random models for the rest (the published code of Fed-ensemble)",
        lambda o, num_clients, seed: mixed_permutations(num_clients, o.num_models),
        EnsembleOptions,
        ("shi2024",),
    ),
    Entry(
        "poisson",
        "every client by itself with probability --clients-per-round / N (differential privacy)",
        lambda o, num_clients, seed: poisson_sampling(num_clients, _cohort_size(o, num_clients) / num_clients),
        SampledOptions,
    ),
    Entry(
        "random_walk",
        "K models walk over --graph (Fed-ensemble 2024, V-H)",
        lambda o, num_clients, seed: random_walk(named_graph(o.graph, num_clients, seed), o.num_models),
        WalkOptions,
        ("shi2024",),
    ),
    Entry(
        "neighbourhoods",
        "every client and its neighbours on --graph train the client's model (NTK-DFL)",
        lambda o, num_clients, seed: neighbourhoods(named_graph(o.graph, num_clients, seed), o.dynamic),
        NeighbourhoodOptions,
        ("thompson2025",),
    ),
    Entry("own", "every client trains a separate model", lambda o, num_clients, seed: own_models(num_clients)),
    Entry(
        "random",
        "every client trains a model drawn at random (Fed-ensemble 2024, table VII)",
        lambda o, num_clients, seed: random_models(num_clients, o.num_models),
        EnsembleOptions,
        ("shi2024",),
    ),
    Entry(
        "power_of_choice",
        "of --candidates clients, the --clients-per-round with the largest losses train the one model",
        lambda o, num_clients, seed: power_of_choice(
            num_clients, num_clients if o.candidates is None else o.candidates, _cohort_size(o, num_clients)
        ),
        CandidatesOptions,
        ("cho2020",),
    ),
    Entry(
        "gradient_norm",
        "about --clients-per-round clients, more often those with large gradients, train the one model",
        lambda o, num_clients, seed: gradient_norm_sampling(num_clients, _cohort_size(o, num_clients)),
        SampledOptions,
        ("chen2022",),
    ),
    Entry(
        "best_fitting",
        "each of --clients-per-round clients trains the model that fits it best (IFCA)",
        lambda o, num_clients, seed: best_fitting(num_clients, o.num_models, o.clients_per_round),
        SampledEnsembleOptions,
        ("ghosh2020",),
    ),
    Entry(
        "assigned_by_loss",
        "the K models take turns to choose the client that they fit worst, or best (--fit)",
        lambda o, num_clients, seed: assigned_by_loss(num_clients, o.num_models, o.clients_per_round, o.fit),
        AssignedOptions,
    ),
)
