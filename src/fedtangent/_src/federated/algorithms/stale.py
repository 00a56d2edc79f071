"""Asynchronous rounds: FedAsync and FedBuff, whose clients answer to the server's model of some rounds ago.

A round is one step of the server, and its cohort is the clients whose answers arrive: one client in FedAsync as
published, the buffer in FedBuff.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int

from fedtangent._src import pytrees, streams
from fedtangent._src.checks import choice, instance, number, real_array, shown
from fedtangent._src.federated.algorithms.common import (
    DEFAULT_WORK,
    Averaging,
    AveragingParts,
    train_and_average,
    trained,
)
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts
from fedtangent._src.federated.faults import MOST_DELAY
from fedtangent._src.federated.graph import TOLERANCE
from fedtangent._src.federated.local import Posed, Work, proximal
from fedtangent._src.federated.schedule import cumulative
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, rate_at
from fedtangent._src.types import (
    Algorithm,
    AnyArray,
    Array,
    ArrayLike,
    Client,
    Cost,
    FederatedData,
    Key,
    Local,
    Model,
    PyTree,
    RoundInfo,
    Schedule,
    Server,
    Training,
)

DISCOUNTS = ("constant", "polynomial", "hinge")


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The delays of the clients' answers, in rounds, and the weights of late answers.

    An answer of delay d in round r, counted from 0, is to the model that the server had d rounds ago. If d is above r,
    it is to the initial model, and its delay counts as r.
    """

    delay: int | Sequence[int] | np.ndarray = 1
    """Rounds by which every answer is late. In Python also one number for each client [N], such as its measured speed.
    """
    probabilities: ArrayLike | None = None
    """Probabilities of the delays 0 to D in place of ``delay``: of all clients [D + 1], or of each client [N, D + 1]. A
    client draws a new delay in every round, the same for all models.
    """
    discount: str = "polynomial"
    """Weight of an answer of delay d: constant, polynomial or hinge. These are 1, (1 + d)^-a, and 1 up to the delay b
    and then 1 / (1 + a (d - b))."""
    discount_rate: float = 0.5
    """The number a of the discount."""
    grace: int = 4
    """The number b of the discount hinge."""
    mu: float | Array = 0.0
    """Strength of the proximal term, which holds clients near the model that they received (FedAsync's rho)."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an unknown discount, or a number that is out of range."""
        choice("discount", self.discount, DISCOUNTS)
        for name in ("discount_rate", "grace", "mu"):
            number(name, getattr(self, name), at_least=0)
        delays = real_array("delay", self.delay)
        if delays.size == 0 or not np.all((delays >= 0) & (delays <= MOST_DELAY) & (delays % 1 == 0)):
            raise ValueError(f"delay: got {shown(self.delay)}, must be whole numbers from 0 to {MOST_DELAY}")

    def law(self, num_clients: int) -> Float64[np.ndarray, "_ ages"]:
        """Returns the probabilities of the delays, in one row for all clients [1, D + 1], or one for each [N, D + 1].

        Args:
            num_clients: Clients N.

        Raises:
            ValueError: Delays or probabilities of another shape, or probabilities that do not sum to 1.
        """
        if self.probabilities is None:
            delays = real_array("delay", self.delay).astype(int)
            if delays.shape not in ((), (num_clients,)):
                raise ValueError(f"delay: got shape {delays.shape}, must be one number or [{num_clients}]")
            return np.atleast_2d(np.eye(delays.max() + 1)[delays])
        rows = real_array("probabilities", self.probabilities)
        if rows.ndim not in (1, 2) or rows.shape[:-1] not in ((), (num_clients,)) or rows.shape[-1] > MOST_DELAY + 1:
            must = f"[D + 1] or [{num_clients}, D + 1], D up to {MOST_DELAY}"
            raise ValueError(f"probabilities: got shape {rows.shape}, must be {must}")
        if not (np.all(rows >= 0) and np.allclose(rows.sum(axis=-1), 1, rtol=0, atol=TOLERANCE)):
            raise ValueError(f"probabilities: got {shown(self.probabilities)}, must be at least 0 and sum to 1")
        return np.atleast_2d(rows)

    def weights(self, ages: int) -> Float64[np.ndarray, "ages"]:
        """Returns the weights of answers of the delays 0 to ``ages - 1`` (Xie et al., 2019, section 5.2)."""
        delays = np.arange(ages, dtype=float)
        if self.discount == "constant":
            return np.ones(ages)
        if self.discount == "polynomial":
            return (1 + delays) ** -self.discount_rate
        return 1 / (1 + self.discount_rate * np.maximum(delays - self.grace, 0))


def _drawn_by(law: Float64[np.ndarray, "_ ages"]) -> Callable[[Key, Array], Int[Array, ""]]:
    """Returns the function that draws a client's delay, from the key of the client's update and its id."""
    limits = jnp.asarray(cumulative(law))

    def draw(key: Key, client: Int[Array, ""]) -> Int[Array, ""]:
        at = jax.random.uniform(streams.apart(key, streams.DELAYS), (), jnp.float32)
        return jnp.sum(limits[jnp.minimum(client, len(limits) - 1)] <= at, dtype=jnp.int32)

    return draw


