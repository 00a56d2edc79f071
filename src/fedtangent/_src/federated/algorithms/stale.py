"""Asynchronous rounds: FedAsync and FedBuff, whose clients train the server's model of some rounds ago.

A round is one step of the server. Its cohort is the clients whose answers arrive in it: one client in FedAsync as
published, all clients in the buffer in FedBuff.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int

from fedtangent._src import pytrees, streams
from fedtangent._src.checks import choice, flag, instance, number, real_array, shown
from fedtangent._src.federated.algorithms import common
from fedtangent._src.federated.algorithms.common import DEFAULT_WORK, Averaging
from fedtangent._src.federated.algorithms.entry import recipe
from fedtangent._src.federated.compose import Parts
from fedtangent._src.federated.faults import MOST_DELAY
from fedtangent._src.federated.graph import TOLERANCE
from fedtangent._src.federated.local import Posed, Work, proximal
from fedtangent._src.federated.schedule import cumulative
from fedtangent._src.losses import Loss
from fedtangent._src.optimizers import Optimizer, Rate, rate_at
from fedtangent._src.types import Algorithm, Array, Client, Key, Local, Model, PyTree, RoundInfo, Schedule, Server


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Options of asynchronous rounds: by how many rounds clients' answers are late, and how late answers count.

    An answer that arrives in round r (from 0) with delay d was trained from the model that the server had d rounds ago.
    If d is above r, it was trained from the initial model, and its delay counts as r.
    """

    delay: int | Sequence[int] | np.ndarray = 1
    """Rounds by which every answer is late. In Python also one number for each client [N], such as its measured speed.
    """
    probabilities: Sequence[Any] | np.ndarray | None = None
    """Probabilities of the delays 0 to D in place of ``delay``: of all clients [D + 1], or of each client [N, D + 1]. A
    client draws a new delay in every round, the same for all models.
    """
    buffered: bool = False
    """Add a late client's change to the present model (FedBuff)."""
    discount: str = "polynomial"
    """Weight of an answer: constant, polynomial or hinge. After a delay of d rounds these are 1, (1 + d)^-a, and 1 up
    to the delay b and then 1 / (1 + a (d - b))."""
    discount_rate: float = 0.5
    """The number a: of d rounds late, polynomial has the weight (1 + d)^-a."""
    grace: int = 4
    """The delay from which the hinge falls."""
    mu: float | Array = 0.0
    """Strength of the proximal term, rho of FedAsync."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an unknown discount, negative numbers, or delays other than 0, 1, .., 1000."""
        choice("discount", self.discount, ("constant", "polynomial", "hinge"))
        flag("buffered", self.buffered)
        for name in ("discount_rate", "grace", "mu"):
            number(name, getattr(self, name), at_least=0)
        delays = real_array("delay", self.delay)
        if delays.size == 0 or not np.all((delays >= 0) & (delays <= MOST_DELAY) & (delays % 1 == 0)):
            raise ValueError(f"delay: got {shown(self.delay)}, must be whole numbers from 0 to {MOST_DELAY}")

    def law(self, num_clients: int) -> Float64[np.ndarray, "_ ages"]:
        """Returns how likely a client's answer is to be 0, 1, .. D rounds late, where D is the largest delay.

        The result is [N, D + 1], or [1, D + 1] if all N clients have the same probabilities. Raises ``ValueError`` for
        delays or probabilities of another shape, or probabilities that do not sum to 1.
        """
        if self.probabilities is None:
            delays = real_array("delay", self.delay).astype(int)
            name, rows = "delay", np.eye(delays.max() + 1)[delays]
            must = f"one number or one per client, [{num_clients}]"
        else:
            name, rows = "probabilities", real_array("probabilities", self.probabilities)
            must = f"[D + 1] for delays 0 to D, or one row per client, [{num_clients}, D + 1], D at most {MOST_DELAY}"
        if rows.ndim not in (1, 2) or rows.shape[:-1] not in ((), (num_clients,)) or rows.shape[-1] > MOST_DELAY + 1:
            raise ValueError(f"{name}: got shape {np.shape(getattr(self, name))}, must be {must}")
        if not (np.all(rows >= 0) and np.allclose(rows.sum(axis=-1), 1, rtol=0, atol=TOLERANCE)):
            raise ValueError(f"probabilities: got {shown(self.probabilities)}, must be at least 0 and sum to 1")
        return np.atleast_2d(rows)

    def weights(self, ages: int) -> Float64[np.ndarray, "ages"]:
        """Returns the weights of answers that are 0 to ``ages - 1`` rounds late (Xie et al., 2019, section 5.2)."""
        delays = np.arange(ages, dtype=float)
        if self.discount == "polynomial":
            return (1 + delays) ** -self.discount_rate
        rate = self.discount_rate if self.discount == "hinge" else 0.0
        return 1 / (1 + rate * np.maximum(delays - self.grace, 0))


def _newest(past: PyTree) -> PyTree:
    return pytrees.take(past, 0)


def _with_newest(params: PyTree, past: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.concatenate([new[None], old[:-1]]), params, past)


def _remembering(models: int, rate: Rate) -> Server:
    """Builds a server that steps by ``x -= rate d`` and keeps its last ``models`` models; d is the aggregated message.

    Its state and broadcast are these models, [models, ...], the newest first.
    """

    def update(past: PyTree, d: PyTree, info: RoundInfo) -> tuple[PyTree, dict[str, Array]]:
        step = pytrees.scale(rate_at(rate, info.round), d)
        return _with_newest(pytrees.subtract(_newest(past), step), past), {}

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (models, *leaf.shape)), params)

    # a round without an answer makes every model a round older, too
    return Server(init, lambda past: past, _newest, update, lambda past, info: _with_newest(_newest(past), past))


@recipe(
    papers=("xie2019", "nguyen2022"),
    parts="local SGD, prox, on late models; mean; SGD",
    inside=True,
    unused=("server_optimizer",),
    python_only=("probabilities",),
)
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
    """Builds FedAsync, or FedBuff if ``staleness.buffered``: clients answer to models of earlier rounds.

    Sources: Xie et al., 2019, algorithm 1; Nguyen et al., 2022, algorithm 1.

    Client i of the cohort receives the model y_i of d_i rounds ago and trains it to x_i. FedAsync mixes models: ``x +=
    alpha mean_i(s(d_i) (x_i - x))``, with x the server's model; in the paper a round has one client
    (``schedules.uniform_sampling(N, 1)``). FedBuff adds updates: ``x += alpha mean_i(s(d_i) (x_i - y_i))``; its buffer
    is the cohort. s is the ``discount``, by default FedBuff's ``1 / sqrt(1 + d)``. alpha is
    ``averaging.server_learning_rate``, 1 by default. Clients are weighted uniformly by default.
    ``run.history.rounds["delay"]`` has the delays d_i. A channel compresses the message of each client:
    ``s(d_i) (x - x_i)`` or ``s(d_i) (y_i - x_i)``.

    Args:
        staleness: Delays of the answers, weights of late ones, strength mu of the proximal term ``mu/2 |w - y_i|^2`` in
            local training, and whether the server mixes models or adds updates.
    """
    instance("staleness", staleness, Staleness)
    instance("schedule", schedule, Schedule)
    law = staleness.law(schedule.num_clients)
    ages = law.shape[1]
    weights, limits = staleness.weights(ages), cumulative(law)

    def draw(key: Key, client: Int[Array, ""]) -> Int[Array, ""]:
        at = jax.random.uniform(streams.apart(key, streams.DELAYS), (), jnp.float32)
        return jnp.sum(jnp.asarray(limits)[jnp.minimum(client, len(limits) - 1)] <= at, dtype=jnp.int32)

    def delays(train: Key, client: Int[np.ndarray, "R S"]) -> Int[np.ndarray, "R S"]:
        def one(round_: Array, i: Array) -> Array:
            return draw(streams.slot_keys(train, round_, i)[0], i)

        rounds = jnp.arange(len(client), dtype=jnp.int32)
        return np.asarray(jax.jit(jax.vmap(jax.vmap(one, (None, 0))))(rounds, jnp.asarray(client)))

    def late(train: Local) -> Local:
        def update(
            key: Key, past: PyTree, client_state: PyTree, client: Client
        ) -> tuple[PyTree, PyTree, dict[str, Array]]:
            delay = jnp.minimum(draw(key, client.id), client.round)
            received = pytrees.take(past, delay)
            message, client_state, info = train.update(key, received, client_state, client)
            if not staleness.buffered:
                message = pytrees.add(message, pytrees.subtract(_newest(past), received))
            return pytrees.scale(jnp.asarray(weights)[delay], message), client_state, {**info, "delay": delay}

        return train._replace(update=update)

    replaced = common.AveragingParts(
        lambda rate: _remembering(ages, rate),
        Posed(pose=proximal(staleness.mu)),
        late,
        Parts(ledger=lambda cost, data: cost._replace(downlink=cost.downlink // ages)),  # a client receives one model
    )
    name = "fed_buff" if staleness.buffered else "fed_async"
    rule = {"algorithm": name, "mu": staleness.mu, "delays": delays, "delay_weights": weights}
    training = common.trained(model, client_learning_rate, client_optimizer, work, loss)
    averaging = averaging.filled(weighting="uniform")
    return common.train_and_average("fed_async", training, schedule, averaging, replaced, rule)