def _remembering(models: int, rate: Rate) -> Server:
    """Builds the server ``x -= rate d``, whose state is its last models [models, ...], the newest first."""
    newest = partial(pytrees.take, i=0)

    def with_newest(params: PyTree, past: PyTree) -> PyTree:
        return jax.tree.map(lambda new, old: jnp.concatenate([new[None], old[:-1]]), params, past)

    def update(past: PyTree, d: PyTree, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        step = pytrees.scale(rate_at(rate, info.round), d)
        return with_newest(pytrees.subtract(newest(past), step), past), {}

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (models, *leaf.shape)), params)

    # also a round without an answer makes every model a round older
    return Server(init, lambda past: past, newest, update, lambda past, info: with_newest(newest(past), past))


def _late(
    name: str, training: Training, schedule: Schedule, averaging: Averaging, staleness: Staleness, mixes: bool
) -> Algorithm:
    """Builds FedAsync, whose server mixes models, or FedBuff, whose server adds updates."""
    instance("staleness", staleness, Staleness)
    instance("schedule", schedule, Schedule)
    law = staleness.law(schedule.num_clients)
    ages = law.shape[1]
    draw, weights = _drawn_by(law), staleness.weights(ages)

    def late(train: Local) -> Local:
        def update(
            key: Key, past: PyTree, client_state: PyTree, client: Client
        ) -> tuple[PyTree, PyTree, dict[str, Array]]:
            delay = jnp.minimum(draw(key, client.id), client.round)
            received = pytrees.take(past, delay)
            message, client_state, info = train.update(key, received, client_state, client)
            if mixes:
                message = pytrees.add(message, pytrees.subtract(pytrees.take(past, 0), received))
            return pytrees.scale(jnp.asarray(weights)[delay], message), client_state, {**info, "delay": delay}

        return train._replace(update=update)

    def delays(train: Key, client: Int[AnyArray, "R S"]) -> Int[np.ndarray, "R S"]:
        def one(round_: Array, i: Array) -> Array:
            return draw(streams.slot_keys(train, round_, i)[0], i)

        rounds = jnp.arange(len(client), dtype=jnp.int32)
        return np.asarray(jax.jit(jax.vmap(jax.vmap(one, (None, 0))))(rounds, jnp.asarray(client)))

    def ledger(cost: Cost, data: FederatedData) -> Cost:
        return cost._replace(downlink=cost.downlink // ages)  # a client receives one of the models

    replaced = AveragingParts(
        partial(_remembering, ages), Posed(pose=proximal(staleness.mu)), late, Parts(ledger=ledger)
    )
    rule = {"algorithm": name, "mu": staleness.mu, "delays": delays, "delay_weights": weights}
    return train_and_average(name, training, schedule, averaging.filled(weighting="uniform"), replaced, rule)


PARTS: dict[str, Any] = {"inside": True, "unused": ("server_optimizer",), "python_only": ("probabilities",)}


@recipe(papers=("xie2019",), parts="local SGD, prox, on late models; mean; mixes models", **PARTS)
def fed_async(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    staleness: Staleness = Staleness(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedAsync: the server mixes models that clients trained from late models (Xie et al., 2019, algorithm 1).

    Client i trains x_i from the model of d_i rounds ago. The server takes ``x += alpha mean_i(s(d_i) (x_i - x))``, with
    alpha the ``averaging.server_learning_rate``, 1 by default. In the paper a round has one client
    (``schedules.uniform_sampling(N, 1)``), alpha is below 1, and the clients have a proximal term. Weights are uniform
    by default; ``run.history.rounds["delay"]`` has the delays. A channel carries ``s(d_i) (x - x_i)``.

    Args:
        staleness: Delays of the answers, weights s of late ones, and proximal strength.
    """
    training = trained(model, client_learning_rate, client_optimizer, work, loss)
    return _late("fed_async", training, schedule, averaging, staleness, mixes=True)


@recipe(papers=("nguyen2022",), parts="local SGD on late models; mean; adds updates", **PARTS)
def fed_buff(
    model: Model,
    schedule: Schedule,
    client_learning_rate: Rate | None = None,
    work: Work = DEFAULT_WORK,
    staleness: Staleness = Staleness(),
    loss: str | Loss | None = None,
    client_optimizer: Optimizer | None = None,
    averaging: Averaging = Averaging(),
) -> Algorithm:
    """Builds FedBuff: the server adds a buffer of updates that clients made to late models.

    Source: Nguyen et al., 2022, algorithm 1.

    Client i sends the update ``x_i - y_i`` that its training makes to the model y_i of d_i rounds ago. When the buffer
    is full, which is a round whose cohort is the buffer, the server takes ``x += eta mean_i(s(d_i) (x_i - y_i))``, with
    eta the ``averaging.server_learning_rate``, 1 by default. The default weight ``s(d) = 1 / sqrt(1 + d)`` is the
    paper's. Weights are uniform by default; ``run.history.rounds["delay"]`` has the delays.

    Args:
        staleness: Delays of the answers, weights s of late ones, and proximal strength.
    """
    training = trained(model, client_learning_rate, client_optimizer, work, loss)
    return _late("fed_buff", training, schedule, averaging, staleness, mixes=False)
